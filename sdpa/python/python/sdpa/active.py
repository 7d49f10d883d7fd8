"""The context in which attention runs over several ranks."""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedError

# A variable of the process: autograd calls functions again in threads of its own.
CURRENT: Any = None
# Whether a context has ended in which reentrant checkpointing ran a call, and may run it again.
ENDED = False


def refuse(what: str) -> None:
    """Raises an error for a function that does not run over several ranks, inside of a context."""
    if CURRENT is not None:
        raise UnsupportedError("parallel", [f"{what} inside of sdpa.context_parallel; call it outside, or call sdpa.flex_attention over shards of dense tensors"])
