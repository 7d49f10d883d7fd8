"""Masks with FlexAttention's API. A mask is defined by its function alone; executors classify the blocks themselves."""

from __future__ import annotations

from typing import Any, Callable

from .errors import SpecError, one
from .mods import MaskMod

_BLOCK = 128
# The rule for a slice of a block mask, which has lost its function.
_ASSIGN = (
    "one with a mask_mod: assign one that counts positions from the start of the slice: "
    "`part.mask_mod = lambda b, h, q, k: mask_mod(b, h, q + offset, k)`"
)


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
    """A mask for given numbers of batch entries, heads, queries and keys, as `create_block_mask` returns it. It does not store blocks: `to_dense`,
    `sparsity` and `to_string` compute them."""

    # As many axes as a mask that is a tensor.
    ndim = 4

    def __init__(self, mask: MaskMod, shape: tuple[int, int, int, int], block_size: tuple[int, int] = (_BLOCK, _BLOCK)):
        self._shape, self.BLOCK_SIZE = tuple(shape), block_size
        self._set(mask)

    def _set(self, mask: MaskMod) -> None:
        self.mask = mask
        # The key of calls with it, without its tensors.
        self.known = mask.known, self._shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch entries, heads, queries, keys; the first two are 1 if the mask is equal for all."""
        return self._shape

    @property
    def mask_mod(self) -> Callable:
        """The function that it was created from. Assign another one to change the mask."""
        return self.mask.fn if self.mask.fn is not None else self.mask

    @mask_mod.setter
    def mask_mod(self, mask_mod: Callable) -> None:
        if type(self) is Slice:
            self.__class__ = BlockMask
        self._set(mask_mod if isinstance(mask_mod, MaskMod) else MaskMod(mask_mod))

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """Number of queries and keys. Assign others to change the mask's extents."""
        return self._shape[2], self._shape[3]

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        self._shape = (*self._shape[:2], *lengths)
        if type(self) is not Slice:
            self._set(self.mask)

    def contiguous(self) -> BlockMask:
        """Returns itself: transformers treats masks as tensors before it generates."""
        return self

    def dim(self) -> int:
        """Returns the number of axes, 4."""
        return self.ndim

    def numel(self) -> int:
        """Number of (query, key), over all heads."""
        b, h, q, k = self.shape
        return b * h * q * k

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Returns the mask for other lengths."""
        return BlockMask(self.mask, (*self.shape[:2], new_q_len, new_kv_len), self.BLOCK_SIZE)

    def to(self, device: Any) -> BlockMask:
        """Returns the mask with its tensors on another device."""
        import torch

        device = torch.device(device)
        if all(torch.as_tensor(t.source).device == device for t in self.mask.tensors):
            return self
        moved = self.mask.over(tuple([torch.as_tensor(t.source).to(device) for t in self.mask.tensors]))
        moved.fn = self.mask.fn
        return BlockMask(moved, self._shape, self.BLOCK_SIZE)

    def __getitem__(self, index: Any) -> BlockMask:
        """Returns the extents of a part: an index or slice of batch entries, heads and query blocks. As in FlexAttention, a part has no function, because
        positions in it begin at 0: assign `mask_mod` before use."""
        import torch

        index = index if isinstance(index, tuple) else (index,)
        blocks = -(-self._shape[2] // self.BLOCK_SIZE[0])
        if len(index) > 3 or any(at is None or at is Ellipsis for at in index):
            raise one("block_mask[...]", repr(index), "at most three indices (batch entries, heads, query blocks), without None and `...`")
        counts = []
        for at, n in zip((*index, *[slice(None)] * (3 - len(index))), (*self._shape[:2], blocks)):
            at = slice(at, at + 1 or None) if isinstance(at, int) else at
            counts.append(torch.arange(n)[at].numel())
        queries = self._shape[2] if counts[2] == blocks else counts[2] * self.BLOCK_SIZE[0]
        return Slice((*counts[:2], queries, self._shape[3]), self.BLOCK_SIZE)

    def _states(self) -> Any:
        from . import blocks

        import torch

        if self.mask.fn is None:
            raise one("block_mask", "a mask made of text", "a mask made of a function: only a function can be evaluated here")
        device = next((t.source.device for t in self.mask.tensors if isinstance(t.source, torch.Tensor)), torch.device("cpu"))
        return blocks.computed(self.mask.fn, self._shape, self.BLOCK_SIZE, device)

    def to_dense(self) -> Any:
        """Returns 1 for every block with an attended pair: (batch, heads, query blocks, KV blocks), int32. It evaluates every pair."""
        import torch

        return (self._states() != 0).to(torch.int32)

    def sparsity(self) -> float:
        """Returns the percentage of blocks without an attended pair. It evaluates every pair."""
        computed = self.to_dense().sum().item() * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1]
        return 100.0 * (1.0 - computed / max(1, self.numel()))

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Returns a picture in characters, per batch entry and head: `█` for computed blocks, a space for empty ones, `░` where a cell has both."""
        dense = self.to_dense()
        rows, columns = dense.shape[2:]
        most = (rows, columns) if grid_size == -1 else (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        down, right = (max(1, -(-n // m)) for n, m in zip((rows, columns), most))
        pictures = []
        for n, (b, h) in enumerate([(b, h) for b in range(dense.shape[0]) for h in range(dense.shape[1])]):
            if n == limit:
                pictures.append("...\nmore with to_string(limit=N)")
                break
            lines = [f"({b}, {h})"]
            for row in range(0, rows, down):
                shares = [dense[b, h, row : row + down, column : column + right].float().mean().item() for column in range(0, columns, right)]
                lines.append("".join(("█" if share == 1 else " " if share == 0 else "░") * 2 for share in shares))
            pictures.append("\n".join(lines))
        return "\n".join(pictures)

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, mask={str(self.mask)!r})"


class Slice(BlockMask):
    """A part of a block mask, until a function is assigned to its `mask_mod`."""

    def __init__(self, shape: tuple[int, int, int, int], block_size: tuple[int, int]):
        self._shape, self.BLOCK_SIZE = shape, block_size

    @property
    def mask(self) -> MaskMod:
        """Raises: a part has no function yet."""
        raise one(
            "block_mask",
            "a slice of a block mask without a mask_mod",
            _ASSIGN,
        )

    @mask.setter
    def mask(self, mask: MaskMod) -> None:
        raise AttributeError("assign to mask_mod instead of mask")

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, no mask_mod yet)"


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
        if block_mask is None:
            return None
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


def read(block_mask: Any) -> BlockMask | None:
    """Reads a block mask of PyTorch. Its `mask_mod` is trusted if its blocks agree with it in a sample. Otherwise its blocks become a table. Returns None for
    the mask of a single block that FlexAttention uses where a call has none."""
    there = getattr(block_mask, "_sdpa", None)
    if there is not None and there[0] is block_mask.mask_mod and there[1].shape[2:] == tuple(block_mask.seq_lengths):
        return there[1]
    from torch.nn.attention import flex_attention as theirs

    from . import blocks

    if not isinstance(block_mask, theirs.BlockMask):
        raise one("block_mask", type(block_mask).__name__, "a BlockMask from create_block_mask")
    mask_mod, lengths, size = block_mask.mask_mod, tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
    if lengths == (1, 1) and min(size) >= 2**30 and mask_mod is theirs.noop_mask:
        return None
    state = blocks.states(block_mask)
    state = state.reshape(*(1,) * (4 - state.dim()), *state.shape)
    if mask_mod is getattr(theirs, "_sliced_mask_mod_error", None):
        if bool((state == blocks.PARTIAL).any()):
            raise one("block_mask", "a slice of a BlockMask with partial blocks and without a mask_mod", _ASSIGN)
        mask_mod = None
    if mask_mod is None or not blocks.agree(state, mask_mod, lengths, size):
        mask_mod = blocks.with_blocks(state, mask_mod, size)
    made = BlockMask(MaskMod(mask_mod), (*state.shape[:2], *lengths), size)
    block_mask._sdpa = block_mask.mask_mod, made
    return made
