"""Score_mods and masks next to compiled FlexAttention and PyTorch's SDPA, in one run and in turns: device time by CUDA events,
median of 20 after 5 warm-ups, bf16, (batch, head, seq, dim). `flex.py DEVICE [ROW...]`, where DEVICE is the binary `device`."""
import json
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from side_by_side import Ours, median

SHAPES = [(1, 32, 8, 2048, 2048, 128), (4, 32, 32, 4096, 4096, 128)]
CAP, WINDOW, PREFIX, DOCUMENTS = 30.0, 512, 512, 8
NEAR, GLOBAL_WINDOW, GLOBALS, FIRST = 257, 256, 64, 4


def softcap(score, b, h, q, k):
    return CAP * torch.tanh(score / CAP)


def alibi(heads):
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def prefix(b, h, q, k):
    return (q >= k) | (k < PREFIX)


def natten(seq):
    def keep(b, h, q, k):
        first = torch.clamp(q - NEAR // 2, 0, seq - NEAR)
        return (k >= first) & (k < first + NEAR)

    return keep


def global_local(b, h, q, k):
    return ((q - k).abs() < GLOBAL_WINDOW) | (k < GLOBALS) | (q < GLOBALS)


def first_tokens(b, h, q, k):
    return (q >= k) & ((k < FIRST) | (q - k < WINDOW))


def document(seq):
    ids = torch.arange(seq, device="cuda") * DOCUMENTS // seq
    return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])


# name, our score_mods, our masks, Flex's score_mod, Flex's mask, what SDPA needs to do the same
ROWS = [
    ("plain", [], [], lambda s: None, lambda s: None, {}),
    ("causal", [], ["causal"], lambda s: None, lambda s: causal, {"is_causal": True}),
    ("softcap 30", ["softcap:30"], [], lambda s: softcap, lambda s: None, None),
    ("softcap 30, causal", ["softcap:30"], ["causal"], lambda s: softcap, lambda s: causal, None),
    ("ALiBi, causal", ["alibi"], ["causal"], lambda s: alibi(s[1]), lambda s: causal, None),
    ("sliding window 512, causal", [], ["sliding-window:512"], lambda s: None, lambda s: window, None),
    ("document, causal", [], ["document", "causal"], lambda s: None, lambda s: document(s[3]), None),
    ("documents in runs, causal", [], ["document-runs", "causal"], lambda s: None, lambda s: document(s[3]), None),
    ("prefix LM 512", [], ["prefix-lm:512"], lambda s: None, lambda s: prefix, None),
    ("prefix LM 512, softcap 30", ["softcap:30"], ["prefix-lm:512"], lambda s: softcap, lambda s: prefix, None),
    ("neighbourhood of 257", [], ["natten:257"], lambda s: None, lambda s: natten(s[3]), None),
    ("64 global, 256 each way", [], ["global-local:256,64"], lambda s: None, lambda s: global_local, None),
    ("first 4, window 512, causal", [], ["k <= q & (k < 4 | q - k < 512)"], lambda s: None, lambda s: first_tokens, None),
]


def torch_times(shape, score_mod, mask_mod, sdpa):
    """Flex and SDPA's flash and cuDNN backends, forward and backward."""
    b, hq, hkv, sq, skv, d = shape
    torch.manual_seed(1)
    q = torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(b, hkv, skv, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    grad = torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16)
    found = {}

    def both(name, forward):
        try:
            with torch.no_grad():
                first = median(forward)
            out = forward()
            second = median(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
            found[name] = (first, second)
        except Exception as e:
            found[name] = str(e).strip().splitlines()[0][:80] if str(e).strip() else type(e).__name__

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(mask_mod, None, None, sq, skv, device="cuda") if mask_mod else None
    both("flex", lambda: compiled(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=hq != hkv))
    if sdpa is not None:
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            with sdpa_kernel(backend):
                both(name, lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=hq != hkv, **sdpa))
    return found


def main():
    wanted = sys.argv[2:]
    ours = Ours(sys.argv[1])
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, its cuDNN {torch.backends.cudnn.version()}")
    for shape in SHAPES:
        for name, mods, masks, score_mod, mask_mod, sdpa in ROWS:
            if wanted and name not in wanted:
                continue
            before = [ours.ask(shape, mods, masks, backward) for backward in (False, True)]
            theirs = torch_times(shape, score_mod(shape), mask_mod(shape), sdpa)
            after = [ours.ask(shape, mods, masks, backward) for backward in (False, True)]
            row = dict(row=name, shape=shape, theirs=theirs, engines=[a.get("engine") for a in after], refused=[a.get("refused") for a in after])
            row["ours"] = [min(x["ms"], y["ms"]) if "ms" in x and "ms" in y else None for x, y in zip(before, after)]
            row["ours_before_and_after"] = [(x.get("ms"), y.get("ms")) for x, y in zip(before, after)]
            print(json.dumps(row), flush=True)
            torch.cuda.empty_cache()


main()
