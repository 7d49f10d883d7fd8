"""Nested tensors of layout jagged. Their sequences are packed in memory, and attention reads them there, without padding."""

from __future__ import annotations

from typing import Any

import torch

from .errors import SpecError, one
from .masks import BlockMask, create_block_mask
from .mods import MaskMod, Packed, ScoreMod
from .op import FLOATS

_AXES = "(batch, heads, seq, dim), where seq differs: transpose(1, 2) of (batch, seq, heads, dim)"


def is_jagged(x: Any) -> bool:
    """Returns true for a nested tensor (batch, heads, seq, dim) of layout jagged without gaps, whose third axis differs from sequence to sequence."""
    return isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.jagged and x.dim() == 4 and x._ragged_idx == 2 and x.lengths() is None


def longest(x: torch.Tensor) -> int:
    """Returns the length of the longest sequence. It synchronises with the GPU, but only once for the sequences of a tensor that was created without
    `max_seqlen`."""
    return int(x._get_max_seqlen()) if x.shape[0] else 0


@torch._dynamo.disable(reason="sdpa reads the offsets of nested tensors outside of the compiled graph")
def attend(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float | None, gqa: bool, lse: bool, maxima: bool, executor: str | None
) -> tuple:
    """Returns the output as a nested tensor, and its row statistics if requested. Score_mods and masks see positions within a sequence, and the number of
    the sequence as `b`."""
    from . import flex

    _mistakes(query, key, value)
    offsets = (query.offsets(), key.offsets())
    cross = offsets[0] is not offsets[1]
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = ScoreMod(score_mod)
    lengths = (longest(query), longest(key))
    batch = query.shape[0]
    mask = _mask(block_mask, (batch, query.shape[1], *lengths))
    if batch == 0:  # as one sequence without tokens, whose scores no function sees
        batch, score_mod, mask, cross, offsets = 1, None, None, False, (offsets[0].new_zeros(2),) * 2
    tensors = [t for kept in (score_mod, mask) if kept is not None for t in kept.tensors]
    q, k, v = (x.values().unsqueeze(0) for x in (query, key, value))
    flex._shapes(q, k, v, gqa)
    # A tensor along queries or keys has the extents of the problem, which are then the exact ones.
    if not any(not t.is_table and {"q", "k"} & set(t.axes) for t in tensors):
        lengths = tuple(map(rounded, lengths))
    totals = [x.shape[2] for x in (q, k)]
    if all(x.stride(2) >= x.stride(1) * (x.shape[1] - 1) for x in (q, k, v)):
        totals = list(map(rounded, totals))
    packed = Packed(batch, *lengths, *totals, cross)
    o, rows = flex.by_operator(
        q, k, v, score_mod, mask, scale, lse or maxima, None, executor, (), maxima, packed, tuple(x.to(q.device) for x in offsets[: 1 + cross])
    )
    # The nested tensors of results share the offsets of the query's, and with them its axis of sequences.
    again = lambda x: torch.nested.nested_tensor_from_jagged(x, query.offsets(), max_seqlen=longest(query)).transpose(1, 2)  # noqa: E731
    o = again(o[0].transpose(0, 1))
    if not (lse or maxima):
        return o, None
    if not maxima:
        return o, again(rows[0].transpose(0, 1))
    return o, [again(x[0].transpose(0, 1)) for x in rows]


def create_nested_block_mask(
    mask_mod: Any, B: int | None, H: int | None, q_nt: torch.Tensor, kv_nt: torch.Tensor | None = None, BLOCK_SIZE: int | tuple[int, int] = 128, **others: Any
) -> BlockMask:
    """Returns the mask of these nested tensors (batch, heads, seq, dim). `mask_mod` sees positions within a sequence, and the number of the sequence as `b`.
    Equals `create_block_mask` with the lengths of the longest sequences."""
    kv_nt = q_nt if kv_nt is None else kv_nt
    wrong = [(name, _said(x), f"a nested tensor of layout jagged {_AXES}") for name, x in (("q_nt", q_nt), ("kv_nt", kv_nt)) if not is_jagged(x)]
    if wrong:
        raise SpecError(wrong)
    return create_block_mask(mask_mod, B, H, longest(q_nt), longest(kv_nt), BLOCK_SIZE=BLOCK_SIZE, **others)


def rounded(n: int) -> int:
    """Rounds up to one of eight lengths per power of two, so that calls with similar lengths share a plan."""
    step = max(64, 1 << max(0, (n - 1).bit_length() - 4))
    return max(1, -(-n // step)) * step


def _mistakes(query: Any, key: Any, value: Any) -> None:
    wrong = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_jagged(x):
            wrong.append((name, _said(x), f"a nested tensor of layout jagged {_AXES}, without gaps between sequences, as the query"))
        elif x.dtype not in FLOATS or x.dtype != query.dtype:
            wrong.append((f"{name} dtype", x.dtype, "one of float32, float16, bfloat16, the same for query, key and value"))
    if not wrong:
        batches = [x.shape[0] for x in (query, key, value)]
        if len(set(batches)) > 1:
            wrong.append(("batch of query, key, value", tuple(batches), "equal numbers of sequences"))
        elif key.offsets() is not value.offsets() and not torch.equal(key.offsets(), value.offsets()):
            wrong.append(("offsets of value", "others than those of key", "a value for each key"))
    if wrong:
        raise SpecError(wrong)


def _said(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    if not x.is_nested:
        return f"a dense tensor of shape {tuple(x.shape)}"
    if x.layout != torch.jagged:
        return f"a nested tensor of layout {x.layout}"
    gaps = " with gaps between sequences" if x.lengths() is not None else ""
    return f"a nested tensor of shape {tuple(x.shape)}{gaps}"


def _mask(block_mask: Any, extents: tuple[int, int, int, int]) -> MaskMod | None:
    if block_mask is None or isinstance(block_mask, MaskMod):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        rule = "a mask of sdpa.create_nested_block_mask, whose function sees positions within a sequence"
        raise one("block_mask", f"{type(block_mask).__module__}.{type(block_mask).__name__}", rule)
    wrong = []
    for name, have, need in zip(("Q_LEN", "KV_LEN"), block_mask.shape[2:], extents[2:]):
        if have < need:
            wrong.append((f"block_mask {name}", have, f"at least {need}, the longest sequence"))
    for name, have, need in zip("BH", block_mask.shape, extents):
        if have not in (1, need):
            wrong.append((f"block_mask {name}", have, f"1, or {need} as the query"))
    if wrong:
        raise SpecError(wrong)
    return block_mask.mask
