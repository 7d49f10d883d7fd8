"""Sampling of the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    # Divides the logits. 0 selects the most probable token.
    temperature: float = 0.0
    # Samples among the fewest most probable tokens whose probabilities sum to this number.
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: got {self.temperature}, expected a finite number, at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected a number above 0 and at most 1")


def sample(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, draw: torch.Tensor, greedy: bool) -> torch.Tensor:
    """Returns a token for each row of logits, or -1 where logits are NaN. `draw` has a random number in [0, 1) for each row."""
    best = logits.argmax(-1)
    if not greedy:
        hot = temperature.masked_fill(temperature == 0, 1.0)[:, None]
        # Doubles: sums of a large vocabulary in f32 would change with the GPU's order of summation.
        probability, order = torch.softmax(logits.double() / hot, -1).sort(dim=-1, descending=True, stable=True)
        sums = probability.cumsum(-1)
        nucleus = sums - probability < top_p[:, None]
        kept = nucleus.sum(-1, keepdim=True).clamp(min=1)  # 0 for NaN
        limit = draw[:, None] * sums.gather(-1, kept - 1)
        chosen = torch.minimum((sums <= limit).sum(-1, keepdim=True), kept - 1)
        best = torch.where(temperature == 0, best, order.gather(-1, chosen)[:, 0])
    return best.masked_fill(logits.isnan().any(-1), -1)
