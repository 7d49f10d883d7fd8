#!/usr/bin/env bash
# leaks.sh [TEST…]: test binaries under valgrind, without a GPU: nothing that was allocated is lost at the end. `recording` alone if
# nothing is said: calls of the raw tier, plans that are made, loaded, evicted and dropped, over the recording library. `soak` and `submissions` take
# minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- recording
scripts/setup-valgrind.sh
cargo build --quiet --package recording
# The features of test.sh, so that nothing is compiled again.
named=("${@/#/--test=}")
mapfile -t binaries < <(cargo test --no-run --workspace --features sdpa/metrics "${named[@]}" 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
[ ${#binaries[@]} -eq $# ] || { echo "leaks: ${#binaries[@]} test binaries of $#: ${binaries[*]}" >&2; exit 1; }
suppressions=$PWD/tests/recording/leaks.supp
for binary in "${binaries[@]}"; do
  binary=$(realpath "$binary")
  (cd tests && SDPA_REQUIRE=recording valgrind --quiet --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
    --error-exitcode=9 --suppressions="$suppressions" "$binary" --test-threads=1) | tail -3
done
echo "leaks: nothing is lost by $*"
