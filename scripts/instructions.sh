#!/usr/bin/env bash
# instructions.sh [--bless]: what a call costs on the host, without a GPU and without a clock: instructions and heap allocations, from
# the specification to the filled variant pack, counted by callgrind over the recording library and compared with
# benches/instructions.toml. --bless writes that file instead.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

scripts/setup-valgrind.sh
cargo build --quiet --release --package recording
cargo build --quiet --release --package bench-sdpa --bin hot
exec python3 scripts/instructions.py "$target/release/hot" benches/instructions.toml "$@"
