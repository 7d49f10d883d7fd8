#!/usr/bin/env bash
# pack.sh CARRY [CUDNN…]: builds what benches/on-gpu.sh needs on a machine that has a driver and a cuDNN but no Rust, and puts it
# into the folder CARRY. Each CUDNN is NAME=FOLDER, a runtime to take along: its libraries are packed with xz (9.27.0.42 of the
# slim wheel makes 53 MB). The machine needs glibc 2.34 or newer, and python3 with PyTorch for the side-by-side numbers.
set -euo pipefail
cd "$(dirname "$0")/.."
carry=${1:?usage: pack.sh CARRY [NAME=FOLDER…]}; shift; mkdir -p "$carry"
cargo build --profile dist -p bench-sdpa --bin device
cargo build --profile dist -p cargo-sdpa
cargo build --profile dist -p cudnn-graph --example matmul_bias_gelu
cargo build --profile dist -p sdpa --example score_mod
target=${CARGO_TARGET_DIR:-target}/dist
cp "$target/device" "$target/cargo-sdpa" "$target/examples/matmul_bias_gelu" "$target/examples/score_mod" "$carry/"
for runtime in "$@"; do
  folder=$carry/cudnn-${runtime%%=*}; mkdir -p "$folder"
  for library in "${runtime#*=}"/*.so.9; do
    packed=$folder/$(basename "$library").xz
    [ -e "$packed" ] || xz -9 -T0 -c "$library" > "$packed"
  done
done
du -sh "$carry"
