//! Dropout: with masks, score_mods, lengths of entries, documents, sinks and dims; heads, lengths, stats and types in turn.

use super::{Kind, Row, Spec};
use sdpa::{AttentionSpec, DType, Layout, Packed, Shape};

const MASKS: [&[&str]; 5] = [&[], &["causal"], &["window:128,0"], &["padding"], &["array:hqk"]];
const SCORE_MODS: [&str; 3] = ["", "softcap:30", "bias:hqk"];
const DIMS: [i64; 4] = [64, 128, 72, 256];
const HEADS: [(i64, i64); 3] = [(8, 1), (8, 2), (4, 4)];
const LENGTHS: [(i64, i64); 4] = [(333, 333), (1, 1025), (257, 500), (500, 257)];

fn name(row: &Row) -> String {
    let [_, score_mod, mask, boundaries, lengths, heads, dims, _, stats, dtype, _, _, sink, _] = &row.features;
    let what = match &row.spec {
        Spec::Forward(_) => stats.as_str(),
        Spec::Backward(b) if b.deterministic => "deterministic",
        Spec::Backward(_) => "any order",
    };
    let pass = if row.spec.is_backward() { "backward: " } else { "" };
    format!(
        "{pass}dropout; score_mod {score_mod}; {mask}; boundaries {boundaries}; {sink}; {lengths}; {heads}; dims {dims}; {what}; {dtype}"
    )
}

fn push(rows: &mut Vec<Row>, spec: Spec) {
    let mut row = Row::new(String::new(), Kind::Dropout, spec);
    row.name = name(&row);
    rows.push(row);
}

/// Every row of both passes.
pub(super) fn rows() -> Result<Vec<Row>, String> {
    let [mut forward, mut backward] = [Vec::new(), Vec::new()];
    let product = MASKS.iter().flat_map(|mask| LENGTHS.iter().map(move |lengths| (mask, lengths)));
    for (n, (mask, &(seq_q, seq_kv))) in product.enumerate() {
        let (heads_q, heads_kv) = HEADS[n % HEADS.len()];
        let dim = DIMS[(n + n / 4) % DIMS.len()];
        let shape = Shape { batch: 2, heads_q, heads_kv, seq_q, seq_kv, dim_qk: dim, dim_v: dim };
        let dtype = [DType::BF16, DType::F16][(n + n / 4) % 2];
        let packed = mask.len() < 2 && !mask.contains(&"padding") && seq_q == seq_kv;
        let mut spec = if packed && n % 8 == 0 {
            AttentionSpec::packed(dtype, shape, Packed::of(2 * seq_q))
        } else {
            AttentionSpec::dense(dtype, shape, [Layout::Bshd, Layout::Bhsd][n / 2 % 2])
        };
        spec = spec.with_dropout(0.1);
        spec.sink = n % 5 == 3;
        for mask in *mask {
            spec.masks.push(mask.parse().map_err(|e| format!("{e}"))?);
        }
        let score_mod = SCORE_MODS[n / 3 % 3];
        if !score_mod.is_empty() {
            spec.score_mods.push(score_mod.parse().map_err(|e| format!("{e}"))?);
        }
        let mut gradient = spec.clone().backward();
        gradient.deterministic = n % 3 == 1;
        push(&mut backward, gradient.into());
        spec.stats = n / 2 % 2 == 0;
        push(&mut forward, spec.into());
    }
    forward.extend(backward);
    Ok(forward)
}
