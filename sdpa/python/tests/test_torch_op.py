"""The operator inside of PyTorch: its own checks, compilation, threads, forks."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch
from textbook import attention, close

import sdpa
import sdpa.op
from sdpa import create_block_mask, flex_attention
from sdpa.mods import joined

SLOPES = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
MOD = sdpa.ScoreMod(lambda s, b, h, q, k: torch.tanh(s / sdpa.scalar("cap", 20.0)) * 20 + SLOPES[h] * (k - q))
MASK = create_block_mask(lambda b, h, q, k: q + 16 >= k, None, None, 37, 53)


def operands(grad=True):
    return [torch.randn(shape).requires_grad_(grad) for shape in ((2, 4, 37, 16), (2, 2, 53, 16), (2, 2, 53, 24))]


@pytest.mark.parametrize("grad, mode", [(True, 2), (False, 0), (False, 1)])
@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("mod", [None, MOD])
def test_opcheck(grad, mode, bshd, mod):
    q, k, v = operands()
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if bshd else q
    qkv = [x if grad else x.detach() for x in (q, k, v)]
    params = [] if mod is None else [SLOPES if grad else SLOPES.detach()]
    call = (*qkv, params, [] if mod is None else [20.0], joined(mod, MASK.mask)[0], 0.25, mode, list(range(len(params))) if grad else [])
    torch.library.opcheck(torch.ops.sdpa.attention, call)
    if mode == 1:
        o, stats = torch.ops.sdpa.attention(*call)
        back = (torch.randn_like(o), *qkv, o, stats, *call[3:7], list(range(len(params))))
        torch.library.opcheck(torch.ops.sdpa.attention_backward, back)


def test_the_operator_takes_none_for_an_empty_list():
    q, k, v = operands()
    program = joined(None, MASK.mask)[0]
    made = []
    for empty in ([], None):
        torch.library.opcheck(torch.ops.sdpa.attention, (q, k, v, empty, empty, program, 0.25, 2, empty))
        o, stats = torch.ops.sdpa.attention(q, k, v, empty, empty, program, 0.25, 2, empty)
        d_o = torch.linspace(-1, 1, o.numel()).view(o.shape)
        made.append((o, *torch.autograd.grad(o, (q, k, v), d_o)))
        torch.library.opcheck(torch.ops.sdpa.attention_backward, (d_o, *(x.detach() for x in (q, k, v, o, stats)), empty, empty, program, 0.25, empty))
    assert all(torch.equal(x, y) for x, y in zip(*made))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole(backend):
    torch._dynamo.reset()
    q, k, v = operands()
    run = lambda q, k, v: flex_attention(q * 2, k, v, MOD, MASK, enable_gqa=True) + 1  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    ours, theirs = compiled(q, k, v), run(q, k, v)
    assert torch.equal(ours, theirs)
    up = torch.randn_like(ours)
    for x, y in zip(torch.autograd.grad(ours, [q, k, v, SLOPES], up), torch.autograd.grad(theirs, [q, k, v, SLOPES], up)):
        close(x, y, "gradient")
    MOD.scalars[0].value = 3.0
    assert torch.equal(compiled(q, k, v), run(q, k, v))
    MOD.scalars[0].value = 20.0


def _capped(s, b, h, q, k):
    return torch.tanh(s / MOD.scalars[0]) * MOD.scalars[0]


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, q, k: torch.where((q - k) // 3 % 2 == 0, s * 2, -float("inf")),
        lambda s, b, h, q, k: s + SLOPES[h] * (k - q).abs(),
        lambda s, b, h, q, k: s * SLOPES[2] + torch.clamp(s.exp2(), max=4.0),
        _capped,
    ],
)
def test_functions_are_traced_in_compiled_ones(fn):
    torch._dynamo.reset()
    q, k, v = operands()
    run = lambda q, k, v: flex_attention(q, k, v, fn, create_block_mask(lambda b, h, i, j: i + 20 >= j, None, None, 37, 53), enable_gqa=True)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(q, k, v), run(q, k, v)
    assert torch.equal(ours, theirs)
    up = torch.randn_like(ours)
    both = [torch.autograd.grad(o, [q, k, v, SLOPES], up, allow_unused=True) for o in (ours, theirs)]
    for x, y in zip(*both):
        assert (x is None) == (y is None)
        if x is not None:
            close(x, y, "gradient")


def test_a_compiled_function_sees_what_changes():
    torch._dynamo.reset()
    q, k, v = operands(False)
    settings = {"factor": 2.0}
    run = lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s * settings["factor"], enable_gqa=True)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for factor in (2.0, 3.0, 5.0):
        settings["factor"] = factor
        assert torch.equal(compiled(), run())
    wrong = torch.compile(lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s if i > j else 0.0, enable_gqa=True), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"torch\.where|TracingError"):
        wrong()


def test_second_derivatives_are_refused():
    q, k, v = operands()
    (first,) = torch.autograd.grad(flex_attention(q, k, v, enable_gqa=True).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()


def test_two_threads_train_at_once():
    def once(seed, out):
        torch.manual_seed(seed)
        q, k, v = operands()
        o = flex_attention(q, k, v, MOD, MASK, enable_gqa=True)
        wanted = attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s / 20) * 20 + SLOPES.detach()[h] * (j - i), lambda b, h, i, j: i + 16 >= j)[0]
        for x, y in zip(torch.autograd.grad(o.sum(), [q, k, v]), torch.autograd.grad(wanted.sum(), [q, k, v])):
            close(x, y, "gradient", 1e-4)
        out.append(seed)

    done = []
    workers = [threading.Thread(target=lambda n=n: [once(9 * n + m, done) for m in range(6)]) for n in range(3)]
    [w.start() for w in workers]
    [w.join(120) for w in workers]
    assert len(done) == 18


FORK = """
import os, threading
import torch
from test_torch_op import MASK, MOD, operands
from sdpa import flex_attention

torch.set_num_threads(2)
q, k, v = operands()
wanted = flex_attention(q, k, v, MOD, MASK, enable_gqa=True)
(gradient,) = torch.autograd.grad(wanted.sum(), q, retain_graph=True)
busy = threading.Thread(target=lambda: [flex_attention(q, k, v, MOD, MASK, enable_gqa=True) for _ in range(50)])
busy.start()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    o = flex_attention(q, k, v, MOD, MASK, enable_gqa=True)
    same = torch.allclose(o, wanted) and torch.allclose(torch.autograd.grad(o.sum(), q)[0], gradient, atol=1e-5)
    os._exit(0 if same else 3)
busy.join()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 0, code
"""


def test_a_fork_computes():
    """In a process of its own: PyTorch's autograd may not survive a fork after other tests."""
    paths = [str(pathlib.Path(__file__).parent), str(pathlib.Path(sdpa.__file__).parent.parent)]
    # With a GPU autograd starts a thread for the device, and refuses to run in a child after that.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", FORK], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def bad(**changed):
    q, k, v = operands(False)
    given = {"query": q, "key": k, "value": v, "enable_gqa": True} | changed
    return flex_attention(**given)


@pytest.mark.parametrize(
    "changed, fields",
    [
        ({"query": torch.randn(2, 4, 37)}, ["query shape"]),
        ({"query": torch.randn(2, 4, 37, 16, dtype=torch.float64)}, ["query dtype", "key dtype", "value dtype"]),
        ({"key": torch.randn(2, 2, 53, 16).half(), "value": torch.randn(53, 24)}, ["key dtype", "value shape"]),
        ({"key": torch.randn(2, 2, 53, 16, device="meta")}, ["key device"]),
        ({"key": torch.randn(3, 3, 50, 17)}, ["batch of query, key, value", "heads of value", "seq of value", "dim of key", "heads of key"]),
        ({"enable_gqa": False}, ["heads of key"]),
        ({"query": 3}, ["query"]),
        ({"value": torch.randn(2, 2, 53, 24).to_sparse()}, ["value layout"]),
        ({"block_mask": create_block_mask(sdpa.noop_mask, 3, 5, 36, 53)}, ["block_mask.shape", "block_mask B", "block_mask H"]),
        ({"block_mask": 3}, ["block_mask"]),
        ({"executor": "abacus"}, ["executor"]),
        ({"executor": ["cpu"]}, ["executor"]),
        ({"executor": "cudnn"}, ["executor"]),
        ({"executor": "cuda"}, ["executor"]),
        ({"score_mod": sdpa.ScoreMod(lambda s, b, h, q, k: s + torch.ones(3)[h])}, ["parameter s0"]),
        ({"score_mod": sdpa.ScoreMod(lambda s, b, h, q, k: s + torch.ones(4, device="meta")[h])}, ["parameter s0 device"]),
        ({"scale": float("inf")}, ["attn_scale"]),
        ({"query": torch.randn(2, 4, 37, 0), "key": torch.randn(2, 2, 53, 0)}, ["q.dims[3] (dim)", "k.dims[3] (dim)"]),
    ],
)
def test_bad_input_is_an_exception_with_field_value_and_rule(changed, fields):
    with pytest.raises(sdpa.SpecError) as told:
        bad(**changed)
    assert [field for field, _, rule in told.value.errors if rule] == fields


def test_the_operator_alone_is_given_what_addresses_cannot_tell():
    q, k, v = operands(False)
    text = joined(MOD, MASK.mask)[0]
    with pytest.raises(sdpa.SpecError, match=r"params\[0\] dtype"):
        torch.ops.sdpa.attention(q, k, v, [SLOPES.detach().double()], [20.0], text, 0.25, 0, [])
    with pytest.raises(sdpa.SpecError, match="parameter s0 length"):
        torch.ops.sdpa.attention(q, k, v, [SLOPES.detach()[:3]], [20.0], text, 0.25, 0, [])
    with pytest.raises(sdpa.SpecError, match="parameters: got 0 tensors"):
        torch.ops.sdpa.attention(q, k, v, [], [20.0], text, 0.25, 0, [])
    with pytest.raises(sdpa.SpecError, match="program: got"):
        torch.ops.sdpa.attention(q, k, v, [], [], "{", 0.25, 0, [])
    o, stats = torch.ops.sdpa.attention(q, k, v, [SLOPES.detach()], [20.0], text, 0.25, 1, [])
    with pytest.raises(sdpa.SpecError) as told:
        torch.ops.sdpa.attention_backward(o[:1], q, k, v, o.double(), stats[..., 1:], [SLOPES.detach()], [20.0], text, 0.25, [])
    assert [field for field, _, _ in told.value.errors] == ["o", "d_o", "stats"]


def test_no_gradient_is_said_at_once():
    q, k, v = operands()
    edge = torch.rand(37, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: edge[i] > 0.5, None, None, 37, 53)
    with pytest.raises(sdpa.SpecError, match="a mask has no gradient"):
        flex_attention(q, k, v, None, mask, enable_gqa=True)
    by_hand = sdpa.ScoreMod.from_text("tensor t[head]: f32; score * t, upstream * t", t=torch.ones(4, requires_grad=True))
    o = flex_attention(*(x.detach() for x in (q, k, v)), by_hand, enable_gqa=True)
    with pytest.raises(sdpa.SpecError, match="the custom gradient of text"):
        o.sum().backward()


def test_wrong_bytes_of_truth_are_read_as_true():
    truth = torch.tensor([0, 2, 1, 255] * 14, dtype=torch.uint8)[:53].view(torch.bool)
    q, k, v = operands(False)
    ours = flex_attention(q, k, v, None, create_block_mask(lambda b, h, i, j: truth[j], None, None, 37, 53), enable_gqa=True)
    true = truth.view(torch.uint8) != 0
    close(ours, attention(q, k, v, None, lambda b, h, i, j: true[j])[0], "o")


def test_an_executor_that_is_named_computes_it_whoever_looks_on():
    q, k, v = operands()
    run = lambda executor: flex_attention(q, k, v, MOD, MASK, enable_gqa=True, executor=executor)  # noqa: E731
    with torch.device("cpu"):
        assert torch.equal(run("cpu"), run(None))
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")("cpu"), run(None))
    for x, y in zip(torch.autograd.grad(run("cpu").sum(), [q, k, v]), torch.autograd.grad(run(None).sum(), [q, k, v])):
        assert torch.equal(x, y)
    told = sdpa.explain(q, k, v, MOD, MASK, enable_gqa=True, executor="cpu")
    assert told.data["executor"] == "cpu"
    elsewhere = sdpa.explain(q, k, v, MOD, MASK, enable_gqa=True, executor="cudnn")
    assert elsewhere.data["executor"] is None and elsewhere.count("executor: got cudnn, expected one that reads tensors in host memory: cpu") == 2


def test_nvrtc_is_that_of_pytorch(monkeypatch, tmp_path):
    from sdpa import op

    monkeypatch.delenv("SDPA_NVRTC", raising=False)
    monkeypatch.setattr(op, "_mapped", lambda name: f"/mapped/{name}.13")
    assert op._nvrtc() == "/mapped/libnvrtc.so.13"
    monkeypatch.setenv("SDPA_NVRTC", "/named")
    assert op._nvrtc() is None
    monkeypatch.delenv("SDPA_NVRTC")
    # NVRTC is not loaded. The PyTorch library that links to it is missing too, and the wheels have NVRTC next to PyTorch.
    monkeypatch.setattr(op, "_mapped", lambda name: None)
    monkeypatch.setattr(op.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    for version, folder in (("13.2", "cu13"), ("12.8", "cuda_nvrtc")):
        monkeypatch.setattr(op.torch.version, "cuda", version)
        assert op._nvrtc() is None
        (tmp_path / "nvidia" / folder / "lib").mkdir(parents=True)
        file = tmp_path / "nvidia" / folder / "lib" / f"libnvrtc.so.{version[:2]}"
        file.touch()
        assert op._nvrtc() == str(file)
    monkeypatch.setattr(op.torch.version, "cuda", None)
    assert op._nvrtc() is None
