"""The cases of `several_gpus.py right`: programs x strategies x shardings, each against f64 attention over the whole sequence."""

import itertools
import time

import torch
import torch.distributed as dist
from textbook import attention, close

import sdpa

# Of "dtensor", operands are DTensors, and the context shards nothing.
SHARDINGS = ("contiguous", "zigzag", "striped", "dtensor")
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
BF16, F16, F32 = TOLERANCES


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i - j <= 70) & (j - i <= 20)


def rows_without_keys(b, h, i, j):
    return (i % 5 != 0) & ((i + 2 * j + h) % 3 != 0)


class Data:
    """The tensors that masks and score_mods capture. Every rank has equal ones."""

    def __init__(self, seq, heads, batch, device):
        draw = torch.Generator().manual_seed(5)
        self.slopes, self.table = torch.rand(heads, generator=draw).to(device), torch.randn(9, generator=draw).to(device)
        self.bias = torch.randn(heads, seq, seq, generator=draw).to(device)
        self.rows, self.sink = torch.randn(batch, seq, generator=draw).to(device), torch.randn(heads, generator=draw).to(device)
        ends = torch.tensor([[seq // 3, seq // 2, seq], [seq // 4, seq - 7, seq]])[torch.arange(batch) % 2]
        self.documents = (torch.arange(seq)[None, :, None] >= ends[:, None, :]).sum(-1).to(device)
        self.lengths = torch.tensor([seq, seq - seq // 3])[torch.arange(batch) % 2].to(torch.int32).to(device)


def programs(data):
    """Name, dtype, head dim, KV heads (as a divisor of the query heads), score_mod, mask_mod, tensors with a gradient, and the sink. Each dtype has both head
    dims, and each mask and score_mod a 16-bit type: every program compiles kernels of its own."""
    slopes, table, bias, documents, lengths = data.slopes, data.table, data.bias, data.documents, data.lengths
    distance = lambda s, b, h, i, j: s + (h + 1) * 0.01 * (j - i)  # noqa: E731
    softcap = lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0)  # noqa: E731
    of_documents = lambda b, h, i, j: (documents[b, i] == documents[b, j]) & (i >= j)  # noqa: E731
    of_lengths = lambda b, h, i, j: j < lengths[b]  # noqa: E731

    def learned(slopes, table, bias, rows):
        return lambda s, b, h, i, j: (s + bias[h, i, j]) * slopes[h] + table[(i - j).clamp(-4, 4) + 4] + rows[b, i]

    tensors = (data.slopes, data.table, data.bias, data.rows)
    return [
        ("causal", BF16, 128, 2, None, causal, None, None),
        ("causal, one KV head", F16, 64, 0, None, causal, None, None),
        ("learned tensors and sinks", BF16, 64, 2, learned, causal, tensors, data.sink),
        ("window with softcap", BF16, 64, 2, softcap, window, None, None),
        ("plain", F32, 128, 2, None, None, None, None),
        ("documents with captured slopes", F16, 128, 1, lambda s, b, h, i, j: s - slopes[h] * 0.1 * (i - j).abs(), of_documents, None, None),
        ("rows without keys, sinks", BF16, 128, 1, None, rows_without_keys, None, data.sink),
        ("causal by distance", F32, 64, 0, distance, causal, None, None),
        ("lengths with a bias", F16, 64, 2, lambda s, b, h, i, j: s + bias[h, i, j], of_lengths, None, None),
        ("table of distances", BF16, 128, 0, lambda s, b, h, i, j: s * 0.5 + table[(i - j).clamp(-4, 4) + 4], causal, None, None),
        ("rows without keys", F16, 64, 1, None, rows_without_keys, None, None),
        ("learned tensors", F32, 64, 2, learned, window, tensors, None),
    ]  # fmt: skip


def strategies(ranks, heads, heads_kv, mask_mod):
    found = ["all_gather", "ring", "head_exchange", "auto"]
    return found + ["all_gather:2"] * (heads_kv > 1) + ["halo"] * (mask_mod is window) + ["grid:2"] * (ranks % 2 == 0)


def of_tokens(world):
    """Returns a function that divides the tokens of a tensor over the ranks as a DTensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(world.group, world.device.type)
    return lambda x: distribute_tensor(x.detach(), mesh, [Shard(2)])


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


class Reference:
    """A program, its operands, and what f64 attention over the whole sequence returns. Gradients of learned tensors come last."""

    def __init__(self, world, program, seq, heads, batch):
        self.name, dtype, dim, divisor, self.mod, self.mask_mod, tensors, self.sink = program
        self.heads_kv = heads // divisor if divisor else 1
        self.tolerance = TOLERANCES[dtype]
        draw = torch.Generator().manual_seed(len(self.name))
        shapes = (batch, heads, seq, dim), (batch, self.heads_kv, seq, dim), (batch, self.heads_kv, seq, dim), (batch, heads, seq, dim), (batch, heads, seq)
        *self.operands, self.d_o, self.d_lse = (torch.randn(shape, generator=draw).to(world.device, dtype) for shape in shapes)
        self.d_lse = self.d_lse.float()
        self.learned = [*(tensors or ()), *([] if self.sink is None else [self.sink])]
        self.count = len(tensors or ())
        whole = [x.double().requires_grad_() for x in (*self.operands, *self.learned)]
        sink = None if self.sink is None else whole[-1]
        o, lse = attention(*whole[:3], self.score_mod(whole[3:]), self.mask_mod, sink=sink)
        finite = torch.where(torch.isinf(lse), 0.0, lse)
        both = torch.autograd.grad((o, finite), whole, (self.d_o.double(), self.d_lse.double()), retain_graph=True)
        self.right = {True: (o, lse, both), False: (o, lse, torch.autograd.grad(o, whole, self.d_o.double()))}

    def score_mod(self, learned):
        return self.mod(*learned[: self.count]) if self.count else self.mod

    def run(self, world, strategy, sharding, lse, deadline):
        """Raises an error if a shard of a result is another one than the reference's."""
        seq, (batch, heads) = self.operands[0].shape[2], self.operands[0].shape[:2]
        mask = None if self.mask_mod is None else sdpa.create_block_mask(self.mask_mod, batch, heads, seq, seq, device=world.device)
        of_dtensors = sharding == "dtensor"
        with sdpa.context_parallel(world.group, sharding="zigzag" if of_dtensors else sharding, strategy=strategy, seq=seq, deadline=deadline) as cp:
            shard = of_tokens(world) if of_dtensors else lambda x: cp.shard(x, 2)
            shards = [shard(x).requires_grad_() for x in self.operands]
            own = [x.clone().requires_grad_() for x in self.learned]
            mod = self.score_mod(own)
            if own:
                sink = None if self.sink is None else own[-1]
                o, rows = sdpa.flex.attend(*shards, None if mod is None else sdpa.ScoreMod(mod), mask, stats=True, sink=sink)[:2]
            else:
                o, rows = sdpa.flex_attention(*shards, mod, mask, enable_gqa=True, return_lse=True)
            outputs, ups = ((o, rows), (shard(self.d_o), shard(self.d_lse))) if lse else ((o,), (shard(self.d_o),))
            gradients = torch.autograd.grad(outputs, [*shards, *own], ups)
        wrong = []
        names = ["o", "lse", "dq", "dk", "dv", *[f"gradient {n}" for n in range(len(own))]]
        right = self.right[lse]
        for n, (name, x, y) in enumerate(zip(names, (o, rows, *gradients), (*right[:2], *right[2]))):
            if n < 5:
                x, y = local(x), local(shard(y))
            else:  # the contributions of the ranks, which are summed for DTensors
                x = local(x.float())
                if not of_dtensors:
                    dist.all_reduce(x, group=world.group)
            try:
                close(x, y, name, self.tolerance if n != 1 else min(self.tolerance, 5e-3))
            except AssertionError as error:
                wrong.append(str(error))
        if wrong:
            raise AssertionError("; ".join(wrong))


def right(world, arguments):
    heads, batch = max(4, world.ranks), 2
    seq = arguments.seq or (393 if world.device.type == "cuda" else 117)  # beyond the window
    table = programs(Data(seq, heads, batch, world.device))
    cases = []
    for number, program in enumerate(table):
        heads_kv = heads // program[3] if program[3] else 1
        combinations = list(itertools.product(strategies(world.ranks, heads, heads_kv, program[5]), SHARDINGS))
        # Programs begin at different strategies and shardings, so that a run that is cut short has some of each.
        cases += [(turn, number, *combinations[(turn + number * 4) % len(combinations)]) for turn in range(len(combinations))]
    cases = [case for case in sorted(cases) if not arguments.only or arguments.only in f"{table[case[1]][0]}, {case[2]}, {case[3]}"]
    part, parts = (int(n) for n in arguments.share.split("/"))
    cases = [case for case in cases if case[1] % parts == part][arguments.first :]  # a program compiles kernels once
    references, passed, failed, began, done = {}, 0, 0, time.monotonic(), 0
    for at, (_, number, strategy, sharding) in enumerate(cases[: arguments.cases]):
        if world.all(time.monotonic() - began)[0] > arguments.seconds:
            break
        lse, deadline = (at // 2) % 2 == 0, (60, None)[at % 2]
        error = None
        try:
            if number not in references:
                references[number] = Reference(world, table[number], seq, heads, batch)
            references[number].run(world, strategy, sharding, lse, deadline)
            world.synchronize()
        except Exception as raised:  # noqa: BLE001
            error = f"{type(raised).__name__}: {raised}"
        errors = world.all(error)
        done += 1
        if not any(errors):
            passed += 1
            world.say(f"pass {table[number][0]}, {table[number][1]}, {strategy}, {sharding}, {time.monotonic() - began:.0f} s")
            continue
        failed += 1
        name, dtype, dim = table[number][:3]
        for rank, text in enumerate(errors):
            if text:
                what = "with" if lse else "without"
                world.say(f"FAIL {name}, {dtype}, dim {dim}, {strategy}, {sharding}, {what} gradient of lse, rank {rank} of {world.ranks}: {text[:600]}")
        if any(text and not text.startswith("AssertionError") for text in errors):
            world.renew()
    left = f", {len(cases) - done} not run" if done < len(cases) else ""
    world.say(f"right on {world.ranks} ranks ({world.backend}): {passed} passed, {failed} failed{left}, {time.monotonic() - began:.0f} s")
    return failed == 0 and passed > 0
