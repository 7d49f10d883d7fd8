"""Reads tensors through DLPack's exchange API if PyTorch has it (from 2.10 on), and otherwise through their attributes."""

from __future__ import annotations

from typing import Any

import torch

from . import _native

PLAIN = (torch.Tensor, torch.nn.Parameter)
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.bool: "bool"}


class Attributes:
    """Implements `_native.Exchange` with attributes."""

    def look(self, tensors: tuple) -> tuple | None:
        """Returns everything that determines the plan of a call over these tensors, or None if one of them is not plain memory."""
        try:
            if any([type(x) not in PLAIN or x.is_neg() for x in tensors]):
                return None
            return tuple([(x.dtype, x.device, x.shape, x.stride(), x.requires_grad, x.data_ptr() & 15) for x in tensors])
        except RuntimeError:  # sparse and nested tensors have no strides, those of transforms no memory
            return None

    def run(self, plan: Any, operands: tuple, stats: Any, params: tuple, scalars: Any, gradients: tuple, *rest: Any) -> None:
        """Runs a plan over tensors that `look` has read."""
        *rest, workspace = rest
        at = lambda x: 0 if x is None else x.data_ptr()  # noqa: E731
        given = [(x.data_ptr(), DTYPES[x.dtype], x.numel()) for x in params]
        plan.run([at(x) for x in operands], at(stats), given, scalars, [at(x) for x in gradients], *rest, at(workspace))


table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
EXCHANGE: Any = Attributes() if table is None else _native.Exchange(table, PLAIN)
