"""Models of Hugging Face's transformers: `register()`, then `model.set_attn_implementation("rust_attention")`.

It registers the attention and the masks: without the second, models pass no mask at all, not even for padding.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.nn.attention import flex_attention as theirs

from . import active
from .errors import TracingError, one
from .flex import attend
from .masks import BlockMask, mask_of
from .mods import MaskMod, ScoreMod, named
from .tracing import Parameter, Scalar, current, dtype_of

NAME = "rust_attention"


# On these devices, each length needs a plan of its own. Growing caches are read there in multiples of this many keys, and lengths are scalars of the call.
PLANNED, ROOM = ("cuda",), 256


class Mask(BlockMask, theirs.BlockMask):
    """A mask that transformers accepts as complete: it checks for PyTorch's class."""

    # The number of keys that it covers, if it is larger than the cache.
    room: int | None = None


def register(name: str = NAME, *, executor: str | None = None) -> None:
    """Registers the attention and the masks in transformers under this name. `executor` selects the executor of every layer: `cpu`, `cudnn` or `cuda`. None
    leaves the selection to the tensors' device and to measured times."""
    if executor is not None:
        named(executor)
    if "sdpa" in name or "flex" in name or "flash" in name or name == "eager":
        raise one("name", repr(name), "a name other than eager that contains none of sdpa, flex and flash, which transformers treats as its own")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention if executor is None else functools.partial(attention, executor=executor))
    AttentionMaskInterface.register(name, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    executor: str | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as models call it: (batch, heads, seq, dim) in, (batch, seq, heads, dim) out. The mask includes the sliding window."""
    active.refuse("attention of Hugging Face models, whose masks have positions of one rank,")
    room = getattr(attention_mask, "room", None)
    if room is not None:
        more = (0, 0, 0, room - key.shape[2])
        key, value = torch.nn.functional.pad(key, more), torch.nn.functional.pad(value, more)
    extents = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    # The order of the models, and of FlexAttention in transformers: the softcap, then additive terms.
    added: list[Parameter] = []
    masks: list[MaskMod] = []
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and query.shape[2] > 1:
            masks.append(_CAUSAL)
    elif isinstance(attention_mask, torch.Tensor):
        _of_tensor(attention_mask, extents, added, masks)
    else:
        masks.append(mask_of(attention_mask, extents))
    if position_bias is not None:
        if room is not None and position_bias.shape[-1] > 1:
            # Keys that are not in the cache yet are masked out, whatever is added.
            position_bias = torch.nn.functional.pad(position_bias, (0, max(0, room - position_bias.shape[-1])))
        # It comes first, because every executor has the gradient of the first term.
        added.insert(0, _parameter(position_bias, "position_bias", extents))
    mod = None if softcap is None and not added else _score_mod(None if softcap is None else float(softcap), tuple(added))
    sink = None if s_aux is None else s_aux.float()
    o, _ = attend(query, key, value, mod, masks[0] if masks else None, scaling, sink=sink, executor=executor, dropout=dropout)
    return o.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    **_others: Any,
) -> Mask:
    """Returns a mask as models request it: the function that they composed, with the padding of the batch."""
    return _made(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, torch.device(device).type)


@torch._dynamo.disable(reason="masks of transformers are traced by sdpa")
def _made(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device) -> Mask:
    # Static caches increment the tensor that they pass before a layer attends.
    q_offset, kv_offset = (x.clone().int() if isinstance(x, torch.Tensor) else x for x in (q_offset, kv_offset))
    padding = attention_mask
    if padding is not None:
        missing = kv_length + kv_offset - padding.shape[-1]
        padding = torch.nn.functional.pad(padding, (0, missing)) if missing > 0 else padding
        padding = padding.to(torch.bool)
        if bool(padding[:, kv_offset : kv_offset + kv_length].all()):
            padding = None
    if device in PLANNED and not torch.is_grad_enabled() and isinstance(q_offset, int) and q_offset > 0:
        try:
            return _growing(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, padding)
        except TracingError:
            pass  # it reads tensors at places of the whole sequence, which have to be constants
    at_end = not isinstance(q_offset, torch.Tensor) and q_offset > 0 and q_offset + q_length == kv_length + kv_offset and kv_offset == 0

    def traced(by_extents: bool) -> MaskMod:
        def fn(b: Any, h: Any, q: Any, k: Any) -> Any:
            # Written with extents, the text is equal in every decoding step.
            if by_extents:
                trace = current("a mask")
                q = q + (trace.extent("k") - trace.extent("q"))
            elif isinstance(q_offset, torch.Tensor):
                # int32, so that no call has to read the tensor to check that the sum fits.
                q = q.int() + q_offset
            elif q_offset:
                q = q + q_offset
            k = k + kv_offset if kv_offset else k
            kept = mask_function(b, h, q, k) if mask_function is not None else k <= q
            return kept if padding is None else kept & padding[b, k]

        return MaskMod(fn)

    try:
        made = traced(at_end)
    except TracingError:
        if not at_end:
            raise
        made = traced(False)
    return Mask(made, (batch_size, 1, q_length, kv_length))


def _growing(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, padding) -> Mask:
    """Returns a mask for a growing cache: its lengths are scalars, so that one plan serves a range of lengths."""
    room = -(-kv_length // ROOM) * ROOM
    numbers = [Scalar(name, n) for name, n in (("q_offset", q_offset), ("kv_offset", kv_offset), ("kv_length", kv_length))]
    if padding is not None:
        padding = torch.nn.functional.pad(padding[:, kv_offset : kv_offset + kv_length], (0, room - kv_length))

    def fn(b: Any, h: Any, q: Any, k: Any) -> Any:
        first, before, length = (n.int() for n in numbers)
        q, there = q.int() + first, k.int() + before
        kept = mask_function(b, h, q, there) if mask_function is not None else there <= q
        kept = kept & (k < length)
        return kept if padding is None else kept & padding[b, k]

    made = Mask(MaskMod(fn), (batch_size, 1, q_length, room))
    made.room = room
    return made


@functools.lru_cache(maxsize=64)
def _cap(cap: float) -> Scalar:
    return Scalar("cap", cap)


def _score_mod(cap: float | None, added: tuple[Parameter, ...]) -> ScoreMod:
    """Returns a softcap, with terms that are added to the capped scores."""
    score = "score" if cap is None else "tanh(score / cap) * cap"
    text = " + ".join([score, *[parameter.name for parameter in added]])
    return _kept(ScoreMod, text, added, () if cap is None else (_cap(cap),))


_CAUSAL = MaskMod.from_text("causal-bottom-right")


def _parameter(tensor: torch.Tensor, name: str, extents: tuple) -> Parameter:
    """Returns a parameter for a tensor of four axes; an extent of 1 applies to all."""
    if tensor.dim() != 4:
        raise one(name, f"shape {tuple(tensor.shape)}", "(batch, heads, queries, keys), where an axis that broadcasts is 1")
    places = tuple(axis for axis, n, have in zip(("batch", "head", "q", "k"), tensor.shape, extents) if n != 1 or have == 1)
    picks = tuple(None if axis in places else 0 for axis in ("batch", "head", "q", "k"))
    return Parameter(name, tensor, picks, tuple(range(len(places))), places, (0,) * len(places), dtype_of(tensor))


def _kept(kind: type, text: str, parameters: tuple[Parameter, ...], scalars: tuple[Scalar, ...] = ()) -> Any:
    declared = [f"scalar {s.name} = {s.value!r}; " for s in scalars]
    declared += [f"{p.declared} " for p in parameters]
    made = kind.__new__(kind)
    made.fn = None
    made._set("".join(declared) + text, parameters, scalars)
    return made


def _of_tensor(tensor: torch.Tensor, extents: tuple, added: list, masks: list) -> None:
    """Reads a mask that was passed as a tensor: booleans, or numbers that are added."""
    if tensor.dtype == torch.bool:
        masks.append(_kept(MaskMod, "attention_mask", (_parameter(tensor, "attention_mask", extents),)))
    elif tensor.is_floating_point():
        added.append(_parameter(tensor, "attention_mask", extents))
    else:
        raise one("attention_mask dtype", tensor.dtype, "bool, or a floating-point type for a mask that is added")
