"""Context parallelism over gloo: results of every rank are the shards of textbook attention over the whole sequence."""

import importlib.util
import itertools
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no distributed package", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from textbook import attention, close  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sdpa  # noqa: E402

BATCH, HEADS, SEQ = 2, 4, 27  # no number of ranks above 1 but 3 divides the sequence
SHARDINGS = ("contiguous", "zigzag", "striped")
_RANDOM = torch.Generator().manual_seed(5)
SLOPES, TABLE = torch.rand(HEADS, generator=_RANDOM), torch.randn(9, generator=_RANDOM)
BIAS = torch.randn(HEADS, SEQ, SEQ, generator=_RANDOM)
DOCUMENTS = torch.tensor([[0] * 11 + [1] * 4 + [2] * 12, [3] * 20 + [4] * 7])
LENGTHS = torch.tensor([SEQ, 19], dtype=torch.int32)
SCALE = sdpa.scalar("parallel_scale", 0.7)


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i - j <= 5) & (j - i <= 2)


def rows_without_keys(b, h, i, j):
    return (i % 5 != 0) & ((i + 2 * j + h) % 3 != 0)


CASES = {
    # score_mod, mask_mod, KV heads
    "plain": (None, None, 2),
    "causal with slopes by head": (lambda s, b, h, i, j: s + (h + 1) * 0.1 * (j - i), causal, 1),
    "window with softcap": (lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0), window, 2),
    "documents with captured slopes": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), lambda b, h, i, j: (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j), 4),
    "lengths with a bias": (lambda s, b, h, i, j: s + BIAS[h, i, j], lambda b, h, i, j: j < LENGTHS[b], 2),
    "rows without keys": (None, rows_without_keys, 4),
    "table of distances": (lambda s, b, h, i, j: s * 0.5 + TABLE[(i - j).clamp(-4, 4) + 4], causal, 2),
}  # fmt: skip


def strategies(ranks, mask):
    # There are as many query heads as the most ranks, and fewer KV heads.
    found = ["auto", "all_gather", "all_gather:2", "head_exchange", "ring"] + ["halo"] * (mask is window) + ["grid:2"] * (ranks % 2 == 0)
    return found


def operands(heads_kv, seq=SEQ, seq_kv=SEQ, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (BATCH, HEADS, seq, 16), (BATCH, heads_kv, seq_kv, 16), (BATCH, heads_kv, seq_kv, 8), (BATCH, HEADS, seq, 8), (BATCH, HEADS, seq)
    q, k, v, d_o, d_lse = (torch.randn(shape).to(dtype) for shape in shapes)
    return (q, k, v), (d_o, d_lse.float())


def textbook(tensors, up, score_mod, mask_mod, sink=None, scale=None):
    """Returns the output, its log-sum-exp, and the gradients through both of them and through the output alone."""
    whole = [x.double().requires_grad_() for x in tensors]
    o, lse = attention(*whole, score_mod, mask_mod, scale, sink)
    finite = torch.where(torch.isinf(lse), 0.0, lse)
    both = None if up[1] is None else torch.autograd.grad((o, finite), whole, (up[0].double(), up[1].double()), retain_graph=True)
    return o, lse, both, torch.autograd.grad(o, whole, up[0].double())


def ours(cp, tensors, up, score_mod, mask, lse=True, **more):
    """Returns the shards of the output, of its log-sum-exp, and of the gradients."""
    shards = [cp.shard(x, 2).requires_grad_() for x in tensors]
    o, rows = sdpa.flex_attention(*shards, score_mod, mask, enable_gqa=True, return_lse=True, **more)
    outputs, ups = ((o, rows), (cp.shard(up[0], 2), cp.shard(up[1], 2))) if lse else ((o,), (cp.shard(up[0], 2),))
    return o, rows, torch.autograd.grad(outputs, shards, ups)


def compare(cp, made, right, lse, what, tolerance=2e-5):
    o, rows, gradients = made
    close(o, cp.shard(right[0], 2), f"{what}: o", tolerance)
    close(rows, cp.shard(right[1], 2), f"{what}: lse", tolerance)
    for name, x, y in zip(("dq", "dk", "dv"), gradients, right[2] if lse else right[3]):
        close(x, cp.shard(y, 2), f"{what}: {name}", tolerance)


def results(ranks, group):
    """Every strategy with every case."""
    for number, (name, (score_mod, mask_mod, heads_kv)) in enumerate(CASES.items()):
        tensors, up = operands(heads_kv)
        right = textbook(tensors, up, score_mod, mask_mod)
        mask = None if mask_mod is None else sdpa.create_block_mask(mask_mod, BATCH, HEADS, SEQ, SEQ)
        for at, strategy in enumerate(strategies(ranks, mask_mod)):
            if strategy == "all_gather:2" and heads_kv == 1:
                continue
            # All of them on two ranks, and a part on more.
            for sharding in SHARDINGS if ranks < 3 else (SHARDINGS[(number + at + ranks) % 3],):
                lse = at % 2 == 0  # with and without a gradient of the log-sum-exp
                with sdpa.context_parallel(group, sharding=sharding, strategy=strategy, seq=SEQ, deadline=60) as cp:
                    made = ours(cp, tensors, up, score_mod, mask, lse)
                compare(cp, made, right, lse, f"{name}, {strategy}, {sharding}, rank {cp.rank} of {ranks}")
                if ranks == 1 and sharding == "contiguous":
                    alone = [x.clone().requires_grad_() for x in tensors]
                    o, rows = sdpa.flex_attention(*alone, score_mod, mask, enable_gqa=True, return_lse=True)
                    gradients = torch.autograd.grad((o, rows) if lse else (o,), alone, up if lse else up[:1])
                    assert all(torch.equal(x, y) for x, y in zip((*made[:2], *made[2]), (o, rows, *gradients))), f"{name}: other bits than without ranks"


def types(ranks, group):
    """16-bit operands, queries and keys of different lengths, chunks, maxima, sinks, scalars, scales, keys of batch 1, and layouts."""
    score_mod = CASES["causal with slopes by head"][0]
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        tensors, up = operands(2, dtype=dtype)
        right, made_by = textbook(tensors, up, score_mod, causal), {}
        for strategy, partials in itertools.product(("all_gather", "ring", "head_exchange"), (None, "operands")):
            with sdpa.context_parallel(group, strategy=strategy, deadline=60, partials=partials) as cp:
                made = ours(cp, tensors, up, score_mod, sdpa.create_block_mask(causal, None, None, SEQ, SEQ), False)
            assert made[0].dtype == made[2][0].dtype == made[2][1].dtype == dtype
            compare(cp, made, right, False, f"{dtype}, {strategy}, {partials}", tolerance)
            made_by[strategy, partials] = made[2][1]
        # Rounded contributions to dk have other bits. Rank 0 has keys of which all ranks have queries. A head exchange has one contribution.
        for strategy, is_merged in (("all_gather", ranks > 1), ("ring", ranks > 1), ("head_exchange", False)) if cp.rank == 0 else ():
            assert torch.equal(made_by[strategy, None], made_by[strategy, "operands"]) != is_merged, f"{dtype}, {strategy}"
    tensors, up = operands(2, 3, 3)  # some ranks have no tokens
    right = textbook(tensors, up, score_mod, causal)
    for strategy in ("auto", "all_gather", "ring", "head_exchange"):
        for sharding in SHARDINGS:
            with sdpa.context_parallel(group, sharding=sharding, strategy=strategy, seq=3, deadline=60) as cp:
                made = ours(cp, tensors, up, score_mod, sdpa.MaskMod(causal))
                assert torch.equal(cp.unshard(cp.shard(tensors[0], 2), 2), tensors[0])
            compare(cp, made, right, True, f"three tokens, {strategy}, {sharding}, rank {cp.rank} of {ranks}")
    tensors, up = operands(2, 12 * ranks, 18 * ranks)
    right = textbook(tensors, up, None, lambda b, h, i, j: j <= i + 6)
    for sharding in SHARDINGS:
        with sdpa.context_parallel(group, sharding=sharding, deadline=60) as cp:  # the lengths are those of equal shards
            made = ours(cp, tensors, up, None, sdpa.MaskMod(lambda b, h, i, j: j <= i + 6))
        compare(cp, made, right, True, f"other keys, {sharding}")
    tensors, up = operands(2)
    right = textbook(tensors, up, lambda s, b, h, i, j: s * 0.7, causal)
    mask = sdpa.create_block_mask(causal, None, None, SEQ, SEQ)
    torch.manual_seed(9)
    cut = [torch.randn(1, heads, SEQ, 8) for heads in (6, 3, 3, 6)]  # four ranks cut GQA groups of two
    right = textbook(cut[:3], (cut[3], None), score_mod, causal)
    with sdpa.context_parallel(group, strategy="head_exchange", deadline=60) as cp:
        made = ours(cp, cut[:3], (cut[3], None), score_mod, mask, False)
    compare(cp, made, right, False, "cut groups")
    right = textbook(tensors, up, lambda s, b, h, i, j: s * 0.7, causal)
    order = [[] for _ in range(ranks)]
    for block in range(9):
        order[block * 5 % ranks].append((3 * block, 1, 3))
    with sdpa.context_parallel(group, sharding=order, deadline=60) as cp:
        made = ours(cp, tensors, up, lambda s, b, h, i, j: s * SCALE, mask)
        assert torch.equal(cp.unshard(cp.shard(tensors[0], 2), 2), tensors[0]) and torch.equal(cp.unshard(cp.shard(up[1], -1), -1), up[1])
    compare(cp, made, right, True, "chunks, scalar")
    together = sdpa.op.gradients
    try:  # GPUs compute the gradient of stats in a pass of its own if there is no room for more columns
        sdpa.op.gradients = lambda d_o, d_lse, *more: (together if d_lse is None or more[2].shape[-1] < 8 else sdpa.op._apart)(d_o, d_lse, *more)
        with sdpa.context_parallel(group, strategy="ring", deadline=60) as cp:
            made = ours(cp, tensors, up, lambda s, b, h, i, j: s * SCALE, mask)
    finally:
        sdpa.op.gradients = together
    compare(cp, made, right, True, "stats apart")
    theirs = torch.nn.attention.flex_attention.create_block_mask(causal, None, None, SEQ, SEQ, "cpu")
    right = textbook(tensors, up, None, causal, scale=0.4)
    with sdpa.context_parallel(group, deadline=60) as cp:
        made = ours(cp, tensors, up, None, theirs, scale=0.4)
        compare(cp, made, right, True, "scale, PyTorch's block mask")
        shards = [cp.shard(x, 2).requires_grad_() for x in (tensors[0], tensors[1][:1], tensors[2][:1])]
        gradients = torch.autograd.grad(sdpa.flex_attention(*shards, None, mask, enable_gqa=True).sum(), shards)
    once = [tensors[0], *[x[:1].expand(BATCH, -1, -1, -1) for x in tensors[1:]]]
    right = textbook(once, (torch.ones_like(up[0]), up[1]), None, causal)[3]
    for name, x, y in zip(("dq", "dk", "dv"), gradients, (right[0], *[y.sum(0, keepdim=True) for y in right[1:]])):
        close(x, cp.shard(y, 2), f"keys of batch 1: {name}")
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    right = textbook(tensors, up, None, rows_without_keys, sink)
    plain = textbook(tensors, up, None, causal)
    for strategy in ("all_gather", "ring", "head_exchange"):
        with sdpa.context_parallel(group, strategy=strategy, seq=SEQ, deadline=60) as cp:
            shards = [cp.shard(x, 2).requires_grad_() for x in tensors]
            o, lse = sdpa.flex.attend(*shards, None, sdpa.MaskMod(rows_without_keys), stats=True, sink=sink)
            gradients = torch.autograd.grad(o, shards, cp.shard(up[0], 2))
            compare(cp, (o, lse, gradients), right, False, f"sinks, {strategy}")
            aux = sdpa.flex.AuxOutput(lse=True, max_scores=True)
            apart = [cp.shard(x, 2).transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
            o, found = sdpa.flex_attention(*apart, None, mask, enable_gqa=True, return_aux=aux)
            close(o, cp.shard(plain[0], 2), f"tokens before heads, {strategy}")
            close(found.lse, cp.shard(plain[1], 2), f"lse with maxima, {strategy}")
            scores = tensors[0] @ tensors[1].repeat_interleave(2, 1).transpose(-1, -2) / 4
            largest = scores.masked_fill(torch.arange(SEQ)[:, None] < torch.arange(SEQ), -torch.inf).amax(-1)
            close(found.max_scores, cp.shard(largest, 2), f"maxima, {strategy}")


def parameters(ranks, group):
    """Gradients of captured tensors and of sinks: the contributions of the ranks sum to those of the whole problem."""
    torch.manual_seed(7)
    slopes, table, sink = torch.rand(HEADS), torch.rand(9), torch.randn(HEADS)
    bias, rows, keys = torch.randn(HEADS, SEQ, SEQ), torch.randn(BATCH, SEQ), torch.randn(SEQ).bfloat16()

    def score_mod(slopes, table, bias, rows, keys):
        return lambda s, b, h, i, j: (s + bias[h, i, j]) * slopes[h] + table[(i - j).clamp(-4, 4) + 4] + rows[b, i] * keys[j]

    tensors, up = operands(2)
    whole = [x.double().requires_grad_() for x in (*tensors, slopes, table, bias, rows, keys, sink)]
    o, lse = attention(*whole[:3], score_mod(*whole[3:8]), causal, sink=whole[8])
    both = torch.autograd.grad((o, lse), whole, (up[0].double(), up[1].double()), retain_graph=True)
    alone = torch.autograd.grad(o, whole, up[0].double())
    for strategy in ("all_gather", "head_exchange", "ring"):
        for lse, right in ((True, both), (False, alone)):
            with sdpa.context_parallel(group, strategy=strategy, seq=SEQ, deadline=60) as cp:
                shards = [cp.shard(x, 2).requires_grad_() for x in tensors]
                own = [x.clone().requires_grad_() for x in (slopes, table, bias, rows, keys, sink)]
                made = sdpa.flex.attend(*shards, sdpa.ScoreMod(score_mod(*own[:5])), sdpa.MaskMod(causal), stats=lse, sink=own[5])
                outputs = ((made, (cp.shard(up[0], 2), cp.shard(up[1], 2))) if lse else (made[:1], (cp.shard(up[0], 2),)))
                gradients = torch.autograd.grad(outputs[0], [*shards, *own], outputs[1])
            for n, (name, x, y) in enumerate(zip(("dq", "dk", "dv", "slopes", "table", "bias", "rows", "keys", "sink"), gradients, right)):
                if n < 3:
                    close(x, cp.shard(y, 2), f"{strategy}: {name}")
                    continue
                assert x.dtype == own[n - 3].dtype
                total = x.float()
                dist.all_reduce(total, group=group)
                close(total, y, f"{strategy}: the gradient of {name}", 1e-2 if name == "keys" else 2e-5)


def programs(ranks, group):
    """Two layers in one step: eager, compiled and with checkpoints; repeated steps have equal bits."""
    torch.manual_seed(3)
    x, weights = torch.randn(1, SEQ, 32), [torch.randn(32, 96) / 6 for _ in range(2)]
    mask = sdpa.create_block_mask(causal, None, None, SEQ, SEQ)

    def layer(x, weight, attend, mask):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (x @ weight).chunk(3, -1))
        return x + attend(q, k, v, mask).transpose(1, 2).flatten(2)

    def both(x, weights, attend, mask, around=lambda f, *rest: f(*rest)):
        for weight in weights:
            x = around(layer, x, weight, attend, mask)
        return x

    flex = lambda q, k, v, mask: sdpa.flex_attention(q, k, v, None, mask)  # noqa: E731
    whole = [w.double().requires_grad_() for w in weights]
    right = both(x.double(), whole, lambda q, k, v, _: attention(q, k, v, None, causal)[0], None)
    gradients = torch.autograd.grad(right.square().sum(), whole)
    ways = {
        "eager": lambda f, *rest: f(*rest), "compiled": torch.compile(lambda f, *rest: f(*rest), backend="aot_eager"),
        "checkpoint": lambda f, *rest: checkpoint(f, *rest, use_reentrant=False), "reentrant": lambda f, *rest: checkpoint(f, *rest, use_reentrant=True),
    }  # fmt: skip
    seen = []
    for name, around in [("eager", ways["eager"]), *ways.items()]:
        own = [w.clone().requires_grad_() for w in weights]
        with sdpa.context_parallel(group, deadline=60) as cp:
            shard = cp.shard(x, 1).requires_grad_()
            made = both(shard, own, flex, mask, around)
            made.square().sum().backward()
        close(made, cp.shard(right, 1), name)
        for own, y in zip(own, gradients):
            dist.all_reduce(own.grad, group=group)  # as data parallelism does
            close(own.grad, y, f"{name}: gradient of a weight")
        seen.append((made.detach(), own.grad))
    assert all(torch.equal(a, b) for a, b in zip(*seen[:2])), "two equal steps have other bits"
    if ranks == 1:
        return
    # A recomputation outside of the context would attend to the tokens of one rank only.
    for reentrant, error in ((False, "different number of tensors|different metadata|[Mm]ismatch"), (True, "context_parallel has ended")):
        with sdpa.context_parallel(group, strategy="all_gather", deadline=60) as cp:
            shard = cp.shard(x[:, : ranks * 6], 1).requires_grad_()
            short = sdpa.MaskMod(causal)
            made = checkpoint(layer, shard, weights[0].clone().requires_grad_(), flex, short, use_reentrant=reentrant)
        with pytest.raises(Exception, match=error):
            made.sum().backward()


def rank(number, folder, ranks, names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=ranks)
    groups = [dist.new_group(list(range(n + 1))) for n in range(ranks)]
    for name in names:
        for n, group in enumerate(groups):
            torch.use_deterministic_algorithms(n == 2)  # PyTorch fills new memory with NaN then
            if number <= n:
                globals()[name](n + 1, group)
    cp = sdpa.context_parallel(groups[-1])
    dist.destroy_process_group()
    with pytest.raises(sdpa.SpecError, match="process group: got one that was destroyed"):
        cp.unshard(torch.rand(4), 0)
    os._exit(0)  # the threads of gloo may abort a process that ends by itself


def test_every_rank_has_its_shard_of_attention_over_the_whole_sequence(tmp_path):
    torch.multiprocessing.spawn(rank, (str(tmp_path), 4, ("results", "types", "parameters", "programs")), nprocs=4)


def everywhere(group, error, match, call):
    """Asserts that a call raises on every rank, soon, and that the group works afterwards."""
    began = time.monotonic()
    with pytest.raises(error, match=match) as raised:
        call()
    assert time.monotonic() - began < 10
    q = torch.full((1, 2, 4, 8), float(dist.get_rank(group) + 1))
    with sdpa.context_parallel(group, deadline=20):
        assert torch.allclose(sdpa.flex_attention(q, q * 0, q), torch.tensor(2.0))  # the mean of the values 1, 2 and 3
    return raised.value


def refusals(number, group):
    q = torch.randn(1, 2, 4, 8)
    flex = lambda *args, **more: sdpa.flex_attention(q, q, q, *args, **more)  # noqa: E731
    learned = torch.nn.Parameter(torch.rand(2))

    def within(call, **more):
        def run():
            with sdpa.context_parallel(group, **{"deadline": 20, **more}):
                call()

        return run

    unsupported = {
        "dropout": lambda: sdpa.flex.attend(q, q, q, None, None, dropout=0.5),
        "transforms of torch.func|meta": lambda: torch.func.vmap(lambda x: sdpa.flex_attention(x, x, x))(q[None]),
        "paged_attention": lambda: sdpa.paged_attention(q, q, q, q, q),
        "second derivatives": second,
    }  # fmt: skip
    for match, call in unsupported.items():
        everywhere(group, sdpa.UnsupportedError, match, within(call))
    wrong = {
        "of the mask: got a tensor that requires grad": lambda: flex(None, sdpa.MaskMod(lambda b, h, i, j: learned[h] > i * 0.1)),
        "at least 12 elements": lambda: flex(lambda s, b, h, i, j, local=torch.rand(4): s + local[i]),
        "seq of query: got 4, expected 7": lambda: flex(None, sdpa.create_block_mask(causal, None, None, 21, 21)),
        "heads of key": lambda: sdpa.flex_attention(torch.cat([q, q], 1), q, q),
        "a tensor": lambda: sdpa.flex_attention(None, q, q),
        "a nested tensor": lambda: sdpa.flex_attention(*[torch.nested.nested_tensor([q[0], q[0]], layout=torch.jagged)] * 3),
    }  # fmt: skip
    for match, call in wrong.items():
        everywhere(group, sdpa.SpecError, match, within(call))
    everywhere(group, sdpa.SpecError, "head_groups: got 3", within(flex, strategy="all_gather:3"))
    everywhere(group, sdpa.SpecError, "strategy: got halo", within(flex, strategy="halo"))
    everywhere(group, sdpa.SpecError, "heads_q.: got 2, expected at least 3", within(flex, strategy="head_exchange"))
    for match, arguments in {
        "strategy: got 'rings'": {"strategy": "rings"}, "strategy: got 'grid'": {"strategy": "grid"}, "sharding: got 'zigzags'": {"sharding": "zigzags"},
        "deadline: got 0": {"deadline": 0}, "seq: got 0": {"seq": 0}, "token 3 in no rank": {"sharding": [[(0, 1, 3)], [(4, 1, 2)], [(4, 1, 2)]]},
        "partials: got 'f16'": {"partials": "f16"},
        "sharding.chunks: got 1 lists": {"sharding": [[(0, 1, 3)]]},
    }.items():  # fmt: skip
        with pytest.raises(sdpa.SpecError, match=match):
            sdpa.context_parallel(group, **arguments)
    with pytest.raises(sdpa.SpecError, match="mesh_or_group: got str"):
        sdpa.context_parallel("cp")
    # What one rank alone does wrong is an error on all.
    for match, mine, others in (
        (("rank 1 failed: SpecError: heads of key", sdpa.ParallelError), lambda: sdpa.flex_attention(q, q[:, :1], q[:, :1]), flex),
        (("seq_q differs between ranks", sdpa.ParallelError), lambda: sdpa.flex_attention(q[:, :, :3], q, q), flex),
        (("masks differs between ranks", sdpa.ParallelError), lambda: flex(None, sdpa.MaskMod(causal)), flex),
        (("dtype differs between ranks", sdpa.ParallelError), lambda: sdpa.flex_attention(*[q.bfloat16()] * 3), flex),
        (("attn_scale differs between ranks", sdpa.ParallelError), lambda: flex(scale=0.1), flex),
    ):  # fmt: skip
        expected = sdpa.SpecError if number == 1 and "failed" in match[0] else match[1]
        error = everywhere(group, expected, "heads of key" if expected is sdpa.SpecError else match[0], within(mine if number == 1 else others))
        if expected is sdpa.ParallelError and "differs" in match[0]:
            assert error.field == match[0].split()[0] and error.ranks == ([0, 2] if number == 1 else [1])
    unlike = sdpa.context_parallel(group, deadline=20, partials="operands" if number == 1 else None)
    with unlike:
        everywhere(group, sdpa.ParallelError, "partials differs between ranks", flex)
    with sdpa.context_parallel(group, deadline=20) as cp:
        with pytest.raises(sdpa.UnsupportedError, match="unshard"):
            cp.unshard(q.clone().requires_grad_(), 2)
        with pytest.raises(sdpa.SpecError, match=r"shards of the ranks: got \[4, 6, 4\] tokens"):
            cp.unshard(torch.rand(6 if number == 1 else 4), 0)
        with pytest.raises(sdpa.SpecError, match="other types or extents"):
            cp.unshard(torch.rand(4, 2 if number == 1 else 4), 0)


def documented(text):
    """Runs the program of the guide, and compares its outputs and gradients with the textbook's."""
    (block,), scope = re.findall(r"```python\n(.*?)```", text, re.S), {}
    exec(compile(block, "several-gpus.md", "exec"), scope)  # noqa: S102
    documents, project = scope["documents"], scope["project"]
    q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (scope["whole"] @ project.weight.T + project.bias).chunk(3, -1))
    mask = lambda b, h, i, j: (i >= j) & (documents[i] == documents[j])  # noqa: E731
    o, _ = attention(q, k, v, lambda s, b, h, i, j: s - 0.1 * (i - j), mask)
    close(scope["outputs"], o, "the guide's outputs")
    gradients = torch.autograd.grad(o.square().sum() / scope["whole"].numel(), project.parameters())
    for parameter, gradient in zip(project.parameters(), gradients):
        close(parameter.grad * 100, gradient * 100, "the guide's gradients")


def second():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    torch.autograd.grad(sdpa.flex_attention(q, q, q).sum(), q, create_graph=True)


def lost(number, folder):
    """Refusals, then a rank that hangs, and one that is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))
    with pytest.raises(sdpa.SpecError, match=r"mesh: got 2 dimensions, expected one dimension"):
        sdpa.context_parallel(mesh)
    guide = pathlib.Path(__file__).resolve().parents[3] / "docs" / "several-gpus.md"
    if guide.exists():
        documented(guide.read_text())
    assert sdpa.context_parallel(mesh["cp"]).ranks == 3 and sdpa.context_parallel(mesh["dp"]).ranks == 1
    groups = [dist.new_group([0, 1, 2]) for _ in range(4)]
    last = dist.new_group([1, 2])
    if number == 0:
        with pytest.raises(sdpa.SpecError, match="process group: got one without this rank"):
            sdpa.context_parallel(last)
    else:
        q = torch.full((1, 2, 4, 8), float(number))
        with sdpa.context_parallel(last, deadline=20) as cp:
            assert (cp.rank, cp.ranks) == (number - 1, 2) and torch.allclose(sdpa.flex_attention(q, q * 0, q), torch.tensor(1.5))
    refusals(number, groups[0])
    q = torch.randn(1, 2, 4, 8)
    late, killed, alive = groups[1:]
    with sdpa.context_parallel(late, deadline=2):
        began = time.monotonic()
        if number == 1:
            time.sleep(4)
        else:
            with pytest.raises(sdpa.ParallelError, match="rank 1 did not answer within 2 s") as raised:
                sdpa.flex_attention(q, q, q)
            assert raised.value.ranks == [1] and time.monotonic() - began < 4
            with pytest.raises(sdpa.ParallelError, match="an earlier call over this process group failed"):
                sdpa.flex_attention(q, q, q)
    q.requires_grad_()
    with sdpa.context_parallel(killed, deadline=20, strategy="ring"):
        o = sdpa.flex_attention(q, q, q)
        dist.barrier(alive)
        if number == 2:
            os._exit(0)
        with pytest.raises(sdpa.ParallelError, match="rank 2|one of the ranks|rank [01] left"):
            o.sum().backward()
    assert q.grad is None
    os._exit(0)


def test_every_rank_raises_an_error_if_one_of_them_fails(tmp_path):
    torch.multiprocessing.spawn(lost, (str(tmp_path),), nprocs=3)


def test_a_context_needs_a_process_group():
    with pytest.raises(sdpa.SpecError, match="process group: got none"):
        sdpa.context_parallel()


def test_a_gpt_on_two_ranks_has_the_losses_of_pytorch_attention_on_one(tmp_path):
    path = pathlib.Path(__file__).parents[1] / "examples" / "parallel_gpt.py"
    spec = importlib.util.spec_from_file_location("parallel_gpt", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    steps, seq = 4, 41
    torch.manual_seed(0)
    model = example.Gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in example.batches(steps, seq):
        attend = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
        logits = model(batch[:, :-1], torch.arange(seq), attend)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path, "--steps", str(steps), "--seq", str(seq)]
    home = str(pathlib.Path(sdpa.__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
    # The exit status says little: the threads of gloo may abort a process at its end.
    found = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(found) == steps and all(abs(a - b) < 2e-4 for a, b in zip(found, losses)), (found, losses, done.stderr[-3000:])
