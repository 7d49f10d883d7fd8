"""`torch.nn.functional.scaled_dot_product_attention` on the executors of this package."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from . import active, op
from .bind import bound
from .errors import UnsupportedError
from .flex import _seed
from .mods import Kept, MaskMod, joined
from .op import STATS
from .transformers import _of_tensor, _score_mod

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
    """Makes `torch.nn.functional.scaled_dot_product_attention` run on this package.

    It replaces PyTorch's fused kernels: flash attention on CPUs, and on GPUs flash, memory-efficient and cuDNN attention. Call it once, or use it as a context
    manager: `with sdpa.use(): ...`. Calls that PyTorch gives to none of them, because it computes them with single operations, are not affected. A call that
    no executor supports raises `UnsupportedError`, and a call with float64 tensors raises `SpecError`.
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


class _Call:
    """One call: its program, and the tensors that it reads, without those of dropout."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, is_causal: bool, bias: torch.Tensor | None, dropout: float, scale: float | None):
        added: list = []
        masks: list[Kept] = [_causal()] if is_causal else []
        extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if bias is not None:
            if is_causal:
                raise UnsupportedError(NAME, ["is_causal and attn_mask cannot be combined: pass one of them"])
            _of_tensor(bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)), extents, added, masks)
        mod = _score_mod(None, tuple(added)) if added else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        self.program, tensors, _ = joined(mod, masks[0] if masks else None, False, deterministic, None, dropout)
        self.params = [bound(t, extents, q.device) for t in tensors]
        self.scale = op.usual(q.shape[-1]) if scale is None else scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and its log-sum-exp."""
        active.refuse("scaled_dot_product_attention")
        o, stats = torch.ops.sdpa.attention(q, k, v, self.params + seed, [], self.program, self.scale, STATS, [])
        return o, stats

    def backward(self, d_o: torch.Tensor, q: Any, k: Any, v: Any, o: Any, stats: Any, seed: list, of_bias: bool = False) -> list[torch.Tensor]:
        """Returns the gradients of q, k, v, and that of the bias if asked."""
        wrt = [0] if of_bias else []
        return torch.ops.sdpa.attention_backward(d_o, q, k, v, o, stats, self.params + seed, [], self.program, self.scale, wrt)


def _state(seed: list, device: torch.device) -> torch.Tensor:
    """Returns seed and offset of dropout as PyTorch's kernels return theirs."""
    return (torch.cat(seed) if seed else torch.zeros(2, dtype=torch.int64, device=device)).view(torch.uint64)


def _seeds(state: torch.Tensor, dropout: float) -> list:
    return list(state.view(torch.int64).split(1)) if dropout else []


def _pair(seed: list, device: torch.device) -> list:
    """Returns seed and offset of dropout as PyTorch's cuDNN and memory-efficient kernels return theirs: two tensors without axes."""
    return [x.reshape(()) for x in seed] if seed else [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]


def _seeds_of(seed: torch.Tensor, offset: torch.Tensor, dropout: float) -> list:
    return [seed.reshape(1), offset.reshape(1)] if dropout else []


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with heads innermost in memory but for its last axis, as some of PyTorch's kernels return their results: compiled code relies on it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _unused(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.uint64, device=device)


def _drawn(dropout: float, device: torch.device) -> list:
    return list(_seed(device)) if dropout else []


def _forward_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    o, stats = _Call(query, key, is_causal, attn_mask, 0.0, scale).forward(query, key, value, [])
    return o, _tokens_first(stats)


def _backward_cpu(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    made = _Call(query, key, is_causal, attn_mask, 0.0, scale).backward(grad_out, query, key, value, out, logsumexp, [])
    return tuple(map(_tokens_first, made))


def _no_debug_mask(asked: bool) -> None:
    if asked:
        raise UnsupportedError(NAME, ["return_debug_mask is not supported"])


def _forward_flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _no_debug_mask(return_debug_mask)
    seed = _drawn(dropout_p, query.device)
    o, stats = _Call(query, key, is_causal, None, dropout_p, scale).forward(query, key, value, seed)
    nothing = torch.empty(0, dtype=query.dtype, device=query.device)
    return o, stats, None, None, query.shape[2], key.shape[2], _state(seed, query.device), _unused(query.device), nothing


def _backward_flash(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, *, scale=None
):
    call = _Call(query, key, is_causal, None, dropout_p, scale)
    return tuple(call.backward(grad_out, query, key, value, out, logsumexp, _seeds(philox_seed, dropout_p)))


def _forward_cudnn(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _no_debug_mask(return_debug_mask)
    seed = _drawn(dropout_p, query.device)
    o, stats = _Call(query, key, is_causal, attn_bias, dropout_p, scale).forward(query, key, value, seed)
    return o, stats.unsqueeze(-1), None, None, query.shape[2], key.shape[2], *_pair(seed, query.device), None


def _backward_cudnn(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None
):
    call = _Call(query, key, is_causal, attn_bias, dropout_p, scale)
    return tuple(call.backward(grad_out, query, key, value, out, logsumexp.squeeze(-1), _seeds_of(philox_seed, philox_offset, dropout_p)))


# PyTorch's memory-efficient kernels pad the log-sum-exp to a multiple of this many queries.
_PADDED = 32


def _forward_efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    seed = _drawn(dropout_p, query.device)
    o, stats = _Call(query, key, is_causal, attn_bias, dropout_p, scale).forward(query, key, value, seed)
    stats = torch.nn.functional.pad(stats, (0, -stats.shape[-1] % _PADDED)) if compute_log_sumexp else stats[..., :0]
    return _tokens_first(o), stats, *_pair(seed, query.device)


def _backward_efficient(
    grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    call = _Call(query, key, is_causal, attn_bias, dropout_p, scale)
    of_bias = attn_bias is not None and grad_input_mask[3]
    stats = logsumexp[..., : query.shape[2]].contiguous()
    made = call.backward(grad_out, query, key, value, out, stats, _seeds_of(philox_seed, philox_offset, dropout_p), of_bias)
    return *map(_tokens_first, made[:3]), _padded(made[3].reshape(attn_bias.shape)) if of_bias else None


def _padded(d_bias: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a bias with rows of a multiple of 16 elements in memory, as PyTorch's memory-efficient kernels do."""
    keys = d_bias.shape[-1]
    return d_bias.new_empty((*d_bias.shape[:-1], keys + -keys % 16))[..., :keys].copy_(d_bias)


_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _forward_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _backward_cpu,
}
_CUDA = {
    "_scaled_dot_product_flash_attention": _forward_flash,
    "_scaled_dot_product_flash_attention_backward": _backward_flash,
    "_scaled_dot_product_cudnn_attention": _forward_cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _backward_cudnn,
    "_scaled_dot_product_efficient_attention": _forward_efficient,
    "_scaled_dot_product_efficient_attention_backward": _backward_efficient,
}
