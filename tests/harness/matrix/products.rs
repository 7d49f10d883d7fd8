//! Masks and lengths, with heads, dims, layouts, stats and types in turn.

use super::features::order;
use super::{Kind, Row, Spec};
use sdpa::{AttentionSpec, DType, Layout, Shape};

pub(super) const MASKS: [(&str, &[&str]); 12] = [
    ("no mask", &[]),
    ("causal", &["causal"]),
    ("causal, bottom right", &["causal-bottom-right"]),
    ("window", &["window:33,0"]),
    ("window, bottom right", &["window:33,0:bottom-right"]),
    ("window on both sides", &["window:17,9"]),
    ("window on both sides, bottom right", &["window:17,9:bottom-right"]),
    ("window open on the left", &["window:inf,5"]),
    ("window open on the right", &["window:33,inf"]),
    ("prefix", &["prefix-lm:20"]),
    ("prefix and window", &["prefix-lm:20", "window:33,inf"]),
    ("prefix and window, bottom right", &["prefix-lm:20", "window:33,9:bottom-right"]),
];
const LENGTHS: [(i64, i64); 7] = [(2048, 2048), (333, 333), (129, 1025), (257, 129), (1, 500), (1, 1), (8, 8)];
const DIMS: [(i64, i64); 5] = [(64, 64), (128, 128), (192, 128), (256, 256), (72, 72)];
const HEADS: [(i64, i64); 3] = [(4, 4), (8, 2), (4, 1)];
const LAYOUTS: [Layout; 3] = [Layout::Bshd, Layout::Bhsd, Layout::Sbhd];

/// Features that tell the rows of a product apart.
fn name(row: &Row) -> String {
    let [_, _, mask, _, _, heads, dims, _, stats, dtype, ..] = &row.features;
    let forward = row.spec.forward();
    let layout: String = order(forward).split(", ").filter_map(|word| word.chars().next()).collect();
    let lengths = format!("{}x{}", forward.q.dims[2], forward.k.dims[2]);
    let what = match &row.spec {
        Spec::Forward(_) => stats.as_str(),
        Spec::Backward(b) if b.deterministic => "deterministic",
        Spec::Backward(_) => "any order",
    };
    let pass = if row.spec.is_backward() { "backward: " } else { "" };
    format!("{pass}{mask}; {lengths}; {heads}; dims {dims}; {layout}; {what}; {dtype}")
}

fn push(rows: &mut Vec<Row>, spec: Spec) {
    let mut row = Row::new(String::new(), Kind::General, spec);
    row.name = name(&row);
    rows.push(row);
}

fn attention(
    masks: &[&str],
    (seq_q, seq_kv): (i64, i64),
    (dim_qk, dim_v): (i64, i64),
    (heads, layout, dtype): (usize, usize, usize),
) -> Result<AttentionSpec, String> {
    let (heads_q, heads_kv) = HEADS[heads % HEADS.len()];
    let shape = Shape { batch: 2, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
    let dtype = if dtype % 2 == 0 { DType::BF16 } else { DType::F16 };
    let mut spec = AttentionSpec::dense(dtype, shape, LAYOUTS[layout % LAYOUTS.len()]);
    for mask in masks {
        spec.masks.push(mask.parse().map_err(|e| format!("{e}"))?);
    }
    Ok(spec)
}

/// Every mask at all lengths and dims.
pub(super) fn forward() -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    let mut n = 0;
    for (_, masks) in MASKS {
        for lengths in LENGTHS {
            for dims in DIMS {
                let mut spec = attention(masks, lengths, dims, (n, n / 3, n / 7))?;
                spec.stats = n / 2 % 2 == 0;
                push(&mut rows, spec.into());
                n += 1;
            }
        }
    }
    Ok(rows)
}

/// Every mask at all lengths; dims in turn.
pub(super) fn backward() -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    let mut n = 0;
    for (_, masks) in MASKS {
        for lengths in LENGTHS {
            let mut spec = attention(masks, lengths, DIMS[n % DIMS.len()], (n, n / 3, n / 2))?.backward();
            spec.deterministic = n / 5 % 2 == 1;
            push(&mut rows, spec.into());
            n += 1;
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::features::mask_feature;
    use sdpa::Mask;

    #[test]
    fn masks_are_what_they_are_called() {
        for (name, masks) in MASKS {
            let masks: Vec<Mask> = masks.iter().map(|m| m.parse().unwrap()).collect();
            assert_eq!(mask_feature(&masks), name);
        }
    }
}
