//! Declared parameters: their gradients, shapes and types.

use crate::textbook::{CPU, Random, Textbook, close, compare, keep, wide};
use candle_core::{DType, Tensor, Var};
use sdpa_candle::expr::{Axis, F32};
use sdpa_candle::{Attention, Mask, ScoreMod, library};

/// A score_mod that declares parameters `names` per head and key, and adds the first once, the second twice, and so on.
fn sums(names: &[&'static str]) -> ScoreMod {
    let one = |(n, name): (usize, &&'static str)| {
        let times = (n + 1) as f32;
        ScoreMod::new(name, move |score, _, p| score + p.tensor(name, [Axis::Head, Axis::K], F32) * times).unwrap()
    };
    let mut all = names.iter().enumerate().map(one);
    let first = all.next().unwrap();
    all.fold(first, ScoreMod::then)
}

#[test]
fn more_parameters_than_an_op_has_arguments_have_their_gradients() {
    let names = ["a", "b", "c", "d", "e", "f"];
    for count in 1..=names.len() {
        let names = &names[..count];
        let mut random = Random::new(count as u64);
        let (q, k, v) = (random.var(&[2, 4, 7, 8]), random.var(&[2, 2, 9, 8]), random.var(&[2, 2, 9, 8]));
        let tracked: Vec<Var> = names.iter().map(|_| random.var(&[4, 9])).collect();
        let mut attention = Attention::new().score_mod(sums(names));
        for (name, x) in names.iter().zip(&tracked) {
            attention = attention.param(name, x);
        }
        let o = attention.forward(&q, &k, &v).unwrap();
        let [wq, wk, wv] = [&q, &k, &v].map(|x| wide(x));
        let wides: Vec<Var> = tracked.iter().map(|x| wide(x)).collect();
        let add = |scores: &Tensor| {
            wides
                .iter()
                .enumerate()
                .try_fold(scores.clone(), |sum, (n, x)| sum.broadcast_add(&(x.reshape((1, 4, 1, 9))? * (n + 1) as f64)?))
        };
        let kept = keep(7, 9, |_, _| true);
        let textbook = Textbook { scale: 1. / 8f64.sqrt(), scores: &add, keep: &kept, sink: None, dropped: None };
        let (want, _) = textbook.attend(&wq, &wk, &wv).unwrap();
        let mut pairs: Vec<(&str, &Tensor, &Tensor)> = vec![("q", &q, &wq), ("k", &k, &wk), ("v", &v, &wv)];
        pairs.extend(names.iter().zip(&tracked).zip(&wides).map(|((name, x), w)| (*name, &**x, &**w)));
        compare(&format!("{count}"), (&o, &want), &random.tensor(&[2, 4, 7, 8]), &pairs);
    }
}

#[test]
fn a_parameter_has_a_gradient_where_operands_have_none() {
    let mut random = Random::new(7);
    let (q, bias) = (random.tensor(&[1, 2, 6, 8]), random.var(&[1, 1, 6, 6]));
    let attention = Attention::new().score_mod(library::bias([Axis::Q, Axis::K], F32));
    // The parameter is computed from a variable. It has four axes, of which the score_mod declares the last two.
    let doubled = (&*bias * 2.).unwrap();
    let o = attention.param("bias", &doubled).forward(&q, &q, &q).unwrap();
    let (wq, wb) = (wide(&q), wide(&bias));
    let add = |scores: &Tensor| scores.broadcast_add(&(&*wb * 2.)?);
    let kept = keep(6, 6, |_, _| true);
    let textbook = Textbook { scale: 1. / 8f64.sqrt(), scores: &add, keep: &kept, sink: None, dropped: None };
    let (want, _) = textbook.attend(&wq, &wq, &wq).unwrap();
    let weights = random.tensor(&[1, 2, 6, 8]);
    compare("bias", (&o, &want), &weights, &[("bias", &bias, &wb)]);
    let gradients = o.sum_all().unwrap().backward().unwrap();
    assert!(gradients.get(&q).is_none(), "nobody asked for the gradient of q");
}

#[test]
fn sinks_and_scalars_are_differentiated() {
    let mut random = Random::new(8);
    let (q, k, sink) = (random.var(&[2, 4, 9, 8]), random.var(&[2, 1, 9, 8]), random.var(&[4]));
    let cap = Var::new(&[1.5f32], &CPU).unwrap();
    let attention = Attention::new().score_mod(library::softcap(1.5)).mask(Mask::causal()).with_sink(&sink).param("cap", &cap);
    let o = attention.forward(&q, &k, &k).unwrap();
    let [wq, wk, ws, wc] = [&q, &k, &sink, &cap].map(|x| wide(x));
    let capped = |scores: &Tensor| scores.broadcast_div(&wc)?.tanh()?.broadcast_mul(&wc);
    let kept = keep(9, 9, |q, k| k <= q);
    let textbook = Textbook { scale: 1. / 8f64.sqrt(), scores: &capped, keep: &kept, sink: Some(&ws), dropped: None };
    let (want, _) = textbook.attend(&wq, &wk, &wk).unwrap();
    let pairs: [(&str, &Tensor, &Tensor); 4] = [("q", &q, &wq), ("k", &k, &wk), ("sink", &sink, &ws), ("cap", &cap, &wc)];
    compare("sink", (&o, &want), &random.tensor(&[2, 4, 9, 8]), &pairs);
}

#[test]
fn truth_values_and_lengths_are_read_from_bytes_and_whole_numbers() {
    let mut random = Random::new(9);
    let (q, k) = (random.var(&[2, 2, 5, 8]), random.var(&[2, 2, 7, 8]));
    let rule = |q: i64, k: i64| (q + 2 * k) % 3 != 0;
    let attention = Attention::new().mask(library::array_mask([Axis::Q, Axis::K])).mask(Mask::padding());
    let attention = attention.param("mask", &keep(5, 7, rule));
    for dtype in [DType::U32, DType::I32, DType::I64] {
        let lengths = |x: [u32; 2]| Tensor::new(&x, &CPU).unwrap().to_dtype(dtype).unwrap();
        let attention = attention.clone().param("seq_len_q", &lengths([5, 3])).param("seq_len_kv", &lengths([4, 7]));
        let o = attention.forward(&q, &k, &k).unwrap();
        let entry = |rows: i64, keys: i64| keep(5, 7, |q, k| rule(q, k) && q < rows && k < keys);
        let kept = Tensor::stack(&[entry(5, 4), entry(3, 7)], 0).unwrap().unsqueeze(1).unwrap();
        let [wq, wk] = [&q, &k].map(|x| wide(x));
        let textbook = Textbook { scale: 1. / 8f64.sqrt(), scores: &|scores| Ok(scores.clone()), keep: &kept, sink: None, dropped: None };
        let (want, _) = textbook.attend(&wq, &wk, &wk).unwrap();
        compare(dtype.as_str(), (&o, &want), &random.tensor(&[2, 2, 5, 8]), &[("q", &q, &wq), ("k", &k, &wk)]);
    }
}

#[test]
fn dropout_is_drawn_by_its_numbers_and_differentiated() {
    let mut random = Random::new(10);
    let q = random.var(&[1, 2, 20, 8]);
    let numbers = |n: i64| Tensor::new(&[n], &CPU).unwrap();
    let drop = |seed: i64| Attention::new().with_dropout(0.5, &numbers(seed), &numbers(0));
    // All values are 1, so an output is the sum of P after dropout.
    let ones = Tensor::ones((1, 2, 20, 8), DType::F32, &CPU).unwrap();
    let (first, again) = (drop(3).forward(&q, &q, &ones).unwrap(), drop(3).forward(&q, &q, &ones).unwrap());
    close("the same seed", &first, &again, 0.);
    let other = drop(4).forward(&q, &q, &ones).unwrap();
    let differs = (&first - &other).unwrap().abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(differs > 1., "another seed drops others: {differs}");
    // All P of a row are equal. With unit vectors as values, the output times the number of keys shows the dropout mask.
    let flat = Tensor::zeros((1, 2, 20, 8), DType::F32, &CPU).unwrap();
    let units = Tensor::eye(20, DType::F32, &CPU).unwrap().broadcast_as((1, 2, 20, 20)).unwrap();
    let mask = (drop(3).forward(&flat, &flat, &units).unwrap() * 20.).unwrap().to_dtype(DType::F64).unwrap().round().unwrap();
    let o = drop(3).forward(&q, &q, &q).unwrap();
    let wq = wide(&q);
    let kept = keep(20, 20, |_, _| true);
    let textbook =
        Textbook { scale: 1. / 8f64.sqrt(), scores: &|scores| Ok(scores.clone()), keep: &kept, sink: None, dropped: Some(&mask) };
    let (want, _) = textbook.attend(&wq, &wq, &wq).unwrap();
    compare("dropout", (&o, &want), &random.tensor(&[1, 2, 20, 8]), &[("q", &q, &wq)]);
}
