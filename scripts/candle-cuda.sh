#!/usr/bin/env bash
# candle-cuda.sh: lints the CUDA half of sdpa-candle on a machine without CUDA. candle's kernels want nvcc when they are built: a stand-in
# answers its questions and writes empty results, which is enough for everything but linking.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -s)" != Linux ]; then
  echo "SKIP candle-cuda: candle builds for CUDA on Linux"
  exit 77
fi
tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/nvcc-stand-in")
mkdir -p "$tools/bin" "$tools/include" "$tools/lib64"
touch "$tools/include/cuda.h"
cat >"$tools/bin/nvcc" <<'NVCC'
#!/usr/bin/env bash
# Stands in for nvcc: a version, a list of architectures, an empty file for every output.
out= dir= inputs=()
while [ $# -gt 0 ]; do
  case $1 in
    --version | -V) printf '%s\n' nvcc stands in "Cuda compilation tools, release 13.0, V13.0.0"; exit ;;
    --list-gpu-code) printf 'sm_%s\n' 80 86 89 90 100; exit ;;
    -o | --output-file) out=$2; shift ;;
    -odir | --output-directory) dir=$2; shift ;;
    *.cu) inputs+=("$1") ;;
  esac
  shift
done
[ -z "$out" ] || : >"$out"
for input in "${inputs[@]}"; do [ -z "$dir" ] || : >"$dir/$(basename "$input" .cu).ptx"; done
NVCC
chmod +x "$tools/bin/nvcc"
export PATH=$tools/bin:$PATH CUDA_HOME=$tools CUDA_PATH=$tools CUDA_ROOT=$tools NVCC=$tools/bin/nvcc CUDA_COMPUTE_CAP=90
# sdpa-cpu is here for what it asks of other crates: candle is then compiled once for both.
cargo clippy --package sdpa-candle --package sdpa-cpu --no-default-features --features sdpa-candle/cuda -- -D warnings
cargo clippy --package sdpa-candle --all-targets --features cuda -- -D warnings
