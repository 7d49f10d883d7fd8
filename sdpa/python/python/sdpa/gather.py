"""Captured tensors that are read by index."""

from __future__ import annotations

from .errors import TracingError
from .values import Operators, Unread


class Partial(Unread):
    """A tensor that was indexed along some of its axes."""

    def __init__(self, source, taken: tuple, trace):
        self.source, self.taken, self.trace = source, taken, trace

    def __getitem__(self, at):
        return index(self.source, at, self.taken, self.trace)

    def whole(self, *_args, **_kwargs):
        given, axes = len(self.taken), len(self.source.shape)
        raise TracingError(f"a tensor of {axes} axes is read with {given} of them", "index every axis, each by one of b, h, q_idx, kv_idx")

    def __getattr__(self, name):
        self.whole()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = whole
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = __bool__ = whole
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        from .tracing import applied

        return applied(func, args, kwargs or {})


_GATHER = (
    "an index has to be one of b, h, q_idx, kv_idx, or one of these plus a constant: make the table a tensor over (q, k) or (head, q, k) before, "
    "`bias = table[:, buckets]`, and read it as `bias[h, q_idx, kv_idx]`, with its gradient"
)


def index(source, at, taken: tuple, trace):
    """An element of a captured tensor, or what is left of it to be indexed."""
    for one in at if isinstance(at, tuple) else (at,):
        if isinstance(one, Operators):
            place = one.lifted().place
            if place is None or place[1] < 0:
                raise TracingError("a tensor is indexed by something computed (a gather)", _GATHER)
            taken = (*taken, place)
        elif isinstance(one, int) and not isinstance(one, bool):
            taken = (*taken, one)
        else:
            raise TracingError(f"a tensor is indexed by {type(one).__name__}", _GATHER)
    shape = tuple(source.shape)
    if len(taken) > len(shape):
        raise TracingError(f"a tensor of {len(shape)} axes is indexed {len(taken)} times", "give one index for each axis")
    if len(taken) < len(shape):
        return Partial(source, taken, trace)
    places = [one for one in taken if isinstance(one, tuple)]
    for n in (n for n, one in enumerate(taken) if isinstance(one, int)):
        if not -shape[n] <= taken[n] < shape[n]:
            raise TracingError(f"index {taken[n]} of an axis of {shape[n]}", "an index within it")
    if len({axis for axis, _ in places}) < len(places):
        raise TracingError("a tensor is indexed twice by the same place", "take the diagonal before: `torch.diagonal(t)[q_idx]`")
    return trace.tensor(source, tuple(one if isinstance(one, int) else None for one in taken), places)
