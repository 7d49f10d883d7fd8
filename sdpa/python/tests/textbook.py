"""Textbook attention in f64 with PyTorch's own autograd, as the reference of the tests."""

import math

import torch


def attention(q, k, v, score_mod=None, mask_mod=None, scale=None, sink=None):
    """Returns the output and the log-sum-exp of each row. Functions are called on tensors of all positions."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    places = [torch.arange(n, device=q.device).view([-1 if axis == at else 1 for at in range(4)]) for axis, n in enumerate(scores.shape)]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = torch.where(torch.as_tensor(mask_mod(*places), device=q.device), scores, -math.inf)
    extra = [] if sink is None else [sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)]
    lse = torch.cat([scores, *extra], -1).logsumexp(-1)
    weights = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]))
    return weights @ v, lse


def close(ours, theirs, what, tolerance=2e-5):
    """Asserts that two tensors agree, relative to the largest element."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} beside {tuple(theirs.shape)}"
    finite = torch.isfinite(theirs)
    assert torch.equal(torch.isfinite(ours), finite), f"{what}: other elements are finite"
    if finite.any():
        error = (ours - theirs)[finite].abs().max().item()
        limit = tolerance * max(theirs[finite].abs().max().item(), 1.0)
        assert error <= limit, f"{what}: {error} is more than {limit}"
