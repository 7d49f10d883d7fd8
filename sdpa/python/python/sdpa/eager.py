"""Calls outside of compilers: what was found out about one of a kind is kept, and the next goes straight to its plan.

The operator of `op` says the same to PyTorch's compilers, modes and transforms; before plain tensors its dispatch takes longer than attention of a few
tokens does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import forward_ad

from . import op
from .bind import bound
from .masks import BlockMask, MaskMod, mask_of
from .mods import Kept, joined
from .op import PLAIN, STATS, TRAIN

_MOST = 512
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

try:
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C import _is_any_autocast_enabled as autocast
    from torch._C._functorch import maybe_current_level
except ImportError:  # of a PyTorch that has none of these: the operator serves it

    def alone() -> bool:
        """Whether no compiler, mode or transform looks on."""
        return False

    def autocast() -> bool:
        """Whether autocast may be on for some device."""
        return True
else:

    def alone() -> bool:
        """Whether no compiler, mode or transform looks on."""
        modes = _len_torch_dispatch_stack() or _len_torch_function_stack()
        return not modes and maybe_current_level() is None and forward_ad._current_level < 0 and _get_tracing_state() is None


class Way:
    """What is done with calls of one kind: alike in layouts, types, score_mod and mask."""

    def __init__(self, plan: Any, results: tuple, device: torch.device, dtype: torch.dtype):
        self.plan, self.device, self.dtype = plan, device, dtype
        # Extents and strides of what is made.
        self.results = results

    def made(self) -> list:
        """Memory for the results."""
        return [torch.empty_strided(shape, strides, dtype=self.dtype, device=self.device) for shape, strides in self.results]


class Forward(Way):
    """A forward pass, and the backward passes that came after it, by the layouts that gradients had."""

    def __init__(self, *given: Any, program: str, mode: int, stats: bool, wrt: list, binds: tuple, extents: tuple, scale: float):
        super().__init__(*given)
        self.program, self.mode, self.stats, self.wrt, self.binds, self.extents, self.scale = program, mode, stats, wrt, binds, extents, scale
        # Extents and strides of stats.
        self.rows = extents[:3], (extents[1] * extents[2], extents[2], 1)
        self.backward: dict[tuple, Any] = {}

    def __call__(self, q: Any, k: Any, v: Any, params: tuple, scalars: list, scale: float) -> tuple:
        (o,) = self.made()
        stats = None if self.mode == PLAIN else torch.empty_strided(*self.rows, dtype=torch.float32, device=self.device)
        at = 0 if stats is None else stats.data_ptr()
        op.run(self.plan, self.device, (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()), at, params, scalars, (), scale)
        return o, stats


class Backward(Way):
    """A backward pass; of each parameter that has a gradient the number, and the type that it is summed in."""

    def __init__(self, *given: Any, sums: list, order: list):
        super().__init__(*given)
        self.sums, self.order = sums, order

    def __call__(self, d_o: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, params: tuple, scalars: list, scale: float) -> tuple:
        made = dq, dk, dv = self.made()
        sums = [torch.empty(params[n].shape, dtype=dtype, device=self.device) for n, dtype in self.sums]
        operands = tuple([x.data_ptr() for x in (q, k, v, o, d_o, dq, dk, dv)])
        op.run(self.plan, self.device, operands, stats.data_ptr(), params, scalars, [sums[n].data_ptr() for n in self.order], scale)
        if not params:
            return tuple(made)
        of = {n: x.to(params[n].dtype) for (n, _), x in zip(self.sums, sums)}
        return (*made, *[of.get(n) for n in range(len(params))])


_WAYS: dict[tuple, Any] = {}
# What the operator is asked for: operands that are copied, one parameter of a score_mod and a mask.
_OPERATOR = object()


def attend(
    query: Any, key: Any, value: Any, score: Kept | None, block_mask: Any, scale: float | None, gqa: bool | None, stats: bool, sink: Any
) -> tuple | None:
    """The output, and stats where they were asked for; or none, where the operator is to be asked. `gqa` is none where the caller has seen to heads."""
    if type(query) not in _TYPES or type(key) not in _TYPES or type(value) not in _TYPES or not alone():
        return None
    mask, shape = (block_mask.mask, block_mask.shape) if isinstance(block_mask, BlockMask) else (block_mask, None)
    tensors = score.tensors if score is not None else ()
    tensors = (*tensors, *mask.tensors) if mask is not None and mask.tensors else tensors
    grad = torch.is_grad_enabled()
    train = grad and (query.requires_grad or key.requires_grad or value.requires_grad)
    parts: list = []
    try:
        for t in tensors:
            x = t.source
            needs = grad and x.requires_grad
            if type(x) not in _TYPES or x.is_neg():
                return None
            parts += (t.reading, x.shape, x.stride(), x.dtype, x.device, needs)
            train = train or needs
        if sink is not None:
            needs = grad and sink.requires_grad
            if type(sink) not in _TYPES or sink.is_neg():
                return None
            parts += (sink.shape, sink.stride(), sink.dtype, sink.device, needs)
            train = train or needs
        if query.is_neg() or key.is_neg() or value.is_neg():
            return None
        at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        kind = (
            None if score is None else score.quoted, None if mask is None else mask.quoted, shape, sink is not None, gqa, train, stats,
            torch.are_deterministic_algorithms_enabled(), (at[0] | at[1] | at[2]) & 15 and tuple([x & 15 for x in at]),
            query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
            query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), *parts,
        )  # fmt: skip
    except (RuntimeError, AttributeError):  # sparse and nested tensors have no strides, arrays of NumPy's no such names
        return None
    way = _WAYS.get(kind)
    if way is None:
        way = _find(query, key, value, score, mask, block_mask, gqa, train, stats, sink)
        while len(_WAYS) >= _MOST:
            try:
                _WAYS.pop(next(iter(_WAYS)), None)
            except (RuntimeError, StopIteration):  # another thread was here
                break
        _WAYS[kind] = way
    if way is _OPERATOR:
        return None
    params: tuple = ()
    if tensors:
        params = tuple([bound(t, way.extents, way.device) if binds else t.source for t, binds in zip(tensors, way.binds)])
    if sink is not None:
        params = (*params, sink.contiguous())
    scalars: Any = ()
    if (score is not None and score.scalars) or (mask is not None and mask.scalars):
        scalars = [s.value for kept in (score, mask) if kept is not None for s in kept.scalars]
    scale = way.scale if scale is None else float(scale)
    if way.mode != TRAIN:
        return way(query, key, value, params, scalars, scale)
    made = _apply(way, scale, scalars, query, key, value, *params)
    return made if way.stats else (made, None)


def _find(query, key, value, score, mask, block_mask, gqa, train, stats, sink) -> Any:
    """What is done with such a call, everything about it looked at."""
    from .flex import _no_gradient, _shapes

    op.mistakes(query, key, value)
    if gqa is not None:
        _shapes(query, key, value, gqa)
    extents = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    mask_of(block_mask, extents)
    program, tensors, scalars = joined(score, mask, sink is not None, torch.are_deterministic_algorithms_enabled())
    apart = [kept for kept in (score, mask) if kept is not None]
    if len(tensors) != sum(len(kept.tensors) for kept in apart) or len(scalars) != sum(len(kept.scalars) for kept in apart):
        return _OPERATOR
    if query.device.type == "meta" or not (op.is_dense(query) and op.is_dense(key) and op.is_dense(value)):
        return _OPERATOR
    params = [bound(t, extents, query.device) for t in tensors]
    binds = tuple(p is not t.source for p, t in zip(params, tensors))
    params += [sink.contiguous()] if sink is not None else []
    wrt = [n for n, t in enumerate(params) if torch.is_grad_enabled() and t.requires_grad]
    if wrt and mask is not None:
        _no_gradient(mask, params, tensors)
    op._there(query, params)
    o = op._like(query, (*query.shape[:3], value.shape[3]))
    mode = TRAIN if train else STATS if stats else PLAIN
    plan = op.forward_plan(query, key, value, o, params, program, mode, wrt)
    results = ((tuple(o.shape), o.stride()),)
    scale = 1.0 / math.sqrt(query.shape[-1])
    return Forward(plan, results, query.device, query.dtype, program=program, mode=mode, stats=stats, wrt=wrt, binds=binds, extents=extents, scale=scale)


def _gradients(way: Forward, d_o: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, params: tuple, scalars: list, scale: float) -> tuple | None:
    """What the backward pass gives, or none where the operator is to be asked. Hooks may have brought what was saved from elsewhere: all of it is looked at."""
    operands = (q, k, v, o, d_o)
    if not alone() or any([type(x) not in _TYPES or x.dtype is not way.dtype or x.is_neg() for x in operands]):
        return None
    at = [x.data_ptr() for x in operands]
    low = (at[0] | at[1] | at[2] | at[3] | at[4]) & 15 and tuple([x & 15 for x in at])
    kind = (low, stats.shape, stats.stride(), *[x.device for x in operands], *[x.shape for x in operands], *[x.stride() for x in operands])
    there = way.backward.get(kind)
    if there is None:
        there = _find_backward(way, d_o, q, k, v, o, stats, params)
        if len(way.backward) >= 16:
            way.backward.clear()
        way.backward[kind] = there
    if there is _OPERATOR:
        return None
    return there(d_o, q, k, v, o, stats, params, scalars, scale)


def _find_backward(way: Forward, d_o: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, params: tuple) -> Any:
    strange = not all(op.is_dense(x) for x in (q, k, v, o)) or (d_o.stride(-1) not in (0, 1) and d_o.shape[-1] > 1)
    if strange or not stats.is_contiguous() or q.device != way.device:
        return _OPERATOR
    out = (*q.shape[:3], v.shape[3])
    op._there(q, params, (("o", o, out, q.dtype), ("d_o", d_o, out, q.dtype), ("stats", stats, q.shape[:3], torch.float32)))
    made = [op._like(x, x.shape) for x in (q, k, v)]
    plan, types, order = op.backward_plan((q, k, v, o, d_o, *made), params, way.program, way.wrt)
    return Backward(plan, tuple((tuple(x.shape), x.stride()) for x in made), q.device, q.dtype, sums=list(zip(way.wrt, types)), order=order)


class Attention(torch.autograd.Function):
    """The operator's gradient in front of plain tensors."""

    @staticmethod
    def forward(ctx: Any, way: Forward, scale: float, scalars: list, q: Any, k: Any, v: Any, *params: Any) -> Any:
        o, stats = way(q, k, v, params, scalars, scale)
        ctx.save_for_backward(q, k, v, o, stats, *params)
        ctx.set_materialize_grads(False)
        ctx.rest = way, scale, scalars
        return (o, stats) if way.stats else o

    @staticmethod
    def backward(ctx: Any, d_o: Any, d_stats: Any = None) -> Any:
        way, scale, scalars = ctx.rest
        q, k, v, o, stats, *params = ctx.saved_tensors
        if d_o is None and d_stats is None:
            return (None,) * (6 + len(params))
        made = None
        if d_stats is None and not torch.is_grad_enabled():
            made = _gradients(way, d_o, q, k, v, o, stats, params, scalars, scale)
        if made is None:
            made = op.gradients(d_o, d_stats, q, k, v, o, stats, params, list(scalars), way.program, scale, way.wrt)
        return None, None, None, *made


# Without what `Function.apply` does for transforms of torch.func, which are not here.
_apply = super(torch.autograd.Function, Attention).apply
