"""Reports on executor selection and on rebuilt plans."""

from __future__ import annotations

import html
import json
from typing import Any

import torch

from . import _native, op
from .errors import EnvironmentError, SpecError, UnsupportedError
from .flex import _autocast, _shapes
from .bind import bound, span
from .masks import mask_of
from .mods import ScoreMod, joined, named, program


class Report(str):
    """Text that a notebook displays."""

    data: Any = None

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"

    def save(self, path: str) -> None:
        """Writes the report as JSON. For a cache, `cargo sdpa cache report` reads the file."""
        with open(path, "w") as file:
            json.dump(self.data, file)


def explain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
    executor: str | None = None,
) -> Report:
    """Explains `flex_attention` with these arguments: the executor of both passes, the reasons against the others, and the traced functions. On a GPU it builds
    the plans, but runs nothing."""
    if executor is not None:
        named(executor)
    if scale is not None:
        op.factor(scale)
    query, key, value = _autocast(query, key, value)
    op.mistakes(query, key, value)
    _shapes(query, key, value, enable_gqa)
    extents = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = ScoreMod(score_mod)
    mask = mask_of(block_mask, extents)
    text, tensors, scalars = joined(score_mod, mask, deterministic=torch.are_deterministic_algorithms_enabled(), executor=executor)
    params = [bound(t, extents, query.device) for t in tensors]
    for traced in (score_mod, mask):
        if traced is not None:
            traced.check(extents, traced.sources, span)
    mods, masks = program(text).texts()
    lines = [f"score_mod: {mods[0] if mods else 'none'}", f"mask: {masks[0] if masks else 'none'}"]
    lines += [f"parameter {t.name}: {t.dtype} over [{t.over}], {tuple(p.shape)}" for t, p in zip(tensors, params)]
    lines += [f"parameter {s.name}: a scalar, {s.value}; another value needs no other plan" for s in scalars]
    copied = [name for name, x in (("query", query), ("key", key), ("value", value)) if not op.is_dense(x)]
    if copied:
        lines.append(f"copied, as the last axis is not dense: {', '.join(copied)}")
    data = {"executor": None, "forward": None, "backward": None}
    for which, made in _passes(query, key, value, text, params, tensors):
        if isinstance(made, Exception):
            lines += [f"{which}: nobody", *(f"  {line}" for line in str(made).split("\n"))]
            data[which] = str(made)
            continue
        library = made.library
        data["executor"] = data["executor"] or made.executor
        engine = made.engine or f"cpu, {torch.get_num_threads()} threads at most"
        lines.append(f"{which}: {engine}; called {made.calls} times")
        if library is not None:
            lines.append(f"  {library[0]} {library[1]}, {library[2]}; workspace {made.workspace_bytes} bytes")
            lines += [f"  copied on the device first: {', '.join(made.copied)}"] if made.copied else []
            lines += [f"  {line}" for line in (made.explain() or "").split("\n")]
            lines += [f"  {made.unproven}"] if made.unproven else []
        lines += [f"  not on {who}: {reason}" for who, reasons in made.others() for reason in reasons]
        data[which] = engine
    if query.device.type == "cpu":
        lines += ["not on cudnn, not on cuda: the tensors are in host memory; `.to('cuda')` and bfloat16 or float16 bring them there", "not on metal: PyTorch's tensors of an Apple GPU are not read"]
    else:
        lines.append("not on cpu: the tensors are in a GPU's memory; nothing is copied to the host by itself")
    made = Report("\n".join(lines))
    made.data = data
    return made


def _passes(query, key, value, text, params, tensors):
    """Returns both prepared passes, or the reasons why one is unsupported."""
    q, k, v = (op.dense("", x) for x in (query, key, value))
    o = op._like(q, (*q.shape[:3], v.shape[3]))
    layouts = tuple(op._layout(x) for x in (q, k, v, o))
    gradients = tuple(op._layout(op._like(x, x.shape)) for x in (q, k, v))
    needed = [n for n, p in enumerate(params) if p.requires_grad]
    train = torch.is_grad_enabled() and (bool(needed) or any(x.requires_grad for x in (query, key, value)))
    for which in ("forward", "backward"):
        try:
            if which == "forward":
                yield which, op.plan(text, q.device, q.dtype, train, layouts, ())
            else:
                wrt = op._wrt(text, params, needed, q.device, q.dtype)
                yield which, op.plan(text, q.device, q.dtype, True, (*layouts, layouts[3], *gradients), wrt)
        except (UnsupportedError, SpecError, EnvironmentError) as e:
            yield which, e


def cache_report() -> Report:
    """Reports cached programs and plans of this process, and plans and kernels on each GPU: hits, and the reasons for builds."""
    from .mods import _PROGRAMS

    lines = [f"{len(_PROGRAMS)} programs were read, {len(op._PLANS)} passes are ready for layouts, called {sum(p.calls for p in op._PLANS.values())} times"]
    caches = {}
    for ordinal in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        told = _native.cache_trace(ordinal)
        if told is None:
            continue
        trace = caches[ordinal] = json.loads(told)
        lines.append(f"GPU {ordinal}, {trace['device']}, cuDNN {trace['cudnn']}:")
        for cache in trace["caches"]:
            stats = cache["stats"]
            lines.append(f"  {cache['name']}: {stats['entries']} kept, {stats['misses']} built, {stats['evictions']} dropped, {stats['refusals']} refused again")
            for event in cache["events"]:
                if event["what"] == "missed":
                    gone = f"; it was here, and went for {event['evicted']}" if event["evicted"] else ""
                    differs = f"; the nearest differs in {', '.join(event['nearest'])}" if event["nearest"] else "; nothing like it was there"
                    lines.append(f"    built {event['label']}{differs}{gone}")
                elif event["what"] in ("failed", "unsupported"):
                    lines.append(f"    {event['what']} {event['label']}: {event['error']}")
                elif event["what"] == "thrashing":
                    lines.append(f"    {event['rebuilt']} of the last {event['of']} builds had been here: the bound on plans is too small")
    if not caches:
        lines.append("the CPU executor compiles nothing: there is nothing that could be built again")
    made = Report("\n".join(lines))
    # The command line reads the report of a single GPU.
    made.data = next(iter(caches.values())) if len(caches) == 1 else caches
    return made
