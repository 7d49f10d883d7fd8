"""State that calls outside of compilers reuse must not change results."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from textbook import attention, close
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import sdpa
from sdpa import eager, exchange, flex_attention, guards, mods, tracing

FACTOR = 2.0


def operands(grad=False, q=9, k=13):
    torch.manual_seed(5)
    return [torch.randn(shape).requires_grad_(grad) for shape in ((2, 4, q, 8), (2, 4, k, 8), (2, 4, k, 8))]


@pytest.fixture
def traces(monkeypatch):
    """Counts traces."""
    seen = []
    trace = tracing.trace
    monkeypatch.setattr(mods.tracing, "trace", lambda *args: (seen.append(args[0]), trace(*args))[1])
    guards._MADE.clear()
    return seen


def check(fn):
    q, k, v = operands()
    close(flex_attention(q, k, v, fn), attention(q, k, v, fn)[0], "o")


def twice(score):
    return score * FACTOR


class Model:
    """Attributes that the score_mods of a model capture."""

    def __init__(self):
        self.cap, self.slopes, self.inner = 3.0, torch.rand(4), [torch.rand(4)]
        self.deep = type("Deep", (), {"settings": {"by": 2.0}})()

    def mod(self, s, b, h, q, k):
        return torch.tanh(s / self.cap) * self.cap + self.slopes[h] * (k - q)


def test_functions_made_anew_are_traced_once(traces):
    slopes, model = torch.rand(4), Model()
    for make in (
        lambda: lambda s, b, h, q, k: s + slopes[h] * (k - q).abs(),
        lambda: lambda s, b, h, q, k: torch.where(q >= k, torch.tanh(s), s) * twice(1.0),
        lambda: lambda s, b, h, q, k: s * model.slopes[h] * model.deep.settings["by"],
        lambda: lambda s, b, h, q, k, by=0.5: s * by * model.inner[0][h],
        lambda: model.mod,
    ):
        traces.clear()
        for _ in range(3):
            check(make())
        assert len(traces) == 1, make


def test_what_a_function_reads_may_change(traces):
    """Each change is detected, and each state is traced exactly once."""
    global FACTOR
    model, slopes, settings, cap = Model(), torch.rand(4), {"by": 2.0}, sdpa.scalar("cap", 3.0)
    values = np.linspace(0, 1, 4, dtype=np.float32)
    number, shift, wrapped = 2.0, 0, sdpa.array(values)
    inner = lambda s: s * number  # noqa: E731

    def mod(s, b, h, q, k):
        return inner(twice(s)) + slopes[h] * (k - q) * (k + shift) + s * settings["by"] * wrapped[h] + torch.tanh(s / cap) * model.cap

    def changes():
        nonlocal number, shift, slopes, inner
        global FACTOR
        yield
        number = 3.0
        yield
        shift = -0.0
        yield
        shift = 0.0
        yield
        slopes = torch.rand(4)
        yield
        slopes.mul_(-1)
        yield
        slopes.data = slopes.data.half()
        yield
        slopes = torch.rand(7)
        yield
        FACTOR = 0.5
        yield
        settings["by"] = 1.0
        yield
        settings["other"] = 1.0
        yield
        values[:] = -1.0
        yield
        cap.value = 0.5
        yield
        model.cap = 2.0
        yield
        inner = lambda s: s - number  # noqa: E731
        yield

    for n, _ in enumerate(changes()):
        q, k, v = operands()
        scaled = lambda s, b, h, i, j: (inner(s * FACTOR) + slopes.float()[h] * (j - i) * (j + shift) + s * settings["by"] * torch.as_tensor(values)[h] + torch.tanh(s / cap.value) * model.cap)  # noqa: E731, B023
        close(flex_attention(q, k, v, mod), attention(q, k, v, scaled)[0], f"after change {n}")
    FACTOR = 2.0
    # One trace per state, except for changes of a tensor of equal type, its values, those of NumPy's array, and the scalar's value.
    assert len(traces) == 11, len(traces)


def test_what_cannot_be_judged_is_traced_each_time(traces):
    table = torch.tensor([1.0, 2.0])

    class Strange:
        def __getitem__(self, at):
            return table[at].item()

    strange, calls = Strange(), []
    for fn in (
        lambda s, b, h, q, k: s * table[0].item(),
        lambda s, b, h, q, k: s * float(table[0]),
        lambda s, b, h, q, k: s * (2.0 if table[0] > 1.5 else 3.0),
        lambda s, b, h, q, k: s * strange[0],
        lambda s, b, h, q, k: s * (table * 2)[0],
        lambda s, b, h, q, k: (calls.append(1), s)[1] * table[0].item(),
        lambda s, b, h, q, k: s * [x for x in table.tolist()][0],
    ):
        for number in (1.0, 5.0):
            table[0] = number
            traces.clear()
            check(fn)
            check(fn)
            assert len(traces) == 2
    assert len(calls) > 4


def test_one_tensor_under_two_names_is_one_parameter():
    for same in (True, False, True):
        first = torch.rand(4)
        second = first if same else torch.rand(4)
        check(lambda s, b, h, q, k: s * first[h] * second[h])


def test_nothing_is_kept_alive():
    bias = torch.randn(9, 13)
    gone = weakref.ref(bias)
    for _ in range(2):
        q, k, v = operands(True)
        flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j]).sum().backward()
    inputs = weakref.ref(q)
    del bias, q, k, v
    gc.collect()
    assert gone() is None and inputs() is None


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operator():
    slopes = torch.rand(4, requires_grad=True)
    mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    q, k, v = operands(True)
    alone = flex_attention(q, k, v, mod)
    gradients = torch.autograd.grad(alone.square().sum(), [q, k, v, slopes])
    with Seen() as seen:
        watched = flex_attention(q, k, v, mod)
        own = torch.autograd.grad(watched.square().sum(), [q, k, v, slopes])
    assert {"sdpa::attention", "sdpa::attention_backward"} <= set(seen.names)
    o = flex_attention(q, k, v, mod)
    with Seen() as behind:
        late = torch.autograd.grad(o.square().sum(), [q, k, v, slopes])
    assert "sdpa::attention_backward" in behind.names and all(torch.equal(x, y) for x, y in zip(late, gradients))
    with torch.device("cpu"):
        there = flex_attention(q, k, v, mod)
    assert torch.equal(alone, watched) and torch.equal(alone, there)
    for x, y in zip(gradients, own):
        assert torch.equal(x, y)
    assert "Attention" in type(alone.grad_fn).__name__ and "sdpa" not in type(alone.grad_fn).__name__


def test_tracers_see_the_operator():
    q, k, v = operands()
    alone = flex_attention(q, k, v)
    scripted = torch.jit.trace(lambda q, k, v: flex_attention(q, k, v), (q, k, v))
    assert "sdpa::attention" in str(scripted.graph) and torch.equal(scripted(q, k, v), alone)
    graph = make_fx(lambda q, k, v: flex_attention(q, k, v))(q, k, v)
    assert "sdpa.attention" in graph.code and torch.equal(graph(q, k, v), alone)
    tracked = operands(True)
    wanted = torch.autograd.grad(flex_attention(*tracked).square().sum(), tracked)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        flex_attention(*tracked).square().sum().backward()
    for x, y in zip(tracked, wanted):
        close(x.grad, y, "gradient")


@pytest.mark.parametrize("turn", [lambda x: x.clone(), lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x, lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() == 4 else x])
def test_what_was_saved_may_come_back_from_elsewhere(turn):
    q, k, v = operands(True)
    bias = torch.randn(4, 9, 13, requires_grad=True)
    run = lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j]).square().sum()  # noqa: E731
    wanted = torch.autograd.grad(run(), [q, k, v, bias])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turn):
        ours = torch.autograd.grad(run(), [q, k, v, bias])
    for x, y in zip(ours, wanted):
        close(x, y, "gradient")


def test_views_gradients_and_flags_of_every_kind():
    q, k, v = operands()
    mod = lambda s, b, h, i, j: s * slopes[h]  # noqa: E731
    slopes = torch.rand(4)
    for needs in (False, True, False):
        slopes.requires_grad_(needs)
        assert flex_attention(q, k, v, mod).requires_grad == needs
        wanting = q.clone().requires_grad_()
        flex_attention(wanting, k, v, mod).sum().backward()
        assert wanting.grad is not None and (slopes.grad is not None) == needs
        slopes.grad = None
        with torch.no_grad():
            assert not flex_attention(q, k, v, mod).requires_grad
        with torch.inference_mode():
            assert flex_attention(q, k, v, mod).is_inference()
    lean = torch._neg_view(q)
    assert lean.is_neg()
    close(flex_attention(lean, k, v), attention(lean.resolve_neg(), k, v)[0], "a view of negative numbers")
    odd = torch.randn(2 * 4 * 9 * 8 + 1)[1:].view(2, 4, 9, 8).requires_grad_()
    for up in (torch.randn(2, 4, 9, 8), torch.ones(()).expand(2, 4, 9, 8), torch.randn(2, 4, 8, 9).transpose(2, 3), torch._neg_view(torch.randn(2, 4, 9, 8)), torch.randn(2 * 4 * 9 * 8 + 1)[1:].view(2, 4, 9, 8)):
        for _ in range(2):
            ours = torch.autograd.grad(flex_attention(odd, k, v), odd, up)[0]
            close(ours, torch.autograd.grad(attention(odd, k, v)[0], odd, up.double())[0], "gradient")
    x = odd.clone()
    o = flex_attention(x, k, v)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_forward_mode_is_refused():
    q, k, v = operands()
    with pytest.raises(sdpa.UnsupportedError, match="forward mode"):
        torch.func.jvp(lambda q: flex_attention(q, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(flex_attention(q, k, v), flex_attention(q, k, v))


def test_transforms_are_refused():
    q, k, v = operands()
    for of in (torch.func.grad, torch.vmap):
        with pytest.raises(sdpa.UnsupportedError, match="transforms of torch.func"):
            of(lambda q: flex_attention(q, k, v).sum())(q[None] if of is torch.vmap else q)
    # Attention whose operands are not transformed is computed.
    assert torch.equal(torch.vmap(lambda x: x + flex_attention(q, k, v))(torch.zeros(2, *q.shape))[1], flex_attention(q, k, v))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    q, k, v = operands()
    with pytest.raises(sdpa.SpecError, match="key: got a nested tensor"):
        flex_attention(q, torch.nested.nested_tensor([k[0], k[1]]), v)


def test_as_many_kinds_of_calls_are_kept_as_are_used():
    q, k, v = operands(k=700)
    for n in range(1, 600):
        flex_attention(q, k[:, :, :n], v[:, :, :n])
    assert len(eager._WAYS) <= eager.op.MOST


def test_tensors_are_looked_at_by_attributes_as_by_the_exchange(monkeypatch):
    """As for a PyTorch before 2.10."""
    slopes, sink = torch.rand(4).half().requires_grad_(), torch.rand(4, requires_grad=True)
    sparse, half = torch.eye(9).to_sparse(), torch.randn(2, 4, 9, 8).half()
    mod, given = lambda s, b, h, i, j: s + slopes[h] * (j - i), operands(True)  # noqa: E731
    wrt, results = [*given, slopes], []
    for of in (eager.EXCHANGE, exchange.Attributes()):
        monkeypatch.setattr(eager, "_look", of.look)
        monkeypatch.setattr(eager, "_run", of.run)
        o = flex_attention(*given, mod)
        capped = sdpa.flex.attend(*[x.detach() for x in given], None, None, sink=sink)[0]
        results.append([o, *torch.autograd.grad(o.square().sum(), wrt), capped])
        assert of.look((sparse,)) is None and of.look((torch._neg_view(half),)) is None and of.look((half,)) != of.look((half[:, :, 1:],))
        assert of.look((half,)) == of.look((half.clone(),)) != of.look((half.bfloat16(),)) != of.look((half.bfloat16().requires_grad_(),))
    for x, y in zip(*results):
        assert torch.equal(x, y)


def test_a_small_call_is_the_same_on_every_thread():
    q, k, v = operands(True)
    before = torch.get_num_threads()
    results = []

    def run():
        o = flex_attention(q, k, v)
        results.append([o.detach(), *torch.autograd.grad(o.square().sum(), [q, k, v])])

    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            run()
            worker = threading.Thread(target=run)
            worker.start()
            worker.join(60)
    finally:
        torch.set_num_threads(before)
    assert len(results) == 4
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0]))
