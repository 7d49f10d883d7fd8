"""Attention with sinks in gpt-oss's shapes next to compiled FlexAttention, whose output is rescaled by its log-sum-exp, in one run and in
turns: device time by CUDA events, median of 20 after 5 warm-ups, bf16; the backward includes the sink's gradient. `sinks.py DEVICE`, where
DEVICE is the binary `device`."""
import json
import sys
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from side_by_side import Ours, median

WINDOW = 128
# Batch, heads of queries, heads of keys, queries, keys, dim; whether a window of 128.
ROWS = [
    ((1, 64, 8, 4096, 4096, 64), True),
    ((1, 64, 8, 4096, 4096, 64), False),
    ((4, 64, 8, 8192, 8192, 64), True),
    ((4, 64, 8, 8192, 8192, 64), False),
]


def flex(shape, window):
    b, hq, hkv, sq, skv, d = shape
    torch.manual_seed(1)
    q = torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(b, hkv, skv, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    sink = torch.randn(hq, device="cuda", requires_grad=True)
    grad = torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16)
    mask = (lambda b, h, q, k: (q >= k) & (q - k < WINDOW)) if window else (lambda b, h, q, k: q >= k)
    blocks = create_block_mask(mask, None, None, sq, skv, device="cuda", _compile=True)
    torch._dynamo.reset()

    def rescaled(q, k, v, sink):
        o, lse = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, return_lse=True)
        return (o * torch.sigmoid(lse - sink[None, :, None])[..., None]).to(q.dtype)

    compiled = torch.compile(rescaled, dynamic=False)
    try:
        with torch.no_grad():
            first = median(lambda: compiled(q, k, v, sink))
        out = compiled(q, k, v, sink)
        return first, median(lambda: torch.autograd.grad(out, (q, k, v, sink), grad, retain_graph=True))
    except Exception as e:
        return str(e).strip().splitlines()[0][:80] if str(e).strip() else type(e).__name__


def main():
    ours = Ours(sys.argv[1])
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for shape, window in ROWS:
        masks = [f"sliding-window:{WINDOW}"] if window else ["causal"]
        both = lambda sink: [ours.ask(shape, [], masks, backward, sink=sink, wrt=["sink"] if sink and backward else []) for backward in (False, True)]
        before, theirs = both(True), flex(shape, window)
        after, without = both(True), both(False)
        row = dict(shape=shape, window=WINDOW if window else None, flex=theirs)
        row["ours"] = [(x.get("ms"), y.get("ms")) for x, y in zip(before, after)]
        row["without_sink"] = [a.get("ms") for a in without]
        row["engines"], row["refused"] = [a.get("engine") for a in after], [a.get("refused") for a in after + without]
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()


main()
