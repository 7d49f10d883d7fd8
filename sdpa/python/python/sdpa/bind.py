"""Prepares captured tensors for the executors: the part that a call reads, with the declared type, dense."""

from __future__ import annotations

import weakref
from typing import Any

from .errors import one
from .tracing import HELD, Parameter

_AXES = ("batch", "head", "q", "k")
_I32 = (-(2**31), 2**31 - 1)
# Keyed by the id of a tensor: the tensor, its version, and its smallest and largest element.
_SPANS: dict[int, tuple] = {}


def span(tensor: Any) -> tuple[int, int] | None:
    """Returns the smallest and the largest element of an integer tensor, computed once per version. Returns None if a compiler has no values yet."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        tensor = torch.as_tensor(tensor)
    if not tensor.numel():
        return (0, 0)
    try:
        version = (tensor._version, tensor.data_ptr())
    except RuntimeError:  # inference tensors count no versions, and those of compilers have no memory
        version = None
    there = _SPANS.get(id(tensor))
    if there is not None and there[0]() is tensor and there[1] == version and version is not None:
        return there[2]
    if not _readable(tensor):
        return None
    if hasattr(tensor, "full_tensor"):  # of a DTensor, all shards
        tensor = tensor.full_tensor()
    least, greatest = torch.aminmax(tensor.detach())
    made = int(least), int(greatest)
    if version is not None:
        number = id(tensor)
        _SPANS[number] = weakref.ref(tensor, lambda _: _SPANS.pop(number, None)), version, made
    return made


def _readable(tensor: Any) -> bool:
    """Returns true if the elements can be read now."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        rule = "a call with it before the capture: convert the tensor to int32, or call the attention once before capturing"
        raise one("int64 tensor that the score_mod or mask reads", "its first use during CUDA graph capture", rule)
    return True


def narrowed(tensor: Any, name: str) -> Any:
    """Converts an int64 tensor to int32, after checking that its elements fit."""
    import torch

    if tensor.dtype != torch.int64:
        return tensor
    outside(name, span(tensor))
    return tensor.to(torch.int32)


def outside(name: str, known: tuple[int, int] | None) -> None:
    """Rejects int64 elements that do not fit into i32."""
    if known is not None and not (_I32[0] <= known[0] and known[1] <= _I32[1]):
        rule = "elements that fit 32 bits: renumber ids with `torch.unique(ids, return_inverse=True)[1]`, or subtract the minimum"
        raise one(name, f"an int64 tensor of elements from {known[0]} to {known[1]}", rule)


def bound(parameter: Parameter, extents: tuple[int, int, int, int], device: Any, later: bool = False) -> Any:
    """Returns the tensor of a parameter for a call over these extents (batch, heads, queries, keys), using differentiable operations. With `later`, the
    operator checks and narrows int64."""
    import torch

    tensor = parameter.source
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.device != device:
        rule = f"{device}, the device of the query" + ("; for a number that changes, use sdpa.scalar(name, x)" if tensor.numel() == 1 else "")
        raise one(f"parameter {parameter.name} device", tensor.device, rule)
    # Selects from the last axis backwards, so that the indices of earlier axes stay valid.
    for dim in range(len(parameter.picks) - 1, -1, -1):
        pick = parameter.picks[dim]
        if pick is not None:
            tensor = tensor.select(dim, pick)
    if parameter.order != tuple(range(len(parameter.order))):
        tensor = tensor.permute(parameter.order)
    for dim, start, need in parts(parameter, tensor.shape, extents):
        tensor = tensor.narrow(dim, start, need)
    dtype = _DTYPES(torch)[parameter.dtype]
    if str(tensor.dtype).rsplit(".", 1)[-1] not in HELD[parameter.dtype]:
        raise one(f"parameter {parameter.name}", f"{tensor.dtype}", f"{parameter.dtype}, as declared; convert the tensor first")
    if tensor.dtype == torch.int64 and dtype == torch.int32:
        if later:
            return tensor.contiguous()
        # The complete tensor is identical in each call. Its range is checked first; that of the part only if the complete one does not fit.
        whole = span(parameter.source)
        if whole is not None and not (_I32[0] <= whole[0] and whole[1] <= _I32[1]):
            outside(f"parameter {parameter.name}", span(tensor))
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def parts(parameter: Parameter, shape: Any, extents: tuple[int, int, int, int]) -> list[tuple[int, int, int]]:
    """Returns the part of a tensor that a call over these extents reads, if it is not all of it: (axis, start, length)."""
    short = lambda least, axis: one(  # noqa: E731
        f"parameter {parameter.name}", f"shape {tuple(parameter.source.shape)}", f"at least {least} elements along the axis {axis}, which this call reads"
    )  # fmt: skip
    if parameter.is_table:
        if tuple(shape) != parameter.axes:
            raise one(f"parameter {parameter.name}", f"shape {tuple(shape)}", f"a table of shape {parameter.axes}, as traced or declared")
        for dim, axis, start in parameter.starts:
            if shape[dim] < start + extents[axis]:
                raise short(start + extents[axis], _AXES[axis])
        return []
    found = []
    for dim, (axis, start) in enumerate(zip(parameter.axes, parameter.starts)):
        need = extents[_AXES.index(axis)]
        if shape[dim] < start + need:
            raise short(start + need, axis)
        if shape[dim] != need:
            found.append((dim, start, need))
    return found


def _DTYPES(torch: Any) -> dict:
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "bool": torch.bool}
