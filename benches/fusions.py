"""fusions.py FUSIONS OUT: times of the fusions of `cudnn-graph/examples/fusions` beside PyTorch's equivalents, on one GPU.

FUSIONS is the binary of the example. Its result and PyTorch's are first compared with f64 on the same inputs: an error may be 2^-7 of the element, a
rounding to bf16 and one before it, and 1e-3 of the largest one, for sums in f32; for results in f32 the latter only. Then both are called in turns, ours and
PyTorch's eager calls (with `torch.backends.cudnn.benchmark`) and `torch.compile`. OUT gets a JSON line for each fusion: medians in us, and the ratios
PyTorch / ours, of which above 0.95 is within 5 %. Norms also have
cudnn-frontend's plan, if the package `nvidia-cudnn-frontend` is there: PyTorch's norms are kernels of its own. `dynamic` is our plan with dynamic shapes.
"""
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

ROUNDS = 21
# Long enough that the time between two CUDA events is not that of a launch.
MEASURED_US = 12_000
N, C, H, W, K = 32, 128, 56, 56, 128
ROWS, COLUMNS = 8192, 4096
IMAGES, RESULTS, FILTERS, CHANNELS = (N, C, H, W), (N, K, H, W), (K, C, 3, 3), (1, K, 1, 1)
MATRIX, ROW, COLUMN, SQUARE = (ROWS, COLUMNS), (1, COLUMNS), (ROWS, 1), (4096, 4096)
aten = torch.ops.aten


def conv(x, w):
    return F.conv2d(x, w, padding=1)


def conv_gradients(dy, x, w, of):
    mask = [of == "x", of == "w", False]
    return aten.convolution_backward(dy, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)["xw".index(of)]


def conv_bias_relu(x, w, bias):
    if x.dtype == torch.float64:
        return torch.relu(conv(x, w) + bias)
    return torch.cudnn_convolution_relu(x, w, bias.flatten(), [1, 1], [1, 1], [1, 1], 1)


def conv_norm_add_relu(x, w, scale, bias, z):
    return torch.relu(conv(x, w) * scale.to(x.dtype) + bias.to(x.dtype) + z)


def conv_data_gradient_relu(dy, w, x):
    return aten.threshold_backward(conv_gradients(dy, x, w, "x"), x, 0)


def conv_filter_gradient(dy, x):
    return conv_gradients(dy, x, torch.empty(FILTERS, dtype=x.dtype, device="cuda").to(memory_format=torch.channels_last), "w")


def swish_gate(a, gate, up):
    return F.silu(a @ gate) * (a @ up)


def layer_norm(x, scale, bias):
    return F.layer_norm(x, (COLUMNS,), scale.flatten().to(x.dtype), bias.flatten().to(x.dtype), 1e-5)


def rms_norm(x, scale):
    return F.rms_norm(x, (COLUMNS,), scale.flatten().to(x.dtype), 1e-5)


def rms_norm_backward(x, dy, scale, inv_variance):
    if x.dtype == torch.float64:
        normal, inner = x * inv_variance, dy * scale
        return inv_variance * (inner - normal * (inner * normal).mean(1, keepdim=True))
    return aten._fused_rms_norm_backward(dy, x, [COLUMNS], inv_variance, scale.flatten().to(x.dtype), [True, True])[0]


def sum_per_channel(x):
    return x.sum((0, 2, 3), keepdim=True, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def frontend(name, inputs, handle=None):
    """Returns cudnn-frontend's graph of a norm, its tensors by name, and the name of its result; `None` for another fusion."""
    import cudnn

    if name not in ("layer_norm", "rms_norm", "rms_norm_backward"):
        return None
    t = cudnn.data_type
    graph = cudnn.pygraph(io_data_type=t.BFLOAT16, intermediate_data_type=t.FLOAT, compute_data_type=t.FLOAT, handle=handle)
    types = {BF16: t.BFLOAT16, F32: t.FLOAT}

    def tensor(key):
        rows, columns = inputs[key].shape
        return graph.tensor(name=key, dim=[rows, columns, 1, 1], stride=[columns, 1, columns, columns], data_type=types[inputs[key].dtype])

    tensors = {key: tensor(key) for key in inputs}
    if name == "rms_norm_backward":
        result = "dx"
        made = graph.rmsnorm_backward(grad=tensors["dy"], input=tensors["x"], scale=tensors["scale"], inv_variance=tensors["inv_variance"], has_dbias=False)
        dscale = made[1]
        dscale.set_output(True).set_data_type(t.FLOAT)
        tensors["dscale"] = dscale
    else:
        result = "y"
        epsilon = tensors["epsilon"] = graph.tensor(name="epsilon", dim=[1] * 4, stride=[1] * 4, is_pass_by_value=True, data_type=t.FLOAT)
        phase = cudnn.norm_forward_phase.INFERENCE
        if name == "layer_norm":
            made = graph.layernorm(norm_forward_phase=phase, input=tensors["x"], scale=tensors["scale"], bias=tensors["bias"], epsilon=epsilon)
        else:
            made = graph.rmsnorm(norm_forward_phase=phase, input=tensors["x"], scale=tensors["scale"], epsilon=epsilon)
    made[0].set_output(True).set_data_type(t.BFLOAT16)
    tensors[result] = made[0]
    return graph, tensors, result


def frontend_call(name, inputs):
    """Returns a function that calls cudnn-frontend's plan of a norm and returns the result; `None` without such a plan."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    made = frontend(name, inputs, handle)
    if made is None:
        return None
    graph, tensors, result = made
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    columns = inputs["x"].shape[1]
    memory = {tensors[key]: x for key, x in inputs.items()}
    out = torch.empty_like(inputs["x"])
    memory[tensors[result]] = out
    if "dscale" in tensors:
        memory[tensors["dscale"]] = torch.empty(1, columns, dtype=F32, device="cuda")
    if "epsilon" in tensors:
        memory[tensors["epsilon"]] = torch.full((1, 1, 1, 1), 1e-5, dtype=F32)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def call():
        graph.execute(memory, workspace, handle=handle)
        return out

    return call


BF16, F32 = torch.bfloat16, torch.float32
# Of each fusion: its function, its inputs, and the name and extents of its result.
FUSIONS = [
    (conv_bias_relu, dict(x=IMAGES, w=FILTERS, bias=CHANNELS), ("y", RESULTS)),
    (conv_norm_add_relu, dict(x=IMAGES, w=FILTERS, scale=CHANNELS, bias=CHANNELS, z=RESULTS), ("y", RESULTS)),
    (conv_data_gradient_relu, dict(dy=RESULTS, w=FILTERS, x=IMAGES), ("dx", IMAGES)),
    (conv_filter_gradient, dict(dy=RESULTS, x=IMAGES), ("dw", FILTERS)),
    (swish_gate, dict(a=SQUARE, gate=SQUARE, up=SQUARE), ("y", SQUARE)),
    (layer_norm, dict(x=MATRIX, scale=ROW, bias=ROW), ("y", MATRIX)),
    (rms_norm, dict(x=MATRIX, scale=ROW), ("y", MATRIX)),
    (rms_norm_backward, dict(x=MATRIX, dy=MATRIX, scale=ROW, inv_variance=COLUMN), ("dx", MATRIX)),
    (sum_per_channel, dict(x=IMAGES), ("sum", (1, C, 1, 1))),
]


def load(file, dims):
    """A tensor of the file's bytes, channels last if it has four axes; its type follows from their number."""
    data, count = bytearray(file.read_bytes()), 1
    for n in dims:
        count *= n
    dtype = {2 * count: BF16, 4 * count: F32}.get(len(data)) or sys.exit(f"{file}: got {len(data)} bytes for {count} elements")
    tensor = torch.frombuffer(data, dtype=dtype).cuda()
    if len(dims) == 2:
        return tensor.view(dims)
    n, c, h, w = dims
    return tensor.view(n, h, w, c).permute(0, 3, 1, 2)


def error(got, want):
    """The largest error, in tolerances."""
    top = want.abs().max()
    tolerance = 1e-3 * top + (2**-7 * want.abs() if got.dtype == BF16 else 0)
    ratio = (got.double() - want).abs() / tolerance
    return float("inf") if torch.isnan(ratio).any() or top == 0 else ratio.max().item()


def torch_us(call, calls):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


class Ours:
    def __init__(self, binary):
        self.process = subprocess.Popen([binary, "--times"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"{question}: {self.process.args[0]} ended")


def main(binary, out):
    torch.backends.cudnn.benchmark = True
    ours, wrong = Ours(binary), []
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    with open(out, "w") as file:
        for function, inputs, (result, dims) in FUSIONS:
            name = function.__name__
            with tempfile.TemporaryDirectory() as folder:
                engine = ours.ask(fusion=name, save=folder)["engine"]
                args = [load(Path(folder) / f"{key}.bin", extents) for key, extents in inputs.items()]
                got = load(Path(folder) / f"out.{result}.bin", dims)
            with torch.no_grad():
                want = function(*(x.double() for x in args))
                compiled = torch.compile(function)
                calls = {"torch": lambda: function(*args), "compiled": lambda: compiled(*args)}
                theirs = None
                if importlib.util.find_spec("cudnn"):
                    try:
                        theirs = frontend_call(name, dict(zip(inputs, args)))
                    except Exception as refusal:  # noqa: BLE001
                        print(f"{name}: cudnn-frontend: {refusal}", flush=True)
                if theirs is not None:
                    calls["frontend"] = theirs
                errors = {"ours": error(got, want)} | {key: error(call(), want) for key, call in calls.items()}
                del want
                for key, call in calls.items():
                    torch_us(call, 5)
                timed = {key: lambda n, call=call: torch_us(call, n) for key, call in calls.items()}
                timed["ours"] = lambda n: ours.ask(fusion=name, calls=n)["us"]
                refusal = ours.ask(fusion=name, calls=1, dynamic=True).get("error")
                if refusal is None:
                    timed["dynamic"] = lambda n: ours.ask(fusion=name, calls=n, dynamic=True)["us"]
                else:
                    print(f"{name}: dynamic shapes: {refusal.splitlines()[0]}", flush=True)
                times = {key: [] for key in timed}
                count = max(3, int(MEASURED_US / timed["ours"](5)))
                for turn in range(ROUNDS):
                    for key in times if turn % 2 == 0 else reversed(times):
                        times[key].append(timed[key](count))
            us = {key: round(statistics.median(all_), 2) for key, all_ in times.items()}
            ratios = {key: round(us[key] / us["ours"], 3) for key in us if key != "ours"}
            answer = dict(fusion=name, engine=engine, us=us, ratio=ratios, error={key: round(e, 3) for key, e in errors.items()})
            file.write(json.dumps(answer) + "\n")
            file.flush()
            print(json.dumps(answer), flush=True)
            # PyTorch rounds between the operations of a fusion, so only ours has to be within the tolerance.
            if errors["ours"] > 1:
                wrong.append(name)
    sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
