"""Nested tensors of layout jagged, against f64 attention of each sequence alone."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import sdpa  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
LENGTHS, OF_KEYS = [5, 0, 70, 3, 1], [7, 2, 40, 40, 0]


class Case:
    """Operands, and learned tensors of score_mods."""

    def __init__(self, device, cross=False, heads_outermost=False, dim=16):
        torch.manual_seed(0)
        self.device, self.dtype, self.outermost = device, TYPES[device], heads_outermost
        self.lengths = (LENGTHS, OF_KEYS if cross else LENGTHS)
        self.offsets = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], device=device) for n in self.lengths]
        if not cross:
            self.offsets[1] = self.offsets[0]
        self.values = [self.made(sum(self.lengths[n > 0]), heads, d) for n, (heads, d) in enumerate([(4, dim), (2, dim), (2, 24)])]
        # In f32, because the definition would round a product of bf16 and a position to bf16.
        self.slopes, self.of_sequence, self.along = (torch.randn(shape, device=device).requires_grad_() for shape in ((4,), (5,), (4, 90)))
        self.params = [self.slopes, self.of_sequence, self.along]

    def made(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_()

    def operands(self):
        """Returns the nested tensors (batch, heads, seq, dim)."""
        made = []
        for n, x in enumerate(self.values):
            offsets = self.offsets[n > 0]
            if self.outermost:
                made.append(torch.nested.nested_tensor_from_jagged(x.transpose(0, 1).contiguous(), offsets, jagged_dim=2))
            else:
                made.append(torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2))
        return made

    def exact(self, mod, keep):
        """Returns output, log-sum-exp and the largest scores in f64: (tokens, heads, dim), (tokens, heads)."""
        q, k, v = (x.double() for x in self.values)
        rows = []
        for n, (queries, keys) in enumerate(zip(*(o.diff().tolist() for o in self.offsets))):
            (a, b), heads = (int(o[n]) for o in self.offsets), q.shape[1]
            qn = q[a : a + queries].transpose(0, 1)
            kn, vn = (x[b : b + keys].transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
            i, j = torch.arange(queries, device=self.device)[:, None], torch.arange(keys, device=self.device)[None, :]
            h = torch.arange(heads, device=self.device)[:, None, None]
            scores = qn @ kn.transpose(-1, -2) * 0.2
            scores = scores if mod is None else mod(scores, n, h, i, j)
            kept = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep(n, h, i, j).expand(scores.shape)
            scores = scores.masked_fill(~kept, -torch.inf)
            empty = ~kept.any(-1, keepdim=True)
            o = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0) @ vn
            largest = scores.amax(-1) if keys else scores.new_full((heads, queries), -torch.inf)
            rows.append([x.transpose(0, 1) for x in (o, torch.logsumexp(scores, -1), largest)])
        return [torch.cat(x) for x in zip(*rows)]

    def check(self, mod=None, keep=None, wanted=()):
        mask = None if keep is None else sdpa.create_nested_block_mask(keep, None, None, *self.operands()[:2])
        q, k, v = self.operands()
        aux = type("Aux", (), {"lse": True, "max_scores": True})
        o, rows = sdpa.flex_attention(q, k, v, mod, mask, scale=0.2, enable_gqa=True, return_aux=aux)
        assert o.shape[:3] == q.shape[:3] and rows.lse.shape == q.shape[:3]
        ours = [x.transpose(1, 2).values() for x in (o, rows.lse, rows.max_scores)]
        right = self.exact(mod, keep)
        close = 1e-5 if self.device == "cpu" else 2e-2
        for x, y in zip(ours, right):
            assert torch.equal(x.isinf(), y.isinf())
            x, y = (t.masked_fill(t.isinf(), 0.0).double() for t in (x, y))
            assert (x - y).norm() <= close * y.norm()
        d_o, d_lse = torch.randn_like(ours[0]), torch.randn_like(ours[1])
        made = torch.autograd.grad(ours[:2], [*self.values, *wanted], [d_o, d_lse])
        exact = torch.autograd.grad(right[:2], [*self.values, *wanted], [d_o.double(), d_lse.double().masked_fill(right[1].isinf(), 0.0)])
        for x, y in zip(made, exact):
            assert (x.double() - y.double()).norm() <= 2 * close * y.double().norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_sequences_attend_within_themselves(device, cross, outermost):
    case = Case(device, cross, outermost)
    case.check()
    case.check(keep=lambda b, h, i, j: i >= j)
    case.check(lambda s, b, h, i, j: s + case.slopes[h] * (j - i), lambda b, h, i, j: (i + h) % 3 >= j % 2, [case.slopes])


@pytest.mark.parametrize("device", DEVICES)
def test_functions_see_positions_within_a_sequence(device):
    case = Case(device)
    case.check(lambda s, b, h, i, j: s * 0.5 + case.of_sequence[b] * (i - j) * 0.1, lambda b, h, i, j: (i - j).abs() <= b + 3, [case.of_sequence])
    case.check(lambda s, b, h, i, j: s + case.along[h, j] - case.slopes[h], None, [case.along])  # it is longer than every sequence
    if device == "cpu":  # a gradient of a table on a GPU takes a type that the index of the definition has not
        case.check(lambda s, b, h, i, j: s + case.along[h, (j - i).abs()], None, [case.along])


def test_many_totals_share_a_plan():
    from sdpa import nested

    assert [nested.rounded(n) for n in (0, 1, 64, 65, 1000, 1025, 9000)] == [64, 64, 64, 128, 1024, 1152, 9216]
    assert all(n <= nested.rounded(n) <= max(n + 63, n * 9 / 8 + 1) or n == 0 for n in range(20000))


def test_results_join_other_nested_tensors_of_the_sequences():
    case = Case("cpu")
    q, k, v = case.operands()
    o = sdpa.flex_attention(q, k, k, enable_gqa=True)
    summed = (o + q).transpose(1, 2).values()
    assert torch.equal(summed, o.transpose(1, 2).values() + case.values[0])
    assert torch.nested.to_padded_tensor(o, 0.0).shape == (5, 4, 70, 16)


def test_the_package_runs_outside_of_a_compiled_graph():
    case = Case("cpu")
    q, k, v = case.operands()
    run = lambda q, k, v: sdpa.flex_attention(q, k, v, enable_gqa=True).transpose(1, 2).values() * 2  # noqa: E731
    assert torch.equal(torch.compile(run, backend="aot_eager")(q, k, v), run(q, k, v))


def test_flops_are_those_of_each_sequence():
    for cross in (False, True):
        case = Case("cpu", cross)
        with FlopCounterMode(display=False) as counter:
            sdpa.flex_attention(*case.operands(), enable_gqa=True).transpose(1, 2).values().sum().backward()
        pairs = 2 * 4 * sum(x * y for x, y in zip(*case.lengths))
        assert counter.get_total_flops() == pairs * (16 + 24) + pairs * (3 * 16 + 2 * 24)


def test_empty_batches_and_sequences():
    for lengths in ([], [0], [0, 0]):
        offsets = torch.tensor([0, *lengths])
        q = torch.nested.nested_tensor_from_jagged(torch.randn(0, 2, 16, requires_grad=True), offsets, max_seqlen=0, min_seqlen=0).transpose(1, 2)
        o = sdpa.flex_attention(q, q, q)
        assert o.transpose(1, 2).values().shape == (0, 2, 16)
        o.transpose(1, 2).values().sum().backward()


def test_mistakes_are_named_together():
    case = Case("cpu")
    q, k, v = case.operands()
    wrong = torch.nested.nested_tensor_from_jagged(case.values[1], case.offsets[0])
    with pytest.raises(sdpa.SpecError) as e:
        sdpa.flex_attention(q, wrong, torch.randn(5, 2, 7, 16))
    assert [field for field, *_ in e.value.errors] == ["key", "value"]
    assert "transpose(1, 2) of (batch, seq, heads, dim)" in str(e.value) and "a dense tensor of shape (5, 2, 7, 16)" in str(e.value)
    with pytest.raises(sdpa.SpecError, match="heads of key: got 2, expected 4, as the query, or enable_gqa=True"):
        sdpa.flex_attention(q, k, v)
    with pytest.raises(sdpa.SpecError, match="block_mask KV_LEN: got 64, expected at least 70, the longest sequence"):
        sdpa.flex_attention(q, k, v, None, sdpa.create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 64), enable_gqa=True)
    theirs = torch.nn.attention.flex_attention.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    with pytest.raises(sdpa.SpecError, match="sdpa.create_nested_block_mask, whose function sees positions within a sequence"):
        sdpa.flex_attention(q, k, v, None, theirs, enable_gqa=True)
    gaps = torch.nested.nested_tensor_from_jagged(case.values[0], case.offsets[0], lengths=torch.tensor([4, 0, 70, 3, 1])).transpose(1, 2)
    with pytest.raises(sdpa.SpecError, match="with gaps between sequences"):
        sdpa.flex_attention(gaps, k, v, enable_gqa=True)
    shorter = torch.nested.nested_tensor_from_jagged(case.values[2], torch.tensor([0, 6, 6, 75, 78, 79])).transpose(1, 2)
    with pytest.raises(sdpa.SpecError, match="offsets of value"):
        sdpa.flex_attention(q, k, shorter, enable_gqa=True)
    with pytest.raises(sdpa.SpecError, match="query dtype: got torch.float64"):
        sdpa.flex_attention(*(x.double() for x in (q, k, v)), enable_gqa=True)
    with pytest.raises(sdpa.SpecError, match="q_nt: got a dense tensor"):
        sdpa.create_nested_block_mask(lambda b, h, i, j: i >= j, None, None, torch.randn(1, 2, 3, 4))
