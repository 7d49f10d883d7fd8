"""The operator over DTensors: how batch entries and heads may be sharded.

A shard of the batch or of the heads is computed alone, on its rank, where this gives the results of the complete call. Otherwise DTensor gathers the operands first
and every rank computes the complete call.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo, StrategyType
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from .mods import DROPOUT
from .mods import program as read
from .op import PLAIN

# The axes of the scores that may be sharded: their names and their dims of queries, keys and values.
_AXES = (("batch", 0), ("head", 1))
# The first argument after the tensors and scalars of both operators. It and the later ones are part of the key of DTensor's cache.
_STATIC = {"attention": 5, "attention_backward": 8}


def _params(program: str, axis: str) -> tuple[list, list]:
    """Returns the placements of the parameters and of their gradients, if the scores are sharded along an axis."""
    axes = {name: along for name, along, _, _ in read(program).params()}
    placed, gradients = [], []
    for name in json.loads(program)["tensors"]:
        along = [] if name in DROPOUT else ["head"] if name == "sink" else axes[name] or []
        placed.append(Shard(along.index(axis)) if axis in along else Replicate())
        gradients.append(placed[-1] if axis in along else Partial())
    return placed, gradients


def _sharded(program: str) -> list[tuple[int, list, list]]:
    """Returns the dim of each axis that may be sharded, with the placements of the parameters and of their gradients."""
    return [(dim, *_params(program, axis)) for axis, dim in _AXES if read(program).shardable(axis)]


def _forward(schema: OpSchema) -> StrategyType:
    params, program, mode = schema.args_schema[3], schema.args_schema[5], schema.args_schema[7]
    most = '"max_scores":' in program
    choices = [[Replicate()] * (5 + _count(params))]
    for dim, placed, _ in _sharded(program):
        rows = Replicate() if mode == PLAIN else Shard(dim + most)
        choices.append([Shard(dim), rows, *[Shard(dim)] * 3, *placed])
    return _with_even_heads(schema, choices, 2, 0)


def _backward(schema: OpSchema) -> StrategyType:
    params, program, wrt = schema.args_schema[6], schema.args_schema[8], schema.args_schema[10] or ()
    choices = [[Replicate()] * (3 + len(wrt) + 6 + _count(params))]
    for dim, placed, gradients in _sharded(program):
        choices.append([*[Shard(dim)] * 3, *[gradients[n] for n in wrt], *[Shard(dim)] * 6, *placed])
    return _with_even_heads(schema, choices, 3 + len(wrt), 1)


def _count(params: Any) -> int:
    return 0 if params is None else len(params.children if hasattr(params, "children") else params)


def _with_even_heads(schema: OpSchema, choices: list, outputs: int, query: int) -> StrategyType:
    """Returns the choices for all dims of the mesh, without those that cut heads unevenly: ranks would have other heads of keys than their queries need."""
    expanded = expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, choices, input_index=outputs)
    fit = []
    for strategy in expanded.strategies:
        q, k = strategy.input_specs[query : query + 2]
        parts = 1
        for size, placement in zip(q.mesh.shape, q.placements):
            parts *= size if placement.is_shard(1) else 1
        if q.shape[1] % parts == 0 and k.shape[1] % parts == 0:
            fit.append(strategy)
    return OpStrategy(fit)


def as_dtensors(query: Any, *others: Any) -> list:
    """Returns the tensors as DTensors of the query's mesh. A plain tensor is the same on all ranks."""
    whole = [Replicate()] * query.device_mesh.ndim
    return [x if isinstance(x, DTensor) else DTensor.from_local(x, query.device_mesh, whole, run_check=False) for x in others]


def register() -> None:
    """Registers both operators with DTensor."""
    for name, strategy in (("attention", _forward), ("attention_backward", _backward)):
        info = RuntimeSchemaInfo(_STATIC[name], needs_pytree=True)
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(getattr(torch.ops.sdpa, name).default, strategy, info)


register()
