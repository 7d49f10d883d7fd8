"""Attention for PyTorch with FlexAttention's API: only the import changes, and training works on CPUs too.

    from sdpa import flex_attention, create_block_mask, and_masks, or_masks, noop_mask

Score_mods and masks are traced from Python functions. CUDA libraries are loaded by the first call with tensors on a GPU. Without PyTorch, the package has
the tracer (`ScoreMod`, `MaskMod`) and attention over NumPy arrays (`sdpa.numpy`).
"""

from __future__ import annotations

from typing import Any

from . import _native
from .errors import EnvironmentError, ParallelError, SpecError, TracingError, UnsupportedError
from .kernels import clear_kernel_cache, kernel_cache, set_kernel_cache
from .masks import BlockMask, and_masks, create_block_mask, noop_mask, or_masks
from .mods import MaskMod, ScoreMod, is_batch_invariant, set_batch_invariant
from .tracing import Scalar, array, scalar

__version__ = _native.__version__

__all__ = [
    "BlockMask", "EnvironmentError", "MaskMod", "ParallelError", "Scalar", "ScoreMod", "SpecError", "TracingError", "UnsupportedError",
    "and_masks", "array", "attach_plans", "cache_report", "clear_kernel_cache", "context_parallel", "create_block_mask", "create_nested_block_mask", "explain", "flex_attention", "is_batch_invariant", "kernel_cache", "noop_mask", "or_masks", "paged_attention", "save_plans", "scalar", "set_batch_invariant", "set_kernel_cache", "show", "use",
]  # fmt: skip

_LATER = {
    "flex_attention": "flex", "explain": "report", "cache_report": "report", "show": "picture", "attach_plans": "plans", "save_plans": "plans", "use": "provider",
    "create_nested_block_mask": "nested", "paged_attention": "paged", "context_parallel": "parallel",
}


def __getattr__(name: str) -> Any:
    """Imports the names that need PyTorch on first access."""
    import importlib

    if name in ("numpy", "transformers", "flex", "op", "parallel", "report", "picture", "plans", "provider", "speed"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = made
    return made
