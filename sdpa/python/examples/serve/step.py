"""The tensors that describe a step: its tokens, its sequences, and how to sample."""

from __future__ import annotations

import numpy as np
import torch


class Step:
    """Tensors of fixed extents at fixed addresses, so that a CUDA graph can read them. They are overwritten for each step: with `tokens` rows for tokens,
    `sequences` rows for sequences, and at most `longest` tokens of one sequence."""

    def __init__(self, tokens: int, sequences: int, columns: int, longest: int, device: torch.device):
        self.tokens, self.sequences, self.columns, self.longest = tokens, sequences, columns, longest
        # Each entry has the rows of a view. 64-bit numbers index tensors in PyTorch.
        wide = {"ids": tokens, "positions": tokens, "slots": tokens, "last": sequences}
        narrow = {"table": sequences * columns, "lengths": sequences, "offsets": sequences + 1}
        real = {"temperature": sequences, "top_p": sequences, "draw": sequences}
        self._copies = []
        self.host: dict[str, np.ndarray] = {}
        for dtype, views in ((torch.int64, wide), (torch.int32, narrow), (torch.float32, real)):
            # Views for attention start at multiples of 16 bytes.
            starts = np.cumsum([0, *[-(-n // 4) * 4 for n in views.values()]])
            host = torch.zeros(int(starts[-1]), dtype=dtype, pin_memory=device.type == "cuda")
            there = host.to(device) if device.type == "cuda" else host
            self._copies.append((there, host))
            for (name, n), start in zip(views.items(), starts):
                self.host[name] = host.numpy()[start : start + n]
                setattr(self, name, there[start : start + n])
        self.host["table"] = self.host["table"].reshape(sequences, columns)
        self.table = self.table.view(sequences, columns)

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    draw: torch.Tensor

    def fill(self, rows: list, unused_slot: int) -> None:
        """Overwrites the step. Each row is a sequence: its tokens, the position of the first one, their slots, its pages, and its temperature, top_p and
        random number. Other rows belong to no sequence."""
        host, end = self.host, 0
        host["offsets"][0] = 0
        for n, (tokens, start, slots, pages, sampling) in enumerate(rows):
            begin, end = end, end + len(tokens)
            host["ids"][begin:end], host["slots"][begin:end] = tokens, slots
            host["positions"][begin:end] = range(start, start + len(tokens))
            host["last"][n], host["lengths"][n], host["offsets"][n + 1] = end - 1, start + len(tokens), end
            host["table"][n, : len(pages)] = pages
            host["temperature"][n], host["top_p"][n], host["draw"][n] = sampling
        n = len(rows)
        host["ids"][end:], host["positions"][end:], host["slots"][end:] = 0, 0, unused_slot
        host["last"][n:], host["lengths"][n:], host["offsets"][n + 1 :] = 0, 0, end
        host["table"][n:], host["temperature"][n:], host["top_p"][n:], host["draw"][n:] = 0, 0, 1, 0
        for there, memory in self._copies:
            if there is not memory:
                there.copy_(memory, non_blocking=True)
