#!/usr/bin/env bash
# fresh.sh: what a new user does, in folders outside this repository: adds the crate by path to a program of ten lines and runs it; installs the tool
# with cargo and runs `cargo sdpa` there; with --pip also has pip build and install the package from its folder. Everything is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
clone=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Nothing here is measured; settings of this workspace, such as those of .cargo, must not be needed.
export CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=false

mkdir "$folder/program"
cd "$folder/program"
cargo init --quiet --vcs none --name attend
cargo add --quiet --path "$clone/sdpa"
cat >src/main.rs <<'RUST'
use sdpa::{AttentionSpec, DType, Dispatcher, HostForward, Layout, Mask, Preference, Shape};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
    let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal_bottom_right()).validate()?;
    let choice = Dispatcher::default().prepare(&problem, Preference::Auto)?;
    let (q, k, v, mut o) = (vec![0.5; 4 * 5 * 8], vec![0.25; 2 * 7 * 8], vec![2.0; 2 * 7 * 8], vec![0.0; 4 * 5 * 8]);
    choice.prepared.forward(HostForward::new(&q, &k, &v, &mut o))?;
    println!("{} computed {}", choice.executor, o[0]);
    Ok(())
}
RUST
printed=$(CARGO_TARGET_DIR=$target/fresh cargo run --quiet)
echo "a program with the crate by path: $printed"
[[ $printed == *" computed 2"* ]]

cd "$clone"
# Most of what it depends on was compiled for the program.
. scripts/unoptimised.sh
CARGO_TARGET_DIR=$target/fresh cargo "${unoptimised[@]}" install --quiet --locked --debug --path sdpa/cli --root "$folder/installed" 2>/dev/null
mkdir "$folder/empty"
cd "$folder/empty"
export PATH=$folder/installed/bin:$PATH
cargo sdpa doctor | head -3
cargo sdpa run | tail -3
[ -z "$(ls -A)" ] || { echo "the tool left files behind: $(ls -A)"; exit 1; }

if [ "${1:-}" = --pip ]; then
  cd "$clone"
  . scripts/python-tools.sh
  "$python" -m venv "$folder/venv"
  # numpy for the program below; what builds the package is named in its pyproject.toml.
  (cd "$folder" && CARGO_TARGET_DIR=$target/fresh "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$clone/sdpa/python" 'numpy>=1.26')
  cd "$folder/empty"
  "$folder/venv/bin/python" -c '
import numpy as np
import sdpa
import sdpa.numpy as attention

q, k, v = (np.random.default_rng(seed).standard_normal((1, 4, 16, 8), dtype=np.float32) for seed in range(3))
alibi = sdpa.ScoreMod(lambda score, b, h, q_idx, kv_idx: score + 0.5 * (kv_idx - q_idx))
causal = sdpa.MaskMod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
o, stats = attention.attention(q, k, v, alibi, causal)
assert np.allclose(o[:, :, 0], v[:, :, 0], atol=1e-6)
print("a Python program with the installed package:", o.shape)'
fi
