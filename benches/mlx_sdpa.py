"""Attention on an Apple GPU beside MLX: a table to paste into an issue. `python3 benches/mlx_sdpa.py`, on a Mac with Rust and `pip install mlx`.

Ours is the time in the kernels, by the GPU's own clock. MLX tells none, so its time is the wall's, of enough calls at once that submitting does not count. Its gradient is
`mx.vjp`, which computes the forward pass too: so the second time is of both passes on either side. Arguments go to the Rust half
(`--quick`, `--executor cpu`)."""
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time

RUNS, AT_ONCE = 7, 8
OURS = ["cargo", "run", "--quiet", "--release", "--package", "bench-sdpa", "--bin", "metal", "--"]


def mlx():
    try:
        import mlx.core as mx
    except ImportError as e:
        return None, f"not measured: {e}"
    return mx, f"MLX {importlib.metadata.version('mlx')} on {mx.default_device()}"


def wall(mx, call):
    """Milliseconds of a call: the median, of several that are submitted together."""
    mx.eval(call())
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        mx.eval([call() for _ in range(AT_ONCE)])
        times.append((time.perf_counter() - start) / AT_ONCE * 1e3)
    return statistics.median(times)


def theirs(mx, row):
    """Of the forward pass, and of it and the gradient."""
    batch, heads_q, heads_kv, seq_q, seq_kv, dim = row["shape"]
    dtype = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}[row["dtype"]]
    mx.random.seed(1)
    normal = lambda heads, seq: mx.random.normal((batch, heads, seq, dim)).astype(dtype)
    q, k, v, d_o = normal(heads_q, seq_q), normal(heads_kv, seq_kv), normal(heads_kv, seq_kv), normal(heads_q, seq_q)
    mask = None if row["mask"] == "none" else "causal"
    mx.eval(q, k, v, d_o)
    forward = lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, mask=mask)
    return wall(mx, lambda: forward(q, k, v)), wall(mx, lambda: mx.vjp(forward, [q, k, v], [d_o])[1])


def cells(ours, other):
    return f"{ours:.3f} | " + ("- | -" if other is None else f"{other:.3f} | {ours / other:.2f}")


def main():
    ours = subprocess.run(OURS + sys.argv[1:], stdout=subprocess.PIPE, text=True)
    if ours.returncode:
        sys.exit("our half failed; what it says is above. `cargo sdpa doctor` tells what is missing")
    device, *rows = map(json.loads, ours.stdout.splitlines())
    quick = "--quick" in sys.argv
    mx, version = mlx()
    revision = subprocess.run(["git", "describe", "--always", "--dirty"], stdout=subprocess.PIPE, text=True).stdout.strip()
    print(f"{device['device']} ({device['executor']}), {device['system']}, {platform.platform()}; {version}; revision {revision}")
    print("ours: time in the kernels; MLX: wall time; ratio: ours / MLX" + ("; QUICK: lengths are a sixteenth" if quick else ""))
    print()
    print("| batch, heads, key heads, queries, keys, dim | type | mask | forward, ours ms | MLX ms | ratio | forward and gradient, ours ms | MLX ms | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        forward, both = theirs(mx, row) if mx else (None, None)
        first, second = cells(row["forward_ms"], forward), cells(row["forward_ms"] + row["backward_ms"], both)
        print(f"| {', '.join(map(str, row['shape']))} | {row['dtype']} | {row['mask']} | {first} | {second} |", flush=True)
    copied = sorted({name for row in rows for name in row["copied"]})
    print()
    print("through a copy, outside of the times: " + (", ".join(copied) or "nothing"))


main()
