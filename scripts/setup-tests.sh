#!/usr/bin/env bash
# setup-tests.sh: what the tests need besides Rust. Two cuDNN runtimes, from their slim wheels, under target/cudnn: the
# offline tests plan with both and need no GPU; others where SDPA_RUNTIMES names them (9.13,9.28); a disassembler beside them. And clang, which makes Metal kernels run here. Does nothing when everything is
# there; installs Debian packages where it may.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}/cudnn
nvrtc=13.5.37
nvdisasm=13.5.37

packages() {
  local missing=()
  command -v cc >/dev/null || command -v gcc >/dev/null || missing+=(gcc libc6-dev)
  command -v python3 >/dev/null || missing+=(python3)
  if ! command -v python3 >/dev/null || ! python3 -m pip --version >/dev/null 2>&1; then missing+=(python3-pip); fi
  # Compiles kernels for the emulations; its sanitizers are a package of their own.
  if ! command -v clang++ >/dev/null; then
    missing+=(clang libclang-rt-dev)
  elif ! [ -e "$(clang++ -print-file-name="libclang_rt.tsan-$(uname -m).a")" ] && ! [ -e "$(clang++ -print-file-name=libclang_rt.tsan.a)" ]; then
    missing+=("libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev")
  fi
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup-tests: installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "setup-tests: please install ${missing[*]}, or the same under your system's names" >&2
    exit 1
  fi
}

# runtime NAME VERSION [PACKAGE]: one cuDNN with the run-time compiler beside it, laid out as in a Python environment. Its metadata asks
# for cuBLAS, which attention does not use. Of a package that is not slim only the three libraries stay that the slim one has: precompiled
# engines want cuBLAS.
runtime() {
  local name=$1 cudnn=$2 package=${3:-nvidia-cudnn-jit-cu13} stamp="cudnn $2 nvrtc $nvrtc"
  if [ "$(cat "$target/$name/stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  echo "setup-tests: cuDNN $cudnn into $target/$name"
  rm -rf "$target/$name.part" "$target/$name"
  mkdir -p "$target"
  python3 -m pip install --quiet --no-deps --no-compile --only-binary=:all: --disable-pip-version-check --root-user-action=ignore \
    --target "$target/$name.part" "$package==$cudnn" "nvidia-cuda-nvrtc==$nvrtc"
  if [ -d "$target/$name.part/nvidia/cudnn" ]; then
    mkdir -p "$target/$name.part/nvidia/cudnn_jit/lib"
    mv "$target/$name.part"/nvidia/cudnn/lib/libcudnn{,_graph,_engines_runtime_compiled}.so.9 "$target/$name.part/nvidia/cudnn_jit/lib"
    rm -rf "$target/$name.part/nvidia/cudnn"
  fi
  rm -rf "$target/$name.part/nvidia/cu13/include" "$target/$name.part/nvidia/cudnn_jit/include"
  find "$target/$name.part" -name '*.a' -delete
  mv "$target/$name.part" "$target/$name"
  # Last, so that what was interrupted is done again.
  echo "$stamp" > "$target/$name/stamp"
}

# disassembler: says which instructions the run-time compiler made.
disassembler() {
  local folder=$target/disassembler stamp="nvdisasm $nvdisasm"
  if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  echo "setup-tests: nvdisasm $nvdisasm into $folder"
  rm -rf "$folder.part" "$folder"
  python3 -m pip install --quiet --no-deps --no-compile --only-binary=:all: --disable-pip-version-check --root-user-action=ignore \
    --target "$folder.part" "nvidia-cuda-nvdisasm==$nvdisasm"
  chmod +x "$folder.part/nvidia/cu13/bin/nvdisasm"
  mv "$folder.part" "$folder"
  echo "$stamp" > "$folder/stamp"
}

packages
runtime 9.19 9.19.0.56
runtime 9.27 9.27.0.42
for name in $(tr ',' ' ' <<<"${SDPA_RUNTIMES:-}"); do
  case $name in
    9.13) runtime 9.13 9.13.1.26 ;;
    9.28) runtime 9.28 9.28.0.42 nvidia-cudnn-cu13 ;; # the index has no slim wheel of it
    9.19 | 9.27) ;;
    *) echo "setup-tests: SDPA_RUNTIMES has $name: 9.13, 9.19, 9.27 and 9.28 are known" >&2 && exit 1 ;;
  esac
done
disassembler
