"""Speed comparisons: they measure attention, report errors, and draw a valid picture."""

import xml.etree.ElementTree as xml

import pytest
import torch

import sdpa
from sdpa import speed

SHAPE = "2,4,2,40:56,16"


@pytest.mark.parametrize("mask", ["none", "causal", "window:9", "prefix:5"])
@pytest.mark.parametrize("score_mod", ["none", "softcap:3", "alibi"])
def test_all_compute_the_same(mask, score_mod):
    made = speed.compare(SHAPE, score_mod, mask, device="cpu", seconds=0.001)
    names = [row.name for row in made.rows]
    assert names == ["sdpa", *(["PyTorch's SDPA"] if score_mod == "none" else []), "eager"]
    for row in made.rows:
        assert not row.error and row.forward > 0 and row.both > 0
        assert row.off is None if row.name == "eager" else row.off < 1e-5
    assert f"mask {mask}; score_mod {score_mod}" in str(made)


def test_functions_of_the_readers_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import torch\ndef mod(s, b, h, q, k):\n    return torch.where(q - k > 3, s * 2, s)\ndef mask(b, h, q, k):\n    return k <= q + 20\n")
    given = ["--shape", SHAPE, "--shape", "1,1,1,8,8", "--mask", f"{tmp_path}/mine.py:mask", "--score-mod", f"{tmp_path}/mine.py:mod"]
    saved = tmp_path / "speed.svg"
    assert speed.main([*given, "--device", "cpu", "--seconds", "0.001", "--forward", "--save", str(saved)]) == 0
    told = capsys.readouterr().out
    assert told.count("times sdpa's") == 2 and "both ms" in told and "mine.py:mod" in told
    picture = xml.parse(saved).getroot()
    bars = [one for one in picture.iter() if one.tag.endswith("rect")]
    # One bar for each figure, and the background.
    assert len(bars) == 1 + 2 * 2
    assert speed.compare("1,1,1,8,8", seconds=0.001, device="cpu")._repr_svg_().startswith("<svg")


@pytest.mark.parametrize(
    "given, word",
    [
        (["--shape", "1,2"], "--shape: got 1,2"),
        (["--shape", "1,3,2,8,8"], "multiple"),
        (["--shape", "1,1,1,8:8:8,8"], "integers of at least 1"),
        (["--mask", "window"], "window:N"),
        (["--mask", "window:-3"], "above 0"),
        (["--mask", "causal:3"], "--mask: got causal:3"),
        (["--score-mod", "nowhere:at"], "can be imported"),
        (["--score-mod", "math:pi"], "a function of yours"),
        (["--seconds", "0", "--save", "x.png"], ".svg"),
    ],
)
def test_what_is_wrong_is_told(given, word, capsys):
    assert speed.main([*given, "--device", "cpu"]) == 2
    assert word in capsys.readouterr().err


def test_who_cannot_is_a_row(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of something\nmore")

    monkeypatch.setattr(speed, "flex_attention", broken)
    made = speed.compare("1,1,1,8,8", device="cpu", seconds=0.001)
    assert made.rows[0].error == "RuntimeError: out of something" and "out of something" in str(made) and made.rows[-1].both > 0
    monkeypatch.setattr(speed, "flex_attention", lambda q, k, v, *args, **kwargs: v * 2 + 0 * (q + k))
    assert speed.compare("1,1,1,8,8", device="cpu", seconds=0.001).rows[0].off > 0.1


def test_a_mistake_of_the_readers_is_an_exception():
    with pytest.raises(sdpa.TracingError):
        speed.compare("1,1,1,8,8", lambda s, b, h, q, k: s.item(), device="cpu")
    assert speed.compare("1,1,1,8,8", device="cpu", dtype=torch.bfloat16, seconds=0.001).rows[0].off < 2e-2
