#!/usr/bin/env bash
# candle-models.sh: compares the models of sdpa-candle's example `models` with candle-transformers' own: logits, generated tokens, gradients.
# candle-transformers takes as long to compile as all of candle, and neither changes often.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --package sdpa-candle --features originals --example models -- -D warnings
cargo test --package sdpa-candle --features originals --example models
