"""Blocks of PyTorch's block masks: which blocks are empty, partial or full, and whether they agree with a mask_mod."""

from __future__ import annotations

from typing import Any, Callable

import torch

EMPTY, PARTIAL, FULL = 0, 1, 2

# Blocks that are compared with a mask_mod, and of each how many queries and keys: many blocks in nine places each, a few in more.
_SAMPLES = ((2**17, 3), (64, 128))


def states(block_mask: Any) -> torch.Tensor:
    """Returns the state of each block of PyTorch's block mask: (batch, heads, query blocks, KV blocks), uint8."""
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    state = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns) * PARTIAL
    if block_mask.full_kv_num_blocks is not None:
        state = torch.where(_listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns), FULL, state)
    return state.to(torch.uint8)


def _listed(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Returns true for the blocks that a list names. Only the first `counts` indices of a row are valid; the others go to a column that is cut off."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    places = torch.where(valid, indices, columns).long().clamp(0, columns)
    listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return listed.scatter_(-1, places, True)[..., :columns]


def evaluated(mask_mod: Callable, *indices: torch.Tensor, together: bool = False) -> torch.Tensor:
    """Returns a mask_mod over all combinations of batch entries, heads, queries and keys. With `together`, all indices have a common first axis: one batch
    entry and head, and several queries and keys, for each of its elements."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    device = indices[0].device

    def one(*at: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(mask_mod(*at), dtype=torch.bool, device=device)

    over = torch.vmap(torch.vmap(one, (None, None, None, 0)), (None, None, 0, None))
    over = torch.vmap(over, (0, 0, 0, 0)) if together else torch.vmap(torch.vmap(over, (None, 0, None, None)), (0, None, None, None))
    with TransformGetItemToIndex(), torch.no_grad():
        return over(*indices)


def agree(state: torch.Tensor, mask_mod: Callable, lengths: tuple[int, int], size: tuple[int, int]) -> bool:
    """Returns true if empty blocks attend to no key and full blocks to every key, in samples: nine pairs of every block, up to 131,072 blocks, and up to 128
    queries and keys of a fixed random selection. A partial block agrees always, because the mask_mod is applied there."""
    decided = (state != PARTIAL).nonzero() if 0 not in lengths else state.new_empty((0, 4))
    return not len(decided) or all(_agree(state, mask_mod, lengths, size, decided, *sample) for sample in _SAMPLES)


def _agree(state: torch.Tensor, mask_mod: Callable, lengths: Any, size: Any, decided: torch.Tensor, most: int, pairs: int) -> bool:
    if len(decided) > most:
        chosen = torch.randperm(len(decided), generator=torch.Generator().manual_seed(len(decided)))[:most]
        decided = decided[chosen.to(decided.device)]
    batch, head, *blocks = decided.unbind(1)
    places = []
    for block, length, rows in zip(blocks, lengths, size):
        # Evenly spaced over the block, both ends included. Indices past the length repeat its last one.
        step = torch.linspace(0, min(rows, length) - 1, min(rows, length, pairs), device=state.device).long()
        places.append((block.unsqueeze(1) * rows + step).clamp(max=length - 1))
    attended = evaluated(mask_mod, batch, head, *places, together=True)
    expected = (state[tuple(decided.unbind(1))] == FULL)[:, None, None]
    return bool((attended == expected).all())


def with_blocks(state: torch.Tensor, mask_mod: Callable | None, size: tuple[int, int]) -> Callable:
    """Returns the mask that FlexAttention computes from blocks: all of a full block, the mask_mod in a partial one, nothing elsewhere."""
    table = state.to(torch.int32)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch, head = (0 if n == 1 else at for n, at in zip(table.shape, (b, h)))
        block = table[batch, head, q_idx // size[0], kv_idx // size[1]]
        return block == FULL if mask_mod is None else (block == FULL) | ((block == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return mask


def computed(mask_mod: Callable, shape: tuple[int, int, int, int], size: tuple[int, int], device: Any) -> torch.Tensor:
    """Returns the states of a mask_mod's blocks. It evaluates one row of blocks at a time: the time grows with queries times keys, the memory with keys."""
    batch, heads, queries, keys = shape
    columns = -(-keys // size[1])
    b, h, k = (torch.arange(n, device=device) for n in (batch, heads, keys))
    rows = []
    for first in range(0, queries, size[0]):
        q = torch.arange(first, min(first + size[0], queries), device=device)
        attended = evaluated(mask_mod, b, h, q, k).expand(batch, heads, len(q), keys)
        attended = torch.nn.functional.pad(attended, (0, columns * size[1] - keys))
        sums = attended.unflatten(-1, (columns, size[1])).sum((-3, -1))
        rows.append(torch.where(sums == 0, EMPTY, torch.where(sums == size[0] * size[1], FULL, PARTIAL)))
    return torch.stack(rows, 2).to(torch.uint8)
