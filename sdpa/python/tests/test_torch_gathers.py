"""Tensors that a score_mod or a mask_mod reads at computed indices, against eager PyTorch: `torch.vmap` of the function over textbook attention."""

import math

import numpy as np
import pytest
import torch
from textbook import attention, close

import sdpa
from sdpa import SpecError, TracingError, create_block_mask, flex_attention
from sdpa.flex import attend

B, H, Q, K, D = 2, 4, 9, 13, 8


def operands(dtype=torch.float32, grad=True):
    torch.manual_seed(5)
    return [torch.randn(B, H, n, D).to(dtype).requires_grad_(grad) for n in (Q, K, K)]


def eager(fn, with_score=True):
    """Applies a function of single numbers to tensors of scores and positions, as FlexAttention does."""
    score = (0,) if with_score else ()
    for at in (3, 2, 1, 0):
        fn = torch.vmap(fn, tuple([n for n in score]) + tuple([0 if n == at else None for n in range(4)]))
    flat = lambda places: [x.flatten() for x in places]  # noqa: E731
    return (lambda s, *places: fn(s, *flat(places))) if with_score else (lambda *places: fn(*flat(places)))


def compare(mod, captured=(), dtype=torch.float32, mask=None, tolerance=2e-5, reference=None):
    """Compares output and gradients, including those of captured tensors."""
    qkv = operands(dtype)
    block_mask = None if mask is None else create_block_mask(mask, None, None, Q, K)
    up = torch.randn(B, H, Q, D)
    ours = flex_attention(*qkv, mod, block_mask)
    theirs = attention(*qkv, None if mod is None else eager(reference or mod), None if mask is None else eager(mask, False))[0]
    close(ours, theirs, "o", tolerance)
    made, wanted = (torch.autograd.grad((o.double() * up).sum(), [*qkv, *captured]) for o in (ours, theirs))
    for n, (x, y) in enumerate(zip(made, wanted)):
        assert x.dtype == y.dtype
        close(x, y, f"gradient {n}", 10 * tolerance)
    for x in made[3:]:
        assert x.abs().max() > 1e-4


def of_reals(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


REL, BIAS, BUCKETS, T2, T3, T4 = of_reals(H, Q + K - 1), of_reals(Q + K), torch.randint(0, 5, (K,)), of_reals(5, H), of_reals(B, H, 5), of_reals(B, H, 3, 5)
XY, W, WIDE = of_reals(K, 3), of_reals(3), of_reals(B, H, K, 3)
IDX, OFFSETS, DOC = torch.randint(-5, 5, (Q, K)), of_reals(4), torch.tensor([[0] * 4 + [1] * 5 + [2] * 4, [3] * 6 + [0] * 7])
FIVE = of_reals(2, B, H, 3, 5)
T5 = of_reals(16, H)


def t5_bucket(relative, both, buckets=16, most=10):
    """As in transformers, with the logarithm of 0 in the branch that is not selected."""
    bucket = 0
    if both:
        buckets //= 2
        bucket = bucket + (relative > 0).to(torch.long) * buckets
        relative = torch.abs(relative)
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = buckets // 2
    small = relative < exact
    large = exact + (torch.log(relative.float() / exact) / math.log(most / exact) * (buckets - exact)).to(torch.long)
    large = torch.min(large, torch.full_like(large, buckets - 1))
    return bucket + torch.where(small, relative, large)


GATHERS = {
    "a bias of the distance": (lambda s, b, h, q, k: s + BIAS[q - k + K - 1], [BIAS]),
    "negative places": (lambda s, b, h, q, k: s + BIAS[q - k], [BIAS]),
    "a place before": (lambda s, b, h, q, k: s + BIAS[q - 1] * BIAS[k + 2], [BIAS]),
    "one place twice": (lambda s, b, h, q, k: s * REL[h, h] + WIDE[b, h, k, b], [REL, WIDE]),
    "a bias of head and distance": (lambda s, b, h, q, k: s + REL[h, k - q + Q - 1], [REL]),
    "index after index": (lambda s, b, h, q, k: s + REL[h][k - q], [REL]),
    "buckets": (lambda s, b, h, q, k: s * T2[BUCKETS[torch.clamp(abs(q - k), max=K - 1)], h], [T2]),
    "places of two": (lambda s, b, h, q, k: s * T2[IDX[q, k], h], [T2]),
    "documents": (lambda s, b, h, q, k: s + OFFSETS[DOC[b, q]] * OFFSETS[DOC[b, k]], [OFFSETS]),
    "three extents": (lambda s, b, h, q, k: s + T3[b, h, (q * 3 + k) % 5], [T3]),
    "four extents": (lambda s, b, h, q, k: s * T4[b, h, q // 3, (k + q) % 5], [T4]),
    "five, one of them a number": (lambda s, b, h, q, k: s * FIVE[-1, b, h, q // 3, (k + q) % 5], [FIVE]),
    "numbers and places": (lambda s, b, h, q, k: s + T4[1, -1, q % 3, 2] + T4[b][h, -3][k % 5], [T4]),
    "an index that is a float first": (lambda s, b, h, q, k: s + BIAS[((q + k).float() * 0.7).long()], [BIAS]),
    "logarithmic buckets": (lambda s, b, h, q, k: s + REL[h, torch.where(q - k < 4, torch.clamp(q - k, 0), torch.clamp(torch.log2((torch.clamp(q - k, 1)).float()).int() + 2, max=8))], [REL]),
    "buckets of T5": (lambda s, b, h, q, k: s + T5[t5_bucket(k - q, True), h], [T5]),
    "buckets of T5 of a decoder": (lambda s, b, h, q, k: s * T5[t5_bucket(k - q, False), h], [T5]),
    "a distance of rows": (lambda s, b, h, q, k: s - ((XY[q] - XY[k]) ** 2).sum(), [XY]),
    "a distance along an axis": (lambda s, b, h, q, k: s - (XY[q, :] - XY[k]).square().sum(dim=-1) * 0.5, [XY]),
    "torch.dot": (lambda s, b, h, q, k: s + torch.dot(XY[q], XY[k]), [XY]),
    "@": (lambda s, b, h, q, k: s + XY[q] @ XY[k] + torch.matmul(XY[k], W), [XY, W]),
    "a mean of weighed rows": (lambda s, b, h, q, k: s * (XY[q] * W).mean(-1) + torch.sum(torch.tanh(XY[k]), dim=0) + (W * XY[k]).prod(), [XY, W]),
    "rows of more axes": (lambda s, b, h, q, k: s + (WIDE[b, h, k] * WIDE[b, h, ..., q % 3][k] - 2.0).sum(), [WIDE]),
    "rows where": (lambda s, b, h, q, k: s + torch.where(XY[q] > XY[k], XY[q], 0.5).sum() + XY[q][1] + XY[k][-1], [XY]),
    "rows and methods": (lambda s, b, h, q, k: s + (XY[q] > 0).where(XY[k] > 0, XY[k] < -0.3).sum() * XY[k].where(XY[q] > 0.1, 0.25).clamp(min=-1).sum(), [XY]),
    "rows as numbers": (lambda s, b, h, q, k: s * [x * y for x, y, _ in [XY[q]]][0] + max(len(XY[k]), 1), [XY]),
    "rows with in all": (lambda s, b, h, q, k: torch.where((XY[q] > XY[k]).all() | (XY[q] < -0.5).any(), s, s * XY[k].sum()), [XY]),
    "a table and a tensor of one": (lambda s, b, h, q, k: s + BIAS[q] * BIAS[q + k], [BIAS]),
}  # fmt: skip


@pytest.mark.parametrize("name", GATHERS)
def test_gathers_and_their_gradients(name):
    compare(*GATHERS[name])


def test_rows_as_numbers_are_iterated():
    mod = sdpa.ScoreMod(lambda s, b, h, q, k: s + sum(x * x for x in XY[q]))
    assert mod.text.count("s0[q, ") == 3 and [t.axes for t in mod.tensors] == [(K, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tables_of_each_type_next_to_operands_of_each(dtype):
    for of in (torch.float32, torch.float16, torch.bfloat16):
        bias = of_reals(H, Q + K, dtype=of)
        near = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
        compare(lambda s, b, h, q, k: s + bias[h, q - k].float(), [bias], dtype, tolerance=max(near[dtype], near[of]))  # noqa: B023


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_tables_of_integers_and_truth_values(dtype):
    table = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 7)).to(dtype)
    compare(lambda s, b, h, q, k: torch.where(table[q % 3, (q + k) % 7] > 0, s, s * 0.5))
    compare(None, mask=lambda b, h, q, k: (table[(q + h) % 3, (q - k) % 7] > 0) | (q == k))
    if dtype != torch.bool:
        # Narrow integers wrap.
        compare(lambda s, b, h, q, k: s + (table[q % 3, (k - q) % 7] * 3 + table[0, k % 7]) * 0.01)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_indices_of_each_type(dtype):
    index = torch.randint(0, 2, (K,)).to(dtype)
    mod = lambda s, b, h, q, k: s + T2[index[k], h]  # noqa: E731
    if dtype not in (torch.int32, torch.int64):  # a mask in PyTorch, or an error
        with pytest.raises(TracingError, match=f"indexed by a value of {str(dtype)[6:]}; an index is"):
            sdpa.ScoreMod(mod)
        return
    compare(mod, [T2])
    with pytest.raises(TracingError, match="indexed by a value of float32"):
        sdpa.ScoreMod(lambda s, b, h, q, k: s + T2[index[k].float(), h])


def test_places_outside_are_clamped_and_negative_ones_wrap_once():
    table = of_reals(5)
    clamped = lambda i: torch.where(i < 0, i + 5, i).clamp(0, 4)  # noqa: E731
    compare(lambda s, b, h, q, k: s + table[q - k], [table], reference=lambda s, b, h, q, k: s + table[clamped(q - k)])
    both = of_reals(5, 5)
    compare(lambda s, b, h, q, k: s + both[q - k, q * k - 3], [both], reference=lambda s, b, h, q, k: s + both[clamped(q - k), clamped(q * k - 3)])


def test_masks_of_tables():
    pages, allowed = torch.randint(0, 6, (B, 4)), torch.rand(6, 4) > 0.4
    near = torch.tensor([True, True, False, True, False])
    for mask in (
        lambda b, h, q, k: (pages[b, k // 4] % 2 == 0) | (k == q),
        lambda b, h, q, k: allowed[pages[b, k // 4], h] | (k == q),
        lambda b, h, q, k: near[torch.clamp(q - k, 0, 4)] & (k <= q),
        lambda b, h, q, k: allowed[q // 3][k // 4] | (q == k),
        lambda b, h, q, k: (allowed[q % 6] & allowed[k % 6]).any(),
        lambda b, h, q, k: (DOC[b, q] == DOC[b, k]) & near[DOC[b, k]],
    ):
        compare(None, mask=mask)
        compare(GATHERS["a bias of head and distance"][0], [REL], mask=mask)


def test_one_bias_of_one_table_is_one_plan_over_other_tensors():
    q, k, v = operands(grad=False)
    seen = []
    for _ in range(3):
        table = torch.randn(H, Q + K)
        mod = lambda s, b, h, q, k: s + table[h, q - k]  # noqa: B023, E731
        close(flex_attention(q, k, v, mod), attention(q, k, v, eager(mod))[0], "o")
        seen.append(sdpa.ScoreMod(mod).text)
    assert len(set(seen)) == 1
    wider = torch.randn(H, Q + K + 3)
    mod = lambda s, b, h, q, k: s + wider[h, q - k]  # noqa: E731
    close(flex_attention(q, k, v, mod), attention(q, k, v, eager(mod))[0], "o")


def test_tables_in_place_of_a_copy_are_read_where_they_are_and_others_are_copied():
    q, k, v = operands(grad=False)
    turned = torch.randn(Q + K, H).t()
    compare(lambda s, b, h, q, k: s + turned[h, q - k])
    table = torch.randn(Q + K)
    mod = sdpa.ScoreMod(lambda s, b, h, q, k: s + table[q - k])
    first = flex_attention(q, k, v, mod)
    table *= 2.0
    assert not torch.equal(first, flex_attention(q, k, v, mod))
    close(flex_attention(q, k, v, mod), attention(q, k, v, eager(mod.fn))[0], "o")


def test_a_position_has_to_be_within_its_table():
    q, k, v = operands(grad=False)
    short = torch.randn(K - 1, 3)
    for mod, least in ((lambda s, b, h, q, k: s + short[k].sum(), K), (lambda s, b, h, q, k: s + short[q + 4, k % 3], Q + 4)):
        with pytest.raises(SpecError, match=f"at least {least} elements along"):
            flex_attention(q, k, v, mod)
    with pytest.raises(SpecError, match="a table of shape"):
        made = sdpa.ScoreMod(lambda s, b, h, q, k: s + short[q - k, 0])
        attend(q, k, v, made.over((torch.randn(3, 3),)), None)


def test_int64_tables_past_32_bits_are_refused():
    q, k, v = operands(grad=False)
    ids = torch.arange(Q + K) + 2**40
    for run in (
        lambda: flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(ids[q - k] > 3, s, 0.0)),
        lambda: torch.compile(lambda: flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(ids[q - k] > 3, s, 0.0)), fullgraph=True, backend="eager")(),
    ):
        with pytest.raises(SpecError, match="int64 tensor of elements"):
            run()
    with pytest.raises(TracingError, match="an int64 value may range"):
        flex_attention(q, k, v, lambda s, b, h, q, k: s + BIAS[(q + 60000) * (k + 60000) % 7])


def test_compilers_follow_gathers():
    q, k, v = operands()
    for name, whole in (("negative places", True), ("buckets", False), ("index after index", True), ("a distance of rows", True), ("torch.dot", True)):
        mod, captured = GATHERS[name]
        torch._dynamo.reset()
        # Several indices in one pair of brackets cause a graph break in the compiler.
        o = torch.compile(lambda q, k, v: flex_attention(q, k, v, mod), fullgraph=whole, backend="aot_eager")(q, k, v)  # noqa: B023
        theirs = attention(q, k, v, eager(mod))[0]
        close(o, theirs, "o")
        for x, y in zip(*[torch.autograd.grad(o.double().square().sum(), [q, k, v, *captured]) for o in (o, theirs)]):
            close(x, y, "gradient", 2e-4)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compilers_take_tables_of_other_lengths(dynamic):
    mod = lambda t, rows: lambda s, b, h, q, k: s + t[q - k] + rows[-1, 0] - ((rows[q] - rows[k]) ** 2).sum()  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, t, rows: flex_attention(q, k, v, mod(t, rows)), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (22, 25, 31):
        q, k, v = (torch.randn(B, H, m, D) for m in (n - 13, 13, 13))
        table, rows = torch.randn(n, requires_grad=True), torch.randn(n, 3)
        o, theirs = compiled(q, k, v, table, rows), attention(q, k, v, eager(mod(table, rows)))[0]
        close(o, theirs, "o")
        close(*[torch.autograd.grad(x.double().square().sum(), table)[0] for x in (o, theirs)], "gradient", 2e-4)


def test_a_mask_with_a_table_that_wants_a_gradient_is_refused():
    q, k, v = operands()
    with pytest.raises(SpecError, match="a mask has no gradient"):
        flex_attention(q, k, v, None, create_block_mask(lambda b, h, q, k: BIAS[q - k] > 0, None, None, Q, K))


def test_tables_of_text_and_of_numpy():
    q, k, v = operands(grad=False)
    table = torch.randn(H, Q + K)
    mod = sdpa.ScoreMod.from_text(f"table t[{H}, {Q + K}]: f32; score + t[head, q - k + {K}]", t=table)
    wanted = attention(q, k, v, eager(lambda s, b, h, q, k: s + table[h, q - k + K]))[0]
    close(flex_attention(q, k, v, mod), wanted, "o")
    assert f"table t[{H}, {Q + K}]" in str(mod)
    with pytest.raises(SpecError, match=r"parameter t: got nothing, expected f32 over \[4, 22\]"):
        sdpa.ScoreMod.from_text("table t[4, 22]: f32; score + t[head, q - k]")
    with pytest.raises(SpecError, match="a table of shape"):
        flex_attention(q, k, v, sdpa.ScoreMod.from_text("table t[4, 22]: f32; score + t[head, q - k]", t=torch.randn(4, 23)))
    ours = sdpa.ScoreMod(lambda s, b, h, q, k: s + sdpa.array(table.numpy())[h, q - k + K])
    close(torch.from_numpy(sdpa.numpy.attention(q.numpy(), k.numpy(), v.numpy(), ours)[0]), wanted, "o")
    o, stats = sdpa.numpy.attention(q.numpy(), k.numpy(), v.numpy(), ours)
    sums = sdpa.numpy.attention_backward(np.ones_like(o), q.numpy(), k.numpy(), v.numpy(), o, stats, ours)[3]
    assert sums["s0"].shape == (H, Q + K)


@pytest.mark.parametrize(
    "fn, what",
    [
        (lambda s, b, h, q, k: s + BIAS[q:k], "indexed by slice"),
        (lambda s, b, h, q, k: s + BIAS[None, q], "indexed 2 times"),
        (lambda s, b, h, q, k: s + REL[None, q], "indexed by NoneType"),
        (lambda s, b, h, q, k: s + REL[True, q], "indexed by bool"),
        (lambda s, b, h, q, k: s + BIAS[[q, k]], "indexed by list"),
        (lambda s, b, h, q, k: s + BIAS[XY[q]], "itself a tensor with unindexed axes"),
        (lambda s, b, h, q, k: REL[q - k], "returns a row"),
        (lambda s, b, h, q, k: s + T4[b, q - k].sum(), "indexed along 2 of them"),
        (lambda s, b, h, q, k: s + (XY[q] * REL[h]).sum(), "rows of different lengths: 3, 21"),
        (lambda s, b, h, q, k: s + torch.dot(XY[q], REL[h]), "not two rows of one length"),
        (lambda s, b, h, q, k: s + torch.dot(XY[q], XY[q] > 0), "of float32 and one of bool"),
        (lambda s, b, h, q, k: s + XY[q].sum(dim=1), "dim=1"),
        (lambda s, b, h, q, k: s + XY[q].sum(keepdim=True), "keepdim"),
        (lambda s, b, h, q, k: s + XY[q].norm(), "`.norm`"),
        (lambda s, b, h, q, k: s + torch.amax(XY[q]), "amax"),
        (lambda s, b, h, q, k: s if (XY[q] > 0) else 0.0, "true or false"),
        (lambda s, b, h, q, k: s + (XY[q] * 2)[q], "a computed row is indexed"),
        (lambda s, b, h, q, k: s + (XY[q] * 2)[3], "index 3 is outside of a row of 3"),
        (lambda s, b, h, q, k: s + XY[q, 3 + k * 0][7], "indexed|index"),
        (lambda s, b, h, q, k: s + DOC[b, q:].sum(), "slice"),
        (lambda s, b, h, q, k: s + DOC[b].float().mean() + DOC[b].mean(), "mean of int64"),
        (lambda s, b, h, q, k: s + torch.zeros(3, 90)[q % 3].sum(), "a row of 90"),
        (lambda s, b, h, q, k: s + torch.zeros(0)[q % 3], "shape \\(0,\\)"),
        (lambda s, b, h, q, k: s + torch.zeros(1, 1, 1, 1, 1)[b, h, q, k, q - k], "5 axes"),
        (lambda s, b, h, q, k: XY[q], "returns"),
        (lambda s, b, h, q, k: s + torch.relu_(XY[q]).sum(), "in place"),
        (lambda s, b, h, q, k: s + torch.nn.functional.relu(XY[q], inplace=True).sum(), "in place"),
        (lambda s, b, h, q, k: s + XY[q].new_ones(()).sum(), "`new_ones` is applied to a row"),
        (lambda s, b, h, q, k: s + XY[q].__iadd__(1).sum(), "changes a row in place"),
        (lambda s, b, h, q, k: s + (XY[q].__setitem__(0, s), 1)[1], "is assigned to"),
    ],
)
def test_what_is_no_gather_is_refused_with_its_line(fn, what):
    with pytest.raises(TracingError, match=what) as caught:
        sdpa.ScoreMod(fn)
    assert __file__ in caught.value.where


def test_a_captured_tensor_of_one_number_is_an_index():
    torch.manual_seed(0)
    bias = torch.randn(2, 4, 3, 37, requires_grad=True)
    which = torch.tensor(1)
    q, k, v = (torch.randn(2, 4, 37, 16) for _ in range(3))
    for chosen in (1, 2, -1):
        which.fill_(chosen)
        o = sdpa.flex_attention(q, k, v, lambda score, b, h, i, j: score + bias[b, h, which, i] * (j % 3))
        scores = q @ k.transpose(-1, -2) / 4 + bias[:, :, chosen, :, None] * (torch.arange(37) % 3)
        right = torch.softmax(scores, -1) @ v
        assert (o - right).abs().max() < 1e-5
        ours, exact = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (o, right))
        assert (ours - exact).abs().max() < 1e-4 and exact.abs().max() > 0.01
    with pytest.raises(TracingError, match="an int32 or an int64"):
        sdpa.ScoreMod(lambda score, b, h, i, j: score + bias[b, h, torch.tensor(0.5), i])


def test_a_value_is_broadcast_against_a_row():
    torch.manual_seed(0)
    chosen = torch.rand(2, 4, 5, 6).topk(3, -1).indices.to(torch.int32)
    q, k, v = (torch.randn(2, 4, n, 16) for n in (40, 48, 48))
    o = flex_attention(q, k, v, None, create_block_mask(lambda b, h, i, j: (chosen[b, h, i // 8] == (j // 8).unsqueeze(-1)).any(dim=-1), 2, 4, 40, 48))
    tiles = torch.zeros(2, 4, 5, 6, dtype=torch.bool).scatter_(-1, chosen.long(), True)
    mask = tiles.repeat_interleave(8, 2).repeat_interleave(8, 3)
    assert (o - torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)).abs().max() < 1e-5
    with pytest.raises(TracingError, match="only one axis is unrolled"):
        sdpa.MaskMod(lambda b, h, i, j: (chosen[b, h, i // 8].unsqueeze(-1) == chosen[b, h, i // 8]).any())
    with pytest.raises(TracingError, match="without axes"):
        sdpa.ScoreMod(lambda s, b, h, i, j: s.unsqueeze(2))
