//! Packed documents: boundaries of both sides or of each side, with masks and dims; heads, lengths, stats and types in turn.

use super::{Kind, Row, Spec};
use sdpa::{AttentionSpec, DType, Packed, Shape};

const MASKS: [&[&str]; 3] = [&[], &["causal"], &["window:33,0"]];
/// Where keys have boundaries of their own.
const ENDS: [&[&str]; 2] = [&["causal-ends"], &["window:33,0:ends"]];
const DIMS: [(i64, i64); 4] = [(64, 64), (128, 128), (72, 72), (256, 256)];
const HEADS: [(i64, i64); 3] = [(4, 4), (8, 2), (4, 1)];
/// The longest documents: of both sides, and of each side.
const SELF: [i64; 2] = [512, 333];
const CROSS: [(i64, i64); 3] = [(129, 1025), (257, 129), (2, 500)];
const DECODE: (i64, i64) = (1, 500);
const BATCH: i64 = 5;

/// Features that tell the rows apart.
fn name(row: &Row) -> String {
    let [_, _, mask, boundaries, lengths, heads, dims, _, stats, dtype, ..] = &row.features;
    let what = match &row.spec {
        Spec::Forward(_) => stats.as_str(),
        Spec::Backward(b) if b.deterministic => "deterministic",
        Spec::Backward(_) => "any order",
    };
    let pass = if row.spec.is_backward() { "backward: " } else { "" };
    format!("{pass}packed, boundaries {boundaries}; {mask}; {lengths}; {heads}; dims {dims}; {what}; {dtype}")
}

fn push(rows: &mut Vec<Row>, spec: Spec) {
    let mut row = Row::new(String::new(), Kind::Packed, spec);
    row.name = name(&row);
    rows.push(row);
}

/// Every row of both passes: all but the features in turn are the same.
pub(super) fn rows() -> Result<Vec<Row>, String> {
    let [mut forward, mut backward] = [Vec::new(), Vec::new()];
    let decode = [(true, MASKS[0], DIMS[1], Some(DECODE))];
    let product = [false, true].into_iter().flat_map(|cross| MASKS.into_iter().map(move |masks| (cross, masks)));
    let product = product.flat_map(|(cross, masks)| DIMS.into_iter().map(move |dims| (cross, masks, dims, None)));
    let ends = ENDS.into_iter().flat_map(|masks| DIMS[..2].iter().map(move |&dims| (true, masks, dims, None)));
    for (n, (cross, masks, (dim_qk, dim_v), longest)) in product.chain(decode).chain(ends).enumerate() {
        let same = SELF[n / 2 % SELF.len()];
        let (seq_q, seq_kv) = longest.unwrap_or(if cross { CROSS[n % CROSS.len()] } else { (same, same) });
        let (heads_q, heads_kv) = HEADS[(n + n / 6) % HEADS.len()];
        let shape = Shape { batch: BATCH, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let dtype = [DType::BF16, DType::F16][(n + n / 4) % 2];
        // Fewer tokens than documents of the longest; unsaid now and then.
        let total = |seq: i64| (n % 5 > 0).then_some(BATCH * seq / 2);
        let packed = Packed::new().with_cross(cross).with_wide(n % 4 == 1).with_totals(total(seq_q), total(seq_kv));
        let mut spec = AttentionSpec::packed(dtype, shape, packed);
        for mask in masks {
            spec.masks.push(mask.parse().map_err(|e| format!("{e}"))?);
        }
        let mut gradient = spec.clone().backward();
        gradient.deterministic = (n + n / 4) % 3 == 1;
        push(&mut backward, gradient.into());
        spec.stats = n / 2 % 2 == 0;
        push(&mut forward, spec.into());
    }
    forward.extend(backward);
    Ok(forward)
}
