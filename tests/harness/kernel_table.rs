//! The native CUDA kernels that tests compile without a GPU: every tile configuration, every data type, and each option that changes the kernel source.

use sdpa::cuda::mma::{self, TileConfig};
use sdpa::cuda::{Backward, Forward, source};
use sdpa::{AttentionSpec, BackwardSpec, DType, Layout, Mask, Packed, Paged, Shape, StatsBase};

/// Dims, type, score_mod (or none), masks.
pub type Row = ([i64; 2], DType, &'static str, &'static [&'static str]);

/// Every tile configuration, both types, and each thing that makes another text.
pub const TABLE: [Row; 10] = [
    ([64, 64], DType::BF16, "", &[]),
    ([64, 64], DType::F16, "softcap:30", &["causal"]),
    ([128, 64], DType::BF16, "alibi", &["padding", "causal"]),
    ([128, 128], DType::BF16, "softcap:30", &["causal", "document"]),
    ([128, 128], DType::F16, "bias:hqk", &["prefix-lm:100"]),
    ([128, 128], DType::BF16, "", &["natten:17"]),
    ([192, 128], DType::BF16, "", &["padding", "window:300,0:ends"]),
    ([192, 192], DType::F16, "score * cos(f32(q - k)) / (1.0 + sqrt(f32(head)))", &["dilated:3", "causal"]),
    ([256, 256], DType::BF16, "softcap:50", &["window:400,0"]),
    ([72, 40], DType::BF16, "select(abs(score) > 3.0, erf(score), exp(-score) + pow(score, 2.0))", &["array:qk"]),
];

/// The problem of a row.
///
/// # Panics
/// If a score_mod or mask does not parse.
pub fn spec([dim_qk, dim_v]: [i64; 2], dtype: DType, score_mod: &str, masks: &[&str]) -> AttentionSpec {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 700, dim_qk, dim_v };
    let mut spec = AttentionSpec::dense(dtype, shape, Layout::Bshd).with_stats();
    if !score_mod.is_empty() {
        spec = spec.score_mod(score_mod.parse().unwrap_or_else(|e| panic!("{score_mod}: {e}")));
    }
    for text in masks {
        spec = spec.mask(text.parse::<Mask>().unwrap_or_else(|e| panic!("{text}: {e}")));
    }
    spec
}

/// How keys, values and queries lie, where that makes another text.
#[derive(Clone, Copy, Debug)]
pub enum Lies {
    /// Documents one behind the other: whether queries and keys have the same, whether boundaries are i64.
    Packed(bool, bool),
    /// So many queries beside 9,000 keys, in two batch entries.
    Few(i64),
    /// The same, keys in pages of so many; packed queries where asked.
    Paged(i64, i64, bool),
}

/// Dims, type, score_mod (or none), masks, how tokens lie, and whether nothing may be spilled. Forward alone.
pub type Other = ([i64; 2], DType, &'static str, &'static [&'static str], Lies, bool);

/// Rows of packed, decode and paged problems.
pub const OTHERS: [Other; 15] = [
    ([64, 64], DType::F16, "", &["causal"], Lies::Packed(false, false), true),
    ([128, 128], DType::BF16, "", &["causal"], Lies::Packed(false, true), true),
    ([128, 128], DType::BF16, "softcap:30", &["window:300,0:ends"], Lies::Packed(true, false), false),
    ([256, 256], DType::BF16, "", &["document"], Lies::Packed(false, false), false),
    ([64, 64], DType::F16, "", &["padding"], Lies::Few(4), true),
    ([128, 128], DType::BF16, "", &["padding", "causal-ends"], Lies::Few(1), true),
    ([128, 128], DType::BF16, "softcap:30", &["array:hqk"], Lies::Few(3), false),
    ([192, 128], DType::BF16, "", &[], Lies::Few(30), true),
    ([256, 256], DType::BF16, "alibi", &["window:3000,0:bottom-right"], Lies::Few(60), false),
    ([128, 128], DType::BF16, "", &["causal-bottom-right"], Lies::Few(128), true),
    ([64, 64], DType::F16, "", &["padding"], Lies::Few(150), false),
    ([128, 128], DType::BF16, "", &["padding", "causal-ends"], Lies::Paged(1, 16, false), true),
    ([64, 64], DType::F16, "", &["causal-ends"], Lies::Paged(300, 64, true), false),
    ([128, 128], DType::BF16, "softcap:30", &["causal-ends"], Lies::Paged(400, 16, true), true),
    ([256, 256], DType::BF16, "", &["causal-ends"], Lies::Paged(4, 8, true), true),
];

/// The problem of such a row.
pub fn lying((dims, dtype, score_mod, masks, lies, _): Other) -> AttentionSpec {
    let dense = spec(dims, dtype, score_mod, masks);
    let few = |seq_q| {
        let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q, seq_kv: 9000, dim_qk: dims[0], dim_v: dims[1] };
        AttentionSpec::dense(dtype, shape, Layout::Bshd)
    };
    match lies {
        Lies::Paged(seq_q, page_size, packed) => {
            let few = few(seq_q);
            let cache = Paged::new(page_size, 900);
            let [k, v] = [few.k, few.v].map(|tensor| cache.dense(tensor.dims, Layout::Bshd));
            let paged = few.with_score_mods(dense.score_mods).with_masks(dense.masks).with_k(k).with_v(v).with_paged(cache).with_stats();
            if packed { paged.with_packed_queries(700) } else { paged }
        }
        Lies::Few(seq_q) => few(seq_q).with_score_mods(dense.score_mods).with_masks(dense.masks).with_stats().with_sink(),
        Lies::Packed(cross, wide) => {
            let [batch, heads_q, seq, dim_qk] = dense.q.dims;
            let [_, heads_kv, seq_kv, dim_v] = dense.v.dims;
            let seq_q = if cross { seq } else { seq_kv };
            let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
            let packed = AttentionSpec::packed(dtype, shape, Packed::new().with_cross(cross).with_wide(wide));
            packed.with_score_mods(dense.score_mods).with_masks(dense.masks).with_stats()
        }
    }
}

/// The problems of a row, with a name each, and whether the compiler may spill nothing of them: as it is, with a sink, with dropout.
pub fn specs_of_row(&(dims, dtype, score_mod, masks): &Row) -> Vec<(String, AttentionSpec, bool)> {
    let plain = score_mod.is_empty() && masks.len() < 2 && dims != [256, 256];
    let name = format!("{dims:?} {dtype} {score_mod} {}", masks.join(" & "));
    let spec = spec(dims, dtype, score_mod, masks);
    let mut all = vec![(name.clone(), spec.clone(), plain)];
    if dims == [128, 128] {
        all.push((format!("{name}, sink"), spec.clone().with_sink(), plain));
    }
    if matches!(dims, [64, 64] | [128, 128] | [256, 256]) {
        all.push((format!("{name}, dropout"), spec.with_dropout(0.1), false));
    }
    all
}

/// A row for the family with `mma.sync`: dims, type, whether rows lie at multiples of 16 bytes, score_mod (or none), masks.
pub type MmaRow = ([i64; 2], DType, bool, &'static str, &'static [&'static str]);

/// Every tile configuration, every type, copies and plain loads, and each thing that makes another text.
pub const MMA_TABLE: [MmaRow; 13] = [
    ([64, 64], DType::BF16, true, "", &[]),
    ([64, 64], DType::F16, true, "softcap:30", &["causal"]),
    ([128, 128], DType::BF16, true, "", &["causal"]),
    ([128, 128], DType::F16, true, "bias:hqk", &["prefix-lm:100"]),
    ([128, 128], DType::BF16, false, "softcap:30", &["causal", "document"]),
    ([128, 64], DType::BF16, true, "alibi", &["padding", "causal"]),
    ([192, 128], DType::BF16, true, "", &["padding", "window:300,0:ends"]),
    ([256, 256], DType::BF16, true, "softcap:50", &["window:400,0"]),
    ([77, 33], DType::F16, false, "score * cos(f32(q - k)) / (1.0 + sqrt(f32(head)))", &["dilated:3", "causal"]),
    ([64, 64], DType::F16, true, "relative-bias:4,20", &["causal"]),
    ([64, 64], DType::F32, true, "", &["causal"]),
    ([128, 128], DType::F32, true, "softcap:30", &["causal"]),
    ([256, 256], DType::F32, false, "select(abs(score) > 3.0, erf(score), exp(-score) + pow(score, 2.0))", &["array:qk"]),
];

/// Devices that texts are compiled for.
pub const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_89", "sm_90"];

/// The kernel sources of a row, with the name of each: both passes, and for causal rows dropout, pages and packed sequences.
///
/// # Panics
/// If the family does not support the problem.
pub fn mma_texts(&(dims, dtype, wide, score_mod, masks): &MmaRow) -> Vec<(&'static str, String)> {
    let mut spec = spec(dims, dtype, score_mod, masks);
    if !wide {
        [spec.q.alignment, spec.k.alignment, spec.v.alignment, spec.o.alignment] = [4; 4];
    }
    let forward = mma::forward(&spec.validate().unwrap()).unwrap();
    let along = [("bias:hqk", "bias"), ("relative-bias:4,20", "rel")].into_iter().find(|(of, _)| *of == score_mod);
    let gradient = along.map_or_else(|| spec.backward(), |(_, name)| spec.backward().wrt(name, DType::F32));
    let backward = mma::backward(&gradient.validate().unwrap()).unwrap();
    let ordered = along.map(|_| mma::backward(&gradient.deterministic().validate().unwrap()).unwrap());
    let (config, back) = (TileConfig::of_forward(&forward).unwrap(), TileConfig::of_backward(&backward).unwrap());
    let texts = [
        ("forward", mma::forward_text(&forward, &config)),
        ("queries", mma::queries_text(&backward, &back)),
        ("keys", mma::keys_text(&backward, &back)),
    ];
    let texts = texts.into_iter().chain(ordered.map(|ordered| ("keys in one order", mma::keys_text(&ordered, &back))));
    let dropped = (masks == ["causal"]).then(|| mma::backward(&spec.clone().with_dropout(0.1).backward().validate().unwrap()).unwrap());
    let texts = texts.chain(dropped.into_iter().flat_map(|dropped| {
        let forward = mma::forward_text(&dropped.forward, &config);
        let [queries, keys] = [mma::queries_text, mma::keys_text].map(|text| text(&dropped, &back));
        [("forward, dropout,", forward), ("queries, dropout,", queries), ("keys, dropout,", keys)]
    }));
    let paged = (masks == ["causal"]).then(|| {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 700, dim_qk: dims[0], dim_v: dims[1] };
        let paged = AttentionSpec::paged(dtype, shape, Paged::new(7, 300)).mask(Mask::padding());
        mma::forward_text(&mma::forward(&paged.validate().unwrap()).unwrap(), &config)
    });
    let texts = texts.chain(paged.map(|paged| ("forward, pages,", paged)));
    let packed = (masks == ["causal"]).then(|| {
        let shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 300, dim_qk: dims[0], dim_v: dims[1] };
        let packed = AttentionSpec::packed(dtype, shape, Packed::of(700)).mask(Mask::causal()).backward();
        mma::backward(&packed.validate().unwrap()).unwrap()
    });
    let texts = texts.chain(packed.into_iter().flat_map(|packed| {
        let forward = mma::forward_text(&packed.forward, &config);
        let [queries, keys] = [mma::queries_text, mma::keys_text].map(|text| text(&packed, &back));
        [("forward, documents,", forward), ("queries, documents,", queries), ("keys, documents,", keys)]
    }));
    texts.collect()
}

/// A kernel source to compile.
#[derive(Clone, Debug)]
pub struct TableKernel {
    /// The problem and the pass; no two kernels of the table have the same.
    pub name: String,
    /// The CUDA source.
    pub source: String,
    /// The architecture that it is compiled for, such as `sm_80`.
    pub architecture: &'static str,
}

/// Problems that the rows above leave out: parameter gradients, sink gradients, query heads split over CTAs, deterministic passes, all statistics, base-2
/// statistics, long traces, decode with dropout, a long band.
fn more() -> Vec<(&'static str, AttentionSpec, BackwardSpec)> {
    let dense = |shape| AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
    let shape = |heads: [i64; 2], seq: [i64; 2], dims: [i64; 2]| Shape {
        batch: 1,
        heads_q: heads[0],
        heads_kv: heads[1],
        seq_q: seq[0],
        seq_kv: seq[1],
        dim_qk: dims[0],
        dim_v: dims[1],
    };
    let bias = spec([128, 128], DType::BF16, "bias:hqk", &["causal"]);
    let wide = spec([256, 256], DType::BF16, "bias:hqk", &[]);
    let table = spec([64, 64], DType::F16, "relative-bias:4,20", &["padding", "causal"]);
    let sink = spec([128, 128], DType::F16, "", &["causal"]).with_sink();
    let shared = dense(shape([8, 1], [300, 230], [128, 104]));
    let shared_wide = dense(shape([6, 1], [260, 110], [200, 256]));
    let [plain, narrow] = [[128, 128], [64, 64]].map(|dims| spec(dims, DType::BF16, "", &[]));
    let wide_keys = spec([192, 128], DType::BF16, "", &["causal"]);
    let wide_capped = spec([256, 256], DType::BF16, "softcap:50", &["causal"]);
    let wide_dropped = spec([256, 256], DType::F16, "", &["causal"]).with_dropout(0.1);
    let all = dense(shape([4, 2], [300, 700], [128, 128])).with_row_max().with_sum_exp();
    let decode = dense(shape([8, 2], [3, 9000], [128, 128])).with_row_max().with_sum_exp().with_sink();
    let two = dense(shape([4, 2], [300, 700], [64, 64])).with_stats_in(StatsBase::Two);
    let long_trace = |name| spec([64, 64], DType::BF16, name, &["causal"]);
    let (sixteen, many) = (long_trace("sandwich:16"), long_trace("sandwich:64"));
    let dropped = |seq_q| dense(shape([8, 2], [seq_q, 9000], [128, 128])).with_dropout(0.1);
    let long_band = dense(shape([4, 4], [9000, 9000], [128, 128])).mask(Mask::causal());
    vec![
        ("gradient of a bias", bias.clone(), bias.backward().wrt("bias", DType::F32)),
        ("gradient of a bias, wide heads", wide.clone(), wide.backward().wrt("bias", DType::BF16)),
        ("gradient of a table", table.clone(), table.backward().wrt("rel", DType::F32)),
        ("gradient of a sink", sink.clone(), sink.backward().wrt("sink", DType::F32)),
        ("one KV head", shared.clone(), shared.backward()),
        ("one KV head, wide heads", shared_wide.clone(), shared_wide.backward()),
        ("one KV head, deterministic", shared.clone(), shared.backward().deterministic()),
        ("one KV head, wide heads, deterministic", shared_wide.clone(), shared_wide.backward().deterministic()),
        ("deterministic", plain.clone(), plain.backward().deterministic()),
        ("deterministic, narrow heads", narrow.clone(), narrow.backward().deterministic()),
        ("deterministic, wide queries and keys", wide_keys.clone(), wide_keys.backward().deterministic()),
        ("deterministic, wide heads", wide_capped.clone(), wide_capped.backward().deterministic()),
        ("deterministic, wide heads, dropout", wide_dropped.clone(), wide_dropped.backward().deterministic()),
        ("all statistics", all.clone(), all.backward()),
        ("all statistics, split KV", decode.clone(), decode.backward()),
        ("base-2 statistics", two.clone(), spec([64, 64], DType::BF16, "", &["padding"]).backward()),
        ("16 cosines", sixteen.clone(), sixteen.backward()),
        ("64 cosines", many.clone(), many.backward()),
        ("decode with dropout", dropped(3), dropped(3).backward()),
        ("few queries with dropout", dropped(20), dropped(20).backward()),
        ("a long band", long_band.clone(), long_band.backward()),
    ]
}

/// Every kernel of the table, of both families and for every architecture.
///
/// # Panics
/// If a family does not support a problem of the table.
pub fn all() -> Vec<TableKernel> {
    let mut kernels = Vec::new();
    let mut tuned = |name: &str, forward: &AttentionSpec, backward: Option<&BackwardSpec>| {
        let of = Forward::of(&forward.validate().unwrap()).unwrap();
        let source = source::forward(&of, &of.tile(132).unwrap());
        kernels.push(TableKernel { name: format!("wgmma forward {name}"), source, architecture: "sm_90a" });
        if let Some(spec) = backward {
            let of = Backward::of(&spec.validate().unwrap()).unwrap();
            let source = source::backward(&of, &of.tile(132).unwrap());
            kernels.push(TableKernel { name: format!("wgmma backward {name}"), source, architecture: "sm_90a" });
        }
    };
    for row in &TABLE {
        for (name, spec, _) in specs_of_row(row) {
            tuned(&name, &spec, Some(&spec.clone().backward()));
        }
    }
    for other in OTHERS {
        let (spec, packed) = (lying(other), matches!(other.4, Lies::Packed(..)));
        let name = format!("{:?} {} {} {} {:?}", other.0, other.1, other.2, other.3.join(" & "), other.4);
        tuned(&name, &spec, packed.then(|| spec.clone().backward()).as_ref());
    }
    for (name, forward, backward) in more() {
        tuned(name, &forward, Some(&backward));
    }
    for row in &MMA_TABLE {
        let (dims, dtype, wide, score_mod, masks) = row;
        let row_name = format!("{dims:?} {dtype}{} {score_mod} {}", if *wide { "" } else { " unaligned" }, masks.join(" & "));
        for (what, source) in mma_texts(row) {
            kernels.extend(ARCHITECTURES.map(|architecture| TableKernel {
                name: format!("mma {} {row_name} {architecture}", what.trim_end_matches(',')),
                source: source.clone(),
                architecture,
            }));
        }
    }
    kernels
}
