#!/usr/bin/env bash
# instructions.sh [--bless]: what a call costs on the host, without a GPU and without a clock: instructions and heap allocations, from
# the specification to the filled variant pack, counted by callgrind over the recording library and compared with
# benches/instructions.toml. --bless writes that file instead.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

if ! command -v valgrind >/dev/null; then
  as_root=
  if [ "$(id -u)" != 0 ]; then as_root="sudo -n"; fi
  if command -v apt-get >/dev/null && $as_root true 2>/dev/null; then
    echo "instructions: installing valgrind"
    $as_root apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends valgrind >/dev/null
  else
    echo "instructions: please install valgrind" >&2
    exit 1
  fi
fi
cargo build --quiet --release --package recording
cargo build --quiet --release --package bench-sdpa --bin hot
exec python3 scripts/instructions.py "$target/release/hot" benches/instructions.toml "$@"
