#!/usr/bin/env python3
"""Which roundings the error of dq consists of: python3 benches/dq_error.py [--sdpa PATH] [--seq 512] [--heads 8] [--seed 1].

Simulates the backward pass of the native CUDA kernels in f64 with each rounding switchable, and prints the mean absolute error of dq, each beside that of the
dense reference: PyTorch's eager `flex_attention` (2.11) in the same type, by the formulas of its `sdpa_dense_backward`.

--sdpa runs the kernels on the same numbers: `cargo sdpa`'s program, on a GPU, or on a CPU with `SDPA_NVRTC` and `CUDNN_GRAPH_DRIVER` naming the library of
`cargo build -p emulated`. Needs PyTorch (the CPU will do), and safetensors for --sdpa.
"""

import argparse
import math
import subprocess
import tempfile

import torch

LOG2_E = math.log2(math.e)
# Keys per block of the forward kernel, and how much larger in base 2 a maximum is before sums are rescaled.
BLOCK, GROWTH = 128, 8.0


class ScoreMod:
    """A function of PyTorch's tests, and the same for `cargo sdpa`."""

    def __init__(self, function, text):
        self.function, self.text = function, text


def relative(score, head, q, k, heads):
    return score + (q - k)


def alibi(score, head, q, k, heads):
    return score + (k - q) * 2.0 ** -((head + 1) * 8.0 / heads)


def composed(score, head, q, k, heads):
    return torch.where(q <= k, score + (q - k), -math.inf)


SCORE_MODS = {
    "none": ScoreMod(lambda score, head, q, k, heads: score, None),
    "relative": ScoreMod(relative, "score + f32(q - k)"),
    "composed": ScoreMod(composed, "select(q <= k, score + f32(q - k), -inf)"),
    "alibi": ScoreMod(alibi, "score + f32(k - q) * pow(0.5, f32(head + 1) * 8.0 / f32(heads_q))"),
}


class Problem:
    def __init__(self, name, dtype, heads, seq, seed):
        made = torch.Generator().manual_seed(seed)
        self.name, self.dtype, self.heads, self.seq, self.dim = name, dtype, heads, seq, 64
        self.given = [torch.randn(1, heads, seq, self.dim, generator=made).to(dtype) for _ in range(4)]
        self.q, self.k, self.v, self.d_o = (x.double() for x in self.given)
        self.places = [torch.arange(n).view(shape) for n, shape in ((heads, (1, -1, 1, 1)), (seq, (1, 1, -1, 1)), (seq, (1, 1, 1, -1)))]
        self.scale = self.dim**-0.5
        self.exact = self.simulated(())

    def rounded(self, x, to=None):
        return x.to(to or self.dtype).double()

    def modified(self, score):
        return SCORE_MODS[self.name].function(score, *self.places, self.heads)

    def scores(self, f32):
        if not f32:
            return self.modified(self.q @ self.k.transpose(-1, -2) * self.scale)
        return self.modified((self.q.float() @ self.k.float().transpose(-1, -2)) * self.scale).double()

    def output(self, x, p_rounded):
        """As the forward kernel has it: from the last block of keys on, P relative to a maximum that may be 2^8 too small."""
        most = torch.full((*x.shape[:3], 1), -math.inf, dtype=x.dtype)
        total, sums = torch.zeros_like(most), torch.zeros_like(self.v)
        for first in reversed(range(0, self.seq, BLOCK)):
            block = x[..., first : first + BLOCK]
            largest = block.amax(-1, keepdim=True)
            now = torch.where((largest - most) * LOG2_E > GROWTH, largest, most)
            less = torch.exp(most - now).nan_to_num(1.0)
            p = torch.exp(block - now).nan_to_num(0.0)
            total = total * less + p.sum(-1, keepdim=True)
            sums = sums * less + (self.rounded(p) if p_rounded else p) @ self.v[..., first : first + BLOCK, :]
            most = now
        return sums / total

    def simulated(self, on):
        """dq with these roundings and no others."""
        x = self.scores("f32 scores" in on)
        o = self.output(x, "P for o" in on)
        o = self.rounded(o) if "o" in on else o
        stats = x.logsumexp(-1, keepdim=True)
        stats = self.rounded(stats, torch.float32) if "f32 stats" in on else stats
        p = torch.exp(x - stats)
        # ex2.approx is off by at most 2^-22.
        p = p * (1 + 2.0**-22 * (2 * torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) - 1)) if "ex2.approx" in on else p
        delta = (o * self.d_o).sum(-1, keepdim=True)
        d_s = p * (self.d_o @ self.v.transpose(-1, -2) - delta)
        dq = (self.rounded(d_s) if "dS" in on else d_s) @ self.k * self.scale
        return self.rounded(dq) if "dq" in on else dq

    def dense(self):
        """Eager flex_attention: the gradient by its formula, delta from the rounded output."""
        x = self.scores(True)
        o = self.rounded(self.rounded(torch.softmax(x, -1)) @ self.v)
        d_s = torch.softmax(x, -1) * (self.d_o @ self.v.transpose(-1, -2) - (o * self.d_o).sum(-1, keepdim=True))
        return self.rounded(self.rounded(d_s * self.scale) @ self.k)

    def autograd(self):
        """Dense attention with scores in the type, differentiated by autograd: no output in the formula of its gradient."""
        q, k, v = (x.clone().requires_grad_() for x in self.given[:3])
        p = torch.softmax(self.modified((q @ k.transpose(-1, -2)).float() * self.scale), -1)
        (p.to(self.dtype) @ v).backward(self.given[3])
        return q.grad

    def kernels(self, program):
        from safetensors.torch import load_file, save_file

        with tempfile.TemporaryDirectory() as folder:
            save_file(dict(zip(("q", "k", "v", "do"), self.given)), f"{folder}/in.safetensors")
            text = SCORE_MODS[self.name].text
            command = [program, "run", "--executor", "cuda", "--backward", "--layout", "bhsd", "--input", f"{folder}/in.safetensors"]
            command += ["--output", f"{folder}/out.safetensors", *(["--score-mod", text] if text else [])]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return load_file(f"{folder}/out.safetensors")["dq"]

    def error(self, dq):
        return (dq.double() - self.exact).abs().mean().item()


ROUNDINGS = ("o", "P for o", "dS", "dq", "f32 scores", "f32 stats", "ex2.approx")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--sdpa")
    options.add_argument("--seq", type=int, default=512)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    print(f"B=1 H={asked.heads} S={asked.seq} D=64, seed {asked.seed}, PyTorch {torch.__version__}: mean |dq - dq in f64|, dense eager FlexAttention = 1")
    for dtype in (torch.bfloat16, torch.float16):
        problems = [Problem(name, dtype, asked.heads, asked.seq, asked.seed) for name in SCORE_MODS]
        units = [problem.error(problem.dense()) for problem in problems]

        def row(what, of):
            print(f"{what:28}", *(f"{problem.error(of(problem)) / unit:9.3f}" for problem, unit in zip(problems, units)), flush=True)

        print(f"\n{str(dtype)[6:]:28}", *(f"{name:>9}" for name in SCORE_MODS))
        if asked.sdpa:
            row("the kernels", lambda problem: problem.kernels(asked.sdpa))
        row("simulated, every rounding", lambda problem: problem.simulated(ROUNDINGS))
        for one in ROUNDINGS:
            row(f"all but {one}", lambda problem: problem.simulated([x for x in ROUNDINGS if x != one]))
        row("all but o and P for o", lambda problem: problem.simulated([x for x in ROUNDINGS if x not in ("o", "P for o")]))
        for one in ROUNDINGS:
            row(f"{one} alone", lambda problem: problem.simulated([one]))
        row("dense by autograd", lambda problem: problem.autograd())


if __name__ == "__main__":
    main()
