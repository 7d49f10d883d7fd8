#!/usr/bin/env bash
# support-table.sh: asks two cuDNN runtimes about every problem and pass on four devices, none of which need be there, rewrites
# docs/support.md, and compiles everything that is taken. Takes about an hour and a half on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup-tests.sh
cargo build --quiet --package null-driver
export SDPA_REQUIRE=offline
SDPA_BLESS=1 cargo test --quiet --package conformance --test offline every_problem
SDPA_OFFLINE=all cargo test --quiet --package conformance --test offline what_is_taken
git --no-pager diff --stat -- docs/support.md tests/snapshots/support
