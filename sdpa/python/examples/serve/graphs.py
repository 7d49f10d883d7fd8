"""CUDA graphs of steps whose tensors stay where they are."""

from __future__ import annotations

from typing import Any, Callable

import torch


class Graphs:
    def __init__(self, device: torch.device, enabled: bool = True):
        self.enabled = enabled and device.type == "cuda"
        self.replayed = 0
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def run(self, key: Any, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the result of `forward`. The first run with a key captures it into a graph, and later ones replay the graph. Without a key, or without CUDA,
        `forward` runs each time."""
        if key is None or not self.enabled:
            return forward()
        there = self._graphs.get(key)
        if there is not None:
            self.replayed += 1
            there[0].replay()
            return there[1]
        # The first run compiles kernels, which a capture must not do. Capturing runs nothing.
        result = forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            captured = forward()
        self._graphs[key] = graph, captured
        return result
