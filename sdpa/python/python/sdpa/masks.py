"""Masks with FlexAttention's API. A mask is defined by its function alone; executors classify the blocks themselves."""

from __future__ import annotations

from typing import Any, Callable

from .errors import SpecError, one
from .mods import MaskMod

_BLOCK = 128


def noop_mask(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Attends to every key."""
    return True


def and_masks(*mask_mods: Callable) -> Callable:
    """A mask_mod that attends where all of these do."""
    _functions(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = True
        for mask_mod in mask_mods:
            kept = mask_mod(b, h, q_idx, kv_idx)
            result = kept if result is True else result & kept
        return result

    return and_mask


def or_masks(*mask_mods: Callable) -> Callable:
    """A mask_mod that attends where at least one of these does."""
    _functions(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = False
        for mask_mod in mask_mods:
            kept = mask_mod(b, h, q_idx, kv_idx)
            result = kept if result is False else result | kept
        return result

    return or_mask


def _functions(mask_mods: tuple) -> None:
    wrong = [(f"mask_mods[{n}]", type(m).__name__, "a function") for n, m in enumerate(mask_mods) if not callable(m)]
    if wrong:
        raise SpecError(wrong)


class BlockMask:
    """A mask for given numbers of batch entries, heads, queries and keys, as `create_block_mask` returns it. It does not store blocks."""

    def __init__(self, mask: MaskMod, shape: tuple[int, int, int, int], block_size: tuple[int, int] = (_BLOCK, _BLOCK)):
        self.mask, self._shape, self.BLOCK_SIZE = mask, tuple(shape), block_size
        # The key of calls with it, without its tensors.
        self.known = mask.known, self._shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch entries, heads, queries, keys; the first two are 1 if the mask is equal for all."""
        return self._shape

    @property
    def mask_mod(self) -> Callable:
        """The function that it was created from."""
        return self.mask.fn if self.mask.fn is not None else self.mask

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """Number of queries and keys."""
        return self._shape[2], self._shape[3]

    def contiguous(self) -> BlockMask:
        """Returns itself: transformers treats masks as tensors before it generates."""
        return self

    def numel(self) -> int:
        """Number of (query, key), over all heads."""
        b, h, q, k = self.shape
        return b * h * q * k

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Returns the mask for other lengths."""
        return BlockMask(self.mask, (*self.shape[:2], new_q_len, new_kv_len), self.BLOCK_SIZE)

    def to(self, device: Any) -> BlockMask:
        """Returns the mask with its tensors on another device."""
        if all(str(t.source.device) == str(device) for t in self.mask.tensors):
            return self
        raise one("block_mask.to", str(device), "a mask_mod whose tensors are on that device: move them and create the mask again")

    def __getitem__(self, index: Any) -> BlockMask:
        raise one(
            "block_mask",
            f"a mask sliced by {index!r}",
            "a whole mask: a slice of blocks does not say at which positions it begins. Create another with create_block_mask and a mask_mod shifted by "
            "the start (`lambda b, h, q, k: mask_mod(b, h, q + offset, k)`), or use _adjust(q_len, kv_len)",
        )

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, mask={str(self.mask)!r})"


def create_block_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK,
    _compile: bool = False,
    **_others: Any,
) -> BlockMask:
    """FlexAttention's function. It traces `mask_mod` and computes nothing: `device`, `BLOCK_SIZE` and `_compile` have no effect."""
    lengths = (("B", 1 if B is None else B), ("H", 1 if H is None else H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN))
    least = {"H": 1}
    odd = lambda name, n: isinstance(n, bool) or not isinstance(n, int) or n < least.get(name, 0)  # noqa: E731
    wrong = [(name, repr(n), f"an integer of at least {least.get(name, 0)}") for name, n in lengths if odd(name, n)]
    if wrong:
        raise SpecError(wrong)
    mask = mask_mod if isinstance(mask_mod, MaskMod) else MaskMod(mask_mod)
    size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    return BlockMask(mask, tuple(n for _, n in lengths), size)


def mask_of(block_mask: Any, lengths: tuple[int, int, int, int]) -> MaskMod | None:
    """Returns the mask of a `block_mask` argument: one of this package, one of PyTorch, or None. It is checked against the extents of the call."""
    if block_mask is None:
        return None
    if isinstance(block_mask, MaskMod):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        block_mask = read(block_mask)
    b, h, q, k = block_mask.shape
    rule = "call create_block_mask for these lengths, or block_mask._adjust(q_len, kv_len), which keeps the upper left corner"
    wrong = []
    if (q, k) != lengths[2:]:
        wrong.append(("block_mask.shape", str(block_mask.shape), f"q_len {lengths[2]} and kv_len {lengths[3]}: {rule}"))
    for name, n, have in (("B", b, lengths[0]), ("H", h, lengths[1])):
        if n not in (1, have):
            wrong.append((f"block_mask {name}", str(n), f"1, or {have} as the query"))
    if wrong:
        raise SpecError(wrong)
    return block_mask.mask


def read(block_mask: Any) -> BlockMask:
    """Reads a block mask of PyTorch through its function, if it was created from one."""
    there = getattr(block_mask, "_sdpa", None)
    if there is not None and there.shape == tuple(block_mask.shape):
        return there
    from torch.nn.attention import flex_attention as theirs

    if not isinstance(block_mask, theirs.BlockMask):
        raise one("block_mask", type(block_mask).__name__, "a BlockMask from create_block_mask")
    if block_mask.mask_mod is getattr(theirs, "_sliced_mask_mod_error", None):
        raise one("block_mask", "a part of a BlockMask", "a whole mask: create another with create_block_mask")
    shape = (1,) * (4 - len(block_mask.shape)) + tuple(block_mask.shape)
    like = theirs.create_block_mask(
        block_mask.mask_mod, *shape, device=block_mask.kv_num_blocks.device, BLOCK_SIZE=block_mask.BLOCK_SIZE
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        ours, own = getattr(like, name), getattr(block_mask, name)
        none = lambda t: t is None or not bool(t.any())  # noqa: E731
        if none(ours) != none(own) or (ours is not None and own is not None and not bool((ours == own).all())):
            raise one(
                "block_mask",
                "blocks that differ from its mask_mod (BlockMask.from_kv_blocks)",
                "a mask that its function defines: create_block_mask(mask_mod, ...), whose mask_mod reads the blocks as a tensor that was expanded over "
                "queries and keys",
            )
    made = BlockMask(MaskMod(block_mask.mask_mod), shape, block_mask.BLOCK_SIZE)
    block_mask._sdpa = made
    return made
