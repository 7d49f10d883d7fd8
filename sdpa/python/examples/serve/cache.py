"""A paged KV cache for all layers of a model."""

from __future__ import annotations

import torch

import sdpa

from .config import Config
from .step import Step


class PagedCache:
    def __init__(self, config: Config, pages: int, page_size: int, dtype: torch.dtype, device: torch.device):
        for name, n in (("pages", pages), ("page_size", page_size)):
            if n < 1:
                raise ValueError(f"{name}: got {n}, expected at least 1")
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages))[::-1]
        # One more page, to which the rows that fill up a step write. Zeros, as cuDNN multiplies the unused tokens of a page by 0.
        shape = (pages + 1, page_size, config.heads_kv, config.dim)
        self.pools = [[torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"] for _ in range(config.layers)]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, pages: int) -> list[int]:
        if pages > self.free_pages:
            raise RuntimeError(f"pages: got {pages}, expected at most {self.free_pages}, the free pages of {self.pages}; wait for a request to end")
        return [self._free.pop() for _ in range(pages)]

    def release(self, pages: list[int]) -> None:
        self._free += pages[::-1]

    def slot(self, pages: list[int], position: int) -> int:
        """Returns the index of a sequence's token among all tokens of the pool."""
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    @property
    def unused_slot(self) -> int:
        return self.pages * self.page_size

    def attend(self, layer: int, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes the keys and values of a step's tokens, and returns the attention of its queries."""
        for pool, new in zip(self.pools[layer], (k, v)):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, step.slots, new)
        return sdpa.paged_attention(q, *self.pools[layer], step.table, step.lengths, cu_seqlens_q=step.offsets, max_seqlen_q=step.longest)
