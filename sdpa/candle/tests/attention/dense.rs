//! Operands: views, strides, types, gradients that share memory, statistics, threads.

use crate::textbook::{CPU, Random, Textbook, close, compare, compare_within, keep, wide};
use candle_core::{DType, Tensor, Var};
use sdpa_candle::{Attention, Mask, library};

fn nothing(scores: &Tensor) -> candle_core::Result<Tensor> {
    Ok(scores.clone())
}

fn capped(scores: &Tensor) -> candle_core::Result<Tensor> {
    (scores / 2.)?.tanh()? * 2.
}

fn textbook<'a>(dim: usize, keep: &'a Tensor, scores: &'a dyn Fn(&Tensor) -> candle_core::Result<Tensor>) -> Textbook<'a> {
    Textbook { scale: 1. / (dim as f64).sqrt(), scores, keep, sink: None, dropped: None }
}

#[test]
fn gradients_of_grouped_heads_are_those_of_the_textbook() {
    let mut random = Random::new(1);
    let (q, k, v) = (random.var(&[2, 6, 19, 8]), random.var(&[2, 2, 37, 8]), random.var(&[2, 2, 37, 5]));
    let attention = Attention::new().score_mod(library::softcap(2.)).mask(Mask::causal_bottom_right());
    let (o, stats) = attention.forward_with_stats(&q, &k, &v).unwrap();
    let [wq, wk, wv] = [&q, &k, &v].map(|x| wide(x));
    let kept = keep(19, 37, |q, k| k <= q + 18);
    let (want, lse) = textbook(8, &kept, &capped).attend(&wq, &wk, &wv).unwrap();
    let weights = random.tensor(&[2, 6, 19, 5]);
    compare("grouped", (&o, &want), &weights, &[("q", &q, &wq), ("k", &k, &wk), ("v", &v, &wv)]);
    close("stats", &stats, &lse, 1e-6);
    assert!(stats.track_op(), "stats have a gradient");
    // If no operand needs a gradient, the result is not part of a graph.
    let plain = attention.forward(&q.detach(), &k.detach(), &v.detach()).unwrap();
    assert!(!plain.track_op() && o.track_op());
    close("untracked", &plain, &want, 1e-5);
}

#[test]
fn a_packed_projection_is_read_through_three_views() {
    let mut random = Random::new(2);
    // The shape is (batch, seq, 3, heads, dim), as a linear layer returns it. The first and the last row are not used.
    let qkv = random.var(&[2, 13, 3, 4, 8]);
    let view = |x: &Tensor, n: usize| x.narrow(1, 1, 11).unwrap().narrow(2, n, 1).unwrap().squeeze(2).unwrap().transpose(1, 2).unwrap();
    let (q, k, v) = (view(&qkv, 0), view(&qkv, 1), view(&qkv, 2));
    assert!(!q.is_contiguous() && k.layout().start_offset() > 0);
    let o = Attention::new().mask(Mask::causal()).forward(&q, &k, &v).unwrap();
    // The output is (batch, seq, heads, dim) in memory, so that the next reshape copies nothing.
    assert!(o.transpose(1, 2).unwrap().is_contiguous());
    let w = wide(&qkv);
    let kept = keep(11, 11, |q, k| k <= q);
    let (want, _) = textbook(8, &kept, &nothing).attend(&view(&w, 0), &view(&w, 1).contiguous().unwrap(), &view(&w, 2)).unwrap();
    compare("views", (&o, &want), &random.tensor(&[2, 4, 11, 8]), &[("qkv", &qkv, &w)]);
}

#[test]
fn strides_that_nobody_reads_in_place_are_copied() {
    let mut random = Random::new(3);
    let (q, k, v) = (random.var(&[1, 2, 8, 7]), random.var(&[1, 1, 8, 9]), random.var(&[1, 2, 9, 6]));
    // The last axis of q and k is not dense; the heads of k share memory.
    let turned = |q: &Tensor, k: &Tensor| (q.transpose(2, 3).unwrap(), k.transpose(2, 3).unwrap().broadcast_as((1, 2, 9, 8)).unwrap());
    let (tq, tk) = turned(&q, &k);
    assert_eq!((tq.stride()[3], tk.stride()[1]), (7, 0));
    let o = Attention::new().forward(&tq, &tk, &v).unwrap();
    let [wq, wk, wv] = [&q, &k, &v].map(|x| wide(x));
    let (uq, uk) = turned(&wq, &wk);
    let kept = keep(7, 9, |_, _| true);
    let (want, _) = textbook(8, &kept, &nothing).attend(&uq.contiguous().unwrap(), &uk.contiguous().unwrap(), &wv).unwrap();
    compare("copied", (&o, &want), &random.tensor(&[1, 2, 7, 6]), &[("q", &q, &wq), ("k", &k, &wk), ("v", &v, &wv)]);
}

#[test]
fn heads_and_entries_that_share_memory_have_gradients_of_their_own() {
    let mut random = Random::new(4);
    let (q, k) = (random.var(&[3, 4, 6, 8]), random.var(&[1, 1, 10, 8]));
    let shared = |k: &Tensor| k.broadcast_as((3, 2, 10, 8)).unwrap();
    let sk = shared(&k);
    assert_eq!(sk.stride()[..2], [0, 0]);
    let o = Attention::new().forward(&q, &sk, &sk).unwrap();
    let [wq, wk] = [&q, &k].map(|x| wide(x));
    let kept = keep(6, 10, |_, _| true);
    let repeated = shared(&wk).contiguous().unwrap();
    let (want, _) = textbook(8, &kept, &nothing).attend(&wq, &repeated, &repeated).unwrap();
    compare("shared", (&o, &want), &random.tensor(&[3, 4, 6, 8]), &[("q", &q, &wq), ("k", &k, &wk)]);
    // The gradient that a plain sum passes on is one number in memory, repeated by strides of 0.
    compare("sum", (&o, &want), &Tensor::ones((), DType::F32, &CPU).unwrap(), &[("k", &k, &wk)]);
    let mine = o.sum_all().unwrap().backward().unwrap();
    let theirs = want.sum_all().unwrap().backward().unwrap();
    close("dk of a sum", mine.get(&k).unwrap(), theirs.get(&wk).unwrap(), 1e-5);
}

#[test]
fn half_precision_is_within_its_roundings() {
    for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let mut random = Random::new(5);
        let round = |x: Tensor| Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
        let (q, k) = (round(random.tensor(&[1, 2, 9, 8])), round(random.tensor(&[1, 2, 11, 8])));
        let v = round(random.tensor(&[1, 2, 11, 8]));
        let o = Attention::new().forward(&q, &k, &v).unwrap();
        assert_eq!(o.dtype(), dtype);
        let [wq, wk, wv] = [&q, &k, &v].map(|x| wide(x));
        let kept = keep(9, 11, |_, _| true);
        let (want, _) = textbook(8, &kept, &nothing).attend(&wq, &wk, &wv).unwrap();
        let weights = random.tensor(&[1, 2, 9, 8]).to_dtype(dtype).unwrap();
        compare_within(dtype.as_str(), (&o, &want), &weights, &[("q", &q, &wq), ("k", &k, &wk), ("v", &v, &wv)], tolerance);
    }
}

#[test]
fn threads_over_one_graph_have_their_own_gradients() {
    let mut random = Random::new(6);
    let (q, slopes) = (random.var(&[1, 2, 33, 8]), random.var(&[2]));
    let attention = Attention::new().score_mod(library::alibi_with()).mask(Mask::causal()).param("slopes", &slopes);
    let o = attention.forward(&q, &q, &q).unwrap();
    let gradient = |factor: f64| {
        let loss = (&o * factor).unwrap().sqr().unwrap().sum_all().unwrap();
        let gradients = loss.backward().unwrap();
        [gradients.get(&slopes).unwrap().clone(), gradients.get(&q).unwrap().clone()]
    };
    let want = [1., 2., 3., 4.].map(gradient);
    std::thread::scope(|scope| {
        for (factor, want) in [1., 2., 3., 4.].into_iter().zip(&want) {
            let gradient = &gradient;
            scope.spawn(move || {
                for _ in 0..20 {
                    let got = gradient(factor);
                    close("slopes", &got[0], &want[0], 1e-6);
                    close("q", &got[1], &want[1], 1e-6);
                }
            });
        }
    });
}
