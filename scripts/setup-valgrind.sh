#!/usr/bin/env bash
# setup-valgrind.sh: what counts instructions and finds leaks. Does nothing when it is there; installs Debian's package where it may.
set -euo pipefail
if ! command -v valgrind >/dev/null; then
  as_root=
  if [ "$(id -u)" != 0 ]; then as_root="sudo -n"; fi
  if command -v apt-get >/dev/null && $as_root true 2>/dev/null; then
    echo "setup-valgrind: installing valgrind"
    $as_root apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends valgrind >/dev/null
  else
    echo "setup-valgrind: please install valgrind" >&2
    exit 1
  fi
fi
