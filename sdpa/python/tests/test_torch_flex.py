"""`flex_attention` on CPU tensors, forward and backward, against the textbook in f64."""

import pytest
import torch
from textbook import attention, close

import sdpa
from sdpa import create_block_mask, flex_attention

torch.manual_seed(11)


def operands(b=2, h=4, hk=4, q=37, k=53, d=16, dv=16, dtype=torch.float32):
    made = [torch.randn(shape) for shape in ((b, h, q, d), (b, hk, k, d), (b, hk, k, dv))]
    return [x.to(dtype).requires_grad_() for x in made]


def check(qkv, score_mod=None, mask_mod=None, params=(), tolerance=2e-5, spread=False, **options):
    """Compares output, log-sum-exp and every gradient, with gradients of the output and of the log-sum-exp."""
    q, k, v = qkv
    mask = mask_mod and create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2])
    o, lse = flex_attention(q, k, v, score_mod, mask, return_lse=True, enable_gqa=q.shape[1] != k.shape[1], **options)
    wanted, log = attention(q, k, v, score_mod, mask_mod, **options)
    close(o, wanted, "o", tolerance)
    close(lse, log, "lse", tolerance)
    wrt = [*qkv, *params]
    up = torch.ones(()).expand(o.shape).to(o.dtype) if spread else torch.randn_like(o)
    along = torch.randn_like(lse)
    rows = torch.isfinite(log)
    ours = torch.autograd.grad([(o * up).sum(), (torch.where(rows, lse, 0.0) * along).sum()], wrt)
    theirs = torch.autograd.grad([(wanted * up).sum(), (torch.where(rows, log, 0.0) * along).sum()], wrt, retain_graph=True)
    for n, (x, y) in enumerate(zip(ours, theirs)):
        close(x, y, f"gradient {n}", 4 * tolerance)
    plain = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, **options)
    ours, theirs = torch.autograd.grad((plain * up).sum(), wrt), torch.autograd.grad((wanted * up).sum(), wrt)
    for n, (x, y) in enumerate(zip(ours, theirs)):
        close(x, y, f"gradient {n} of o alone", 4 * tolerance)


def causal(b, h, q, k):
    return q >= k


def test_plain_and_sizes():
    check(operands())
    check(operands(b=1, h=1, hk=1, q=1, k=1, d=8, dv=8))
    check(operands(q=129, k=257, d=40, dv=24), scale=0.3)
    check(operands(h=6, hk=2))
    check(operands(h=6, hk=1), mask_mod=causal)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_sixteen_bits(dtype, tolerance):
    check(operands(dtype=dtype), lambda s, b, h, q, k: torch.tanh(s / 5) * 5, causal, tolerance=tolerance)


def test_causal_window_softcap_and_prefix():
    window = sdpa.and_masks(causal, lambda b, h, q, k: q - k < 9)
    cap = sdpa.scalar("cap", 4.0)
    check(operands(), None, causal)
    check(operands(), None, window)
    check(operands(), lambda s, b, h, q, k: 4.0 * torch.tanh(s / 4.0), sdpa.or_masks(window, lambda b, h, q, k: k < 7))
    q, k, v = operands()
    for value in (4.0, 0.5):
        cap.value = value
        close(flex_attention(q, k, v, lambda s, b, h, i, j: cap * torch.tanh(s / cap)), attention(q, k, v, lambda s, b, h, i, j: value * torch.tanh(s / value))[0], "cap")


def test_alibi_with_learned_slopes():
    slopes = torch.nn.Parameter(torch.rand(4))
    check(operands(), lambda s, b, h, q, k: s + slopes[h] * (k - q), causal, [slopes])
    check(operands(h=4, hk=2), lambda s, b, h, q, k: s + slopes[h] * (k - q).abs(), None, [slopes])


def test_captured_tensors_have_gradients():
    bias = torch.randn(4, 37, 53, requires_grad=True)
    check(operands(), lambda s, b, h, q, k: s + bias[h, q, k], causal, [bias])
    turned = torch.randn(53, 4, 37, requires_grad=True)
    check(operands(), lambda s, b, h, q, k: s + turned[k, h, q], None, [turned])
    long, number = torch.randn(60, 99, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    check(operands(), lambda s, b, h, q, k: s * number + long[q, k] + long[3, k], None, [long, number])
    gate = torch.randn(2, 4, requires_grad=True)
    check(operands(), lambda s, b, h, q, k: s * torch.sigmoid(gate[b, h]), None, [gate])
    half = torch.randn(37, 53, dtype=torch.bfloat16, requires_grad=True)
    check(operands(), lambda s, b, h, q, k: s + half[q, k], None, [half], tolerance=2e-3)


def test_documents_and_arrays_of_truth():
    doc_q, doc_k = torch.randint(0, 3, (2, 37)).sort(-1).values, torch.randint(0, 3, (2, 53)).sort(-1).values
    check(operands(), None, lambda b, h, q, k: (doc_q[b, q] == doc_k[b, k]) & (k < 50))
    array = torch.rand(4, 37, 53) < 0.4
    check(operands(), None, lambda b, h, q, k: array[h, q, k])
    one = torch.randint(0, 3, (53,)).sort().values
    check(operands(q=53), None, sdpa.and_masks(causal, lambda b, h, q, k: one[q] == one[k]))
    lengths = torch.tensor([11, 40])
    check(operands(), lambda s, b, h, q, k: torch.where(k < lengths[b], s, -float("inf")), None)


def test_functions_of_torch():
    bound = torch.tensor([3.0, 1.0, 2.0, 0.5])

    def mod(s, b, h, q, k):
        far = torch.where((q - k).abs() > 5, torch.zeros_like(s), torch.exp2(-torch.abs(q - k).float()))
        s = torch.clamp(torch.maximum(s, -bound[h]), max=2.0) + far * torch.logical_or(q > 3, torch.logical_not(k > q))
        s = torch.maximum(s, torch.full_like(s, -1.5)) * torch.rsqrt(1.0 + torch.square(s))
        return torch.add(s, torch.div(q, 3, rounding_mode="floor")) - torch.remainder(q - k, 4) + torch.floor_divide(k, 5).to(s.dtype) + torch.log1p(s.relu())

    check(operands(), mod)
    check(operands(), lambda s, b, h, q, k: s * torch.pow(2.0, -(q - k).abs() / 8) + 1 / (1 + torch.erf(s) ** 2) - torch.sin(s).mul(0.5).sub(s, alpha=2))


def test_layouts():
    def bshd(x):
        return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()

    q, k, v = map(bshd, operands())
    check([q, k, v], None, causal)
    o = flex_attention(q, k, v)
    assert o.stride() == q.stride() and o.transpose(1, 2).is_contiguous()
    check([x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in operands()])
    check(operands(), spread=True)
    whole = torch.randn(2, 37, 3, 4, 16, requires_grad=True)
    parts = [whole[:, :, n].transpose(1, 2) for n in range(3)]
    ours = torch.autograd.grad(flex_attention(*parts).square().sum(), whole)[0]
    close(ours, torch.autograd.grad(attention(*parts)[0].square().sum(), whole)[0], "packed projection", 1e-4)
    key = torch.randn(2, 1, 53, 16).expand(2, 4, 53, 16).requires_grad_()
    check([operands()[0], key, operands()[2]])


@pytest.mark.parametrize("dtype, factor", [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 1e5)])
def test_gradient_of_lse_keeps_f32(dtype, factor):
    """In f16, a factor of 1e5, as in loss scaling, exceeds the largest number of the type, but gradients of q and k do not."""
    q, k, v = operands(q=96, k=96, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    along = factor * torch.randn(q.shape[:3])
    lse = flex_attention(q, k, v, return_lse=True)[1]
    ours = torch.autograd.grad((lse * along).sum(), [q, k])
    theirs = torch.autograd.grad((attention(*wide, v)[1] * along).sum(), wide)
    for x, y in zip(ours, theirs):
        rounded = y.to(dtype)
        there = torch.isfinite(rounded)
        assert torch.isfinite(x[there]).all()
        error, least = ((a.double() - y)[there].abs().mean().item() for a in (x, rounded))
        assert error <= 1.05 * least, f"{error / least} times the error of rounding the result once"


def test_row_without_a_key():
    q, k, v = operands()
    mask = create_block_mask(lambda b, h, i, j: (j < i) & (i > 3), None, None, 37, 53)
    o, lse = flex_attention(q, k, v, None, mask, return_lse=True)
    assert (o[:, :, :4] == 0).all() and torch.isneginf(lse[:, :, :4]).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(o.square().sum(), [q, k, v]))
    check([q, k, v], None, lambda b, h, i, j: (j < i) & (i > 3))


def test_masks_of_torch_are_read():
    from torch.nn.attention import flex_attention as theirs

    q, k, v = operands(q=256, k=256)
    mask = theirs.create_block_mask(causal, None, None, 256, 256, device="cpu")
    close(flex_attention(q, k, v, None, mask), attention(q, k, v, None, causal)[0], "o")
    with torch.no_grad():
        alone = theirs.flex_attention(q.detach(), k.detach(), v.detach(), block_mask=mask)
        close(flex_attention(q, k, v, None, mask), alone, "beside FlexAttention")
    with pytest.raises(sdpa.SpecError, match="a slice of a BlockMask"):
        flex_attention(q, k, v, None, mask[:, :, :1])


def test_results_that_are_asked_for():
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = operands()
    o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    close(aux.lse, attention(q, k, v)[1], "lse")
    assert aux.max_scores is None
    assert flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))[1].max_scores.shape == q.shape[:3]
    with pytest.warns(UserWarning, match="kernel_options"):
        flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})
    with torch.no_grad():
        assert not flex_attention(q, k, v).requires_grad


def test_a_model_trains():
    torch.manual_seed(0)
    project, slopes = torch.nn.Linear(32, 96), torch.nn.Parameter(torch.full((4,), 0.1))
    x = torch.randn(4, 24, 32)
    optimiser = torch.optim.Adam([*project.parameters(), slopes], lr=1e-2)
    mask = create_block_mask(causal, None, None, 24, 24)
    losses = []
    for _ in range(30):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in project(x).chunk(3, -1))
        o = flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), mask).transpose(1, 2).flatten(2)
        loss = (o - x).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_sinks():
    from sdpa.flex import attend

    q, k, v = operands(h=4, hk=2, dv=24)
    sink = torch.randn(4, requires_grad=True)
    o, lse = attend(q, k, v, None, create_block_mask(causal, None, None, 37, 53).mask, stats=True, sink=sink)
    wanted, log = attention(q, k, v, None, causal, sink=sink)
    close(o, wanted, "o")
    close(lse, log, "lse")
    up = torch.randn_like(o)
    for x, y in zip(torch.autograd.grad((o * up).sum(), [q, k, v, sink]), torch.autograd.grad((wanted * up).sum(), [q, k, v, sink])):
        close(x, y, "gradient", 1e-4)


@pytest.mark.parametrize("of_output", [False, True])
def test_the_gradient_of_a_sink_through_lse_counts_rows_without_keys(of_output):
    from sdpa.flex import attend

    q, k, v = operands(h=4, hk=2, dv=24)
    sink = torch.randn(4, requires_grad=True)
    late = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + 5  # noqa: E731
    o, lse = attend(q, k, v, None, create_block_mask(late, None, None, 37, 53).mask, stats=True, sink=sink)
    wanted, log = attention(q, k, v, None, late, sink=sink)
    assert torch.equal(lse[:, :, 0].detach(), sink.detach().expand(lse.shape[0], 4))
    up, rows = torch.randn_like(o), torch.randn_like(lse)
    losses = [(x * up).sum() * of_output + (y * rows).sum() for x, y in ((o, lse), (wanted, log))]
    for x, y in zip(*[torch.autograd.grad(loss, [q, k, v, sink], allow_unused=True) for loss in losses]):
        close(x, y, "gradient", 1e-4)


def test_checkpointing_and_autocast():
    from torch.utils.checkpoint import checkpoint

    q, k, v = operands()
    run = lambda q, k, v: flex_attention(q, k, v, None, create_block_mask(causal, None, None, 37, 53))  # noqa: E731
    ours = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False).sum(), [q, k, v])
    for x, y in zip(ours, torch.autograd.grad(run(q, k, v).sum(), [q, k, v])):
        assert torch.equal(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(q, k, v).dtype == torch.bfloat16
