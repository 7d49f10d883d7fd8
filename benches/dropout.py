"""Dropout next to PyTorch's cuDNN and flash backends, and each without it, in one run and in turns: device time by CUDA events, median of 20 after 5 warm-ups,
bf16, ms forward; backward. `dropout.py DEVICE`, where DEVICE is the binary `device`."""
import json
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from side_by_side import Ours, median

P = 0.1
# Batch, heads of queries, heads of keys, queries, keys, dim.
SHAPES = [(4, 32, 32, 2048, 2048, 128), (4, 32, 8, 4096, 4096, 128), (8, 16, 16, 1024, 1024, 64)]


def theirs(shape, p):
    b, hq, hkv, sq, skv, d = shape
    torch.manual_seed(1)
    make = lambda heads, seq: torch.randn(b, heads, seq, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v, grad = make(hq, sq), make(hkv, skv), make(hkv, skv), make(hq, sq).detach()
    found = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=hq != hkv)
                with torch.no_grad():
                    forward = median(run)
                out = run()
                found[name] = (forward, median(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)))
        except Exception as e:
            found[name] = str(e).strip().splitlines()[0][:80] if str(e).strip() else type(e).__name__
    return found


def main():
    ours = Ours(sys.argv[1])
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, its cuDNN {torch.backends.cudnn.version()}; causal, p = {P}")
    for shape in SHAPES:
        found = {"shape": shape}
        for name, p in (("dropout", P), ("without", 0.0)):
            more = dict(dropout=p) if p else {}
            ask = lambda backward: ours.ask(shape, [], ["causal"], backward, **more)
            before, peers, after = [ask(b) for b in (False, True)], theirs(shape, p), [ask(b) for b in (False, True)]
            found[name] = {"ours": [min(x.get("ms", 1e9), y.get("ms", 1e9)) for x, y in zip(before, after)], **peers}
            found[name]["refused"] = [x.get("refused") for x in before]
        print(json.dumps(found), flush=True)


main()
