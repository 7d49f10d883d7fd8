#!/usr/bin/env bash
# leaks.sh [BINARY[/MODULE]…]: tests under valgrind, without a GPU: nothing that was allocated is lost at the end. `recorded/calls` alone if
# nothing is said: calls of the raw tier, plans that are made, loaded, evicted and dropped, over the recording library. All of `recorded`
# and `soak` take minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- recorded/calls
scripts/setup-valgrind.sh
cargo build --quiet --package recording
suppressions=$PWD/tests/recording/leaks.supp
for name in "$@"; do
  module=${name#"${name%%/*}"}
  # The features of test.sh, so that nothing is compiled again.
  binary=$(cargo test --no-run --workspace --features sdpa/metrics --test="${name%%/*}" 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
  [ -n "$binary" ] || { echo "leaks: there is no test binary ${name%%/*}" >&2; exit 1; }
  binary=$(realpath "$binary")
  (cd tests && SDPA_REQUIRE=recording valgrind --quiet --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
    --error-exitcode=9 --suppressions="$suppressions" "$binary" --test-threads=1 ${module:+"${module#/}::"}) | tail -3
done
echo "leaks: nothing is lost by $*"
