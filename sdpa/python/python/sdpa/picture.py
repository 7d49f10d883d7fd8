"""Pictures of a score_mod and a mask: the modified scores, and the keys that each query attends to."""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

from .errors import one
from .masks import BlockMask
from .mods import Kept, MaskMod, ScoreMod

_CELL = 480


class Picture:
    """Queries downwards, keys to the right: the modified score, blue below the input score and red above it. Masked-out pairs are grey, and infinities and NaN
    are black. A notebook shows it."""

    def __init__(self, values: list[list[float]], score: float, about: str):
        self.values, self.score, self.about = values, score, about

    def _repr_png_(self) -> bytes:
        return self.png()

    def __repr__(self) -> str:
        return f"Picture({len(self.values)} queries, {len(self.values[0])} keys: {self.about})"

    def png(self) -> bytes:
        """Returns the picture as the bytes of a PNG file."""
        rows, columns = len(self.values), len(self.values[0])
        side = max(1, _CELL // max(rows, columns))
        reach = max((abs(x - self.score) for row in self.values for x in row if math.isfinite(x)), default=0.0) or 1.0
        lines = []
        for row in self.values:
            line = b"\0" + b"".join(_colour(x, self.score, reach) * side for x in row)
            lines += [line] * side
        header = struct.pack(">IIBBBBB", columns * side, rows * side, 8, 2, 0, 0, 0)
        parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines))), (b"IEND", b"")]
        chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))  # noqa: E731
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)

    def save(self, path: str) -> None:
        """Writes the picture as PNG."""
        with open(path, "wb") as file:
            file.write(self.png())


def _colour(x: float, score: float, reach: float) -> bytes:
    if x == -math.inf:
        return bytes((205, 205, 205))
    if not math.isfinite(x):
        return bytes((0, 0, 0))
    along = max(-1.0, min(1.0, (x - score) / reach))
    fade = lambda full: round(255 - abs(along) * (255 - full))  # noqa: E731
    return bytes((fade(200), fade(40), fade(30))) if along > 0 else bytes((fade(30), fade(80), fade(180)))


def show(
    score_mod: Any = None, block_mask: Any = None, shape: tuple[int, int, int, int] | None = None, batch: int = 0, head: int = 0, score: float = 1.0
) -> Picture:
    """Returns the picture of one head: the result of the score_mod for `score` at each position, and the mask. `shape` is (batch, heads, queries, keys). The
    default is the block mask's, or 96 queries and keys."""
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = ScoreMod(score_mod)
    if block_mask is not None and not isinstance(block_mask, (BlockMask, MaskMod)):
        block_mask = MaskMod(block_mask) if not hasattr(block_mask, "mask_mod") else MaskMod(block_mask.mask_mod)
    mask = block_mask.mask if isinstance(block_mask, BlockMask) else block_mask
    if shape is None:
        shape = block_mask.shape if isinstance(block_mask, BlockMask) else (1, 1, 96, 96)
        shape = (max(shape[0], batch + 1), max(shape[1], head + 1), *shape[2:])
    if not (0 <= batch < shape[0] and 0 <= head < shape[1]):
        raise one("batch and head", (batch, head), f"indices below {tuple(shape[:2])}, the batch and the heads of the shape")
    if min(shape[2:]) < 1:
        raise one("shape", tuple(shape), "at least one query and one key")
    if shape[2] * shape[3] > 2**20:
        raise one("shape", tuple(shape), "at most 2^20 pairs of a query and a key; plot a part of the shape")
    values = _values(score_mod, mask, tuple(shape), batch, head, score)
    return Picture(values, score, "; ".join(str(x) for x in (score_mod, mask) if x is not None) or "no score_mod, no mask")


# With one key at a time, the log-sum-exp of a row is its modified score.
_ALONE = "scalar the_key_shown = 0.0; f32(k) == the_key_shown"


def _values(score_mod: Kept | None, mask: Kept | None, shape: tuple, batch: int, head: int, score: float) -> list[list[float]]:
    alone = MaskMod.from_text(_ALONE)
    if mask is not None:
        alone.text = _and(mask.text, alone.text)
        alone.tensors, alone.scalars, alone.ranges = mask.tensors, (*mask.scalars, *alone.scalars), mask.ranges
        import json

        alone.quoted = json.dumps(alone.text)
    at = alone.scalars[-1]
    rows = []
    run = _runner(score_mod, alone, shape, score)
    for key in range(shape[3]):
        at.value = float(key)
        rows.append(run()[batch][head])
    return [[float(rows[key][query]) for key in range(shape[3])] for query in range(shape[2])]


def _and(first: str, second: str) -> str:
    """Joins two masks with their declarations into one text."""
    import json

    from .mods import Program

    (first,) = Program(json.dumps({"masks": [first]})).texts()[1]
    head, _, value = first.rpartition(";")
    own, _, rest = second.rpartition(";")
    return f"{head}{';' if head else ''} {own}; ({value}) & ({rest})"


def _runner(score_mod: Kept | None, mask: Kept, shape: tuple, score: float) -> Any:
    """Returns a function that computes the log-sum-exp of each row: with PyTorch tensors if one was captured, else with NumPy arrays."""
    sources = [t.source for kept in (score_mod, mask) if kept is not None for t in kept.tensors]
    if any(type(s).__module__.startswith("torch") for s in sources):
        import torch

        from .flex import attend

        where = next(s.device for s in sources if hasattr(s, "device") and hasattr(s, "data_ptr"))
        if where.type != "cpu":
            raise one("device of the tensors that are read", where, "cpu, for a picture")
        query = torch.full((*shape[:3], 1), float(score))
        key = torch.ones(shape[0], shape[1], shape[3], 1)

        def run() -> Any:
            with torch.no_grad():
                return attend(query, key, key, score_mod, mask, 1.0, stats=True)[1]

        return run
    import numpy as np

    from .numpy import attention

    query, key = np.full((*shape[:3], 1), score, np.float32), np.ones((shape[0], shape[1], shape[3], 1), np.float32)
    return lambda: attention(query, key, key, score_mod, mask, 1.0)[1]


class Bars:
    """A bar chart: groups with a title and rows. A row has a name and either two numbers, the first a part of the second, or an error message."""

    _COLOURS = (("#1d4f91", "#9dbde6"), ("#b4540a", "#f2c197"), ("#3f7d3f", "#b5d8b5"), ("#666666", "#cfcfcf"))

    def __init__(self, groups: list, told: tuple[str, str], unit: str):
        self.groups, self.told, self.unit = groups, told, unit

    def _repr_svg_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """Returns the picture as SVG; each group has a scale of its own."""
        left, wide, high, y = 150, 420, 22, 34
        names = list(dict.fromkeys(name for _, rows in self.groups for name, *_ in rows))
        parts = [_text(10, 18, f"{self.told[0]} (dark) and {self.told[1]} (whole bar), {self.unit}")]
        for title, rows in self.groups:
            y += 8
            parts.append(_text(10, y + 4, title, "bold"))
            y += 14
            most = max((n for _, first, second, _ in rows for n in (first, second) if n is not None), default=1.0) or 1.0
            for name, first, second, error in rows:
                dark, light = self._COLOURS[min(names.index(name), len(self._COLOURS) - 1)]
                parts.append(_text(left - 8, y + 15, name, anchor="end"))
                for n, colour in ((second, light), (first, dark)):
                    if n is not None:
                        parts.append(f'<rect x="{left}" y="{y + 3}" width="{max(1.0, wide * n / most):.1f}" height="{high - 6}" fill="{colour}"/>')
                numbers = " ; ".join(f"{n:.4g}" for n in (first, second) if n is not None)
                end = max((n for n in (first, second) if n is not None), default=0.0)
                parts.append(_text(left + wide * end / most + 6, y + 15, error[:90] if error else numbers))
                y += high
        size = f'width="{left + wide + 150}" height="{y + 12}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'

    def save(self, path: str) -> None:
        """Writes the picture as SVG."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())


def _text(x: float, y: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    from xml.sax.saxutils import escape

    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
