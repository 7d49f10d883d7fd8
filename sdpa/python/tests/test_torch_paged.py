"""Attention over a paged KV cache, against f64 attention of each sequence alone."""

import pytest

torch = pytest.importorskip("torch")

import sdpa  # noqa: E402
from textbook import attention, close  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
# Decode, a prefill of a whole prompt, no queries, a chunk after 20 keys, one whole page, and a query without keys.
QUERIES, KEYS = [1, 13, 0, 6, 1, 1], [37, 13, 9, 26, 8, 0]
PAGE, BEFORE, AFTER = 8, 2, 3


class Case:
    """Queries, pools whose unused tokens are garbage, and the keys and values of each sequence."""

    def __init__(self, device, queries=QUERIES, keys=KEYS, dims=(16, 24), wide=False, spare=(BEFORE, AFTER)):
        generator = torch.Generator().manual_seed(0)
        made = lambda *shape: torch.randn(*shape, generator=generator).to(device, TYPES[device])  # noqa: E731
        self.device, self.queries, self.counts, self.spare = device, queries, keys, spare
        self.q = made(sum(queries) + sum(spare), 4, dims[0])
        self.keys, self.values = ([made(n, 2, dim) for n in keys] for dim in dims)
        columns, pages = max(1, -(-max(keys) // PAGE)), sum(-(-n // PAGE) for n in keys) + 3
        free = torch.randperm(pages, generator=generator).tolist()
        # cuDNN multiplies the tokens after the last key of a page by 0; unused pages may hold anything.
        tail = torch.nan if device == "cpu" else 50.0
        self.pools = [torch.full((pages, PAGE, 2, dim), torch.nan, device=device, dtype=TYPES[device]) for dim in dims]
        table = torch.full((len(keys), columns), -7 if device == "cpu" else 0, dtype=torch.int32)
        for b, n in enumerate(keys):
            for column in range(-(-n // PAGE)):
                page = table[b, column] = free.pop()
                part = slice(column * PAGE, min(n, (column + 1) * PAGE))
                for pool, tokens in zip(self.pools, (self.keys[b], self.values[b])):
                    pool[page] = tail
                    pool[page, : part.stop - part.start] = tokens[part]
        self.table, self.lengths = table.to(device), torch.tensor(keys, dtype=torch.int32, device=device)
        offsets = torch.tensor([0, *queries]).cumsum(0) + spare[0]
        self.offsets = offsets.to(device, torch.int64 if wide else torch.int32)
        self.context = torch.tensor([k - q for q, k in zip(queries, keys)], dtype=torch.int32, device=device)

    def run(self, **options):
        with torch.no_grad():
            return sdpa.paged_attention(self.q, *self.pools, self.table, self.lengths, **options)

    def packed(self, **options):
        return self.run(cu_seqlens_q=self.offsets, return_lse=True, **options)

    def exact(self, score_mod=None, keep=None, scale=None):
        """Returns output and log-sum-exp. The functions see the number of a sequence, and positions as a call counts them."""
        o = self.q.new_zeros(*self.q.shape[:2], self.values[0].shape[-1], dtype=torch.float64)
        lse = o.new_full(o.shape[:2], -torch.inf)
        for b, queries in enumerate(self.queries):
            rows = slice(int(self.offsets[b]), int(self.offsets[b]) + queries)
            if not queries or not self.counts[b]:
                continue
            q, k, v = (x.transpose(0, 1)[None] for x in (self.q[rows], self.keys[b], self.values[b]))
            of = lambda fn: None if fn is None else lambda *args: fn(*args[:-4], b, *args[-3:])  # noqa: E731, B023
            row, stats = attention(q, k, v, of(score_mod), of(keep), scale)
            o[rows], lse[rows] = row[0].transpose(0, 1), stats[0].transpose(0, 1)
        return o, lse

    def causal(self, b, h, i, j):
        return j <= i + int(self.context[b])

    def check(self, score_mod=None, keep=None, scale=None, **options):
        o, lse = self.packed(score_mod=score_mod, scale=scale, **options)
        assert o.dtype == self.q.dtype and lse.dtype == torch.float32
        right = self.exact(score_mod, keep, scale)
        tolerance = 2e-6 if self.device == "cpu" else 1e-2
        close(o, right[0], "output", tolerance)
        close(lse, right[1], "lse", tolerance)
        assert torch.equal(lse.isneginf(), right[1].isneginf())
        return o


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [False, True])
def test_chunks_and_decode_attend_up_to_their_positions(device, wide):
    case = Case(device, wide=wide)
    o = case.check(keep=case.causal, max_seqlen_q=13)
    assert not o[:BEFORE].any() and not o[-AFTER - 1 :].any(), "rows of no sequence, and a query without keys"
    case.check(keep=case.causal, scale=0.5)
    case.check(keep=lambda b, h, i, j: j >= 0, mask=None)
    case.check(keep=lambda b, h, i, j: (case.causal(b, h, i, j)) & (j > i + int(case.context[b]) - 5), mask="window:5,0")
    case.check(keep=lambda b, h, i, j: j <= i + int(case.context[b]) + 2, mask="window:inf,2")


@pytest.mark.parametrize("device", DEVICES)
def test_functions_see_sequences_and_positions(device):
    case = Case(device)
    of_sequence = torch.tensor([0.5, 1.5, 1.0, 0.25, 2.0, 1.0], device=device)
    slopes, context = torch.tensor([0.1, 0.2, 0.0, -0.1], device=device), case.context
    alibi = lambda s, b, h, i, j: s * of_sequence[b] + slopes[h] * (j - (i + context[b]))  # noqa: E731
    case.check(alibi, case.causal)
    case.check(sdpa.ScoreMod(alibi), case.causal)
    even = lambda b, h, i, j: (i + context[b] >= j) & ((j + h) % 2 == 0)  # noqa: E731
    case.check(None, even, mask=even)
    case.check(alibi, even, mask=sdpa.MaskMod(even), executor="cpu" if device == "cpu" else "cuda")
    along = torch.randn(4, 13, 40, generator=torch.Generator().manual_seed(1)).to(device)
    case.check(lambda s, b, h, i, j: s + along[h, i, j], case.causal, max_seqlen_q=13)
    bias = sdpa.scalar("bias", 2.0)
    mod = sdpa.ScoreMod(lambda s, b, h, i, j: torch.where(j == 0, s + bias, s))
    for bias.value in (2.0, -1.0):
        first = lambda s, b, h, i, j: torch.where(j == 0, s + bias.value, s)  # noqa: E731
        close(case.packed(score_mod=mod, mask=None)[0], case.exact(first)[0], "output", 2e-6 if device == "cpu" else 1e-2)
    numbers = torch.tensor([3, 1, 4, 1, 5, 9], device=device)  # int64
    case.check(lambda s, b, h, i, j: s + numbers[b] * (j % 3), case.causal)


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_near_powers_of_two(device):
    for tokens in (63, 64, 65, 130):
        case = Case(device, [tokens, 1], [tokens + 3, 9], spare=(0, 0))
        case.check(keep=case.causal)
        case.check(keep=case.causal, max_seqlen_q=tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_a_decode_step_needs_no_offsets(device):
    case = Case(device, [1] * 5, [37, 1, 0, 8, 40], spare=(0, 0))
    right, lse = case.exact(keep=case.causal)
    tolerance = 2e-6 if device == "cpu" else 1e-2
    used = torch.full_like(right, torch.nan, dtype=case.q.dtype)  # the allocator gives this memory to the output
    del used
    o, stats = case.run(return_lse=True)
    close(o, right, "output", tolerance)
    close(stats, lse, "lse", tolerance)
    close(case.run(max_seqlen_q=1), right, "output", tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_read_where_they_are(device):
    case = Case(device)
    right = case.exact(keep=case.causal)[0]
    # Head-major pages, a wider table, a query out of a fused projection, and numbers at an address that is no multiple of 16 bytes.
    case.pools = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.pools]
    case.table = torch.cat([case.table, case.table], 1)[:, : case.table.shape[1]]
    case.lengths = torch.cat([case.lengths[:1], case.lengths])[1:]
    fused = torch.cat([case.q, case.q], 1)
    for case.q in (fused[:, :4], *[case.q.transpose(*axes).contiguous().transpose(*axes) for axes in ((0, 1), (1, 2))]):
        close(case.packed()[0], right, "output", 2e-6 if device == "cpu" else 1e-2)


def test_steps_share_plans():
    from sdpa import op, paged

    paged._WAYS.clear()
    op._PLANS.clear()
    case = Case("cpu")
    shift = case.context * 0.1
    mod = lambda s, b, h, i, j: s + shift[b] * (j % 3)  # noqa: E731
    for step in range(3):
        case.check(mod, case.causal, max_seqlen_q=13)
        # Tensors of other values elsewhere: the table's pages, and those that a function reads.
        case.pools = [torch.cat([x[3:], x[:3]]) for x in case.pools]
        case.table, case.lengths, shift = (case.table - 3) % len(case.pools[0]), case.lengths.clone(), shift * (step - 0.5)
    assert len(paged._WAYS) == len(op._PLANS) == 1
    case.packed(max_seqlen_q=14, score_mod=mod)  # rounded up to the same length
    assert len(op._PLANS) == 1


def test_no_tokens_no_sequences_and_no_pages():
    none = Case("cpu", [0, 0], [3, 0], spare=(0, 0))
    o, lse = none.packed()
    assert o.shape == (0, 4, 24) and lse.shape == (0, 4)
    case = Case("cpu", [1, 2], [0, 0], spare=(1, 0))
    for case.table in (case.table, case.table[:, :0]):
        o, lse = case.packed()
        assert o.shape == (4, 4, 24) and not o.any() and lse.isneginf().all()
    case.table, case.lengths, case.offsets = case.table[:0], case.lengths[:0], case.offsets[:1]
    o, lse = case.packed()
    assert not o.any() and lse.isneginf().all()


def test_mistakes_are_named_together():
    case = Case("cpu")
    call = lambda **other: sdpa.paged_attention(**{  # noqa: E731
        "query": case.q, "key_pool": case.pools[0], "value_pool": case.pools[1], "page_table": case.table, "seq_lens_kv": case.lengths,
        "cu_seqlens_q": case.offsets, **other,
    })  # fmt: skip

    def told(*parts, error=sdpa.SpecError, **other):
        with pytest.raises(error) as e:
            call(**other)
        for part in parts:
            assert part in str(e.value), f"{part} is not in: {e.value}"

    told("page_table: got list, expected a tensor (sequences, pages of a sequence)", "query shape: got (1, 2)", page_table=[[0]], query=torch.ones(1, 2))
    told(
        "page_table dtype: got torch.int64, expected int32: convert it with .to(torch.int32)", "query dtype: got torch.float64", "key_pool dim: got 16, expected 8",
        "seq_lens_kv dtype", "key_pool heads: got 2, expected a divisor of 3", "cu_seqlens_q shape: got (3,), expected (6,)", "page_table shape: got (6, 5), expected (5,",
        "max_seqlen_q: got -1", page_table=case.table.long(), query=torch.ones(4, 3, 8, dtype=torch.float64), seq_lens_kv=torch.ones(5), max_seqlen_q=-1,
        cu_seqlens_q=case.offsets[:3],
    )  # fmt: skip
    told("value_pool shape: got (17, 7, 2, 24)", value_pool=case.pools[1][:, :7])
    told("key_pool strides", key_pool=case.pools[0].transpose(1, 3).contiguous().transpose(1, 3))
    told("query tokens: got 27, expected 6, one for each sequence, or cu_seqlens_q", cu_seqlens_q=None)
    told("max_seqlen_q: got 2, expected 1 or None", cu_seqlens_q=None, max_seqlen_q=2, query=case.q[:6])
    for name, x in (("query", case.q), ("key_pool", case.pools[0]), ("value_pool", case.pools[1])):
        told(f"{name}: got a tensor that requires grad, expected one that does not", **{name: x.clone().requires_grad_()})
    learned = torch.ones(4, requires_grad=True)
    told("tensor 0 of the functions: got a tensor that requires grad", score_mod=lambda s, b, h, i, j: s * learned[h])
    told("seq_lens_kv[3]: got 41, expected between 0 and 40", seq_lens_kv=torch.tensor([1, 2, 3, 41, 5, 6], dtype=torch.int32))
    told("seq_lens_kv[1]: got -2, expected between 0 and 40", seq_lens_kv=torch.tensor([1, -2, 3, 4, 5, 6], dtype=torch.int32))
    told("page_table[0][1]: got 17, expected between 0 and 16", page_table=case.table.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(17, dtype=torch.int32)))
    told("cu_seqlens_q[6]: got", cu_seqlens_q=case.offsets.index_put((torch.tensor(6),), torch.tensor(3, dtype=torch.int32)))
    told("memory for 30 tokens", cu_seqlens_q=case.offsets + 6)
    told("a sequence of 13 tokens, expected at most 1", max_seqlen_q=1)
    told("mask: got 'causal-ends', expected 'causal', 'window:LEFT,RIGHT'", mask="causal-ends")
    told("mask: got BlockMask", "block_mask.mask_mod", mask=sdpa.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8))
    told("masks[0].left: got 0, expected at least 1", mask="window:0,0")
    told("executor", executor="tpu")
    told("scale", scale="x")
    reserved = sdpa.ScoreMod.from_text("tensor seq_len_kv[batch]: i32; score + f32(seq_len_kv)", seq_len_kv=case.lengths)
    told("parameter seq_len_kv: got a declared name", score_mod=reserved)
    told("reads plain tensors", error=sdpa.UnsupportedError, query=case.q.as_subclass(Other))
    shared = case.context
    told("give the mask one of its own", error=sdpa.UnsupportedError, score_mod=sdpa.ScoreMod.from_text("tensor t[batch]: i32; score + f32(t)", t=shared),
         mask=sdpa.MaskMod.from_text("tensor t[batch]: i32; k <= t", t=shared))  # fmt: skip


class Other(torch.Tensor):
    """A tensor of a subclass."""


def test_grad_mode_decides_about_gradients():
    case = Case("cpu")
    right = case.packed()[0]
    case.q.requires_grad_()
    assert torch.equal(case.packed()[0], right) and not case.packed()[0].requires_grad


def test_the_package_runs_outside_of_a_compiled_graph():
    case = Case("cpu")
    run = lambda q: sdpa.paged_attention(q, *case.pools, case.table, case.lengths, cu_seqlens_q=case.offsets) * 2  # noqa: E731
    assert torch.equal(torch.compile(run, backend="eager")(case.q), run(case.q))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_replays_other_lengths_and_pages():
    case = Case("cuda", [1] * 5, [37, 1, 0, 8, 30], spare=(0, 0))
    slopes = torch.tensor([0.1, 0.2, 0.0, -0.1], device="cuda")
    alone = lambda: case.run(score_mod=lambda s, b, h, i, j: s + slopes[h] * j)  # noqa: E731
    packed = lambda: case.packed(max_seqlen_q=1)  # noqa: E731
    for call in (alone, packed):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for step in range(3):
            case.lengths[0], case.lengths[4] = 20 + step, 1 + 7 * step
            case.table[[0, 4]] = case.table[[4, 0]]
            case.q.normal_()
            graph.replay()
            expected = call()
            for x, y in zip(captured if call is packed else [captured], expected if call is packed else [expected]):
                assert torch.equal(x, y) and x[0].abs().sum() > 0
