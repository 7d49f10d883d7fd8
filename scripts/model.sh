#!/usr/bin/env bash
# model.sh: the promises of the cache of plans, in every order of steps that a model checker tries. It sets what `--cfg shuttle` does for
# the crates of the workspace alone, so that what they depend on is compiled once for this and for every other test.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -gt 0 ]; then
  # Called by cargo, in place of the compiler that it names first.
  exec "$@" --cfg shuttle
fi
RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/model.sh cargo test --package sdpa-cache --features metrics --lib model
