"""`set_batch_invariant`: the bits of a sequence's results alone, in batches, in chunks and in pages."""

import pytest

torch = pytest.importorskip("torch")

import sdpa
from sdpa import SpecError, create_block_mask, flex_attention


@pytest.fixture(autouse=True)
def invariant():
    sdpa.set_batch_invariant(True)
    yield
    sdpa.set_batch_invariant(False)


def drawn(batch: int, heads: int, seq: int, dim: int = 64) -> torch.Tensor:
    return torch.randn(batch, heads, seq, dim, generator=torch.Generator().manual_seed(seq + dim))


def grads(q, k, v, d_o, mask=None):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = flex_attention(*leaves, block_mask=mask, enable_gqa=True)
    o.backward(d_o)
    return [o.detach(), *[x.grad for x in leaves]]


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch():
    q, k, v, d_o = drawn(9, 6, 300), drawn(9, 2, 300), drawn(9, 2, 300), drawn(9, 6, 300)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
    together = grads(q, k, v, d_o, mask)
    for n in (0, 4, 8):
        alone = grads(*[x[n : n + 1] for x in (q, k, v, d_o)], mask)
        for name, one, other in zip(("o", "dq", "dk", "dv"), alone, together):
            assert one.abs().max() > 0 and torch.equal(one[0], other[n]), name


def test_decode_steps_have_the_bits_of_the_prefill():
    q, k, v = drawn(1, 6, 700), drawn(1, 2, 700), drawn(1, 2, 700)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 700, 700, device="cpu")
    prefill = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    step = flex_attention(q[:, :, -1:], k, v, enable_gqa=True)
    assert torch.equal(step[:, :, 0], prefill[:, :, -1])
    # And the call sees that there is something to be seen.
    sdpa.set_batch_invariant(False)
    assert not torch.equal(flex_attention(q[:, :, -1:], k, v, enable_gqa=True)[:, :, 0], prefill[:, :, -1])


def test_pages_have_the_bits_of_contiguous_keys():
    q, k, v = drawn(1, 6, 1), drawn(1, 2, 640), drawn(1, 2, 640)
    want = flex_attention(q, k, v, enable_gqa=True)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    pools = []
    for x in (k, v):
        pool = torch.empty(40, 16, 2, 64)
        pool[order] = x[0].transpose(0, 1).reshape(40, 16, 2, 64)
        pools.append(pool)
    got = sdpa.paged_attention(q[0].transpose(0, 1), *pools, order.to(torch.int32)[None], torch.tensor([640], dtype=torch.int32))
    assert torch.equal(got[0], want[0, :, 0])


def test_the_setting_is_part_of_prepared_calls_and_of_compiled_ones():
    q, k, v = drawn(1, 6, 1), drawn(1, 2, 700), drawn(1, 2, 700)
    compiled = torch.compile(lambda *x: flex_attention(*x, enable_gqa=True), backend="aot_eager")
    on = flex_attention(q, k, v, enable_gqa=True)
    assert torch.equal(compiled(q, k, v), on)
    sdpa.set_batch_invariant(False)
    off = flex_attention(q, k, v, enable_gqa=True)
    assert not sdpa.is_batch_invariant() and not torch.equal(on, off)
    assert torch.equal(compiled(q, k, v), off)


def test_dropout_and_other_values_are_errors():
    q = drawn(1, 2, 8)
    with pytest.raises(SpecError, match="dropout"):
        sdpa.flex.attend(q, q, q, None, None, dropout=0.5)
    with pytest.raises(SpecError, match="enabled: got 'yes', expected True or False"):
        sdpa.set_batch_invariant("yes")
