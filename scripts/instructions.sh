#!/usr/bin/env bash
# instructions.sh [--bless]: what a call costs on the host, without a GPU and without a clock: instructions and heap allocations, from
# the specification to the filled variant pack, counted by callgrind over the recording library and compared with
# benches/instructions.toml. --bless writes that file instead.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

scripts/setup-valgrind.sh
# Together, so that what both are made of is compiled once.
cargo build --quiet --profile counted --package recording --package bench-sdpa --lib --bin hot
exec python3 scripts/instructions.py "$target/counted/hot" benches/instructions.toml "$@"
