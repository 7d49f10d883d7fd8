//! Packed queries over a paged KV cache, against the textbook over keys that are gathered sequence by sequence.

use crate::errors::told;
use crate::packed::boundaries;
use crate::textbook::{CPU, Random, Textbook, close, wide};
use candle_core::{DType, Result, Tensor, Var};
use sdpa_candle::{Attention, Mask, Pages, flash_attn_varlen_paged_windowed, library};

/// Four sequences in pages of 4 tokens: one decodes, one prefills the end of its prompt, one has no queries, one has all of its keys as
/// queries.
const PAGE: usize = 4;
const POOL: usize = 9;
const LENGTHS: [usize; 4] = [6, 10, 3, 5];
const OFFSETS: [usize; 5] = [0, 1, 5, 5, 10];
/// The last page of the first and the third sequence is not used, and outside of the pool.
const TABLE: [[u32; 3]; 4] = [[3, 1, 77], [8, 0, 5], [2, 99, 99], [7, 4, 6]];

fn table(dtype: DType) -> Tensor {
    Tensor::new(&TABLE, &CPU).unwrap().to_dtype(dtype).unwrap()
}

fn pages(dtype: DType) -> Pages {
    Pages::new(&table(dtype), &boundaries(&LENGTHS, dtype)).queries(&boundaries(&OFFSETS, dtype), 5)
}

/// Returns (1, heads, keys, dim) of a sequence, from a pool (pages, page size, heads, dim).
fn gathered(pool: &Tensor, sequence: usize) -> Tensor {
    let rows: Vec<Tensor> =
        (0..LENGTHS[sequence]).map(|n| pool.get(TABLE[sequence][n / PAGE] as usize).unwrap().narrow(0, n % PAGE, 1).unwrap()).collect();
    Tensor::cat(&rows, 0).unwrap().transpose(0, 1).unwrap().unsqueeze(0).unwrap().contiguous().unwrap()
}

/// Returns output and stats of the textbook, (tokens, heads, dim) and (tokens, heads). `keep` has a sequence, and positions from its start.
fn textbook(
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    scores: &dyn Fn(&Tensor) -> Result<Tensor>,
    sink: Option<&Tensor>,
    keep: &dyn Fn(usize, i64, i64) -> bool,
) -> [Tensor; 2] {
    let [q, k, v] = [q, k, v].map(wide);
    let parts = (0..4).filter(|n| OFFSETS[n + 1] > OFFSETS[*n]).map(|n| {
        let rows = OFFSETS[n + 1] - OFFSETS[n];
        let shift = LENGTHS[n] as i64 - rows as i64;
        let kept = crate::textbook::keep(rows, LENGTHS[n], |q, k| keep(n, q + shift, k));
        let textbook = Textbook { scale, scores, keep: &kept, sink, dropped: None };
        let q = q.narrow(0, OFFSETS[n], rows).unwrap().transpose(0, 1).unwrap().unsqueeze(0).unwrap();
        let (o, lse) = textbook.attend(&q, &gathered(&k, n), &gathered(&v, n)).unwrap();
        [o.squeeze(0).unwrap().transpose(0, 1).unwrap(), lse.squeeze(0).unwrap().transpose(0, 1).unwrap()]
    });
    let (o, lse): (Vec<Tensor>, Vec<Tensor>) = parts.map(|[o, lse]| (o, lse)).unzip();
    [Tensor::cat(&o, 0).unwrap(), Tensor::cat(&lse, 0).unwrap()]
}

fn same(scores: &Tensor) -> Result<Tensor> {
    Ok(scores.clone())
}

#[test]
fn decode_and_chunked_prefill_read_the_pages_of_their_sequence() {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        for integers in [DType::U32, DType::I32, DType::I64] {
            let mut random = Random::new(41);
            let mut numbers = |dims: &[usize]| random.tensor(dims).to_dtype(dtype).unwrap();
            let (q, k, v) = (numbers(&[10, 4, 8]), numbers(&[POOL, PAGE, 2, 8]), numbers(&[POOL, PAGE, 2, 5]));
            let sink = Random::new(42).tensor(&[4]);
            let attention = Attention::new().score_mod(library::softcap(2.)).mask(Mask::causal_ends()).with_sink(&sink);
            let pages = pages(integers).at_most(10);
            let (o, stats) = attention.forward_paged_with_stats(&pages, &q, &k, &v).unwrap();
            let capped = |scores: &Tensor| (scores / 2.)?.tanh()? * 2.;
            let [want, lse] = textbook([&q, &k, &v], 1. / 8f64.sqrt(), &capped, Some(&*wide(&sink)), &|_, q, k| k <= q);
            close(&format!("{dtype:?} {integers:?}"), &o, &want, tolerance);
            close(&format!("{dtype:?} {integers:?}: stats"), &stats, &lse, tolerance);
            assert_eq!((o.dtype(), o.track_op()), (dtype, false));
        }
    }
}

#[test]
fn pools_may_be_views_and_pages_head_major() {
    let mut random = Random::new(43);
    let q = random.tensor(&[10, 4, 8]);
    // (layer, pages, heads, page size, dim): the pools are the second and the third layer.
    let layers = random.tensor(&[3, POOL, 2, PAGE, 8]);
    let pool = |layer: usize| layers.get(layer).unwrap().transpose(1, 2).unwrap();
    let (k, v) = (pool(1), pool(2));
    assert!(!k.is_contiguous() && k.layout().start_offset() > 0);
    let o = Attention::new().mask(Mask::causal_ends()).forward_paged(&pages(DType::U32), &q, &k, &v).unwrap();
    let [want, _] = textbook([&q, &k, &v], 1. / 8f64.sqrt(), &same, None, &|_, q, k| k <= q);
    close("views", &o, &want, 1e-5);
}

#[test]
fn a_query_for_each_sequence_is_the_default() {
    let mut random = Random::new(44);
    let (q, k) = (random.tensor(&[4, 4, 8]), random.tensor(&[POOL, PAGE, 2, 8]));
    let pages = Pages::new(&table(DType::U32), &boundaries(&LENGTHS, DType::U32));
    let o = Attention::new().mask(Mask::causal_ends()).forward_paged(&pages, &q, &k, &k).unwrap();
    for (n, keys) in LENGTHS.into_iter().enumerate() {
        let (q, k) = (wide(&q.narrow(0, n, 1).unwrap().transpose(0, 1).unwrap().unsqueeze(0).unwrap()), wide(&gathered(&k, n)));
        let kept = crate::textbook::keep(1, keys, |_, _| true);
        let textbook = Textbook { scale: 1. / 8f64.sqrt(), scores: &same, keep: &kept, sink: None, dropped: None };
        let (want, _) = textbook.attend(&q, &k, &k).unwrap();
        close(&format!("{n}"), &o.get(n).unwrap(), &want.squeeze(2).unwrap().squeeze(0).unwrap(), 1e-5);
    }
}

#[test]
fn the_function_of_candle_flash_attn_has_windows_softcaps_and_ranges() {
    let mut random = Random::new(45);
    let (q, k, v) = (random.tensor(&[10, 4, 8]), random.tensor(&[POOL, PAGE, 2, 8]), random.tensor(&[POOL, PAGE, 2, 8]));
    let seqlens_k = boundaries(&[0, 6, 16, 19, 24], DType::U32);
    // Ranges of positions within each sequence; the empty ones have no effect.
    let ranges = [[[0i64, 0], [0, 0]], [[5, 9], [0, 2]], [[0, 3], [0, 0]], [[3, 3], [1, 4]]];
    let tensor = Tensor::new(&ranges, &CPU).unwrap();
    for (left, right, softcap) in
        [(None, Some(0), None), (Some(2), Some(0), None), (Some(1), Some(2), Some(0.4)), (None, None, Some(0.)), (Some(3), None, None)]
    {
        for with_ranges in [false, true] {
            for integers in [DType::U32, DType::I32, DType::I64] {
                let given = with_ranges.then(|| tensor.to_dtype(integers).unwrap());
                let of_k = seqlens_k.to_dtype(integers).unwrap();
                let of_q = boundaries(&OFFSETS, integers);
                let o = flash_attn_varlen_paged_windowed(
                    &q,
                    &k,
                    &v,
                    &of_q,
                    &of_k,
                    &table(integers),
                    given.as_ref(),
                    5,
                    10,
                    0.3,
                    left,
                    right,
                    PAGE,
                    softcap,
                )
                .unwrap();
                let scores = |scores: &Tensor| match softcap {
                    Some(cap) if cap > 0. => (scores / f64::from(cap))?.tanh()? * f64::from(cap),
                    _ => Ok(scores.clone()),
                };
                let keep = |sequence: usize, q: i64, k: i64| {
                    let window = left.is_none_or(|left| k >= q - left as i64) && right.is_none_or(|right| k <= q + right as i64);
                    let inside = |&[start, end]: &[i64; 2]| [q, k].iter().all(|at| (start..end).contains(at));
                    window || with_ranges && ranges[sequence].iter().any(inside)
                };
                let [want, _] = textbook([&q, &k, &v], f64::from(0.3f32), &scores, None, &keep);
                close(&format!("{left:?} {right:?} {softcap:?} {with_ranges} {integers:?}"), &o, &want, 1e-5);
            }
        }
    }
}

#[test]
fn tensors_that_require_a_gradient_are_refused() {
    let mut random = Random::new(46);
    let (q, k, sink) = (random.var(&[10, 4, 8]), random.var(&[POOL, PAGE, 2, 8]), random.var(&[4]));
    let attention = Attention::new().with_sink(&sink);
    told(
        attention.forward_paged(&pages(DType::U32), &q, &k, &k),
        &["q: got a tensor that requires a gradient", "k: got", "v: got", "parameter sink: got", "pass `detach()` of it"],
    );
    let attention = Attention::new().with_sink(&sink.detach());
    assert!(attention.forward_paged(&pages(DType::U32), &q.detach(), &k.detach(), &k.detach()).is_ok());
}

#[test]
fn wrong_pages_are_named_at_once() {
    let mut random = Random::new(47);
    let (q, k) = (random.tensor(&[10, 4, 8]), random.tensor(&[POOL, PAGE, 2, 8]));
    let of = |pages: &Pages| Attention::new().forward_paged(pages, &q, &k, &k);
    let (table, lengths, offsets) = (table(DType::U32), boundaries(&LENGTHS, DType::U32), boundaries(&OFFSETS, DType::U32));
    told(
        of(&Pages::new(&table.to_dtype(DType::F32).unwrap(), &lengths.narrow(0, 0, 3).unwrap()).queries(&offsets, 5)),
        &[
            "page_table dtype: got f32",
            "page_table shape: got [4, 3], expected [3, pages of a sequence]",
            "cu_seqlens_q shape: got [5], expected [4]",
        ],
    );
    let lengths_of = |lengths: &[usize; 4]| of(&Pages::new(&table, &boundaries(lengths, DType::U32)).queries(&offsets, 5));
    told(lengths_of(&[6, 13, 3, 5]), &["seq_len_kv[1]: got 13, expected between 0 and 12, the keys of a row of page_table"]);
    told(lengths_of(&[9, 10, 3, 5]), &["page_table[0][2]", "77", "the page pool has 9 pages"]);
    told(
        Attention::new().forward_paged(&pages(DType::U32), &q, &k.flatten_to(1).unwrap(), &k.narrow(1, 0, 3).unwrap()),
        &["k shape: got [36, 2, 8], expected (page, token, head, dim)"],
    );
    told(
        Attention::new().forward_paged(&pages(DType::U32), &q, &k, &k.narrow(1, 0, 3).unwrap()),
        &["v shape: got [9, 3, 2, 8], expected [9, 4]"],
    );
    let turned = random.tensor(&[POOL, PAGE, 8, 2]).transpose(2, 3).unwrap();
    told(
        Attention::new().forward_paged(&pages(DType::U32), &q, &turned, &k),
        &["k strides: got [64, 16, 1, 2], expected a dense last axis"],
    );
    let more = Random::new(48).tensor(&[9, 4, 8]);
    told(Attention::new().forward_paged(&pages(DType::U32), &more, &k, &k), &["q length"]);

    let flash = |of_q: &Tensor, of_k: &Tensor, ranges: Option<&Tensor>, page: usize| {
        flash_attn_varlen_paged_windowed(&q, &k, &k, of_q, of_k, &table, ranges, 5, 10, 0.3, None, Some(0), page, None)
    };
    let of_k = boundaries(&[0, 6, 16, 19, 24], DType::U32);
    let ranges = Tensor::zeros((4, 2), DType::F32, &CPU).unwrap();
    told(
        flash(&offsets, &of_k.narrow(0, 0, 4).unwrap(), Some(&ranges), 8),
        &[
            "seqlens_k length: got 4, expected 5",
            "page_block_size: got 8, expected 4",
            "mm_prefix_ranges shape: got [4, 2], expected [4, ranges, 2]",
            "mm_prefix_ranges dtype: got f32",
        ],
    );
    told(flash(&offsets, &boundaries(&[0, 6, 5, 8, 13], DType::U32), None, 4), &["seq_len_kv[1]: got -1"]);
    told(
        flash(&offsets.to_dtype(DType::F32).unwrap(), &of_k.unsqueeze(0).unwrap(), None, 4),
        &["seqlens_q dtype: got f32", "seqlens_k shape"],
    );
    let var = Var::from_tensor(&q).unwrap();
    let tracked = flash_attn_varlen_paged_windowed(&var, &k, &k, &offsets, &of_k, &table, None, 5, 10, 0.3, None, Some(0), 4, None);
    told(tracked, &["q: got a tensor that requires a gradient"]);
}
