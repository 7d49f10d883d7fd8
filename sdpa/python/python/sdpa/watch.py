"""Rejects operations that a trace cannot represent: random numbers, and autograd functions with custom gradients."""

from __future__ import annotations

import sys
import types
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import TracingError
from .values import CURRENT, Operators, Unread

_APPLY = torch.autograd.Function.apply.__func__.__code__
_OWN_GRADIENT = (
    "a torch.autograd.Function is applied to a traced value, and its backward would be lost",
    "write it with operations that have the gradient you want, or give the gradient by hand: sdpa.ScoreMod.from_text('value, gradient')",
)


class _Random(TorchDispatchMode):
    """Detects random numbers: they would be drawn once for all scores, and never again when the trace is reused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TracingError(f"random numbers are drawn ({func})", "draw a tensor before the call, and read it by b, h, q_idx, kv_idx")
        return func(*args, **(kwargs or {}))


def _traced(values: Any) -> bool:
    return any(isinstance(x, (Operators, Unread)) for x in values)


def watched(fn: Callable, args: tuple) -> Any:
    """Runs a function under a profiler, which Python calls at every call. It detects even an autograd function that only returns its input."""
    before = sys.getprofile()

    def seen(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is _APPLY and _traced((*frame.f_locals["args"], *frame.f_locals["kwargs"].values())):
            raise TracingError(*_OWN_GRADIENT)
        if before is not None:
            before(frame, event, arg)

    # A profiler written in C cannot be called from here: cProfile pauses.
    paused = before if before is not None and not isinstance(before, (types.FunctionType, types.MethodType)) else None
    if paused is not None:
        if not hasattr(paused, "disable"):
            with _Random():
                return fn(*args)
        paused.disable()
        before = None
    with _Random():
        CURRENT.watch = seen
        sys.setprofile(seen)
        try:
            return fn(*args)
        finally:
            sys.setprofile(before)
            CURRENT.watch = None
            if paused is not None:
                paused.enable()
