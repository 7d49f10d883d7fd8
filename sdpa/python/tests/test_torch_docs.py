"""Runs the Python blocks of the guides unchanged, in order."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.skipif(not DOCS.exists(), reason="the guides are in the repository")
@pytest.mark.parametrize(("page", "least"), [("pytorch.md", 5), ("migration.md", 1)])
def test_guides_run(page, least, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    assert len(blocks) >= least
    scope = {}
    for block in blocks:
        exec(compile(block.replace("/tmp/", f"{tmp_path}/"), page, "exec"), scope)  # noqa: S102
    assert "loss" not in scope or scope["loss"].item() < 2
