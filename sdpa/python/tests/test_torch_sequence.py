"""DTensors sharded along tokens, inside and outside of `context_parallel`: results and gradients are those of complete tensors without ranks."""

import contextlib
import itertools
import types

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no distributed package", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from textbook import attention  # noqa: E402

import sdpa  # noqa: E402

BATCH, HEADS = 2, 4
DOCUMENTS = torch.arange(96).reshape(2, 48).mul(7).remainder(3)


def causal(b, h, i, j):
    return i >= j


def documents(b, h, i, j):
    return DOCUMENTS[b, i] == DOCUMENTS[b, j]


CASES = {
    # score_mod of a captured tensor, its shape, and mask_mod
    "plain": (None, (1,), None),
    "causal with slopes": (lambda t: lambda s, b, h, i, j: s + t[h] * (j - i) * (h + 1), (HEADS,), causal),
    "documents with a bias": (lambda t: lambda s, b, h, i, j: s + t[b, j] * 0.3 * (h + 1), (BATCH, 48), documents),
}


def operands(seq, seq_kv, heads_kv=2):
    shapes = (BATCH, HEADS, seq, 16), (BATCH, heads_kv, seq_kv, 16), (BATCH, heads_kv, seq_kv, 8)
    ups = (BATCH, HEADS, seq, 8), (BATCH, HEADS, seq)
    draw = torch.Generator().manual_seed(seq)
    return [torch.randn(shape, generator=draw) for shape in shapes], [torch.randn(shape, generator=draw) for shape in ups]


def run(tensors, ups, case, captured, lse=True, maxima=False):
    """Returns the output, statistics, and the gradients of the operands and of the captured tensor."""
    mod, _, mask = CASES[case]
    inputs = [x.detach().requires_grad_() for x in tensors]
    captured = captured.detach().requires_grad_()
    mask = None if mask is None else sdpa.create_block_mask(mask, BATCH, HEADS, tensors[0].shape[2], tensors[1].shape[2])
    aux = types.SimpleNamespace(lse=True, max_scores=maxima)
    o, rows = sdpa.flex_attention(*inputs, None if mod is None else mod(captured), mask, enable_gqa=True, return_aux=aux)
    wanted = inputs + ([] if mod is None else [captured])
    outputs = (o, rows.lse) if lse else (o,)
    gradients = torch.autograd.grad(outputs, wanted, ups[: len(outputs)])
    return {"o": o, "lse": rows.lse, **({"max_scores": rows.max_scores} if maxima else {}), **dict(zip(("dq", "dk", "dv", "d_captured"), gradients))}


def right(tensors, ups, case, captured, lse=True):
    """Returns the same of textbook attention in f64."""
    mod, _, mask = CASES[case]
    whole = [x.double().requires_grad_() for x in tensors]
    captured = captured.double().requires_grad_()
    o, rows = attention(*whole, None if mod is None else mod(captured), mask)
    outputs = (o, rows) if lse else (o,)
    gradients = torch.autograd.grad(outputs, whole + ([] if mod is None else [captured]), [u.double() for u in ups[: len(outputs)]])
    return {"o": o, "lse": rows, **dict(zip(("dq", "dk", "dv", "d_captured"), gradients))}


def check(made, expected, what):
    from torch.distributed.tensor import DTensor

    for name, y in expected.items():
        x = made[name]
        x = x.full_tensor() if isinstance(x, DTensor) else x
        assert x.shape == y.shape, f"{what}: {name}"
        # A gradient is zero but for rounding if each row has one key.
        assert (x - y).abs().max() <= 2e-5 * y.abs().max() + 1e-6, f"{what}: {name}, rank {dist.get_rank()}"


def results(number, ranks):
    """Every strategy, lengths that do not divide evenly, and a rank without tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    shard = lambda x: distribute_tensor(x, mesh, [Shard(2)])  # noqa: E731
    contexts = [None, *[{"strategy": s} for s in ("auto", "all_gather", "head_exchange", "ring")], {"sharding": "striped", "seq": 99, "deadline": 60}]
    for (case, (_, shape, _)), lengths in itertools.product(CASES.items(), ((33, 40), (41, 41), (ranks + 1, ranks + 1))):
        tensors, ups = operands(*lengths)
        captured = torch.rand(shape, generator=torch.Generator().manual_seed(7))
        for at, options in enumerate(contexts):
            lse, maxima = at % 2 == 0, at % 3 == 0
            expected = right(tensors, ups, case, captured, lse)
            what = f"{case}, {lengths}, {options}"
            parts = [shard(x) for x in tensors]
            # A captured tensor may be a DTensor. Its gradient, and that of a plain tensor, has the contributions of all ranks.
            own = distribute_tensor(captured, mesh, [Shard(0) if at % 4 == 1 else Replicate()]) if at % 2 else captured
            if options is None:
                made = run(parts, [shard(u) for u in ups], case, own, lse, maxima)
            else:
                with sdpa.context_parallel(mesh, **options):
                    made = run(parts, [shard(u) for u in ups], case, own, lse, maxima)
            check(made, expected, what)
            if maxima:
                check(made, {"max_scores": run(tensors, ups, case, captured, lse, True)["max_scores"]}, what)
            for name in ("o", "lse", "dq", "dk", "dv", *["max_scores"] * maxima):
                x = made[name]
                assert x.placements == (Shard(2),) and x.device_mesh == mesh, f"{what}: {name}"
                whole = torch.empty(x.shape).chunk(ranks, 2)
                n = whole[number].shape[2] if number < len(whole) else 0
                assert x.to_local().shape[2] == n, f"{what}: {name}"
    # Tokens of each rank lie together, as after a projection; and no gradient is computed.
    tensors, ups = operands(41, 41)
    mixed = [distribute_tensor(x.transpose(1, 2).contiguous(), mesh, [Shard(1)]).transpose(1, 2) for x in tensors]
    expected = right(tensors, ups, "plain", torch.ones(1))["o"]
    with torch.no_grad():
        o = sdpa.flex_attention(*mixed, enable_gqa=True)
        assert o.transpose(1, 2).is_contiguous() and o.placements == (Shard(2),)
        check({"o": o}, {"o": expected}, "tokens first")
    # Operands that are not all sharded along tokens are gathered outside of a context, as before.
    o = sdpa.flex_attention(shard(tensors[0]), *[distribute_tensor(x, mesh, [Replicate()]) for x in tensors[1:]], enable_gqa=True)
    check({"o": o}, {"o": expected}, "gathered")
    # Plain tensors in the same context keep the sharding of the context.
    with sdpa.context_parallel(mesh, sharding="zigzag", seq=41) as cp:
        sdpa.flex_attention(*[shard(x) for x in tensors], enable_gqa=True)
        o = sdpa.flex_attention(*[cp.shard(x, 2) for x in tensors], enable_gqa=True)
        check({"o": o}, {"o": cp.shard(expected, 2)}, "zigzag")


def meshes(number, ranks):
    """Meshes with two dims, and every mistake, which is one on each rank before anything is exchanged."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "tokens"))
    line = init_device_mesh("cpu", (ranks,))
    tensors, ups = operands(33, 40)
    captured = torch.rand(HEADS, generator=torch.Generator().manual_seed(7))
    case = "causal with slopes"
    place = lambda x, placements, mesh=mesh: distribute_tensor(x, mesh, placements)  # noqa: E731
    both = [Replicate(), Shard(2)]
    expected = right(tensors, ups, case, captured)
    with sdpa.context_parallel(mesh["tokens"], strategy="ring"):
        for own in (captured, place(captured, [Shard(0), Replicate()])):
            made = run([place(x, both) for x in tensors], [place(u, both) for u in ups], case, own)
            assert made["o"].placements == tuple(both)
            check(made, expected, "two dims")
    # One dim of the mesh, as a mesh of its own.
    row = lambda x: distribute_tensor(x, mesh["tokens"], [Shard(2)])  # noqa: E731
    for context in (contextlib.nullcontext(), sdpa.context_parallel(mesh["tokens"].get_group(), strategy="all_gather")):
        with context:
            made = run([row(x) for x in tensors], [row(u) for u in ups], case, captured)
        assert made["o"].placements == made["dk"].placements == (Shard(2),)
        check(made, expected, "one dim of two")

    def mistake(context, operands, message, **more):
        with context, pytest.raises(sdpa.SpecError, match=message):
            sdpa.flex_attention(*operands, enable_gqa=True, **more)

    q, k, v = tensors
    of = lambda *placements, mesh=mesh: [place(x, placements, mesh) for x in tensors]  # noqa: E731
    group = sdpa.context_parallel(mesh["tokens"])
    mistake(group, [of(*both)[0], k, v], r"key: got a plain tensor beside DTensors, expected DTensors(.|\n)*value: got a plain tensor")
    mistake(group, [q, *of(*both)[1:]], r"query: got a plain tensor beside DTensors")
    mistake(group, [of(*both)[0], of(*both)[1], place(v, [Replicate(), Replicate()])], r"placements of value: got .*Replicate.*, expected .* as the query")
    mistake(group, [of(*both)[0], *of(Shard(2), mesh=line)[1:]], r"mesh of key: got DeviceMesh.*, expected DeviceMesh.* as the query")
    mistake(group, of(Shard(2), Shard(2)), r"placements of query, key, value: got .*, expected Shard\(2\), the tokens, on the dim of the mesh")
    mistake(group, of(Shard(0), Shard(2)), r"placements of query, key, value: .* and Replicate on any other$")
    mistake(group, of(Replicate(), Shard(1)), r"heads are sharded outside of sdpa.context_parallel")
    mistake(group, of(Replicate(), Replicate()), r"heads are sharded outside of sdpa.context_parallel")
    mistake(group, of(Shard(2), Replicate()), r"mesh dim 0: got the ranks \[.*\], expected the ranks \[.*\] of the context's group, in this order")
    mistake(sdpa.context_parallel(), of(*both), r"mesh dim 1: got the ranks \[.*\], expected the ranks \[0, 1, 2, 3\]")
    back = DeviceMesh("cpu", list(reversed(range(ranks))))
    mistake(sdpa.context_parallel(), of(Shard(2), mesh=back), r"mesh dim 0: got the ranks \[3, 2, 1, 0\], expected the ranks \[0, 1, 2, 3\]")
    elsewhere = place(captured, [Replicate()], line)
    mistake(group, of(*both), r"mesh of a captured tensor: got DeviceMesh.*, as the query", score_mod=lambda s, b, h, i, j: s + elsewhere[h])
    mistake(group, of(*both), r"block_mask.shape: got .*, expected q_len 33 and kv_len 40", block_mask=sdpa.create_block_mask(causal, None, None, 16, 16))
    # The group is usable after mistakes of every rank.
    with group:
        check(run([place(x, both) for x in tensors], [place(u, both) for u in ups], case, captured), expected, "after mistakes")
    # Outside of a context DTensor gathers what is sharded along tokens of a mesh with two dims.
    made = run(of(Shard(2), Shard(2)), [place(u, [Replicate()] * 2) for u in ups], case, captured)
    check(made, expected, "outside")


def process(number, ranks, folder, what):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=ranks)
    try:
        what(number, ranks)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dtensors_sharded_along_tokens_are_one_attention(tmp_path, ranks):
    torch.multiprocessing.spawn(process, (ranks, str(tmp_path), results), nprocs=ranks)


def test_one_dim_of_a_mesh_may_have_the_tokens_and_others_are_mistakes(tmp_path):
    torch.multiprocessing.spawn(process, (4, str(tmp_path), meshes), nprocs=4)
