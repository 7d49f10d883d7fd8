"""Attention over NumPy arrays, or anything that NumPy can view without a copy (`numpy.from_dlpack`), on the CPU executor."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from .bind import outside, parts
from .errors import SpecError, one
from .mods import Kept, joined, program
from .tracing import DTYPES, HELD, Parameter

_FLOATS = {"float32": "f32", "float16": "f16"}


def attention(q: Any, k: Any, v: Any, score_mod: Kept | None = None, mask: Kept | None = None, scale: float | None = None, threads: int = 0) -> tuple:
    """Computes `softmax(mask(score_mod(q·kᵀ · scale))) · v` over (batch, heads, seq, dim), float32 or float16. Returns the output and stats, the log-sum-exp of
    each row."""
    q, k, v = _operands(q, k, v)
    text, tensors, scalars = joined(score_mod, mask)
    o = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    stats = np.empty(q.shape[:3], np.float32)
    made = program(text).plan(None, _FLOATS[q.dtype.name], [_layout(x) for x in (q, k, v, o)], True, [])
    params, kept = _params(tensors, q, k, score_mod, mask)
    made.run([_at(x) for x in (q, k, v, o)], _at(stats), params, [s.value for s in scalars], [], _scale(scale, q), _threads(threads), 0, 0)
    del kept
    return o, stats


def attention_backward(
    d_o: Any, q: Any, k: Any, v: Any, o: Any, stats: Any, score_mod: Kept | None = None, mask: Kept | None = None, scale: float | None = None, threads: int = 0
) -> tuple:
    """Returns the gradients of `q`, `k`, `v`, and those of floating-point parameters of the score_mod, by name."""
    q, k, v = _operands(q, k, v)
    o, d_o = (np.ascontiguousarray(x, dtype=q.dtype) for x in (o, d_o))
    text, tensors, scalars = joined(score_mod, mask)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    of_score = score_mod.tensors if score_mod is not None else ()
    wrt = [(t.name, t.dtype) for t in of_score if t.dtype in ("f32", "f16")]
    params, kept = _params(tensors, q, k, score_mod, mask)
    names = [t.name for t in tensors]
    sums = {name: np.empty(kept[names.index(name)].shape, np.float32 if dtype == "f32" else np.float16) for name, dtype in wrt}
    layouts = [_layout(x) for x in (q, k, v, o, d_o, dq, dk, dv)]
    made = program(text).plan(None, _FLOATS[q.dtype.name], layouts, True, wrt)
    stats = np.ascontiguousarray(stats, np.float32)
    gradients = [_at(sums[name]) for name, _ in wrt]
    addresses = [_at(x) for x in (q, k, v, o, d_o, dq, dk, dv)]
    made.run(addresses, _at(stats), params, [s.value for s in scalars], gradients, _scale(scale, q), _threads(threads), 0, 0)
    return dq, dk, dv, sums


def _seen(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x)


def _operands(*given: Any) -> list[np.ndarray]:
    arrays, errors = [_seen(x) for x in given], []
    for name, x in zip("qkv", arrays):
        if x.ndim != 4:
            errors.append((f"{name} shape", x.shape, "(batch, heads, seq, dim)"))
        if x.dtype.name not in _FLOATS:
            errors.append((f"{name} dtype", x.dtype, "one of float32, float16"))
        elif x.dtype != arrays[0].dtype:
            errors.append((f"{name} dtype", x.dtype, f"{arrays[0].dtype}, the type of q"))
        if not x.dtype.isnative:
            errors.append((f"{name} dtype", x.dtype, "this machine's byte order"))
    if errors:
        raise SpecError(errors)
    odd = lambda x: x.strides[3] != x.itemsize or any(s < 0 or s % x.itemsize for s in x.strides) or not x.flags.aligned  # noqa: E731
    return [np.ascontiguousarray(x) if odd(x) else x for x in arrays]


def _layout(x: np.ndarray) -> tuple:
    low = _at(x) & 15
    return x.shape, tuple(s // x.itemsize for s in x.strides), (low & -low) or 16


def _at(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _scale(scale: float | None, q: np.ndarray) -> float:
    return float(scale) if scale is not None else 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0


def _threads(threads: int) -> int:
    return threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def _span(source: Any) -> tuple[int, int]:
    """Returns the smallest and the largest element of an integer array."""
    x = _seen(source)
    return (int(x.min()), int(x.max())) if x.size else (0, 0)


def _params(tensors: tuple, q: np.ndarray, k: np.ndarray, *of: Kept | None) -> tuple[list, list]:
    """Returns addresses, element types and sizes of the tensors of a call, and the references that keep them alive."""
    extents = (*q.shape[:3], k.shape[2])
    for traced in of:
        if traced is not None:
            traced.check(extents, traced.sources, _span)
    kept = [_bound(t, extents) for t in tensors]
    return [(_at(x), t.dtype, x.size) for t, x in zip(tensors, kept)], kept


def _bound(parameter: Parameter, extents: tuple) -> np.ndarray:
    x = _seen(parameter.source)
    x = x[tuple(slice(None) if pick is None else pick for pick in parameter.picks)].transpose(parameter.order)
    for dim, start, need in parts(parameter, x.shape, extents):
        x = x[(slice(None),) * dim + (slice(start, start + need),)]
    wanted = {ours: theirs for theirs, ours in DTYPES.items()}[parameter.dtype]
    if x.dtype.name not in HELD[parameter.dtype]:
        raise one(f"parameter {parameter.name}", f"{x.dtype}", f"{parameter.dtype}, as declared; convert the array first")
    if x.dtype.name == "int64":
        outside(f"parameter {parameter.name}", _span(x))
    return np.ascontiguousarray(x, dtype=wanted)
