#!/usr/bin/env bash
# release.sh --dry-run | --upload: makes a release, in order: checks that the tree can be released, checks licences, advisories and semver, builds every
# crate from its archive, builds and tries the wheels and the source distribution, installs all of it as a new user would. --dry-run ends there and lists
# what is missing; --upload stops before the first step where anything is missing, and at the end uploads and tags.
# docs/releasing.md says what a person does before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  --dry-run | --upload) mode=$1 ;;
  *) echo "usage: scripts/release.sh --dry-run | --upload" >&2; exit 2 ;;
esac
step() { echo; echo "== $*"; "$@"; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
last=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)

missing=()
need() { "${@:2}" || missing+=("$1"); }
clean() { [ -z "$(git status --porcelain)" ]; }
has_repository() { grep -q '^repository = "https://' Cargo.toml; }
has_notes() { grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}" CHANGELOG.md; }
is_new() { ! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null; }
python_agrees() { grep -q "^version = \"$version\"" sdpa/python/Cargo.toml; }
semver_checks() { [ -z "$last" ] || cargo semver-checks --version >/dev/null 2>&1; }
tokens() { [ -n "${CARGO_REGISTRY_TOKEN:-}" ] || [ -e "${CARGO_HOME:-$HOME/.cargo}/credentials.toml" ]; }
need "uncommitted changes: commit or remove them" clean
need "the repository's address: set workspace.package.repository in Cargo.toml (docs/releasing.md)" has_repository
need "CHANGELOG.md needs a heading \"## [$version] - YYYY-MM-DD\"" has_notes
need "the tag v$version exists: raise workspace.package.version" is_new
need "sdpa/python/Cargo.toml has another version than $version" python_agrees
need "cargo-semver-checks is not installed: cargo install --locked cargo-semver-checks" semver_checks
need "no token for crates.io: cargo login, or CARGO_REGISTRY_TOKEN" tokens
need "no token for PyPI: MATURIN_PYPI_TOKEN" test -n "${MATURIN_PYPI_TOKEN:-}"
report() {
  [ ${#missing[@]} -eq 0 ] || { echo "missing for a release of $version:"; printf '  - %s\n' "${missing[@]}"; }
}
if [ $mode = --upload ] && [ ${#missing[@]} -gt 0 ]; then
  report
  exit 1
fi

step scripts/msrv.sh
deny=0
step scripts/deny.sh || deny=$?
case $deny in
  0) ;;
  77) missing+=("advisories were not checked: see scripts/deny.sh above") ;;
  *) exit "$deny" ;;
esac
if [ -n "$last" ] && semver_checks; then
  step cargo semver-checks --workspace --baseline-rev "$last"
else
  echo; echo "== cargo semver-checks: there is no earlier release to compare with"
fi
allow=()
clean || allow=(--allow-dirty)
# Every crate is built from its archive, against the archives of the others.
CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=false step cargo publish --workspace --dry-run --locked --quiet "${allow[@]}"
step scripts/wheels.sh
step scripts/fresh.sh --pip

if [ $mode = --dry-run ] || [ ${#missing[@]} -gt 0 ]; then
  echo
  report
  [ $mode = --dry-run ] || exit 1
  echo "dry run of $version done: nothing was uploaded"
  exit
fi
step cargo publish --workspace --locked
. scripts/python-tools.sh
step "$tools/bin/maturin" upload "$target"/dist-python/*
step git tag -a "v$version" -m "$version"
echo "uploaded; now push the tag: git push origin v$version"
