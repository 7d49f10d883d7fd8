"""Selects the tests: those that need PyTorch run if it is installed. `SDPA_REQUIRE=torch` requires it, and so does `transformers`."""

import importlib.util
import os
import pathlib

import pytest

# Tests must not write to the user's kernel cache; the tests of the cache turn it on.
os.environ["SDPA_CACHE"] = "off"

NEEDS = {"torch": "torch", "transformers": "transformers"}
collect_ignore: list[str] = []
_REQUIRED = [word for word in os.environ.get("SDPA_REQUIRE", "").split(",") if word]
_SKIPPED: list[str] = []

for _word, _module in NEEDS.items():
    if importlib.util.find_spec(_module) is None or (_word == "transformers" and importlib.util.find_spec("torch") is None):
        if _word in _REQUIRED:
            raise pytest.UsageError(f"SDPA_REQUIRE names {_word}, and it is not installed")
        _files = sorted(p.name for p in pathlib.Path(__file__).parent.glob(f"test_{_word}*.py"))
        collect_ignore += _files
        _SKIPPED.append(f"SKIP {', '.join(_files)}: {_word} is not installed")


def pytest_report_header(config):
    return _SKIPPED


def pytest_terminal_summary(terminalreporter):
    for line in _SKIPPED:
        terminalreporter.write_line(line)
