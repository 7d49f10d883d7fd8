# shellcheck shell=bash
# python-tools.sh: sourced by the scripts that build the Python package. Sets `target`, `python` (from 3.11 on) and `tools`, a virtual environment with
# maturin and with zig, the linker for older glibc and for other processors. Exits with 77, which is a skip, where either cannot be had.
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
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
if ! "$tools/bin/maturin" --version >/dev/null 2>&1 || ! "$tools/bin/python" -m ziglang version >/dev/null 2>&1; then
  rm -rf "$tools"
  "$python" -m venv "$tools"
  if ! "$tools/bin/pip" install --quiet --disable-pip-version-check 'maturin>=1.9,<2' 'ziglang>=0.13'; then
    echo "SKIP python: maturin and zig cannot be installed"
    exit 77
  fi
fi
