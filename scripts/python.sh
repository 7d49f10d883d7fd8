#!/usr/bin/env bash
# python.sh [--release]: builds the wheel of sdpa/python for this platform, installs it in a fresh virtual environment and tests it there. Tests that
# need PyTorch or transformers run where the interpreter has them already, and are named as skipped elsewhere; SDPA_REQUIRE=torch makes that an error.
# The wheel stays in target/wheels: of the development profile, which shares what the tests have built, or with --release stripped.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
profile=dev
[ "${1:-}" != --release ] || profile=dist

python=
for candidate in ${SDPA_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "SKIP python: there is no Python from 3.11 on that makes virtual environments"
  exit 77
fi

tools=$target/python/tools
if ! "$tools/bin/maturin" --version >/dev/null 2>&1; then
  rm -rf "$tools"
  "$python" -m venv "$tools"
  if ! "$tools/bin/pip" install --quiet --disable-pip-version-check 'maturin>=1.9,<2'; then
    echo "SKIP python: maturin is not to be had"
    exit 77
  fi
fi
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
# What stands in for cuDNN and the driver, where the tests of the workspace have built it.
export SDPA_RECORDING=$target/debug/librecording.so
(cd sdpa/python && "$fresh/bin/python" -m pytest --quiet -p no:cacheprovider tests)
ls -l "$target"/wheels/*.whl
