"""Attention over the ranks of a process group, with NCCL on GPUs: correctness, equal bits, a lost rank, and times.

    torchrun --nproc-per-node 2 benches/several_gpus.py right [--first N] [--cases N] [--seconds S] [--only TEXT] [--share N/M]
    torchrun --nproc-per-node 2 benches/several_gpus.py bits [--launches N]
    torchrun --nproc-per-node 2 benches/several_gpus.py killed [--hang] [--deadline S]
    torchrun --nproc-per-node 2 benches/several_gpus.py times [--tokens 8192,16384,32768] [--heads GQA|MHA|extras] [--only TEXT] [--runs N]

`--device cpu` runs over gloo, for a look at the script itself. `right` compares every shard with f64 attention over the whole sequence and exits with 1 if
one differs; cases that `--cases` or `--seconds` leave out are counted as not run. `bits` counts launches with other bits than the first one. `killed` ends (or
hangs) the last rank and expects a `ParallelError` on the others within the deadline. `times` prints a JSON line for each approach, and a table with the
fraction of ideal: the time of one GPU for the whole problem, divided by the ranks and by the time.
"""

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import pathlib
import signal
import statistics
import sys
import time
from datetime import timedelta

ALONE = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
if ALONE:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "sdpa/python/python"), str(ROOT / "sdpa/python/tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from several_gpus_cases import BF16, TOLERANCES, causal, right  # noqa: E402
from textbook import attention, close  # noqa: E402

import sdpa  # noqa: E402

# All ranks of `torchrun` end if one of them hangs in NCCL for as long.
TIMEOUT = timedelta(seconds=150)


class World:
    """This process: its device, the group under test, and a group over host memory for what the script itself exchanges."""

    def __init__(self, kind):
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if kind == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
        self.backend = "gloo" if kind == "cpu" else "nccl"
        dist.init_process_group(self.backend, timeout=TIMEOUT)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.group = dist.group.WORLD

    def all(self, value):
        """Returns the values of all ranks."""
        values = [None] * self.ranks
        dist.all_gather_object(values, value, self.control)
        return values

    def renew(self):
        """Makes a new group under test, after a failed call."""
        self.group = dist.new_group(backend=self.backend, timeout=TIMEOUT)

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# --- bits and killed


def operands(world, heads, heads_kv, seq, dim, dtype=BF16):
    draw = torch.Generator(world.device).manual_seed(11)
    shapes = (1, heads, seq, dim), (1, heads_kv, seq, dim), (1, heads_kv, seq, dim), (1, heads, seq, dim)
    return [torch.randn(shape, generator=draw, device=world.device).to(dtype) for shape in shapes]


def step(shards, d_o, mask, **more):
    """Returns the output and the gradients of the operands."""
    o = sdpa.flex_attention(*shards, None, mask, enable_gqa=True, **more)
    return [o.detach(), *torch.autograd.grad(o, shards, d_o)]


def causal_mask(world, seq):
    return sdpa.create_block_mask(causal, None, None, seq, seq, device=world.device)


def bits(world, arguments):
    seq, dim = (arguments.seq or 3001, 128) if world.device.type == "cuda" else (arguments.seq or 101, 16)
    heads, heads_kv = max(8, world.ranks), 2
    if not arguments.default:
        torch.use_deterministic_algorithms(True)
    *whole, d_o = operands(world, heads, heads_kv, seq, dim)
    mask = causal_mask(world, seq)
    own = [x.double().requires_grad_() for x in whole]
    o, _ = attention(*own, None, causal)
    expected = [o, *torch.autograd.grad(o, own, d_o.double())]
    good = True
    for strategy in arguments.strategies.split(","):
        with sdpa.context_parallel(world.group, strategy=strategy, seq=seq, sharding="zigzag") as cp:
            shards, up = [cp.shard(x, 2).requires_grad_() for x in whole], cp.shard(d_o, 2)
            first = step(shards, up, mask)
            for name, x, y in zip(("o", "dq", "dk", "dv"), first, expected):
                close(x, cp.shard(y, 2), f"{strategy}: {name}", TOLERANCES[BF16])
            others = torch.zeros((), dtype=torch.int64, device=world.device)
            began = time.monotonic()
            for _ in range(arguments.launches - 1):
                made = step(shards, up, mask)
                others += torch.stack([(x.view(torch.int16) != y.view(torch.int16)).any() for x, y in zip(made, first)]).any()
            counts = world.all(int(others))
        good = good and not any(counts)
        world.say(f"bits {strategy}: {arguments.launches} launches, with other bits on each rank: {counts}, {time.monotonic() - began:.1f} s")
    return good


def killed(world, arguments):
    seq, dim = (16384, 128) if world.device.type == "cuda" else (96, 16)
    *whole, d_o = operands(world, max(8, world.ranks), 2, seq, dim)
    mask = causal_mask(world, seq)
    with sdpa.context_parallel(world.group, strategy=arguments.strategy, deadline=arguments.deadline, seq=seq) as cp:
        shards, up = [cp.shard(x, 2).requires_grad_() for x in whole], cp.shard(d_o, 2)
        for _ in range(5):
            step(shards, up, mask)
        world.synchronize()
        dist.barrier(world.control)
        if world.rank == world.ranks - 1:
            if arguments.hang:
                time.sleep(arguments.deadline + 20)
            os._exit(0)
        began = time.monotonic()
        try:
            for _ in range(20):
                step(shards, up, mask)
            world.synchronize()
            outcome = (False, "no error")
        except sdpa.ParallelError as error:
            outcome = (True, f"ParallelError: {error} (ranks {error.ranks})")
        except Exception as error:  # noqa: BLE001
            outcome = (False, f"another error, {type(error).__name__}: {error}")
        took = time.monotonic() - began
        try:
            step(shards, up, mask)
            later = (False, "a later call: no error")
        except Exception as error:  # noqa: BLE001
            later = (isinstance(error, sdpa.ParallelError), f"a later call: {type(error).__name__}: {error}")
    # The device must be usable after the exchange was ended.
    usable = torch.ones(8, device=world.device).sum().item() == 8
    good = outcome[0] and later[0] and usable and took < arguments.deadline + 5
    how = "hangs" if arguments.hang else "exited"
    print(f"killed: rank {world.ranks - 1} {how}; rank {world.rank} after {took:.2f} s of a deadline of {arguments.deadline:g} s: {outcome[1][:700]}", flush=True)
    print(f"  {later[1][:300]}; the device is {'' if usable else 'not '}usable: {'passed' if good else 'FAILED'}", flush=True)
    os._exit(0 if good else 1)  # the process group cannot be destroyed in order


# --- times


class Approach:
    """A way to compute the problem: `forward()` returns the output, `both()` the output and the gradients."""

    def __init__(self, name, shards, d_o, call, alone=False, around=None):
        self.name, self.shards, self.d_o, self.call, self.alone = name, shards, d_o, call, alone
        self.around = around or contextlib.nullcontext
        self.times = {"forward": [], "both": []}
        self.error = None

    def run(self, which):
        with self.around():
            if which == "forward":
                with torch.no_grad():
                    return self.call(*self.shards)
            o = self.call(*self.shards)
            torch.autograd.grad(o, self.shards, self.d_o)
            return o.detach()


def measured(world, approach, which):
    """Returns the milliseconds of the slowest rank, or of rank 0 if it runs alone, with the error of each rank."""
    error, took, o = None, 0.0, None
    dist.barrier(world.control)
    runs = not approach.alone or world.rank == 0
    try:
        if world.device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            world.synchronize()
            if not approach.alone:
                dist.all_reduce(world.mark)  # the GPUs begin together
            marks[0].record()
            o = approach.run(which) if runs else None
            marks[1].record()
            world.synchronize()
            took = marks[0].elapsed_time(marks[1])
        else:
            began = time.perf_counter()
            o = approach.run(which) if runs else None
            took = (time.perf_counter() - began) * 1e3
    except Exception as raised:  # noqa: BLE001
        error = f"{type(raised).__name__}: {raised}"
    found = world.all((took if runs else 0.0, error))
    return max(t for t, _ in found), [e for _, e in found], o


def of_torch(world, whole, d_o, backends, rotate):
    """PyTorch's own context parallelism over the shards of the whole tensors, which it replaces in place. Its default load balancer has zigzag shards."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import sdpa_kernel

    mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.ranks,))
    buffers = [x.detach().clone() for x in (*whole, d_o)]
    gqa = buffers[0].shape[1] != buffers[1].shape[1]
    inside = contextlib.ExitStack()

    def enter():
        inside.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4))
        for x in buffers[:3]:
            x.requires_grad_()
        return buffers[:3], buffers[3]

    def leave():
        for x in buffers[:3]:
            x.requires_grad_(False)
        inside.close()

    def call(q, k, v):
        set_rotate_method(rotate)
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

    return enter, leave, call


def of_flex(world, whole, d_o, seq):
    """FlexAttention in PyTorch's context parallelism: each rank gathers all keys and values, and has zigzag shards of queries. The classes are private in
    PyTorch 2.11. The mask gets the positions of the whole sequence there; a score_mod would get those within the shard."""
    from torch.distributed.tensor.experimental import _attention as parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
    from torch.nn.attention.flex_attention import flex_attention

    mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.ranks,))
    balancer = parallel._HeadTailLoadBalancer(seq, world.ranks, world.device)
    mask = _create_cp_block_mask(causal, None, None, seq, seq, mesh, load_balancer=balancer)
    *shards, up = parallel._context_parallel_shard(mesh, [*whole, d_o], [2] * 4, balancer)
    shards = [x.detach().clone().requires_grad_() for x in shards]
    attend = torch.compile(flex_attention, dynamic=False) if world.device.type == "cuda" else flex_attention
    gather = parallel._ContextParallel(2, parallel._ContextParallel.AttentionType.FLEX)
    gqa = whole[0].shape[1] != whole[1].shape[1]

    def call(q, k, v):
        operands, _ = gather.flex_input_fn(None, (q, k, v), {}, mesh)
        return attend(*operands, block_mask=mask, enable_gqa=gqa)

    return Approach("torch context_parallel flex", shards, up.contiguous(), call)


DOCUMENTS = 8


def attends(world, seq, heads, extras):
    """Returns the attention of `sdpa` under test, causal; with `extras` also ALiBi, documents and sinks, which PyTorch's `context_parallel` does not have."""
    if not extras:
        mask = causal_mask(world, seq)
        return lambda q, k, v: sdpa.flex_attention(q, k, v, None, mask, enable_gqa=True)
    documents = torch.arange(seq, device=world.device) * DOCUMENTS // seq
    slopes = torch.pow(2.0, -8.0 * torch.arange(1, heads + 1, device=world.device) / heads)
    sink = torch.linspace(-1, 1, heads, device=world.device)
    of_documents = lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j)  # noqa: E731
    mask = sdpa.create_block_mask(of_documents, None, None, seq, seq, device=world.device)
    mod = sdpa.ScoreMod(lambda s, b, h, i, j: s + slopes[h] * (j - i))
    return lambda q, k, v: sdpa.flex.attend(q, k, v, mod, mask, sink=sink)[0]


def approaches(world, whole, d_o, seq, extras):
    """Returns the approaches that can be prepared, with what ends them. Those of PyTorch patch its functions while they run: they enter for each run."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend, gqa = attends(world, seq, whole[0].shape[1], extras), whole[0].shape[1] != whole[1].shape[1]
    found = []

    def of_ours(strategy, sharding):
        def make():
            cp = sdpa.context_parallel(world.group, strategy=strategy, sharding=sharding, seq=seq)
            shards, up = [cp.shard(x, 2).requires_grad_() for x in whole], cp.shard(d_o, 2)
            return Approach(f"sdpa {strategy} {sharding}", shards, up, attend, around=lambda: cp)

        return make

    for strategy, sharding in (("all_gather", "zigzag"), ("head_exchange", "contiguous"), ("head_exchange", "zigzag"), ("ring", "zigzag"), ("auto", "zigzag")):
        found.append((f"sdpa {strategy} {sharding}", of_ours(strategy, sharding)))
    leaves = [x.detach().clone().requires_grad_() for x in whole] if world.rank == 0 else None
    found.append(("one GPU, sdpa", lambda: Approach("one GPU, sdpa", leaves, d_o, attend, True)))
    if extras:
        return found
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION} if world.device.type == "cuda" else {"flash": SDPBackend.FLASH_ATTENTION}
    for (name, backend), rotate in itertools.product(backends.items(), ("allgather", "alltoall")):

        def make(name=name, backend=backend, rotate=rotate):
            enter, leave, call = of_torch(world, whole, d_o, backend, rotate)
            made = Approach(f"torch context_parallel {name} {rotate}", None, None, call)
            made.enter, made.leave = enter, leave
            return made

        found.append((f"torch context_parallel {name} {rotate}", make))
    found.append(("torch context_parallel flex", lambda: of_flex(world, whole, d_o, seq)))
    for name, backend in backends.items():

        def alone(name=name, backend=backend):
            def call(q, k, v):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

            return Approach(f"one GPU, torch {name}", leaves, d_o, call, True)

        found.append((f"one GPU, torch {name}", alone))
    return found


def timed(world, approach, which):
    """Measures an approach, which may patch PyTorch's functions for as long."""
    error = None
    enter = getattr(approach, "enter", None)
    if enter is not None:
        try:
            approach.shards, approach.d_o = enter()
        except Exception as raised:  # noqa: BLE001
            error = f"{type(raised).__name__}: {raised}"
        errors = world.all(error)
        if any(errors):
            return 0.0, errors, None
    took, errors, o = measured(world, approach, which)
    if enter is not None:
        approach.leave()
    return took, errors, o


def problem(world, name, heads, heads_kv, seq, dim, arguments):
    *whole, d_o = operands(world, heads, heads_kv, seq, dim)
    made = []
    for label, make in approaches(world, whole, d_o, seq, name == "extras"):
        if arguments.only and arguments.only not in label and label != "one GPU, sdpa":
            continue
        approach, error = None, None
        try:
            approach = make()
        except Exception as raised:  # noqa: BLE001
            error = f"{type(raised).__name__}: {raised}"
        errors = world.all(error)
        if any(errors):
            world.say(json.dumps({"problem": name, "seq": seq, "approach": label, "error": next(e for e in errors if e)[:500]}))
        else:
            made.append(approach)
    # The first runs compile kernels and connect the ranks; they also show whether results agree.
    outputs = {}
    for approach in list(made):
        for which in ("forward", "both", "forward", "both"):
            _, errors, o = timed(world, approach, which)
            if any(errors):
                text = next(e for e in errors if e)
                world.say(json.dumps({"problem": name, "seq": seq, "approach": approach.name, "pass": which, "error": text[:500]}))
                made.remove(approach)
                if "ParallelError" in text:
                    world.renew()
                break
            outputs[approach.name] = o
    cut = {s: sdpa.context_parallel(world.group, sharding=s, seq=seq) for s in ("zigzag", "contiguous")}
    differences, right_o = {}, outputs.get("one GPU, sdpa")
    for approach in made if world.rank == 0 and right_o is not None else []:
        o = outputs[approach.name]
        y = right_o if approach.alone else cut["contiguous" if "contiguous" in approach.name else "zigzag"].shard(right_o, 2)
        differences[approach.name] = float("nan") if o.shape != y.shape else (o.float() - y.float()).abs().max().item()
    outputs.clear()
    for run in range(arguments.runs):
        for approach in made[run % max(len(made), 1) :] + made[: run % max(len(made), 1)]:
            for which in ("forward", "both"):
                took, errors, _ = timed(world, approach, which)
                if any(errors):
                    approach.error = approach.error or next(e for e in errors if e)
                    continue
                approach.times[which].append(took)
    medians = {a.name: {w: statistics.median(t) for w, t in a.times.items() if t} for a in made}
    ideal = medians.get("one GPU, sdpa", {})
    for approach in made:
        for which, took in medians[approach.name].items():
            times = approach.times[which]
            line = {"problem": name, "ranks": world.ranks, "heads": [heads, heads_kv], "seq": seq, "dim": dim, "approach": approach.name, "pass": which, "ms": took}
            line |= {"least": min(times), "most": max(times), "runs": len(times), "difference": differences.get(approach.name), "error": approach.error}
            if not approach.alone and which in ideal:
                line["fraction_of_ideal"] = ideal[which] / world.ranks / took
            world.say(json.dumps(line))
    world.say(f"\n| {name}, {heads}/{heads_kv} heads, {seq} tokens on {world.ranks} ranks | forward ms | of ideal | forward + backward ms | of ideal | difference |")
    world.say("|---|---|---|---|---|---|")
    for approach in made:
        found, cells = medians[approach.name], []
        for which in ("forward", "both"):
            took = found.get(which)
            part = "" if approach.alone or took is None or which not in ideal else f"{ideal[which] / world.ranks / took:.2f}"
            cells += ["" if took is None else f"{took:.3f}", part]
        difference = differences.get(approach.name)
        world.say(f"| {approach.name} | {' | '.join(cells)} | {'' if difference is None else f'{difference:.1e}'} |")
    world.say("")


def times(world, arguments):
    world.mark = torch.zeros(1, device=world.device)
    tokens = [int(n) for n in arguments.tokens.split(",")] if world.device.type == "cuda" or arguments.tokens != "8192,16384,32768" else [64]
    dim = 128 if world.device.type == "cuda" else 16
    for per_rank in tokens:
        for name, heads, heads_kv in (("GQA", 32, 8), ("MHA", 16, 16), ("extras", 32, 8)):
            if not arguments.heads or arguments.heads == name:
                problem(world, name, heads, heads_kv, per_rank * world.ranks, dim, arguments)
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("right", "bits", "killed", "times"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--first", type=int, default=0, help="right: the number of the case to begin with, after --only and --share")
    parser.add_argument("--cases", type=int, default=None, help="right: run so many cases")
    parser.add_argument("--seconds", type=float, default=240, help="right: begin no case after so many seconds")
    parser.add_argument("--only", default="", help="right: cases whose name has this text; times: approaches")
    parser.add_argument("--share", default="0/1", help="right: N/M runs every M-th program from the N-th on")
    parser.add_argument("--seq", type=int, default=None, help="right, bits: tokens of all ranks")
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--strategies", default="all_gather,ring", help="bits")
    parser.add_argument("--default", action="store_true", help="bits: without torch.use_deterministic_algorithms")
    parser.add_argument("--strategy", default="ring", help="killed")
    parser.add_argument("--hang", action="store_true", help="killed: the last rank hangs")
    parser.add_argument("--deadline", type=float, default=5.0, help="killed: seconds")
    parser.add_argument("--tokens", default="8192,16384,32768", help="times: tokens of each rank")
    parser.add_argument("--heads", choices=("GQA", "MHA", "extras"), default=None, help="times: one of the problems; `extras` has ALiBi, documents and sinks")
    parser.add_argument("--runs", type=int, default=7, help="times")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # a rank that hangs tells where
    world = World(arguments.device)
    good = {"right": right, "bits": bits, "killed": killed, "times": times}[arguments.mode](world, arguments)
    dist.barrier(world.control)
    sys.stdout.flush()
    if world.device.type == "cpu":
        os._exit(0 if good else 1)  # the threads of gloo may abort a process that ends by itself
    dist.destroy_process_group()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
