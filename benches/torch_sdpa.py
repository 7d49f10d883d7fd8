"""PyTorch's attention on the shapes of `device speed`: device time by CUDA events, median of 20 after 5 warm-ups, backends in turns."""
import statistics
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

WARM, RUNS = 5, 20
ROWS = [
    ("causal", 1, 32, 8, 2048, 2048, 128),
    ("causal", 1, 32, 8, 2049, 2049, 128),
    ("causal", 1, 32, 8, 8, 8, 128),
    ("causal-bottom-right", 1, 32, 8, 2048, 4096, 128),
    ("causal", 4, 32, 32, 4096, 4096, 128),
    ("causal", 4, 16, 16, 16384, 16384, 128),
    ("none", 1, 32, 8, 2048, 2048, 128),
    ("none", 16, 32, 8, 1, 8192, 128),
]
print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
for mask, b, hq, hkv, sq, skv, d in ROWS:
    torch.manual_seed(1)
    q = torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, hkv, skv, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    options = dict(enable_gqa=hq != hkv)
    if mask == "causal":
        options["is_causal"] = True
    if mask == "causal-bottom-right":
        options["attn_mask"] = causal_lower_right(sq, skv)
    line = []
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            times = []
            with sdpa_kernel(backend):
                for n in range(WARM + RUNS):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    F.scaled_dot_product_attention(q, k, v, **options)
                    end.record()
                    end.synchronize()
                    if n >= WARM:
                        times.append(start.elapsed_time(end))
            line.append(f"{name} {statistics.median(times):.4f} ms")
        except Exception as e:
            line.append(f"{name} refuses ({str(e).splitlines()[0][:80]})")
    print(f"{mask} ({b},{hq},{hkv},{sq},{skv},{d}): {', '.join(line)}", flush=True)
