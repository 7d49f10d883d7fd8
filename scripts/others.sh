#!/usr/bin/env bash
# others.sh BINARY [ARGUMENT…]: runs a test binary, unless another part of scripts/test.sh does. Called by cargo.
case $(basename "$1") in
  cuda-* | msl-*) echo "left to scripts/test.sh kernels: $1" ;;
  offline-*) echo "left to scripts/test.sh offline: $1" ;;
  *) exec "$@" ;;
esac
