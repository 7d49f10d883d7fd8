#!/usr/bin/env python3
"""Writes pytorch.json: inputs, and what PyTorch's CPU operations compute from them in f64.

`python3 make.py > pytorch.json` needs PyTorch; the file that is checked in was made with 2.11. Inputs are multiples of 1/8, so they are exact
in every float type. Each case is a map from a name to extents and elements; `tests/pytorch.rs` builds the graph of each case.
"""

import json
import torch
import torch.nn.functional as F

torch.manual_seed(47)
torch.set_default_dtype(torch.float64)
cases = {}


def numbers(*dims, low=-16, high=17, step=8, grad=False):
    x = torch.randint(low, high, dims).double() / step
    return x.requires_grad_(grad)


def case(name, **tensors):
    def plain(t):
        t = t.detach()
        data = t.reshape(-1).tolist()
        return {"dims": list(t.shape), "data": [int(x) if x == int(x) else x for x in data]}

    cases[name] = {key: plain(t) for key, t in tensors.items() if t is not None}


def convolution(name, x, w, stride, dilation, before, after):
    x, w = numbers(*x, grad=True), numbers(*w, grad=True)
    pads = [n for pair in reversed(list(zip(before, after))) for n in pair]
    groups = x.shape[1] // w.shape[1]
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(stride)]
    y = conv(F.pad(x, pads), w, stride=stride, dilation=dilation, groups=groups)
    dy = numbers(*y.shape)
    y.backward(dy)
    case(name, x=x, w=w, y=y, dy=dy, dx=x.grad, dw=w.grad)


convolution("conv1d", (2, 3, 9), (4, 3, 3), [2], [1], [1], [2])
convolution("conv2d", (2, 4, 6, 5), (6, 4, 3, 2), [1, 2], [1, 1], [1, 0], [1, 1])
convolution("conv2d_groups", (1, 4, 7, 6), (6, 2, 2, 3), [2, 1], [3, 2], [2, 1], [0, 3])
convolution("conv3d", (1, 2, 4, 5, 3), (3, 2, 2, 3, 2), [1, 2, 1], [2, 1, 1], [1, 1, 0], [0, 1, 1])
convolution("conv_depthwise", (1, 3, 5, 4), (3, 1, 3, 3), [1, 1], [1, 1], [1, 1], [1, 1])


def norm(name, x, scale, forward, mean_of, rms=False):
    x, scale = numbers(*x, grad=True), numbers(*scale, low=4, high=24, grad=True)
    bias = None if rms else numbers(*scale.shape, grad=True)
    y = forward(x, scale, bias)
    dy = numbers(*y.shape)
    y.backward(dy)
    mean, inverse = mean_of(x)
    dbias = None if rms else bias.grad
    case(name, x=x, scale=scale, bias=bias, y=y, mean=mean, inv_variance=inverse, dy=dy, dx=x.grad, dscale=scale.grad, dbias=dbias)


# The graph has this number in f32.
EPSILON = 1 / 1024


def moments(axes):
    def of(x):
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        return mean, torch.rsqrt(variance + EPSILON)

    return of


norm("layer", (3, 4, 2, 5), (1, 4, 2, 5), lambda x, s, b: F.layer_norm(x, x.shape[1:], s[0], b[0], EPSILON), moments((1, 2, 3)))
norm("layer_last", (2, 3, 6), (1, 1, 6), lambda x, s, b: F.layer_norm(x, (6,), s[0, 0], b[0, 0], EPSILON), moments((2,)))
norm("instance", (2, 3, 4, 2), (1, 3, 1, 1), lambda x, s, b: F.instance_norm(x, weight=s.flatten(), bias=b.flatten(), eps=EPSILON), moments((2, 3)))
norm("batch", (4, 3, 2, 2), (1, 3, 1, 1), lambda x, s, b: F.batch_norm(x, None, None, s.flatten(), b.flatten(), True, 0.1, EPSILON), moments((0, 2, 3)))
norm("rms", (3, 8, 1, 1), (1, 8, 1, 1), lambda x, s, b: F.rms_norm(x, x.shape[1:], s[0], EPSILON),
     lambda x: (None, torch.rsqrt(x.pow(2).mean((1, 2, 3), keepdim=True) + EPSILON)), rms=True)
norm("ada_layer", (2, 3, 6), (2, 1, 6), lambda x, s, b: F.layer_norm(x, (6,), eps=EPSILON) * s + b, moments((2,)))

x, scale, bias = numbers(4, 3, 2, 3), numbers(3, low=4, high=24), numbers(3)
running_mean, running_variance = numbers(3), numbers(3, low=1, high=20)
next_mean, next_variance = running_mean.clone(), running_variance.clone()
y = F.batch_norm(x, next_mean, next_variance, scale, bias, True, 0.25, EPSILON)
_, mean, inverse = torch.native_batch_norm(x, scale, bias, None, None, True, 0.25, EPSILON)
channel = lambda t: t.view(1, 3, 1, 1)
case("batch_running", x=x, y=y, sum=x.sum((0, 2, 3), keepdim=True), square_sum=(x * x).sum((0, 2, 3), keepdim=True),
     **{key: channel(t) for key, t in dict(scale=scale, bias=bias, running_mean=running_mean, running_variance=running_variance,
        next_mean=next_mean, next_variance=next_variance, mean=mean, inv_variance=inverse).items()})

# The gradients of batch norm in two steps: three factors per channel give the gradient of x.
x, scale = numbers(4, 3, 2, 2, grad=True), numbers(3, low=4, high=24, grad=True)
bias = numbers(3, grad=True)
y = F.batch_norm(x, None, None, scale, bias, True, 0.1, EPSILON)
dy = numbers(*y.shape)
y.backward(dy)
mean, inverse = moments((0, 2, 3))(x)
case("batch_weights", x=x, dy=dy, scale=channel(scale), mean=mean, inv_variance=inverse, dscale=channel(scale.grad), dbias=channel(bias.grad),
     dx=x.grad)

# Max pooling: PyTorch gives the position in the image; the ops here have the position in the window.
x = torch.randperm(2 * 2 * 6 * 5).double().view(2, 2, 6, 5).sub(60).div(8).requires_grad_()
window, stride, padding = (3, 2), (2, 2), (1, 1)
y, at = F.max_pool2d(x, window, stride, padding, return_indices=True)
row = at // 5 - (torch.arange(y.shape[2]).view(-1, 1) * stride[0] - padding[0])
column = at % 5 - (torch.arange(y.shape[3]) * stride[1] - padding[1])
dy = numbers(*y.shape)
y.backward(dy)
case("max_pool", x=x, y=y, index=(row * window[1] + column).double(), dy=dy, dx=x.grad)
for name, included in [("average_pool_included", True), ("average_pool_excluded", False)]:
    x = numbers(1, 2, 5, 6, grad=True)
    y = F.avg_pool2d(x, (2, 3), (2, 1), (1, 1), count_include_pad=included)
    dy = numbers(*y.shape)
    y.backward(dy)
    case(name, x=x, y=y, dy=dy, dx=x.grad)

a, b, c = numbers(2, 3, 4), numbers(2, 1, 4), numbers(2, 2, 4)
case("concat", a=a, b=b, c=c, y=torch.cat([a, b, c], 1))

tokens, weights, first = numbers(7, 4), numbers(3, 4, 5, grad=True), [0, 2, 2]
ends = first[1:] + [7]
grouped = lambda rows: torch.cat([rows[i:j] @ weights[e] for e, (i, j) in enumerate(zip(first, ends))])
y = grouped(tokens)
dy = numbers(*y.shape)
y.backward(dy)
case("moe", tokens=tokens[None], weights=weights, first_token=torch.tensor(first).double().view(3, 1, 1), y=y[None], dy=dy[None],
     dweights=weights.grad)
index = torch.tensor([3, 0, 6, 6, 1, 2, 4])
case("moe_gather", index=index.double().view(1, 7, 1), y=grouped(tokens[index])[None])
pairs, top_k = torch.randperm(6), 2
rows = numbers(6, 4)
ends, routed = [2, 2, 6], torch.zeros(6, 5)
y = torch.cat([rows[i:j] @ weights[e] for e, (i, j) in enumerate(zip(first, ends))])
routed[pairs] = y.detach()
case("moe_scatter", tokens=rows[None], index=(pairs // top_k).double().view(1, 6, 1), slot=(pairs % top_k).double().view(1, 6, 1), y=routed[None])

# A rotation as the product of complex numbers: the halves of a head are real and imaginary parts.
x = numbers(2, 2, 3, 8, grad=True)
angles = numbers(3, 1, 1, 6)
turn = torch.polar(torch.ones(3, 3), angles[:, 0, 0, :3])
turned = torch.complex(x[..., 2:5], x[..., 5:]) * turn
y = 0.5 * torch.cat([x[..., :2], turned.real, turned.imag], -1)
dy = numbers(*y.shape)
y.backward(dy)
case("rope", x=x, angles=angles, y=y, dy=dy, dx=x.grad)

a, b = numbers(2, 3, 4), numbers(2, 4, 5)
case("matmul", a=a, b=b, y=a @ b)
x = numbers(3, 4, 2, low=1)
case("reduction", x=x, add=x.sum((0, 2), keepdim=True), mul=x.prod(0, keepdim=True).prod(2, keepdim=True), min=x.amin((0, 2), keepdim=True),
     max=x.amax((0, 2), keepdim=True), amax=(-x).abs().amax((0, 2), keepdim=True))
x = numbers(2, 3, 4)
case("moves", x=x, transposed=x.permute(2, 0, 1), sliced=x[1:, 0:3:2, 1:3], reshaped=x.reshape(4, 6))
x = numbers(1, 2, 3, 5)
case("softmax", x=x, y=x.softmax(-1), stats=x.logsumexp(-1, keepdim=True), max=x.amax(-1, keepdim=True))
x = numbers(1, 1, 4, 6)
keep = torch.ones(4, 6).tril(diagonal=1).bool()
left = torch.ones(4, 6).triu(diagonal=-1).bool()
case("band", x=x, right=x.masked_fill(~keep, -100.0), left=x.masked_fill(~left, -100.0))
pool, table = numbers(5, 2, 4, 3), torch.tensor([[4, 0], [2, 1]])
pages = torch.stack([pool[row].transpose(0, 1).reshape(2, 8, 3)[:, :5] for row in table])
pages[1, :, 4:] = 0
case("pages", container=pool, table=table.double().view(2, 1, 2, 1), lengths=torch.tensor([5.0, 4.0]).view(2, 1, 1, 1), y=pages)
x, scale = numbers(2, 8), torch.tensor([[0.5, 2.0], [4.0, 0.25]])
case("dequantize", x=x, scale=scale, y=x * scale.repeat_interleave(4, 1))
weights, scale = torch.randint(-8, 8, (4, 6)), numbers(2, 6, low=1)
case("dequantize_i4", x=weights.double(), scale=scale, y=weights * scale.repeat_interleave(2, 0))
case("dequantize_u4", x=(weights + 8).double(), scale=scale, y=(weights + 8) * scale.repeat_interleave(2, 0))
x = numbers(2, 8)
scale = x.view(2, 2, 4).abs().amax(-1) / 448
case("quantize", x=x, scale=scale, y=x / scale.repeat_interleave(4, 1))

forward = dict(abs=torch.abs, ceil=torch.ceil, cos=torch.cos, exp=torch.exp, floor=torch.floor,
               neg=torch.neg, sin=torch.sin, tan=torch.tan, erf=torch.erf, reciprocal=torch.reciprocal, relu=F.relu, tanh=torch.tanh,
               sigmoid=torch.sigmoid, elu=F.elu, gelu=F.gelu, softplus=F.softplus, swish=F.silu,
               gelu_approx_tanh=lambda x: F.gelu(x, approximate="tanh"))
x = torch.tensor([-3.0, -1.75, -0.5, 0.125, 0.75, 2.5], requires_grad=True)
case("unary", x=x, **{name: f(x) for name, f in forward.items()})
positive = torch.tensor([0.125, 0.5, 1.0, 2.5, 9.0, 17.0])
case("positive", x=positive, sqrt=positive.sqrt(), rsqrt=positive.rsqrt(), log=positive.log())
b = torch.tensor([0.5, -1.25, 2.0, -0.75, 3.0, 1.5])
case("binary", x=x, b=b, add=x + b, sub=x - b, mul=x * b, div=x / b, min=torch.minimum(x, b), max=torch.maximum(x, b), mod=torch.fmod(x, b),
     floor_mod=torch.remainder(x, b), atan2=torch.atan2(x, b), add_square=x + b * b)
case("pow", x=positive, b=b, pow=positive**b)
gradients = {}
dy = numbers(6)
for name in ["relu", "tanh", "sigmoid", "elu", "gelu", "softplus", "swish", "gelu_approx_tanh"]:
    (gradients[name + "_bwd"],) = torch.autograd.grad(forward[name](x), x, dy)
case("gradients", x=x, dy=dy, **gradients)
compare = dict(cmp_lt=x < b, cmp_le=x <= b, cmp_gt=x > b, cmp_ge=x >= b, cmp_neq=x != b)
case("comparisons", x=x, b=b, **{name: t.double() for name, t in compare.items()}, select=torch.where(x < b, x, b))

# Positions at halves: PyTorch aligns the corners of images whose last elements are repeated.
x = numbers(2, 3, 3, 2)
y = F.interpolate(F.pad(x, (0, 1, 0, 1), mode="replicate"), size=(7, 5), mode="bilinear", align_corners=True)
case("upsample", x=x, y=y[..., :6, :4])

print("{" + ",\n".join(json.dumps(name) + ": " + json.dumps(value, separators=(",", ":")) for name, value in cases.items()) + "}")
