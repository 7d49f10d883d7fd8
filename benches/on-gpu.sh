#!/usr/bin/env bash
# on-gpu.sh CARRY OUT [SECONDS]: everything that needs a GPU, on a machine that has a driver, a cuDNN and nothing else of ours.
# CARRY holds the binary `device` (cargo build --profile dist -p bench-sdpa --bin device) and, optionally, folders
# cudnn-VERSION with that runtime's libraries, plain or packed with xz, and files plans-VERSION.bin made for the device by
# `cargo sdpa compile --problems benches/problems.toml`. The cuDNN of the active Python environment is used as well. Raw output goes to OUT; SECONDS go to the thread experiment, per runtime.
set -u
carry=$(cd "$1" && pwd); out=$2; seconds=${3:-0}; random=${RANDOM_CASES:-200}
here=$(cd "$(dirname "$0")" && pwd); mkdir -p "$out"
libraries=()
site=$(python3 -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])' 2>/dev/null) && libraries+=("$site/lib")
for packed in "$carry"/cudnn-*; do
  [ -d "$packed" ] || continue
  unpacked=${TMPDIR:-/tmp}/$(basename "$packed"); mkdir -p "$unpacked"
  for f in "$packed"/*; do case $f in *.xz) xz -dc "$f" > "$unpacked/$(basename "${f%.xz}")" ;; *) cp "$f" "$unpacked/" ;; esac; done
  libraries+=("$unpacked")
done
status=0
for library in "${libraries[@]}"; do
  export CUDNN_GRAPH_LIBRARY=$library
  case $library in */cudnn-*) name=$(basename "$library") ;; *) name=python-wheel ;; esac
  {
    date -u +%F; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; echo "$library" | sed 's|.*/nvidia/|…/nvidia/|; s|.*/cudnn-|…/cudnn-|' # names, not this machine's paths
    "$carry/device" suite "$random" || status=1
    for part in cudarc plans graphs lengths limits buckets tuned weight; do "$carry/device" "$part" || status=1; done
    [ "$(nvidia-smi --list-gpus | wc -l)" -lt 2 ] || "$carry/device" gpus || status=1
    plans=$carry/plans-$("$carry/device" version).bin; [ -e "$plans" ] || plans=
    "$carry/device" files ${plans:+"$plans"} || status=1
    [ ! -x "$carry/cargo-sdpa" ] || {
      "$carry/cargo-sdpa" doctor
      python3 - <<'EOF'
import torch
from safetensors.torch import save_file
torch.manual_seed(3)
size = {"q": (2, 8, 1025, 128), "k": (2, 2, 1300, 128), "v": (2, 2, 1300, 128)}
tensors = {n: torch.randn(s, dtype=torch.bfloat16) for n, s in size.items()}
save_file(tensors, "/tmp/q.safetensors")
save_file({**tensors, "do": torch.randn(size["q"], dtype=torch.bfloat16)}, "/tmp/do.safetensors")
EOF
      for how in "do --score-mod @$here/decay.txt --param cap=20 --mask causal --backward" 'q --mask causal-bottom-right' 'q --mask window:200,0:bottom-right' 'q --mask prefix-lm:77 --dtype f16'; do
        input=${how%% *}.safetensors how=${how#* }
        echo "cargo sdpa run --input $input $how ${plans:+--plans $(basename "$plans")} --executor cudnn --check --output o.safetensors"
        # shellcheck disable=SC2086
        "$carry/cargo-sdpa" run --input "/tmp/$input" $how ${plans:+--plans "$plans"} --executor cudnn --check --output /tmp/o.safetensors || status=1
      done
    }
    [ ! -x "$carry/score_mod" ] || "$carry/score_mod" cudnn || status=1
    [ ! -x "$carry/matmul_bias_gelu" ] || "$carry/matmul_bias_gelu" || status=1
  } > "$out/$name-suite.txt" 2>&1
  { date -u +%F; for part in speed host loads scaling growth; do "$carry/device" "$part" || status=1; done
    one=$(mktemp -u); "$carry/device" startup "$one" || status=1
    for _ in 1 2 3; do "$carry/device" startup || status=1; "$carry/device" startup "$one" || status=1; done
    rm -f "$one"; } > "$out/$name-speed.txt" 2>&1
  { date -u +%F; "$carry/device" soak || status=1; } > "$out/$name-soak.txt" 2>&1
  if [ "$seconds" -gt 0 ]; then { date -u +%F; "$carry/device" threads "$seconds" || status=1; } > "$out/$name-threads.txt" 2>&1; fi
done
unset CUDNN_GRAPH_LIBRARY
# NVRTC of the active Python environment, or the system's.
nvrtc=$(python3 -c 'import nvidia.cu13 as c; print(list(c.__path__)[0])' 2>/dev/null) && export SDPA_NVRTC=${SDPA_NVRTC:-$nvrtc/lib}
# Native CUDA kernels: their times, then a process for each part, as every kernel takes a second to compile.
{ date -u +%F; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; "$carry/device" cuda-speed || status=1; } > "$out/cuda-speed.txt" 2>&1
for part in cases library random ends trees; do { date -u +%F; "$carry/device" cuda "$random" "$part"; } > "$out/cuda-$part.txt" 2>&1 & done
wait
# The Metal kernels, through NVRTC.
{ date -u +%F; "$carry/device" msl || status=1; "$carry/device" msl long || status=1
  for tool in racecheck memcheck initcheck synccheck; do
    if command -v compute-sanitizer >/dev/null; then compute-sanitizer --tool $tool --error-exitcode 9 "$carry/device" msl few || status=1
    else echo "SKIP $tool: there is no compute-sanitizer"; fi
  done; } > "$out/msl.txt" 2>&1
python3 "$here/frontend/host.py" > "$out/frontend-host.txt" 2>&1 || echo "the frontend's side did not run" >> "$out/frontend-host.txt"
python3 "$here/torch_sdpa.py" > "$out/torch.txt" 2>&1 || echo "PyTorch's side did not run" >> "$out/torch.txt"
grep -hE 'passed|FAIL|outputs are wrong|differ|SUMMARY|SKIP.*check' "$out"/*-suite.txt "$out"/cuda-*.txt "$out"/*-threads.txt "$out"/msl.txt 2>/dev/null
exit $status
