#!/usr/bin/env bash
# faults.sh: tries every fault that rules make of the Metal kernels (tests/harness/msl/generated.rs), which takes from half an hour on, and
# writes what became of each to benches/results/metal-faults.txt. Fails where a fault survives that is not known to change nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
results=benches/results/metal-faults.txt
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
SDPA_REQUIRE=msl SDPA_FAULTS=all cargo test --package conformance --test msl -- --nocapture faults_that_rules_make | tee "$log" || status=1
{
  echo "# What became of every fault that rules make of the Metal kernels: scripts/faults.sh, $(date -u +%F), $(clang++ --version | head -1)"
  grep '^faults by rules' "$log"
  echo
  grep '^fault ' "$log" | sed 's/^fault //; s/; found, \([A-Za-z]*\).*/; found, \1/' | sort -t: -k1,1 -k2,2n
} > "$results"
exit $status
