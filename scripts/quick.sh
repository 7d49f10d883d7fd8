#!/usr/bin/env bash
# quick.sh CRATE: runs the tests of one crate and those of the conformance suites that cover it, before the whole of `.ci/run`.
set -euo pipefail
cd "$(dirname "$0")/.."
# One set of features, so that nothing is compiled for one suite and again for the next.
suite() { scripts/test.sh --package conformance --features sdpa/metrics --test "$@"; }
export SDPA_TEST_FEATURES=sdpa/metrics

own=${1:-}
case $own in
  sdpa-core) suites=("host -- --skip cli::" "executors -- cpu::") ;;
  sdpa-cpu) suites=("executors -- cpu::" "host -- property::") ;;
  sdpa-cuda | sdpa-emit) suites=("offline -- cuda" "recorded -- cuda") ;;
  sdpa-driver | sdpa-nvidia | cudnn-graph | sdpa-cudnn) suites=("host -- lowering:: snapshots:: property:: house::" recorded) ;;
  sdpa-cache) suites=(soak "recorded -- key::") ;;
  metal-fallback) suites=("msl -- any_two_features_meet sources functions") ;;
  sdpa) suites=("host -- house:: params:: seq::") ;;
  sdpa-parallel) suites=("host -- house::") ;;
  cargo-sdpa) suites=("host -- cli::") ;;
  sdpa-oracle) suites=("executors -- cpu::" "host -- cli::check") ;;
  sdpa-conformance) suites=("executors -- cpu::" "host -- cli::prove") ;;
  *)
    echo "quick.sh sdpa-core | sdpa-driver | sdpa-emit | sdpa-nvidia | sdpa-cuda | sdpa-cpu | sdpa-cudnn | sdpa-cache | sdpa-oracle | sdpa-conformance | sdpa-parallel | sdpa | cargo-sdpa | cudnn-graph | metal-fallback" >&2
    exit 2
    ;;
esac
cargo test --package "$own"
if [ "$own" = sdpa-cache ]; then cargo test --package cache-model; fi
for arguments in "${suites[@]}"; do
  # Words of a line above.
  # shellcheck disable=SC2086
  suite $arguments
done
