//! The same launch many times: the same bits where sums are added in one order, and within rounding where they are added in any.

#![allow(unsafe_code)]

use crate::setup::Result;
use sdpa::cuda::{CudaExecutor, CudaOptions, CudaPlan, Family};
use sdpa::nvidia::race::{Memory, Results};
use sdpa::nvidia::{Job, Stream};
use sdpa::{AttentionSpec, BackwardSpec, DType, DevicePrepared, Layout, Packed, SINK, Shape};
use std::sync::Arc;
use std::time::Instant;

/// Of an element's magnitude, and of the root mean square of its tensor: sums of f32 in another order, rounded to bf16, some of which are near 0.
const ROUNDING: [f32; 2] = [0.016, 0.008];

/// How many comparisons of bits there are to one of numbers, which takes that much longer.
const SLOWER: u64 = 10;

fn shape(heads: [i64; 2], seq: [i64; 2], dim: i64) -> Shape {
    Shape { batch: 2, heads_q: heads[0], heads_kv: heads[1], seq_q: seq[0], seq_kv: seq[1], dim_qk: dim, dim_v: dim }
}

fn spec(shape: Shape, mask: &str) -> Result<AttentionSpec> {
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
    Ok(if mask.is_empty() { spec } else { spec.mask(mask.parse()?) })
}

/// Passes of one order, then those of any.
fn passes() -> Result<Vec<(&'static str, Job, Family, bool)>> {
    let square = |dim| shape([16, 4], [700, 700], dim);
    let forward = |spec: AttentionSpec| Ok::<Job, sdpa::SpecErrors>(spec.validate()?.into());
    let backward = |spec: BackwardSpec| Ok::<Job, sdpa::SpecErrors>(spec.validate()?.into());
    let ordered = |spec: AttentionSpec, params: &[&str]| {
        let spec = params.iter().fold(spec.backward().deterministic(), |spec, param| spec.wrt(param, DType::F32));
        Ok::<Job, sdpa::SpecErrors>(spec.validate()?.into())
    };
    let packed = AttentionSpec::packed(DType::BF16, square(128), Packed::new()).with_stats().mask("causal".parse()?);
    let capped = spec(square(64), "causal")?.score_mod("softcap:30".parse()?);
    let sinks = spec(square(64), "causal")?.with_sink();
    let biased = spec(square(64), "causal")?.score_mod("bias:h".parse()?);
    Ok(vec![
        ("forward, causal", forward(spec(square(128), "causal")?)?, Family::Wgmma, true),
        ("forward, a neighbourhood", forward(spec(square(64), "natten:65")?)?, Family::Wgmma, true),
        ("forward, documents of a mask", forward(spec(square(128), "document & causal")?)?, Family::Wgmma, true),
        ("forward, one query, keys in parts", forward(spec(shape([16, 4], [1, 9000], 128), "padding")?)?, Family::Wgmma, true),
        ("forward, packed", forward(packed.clone())?, Family::Wgmma, true),
        ("forward, mma.sync", forward(spec(square(128), "causal")?)?, Family::Mma, true),
        ("backward, mma.sync", backward(capped.clone().backward().deterministic())?, Family::Mma, true),
        ("backward, fixed point, 64", backward(capped.clone().backward().deterministic())?, Family::Wgmma, true),
        ("backward, fixed point, 128", backward(spec(square(128), "causal")?.backward().deterministic())?, Family::Wgmma, true),
        ("backward, fixed point, 256", backward(spec(square(256), "causal")?.backward().deterministic())?, Family::Wgmma, true),
        (
            "backward, fixed point, shared KV heads",
            backward(spec(shape([8, 1], [900, 700], 128), "causal")?.backward().deterministic())?,
            Family::Wgmma,
            true,
        ),
        ("backward, fixed point, packed", backward(packed.clone().backward().deterministic())?, Family::Wgmma, true),
        ("backward, fixed point, sinks", backward(sinks.backward().wrt(SINK, DType::F32).deterministic())?, Family::Wgmma, true),
        ("backward, fixed point, a bias of heads", ordered(biased.clone(), &["bias"])?, Family::Wgmma, true),
        (
            "backward, fixed point, a bias of queries, wide heads",
            ordered(spec(square(192), "causal")?.score_mod("bias:q".parse()?), &["bias"])?,
            Family::Wgmma,
            true,
        ),
        (
            "backward, fixed point, slopes and a table",
            ordered(
                spec(square(128), "")?.score_mod("alibi-slopes".parse()?).score_mod("relative-bias:4,30".parse()?),
                &["slopes", "rel"],
            )?,
            Family::Wgmma,
            true,
        ),
        (
            "forward, fixed splits",
            forward(spec(shape([16, 4], [700, 3000], 128), "causal-bottom-right")?.batch_invariant())?,
            Family::Wgmma,
            true,
        ),
        (
            "forward, fixed splits, one query",
            forward(spec(shape([16, 4], [1, 9000], 128), "padding")?.batch_invariant())?,
            Family::Wgmma,
            true,
        ),
        ("backward, causal, 64", backward(capped.backward())?, Family::Wgmma, false),
        ("backward, causal, 128", backward(spec(square(128), "causal")?.backward())?, Family::Wgmma, false),
        ("backward, causal, 256, in pairs", backward(spec(square(256), "causal")?.backward())?, Family::Wgmma, false),
        ("backward, a neighbourhood, 64", backward(spec(square(64), "natten:65")?.backward())?, Family::Wgmma, false),
        ("backward, packed", backward(packed.backward())?, Family::Wgmma, false),
        ("backward, a bias of heads", backward(biased.backward().wrt("bias", DType::F32))?, Family::Wgmma, false),
    ])
}

fn made(executor: &CudaExecutor, job: &Job) -> Result<Arc<CudaPlan>> {
    Ok(match job {
        Job::Forward(problem) => executor.attention(problem)?.0,
        Job::Backward(problem) => executor.gradient(problem)?.0,
    })
}

/// How far the numbers of a result are from those of the first launch, in units of what is allowed.
fn off(first: &[f32], again: &[f32]) -> f32 {
    let squares: f64 = first.iter().map(|x| f64::from(*x).powi(2)).sum();
    let typical = (squares / first.len().max(1) as f64).sqrt() as f32;
    let far = |(x, y): (&f32, &f32)| {
        let off = (x - y).abs() / (ROUNDING[0] * x.abs() + ROUNDING[1] * typical);
        match (x == y || x.is_nan() && y.is_nan(), off.is_nan()) {
            (true, _) => 0.0,
            (false, true) => f32::INFINITY,
            (false, false) => off,
        }
    };
    first.iter().zip(again).map(far).fold(0.0, f32::max)
}

/// The same of all results.
fn most_off(first: &Results, again: &Results) -> f32 {
    first.iter().zip(again).map(|((_, first), (_, again))| off(first, again)).fold(0.0, f32::max)
}

/// Every pass whose name has this text, `times` times; those of any order a tenth of that.
pub(crate) fn run(times: u64, named: &str) -> Result<()> {
    let mut failed = 0;
    for (what, job, family, one_order) in passes()?.into_iter().filter(|(what, ..)| what.contains(named)) {
        let executor = crate::cuda::executor_of(CudaOptions::default().with_family(family))?;
        let (plan, stream) = (made(&executor, &job)?, executor.device().stream()?);
        let mut memory = Memory::new(&stream, &job, plan.workspace_bytes())?;
        let start = Instant::now();
        let run = |memory: &mut Memory<'_>, stream: &Stream| -> Result<()> {
            memory.poison()?;
            // SAFETY: the memory is this device's, as large as it says, and reading it waits for the stream.
            Ok(memory.call(|call| unsafe { plan.submit(stream, call) })?)
        };
        run(&mut memory, &stream)?;
        let (bytes, numbers) = (memory.bytes()?, memory.read()?);
        let (mut others, mut most) = (0u64, 0f32);
        let times = if one_order { times } else { times.div_ceil(SLOWER) };
        for _ in 1..times {
            run(&mut memory, &stream)?;
            if memory.bytes()? != bytes {
                others += 1;
                most = most.max(most_off(&numbers, &memory.read()?));
            }
        }
        let right = if one_order { others == 0 } else { most <= 1.0 };
        failed += u64::from(!right);
        println!(
            "{}: {what}: {times} launches, {others} with other bits, at most {most:.3} of rounding apart; {:.1} s",
            if right { "passed" } else { "FAILED" },
            start.elapsed().as_secs_f64()
        );
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} passes are not what they were the first time").into()) }
}
