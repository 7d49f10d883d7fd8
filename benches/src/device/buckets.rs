//! Buckets of lengths on the device: a decode loop and prompts of random lengths, each call against the CPU executor at the exact
//! length, and how many plans they take. `device buckets [CALLS]`.

use crate::setup::Result;
use conformance::inputs;
use conformance::random::Random;
use half::bf16;
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::seq::{Buckets, SeqPolicy};
use sdpa::{AttentionSpec, DType, Elements, Executor, HostForward, Layout, Mask, Param, Shape, TensorSpec};

/// Rows that every buffer has room for.
const CAPACITY: i64 = 4096;

fn spec(seq_q: i64, seq_kv: i64) -> AttentionSpec {
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q, seq_kv, dim_qk: 64, dim_v: 64 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal_bottom_right());
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
        tensor.strides[0] = CAPACITY * tensor.dims[1] * tensor.dims[3];
    }
    spec
}

fn room(tensor: &TensorSpec) -> TensorSpec {
    TensorSpec { dims: [tensor.dims[0], tensor.dims[1], CAPACITY, tensor.dims[3]], ..*tensor }
}

fn forward(executor: &dyn Executor, spec: &AttentionSpec, qkv: [Elements<'_>; 3], params: &[Param<'_>]) -> Result<Vec<bf16>> {
    let mut o = vec![bf16::NAN; room(&spec.o).extent().unwrap_or(0) as usize];
    let [q, k, v] = qkv;
    let call = HostForward::new(q, k, v, &mut o).params(params);
    executor.prepare(&spec.validate()?)?.forward(call)?;
    Ok(o)
}

/// The largest difference of rows within the length, and whether rows past it are 0.
fn compare(exact: &AttentionSpec, longer: &AttentionSpec, want: &[bf16], got: &[bf16]) -> (f64, bool) {
    let ([batch, heads, rows, dim], strides) = (longer.o.dims, longer.o.strides);
    let (mut worst, mut zeros) = (0f64, true);
    for n in 0..batch * heads * rows * dim {
        let place = [n / (heads * rows * dim), n / (rows * dim) % heads, n / dim % rows, n % dim];
        let at = place.iter().zip(strides).map(|(i, s)| i * s).sum::<i64>() as usize;
        if place[2] < exact.o.dims[2] {
            let difference = (got[at].to_f64() - want[at].to_f64()).abs();
            worst = if difference.is_nan() { f64::INFINITY } else { worst.max(difference) };
        } else {
            zeros &= got[at].to_f64() == 0.0;
        }
    }
    (worst, zeros)
}

pub(crate) fn run(calls: u64) -> Result<()> {
    let cudnn = CudnnExecutor::new(CudnnOptions::default())?;
    let cpu = CpuExecutor::default();
    let kv = Some(Buckets::doubling(128, CAPACITY)?);
    let decode = SeqPolicy::new(None, kv.clone());
    let prompts = SeqPolicy::new(Buckets::doubling(64, CAPACITY)?, kv);
    let mut random = Random::new(1);
    let exact = spec(1, 1);
    let mut draw = |tensor: &TensorSpec| inputs::random(&room(tensor), DType::BF16, 1.0, &mut random);
    let [q, k, v] = [draw(&exact.q), draw(&exact.k), draw(&exact.v)];
    let mut lengths = Random::new(2);
    for (label, policy, most_q) in [("decode", &decode, 1), ("prompts", &prompts, 600)] {
        let before = cudnn.cache_stats()[0].misses;
        let mut worst = 0f64;
        for _ in 0..calls {
            let seq_kv = lengths.between(1, 1500);
            let exact = spec(lengths.between(1, most_q).min(seq_kv), seq_kv);
            let bucketed = policy.bucket(&exact)?;
            let qkv = [q.elements(), k.elements(), v.elements()];
            let want = forward(&cpu, &exact, qkv, &[])?;
            let got = forward(&cudnn, &bucketed.spec, qkv, &bucketed.params())?;
            let (difference, zeros) = compare(&exact, &bucketed.spec, &want, &got);
            if difference > 0.03 || !zeros {
                return Err(format!("{label}, {:?} of {:?}: off by {difference}, zeros past it: {zeros}", exact.q.dims, seq_kv).into());
            }
            worst = worst.max(difference);
        }
        let plans = cudnn.cache_stats()[0].misses - before;
        println!("{label}: {calls} calls of random lengths, {plans} plans, off by at most {worst:.4}");
    }
    Ok(())
}
