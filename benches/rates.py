"""Native CUDA kernels and cuDNN's beside FlashAttention-4, both backends of FlexAttention and PyTorch's SDPA, in one run: device time, bf16.

    rates.py DEVICE [--processes N] [--within SECONDS] [ROW...] > RESULTS.jsonl
                                                                 DEVICE is the binary `device`, ROW a part of a row's name; rows that no process has
                                                                 come to within so many seconds are left out, and told
    rates.py --table RESULTS.jsonl                               a table in Markdown
    rates.py --plot RESULTS.jsonl OUT.svg [EARLIER.jsonl]        speed against length; dashed, of an earlier run, peers that this one has not

Processes compile side by side; then one after the other times its rows, the others waiting. All that run a pass of a row are timed in turns, so that they
meet the same clocks; medians. A pause on the device ahead of Python's marks lets the host be done before the first kernel begins: nothing of the host's
time is in any figure. FlashAttention-4 is the package `flash-attn-4`; a peer that is not there, or declines, is told as such.
"""
import json
import math
import os
import statistics
import subprocess
import sys
import time

CAP, WINDOW, PREFIX, NEAR, GLOBAL_WINDOW, GLOBALS, EVERY, DOCUMENTS = 30.0, 512, 512, 257, 256, 64, 4, 8
LONG, LONG_64, WIDE, BROAD = (2, 16, 16, 16384, 128), (1, 32, 8, 16384, 64), (1, 16, 16, 8192, 256), (4, 32, 32, 4096, 128)
LENGTHS = [1024, 2048, 4096, 8192, 16384]
OURS = ["own", "cudnn"]
WARM, RUNS, BETWEEN = 2, 7, 2.0


def rows():
    """Name, (batch, heads_q, heads_kv, seq, dim), score_mod, masks, lengths of packed documents."""
    for shape in (LONG, LONG_64, WIDE):
        for mask in ([], ["causal"]):
            yield "rate", shape, [], mask, None
    for mods, mask in (([], []), ([], ["causal"]), ([f"softcap:{CAP:.0f}"], ["causal"]), (["alibi"], ["causal"]), ([], [f"sliding-window:{WINDOW}"])):
        yield "usual", BROAD, mods, mask, None
    prefix, shared = f"prefix-lm:{PREFIX}", f"shared-prefix:{PREFIX} & causal"
    for mask in (prefix, f"dilated:{EVERY} & causal", f"natten:{NEAR}", shared, f"global-local:{GLOBAL_WINDOW},{GLOBALS}", "array:qk", "document & causal"):
        yield "mask", BROAD, [], [mask], None
    yield "packed", (32, 32, 32, 512, 128), [], ["causal"], [512] * 32
    yield "packed", (8, 32, 8, 2048, 128), [], ["causal"], [2048] * 8
    for dim in (64, 128):
        for mask in ([], ["causal"]):
            for seq in LENGTHS:
                yield "length", (max(LENGTHS) // seq, 16, 16, seq, dim), [], mask, None


def told(row):
    name, shape, mods, masks, documents = row
    what = " ".join(mods + masks) or "none"
    return f"{name} {shape} {what}" + (f" {len(documents)} documents" if documents else "")


def mask_mod(mask, seq):
    """What FlexAttention is told of a mask."""
    import torch

    clamp, ids = torch.clamp, torch.arange(seq, device="cuda") * DOCUMENTS // seq
    kept = torch.rand(seq, seq, device="cuda") < 0.5 if mask == "array:qk" else None
    return {
        "causal": lambda b, h, q, k: q >= k,
        f"sliding-window:{WINDOW}": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        f"prefix-lm:{PREFIX}": lambda b, h, q, k: (q >= k) | (k < PREFIX),
        f"dilated:{EVERY} & causal": lambda b, h, q, k: (q >= k) & ((q - k) % EVERY == 0),
        f"natten:{NEAR}": lambda b, h, q, k: (k >= clamp(q - NEAR // 2, 0, seq - NEAR)) & (k < clamp(q - NEAR // 2, 0, seq - NEAR) + NEAR),
        f"shared-prefix:{PREFIX} & causal": lambda b, h, q, k: (q >= k) & ((k < PREFIX) | (ids[q] == ids[k])),
        f"global-local:{GLOBAL_WINDOW},{GLOBALS}": lambda b, h, q, k: ((q - k).abs() < GLOBAL_WINDOW) | (k < GLOBALS) | (q < GLOBALS),
        "array:qk": lambda b, h, q, k: kept[q, k],
        "document & causal": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
    }[mask]


def passes(forward, inputs, grad):
    """Both passes of a peer, ready to be called."""
    import torch

    def alone():
        with torch.no_grad():
            forward()

    out = forward()
    return [alone, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)]


def flash4(shape, mods, masks, documents, inputs):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    import torch

    if masks not in ([], ["causal"], [f"sliding-window:{WINDOW}"]) or "alibi" in mods:
        raise NotImplementedError("this problem")
    how = dict(causal=masks == ["causal"], softcap=CAP if mods else 0.0, window_size=(WINDOW - 1, 0) if masks and masks != ["causal"] else (None, None))
    q, k, v, grad = inputs
    first = lambda found: found[0] if isinstance(found, tuple) else found
    if documents:
        bounds = torch.tensor([0, *documents], device="cuda").cumsum(0).to(torch.int32)
        at = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=max(documents), max_seqlen_k=max(documents))
        return passes(lambda: first(flash_attn_varlen_func(q, k, v, **at, **how)), (q, k, v), grad)
    q, k, v, grad = (x.transpose(1, 2).contiguous().detach().requires_grad_() for x in (q, k, v, grad))
    return passes(lambda: first(flash_attn_func(q, k, v, **how)), (q, k, v), grad.detach())


def flex(backend):
    def made(shape, mods, masks, documents, inputs):
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch, heads_q, heads_kv, seq, _ = shape
        q, k, v, grad = inputs
        mask = mask_mod(masks[0], seq) if masks else None
        if documents:
            # One row, in which the mask keeps documents apart.
            seq, ids = sum(documents), torch.repeat_interleave(torch.arange(len(documents), device="cuda"), torch.tensor(documents, device="cuda"))
            mask = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
            q, k, v = (x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v))
            grad = grad.transpose(0, 1)[None]
        blocks = create_block_mask(mask, None, None, seq, seq, device="cuda", _compile=True) if mask else None
        compiled = torch.compile(flex_attention, dynamic=False)
        slopes = torch.exp2(-8.0 * torch.arange(1, heads_q + 1, device="cuda") / heads_q)
        score_mods = {"softcap": lambda score, b, h, q, k: CAP * torch.tanh(score / CAP), "alibi": lambda score, b, h, q, k: score + slopes[h] * (k - q)}
        how = dict(score_mod=score_mods[mods[0].split(":")[0]] if mods else None, block_mask=blocks, enable_gqa=heads_q != heads_kv, kernel_options={"BACKEND": backend})
        return passes(lambda: compiled(q, k, v, **how), (q, k, v), grad)

    return made


def sdpa_cudnn(shape, mods, masks, documents, inputs):
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if mods or documents or masks not in ([], ["causal"]):
        raise NotImplementedError("this problem")
    q, k, v, grad = inputs

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=bool(masks), enable_gqa=shape[1] != shape[2])

    return passes(forward, (q, k, v), grad)


MAKERS = {"fa4": flash4, "flex triton": flex("TRITON"), "flex FLASH": flex("FLASH"), "sdpa cuDNN": sdpa_cudnn}


def short(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


def on_device(call):
    """Milliseconds of a call of PyTorch's, of so many between two marks, behind a pause of so many cycles of about half a nanosecond."""
    import torch

    def timed(calls, cycles):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    host = time.perf_counter() - begun
    return lambda calls: timed(calls, int(min(20e-3, 1.5 * host * calls + 1e-4) * 2e9))


def in_turns(timed):
    """Medians of what is timed, by name."""
    calls = {name: max(1, min(16, int(BETWEEN / call(1)))) for name, call in timed.items()}
    times = {name: [] for name in timed}
    for n in range(WARM + RUNS):
        for name, call in timed.items():
            ms = call(calls[name])
            if n >= WARM:
                times[name].append(ms)
    return {name: statistics.median(found) for name, found in times.items()}


class Worker:
    """Every `of`th row from `first` on."""

    def __init__(self, binary, first, of, within, wanted):
        from side_by_side import Ours
        import torch

        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
        # A graph is kept for more than one backward pass.
        torch._functorch.config.donated_buffer = False
        self.ours, self.made, self.left = Ours(binary, sys.stderr), [], 0
        started = time.perf_counter()
        every = [row for row in rows() if not wanted or any(part in told(row) for part in wanted)]
        for row in every[first::of]:
            begun = time.perf_counter()
            if begun - started > within:
                self.left += 1
                print(f"# {told(row)}: left out, {begun - started:.0f} s have passed", file=sys.stderr, flush=True)
                continue
            self.made.append((row, *self.make(row)))
            print(f"# {told(row)}: ready after {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()

    def make(self, row):
        import torch

        _, shape, mods, masks, documents = row
        for backward in (False, True):
            for kind in OURS:
                self.ask(row, kind, backward, 1)
        torch.manual_seed(1)
        batch, heads_q, heads_kv, seq, dim = shape
        of = lambda heads: (sum(documents), heads, dim) if documents else (batch, heads, seq, dim)
        make = lambda heads: torch.randn(of(heads), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        inputs = make(heads_q), make(heads_kv), make(heads_kv), make(heads_q).detach()
        calls, refused = {}, {}
        for name, maker in MAKERS.items():
            try:
                both = maker(shape, mods, masks, documents, inputs)
                for call in both:
                    call()
                torch.cuda.synchronize()
                calls[name] = both
            except Exception as e:
                refused[name] = short(e)
        return calls, refused

    def ask(self, row, kind, backward, calls):
        _, (batch, heads_q, heads_kv, seq, dim), mods, masks, documents = row
        turn = {"own": kind == "own", "calls": calls}
        return self.ours.ask((batch, heads_q, heads_kv, seq, seq, dim), mods, masks, backward, documents=documents, turn=turn)

    def times(self):
        for row, calls, refused in self.made:
            name, shape, mods, masks, documents = row
            found = dict(row=name, shape=shape, score_mod=mods, mask=masks, documents=documents, flops=[None, None], ms={}, refused=refused, engines={})
            for backward in (False, True):
                timed = {name: on_device(both[backward]) for name, both in calls.items()}
                for kind in OURS:
                    answer = self.ask(row, kind, backward, 1)
                    if "ms" in answer:
                        timed[kind] = lambda calls, kind=kind: self.ask(row, kind, backward, calls)["ms"]
                        found["flops"][backward] = answer["tflops"] * answer["ms"] * 1e9
                        found["engines"].setdefault(kind, []).append(answer["engine"])
                    else:
                        refused[f"{kind}, {'backward' if backward else 'forward'}"] = answer["refused"][:300]
                for name, ms in in_turns(timed).items():
                    found["ms"].setdefault(name, [None, None])[backward] = round(ms, 5)
            print(json.dumps(found), flush=True)


def work(binary, first, of, within, wanted):
    worker = Worker(binary, first, of, within, wanted)
    print("ready", flush=True)
    sys.stdin.readline()
    worker.times()
    print(f"done {worker.left}", flush=True)


def measure(binary, processes, within, wanted):
    import torch

    every = [row for row in rows() if not wanted or any(part in told(row) for part in wanted)]
    processes = min(processes, len(every))
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, its cuDNN {torch.backends.cudnn.version()}", flush=True)
    start = lambda n: [sys.executable, __file__, "--work", binary, str(n), str(processes), str(within), *wanted]
    # Each compiles by itself: no pools of helpers in every process.
    alone = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    workers = [subprocess.Popen(start(n), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone) for n in range(processes)]
    ready = [worker.stdout.readline() == "ready\n" for worker in workers]
    failed, left = ready.count(False), 0
    for worker in (worker for worker, is_ready in zip(workers, ready) if is_ready):
        worker.stdin.write("go\n")
        worker.stdin.flush()
        ended = False
        for line in worker.stdout:
            ended = line.startswith("done ")
            if ended:
                left += int(line.split()[1])
            else:
                print(line, end="", flush=True)
        failed += not ended
    if failed or left:
        sys.exit(f"{failed} of {processes} processes failed, {left} rows left out: rows are missing")


def read(results):
    return [json.loads(line) for line in open(results) if line.startswith("{")]


def table(results):
    names = ["own", "cudnn", *MAKERS]
    print("| | (batch, heads_q, heads_kv, seq, dim) | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 2) + "|")
    for row in read(results):
        def cell(name):
            rate = lambda ms, flops: f"{ms:.3f}" + (f" ({flops / ms / 1e9:.0f})" if flops else "")
            both = row["ms"].get(name)
            return "; ".join("–" if ms is None else rate(ms, flops) for ms, flops in zip(both, row["flops"])) if both else "–"

        what = " ".join(row["score_mod"] + row["mask"]) or "none"
        documents = f", {len(row['documents'])} packed documents" if row["documents"] else ""
        shape = ",".join(map(str, row["shape"]))
        print(f"| {what}{documents} | ({shape}) | " + " | ".join(map(cell, names)) + " |")


def plot(results, out, earlier):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(17, 7), sharex=True)
    names = {"own": "native CUDA kernels", "cudnn": "cuDNN through sdpa", "fa4": "FlashAttention-4", "flex triton": "FlexAttention, Triton",
             "flex FLASH": "FlexAttention, FLASH", "sdpa cuDNN": "PyTorch's cuDNN"}
    rows = read(results)
    runs = {name: results if any(row["ms"].get(name) for row in rows) else earlier for name in names}
    lengths = {run: [row for row in read(run) if row["row"] == "length"] for run in set(runs.values()) if run}
    for i, dim in enumerate((64, 128)):
        for j, (mask, backward) in enumerate((mask, backward) for mask in ([], ["causal"]) for backward in (0, 1)):
            axis = axes[i][j]
            for name, run in runs.items():
                points = sorted((row["shape"][3], row["flops"][backward] / row["ms"][name][backward] / 1e9) for row in lengths.get(run, [])
                                if row["shape"][4] == dim and row["mask"] == mask and row["ms"].get(name))
                if points:
                    label = names[name] + (", an earlier run" if run == earlier else "")
                    axis.plot(*zip(*points), marker="o", label=label, linewidth=2.5 if name in OURS else 1.2, linestyle="--" if run == earlier else "-")
            axis.set_title(f"{'backward' if backward else 'forward'}, d = {dim}, {mask[0] if mask else 'no mask'}", fontsize=9)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("tokens of 16 Ki in all, 16 heads")
    figure.tight_layout()
    figure.savefig(out)


def main(arguments):
    match arguments:
        case ["--table", results]:
            table(results)
        case ["--plot", results, out, *earlier] if len(earlier) < 2:
            plot(results, out, *(earlier or [None]))
        case ["--work", binary, first, of, within, *wanted]:
            work(binary, int(first), int(of), float(within), wanted)
        case [binary, "--processes", count, "--within", within, *wanted]:
            measure(binary, int(count), float(within), wanted)
        case [binary, "--processes", count, *wanted]:
            measure(binary, int(count), math.inf, wanted)
        case [binary, "--within", within, *wanted]:
            measure(binary, 4, float(within), wanted)
        case [binary, *wanted]:
            measure(binary, 4, math.inf, wanted)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
