#!/usr/bin/env python3
"""The Python package on an NVIDIA GPU: python3 benches/flex_python.py [check] [time] [host] [stack] [curve]; without words, all of them.

check  correctness beside textbook attention in f64, gradients too, on either executor; who is chosen; CUDA graphs, streams and threads, opcheck,
       compilation, refusals
time   device and host time of a call of ALiBi and of softcap, of this package and of FlexAttention
host   host time of calls that compute next to nothing, and where it goes; where there is no GPU, on the CPU
stack  layers of Gemma 2's shape, forward and backward, beside FlexAttention, eager attention and PyTorch's SDPA
curve  the losses of 200 steps beside those of eager attention

Needs PyTorch, with CUDA for everything but `host`, and the wheel of sdpa/python installed: `scripts/python.sh --release` makes it.
"""

import contextlib
import math
import pathlib
import platform
import statistics
import sys
import threading
import time
import traceback

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "sdpa" / "python" / "tests"))
import textbook  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

import sdpa  # noqa: E402
from sdpa import create_block_mask, flex_attention, guards  # noqa: E402
from sdpa.eager import _WAYS, Forward  # noqa: E402
from sdpa.exchange import EXCHANGE  # noqa: E402
from sdpa.flex import attend  # noqa: E402
from sdpa.mods import joined  # noqa: E402

FAILED = []


def case(name):
    """Runs a check now, and goes on where it fails."""

    def run(f):
        start = time.perf_counter()
        try:
            said = f()
            torch.cuda.synchronize()
            print(f"ok    {name} ({time.perf_counter() - start:.1f} s){': ' + str(said) if said else ''}", flush=True)
        except Exception as e:  # noqa: BLE001 - told, and counted
            FAILED.append(name)
            print(f"FAIL  {name}: {type(e).__name__}: {e}", flush=True)
            traceback.print_exc(limit=4)

    return run


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < 100)


def operands(b=2, h=8, hk=2, q=515, k=515, d=64, dv=64, dtype=torch.bfloat16, bshd=False):
    made = []
    for heads, seq, dim in ((h, q, d), (hk, k, d), (hk, k, dv)):
        shape = (b, seq, heads, dim) if bshd else (b, heads, seq, dim)
        x = torch.randn(shape, device="cuda").transpose(1, 2) if bshd else torch.randn(shape, device="cuda")
        x = x.to(dtype)
        made.append((x.detach() if bshd else x).requires_grad_())
    return made


def compare(qkv, score_mod=None, mask_mod=None, params=(), tolerance=2e-2, spread=False, lse=False, executor=None, **options):
    """Beside the book in f64, and once more as PyTorch's modes see it: the operator in place of the way past the dispatcher."""
    q, k, v = qkv
    mask = mask_mod and create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2])
    wanted, log = textbook.attention(q, k, v, score_mod, mask_mod, **options)
    up = torch.ones((), dtype=q.dtype, device=q.device).expand(wanted.shape) if spread else torch.randn(wanted.shape, dtype=q.dtype, device=q.device)
    along = torch.randn_like(log) if lse else torch.zeros_like(log)
    wrt = [*qkv, *params]
    loss = lambda o, l: [o.sum() if spread else (o * up).sum()] + ([(torch.where(torch.isfinite(log), l, 0.0) * along).sum()] if lse else [])  # noqa: E731, E741
    own = torch.autograd.grad(loss(wanted, log), wrt)
    for mode in (contextlib.nullcontext(), torch.device("cuda")):
        with mode:
            o, stats = flex_attention(q, k, v, score_mod, mask, return_lse=True, enable_gqa=True, executor=executor, **options)
            alone = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, executor=executor, **options)
            ours = torch.autograd.grad(loss(o if lse else alone, stats), wrt)
        textbook.close(o, wanted, "o", tolerance)
        textbook.close(stats, log, "lse", 1e-2)
        for n, (x, y) in enumerate(zip(ours, own)):
            textbook.close(x, y, f"gradient {n}", 1.5 * tolerance)


def holds_in_a_graph(step, tensors):
    """Captured, and run again on other numbers: what the step gives by itself."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for x in tensors:
                x.copy_(torch.randn_like(x))
        graph.replay()
        for x, y in zip(captured, step()):
            textbook.close(x, y, "gradient", 2e-2)


def on_device(f):
    """Makes tensors on the GPU where nothing else is said. A mode of PyTorch's, and so not for what is timed."""

    def run(*args, **options):
        with torch.device("cuda"):
            return f(*args, **options)

    return run


def check():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    torch.manual_seed(1)
    slopes = torch.tensor([2.0 ** -(n + 1) for n in range(8)], device="cuda")
    cap = sdpa.scalar("cap", 15.0)
    case("plain")(lambda: compare(operands(h=4, hk=4)))
    case("causal, GQA, f16")(lambda: compare(operands(dtype=torch.float16), None, causal, tolerance=6e-3))
    case("causal, dims 128, (batch, seq, head, dim) in memory")(lambda: compare(operands(d=128, dv=128, bshd=True), None, causal))
    case("window")(lambda: compare(operands(), None, window))
    case("softcap, causal")(lambda: compare(operands(), lambda s, b, h, q, k: 5 * torch.tanh(s / 5), causal))
    case("ALiBi, causal")(lambda: compare(operands(), lambda s, b, h, q, k: s + slopes[h] * (k - q), causal))
    case("prefix, odd lengths")(lambda: compare(operands(q=301, k=777), None, lambda b, h, q, k: (k <= q) | (k < 130)))
    case("whole numbers: // and %")(lambda: compare(operands(), None, lambda b, h, q, k: ((q - k) // 3) % 2 == 0))
    documents = torch.randint(0, 4, (2, 515), device="cuda").sort(-1).values
    case("documents")(lambda: compare(operands(), None, lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k)))
    truth = torch.rand(515, 515, device="cuda") < 0.5
    case("array of truth values")(lambda: compare(operands(), None, lambda b, h, q, k: truth[q, k]))
    for dtype in (torch.bfloat16, torch.float32):
        bias = torch.randn(8, 515, 515, device="cuda").to(dtype).requires_grad_()
        case(f"bias in {dtype} with a gradient")(lambda bias=bias: compare(operands(), lambda s, b, h, q, k: s + bias[h, q, k], causal, [bias]))
        table = torch.randn(8, 1029, device="cuda").to(dtype).requires_grad_()
        case(f"a table of distances in {dtype} with a gradient")(lambda table=table: compare(operands(), lambda s, b, h, q, k: s + table[h, q - k], causal, [table]))
    pages, hashes = torch.randint(0, 9, (2, 33), device="cuda"), torch.randint(-(2**31), 2**31 - 1, (515,), dtype=torch.int32, device="cuda")
    case("a mask of a page table")(lambda: compare(operands(), None, lambda b, h, q, k: (pages[b, k // 16] % 2 == 0) | (q == k)))
    case("a mask of bits")(lambda: compare(operands(), None, lambda b, h, q, k: ((hashes[q] ^ hashes[k]) & 0x50 == 0) | (q == k)))
    case("gradient of the output spread from one number")(lambda: compare(operands(), None, causal, spread=True))
    case("gradient through the log-sum-exp")(lambda: compare(operands(), None, causal, lse=True, tolerance=3e-2))
    case("scale")(lambda: compare(operands(), None, causal, scale=0.3))

    @case("a scalar changes without a new plan")
    def _():
        mod = lambda s, b, h, q, k: cap * torch.tanh(s / cap)  # noqa: E731
        q, k, v = operands()
        for x in (15.0, 3.0):
            cap.value = x
            flex_attention(q, k, v, mod, enable_gqa=True)
            wanted = textbook.attention(q, k, v, lambda s, *_, x=x: x * torch.tanh(s / x))[0]
            textbook.close(flex_attention(q, k, v, mod, enable_gqa=True), wanted, "o", 2e-2)

    @case("sink with a gradient")
    def _():
        q, k, v = operands()
        sink = torch.randn(8, device="cuda", requires_grad=True)
        o, _ = attend(q, k, v, None, create_block_mask(causal, None, None, 515, 515).mask, sink=sink)
        wanted = textbook.attention(q, k, v, None, causal, sink=sink)[0]
        up = torch.randn_like(o)
        for x, y in zip(torch.autograd.grad((o * up).sum(), [q, k, v, sink]), torch.autograd.grad((wanted * up).sum(), [q, k, v, sink])):
            textbook.close(x, y, "gradient", 3e-2)

    @case("captured into a CUDA graph, forward and backward")
    def _():
        q, k, v = operands()
        mod, mask = sdpa.ScoreMod(lambda s, b, h, i, j: s + slopes[h] * (j - i)), create_block_mask(causal, None, None, 515, 515)
        up = torch.randn_like(q)
        step = lambda: torch.autograd.grad((flex_attention(q, k, v, mod, mask, enable_gqa=True) * up).sum(), [q, k, v])  # noqa: E731
        holds_in_a_graph(step, [q, k, v])

    @case("two threads, a stream each")
    def _():
        done, faults = [], []

        def work(seed):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(5):
                        compare(operands(), lambda s, b, h, q, k: 5 * torch.tanh(s / 5), causal)
                done.append(seed)
            except Exception as e:  # noqa: BLE001
                faults.append(e)

        workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        [w.start() for w in workers]
        [w.join() for w in workers]
        assert not faults and len(done) == 2, faults

    @case("opcheck")
    def _():
        q, k, v = operands(q=64, k=64)
        text = joined(None, create_block_mask(causal, None, None, 64, 64).mask)[0]
        torch.library.opcheck(torch.ops.sdpa.attention, (q, k, v, [], [], text, 0.125, 2, []))

    @case("torch.compile, fullgraph")
    def _():
        q, k, v = operands()
        mod, mask = sdpa.ScoreMod(lambda s, b, h, i, j: s + slopes[h] * (j - i)), create_block_mask(causal, None, None, 515, 515)
        run = lambda q, k, v: flex_attention(q * 2, k, v, mod, mask, enable_gqa=True) + 1  # noqa: E731
        compiled, up = torch.compile(run, fullgraph=True), torch.randn_like(q)
        textbook.close(compiled(q, k, v), run(q, k, v), "o", 1e-2)
        for x, y in zip(torch.autograd.grad(compiled(q, k, v), [q, k, v], up), torch.autograd.grad(run(q, k, v), [q, k, v], up)):
            textbook.close(x, y, "gradient", 2e-2)

    def refused(kind, f, word):
        try:
            f()
        except kind as e:
            assert word in str(e), e
            return str(e).split("\n")[0]
        raise AssertionError("it was not refused")

    wide = [x.detach().float().requires_grad_() for x in operands()]
    by_cudnn = lambda: flex_attention(*wide, enable_gqa=True, executor="cudnn")  # noqa: E731
    case("f32 on cudnn by name is refused with a reason")(lambda: refused(sdpa.UnsupportedError, by_cudnn, "cudnn: dtype is f32"))
    learned = torch.nn.Parameter(slopes.clone())
    distances = lambda s, b, h, q, k: s + learned[h] * (k - q)  # noqa: E731
    late = lambda: flex_attention(*operands(), distances, enable_gqa=True, executor="cudnn")  # noqa: E731
    case("learned slopes on cudnn by name are refused in the forward pass")(lambda: refused(sdpa.UnsupportedError, late, "cudnn"))
    unknown = lambda: flex_attention(*operands(), enable_gqa=True, executor="abacus")  # noqa: E731
    case("an executor that is none")(lambda: refused(sdpa.SpecError, unknown, "executor is 'abacus'"))
    on_host = lambda: flex_attention(*operands(), enable_gqa=True, executor="cpu")  # noqa: E731
    case("the CPU executor by name, of tensors on the GPU")(lambda: refused(sdpa.SpecError, on_host, "cudnn, cuda"))
    chosen(slopes, refused)
    q, k, v = operands()
    case("tensors on two devices")(lambda: refused(sdpa.SpecError, lambda: flex_attention(q, k.cpu(), v, enable_gqa=True), "key device"))
    mask = create_block_mask(causal, None, None, 515, 515)
    case("explain")(lambda: "\n" + sdpa.explain(q, k, v, lambda s, b, h, i, j: 5 * torch.tanh(s / 5), mask, enable_gqa=True))
    case("report of the caches")(lambda: "\n" + "\n".join(sdpa.cache_report().split("\n")[:12]))


def dilated(b, h, q, k):
    return (q >= k) & ((q - k) % 4 == 0)


def prefix(b, h, q, k):
    return (k <= q) | (k < 130)


def chosen(slopes, refused):
    """Who computes what, and that the name of an executor is kept; every result beside the book."""
    # Kernels that are not tuned come behind cuDNN; so do those that an old NVRTC makes.
    tuned = torch.cuda.get_device_capability() == (9, 0) and tuple(map(int, torch.version.cuda.split("."))) >= (12, 9)
    first = "cuda" if tuned else "cudnn"
    long = lambda: operands(q=2048, k=2048)  # noqa: E731
    of = torch.randint(0, 4, (2, 2048), device="cuda").sort(-1).values
    documents = lambda b, h, q, k: (of[b, q] == of[b, k]) & (q >= k)  # noqa: E731

    def runs(who, qkv, mask_mod, score_mod=None, executor=None, passes=("forward", "backward")):
        """That this one is said to run it."""
        mask = create_block_mask(mask_mod, None, None, qkv[0].shape[2], qkv[1].shape[2])
        told = sdpa.explain(*qkv, score_mod, mask, enable_gqa=True, executor=executor)
        for which in passes:
            assert told.data[which].startswith(f"{who} "), f"{which}: {told}"
        return told

    # Kinds of problems of which native CUDA kernels were faster in both passes: `sdpa/cuda/src/choice.rs`.
    for name, mask in (("dilated", dilated), ("prefix", prefix), ("documents", documents)):

        @case(f"{name} runs on {first} by itself")
        def _(mask=mask):
            qkv = long()
            told = runs(first, qkv, mask)
            other = "cudnn" if first == "cuda" else "cuda"
            assert f"not on {other}: not tried" in told, told
            compare(qkv, None, mask)

        for who in ("cudnn", "cuda"):

            @case(f"{name} on {who}, which was named")
            def _(mask=mask, who=who):
                qkv = operands()
                told = runs(who, qkv, mask, executor=who)
                assert "not tried: the caller named " + who in told, told
                compare(qkv, None, mask, executor=who)

    case("causal on cuda, which was named")(lambda: compare(operands(), None, causal, executor="cuda"))
    case("softcap, causal on cuda, which was named")(
        lambda: compare(operands(), lambda s, b, h, q, k: 5 * torch.tanh(s / 5), causal, executor="cuda")
    )
    case("scale, gradient of the log-sum-exp, on cuda")(lambda: compare(operands(), None, dilated, lse=True, tolerance=3e-2, scale=0.3, executor="cuda"))
    case("(batch, seq, head, dim) in memory on cuda")(lambda: compare(operands(d=128, dv=128, bshd=True), None, dilated, executor="cuda"))

    @case("f32 runs on cuda")
    def _():
        qkv = operands(dtype=torch.float32)
        told = runs("cuda", qkv, causal)
        assert "not on cudnn: dtype is f32" in told, told
        compare(qkv, None, causal, tolerance=1e-4)

    @case("learned slopes train on cuda")
    def _():
        learned = torch.nn.Parameter(slopes.clone())
        qkv, mod = operands(), lambda s, b, h, q, k: s + learned[h] * (k - q)
        runs("cuda", qkv, causal, mod, passes=("backward",))
        compare(qkv, mod, causal, [learned], tolerance=3e-2)

    @case("what neither takes is told of both")
    def _():
        broad = operands(d=264, dv=264)
        said = refused(sdpa.UnsupportedError, lambda: flex_attention(*broad, enable_gqa=True), "cudnn: ")
        refused(sdpa.UnsupportedError, lambda: flex_attention(*broad, enable_gqa=True), "cuda: ")
        return said

    @case("a rule of places on cuda, captured into a CUDA graph, forward and backward")
    def _():
        q, k, v = operands()
        mask, up = create_block_mask(dilated, None, None, 515, 515), torch.randn_like(q)
        step = lambda: torch.autograd.grad((flex_attention(q, k, v, None, mask, enable_gqa=True, executor="cuda") * up).sum(), [q, k, v])  # noqa: E731
        holds_in_a_graph(step, [q, k, v])

    @case("the libraries are PyTorch's")
    def _():
        q, k, v = operands()
        mask = create_block_mask(dilated, None, None, 515, 515)
        said = [sdpa.explain(q, k, v, None, mask, enable_gqa=True, executor=who) for who in ("cudnn", "cuda")]
        line = lambda told, word: next(line.strip() for line in told.split("\n") if line.strip().startswith(word))  # noqa: E731
        with open("/proc/self/maps") as maps:
            files = {line.split(None, 5)[5].strip() for line in maps if "libnvrtc.so" in line or "libcudnn.so" in line}
        assert len(files) == 2, files
        assert sum(file in told for told in said for file in files) == 2, (files, said)
        return f"{line(said[0], 'cuDNN')}; {line(said[1], 'NVRTC')}"


def device_ms(f, n=20):
    """The median of the device's time of a call, in milliseconds."""
    for _ in range(5):
        f()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for start, end in events:
        start.record()
        f()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_us(f, n=30):
    """The median of the time until a call returns, in microseconds, the device's queue being empty before each."""
    taken = []
    for _ in range(n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(taken)


def times():
    print("| (4,h,4096,128), bf16, causal | | forward ms | both ms | host us, forward | host us, both |\n|---|---|---|---|---|---|")
    compiled = torch.compile(theirs.flex_attention)
    slopes = torch.tensor([2.0 ** (-8 * (n + 1) / 32) for n in range(32)], device="cuda")
    mods = {"ALiBi": lambda s, b, h, q, k: s + slopes[h] * (k - q), "softcap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30)}
    masks = {"sdpa": create_block_mask(causal, None, None, 4096, 4096), "FlexAttention": theirs.create_block_mask(causal, None, None, 4096, 4096, device="cuda")}
    for heads in (32, 8):
        q, k, v = operands(b=4, h=32, hk=heads, q=4096, k=4096, d=128, dv=128)
        up = torch.randn_like(q)
        for name, mod in mods.items():
            of = {
                "sdpa, traced at each call": lambda mod=mod: flex_attention(q, k, v, mod, masks["sdpa"], enable_gqa=True),
                "sdpa, traced once": lambda mod=sdpa.ScoreMod(mod): flex_attention(q, k, v, mod, masks["sdpa"], enable_gqa=True),
                "FlexAttention": lambda mod=mod: compiled(q, k, v, score_mod=mod, block_mask=masks["FlexAttention"], enable_gqa=True),
            }
            for who, f in of.items():
                both = lambda f=f: torch.autograd.grad(f(), [q, k, v], up)  # noqa: E731
                try:
                    with torch.no_grad():
                        alone, host = device_ms(f), host_us(f)
                    print(f"| {name}, 32/{heads} | {who} | {alone:.3f} | {device_ms(both):.3f} | {host:.0f} | {host_us(both):.0f} |", flush=True)
                except Exception as e:  # noqa: BLE001
                    print(f"| {name}, 32/{heads} | {who} | {type(e).__name__}: {str(e).splitlines()[0]} |", flush=True)


def batches_us(of, n=20, batches=200):
    """The least of several means of each call's host time, in microseconds: batches in turns, so that what slows a machine for a while slows all of them.
    A GPU's queue is empty before each batch, and too long to be full behind it."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    least, failed = dict.fromkeys(of, math.inf), {}
    for _ in range(batches):
        for name, f in of.items():
            if name in failed:
                continue
            try:
                f()
                wait()
                start = time.perf_counter()
                for _ in range(n):
                    f()
                least[name] = min(least[name], 1e6 * (time.perf_counter() - start) / n)
            except Exception as e:  # noqa: BLE001 - told, and counted
                failed[name] = f"{type(e).__name__}: {str(e).splitlines()[0]}"
                FAILED.append(f"host, {name}")
    wait()
    return {name: failed.get(name, f"{us:.1f}") for name, us in least.items()}


class Nothing(torch.autograd.Function):
    """What a function with a gradient costs that computes nothing."""

    @staticmethod
    def forward(ctx, o, q, k, v):
        ctx.save_for_backward(q, k, v, o)
        return o

    @staticmethod
    def backward(ctx, d_o):
        return None, *ctx.saved_tensors[:3]


def host():
    gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    device, dtype, dim = ("cuda", torch.bfloat16, 64) if gpu else ("cpu", torch.float32, 8)
    print(f"{torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine()}, PyTorch {torch.__version__}, Python {platform.python_version()}")
    q, k, v = (torch.randn(1, 1, 8, dim, dtype=dtype, device=device) for _ in range(3))
    with_grad, up = [x.clone().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    slopes = torch.rand(1, device=device)
    alibi, softcap = lambda s, b, h, i, j: s + slopes[h] * (j - i), lambda s, b, h, i, j: 20 * torch.tanh(s / 20)  # noqa: E731
    mask = create_block_mask(causal, None, None, 8, 8)
    by_operator = lambda q, k, v: torch.ops.sdpa.attention(q, k, v, [], [], program, 0.3, 2 if q.requires_grad and torch.is_grad_enabled() else 0, [])  # noqa: E731
    program = joined(None, mask.mask)[0]
    of = {
        "causal": lambda q, k, v: flex_attention(q, k, v, None, mask),
        "softcap, causal": lambda q, k, v: flex_attention(q, k, v, softcap, mask),
        "softcap as a ScoreMod": lambda q, k, v, mod=sdpa.ScoreMod(softcap): flex_attention(q, k, v, mod, mask),
        "ALiBi, causal": lambda q, k, v: flex_attention(q, k, v, alibi, mask),
        "causal, by the operator": lambda q, k, v: by_operator(q, k, v)[0],
        "PyTorch's SDPA, causal": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    if gpu:
        compiled, blocks = torch.compile(theirs.flex_attention), theirs.create_block_mask(causal, None, None, 8, 8, device="cuda")
        for name, mod in (("causal", None), ("softcap, causal", softcap), ("ALiBi, causal", alibi)):
            of[f"FlexAttention, {name}"] = lambda q, k, v, mod=mod: compiled(q, k, v, score_mod=mod, block_mask=blocks)
    calls = {}
    for name, f in of.items():
        calls[name, "forward"] = lambda f=f: f(q, k, v)
        calls[name, "tracked"] = lambda f=f: f(*with_grad)
        calls[name, "both"] = lambda f=f: torch.autograd.grad(f(*with_grad), with_grad, up)
    told = batches_us(calls)
    print(f"| 8 tokens, dims {dim}, {dtype}, {device}: host µs | forward | forward with a gradient | both passes |\n|---|---|---|---|")
    for name in of:
        print(f"| {name} | {' | '.join(told[name, what] for what in ('forward', 'tracked', 'both'))} |", flush=True)
    # The parts of one call: a forward pass without parameters, and its backward pass.
    ways = [way for way in _WAYS.values() if isinstance(way, Forward) and way.backward and way.program == program]
    forward, backward = ways[-1], next(iter(ways[-1].backward.values()))
    o, stats = forward.run(q, k, v, (), (), 0.3)
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    # As this package calls its own: without what `apply` does for transforms of torch.func.
    empty = lambda q, k, v: super(torch.autograd.Function, Nothing).apply(o, q, k, v)  # noqa: E731
    print("| of these | µs |\n|---|---|")
    parts = {
        "native, forward": lambda: EXCHANGE.run(forward.plan, (q, k, v, o), stats, (), (), (), 0.3, *forward.where()),
        "native, backward": lambda: EXCHANGE.run(backward.plan, (q, k, v, o, up, dq, dk, dv), stats, (), (), (), 0.3, *backward.where()),
        "threads, or stream and workspace: forward": forward.where,
        "threads, or stream and workspace: backward": backward.where,
        "memory for output and stats": lambda: (torch.empty_strided(*forward.o, **forward.of), torch.empty_strided(*forward.rows, dtype=torch.float32, device=device)),
        "looking at three tensors": lambda: EXCHANGE.look((q, k, v)),
        "whether a function is as it was (ALiBi)": lambda: guards.kept(sdpa.ScoreMod, alibi),
        "an autograd function that computes nothing, forward": lambda: empty(*with_grad),
        "the same, both passes": lambda: torch.autograd.grad(empty(*with_grad), with_grad, up),
    }
    for name, us in batches_us(parts).items():
        print(f"| {name} | {us} |", flush=True)


class Layer(torch.nn.Module):
    """A layer of Gemma 2's 9B: 16 heads of 256 over 8 of keys."""

    def __init__(self, attend, hidden=3584, heads=16, of_keys=8, dim=256, inner=14336):
        super().__init__()
        self.attend, self.heads, self.of_keys, self.dim = attend, heads, of_keys, dim
        linear = lambda n, m: torch.nn.Linear(n, m, bias=False, dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v = linear(hidden, heads * dim), linear(hidden, of_keys * dim), linear(hidden, of_keys * dim)
        self.o, self.gate, self.up, self.down = linear(heads * dim, hidden), linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)
        self.before, self.behind = (torch.nn.RMSNorm(hidden, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        y = self.behind(x)
        return x + self.down(torch.nn.functional.gelu(self.gate(y), approximate="tanh") * self.up(y))


def eager(mask, cap):
    def attend(q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.tanh(q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5) / cap) * cap
        return torch.softmax(torch.where(mask, scores, -math.inf).float(), -1).to(q.dtype) @ v

    return attend


def stack(tokens=8192, layers=4):
    cap, wide = 50.0, 4096
    mod = lambda s, b, h, q, k: cap * torch.tanh(s / cap)  # noqa: E731
    near = lambda b, h, q, k: (q >= k) & (q - k < wide)  # noqa: E731
    kept = sdpa.ScoreMod(mod)
    ours = [create_block_mask(m, None, None, tokens, tokens) for m in (near, causal)]
    blocks = [theirs.create_block_mask(m, None, None, tokens, tokens, device="cuda") for m in (near, causal)]
    row, column = torch.arange(tokens, device="cuda")[:, None], torch.arange(tokens, device="cuda")[None]
    dense = [near(0, 0, row, column), causal(0, 0, row, column)]
    compiled = torch.compile(theirs.flex_attention)
    of = {
        "sdpa": lambda n: lambda q, k, v: flex_attention(q, k, v, kept, ours[n], enable_gqa=True),
        "FlexAttention": lambda n: lambda q, k, v: compiled(q, k, v, score_mod=mod, block_mask=blocks[n], enable_gqa=True),
        "eager": lambda n: eager(dense[n], cap),
        "SDPA, without the softcap": lambda n: lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, dense[n], enable_gqa=True),
    }
    print(f"| {layers} layers, {tokens} tokens, 16/8 heads of 256, softcap 50, window 4096 in every second | forward ms | both ms | peak GiB |\n|---|---|---|---|")
    for who, make in of.items():
        try:
            torch.manual_seed(2)
            model = on_device(lambda make=make: torch.nn.Sequential(*(Layer(make(n % 2)) for n in range(layers))))()
            x = torch.randn(1, tokens, 3584, dtype=torch.bfloat16, device="cuda")
            with torch.no_grad():
                alone = device_ms(lambda: model(x), 8)
            torch.cuda.reset_peak_memory_stats()
            both = device_ms(lambda: model(x).float().square().mean().backward(), 8)
            print(f"| {who} | {alone:.1f} | {both:.1f} | {torch.cuda.max_memory_allocated() / 2**30:.1f} |", flush=True)
        except Exception as e:  # noqa: BLE001
            print(f"| {who} | {type(e).__name__}: {str(e).splitlines()[0]} |", flush=True)
        model = None
        torch.cuda.empty_cache()


@on_device
def curve(steps=200):
    tokens, vocabulary, hidden, cap = 512, 256, 512, 20.0
    near = lambda b, h, q, k: (q >= k) & (q - k < 128)  # noqa: E731
    kept, mask = sdpa.ScoreMod(lambda s, b, h, q, k: cap * torch.tanh(s / cap)), create_block_mask(near, None, None, tokens, tokens)
    dense = near(0, 0, torch.arange(tokens)[:, None], torch.arange(tokens)[None])
    losses = {}
    for who, attend_ in (("eager", eager(dense, cap)), ("sdpa", lambda q, k, v: flex_attention(q, k, v, kept, mask, enable_gqa=True))):
        torch.manual_seed(3)
        embed = torch.nn.Embedding(vocabulary, hidden, dtype=torch.bfloat16)
        model = torch.nn.Sequential(*(Layer(attend_, hidden, 8, 4, 64, 1024) for _ in range(4)))
        head = torch.nn.Linear(hidden, vocabulary, dtype=torch.bfloat16)
        optimiser = torch.optim.AdamW([*embed.parameters(), *model.parameters(), *head.parameters()], lr=3e-4)
        losses[who] = []
        torch.manual_seed(4)
        for _ in range(steps):
            # A sequence that repeats itself: attention alone can tell what comes next.
            part = torch.randint(0, vocabulary, (8, 64))
            ids = part.repeat(1, tokens // 64 + 1)[:, : tokens + 1]
            loss = torch.nn.functional.cross_entropy(head(model(embed(ids[:, :-1]))).float().flatten(0, 1), ids[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses[who].append(loss.item())
    print("| step | eager | sdpa |\n|---|---|---|")
    for n in [*range(0, steps, 20), steps - 1]:
        print(f"| {n} | {losses['eager'][n]:.4f} | {losses['sdpa'][n]:.4f} |")
    far = max(abs(x - y) for x, y in zip(losses["eager"], losses["sdpa"]))
    print(f"largest difference of {steps} losses: {far:.4f}")
    if far > 0.1:
        FAILED.append("curve")


PARTS = {"check": check, "time": times, "host": host, "stack": stack, "curve": curve}

if __name__ == "__main__":
    unknown = [word for word in sys.argv[1:] if word not in PARTS]
    asked = sys.argv[1:] or list(PARTS)
    if unknown or (asked != ["host"] and not torch.cuda.is_available()):
        sys.exit(__doc__ if unknown else "no NVIDIA GPU is there: without one there is `host`")
    for part in asked:
        print(f"\n== {part}", flush=True)
        PARTS[part]()
    print(f"\n{len(FAILED)} failed{': ' + ', '.join(FAILED) if FAILED else ''}")
    sys.exit(bool(FAILED))
