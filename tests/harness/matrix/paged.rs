//! Paged caches: pages of every size, one query or several, masks beside lengths or without; containers, score_mods, sinks, dims, heads, stats
//! and types in turn; the same with packed queries. Forward alone: a cache is not trained.

use super::{Kind, Row};
use sdpa::{AttentionSpec, DType, Layout, Mask, Paged, Shape};

const PAGE_SIZES: [i64; 5] = [1, 16, 48, 64, 128];
const MASKS: [&str; 3] = ["", "causal-bottom-right", "window:128,0:bottom-right"];
/// One query, and several.
const LENGTHS: [[(i64, i64); 3]; 2] = [[(1, 1025), (1, 500), (1, 2048)], [(257, 500), (333, 333), (5, 700)]];
const SCORE_MODS: [&str; 4] = ["", "softcap:30", "", "alibi"];
const DIMS: [i64; 4] = [64, 128, 72, 256];
const HEADS: [(i64, i64); 3] = [(8, 1), (8, 2), (4, 4)];
const BATCH: i64 = 3;
/// Of packed queries.
const PACKED: ([&str; 3], [i64; 3]) = (["", "causal-ends", "window:128,0:ends"], [16, 48, 128]);

fn name(row: &Row) -> String {
    let [_, score_mod, mask, _, lengths, heads, dims, _, stats, dtype, _, pages, sink, _] = &row.features;
    format!("paged, {pages}; score_mod {score_mod}; {mask}; {lengths}; {heads}; dims {dims}; {sink}; {stats}; {dtype}")
}

/// Every row, always in the same order.
pub(super) fn rows() -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    let product = MASKS.iter().flat_map(|mask| [false, true].into_iter().map(move |padded| (mask, padded)));
    let product = product.flat_map(|(mask, padded)| LENGTHS.into_iter().map(move |lengths| (mask, padded, lengths)));
    let product = product.flat_map(|what| PAGE_SIZES.into_iter().map(move |page_size| (what, page_size)));
    for (n, ((mask, padded, lengths), page_size)) in product.enumerate() {
        let (seq_q, seq_kv) = lengths[(n + n / 10) % lengths.len()];
        let (heads_q, heads_kv) = HEADS[(n + n / 6) % HEADS.len()];
        let dim = DIMS[(n + n / 20) % DIMS.len()];
        let shape = Shape { batch: BATCH, heads_q, heads_kv, seq_q, seq_kv, dim_qk: dim, dim_v: dim };
        let mut paged = Paged::new(page_size, 1);
        paged.pages = BATCH * paged.pages_of(seq_kv) + 3;
        let mut spec = AttentionSpec::paged([DType::BF16, DType::F16][(n + n / 4) % 2], shape, paged);
        if n % 3 == 1 {
            (spec.k, spec.v) = (paged.dense(spec.k.dims, Layout::Bhsd), paged.dense(spec.v.dims, Layout::Bhsd));
        }
        if !mask.is_empty() {
            spec.masks.push(mask.parse().map_err(|e| format!("{e}"))?);
        }
        if padded {
            spec.masks.push(Mask::padding());
        }
        let score_mod = SCORE_MODS[(n + n / 15) % SCORE_MODS.len()];
        if !score_mod.is_empty() {
            spec.score_mods.push(score_mod.parse().map_err(|e| format!("{e}"))?);
        }
        (spec.sink, spec.stats) = (n % 7 > 4, n / 2 % 2 == 0);
        let mut row = Row::new(String::new(), Kind::Paged, spec.into());
        row.name = name(&row);
        rows.push(row);
    }
    let (masks, page_sizes) = PACKED;
    let product = masks.into_iter().flat_map(|mask| LENGTHS.into_iter().map(move |lengths| (mask, lengths)));
    let product = product.flat_map(|what| page_sizes.into_iter().map(move |page_size| (what, page_size)));
    for (n, ((mask, lengths), page_size)) in product.enumerate() {
        let (seq_q, seq_kv) = lengths[(n + n / 10) % lengths.len()];
        let (heads_q, heads_kv) = HEADS[(n + n / 6) % HEADS.len()];
        let dim = DIMS[(n + n / 4) % DIMS.len()];
        let shape = Shape { batch: BATCH, heads_q, heads_kv, seq_q, seq_kv, dim_qk: dim, dim_v: dim };
        let paged = Paged::new(page_size, BATCH * Paged::new(page_size, 1).pages_of(seq_kv));
        let dtype = [DType::BF16, DType::F16][(n + n / 4) % 2];
        let mut spec = AttentionSpec::paged(dtype, shape, paged).with_packed_queries(BATCH * seq_q);
        if !mask.is_empty() {
            spec.masks.push(mask.parse().map_err(|e| format!("{e}"))?);
        }
        let score_mod = SCORE_MODS[(n + n / 15) % SCORE_MODS.len()];
        if !score_mod.is_empty() {
            spec.score_mods.push(score_mod.parse().map_err(|e| format!("{e}"))?);
        }
        (spec.sink, spec.stats) = (n % 7 > 4, n / 2 % 2 == 0);
        let mut row = Row::new(String::new(), Kind::Paged, spec.into());
        row.name = name(&row);
        rows.push(row);
    }
    Ok(rows)
}
