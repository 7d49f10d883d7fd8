"""The native module over NumPy arrays, against the formula in f64."""

import multiprocessing
import threading

import numpy as np
import pytest

import sdpa
from sdpa import MaskMod, ScoreMod, SpecError, array
from sdpa.numpy import attention, attention_backward

rng = np.random.default_rng(5)


def book(q, k, v, score_mod=None, mask=None, scale=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = np.ogrid[tuple(slice(n) for n in s.shape)]
    s = score_mod(s, *places) if score_mod else s
    s = np.where(mask(*places), s, -np.inf) if mask else s
    top = np.where(np.isneginf(s.max(-1)), 0, s.max(-1))
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(s - top[..., None]).sum(-1)) + top
    return np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None]) @ v, lse


def tensors(dtype=np.float32, b=2, h=4, hk=2, q=37, k=53, d=16, dv=24):
    return [rng.standard_normal(shape).astype(dtype) for shape in ((b, h, q, d), (b, hk, k, d), (b, hk, k, dv))]


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 4e-3)])
def test_output_and_stats(dtype, tolerance):
    q, k, v = tensors(dtype)
    slopes = rng.random(4).astype(np.float32)
    mod, mask = (lambda s, b, h, i, j: s + slopes[h] * (j - i)), (lambda b, h, i, j: (j <= i + 9) & ((i - j) // 3 % 2 == 0))
    o, stats = attention(q, k, v, ScoreMod(lambda s, b, h, i, j: s + array(slopes)[h] * (j - i)), MaskMod(mask))
    wanted, lse = book(q, k, v, mod, mask)
    assert o.dtype == dtype and np.abs(o - wanted).max() < tolerance
    assert np.array_equal(np.isneginf(stats), np.isneginf(lse)) and np.abs(np.nan_to_num(stats - lse, nan=0)).max() < 1e-4


def test_gradients_by_differences():
    q, k, v = tensors(b=1, q=7, k=9, d=4, dv=5)
    rate, d_o = rng.random(4).astype(np.float32), rng.standard_normal((1, 4, 7, 5)).astype(np.float32)
    of = lambda rate: ScoreMod(lambda s, b, h, i, j: s * array(rate)[h])  # noqa: E731
    mask = MaskMod(lambda b, h, i, j: j <= i + 2)
    o, stats = attention(q, k, v, of(rate), mask)
    dq, dk, dv, more = attention_backward(d_o, q, k, v, o, stats, of(rate), mask)
    loss = lambda q, k, v, r: (book(q, k, v, lambda s, b, h, i, j: s * r[h], lambda b, h, i, j: j <= i + 2)[0] * d_o).sum()  # noqa: E731
    given = [np.asarray(x, np.float64) for x in (q, k, v, rate)]
    for n, (ours, at) in enumerate(zip([dq, dk, dv, more["s0"]], [(0, 1, 3, 2), (0, 1, 4, 1), (0, 0, 2, 3), (2,)])):
        up, down = [x.copy() for x in given], [x.copy() for x in given]
        up[n][at] += 1e-5
        down[n][at] -= 1e-5
        assert ours[at] == pytest.approx((loss(*up) - loss(*down)) / 2e-5, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("b, n, m", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_without_batch_entries_queries_or_keys(b, n, m):
    for dtype in (np.float32, np.float16):
        q, k, v = tensors(dtype, b=b, q=n, k=m)
        bias = rng.random((4, m)).astype(np.float32)
        mod, mask = ScoreMod(lambda s, b, h, i, j: s + array(bias)[h, j]), MaskMod(lambda b, h, i, j: j <= i)
        o, stats = attention(q, k, v, mod, mask)
        assert (o.dtype, o.shape, stats.shape) == (dtype, (b, 4, n, 24), (b, 4, n))
        assert not o.any() and np.isneginf(stats).all()
        gradients = attention_backward(np.ones_like(o), q, k, v, o, stats, mod, mask)
        for x, gradient in zip((q, k, v, bias), (*gradients[:3], gradients[3]["s0"])):
            assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape) and not gradient.any()


def test_views_are_read_where_they_are_and_others_are_copied():
    q, k, v = tensors()
    wanted = book(q, k, v)[0]
    views = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    backwards = [np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in (q, k, v)]
    spread = [np.broadcast_to(x[:, :1], (2, 2, *x.shape[2:])) for x in (k, v)]
    assert np.abs(attention(*views)[0] - wanted).max() < 1e-5 and np.abs(attention(*backwards)[0] - wanted).max() < 1e-5
    assert np.abs(attention(q, *spread)[0] - book(q, *spread)[0]).max() < 1e-5
    whole = rng.standard_normal((2, 37, 3, 4, 16)).astype(np.float32)
    parts = [whole[:, :, n].swapaxes(1, 2) for n in range(3)]
    assert np.abs(attention(*parts)[0] - book(*parts)[0]).max() < 1e-5


class Elsewhere:
    """Memory of another library, which is accessible through DLPack capsules only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_capsules_are_read_without_a_copy():
    q, k, v = tensors()
    slopes = rng.random(4).astype(np.float32)
    q.flags.writeable = False
    mod = ScoreMod.from_text("tensor t[head]: f32; score * t", t=slopes)
    o, _ = attention(Elsewhere(q), Elsewhere(k), Elsewhere(v.swapaxes(1, 2).copy().swapaxes(1, 2)), mod)
    assert np.abs(o - book(q, k, v, lambda s, b, h, i, j: s * slopes[h])[0]).max() < 1e-5


def test_bad_input_is_told_at_once():
    q, k, v = tensors()
    with pytest.raises(SpecError) as told:
        attention(q[0], k.astype(np.float64), v.astype(np.float16))
    assert [field for field, _, _ in told.value.errors] == ["q shape", "k dtype", "v dtype"]
    with pytest.raises(SpecError, match="heads"):
        attention(q, np.repeat(k, 3, 1)[:, :3], np.repeat(v, 3, 1)[:, :3])
    with pytest.raises(SpecError, match="at least 37 elements along the axis q"):
        attention(q, k, v, ScoreMod(lambda s, b, h, i, j: s + array(np.zeros(36, np.float32))[i]))
    with pytest.raises(SpecError, match=r"a table of shape \(4, 19\)"):
        attention(q, k, v, ScoreMod.from_text("relative-bias:4,9", rel=np.zeros((4, 18), np.float32)))
    with pytest.raises(SpecError, match="attn_scale"):
        attention(q, k, v, scale=float("nan"))
    with pytest.raises(SpecError, match="dims"):
        attention(q[:, :0], k, v)
    with pytest.raises(SpecError, match="dim"):
        attention(q[..., :0], k[..., :0], v)


def test_threads_and_forks():
    q, k, v = tensors(h=8, hk=8, q=300, k=300)
    wanted, failed = attention(q, k, v)[0], []

    def again(threads):
        for _ in range(10):
            if np.abs(attention(q, k, v, threads=threads)[0] - wanted).max() > 1e-5:
                failed.append(threads)

    workers = [threading.Thread(target=again, args=(1 + n % 3,)) for n in range(4)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert not failed and not any(w.is_alive() for w in workers)
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    child = fork.Process(target=lambda: results.put(float(np.abs(attention(q, k, v, threads=2)[0] - wanted).max())))
    child.start()
    assert results.get(timeout=60) < 1e-5
    child.join(10)
    assert child.exitcode == 0


def test_errors_go_through_pickle():
    import pickle

    for error in (SpecError([("a", "1", "2")]), sdpa.UnsupportedError("cpu", ["no"])):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    try:
        ScoreMod(lambda s, *_: int(s))
    except sdpa.TracingError as e:
        assert str(pickle.loads(pickle.dumps(e))) == str(e)
