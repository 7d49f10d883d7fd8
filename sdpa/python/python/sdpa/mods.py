"""Score_mods and masks as reusable objects: the trace of a function, and the tensors that it reads."""

from __future__ import annotations

import json
from typing import Any, Callable, NamedTuple

from . import tracing
from ._native import Program
from .dtypes import Ranges
from .errors import TracingError, one
from .tracing import Parameter, Scalar

_PROGRAMS: dict[str, Program] = {}


def program(text: str) -> Program:
    """Returns the parsed program of a text. Programs are cached, as many as a process needs."""
    there = _PROGRAMS.get(text)
    if there is None:
        if len(_PROGRAMS) >= 1024:
            _PROGRAMS.clear()
        there = _PROGRAMS[text] = Program(text)
    return there


class Kept:
    """The text of a function, with the tensors and the scalars that it reads."""

    kind = ""
    _with_score = True
    _prefix = "s"

    def __init__(self, fn: Callable):
        if not callable(fn):
            raise one(self.kind, type(fn).__name__, f"a function, or {type(self).__name__}.from_text(...)")
        self.fn = fn
        traced = tracing.trace(fn, self._prefix, self._with_score)
        self._set(traced.text, traced.tensors, traced.scalars, traced.ranges)

    def _set(self, text: str, tensors: tuple, scalars: tuple, ranges: Ranges | None = None) -> None:
        self.text, self.tensors, self.scalars, self.ranges = text, tensors, scalars, ranges
        # A fragment of the program's JSON. Traced texts contain no character that needs further escaping.
        plain = self.fn is not None
        self.quoted = '"' + text.replace("\n", " ") + '"' if plain else json.dumps(text)
        # The key of calls with it, without its tensors.
        self.known = self.quoted, *[t.reading for t in tensors]

    @property
    def sources(self) -> tuple:
        """The tensors that it reads."""
        return tuple([t.source for t in self.tensors])

    def over(self, sources: tuple) -> Any:
        """Returns the object for other tensors, one per parameter, without the function."""
        made = type(self).__new__(type(self))
        made.fn, made.text, made.quoted, made.known, made.scalars, made.ranges = None, self.text, self.quoted, self.known, self.scalars, self.ranges
        made.tensors = tuple([parameter.of(source) for parameter, source in zip(self.tensors, sources)])
        return made

    def check(self, extents: tuple, sources: tuple, span: Callable[[Any], tuple[int, int] | None]) -> None:
        """Rejects a call in which integers that are int64 in PyTorch may exceed 32 bits. `span` returns the smallest and the largest element of a tensor, if
        known."""
        found = None if self.ranges is None else self.ranges.check(extents, {t.name: x for t, x in zip(self.tensors, sources)}, span)
        if found is not None:
            step, (low, high) = found
            raise TracingError(
                f"an int64 value may range from {low} to {high} with (batch, heads, queries, keys) = {tuple(extents)}, but integers have 32 bits here",
                "convert to floats first, `.float()`, or to int32 if wrapping is intended, `.int()`", step.where,
            )  # fmt: skip

    @classmethod
    def from_text(cls, text: str, **values: Any):
        """Creates the object from text in the expression language, or from a library name (`softcap:30`), with the tensors and numbers that it declares."""
        made = cls.__new__(cls)
        made.fn = None
        key = "score_mods" if cls._with_score else "masks"
        declared = {name: (_axes(axes), dtype, default) for name, axes, dtype, default in Program(json.dumps({key: [text]})).params()}
        errors, tensors, scalars = [], [], []
        for name, given in values.items():
            if name not in declared:
                errors.append((f"parameter {name}", "a value", f"one of the declared parameters: {', '.join(declared) or 'none'}"))
        for name, (axes, dtype, default) in declared.items():
            given = values.get(name, default)
            if given is None:
                errors.append((f"parameter {name}", "nothing", f"{dtype} over [{_over(axes)}], as declared"))
            elif axes is None:
                scalars.append(given if isinstance(given, Scalar) else Scalar(name, given))
            elif not hasattr(given, "shape"):
                errors.append((f"parameter {name}", type(given).__name__, f"a tensor over [{_over(axes)}]"))
            elif len(given.shape) != len(axes):
                errors.append((f"parameter {name}", f"shape {tuple(given.shape)}", f"a tensor over [{_over(axes)}]"))
            else:
                starts = () if axes and not isinstance(axes[0], str) else (0,) * len(axes)
                tensors.append(Parameter(name, given, (None,) * len(axes), tuple(range(len(axes))), axes, starts, dtype))
        if errors:
            from .errors import SpecError

            raise SpecError(errors)
        made._set(text, tuple(tensors), tuple(scalars))
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        key = "score_mods" if self._with_score else "masks"
        mods, masks = Program(f'{{"{key}":[{self.quoted}]}}').texts()
        return (mods or masks)[0]


def _axes(declared: list | None) -> tuple | None:
    """Returns the axes of a parameter, with the extents of a table as numbers."""
    return None if declared is None else tuple([int(axis) if axis.isdigit() else axis for axis in declared])


def _over(axes: tuple | None) -> str:
    return ", ".join([str(axis) for axis in axes or ()])


class ScoreMod(Kept):
    """A score_mod that was traced once: `ScoreMod(fn)`, or `ScoreMod.from_text("softcap:30")`.

    It can replace the function everywhere, needs no tracing in each call, and is accepted by `torch.compile`. It keeps what the function captured: tensors
    by reference, so that their values may change; numbers by value, except for `sdpa.scalar`.
    """

    kind = "score_mod"

    def __call__(self, *args: Any) -> Any:
        if self.fn is None:
            raise one("score_mod", "one made of text", "a function: only a function can be called")
        return self.fn(*args)


class MaskMod(Kept):
    """A mask_mod that was traced once: `MaskMod(fn)`, or `MaskMod.from_text("causal & k % 2 == 0")`."""

    kind = "mask_mod"
    _with_score = False
    _prefix = "m"

    def __call__(self, *args: Any) -> Any:
        if self.fn is None:
            raise one("mask_mod", "one made of text", "a function: only a function can be called")
        return self.fn(*args)


# Executors that a call may select.
EXECUTORS = ("cpu", "cudnn", "cuda")


def named(executor: Any) -> None:
    """Raises an error for an unknown executor name."""
    if not isinstance(executor, str) or executor not in EXECUTORS:
        raise one("executor", repr(executor), f"one of {', '.join(EXECUTORS)}, or None for the first that supports the call")


# Tensors that come after those of the functions, in this order. Packed sequences have the first or the last two of CU_SEQLENS.
SINK, DROPOUT, CU_SEQLENS = "sink", ("dropout_seed", "dropout_offset"), ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv")
# Those of packed queries over a paged KV cache.
PAGES = (CU_SEQLENS[1], "seq_len_kv", "page_table")


class Packed(NamedTuple):
    """The sequences of a packed call: their number, the most tokens of a sequence and of all, whether keys have offsets of their own, and whether offsets
    are int64."""

    batch: int
    seq_q: int
    seq_kv: int
    total_q: int
    total_kv: int | None
    cross: bool
    wide: bool = True

    @property
    def names(self) -> tuple:
        """The names of the offsets among the tensors of a call."""
        return CU_SEQLENS[1:] if self.cross else CU_SEQLENS[:1]


class Paged(NamedTuple):
    """A paged KV cache: the tokens of a page, and the pages of the pool."""

    page_size: int
    pages: int


_BATCH_INVARIANT = False


def set_batch_invariant(enabled: bool) -> None:
    """Requires of all later calls of this process that the bits of a sequence's results depend on this sequence alone, or ends that.

    A sequence then has the same results alone, in any batch, padded, packed and paged, and a query the same results in a prefill, in a chunk of it and in a
    decode step. Dropout raises an error."""
    global _BATCH_INVARIANT
    if type(enabled) is not bool:
        raise one("enabled", repr(enabled), "True or False")
    _BATCH_INVARIANT = enabled


def is_batch_invariant() -> bool:
    """Returns whether `set_batch_invariant` is in force."""
    return _BATCH_INVARIANT


def joined(
    score_mod: Kept | None,
    mask: Kept | None,
    sink: bool = False,
    deterministic: bool = False,
    executor: str | None = None,
    dropout: float = 0.0,
    max_scores: bool = False,
    packed: Packed | None = None,
    paged: Paged | None = None,
) -> tuple[str, tuple, tuple]:
    """Returns the text of a program, and the tensors and scalars of each of its calls. The caller has checked the executor's name."""
    tensors = _once(score_mod.tensors if score_mod else (), mask.tensors if mask else ())
    scalars = _once(score_mod.scalars if score_mod else (), mask.scalars if mask else ())
    names = [t.name for t in tensors] + ([SINK] if sink else []) + (list(DROPOUT) if dropout else []) + list(PAGES if paged else packed.names if packed else ())
    text = (
        '{"score_mods":[' + (score_mod.quoted if score_mod else "") + '],"masks":[' + (mask.quoted if mask else "")
        + '],"tensors":[' + ",".join(['"' + name + '"' for name in names]) + '],"scalars":[' + ",".join(['"' + s.name + '"' for s in scalars]) + "]"
        + (',"sink":true' if sink else "") + (',"deterministic":true' if deterministic else "")
        + (',"batch_invariant":true' if _BATCH_INVARIANT else "")
        + ("" if executor is None else ',"executor":"' + executor + '"')
        + (f',"dropout":{dropout!r}' if dropout else "") + (',"max_scores":true' if max_scores else "")
        + (',"packed":' + json.dumps(packed._asdict()) if packed else "")
        + (',"paged":' + json.dumps(paged._asdict()) if paged else "") + "}"
    )
    return text, tensors, scalars


def _once(first: tuple, second: tuple) -> tuple:
    """Joins two tuples without duplicates. One name for two different objects is an error."""
    names = {p.name: p for p in first}
    for p in second:
        there = names.setdefault(p.name, p)
        same = there is p or (isinstance(p, Parameter) and there.source is p.source and there.axes == p.axes)
        if not same:
            raise one(f"parameter {p.name}", "declarations in the score_mod and in the mask that differ", "one declaration per name")
    return tuple(names.values())
