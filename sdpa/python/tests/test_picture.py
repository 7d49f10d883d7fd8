"""Pictures: the numbers that they show, and that they are valid image files."""

import math

import numpy as np
import pytest

import sdpa
from sdpa.picture import show


def test_values_are_those_of_the_functions():
    slopes = np.asarray([0.5, 0.25], np.float32)
    keep = sdpa.MaskMod(lambda b, h, q, k: (k <= q) & (q - k < 4) | (k == 1))
    drawn = show(lambda s, b, h, q, k: s * 2 + sdpa.array(slopes)[h] * (k - q), keep, (1, 2, 9, 7), head=1, score=0.5)
    for q in range(9):
        for k in range(7):
            wanted = 1 + 0.25 * (k - q) if (k <= q and q - k < 4) or k == 1 else -math.inf
            assert drawn.values[q][k] == pytest.approx(wanted, abs=1e-5)


def test_a_picture_is_a_png(tmp_path):
    mask = sdpa.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 20, 30)
    drawn = show(None, mask)
    assert len(drawn.values) == 20 and len(drawn.values[0]) == 30 and drawn._repr_png_().startswith(b"\x89PNG")
    drawn.save(tmp_path / "causal.png")
    assert (tmp_path / "causal.png").read_bytes() == drawn.png()
    with pytest.raises(sdpa.SpecError, match="batch and head"):
        show(None, mask, (1, 1, 4, 4), head=1)


@pytest.mark.parametrize("shape", [(1, 1, 0, 5), (1, 1, 5, 0)])
def test_a_picture_needs_a_query_and_a_key(shape):
    with pytest.raises(sdpa.SpecError, match="at least one query and one key"):
        show(None, sdpa.MaskMod(lambda b, h, q, k: q >= k), shape)
