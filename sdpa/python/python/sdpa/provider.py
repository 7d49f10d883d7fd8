"""`torch.nn.functional.scaled_dot_product_attention` on the executors of this package."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from . import op
from .errors import UnsupportedError
from .flex import _seed
from .mods import Kept, MaskMod, ScoreMod, joined
from .op import STATS
from .transformers import _of_tensor

try:
    from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl, restore_flash_attention_impl
except ImportError:  # of a PyTorch without the registry, before 2.11
    register_flash_attention_impl = None

NAME = "sdpa"


class Use:
    """The result of `use()`. It is a context manager: at its end, PyTorch's own kernels run again. `remove()` does the same."""

    _active: Use | None = None

    def __init__(self) -> None:
        if Use._active is not None:
            Use._active.remove()
        self.libraries: tuple = ()
        if register_flash_attention_impl is None:
            self.libraries = _registered()
        else:
            register_flash_attention_impl(NAME, register_fn=lambda: _Handle(_registered()))
            activate_flash_attention_impl(NAME)
        Use._active = self

    def remove(self) -> None:
        """Restores PyTorch's own kernels."""
        if Use._active is not self:
            return
        Use._active, self.libraries = None, ()
        if register_flash_attention_impl is not None:
            restore_flash_attention_impl()

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


class _Handle:
    """What PyTorch's registry keeps. The kernels are registered as long as the libraries exist."""

    def __init__(self, libraries: tuple):
        self.libraries = libraries

    def remove(self) -> None:
        self.libraries = ()


def use() -> Use:
    """Makes `scaled_dot_product_attention` run on this package, where PyTorch would use flash attention: f16 and bf16 on GPUs, f32, f16 and bf16 on CPUs.

    Call it once, or use it as a context manager: `with sdpa.use(): ...`. Calls that PyTorch gives to another backend are not affected: on GPUs those with
    `attn_mask`, with is_causal and different lengths, or in float32. A call that no executor supports raises `UnsupportedError`.
    """
    return Use()


def _registered() -> tuple:
    libraries = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of every kernel that it replaces.
        for key, kernels in (("CPU", _CPU), ("CUDA", _CUDA)):
            library = torch.library.Library("aten", "IMPL", key)
            for name, kernel in kernels.items():
                library.impl(name, kernel, key)
            libraries.append(library)
    return tuple(libraries)


@functools.lru_cache(maxsize=1)
def _causal() -> MaskMod:
    return MaskMod.from_text("causal")


def _problem(q: torch.Tensor, k: torch.Tensor, is_causal: bool, attn_mask: torch.Tensor | None, dropout: float) -> tuple[str, list]:
    """Returns the program of a call and the tensors that it reads, without those of dropout."""
    added: list = []
    masks: list[Kept] = [_causal()] if is_causal else []
    if attn_mask is not None:
        if is_causal:
            raise UnsupportedError(NAME, ["is_causal and attn_mask cannot be combined: pass one of them"])
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
        _of_tensor(attn_mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), added, masks)
    mod = None
    if added:
        from .transformers import _score_mod

        mod = _score_mod(None, tuple(added))
    deterministic = torch.are_deterministic_algorithms_enabled()
    program, tensors, _ = joined(mod, masks[0] if masks else None, False, deterministic, None, dropout)
    from .bind import bound

    extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return program, [bound(t, extents, q.device) for t in tensors]


def _run(q, k, v, dropout, is_causal, attn_mask, scale) -> tuple:
    program, params = _problem(q, k, is_causal, attn_mask, dropout)
    seed = list(_seed(q.device)) if dropout else []
    scale = op.usual(q.shape[-1]) if scale is None else scale
    o, stats = torch.ops.sdpa.attention(q, k, v, params + seed, [], program, scale, STATS, [])
    return o, stats, seed


def _gradients(d_o, q, k, v, o, stats, dropout, is_causal, attn_mask, scale, seed) -> tuple:
    program, params = _problem(q, k, is_causal, attn_mask, dropout)
    scale = op.usual(q.shape[-1]) if scale is None else scale
    made = torch.ops.sdpa.attention_backward(d_o, q, k, v, o, stats, params + seed, [], program, scale, [])
    return tuple(made[:3])


def _forward_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    o, stats, _ = _run(query, key, value, 0.0, is_causal, attn_mask, scale)
    return o, stats


def _backward_cpu(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    return _gradients(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask, scale, [])


def _forward_cuda(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if return_debug_mask:
        raise UnsupportedError(NAME, ["return_debug_mask is not supported"])
    o, stats, seed = _run(query, key, value, dropout_p, is_causal, None, scale)
    state = torch.cat(seed) if seed else torch.zeros(2, dtype=torch.int64, device=query.device)
    nothing = torch.empty(0, dtype=query.dtype, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return o, stats, None, None, query.shape[2], key.shape[2], state.view(torch.uint64), unused, nothing


def _backward_cuda(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, *, scale=None
):
    seed = list(philox_seed.view(torch.int64).split(1)) if dropout_p else []
    return _gradients(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, None, scale, seed)


_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _forward_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _backward_cpu,
}
_CUDA = {
    "_scaled_dot_product_flash_attention": _forward_cuda,
    "_scaled_dot_product_flash_attention_backward": _backward_cuda,
}
