//! Discontinuities of masks and score_mods with floats, element by element. All scores are 0, and V has a one at a single key, so that the output shows P of
//! that key. A d_o with a one at a single query makes dV show P too.

use super::ready;
use crate::inputs::Operand;
use crate::random::Random;
use crate::runner::{Outcome, side_by_side};
use crate::say::say;
use sdpa::expr::{Place, Precision, Trace};
use sdpa::{AttentionSpec, DType, Error, Executor, HostBackward, HostForward, Layout, Mask, ScoreMod, Shape, Unsupported};
use std::sync::atomic::{AtomicUsize, Ordering};

/// More than one block of queries and keys, and not a multiple of one.
const SHAPE: Shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 200, seq_kv: 300, dim_qk: 64, dim_v: 64 };
const DIM: usize = 64;

/// The score where the rule does not hold; it is 0 where the rule holds.
const LESS: f64 = -3.0;

/// Divisors whose product with their f32 reciprocal is less than 1.
const INVERTED: [i64; 8] = [41, 47, 55, 61, 82, 83, 94, 97];

/// Number of kinds of rules.
const KINDS: u64 = 12;

/// Draws a rule whose boundary some positions meet exactly, or would meet without rounding.
fn rule(kind: u64, random: &mut Random) -> String {
    let whole = random.pick(&INVERTED);
    let [a, b] = [(); 2].map(|()| random.between(1, 99) as f64 / 10.0);
    // The line q · a + k · b = `met` goes through one of the positions.
    let met = a * random.between(0, 150) as f64 + b * random.between(0, 200) as f64;
    let times = random.between(1, 9) as f64;
    match kind {
        0 => format!("f32(k) / {whole}.0 < {}.0", random.between(1, 6)),
        1 => format!("i32(f32(k - q) / {whole}.0) % 2 == 0"),
        2 => format!("f32(q) * {a:?} + f32(k) * {b:?} < {met:.1}"),
        3 => format!("floor(f32(q) / {whole}.0) == floor(f32(k) / {whole}.0)"),
        4 => format!("abs(f32(k) * {a:?} - f32(q) * {a:?}) <= {:.1}", a * times),
        5 => format!("f32(k) * {a:?} % {b:?} < {:.2}", b / 2.0),
        6 => format!("ceil(f32(k) * {a:?} - f32(q) * {a:?}) <= {:.1}", (a * 10.0).round() * random.between(0, 2) as f64),
        7 => {
            // Put the boundary half a step away from the nearest keys: tanh differs there by much less than the error of a fast `tanh`.
            let [step, at] = [1e-5, 0.5 + random.unit()];
            let met = (at + step * (random.between(20, 280) as f64 + 0.5)).tanh();
            format!("tanh({at:?} + f32(k) * 0.00001) < {met:.9}")
        }
        // These rules use only integers, which every executor computes exactly.
        8 => format!("k / {whole} == (q + {}) / {whole}", random.between(-100, 100)),
        9 => format!("({} * k - q) % {whole} < {}", random.between(1, 9), random.between(-3, whole)),
        10 => format!("(q - k) / {} != (k - {}) / {whole}", random.between(2, 9), random.between(0, 200)),
        _ => format!("f32(q) * f32(k) / {whole}.0 - f32(k) / {a:?} >= {}.0", random.between(-5, 40)),
    }
}

/// A rule on the indices of query and key, with floats or with integer quotients and remainders. It is used as a mask, or as a choice
/// between two scores.
#[derive(Clone, Debug)]
pub struct Edges {
    /// The text of the rule, in the expression language.
    pub text: String,
    /// Whether the rule is used as a mask, not as a choice between two scores.
    pub is_mask: bool,
    /// The element type of operands.
    pub dtype: DType,
}

/// The result of testing a rule: the number of compared elements of P, or a message about the first wrong one. `None` if the executor
/// does not support the rule.
pub type Looked = Result<Option<usize>, String>;

fn made<T>(said: Result<(), Unsupported>, made: Result<T, Error>) -> Result<Option<T>, String> {
    match ready::<T, ()>(said, made) {
        Ok(made) => Ok(Some(made)),
        Err(Outcome::Skip(_)) => Ok(None),
        Err(Outcome::Fail(how)) => Err(how),
        Err(Outcome::Pass(..)) => Err("it passed".to_owned()),
    }
}

/// Tests the rules that these seeds draw on an executor that supports all of them, and prints the number of compared elements of P.
///
/// # Panics
/// Panics if an element of P is wrong, or if a rule is unsupported.
pub fn edges(executor: &dyn Executor, name: &str, seeds: &[u64]) {
    let looked = AtomicUsize::new(0);
    side_by_side(seeds, |&seed| {
        let found = Edges::drawn(seed).look(executor).unwrap_or_else(|e| panic!("SDPA_SEED={seed}, {e}"));
        looked.fetch_add(found.unwrap_or_else(|| panic!("SDPA_SEED={seed} is unsupported")), Ordering::Relaxed);
    });
    say(&format!("edges {name}: {} weights of {} rules of floats, each as the rule says", looked.into_inner(), seeds.len()));
}

impl Edges {
    /// Draws the rule of a seed. Its kind depends on `seed / 3`, so that 36 consecutive seeds cover all 12 kinds. The element type and
    /// the use as a mask are random.
    pub fn drawn(seed: u64) -> Edges {
        let mut random = Random::new(seed * 7919 + 61);
        Edges {
            text: rule(seed / 3 % KINDS, &mut random),
            is_mask: random.between(0, 1) == 0,
            dtype: random.pick(&[DType::F16, DType::BF16]),
        }
    }

    fn zeros(&self, seq: i64) -> Operand {
        Operand::filled(self.dtype, seq as usize * DIM, 0.0)
    }

    fn poison(&self, seq: i64) -> Operand {
        Operand::filled(self.dtype, seq as usize * DIM, f32::NAN)
    }

    /// Returns an operand with a one at each of `DIM` rows, each in a column of its own, and zeros elsewhere.
    fn ones(&self, seq: i64, first: usize) -> Operand {
        let mut all = self.zeros(seq);
        (first..(first + DIM).min(seq as usize)).for_each(|row| all.set(row * DIM + row - first, 1.0));
        all
    }

    fn spec(&self) -> Result<AttentionSpec, String> {
        let spec = AttentionSpec::dense(self.dtype, SHAPE, Layout::Bhsd).with_stats();
        Ok(if self.is_mask {
            spec.mask(self.text.parse::<Mask>().map_err(|e| e.to_string())?)
        } else {
            spec.score_mod(format!("score + select({}, 0.0, {LESS:?})", self.text).parse::<ScoreMod>().map_err(|e| e.to_string())?)
        })
    }

    /// Returns P of each (query, key), row by row, and the log-sum-exp of each row.
    fn weights(&self) -> Result<(Vec<f64>, Vec<f32>), String> {
        let rule: Trace = self.text.parse().map_err(|e| format!("{}: {e}", self.text))?;
        let extents = [1, 1, SHAPE.seq_q, SHAPE.seq_kv];
        let (mut weights, mut stats) = (Vec::new(), Vec::new());
        for q in 0..SHAPE.seq_q {
            let row = (0..SHAPE.seq_kv).map(|k| {
                let place = Place { score: 0.0, upstream: 0.0, index: [0, 0, q, k], extents, params: &[] };
                match (rule.eval_first(&place, Precision::F32) != 0.0, self.is_mask) {
                    (true, _) => 1.0,
                    (false, true) => 0.0,
                    (false, false) => LESS.exp(),
                }
            });
            let row: Vec<f64> = row.collect();
            let sum: f64 = row.iter().sum();
            weights.extend(row.iter().map(|x| if sum == 0.0 { 0.0 } else { x / sum }));
            stats.push(sum.ln() as f32);
        }
        Ok((weights, stats))
    }

    /// Compares every element of P with the rule, in the forward and in the backward pass.
    ///
    /// # Errors
    /// Returns a message about the first wrong element.
    pub fn look(&self, executor: &dyn Executor) -> Looked {
        let (weights, stats) = self.weights()?;
        // Allow for two roundings to the element type: of P and of the result.
        let rounding = if self.dtype == DType::BF16 { 1e-2 } else { 4e-3 };
        let judge = |got: f64, q: usize, k: usize, pass: &str| {
            let want = weights[q * SHAPE.seq_kv as usize + k];
            let is_near = (got - want).abs() <= rounding * want + 1e-7;
            if is_near { Ok(()) } else { Err(format!("{self:?}, {pass}: query {q} weighs key {k} by {got}, not {want}")) }
        };
        let (mut looked, (queries, keys)) = (0, (SHAPE.seq_q as usize, SHAPE.seq_kv as usize));
        let problem = self.spec()?.backward().validate().map_err(|e| e.to_string())?;
        if let Some(prepared) = made(executor.supports(problem.forward()), executor.prepare(problem.forward()))? {
            let (q, k) = (self.zeros(SHAPE.seq_q), self.zeros(SHAPE.seq_kv));
            for first in (0..keys).step_by(DIM) {
                let (v, mut o, mut told) = (self.ones(SHAPE.seq_kv, first), self.poison(SHAPE.seq_q), vec![f32::NAN; queries]);
                let call = HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut()).stats(&mut told);
                prepared.forward(call).map_err(|e| e.to_string())?;
                for at in (0..queries * DIM).filter(|at| first + at % DIM < keys) {
                    judge(o.get(at), at / DIM, first + at % DIM, "forward")?;
                    looked += 1;
                }
            }
        }
        if let Some(prepared) = made(executor.supports_backward(&problem), executor.prepare_backward(&problem))? {
            let ([q, o], [k, v]) = ([(); 2].map(|()| self.zeros(SHAPE.seq_q)), [(); 2].map(|()| self.zeros(SHAPE.seq_kv)));
            for first in (0..queries).step_by(DIM) {
                let d_o = self.ones(SHAPE.seq_q, first);
                let (mut dq, mut dk, mut dv) = (self.poison(SHAPE.seq_q), self.poison(SHAPE.seq_kv), self.poison(SHAPE.seq_kv));
                let call = HostBackward::new(
                    (q.elements(), k.elements(), v.elements()),
                    (o.elements(), &stats),
                    d_o.elements(),
                    (dq.elements_mut(), dk.elements_mut(), dv.elements_mut()),
                );
                prepared.backward(call).map_err(|e| e.to_string())?;
                for at in (0..keys * DIM).filter(|at| first + at % DIM < queries) {
                    judge(dv.get(at), first + at % DIM, at / DIM, "backward")?;
                    looked += 1;
                }
            }
        }
        Ok((looked > 0).then_some(looked))
    }
}
