//! Gradients through `stats`, against candle's own autograd over the textbook formula in f64.

use crate::packed::boundaries;
use crate::textbook::{CPU, Random, Textbook, close, keep, wide};
use candle_core::{DType, Result, Tensor, Var};
use sdpa_candle::expr::{Axis, F32};
use sdpa_candle::{Attention, Documents, Mask, ScoreMod, library};

fn capped(scores: &Tensor) -> Result<Tensor> {
    (scores / 2.)?.tanh()? * 2.
}

/// Returns the log-sum-exp of each row without subtracting its maximum, so that a row may have no term but the sink. A row without any
/// term has 0.
fn log_sum_exp(q: &Tensor, k: &Tensor, keep: &Tensor, sink: Option<&Tensor>) -> Tensor {
    let group = q.dim(1).unwrap() / k.dim(1).unwrap();
    let heads: Vec<Tensor> = (0..q.dim(1).unwrap()).map(|head| k.narrow(1, head / group, 1).unwrap()).collect();
    let k = Tensor::cat(&heads, 1).unwrap().transpose(2, 3).unwrap().contiguous().unwrap();
    let scores = (q.contiguous().unwrap().matmul(&k).unwrap() * (1. / 8f64.sqrt())).unwrap();
    let mut sum = scores.exp().unwrap().broadcast_mul(&keep.to_dtype(DType::F64).unwrap()).unwrap().sum(3).unwrap();
    if let Some(sink) = sink {
        sum = sum.broadcast_add(&sink.exp().unwrap().reshape((1, (), 1)).unwrap()).unwrap();
    }
    let none = sum.eq(0.).unwrap().to_dtype(DType::F64).unwrap();
    (sum + none).unwrap().log().unwrap()
}

/// Returns the gradients by `variables` of a loss of the output and the stats, each with its own weights. Rows whose stats are −∞ count 0.
fn gradients(o: &Tensor, stats: &Tensor, weights: [&Tensor; 2], shares: [f64; 2], variables: &[&Tensor]) -> Vec<Tensor> {
    let [of_o, of_stats] = [(weights[0], o), (weights[1], stats)].map(|(weights, like)| weights.to_dtype(like.dtype()).unwrap());
    let counted = stats.ne(f64::from(f32::NEG_INFINITY)).unwrap();
    let finite = counted.where_cond(stats, &stats.zeros_like().unwrap()).unwrap();
    let o = (o * of_o).unwrap().to_dtype(DType::F64).unwrap().sum_all().unwrap();
    let stats = (finite.sqr().unwrap() * of_stats).unwrap().to_dtype(DType::F64).unwrap().sum_all().unwrap();
    let loss = match shares {
        [0., share] => stats * share,
        [share, 0.] => o * share,
        [one, other] => (o * one).unwrap() + (stats * other).unwrap(),
    };
    let gradients = loss.unwrap().backward().unwrap();
    variables.iter().map(|x| gradients.get(x).cloned().unwrap_or_else(|| x.zeros_like().unwrap())).collect()
}

#[test]
fn a_loss_of_output_and_stats_has_both_gradients() {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let mut random = Random::new(31);
        let mut var = |dims: &[usize], dtype| Var::from_tensor(&random.tensor(dims).to_dtype(dtype).unwrap()).unwrap();
        let [q, k, v] = [[2, 6, 11, 8], [2, 2, 13, 8], [2, 2, 13, 5]].map(|dims| var(&dims, dtype));
        let (sink, bias) = (var(&[6], DType::F32), var(&[6, 11, 13], DType::F32));
        let attention = Attention::new()
            .score_mod(library::softcap(2.))
            .score_mod(library::bias([Axis::Head, Axis::Q, Axis::K], F32))
            .mask(Mask::causal())
            .with_sink(&sink)
            .param("bias", &bias);
        let (o, stats) = attention.forward_with_stats(&q, &k, &v).unwrap();
        let [wq, wk, wv, ws, wb] = [&q, &k, &v, &sink, &bias].map(|x| wide(x));
        let kept = keep(11, 13, |q, k| k <= q);
        let scores = |scores: &Tensor| capped(scores)?.broadcast_add(&wb);
        let textbook = Textbook { scale: 1. / 8f64.sqrt(), scores: &scores, keep: &kept, sink: Some(&ws), dropped: None };
        let (want, lse) = textbook.attend(&wq, &wk, &wv).unwrap();
        close("stats", &stats, &lse, tolerance);
        let weights = [&random.tensor(&[2, 6, 11, 5]), &random.tensor(&[2, 6, 11])];
        for shares in [[1., 1.], [0., 1.], [1., 0.], [1., -3.]] {
            let mine = gradients(&o, &stats, weights, shares, &[&q, &k, &v, &sink, &bias]);
            let theirs = gradients(&want, &lse, weights, shares, &[&wq, &wk, &wv, &ws, &wb]);
            for ((name, got), want) in ["q", "k", "v", "sink", "bias"].iter().zip(&mine).zip(&theirs) {
                let what = format!("{dtype:?} {shares:?} d{name}");
                if shares[0] == 0. && *name == "v" {
                    // Stats do not depend on values.
                    assert!(
                        got.to_dtype(DType::F32).unwrap().abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap() == 0.,
                        "{what}"
                    );
                } else {
                    close(&what, got, want, tolerance);
                }
            }
        }
    }
}

#[test]
fn large_gradients_of_half_precision_are_not_rounded_away() {
    let mut random = Random::new(32);
    for dtype in [DType::F16, DType::BF16] {
        for size in [1e-3f64, 1., 1e5] {
            let q = Var::from_tensor(&random.tensor(&[1, 1, 3, 8]).to_dtype(dtype).unwrap()).unwrap();
            let bias = random.var(&[3, 3]);
            let attention = Attention::new().score_mod(library::bias([Axis::Q, Axis::K], F32)).param("bias", &bias);
            let (_, stats) = attention.forward_with_stats(&q.detach(), &q.detach(), &q.detach()).unwrap();
            // The gradient of a bias is P times that of the stats, and a row of P sums to 1.
            let factor = size * (1. + 1. / 1024. + 1. / 65536.);
            let gradient = (stats * factor).unwrap().sum_all().unwrap().backward().unwrap().remove(&bias).unwrap();
            let sums = gradient.to_dtype(DType::F64).unwrap().sum(1).unwrap();
            close(&format!("{dtype:?} {size}"), &sums, &(sums.ones_like().unwrap() * factor).unwrap(), 1e-5);
        }
    }
}

#[test]
fn invalid_gradients_are_passed_on() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for invalid in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let q = Var::from_tensor(&Random::new(33).tensor(&[1, 1, 3, 8]).to_dtype(dtype).unwrap()).unwrap();
            // The last key of each row has a P of about 1e-7.
            let bias = Var::new(&[0f32, 0., -16.], &CPU).unwrap();
            let attention = Attention::new().score_mod(library::bias([Axis::K], F32)).param("bias", &bias);
            let (_, stats) = attention.forward_with_stats(&q, &q, &q).unwrap();
            let gradients = (stats * invalid).unwrap().sum_all().unwrap().backward().unwrap();
            let numbers = |x: &Var| gradients.get(x).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            let numbers: Vec<f32> = [numbers(&q), numbers(&bias)].concat();
            assert!(numbers.iter().all(|x| !x.is_finite()), "{dtype:?} {invalid}: {numbers:?}");
        }
    }
}

#[test]
fn rows_without_keys_have_the_gradient_of_the_sink() {
    let mut random = Random::new(34);
    let [q, k] = [[2, 4, 5, 8], [2, 2, 3, 8]].map(|dims| random.var(&dims));
    let weights = random.tensor(&[2, 4, 5]);
    // The first two of five queries come before the first of three keys.
    let kept = keep(5, 3, |q, k| k <= q - 2);
    let sink = random.var(&[4]);
    for with_sink in [false, true] {
        let attention = Attention::new().mask(Mask::causal_bottom_right());
        let attention = if with_sink { attention.with_sink(&sink) } else { attention };
        let (o, stats) = attention.forward_with_stats(&q, &k, &k).unwrap();
        let [wq, wk, ws] = [&q, &k, &sink].map(|x| wide(x));
        let lse = log_sum_exp(&wq, &wk, &kept, with_sink.then_some(&ws));
        let ones = o.ones_like().unwrap();
        let mine = gradients(&o, &stats, [&ones, &weights], [0., 1.], &[&q, &k, &sink]);
        let theirs = gradients(&wq, &lse, [&wq, &weights], [0., 1.], &[&wq, &wk, &ws]);
        for (n, (got, want)) in mine.iter().zip(&theirs).enumerate().filter(|(n, _)| with_sink || *n < 2) {
            close(&format!("sink {with_sink}: gradient {n}"), got, want, 1e-5);
        }
    }
}

#[test]
fn no_keys_at_all_leave_the_sink() {
    let mut random = Random::new(35);
    let (q, sink) = (random.var(&[2, 3, 4, 8]), random.var(&[3]));
    let k = Var::zeros((2, 3, 0, 8), DType::F32, &CPU).unwrap();
    let weights = random.tensor(&[2, 3, 4]);
    let (_, stats) = Attention::new().with_sink(&sink).forward_with_stats(&q, &k, &k).unwrap();
    let gradients = (stats * &weights).unwrap().sum_all().unwrap().backward().unwrap();
    close("sink", gradients.get(&sink).unwrap(), &weights.sum((0, 2)).unwrap(), 1e-6);
}

#[test]
fn packed_stats_have_gradients() {
    let mut random = Random::new(36);
    // The second sequence has no keys, and the third no queries. A token before the first and after the last sequence belongs to none.
    let (of_q, of_k): (&[usize], &[usize]) = (&[1, 4, 6, 6, 10], &[0, 5, 5, 9, 12]);
    let (q, k, sink) = (random.var(&[11, 4, 8]), random.var(&[12, 2, 8]), random.var(&[4]));
    let documents = Documents::new(&boundaries(of_q, DType::U32), 4).keys(&boundaries(of_k, DType::U32), 5);
    let attention = Attention::new().mask(Mask::causal_ends()).with_sink(&sink);
    let (_, stats) = attention.forward_packed_with_stats(&documents, &q, &k, &k).unwrap();
    let weights = random.tensor(&[11, 4]);
    let [wq, wk, ws] = [&q, &k, &sink].map(|x| wide(x));
    let mut loss = Tensor::zeros((), DType::F64, &CPU).unwrap();
    for n in 0..4 {
        let part = |x: &Tensor, of: &[usize]| x.narrow(0, of[n], of[n + 1] - of[n]).unwrap().transpose(0, 1).unwrap().unsqueeze(0).unwrap();
        let (rows, keys) = (of_q[n + 1] - of_q[n], of_k[n + 1] - of_k[n]);
        let weights = part(&weights.unsqueeze(2).unwrap(), of_q).to_dtype(DType::F64).unwrap().squeeze(3).unwrap();
        if rows == 0 {
            continue;
        }
        let lse = if keys == 0 {
            ws.reshape((1, 4, 1)).unwrap().broadcast_as((1, 4, rows)).unwrap()
        } else {
            let kept = keep(rows, keys, |q, k| k <= q + keys as i64 - rows as i64);
            log_sum_exp(&part(&wq, of_q), &part(&wk, of_k), &kept, Some(&ws))
        };
        let found = stats.narrow(0, of_q[n], rows).unwrap().transpose(0, 1).unwrap().unsqueeze(0).unwrap();
        close(&format!("stats of sequence {n}"), &found, &lse, 1e-6);
        loss = (loss + (lse * weights).unwrap().sum_all().unwrap()).unwrap();
    }
    for outside in [0, 10] {
        let row: Vec<f32> = stats.get(outside).unwrap().to_vec1().unwrap();
        assert_eq!(row, [f32::NEG_INFINITY; 4]);
    }
    // Rows outside of the sequences have gradients too, which no variable receives.
    let inside = stats.narrow(0, 1, 9).unwrap();
    let mine = (inside * weights.narrow(0, 1, 9).unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
    let theirs = loss.backward().unwrap();
    for (name, x, w) in [("q", &q, &wq), ("k", &k, &wk), ("sink", &sink, &ws)] {
        close(name, mine.get(x).unwrap(), theirs.get(w).unwrap(), 1e-5);
    }
}

#[test]
fn stats_of_untracked_scores_are_not_tracked() {
    let mut random = Random::new(37);
    let (q, v) = (random.tensor(&[1, 2, 3, 8]), random.var(&[1, 2, 3, 8]));
    let (o, stats) = Attention::new().forward_with_stats(&q, &q, &v).unwrap();
    assert!(o.track_op() && !stats.track_op(), "stats do not depend on values");
    // A parameter alone, next to values that are tracked.
    let slopes = random.var(&[2]);
    let by_head = ScoreMod::new("by head", |score, _, p| score + p.tensor("slopes", [Axis::Head], F32) * score).unwrap();
    let (_, stats) = Attention::new().score_mod(by_head).param("slopes", &slopes).forward_with_stats(&q, &q, &v).unwrap();
    let gradients = stats.sum_all().unwrap().backward().unwrap();
    assert!(gradients.get(&slopes).is_some() && gradients.get(&v).is_none());
}

#[test]
fn dropout_does_not_change_the_gradient_of_stats() {
    let mut random = Random::new(38);
    let [q, k] = [[1, 2, 20, 8], [1, 2, 20, 8]].map(|dims| random.var(&dims));
    let weights = random.tensor(&[1, 2, 20]);
    let numbers = |n: i64| Tensor::new(&[n], &CPU).unwrap();
    let of = |attention: Attention| {
        let (_, stats) = attention.forward_with_stats(&q, &k, &k).unwrap();
        let gradients = (stats * &weights).unwrap().sum_all().unwrap().backward().unwrap();
        [&q, &k].map(|x| gradients.get(x).unwrap().clone())
    };
    let want = of(Attention::new());
    for (got, want) in of(Attention::new().with_dropout(0.5, &numbers(3), &numbers(0))).iter().zip(&want) {
        close("dropout", got, want, 1e-5);
    }
}

#[test]
fn rows_without_keys_pass_no_gradient_on() {
    let mut random = Random::new(39);
    let [q, k] = [[1, 2, 5, 8], [1, 2, 3, 8]].map(|dims| random.var(&dims));
    let (_, stats) = Attention::new().mask(Mask::causal_bottom_right()).forward_with_stats(&q, &k, &k).unwrap();
    // The derivative of the square of −∞ is −∞, in the first two rows.
    let mine = stats.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let kept = stats.narrow(2, 2, 3).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
    for x in [&q, &k] {
        close("finite", mine.get(x).unwrap(), kept.get(x).unwrap(), 0.);
    }
}
