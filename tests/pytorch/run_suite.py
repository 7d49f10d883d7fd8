"""run_suite.py FOLDER FILE [--shard I/N] [--save JSON] [PYTEST…]: runs a file of PyTorch's FlexAttention tests with `sdpa.flex_attention` in place of the compiled FlexAttention.

FOLDER has PyTorch's tests (`test/inductor` of a source tree), FILE is `test_flex_attention.py` or `test_flex_decoding.py`. The tests compare with eager
FlexAttention in f64. `excluded.toml` next to this script names the tests that are not about results, each with a reason; they are deselected and counted.
`--shard 2/10` runs every tenth test from the second on, `--save` writes the outcome of each test. More arguments go to pytest: `-k NAME`, `-x`.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import sys
import tomllib

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import sdpa

HERE = pathlib.Path(__file__).parent
NEEDS_GPU = ("No CUDA GPUs are available", "Found no NVIDIA driver", "FlexAttention does not support backward on CPU")


class Suite:
    """A pytest plugin: loads the tests with the replacement, and deselects what is excluded."""

    def __init__(self, path: pathlib.Path, excluded: dict, shard: str, save: str | None):
        self.path, self.excluded, self.save, self.outcomes = path, excluded, save, {}
        self.first, self.step = (int(n) for n in shard.split("/"))

    def pytest_collection_modifyitems(self, config, items):
        out = [item for item in items if any(item.name.startswith(name) for name in self.excluded)]
        config.hook.pytest_deselected(items=out)
        self.left_out = len(out)
        kept = [item for item in items if item not in out]
        items[:] = kept[self.first - 1 :: self.step]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr) if report.outcome == "failed" else ""
            # Some tests name the GPU as their device, and on a CPU PyTorch's reference has no backward pass.
            needs_gpu = not torch.cuda.is_available() and any(said in text for said in NEEDS_GPU)
            unsupported = "UnsupportedError" in text or "TracingError" in text or "SpecError" in text
            last = next((line for line in text.splitlines() if line.startswith("E ")), "")
            self.outcomes[report.nodeid.rsplit("::", 1)[1]] = "needing a GPU" if needs_gpu else "unsupported" if unsupported else report.outcome, last[2:].strip()
            if self.save:
                pathlib.Path(self.save).write_text(json.dumps(self.outcomes, indent=0))

    def pytest_terminal_summary(self, terminalreporter):
        counts: dict = {}
        for outcome, _ in self.outcomes.values():
            counts[outcome] = counts.get(outcome, 0) + 1
        told = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
        terminalreporter.write_line(f"suite {self.path.name}: {told}, {self.left_out} excluded of all shards")


def replaced(module):
    """Returns a function that stands for `torch.compile` in the tests of a module."""

    def stand_in(fn=None, **options):
        if fn is None:
            return lambda fn: stand_in(fn, **options)
        if fn is theirs.flex_attention:
            return sdpa.flex_attention
        if isinstance(fn, functools.partial) and fn.func is theirs.flex_attention:
            return functools.partial(sdpa.flex_attention, *fn.args, **fn.keywords)
        if fn is theirs.create_block_mask:
            return fn

        @functools.wraps(fn if callable(fn) and hasattr(fn, "__name__") else lambda: None)
        def run(*args, **kwargs):
            module.flex_attention = sdpa.flex_attention
            try:
                return fn(*args, **kwargs)
            finally:
                module.flex_attention = theirs.flex_attention

        return run

    return stand_in


class Torch:
    """PyTorch with another `compile`, for the tests alone: PyTorch's own code also calls `torch.compile`."""

    def __init__(self, compile_):
        self.compile = compile_

    def __getattr__(self, name):
        return getattr(torch, name)


def adapt(paged) -> None:
    """Lets `PagedAttention.assign` take one list of positions for the whole batch, as the tests of PyTorch 2.6 pass it."""
    assign = paged.assign

    def adapted(self, batch_idx, input_pos, k_val, *rest):
        return assign(self, batch_idx, input_pos.expand(k_val.shape[0], -1) if input_pos.dim() == 1 else input_pos, k_val, *rest)

    paged.assign = adapted


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("file")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--save")
    asked, more = parser.parse_known_args(arguments)
    folder, path = asked.folder, pathlib.Path(asked.folder) / asked.file
    excluded = tomllib.loads((HERE / "excluded.toml").read_text())
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    module.torch = Torch(replaced(module))
    adapt(module.PagedAttention)
    options = [str(path), "-q", "-p", "no:cacheprovider", "--tb=short", *more]
    return pytest.main(options, plugins=[Suite(path, excluded.get(path.stem, {}), asked.shard, asked.save)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
