"""Forward and backward of a stack of attention layers: peak memory and tokens per second, next to PyTorch's flash and unfused paths.
A layer is attention alone: the output of one is the query of the next. `stack.py DEVICE`."""
import json
import subprocess
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS, HEADS, DIM, RUNS = 4, 32, 128, 5


def run(backend, batch, seq):
    torch.manual_seed(1)
    make = lambda: torch.randn(batch, HEADS, seq, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x, layers = make(), [(make(), make()) for _ in range(LAYERS)]
    grad = torch.randn_like(x)
    leaves = [x, *(t for pair in layers for t in pair)]

    def step():
        out = x
        for k, v in layers:
            out = F.scaled_dot_product_attention(out, k, v, is_causal=True)
        return torch.autograd.grad(out, leaves, grad)

    with sdpa_kernel(backend):
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(RUNS):
            kept = step()
            del kept
        end.record()
        torch.cuda.synchronize()
    ms = start.elapsed_time(end) / RUNS
    return dict(ms=ms, tokens_per_s=batch * seq / ms * 1e3, peak_mib=torch.cuda.max_memory_allocated() / 2**20)


for batch, seq in ((4, 2048), (2, 8192)):
    row = dict(batch=batch, seq=seq, layers=LAYERS, heads=HEADS, dim=DIM)
    row["ours"] = json.loads(subprocess.run([sys.argv[1], "stack", str(batch), str(seq)], capture_output=True, text=True).stdout.splitlines()[-1])
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION), ("math", SDPBackend.MATH)):
        try:
            row[name] = run(backend, batch, seq)
        except Exception as e:
            row[name] = str(e).splitlines()[0][:90]
        torch.cuda.empty_cache()
    print(json.dumps(row), flush=True)
