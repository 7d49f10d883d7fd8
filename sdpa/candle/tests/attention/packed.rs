//! Packed sequences.

use crate::textbook::{CPU, Random, Textbook, close, compare, keep, wide};
use candle_core::{DType, Result, Tensor};
use sdpa_candle::{Attention, Documents, Mask};

/// Computes each sequence separately; rows between them are 0.
pub(crate) fn textbook(
    [q, k, v]: [&Tensor; 3],
    [of_q, of_k]: [&[usize]; 2],
    attend: &dyn Fn(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut parts = Vec::new();
    let part = |x: &Tensor, from: usize, to: usize| x.narrow(0, from, to - from)?.transpose(0, 1)?.unsqueeze(0)?.contiguous();
    let zeros = |rows: usize| Tensor::zeros((rows, q.dim(1)?, v.dim(2)?), DType::F64, &CPU);
    parts.push(zeros(of_q[0])?);
    for n in 0..of_q.len() - 1 {
        let (rows, keys) = (of_q[n + 1] - of_q[n], of_k[n + 1] - of_k[n]);
        if rows == 0 || keys == 0 {
            parts.push(zeros(rows)?);
            continue;
        }
        let (k, v) = (part(k, of_k[n], of_k[n + 1])?, part(v, of_k[n], of_k[n + 1])?);
        parts.push(attend(n, &part(q, of_q[n], of_q[n + 1])?, &k, &v)?.squeeze(0)?.transpose(0, 1)?);
    }
    parts.push(zeros(q.dim(0)? - of_q[of_q.len() - 1])?);
    let parts: Vec<Tensor> = parts.into_iter().filter(|part| part.elem_count() > 0).collect();
    Tensor::cat(&parts, 0)
}

pub(crate) fn boundaries(of: &[usize], dtype: DType) -> Tensor {
    Tensor::new(of.iter().map(|&n| n as u32).collect::<Vec<_>>(), &CPU).unwrap().to_dtype(dtype).unwrap()
}

fn each(_: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let shift = k.dim(2)? as i64 - q.dim(2)? as i64;
    let kept = keep(q.dim(2)?, k.dim(2)?, |q, k| k <= q + shift);
    let same = |scores: &Tensor| Ok(scores.clone());
    Ok(Textbook { scale: 1. / 8f64.sqrt(), scores: &same, keep: &kept, sink: None, dropped: None }.attend(q, k, v)?.0)
}

#[test]
fn documents_attend_to_themselves_alone() {
    for dtype in [DType::U32, DType::I32, DType::I64] {
        let mut random = Random::new(11);
        // There is one token before the first sequence, and two after the last. The third sequence is empty.
        let of: &[usize] = &[1, 6, 17, 17, 21];
        let (q, k, v) = (random.var(&[23, 4, 8]), random.var(&[23, 2, 8]), random.var(&[23, 2, 5]));
        let documents = Documents::new(&boundaries(of, dtype), 11).at_most(30);
        let (o, stats) = Attention::new().mask(Mask::causal()).forward_packed_with_stats(&documents, &q, &k, &v).unwrap();
        assert_eq!(stats.dims(), [23, 4]);
        let [wq, wk, wv] = [&q, &k, &v].map(|x| wide(x));
        let want = textbook([&wq, &wk, &wv], [of, of], &each).unwrap();
        compare(dtype.as_str(), (&o, &want), &random.tensor(&[23, 4, 5]), &[("q", &q, &wq), ("k", &k, &wk), ("v", &v, &wv)]);
    }
}

#[test]
fn keys_have_boundaries_of_their_own() {
    let mut random = Random::new(12);
    let (of_q, of_k): (&[usize], &[usize]) = (&[0, 3, 9, 10], &[0, 8, 15, 24]);
    // Keys and values are views of every second head of a cache.
    let cache = random.var(&[24, 4, 8]);
    let heads = |x: &Tensor| x.reshape((24, 2, 2, 8)).unwrap().narrow(2, 1, 1).unwrap().squeeze(2).unwrap();
    let q = random.var(&[10, 4, 8]);
    let documents = Documents::new(&boundaries(of_q, DType::U32), 6).keys(&boundaries(of_k, DType::U32), 9);
    let k = heads(&cache);
    assert_eq!(k.stride(), [32, 16, 1]);
    let o = Attention::new().mask(Mask::causal_ends()).forward_packed(&documents, &q, &k, &k).unwrap();
    let (wq, wc) = (wide(&q), wide(&cache));
    let wk = heads(&wc);
    let want = textbook([&wq, &wk, &wk], [of_q, of_k], &each).unwrap();
    compare("cross", (&o, &want), &random.tensor(&[10, 4, 8]), &[("q", &q, &wq), ("cache", &cache, &wc)]);
}

#[test]
fn what_lies_past_a_view_is_not_reached() {
    let mut random = Random::new(13);
    let all = random.tensor(&[20, 2, 8]);
    let (q, of) = (all.narrow(0, 0, 12).unwrap(), [0, 5, 14]);
    let told = Attention::new().forward_packed(&Documents::new(&boundaries(&of, DType::U32), 9), &q, &q, &q).unwrap_err().to_string();
    assert!(told.contains("q length") && told.contains("memory for 14 tokens"), "{told}");
    let inside = Attention::new().forward_packed(&Documents::new(&boundaries(&[0, 5, 12], DType::U32), 9), &q, &q, &q).unwrap();
    close("inside", &inside.narrow(0, 0, 12).unwrap(), &inside, 0.);
}
