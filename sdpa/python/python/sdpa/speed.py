"""Compares speed at your own shapes: `python -m sdpa.speed --shape 4,32,8,4096,128 --mask causal --score-mod softcap:30 --save speed.svg`.

On a GPU it measures FlexAttention (compiled), attention in PyTorch's own operations, and PyTorch's SDPA if there is no score_mod; on the CPU the last two.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import pathlib
import statistics
import sys
import time
from typing import Any, Callable, NamedTuple

import torch

from .errors import EnvironmentError, SpecError, TracingError, UnsupportedError
from .flex import flex_attention
from .masks import create_block_mask
from .picture import Bars

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Shape(NamedTuple):
    """Extents of a call."""

    batch: int
    heads: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    dim: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """Parses `batch,heads,heads_kv,seq,dim`; `seq` may be `queries:keys`."""
        rule = "batch,heads,heads_kv,seq,dim: integers of at least 1, seq as queries:keys if they differ, heads a multiple of heads_kv"
        parts = text.split(",")
        lengths = parts[3].split(":") if len(parts) == 5 else []
        numbers = [*parts[:3], *(lengths * 2)[:2], *parts[4:]]
        if len(lengths) not in (1, 2) or not all(n.strip().isdecimal() and int(n) > 0 for n in numbers):
            raise SpecError([("--shape", text, rule)])
        made = cls(*map(int, numbers))
        if made.heads % made.heads_kv:
            raise SpecError([("--shape", text, rule)])
        return made

    def __str__(self) -> str:
        seq = f"{self.seq_q}" if self.seq_q == self.seq_kv else f"{self.seq_q}:{self.seq_kv}"
        return f"{self.batch},{self.heads},{self.heads_kv},{seq},{self.dim}"


class Row(NamedTuple):
    """The measurement of one implementation: milliseconds, difference from attention in PyTorch's operations, MiB; or the reason why there is none."""

    name: str
    forward: float | None = None
    both: float | None = None
    off: float | None = None
    memory: float | None = None
    error: str = ""


class Comparison:
    """The rows of one shape. A notebook shows the picture; `print` shows the table."""

    def __init__(self, title: str, rows: list[Row]):
        self.title, self.rows = title, rows

    def __str__(self) -> str:
        number = lambda x: "" if x is None else f"{x:.4g}"  # noqa: E731
        ours = self.rows[0]
        head = ("", "forward ms", "both ms", "times sdpa's", "off eager", "most MiB")
        lines = [head]
        for row in self.rows:
            of = (row.both, ours.both) if row.both is not None else (row.forward, ours.forward)
            times = None if None in of else of[0] / of[1]
            off = "" if row.off is None else f"{row.off:.1e}"
            lines.append((row.name, number(row.forward), number(row.both), number(times), off, number(row.memory)))
        if all(row.memory is None for row in self.rows):
            lines = [line[:-1] for line in lines]
        wide = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
        told = ["  ".join([line[0].ljust(wide[0]), *(x.rjust(w) for x, w in zip(line[1:], wide[1:]))]).rstrip() for line in lines]
        told[1:] = [f"{line}  {row.error}" if row.error else line for line, row in zip(told[1:], self.rows)]
        return "\n".join([self.title, *told])

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return picture([self]).svg()


def picture(comparisons: list[Comparison]) -> Bars:
    """Returns a bar chart of both passes' milliseconds, with the part of the forward pass darker."""
    groups = []
    for made in comparisons:
        bars = [(row.name, row.forward, row.both, row.error) for row in made.rows]
        groups.append((made.title, bars))
    return Bars(groups, ("forward", "both passes"), "ms")


def compare(
    shape: Shape | str,
    score_mod: Callable | str | None = None,
    mask_mod: Callable | str | None = None,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    seconds: float = 1.0,
) -> Comparison:
    """Measures attention of this shape. Functions may be FlexAttention's, or names as on the command line. Each figure is the median of the calls that fit into
    `seconds`, after three warm-up calls."""
    shape = Shape.of(shape) if isinstance(shape, str) else shape
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    told = [str(fn) if isinstance(fn, str) else getattr(fn, "__name__", "a function") if fn is not None else "none" for fn in (mask_mod, score_mod)]
    mask_mod = named("--mask", mask_mod, _MASKS, shape, device) if isinstance(mask_mod, str) else mask_mod
    score_mod = named("--score-mod", score_mod, _SCORE_MODS, shape, device) if isinstance(score_mod, str) else score_mod
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    title = f"{shape}, {str(dtype).rsplit('.', 1)[-1]}, on {where}; mask {told[0]}; score_mod {told[1]}"
    q, k, v = _operands(shape, device, dtype)
    up = torch.randn_like(q)
    wanted, rows = None, []
    for name, make in _implementations(shape, score_mod, mask_mod, device).items():
        try:
            run = make()
            with torch.no_grad():
                o = run(q, k, v)
                wanted = o if name == "eager" else wanted
                forward = _ms(lambda: run(q, k, v), device, seconds)  # noqa: B023
            both = memory = None
            if backward:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                both = _ms(lambda: torch.autograd.grad(run(q, k, v), [q, k, v], up), device, seconds)  # noqa: B023
                memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
            rows.append((Row(name, forward, both, None, memory), o))
        except (SpecError, TracingError):
            raise
        except Exception as e:  # noqa: BLE001 - an implementation that does not do this is a row that says so
            rows.append((Row(name, error=f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"), None))
    # Eager attention is measured last, because it may use all memory.
    return Comparison(title, [row._replace(off=_off(o, wanted)) for row, o in rows])


def _operands(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    heads = ((shape.heads, shape.seq_q), (shape.heads_kv, shape.seq_kv), (shape.heads_kv, shape.seq_kv))
    made = (torch.randn(shape.batch, n, seq, shape.dim, device=device, generator=generator).to(dtype) for n, seq in heads)
    return [x.requires_grad_() for x in made]


def _off(o: torch.Tensor | None, wanted: torch.Tensor | None) -> float | None:
    """Returns the largest difference, relative to the largest element."""
    if o is None or wanted is None or o is wanted:
        return None
    finite = torch.isfinite(wanted)
    return ((o - wanted).float()[finite].abs().max() / wanted.float()[finite].abs().max()).item() if finite.any() else None


def _ms(f: Callable, device: torch.device, seconds: float) -> float:
    for _ in range(3):
        f()
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) < 3 or (len(taken) < 200 and time.perf_counter() - start < seconds):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            f()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        else:
            begun = time.perf_counter()
            f()
            taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def _implementations(shape: Shape, score_mod: Callable | None, mask_mod: Callable | None, device: torch.device) -> dict[str, Callable]:
    """Returns the implementations by name; each prepares itself first."""
    gqa = shape.heads != shape.heads_kv

    def ours() -> Callable:
        mask = mask_mod and create_block_mask(mask_mod, None, None, shape.seq_q, shape.seq_kv)
        return lambda q, k, v: flex_attention(q, k, v, score_mod, mask, enable_gqa=gqa)

    def flex() -> Callable:
        from torch.nn.attention import flex_attention as theirs

        mask = mask_mod and theirs.create_block_mask(mask_mod, None, None, shape.seq_q, shape.seq_kv, device=device)
        compiled = torch.compile(theirs.flex_attention)
        return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=gqa)

    def places() -> list[torch.Tensor]:
        extents = (shape.batch, shape.heads, shape.seq_q, shape.seq_kv)
        return [torch.arange(n, device=device).view([-1 if axis == at else 1 for at in range(4)]) for axis, n in enumerate(extents)]

    def sdpa() -> Callable:
        kept = None if mask_mod is None else torch.as_tensor(mask_mod(*places()), device=device).expand(1, 1, shape.seq_q, shape.seq_kv)
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, kept, enable_gqa=gqa)

    def eager() -> Callable:
        at, group = places(), shape.heads // shape.heads_kv

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(shape.dim))
            if score_mod is not None:
                scores = score_mod(scores, *at)
            if mask_mod is not None:
                scores = torch.where(torch.as_tensor(mask_mod(*at), device=device), scores, -math.inf)
            return torch.softmax(scores.float(), -1).to(q.dtype) @ v

        return run

    made: dict[str, Callable] = {"sdpa": ours}
    if device.type == "cuda":
        made["FlexAttention"] = flex
    if score_mod is None:
        made["PyTorch's SDPA"] = sdpa
    return made | {"eager": eager}


def _softcap(shape: Shape, device: torch.device, cap: float) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def _alibi(shape: Shape, device: torch.device) -> Callable:
    slopes = torch.tensor([2.0 ** (-8 * (n + 1) / shape.heads) for n in range(shape.heads)], device=device)
    before = shape.seq_kv - shape.seq_q
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx - before)


def _causal(shape: Shape, device: torch.device) -> Callable:
    before = shape.seq_kv - shape.seq_q
    return lambda b, h, q_idx, kv_idx: q_idx + before >= kv_idx


def _window(shape: Shape, device: torch.device, wide: float) -> Callable:
    before = shape.seq_kv - shape.seq_q
    return lambda b, h, q_idx, kv_idx: (q_idx + before >= kv_idx) & (q_idx + before - kv_idx < int(wide))


def _prefix(shape: Shape, device: torch.device, first: float) -> Callable:
    before = shape.seq_kv - shape.seq_q
    return lambda b, h, q_idx, kv_idx: (q_idx + before >= kv_idx) | (kv_idx < int(first))


# The function that creates each score_mod or mask, and whether its name has a number.
_SCORE_MODS = {"softcap": (_softcap, True), "alibi": (_alibi, False)}
_MASKS = {"causal": (_causal, False), "window": (_window, True), "prefix": (_prefix, True)}


def named(field: str, text: str, table: dict, shape: Shape, device: torch.device) -> Callable | None:
    """Returns the function of a name (`softcap:30`), or one from the user's own code (`model.py:score_mod`, `package.module:score_mod`)."""
    name, _, rest = text.partition(":")
    if text == "none":
        return None
    if name in table:
        make, counted = table[name]
        try:
            numbers = [float(rest)] if counted else []
        except ValueError:
            numbers = []
        if len(numbers) == counted and bool(rest) == counted and all(n > 0 for n in numbers):
            return make(shape, device, *numbers)
    elif rest.isidentifier():
        try:
            found = getattr(_module(name), rest, None)
        except (ImportError, OSError, SyntaxError) as e:
            raise SpecError([(field, text, f"a function that can be imported: {e}")]) from None
        if callable(found):
            return found
    names = ", ".join(f"{known}:N" if counted else known for known, (_, counted) in table.items())
    raise SpecError([(field, text, f"none, {names} with N above 0, or a function of yours as file.py:name or module:name")])


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(pathlib.Path(name).stem, name)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def main(given: list[str] | None = None) -> int:
    """The command line. Exit codes: 1 if this package could not compute something, 2 for invalid arguments."""
    parser = argparse.ArgumentParser("python -m sdpa.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="BATCH,HEADS,HEADS_KV,SEQ,DIM", help="as often as wanted; SEQ may be QUERIES:KEYS; 1,8,8,1024,64 if none is given")
    parser.add_argument("--mask", default="none", help="none, causal, window:N, prefix:N, or a mask_mod of yours, file.py:name or module:name; none")
    parser.add_argument("--score-mod", default="none", help="none, softcap:N, alibi, or a score_mod of yours; none")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--device", help="cuda where it is there, else cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each figure is measured; 1")
    parser.add_argument("--forward", action="store_true", help="the forward pass alone")
    parser.add_argument("--save", metavar="FILE.svg", help="writes the picture")
    asked = parser.parse_args(given)
    errors: list = []
    shapes = []
    for text in asked.shape or ["1,8,8,1024,64"]:
        try:
            shapes.append(Shape.of(text))
        except SpecError as e:
            errors += e.errors
    if not 0 < asked.seconds < 3600:
        errors.append(("--seconds", asked.seconds, "above 0 and below 3600"))
    if asked.save and not asked.save.endswith(".svg"):
        errors.append(("--save", asked.save, "a file that ends in .svg"))
    try:
        if errors:
            raise SpecError(errors)
        made = []
        for shape in shapes:
            dtype = DTYPES.get(asked.dtype)
            of = compare(shape, asked.score_mod, asked.mask, device=asked.device, dtype=dtype, backward=not asked.forward, seconds=asked.seconds)
            print(of, end="\n\n", flush=True)
            made.append(of)
    except (SpecError, TracingError, UnsupportedError, EnvironmentError, RuntimeError) as e:
        print(e, file=sys.stderr)
        return 2
    if asked.save:
        picture(made).save(asked.save)
        print(f"the picture is {asked.save}")
    return int(any(of.rows[0].error for of in made))


if __name__ == "__main__":
    sys.exit(main())
