//! 8-bit floats: with masks, score_mods, lengths of entries and dims; formats, results, heads, lengths, stats and layouts in turn.

use super::{Kind, Row, Spec};
use sdpa::{AttentionSpec, DType, Layout, Shape};

const MASKS: [&[&str]; 7] =
    [&[], &["causal"], &["window:128,0"], &["causal-bottom-right"], &["padding"], &["padding", "causal"], &["prefix-lm:40"]];
const SCORE_MODS: [&str; 3] = ["", "", "softcap:30"];
const DIMS: [[i64; 2]; 5] = [[128, 128], [64, 64], [192, 128], [256, 256], [80, 80]];
const HEADS: [(i64, i64); 3] = [(4, 4), (8, 2), (6, 6)];
const LENGTHS: [(i64, i64); 4] = [(333, 333), (1, 1025), (256, 512), (500, 257)];
/// Of q, k and v; of the output; of its gradient; of theirs.
const TYPES: [[DType; 4]; 5] = [
    [DType::F8E4M3, DType::F8E4M3, DType::F8E4M3, DType::F8E4M3],
    [DType::F8E4M3, DType::F8E4M3, DType::F8E5M2, DType::F8E5M2],
    [DType::F8E5M2, DType::F8E5M2, DType::F8E5M2, DType::F8E5M2],
    [DType::F8E4M3, DType::BF16, DType::F8E5M2, DType::BF16],
    [DType::F8E4M3, DType::F8E5M2, DType::F8E4M3, DType::F16],
];

fn name(row: &Row) -> String {
    let [_, score_mod, mask, _, lengths, heads, dims, layout, stats, dtype, ..] = &row.features;
    let what = match &row.spec {
        Spec::Forward(_) => stats.as_str(),
        Spec::Backward(b) if b.deterministic => "deterministic",
        Spec::Backward(_) => "any order",
    };
    let pass = if row.spec.is_backward() { "backward: " } else { "" };
    format!("{pass}8 bits; score_mod {score_mod}; {mask}; {lengths}; {heads}; dims {dims}; {layout}; {what}; {dtype}")
}

fn push(rows: &mut Vec<Row>, spec: Spec) {
    let mut row = Row::new(String::new(), Kind::Fp8, spec);
    row.name = name(&row);
    rows.push(row);
}

/// Every row of both passes.
pub(super) fn rows() -> Result<Vec<Row>, String> {
    let [mut forward, mut backward] = [Vec::new(), Vec::new()];
    let product = MASKS.iter().flat_map(|mask| LENGTHS.iter().map(move |lengths| (mask, lengths)));
    for (n, (mask, &(seq_q, seq_kv))) in product.enumerate() {
        let (heads_q, heads_kv) = HEADS[n % HEADS.len()];
        let [dim_qk, dim_v] = if n % 2 == 0 { [128; 2] } else { DIMS[n / 2 % DIMS.len()] };
        let [dtype, o, d_o, gradient] = TYPES[(n + n / 7) % TYPES.len()];
        let shape = Shape { batch: 2, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let mut spec = AttentionSpec::dense(dtype, shape, [Layout::Bshd, Layout::Bhsd][n / 2 % 2]).with_output_in(o);
        for mask in *mask {
            spec.masks.push(mask.parse().map_err(|e| format!("{e}"))?);
        }
        let score_mod = SCORE_MODS[n % SCORE_MODS.len()];
        let mut gradients = spec.clone().backward().with_upstream_in(d_o).with_gradients_in(gradient);
        gradients.deterministic = n % 5 == 1;
        push(&mut backward, gradients.into());
        if !score_mod.is_empty() {
            spec.score_mods.push(score_mod.parse().map_err(|e| format!("{e}"))?);
        }
        spec.stats = n / 2 % 2 == 0;
        push(&mut forward, spec.into());
    }
    forward.extend(backward);
    Ok(forward)
}
