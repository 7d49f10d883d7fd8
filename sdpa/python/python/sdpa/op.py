"""The operator `torch.ops.sdpa.attention`, its gradient, and its registration for `torch.compile`."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import warnings
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import _native
from .bind import narrowed
from .errors import SpecError, UnsupportedError, one
from .exchange import DTYPES
from .mods import DROPOUT
from .mods import program as read

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Compilers call the operator with tensors on `meta`, without memory.
DEVICES = ("cpu", "cuda", "meta")

# The results of a forward call in addition to the output.
PLAIN, STATS, TRAIN = 0, 1, 2

torch.library.define(
    "sdpa::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor[]? params, float[]? scalars, str program, float scale, int mode, int[]? wrt) -> (Tensor, Tensor)",
)
torch.library.define(
    "sdpa::attention_backward",
    "(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor stats, Tensor[]? params, float[]? scalars, str program, float scale, int[]? wrt) -> Tensor[]",
)

try:
    from torch._C import _cuda_getCurrentRawStream as _stream
except ImportError:  # of a build without CUDA

    def _stream(index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream


# Most entries of a cache of prepared calls.
MOST = 512
_PLANS: dict[tuple, Any] = {}
_SAID: set[str] = set()
_SEEN_LIBRARIES = threading.Lock()


def _warn_once(what: str, text: str) -> None:
    if what not in _SAID:
        _SAID.add(what)
        warnings.warn(f"{text}; said once", stacklevel=4)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns true if the last axis is dense."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with a dense last axis, copied if necessary."""
    if is_dense(tensor):
        return tensor
    _warn_once("copied", f"{name} is copied, as its last axis has strides of {tensor.stride(-1)} elements")
    return tensor.contiguous()


def _like(tensor: torch.Tensor, shape: tuple) -> torch.Tensor:
    """Allocates a result whose last axis is dense and whose other axes have the order of the tensor's, an expanded axis outermost."""
    order = sorted(range(3), key=lambda n: (tensor.stride(n) != 0, -tensor.stride(n)))
    if order == [0, 1, 2]:
        return tensor.new_empty(shape)
    made = tensor.new_empty([shape[n] for n in order] + [shape[3]])
    return made.permute([order.index(n) for n in range(3)] + [3])


def _output(query: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Allocates an output in the query's memory order, if the last axis is not dense there."""
    if is_dense(query):
        return None
    order = sorted(range(4), key=lambda n: (query.stride(n) != 0, -query.stride(n)))
    shape = (*query.shape[:3], dim)
    return query.new_empty([shape[n] for n in order]).permute([order.index(n) for n in range(4)])


def _strides(tensor: torch.Tensor) -> tuple:
    strides = tensor.stride()
    return strides if strides[-1] == 1 or tensor.shape[-1] > 1 else (*strides[:-1], 1)


def _layout(tensor: torch.Tensor) -> tuple:
    low = tensor.data_ptr() & 15
    return tensor.shape, _strides(tensor), (low & -low) or 16


def mistakes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises an error that lists everything wrong with the operands, before anything runs."""
    if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and not (q.is_nested or k.is_nested or v.is_nested):
        kind = (q.dtype, q.device, 4, torch.strided)
        alike = all((x.dtype, x.device, x.dim(), x.layout) == kind for x in (q, k, v))
        if alike and q.dtype in FLOATS and q.device.type in DEVICES:
            return
    errors = []
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, torch.Tensor):
            errors.append((name, type(x).__name__, "a tensor"))
            continue
        if x.is_nested:
            errors.append((name, "a nested tensor", "a dense tensor (batch, heads, seq, dim)"))
            continue
        if x.dim() != 4:
            errors.append((f"{name} shape", tuple(x.shape), "(batch, heads, seq, dim)"))
        if x.dtype not in FLOATS:
            errors.append((f"{name} dtype", x.dtype, "one of float32, float16, bfloat16"))
        elif isinstance(q, torch.Tensor) and x.dtype != q.dtype:
            errors.append((f"{name} dtype", x.dtype, f"{q.dtype}, as the query"))
        if isinstance(q, torch.Tensor) and x.device != q.device:
            errors.append((f"{name} device", x.device, f"{q.device}, as the query"))
        if x.device.type not in DEVICES:
            errors.append((f"{name} device", x.device, "cpu or cuda"))
        if x.layout != torch.strided:
            errors.append((f"{name} layout", x.layout, "strided"))
    if errors:
        raise SpecError(errors)


def expanded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values for the query's batch: those of batch 1 are expanded, without a copy."""
    batch = query.shape[0]
    one = [x.shape[0] == 1 and batch != 1 for x in (key, value)]
    return tuple(x.expand(batch, -1, -1, -1) if once else x for x, once in zip((key, value), one))  # type: ignore[return-value]


def usual(dim: int) -> float:
    """Returns the default scale. A dim of 0 is rejected later, together with other mistakes."""
    return 1.0 / math.sqrt(dim) if dim else 1.0


def factor(scale: Any) -> float:
    """Returns a scale as a number. A tensor that requires a gradient is rejected, because the gradient would be lost."""
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise one("scale", "a tensor that requires grad", "a number: scale has no gradient; flex_attention(query * scale, ..., scale=1.0) has one")
    try:
        return float(scale)
    except (TypeError, ValueError, RuntimeError):
        raise one("scale", f"type {type(scale).__name__}", "one number, or None for 1 / sqrt(dim)") from None


def _mapped(name: str) -> str | None:
    """Returns the file of a library that this process has loaded."""
    try:
        with open("/proc/self/maps") as maps:
            parts = [line.split(None, 5) for line in maps if name in line]
    except OSError:
        return None
    return min({part[5].strip() for part in parts if len(part) == 6}, default=None)


def _nvrtc() -> str | None:
    """Returns the NVRTC that PyTorch has loaded, or would load. It first loads the PyTorch library that links to it, so that the process has only PyTorch's
    NVRTC. Returns None if the variable `SDPA_NVRTC` names one, or if PyTorch has none."""
    if os.environ.get("SDPA_NVRTC"):
        return None
    there = _mapped("libnvrtc.so")
    if there is None and torch.version.cuda is not None:
        try:
            ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libcaffe2_nvrtc.so"))
        except OSError:
            return _in_wheels()
        there = _mapped("libnvrtc.so")
    return there


def _in_wheels() -> str | None:
    """Returns the NVRTC of the wheels next to PyTorch's."""
    site = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    places = [os.path.join(site, "nvidia", *folder, "lib", f"libnvrtc.so.{major}") for folder in ((f"cu{major}",), ("cuda_nvrtc",))]
    return next((place for place in places if os.path.exists(place)), None)


def libraries() -> None:
    """Selects the cuDNN and the NVRTC that PyTorch has loaded, so that the process has one of each."""
    if "libraries" in _SAID:
        return
    with _SEEN_LIBRARIES:
        if "libraries" in _SAID:
            return
        cudnn = None
        if torch.backends.cudnn.is_available() and torch.backends.cudnn.version():
            cudnn = _mapped("libcudnn.so")
        _native.use_libraries(cudnn, _nvrtc())
        _SAID.add("libraries")


def keep(cache: dict, key: tuple, made: Any) -> None:
    """Adds an entry to a cache, without its oldest entries if it is full."""
    while len(cache) >= MOST:
        try:
            cache.pop(next(iter(cache)), None)
        except (RuntimeError, StopIteration):  # another thread was here
            break
    cache[key] = made


def plan(program: str, device: torch.device, dtype: torch.dtype, stats: bool, tensors: tuple, wrt: tuple) -> Any:
    """Returns a prepared pass for tensors of these layouts; the most recent ones are cached."""
    key = (program, device, dtype, stats, tensors, wrt)
    there = _PLANS.get(key)
    if there is not None:
        return there
    ordinal = None
    if device.type == "cuda":
        libraries()
        ordinal = torch.cuda.current_device() if device.index is None else device.index
    try:
        made = read(program).plan(ordinal, DTYPES[dtype], list(tensors), stats, list(wrt))
    except UnsupportedError as e:
        hint = "tensors on the CPU run on the CPU executor, whatever they ask for; nothing falls back by itself"
        raise UnsupportedError(e.executor, [*e.reasons, hint], e.before) from None
    keep(_PLANS, key, made)
    return made


def _names(program: str) -> list[str]:
    import json

    return json.loads(program)["tensors"]


def _narrowed(params: list, program: str) -> list:
    """Returns the parameters with int64 converted to int32, except the seed and offset of dropout and the offsets of packed sequences."""
    own = len(params) - (len(DROPOUT) if '"dropout":' in program else 0) - (0 if not is_packed(program) else 2 if '"cross": true' in program else 1)
    return [narrowed(t, f"params[{n}]") if n < own else t for n, t in enumerate(params)]


def is_packed(program: str) -> bool:
    """Returns true for packed sequences, whose operands are (1, heads, tokens, dim)."""
    return '"packed":' in program


def statistics(q: torch.Tensor, program: str) -> torch.Tensor:
    """Allocates the row statistics of a forward pass: (batch, heads, queries), or (1, heads, tokens) in the order of packed sequences, (tokens, heads)."""
    shape = rows(q.shape, program)
    if not is_packed(program):
        return q.new_empty(shape, dtype=torch.float32)
    return q.new_zeros((*shape[:-2], shape[-1], shape[-2]), dtype=torch.float32).transpose(-1, -2)


def rows(shape: tuple, program: str) -> tuple:
    """Returns the shape of the row statistics of a forward pass: stats, and the maxima of the scores and the sums of exponentials if the program has them."""
    if '"max_scores":' not in program:
        return tuple(shape[:3])
    return (3 if '"sum_exp":' in program else 2, *shape[:3])


def _wrt(program: str, params: list, wrt: list[int], device: torch.device, dtype: torch.dtype) -> tuple:
    """Returns names and element types of the gradients of parameters. On a GPU those of f32 parameters are rounded to the type of the operands, as cuDNN
    does."""
    if not wrt:
        return ()
    names = _names(program)
    types = [params[n].dtype for n in wrt]
    if device.type == "cuda":
        types = [dtype if names[n] != "sink" and t == torch.float32 else t for n, t in zip(wrt, types)]
    return tuple((names[n], DTYPES[t]) for n, t in zip(wrt, types))


def _there(q: torch.Tensor, params: list, others: tuple = ()) -> None:
    """Checks that all other tensors are on the operands' device, and have a shape and type that fits."""
    errors = [(f"params[{n}] device", t.device, f"q's, {q.device}") for n, t in enumerate(params) if t.device != q.device]
    errors += [(f"params[{n}] dtype", t.dtype, f"one of {', '.join(DTYPES.values())}") for n, t in enumerate(params) if t.dtype not in DTYPES]
    for name, x, shape, dtype in others:
        if (tuple(x.shape), x.dtype, x.device) != (tuple(shape), dtype, q.device):
            errors.append((name, f"{tuple(x.shape)} of {x.dtype} on {x.device}", f"{tuple(shape)} of {dtype} on {q.device}"))
    if errors:
        raise SpecError(errors)


def run(made: Any, device: torch.device, operands: Any, stats: int, params: Any, scalars: Any, gradients: Any, scale: float) -> None:
    """Runs a plan over these addresses: immediately on the CPU, or on PyTorch's current stream of a GPU."""
    if device.type == "cpu":
        given = [(t.data_ptr(), DTYPES[t.dtype], t.numel()) for t in params] if params else ()
        made.run(operands, stats, given, scalars, gradients, scale, torch.get_num_threads(), 0, 0)
        return
    aligned = [t if t.data_ptr() % 16 == 0 else t.clone() for t in params]
    given = [(t.data_ptr(), DTYPES[t.dtype], t.numel()) for t in aligned]
    # PyTorch allocates it, so that it is reused in stream order and a captured graph keeps it.
    size = made.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    made.run(operands, stats, given, scalars, gradients, scale, 1, _stream(device.index), workspace.data_ptr() if size else 0)


def forward_plan(q: Any, k: Any, v: Any, o: Any, params: list, program: str, mode: int, wrt: list) -> Any:
    """Returns the plan of a forward pass. On a GPU it also prepares the backward pass if gradients will be computed, so that unsupported features are reported
    now."""
    layouts = (_layout(q), _layout(k), _layout(v), _layout(o))
    made = plan(program, q.device, q.dtype, mode != PLAIN, layouts, ())
    if mode == TRAIN and q.device.type == "cuda":
        gradients = tuple(_layout(_like(x, x.shape)) for x in (q, k, v))
        plan(program, q.device, q.dtype, True, (*layouts, layouts[3], *gradients), _wrt(program, params, wrt, q.device, q.dtype))
    return made


def backward_plan(tensors: tuple, params: list, program: str, wrt: list) -> tuple[Any, list, list]:
    """Returns the plan of a backward pass over `q k v o d_o dq dk dv`, the types in which gradients of parameters are summed, and the plan's order of these."""
    q = tensors[0]
    asked = _wrt(program, params, wrt, q.device, q.dtype)
    made = plan(program, q.device, q.dtype, True, tuple(_layout(x) for x in tensors), asked)
    types = {name: dtype for dtype, name in DTYPES.items()}
    # A problem has the gradient of a sink after the others.
    order = sorted(range(len(asked)), key=lambda n: asked[n][0] == "sink")
    return made, [types[dtype] for _, dtype in asked], order


def _forward(q, k, v, params, scalars, program, scale, mode, wrt):
    mistakes(q, k, v)
    params, scalars, wrt = _narrowed(params or [], program), scalars or [], wrt or []
    _there(q, params)
    ordered = _output(q, v.shape[3])
    q, k, v = dense("query", q), dense("key", k), dense("value", v)
    o = _like(q, (q.shape[0], q.shape[1], q.shape[2], v.shape[3]))
    if is_packed(program):
        o.zero_()  # tokens may belong to no sequence
    stats = q.new_empty(0, dtype=torch.float32) if mode == PLAIN else statistics(q, program)
    params = [t.contiguous() for t in params]
    made = forward_plan(q, k, v, o, params, program, mode, wrt)
    operands = [x.data_ptr() for x in (q, k, v, o)]
    run(made, q.device, operands, stats.data_ptr() if mode != PLAIN else 0, params, scalars, [], scale)
    return o if ordered is None else ordered.copy_(o), stats


def _backward(d_o, q, k, v, o, stats, params, scalars, program, scale, wrt):
    mistakes(q, k, v)
    out = (*q.shape[:3], v.shape[3])
    params, scalars, wrt = _narrowed(params or [], program), scalars or [], wrt or []
    _there(q, params, (("o", o, out, q.dtype), ("d_o", d_o, out, q.dtype), ("stats", stats, q.shape[:3], torch.float32)))
    q, k, v, o = dense("query", q), dense("key", k), dense("value", v), dense("output", o)
    if d_o.stride(-1) not in (0, 1) and d_o.shape[-1] > 1:
        d_o = d_o.contiguous()
    dq, dk, dv = (_like(x, x.shape) for x in (q, k, v))
    if is_packed(program):
        dq, dk, dv, stats = dq.zero_(), dk.zero_(), dv.zero_(), stats.transpose(-1, -2)
    params, stats = [t.contiguous() for t in params], stats.contiguous()
    tensors = (q, k, v, o, d_o, dq, dk, dv)
    made, types, order = backward_plan(tensors, params, program, wrt)
    sums = [torch.empty(params[n].shape, dtype=dtype, device=q.device) for n, dtype in zip(wrt, types)]
    operands = [x.data_ptr() for x in tensors]
    run(made, q.device, operands, stats.data_ptr(), params, scalars, [sums[n].data_ptr() for n in order], scale)
    return [dq, dk, dv, *(s.to(params[n].dtype) for n, s in zip(wrt, sums))]


torch.library.impl("sdpa::attention", ("cpu", "cuda"))(_forward)
torch.library.impl("sdpa::attention_backward", ("cpu", "cuda"))(_backward)


@torch.library.register_fake("sdpa::attention")
def _fake(q, k, v, params, scalars, program, scale, mode, wrt):
    ordered = _output(q, v.shape[3])
    o = _like(q, (q.shape[0], q.shape[1], q.shape[2], v.shape[3])) if ordered is None else ordered
    return o, q.new_empty(0, dtype=torch.float32) if mode == PLAIN else statistics(q, program)


@torch.library.register_fake("sdpa::attention_backward")
def _fake_backward(d_o, q, k, v, o, stats, params, scalars, program, scale, wrt):
    return [*(_like(x, x.shape) for x in (q, k, v)), *(params[n].new_empty(params[n].shape) for n in wrt or [])]


def _pairs(q: torch.Tensor, k: torch.Tensor, params: list | None, program: str) -> int:
    """Returns the number of pairs of a query and a key without a mask, over all batch entries and heads. It reads the offsets of packed sequences."""
    if not is_packed(program):
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    lengths = [offsets.diff() for offsets in params[-2 if '"cross": true' in program else -1 :]]
    return q.shape[1] * int((lengths[0] * lengths[-1]).sum())


@register_flop_formula(torch.ops.sdpa.attention, get_raw=True)
def _flops(q, k, v, params, scalars, program, *_others, **_more) -> int:
    """Returns the operations of a forward pass without a mask, as PyTorch counts those of its own attention."""
    return 2 * _pairs(q, k, params, program) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.sdpa.attention_backward, get_raw=True)
def _backward_flops(d_o, q, k, v, o, stats, params, scalars, program, *_others, **_more) -> int:
    """Returns the operations of a backward pass: scores, dP, dV, dQ and dK."""
    return 2 * _pairs(q, k, params, program) * (3 * q.shape[3] + 2 * v.shape[3])


def _setup(ctx, inputs, output):
    q, k, v, params, scalars, program, scale, mode, wrt = inputs
    o, stats = output
    ctx.save_for_backward(q, k, v, o, stats[0] if stats.dim() == 4 else stats, *(params or []))
    ctx.set_materialize_grads(False)
    ctx.rest = (scalars, program, scale, mode, wrt)


def _gradient(ctx, d_o, d_stats):
    scalars, program, scale, mode, wrt = ctx.rest
    q, k, v, o, stats, *params = ctx.saved_tensors
    of_params = ctx.needs_input_grad[3]
    needed = [n for n, needs in enumerate(of_params) if needs] if params else []
    if mode != TRAIN:
        raise one("mode", f"{mode} (without gradients)", f"{TRAIN} (with gradients), as an input requires grad")
    if not set(needed) <= set(wrt or []):
        raise one("wrt", wrt, f"every parameter that requires a gradient: {needed}")
    dq, dk, dv, *sums = gradients(d_o, d_stats, q, k, v, o, stats, params, scalars or [], program, scale, wrt or [])
    # The pytree structure of an empty list is that of a list of tensors; a list of numbers has none.
    of_numbers = [None if numbers is None or numbers else [] for numbers in (scalars, wrt)]
    return dq, dk, dv, sums if isinstance(of_params, list) else None, of_numbers[0], None, None, None, of_numbers[1]


def gradients(d_o, d_stats, q, k, v, o, stats, params, scalars, program, scale, wrt, backward=None) -> tuple:
    """Calls the operator, or `backward` in its place. Returns the gradients of `q`, `k`, `v`, and of each parameter, or None for those without one."""
    backward = torch.ops.sdpa.attention_backward if backward is None else backward
    if d_o is None and d_stats is None:
        return (None,) * (3 + len(params))
    if d_stats is not None and d_stats.dim() == 4:
        # The maxima of scores have no gradient.
        d_stats = d_stats[0]
    if d_stats is not None and v.shape[-1] + _MORE > WIDEST and q.device.type == "cuda":
        return _apart(d_o, d_stats, q, k, v, o, stats, params, scalars, program, scale, wrt, backward)
    sink = _names(program).index("sink") if d_stats is not None and '"sink":true' in program else None
    of_sink = _of_sink(d_o, d_stats, o, stats, params[sink]) if sink in wrt else None
    if d_stats is not None:
        d_o, o, v = _through_stats(d_o, o, v, d_stats)
    dq, dk, dv, *sums = backward(d_o, q, k, v, o, stats, params, scalars, program, scale, wrt)
    if d_stats is not None:
        dv = dv[..., : dv.shape[-1] - _MORE]
    of = dict(zip(wrt, sums))
    if of_sink is not None:
        of[sink] = of_sink
    return dq, dk, dv, *[of.get(n) for n in range(len(params))]


def _apart(d_o, d_stats, q, k, v, o, stats, params, scalars, program, scale, wrt, backward=None) -> tuple:
    """Computes the gradient through stats in a pass of its own, over values of 0 with the fewest columns, because no kernel has room for more columns."""
    narrow = o.new_zeros((*o.shape[:3], 0)), v.new_zeros((*v.shape[:3], 0))
    through = gradients(None, d_stats, q, k, narrow[1], narrow[0], stats, params, scalars, program, scale, wrt, backward)
    if d_o is None:
        return (*through[:2], torch.zeros_like(v), *through[3:])
    direct = gradients(d_o, None, q, k, v, o, stats, params, scalars, program, scale, wrt, backward)
    dq, dk = (x + y for x, y in zip(direct[:2], through[:2]))
    return dq, dk, direct[2], *[x if y is None else x + y for x, y in zip(direct[3:], through[3:])]


def _of_sink(d_o, d_stats, o, stats, sink) -> torch.Tensor:
    """Returns the gradient of a sink through the output and stats. Executors leave out rows without keys, whose output is 0 but whose stats are the sink."""
    rows = d_stats.float() if d_o is None else d_stats.float() - (o.float() * d_o.float()).sum(-1)
    return ((sink.float()[:, None] - stats).exp() * rows).sum((0, 2)).to(sink.dtype)


# The largest head dim of executors on GPUs.
WIDEST = 256
# Number of columns that carry the gradient of stats: the minimum that every executor supports.
_MORE = 8
# The values of `o` in the first of these columns. A single element of f16 or bf16 would round the gradient of stats, and f16 ends at 65,504; three hold an f32.
_CARRIERS = (2.0**15, 1.0, 2.0**-12)


def _through_stats(d_o, o, v, d_stats):
    """Passes the gradient of stats in columns whose V is 0: `Σ o·d_o` decreases by `d_stats`, and nothing else changes."""
    d_o = torch.zeros_like(o) if d_o is None else d_o
    largest = torch.finfo(d_o.dtype).max
    left = torch.where(torch.isfinite(d_stats), -d_stats, 0.0).unsqueeze(-1)
    parts, carriers = [], []
    for carrier in _CARRIERS:
        part = (left / carrier).clamp(-largest, largest).to(d_o.dtype)
        left = left - part.float() * carrier
        parts.append(part)
        carriers.append(o.new_full((*o.shape[:3], 1), carrier))
    zeros = o.new_zeros((*o.shape[:3], _MORE - len(_CARRIERS)))
    return _columns(d_o, *parts, zeros), _columns(o, *carriers, zeros), _columns(v, v.new_zeros((*v.shape[:3], _MORE)))


def _columns(first: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """Appends columns, in the first tensor's order of heads and tokens: packed sequences may need it."""
    if first.stride(1) >= first.stride(2):
        return torch.cat([first, *more], -1)
    return torch.cat([x.transpose(1, 2) for x in (first, *more)], -1).transpose(1, 2)


def _no_second(ctx, *gradients):
    raise UnsupportedError("sdpa", ["second derivatives of attention are not supported"])


torch.library.register_autograd("sdpa::attention", _gradient, setup_context=_setup)
torch.library.register_autograd("sdpa::attention_backward", _no_second, setup_context=lambda ctx, inputs, output: None)
