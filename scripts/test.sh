#!/usr/bin/env bash
# test.sh [kernels | offline | others | ARGUMENTS OF cargo test]: every test of the workspace, or those that the arguments name, with everything that they
# need made first. `kernels` are the tests of emulated CUDA and Metal kernels, `offline` those over the real cuDNN and NVRTC, `others` all but these. Ends with
# what was skipped and why; fails where a test fails, or where something is skipped that SDPA_REQUIRE asks for (the offline tests, those over the
# recording library and the emulated kernels, if nothing else is said).
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
if [ "$(uname -s)" = Linux ]; then
  scripts/setup-tests.sh
  cargo build --quiet --package null-driver --package recording --package emulated
  export SDPA_REQUIRE=${SDPA_REQUIRE-offline,recording,msl,cuda}
fi
log=$target/test.log
status=0
whole=$([ "${1:-others}" != others ] || echo yes)
# With counters: what they are told is tested, and that they cost no allocation.
case ${1:-} in
  "" | others | offline | kernels)
    part=${1:-}
    export SDPA_TEST_FEATURES=sdpa/metrics
    set -- --workspace --features "$SDPA_TEST_FEATURES"
    ;;
esac
case ${part:-} in
  # Of the workspace: with `--package` other features are asked for, and most is compiled anew.
  kernels) set -- "$@" --test cuda --test msl ;;
  offline) set -- "$@" --test offline ;;
  # Cargo has no option for all tests but some; these are compiled and not run.
  others)
    host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    export "CARGO_TARGET_${host}_RUNNER=$PWD/scripts/others.sh"
    ;;
esac
cargo test --no-fail-fast "$@" 2>&1 | tee "$log" || status=1

# The examples that are not attention, planned by both runtimes.
if [ "$whole" ] && [ "$(uname -s)" = Linux ]; then
  for runtime in 9.19 9.27; do
    echo "example matmul_bias_gelu on cuDNN $runtime, for an H200's profile"
    CUDNN_GRAPH_LIBRARY=$target/cudnn/$runtime/nvidia/cudnn_jit/lib CUDNN_GRAPH_DRIVER=$target/debug/libnull_driver.so \
      "$target/debug/examples/matmul_bias_gelu" cudnn-graph/devprops/h200.json | tail -4 || status=1
    echo "example fusions on cuDNN $runtime, for an H200's profile"
    CUDNN_GRAPH_LIBRARY=$target/cudnn/$runtime/nvidia/cudnn_jit/lib CUDNN_GRAPH_DRIVER=$target/debug/libnull_driver.so \
      "$target/debug/examples/fusions" cudnn-graph/devprops/h200.json || status=1
  done
fi

echo
awk '/^test result:/ { passed += $4; failed += $6; ignored += $8 }
     END { printf "%d passed, %d failed, %d ignored\n", passed, failed, ignored }' "$log"
skips=$(grep -o 'SKIP .*' "$log" | sort | uniq || true)
if [ -n "$skips" ]; then
  echo "skipped, $(wc -l <<<"$skips") lines:"
  sed 's/^/  /' <<<"$skips"
else
  echo "nothing was skipped"
fi
exit $status
