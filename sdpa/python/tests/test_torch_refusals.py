"""Each refusal of the tracer is an error with the line, and never another number."""

import numpy as np
import pytest
import torch
from textbook import attention, close

import sdpa
from sdpa import SpecError, flex_attention
from sdpa.flex import attend


def operands(grad=False, q=9, k=13, h=4):
    torch.manual_seed(3)
    return [torch.randn(shape).requires_grad_(grad) for shape in ((2, h, q, 8), (2, h, k, 8), (2, h, k, 8))]


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
        with pytest.raises(SpecError, match="scale is of type"):
            flex_attention(q, k, v, scale=wrong)
    # The way that the error names has the gradient.
    ours = torch.autograd.grad(flex_attention(q * t, k, v, scale=1.0).square().sum(), t)[0]
    close(ours, torch.autograd.grad(attention(q * t, k, v, scale=1.0)[0].square().sum(), t)[0], "gradient", 1e-4)
