"""Runs the schedule of one rank over tensors.

The native module makes the schedules. A slot is a tensor (tokens, batch, heads, dim). Merges and sums are f32, as in `sdpa_parallel`. The results that are merged
or summed are f32 too, or have the type of the operands: `Values.narrow`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

from . import op
from .group import Group

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_OF_KEYS = ("k", "v", "dk", "dv")
_STATISTICS = ("stats", "row_max", "sum_exp")
# Adding −0 changes no number, not even +0 and −0.
_EMPTY = {"dq": -0.0, "dk": -0.0, "dv": -0.0, "row_max": float("-inf"), "o": 0.0, "sum_exp": 0.0}


class Slot(NamedTuple):
    """Memory of a schedule."""

    tensor: str
    role: str
    dtype: torch.dtype
    heads: int
    tokens: int


class Schedule:
    """The slots and steps of one rank in one pass."""

    def __init__(self, text: str, extents: tuple):
        read = json.loads(text)
        self.text, self.steps = read["text"], read["steps"]
        self.batch, self.dim_qk, self.dim_v = extents
        self.slots = [Slot(s["tensor"], s["role"], _DTYPES[s["dtype"]], s["heads"], s["tokens"]) for s in read["slots"]]
        # For each step, the slots that it reads and writes, and those that no later step uses.
        self.uses = [_slots(step) for step in self.steps]
        last = {slot: n for n, (reads, writes) in enumerate(self.uses) for slot in reads | writes}
        self.frees = [[slot for slot in reads | writes if last[slot] == n] for n, (reads, writes) in enumerate(self.uses)]

    def dim(self, tensor: str) -> int:
        """Returns the elements of one row of a tensor."""
        return 1 if tensor in _STATISTICS else self.dim_qk if tensor in ("q", "k", "dq", "dk") else self.dim_v

    def new(self, n: int, device: Any) -> torch.Tensor:
        """Allocates a buffer, or an accumulator with the result of no contribution."""
        slot = self.slots[n]
        shape = (slot.tokens, self.batch, slot.heads, self.dim(slot.tensor))
        if slot.role == "accumulator":
            return torch.full(shape, _EMPTY[slot.tensor], dtype=slot.dtype, device=device)
        return torch.empty(shape, dtype=slot.dtype, device=device)


def _slots(step: dict) -> tuple[set, set]:
    """Returns the slots that a step reads, and those that it writes."""
    if step["kind"] == "exchange":
        return {slot for _, slot, _, _ in step["sends"]}, {slot for _, slot, _, _ in step["receives"]}
    views = ([step["from"]], [step["to"]]) if step["kind"] in ("copy", "add") else (step["reads"], step["writes"])
    return {view[0] for view in views[0]}, {view[0] for view in views[1]}


class Values(NamedTuple):
    """The arguments that all parts of a call share. `wrt` has the indices of the tensors whose gradients are computed. `narrow` is true if partial results have
    the type of the operands."""

    tensors: list
    scalars: list
    sink: torch.Tensor | None
    scale: float
    wrt: list
    narrow: bool


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Returns a shard (batch, heads, seq, dim), or statistics (batch, heads, seq), as a slot."""
    return x.permute(2, 0, 1, 3) if x.dim() == 4 else x.permute(2, 0, 1).unsqueeze(-1)


def _part(memory: torch.Tensor, view: list) -> torch.Tensor:
    """Returns a part of a slot, as (batch, heads, seq, dim)."""
    _, head, end, first, tokens = view
    return memory[first : first + tokens, :, head:end].permute(1, 2, 0, 3)


def _run(memory: torch.Tensor, heads: list, run: list) -> torch.Tensor:
    start, step, n = run
    return memory[start : start + step * (n - 1) + 1 : step, :, heads[0] : heads[1]]


def _cut(tensor: torch.Tensor, runs: list | None) -> torch.Tensor:
    """Returns the part of a captured tensor that a step reads."""
    return tensor if runs is None else tensor[tuple([slice(start, start + stride * (n - 1) + 1, stride) for start, stride, n in runs])]


class Run:
    """One call in progress. `shards` has the operands and the results of this rank, by the name of the tensor."""

    def __init__(self, schedule: Schedule, shards: dict, values: Values):
        self.schedule, self.values = schedule, values
        self.device = next(iter(shards.values())).device
        self.memory: dict[int, torch.Tensor] = {}
        for n, slot in enumerate(schedule.slots):
            if slot.role in ("input", "output"):
                self.memory[n] = tokens_first(shards[slot.tensor])
        # The sums of the gradients of tensors over the parts of this rank.
        self.sums = {n: torch.zeros(values.tensors[n].shape, dtype=torch.float32, device=self.device) for n in values.wrt}
        # Transfers in progress: their works, and the slots that they read and write.
        self.pending: list[tuple] = []

    def slot(self, n: int) -> torch.Tensor:
        """Returns the memory of a slot, allocated at its first use."""
        there = self.memory.get(n)
        if there is None:
            there = self.memory[n] = self.schedule.new(n, self.device)
        return there

    def steps(self, group: Group) -> None:
        """Runs every step."""
        for n, step in enumerate(self.schedule.steps):
            self.wait(group, self.schedule.uses[n])
            kind = step["kind"]
            if kind == "exchange":
                self.exchange(group, step, self.schedule.uses[n])
            elif kind == "attend":
                (self.forward if "dq" not in self.names(step["writes"]) else self.backward)(step)
            elif kind == "finish":
                self.finish(step)
            else:
                self.move(step, kind == "add")
            for slot in self.schedule.frees[n]:
                self.memory.pop(slot, None)
        self.wait(group, None)
        group.complete()

    def names(self, views: list) -> list:
        """Returns the tensors of slots."""
        return [self.schedule.slots[view[0]].tensor for view in views]

    def wait(self, group: Group, uses: tuple[set, set] | None) -> None:
        """Waits for transfers that write to a slot of a step or read one that it writes, or for all transfers."""
        hinders = lambda at: uses is None or at[1][1] & (uses[0] | uses[1]) or at[1][0] & uses[1]  # noqa: E731
        for at in [at for at in self.pending if hinders(at)]:
            group.finish(at[0])
            self.pending.remove(at)

    def exchange(self, group: Group, step: dict, uses: tuple[set, set]) -> None:
        """Starts the transfers of a step. Parts that do not use their slots run while they progress. The tokens of buffers are contiguous."""
        sends = [(peer, self.slot(n)[first : first + tokens].contiguous()) for peer, n, first, tokens in step["sends"]]
        receives = [(peer, self.slot(n)[first : first + tokens]) for peer, n, first, tokens in step["receives"]]
        self.pending.append((group.start(sends, receives), uses))

    def move(self, step: dict, add: bool) -> None:
        """Copies elements between slots, or adds them to an accumulator."""
        (source, *heads), (target, *own) = [[at[0], *at[1]] for at in (step["from"], step["to"])]
        source, target = self.slot(source), self.slot(target)
        for a, b in step["runs"]:
            to, moved = _run(target, own, b), _run(source, heads, a)
            to.add_(moved) if add else to.copy_(moved)

    def operands(self, step: dict) -> list:
        """Returns the operands of a part, in the type in which it is computed."""
        found = [_part(self.slot(view[0]), view) for view in step["reads"]]
        dtype = found[0].dtype if self.values.narrow else _DTYPES[step["dtype"]]
        return [x if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format) for x in found]

    def params(self, step: dict) -> tuple:
        """Returns the tensors and scalars of a part."""
        cut = [_cut(tensor, runs) for tensor, runs in zip(self.values.tensors, step["tensors"])]
        if step["sink"]:
            runs = step["tensors"][len(self.values.tensors)]
            (first, _, n), = runs if runs is not None else [(0, 1, self.values.sink.shape[0])]
            cut.append(self.values.sink[first : first + n])
        return cut, [*self.values.scalars, *step["numbers"]]

    def forward(self, step: dict) -> None:
        """Computes attention of a part. A partial result is merged into accumulators."""
        params, scalars = self.params(step)
        o, rows = torch.ops.sdpa.attention(*self.operands(step), params, scalars, step["program"], self.values.scale, op.STATS, [])
        if step["partial"]:
            self.merge(step, o, rows[1].unsqueeze(-1), rows[2].unsqueeze(-1))
            return
        results = {"o": o, "stats": (rows if rows.dim() == 3 else rows[0]).unsqueeze(-1)}
        if rows.dim() == 4:
            results["row_max"] = rows[1].unsqueeze(-1)
        for view, name in zip(step["writes"], self.names(step["writes"])):
            _part(self.slot(view[0]), view).copy_(results[name])

    def merge(self, step: dict, o: torch.Tensor, row_max: torch.Tensor, sum_exp: torch.Tensor) -> None:
        """Merges a partial output into the accumulators."""
        merged, largest, total = [_part(self.slot(view[0]), view) for view in step["writes"]]
        both, wa, wb, z = _weights(largest, total, row_max, sum_exp)
        merged.copy_(wa * merged + wb * o)
        largest.copy_(both)
        total.copy_(z)

    def finish(self, step: dict) -> None:
        """Adds the sink to a merged output, and writes the output and the statistics."""
        o, row_max, sum_exp = [_part(self.slot(view[0]), view) for view in step["reads"]]
        if self.values.sink is not None:
            sink = self.values.sink[slice(*step["heads"])].float().view(1, -1, 1, 1).expand_as(row_max)
            row_max, w, _, sum_exp = _weights(row_max, sum_exp, sink, torch.ones_like(sink))
            o = w * o
        results = {"o": o, "stats": row_max + sum_exp.log(), "row_max": row_max, "sum_exp": sum_exp}
        for view, name in zip(step["writes"], self.names(step["writes"])):
            _part(self.slot(view[0]), view).copy_(results[name])

    def backward(self, step: dict) -> None:
        """Computes the gradients of a part, and adds them to accumulators."""
        params, scalars = self.params(step)
        q, k, v, o, d_o, stats = self.operands({**step, "reads": step["reads"][:5]}) + [_part(self.slot(step["reads"][5][0]), step["reads"][5])]
        stats = stats.squeeze(-1).contiguous()
        wrt = self.wrt(step)
        made = torch.ops.sdpa.attention_backward(d_o, q, k, v, o, stats, params, scalars, step["program"], self.values.scale, wrt)
        for view, gradient in zip(step["writes"], made):
            _part(self.slot(view[0]), view).add_(gradient)
        for n, gradient in zip(wrt, made[3:]):
            _cut(self.sums[n], step["tensors"][n]).add_(gradient)

    def wrt(self, step: dict) -> list:
        """Returns the indices of the tensors that have a gradient and that a part reads."""
        return [n for n in self.values.wrt if step["read"][n]]

    def prepare(self) -> None:
        """Makes the plan of every part, so that a rank that cannot run its part fails before others wait for it."""
        for step in self.schedule.steps:
            if step["kind"] != "attend":
                continue
            operands = self.operands({**step, "reads": step["reads"][:5]})
            q, k, v = operands[:3]
            o = op._like(q, (*q.shape[:3], v.shape[3]))
            forward = len(operands) == 3
            operands = [*operands[:3], o] if forward else [*operands, *[op._like(x, x.shape) for x in (q, k, v)]]
            asked = () if forward else op._wrt(step["program"], self.values.tensors, self.wrt(step), self.device, q.dtype)
            op.plan(step["program"], self.device, q.dtype, True, tuple([op._layout(x) for x in operands]), asked)


class Dry(Run):
    """A call without memory, which prepares the plans of a call over such shards on `device`."""

    def __init__(self, schedule: Schedule, shards: dict, values: Values, device: torch.device):
        empty = {name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for name, x in shards.items()}
        super().__init__(schedule, empty, values._replace(wrt=[]))
        self.values = values
        self.device = device

    def slot(self, n: int) -> torch.Tensor:
        """Returns the memory of a slot on `meta`."""
        there = self.memory.get(n)
        if there is None:
            there = self.memory[n] = self.schedule.new(n, "meta")
        return there


def _weights(a: torch.Tensor, sum_a: torch.Tensor, b: torch.Tensor, sum_b: torch.Tensor) -> tuple:
    """Returns the larger row maximum of two outputs, their weights in the merged one, and its sum of exponentials. A row without keys has a maximum of −∞ and a
    sum of 0."""
    both = torch.maximum(a, b)
    of = torch.where(torch.isneginf(both), 0.0, both)
    wa, wb = sum_a * (a - of).exp(), sum_b * (b - of).exp()
    z = wa + wb
    # A row without keys in both keeps the weights 0.
    divisor = torch.where(torch.isneginf(both), 1.0, z)
    return both, wa / divisor, wb / divisor, z
