"""PyTorch's tools next to this package: SDPA's registry, FLOP counts, profiler, export, checkpoints, FSDP2."""

import os
import shutil

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import sdpa  # noqa: E402
from sdpa import provider  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICES = ["cpu"] + (["cuda"] if CUDA else [])
TYPES = {"cpu": (torch.float32, 1e-5), "cuda": (torch.bfloat16, 2e-2)}


@pytest.fixture
def runs(monkeypatch):
    """The passes that `scaled_dot_product_attention` ran here."""
    passes = []
    for name in ("forward", "backward"):
        run = getattr(provider._Call, name)
        monkeypatch.setattr(provider._Call, name, lambda *args, run=run, name=name: (passes.append(name), run(*args))[1])
    return passes


def passes(device, **options):
    """Returns the output and the gradients of PyTorch's function, in f64 too where there is no dropout."""
    torch.manual_seed(3)
    dtype = TYPES[device][0]
    q, k, v = (torch.randn(2, heads, 65, 32, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    d_o = torch.randn(2, 4, 65, 32, device=device, dtype=dtype)
    torch.manual_seed(7)
    o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return o, *torch.autograd.grad(o, (q, k, v), d_o)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["plain", "causal", "scale", "boolean mask", "added mask"])
def test_sdpa_runs_here_while_it_is_in_use(device, name, runs):
    torch.manual_seed(0)
    mask = {"boolean mask": torch.rand(65, 65) > 0.3, "added mask": torch.randn(2, 1, 65, 65)}.get(name)
    if mask is not None:
        mask = mask.to(device, TYPES[device][0]) if mask.is_floating_point() else mask.to(device)
    options = {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}}.get(name, {"attn_mask": mask})
    before = passes(device, **options)
    with sdpa.use():
        ours = passes(device, **options)
    assert runs == ["forward", "backward"]
    after = passes(device, **options)
    assert len(runs) == 2
    for x, y, z in zip(before, ours, after):
        assert (x.double() - y.double()).norm() <= 2 * TYPES[device][1] * x.double().norm()
        assert torch.equal(x, z) or device == "cuda"


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_every_fused_kernel_of_a_gpu_is_replaced(backend, runs):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 65, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = None if backend == "FLASH_ATTENTION" else torch.randn(2, 4, 65, 65, device="cuda", dtype=torch.bfloat16)
    if backend == "EFFICIENT_ATTENTION":
        bias.requires_grad_()
    wanted = [x for x in (q, k, v, bias) if x is not None and x.requires_grad]
    e = [x.detach().double().requires_grad_(x.requires_grad) for x in (q, k, v)] + [None if bias is None else bias.detach().double().requires_grad_(bias.requires_grad)]
    scores = e[0] @ e[1].transpose(-1, -2) / 32**0.5 + (0 if bias is None else e[3])
    right = torch.softmax(scores, -1) @ e[2]
    d_o = torch.randn_like(q)
    with sdpa.use(), sdpa_kernel(getattr(SDPBackend, backend)):
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        made = torch.autograd.grad(o, wanted, d_o)
    assert runs == ["forward", "backward"]
    gradients = torch.autograd.grad(right, [x for x in e if x is not None and x.requires_grad], d_o.double())
    for ours, exact in zip((o, *made), (right, *gradients)):
        assert (ours.double() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.skipif(not CUDA, reason="PyTorch has no dropout in flash attention on CPUs")
def test_sdpa_drops_with_the_same_seed_here():
    with sdpa.use():
        first, second = passes("cuda", dropout_p=0.25), passes("cuda", dropout_p=0.25)
        plain = passes("cuda")
    assert all(torch.equal(x, y) for x, y in zip(first, second))
    assert not torch.equal(first[0], plain[0])


def _layouts(results):
    return [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) and x.numel() else None for x in results]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", ["bhsd", "bshd"])
def test_results_have_the_layouts_that_compiled_code_expects(device, memory):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def calls(make):
        q, k, v = (make((2, 4, 65, 32) if memory == "bhsd" else (2, 65, 4, 32)) for _ in range(3))
        q, k, v = (q, k, v) if memory == "bhsd" else (x.transpose(1, 2) for x in (q, k, v))
        aten, found = torch.ops.aten, []
        if device == "cpu":
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
            return [(o, lse), aten._scaled_dot_product_flash_attention_for_cpu_backward(o, q, k, v, o, lse, 0.0, True)]
        o, lse, _, _, _, _, seed, offset, _ = made = aten._scaled_dot_product_flash_attention(q, k, v, 0.1, True)
        found += [made[:8], aten._scaled_dot_product_flash_attention_backward(o, q, k, v, o, lse, None, None, 65, 65, 0.1, True, seed, offset)]
        o, lse, _, _, _, _, seed, offset, _ = made = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.1, True)
        found += [made[:8], aten._scaled_dot_product_cudnn_attention_backward(o, q, k, v, o, lse, seed, offset, None, None, None, 65, 65, 0.1, True)]
        bias = make((2, 4, 65, 65))
        o, lse, seed, offset = made = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.1)
        found += [made, aten._scaled_dot_product_efficient_attention_backward(o, q, k, v, bias, o, lse, seed, offset, 0.1, [True] * 4)]
        return found

    make = lambda shape: torch.ones(shape, device=device, dtype=TYPES[device][0])  # noqa: E731
    with torch.no_grad():
        with sdpa.use():
            ours = calls(make)
        with FakeTensorMode():
            expected = calls(make)
    for x, y in zip(ours, expected, strict=True):
        assert _layouts(x) == _layouts(y)


def test_use_ends_once(runs):
    first = sdpa.use()
    second = sdpa.use()
    first.remove()  # the second has replaced it
    passes("cpu")
    assert len(runs) == 2
    second.remove()
    second.remove()
    passes("cpu")
    assert len(runs) == 2


def test_operations_are_counted_as_those_of_sdpa():
    q, k, v = (torch.randn(2, 4, n, d, requires_grad=True) for n, d in ((65, 32), (70, 32), (70, 16)))
    with FlopCounterMode(display=False) as counter:
        sdpa.flex_attention(q, k, v).sum().backward()
    pairs = 2 * 2 * 4 * 65 * 70
    assert counter.get_total_flops() == pairs * (32 + 16) + pairs * (3 * 32 + 2 * 16)


def test_a_profiler_sees_both_passes():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdpa.flex_attention(q, q, q).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"sdpa::attention", "sdpa::attention_backward"} <= names


class Layer(torch.nn.Module):
    """Learned ALiBi slopes under a causal mask."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.slopes = torch.nn.Parameter(torch.rand(2))
        self.mask = sdpa.create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        o = sdpa.flex_attention(q, k, v, lambda score, b, h, i, j: score + self.slopes[h] * (j - i), self.mask)
        return o.transpose(1, 2).flatten(2)


class Causal(Layer):
    """Attention whose operator has no parameters and no scalars."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return sdpa.flex_attention(q, k, v, None, self.mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_is_exported(strict):
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 24, 32)
    exported = torch.export.export(layer, (x,), strict=strict).module()
    assert torch.equal(exported(x), layer(x))


@pytest.mark.skipif(shutil.which("c++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_compiled_ahead_of_time(biased, tmp_path):
    torch.manual_seed(0)
    layer, x = (Layer() if biased else Causal()).eval(), torch.randn(2, 24, 32)
    with torch.no_grad():
        exported = torch.export.export(layer, (x,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
        other = torch.randn(2, 24, 32)
        assert torch.equal(torch._inductor.aoti_load_package(package)(other), layer(other))


def test_a_checkpointed_layer_has_the_same_gradients():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 24, 32)
    made = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False), lambda x: checkpoint(layer, x.requires_grad_(), use_reentrant=True)):
        layer.zero_grad()
        run(x).square().sum().backward()
        made.append([p.grad.clone() for p in layer.parameters()])
    assert all(torch.equal(a, b) for gradients in made[1:] for a, b in zip(made[0], gradients))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no distributed package")
def test_a_sharded_layer_trains_as_a_whole_one(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole, x = Layer(), torch.randn(2, 24, 32)
    sharded = Layer()
    sharded.load_state_dict(whole.state_dict())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        for layer in (whole, sharded):
            layer(x).square().sum().backward()
        for ours, right in zip(sharded.parameters(), whole.parameters()):
            assert torch.equal(ours.grad.full_tensor(), right.grad)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_training_step_is_captured():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = sdpa.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cuda")
    step = lambda: torch.autograd.grad(sdpa.flex_attention(q, k, v, None, mask).square().sum(), (q, k, v))  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for ours, right in zip(captured, step()):
        assert torch.equal(ours, right)
