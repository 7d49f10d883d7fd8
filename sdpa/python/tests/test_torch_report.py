"""Reports about calls: executors, parameters, plans."""

import torch

import sdpa
from sdpa import cache_report, create_block_mask, explain, flex_attention, show


def test_explain_and_the_report_of_caches():
    q = torch.randn(1, 4, 24, 16)
    slopes = torch.nn.Parameter(torch.ones(4))
    cap = sdpa.scalar("cap", 30.0)
    mod = lambda s, b, h, i, j: cap * torch.tanh(s / cap) + slopes[h] * (j - i)  # noqa: E731
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24)
    flex_attention(q, q, q, mod, mask).sum().backward()
    told = explain(q, q, q, mod, mask)
    for word in ("score_mod: ", "tanh", "mask: ", "s0: f32 over [head], (4,)", "cap: a scalar, 30.0", "forward: cpu", "backward: cpu", "not on cudnn", "called 1 times"):
        assert word in told, f"{word!r} is not in {told}"
    assert told.data["executor"] == "cpu" and told._repr_html_().startswith("<pre>")
    assert "passes are ready" in cache_report()
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert "copied, as the last axis is not dense: query" in explain(turned, q, q)


def test_pictures_over_tensors():
    slopes = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    drawn = show(lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: k <= q, (1, 2, 5, 5), head=1)
    assert drawn.values[4][2] == 0.5 and drawn.values[0][1] == -float("inf")
