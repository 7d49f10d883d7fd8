"""Reuse of traces. The values that a function reads are compared with those of an earlier trace, and an equal function is not traced again.

The bytecode of a function determines which surrounding names it reads, and which attributes of these. Numbers are compared by value, tensors by type and
shape, and functions by what they read in turn. A function with values that cannot be compared is traced in each call.
"""

from __future__ import annotations

import builtins
import dis
import math
import types
from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode

from .mods import Kept
from .tracing import Array, Scalar
from .values import FUNCTIONS, Operators, Unread

# Maximum number of functions, and of states of the values they read.
_MOST = 512
# Maximum length of lists and dictionaries that are compared.
_WIDE = 64

# Functions without side effects, whose results depend on their arguments only.
_PURE = {getattr(torch, name) for name in FUNCTIONS if callable(getattr(torch, name, None))}
_PURE |= {getattr(of, name) for of in (torch.special, torch.nn.functional) for name in FUNCTIONS if callable(getattr(of, name, None))}
_PURE.add(torch.nn.functional.logsigmoid)
_PURE |= {value for value in vars(math).values() if callable(value)}
_PURE |= {getattr(builtins, name) for name in "abs all any bool divmod enumerate float int isinstance len max min pow range reversed round sum tuple zip".split()}

_BY_VALUE = (int, bool, str, type(None), torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
# Attributes of tensors that are compared again.
_OF_TYPE = ("shape", "dtype", "ndim")


class _Unknown(Exception):
    """The values that a function reads cannot be compared."""


class _Code:
    """The names that a function's code reads from its surroundings, with the attributes it accesses directly."""

    __slots__ = ("code", "last", "reads")

    def __init__(self, code: types.CodeType):
        self.code, self.reads = code, _reads(code)
        self.last: _Last | None = None


def _reads(code: types.CodeType) -> tuple | None:
    """Returns `(where, name or number, attributes)` of everything that is read, or None if the code does more than read, compute and return."""
    self_name = code.co_varnames[0] if code.co_argcount else None
    found: dict[tuple, None] = {}
    root: tuple | None = None
    for one in dis.get_instructions(code):
        name = one.opname
        if name in ("EXTENDED_ARG", "CACHE"):
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            root = None if root is None else (root[0], root[1], (*root[2], one.argval))
            if root is not None:
                continue
        if root is not None:
            found[root] = None
        root = None
        if name == "LOAD_GLOBAL":
            root = ("global", one.argval, ())
        elif name == "LOAD_DEREF":
            root = ("free", code.co_freevars.index(one.argval) if one.argval in code.co_freevars else -1, ())
        elif name.startswith("LOAD_FAST"):
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            if self_name in names[:-1]:
                found[("self", self_name, ())] = None
            if names[-1] == self_name:
                root = ("self", self_name, ())
        elif name.startswith("STORE_FAST") and self_name in (one.argval if isinstance(one.argval, tuple) else (one.argval,)):
            return None
        elif name.startswith(("MAKE_", "IMPORT_", "DELETE_", "YIELD_", "LOAD_CLOSURE", "LOAD_NAME", "LOAD_CLASS", "LOAD_FROM", "LOAD_SUPER", "LOAD_LOCALS", "LOAD_BUILD")):
            return None
        elif name in ("STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "STORE_ATTR", "STORE_SUBSCR", "RETURN_GENERATOR", "SEND", "RAISE_VARARGS"):
            return None
    return None if any(where == "free" and name < 0 for where, name, _ in found) else tuple(found)


_CODES: dict[int, _Code] = {}


def _code(code: types.CodeType) -> _Code:
    # Keyed by id, because the hash of a code object covers its contents. The entry keeps the object alive, so that the id stays unique.
    there = _CODES.get(id(code))
    if there is None:
        if len(_CODES) >= _MOST:
            _CODES.clear()
        there = _CODES[id(code)] = _Code(code)
    return there


def _values(fn: types.FunctionType, reads: tuple, owner: Any) -> list:
    """Returns the current values that the function reads."""
    values = []
    for where, name, attributes in reads:
        if where == "free":
            value = fn.__closure__[name].cell_contents
        elif where == "global":
            there = fn.__globals__
            value = there[name] if name in there else fn.__builtins__[name]
        elif owner is None:
            continue  # an argument like the others
        else:
            value = owner
        for attribute in attributes:
            value = getattr(value, attribute)
        values.append(value)
    return values


def _function(fn: types.FunctionType, owner: Any, found: list) -> tuple:
    code = _code(fn.__code__)
    if code.reads is None:
        raise _Unknown
    token: list = [code, *[_token(value, found) for value in _values(fn, code.reads, owner)]]
    if fn.__defaults__ is not None:
        token.append(_token(fn.__defaults__, found))
    if fn.__kwdefaults__ is not None:
        token.append(_token(fn.__kwdefaults__, found))
    return tuple(token)


def _token(x: Any, found: list) -> Any:
    """Returns a token that is equal for values with which a function behaves equally. Tensors are appended to `found`."""
    kind = type(x)
    if kind in _TENSORS:
        found.append(x)
        return kind, x.dtype, x.shape
    if kind is float:
        return kind, x or str(x)
    if kind in _BY_VALUE:
        return kind, x
    if kind is types.FunctionType:
        return x if x in _PURE else _function(x, None, found)
    if kind in (types.BuiltinFunctionType, type) and x in _PURE:
        return x
    if kind is types.MethodType and type(x.__func__) is types.FunctionType:
        return "method", _function(x.__func__, x.__self__, found)
    if kind in (tuple, list, torch.Size) and len(x) <= _WIDE:
        return kind, *[_token(one, found) for one in x]
    if kind is dict and len(x) <= _WIDE:
        return kind, *[(_token(name, found), _token(one, found)) for name, one in x.items()]
    if kind is Scalar:
        found.append(x)
        return kind, id(x), x.name
    if kind is Array:
        found.append(x.source)
        return kind, type(x.source), str(x.source.dtype), tuple(x.source.shape)
    raise _Unknown


class _Watch(TorchFunctionMode):
    """Detects operations on tensors alone, whose values the trace may then contain."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not any(issubclass(kind, (Operators, Unread)) for kind in types):
            name = getattr(func, "__name__", "")
            of_type = name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _OF_TYPE
            self.alone = self.alone or not of_type
        return func(*args, **(kwargs or {}))


class _Template:
    """The trace of a function without the tensors that it reads: each call brings its own."""

    __slots__ = ("made", "numbers", "scalars")

    def __init__(self, made: Kept, numbers: list[int], scalars: list):
        # The index of each parameter's tensor among those found.
        self.numbers = numbers
        # Scalars are compared by id: a reference keeps the id unique.
        self.scalars = scalars
        self.made = made.over((None,) * len(numbers))


class _Last:
    """The values that functions of one code read most recently, if those were only numbers, scalars, tensors and PyTorch functions. Equal numbers and similar
    tensors give an equal trace; this check is faster than the search among all stored traces."""

    __slots__ = ("kind", "made", "numbers", "tensors", "values")

    def __init__(self, kind: type[Kept], values: list, made: Kept, numbers: list[int]):
        self.kind, self.made = kind, made
        # Only the type of tensors is stored, because each call may bring others. References to all other values keep their ids unique.
        self.values = [(type(x), x.dtype, x.shape) if type(x) in _TENSORS else x for x in values]
        found = [n for n, x in enumerate(values) if type(x) in _TENSORS or type(x) is Scalar]
        # The index of each parameter's value, and the number of distinct tensors.
        self.numbers, self.tensors = [found[n] for n in numbers], sum(type(x) in _TENSORS for x in values)

    @staticmethod
    def knows(values: list) -> bool:
        """Returns true if ids or types are sufficient to compare all of these."""
        tensors = [id(x) for x in values if type(x) in _TENSORS]
        rest = [x for x in values if type(x) not in (*_TENSORS, *_BY_VALUE, float, Scalar)]
        return len(set(tensors)) == len(tensors) and all(type(x) in _FUNCTIONS and x in _PURE for x in rest)

    def read_by(self, values: list) -> tuple | None:
        """Returns the tensors if the values give an equal trace."""
        if len(values) != len(self.values):
            return None
        for value, known in zip(values, self.values):
            if value is not known and (type(known) is not tuple or type(value) is not known[0] or value.dtype is not known[1] or value.shape != known[2]):
                return None
        if self.tensors > 1 and len({id(x) for x in values if type(x) in _TENSORS}) < self.tensors:
            return None
        return tuple([values[n] for n in self.numbers]) if self.numbers else ()


_NEVER = object()
_MADE: dict[tuple, Any] = {}


def kept(kind: type[Kept], fn: Callable) -> tuple[Kept, tuple]:
    """Returns `kind(fn)`, traced only if a value that the function reads has changed, and the tensors that it reads in this call."""
    function, owner = fn, None
    if type(fn) is not types.FunctionType:
        if isinstance(fn, kind):
            return fn, fn.sources if fn.tensors else ()
        if type(fn) is not types.MethodType or type(fn.__func__) is not types.FunctionType:
            return _traced(kind, fn)
        function, owner = fn.__func__, fn.__self__
    found: list = []
    values = None
    try:
        code = _code(function.__code__)
        if code.reads is not None and function.__kwdefaults__ is None:
            values = _values(function, code.reads, owner)
            values += function.__defaults__ or ()
            last = code.last
            if last is not None and last.kind is kind:
                sources = last.read_by(values)
                if sources is not None:
                    return last.made, sources
        key: tuple = (kind, _function(function, owner, found))
        if len(found) > 1:
            # A tensor that is read under two names is one parameter.
            ids = [id(x) for x in found]
            key = (*key, *[ids.index(n) for n in ids])
        there = _MADE.get(key)
    except (_Unknown, AttributeError, KeyError, ValueError, TypeError, RecursionError):
        return _traced(kind, fn)
    if there is None:
        with _Watch() as watch:
            made = kind(fn)
        numbers = [next((n for n, x in enumerate(found) if x is t.source), -1) for t in made.tensors]
        known = not watch.alone and -1 not in numbers
        if len(_MADE) >= _MOST:
            _MADE.clear()
        _MADE[key] = there = _Template(made, numbers, [x for x in found if type(x) is Scalar]) if known else _NEVER
        if not known:
            return made, made.sources
    if there is _NEVER:
        return _traced(kind, fn)
    if values is not None and _Last.knows(values):
        code.last = _Last(kind, values, there.made, there.numbers)
    return there.made, tuple([found[n] for n in there.numbers])


def _traced(kind: type[Kept], fn: Callable) -> tuple[Kept, tuple]:
    made = kind(fn)
    return made, made.sources
