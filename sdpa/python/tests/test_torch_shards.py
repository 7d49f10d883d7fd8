"""DTensors on four ranks, two for the batch and two for heads: every result is that of one rank with complete tensors."""

import json
import types

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no distributed package", allow_module_level=True)

import sdpa  # noqa: E402
from sdpa import _native  # noqa: E402

SLOPES, BIAS, TABLE = (torch.nn.Parameter(torch.rand(shape)) for shape in ((8,), (4, 1, 33, 40), (128,)))
DOCUMENTS = torch.arange(160).reshape(4, 40).mul(7).remainder(3)
CASES = {
    # score_mod, its parameter, mask_mod, and the axes whose shards are computed alone
    "plain": (None, None, None, (0, 1)),
    "parameter along heads": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), SLOPES, None, (0, 1)),
    "parameter along the batch": (lambda s, b, h, i, j: s + BIAS[b, 0, i, j], BIAS, None, (0, 1)),
    "table": (lambda s, b, h, i, j: s + TABLE[i - j + 64], TABLE, None, (0, 1)),
    "index of the head": (lambda s, b, h, i, j: s - (h + 1) * 0.1 * (i - j).abs(), None, None, (0,)),
    "index of the batch entry": (lambda s, b, h, i, j: s * (b + 1), None, None, (1,)),
    "mask along the batch": (None, None, lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j], (0, 1)),
    "index of the head in a mask": (None, None, lambda b, h, i, j: (i + h) % 3 != j % 3, (0,)),
}


def run(operands, name, into=lambda x: x, heads=8):
    """Returns outputs, row statistics and gradients; `into` makes DTensors of the operands."""
    mod, param, mask, _ = CASES[name]
    q, k, v = (into(x).requires_grad_() for x in operands)
    mask = None if mask is None else sdpa.create_block_mask(mask, 4, heads, 33, 40)
    aux = types.SimpleNamespace(lse=True, max_scores=True)
    o, rows = sdpa.flex_attention(q, k, v, mod, mask, enable_gqa=True, return_aux=aux)
    up = torch.linspace(-1, 1, o.numel()).view(o.shape), torch.linspace(-1, 1, rows.lse.numel()).view(rows.lse.shape)
    up = [torch.distributed.tensor.distribute_tensor(u, x.device_mesh, x.placements) if hasattr(x, "placements") else u for u, x in zip(up, (o, rows.lse))]
    wanted = [q, k, v] + ([] if param is None else [param])
    return o, rows.lse, rows.max_scores, *torch.autograd.grad((o, rows.lse), wanted, up)


def operands(heads=8):
    torch.manual_seed(0)
    return torch.randn(4, heads, 33, 16), torch.randn(4, heads // 2, 40, 16), torch.randn(4, heads // 2, 40, 24)


def rank(number, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    torch.manual_seed(1)  # the parameters of all ranks are equal
    for param in (SLOPES, BIAS, TABLE):
        param.data = torch.rand(param.shape)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    try:
        for name, (_, _, _, alone) in CASES.items():
            right = run(operands(), name)
            for placed in ((0, 1), (0, None), (None, 1), (1, 1), (0, 2), (3, 0)):
                into = lambda x, placed=placed: distribute_tensor(x, mesh, [Replicate() if n is None else Shard(n) for n in placed])  # noqa: E731
                made = run(operands(), name, into)
                if placed == (0, 1):
                    assert made[0].placements == tuple(Shard(n) if n in alone else Replicate() for n in (0, 1)) or len(alone) == 1, name
                for n, (x, y) in enumerate(zip(made, right)):
                    x = x.full_tensor() if isinstance(x, DTensor) else x
                    assert (x - y).abs().max() <= 1e-6 * y.abs().max(), f"{name}, {placed}, result {n}"
        # Three KV heads cannot be cut into two parts that have the query heads of their own keys.
        into = lambda x: distribute_tensor(x, mesh, [Replicate(), Shard(1)])  # noqa: E731
        made, right = run(operands(6), "plain", into, 6), run(operands(6), "plain", heads=6)
        assert not any(p.is_shard(1) for p in made[0].placements)
        assert all(torch.allclose(x.full_tensor(), y, atol=1e-6) for x, y in zip(made, right))
    finally:
        torch.distributed.destroy_process_group()


def test_every_placement_has_the_results_of_complete_tensors(tmp_path):
    torch.multiprocessing.spawn(rank, (str(tmp_path),), nprocs=4)


@pytest.mark.parametrize("text, batch, head", [
    ("score * 2.0", True, True),
    ("tensor slopes[head]: f32; score + slopes", True, True),
    ("score + f32(head)", True, False),
    ("score + f32(batch)", False, True),
    ("score / f32(heads_q)", True, False),
])  # fmt: skip
def test_a_shard_is_computed_alone_where_no_function_reads_its_index(text, batch, head):
    program = _native.Program(json.dumps({"score_mods": [text]}))
    assert (program.shardable("batch"), program.shardable("head")) == (batch, head)
    dropped = _native.Program(json.dumps({"score_mods": [text], "dropout": 0.5, "tensors": ["dropout_seed", "dropout_offset"]}))
    assert not dropped.shardable("batch") and not dropped.shardable("head")
    with pytest.raises(sdpa.SpecError, match="axis: got q, expected batch or head"):
        program.shardable("q")
