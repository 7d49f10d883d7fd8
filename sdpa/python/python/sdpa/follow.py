"""Functions under `torch.compile`: they are traced once outside of the compiler, so that `watch` can examine them."""

from __future__ import annotations

import types
from typing import Any, Callable

from torch._dynamo.comptime import comptime

from . import tracing
from .errors import TracingError


def followed(fn: Callable, with_score: bool) -> None:
    """Traces the function outside of the compiler, which runs neither a dispatch mode nor a profiler. Errors have the user's source line there, too."""
    comptime(_again)


def _again(context: Any) -> None:
    try:
        fn, with_score = (context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker() for name in ("fn", "with_score"))
        function = _real(fn, context._ComptimeContext__tx.output.side_effects)
        tracing.trace(function, "s", with_score.as_python_constant())
    except TracingError:
        raise
    except Exception:  # noqa: BLE001 - a capture that exists inside of the compiler alone, or a compiler of another shape: it follows the function as it is
        return


def _real(variable: Any, effects: Any) -> Any:
    """Returns the Python object of a compiler variable; for a tensor, one without memory."""
    variable = variable.realize()
    if hasattr(variable, "code") and hasattr(variable, "f_globals"):
        cells = () if variable.closure is None else tuple([types.CellType(_real(effects.load_cell(cell), effects)) for cell in variable.closure.items])
        defaults = None if variable.defaults is None else tuple([_real(x, effects) for x in variable.defaults.items])
        return types.FunctionType(variable.code.as_python_constant(), variable.f_globals, "score_mod", defaults, cells)
    if hasattr(variable, "obj") and hasattr(variable, "fn"):
        return types.MethodType(variable.fn, _real(variable.obj, effects))
    if hasattr(variable, "proxy"):
        return variable.proxy.node.meta["example_value"]
    for name in ("fn", "fn_cls", "value"):
        if hasattr(variable, name):
            return getattr(variable, name)
    return variable.as_python_constant()
