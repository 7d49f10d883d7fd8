#!/usr/bin/env bash
# wheels.sh [x86_64 | aarch64 | sdist]…: builds what is uploaded to PyPI into target/dist-python (all three, if none is named), and tries each:
#   x86_64   the wheel for glibc 2.17 and newer, installed in a fresh virtual environment, where the tests with NumPy run
#   aarch64  the same, cross-compiled; its tests run on Debian's arm64 Python under qemu, or are skipped with a reason
#   sdist    the source distribution, from which pip builds a wheel in a fresh virtual environment
# A wheel has no CUDA in it: the driver, cuDNN and NVRTC (of CUDA 12 or 13) are found when a tensor of a GPU comes in.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/python-tools.sh
out=$target/dist-python
mkdir -p "$out"

# The tests that need NumPy alone, by the interpreter that the arguments run. They run in a folder without the package's sources, so that the
# installed package is the one that they import.
try() {
  local folder
  folder=$(mktemp -d)
  cp sdpa/python/tests/{conftest,textbook,test_numpy,test_tracing}.py "$folder/"
  (cd "$folder" && "$@" -m pytest --quiet -p no:cacheprovider .)
  rm -rf "$folder"
}

wheel() {
  rm -f "$out"/sdpa-*_"$1".whl
  PATH=$tools/bin:$PATH maturin build --quiet --manifest-path sdpa/python/Cargo.toml --profile dist --target "$1-unknown-linux-gnu" --zig \
    --compatibility manylinux_2_17 --out "$out"
}

# fresh NAME: an empty virtual environment.
fresh() {
  rm -rf "$target/python/$1"
  "$python" -m venv "$target/python/$1"
}

x86_64() {
  wheel x86_64
  fresh x86_64
  "$target/python/x86_64/bin/pip" install --quiet --disable-pip-version-check "$out"/sdpa-*_x86_64.whl 'numpy>=1.26' 'pytest>=8'
  try "$target/python/x86_64/bin/python"
}

# emulated FOLDER: Debian's Python for arm64 with this wheel, unpacked beside this system and not installed in it.
emulated() {
  local apt=(-oAPT::Architecture=arm64 -oAPT::Architectures=arm64 "-oDir::State::Lists=$1/lists" -oAPT::Sandbox::User=root) file
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || return
  command -v qemu-aarch64-static >/dev/null || apt-get install -y -qq qemu-user-static >/dev/null || return
  mkdir -p "$1/lists/partial" "$1/debs" "$1/root" "$1/wheels" "$1/site"
  apt-get "${apt[@]}" update -qq || return
  (cd "$1/debs" && apt-get "${apt[@]}" download -qq libc6 libgcc-s1 libstdc++6 libpython3.11-minimal python3.11-minimal libpython3.11-stdlib zlib1g libexpat1 libffi8) || return
  for file in "$1"/debs/*.deb; do dpkg -x "$file" "$1/root" || return; done
  "$tools/bin/pip" download --quiet --disable-pip-version-check --only-binary=:all: --python-version 3.11 --implementation cp \
    --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 \
    --dest "$1/wheels" 'numpy>=1.26' 'pytest>=8' || return
  for file in "$1"/wheels/*.whl "$out"/sdpa-*_aarch64.whl; do "$python" -m zipfile -e "$file" "$1/site" || return; done
}

aarch64() {
  rustup target list --installed | grep -qx aarch64-unknown-linux-gnu || rustup target add aarch64-unknown-linux-gnu
  wheel aarch64
  local there=$target/python/aarch64
  rm -rf "$there"
  if emulated "$there"; then
    PYTHONPATH=$there/site try qemu-aarch64-static -L "$there/root" "$there/root/usr/bin/python3.11"
  else
    echo "SKIP aarch64: the wheel is built and was not tried: it takes qemu-user-static and Debian's arm64 packages"
  fi
}

sdist() {
  rm -f "$out"/sdpa-*.tar.gz
  "$tools/bin/maturin" sdist --manifest-path sdpa/python/Cargo.toml --out "$out"
  fresh sdist
  "$target/python/sdist/bin/pip" install --quiet --disable-pip-version-check "$out"/sdpa-*.tar.gz 'numpy>=1.26' 'pytest>=8'
  try "$target/python/sdist/bin/python"
}

[ $# -gt 0 ] || set -- x86_64 aarch64 sdist
for part in "$@"; do
  case $part in
    x86_64 | aarch64 | sdist) echo "wheels: $part"; "$part" ;;
    *) echo "wheels.sh: \"$part\" is none of x86_64, aarch64, sdist" >&2; exit 2 ;;
  esac
done
ls -l "$out"
