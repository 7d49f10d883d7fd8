#!/usr/bin/env bash
# msrv.sh: compiles every published crate, with all features, by the oldest Rust that its Cargo.toml promises (rust-version). Installs that
# toolchain through rustup. sdpa-candle is left out: candle-core needs a newer Rust, so it promises only the one that CI runs.
set -euo pipefail
cd "$(dirname "$0")/.."

# 77 says to the caller that this step was skipped.
skip() {
  echo "SKIP msrv: $*"
  case ,${SDPA_REQUIRE:-}, in *,msrv,*) exit 1 ;; esac
  exit 77
}

version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
command -v rustup >/dev/null || skip "rustup, which installs Rust $version, is not here"
rustup run "$version" rustc --version >/dev/null 2>&1 || rustup toolchain install "$version" --profile minimal --no-self-update ||
  skip "Rust $version cannot be installed"

crates=()
while read -r crate; do crates+=(--package "$crate"); done < <(scripts/published.py --without sdpa-candle)
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/msrv
rustup run "$version" cargo check --quiet --locked --all-features "${crates[@]}"
echo "$((${#crates[@]} / 2)) crates compile with Rust $version"
