#!/usr/bin/env bash
# apple.sh: lints everything for Apple machines, and links what they would run, on a machine that is none: every call of Apple's
# interface is held against its declaration, every symbol against scripts/apple-symbols.txt. Nothing is run. Installs the target's
# standard library through rustup; where rustup cannot, Debian's compiler and sources of it.
set -euo pipefail
cd "$(dirname "$0")/.."
triple=aarch64-apple-darwin
built=${CARGO_TARGET_DIR:-target}
sdk=$built/apple-sdk

if [ "$(uname -s)" = Darwin ]; then
  echo "this is an Apple machine: the other steps lint and link for it"
  exit
fi

# stub FILE INSTALL_NAME SYMBOLS: a library as the linker sees it.
stub() {
  mkdir -p "$(dirname "$sdk/$1")"
  printf -- "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '%s'\nexports:\n  - targets: [ arm64-macos ]\n    symbols: [ %s ]\n...\n" \
    "$2" "${3// /, }" >"$sdk/$1"
}

stubs() {
  local library='' symbols name
  rm -rf "$sdk"
  while read -r library symbols; do
    name=$(basename "$library" .dylib)
    case $library in
      */Frameworks/*) stub "${library%/Versions/*}/$name.tbd" "$library" "$symbols" ;;
      *libSystem*) for name in libSystem libc libm; do stub "usr/lib/$name.tbd" "$library" "$symbols"; done ;;
      *) stub "usr/lib/${name%%.*}.tbd" "$library" "$symbols" ;;
    esac
  done < <(sed 's/#.*//' scripts/apple-symbols.txt | awk '/^\//{ if (line) print line; line = $1; next } { for (n = 1; n <= NF; n++) line = line " " $n } END { print line }')
}

# Binaries of macOS 14, the first with the version of MSL that kernels are written in.
linker() {
  local lld
  lld=$(find "$(rustc --print sysroot)/lib/rustlib" -name rust-lld | head -1)
  [ -n "$lld" ] || lld=rust-lld
  local flags=(-Clinker="$lld" -Clinker-flavor=ld64.lld "-Clink-arg=-F$sdk/System/Library/Frameworks" "-Clink-arg=-L$sdk/usr/lib")
  for argument in -platform_version macos 14.0 14.0 -arch arm64; do flags+=("-Clink-arg=$argument"); done
  export CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS="$* ${flags[*]}" SDKROOT=$sdk
}

# What a Mac would run: the tests of the glue, the suite, the benchmark, the command line tool.
link() {
  cargo test --no-run --profile apple --target "$triple" "$@" --package metal-fallback --package conformance --lib \
    --test forward --test backward --test library
  cargo build --profile apple --target "$triple" "$@" --package bench-sdpa --bin metal --package sdpa-cli --bin sdpa
}

skip() { echo "SKIP apple: $*"; exit; }

mkdir -p "$built"
sdk=$(cd "$built" && pwd)/apple-sdk
stubs
if rustup target list --installed 2>/dev/null | grep -qx "$triple" || rustup target add "$triple"; then
  cargo clippy --workspace --all-targets --target "$triple" -- -D warnings
  RUSTDOCFLAGS="-D warnings" cargo doc --quiet --package metal-fallback --package sdpa --no-deps --target "$triple"
  linker
  link
fi
