"""The blocks of the guide run as they stand, one after the other."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "pytorch.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the guide is in the repository")
def test_the_guide_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 5
    scope = {}
    for block in blocks:
        exec(compile(block.replace("/tmp/", f"{tmp_path}/"), str(PAGE), "exec"), scope)  # noqa: S102
    assert scope["loss"].item() < 2
