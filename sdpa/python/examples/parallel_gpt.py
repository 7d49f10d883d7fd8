"""Trains a small GPT whose sequences are divided over the ranks of torchrun, on CPUs with gloo or on GPUs with NCCL.

    torchrun --nproc-per-node 2 parallel_gpt.py --steps 10

Every number of ranks has the same losses, but for rounding.
"""

from __future__ import annotations

import argparse
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import sdpa

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 64, 4, 2, 2
DIM = WIDTH // HEADS


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Applies rotary embeddings. A shard's tokens have the positions that they have in the whole sequence."""
    angles = positions[:, None] * 10000.0 ** -(torch.arange(0, DIM, 2, device=x.device) / DIM)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.project, self.out = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Callable) -> torch.Tensor:
        heads = self.project(self.norms[0](x)).unflatten(-1, (HEADS + 2 * KV_HEADS, DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        o = attend(rotated(q, positions), rotated(k, positions), v)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.head(self.norm(x))


def batches(steps: int, seq: int) -> list[torch.Tensor]:
    """Returns sequences that count on from a random token, with a token more for the targets."""
    first = torch.randint(VOCABULARY, (steps, 2, 1), generator=torch.Generator().manual_seed(1))
    return list((first + torch.arange(seq + 1) * 3) % VOCABULARY)


def train(cp: sdpa.parallel.ContextParallel, steps: int, seq: int, device: torch.device) -> list[float]:
    """Returns the loss of each step."""
    torch.manual_seed(0)  # all ranks begin with equal weights
    model = Gpt().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    causal = sdpa.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, seq, seq)
    positions = cp.positions(seq, device)
    attend = lambda q, k, v: sdpa.flex_attention(q, k, v, block_mask=causal, enable_gqa=True)  # noqa: E731
    losses = []
    for batch in batches(steps, seq):
        tokens, targets = (cp.shard(x.to(device), 1) for x in (batch[:, :-1], batch[:, 1:]))
        with cp:
            logits = model(tokens, positions, attend)
            # The mean over all tokens: this rank adds the loss of its own.
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (batch.shape[0] * seq)
            optimiser.zero_grad()
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimiser.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--seq", type=int, default=101, help="need not be a multiple of the number of ranks")
    arguments.add_argument("--sharding", default="zigzag")
    arguments.add_argument("--strategy", default="auto")
    given = arguments.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank(0)) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    cp = sdpa.context_parallel(sharding=given.sharding, strategy=given.strategy)
    for step, loss in enumerate(train(cp, given.steps, given.seq, device)):
        if cp.rank == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
