"""Shapes and results of calls: broadcast keys, memory orders, maxima of scores, gradients of lse, dropout."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention as reference  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sdpa  # noqa: E402
from sdpa import op  # noqa: E402
from sdpa.flex import AuxOutput, attend  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TYPES = {"cpu": (torch.float32, 1e-5), "cuda": (torch.float16, 4e-3)}


class Aux:
    """A request as PyTorch's `AuxRequest`, which older versions do not have."""

    def __init__(self, lse=False, max_scores=False):
        self.lse, self.max_scores = lse, max_scores


def tensors(device, *shapes, dtype=None):
    return [torch.randn(shape, device=device, dtype=dtype or TYPES[device][0], requires_grad=True) for shape in shapes]


def near(ours, right, device, times=1.0):
    assert ours.shape == right.shape
    assert (ours.double() - right).norm() <= times * TYPES[device][1] * right.norm(), (ours.double() - right).norm() / right.norm()


def exact(*of):
    return [x.detach().double().requires_grad_() for x in of]


@pytest.mark.parametrize("device", DEVICES)
def test_keys_of_batch_1_serve_every_query(device):
    torch.manual_seed(0)
    d_o = None
    for batches in ((1, 1), (1, 3), (3, 1)):
        q, k, v = tensors(device, (3, 4, 37, 16), (batches[0], 2, 53, 16), (batches[1], 2, 53, 16))
        e = exact(q, k, v)
        wide = [x.expand(3, -1, -1, -1).repeat_interleave(2, 1) for x in e[1:]]
        right = reference(e[0], *wide)
        d_o = torch.randn_like(q)
        for _ in range(2):  # the second call takes the way of the first
            o = sdpa.flex_attention(q, k, v, enable_gqa=True)
            near(o, right, device)
            for ours, theirs in zip(torch.autograd.grad(o, (q, k, v), d_o), torch.autograd.grad(right, e, d_o.double(), retain_graph=True)):
                near(ours, theirs, device)
    compiled = torch.compile(lambda q, k, v: sdpa.flex_attention(q, k, v, enable_gqa=True), backend="aot_eager", fullgraph=True)
    near(compiled(q, k, v), right, device)
    with pytest.raises(sdpa.SpecError, match="equal batches, or keys and values of batch 1"):
        sdpa.flex_attention(q, torch.cat([k, k]), torch.cat([v, v, v, v])[:2], enable_gqa=True)


@pytest.mark.parametrize("device", DEVICES)
def test_the_output_has_the_memory_order_of_the_query(device):
    torch.manual_seed(0)
    shape = (2, 3, 5, 8)
    k, v = tensors(device, (2, 3, 7, 8), (2, 3, 7, 8))
    for order in itertools.permutations(range(4)):
        memory = torch.randn([shape[n] for n in order], device=device, dtype=k.dtype)
        q = memory.permute([order.index(n) for n in range(4)]).requires_grad_()
        e = exact(q, k, v)
        right = reference(*e)
        d_o = torch.randn_like(right)
        o = sdpa.flex_attention(q, k, v)
        assert o.stride() == q.stride(), order
        near(o, right, device)
        for ours, theirs in zip(torch.autograd.grad(o, (q, k, v), d_o.to(o.dtype)), torch.autograd.grad(right, e, d_o)):
            near(ours, theirs, device)
    for order in ((0, 1, 3, 2), (3, 0, 1, 2), (2, 0, 1, 3)):
        q = torch.randn([shape[n] for n in order], device=device, dtype=k.dtype).permute([order.index(n) for n in range(4)])
        compiled = torch.compile(lambda q: sdpa.flex_attention(q, k, v), backend="aot_eager", fullgraph=True)
        assert compiled(q).stride() == q.stride(), order
        torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", [True, False])
def test_maxima_of_scores_are_those_of_modified_scores(device, grad):
    torch.manual_seed(1)
    q, k, v = tensors(device, (2, 4, 37, 16), (2, 2, 53, 16), (2, 2, 53, 16))
    mod = lambda score, b, h, i, j: 3 * torch.tanh(score / 3) + 0.1 * (i - j)  # noqa: E731
    mask = sdpa.create_block_mask(lambda b, h, i, j: (i >= j) & (i != 5), None, None, 37, 53)
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / 4
    i, j = torch.arange(37, device=device)[:, None], torch.arange(53, device=device)
    scores = torch.where((i >= j) & (i != 5), 3 * torch.tanh(scores / 3) + 0.1 * (i - j), -math.inf)
    call = lambda aux: sdpa.flex_attention(q, k, v, mod, mask, enable_gqa=True, return_aux=aux)  # noqa: E731
    with torch.set_grad_enabled(grad):
        o, both = call(Aux(lse=True, max_scores=True))
        alone = call(Aux(max_scores=True))[1]
        plain = sdpa.flex_attention(q, k, v, mod, mask, enable_gqa=True)
        none = call(Aux())[1]
    assert isinstance(both, AuxOutput) and alone.lse is None and none == AuxOutput(lse=None, max_scores=None)
    assert torch.equal(o, plain) and not both.max_scores.requires_grad and both.lse.requires_grad == grad
    for maxima in (both.max_scores, alone.max_scores):
        assert maxima.shape == (2, 4, 37) and bool((maxima[:, :, 5] == -math.inf).all())
        near(maxima.nan_to_num(neginf=0), scores.amax(-1).nan_to_num(neginf=0), device)
    near(both.lse.nan_to_num(neginf=0), torch.logsumexp(scores, -1).nan_to_num(neginf=0), device)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_pass_through_lse_next_to_maxima(device):
    torch.manual_seed(2)
    q, k, v = tensors(device, (2, 4, 37, 16), (2, 4, 53, 16), (2, 4, 53, 16))
    e = exact(q, k, v)
    scores = e[0] @ e[1].transpose(-1, -2) / 4
    d_o, d_lse = torch.randn_like(q), torch.randn(2, 4, 37, device=device)
    right = torch.autograd.grad((torch.softmax(scores, -1) @ e[2] * d_o).sum() + (torch.logsumexp(scores, -1) * d_lse).sum(), e)
    call = lambda q, k, v: sdpa.flex_attention(q, k, v, return_aux=Aux(lse=True, max_scores=True))  # noqa: E731
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        o, aux = run(q, k, v)
        for ours, theirs in zip(torch.autograd.grad((o * d_o).sum() + (aux.lse * d_lse).sum(), (q, k, v)), right):
            near(ours, theirs, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("through", ["lse", "both"])
def test_gradients_pass_through_lse_of_the_widest_values(device, through, monkeypatch):
    """No kernel has room for more columns there, so that the gradient through lse is a pass of its own; the CPU takes it as well here."""
    torch.manual_seed(3)
    q, k, v = tensors(device, (1, 2, 33, 256), (1, 2, 40, 256), (1, 2, 40, 256))
    slopes = torch.rand(2, device=device, requires_grad=True)
    if device == "cpu":
        run = op.gradients
        wide = lambda d_o, d_stats, q, k, v, *more: (op._apart if d_stats is not None and v.shape[-1] == 256 else run)(d_o, d_stats, q, k, v, *more)  # noqa: E731
        monkeypatch.setattr(op, "gradients", wide)
    mod = lambda score, b, h, i, j: score + slopes[h] * (j - i)  # noqa: E731
    o, lse = sdpa.flex_attention(q, k, v, mod, return_lse=True)
    e = exact(q, k, v, slopes)
    distance = torch.arange(40, device=device) - torch.arange(33, device=device)[:, None]
    scores = e[0] @ e[1].transpose(-1, -2) / 16 + e[3][:, None, None] * distance
    d_o = torch.randn_like(o) * (through == "both")
    d_lse = torch.randn_like(lse)
    ours = torch.autograd.grad((lse * d_lse).sum() + ((o * d_o).sum() if through == "both" else 0), (q, k, v, slopes), allow_unused=True)
    right = torch.autograd.grad((torch.logsumexp(scores, -1) * d_lse).sum() + (torch.softmax(scores, -1) @ e[2] * d_o).sum(), e)
    for x, y in zip(ours, right):
        near(torch.zeros_like(y) if x is None else x, y, device, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_drops_and_its_gradient_has_the_same_mask(device):
    torch.manual_seed(4)
    p, n = 0.3, 64
    q, k, v = tensors(device, (2, 4, 37, 16), (2, 2, n, 16), (2, 2, n, 16))
    drop = lambda v, k=k: attend(q, k, v, None, None, dropout=p)[0]  # noqa: E731
    seeded = lambda f, seed=5: (torch.manual_seed(seed), f())[1]  # noqa: E731
    # Values that are the identity show the weights.
    identity = torch.eye(n, device=device, dtype=v.dtype).expand(2, 2, -1, -1).contiguous()
    weights = seeded(lambda: drop(identity)).double()
    e = exact(q, k, v)
    right = torch.softmax(e[0] @ e[1].repeat_interleave(2, 1).transpose(-1, -2) / 4, -1)
    kept = weights != 0
    assert abs(kept.double().mean() - (1 - p)) < 0.02  # 18,944 weights: four standard deviations
    near(weights, right.detach() * kept / (1 - p), device)
    o = seeded(lambda: drop(v))
    expected = (right * kept / (1 - p)) @ e[2].repeat_interleave(2, 1)
    near(o, expected, device)
    d_o = torch.randn_like(o)
    made = torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)
    for ours, theirs in zip(made, torch.autograd.grad(expected, e, d_o.double())):
        near(ours, theirs, device)
    assert not torch.equal(seeded(lambda: drop(v), 6), o)
    again = seeded(lambda: checkpoint(lambda q, k, v: attend(q, k, v, None, None, dropout=p)[0], q, k, v, use_reentrant=False))
    for first, second in zip(made, torch.autograd.grad(again, (q, k, v), d_o)):
        assert torch.equal(first, second)
    compiled = torch.compile(drop, backend="aot_eager", fullgraph=True)
    assert torch.equal(seeded(lambda: compiled(v)), o)
