"""Deterministic backward passes in one run: the native CUDA kernels beside cuDNN, FlashAttention-4 and FoldAttention. Device time, error of dQ, and bits.

    deterministic.py [--row N] [--launches N] [--lock FILE]

All peers of a row are timed in turns; medians, in milliseconds. `(free)` is a peer without its deterministic mode. Errors are root mean squares of the
difference from f64 attention, relative to dQ's, over a shorter sequence. Kernels compile for minutes, so rows may be prepared by processes side by side, with a
number each and a lock file that is held while one of them measures. `--launches` compares the bits of so many launches of each deterministic peer.
FlashAttention-4 is the package `flash-attn-4`, FoldAttention the package `fold-attention`; a peer that is not there, or refuses a row, is reported.
"""

import argparse
import fcntl
import importlib.metadata
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "sdpa/python/python"), str(ROOT / "sdpa/python/tests")]

import torch  # noqa: E402
from rates import in_turns, on_device, passes, short  # noqa: E402
from textbook import attention  # noqa: E402

import sdpa  # noqa: E402

CAP = 30.0
ERROR_SEQ = 1536
# Name, (batch, heads_q, heads_kv, seq, dim), causal, softcap, packed
ROWS = [
    *[(f"dim {dim}, {'causal' if causal else 'plain'}", shape, causal, False, False) for dim, shapes in ((64, ((2, 16, 16, 8192, 64), (1, 32, 8, 16384, 64))), (96, ((2, 16, 16, 8192, 96),)), (128, ((2, 16, 16, 8192, 128), (1, 32, 8, 16384, 128), (4, 32, 8, 2048, 128)))) for shape in shapes for causal in (False, True)],
    ("dim 128, softcap", (2, 16, 16, 8192, 128), True, True, False),
    ("dim 256, causal", (1, 16, 16, 8192, 256), True, False, False),
    ("dim 128, packed", (8, 32, 8, 2048, 128), True, False, True),
    ("dim 128, packed", (32, 32, 8, 512, 128), True, False, True),
]  # fmt: skip


def first(found):
    return found[0] if isinstance(found, tuple) else found


def causal_mask(b, h, i, j):
    return i >= j


def capped(s, b, h, i, j):
    return CAP * torch.tanh(s / CAP)


class Row:
    """A problem with its operands, (batch, heads, seq, dim) or packed (tokens, heads, dim)."""

    def __init__(self, shape, causal, softcap, packed, dtype=torch.bfloat16):
        batch, heads_q, heads_kv, seq, dim = self.shape = shape
        self.causal, self.softcap, self.packed = causal, softcap, packed
        draw = torch.Generator("cuda").manual_seed(seq + dim)
        of = lambda heads: (batch * seq, heads, dim) if packed else (batch, heads, seq, dim)  # noqa: E731
        make = lambda heads: torch.randn(of(heads), device="cuda", dtype=dtype, generator=draw).requires_grad_()  # noqa: E731
        self.q, self.k, self.v = make(heads_q), make(heads_kv), make(heads_kv)
        self.d_o = make(heads_q).detach()
        self.cu_seqlens = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * seq

    def tokens_first(self):
        """The operands as FlashAttention takes them: (batch, seq, heads, dim)."""
        if self.packed:
            return self.q, self.k, self.v, self.d_o
        *inputs, d_o = (x.detach().transpose(1, 2).contiguous() for x in (self.q, self.k, self.v, self.d_o))
        return *(x.requires_grad_() for x in inputs), d_o

    def ours(self, executor):
        batch, seq = self.shape[0], self.shape[3]
        mod = sdpa.ScoreMod(capped) if self.softcap else None
        mask = sdpa.create_block_mask(causal_mask, None, None, seq, seq, device="cuda") if self.causal else None
        if not self.packed:
            return passes(lambda: sdpa.flex_attention(self.q, self.k, self.v, mod, mask, enable_gqa=True, executor=executor), (self.q, self.k, self.v), self.d_o)[1]
        offsets = self.cu_seqlens.long()
        jagged = lambda x: torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=seq, max_seqlen=seq).transpose(1, 2)  # noqa: E731
        mask = sdpa.create_nested_block_mask(causal_mask, None, None, jagged(self.q)) if self.causal else None

        def forward():
            return sdpa.flex_attention(*(jagged(x) for x in (self.q, self.k, self.v)), mod, mask, enable_gqa=True, executor=executor).transpose(1, 2).values()

        return passes(forward, (self.q, self.k, self.v), self.d_o)[1]

    def flash(self, deterministic):
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        q, k, v, d_o = self.tokens_first()
        options = dict(causal=self.causal, softcap=CAP if self.softcap else 0.0, deterministic=deterministic)
        if self.packed:
            seq = self.shape[3]
            lengths = dict(cu_seqlens_q=self.cu_seqlens, cu_seqlens_k=self.cu_seqlens, max_seqlen_q=seq, max_seqlen_k=seq)
            return passes(lambda: first(flash_attn_varlen_func(q, k, v, **lengths, **options)), (q, k, v), d_o)[1]
        return passes(lambda: first(flash_attn_func(q, k, v, **options)), (q, k, v), d_o)[1]

    def fold(self):
        from fold_attention import fold_attn_func, fold_attn_varlen_func

        if self.softcap:
            raise NotImplementedError("softcap")
        q, k, v, d_o = self.tokens_first()
        if self.packed:
            return passes(lambda: fold_attn_varlen_func(q, k, v, self.cu_seqlens, max_seqlen_q=self.shape[3], causal=self.causal), (q, k, v), d_o)[1]
        return passes(lambda: fold_attn_func(q, k, v, causal=self.causal), (q, k, v), d_o)[1]


def peers(row):
    """Returns the backward pass of each peer, and the reasons of those that refuse the row."""

    def mode(deterministic, call):
        def run():
            torch.use_deterministic_algorithms(deterministic)
            try:
                return call()
            finally:
                torch.use_deterministic_algorithms(False)

        return run

    makers = {
        "native kernels": mode(True, lambda: row.ours("cuda")),
        "native kernels (free)": mode(False, lambda: row.ours("cuda")),
        "cuDNN": mode(True, lambda: row.ours("cudnn")),
        "cuDNN (free)": mode(False, lambda: row.ours("cudnn")),
        "FlashAttention-4": lambda: row.flash(True),
        "FlashAttention-4 (free)": lambda: row.flash(False),
        "FoldAttention": row.fold,
    }
    found, refused = {}, {}
    for name, make in makers.items():
        try:
            backward = make()
            if "native" in name or "cuDNN" in name:
                # The mode of the backward pass is that of its own call.
                backward = mode("free" not in name, backward)
            backward()
            torch.cuda.synchronize()
            found[name] = backward
        except Exception as error:  # noqa: BLE001
            refused[name] = short(error)
    return found, refused


def errors(name, shape, causal, softcap):
    """The error of dQ of each peer over a shorter sequence."""
    _, heads_q, heads_kv, _, dim = shape
    row = Row((1, heads_q // 4, max(1, heads_kv // 4), ERROR_SEQ, dim), causal, softcap, False)
    whole = [x.detach().double().requires_grad_() for x in (row.q, row.k, row.v)]
    o, _ = attention(*whole, capped if softcap else None, causal_mask if causal else None)
    right = torch.autograd.grad(o, whole, row.d_o.double())[0]
    found, _ = peers(row)
    result = {}
    for peer, backward in found.items():
        dq = backward()[0].double()
        dq = dq if dq.shape == right.shape else dq.transpose(1, 2)
        result[peer] = ((dq - right).square().mean() / right.square().mean()).sqrt().item()
    return result


def bits(backward, launches):
    """Returns how many launches have other bits than the first one."""
    expected = [x.clone() for x in backward()]
    other = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(launches - 1):
        other += torch.stack([(x.view(torch.int16) != y.view(torch.int16)).any() for x, y in zip(backward(), expected)]).any()
    return int(other)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--row", type=int, help=f"one of the {len(ROWS)} rows, from 0")
    options.add_argument("--lock", help="the file that is locked while a row is measured")
    options.add_argument("--launches", type=int, default=0, help="compare the bits of so many launches")
    asked = options.parse_args()
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("flash-attn-4", "fold-attention", "nvidia-cutlass-dsl") if found(name)]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {', '.join(packages)}; bf16", flush=True)
    for name, shape, causal, softcap, packed in ROWS if asked.row is None else ROWS[asked.row : asked.row + 1]:
        calls, refused = peers(Row(shape, causal, softcap, packed))
        if asked.lock:
            lock = open(asked.lock, "w")  # noqa: SIM115: the end of the process unlocks it
            fcntl.flock(lock, fcntl.LOCK_EX)
        times = in_turns({peer: on_device(call) for peer, call in calls.items()})
        wrong = {} if packed else errors(name, shape, causal, softcap)
        print(f"\n{name}, {shape}", flush=True)
        for peer, ms in times.items():
            error = f", error {wrong[peer]:.2e}" if peer in wrong else ""
            other = f", {bits(calls[peer], asked.launches)} of {asked.launches} launches with other bits" if asked.launches and "free" not in peer else ""
            print(f"  {peer}: {ms:.4f} ms{error}{other}", flush=True)
        for peer, reason in refused.items():
            print(f"  {peer}: {reason}", flush=True)


def found(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
