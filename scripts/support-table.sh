#!/usr/bin/env bash
# support-table.sh: asks two cuDNN runtimes, and those that SDPA_RUNTIMES names beside them (9.13,9.28), about every problem and pass on four
# devices, none of which need be there; keeps the answers in tests/snapshots/support, rewrites what is made of them (docs/support.md, docs/support/, the
# table of `cargo sdpa support`), and compiles everything that the two take. Takes about an hour and a half on two cores, of which the questions take five minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup-tests.sh
cargo build --quiet --package null-driver
export SDPA_REQUIRE=offline
SDPA_BLESS=1 cargo test --quiet --package conformance --test offline every_problem
SDPA_BLESS=1 cargo test --quiet --package conformance --test host support::pages
SDPA_OFFLINE=all cargo test --quiet --package conformance --test offline what_is_taken
git --no-pager diff --stat -- docs/support.md docs/support tests/snapshots/support sdpa/cli/src/support
