#!/usr/bin/env bash
# faults.sh [metal|cuda]: tries faults that rules make of kernels, and writes what became of each to benches/results. Fails where a fault survives that is
# not known to change nothing.
#
# metal: every fault of the Metal kernels (tests/harness/msl/generated.rs), from half an hour on, to metal-faults.txt.
# cuda: 100 mutants of the CUDA kernels (tests/harness/mutants.rs), about an hour on two cores, to cuda-mutants.txt. SDPA_SEED chooses others,
# SDPA_MUTANTS fewer or more, or those that a file lists as this writes them.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
case ${1:-metal} in
  metal)
    results=benches/results/metal-faults.txt
    SDPA_REQUIRE=msl SDPA_FAULTS=all cargo test --package conformance --test msl -- --nocapture faults_that_rules_make | tee "$log" || status=1
    title="What became of every fault that rules make of the Metal kernels: scripts/faults.sh"
    summary='^faults by rules'
    ;;
  cuda)
    results=benches/results/cuda-mutants.txt
    cargo build --quiet --package emulated
    SDPA_REQUIRE=cuda cargo test --package conformance --test cuda -- --ignored --nocapture --exact mutants::mutants_are_found | tee "$log" || status=1
    title="What became of mutants of the CUDA kernels: scripts/faults.sh cuda"
    summary='^mutants'
    ;;
  *)
    echo "faults.sh [metal|cuda]" >&2
    exit 2
    ;;
esac
{
  echo "# $title, $(date -u +%F), $(clang++ --version | head -1)"
  grep "$summary" "$log"
  echo
  grep '^fault ' "$log" | sed 's/^fault //; s/; found, \([A-Za-z]*\).*/; found, \1/; s/\(; found by [^:]*\): .*\(TIME LIMIT\|CRASH\).*/\1, \2/; s/\(; found by [^:]*\): .*/\1/' | sort -t: -k1,1 -k2,2n
} > "$results"
exit $status
