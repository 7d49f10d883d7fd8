"""torch_calls.py: times of calls that PyTorch's users make, on a GPU.

`scaled_dot_product_attention` through PyTorch's own kernels, through `sdpa.use()` and, if it is installed, through FlashAttention-4, the same call in turn; and a new document mask at 32,768 tokens, from the
mask to the output. Prints medians in ms.
"""

import functools
import importlib.util
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

import sdpa

ROUNDS = 15


def events(run, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def adapt_flash_attention():
    """PyTorch 2.11 unpacks two results of FlashAttention-4's forward function; 4.0.0b36 returns more."""
    from flash_attn.cute import interface

    run = interface._flash_attn_fwd
    # It keeps its cache of compiled kernels as an attribute of the function.
    interface._flash_attn_fwd = functools.wraps(run)(lambda *args, **options: run(*args, **options)[:2])


def through(name, run):
    """Runs with one of PyTorch's backends, with this package, or with FlashAttention-4 through PyTorch's registry."""
    if name == "sdpa":
        with sdpa.use():
            return run()
    if name == "FA4":
        activate_flash_attention_impl("FA4")
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return run()
        finally:
            restore_flash_attention_impl()
    with sdpa_kernel(getattr(SDPBackend, name)):
        return run()


def calls():
    for shape, causal in (((4, 32, 4096, 128), True), ((4, 32, 4096, 128), False), ((4, 32, 4096, 64), True), ((2, 16, 16384, 128), True)):
        q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        for x in (q, k, v):
            x.requires_grad_()

        def forward():
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def both():
            return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), d_o)

        for name, run in (("forward", forward), ("both passes", both)):
            names = ["sdpa", "CUDNN_ATTENTION", "FLASH_ATTENTION"] + (["FA4"] if importlib.util.find_spec("flash_attn") else [])
            times = {backend: [] for backend in names}
            for backend in names:
                through(backend, lambda: [run() for _ in range(3)])
            for turn in range(ROUNDS):
                for backend in names if turn % 2 == 0 else reversed(names):
                    times[backend].append(through(backend, lambda: events(run, 5)))
            print(shape, "causal" if causal else "no mask", name, {backend: round(statistics.median(t), 3) for backend, t in times.items()}, flush=True)


def masks():
    n, documents = 32768, 8
    q, k, v = (torch.randn(1, 16, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    host, device = [], []
    for round_ in range(12):
        bounds = torch.sort(torch.randperm(n - 1, device="cuda")[: documents - 1] + 1).values
        ids = torch.searchsorted(bounds, torch.arange(n, device="cuda"), right=True).int()
        attend = lambda mask: sdpa.flex_attention(q, k, v, None, mask)  # noqa: E731
        torch.cuda.synchronize()
        start = time.perf_counter()
        mask = sdpa.create_block_mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, n, n, device="cuda")
        made = time.perf_counter() - start
        attend(mask)
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        again = events(lambda: attend(mask), 5)
        if round_ > 1:
            host.append((made * 1e3, queued * 1e3))
            device.append((first * 1e3, again))
    median = lambda rows, n: round(statistics.median(row[n] for row in rows), 3)  # noqa: E731
    print(f"a new mask of {documents} documents, {n} tokens: made in {median(host, 0)} ms, first call queued after {median(host, 1)} ms,", end=" ")
    print(f"done after {median(device, 0)} ms; the same mask again {median(device, 1)} ms")


if __name__ == "__main__":
    if importlib.util.find_spec("flash_attn"):
        adapt_flash_attention()
    print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
    calls()
    masks()
