"""Attention over a paged KV cache, for decoding and chunked prefill."""

from __future__ import annotations

import re
from typing import Any, Callable

import torch
from torch import empty_strided, get_num_threads, is_grad_enabled

from . import active, op
from .bind import bound, span
from .errors import SpecError, UnsupportedError, one
from .exchange import EXCHANGE
from .guards import kept
from .masks import BlockMask
from .mods import PAGES, Kept, MaskMod, Packed, Paged, ScoreMod, is_batch_invariant, joined, named
from .nested import rounded
from .op import PLAIN, STATS

_WINDOW = re.compile(r"window:(\d+|inf),(\d+|inf)")
_MASKS: dict[str, MaskMod] = {}
_WAYS: dict[tuple, Way] = {}
# Offsets of one query per sequence, by device and number of sequences.
_ONES: dict[tuple, torch.Tensor] = {}


@torch._dynamo.disable(reason="sdpa runs paged attention outside of the compiled graph")
def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens_kv: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    score_mod: Callable | None = None,
    mask: Any = "causal",
    scale: float | None = None,
    executor: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the queries of several sequences over keys and values in pages: `softmax(mask(score_mod(q·kᵀ · scale))) · v`, without a gradient.

    - `query`: (tokens, heads, dim). Sequence `b` has the rows from `cu_seqlens_q[b]` up to `cu_seqlens_q[b + 1]`; without offsets, it has row `b` alone.
      `max_seqlen_q` bounds the rows of a sequence.
    - `key_pool`, `value_pool`: (pages, page size, heads_kv, dim). Key `n` of sequence `b` is token `n % page_size` of page
      `page_table[b, n // page_size]`.
    - `page_table`: int32 (sequences, pages of a sequence), and `seq_lens_kv`: int32 (sequences,), the keys of each sequence, those of the queries included.
    - `mask`: `"causal"` aligns the last query of a sequence to its last key. `"window:LEFT,RIGHT"` lets a query attend to the keys with
      `q - LEFT < k <= q + RIGHT`, aligned in the same way. A `mask_mod` may be a function or a `MaskMod`; `None` masks nothing.

    In a `score_mod` or `mask_mod`, `q_idx` counts the queries of the sequence in this call, and `kv_idx` its keys. The position of a query in its sequence is
    `q_idx + context[b]` with a tensor `context` of the keys before its first query.

    Returns (tokens, heads, dim of the values), and with `return_lse` also the log-sum-exp (tokens, heads). Rows that belong to no sequence are 0, and their
    log-sum-exp is −∞. On a GPU the call does not synchronise, so that a CUDA graph can capture it after a first call.
    """
    active.refuse("paged_attention")
    if executor is not None:
        named(executor)
    scale = scale if scale is None or type(scale) is float else op.factor(scale)
    score, sources = (None, ()) if score_mod is None else kept(ScoreMod, score_mod)
    masked = _mask(mask)
    if masked is not None:
        masked, of_mask = masked if isinstance(masked, tuple) else (masked, masked.sources)
        sources = (*sources, *of_mask)
    numbers = (seq_lens_kv, page_table) if cu_seqlens_q is None else (cu_seqlens_q, seq_lens_kv, page_table)
    layouts = EXCHANGE.look((query, key_pool, value_pool, *numbers, *sources))
    kind = (
        layouts, max_seqlen_q, cu_seqlens_q is None, None if score is None else score.known, None if masked is None else masked.known, return_lse,
        is_grad_enabled(), is_batch_invariant(), executor,
    )  # fmt: skip
    way = None if layouts is None else _WAYS.get(kind)
    if way is None:
        _mistakes(query, key_pool, value_pool, page_table, seq_lens_kv, cu_seqlens_q, max_seqlen_q, sources)
        if layouts is None:
            reason = "paged_attention reads plain tensors: not those of torch.func, of a compiler or of a subclass, nor views that negate"
            raise UnsupportedError("sdpa", [reason])
        way = Way(query, key_pool, value_pool, page_table, cu_seqlens_q, max_seqlen_q, score, masked, sources, executor, return_lse)
        op.keep(_WAYS, kind, way)
    o, lse = way.run(query, key_pool, value_pool, numbers, score, masked, sources, scale)
    return (o, lse) if return_lse else o


class Way:
    """The prepared work for one kind of call: equal layouts, types, score_mod and mask."""

    def __init__(
        self, query: Any, k: Any, v: Any, table: Any, offsets: Any, longest: int | None, score: Kept | None, mask: Kept | None, sources: tuple,
        executor: str | None, lse: bool,
    ):  # fmt: skip
        tokens, heads, dim = query.shape
        sequences, columns = table.shape
        pages, page_size = k.shape[:2]
        self.device, self.dtype, self.gpu = query.device, query.dtype, query.device.type == "cuda"
        self.o, self.rows = (tokens, heads, v.shape[3]), (tokens, heads) if lse else None
        self.scale, self.keys = op.usual(dim), columns * page_size
        self.sequences, self.covered = sequences, offsets is None
        score = None if score is None else score.over(sources[: len(score.tensors)])
        mask = None if mask is None else mask.over(sources[len(sources) - len(mask.tensors) :])
        self.parameters = [t for x in (score, mask) if x is not None for t in x.tensors]
        self.plan = None
        if not (tokens and sequences and columns):
            self.extents = (sequences, heads, 0, 0)
            return
        # Heads that are farther apart than tokens leave no room for more tokens.
        total = rounded(tokens) if query.stride(0) >= query.stride(1) * (heads - 1) else tokens
        longest = 1 if offsets is None else tokens if longest is None else min(longest, tokens)
        # A tensor along the queries has the extents of the problem, which are then the exact ones.
        if not any(not t.is_table and "q" in t.axes for t in self.parameters):
            # NVRTC would compile kernels of their own for bounds of 2, 4 and 8, in half a second each.
            longest = 1 if longest <= 1 else min(max(16, 1 << (longest - 1).bit_length()), total)
        self.extents = (sequences, heads, max(longest, 1), self.keys)
        packed = Packed(sequences, *self.extents[2:], total, None, True, offsets is not None and offsets.dtype == torch.int64)
        program, tensors, scalars = joined(score, mask, executor=executor, packed=packed, paged=Paged(page_size, pages))
        if len(tensors) != len(self.parameters) or len(scalars) != sum(len(x.scalars) for x in (score, mask) if x is not None):
            raise UnsupportedError("sdpa", ["a tensor or a scalar of one name in the score_mod and in the mask; give the mask one of its own, with another name"])
        wrong = [(f"parameter {t.name}", "a declared name", f"another name than those of the call: {', '.join(PAGES)}") for t in tensors if t.name in PAGES]
        if wrong:
            raise SpecError(wrong)
        # The tensors of a call are those of its own functions; those of the first one are not kept alive.
        self.parameters = [t.of(None) for t in self.parameters]
        q = query if op.is_dense(query) else query.contiguous()
        o = query.new_empty(self.o)
        operands = (q.transpose(0, 1)[None], k.transpose(1, 2), v.transpose(1, 2), o.transpose(0, 1)[None])
        self.plan = op.plan(program, self.device, self.dtype, lse, tuple([op._layout(x) for x in operands]), ())
        size = self.plan.workspace_bytes
        self.workspace = (((size,), (1,)), {"dtype": torch.uint8, "device": self.device}) if size else None

    def run(self, q: Any, k: Any, v: Any, numbers: tuple, score: Kept | None, mask: Kept | None, sources: tuple, scale: float | None) -> tuple:
        """Returns the output, and the log-sum-exp if requested."""
        if not self.gpu:
            self._lengths(numbers[-2])
        for x, read in ((score, sources[: len(score.tensors)] if score else ()), (mask, sources[len(score.tensors) if score else 0 :])):
            if x is not None and x.ranges is not None:
                x.check(self.extents, read, span)
        # Tokens may belong to no sequence. With one row per sequence, every row is written.
        make = empty_strided if self.covered and self.plan is not None else _zeros
        o = make(self.o, _strides(self.o), dtype=self.dtype, device=self.device)
        lse = None
        if self.rows is not None:
            lse = torch.full(self.rows, -torch.inf, dtype=torch.float32, device=self.device)
        if self.plan is None:
            return o, lse
        if self.covered:
            numbers = (_ones(self.sequences, self.device), *numbers)
        params = [bound(t.of(x), self.extents, self.device) for t, x in zip(self.parameters, sources)]
        params += [x.contiguous() for x in numbers]
        if self.gpu:
            params = [x.clone() if x.data_ptr() % 16 else x for x in params]
        if not op.is_dense(q):
            q = q.contiguous()
        scalars = [s.value for x in (score, mask) if x is not None for s in x.scalars]
        where: tuple = (get_num_threads(), 0, None)
        if self.gpu:
            # PyTorch allocates the workspace, so that it is reused in stream order and a captured graph keeps it.
            workspace = None if self.workspace is None else empty_strided(*self.workspace[0], **self.workspace[1])
            where = 1, op._stream(self.device.index), workspace
        EXCHANGE.run(self.plan, (q, k, v, o), lse, tuple(params), scalars, (), self.scale if scale is None else scale, *where)
        return o, lse

    def _lengths(self, lengths: Any) -> None:
        """Rejects lengths in host memory that the page table cannot hold. The core checks page indices and offsets."""
        if not self.sequences:
            return
        least, most = (int(x) for x in torch.aminmax(lengths))
        if least < 0 or most > self.keys:
            n = int((lengths < 0).nonzero()[0, 0] if least < 0 else lengths.argmax())
            rule = f"between 0 and {self.keys}, the tokens of a row of the page table; add columns to the table"
            raise one(f"seq_lens_kv[{n}]", int(lengths[n]), rule)


def _strides(shape: tuple) -> tuple:
    return shape[1] * shape[2], shape[2], 1


def _zeros(shape: tuple, _strides: tuple, **of: Any) -> torch.Tensor:
    return torch.zeros(shape, **of)


def _ones(sequences: int, device: torch.device) -> torch.Tensor:
    """Returns the offsets of one query per sequence. Those that a CUDA graph computes belong to that graph, and are not kept."""
    key = (device, sequences)
    there = _ONES.get(key)
    if there is not None:
        return there
    made = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _ONES[key] = made
    return made


def _mask(mask: Any) -> Any:
    """Returns the mask, or the mask and its tensors if it is a function."""
    if mask is None or isinstance(mask, MaskMod):
        return mask
    if isinstance(mask, str):
        there = _MASKS.get(mask)
        if there is not None:
            return there
        if mask == "causal":
            text = "causal-ends"
        elif _WINDOW.fullmatch(mask):
            text = f"{mask}:ends"
        else:
            raise one("mask", repr(mask), "'causal', 'window:LEFT,RIGHT' (such as window:512,0), a mask_mod, or None")
        made = _MASKS[mask] = MaskMod.from_text(text)
        return made
    if isinstance(mask, BlockMask) or not callable(mask):
        rule = "'causal', 'window:LEFT,RIGHT', a mask_mod such as block_mask.mask_mod, or None: the number of keys differs from sequence to sequence"
        raise one("mask", type(mask).__name__, rule)
    return kept(MaskMod, mask)


def _mistakes(query: Any, k: Any, v: Any, table: Any, lengths: Any, offsets: Any, longest: Any, sources: tuple) -> None:
    """Raises an error that lists everything wrong with the arguments."""
    axes = {
        "query": (query, "(tokens, heads, dim)", 3), "key_pool": (k, "(pages, page size, heads_kv, dim)", 4), "value_pool": (v, "(pages, page size, heads_kv, dim)", 4),
        "page_table": (table, "(sequences, pages of a sequence)", 2), "seq_lens_kv": (lengths, "(sequences,)", 1),
    }  # fmt: skip
    if offsets is not None:
        axes["cu_seqlens_q"] = (offsets, "(sequences + 1,)", 1)
    errors = []
    for name, (x, shape, ndim) in axes.items():
        if not isinstance(x, torch.Tensor):
            errors.append((name, type(x).__name__, f"a tensor {shape}"))
        elif x.is_nested or x.layout != torch.strided or x.dim() != ndim:
            errors.append((f"{name} shape", "a nested tensor" if x.is_nested else tuple(x.shape), f"a dense tensor {shape}"))
    if errors:
        raise SpecError(errors)
    for name, (x, _, ndim) in axes.items():
        if x.device != query.device or x.device.type not in ("cpu", "cuda"):
            errors.append((f"{name} device", x.device, "cpu or cuda" if name == "query" else f"{query.device}, as the query"))
        if ndim > 2:
            if x.dtype not in op.FLOATS:
                errors.append((f"{name} dtype", x.dtype, "one of float32, float16, bfloat16"))
            elif x.dtype != query.dtype:
                errors.append((f"{name} dtype", x.dtype, f"{query.dtype}, as the query"))
        elif x.dtype != torch.int32 and (name != "cu_seqlens_q" or x.dtype != torch.int64):
            errors.append((f"{name} dtype", x.dtype, "int32: convert it with .to(torch.int32)"))
    for name, x in (*[(name, x) for name, (x, *_) in axes.items()], *[(f"tensor {n} of the functions", x) for n, x in enumerate(sources)]):
        if isinstance(x, torch.Tensor) and x.requires_grad and is_grad_enabled():
            errors.append((name, "a tensor that requires grad", "one that does not, as paged attention has no gradient: use torch.no_grad(), or detach it"))
    errors += _extents(query, k, v, table, lengths, offsets, longest)
    if errors:
        raise SpecError(errors)


def _extents(query: Any, k: Any, v: Any, table: Any, lengths: Any, offsets: Any, longest: Any) -> list:
    errors = []
    tokens, heads, dim = query.shape
    pages, page_size, heads_kv, of_key = k.shape
    sequences = lengths.shape[0]
    if v.shape[:3] != k.shape[:3]:
        errors.append(("value_pool shape", tuple(v.shape), f"({pages}, {page_size}, {heads_kv}, dim), as the key_pool"))
    if of_key != dim:
        errors.append(("key_pool dim", of_key, f"{dim}, as the query"))
    if not (heads and heads_kv) or heads % heads_kv:
        errors.append(("key_pool heads", heads_kv, f"a divisor of {heads}, the heads of the query"))
    if not (pages and page_size):
        errors.append(("key_pool shape", tuple(k.shape), "at least one page of at least one token"))
    errors += [(f"{name} strides", x.stride(), "a dense last axis: a pool is never copied") for name, x in (("key_pool", k), ("value_pool", v)) if not op.is_dense(x)]
    if table.shape[0] != sequences:
        errors.append(("page_table shape", tuple(table.shape), f"({sequences}, pages of a sequence), a row for each of seq_lens_kv"))
    whole = isinstance(longest, int) and not isinstance(longest, bool)
    if longest is not None and (not whole or longest < 0 or (offsets is None and longest != 1)):
        rule = "1 or None, as every sequence has one query without cu_seqlens_q" if offsets is None else "an integer of at least 0, or None for all tokens"
        errors.append(("max_seqlen_q", repr(longest), rule))
    if offsets is None and tokens != sequences:
        errors.append(("query tokens", tokens, f"{sequences}, one for each sequence, or cu_seqlens_q with the offsets of the sequences"))
    if offsets is not None and offsets.shape[0] != sequences + 1:
        errors.append(("cu_seqlens_q shape", tuple(offsets.shape), f"({sequences + 1},), the first token of each sequence, and the end of the last"))
    return errors
