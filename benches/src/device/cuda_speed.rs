//! Times of native CUDA kernels beside cuDNN's, in turns.
#![allow(unsafe_code)]

use crate::cuda::{executor, executor_of};
use crate::memory::Memory;
use crate::setup::{Result, executor as cudnn, median};
use cudnn_graph::Stream;
use sdpa::cuda::tile_config::Tile;
use sdpa::cuda::{CudaExecutor, CudaOptions, Family};
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::Job;
use sdpa::device::{DeviceCall, DevicePrepared, OnDevice};
use sdpa::{AttentionSpec, DType, Layout, Packed, Paged, Shape};
use sdpa_driver::DeviceSlice;

pub(crate) type Pass = dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>;

/// A problem of the table: batch, heads_q, heads_kv, seq, dim; score_mod; mask.
pub(crate) type Row = ([i64; 5], &'static str, &'static str);

pub(crate) const ROWS: [Row; 18] = [
    ([4, 32, 32, 4096, 128], "", ""),
    ([4, 32, 32, 4096, 128], "", "causal"),
    ([4, 32, 32, 4096, 128], "softcap:30", "causal"),
    ([2, 16, 16, 16384, 128], "", ""),
    ([2, 16, 16, 16384, 128], "", "causal"),
    ([1, 32, 8, 16384, 64], "", ""),
    ([1, 32, 8, 16384, 64], "", "causal"),
    ([1, 16, 16, 8192, 256], "", ""),
    ([1, 16, 16, 8192, 256], "", "causal"),
    ([4, 32, 32, 4096, 128], "", "sliding-window:512"),
    ([4, 32, 32, 4096, 128], "", "prefix-lm:512"),
    ([4, 32, 32, 4096, 128], "softcap:30", "prefix-lm:512"),
    ([4, 32, 32, 4096, 128], "", "dilated:4 & causal"),
    ([4, 32, 32, 4096, 128], "", "natten:257"),
    ([4, 32, 32, 4096, 128], "", "global-local:256,64"),
    ([4, 32, 32, 4096, 128], "", "k <= q & (k < 4 | q - k < 512)"),
    ([4, 32, 32, 4096, 128], "", "q / 512 == k / 512 & k <= q"),
    ([1, 32, 8, 2048, 128], "", "causal"),
];

pub(crate) fn spec(([batch, heads_q, heads_kv, seq, dim], score_mod, mask): Row) -> Result<AttentionSpec> {
    let shape = Shape { batch, heads_q, heads_kv, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd);
    if !score_mod.is_empty() {
        spec = spec.score_mod(score_mod.parse()?);
    }
    if !mask.is_empty() {
        spec = spec.mask(mask.parse()?);
    }
    Ok(spec)
}

const WARM: usize = 3;
const RUNS: usize = 11;

/// How passes are timed.
#[derive(Clone, Copy)]
pub(crate) struct Round<'a> {
    /// Calls follow one another between two marks for so many milliseconds, about: one call where it takes longer.
    pub(crate) between: f64,
    pub(crate) runs: usize,
    /// How long packed documents are, where they are not all of the whole length.
    pub(crate) documents: Option<&'a [i32]>,
}

/// A call between two marks.
pub(crate) const EACH: Round<'static> = Round { between: 0.0, runs: RUNS, documents: None };
/// Calls between two marks, at most.
const MOST_CALLS: f64 = 32.0;

/// Memory for passes of one problem. Those of a backward pass read what the forward pass `first` has left.
pub(crate) fn ready(stream: &Stream, job: &Job, passes: &[&Pass], first: Option<&Pass>, documents: Option<&[i32]>) -> Result<Memory> {
    let workspace = passes.iter().copied().chain(first).map(|pass| pass.workspace_bytes()).max().unwrap_or(0);
    let mut memory = Memory::seeded(stream, job, workspace, 7)?;
    if let Some(lengths) = documents {
        memory.set_documents(stream, lengths)?;
    }
    if let Some(first) = first {
        let (params, whole) = (memory.params(), Some(memory.workspace()));
        // SAFETY: the memory is whole buffers of this device that outlive the call; the stream is waited for below.
        unsafe { first.submit(stream, &(&memory.forward_call(&params, None, whole)).into()) }?;
        stream.synchronize()?;
    }
    Ok(memory)
}

/// Milliseconds of a call, of so many between two marks.
pub(crate) fn between(stream: &Stream, job: &Job, memory: &Memory, pass: &Pass, calls: i32) -> Result<f64> {
    let (params, gradients, whole) = (memory.params(), memory.gradients(), Some(memory.workspace()));
    let call: DeviceCall<'_, DeviceSlice> = match job {
        Job::Forward(_) => (&memory.forward_call(&params, None, whole)).into(),
        Job::Backward(_) => (&memory.backward_call(&params, &gradients, None)?).into(),
    };
    let start = stream.record(true)?;
    for _ in 0..calls {
        // SAFETY: the memory is whole buffers of this device that outlive the loop; the stream is waited for below.
        unsafe { pass.submit(stream, &call) }?;
    }
    let end = stream.record(true)?;
    end.synchronize()?;
    Ok(f64::from(end.since(&start)?) / f64::from(calls))
}

/// Medians of passes of one problem, in turns, in milliseconds.
pub(crate) fn times(stream: &Stream, job: &Job, passes: &[&Pass], first: Option<&Pass>, round: Round<'_>) -> Result<Vec<f64>> {
    let memory = ready(stream, job, passes, first, round.documents)?;
    let mut times = vec![Vec::new(); passes.len()];
    let mut calls = vec![1; passes.len()];
    for n in 0..WARM + round.runs {
        for ((pass, times), calls) in passes.iter().zip(&mut times).zip(&mut calls) {
            let ms = between(stream, job, &memory, *pass, *calls)?;
            if n >= WARM {
                times.push(ms);
            } else if n + 1 == WARM {
                *calls = (round.between / ms).clamp(1.0, MOST_CALLS) as i32;
            }
        }
    }
    Ok(times.into_iter().map(median).collect())
}

/// Times of the first rows of the table beside cuDNN's, in turns: milliseconds, and TFLOP/s by the pairs that bands keep.
pub(crate) fn speed(backward: bool, rows: u64) -> Result<()> {
    let (ours, theirs) = (executor(None)?, cudnn(PlanOptions::default())?);
    let stream = ours.device().stream()?;
    for row in ROWS.into_iter().take(usize::try_from(rows)?) {
        let (spec, ([batch, heads_q, heads_kv, seq, dim], score_mod, mask)) = (spec(row)?, row);
        let (mine, other, job, first, flops);
        if backward {
            let problem = spec.with_stats().backward().validate()?;
            first = Some(ours.attention(problem.forward())?.0);
            mine = ours.gradient(&problem)?.0;
            other = theirs.attention_backward(&problem).ok().map(|(planned, _)| planned as OnDevice<DeviceSlice, Stream>);
            (flops, job) = (problem.flops(), Job::from(problem));
        } else {
            let problem = spec.validate()?;
            first = None;
            mine = ours.attention(&problem)?.0;
            other = theirs.attention(&problem).ok().map(|(planned, _)| planned as OnDevice<DeviceSlice, Stream>);
            (flops, job) = (problem.flops(), Job::from(problem));
        }
        let passes: Vec<&Pass> = std::iter::once(&*mine as &Pass).chain(other.as_deref()).collect();
        let ms = times(&stream, &job, &passes, first.as_deref().map(|first| first as &Pass), EACH)?;
        let told = |ms: f64| format!("{ms:.4} ms {:.0}", flops / ms / 1e9);
        let other = ms.get(1).map_or_else(|| "unsupported".to_owned(), |&theirs| format!("{}, ratio {:.3}", told(theirs), theirs / ms[0]));
        println!("({batch},{heads_q},{heads_kv},{seq},{dim}) {score_mod} {mask}: cuda {}; cudnn {other}", told(ms[0]));
    }
    Ok(())
}

/// Problems that both families of kernels take, forward and backward, in turns where the device has both; and of f32, which one takes.
pub(crate) fn families() -> Result<()> {
    let executor = |family| executor_of(CudaOptions::default().with_family(family));
    let executors = Family::ALL.map(executor).into_iter().collect::<Result<Vec<_>>>()?;
    let stream = executors[0].device().stream()?;
    for (row, dtype) in ROWS.into_iter().flat_map(|row| [DType::BF16, DType::F32].map(|dtype| (row, dtype))) {
        let spec = spec(row)?.with_dtype(dtype);
        let problem = spec.validate()?;
        let plans: Vec<_> = executors.iter().filter_map(|executor| executor.attention(&problem).ok()).map(|(plan, _)| plan).collect();
        let passes: Vec<&Pass> = plans.iter().map(|plan| &**plan as &Pass).collect();
        let (forward, flops) = (times(&stream, &problem.clone().into(), &passes, None, EACH)?, problem.flops());
        let problem = spec.with_stats().backward().validate()?;
        let last = executors.last().ok_or("no family")?;
        let first = last.attention(problem.forward())?.0;
        let gradients: Vec<_> = executors.iter().filter_map(|executor| executor.gradient(&problem).ok()).map(|(plan, _)| plan).collect();
        let passes: Vec<&Pass> = gradients.iter().map(|plan| &**plan as &Pass).collect();
        let (backward, more) = (times(&stream, &problem.clone().into(), &passes, Some(&*first as &Pass), EACH)?, problem.flops());
        let told = |plans: &[std::sync::Arc<sdpa::cuda::CudaPlan>], ms: Vec<f64>, flops: f64| {
            let each = plans.iter().zip(ms).map(|(plan, ms)| format!("{ms:.4} ms {:.0} ({})", flops / ms / 1e9, plan.engine()));
            each.collect::<Vec<_>>().join("; ")
        };
        println!("{row:?} {dtype}: forward {}", told(&plans, forward, flops));
        println!("{row:?} {dtype}: backward {}", told(&gradients, backward, more));
    }
    Ok(())
}

/// How tokens lie where batch entries are not one behind the other.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lies {
    Dense,
    /// Documents of the whole length each, one behind the other.
    Packed,
    /// Keys in pages of so many.
    Paged(i64),
}

/// How tokens lie; batch, heads_q, heads_kv, queries, keys; mask. Head dims are 128.
pub(crate) type Few = (Lies, [i64; 5], &'static str);

pub(crate) const FEW: [Few; 17] = [
    (Lies::Packed, [32, 32, 32, 512, 512], "causal"),
    (Lies::Packed, [8, 32, 8, 2048, 2048], "causal"),
    (Lies::Packed, [8, 32, 8, 2048, 2048], ""),
    (Lies::Packed, [1, 32, 8, 16384, 16384], "causal"),
    (Lies::Dense, [1, 32, 8, 1, 8192], ""),
    (Lies::Dense, [1, 32, 8, 1, 131_072], ""),
    (Lies::Dense, [16, 32, 8, 1, 8192], ""),
    (Lies::Dense, [16, 32, 8, 1, 8192], "padding"),
    (Lies::Dense, [64, 32, 8, 1, 8192], ""),
    (Lies::Dense, [64, 32, 8, 1, 8192], "padding"),
    (Lies::Dense, [16, 32, 8, 4, 8192], "causal-bottom-right"),
    (Lies::Dense, [1, 8, 8, 128, 65_536], "causal-bottom-right"),
    (Lies::Paged(16), [16, 32, 8, 1, 8192], "padding"),
    (Lies::Paged(64), [16, 32, 8, 1, 8192], "padding"),
    (Lies::Paged(16), [64, 32, 8, 1, 8192], "padding"),
    (Lies::Paged(64), [64, 32, 8, 1, 8192], "padding"),
    (Lies::Paged(16), [1, 32, 8, 2048, 8192], "causal-bottom-right"),
];

pub(crate) fn few_spec((lies, [batch, heads_q, heads_kv, seq_q, seq_kv], mask): Few) -> Result<AttentionSpec> {
    let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 128, dim_v: 128 };
    let spec = match lies {
        Lies::Dense => AttentionSpec::dense(DType::BF16, shape, Layout::Bshd),
        Lies::Packed => AttentionSpec::packed(DType::BF16, shape, Packed::of(batch * seq_q)),
        Lies::Paged(page_size) => AttentionSpec::paged(DType::BF16, shape, Paged::new(page_size, batch * seq_kv / page_size)),
    };
    Ok(if mask.is_empty() { spec } else { spec.mask(mask.parse()?) })
}

/// Times of packed documents, of few queries and of pages, beside cuDNN's: milliseconds, TFLOP/s, and TB/s of keys and values that are read once.
pub(crate) fn few() -> Result<()> {
    let (ours, theirs) = (executor(None)?, cudnn(PlanOptions::default())?);
    let stream = ours.device().stream()?;
    for row in FEW {
        let (lies, [batch, heads_q, heads_kv, seq_q, seq_kv], mask) = row;
        let spec = few_spec(row)?;
        let problem = spec.validate()?;
        let mine = ours.attention(&problem)?.0;
        let other = theirs.attention(&problem).ok().map(|(planned, _)| planned as OnDevice<DeviceSlice, Stream>);
        let (flops, bytes) = (problem.flops(), (batch * heads_kv * seq_kv * 512) as f64);
        let passes: Vec<&Pass> = std::iter::once(&*mine as &Pass).chain(other.as_deref()).collect();
        let ms = times(&stream, &problem.into(), &passes, None, EACH)?;
        let told = |ms: f64| format!("{ms:.4} ms {:.0} TFLOP/s {:.2} TB/s", flops / ms / 1e9, bytes / ms / 1e9);
        let other = ms.get(1).map_or_else(|| "unsupported".to_owned(), |&theirs| format!("{}, ratio {:.3}", told(theirs), theirs / ms[0]));
        println!("{lies:?} ({batch},{heads_q},{heads_kv},{seq_q},{seq_kv},128) {mask}: {}, {}; cudnn {other}", mine.engine(), told(ms[0]));
    }
    Ok(())
}

/// Cuts beside the usual one of each head dim.
pub(crate) fn cuts() -> Result<()> {
    for dim in [64, 128, 256] {
        let usual = Tile::of(dim, dim).ok_or("no cut")?;
        let others = [Tile { turns: !usual.turns, ..usual }, Tile { keys: usual.keys - 16, ..usual }];
        let executors: Vec<CudaExecutor> = [usual].into_iter().chain(others).map(|tile| executor(Some(tile))).collect::<Result<_>>()?;
        let stream = executors[0].device().stream()?;
        for row in ROWS.into_iter().filter(|row| row.0[4] == dim) {
            let spec = spec(row)?;
            let problem = spec.validate()?;
            let plans = executors.iter().map(|executor| Ok(executor.attention(&problem)?.0)).collect::<Result<Vec<_>>>()?;
            let passes: Vec<&Pass> = plans.iter().map(|plan| &**plan as &Pass).collect();
            let ms = times(&stream, &problem.into(), &passes, None, EACH)?;
            println!("{row:?}: usual {:.4} ms, other turns {:.4}, {} keys {:.4}", ms[0], ms[1], usual.keys - 16, ms[2]);
        }
    }
    Ok(())
}
