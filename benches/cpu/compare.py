"""Times the CPU executor against PyTorch's scaled_dot_product_attention, in turns, on this machine.

    cargo build --release -p bench-sdpa --bin cpu
    python benches/cpu/compare.py target/release/cpu [--threads 2] [--rounds 7] [--cases NAME...]

Each round times a few calls of one and then of the other; the ratio is of the medians over all rounds, torch / sdpa:
above 1, sdpa is faster.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time

CASES = [
    # name, dtype, (batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v), layout, mask, calls per round
    ("f32", "f32", (1, 16, 16, 2048, 2048, 64, 64), "bhsd", None, 3),
    ("f32 causal", "f32", (1, 16, 16, 2048, 2048, 64, 64), "bhsd", "causal", 3),
    ("f32 bshd", "f32", (1, 16, 16, 2048, 2048, 64, 64), "bshd", None, 3),
    ("bf16", "bf16", (1, 16, 16, 2048, 2048, 64, 64), "bhsd", None, 3),
    ("f16", "f16", (1, 16, 16, 2048, 2048, 64, 64), "bhsd", None, 3),
    ("gqa d128", "f32", (1, 32, 8, 2048, 2048, 128, 128), "bhsd", None, 1),
    ("gqa d128 causal", "f32", (1, 32, 8, 2048, 2048, 128, 128), "bhsd", "causal", 1),
    ("gqa d128 bf16", "bf16", (1, 32, 8, 2048, 2048, 128, 128), "bhsd", None, 1),
    ("decode", "f32", (1, 32, 8, 1, 8192, 128, 128), "bhsd", None, 10),
    ("decode bf16", "bf16", (1, 32, 8, 1, 8192, 128, 128), "bhsd", None, 10),
    ("decode mha", "f32", (1, 16, 16, 1, 8192, 64, 64), "bhsd", None, 10),
    ("decode mha bf16", "bf16", (1, 16, 16, 1, 8192, 64, 64), "bhsd", None, 10),
    ("decode bshd", "f32", (1, 32, 8, 1, 8192, 128, 128), "bshd", None, 10),
    ("short", "f32", (8, 12, 12, 128, 128, 64, 64), "bhsd", None, 20),
    ("tiny", "f32", (1, 4, 4, 16, 16, 32, 32), "bhsd", None, 200),
]


def busy(seconds=0.1):
    """Share of this machine's processors that something else keeps busy, sampled while we sleep."""

    def ticks():
        with open("/proc/stat") as lines:
            numbers = [int(x) for x in lines.readline().split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]

    try:
        total, idle = ticks()
        time.sleep(seconds)
        new_total, new_idle = ticks()
    except OSError:
        time.sleep(seconds)
        return 0.0
    return 1 - (new_idle - idle) / max(new_total - total, 1)


def wait_for_quiet(patience):
    """Waits until the machine is quiet; also lets threads of the other side stop spinning. False: it never was."""
    until = time.monotonic() + patience
    while busy() > 0.1:
        if time.monotonic() > until:
            return False
    return True


def cpu_model():
    try:
        with open("/proc/cpuinfo") as lines:
            facts = dict(line.split(":", 1) for line in lines if ":" in line)
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    return f"{facts.get('model name')} (family {facts.get('cpu family')}, model {facts.get('model')})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="*", help="names; all without it")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for a quiet machine before each turn")
    parser.add_argument("--json", action="store_true", help="print every time, a line a case")
    args = parser.parse_args()

    import torch
    import torch.nn.functional as F

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    environment = {**os.environ, "RAYON_NUM_THREADS": str(args.threads)}
    sdpa = subprocess.Popen([args.binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def rust(case):
        sdpa.stdin.write(json.dumps(case) + "\n")
        sdpa.stdin.flush()
        line = sdpa.stdout.readline()
        if not line:
            raise SystemExit(f"{args.binary} ended")
        return json.loads(line)

    def repeat(call, n):
        times = []
        for _ in range(n):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    # A plain product of matrices, for what the machine can do.
    wait_for_quiet(args.patience)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    torch.mm(a, b)
    gemm = 2 * 2048**3 / statistics.median(repeat(lambda: torch.mm(a, b), 9)) / 1e6

    print(f"{datetime.date.today()}, {cpu_model()}, {args.threads} threads, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})")
    print(f"torch.mm f32 2048^3: {gemm:.0f} GFLOP/s")
    print(f"{'case':17} {'dtype':5} {'shape':34} {'mask':7} {'sdpa ms':>9} {'torch ms':>9} {'ratio':>6} {'GFLOP/s':>8} {'of mm':>6}  engine")
    for name, dtype, shape, layout, mask, repeats in CASES:
        if args.cases and name not in args.cases:
            continue
        batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v = shape
        case = {"name": name, "dtype": dtype, "shape": shape, "layout": layout, "mask": mask, "repeats": repeats}
        kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]

        def tensor(heads, seq, dim):
            if layout == "bshd":
                return torch.randn(batch, seq, heads, dim).to(kind).transpose(1, 2)
            return torch.randn(batch, heads, seq, dim).to(kind)

        q, k, v = tensor(heads_q, seq_q, dim_qk), tensor(heads_kv, seq_kv, dim_qk), tensor(heads_kv, seq_kv, dim_v)

        def torch_call():
            return F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", enable_gqa=heads_q != heads_kv)

        torch_call()
        ours, theirs, noisy = [], [], False
        for _ in range(args.rounds):
            noisy |= not wait_for_quiet(args.patience)
            answer = rust(case)
            ours += answer["ms"]
            noisy |= not wait_for_quiet(args.patience)
            theirs += repeat(torch_call, repeats)
        mine, other = statistics.median(ours), statistics.median(theirs)
        rate = answer["flops"] / mine / 1e6
        print(
            f"{name:17} {dtype:5} {str(shape):34} {mask or '-':7} {mine:9.3f} {other:9.3f} {other / mine:6.2f} {rate:8.0f} {rate / gemm:6.2f}  {answer['engine']}{'  (machine not quiet)' if noisy else ''}",
            flush=True,
        )
        if args.json:
            print(json.dumps({"name": name, "sdpa_ms": ours, "torch_ms": theirs}))
    sdpa.stdin.close()
    sdpa.wait()


if __name__ == "__main__":
    main()
