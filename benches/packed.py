"""Packed documents next to compiled FlexAttention with a document mask over one row and PyTorch's variable length attention (FlashAttention-2),
in one run and in turns: device time by CUDA events, median of 20 after 5 warm-ups, bf16, causal, (total, heads, dim). `packed.py DEVICE
[ROW...]`, where DEVICE is the binary `device` and ROW the number of a line of DOCUMENTS."""
import json
import sys
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from side_by_side import Ours, median

# Lengths, heads of queries, heads of keys, dim.
DOCUMENTS = [
    ([512] * 32, 32, 32, 128),
    ([2048] * 8, 32, 8, 128),
    ([4096] * 8, 32, 8, 128),
    ([100, 4000, 700, 3000, 1500, 6000, 84, 1000], 32, 8, 128),
    ([2048] * 8, 32, 8, 64),
    ([64] * 256, 32, 8, 128),
]


def tried(name, found, forward, inputs, grad):
    try:
        with torch.no_grad():
            first = median(forward)
        out = forward()
        found[name] = (first, median(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)))
    except Exception as e:
        found[name] = str(e).strip().splitlines()[0][:80] if str(e).strip() else type(e).__name__


def theirs(lengths, hq, hkv, d):
    torch.manual_seed(1)
    total, longest, found = sum(lengths), max(lengths), {}
    make = lambda heads: torch.randn(total, heads, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v, grad = make(hq), make(hkv), make(hkv), make(hq).detach()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
    try:
        from torch.nn.attention.varlen import varlen_attn
        wide = [x if hq == hkv else x.detach().repeat_interleave(hq // hkv, 1).requires_grad_() for x in (k, v)]
        tried("varlen", found, lambda: varlen_attn(q, *wide, bounds, bounds, longest, longest, window_size=(-1, 0)), (q, *wide), grad)
    except ImportError as e:
        found["varlen"] = str(e)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), torch.tensor(lengths, device="cuda"))
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, total, total, device="cuda", _compile=True)
    rows = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    back = grad.transpose(0, 1)[None]
    tried("flex", found, lambda: compiled(*rows, block_mask=blocks, enable_gqa=hq != hkv), rows, back)
    return found


def main():
    ours = Ours(sys.argv[1])
    wanted = [int(n) for n in sys.argv[2:]] or range(len(DOCUMENTS))
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for lengths, hq, hkv, d in (DOCUMENTS[n] for n in wanted):
        longest = max(lengths)
        ask = lambda backward: ours.ask((len(lengths), hq, hkv, longest, longest, d), [], ["causal"], backward, documents=lengths)
        before = [ask(backward) for backward in (False, True)]
        found = theirs(lengths, hq, hkv, d)
        after = [ask(backward) for backward in (False, True)]
        row = dict(documents=len(lengths), longest=longest, total=sum(lengths), heads=(hq, hkv), dim=d, theirs=found)
        row["ours"] = [min(x["ms"], y["ms"]) if "ms" in x and "ms" in y else None for x, y in zip(before, after)]
        row["ours_before_and_after"] = [(x.get("ms"), y.get("ms")) for x, y in zip(before, after)]
        row["engines"], row["workspace"] = [a.get("engine") for a in after], [a.get("workspace") for a in after]
        row["refused"] = [a.get("refused") for a in after]
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()


main()
