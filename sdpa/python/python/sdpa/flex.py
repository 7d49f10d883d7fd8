"""`flex_attention` with FlexAttention's signature."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable

import torch
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import active, eager, nested, table
from .bind import bound, span
from .eager import autocast
from .errors import SpecError, UnsupportedError, one
from .follow import followed
from .guards import kept
from .masks import BlockMask, mask_of, read
from .mods import Kept, MaskMod, Packed, ScoreMod, joined, named
from .op import PLAIN, STATS, TRAIN, expanded, factor, mistakes, usual

try:
    from torch.nn.attention.flex_attention import AuxOutput
except ImportError:  # of a PyTorch that has no such results
    from typing import NamedTuple

    class AuxOutput(NamedTuple):  # type: ignore[no-redef]
        lse: Any = None
        max_scores: Any = None


# The compiler can follow this function without a search for PyTorch in the loaded modules.
table.compiling = is_compiling
table.followed = followed

# A compiler cannot follow this import later.
if "torch.distributed.tensor" in sys.modules:
    from . import shards  # noqa: F401

_SAID: set[str] = set()
_MASKS = (BlockMask, MaskMod)

# Dynamo follows our tracer, and guards what a function captures. It does not follow the reader of PyTorch's masks, which raises an error under
# `fullgraph=True`.
_mask_outside = torch._dynamo.disable(mask_of, reason="a mask of PyTorch's is read by sdpa: make it with sdpa.create_block_mask outside")


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict | None = None,
    *,
    return_aux: Any = None,
    executor: str | None = None,
) -> Any:
    """FlexAttention's function: `softmax(mask(score_mod(q·kᵀ · scale))) · v` over (batch, heads, seq, dim), on the executor of the tensors' device.

    `score_mod` may be a function or a `ScoreMod`. `block_mask` is a result of `create_block_mask`, from this package or from PyTorch. `kernel_options` are
    ignored, with one warning: they are for FlexAttention's kernels. `lse` is in natural logarithms and has a gradient. `executor` selects the executor of
    both passes: `cpu`, `cudnn`, `cuda`. Without it, each pass on a GPU runs on the faster of cuDNN and the native CUDA kernels that supports it.
    """
    if executor is not None:
        named(executor)
    if scale is not None and type(scale) is not float:
        scale = factor(scale)
    if kernel_options and "kernel_options" not in _SAID:
        _SAID.add("kernel_options")
        warnings.warn("kernel_options are of Triton's kernels and are ignored; said once", stacklevel=2)
    return_lse = return_lse or (return_aux is not None and bool(return_aux.lse))
    maxima = return_aux is not None and bool(getattr(return_aux, "max_scores", None))
    if active.CURRENT is not None:
        query, key, value = _autocast(query, key, value)
        made = active.CURRENT.attend(query, key, value, score_mod, block_mask, scale, enable_gqa, maxima, executor)
        return _results(*made, return_lse, return_aux)
    if active.ENDED:
        _not_again()
    if getattr(query, "is_nested", False):
        query, key, value = _autocast(query, key, value)
        return _results(*nested.attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, maxima, executor), return_lse, return_aux)
    if is_compiling():
        query, key, value = _autocast(query, key, value)
    else:
        if autocast():
            query, key, value = _autocast(query, key, value)
        sources: tuple = ()
        if score_mod is not None:
            score_mod, sources = kept(ScoreMod, score_mod)
        if block_mask is not None and not isinstance(block_mask, _MASKS):
            block_mask = read(block_mask)
        rows = return_lse or maxima
        made = eager.attend(query, key, value, score_mod, sources, block_mask, scale, enable_gqa, rows, None, executor, (), maxima)
        if made is not None:
            return made[0] if return_aux is None and not return_lse else _results(*made, return_lse, return_aux)
        if score_mod is not None and score_mod.tensors:
            score_mod = score_mod.over(sources)
        if hasattr(query, "device_mesh"):
            from . import sequence

            over_ranks = sequence.alone(query, key, value)
            if over_ranks is not None:
                made = over_ranks.attend(query, key, value, score_mod, block_mask, scale, enable_gqa, maxima, executor)
                return _results(*made, return_lse, return_aux)
    mistakes(query, key, value)
    key, value = expanded(query, key, value)
    _shapes(query, key, value, enable_gqa)
    extents = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = ScoreMod(score_mod)
    if isinstance(block_mask, (BlockMask, MaskMod, type(None))) or not is_compiling():
        mask = mask_of(block_mask, extents)
    else:
        mask = _mask_outside(block_mask, extents)
    o, rows = by_operator(query, key, value, score_mod, mask, scale, return_lse or maxima, None, executor, (), maxima)
    return _results(o, rows, return_lse, return_aux)


@torch._dynamo.disable
def _not_again() -> None:
    """Raises an error if reentrant checkpointing recomputes a call, whose first run may have been inside of a context that has ended. Other checkpoints notice
    the difference by themselves: a call inside of a context saves one tensor more."""
    if active.CURRENT is None and torch._C._current_graph_task_id() != -1 and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        what = "a call in a backward pass, after sdpa.context_parallel has ended: run the backward pass inside of the context too, or use checkpoint(use_reentrant=False)"
        raise UnsupportedError("parallel", [what])


def _results(o: torch.Tensor, rows: torch.Tensor | None, return_lse: bool, return_aux: Any) -> Any:
    if return_aux is None:
        return (o, rows) if return_lse else o
    maxima = rows[1].detach() if return_aux.max_scores else None
    lse = None if not return_lse else rows if maxima is None else rows[0]
    return o, AuxOutput(lse=lse, max_scores=maxima)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Kept | None,
    mask: Kept | None,
    scale: float | None = None,
    *,
    stats: bool = False,
    sink: torch.Tensor | None = None,
    executor: str | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs attention with traced score_mods and masks. Returns the output, and stats if requested. `dropout` is the probability that a weight becomes 0; the
    seed comes from PyTorch's generator of the device."""
    if executor is not None:
        named(executor)
    if scale is not None and type(scale) is not float:
        scale = factor(scale)
    if active.CURRENT is not None:
        if dropout:
            active.refuse("dropout")
        return active.CURRENT.attend(query, key, value, score_mod, mask, scale, None, False, executor, sink)
    sources = () if score_mod is None else score_mod.sources
    drop = () if not dropout else (float(dropout), *_seed(query.device))
    made = None if is_compiling() else eager.attend(query, key, value, score_mod, sources, mask, scale, None, stats, sink, executor, drop)
    return made if made is not None else by_operator(query, key, value, score_mod, mask, scale, stats, sink, executor, drop)


def _seed(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the seed of a call's dropout; the offset is 0."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)


def by_operator(
    query: Any, key: Any, value: Any, score_mod: Kept | None, mask: Kept | None, scale: float | None, stats: bool, sink: Any, executor: str | None,
    dropout: tuple = (), maxima: bool = False, packed: Packed | None = None, offsets: tuple = (),
) -> tuple:
    extents = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if packed is not None:
        extents = (packed.batch, query.shape[1], packed.seq_q, packed.seq_kv)
    deterministic = torch.are_deterministic_algorithms_enabled()
    program, tensors, scalars = joined(score_mod, mask, sink is not None, deterministic, executor, *(dropout[:1] or (0.0,)), maxima, packed)
    after = ([sink] if sink is not None else []) + list(dropout[1:]) + list(offsets)
    params = [bound(t, extents, query.device, later=True) for t in tensors] + after
    if hasattr(query, "device_mesh"):
        from . import shards

        params = shards.as_dtensors(query, *params)
    for traced in (score_mod, mask):
        if traced is not None and traced.ranges is not None:
            traced.check(extents, traced.sources, span)
    wrt: list[int] = []
    train = False
    if not is_compiling():
        _no_transforms(query, key, value, *params)
    if torch.is_grad_enabled():
        wrt = [n for n, t in enumerate(params) if t.requires_grad]
        train = bool(wrt) or query.requires_grad or key.requires_grad or value.requires_grad
        if wrt and mask is not None:
            _no_gradient(mask, params, tensors)
    if scale is None:
        scale = usual(query.shape[-1])
    mode = TRAIN if train else STATS if stats else PLAIN
    return torch.ops.sdpa.attention(query, key, value, params, [s.value for s in scalars], program, scale, mode, wrt)


def _no_transforms(*tensors: torch.Tensor) -> None:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError("sdpa", ["derivatives in forward mode (torch.func.jvp, dual numbers) are not supported; use backward() or torch.autograd.grad"])
    if any(is_batchedtensor(x) or is_gradtrackingtensor(x) for x in tensors):
        raise UnsupportedError("sdpa", ["transforms of torch.func (vmap, grad, vjp) are not supported; use backward() or torch.autograd.grad"])


def _no_gradient(mask: Kept, params: list, tensors: tuple) -> None:
    of_mask = {t.name for t in mask.tensors}
    wrong = [
        (f"parameter {t.name} of the mask", "a tensor that requires grad", "one that does not: a mask has no gradient; detach it")
        for t, param in zip(tensors, params)
        if t.name in of_mask and param.requires_grad
    ]
    if wrong:
        raise SpecError(wrong)


def _autocast(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
    """Under autocast the operands are converted to its type, as in FlexAttention."""
    if isinstance(query, torch.Tensor) and query.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(query.device.type):
        to = torch.get_autocast_dtype(query.device.type)
        return tuple(x.to(to) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in (query, key, value))
    return query, key, value


def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    errors = []
    if query.shape[0] != key.shape[0] or query.shape[0] != value.shape[0]:
        sizes = (query.shape[0], key.shape[0], value.shape[0])
        errors.append(("batch of query, key, value", sizes, "equal batches, or keys and values of batch 1"))
    if key.shape[1] != value.shape[1]:
        errors.append(("heads of value", value.shape[1], f"{key.shape[1]}, as the key"))
    if key.shape[2] != value.shape[2]:
        errors.append(("seq of value", value.shape[2], f"{key.shape[2]}, as the key"))
    if query.shape[3] != key.shape[3]:
        errors.append(("dim of key", key.shape[3], f"{query.shape[3]}, as the query"))
    heads, of_keys = query.shape[1], key.shape[1]
    if heads != of_keys and not enable_gqa:
        errors.append(("heads of key", of_keys, f"{heads}, as the query, or enable_gqa=True"))
    if enable_gqa and (of_keys == 0 or heads % of_keys):
        errors.append(("heads of key", of_keys, f"a divisor of {heads}, the heads of the query"))
    if errors:
        raise SpecError(errors)
