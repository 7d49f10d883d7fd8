//! The mean error of dq, relative to that of dense attention in the same type. PyTorch's tests of FlexAttention allow a factor of 1.1. The mean over many elements
//! shows one rounding too many, which a bound for the worst element has to allow.

use super::{executor, mma};
use conformance::emulated::faulty;
use conformance::random::Random;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::{AttentionSpec, DType, Elements, Executor, HostBackward, HostForward, Layout, Shape};

const HEADS: usize = 2;
const SEQ: usize = 192;
const DIM: usize = 64;
const SCALE: f64 = 0.125;

/// A score_mod as text, and the same of a score, a query and a key.
type ScoreMod = (&'static str, fn(f64, f64, f64) -> f64);

/// With the last two, most of the weight is on one or two keys per row. There the rounding of `o` is most of the error.
const SCORE_MODS: [ScoreMod; 3] = [
    ("score * 1.0", |score, _, _| score),
    ("score + f32(q - k)", |score, q, k| score + (q - k)),
    ("select(q <= k, score + f32(q - k), -inf)", |score, q, k| if q <= k { score + (q - k) } else { f64::NEG_INFINITY }),
];

/// q, k, v and dO of every head.
struct Numbers([Vec<bf16>; 4]);

impl Numbers {
    fn new() -> Numbers {
        let mut random = Random::new(11);
        Numbers([(); 4].map(|()| (0..HEADS * SEQ * DIM).map(|_| bf16::from_f64(random.normal())).collect()))
    }

    /// dq of dense attention in f64, with `round` wherever PyTorch's eager `flex_attention` rounds to the type of the operands.
    fn dense(&self, modify: fn(f64, f64, f64) -> f64, round: fn(f64) -> f64) -> Vec<f64> {
        let [q, k, v, d_o] = self.0.each_ref().map(|x| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let mut dq = Vec::new();
        for row in 0..HEADS * SEQ {
            let (first, query) = (row / SEQ * SEQ, row % SEQ);
            let of = |x: &[f64], row: usize| x[row * DIM..][..DIM].to_vec();
            let (own_q, own_d_o) = (of(&q, row), of(&d_o, row));
            let scores: Vec<f64> =
                (0..SEQ).map(|key| modify(dot(&own_q, &of(&k, first + key)) * SCALE, query as f64, key as f64)).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
            let p: Vec<f64> = scores.iter().map(|score| (score - most).exp() / sum).collect();
            let mut o = [0.0; DIM];
            for (key, p) in p.iter().enumerate() {
                of(&v, first + key).iter().zip(&mut o).for_each(|(v, o)| *o += round(*p) * v);
            }
            let delta = dot(&o.map(round), &own_d_o);
            let mut own = [0.0; DIM];
            for (key, p) in p.iter().enumerate() {
                let d_s = round(p * (dot(&own_d_o, &of(&v, first + key)) - delta) * SCALE);
                of(&k, first + key).iter().zip(&mut own).for_each(|(k, dq)| *dq += d_s * k);
            }
            dq.extend(own.map(round));
        }
        dq
    }

    /// dq of both passes of an executor.
    fn computed(&self, executor: &CudaExecutor, text: &str) -> Vec<f64> {
        let (heads, seq, dim) = (HEADS as i64, SEQ as i64, DIM as i64);
        let shape = Shape { batch: 1, heads_q: heads, heads_kv: heads, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).score_mod(text.parse().unwrap()).with_stats();
        let [q, k, v, d_o] = self.0.each_ref().map(|x| Elements::BF16(x));
        let [mut o, mut dq, mut dk, mut dv] = [(); 4].map(|()| vec![bf16::NAN; HEADS * SEQ * DIM]);
        let mut stats = vec![f32::NAN; HEADS * SEQ];
        let forward = HostForward::new(q, k, v, &mut o).stats(&mut stats).attn_scale(SCALE as f32);
        executor.prepare(&spec.validate().unwrap()).unwrap().forward(forward).unwrap();
        let backward = HostBackward::new((q, k, v), (&o, &stats), d_o, (&mut dq, &mut dk, &mut dv)).attn_scale(SCALE as f32);
        executor.prepare_backward(&spec.backward().validate().unwrap()).unwrap().backward(backward).unwrap();
        dq.iter().map(|x| x.to_f64()).collect()
    }

    /// The mean error of an executor's dq, relative to that of dense attention.
    fn ratio(&self, executor: &CudaExecutor, (text, modify): ScoreMod) -> f64 {
        let exact = self.dense(modify, |x| x);
        let error = |dq: Vec<f64>| dq.iter().zip(&exact).map(|(x, y)| (x - y).abs()).sum::<f64>();
        error(self.computed(executor, text)) / error(self.dense(modify, |x| bf16::from_f64(x).to_f64()))
    }
}

#[test]
fn dq_is_as_near_as_dense_attention() {
    let (Some(wgmma), Some(mma)) = (executor(), mma::executor()) else { return };
    let numbers = Numbers::new();
    for score_mod in SCORE_MODS {
        let ratios = [&wgmma, &mma].map(|executor| numbers.ratio(executor, score_mod));
        assert!(ratios.iter().all(|ratio| *ratio < 1.1), "{}: {ratios:?} times the error of dense attention", score_mod.0);
    }
    // Products of o and dO in bf16.
    let product = "low(x) * low(y) + low(x >> 16) * low(y >> 16)";
    let narrow = "float(Element{(unsigned short)(__float_as_uint(low(x) * low(y)) >> 16)}) + \
                  float(Element{(unsigned short)(__float_as_uint(low(x >> 16) * low(y >> 16)) >> 16)})";
    let spoiled = faulty([product, narrow], || numbers.ratio(&executor().unwrap(), SCORE_MODS[1]));
    assert!(spoiled > 1.1, "{spoiled}");
}
