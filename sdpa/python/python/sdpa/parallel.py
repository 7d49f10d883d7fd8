"""Context parallelism: attention over the tokens of all ranks of a process group."""

from __future__ import annotations

import copy
import functools
import json
import sys
import zlib
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch.utils.checkpoint import CheckpointFunction

from . import _native, active, op
from .bind import bound, span
from .errors import SpecError, UnsupportedError, one
from .exchange import DTYPES
from .group import Group
from .guards import kept
from .masks import BlockMask, mask_of, read
from .mods import MaskMod, ScoreMod, joined, named
from .mods import program as parsed
from .steps import Dry, Run, Schedule, Values

_SHARDINGS = ("contiguous", "zigzag", "striped")
# The JSON of each strategy, and the default of its number.
_STRATEGIES: dict[str, tuple] = {
    "auto": (lambda n: "auto", None),
    "all_gather": (lambda n: {"all_gather": {"head_groups": n}}, 1),
    "head_exchange": (lambda n: "head_exchange", None),
    "ring": (lambda n: "ring", None),
    "halo": (lambda n: "halo", None),
    "grid": (lambda n: {"grid": {"heads": n}}, 0),
}


def _strategy(given: Any) -> str:
    name, _, number = given.partition(":") if isinstance(given, str) else ("", "", "")
    write, default = _STRATEGIES.get(name, (None, None))
    names = "auto, all_gather, all_gather:GROUPS (of heads), head_exchange, ring, halo, or grid:RANKS (that divide the heads)"
    if write is None or (number and (default is None or not number.isdigit())) or (default == 0 and not number):
        raise one("strategy", repr(given), names)
    return json.dumps(write(int(number) if number else default))


def _sharding(given: Any) -> tuple[str, int | None]:
    """Returns a sharding as JSON, and the number of tokens that it fixes."""
    rule = "contiguous, zigzag, striped, or a list of (start, stride, length) for each rank"
    if isinstance(given, str):
        if given not in _SHARDINGS:
            raise one("sharding", repr(given), rule)
        return json.dumps(given), None
    try:
        lists = [[{"start": int(start), "stride": int(stride), "len": int(n)} for start, stride, n in chunks] for chunks in given]
    except (TypeError, ValueError):
        raise one("sharding", repr(given), rule) from None
    return json.dumps({"chunks": lists}), sum(chunk["len"] for chunks in lists for chunk in chunks)


def _lengths(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    pair = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise one("seq", repr(given), "the tokens of all ranks, or (queries, keys)")
    return pair


@functools.lru_cache(maxsize=256)
def _shards(sharding: str, ranks: int, seq: int) -> tuple:
    return tuple([tuple(chunks) for chunks in _native.shards(sharding, ranks, seq)])


class Problem:
    """A problem over several ranks, as one of them sees it."""

    def __init__(self, key: tuple, rank: int):
        program, dtype, extents, ranks, sharding, strategy, backward = key
        self.key, self.rank, self.extents = key, rank, extents
        self.native = _native.Parallel(parsed(program), DTYPES[dtype], list(extents), ranks, sharding, strategy, backward)
        self.lengths = self.native.lengths(rank)
        self.made: dict[str, Schedule] = {}
        self.digests: dict[tuple, list] = {}
        self.prepared: set = set()

    def schedule(self, which: str) -> Schedule:
        """Returns the schedule of a pass."""
        there = self.made.get(which)
        if there is None:
            batch, _, _, _, _, dim_qk, dim_v = self.extents
            there = self.made[which] = Schedule(self.native.schedule(self.rank, which), (batch, dim_qk, dim_v))
        return there

    def digest(self, which: str, scale: float) -> list:
        """Returns what all ranks must have in common."""
        there = self.digests.get((which, scale))
        if there is None:
            if len(self.digests) >= 64:
                self.digests.clear()
            there = self.digests[which, scale] = self.native.digest(which, scale)
        return there

    def prepare(self, which: str, shards: dict, values: Values, device: torch.device) -> None:
        """Makes the plans of a pass over such shards."""
        key = (which, device, values.narrow, *[(name, op._layout(x)) for name, x in shards.items()], *[(n, values.tensors[n].dtype) for n in values.wrt])
        if key not in self.prepared:
            Dry(self.schedule(which), shards, values, device).prepare()
            if len(self.prepared) >= 64:
                self.prepared.clear()
            self.prepared.add(key)


_PROBLEMS: dict[tuple, Problem] = {}


def _problem(key: tuple, rank: int) -> Problem:
    there = _PROBLEMS.get((key, rank))
    if there is None:
        there = Problem(key, rank)
        op.keep(_PROBLEMS, (key, rank), there)
    return there


class ContextParallel:
    """The context that `context_parallel` returns."""

    def __init__(self, mesh_or_group: Any, sharding: Any, strategy: Any, deadline: float | None, seq: Any, partials: str | None):
        if deadline is not None and not (isinstance(deadline, (int, float)) and deadline > 0):
            raise one("deadline", repr(deadline), "seconds, or None for the timeout of the process group")
        if partials not in (None, "f32", "operands"):
            raise one("partials", repr(partials), '"f32", "operands", or None for "operands" on GPUs and "f32" on CPUs')
        self._partials = partials
        self._strategy = _strategy(strategy)
        self._sharding, fixed = _sharding(sharding)
        self._seq = _lengths(seq) or (None if fixed is None else (fixed, fixed))
        self._group = Group(mesh_or_group, deadline)
        if fixed is not None:
            _shards(self._sharding, self._group.ranks, fixed)
        self._before: list = []
        # Whether reentrant checkpointing runs a call again in the backward pass.
        self._reruns = False

    def __enter__(self) -> ContextParallel:
        self._before.append(active.CURRENT)
        active.CURRENT = self
        return self

    def __exit__(self, *_: Any) -> None:
        active.CURRENT = self._before.pop()
        active.ENDED = active.ENDED or self._reruns

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.ranks}, sharding={self._sharding}, strategy={self._strategy})"

    def _narrow(self, device: torch.device) -> bool:
        """Returns whether partial results have the type of the operands."""
        return self._partials == "operands" or self._partials is None and device.type == "cuda"

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._group.ranks

    def positions(self, seq: int, device: Any = None, rank: int | None = None) -> torch.Tensor:
        """Returns the positions of this rank's tokens in a sequence of `seq` tokens, in the order of the shard. Rotary embeddings need them."""
        if isinstance(seq, bool) or not isinstance(seq, int):
            raise one("seq", repr(seq), "the tokens of all ranks")
        if rank is not None and not 0 <= rank < self.ranks:
            raise one("rank", rank, f"below {self.ranks}")
        chunks = _shards(self._sharding, self.ranks, seq)[self.rank if rank is None else rank]
        runs = [torch.arange(start, start + stride * n, stride, device=device) for start, stride, n in chunks]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)

    def shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's tokens of a tensor that has the tokens of all ranks along `dim`."""
        return tensor.index_select(dim, self.positions(tensor.shape[dim], tensor.device))

    def unshard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Gathers the shards of all ranks, in the order of the sequence. All ranks must call it. It has no gradient."""
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError("parallel", ["gradients through unshard; compute the loss over shards, or detach the tensor"])
        dim = dim % tensor.dim()
        own = tensor.detach().movedim(dim, 0).contiguous()
        group = self._group
        group.check()
        group.require(own.device)
        shape = torch.tensor([own.shape[0], zlib.crc32(repr((own.dtype, dim, *own.shape[1:])).encode())], dtype=torch.int64, device=own.device)
        headers = [shape if rank == self.rank else torch.zeros_like(shape) for rank in range(self.ranks)]
        with _Exchanging(group):
            group.finish(group.start([(peer, shape) for peer in group.peers], [(peer, headers[peer]) for peer in group.peers]), blocking=True)
            lengths = [int(header[0]) for header in headers]
            kinds = {int(header[1]) for header in headers}
        seq = sum(lengths)
        expected = [sum(n for _, _, n in chunks) for chunks in _shards(self._sharding, self.ranks, seq)]
        if lengths != expected:
            raise one("shards of the ranks", f"{lengths} tokens", f"{expected}, the shards of {seq} tokens")
        if len(kinds) > 1:
            raise one("shards of the ranks", "other types or extents than this rank's", f"{own.dtype} of the extents {tuple(tensor.shape)} but for dim {dim}")
        parts = [own if rank == self.rank else own.new_empty((n, *own.shape[1:])) for rank, n in enumerate(lengths)]
        with _Exchanging(group):
            sends = [(peer, own) for peer in group.peers if lengths[self.rank]]
            group.finish(group.start(sends, [(peer, parts[peer]) for peer in group.peers if lengths[peer]]), blocking=True)
        whole = own.new_empty((seq, *own.shape[1:]))
        for rank, part in enumerate(parts):
            whole[self.positions(seq, own.device, rank)] = part
        return whole.movedim(0, dim)

    @torch._dynamo.disable(reason="exchanges between ranks")
    def attend(
        self, query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float | None, gqa: bool | None, maxima: bool, executor: str | None,
        sink: Any = None,
    ) -> tuple:  # fmt: skip
        """Returns this rank's shard of the output, and of stats with the maxima of the scores if requested."""
        self._group.check()
        with _Reported(self._group, query):
            placed = None
            if any([hasattr(x, "device_mesh") for x in (query, key, value)]):
                from . import sequence

                placed = sequence.Placed(self._group, query, key, value)
                query, key, value = placed.locals
            call, operands = self._prepared(query, key, value, score_mod, block_mask, scale, gqa, maxima, executor, sink, placed)
        if call.train:
            o, rows = _Attention.apply(call, *operands)
        else:
            self._reruns = self._reruns or _is_checkpointed()
            with torch.no_grad():
                o, rows = call.forward(*operands)
        return (o, rows) if placed is None else placed.results(o, rows)

    def _over(self, sharding: str, seq: tuple[int, int]) -> ContextParallel:
        """Returns a context for other shards."""
        other = copy.copy(self)
        other._sharding, other._seq = sharding, seq
        return other

    def _global(self, query: torch.Tensor, key: torch.Tensor, block_mask: Any) -> tuple[int, int]:
        """Returns the numbers of queries and keys of all ranks."""
        if isinstance(block_mask, BlockMask):
            return block_mask.shape[2], block_mask.shape[3]
        return self._seq or (query.shape[2] * self.ranks, key.shape[2] * self.ranks)

    def _prepared(self, query, key, value, score_mod, block_mask, scale, gqa, maxima, executor, sink, placed) -> tuple[Call, list]:
        from .flex import _no_gradient, _no_transforms, _shapes

        if executor is not None:
            named(executor)
        op.mistakes(query, key, value)
        if query.device.type == "meta" or maybe_current_level() is not None:
            raise UnsupportedError("parallel", ["tensors on meta and transforms of torch.func inside of sdpa.context_parallel"])
        if self.ranks > 1:
            self._group.require(query.device)
        key, value = op.expanded(query, key, value)
        _shapes(query, key, value, query.shape[1] != key.shape[1] if gqa is None else gqa)
        _no_transforms(query, key, value)
        if block_mask is not None and not isinstance(block_mask, (BlockMask, MaskMod)):
            block_mask = read(block_mask)
        context = self if placed is None else self._over(placed.SHARDING, placed.lengths)
        seq_q, seq_kv = self._global(query, key, block_mask) if placed is None else placed.lengths
        extents = (query.shape[0], query.shape[1], seq_q, seq_kv)
        mask = mask_of(block_mask, extents)
        if score_mod is not None and not isinstance(score_mod, ScoreMod):
            score_mod, sources = kept(ScoreMod, score_mod)
            score_mod = score_mod.over(sources) if score_mod.tensors else score_mod
        program, tensors, scalars = joined(score_mod, mask, sink is not None, torch.are_deterministic_algorithms_enabled(), executor, 0.0, maxima)
        params = [bound(t, extents, query.device) for t in tensors]
        for traced in (score_mod, mask):
            if traced is not None and traced.ranges is not None:
                traced.check(extents, traced.sources, span)
        if sink is not None and (tuple(sink.shape) != (query.shape[1],) or sink.device != query.device):
            raise one("sink", f"{tuple(sink.shape)} on {sink.device}", f"({query.shape[1]},) on {query.device}, one number for each query head")
        params += [] if sink is None else [sink]
        params = params if placed is None else placed.params(params)
        wrt = [n for n, x in enumerate(params) if x.requires_grad and torch.is_grad_enabled()]
        if wrt and mask is not None:
            _no_gradient(mask, params, tensors)
        train = bool(wrt) or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
        sizes = (query.shape[0], query.shape[1], key.shape[1], seq_q, seq_kv, query.shape[3], value.shape[3])
        scale = op.usual(query.shape[3]) if scale is None else scale
        operands = [op.dense(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
        call = Call(context, query.device, query.dtype, program, sizes, [s.value for s in scalars], sink is not None, scale, wrt, maxima, train)
        call.prepare(*operands, *params)
        return call, [*operands, *params]


def _is_checkpointed() -> bool:
    """Returns whether reentrant checkpointing makes this call, without gradients."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


class _Reported:
    """Tells the other ranks if this one cannot prepare a call, so that they need not wait."""

    def __init__(self, group: Group, tensor: Any):
        self.group, self.tensor = group, tensor

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if not isinstance(error, Exception):
            return
        try:
            self.group.report(error, len(_fields()), self.group.device(self.tensor))
        except Exception as failed:  # the rank's own error says more
            self.group.fail(failed)


class _Exchanging:
    """Marks the group as unusable if a call fails after its first exchange: ranks are then at different steps."""

    def __init__(self, group: Group):
        self.group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if error is not None:
            self.group.fail(error)


@functools.cache
def _fields() -> tuple:
    """The fields that ranks compare."""
    problem = _native.Parallel(parsed('{"score_mods":[]}'), "f32", [1, 1, 1, 1, 1, 8, 8], 1, '"contiguous"', '"ring"', False)
    return (*[field for field, _ in problem.digest("forward", 1.0)], "partials")


class Call:
    """One call, without its operands: autograd keeps them, so that its hooks can move or drop them."""

    def __init__(
        self, context: ContextParallel, device: torch.device, dtype: torch.dtype, program: str, sizes: tuple, scalars: list, has_sink: bool, scale: float,
        wrt: list, maxima: bool, train: bool,
    ):  # fmt: skip
        self.context, self.device, self.dtype, self.program, self.sizes = context, device, dtype, program, sizes
        self.scalars, self.has_sink, self.scale, self.wrt, self.maxima, self.train = scalars, has_sink, scale, wrt, maxima, train

    def values(self, params: Any) -> Values:
        """Returns the arguments of all parts. A sink is the last parameter; its gradient needs no part."""
        tensors = list(params[:-1]) if self.has_sink else list(params)
        wrt, narrow = [n for n in self.wrt if n < len(tensors)], self.context._narrow(self.device)
        return Values(tensors, self.scalars, params[-1] if self.has_sink else None, self.scale, wrt, narrow)

    def problem(self, dim_v: int) -> Problem:
        """Returns the problem, for values of this many elements: the gradient of stats travels in columns of its own."""
        context = self.context
        key = (self.program, self.dtype, (*self.sizes[:6], dim_v), context.ranks, context._sharding, context._strategy, self.train)
        return _problem(key, context.rank)

    def prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *params: torch.Tensor) -> None:
        """Validates the call on this rank and makes its plans."""
        problem = self.problem(v.shape[3])
        errors = []
        for name, x, n in (("query", q, problem.lengths[0]), ("key", k, problem.lengths[1])):
            if x.shape[2] != n:
                whole = self.sizes[3 if name == "query" else 4]
                rule = f"{n}, the shard of rank {self.context.rank} of {whole} tokens; if shards differ in length, pass seq= to context_parallel"
                errors.append((f"seq of {name}", x.shape[2], rule))
        if errors:
            raise SpecError(errors)
        # Results without memory: only their layouts count here.
        q_, k_, v_ = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (q, k, v))
        o, rows = self.output(q_, v_), self.rows(q_)
        shards = {"q": q, "k": k, "v": v, "o": o, "stats": rows[0]}
        values = self.values(params)
        problem.prepare("forward", {**shards, **({"row_max": rows[1]} if self.maxima else {})}, values._replace(wrt=[]), q.device)
        if self.train:
            gradients = {name: op._like(x, x.shape) for name, x in (("dq", q_), ("dk", k_), ("dv", v_))}
            problem.prepare("backward", {**shards, "d_o": o, **gradients}, values, q.device)

    def output(self, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Allocates this rank's output."""
        return op._like(q, (*q.shape[:3], v.shape[3]))

    def rows(self, q: torch.Tensor) -> torch.Tensor:
        """Allocates the statistics of this rank's rows: stats, and the maxima of the scores if requested."""
        return q.new_empty((1 + self.maxima, *q.shape[:3]), dtype=torch.float32)

    def run(self, problem: Problem, which: str, shards: dict, values: Values) -> Run:
        """Compares the call with those of the other ranks, and runs the steps of a pass."""
        group = self.context._group
        digest = [*problem.digest(which, self.scale), ("partials", int(values.narrow))]
        group.agree(digest, self.device, (problem.key, which, self.scale, values.narrow))
        with _Exchanging(group):
            run = Run(problem.schedule(which), shards, values)
            run.steps(group)
        return run

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *params: torch.Tensor) -> tuple:
        """Returns the output, and stats (with the maxima of the scores)."""
        o, rows = self.output(q, v), self.rows(q)
        shards = {"q": q, "k": k, "v": v, "o": o, "stats": rows[0], **({"row_max": rows[1]} if self.maxima else {})}
        self.run(self.problem(v.shape[3]), "forward", shards, self.values(params)._replace(wrt=[]))
        return o, rows if self.maxima else rows[0]

    def backward(self, d_o, q, k, v, o, stats, params: list, *_: Any) -> list:
        """Returns the gradients of the operands and of the parameters with one, as the operator does. Those of parameters are the contributions of this rank."""
        group = self.context._group
        group.check()
        with _Reported(group, q):
            problem, values = self.problem(v.shape[3]), self.values(params)
            v, d_o = (x if op.is_dense(x) else x.contiguous() for x in (v, d_o))
            shards = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o, "stats": stats}
            dq, dk, dv = (op._like(x, x.shape) for x in (q, k, v))
            shards |= {"dq": dq, "dk": dk, "dv": dv}
            problem.prepare("backward", shards, values, q.device)
        sums = self.run(problem, "backward", shards, values).sums
        if self.has_sink:
            sums[len(params) - 1] = op._of_sink(d_o, torch.zeros_like(stats), o, stats, params[-1])
        return [dq, dk, dv, *[sums[n].to(params[n].dtype) for n in self.wrt]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, q: Any, k: Any, v: Any, *params: Any) -> Any:
        o, rows = call.forward(q, k, v, *params)
        ctx.call = call
        # The empty tensor is a mark: a checkpoint that recomputes the call outside of the context saves one tensor less, and raises an error.
        ctx.save_for_backward(q, k, v, o, rows[0] if call.maxima else rows, q.new_empty(0), *params)
        ctx.set_materialize_grads(False)
        return o, rows

    @staticmethod
    def backward(ctx: Any, d_o: Any, d_rows: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError("sdpa", ["second derivatives of attention are not supported"])
        q, k, v, o, stats, _, *params = ctx.saved_tensors
        if d_o is None and d_rows is None:
            return (None,) * (4 + len(params))
        if d_rows is not None and d_rows.dim() == 4:
            # The maxima of scores have no gradient.
            d_rows = d_rows[0]
        call = ctx.call
        return None, *op.gradients(d_o, d_rows, q, k, v, o, stats, params, call.scalars, call.program, call.scale, call.wrt, call.backward)


def context_parallel(
    mesh_or_group: Any = None,
    *,
    sharding: Any = "zigzag",
    strategy: str = "auto",
    deadline: float | None = None,
    seq: int | tuple[int, int] | None = None,
    partials: str | None = None,
) -> ContextParallel:
    """Returns a context in which `flex_attention` computes one attention over the tokens of all ranks of a process group.

    Each rank passes its shards of queries, keys and values, (batch, heads, tokens of the rank, dim), and gets its shard of the output. Masks and score_mods see
    positions in the whole sequence, and captured tensors have whole extents on every rank. Gradients are those of the shards.

    `mesh_or_group` is a mesh with one dimension, a process group, or None for the default group. `sharding` is `zigzag`, `contiguous`, `striped`, or a list of
    (start, stride, length) for each rank. `strategy` is `auto`, `all_gather`, `all_gather:GROUPS`, `head_exchange`, `ring`, `halo` or `grid:RANKS`.
    `deadline` is the number of seconds for which a rank waits for another one, and every rank must have one or none; by default the timeout of the process group
    applies. On GPUs the host waits at the end of each pass if there is a deadline. `seq` is the number of tokens of all ranks, or (queries, keys): a call needs it
    if ranks hold different numbers of tokens and its mask is not a block mask, which has it. `partials` is the type of results that are merged or summed in f32:
    "f32", or "operands" for the type of the operands, which rounds each of them. By default it is "operands" on GPUs, where kernels for f32 operands are many times
    slower, and "f32" on CPUs.
    """
    return ContextParallel(mesh_or_group, sharding, strategy, deadline, seq, partials)
