"""Captured tensors as the executors read them: the part that this call needs, of the declared type, dense."""

from __future__ import annotations

from typing import Any

from .errors import one
from .tracing import Parameter


def bound(parameter: Parameter, extents: tuple[int, int, int, int], device: Any) -> Any:
    """The tensor of a parameter in a call over these extents (batch, heads, queries, keys), by operations that have gradients."""
    import torch

    tensor = parameter.source
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.device != device:
        rule = f"the query's, {device}" + ("; a number that changes is sdpa.scalar(name, x)" if tensor.numel() == 1 else "")
        raise one(f"parameter {parameter.name} device", tensor.device, rule)
    # Picks from behind, so that places of axes in front stay.
    for dim in range(len(parameter.picks) - 1, -1, -1):
        pick = parameter.picks[dim]
        if pick is not None:
            tensor = tensor.select(dim, pick)
    if parameter.order != tuple(range(len(parameter.order))):
        tensor = tensor.permute(parameter.order)
    for dim, (axis, start) in enumerate(zip(parameter.axes, parameter.starts)):
        need = extents[("batch", "head", "q", "k").index(axis)]
        if tensor.shape[dim] < start + need:
            of, rule = tuple(parameter.source.shape), f"at least {start + need} along {axis}, as many as this call reads"
            raise one(f"parameter {parameter.name}", f"of shape {of}", rule)
        if tensor.shape[dim] != need:
            tensor = tensor.narrow(dim, start, need)
    dtype = _DTYPES(torch)[parameter.dtype]
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def _DTYPES(torch: Any) -> dict:
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "bool": torch.bool}
