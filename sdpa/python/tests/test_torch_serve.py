"""The serving example: the texts of batched requests against those of each request alone, and the sampler against its distribution."""

import dataclasses
import math
import pathlib
import random
import sys

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
if not EXAMPLES.exists():
    pytest.skip("the examples are in the repository", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))

from serve import __main__ as program  # noqa: E402
from serve.cache import PagedCache  # noqa: E402
from serve.config import MODELS, weights  # noqa: E402
from serve.decoder import Decoder  # noqa: E402
from serve.engine import Counts, Engine, Request, bucket  # noqa: E402
from serve.graphs import Graphs  # noqa: E402
from serve.sampler import Sampling, sample  # noqa: E402

CONFIG = dataclasses.replace(MODELS["small"], layers=2)
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(autouse=True)
def one_thread():
    """Steps of few tokens run on one thread: on a busy machine, others wait for it longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decoder(device="cpu"):
    return Decoder(CONFIG, weights(CONFIG, 1, torch.float32, torch.device(device)))


def engine(model, pages, budget, page_size=8):
    of = model.embedding
    return Engine(model, PagedCache(CONFIG, pages, page_size, of.dtype, of.device), budget)


def alone(model, request):
    """Generates without a cache and without this package: the whole text is computed anew for each token."""
    def attend(layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    text, numbers, at = list(request.prompt), random.Random(request.sampling.seed), request.sampling
    device = model.embedding.device
    for _ in range(request.tokens):
        x = model.forward(torch.tensor(text, device=device), torch.arange(len(text), device=device), attend)
        draw = numbers.random() if at.temperature else 0.0
        row = [torch.tensor([x], device=device) for x in (at.temperature, at.top_p, draw)]
        text.append(int(sample(model.logits(x[-1:]), *row, greedy=at.temperature == 0)))
    return text[len(request.prompt) :]


def requests(sampling, count=6):
    return program.requests(CONFIG, sampling, count, prompt=40, generate=14)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 0.9, 3), Sampling(1.0, 1.0, 4)])
def test_batched_requests_have_the_text_of_each_alone(device, sampling):
    model = decoder(device)
    submitted = requests(sampling)
    texts = [alone(model, request) for request in submitted]
    assert len({token for text in texts for token in text}) > 10, "a text that repeats tokens proves little"
    replayed = 0
    # A large budget, a small one that cuts prompts into chunks, and a cache that lets some requests wait.
    for pages, budget in ((60, 512), (60, 4), (9, 16)):
        made = engine(model, pages, budget)
        for request in submitted:
            made.submit(request)
        assert made.run() == texts, (pages, budget)
        assert made.cache.free_pages == pages and len(set(made.cache._free)) == pages, "all pages are returned"
        counts = made.counts
        assert counts.prefilled == sum(len(request.prompt) for request in submitted)
        assert counts.generated == sum(request.tokens for request in submitted)
        assert budget == 512 or counts.mixed > 0
        assert 1 < counts.widest <= counts.largest <= budget
        replayed += counts.replayed
        # Pages that held other keys, and other pages, give the same texts.
        made.counts = Counts()
        for request in submitted[::-1]:
            made.submit(request)
        assert made.run() == texts[::-1]
    assert device == "cpu" or replayed > 0


class Replayed(Graphs):
    """Runs the first step of each key again, as a graph does: with the tensors that this step read."""

    def run(self, key, forward):
        if key is None:
            return forward()
        self.replayed += key in self._graphs
        return self._graphs.setdefault(key, forward)()


def test_a_step_reads_the_tensors_of_its_first_run():
    model = decoder()
    made = engine(model, 60, 16)
    made.graphs = Replayed(made.device)
    for sampling in (Sampling(), Sampling(0.7, 0.9, 3)):
        submitted = program.requests(CONFIG, sampling, 6, prompt=6, generate=30)
        for request in submitted:
            made.submit(request)
        assert made.run() == [alone(model, request) for request in submitted]
        assert made.counts.replayed > 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_change_no_text():
    model = decoder("cuda")
    texts = []
    for enabled in (True, False):
        made = engine(model, 60, 16)
        made.graphs = Graphs(made.device, enabled)
        for request in requests(Sampling(0.7, 0.9, 3)):
            made.submit(request)
        texts.append(made.run())
        assert bool(made.counts.replayed) == enabled
    assert texts[0] == texts[1]


def test_steps_keep_to_their_budget():
    model = decoder()
    submitted = [Request([n, *prompt], 6) for n, prompt in enumerate(([], [], [5] * 9, [], [7] * 4))]
    for budget in (1, 2, 3):
        made = engine(model, 60, budget)
        for request in submitted:
            made.submit(request)
        assert made.run() == [alone(model, request) for request in submitted]
        assert made.counts.largest == budget


def test_requests_that_arrive_later_join_the_batch():
    model = decoder()
    submitted, texts = requests(Sampling()), []
    made = engine(model, 60, 32)
    for request in submitted:
        made.submit(request)
        texts += made.step()
    assert len(texts) < len(submitted) and made.counts.mixed > 0
    while made.running or made.waiting:
        texts += made.step()
    assert [text for _, text in sorted(texts)] == [alone(model, request) for request in submitted]
    assert made.step() == [] and made.cache.free_pages == 60


def test_texts_are_those_of_transformers():
    pytest.importorskip("transformers")
    from serve import static

    random_weights = weights(CONFIG, 1, torch.float32, torch.device("cpu"))
    submitted = requests(Sampling())
    theirs = static.load(CONFIG, random_weights)
    model = Decoder(CONFIG, random_weights)
    texts, seconds = static.generate(theirs, submitted, 4)
    assert texts == [alone(model, request) for request in submitted] and seconds > 0
    ids = torch.arange(20)
    with torch.no_grad():
        right = theirs(ids[None]).logits[0]
    attend = lambda layer, q, k, v: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    assert (model.logits(model.forward(ids, ids, attend)) - right).abs().max() < 1e-4


def test_requests_that_cannot_run_are_refused():
    made = engine(decoder(), 10, 8, page_size=4)

    def told(prompt, tokens, part, sampling=Sampling()):
        with pytest.raises(ValueError) as e:
            made.submit(Request(prompt, tokens, sampling))
        assert part in str(e.value), f"{part} is not in: {e.value}"

    told([1] * 40, 2, "got 41 tokens in 11 pages, expected at most 10, all pages of the cache; add pages")
    told([1] * 100, 40, "got 139 tokens, expected at most 128; shorten the prompt")
    told([], 2, "got 0 tokens of a prompt")
    told([1], 0, "0 to generate")
    told([1, 96], 2, "got the token 96, expected tokens from 0 to 95")
    told([1], 2, "temperature: got -1", Sampling(-1.0))
    told([1], 2, "top_p: got 0", Sampling(1.0, 0.0))
    assert not made.waiting
    # The longest request that fits.
    made.submit(Request([1] * 40, 1))
    assert len(made.run()) == 1 and made.cache.free_pages == 10
    with pytest.raises(ValueError, match="budget: got 0"):
        engine(made.model, 10, 0)
    with pytest.raises(ValueError, match="pages: got 0"):
        engine(made.model, 0, 8)
    with pytest.raises(RuntimeError, match="pages: got 11, expected at most 10, the free pages of 10"):
        made.cache.allocate(11)


def test_nan_logits_are_an_error():
    random_weights = weights(CONFIG, 1, torch.float32, torch.device("cpu"))
    random_weights["lm_head.weight"][5] = torch.nan
    made = engine(Decoder(CONFIG, random_weights), 10, 8)
    made.submit(Request([1, 2, 3], 1))
    with pytest.raises(RuntimeError, match="request 0: the logits of token 3 are NaN"):
        made.run()


def test_samples_have_the_probabilities_of_the_nucleus():
    # Probabilities of 8, 4, 2 and 1 fifteenths.
    logits = torch.tensor([2.0, 8.0, 1.0, 4.0]).log()
    n = 15_000

    def shares(temperature, top_p):
        draws = (torch.arange(n) + 0.5) / n
        tokens = sample(logits.expand(n, 4), torch.full((n,), temperature), torch.full((n,), top_p), draws, greedy=False)
        return (torch.bincount(tokens, minlength=4) / n).tolist()

    near = lambda x, y: all(math.isclose(a, b, abs_tol=2e-3) and (b or not a) for a, b in zip(x, y))  # noqa: E731
    assert near(shares(1.0, 1.0), [2 / 15, 8 / 15, 1 / 15, 4 / 15])
    # A temperature of 1/2 squares the probabilities.
    assert near(shares(0.5, 1.0), [4 / 85, 64 / 85, 1 / 85, 16 / 85])
    # The two most probable tokens reach 0.7; the first one alone reaches 0.5.
    assert near(shares(1.0, 0.7), [0, 8 / 12, 0, 4 / 12])
    assert near(shares(1.0, 0.5), [0, 1, 0, 0])
    assert shares(0.0, 1.0) == [0, 1, 0, 0]
    # The first of two equal tokens reaches 0.5.
    tie = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert sample(tie, torch.ones(1), torch.full((1,), 0.5), torch.full((1,), 0.99), greedy=False).tolist() == [0]
    # Rows of a step sample in their own ways.
    ways = [torch.tensor(x) for x in ([0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.5, 1.0], [0.99, 0.99, 0.99, 0.0])]
    rows = logits.expand(4, 4).clone()
    assert sample(rows, *ways, greedy=False).tolist() == [1, 2, 1, 1]
    rows[2, 3] = torch.nan
    assert sample(rows, *ways, greedy=False).tolist() == [1, 2, -1, 1]
    assert sample(rows, *ways, greedy=True).tolist() == [1, 1, -1, 1]


def test_steps_have_few_extents():
    assert [bucket(n) for n in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]
    made = engine(decoder(), 60, 16)
    for request in requests(Sampling()):
        made.submit(request)
    made.run()
    assert len(made._steps) < made.counts.steps / 2
    assert all(step.table.data_ptr() % 16 == step.offsets.data_ptr() % 16 == 0 for step in made._steps.values())


def test_the_program_prints_its_throughput(capsys):
    program.main("--requests 4 --prompt 12 --generate 6 --budget 8 --temperature 0.5 --top-p 0.9".split())
    printed = capsys.readouterr().out
    assert "generated tokens/s" in printed and "128 of 128 pages are free" in printed
    with pytest.raises(SystemExit):
        program.options(["--requests", "0"])
    with pytest.raises(SystemExit):
        program.options(["--compare", "--temperature", "1"])
