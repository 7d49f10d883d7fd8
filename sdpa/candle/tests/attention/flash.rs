//! The functions of candle-flash-attn against their documented formula.

use crate::packed::{boundaries, textbook};
use crate::textbook::{CPU, Random, Textbook, compare, keep, wide};
use candle_core::{DType, Result, Tensor};
use sdpa_candle::*;

const SCALE: f32 = 0.3;

/// The formula, for (batch, heads, seq, dim): bottom-right aligned windows, softcap, then ALiBi slopes.
struct Formula<'a> {
    slopes: Option<&'a Tensor>,
    window: (Option<i64>, Option<i64>),
    softcap: Option<f64>,
}

impl Formula<'_> {
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (seq_q, seq_kv) = (q.dim(2)?, k.dim(2)?);
        let shift = seq_kv as i64 - seq_q as i64;
        let (left, right) = self.window;
        let kept =
            keep(seq_q, seq_kv, |q, k| left.is_none_or(|left| k >= q + shift - left) && right.is_none_or(|right| k <= q + shift + right));
        let distances: Vec<f64> =
            (0..seq_q * seq_kv).map(|n| -(((n / seq_kv) as i64 + shift - (n % seq_kv) as i64).abs() as f64)).collect();
        let distances = Tensor::from_vec(distances, (1, 1, seq_q, seq_kv), &CPU)?;
        let scores = |scores: &Tensor| {
            let mut scores = scores.clone();
            if let Some(cap) = self.softcap {
                scores = ((scores / cap)?.tanh()? * cap)?;
            }
            match self.slopes {
                Some(slopes) => scores.broadcast_add(&slopes.reshape((1, (), 1, 1))?.broadcast_mul(&distances)?),
                None => Ok(scores),
            }
        };
        Ok(Textbook { scale: f64::from(SCALE), scores: &scores, keep: &kept, sink: None, dropped: None }.attend(q, k, v)?.0)
    }
}

type Dense = fn(&Tensor, &Tensor, &Tensor, &Tensor) -> Result<Tensor>;
type Packed = fn([&Tensor; 3], &Tensor, [&Tensor; 2], [usize; 2]) -> Result<Tensor>;

struct Function {
    name: &'static str,
    slopes: bool,
    window: (Option<i64>, Option<i64>),
    softcap: Option<f64>,
    dense: Dense,
    packed: Packed,
}

const FUNCTIONS: [Function; 9] = [
    Function {
        name: "plain",
        slopes: false,
        window: (None, None),
        softcap: None,
        dense: |q, k, v, _| flash_attn(q, k, v, SCALE, false),
        packed: |[q, k, v], _, [a, b], [m, n]| flash_attn_varlen(q, k, v, a, b, m, n, SCALE, false),
    },
    Function {
        name: "causal",
        slopes: false,
        window: (None, Some(0)),
        softcap: None,
        dense: |q, k, v, _| flash_attn(q, k, v, SCALE, true),
        packed: |[q, k, v], _, [a, b], [m, n]| flash_attn_varlen(q, k, v, a, b, m, n, SCALE, true),
    },
    Function {
        name: "windowed",
        slopes: false,
        window: (Some(3), Some(2)),
        softcap: None,
        dense: |q, k, v, _| flash_attn_windowed(q, k, v, SCALE, Some(3), Some(2)),
        packed: |[q, k, v], _, [a, b], [m, n]| flash_attn_varlen_windowed(q, k, v, a, b, m, n, SCALE, Some(3), Some(2)),
    },
    Function {
        name: "left alone",
        slopes: false,
        window: (Some(0), None),
        softcap: None,
        dense: |q, k, v, _| flash_attn_windowed(q, k, v, SCALE, Some(0), None),
        packed: |[q, k, v], _, [a, b], [m, n]| flash_attn_varlen_windowed(q, k, v, a, b, m, n, SCALE, Some(0), None),
    },
    Function {
        name: "alibi",
        slopes: true,
        window: (None, None),
        softcap: None,
        dense: |q, k, v, s| flash_attn_alibi(q, k, v, s, SCALE, false),
        packed: |[q, k, v], s, [a, b], [m, n]| flash_attn_varlen_alibi(q, k, v, s, a, b, m, n, SCALE, false),
    },
    Function {
        name: "alibi, causal",
        slopes: true,
        window: (None, Some(0)),
        softcap: None,
        dense: |q, k, v, s| flash_attn_alibi(q, k, v, s, SCALE, true),
        packed: |[q, k, v], s, [a, b], [m, n]| flash_attn_varlen_alibi(q, k, v, s, a, b, m, n, SCALE, true),
    },
    Function {
        name: "alibi, windowed",
        slopes: true,
        window: (Some(4), Some(1)),
        softcap: None,
        dense: |q, k, v, s| flash_attn_alibi_windowed(q, k, v, s, SCALE, Some(4), Some(1)),
        packed: |[q, k, v], s, [a, b], [m, n]| flash_attn_varlen_alibi_windowed(q, k, v, s, a, b, m, n, SCALE, Some(4), Some(1)),
    },
    Function {
        name: "softcap",
        slopes: false,
        window: (Some(5), None),
        softcap: Some(0.4),
        dense: |q, k, v, _| flash_attn_alibi_windowed_softcap(q, k, v, None, SCALE, Some(5), None, 0.4),
        packed: |[q, k, v], _, [a, b], [m, n]| {
            flash_attn_varlen_alibi_windowed_softcap(q, k, v, None, a, b, m, n, SCALE, Some(5), None, 0.4)
        },
    },
    Function {
        name: "softcap, alibi",
        slopes: true,
        window: (None, Some(1)),
        softcap: Some(0.4),
        dense: |q, k, v, s| flash_attn_alibi_windowed_softcap(q, k, v, Some(s), SCALE, None, Some(1), 0.4),
        packed: |[q, k, v], s, [a, b], [m, n]| {
            flash_attn_varlen_alibi_windowed_softcap(q, k, v, Some(s), a, b, m, n, SCALE, None, Some(1), 0.4)
        },
    },
];

#[test]
fn dense_functions_and_their_gradients() {
    for f in &FUNCTIONS {
        let mut random = Random::new(14);
        let (q, k, v) = (random.var(&[2, 6, 4, 8]), random.var(&[2, 11, 2, 8]), random.var(&[2, 11, 2, 8]));
        let slopes = random.var(&[4]);
        let o = (f.dense)(&q, &k, &v, &slopes).unwrap();
        let [wq, wk, wv, ws] = [&q, &k, &v, &slopes].map(|x| wide(x));
        let turn = |x: &Tensor| x.transpose(1, 2).unwrap().contiguous().unwrap();
        let formula = Formula { slopes: f.slopes.then_some(&ws), window: f.window, softcap: f.softcap };
        let want = formula.attend(&turn(&wq), &turn(&wk), &turn(&wv)).unwrap().transpose(1, 2).unwrap();
        let mut pairs: Vec<(&str, &Tensor, &Tensor)> = vec![("q", &q, &wq), ("k", &k, &wk), ("v", &v, &wv)];
        pairs.extend(f.slopes.then_some(("slopes", &*slopes as &Tensor, &*ws as &Tensor)));
        compare(f.name, (&o, &want), &random.tensor(&[2, 6, 4, 8]), &pairs);
    }
}

#[test]
fn functions_of_documents_and_their_gradients() {
    // Test sequences of the same lengths on both sides, given as one tensor, and of different lengths.
    let ends: [&[usize]; 2] = [&[0, 5, 6, 12], &[0, 7, 15, 23]];
    for (f, same) in FUNCTIONS.iter().flat_map(|f| [(f, true), (f, false)]) {
        let of = if same { [ends[0], ends[0]] } else { ends };
        let mut random = Random::new(15);
        let (q, k, v) = (random.var(&[12, 4, 8]), random.var(&[of[1][3], 2, 8]), random.var(&[of[1][3], 2, 8]));
        let slopes = random.var(&[4]);
        let of_q = boundaries(of[0], DType::U32);
        let of_k = if same { of_q.clone() } else { boundaries(of[1], DType::U32) };
        let o = (f.packed)([&q, &k, &v], &slopes, [&of_q, &of_k], [6, if same { 6 } else { 8 }]).unwrap();
        let [wq, wk, wv, ws] = [&q, &k, &v, &slopes].map(|x| wide(x));
        let formula = Formula { slopes: f.slopes.then_some(&ws), window: f.window, softcap: f.softcap };
        let want = textbook([&wq, &wk, &wv], of, &|_, q, k, v| formula.attend(q, k, v)).unwrap();
        let mut pairs: Vec<(&str, &Tensor, &Tensor)> = vec![("q", &q, &wq), ("k", &k, &wk), ("v", &v, &wv)];
        pairs.extend(f.slopes.then_some(("slopes", &*slopes as &Tensor, &*ws as &Tensor)));
        compare(&format!("{} {same}", f.name), (&o, &want), &random.tensor(&[12, 4, 8]), &pairs);
    }
}

#[test]
fn a_window_that_is_longer_than_the_keys_is_open() {
    let mut random = Random::new(16);
    let (q, k) = (random.var(&[1, 20, 2, 8]), random.var(&[1, 4, 2, 8]));
    let o = flash_attn_windowed(&q, &k, &k, SCALE, Some(5), Some(5)).unwrap();
    let (wq, wk) = (wide(&q), wide(&k));
    let turn = |x: &Tensor| x.transpose(1, 2).unwrap().contiguous().unwrap();
    let formula = Formula { slopes: None, window: (None, None), softcap: None };
    let want = formula.attend(&turn(&wq), &turn(&wk), &turn(&wk)).unwrap().transpose(1, 2).unwrap();
    compare("open", (&o, &want), &random.tensor(&[1, 20, 2, 8]), &[("q", &q, &wq), ("k", &k, &wk)]);
}
