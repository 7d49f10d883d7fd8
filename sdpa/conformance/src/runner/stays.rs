//! Compares the dropout mask of an executor bit by bit. All P of a row are equal. V has a one at a single key, so that the output shows the mask of that key; a
//! d_o with a one at a single query makes dV show it.

use super::ready;
use crate::inputs::Operand;
use crate::oracle::Dropout;
use crate::runner::Outcome;
use half::f16;
use sdpa::{AttentionSpec, DROPOUT_OFFSET, DROPOUT_SEED, DType, Executor, HostBackward, HostForward, Layout, Param, Shape};

/// The number of dropout mask bits that were compared in each pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stays {
    /// Number of bits that were compared in the forward pass.
    pub forward: usize,
    /// Number of bits that were compared in the backward pass.
    pub backward: usize,
}

const CASES: [(&str, Shape, f32, [i64; 2]); 9] = {
    const fn of(batch: i64, heads: i64, seq_q: i64, seq_kv: i64, dim: i64) -> Shape {
        Shape { batch, heads_q: heads, heads_kv: heads, seq_q, seq_kv, dim_qk: dim, dim_v: dim }
    }
    [
        ("square", of(2, 3, 130, 130, 64), 0.5, [1234, 0]),
        ("more keys", of(1, 2, 77, 300, 64), 0.1, [0x1234_5678_9abc, 7]),
        ("more queries", of(2, 2, 300, 65, 64), 0.25, [-3, 1 << 40]),
        ("wide", of(1, 2, 140, 290, 128), 0.1, [99, 5]),
        ("wider", of(1, 2, 130, 270, 256), 0.3, [7, 2]),
        ("narrow", of(2, 2, 129, 100, 32), 0.9, [i64::MIN, 1]),
        ("one query", of(2, 2, 1, 200, 64), 0.5, [5, 6]),
        ("nearly none", of(1, 1, 256, 256, 64), 0.001, [8, 12]),
        ("the end of the sequence", of(2, 2, 70, 70, 64), 0.5, [1, -9]),
    ]
};

/// Returns `n` numbers: one where `at` returns true, else zero.
fn ones(n: i64, at: impl Fn(i64) -> bool) -> Operand {
    Operand::F16((0..n).map(|n| f16::from_f32(f32::from(u8::from(at(n))))).collect())
}

/// Compares every bit of an executor's dropout mask, in the forward and in the backward pass.
///
/// # Errors
/// Returns a message about the first wrong bit, with its position.
pub fn stays(executor: &dyn Executor) -> Result<Stays, String> {
    let mut all = Stays::default();
    for (name, shape, p, [seed, offset]) in CASES {
        let told = |e: String| format!("{name}: {e}");
        let spec = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).with_dropout(p);
        let dropout = Dropout { p: p.into(), seed, offset };
        let numbers = [[seed], [offset]];
        let [seed, offset] = &numbers;
        let params = [Param::new(DROPOUT_SEED, seed), Param::new(DROPOUT_OFFSET, offset)];
        all.forward += forward(&spec, shape, dropout, &params, executor).map_err(told)?;
        all.backward += backward(&spec, shape, dropout, &params, executor).map_err(told)?;
    }
    Ok(all)
}

fn made<T>(made: Result<T, Outcome>) -> Result<T, String> {
    made.map_err(|outcome| match outcome {
        Outcome::Fail(how) | Outcome::Skip(how) => how,
        Outcome::Pass(..) => "it passed".to_owned(),
    })
}

/// Compares a result with the dropout factor of its position.
fn judge(got: f64, at: [i64; 4], shape: Shape, dropout: Dropout) -> Result<(), String> {
    let Shape { batch, heads_q, seq_q, seq_kv, .. } = shape;
    let want = dropout.factor(at, [batch, heads_q, seq_q, seq_kv]) / seq_kv as f64;
    if (got - want).abs() <= 4e-3 * want { Ok(()) } else { Err(format!("the weight of {at:?} is {got}, not {want}")) }
}

fn forward(spec: &AttentionSpec, shape: Shape, dropout: Dropout, params: &[Param<'_>], executor: &dyn Executor) -> Result<usize, String> {
    let problem = spec.validate().map_err(|e| e.to_string())?;
    let prepared = made(ready(executor.supports(&problem), executor.prepare(&problem)))?;
    let Shape { batch, heads_q, seq_q, seq_kv, dim_v: dim, .. } = shape;
    let [q, k] = [seq_q, seq_kv].map(|seq| Operand::filled(DType::F16, (batch * heads_q * seq * dim) as usize, 0.0));
    let mut n = 0;
    for first in (0..seq_kv).step_by(dim as usize) {
        let v = ones(batch * heads_q * seq_kv * dim, |n| n / dim % seq_kv == first + n % dim);
        let mut o = Operand::filled(DType::F16, (batch * heads_q * seq_q * dim) as usize, f32::NAN);
        let call = HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut()).params(params);
        prepared.forward(call).map_err(|e| e.to_string())?;
        let Operand::F16(o) = o else { return Err("the output has another type".to_owned()) };
        for (at, o) in (0..).zip(o).filter(|(at, _)| first + at % dim < seq_kv) {
            let place = [at / (dim * seq_q * heads_q), at / (dim * seq_q) % heads_q, at / dim % seq_q, first + at % dim];
            judge(o.to_f64(), place, shape, dropout)?;
            n += 1;
        }
    }
    Ok(n)
}

fn backward(spec: &AttentionSpec, shape: Shape, dropout: Dropout, params: &[Param<'_>], executor: &dyn Executor) -> Result<usize, String> {
    let problem = spec.backward().validate().map_err(|e| e.to_string())?;
    let prepared = made(ready(executor.supports_backward(&problem), executor.prepare_backward(&problem)))?;
    let Shape { batch, heads_q, seq_q, seq_kv, dim_v: dim, .. } = shape;
    let zeros = |seq: i64| Operand::filled(DType::F16, (batch * heads_q * seq * dim) as usize, 0.0);
    let ([q, o], [k, v]) = ([zeros(seq_q), zeros(seq_q)], [zeros(seq_kv), zeros(seq_kv)]);
    let stats = vec![(seq_kv as f32).ln(); (batch * heads_q * seq_q) as usize];
    let mut n = 0;
    for first in (0..seq_q).step_by(dim as usize) {
        let d_o = ones(batch * heads_q * seq_q * dim, |n| n / dim % seq_q == first + n % dim);
        let poison = |seq: i64| Operand::filled(DType::F16, (batch * heads_q * seq * dim) as usize, f32::NAN);
        let (mut dq, mut dk, mut dv) = (poison(seq_q), poison(seq_kv), poison(seq_kv));
        let call = HostBackward::new(
            (q.elements(), k.elements(), v.elements()),
            (o.elements(), &stats),
            d_o.elements(),
            (dq.elements_mut(), dk.elements_mut(), dv.elements_mut()),
        )
        .params(params);
        prepared.backward(call).map_err(|e| e.to_string())?;
        let Operand::F16(dv) = dv else { return Err("a gradient has another type".to_owned()) };
        for (at, dv) in (0..).zip(dv).filter(|(at, _)| first + at % dim < seq_q) {
            let place = [at / (dim * seq_kv * heads_q), at / (dim * seq_kv) % heads_q, first + at % dim, at / dim % seq_kv];
            judge(dv.to_f64(), place, shape, dropout)?;
            n += 1;
        }
    }
    Ok(n)
}
