"""Dims 64 and 128, forward, backward and both, causal and not, 1 Ki to 16 Ki, next to PyTorch's backends: 16 heads, 16 Ki tokens in
all, bf16. `matrix.py DEVICE` prints one JSON object a line; `matrix.py --plot RESULTS.jsonl OUT` draws them."""
import json
import sys

LENGTHS = [1024, 2048, 4096, 8192, 16384]
TOKENS, HEADS = 16384, 16
BACKENDS = ["cudnn", "flash", "efficient", "math"]


def measure(binary):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from side_by_side import Ours, median

    kinds = dict(cudnn=SDPBackend.CUDNN_ATTENTION, flash=SDPBackend.FLASH_ATTENTION, efficient=SDPBackend.EFFICIENT_ATTENTION, math=SDPBackend.MATH)
    ours = Ours(binary)
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, its cuDNN {torch.backends.cudnn.version()}")
    for dim in (64, 128):
        for causal in (True, False):
            for seq in LENGTHS:
                batch = TOKENS // seq
                shape = (batch, HEADS, HEADS, seq, seq, dim)
                masks = ["causal"] if causal else []
                row = dict(dim=dim, causal=causal, seq=seq, batch=batch, heads=HEADS)
                row["ours"] = [ours.ask(shape, [], masks, backward).get("ms") for backward in (False, True)]
                torch.manual_seed(1)
                q, k, v = (torch.randn(batch, HEADS, seq, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
                grad = torch.randn_like(q)
                for name in BACKENDS:
                    try:
                        with sdpa_kernel(kinds[name]):
                            call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                            with torch.no_grad():
                                forward = median(call)
                            out = call()
                            backward = median(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
                        row[name] = [forward, backward]
                    except Exception as e:
                        row[name] = str(e).splitlines()[0][:80]
                    out = None
                    torch.cuda.empty_cache()
                again = [ours.ask(shape, [], masks, backward).get("ms") for backward in (False, True)]
                row["ours"] = [min(a, b) for a, b in zip(row["ours"], again)]
                print(json.dumps(row), flush=True)


def plot(results, out):
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in open(results) if line.startswith("{")]
    figure, axes = plt.subplots(2, 6, figsize=(22, 7), sharex=True)
    for i, dim in enumerate((64, 128)):
        for j, (causal, what) in enumerate((c, w) for c in (True, False) for w in ("forward", "backward", "both")):
            axis = axes[i][j]
            for name in ["ours", *BACKENDS]:
                points = []
                for row in (r for r in rows if r["dim"] == dim and r["causal"] == causal):
                    if not isinstance(row.get(name), list):
                        continue
                    ms = dict(forward=row[name][0], backward=row[name][1], both=sum(row[name]))[what]
                    flops = 4 * row["batch"] * row["heads"] * row["seq"] ** 2 * dim * dict(forward=1, backward=2.5, both=3.5)[what]
                    points.append((row["seq"], flops / (2 if causal else 1) / ms / 1e9))
                axis.plot(*zip(*points), marker="o", label=name, linewidth=2.5 if name == "ours" else 1.2)
            axis.set_title(f"{what}, d = {dim}, {'causal' if causal else 'no mask'}", fontsize=9)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    figure.tight_layout()
    figure.savefig(out)


if sys.argv[1] == "--plot":
    plot(sys.argv[2], sys.argv[3])
else:
    measure(sys.argv[1])
