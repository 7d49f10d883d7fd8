"""Exceptions, by what has to change."""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class SpecError(ValueError):
    """A call violates rules. The exception lists all violations with field, value and rule."""

    def __init__(self, errors: list[tuple[str, str, str]]):
        self.errors = [(str(field), str(value), str(rule)) for field, value, rule in errors]
        super().__init__("\n".join(f"{field}: got {value}, expected {rule}" for field, value, rule in self.errors))

    def __reduce__(self):
        return type(self), (self.errors,)


class UnsupportedError(NotImplementedError):
    """The call is valid, but this executor does not support it; with its reasons. `before` has the executors that were tried before, with their reasons."""

    def __init__(self, executor: str, reasons: list[str], before: list[tuple[str, list[str]]] = ()):  # type: ignore[assignment]
        self.executor, self.reasons, self.before = executor, list(reasons), [(who, list(why)) for who, why in before]
        asked = [*self.before, (executor, self.reasons)]
        super().__init__("\n".join(f"{who}: {reason}" for who, why in asked for reason in why))

    def __reduce__(self):
        return type(self), (self.executor, self.reasons, self.before)


class EnvironmentError(RuntimeError):  # noqa: A001 - the name says what failed
    """A library, a driver, a device or memory failed."""


class ParallelError(RuntimeError):
    """Ranks of a context-parallel call do not run the same problem, or one of them failed or did not answer. `field` is the first field that differs between
    ranks, and `ranks` are the ranks with another value, or those that failed."""

    def __init__(self, text: str, field: str | None = None, ranks: list[int] = ()):  # type: ignore[assignment]
        self.field, self.ranks = field, list(ranks)
        super().__init__(text)

    def __reduce__(self):
        return type(self), (str(self), self.field, self.ranks)


class TracingError(TypeError):
    """A score_mod or mask_mod uses something that the expression language does not have. The message has the source line and an alternative."""

    def __init__(self, what: str, instead: str, where: str | None = None):
        self.what, self.instead, self.where = what, instead, source_line() if where is None else where
        at = f"{self.where}: " if self.where else ""
        super().__init__(f"{at}{what}; {instead}")

    def __reduce__(self):
        return _again, (type(self), self.what, self.instead, self.where, str(self))


def _again(kind, what, instead, where, text):
    error = kind.__new__(kind, text)
    error.what, error.instead, error.where = what, instead, where
    error.args = (text,)
    return error


def one(field: str, value: object, rule: str) -> SpecError:
    """Returns an error about one field."""
    return SpecError([(field, str(value), rule)])


def source_line() -> str:
    """Returns the innermost source line of the user, outside of this package, PyTorch and NumPy."""
    import linecache

    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        parts = file.replace("\\", "/").split("/")
        ours = os.path.dirname(os.path.abspath(file)) == _HERE
        if not ours and "torch" not in parts and "numpy" not in parts and not file.startswith("<"):
            line = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}" + (f": `{line}`" if line else "")
        frame = frame.f_back
    return ""
