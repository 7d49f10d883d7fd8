//! What buckets of lengths save and cost on the device: the builds of a decode loop from 1 to 4096 keys and of 500 training steps of
//! random lengths, and the time of their kernels beside those of exact plans, in turns. `device growth`.
#![allow(unsafe_code)]

use crate::memory::Memory;
use crate::setup::{Result, median};
use conformance::random::Random;
use cudnn_graph::Stream;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, Planned};
use sdpa::seq::{Buckets, SeqPolicy};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::sync::Arc;
use std::time::Instant;

const WARM: usize = 5;
const RUNS: usize = 20;

/// A sequence of problems of one form.
struct Run {
    name: &'static str,
    /// All extents but the lengths.
    shape: Shape,
    mask: Mask,
    /// Rows that buffers have room for.
    capacity: i64,
    decode: bool,
    policy: SeqPolicy,
    lengths: Vec<i64>,
    /// Those that are timed.
    timed: Vec<i64>,
}

impl Run {
    fn spec(&self, length: i64) -> AttentionSpec {
        let shape = Shape { seq_q: if self.decode { 1 } else { length }, seq_kv: length, ..self.shape };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(self.mask.clone());
        for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
            tensor.strides[0] = self.capacity * tensor.dims[1] * tensor.dims[3];
        }
        spec.stats = !self.decode;
        spec
    }

    /// The plans of a step, and how long it took to have them.
    fn plans(&self, executor: &CudnnExecutor, spec: &AttentionSpec) -> Result<(Vec<Arc<Planned>>, f64)> {
        let start = Instant::now();
        let mut plans = vec![executor.attention(&spec.validate()?)?.0];
        if !self.decode {
            plans.push(executor.attention_backward(&spec.backward().validate()?)?.0);
        }
        Ok((plans, start.elapsed().as_secs_f64() * 1e3))
    }

    fn bucketed(&self, length: i64) -> Result<(AttentionSpec, f64)> {
        let bucketed = self.policy.bucket(&self.spec(length))?;
        Ok((bucketed.spec, bucketed.cost))
    }
}

/// A step whose memory is there.
struct Step {
    passes: Vec<(Arc<Planned>, Memory)>,
}

impl Step {
    fn new(executor: &CudnnExecutor, stream: &Stream, spec: &AttentionSpec, plans: Vec<Arc<Planned>>, lengths: [i64; 2]) -> Result<Step> {
        let mut passes = Vec::new();
        for (n, planned) in plans.into_iter().enumerate() {
            let mut memory = Memory::new(stream, &planned, planned.workspace_bytes())?;
            memory.set_lengths(stream, lengths)?;
            if n > 0 {
                memory.forward_first(executor, stream, spec)?;
            }
            passes.push((planned, memory));
        }
        Ok(Step { passes })
    }

    /// Milliseconds of one run.
    fn time(&self, executor: &CudnnExecutor, stream: &Stream) -> Result<f64> {
        let handle = executor.library().handle(stream)?;
        let start = stream.record(true)?;
        for (planned, memory) in &self.passes {
            // SAFETY: the memory is whole buffers of this device that outlive the call; the stream is waited for below.
            unsafe { memory.submit(planned, &handle) }?;
        }
        let end = stream.record(true)?;
        end.synchronize()?;
        Ok(f64::from(end.since(&start)?))
    }
}

fn misses(executor: &CudnnExecutor) -> [u64; 2] {
    executor.cache_stats().map(|stats| stats.misses)
}

fn measure(run: &Run) -> Result<()> {
    let executor = CudnnExecutor::new(CudnnOptions::default())?;
    let stream = executor.device().stream()?;
    let (mut building, mut looking, mut found) = (0f64, 0f64, 0usize);
    for &length in &run.lengths {
        let before = misses(&executor);
        let (_, ms) = run.plans(&executor, &run.bucketed(length)?.0)?;
        if misses(&executor) == before {
            (looking, found) = (looking + ms, found + 1);
        } else {
            building += ms;
        }
    }
    let [forward, backward] = misses(&executor);
    println!(
        "{}: {} steps, {forward} forward and {backward} backward builds in {building:.0} ms, {:.1} us to find the plans of any other step",
        run.name,
        run.lengths.len(),
        looking * 1e3 / found.max(1) as f64
    );
    let mut builds = Vec::new();
    for &length in &run.timed {
        let lengths = [if run.decode { 1 } else { length }, length];
        let (exact, (longer, cost)) = (run.spec(length), run.bucketed(length)?);
        let (plans, ms) = run.plans(&executor, &exact)?;
        builds.push(ms);
        let exact_step = Step::new(&executor, &stream, &exact, plans, lengths)?;
        let (plans, _) = run.plans(&executor, &longer)?;
        let step = Step::new(&executor, &stream, &longer, plans, lengths)?;
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..WARM + RUNS {
            for turn in [round % 2, 1 - round % 2] {
                let ms = [&exact_step, &step][turn].time(&executor, &stream)?;
                if round >= WARM {
                    times[turn].push(ms);
                }
            }
        }
        let [exact_ms, bucket_ms] = times.map(median);
        println!(
            "    {length:>5} in a bucket of {:>4}: {bucket_ms:.4} ms, exact {exact_ms:.4}, {:.2} times (bound {cost:.2}); the exact plans took {ms:.0} ms to make",
            longer.k.dims[2],
            bucket_ms / exact_ms
        );
    }
    println!("    exact plans took {:.0} ms to make a step", builds.iter().sum::<f64>() / builds.len() as f64);
    Ok(())
}

pub(crate) fn run() -> Result<()> {
    let mut random = Random::new(3);
    let shape = Shape { batch: 16, heads_q: 32, heads_kv: 8, seq_q: 1, seq_kv: 1, dim_qk: 128, dim_v: 128 };
    measure(&Run {
        name: "decode, (16,32,8,1,1 to 4096,128)",
        shape,
        mask: Mask::causal_bottom_right(),
        capacity: 4096,
        decode: true,
        policy: SeqPolicy::new(None, Buckets::doubling(128, 4096)?),
        lengths: (1..=4096).collect(),
        timed: vec![1, 100, 128, 129, 200, 300, 512, 513, 777, 1024, 1025, 1500, 2048, 2049, 3000, 4096],
    })?;
    let buckets = Buckets::multiples(256, 2048)?;
    let lengths: Vec<i64> = (0..500).map(|_| random.between(64, 2048)).collect();
    measure(&Run {
        name: "training, (4,16,16,64 to 2048,the same,128), both passes",
        shape: Shape { batch: 4, heads_q: 16, heads_kv: 16, ..shape },
        mask: Mask::causal(),
        capacity: 2048,
        decode: false,
        policy: SeqPolicy::new(buckets.clone(), buckets),
        timed: lengths[..24].to_vec(),
        lengths,
    })
}
