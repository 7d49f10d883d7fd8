"""One query over a cache of keys, contiguous and in pages, next to PyTorch's cuDNN and flash backends and to a plain copy, in one run and
in turns: device time by CUDA events, median of 20 after 5 warm-ups, bf16, 8,192 keys. Bandwidth counts keys and values, read once.
`decode.py DEVICE`, where DEVICE is the binary `device`."""
import json
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from side_by_side import Ours, median

# Batch, heads of queries, heads of keys, queries, keys, dim.
SHAPES = [(16, 32, 8, 1, 8192, 128), (64, 32, 8, 1, 8192, 128), (16, 64, 8, 1, 8192, 64)]
# What is asked for beside the shape: masks and more.
OURS = [
    ("contiguous", [], {}),
    ("lengths", ["padding"], {}),
    ("paged 16", ["padding"], dict(paged=16)),
    ("paged 64", ["padding"], dict(paged=64)),
    ("paged 128", ["padding"], dict(paged=128)),
    ("paged 16, unified", ["padding"], dict(paged=16, form="unified")),
    ("paged 16, composite", ["padding"], dict(paged=16, form="composite")),
    ("contiguous, sink", [], dict(sink=True)),
    ("paged 64, sink", ["padding"], dict(paged=64, sink=True)),
]


def theirs(shape):
    b, hq, hkv, sq, skv, d = shape
    torch.manual_seed(1)
    q = torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, hkv, skv, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend), torch.no_grad():
                found[name] = median(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        except Exception as e:
            found[name] = str(e).strip().splitlines()[0][:80] if str(e).strip() else type(e).__name__
    to = torch.empty_like(k)
    found["copy"] = median(lambda: to.copy_(k))
    return found


def main():
    ours = Ours(sys.argv[1])
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, its cuDNN {torch.backends.cudnn.version()}")
    for shape in SHAPES:
        b, _, hkv, _, skv, d = shape
        speed = lambda ms: round(2 * b * hkv * skv * d * 2 / ms / 1e9, 3) if isinstance(ms, float) else ms
        found = theirs(shape)
        answers = {name: ours.ask(shape, [], masks, False, **more) for name, masks, more in OURS}
        row = dict(shape=shape, tb_per_s={name: speed(ms) for name, ms in found.items()})
        row["ours"] = {name: dict(tb_per_s=speed(a.get("ms")), **a) for name, a in answers.items()}
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()


main()
