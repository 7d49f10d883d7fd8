"""Captured tensors that are indexed: elements, tables at computed indices, and short rows, which are unrolled."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator

from .errors import TracingError
from .values import FUNCTIONS, NUMBERS, Operators, Unread, current, element_of, extents, kind_of, no_attribute, unary

# Maximum number of elements in a row. Each element is read and computed separately.
_LONGEST = 64
# An axis without an index so far.
_FREE = object()


def _each(name: str) -> Callable:
    def method(self: Rows, *args: Any, **kwargs: Any) -> Any:
        return _called(name, self, *args, **kwargs)

    return method


def _called(name: str, *args: Any, **kwargs: Any) -> Any:
    from .table import called

    return called(name, name, args, kwargs)


class Rows(Unread):
    """One axis of elements: operators and functions apply to each element, and reductions combine them."""

    __hash__ = object.__hash__

    def elements(self) -> tuple:
        """The values of the row."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.elements())

    def __iter__(self) -> Iterator:
        return iter(self.elements())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in REDUCTIONS and name not in FUNCTIONS:
            raise no_attribute(name)
        return functools.partial(_called, name, self)

    @property
    def shape(self) -> tuple:
        """The length of the row."""
        return (len(self),)

    @property
    def ndim(self) -> int:
        """One axis."""
        return 1

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        return self.elements()[0].dtype

    def where(self, condition: Any, other: Any) -> Any:
        """As a method, the first operand is the value where the condition holds."""
        return _called("where", condition, self, other)

    def __setitem__(self, at: Any, to: Any) -> None:
        raise TracingError("a traced row is assigned to", "compute another row: torch.where(condition, row, x)")

    def __matmul__(self, other: Any) -> Any:
        return _called("matmul", self, other)

    __rmatmul__ = __matmul__

    def __bool__(self) -> bool:
        raise TracingError("a row of a tensor is used as true or false", "reduce it by `.all()` or `.any()`, and choose by torch.where")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from .tracing import applied

        return applied(func, args, kwargs or {})


for _name in "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow and or xor rand ror rxor eq ne lt le gt ge neg pos abs invert lshift rshift rlshift rrshift".split():
    setattr(Rows, f"__{_name}__", _each(_name))


def _in_place(name: str) -> Callable:
    def method(self: Rows, other: Any) -> Any:
        raise TracingError(f"`{name}` changes a row in place", "write `x = x + y`")

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split():
    setattr(Rows, f"__i{_name}__", _in_place(_name))


class Row(Rows):
    """A computed row."""

    def __init__(self, values: tuple):
        self._values = values

    def elements(self) -> tuple:
        """The values of the row."""
        return self._values

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, bool) or not isinstance(at, int):
            raise TracingError(f"a computed row is indexed by {type(at).__name__}", "index it by a constant")
        if not -len(self._values) <= at < len(self._values):
            raise TracingError(f"index {at} is outside of a row of {len(self._values)} elements", "use an index within the row")
        return self._values[at]


class Partial(Rows):
    """A tensor that is indexed along some of its axes. With one axis left it is a row."""

    def __init__(self, source: Any, taken: tuple, trace: Any):
        self.source, self.taken, self.trace = source, taken, trace
        self._values: tuple | None = None

    def __getitem__(self, at: Any) -> Any:
        return index(self.source, at, self.taken, self.trace)

    def elements(self) -> tuple:
        """The values of the row. Each is read separately, once."""
        if self._values is None:
            self._values = self._read()
        return self._values

    def _read(self) -> tuple:
        free = [n for n, one in enumerate(self.taken) if one is _FREE]
        if len(free) > 1:
            given, axes = len(self.taken) - len(free), len(self.taken)
            raise TracingError(f"a tensor of {axes} axes is indexed along {given} of them", "index every axis, or leave out one axis to get a row and reduce it, for example with `.sum()`")
        length = extents(self.source)[free[0]]
        if not 0 < length <= _LONGEST:
            raise TracingError(f"a row of {length} elements is read", f"rows of 1 to {_LONGEST} elements are supported; reduce longer ones before tracing, into a tensor over queries and keys")
        at = lambda n: tuple([n if one is _FREE else one for one in self.taken])  # noqa: E731
        return tuple([self.trace.table(self.source, at(n)) for n in range(length)])


def index(source: Any, at: Any, taken: tuple | None, trace: Any) -> Any:
    """Returns an element of a captured tensor, or a partially indexed tensor."""
    shape = tuple(source.shape)
    at = at if isinstance(at, tuple) else (at,)
    taken = (_FREE,) * len(shape) if taken is None else taken
    free = [n for n, one in enumerate(taken) if one is _FREE]
    given = len([one for one in at if one is not Ellipsis])
    if given > len(free):
        raise TracingError(f"a tensor of {len(shape)} axes is indexed {len(shape) - len(free) + given} times", "give one index for each axis")
    rest = list(taken)
    axis = 0
    for one in at:
        if one is Ellipsis:
            axis += len(free) - given
            continue
        if not (isinstance(one, slice) and (one.start, one.stop, one.step) == (None, None, None)):
            if not isinstance(one, Operators) and hasattr(one, "dtype") and tuple(getattr(one, "shape", (0,))) == ():
                # A captured number in a tensor of no axes.
                one = trace.tensor(one, (), [])
            rest[free[axis]] = _index(one, source, free[axis])
        axis += 1
    if any([one is _FREE for one in rest]):
        return Partial(source, tuple(rest), trace)
    return element(source, tuple(rest), trace)


def _index(one: Any, source: Any, axis: int) -> Any:
    """Returns an index along an axis: a non-negative number, or a traced integer."""
    if isinstance(one, Operators):
        one = one.lifted()
        if one.element not in ("int32", "int64"):
            mask = ", as PyTorch reads bools and uint8 as a mask" if one.element in ("bool", "uint8") else ""
            raise TracingError(f"a tensor is indexed by a value of {one.element}", f"an index is an int32 or an int64{mask}; convert it with `.int()` first")
        return one
    if isinstance(one, int) and not isinstance(one, bool):
        extent = source.shape[axis]
        if not -extent <= one < extent:
            raise TracingError(f"index {one} is outside of an axis of length {extent}", "use an index within the axis")
        return one if one >= 0 else one + extents(source)[axis]
    if isinstance(one, Unread):
        raise TracingError("the index of a tensor is itself a tensor with unindexed axes", "index every axis of the index tensor first, for example `idx[q_idx, kv_idx]`")
    raise TracingError(f"a tensor is indexed by {type(one).__name__}", "an index is an integer constant, q_idx, kv_idx, b, h, or an integer that is computed from these and from tensors")


def element(source: Any, taken: tuple, trace: Any) -> Any:
    """Returns the element at numbers and traced integers: by the position of the score if possible, else from a table."""
    traced = [one for one in taken if not isinstance(one, int)]
    places = [one.place for one in traced]
    if all([place is not None and place[1] >= 0 for place in places]) and len({axis for axis, _ in places}) == len(places):
        return trace.tensor(source, tuple([one if isinstance(one, int) else None for one in taken]), places)
    return trace.table(source, taken)


def mapped(name: str, args: tuple, kwargs: dict) -> Any:
    """Applies a function to rows: to each of their elements, or to all together."""
    if name in REDUCTIONS:
        return REDUCTIONS[name](*args, **kwargs)
    if name == "unsqueeze":
        raise TracingError("`unsqueeze` is applied to a row", "use the row as it is: only one axis is unrolled")
    if kwargs.get("inplace"):
        raise TracingError(f"`{name}` changes a row in place", "call it without inplace=True and use its result")
    if name.startswith("new_"):
        raise TracingError(f"`{name}` is applied to a row", "use a number instead of a new tensor")
    given = [*args, *kwargs.values()]
    lengths = {len(_row(x)) for x in given if _row(x) is not None} - {1}
    if len(lengths) > 1:
        raise TracingError(f"`{name}` has rows of different lengths: {', '.join(map(str, sorted(lengths)))}", "give it rows of one length")
    length = max(lengths, default=1)
    rows = [_row(x) for x in given]
    made = []
    for n in range(length):
        one = [x if row is None else row[n if len(row) > 1 else 0] for x, row in zip(given, rows)]
        made.append(FUNCTIONS[name](*one[: len(args)], **dict(zip(kwargs, one[len(args) :]))))
    return Row(tuple(made))


def _row(x: Any) -> tuple | None:
    """Returns the elements of a row or a captured tensor with one axis, or None for a single number."""
    if isinstance(x, Rows):
        return x.elements()
    if isinstance(x, Operators) or type(x) in NUMBERS or not (hasattr(x, "dtype") and hasattr(x, "shape")) or len(x.shape) == 0:
        return None
    if len(x.shape) > 1:
        raise TracingError(f"a tensor of shape {tuple(x.shape)} is joined with a row", "use a row, or one number")
    return Partial(x, (_FREE,), current("a row")).elements()


def _reduced(start: Callable, join: str, end: Callable = lambda made, _: made) -> Callable:
    """Returns a reduction over the only axis of a row."""

    def made(x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None) -> Any:
        dim = dim if axis is None else axis
        if dim not in (None, 0, -1, (0,), (-1,), [0], [-1]) or keepdim:
            raise TracingError(f"a row is reduced with dim={dim}, keepdim={keepdim}", "reduce its only axis: dim=-1, without keepdim")
        parts = [start(one) for one in _row(x)]
        return end(functools.reduce(FUNCTIONS[join], parts), len(parts))

    return made


def _whole(x: Any) -> Any:
    """Converts an operand of a sum: integers and booleans become int64."""
    return x if kind_of(x) == "f32" else FUNCTIONS["long"](x)


def _truth(x: Any) -> Any:
    if element_of(x) == "uint8":
        raise TracingError("`all` or `any` is applied to uint8, for which PyTorch returns uint8", "convert it first, `.bool()`")
    return x


def _float(x: Any) -> Any:
    if kind_of(x) != "f32":
        raise TracingError(f"the mean of {element_of(x)} is computed", "convert it first, `.float()`")
    return x


def _dot(x: Any, y: Any, *, out: Any = None) -> Any:
    x, y = _row(x), _row(y)
    if x is None or y is None or len(x) != len(y):
        raise TracingError("operands that are not two rows of one length are multiplied", "use two rows of one length")
    _, first = unary(x[0], out)
    if first.element != y[0].element or first.element == "bool":
        raise TracingError(f"a row of {first.element} and one of {y[0].element} are multiplied", "convert them to one type of numbers, `.float()`")
    return functools.reduce(FUNCTIONS["add"], [FUNCTIONS["mul"](a, b) for a, b in zip(x, y)])


REDUCTIONS: dict[str, Callable] = {
    "sum": _reduced(_whole, "add"), "prod": _reduced(_whole, "mul"), "mean": _reduced(_float, "add", lambda made, n: FUNCTIONS["div"](made, n)),
    "all": _reduced(_truth, "logical_and", lambda made, _: FUNCTIONS["bool"](made)), "any": _reduced(_truth, "logical_or", lambda made, _: FUNCTIONS["bool"](made)),
    "dot": _dot, "vdot": _dot, "inner": _dot, "matmul": _dot,
}  # fmt: skip
