"""DTensors whose tokens are sharded: one attention over the ranks of a dim of their mesh, on their local shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from . import op
from .errors import SpecError, one

_NAMES = ("query", "key", "value")
# The dim of the tokens in queries, keys, values, outputs and statistics.
_TOKENS = 2


def alone(query: Any, key: Any, value: Any) -> Any:
    """Returns a context for a call outside of one, if all operands are sharded along tokens on one mesh with one dim; otherwise None, and DTensor gathers the
    operands that are sharded along tokens."""
    from .parallel import ContextParallel

    mesh = getattr(query, "device_mesh", None)
    if not all([isinstance(x, DTensor) and x.device_mesh == mesh and _of_tokens(x) == [0] for x in (query, key, value)]):
        return None
    # Ranks outside of the mesh hold nothing, and tensors without memory are those of a compiler.
    if mesh.ndim != 1 or mesh.get_coordinate() is None or query.is_meta or isinstance(query._local_tensor, FakeTensor):
        return None
    return ContextParallel(mesh, "contiguous", "auto", None, None, None)


def _of_tokens(x: Any) -> list[int]:
    """Returns the dims of the mesh along which the tokens of a DTensor are sharded."""
    return [n for n, placement in enumerate(x.placements) if type(placement) is Shard and placement.dim == _TOKENS]


class Placed:
    """The mesh and the placements that the operands of a call share."""

    # DTensor divides tokens as `torch.chunk` does. They are in the order of the sequence.
    SHARDING = '"blocks"'

    def __init__(self, group: Any, query: Any, key: Any, value: Any):
        operands = (query, key, value)
        plain = [name for name, x in zip(_NAMES, operands) if not isinstance(x, DTensor)]
        if plain:
            rule = "DTensors for query, key and value, or local shards for all, x.to_local()"
            raise SpecError([(name, "a plain tensor beside DTensors", rule) for name in plain])
        self.mesh, self.placements = query.device_mesh, tuple(query.placements)
        errors: list[tuple] = []
        for name, x in zip(_NAMES[1:], operands[1:]):
            if x.device_mesh != self.mesh:
                errors.append((f"mesh of {name}", x.device_mesh, f"{self.mesh}, as the query"))
            elif tuple(x.placements) != self.placements:
                errors.append((f"placements of {name}", tuple(x.placements), f"{self.placements}, as the query"))
        if errors:
            raise SpecError(errors)
        dims = _of_tokens(query)
        rule = f"Shard({_TOKENS}), the tokens, on the dim of the mesh with the context's group, and Replicate on any other"
        others = [placement for n, placement in enumerate(self.placements) if n not in dims[:1] and not placement.is_replicate()]
        if not dims or others:
            outside = "" if dims else "; batch entries and heads are sharded outside of sdpa.context_parallel"
            raise one("placements of query, key, value", self.placements, rule + outside)
        self.dim = dims[0]
        ranks, expected = self._ranks(), dist.get_process_group_ranks(group.group)
        if ranks != expected:
            raise one(f"mesh dim {self.dim}", f"the ranks {ranks}", f"the ranks {expected} of the context's group, in this order")
        self.shapes = [tuple(x.shape) for x in operands]
        self.lengths = (query.shape[_TOKENS], key.shape[_TOKENS])
        self.like = torch.empty_strided(query.shape, query.stride(), dtype=query.dtype, device="meta")
        self.locals = [x.to_local() for x in operands]

    def _ranks(self) -> list[int]:
        """Returns the ranks along the dim of the tokens, in the order of their shards."""
        here = self.mesh.get_coordinate()
        if here is None:
            raise one("mesh", f"{self.mesh}, without this rank", "a mesh that this rank is in")
        return self.mesh.mesh[tuple([slice(None) if n == self.dim else at for n, at in enumerate(here)])].tolist()

    def params(self, params: list) -> list:
        """Returns captured tensors whole, as plain tensors. Their gradients are summed over the ranks, as DTensor does outside of a context."""
        partial = [Partial() if n == self.dim else Replicate() for n in range(self.mesh.ndim)]
        whole = [Replicate()] * self.mesh.ndim
        found = []
        for x in params:
            if not isinstance(x, DTensor):
                if not x.requires_grad:
                    found.append(x)
                    continue
                x = DTensor.from_local(x, self.mesh, whole, run_check=False)
            elif x.device_mesh != self.mesh:
                raise one("mesh of a captured tensor", x.device_mesh, f"{self.mesh}, as the query")
            found.append(x.redistribute(placements=whole).to_local(grad_placements=partial))
        return found

    def results(self, o: torch.Tensor, rows: torch.Tensor) -> tuple:
        """Returns DTensors of the output and of the statistics, which may have the maxima of the scores."""
        batch, heads, tokens, _ = self.shapes[0]
        whole = op._like(self.like, (batch, heads, tokens, self.shapes[2][3]))
        statistics = torch.empty((*rows.shape[: rows.dim() - 3], batch, heads, tokens), device="meta")
        return self._placed(o, whole, _TOKENS), self._placed(rows, statistics, rows.dim() - 1)

    def _placed(self, local: torch.Tensor, whole: torch.Tensor, tokens: int) -> Any:
        placements = [Shard(tokens) if n == self.dim else Replicate() for n in range(self.mesh.ndim)]
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

