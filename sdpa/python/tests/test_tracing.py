"""Traced functions against the functions themselves, on numbers. Needs only NumPy."""

import math
import random

import numpy as np
import pytest

import sdpa
from sdpa import MaskMod, ScoreMod, SpecError, TracingError, array, scalar
from sdpa.numpy import attention
from sdpa.values import rounded


def modified(mod, score, at, extents=(2, 3, 11, 13)):
    """Evaluates a traced score_mod for one score at one position: attention over one key, whose stats equal that score."""
    b, h, q, k = at
    keep = MaskMod.from_text(f"batch == {b} & head == {h} & q == {q} & k == {k}")
    query, key = np.full((*extents[:3], 1), score, np.float32), np.ones((extents[0], extents[1], extents[3], 1), np.float32)
    return float(attention(query, key, key, mod, keep, scale=1.0)[1][b, h, q])


def check(fn, scores=(-3.5, -0.25, 0.0, 1.75), wanted=None, places=24):
    rng = random.Random(7)
    mod = ScoreMod(fn)
    for _ in range(places):
        at = tuple(rng.randrange(n) for n in (2, 3, 11, 13))
        score = rng.choice(scores)
        ours, theirs = modified(mod, score, at), float((wanted or fn)(score, *at))
        assert ours == pytest.approx(theirs, rel=2e-6, abs=2e-6, nan_ok=True), f"{mod} of {score} at {at}"


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, q, k: s + 1,
        lambda s, b, h, q, k: 2.5 - s / 3,
        lambda s, b, h, q, k: s + (q - k),
        lambda s, b, h, q, k: s + (q - k) // 3,
        lambda s, b, h, q, k: s + (q - k) % 3,
        lambda s, b, h, q, k: s + (q - k) // -3,
        lambda s, b, h, q, k: s + (q - k) % -3,
        lambda s, b, h, q, k: s + (q - 5) // (k - 20),
        lambda s, b, h, q, k: s + (q - 5) % (k - 20),
        lambda s, b, h, q, k: s + 7 // (k - 20) + 7 % (q - 30),
        lambda s, b, h, q, k: s // 0.75,
        lambda s, b, h, q, k: (s * 0 + 1.0) // 0.1 + (s * 0 - 1.0) // 0.1,
        lambda s, b, h, q, k: s + (q - 7) ** 2.0 / 3 + (q - 7) ** 2 // 3,
        lambda s, b, h, q, k: s % 0.75,
        lambda s, b, h, q, k: s % -0.75,
        lambda s, b, h, q, k: s + (q - k) / 4,
        lambda s, b, h, q, k: s + (q - 7) ** 2 + (h + 1) ** 3,
        lambda s, b, h, q, k: abs(s) ** 1.5,
        lambda s, b, h, q, k: -s * abs(q - k),
        lambda s, b, h, q, k: s * (k <= q),
        lambda s, b, h, q, k: s + ((k <= q) & (q < 7)) * 2 + ((k > 3) | (h == 1)) * 4.0,
        lambda s, b, h, q, k: s + ((k <= q) ^ (q < 7)) * 2,
        lambda s, b, h, q, k: s + (k << 2) + ((q - k) >> 1),
        lambda s, b, h, q, k: s * 1e-5 + 1e-3 * b - 1e-7,
        lambda s, b, h, q, k: 4.0,
        lambda s, b, h, q, k: s * np.float32(0.5) + np.int64(3) * np.float64(0.25) + np.float64(2) * s,
        lambda s, b, h, q, k: q - k,
        lambda s, b, h, q, k: math.floor(s) + math.ceil(s) * 10 + math.trunc(s) * 100,
    ],
)
def test_operators_mean_what_they_mean_in_python(fn):
    check(fn)


def test_equal_values_are_written_once_and_equal_functions_alike():
    def mod(s, b, h, q, k):
        return s * (q - k) + (q - k)

    assert ScoreMod(mod).text.count("q - k") == 1
    assert ScoreMod(mod).text == ScoreMod(lambda s, b, h, q, k: s * (q - k) + (q - k)).text
    x = ScoreMod(lambda s, *_: sum((s for _ in range(300)), 0.0))
    assert "score" in str(x)
    deep = lambda s, *_: [s := s * 1.5 + s for _ in range(40)][-1]  # noqa: E731
    assert len(ScoreMod(deep).text) < 3000


def test_arrays_are_declared_by_the_places_that_they_are_read_at():
    rng = np.random.default_rng(3)
    slopes, bias, kind = rng.random(3, np.float32), rng.random((3, 11, 13), np.float32), rng.integers(0, 2, (2, 13))
    mod = ScoreMod(lambda s, b, h, q, k: s + array(slopes)[h] * (k - q) + array(bias)[h, q, k] + array(bias.transpose(2, 0, 1))[k][h, q] + array(kind)[b, k])
    assert [(t.axes, t.dtype) for t in mod.tensors][:2] == [(("head",), "f32"), (("head", "q", "k"), "f32")]
    check(mod, wanted=lambda s, b, h, q, k: s + slopes[h] * (k - q) + 2 * bias[h, q, k] + kind[b, k])
    one = ScoreMod(lambda s, b, h, q, k: s + array(bias)[1, q, -1])
    assert [t.axes for t in one.tensors] == [("q",)]
    check(one, wanted=lambda s, b, h, q, k: s + bias[1, q, -1])
    long = rng.random(30, np.float32)
    shifted = lambda s, b, h, q, k: s + array(long)[q + 5] + array(long)[2 + k + 3 - 1]  # noqa: E731
    check(shifted, wanted=lambda s, b, h, q, k: s + long[q + 5] + long[k + 4])


def test_a_scalar_changes_without_another_program():
    cap = scalar("cap", 4.0)
    mod = ScoreMod(lambda s, *_: cap * s / (1 + cap))
    text = mod.text
    for x in (4.0, 9.0):
        cap.value = x
        assert modified(mod, 2.0, (0, 0, 0, 0)) == pytest.approx(2 * x / (1 + x))
    assert mod.text == text and modified(ScoreMod.from_text("scalar cap = 2.0; score * cap", cap=5.0), 2.0, (0, 0, 0, 0)) == 10


def test_text_takes_the_place_of_a_function():
    mod = ScoreMod.from_text("tensor slopes[head]: f32; score + slopes * f32(k - q)", slopes=np.arange(3, dtype=np.float32))
    assert modified(mod, 1.0, (1, 2, 3, 7)) == 9
    assert str(ScoreMod.from_text("softcap:30")) == "softcap:30"
    with pytest.raises(SpecError, match=r"parameter slopes: got nothing, expected f32 over \[head\]"):
        ScoreMod.from_text("tensor slopes[head]: f32; score + slopes")
    with pytest.raises(SpecError, match="parameter slope: got a value, expected one of the declared parameters: cap"):
        ScoreMod.from_text("softcap:30", slope=3.0)
    with pytest.raises(SpecError, match="score_mod: got score \\+"):
        ScoreMod.from_text("score +")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64])
def test_integers_have_the_width_of_their_array(dtype):
    ends = [np.iinfo(dtype).min, np.iinfo(dtype).max] if dtype != np.int64 else [-40000, 40000]
    x = np.array([*ends, ends[1] - 1, 0, 1, 2, 3, 100, 7, 5, 90], dtype)
    y = np.array([*ends, ends[1] - 1, 1, 2, 3, 4, 100, 7, 11, 90, 33, 1], dtype)
    for fn in (lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: (x + y) % 7, lambda x, y: -x, lambda x, y: abs(x) // 3, lambda x, y: x < y):
        mod = ScoreMod(lambda s, b, h, q, k: s + fn(array(x)[q], array(y)[k]))  # noqa: B023
        check(mod, wanted=lambda s, b, h, q, k: s + float(fn(x[q : q + 1], y[k : k + 1])[0]), places=40)  # noqa: B023


def test_int64_that_an_i32_does_not_hold_is_refused():
    ids = np.array([7, 7 + 2**32] + [0] * 11)
    zeros = np.zeros((1, 1, 13, 1), np.float32)
    with pytest.raises(SpecError, match="int64 tensor of elements from 0 to 4294967303"):
        attention(zeros, zeros, zeros, mask=MaskMod(lambda b, h, q, k: array(ids)[q] == array(ids)[k]))
    squares = MaskMod(lambda b, h, q, k: (q * k) % 2 == 0)
    squares.check((1, 1, 40000, 50000), (), lambda _: None)
    with pytest.raises(TracingError, match="from 0 to 2499900001") as told:
        squares.check((1, 1, 50000, 50000), (), lambda _: None)
    assert "q * k" in told.value.where
    # Small document ids are multiplied without conversion.
    ids[1] = 8
    product = ScoreMod(lambda s, b, h, q, k: s + array(ids)[q] * array(ids)[k])
    check(product, wanted=lambda s, b, h, q, k: s + ids[q] * ids[k])
    ids[:] = 50000
    with pytest.raises(TracingError, match="an int64 value may range"):
        modified(product, 1.0, (0, 0, 0, 0))


def test_what_is_known_of_one_value_is_not_taken_for_another_of_its_text():
    def mod(s, b, h, q, k):
        down = (q - k).div(4, rounding_mode="trunc")
        return s + (q - k) // 4 * 10 + down % 3 + (q - k).div(4, rounding_mode="trunc") // 2 * 100

    cut = lambda q, k: math.trunc((q - k) / 4)  # noqa: E731
    check(mod, wanted=lambda s, b, h, q, k: s + (q - k) // 4 * 10 + cut(q, k) % 3 + cut(q, k) // 2 * 100)
    # A product of int32 wraps, so it is no longer known to be positive.
    wraps = lambda s, b, h, q, k: s + ((q.int() + 1) * 1000000007 * (k.int() + 2)) % 5  # noqa: E731
    check(wraps, wanted=lambda s, b, h, q, k: s + (((q + 1) * 1000000007 * (k + 2) + 2**31) % 2**32 - 2**31) % 5)


def test_nan_goes_through_extremes():
    x = np.array([1.0, np.nan, -2.0, 0.0, np.nan, 3.0, 1.0, 0.5, np.nan, 2.0, 9.0], np.float32)
    for fn, wanted in (
        (lambda s, x: s.maximum(x), np.maximum), (lambda s, x: s.minimum(x), np.minimum), (lambda s, x: s.clamp(x), np.maximum), (lambda s, x: s.fmax(x), np.fmax),
        (lambda s, x: x.relu() + s, lambda s, x: np.maximum(x, 0) + s), (lambda s, x: x.clamp(-1.0, 1.0) + s, lambda s, x: np.clip(x, -1, 1) + s),
    ):  # fmt: skip
        check(lambda s, b, h, q, k: fn(s, array(x)[q]), wanted=lambda s, b, h, q, k: float(wanted(np.float32(s), x[q])))  # noqa: B023


def test_functions_near_0_keep_their_digits():
    for name, wanted in (("expm1", math.expm1), ("log1p", math.log1p), ("sigmoid", lambda x: 1 / (1 + math.exp(-x)))):
        for score in (1e-8, -1e-8, 3e-5, -3e-5, 0.25, -0.75, 20.0, -0.999, *([-30.0] if name != "log1p" else [])):
            made = modified(ScoreMod(lambda s, *_: getattr(s, name)()), score, (0, 0, 0, 0))  # noqa: B023
            assert made == pytest.approx(wanted(float(np.float32(score))), rel=1e-6), f"{name} of {score}"


def test_constants_are_rounded_once():
    rng = random.Random(5)
    numbers = [1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0**-149 * 1.5, 2.0**-150, 3e-46, 1e-42, 0.1, -0.1, 16777217, 3.4028234663852886e38]
    for x in [*numbers, *[rng.uniform(-1, 1) * 10.0 ** rng.randint(-44, 38) for _ in range(200)]]:
        near = rounded(float(x))
        assert near == float(np.float32(x)), x
        assert modified(ScoreMod(lambda s, *_: s * 0 + x), 1.0, (0, 0, 0, 0)) == near  # noqa: B023


def kept(mask, extents=(2, 3, 11, 13)):
    """Returns the keys that a mask allows: queries are 0, and the value of each key is 1 in a column of its own."""
    query = np.zeros((*extents[:3], 1), np.float32)
    key = np.zeros((extents[0], extents[1], extents[3], 1), np.float32)
    value = np.broadcast_to(np.eye(extents[3], dtype=np.float32), (*extents[:2], extents[3], extents[3]))
    return attention(query, key, value, mask=mask)[0] > 0


causal, near = (lambda b, h, q, k: q >= k), (lambda b, h, q, k: q - k < 4)


@pytest.mark.parametrize(
    "fn",
    [
        causal,
        sdpa.and_masks(causal, near),
        sdpa.or_masks(sdpa.and_masks(causal, near), lambda b, h, q, k: k < 2),
        lambda b, h, q, k: (q + k) % 3 == h,
        lambda b, h, q, k: ((q - k) // 4 % 2 == 0) & ~(k == 5),
        lambda b, h, q, k: (q > k) ^ (b == 1),
        lambda b, h, q, k: (q > k) == (h > 0),
        lambda b, h, q, k: (q > k) != (h > 0),
        sdpa.noop_mask,
        sdpa.and_masks(),
        sdpa.or_masks(),
    ],
)
def test_masks_keep_what_their_functions_keep(fn):
    extents = (2, 3, 11, 13)
    wanted = np.broadcast_to(np.asarray(fn(*np.ogrid[tuple(slice(n) for n in extents)])), extents)
    assert np.array_equal(kept(MaskMod(fn)), wanted)


def test_a_causal_mask_is_the_same_whoever_writes_it():
    query, texts = np.zeros((1, 1, 4, 1), np.float32), (MaskMod(causal), MaskMod.from_text("causal"))
    assert [attention(query, query, query + 1, mask=m)[1].tolist() for m in texts] == [[[np.log(np.float32([1, 2, 3, 4])).tolist()]]] * 2


def _branch(s, b, h, q, k):
    if q > k:
        return s
    return s * 2


@pytest.mark.parametrize(
    "fn, what, instead",
    [
        (_branch, "true or false", "torch.where"),
        (lambda s, b, h, q, k: s if 0 <= q < k else 0, "true or false", "chained"),
        (lambda s, b, h, q, k: s + q.item(), "item", "index"),
        (lambda s, b, h, q, k: s + float(q), "a number", "traced"),
        (lambda s, b, h, q, k: s + np.zeros(9)[q], "an index", r"sdpa\.array"),
        (lambda s, b, h, q, k: s + array(np.zeros(9))[q - k], "a gather", "bias"),
        (lambda s, b, h, q, k: s + array(np.zeros(9))[q - 1], "a gather", "bias"),
        (lambda s, b, h, q, k: s + array(np.zeros((9, 9)))[q], "2 axes", "every axis"),
        (lambda s, b, h, q, k: s + array(np.zeros((9, 9)))[q, q], "twice", "diagonal"),
        (lambda s, b, h, q, k: s + array(np.zeros((9, 9)))[q, k, h], "indexed 3 times", "one index"),
        (lambda s, b, h, q, k: s + array(np.zeros(9, np.complex64))[q], "complex64", "convert"),
        (lambda s, b, h, q, k: (q > k) + (q > 2), "two bools", "&"),
        (lambda s, b, h, q, k: s & 1, "`&` is applied to float32", "compare"),
        (lambda s, b, h, q, k: s + (q ^ (k * 0.5)), "`\\^` is applied to float32", "compare"),
        (lambda s, b, h, q, k: s.softmax(), "softmax", "attention takes the softmax"),
        (lambda s, b, h, q, k: s.sigmod(), "sigmod", "the nearest name is `sigmoid`; write it with operators"),
        (lambda s, b, h, q, k: s.atan2(q), "atan2", "compute the angles before"),
        (lambda s, b, h, q, k: s.xyzzy(), "xyzzy", "counterpart; write it with operators"),
        (lambda s, b, h, q, k: np.tanh(s), "NumPy's `tanh`", r"x\.tanh"),
        (lambda s, b, h, q, k: s + array(np.zeros(9))[q], "float64", "convert"),
        (lambda s, b, h, q, k: ~s, "`~` is applied to float32", "compare"),
        (lambda s, b, h, q, k: q**k, "power", "float"),
        (lambda s, b, h, q, k: q + 2**31, "does not fit an i32", "float"),
        (lambda s, b, h, q, k: "x", "returns str", "arguments"),
        (lambda s, b, h, q, k: s[0], "indexed", "one number"),
        (lambda s, b, h, q, k: s.detach(), "autograd", "gradients"),
    ],
)
def test_what_has_no_counterpart_is_told_with_its_line(fn, what, instead):
    with pytest.raises(TracingError, match=what) as told:
        ScoreMod(fn)
    assert __file__ in told.value.where and "`" in told.value.where
    assert __import__("re").search(instead, str(told.value))


def test_values_do_not_leave_their_function():
    kept = []
    ScoreMod(lambda s, *_: kept.append(s) or s)
    with pytest.raises(TracingError, match="outside of its function"):
        ScoreMod(lambda s, *_: s + kept[0])
    with pytest.raises(TracingError, match="nothing is traced"):
        scalar("cap", 3.0) + 1
    with pytest.raises(TracingError, match="named 'cap'"):
        ScoreMod(lambda s, *_: s * scalar("cap", 3.0) + scalar("cap", 4.0))
    with pytest.raises(TracingError, match="returns a number"):
        MaskMod(lambda b, h, q, k: q - k)
    with pytest.raises(SpecError, match="score_mod: got int"):
        ScoreMod(3)


def test_block_masks_are_whole():
    mask = sdpa.create_block_mask(lambda b, h, q, k: q >= k, None, 4, 10, 12)
    assert mask.shape == (1, 4, 10, 12) and mask._adjust(3, 5).seq_lengths == (3, 5)
    with pytest.raises(SpecError, match="Q_LEN: got -1"):
        sdpa.create_block_mask(sdpa.noop_mask, 1, 1, -1, 12)
