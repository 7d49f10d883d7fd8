"""Block masks: those of PyTorch, with blocks that differ from their mask_mod, and what a mask tells of its blocks."""

import time
import tracemalloc

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402

import sdpa  # noqa: E402
from sdpa import blocks  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TYPES = {"cpu": (torch.float32, 1e-5), "cuda": (torch.float16, 4e-3)}
B, H, Q, K = 2, 3, 300, 400
causal = lambda b, h, q, k: q >= k  # noqa: E731
stripes = lambda b, h, q, k: (q + k) % 3 != 0  # noqa: E731
by_head = lambda b, h, q, k: (q >= k) & (h != 1) | (k < 40 * (b + 1))  # noqa: E731


def of_kv_blocks(mask_mod=None, full=False, device="cpu"):
    numbers = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    partial = numbers([[[1, 2, 1]]]), numbers([[[[0, 1, 2, 3], [1, 3, 0, 2], [2, 0, 1, 3]]]])
    more = (numbers([[[1, 0, 1]]]), numbers([[[[3, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]]])) if full else (None, None)
    return theirs.BlockMask.from_kv_blocks(*partial, *more, mask_mod=mask_mod, seq_lengths=(Q, K))


def attended(block_mask, device):
    """What FlexAttention's kernels compute: all of a full block, the mask_mod in a partial one, nothing elsewhere."""
    dense = torch.zeros(B, H, Q, K, dtype=torch.bool, device=device)
    every = theirs.create_mask(block_mask.mask_mod, B, H, Q, K, device=device)
    rows, columns = block_mask.BLOCK_SIZE
    for lists, of_block in (
        ((block_mask.kv_num_blocks, block_mask.kv_indices), every),
        ((block_mask.full_kv_num_blocks, block_mask.full_kv_indices), torch.ones_like(every)),
    ):
        if lists[0] is None:
            continue
        for b in range(B):
            for h in range(H):
                counts, indices = (x[b % x.shape[0], h % x.shape[1]] for x in lists)
                for row in range(len(counts)):
                    for column in indices[row][: counts[row]].tolist():
                        at = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
                        dense[b, h][at] = of_block[b, h][at]
    return dense


CASES = {
    "causal": lambda device: theirs.create_block_mask(causal, None, None, Q, K, device=device),
    "by head": lambda device: theirs.create_block_mask(by_head, B, H, Q, K, device=device),
    "small blocks": lambda device: theirs.create_block_mask(stripes, B, 1, Q, K, device=device, BLOCK_SIZE=(64, 32)),
    "blocks alone": lambda device: of_kv_blocks(device=device),
    "blocks and causal": lambda device: of_kv_blocks(causal, device=device),
    "full blocks too": lambda device: of_kv_blocks(stripes, True, device=device),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_masks_of_pytorch_are_what_their_blocks_say(name, device):
    torch.manual_seed(0)
    dtype, tolerance = TYPES[device]
    mask = CASES[name](device)
    q, k, v = (torch.randn(B, H, n, 16, device=device, dtype=dtype, requires_grad=True) for n in (Q, K, K))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = (exact[0] @ exact[1].transpose(-1, -2) / 4).masked_fill(~attended(mask, device), -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num() @ exact[2]
    o = sdpa.flex_attention(q, k, v, None, mask)
    d_o = torch.randn_like(o)
    assert (o - expected).abs().max() < tolerance
    gradients = torch.autograd.grad(o, (q, k, v), d_o)
    for ours, right in zip(gradients, torch.autograd.grad(expected, exact, d_o.double())):
        assert (ours - right).norm() <= tolerance * right.norm()
    # A mask_mod that agrees with its blocks stays the mask; other blocks become a table.
    assert ("table" in sdpa.masks.read(mask).mask.text) == ("blocks" in name and name != "small blocks")


def test_the_mask_of_a_call_without_one_is_none():
    q, k = torch.randn(1, 2, 30, 16), torch.randn(1, 2, 50, 16)
    mask = theirs._create_empty_block_mask(q, k)
    assert sdpa.masks.read(mask) is None
    assert torch.equal(sdpa.flex_attention(q, k, k, None, mask), sdpa.flex_attention(q, k, k))


def test_reading_a_long_mask_needs_no_quadratic_memory():
    n, blocks_ = 32768, 256
    counts = torch.arange(1, blocks_ + 1, dtype=torch.int32)[None, None]
    indices = torch.arange(blocks_, dtype=torch.int32).expand(1, 1, blocks_, blocks_).contiguous()
    mask = theirs.BlockMask.from_kv_blocks(torch.ones_like(counts), indices.flip(-1), counts - 1, indices, mask_mod=causal, seq_lengths=(n, n))
    # The partial block of a row is its diagonal one.
    mask.kv_indices = torch.arange(blocks_, dtype=torch.int32)[None, None, :, None].expand(1, 1, blocks_, blocks_).contiguous()
    tracemalloc.start()
    start = time.perf_counter()
    made = sdpa.masks.read(mask)
    seconds = time.perf_counter() - start
    tracemalloc.stop()
    assert str(made.mask) == "q >= k"
    assert seconds < 2, seconds  # A dense mask of this size takes half a minute and 10 GiB.


def test_one_block_of_many_that_disagrees_is_seen():
    state = torch.full((1, 1, 256, 256), blocks.FULL, dtype=torch.uint8)
    everything, lengths, size = (lambda b, h, q, k: q >= 0), (32768, 32768), (128, 128)
    assert blocks.agree(state, everything, lengths, size)
    for row, column in ((0, 0), (255, 255), (100, 17), (3, 250)):
        state[0, 0, row, column] = blocks.EMPTY
        assert not blocks.agree(state, everything, lengths, size), (row, column)
        state[0, 0, row, column] = blocks.FULL


def test_a_block_that_disagrees_is_seen():
    state = torch.full((1, 1, 4, 4), blocks.FULL, dtype=torch.uint8)
    everything, last = (lambda b, h, q, k: q >= 0), (lambda b, h, q, k: (q != 511) | (k != 511))
    assert blocks.agree(state, everything, (512, 512), (128, 128))
    assert not blocks.agree(state, last, (512, 512), (128, 128))
    state[0, 0, 3, 3] = blocks.PARTIAL
    assert blocks.agree(state, last, (512, 512), (128, 128))
    state[0, 0, 0, 1] = blocks.EMPTY
    assert not blocks.agree(state, last, (512, 512), (128, 128))


@pytest.mark.parametrize("make", [sdpa.create_block_mask, theirs.create_block_mask])
def test_a_part_gets_a_function_as_in_gpt_fast(make):
    torch.manual_seed(1)
    whole = make(causal, 1, 1, 512, 512, device="cpu")
    offset = torch.tensor(300)
    part = whole[:, :, torch.tensor([2])]
    q, k, v = (torch.randn(1, 2, n, 16) for n in (1, 512, 512))
    with pytest.raises(sdpa.SpecError, match="positions from the start of the slice"):
        sdpa.flex_attention(q, k, v, None, part)
    part.mask_mod = lambda b, h, q, k: q + offset >= k
    part.seq_lengths = (1, 512)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :301], v[:, :, :301])
    assert (sdpa.flex_attention(q, k, v, None, part) - expected).abs().max() < 1e-5
    assert part.seq_lengths == (1, 512)


def test_a_part_has_extents():
    mask = sdpa.create_block_mask(by_head, 4, 8, 300, 400)
    assert mask[0].shape == (1, 8, 300, 400)
    assert mask[1:3, -1].shape == (2, 1, 300, 400)
    assert mask[:, :, 0:2].shape == (4, 8, 256, 400)
    assert mask[0, 0, torch.tensor([1])].shape == (1, 1, 128, 400)
    assert "no mask_mod yet" in repr(mask[0])
    with pytest.raises(sdpa.SpecError, match="at most three indices"):
        mask[0, 0, 0, 0]
    with pytest.raises(sdpa.SpecError, match="a slice of a block mask without a mask_mod"):
        mask[0].mask


@pytest.mark.parametrize("mask_mod", [causal, stripes, by_head])
def test_blocks_are_those_of_pytorch(mask_mod):
    ours = sdpa.create_block_mask(mask_mod, 2, 3, 512, 640)
    there = theirs.create_block_mask(mask_mod, 2, 3, 512, 640, device="cpu")
    assert torch.equal(ours.to_dense(), there.to_dense())
    assert ours.sparsity() == pytest.approx(there.sparsity())
    state = blocks.computed(mask_mod, (2, 3, 512, 640), (128, 128), "cpu")
    assert torch.equal(state, blocks.states(there))
    for grid in ((20, 20), 2, (2, 5)):
        tell = lambda text: [line for line in text.splitlines() if set(line) <= set("█░ ") and line]  # noqa: E731
        assert tell(ours.to_string(grid, limit=6)) == tell(there.to_string(grid, limit=6))


def test_a_picture_ends_at_its_limit():
    assert "to_string(limit=N)" in sdpa.create_block_mask(causal, 3, 3, 128, 128).to_string()


def test_a_mask_moves_with_its_tensors():
    ids = torch.randint(0, 3, (300,))
    mask = sdpa.create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 300, 300)
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    assert moved is not mask and all(t.source.device.type == "meta" for t in moved.mask.tensors)
    assert moved.shape == mask.shape and moved.mask_mod is mask.mask_mod
    with pytest.raises(sdpa.SpecError, match="a mask made of text"):
        sdpa.masks.BlockMask(sdpa.MaskMod.from_text("causal"), (1, 1, 8, 8)).to_dense()
