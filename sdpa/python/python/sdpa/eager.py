"""Calls outside of compilers. Checks of one kind of call are done once, and the next call of that kind uses its plan directly.

The operator of `op` supports PyTorch's compilers, modes and transforms. For plain tensors, its dispatch takes longer than attention over a few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import are_deterministic_algorithms_enabled, empty_strided, get_num_threads, is_grad_enabled
from torch.autograd import forward_ad

from . import op
from .bind import bound, span
from .exchange import EXCHANGE
from .masks import BlockMask, mask_of
from .mods import Kept, is_batch_invariant, joined
from .op import PLAIN, STATS, TRAIN

_ROWS = torch.float32
# How a parameter is read: unchanged, as its `reading` describes, or as a copy with the alignment that a GPU needs.
_AS_IT_IS, _BOUND, _COPIED = 0, 1, 2
_look, _run = EXCHANGE.look, EXCHANGE.run

try:
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C import _is_any_autocast_enabled as autocast
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import maybe_current_level
except ImportError:  # of a PyTorch that has none of these: the operator serves it

    def alone() -> bool:
        """Returns true if no compiler, mode or transform is active."""
        return False

    def autocast() -> bool:
        """Returns true if autocast may be active for some device."""
        return True
else:

    def alone() -> bool:
        """Returns true if no compiler, mode, transform or profiler is active. A profiler sees the operator by its name."""
        modes = _len_torch_dispatch_stack() or _len_torch_function_stack()
        return not modes and maybe_current_level() is None and forward_ad._current_level < 0 and _get_tracing_state() is None and not _profiler_enabled()


def _like(tensor: torch.Tensor) -> tuple:
    """Returns the arguments of `empty_strided` for a result like this tensor."""
    return (tuple(tensor.shape), tensor.stride()), {"dtype": tensor.dtype, "device": tensor.device}


class Way:
    """The prepared work for one kind of call: equal layouts, types, score_mod and mask."""

    def __init__(self, plan: Any, device: torch.device):
        self.plan, self.device, self.gpu = plan, device, device.type == "cuda"
        # PyTorch allocates it, so that it is reused in stream order and a captured graph keeps it.
        size = plan.workspace_bytes
        self.workspace = (((size,), (1,)), {"dtype": torch.uint8, "device": device}) if size else None

    def where(self) -> tuple:
        """Returns the plan's resources: the current number of CPU threads, or PyTorch's current stream."""
        if not self.gpu:
            return get_num_threads(), 0, None
        return 1, op._stream(self.device.index), None if self.workspace is None else empty_strided(*self.workspace[0], **self.workspace[1])


class Forward(Way):
    """A forward pass, and its backward passes by the layout of the upstream gradient."""

    def __init__(self, plan: Any, o: torch.Tensor, *, program: str, mode: int, stats: bool, wrt: list, reads: tuple, extents: tuple, scale: float):
        super().__init__(plan, o.device)
        self.program, self.mode, self.with_stats, self.wrt, self.reads, self.extents, self.scale = program, mode, stats, wrt, reads, extents, scale
        self.dtype, (self.o, self.of) = o.dtype, _like(o)
        # Extents and strides of the row statistics.
        self.maxima = '"max_scores":' in program
        b, h, q = extents[:3]
        self.rows = ((2, b, h, q), (b * h * q, h * q, q, 1)) if self.maxima else ((b, h, q), (h * q, q, 1))
        self.backward: dict[Any, Any] = {}

    def read(self, score: Kept | None, mask: Kept | None, sources: tuple) -> tuple:
        """Returns the tensors as the plan reads them."""
        parameters = [t for kept in (score, mask) if kept is not None for t in kept.tensors]
        read = [bound(t.of(x), self.extents, self.device) if how != _AS_IT_IS else x for t, x, how in zip(parameters, sources, self.reads)]
        read += [x.contiguous() for x in sources[len(parameters) :]]
        return tuple([x.clone() if how == _COPIED else x for x, how in zip(read, self.reads)])

    def run(self, q: Any, k: Any, v: Any, params: tuple, scalars: Any, scale: float) -> tuple:
        """Returns the output, and stats if there are any."""
        o = empty_strided(*self.o, **self.of)
        stats = None if self.mode == PLAIN else empty_strided(*self.rows, dtype=_ROWS, device=self.device)
        _run(self.plan, (q, k, v, o), stats, params, scalars, (), scale, *self.where())
        return o, stats


class Backward(Way):
    """A backward pass; for each parameter with a gradient, its index and the type of the sum."""

    def __init__(self, plan: Any, made: tuple, sums: list, order: list):
        super().__init__(plan, made[0].device)
        (self.dq, self.of), (self.dk, _), (self.dv, _) = map(_like, made)
        self.sums, self.order = sums, order

    def run(self, d_o: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, params: tuple, scalars: Any, scale: float) -> tuple:
        """Returns the gradients of the operands, and of each parameter, or None for those without one."""
        of = self.of
        dq, dk, dv = empty_strided(*self.dq, **of), empty_strided(*self.dk, **of), empty_strided(*self.dv, **of)
        sums = {n: torch.empty(params[n].shape, dtype=dtype, device=self.device) for n, dtype in self.sums} if self.sums else {}
        _run(self.plan, (q, k, v, o, d_o, dq, dk, dv), stats, params, scalars, tuple([sums[n] for n in self.order]), scale, *self.where())
        if not params:
            return dq, dk, dv
        return dq, dk, dv, *[sums[n].to(x.dtype) if n in sums else None for n, x in enumerate(params)]


_WAYS: dict[tuple, Any] = {}
# Marks calls that the operator handles: operands that need copies, or one parameter of both a score_mod and a mask.
_OPERATOR = object()
# Marks calls whose keys and values have batch 1 and are expanded first.
_EXPAND = object()


def attend(
    query: Any, key: Any, value: Any, score: Kept | None, sources: tuple, block_mask: Any, scale: float | None, gqa: bool | None, stats: bool, sink: Any,
    executor: str | None, dropout: tuple = (), maxima: bool = False,
) -> tuple | None:
    """Returns the output, and stats if requested, or None if the operator must handle the call. `sources` are the tensors that `score` reads. `gqa` is None if
    the caller has checked the heads. `dropout` has its probability, seed and offset. With `maxima`, the statistics include the maxima of the scores."""
    if not alone():
        return None
    mask = block_mask.mask if isinstance(block_mask, BlockMask) else block_mask
    if mask is not None and mask.tensors:
        sources = (*sources, *[t.source for t in mask.tensors])
    if sink is not None:
        sources = (*sources, sink)
    if dropout:
        sources = (*sources, *dropout[1:])
    layouts = _look((query, key, value, *sources) if sources else (query, key, value))
    if layouts is None:
        return None
    kind = (
        layouts, None if score is None else score.known, None if mask is None else block_mask.known, sink is not None, gqa, stats, is_grad_enabled(),
        are_deterministic_algorithms_enabled(), is_batch_invariant(), executor, dropout[:1], maxima,
    )  # fmt: skip
    way = _WAYS.get(kind)
    if way is None:
        if score is not None and score.tensors:
            score = score.over(sources)
        way = _find(query, key, value, score, mask, block_mask, gqa, stats, sink, executor, dropout, maxima)
        op.keep(_WAYS, kind, way)
    if way is _OPERATOR:
        return None
    if way is _EXPAND:
        key, value = op.expanded(query, key, value)
        sources = sources[: 0 if score is None else len(score.tensors)]
        return attend(query, key, value, score, sources, block_mask, scale, gqa, stats, sink, executor, dropout, maxima)
    if score is not None and score.ranges is not None:
        score.check(way.extents, sources[: len(score.tensors)], span)
    if mask is not None and mask.ranges is not None:
        mask.check(way.extents, mask.sources, span)
    if way.reads:
        sources = way.read(score, mask, sources)
    scalars: Any = ()
    if (score is not None and score.scalars) or (mask is not None and mask.scalars):
        scalars = [s.value for kept in (score, mask) if kept is not None for s in kept.scalars]
    scale = way.scale if scale is None else scale
    if way.mode != TRAIN:
        return way.run(query, key, value, sources, scalars, scale)
    made = _apply((way, scale, scalars), query, key, value, *sources)
    return made if way.with_stats else (made, None)


def _how(source: torch.Tensor, read: torch.Tensor) -> int:
    """Returns how a parameter is read. The key of a call includes the alignment of the tensors it reads."""
    if read.device.type == "cuda" and read.data_ptr() % 16:
        return _COPIED
    return _AS_IT_IS if read is source else _BOUND


def _find(query, key, value, score, mask, block_mask, gqa, stats, sink, executor, dropout, maxima) -> Any:
    """Validates a call of a new kind and returns its prepared work."""
    from .flex import _no_gradient, _shapes

    op.mistakes(query, key, value)
    if query.shape[0] != 1 and 1 in (key.shape[0], value.shape[0]):
        return _EXPAND
    if gqa is not None:
        _shapes(query, key, value, gqa)
    extents = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    mask_of(block_mask, extents)
    deterministic = are_deterministic_algorithms_enabled()
    program, tensors, scalars = joined(score, mask, sink is not None, deterministic, executor, *(dropout[:1] or (0.0,)), maxima)
    apart = [kept for kept in (score, mask) if kept is not None]
    if len(tensors) != sum(len(kept.tensors) for kept in apart) or len(scalars) != sum(len(kept.scalars) for kept in apart):
        return _OPERATOR
    if query.device.type == "meta" or not (op.is_dense(query) and op.is_dense(key) and op.is_dense(value)):
        return _OPERATOR
    after = ([sink] if sink is not None else []) + list(dropout[1:])
    sources = [t.source for t in tensors] + after
    params = [bound(t, extents, query.device) for t in tensors] + [x.contiguous() for x in after]
    wrt = [n for n, t in enumerate(params) if is_grad_enabled() and t.requires_grad]
    if wrt and mask is not None:
        _no_gradient(mask, params, tensors)
    op._there(query, params)
    o = op._like(query, (*query.shape[:3], value.shape[3]))
    train = bool(wrt) or (is_grad_enabled() and any([x.requires_grad for x in (query, key, value)]))
    mode = TRAIN if train else STATS if stats else PLAIN
    plan = op.forward_plan(query, key, value, o, params, program, mode, wrt)
    reads = tuple([_how(source, read) for source, read in zip(sources, params)])
    scale = op.usual(query.shape[-1])
    return Forward(plan, o, program=program, mode=mode, stats=stats, wrt=wrt, reads=reads if any(reads) else (), extents=extents, scale=scale)


def _gradients(way: Forward, d_o: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, params: tuple, scalars: Any, scale: float) -> tuple | None:
    """Returns the gradients, or None if the operator must compute them. Hooks may have replaced saved tensors, so all are checked."""
    layouts = _look((q, k, v, o, d_o, stats)) if alone() else None
    if layouts is None:
        return None
    there = way.backward.get(layouts)
    if there is None:
        there = _find_backward(way, d_o, q, k, v, o, stats, params)
        if len(way.backward) >= 16:
            way.backward.clear()
        way.backward[layouts] = there
    return None if there is _OPERATOR else there.run(d_o, q, k, v, o, stats, params, scalars, scale)


def _find_backward(way: Forward, d_o: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, params: tuple) -> Any:
    strange = not all(op.is_dense(x) for x in (q, k, v, o)) or (d_o.stride(-1) not in (0, 1) and d_o.shape[-1] > 1)
    if strange or not stats.is_contiguous() or any([x.device != way.device or x.dtype != way.dtype for x in (q, k, v, o, d_o)]):
        return _OPERATOR
    out = (*q.shape[:3], v.shape[3])
    op._there(q, params, (("o", o, out, q.dtype), ("d_o", d_o, out, q.dtype), ("stats", stats, q.shape[:3], torch.float32)))
    made = tuple([op._like(x, x.shape) for x in (q, k, v)])
    plan, types, order = op.backward_plan((q, k, v, o, d_o, *made), params, way.program, way.wrt)
    return Backward(plan, made, list(zip(way.wrt, types)), [way.wrt[n] for n in order])


class Attention(torch.autograd.Function):
    """The autograd function for plain tensors, which bypasses the operator."""

    @staticmethod
    def forward(ctx: Any, call: tuple, q: Any, k: Any, v: Any, *params: Any) -> Any:
        way, scale, scalars = ctx.call = call
        o, stats = way.run(q, k, v, params, scalars, scale)
        ctx.save_for_backward(q, k, v, o, stats[0] if way.maxima else stats, *params)
        if not way.with_stats:
            return o
        ctx.set_materialize_grads(False)
        return o, stats

    @staticmethod
    def backward(ctx: Any, d_o: Any, d_stats: Any = None) -> Any:
        way, scale, scalars = ctx.call
        q, k, v, o, stats, *params = ctx.saved_tensors
        if d_o is None and d_stats is None:
            return (None,) * (4 + len(params))
        if way.maxima and d_stats is not None:
            # The maxima have no gradient.
            d_stats = d_stats[0]
        made = None
        if d_stats is None and not is_grad_enabled():
            made = _gradients(way, d_o, q, k, v, o, stats, tuple(params), scalars, scale)
        if made is None:
            made = op.gradients(d_o, d_stats, q, k, v, o, stats, params, list(scalars), way.program, scale, way.wrt)
        return None, *made


# Bypasses the part of `Function.apply` for torch.func transforms, which are not active here.
_apply = super(torch.autograd.Function, Attention).apply
