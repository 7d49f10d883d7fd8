#!/usr/bin/env bash
# apple.sh [rustup | debian | lint]: lints everything for Apple machines, and links what they would run, on a machine that is none: every call of Apple's
# interface is held against its declaration, every symbol against scripts/apple-symbols.txt. Nothing is run. Installs the target's
# standard library through rustup; where rustup cannot, Debian's compiler and sources of it. `lint` alone links nothing, and makes no pages.
set -euo pipefail
cd "$(dirname "$0")/.."
triple=aarch64-apple-darwin
built=${CARGO_TARGET_DIR:-target}

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

# Binaries of macOS 14, the first with the version of MSL that kernels are written in. The linker is beside rustup's compiler.
linker() {
  local lld argument flags
  lld=$(find "$(rustup run "${RUSTUP_TOOLCHAIN:-$(rustup show active-toolchain | cut -d' ' -f1)}" rustc --print sysroot)/lib/rustlib" -name rust-lld | head -1)
  [ -n "$lld" ] || skip "there is no rust-lld to link with"
  flags=("$@" -Clinker="$lld" -Clinker-flavor=ld64.lld "-Clink-arg=-F$sdk/System/Library/Frameworks" "-Clink-arg=-L$sdk/usr/lib")
  for argument in -platform_version macos 14.0 14.0 -arch arm64; do flags+=("-Clink-arg=$argument"); done
  export CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS="${flags[*]}" SDKROOT=$sdk
}

# What calls Metal on a Mac: the tests of the glue, the benchmark, the command line tool. It does not run here, so nothing is optimised; what
# runs in the compiler is that of every other step.
link() {
  . scripts/unoptimised.sh
  export CARGO_PROFILE_DEV_STRIP=none
  # The same packages for both, so that both ask the same features of dependencies, which are compiled once.
  local packages=(--package metal-fallback --package bench-sdpa --package cargo-sdpa)
  cargo "${unoptimised[@]}" test --no-run --target "$triple" "$@" "${packages[@]}" --lib
  cargo "${unoptimised[@]}" build --target "$triple" "$@" "${packages[@]}" --bin metal --bin cargo-sdpa
}

# Nothing is an Apple binary that does not say so.
linked() {
  local n=0 file
  while read -r file; do
    n=$((n + 1))
    [ "$(od -An -tx4 -N8 "$file" | tr -d ' \n')" = feedfacf0100000c ] || { echo "$file is no arm64 binary of macOS"; exit 1; }
  done < <(find "$1/$triple/debug/deps" -type f -perm -u+x ! -name '*.*')
  [ "$n" -ge 3 ] || { echo "only $n binaries were linked"; exit 1; }
  echo "$n arm64 binaries for macOS are linked; none is run"
}

# Crates that differ by target, and those that a Mac runs. Clippy lints the libraries that they depend on as well, which is all of them but the
# integrations; the tests of the others are the same as on every target.
differing() {
  local file
  echo cargo-sdpa
  while read -r file; do
    until grep -qs '^\[package\]' "$file/Cargo.toml"; do file=$(dirname "$file"); done
    sed -n 's/^name = "\(.*\)"/\1/p' "$file/Cargo.toml" | head -1
  done < <(grep -rlE 'target_(vendor|os|arch)' --include='*.rs' --include=Cargo.toml --exclude-dir=target .)
}

with_rustup() {
  rustup target list --installed 2>/dev/null | grep -qx "$triple" || rustup target add "$triple" || return
  rm -rf "$built/$triple/debug/deps/"{metal,sdpa,cargo_sdpa}*-????????????????
  local crates=()
  # The integrations have nothing of Apple's own, and much to compile; what stands in for CUDA's libraries is Linux's.
  while read -r crate; do crates+=(--package "$crate"); done < <(differing | sort -u | grep -vE '^(sdpa-candle|sdpa-python|emulated|recording|null-driver)$')
  cargo clippy "${crates[@]}" --all-targets --target "$triple" -- -D warnings || exit
  [ "${1:-}" != lint ] || return 0
  RUSTDOCFLAGS="-D warnings" cargo doc --quiet --package metal-fallback --package sdpa --no-deps --target "$triple" || exit
  linker
  link || exit
  linked "$built"
}

# The compiler of Debian's security archive and the sources of the standard library, which is built too: no package has it for macOS.
# There is no clippy for it; warnings are errors all the same.
with_debian() {
  local prefix=$built/apple-debian std llvm package
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || return
  [ "$(id -u)" != 0 ] || apt-get update -qq || return
  std=$(apt-cache depends libstd-rust-web-dev 2>/dev/null | awk '/ Depends: libstd-rust-web-[0-9]/ { print $2 }')
  llvm=$(apt-cache depends "${std:-none}" 2>/dev/null | awk '/ Depends: libllvm/ { print $2 }')
  [ -n "$llvm" ] || return
  mkdir -p "$prefix/debs"
  for package in rustc-web "$std" libstd-rust-web-dev rust-web-src "$llvm"; do
    compgen -G "$prefix/debs/${package}_*.deb" >/dev/null || (cd "$prefix/debs" && apt-get download -qq "$package") || return
    [ -e "$prefix/$package.there" ] || { dpkg -x "$prefix/debs/$package"_*.deb "$prefix" && touch "$prefix/$package.there"; } || return
  done
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s/usr/lib/x86_64-linux-gnu:%s exec %s/usr/bin/rustc "$@"\n' \
    "$prefix" "$(dirname "$(find "$prefix/usr/lib" -name 'libLLVM*.so*' | head -1)")" "$prefix" >"$prefix/rustc"
  chmod +x "$prefix/rustc"
  linker -Dwarnings
  export RUSTC=$prefix/rustc RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$prefix/target
  link -Zbuild-std=std,panic_abort,test || exit
  linked "$prefix/target"
}

# 77 says that it is a skip to who called.
skip() {
  echo "SKIP apple: $*"
  case ,${SDPA_REQUIRE:-}, in *,apple,*) exit 1 ;; esac
  exit 77
}

mkdir -p "$built"
built=$(cd "$built" && pwd)
sdk=$built/apple-sdk
stubs
case ${1:-any} in
  rustup | lint) with_rustup "$1" || skip "rustup has no standard library for $triple" ;;
  debian) with_debian || skip "Debian's compiler and its sources are not to be had" ;;
  any) with_rustup || with_debian || skip "neither rustup nor Debian's packages have a standard library for $triple" ;;
  *) echo "apple.sh [rustup | debian | lint]: \"$1\" is none of these" >&2; exit 2 ;;
esac
