"""Each unsupported function is an error with the source line, never a wrong number."""

import cProfile
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from textbook import attention, close

import sdpa
from sdpa import SpecError, TracingError, bind, create_block_mask, flex_attention
from sdpa.flex import attend


def operands(grad=False, q=9, k=13, h=4):
    torch.manual_seed(3)
    return [torch.randn(shape).requires_grad_(grad) for shape in ((2, h, q, 8), (2, h, k, 8), (2, h, k, 8))]


def refused(fn, what, instead=""):
    """Tests tracing alone, and a call."""
    q, k, v = operands()
    for run in (lambda: sdpa.ScoreMod(fn), lambda: flex_attention(q, k, v, fn), lambda: sdpa.explain(q, k, v, fn)):
        with pytest.raises(TracingError, match=what) as caught:
            run()
        assert __file__ in caught.value.where and instead in str(caught.value), caught.value


class Clip(torch.autograd.Function):
    """Straight-through estimator: clipped forward, with a gradient everywhere."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx, g):
        return g


class Reverse(torch.autograd.Function):
    """A forward pass without any operation."""

    @staticmethod
    def forward(x):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return -g


clip = Clip.apply


@pytest.mark.parametrize("fn", [lambda s, b, h, q, k: clip(s), lambda s, b, h, q, k: Clip.apply(s) * 2, lambda s, b, h, q, k: Reverse.apply(s)])
def test_autograd_functions_would_lose_their_backward(fn):
    refused(fn, "autograd.Function", "from_text")
    profile = cProfile.Profile()
    profile.enable()
    try:
        refused(fn, "autograd.Function")
    finally:
        profile.disable()
    assert profile.getstats()
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        refused(fn, "autograd.Function")
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert len(calls) > 100


def test_a_compiler_that_follows_refuses_as_well():
    q, k, v = operands(True)
    factor, gate = 2.0, torch.randn(4, requires_grad=True)

    def inner(s):
        return clip(s) * factor

    for mod, what in (
        (lambda s, b, h, i, j: clip(s), "autograd.Function"),
        (lambda s, b, h, i, j: Reverse.apply(s) + gate[h], "autograd.Function"),
        (lambda s, b, h, i, j: inner(s), "autograd.Function"),
        (lambda s, b, h, i, j: s * torch.rand(()), "random numbers"),
        (lambda s, b, h, i, j: s.softmax(-1), "softmax"),
    ):
        for given in (lambda: mod, lambda: lambda s, b, h, i, j: mod(s, b, h, i, j) * factor + gate[h]):  # noqa: B023
            for fullgraph in (True, False):
                torch._dynamo.reset()
                with pytest.raises(Exception, match=f"(?s)TracingError|NoAttribute.*{what}"):
                    torch.compile(lambda q, k, v: flex_attention(q, k, v, given()), fullgraph=fullgraph, backend="eager")(q, k, v)  # noqa: B023
    # A random tensor that the compiled function created before the call is an ordinary tensor.
    torch._dynamo.reset()

    def run(q, k, v):
        drawn = torch.rand(13)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * factor + drawn[j]), drawn

    o, drawn = torch.compile(run, fullgraph=True, backend="eager")(q, k, v)
    close(o, attention(q, k, v, lambda s, b, h, i, j: s * factor + drawn[j])[0], "o")


def test_autograd_functions_of_tensors_alone_have_theirs():
    q, k, v = operands()
    t = torch.tensor(0.7, requires_grad=True)
    mod = lambda s, b, h, i, j: s * Reverse.apply(t)  # noqa: E731
    ours = torch.autograd.grad(flex_attention(q, k, v, mod).square().sum(), t)[0]
    close(ours, torch.autograd.grad(attention(q, k, v, mod)[0].square().sum(), t)[0], "gradient", 1e-4)
    assert ours.abs() > 1e-3


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(()),
        lambda: torch.randn(1),
        lambda: torch.rand((), generator=torch.Generator().manual_seed(1)),
        lambda: torch.randint(0, 9, ()).float(),
        lambda: torch.bernoulli(torch.tensor(0.5)),
        lambda: torch.rand_like(torch.ones(())),
        lambda: torch.zeros(()).uniform_(),
        lambda: F.dropout(torch.ones(()), 0.5, training=True),
    ],
)
def test_random_numbers_would_be_drawn_once(draw):
    refused(lambda s, b, h, q, k: s * draw(), "random numbers", "before")
    with pytest.raises(TracingError, match="random numbers"):
        create_block_mask(lambda b, h, q, k: (q >= k) & (draw() > 0.5), None, None, 9, 13)


@pytest.mark.parametrize(
    "fn, what",
    [
        (lambda s, b, h, q, k: s.softmax(-1), "`.softmax`"),
        (lambda s, b, h, q, k: torch.softmax(s, -1), "softmax"),
        (lambda s, b, h, q, k: F.softmax(s, -1), "softmax"),
        (lambda s, b, h, q, k: F.gelu(q), "`gelu` is applied to int64"),
        (lambda s, b, h, q, k: F.gelu(s, approximate="erf"), "approximate is 'erf'"),
        (lambda s, b, h, q, k: F.silu(q), "`silu` is applied to int64"),
        (lambda s, b, h, q, k: F.softplus(s, beta=s), "beta is a value of type Value"),
        (lambda s, b, h, q, k: torch.lerp(s, q, 0.5), "lerp is applied to values"),
        (lambda s, b, h, q, k: torch.logaddexp(q, k), "logaddexp is applied to int64"),
        (lambda s, b, h, q, k: torch.atan2(s, s), "`atan2` is not supported in a score_mod or mask_mod; the kernels have no inverse"),
        (lambda s, b, h, q, k: s.arctan(), "no inverse of a sine"),
        (lambda s, b, h, q, k: torch.special.bessel_j0(s), "bessel_j0` is not supported"),
        (lambda s, b, h, q, k: s + (q << s), "`<<` is applied to float32"),
        (lambda s, b, h, q, k: s + q.round(decimals=1), "decimals"),
        (lambda s, b, h, q, k: torch.rand_like(s), "rand_like"),
        (lambda s, b, h, q, k: F.dropout(s, 0.5), "dropout"),
        (lambda s, b, h, q, k: np.tanh(s), "NumPy's `tanh`"),
        (lambda s, b, h, q, k: np.maximum(s, 0.0), "NumPy's `maximum`"),
        (lambda s, b, h, q, k: np.add(s, 1.0, out=np.zeros(1)), "NumPy's `add`"),
        (lambda s, b, h, q, k: np.add.reduce(s), "NumPy's `add`"),
        (lambda s, b, h, q, k: np.zeros(9, np.float32) * s, "shape"),
        (lambda s, b, h, q, k: F.relu(q > k, inplace=True), "bool"),
        (lambda s, b, h, q, k: (torch.relu_(s), s)[1], "in place"),
        (lambda s, b, h, q, k: (torch.sigmoid_(s), s)[1], "in place"),
        (lambda s, b, h, q, k: s.add_(1), "`.add_`"),
        (lambda s, b, h, q, k: s.masked_fill_(q > k, 0.0), "`.masked_fill_`"),
        (lambda s, b, h, q, k: q.masked_fill(q > k, 0.5), "masked_fill"),
        (lambda s, b, h, q, k: torch.add(s, 1, out=torch.zeros(())), "out="),
        (lambda s, b, h, q, k: torch.max(s, 0), "with one value"),
        (lambda s, b, h, q, k: s.max(dim=0), "arguments"),
        (lambda s, b, h, q, k: s.max(), "with one value"),
        (lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="up"), "rounding_mode"),
        (lambda s, b, h, q, k: s.clamp(), "without a bound"),
        (lambda s, b, h, q, k: torch.where(s, s, 0.0), "a number"),
        (lambda s, b, h, q, k: s + (q ^ s), "`\\^` is applied to float32"),
        (lambda s, b, h, q, k: s + torch.bitwise_xor(q, s), "`\\^` is applied to float32"),
        (lambda s, b, h, q, k: s - (q > k), "bool"),
        (lambda s, b, h, q, k: s + (-(q > k)), "bool"),
        (lambda s, b, h, q, k: s + q // 0, "divided by 0"),
        (lambda s, b, h, q, k: s + q % 0, "divided by 0"),
        (lambda s, b, h, q, k: s + q**-1, "power"),
        (lambda s, b, h, q, k: s * 1e39, "does not fit an f32"),
        (lambda s, b, h, q, k: s * 10**400, "does not fit an f32"),
        (lambda s, b, h, q, k: q + 2**31, "does not fit an i32"),
        (lambda s, b, h, q, k: torch.where(q > k, q, 2**33), "does not fit an i32"),
        (lambda s, b, h, q, k: divmod(s, 2)[0], "divmod"),
        (lambda s, b, h, q, k: round(s), "rounded"),
        (lambda s, b, h, q, k: s @ s, "`@`"),
        (lambda s, b, h, q, k: s.new_full(), "without a number"),
        (lambda s, b, h, q, k: s * 1j, "complex"),
        (lambda s, b, h, q, k: s.double(), "`.double`"),
        (lambda s, b, h, q, k: s.to(torch.float64), "converted to float64"),
        (lambda s, b, h, q, k: s.to(torch.zeros((), dtype=torch.float64)), "converted to float64"),
        (lambda s, b, h, q, k: s.to(torch.complex64), "converted to complex64"),
        (lambda s, b, h, q, k: s.to("float"), "converted to float"),
        (lambda s, b, h, q, k: s.type(), "without a type"),
        (lambda s, b, h, q, k: s + s.long(), "int64"),
        (lambda s, b, h, q, k: s + torch.zeros(9, dtype=torch.float64)[q], "float64"),
        (lambda s, b, h, q, k: s + torch.zeros(9, dtype=torch.uint16)[q], "uint16"),
        (lambda s, b, h, q, k: s + q.new_full((3,), 2.0), "shape"),
        (lambda s, b, h, q, k: s + (torch.zeros(9, dtype=torch.uint8)[q] + 300), "does not fit uint8"),
    ],
)
def test_what_has_no_counterpart_is_an_error_with_the_line(fn, what):
    refused(fn, what)


def test_what_is_told_of_an_unknown_function_is_short():
    for name in ("softmax", "sigmod", "atan2", "erfinv", "cumsum"):
        with pytest.raises(TracingError) as caught:
            sdpa.ScoreMod(lambda s, *_: getattr(s, name)())  # noqa: B023
        assert len(caught.value.what) + len(caught.value.instead) < 260, caught.value


def test_attributes_that_a_value_lacks_are_absent_for_hasattr():
    seen = []
    sdpa.ScoreMod(lambda s, *_: (seen.append(hasattr(s, "softmax")), s)[1])
    assert seen == [False]


def test_operators_in_place_change_every_name_of_a_value():
    q, k, v = operands()

    def mod(s, b, h, i, j):
        same, copy = s, s.clone()
        same += 2.0
        same *= h + 1.0
        return s + copy * 0.5

    close(flex_attention(q, k, v, mod), attention(q, k, v, lambda s, b, h, i, j: (s + 2.0) * (h + 1.0) + s * 0.5)[0], "o")


def test_filled_scores_and_relu():
    qkv, bound = operands(True), torch.tensor([0.3, -0.2, 0.0, 1.0], requires_grad=True)
    for mod in (
        lambda s, b, h, i, j: s.masked_fill(j > i + 2, -torch.inf),
        lambda s, b, h, i, j: torch.masked_fill(s, (i + j) % 3 == 1, 0.5),
        lambda s, b, h, i, j: F.relu(s) + F.relu(s - 0.5, inplace=False),
        lambda s, b, h, i, j: torch.maximum(s, bound[h]) + s.where(i > j, 0.0),
    ):
        up = torch.randn(2, 4, 9, 8)
        wrt = [*qkv, bound]
        ours, theirs = flex_attention(*qkv, mod), attention(*qkv, mod)[0]
        close(ours, theirs, "o")
        made = [torch.autograd.grad((o * up).sum(), wrt, allow_unused=True) for o in (ours, theirs)]
        for x, y in zip(*made):
            assert (x is None) == (y is None)
            if x is not None:
                close(x, y, "gradient", 1e-4)


def test_a_tensor_that_is_read_for_nothing_has_no_gradient():
    q, k, v = operands()
    unread = torch.ones(9, requires_grad=True)
    o = flex_attention(q, k, v, lambda s, b, h, i, j: (unread[i], s.type_as(unread[i]) * 2)[1])
    assert not o.requires_grad
    close(o, attention(q, k, v, lambda s, b, h, i, j: s * 2)[0], "o")


BIG = 7 + 2**32


def test_ids_past_32_bits_are_refused_and_not_cut():
    q, k, v = operands()
    ids = torch.full((13,), 7)
    mask = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 9, 13)
    same = flex_attention(q, k, v, None, mask)
    close(same, attention(q, k, v)[0], "o")
    mod = lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -torch.inf)  # noqa: E731
    ids[5:] = BIG
    wrong = f"int64 tensor of elements from 7 to {BIG}"
    for run in (
        lambda: flex_attention(q, k, v, None, mask),
        lambda: flex_attention(q, k, v, mod),
        lambda: attend(q, k, v, None, mask.mask),
        lambda: sdpa.explain(q, k, v, mod),
        lambda: torch.compile(lambda: flex_attention(q, k, v, mod), fullgraph=True, backend="aot_eager")(),
        lambda: torch.jit.trace(lambda q, k, v: flex_attention(q, k, v, mod), (q, k, v)),
    ):
        torch._dynamo.reset()
        with pytest.raises(SpecError, match=wrong):
            run()
    ids[5:] = 8
    documents = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731
    for o in (flex_attention(q, k, v, None, mask), torch.compile(lambda: flex_attention(q, k, v, mod), fullgraph=True, backend="aot_eager")()):
        close(o, attention(q, k, v, None, documents)[0], "o")
    # Elements outside of the part that is read do not matter.
    ids = torch.cat([torch.full((13,), 7), torch.tensor([BIG])])
    close(flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -torch.inf)), attention(q, k, v)[0], "o")
    ids[3] = -(2**31) - 1
    with pytest.raises(SpecError, match="int64"):
        flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -torch.inf))


def test_ids_are_looked_at_once_for_each_version(monkeypatch):
    q, k, v = operands()
    ids = torch.arange(13)
    looks, aminmax = [], torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda x: (looks.append(1), aminmax(x))[1])
    mask = create_block_mask(lambda b, h, i, j: ids[i] >= ids[j], None, None, 9, 13)
    for _ in range(3):
        flex_attention(q, k, v, None, mask)
    assert len(looks) == 1
    ids += 1
    for _ in range(3):
        flex_attention(q, k, v, None, mask)
    assert len(looks) == 2
    with torch.inference_mode():
        other = torch.arange(13)
        flex_attention(q, k, v, lambda s, b, h, i, j: s + other[j] * 0.1)
    known = len(bind._SPANS)
    del ids, mask
    assert len(bind._SPANS) == known - 1


@pytest.mark.parametrize(
    "fn, extents, fits",
    [
        (lambda b, h, q, k: q * k % 2 == 0, (1, 1, 50000, 50000), False),
        (lambda b, h, q, k: q * k % 2 == 0, (1, 1, 40000, 50000), True),
        (lambda b, h, q, k: (q - k) ** 2 < 7, (1, 1, 50000, 50000), False),
        (lambda b, h, q, k: (q - k) ** 2 < 7, (1, 1, 46000, 46000), True),
        (lambda b, h, q, k: (q * 65536 + k) % 3 == 0, (1, 1, 32769, 9), False),
        (lambda b, h, q, k: (q * 65536 + k) % 3 == 0, (1, 1, 32768, 9), True),
        (lambda b, h, q, k: (q << 20) + k > 5, (1, 1, 2049, 9), False),
        (lambda b, h, q, k: -(q * k * k) < 5, (1, 1, 1300, 1300), False),
        (lambda b, h, q, k: (q.int() * k.int()) % 2 == 0, (1, 1, 90000, 90000), True),
        (lambda b, h, q, k: (q * k % 100) * q * 10 > 3, (1, 1, 46000, 46000), True),
        (lambda b, h, q, k: torch.where(q > k, q, 7) * torch.minimum(k, k.new_full((), 9)) > 3, (1, 1, 90000, 90000), True),
        (lambda b, h, q, k: (q.float() * 3).long() + 5 > k, (1, 1, 90000, 90000), True),
        (lambda b, h, q, k: (torch.log(q.float() + 1.0) * 16).long() * 40 > k, (1, 1, 90000, 90000), True),
        (lambda b, h, q, k: (q.float() * q.float()).long() + 5 > k, (1, 1, 90000, 90000), False),
    ],
)
def test_positions_past_32_bits_are_refused(fn, extents, fits):
    mask = sdpa.MaskMod(fn)
    if fits:
        mask.check(extents, (), bind.span)
        return
    with pytest.raises(TracingError, match="an int64 value may range from") as caught:
        mask.check(extents, (), bind.span)
    assert __file__ in caught.value.where and "float()" in caught.value.instead


def test_calls_refuse_integers_that_leave_32_bits():
    q, k, v = operands(k=47000, q=1, h=1)
    mod = lambda s, b, h, i, j: s + (j * j) % 7  # noqa: E731
    mask = create_block_mask(lambda b, h, i, j: (j * j) % 7 < 3, None, None, 1, 47000)
    both = (lambda: flex_attention(q, k, v, mod), lambda: flex_attention(q, k, v, None, mask), lambda: sdpa.explain(q, k, v, mod), lambda: attend(q, k, v, None, mask.mask))
    for run in both:
        with pytest.raises(TracingError, match="an int64 value may range from 0 to 2208906001"):
            run()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="TracingError|super"):
        torch.compile(both[0], fullgraph=True, backend="eager")()
    with pytest.raises(TracingError, match="an int64 value may range"):
        sdpa.numpy.attention(q.numpy(), k.numpy(), v.numpy(), sdpa.ScoreMod(mod))
    k, v = k[:, :, :46000], v[:, :, :46000]
    for _ in range(2):
        close(flex_attention(q, k, v, mod), attention(q, k, v, mod)[0], "o", 1e-4)


def test_what_tensors_hold_decides_where_their_type_does_not():
    q, k, v = operands()
    ids = torch.arange(13)
    small = torch.arange(13, dtype=torch.int32)
    for mod in (lambda s, b, h, i, j: s + (ids[i] * 1000 + ids[j]) % 5, lambda s, b, h, i, j: s + small[i] * j % 5):
        close(flex_attention(q, k, v, mod), attention(q, k, v, mod)[0], "o", 1e-4)
    ids[4] = 3000000
    small[4] = 400000000
    for mod in (lambda s, b, h, i, j: s + (ids[i] * 1000 + ids[j]) % 5, lambda s, b, h, i, j: s + small[i] * j % 5):
        with pytest.raises(TracingError, match="an int64 value may range"):
            flex_attention(q, k, v, mod)
    shift = sdpa.scalar("shift", 5.0)
    moved = lambda s, b, h, i, j: s + (i + shift.int()) % 3  # noqa: E731
    close(flex_attention(q, k, v, moved), attention(q, k, v, lambda s, b, h, i, j: s + (i + 5) % 3)[0], "o", 1e-4)
    shift.value = 2.0**31
    with pytest.raises(TracingError, match="an int64 value may range"):
        flex_attention(q, k, v, moved)


def test_a_scale_or_a_scalar_that_wants_a_gradient_is_refused():
    q, k, v = operands(True)
    t = torch.tensor(0.4, requires_grad=True)
    mask = sdpa.MaskMod(lambda b, h, i, j: i >= j)
    for run in (
        lambda: flex_attention(q, k, v, scale=t),
        lambda: flex_attention(q, k, v, lambda s, *_: s * 2, scale=t * 2),
        lambda: flex_attention(q, k, v, scale=torch.nn.Parameter(torch.ones(1))),
        lambda: attend(q, k, v, None, mask, t),
        lambda: sdpa.explain(q, k, v, scale=t),
        lambda: sdpa.scalar("cap", t),
        lambda: setattr(sdpa.scalar("cap", 1.0), "value", t),
    ):
        with pytest.raises(SpecError, match="a tensor that requires grad"):
            run()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="requires grad"):
        torch.compile(lambda: flex_attention(q, k, v, scale=t), fullgraph=True, backend="eager")()
    for scale in (t.detach(), 0.4, np.float32(0.4), torch.tensor([0.4])):
        close(flex_attention(q, k, v, scale=scale), attention(q, k, v, scale=0.4)[0], "o")
    close(flex_attention(q, k, v, scale=1), attention(q, k, v, scale=1.0)[0], "o")
    for wrong in (torch.ones(2), "x", [1.0]):
        with pytest.raises(SpecError, match="scale: got type"):
            flex_attention(q, k, v, scale=wrong)
    # The alternative that the error suggests has the gradient.
    ours = torch.autograd.grad(flex_attention(q * t, k, v, scale=1.0).square().sum(), t)[0]
    close(ours, torch.autograd.grad(attention(q * t, k, v, scale=1.0)[0].square().sum(), t)[0], "gradient", 1e-4)


def test_declared_types_are_those_of_tensors():
    q, k, v = operands()
    whole = sdpa.ScoreMod.from_text("tensor t[q]: i32; score + f32(t)", t=torch.full((9,), 1.5))
    exact = sdpa.ScoreMod.from_text("tensor t[q]: f32; score + t", t=torch.ones(9, dtype=torch.float64))
    for mod in (whole, exact):
        with pytest.raises(SpecError, match="as declared"):
            flex_attention(q, k, v, mod)
