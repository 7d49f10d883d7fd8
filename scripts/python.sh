#!/usr/bin/env bash
# python.sh [--release]: builds the wheel of sdpa/python for this platform, installs it in a fresh virtual environment and tests it there. Tests that
# need PyTorch or transformers run where the interpreter has them already, and are named as skipped elsewhere; SDPA_REQUIRE=torch makes that an error.
# The wheel stays in target/wheels: of the development profile, or with --release stripped. Cargo builds it alone, with the features that users get;
# the tests of the workspace turn on others, so half of its dependencies are compiled again.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=dev
if [ "${1:-}" = --release ]; then
  profile=dist
else
  # Crates of this workspace, but for the CPU kernels: compiling them costs more than the tests gain.
  export CARGO_PROFILE_DEV_OPT_LEVEL=0
fi

. scripts/python-tools.sh
rm -rf "$target/wheels"
"$tools/bin/maturin" build --quiet --manifest-path sdpa/python/Cargo.toml --profile "$profile" --out "$target/wheels"

fresh=$target/python/fresh
rm -rf "$fresh"
"$python" -m venv "$fresh"
# Behind what is installed here: the place where the interpreter has PyTorch, itself a virtual environment or not.
there=$("$python" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("torch").origin).parents[1])' 2>/dev/null || true)
[ -z "$there" ] || echo "$there" >"$("$fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
"$fresh/bin/pip" install --quiet --disable-pip-version-check "$target"/wheels/sdpa-*.whl
# Without NumPy and without PyTorch there is the tracer.
(cd / && "$fresh/bin/python" -c '
import sdpa
mod = sdpa.ScoreMod(lambda score, b, h, q, k: score * 2 + (k - q) // 2)
assert "score * 2.0" in str(mod), mod
print("sdpa", sdpa.__version__, "imports and traces:", mod.text.replace("\n", " "))')
if ! "$fresh/bin/pip" install --quiet --disable-pip-version-check 'numpy>=1.26' 'pytest>=8'; then
  echo "SKIP python: numpy and pytest are not to be had"
  exit 77
fi
# What stands in for cuDNN and the driver, and the run-time compiler beside it.
if [ "$(uname -s)" = Linux ]; then
  scripts/setup-tests.sh
  env --unset=CARGO_PROFILE_DEV_OPT_LEVEL cargo build --quiet --package recording
fi
export SDPA_RECORDING=$target/debug/librecording.so
(cd sdpa/python && "$fresh/bin/python" -m pytest --quiet -p no:cacheprovider tests)
ls -l "$target"/wheels/*.whl
