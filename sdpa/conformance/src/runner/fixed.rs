//! Random problems of the kernels that sum in fixed point, and of those whose splits have a fixed size.

use super::{in_rows_of_16_bytes, random_ends, random_few, random_packed, random_padded, random_paged, random_spec};
use crate::random::Random;
use sdpa::{AttentionSpec, BackwardSpec, DType, Layout, Mask, SINK, Shape};
use std::ops::RangeInclusive;

const NARROW: [DType; 2] = [DType::BF16, DType::F16];

/// Returns deterministic backward passes, each with a name.
#[must_use]
pub fn fixed_point_problems(random: &mut Random) -> Vec<(&'static str, BackwardSpec)> {
    let mut drawn = |draw: fn(&mut Random, &[DType]) -> AttentionSpec, dims: RangeInclusive<i64>| loop {
        let spec = draw(random, &NARROW);
        if dims.contains(&spec.q.dims[3].max(spec.v.dims[3])) {
            break in_rows_of_16_bytes(spec);
        }
    };
    let (narrow, wide) = (1..=128, 129..=256);
    let sink = |spec: AttentionSpec| spec.with_sink().backward().wrt(SINK, DType::F32);
    let all = [
        ("any", drawn(random_spec, narrow.clone()).backward()),
        ("documents", drawn(random_packed, narrow.clone()).backward()),
        ("ends", drawn(random_ends, narrow.clone()).backward()),
        ("lengths", drawn(random_padded, narrow.clone()).backward()),
        ("lengths and a sink", sink(drawn(random_padded, narrow.clone()))),
        ("documents and a sink", sink(drawn(random_packed, narrow))),
        ("wide heads", drawn(random_spec, wide.clone()).backward()),
        ("wide heads, documents and a sink", sink(drawn(random_packed, wide.clone()))),
        ("wide heads, lengths", drawn(random_padded, wide).backward()),
        ("shared KV heads", shared(random).backward()),
    ];
    all.into_iter().map(|(what, spec)| (what, spec.deterministic())).collect()
}

/// Returns a problem with so few KV blocks that several thread blocks share the query heads of each.
fn shared(random: &mut Random) -> AttentionSpec {
    let [dim_qk, dim_v] = [(); 2].map(|()| random.pick(&[64, 72, 128, 192, 256]));
    let [seq_q, seq_kv] = [random.between(260, 500), random.between(70, 128)];
    let shape = Shape { batch: 1, heads_q: 8, heads_kv: 1, seq_q, seq_kv, dim_qk, dim_v };
    let mask = random.pick(&["causal-bottom-right", "window:150,40", "padding"]);
    AttentionSpec::dense(random.pick(&NARROW), shape, random.pick(&[Layout::Bhsd, Layout::Bshd])).mask(mask.parse::<Mask>().unwrap())
}

/// Returns batch-invariant forward passes with head dims up to 128 and without dropout, each with a name.
#[must_use]
pub fn fixed_split_problems(random: &mut Random) -> Vec<(&'static str, AttentionSpec)> {
    let mut drawn = |draw: fn(&mut Random, &[DType]) -> AttentionSpec| loop {
        let spec = draw(random, &NARROW);
        if spec.q.dims[3].max(spec.v.dims[3]) <= 128 && spec.dropout.is_none() {
            break in_rows_of_16_bytes(spec);
        }
    };
    let mut all = vec![
        ("few", drawn(random_few)),
        ("few with a sink", drawn(random_few).with_sink()),
        ("few with statistics", drawn(random_few).with_row_max().with_sum_exp()),
        ("any", drawn(random_spec)),
        ("documents", drawn(random_packed)),
        ("paged", drawn(random_paged)),
        ("lengths and a sink", drawn(random_padded).with_sink()),
    ];
    all.push(("many keys", many_keys(random).with_row_max().with_sum_exp()));
    all.push(("many keys and a sink", many_keys(random).with_sink().with_row_max().with_sum_exp()));
    all.into_iter().map(|(what, spec)| (what, spec.batch_invariant())).collect()
}

/// Returns a problem with so many query tiles that thread blocks process all splits of each.
fn many_keys(random: &mut Random) -> AttentionSpec {
    let seq_kv = random.between(2049, 4600);
    let [dim_qk, dim_v] = [(); 2].map(|()| 8 * random.between(1, 16));
    let group = random.between(1, 2);
    let shape = Shape { batch: 2, heads_q: 2 * group, heads_kv: 2, seq_q: random.between(130, 300), seq_kv, dim_qk, dim_v };
    let mask = random.pick(&["causal-bottom-right", "window:2600,0:bottom-right", "padding"]);
    AttentionSpec::dense(random.pick(&NARROW), shape, random.pick(&[Layout::Bhsd, Layout::Bshd]))
        .mask(mask.parse::<Mask>().unwrap())
        .with_stats()
}
