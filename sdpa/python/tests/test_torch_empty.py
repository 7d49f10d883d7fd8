"""Tensors without a batch entry, a query or a key, against PyTorch's `scaled_dot_product_attention`."""

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.functional import scaled_dot_product_attention

import sdpa
from sdpa import SpecError, create_block_mask, flex_attention

EXTENTS = [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)]


def operands(b, q, k, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((b, 4, q, 8), (b, 2, k, 8), (b, 2, k, 6))]


def same(ours, wanted):
    assert (ours.shape, ours.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("extents", EXTENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_pytorch(extents, dtype):
    q, k, v = operands(*extents, dtype)
    wanted = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for options in ({}, {"executor": "cpu"}):
        o, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True, **options)
        same(o, wanted)
        same(lse, torch.full(o.shape[:3], -torch.inf))
        up = torch.randn_like(o)
        for x, y in zip(torch.autograd.grad((o * up).sum(), (q, k, v)), torch.autograd.grad((wanted * up).sum(), (q, k, v), retain_graph=True)):
            same(x, y)
    with torch.no_grad():
        same(flex_attention(q, k, v, enable_gqa=True), wanted)


@pytest.mark.parametrize("extents", EXTENTS)
def test_masks_and_gradients_of_captured_tensors(extents):
    b, n, m = extents
    q, k, v = operands(*extents)
    bias, slopes = torch.randn(4, n, m, requires_grad=True), torch.randn(4, requires_grad=True)
    lengths = torch.ones(b, dtype=torch.long)
    mod = lambda s, b, h, i, j: s * slopes[h] + bias[h, i, j]  # noqa: E731
    keep = lambda b, h, i, j: (i >= j) & (j < lengths[b])  # noqa: E731
    for mask in (create_block_mask(keep, b, None, n, m), create_block_mask(keep, b, 4, n, m), sdpa.MaskMod(keep)):
        o = flex_attention(q, k, v, mod, mask, enable_gqa=True)
        same(o, torch.zeros(b, 4, n, 6))
        for x, gradient in zip((q, k, v, bias, slopes), torch.autograd.grad(o.sum(), (q, k, v, bias, slopes))):
            same(gradient, torch.zeros(x.shape))
    with pytest.raises(SpecError, match="H"):
        create_block_mask(keep, None, 0, n, m)


@pytest.mark.parametrize("extents", [(2, 0, 5), (2, 3, 0)])
def test_block_masks_of_pytorch(extents):
    q, k, v = operands(*extents)
    mask = theirs.create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cpu")
    same(flex_attention(q, k, v, None, mask, enable_gqa=True), torch.zeros(2, 4, q.shape[2], 6))


def test_integers_of_a_trace_have_no_range_without_indices():
    """`2**31 - 1 + i` exceeds 32 bits for the second query, but there is none."""
    far = lambda s, b, h, i, j: s + (2147483646 + i + i).float()  # noqa: E731
    q, k, v = operands(2, 0, 5)
    assert flex_attention(q, k, v, far, enable_gqa=True).shape == (2, 4, 0, 6)
    q, k, v = operands(2, 3, 5)
    with pytest.raises(Exception, match="32 bits"):
        flex_attention(q, k, v, far, enable_gqa=True)


def test_views_without_elements():
    x = torch.randn(2, 5, 4, 8, requires_grad=True)
    turned = x.transpose(1, 2)
    for none in (turned[:, :, 3:3], turned[:, :, :0, ::2].repeat(1, 1, 1, 2), torch.empty(2, 4, 8, 0).transpose(2, 3)):
        o = flex_attention(turned, none, none)
        same(o, torch.zeros(2, 4, 5, 8))
        same(torch.autograd.grad(o.sum(), x)[0], torch.zeros(2, 5, 4, 8))
        assert flex_attention(none, turned, turned).shape == (2, 4, 0, 8)


@pytest.mark.parametrize("extents", EXTENTS)
def test_a_sink_is_the_only_term_without_keys(extents):
    q, k, v = operands(*extents)
    sink = torch.tensor([0.5, -2.0, 0.0, 3.0], requires_grad=True)
    o, lse = sdpa.flex.attend(q, k, v, None, None, stats=True, sink=sink)
    same(o, torch.zeros(*q.shape[:3], 6))
    if k.shape[2] == 0:
        same(lse, sink.detach()[None, :, None].expand(q.shape[:3]))
    same(torch.autograd.grad(o.sum(), sink)[0], torch.zeros(4))


@pytest.mark.parametrize("extents", EXTENTS)
def test_the_operator_keeps_its_contract(extents):
    q, k, v = operands(*extents)
    program = sdpa.mods.joined(None, None)[0]
    torch.library.opcheck(torch.ops.sdpa.attention.default, (q, k, v, [], [], program, 0.5, 2, []))


@pytest.mark.parametrize("extents", EXTENTS)
def test_compiled_calls(extents):
    q, k, v = operands(*extents)
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, None, enable_gqa=True), backend="aot_eager", fullgraph=True)
    o = compiled(q, k, v)
    same(o, torch.zeros(*q.shape[:3], 6))
    for x, gradient in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v))):
        same(gradient, torch.zeros(x.shape))
