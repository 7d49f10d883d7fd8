//! The adapter for cudarc against the oracle: two of its streams, one waiting for the other by cudarc's own events; and a call that cudarc
//! captures, whose plan leaves the cache before the graph is launched.
#![allow(unsafe_code)]

use crate::setup::{Result, executor};
use conformance::compare::{Measured, Outputs, compare};
use conformance::inputs::{self, Operand};
use conformance::oracle;
use conformance::random::Random;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use half::bf16;
use sdpa::cudarc::{Backward, Forward};
use sdpa::cudnn::{CudnnExecutor, PlanOptions};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};

fn bf16s(operand: &Operand) -> Result<&[bf16]> {
    match operand {
        Operand::BF16(x) => Ok(x),
        Operand::F32(_) | Operand::F16(_) | Operand::F8E4M3(_) | Operand::F8E5M2(_) => Err("the inputs are bf16".into()),
    }
}

pub(crate) fn run() -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let context = CudaContext::new(0)?;
    let (uploads, compute) = (context.new_stream()?, context.new_stream()?);
    for (masks, layout, gap) in
        [(vec![Mask::causal()], Layout::Bhsd, 0), (vec![], Layout::Bshd, 0), (vec![Mask::prefix_lm(30)], Layout::Sbhd, 3)]
    {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 129, seq_kv: 200, dim_qk: 64, dim_v: 64 };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, layout).with_stats();
        spec.masks = masks;
        spec.q.strides = layout.strides([2, 4, 129, 64 + gap]);
        let mut random = Random::new(5);
        let [q, k, v] = [&spec.q, &spec.k, &spec.v].map(|t| inputs::random(t, DType::BF16, 1.0, &mut random));
        let attention = sdpa::cudarc::Attention::new(&executor, &spec)?;
        let (dq, dk, dv) = (uploads.clone_htod(bf16s(&q)?)?, uploads.clone_htod(bf16s(&k)?)?, uploads.clone_htod(bf16s(&v)?)?);
        let mut o = uploads.clone_htod(&vec![bf16::NAN; 2 * 4 * 129 * 64])?;
        let mut stats = uploads.clone_htod(&vec![f32::NAN; 2 * 4 * 129])?;
        let call = Forward::new(&dq, &dk, &dv, &mut o).stats(&mut stats);
        attention.forward(&compute, call)?;
        let (o, stats) = (uploads.clone_dtoh(&o)?, uploads.clone_dtoh(&stats)?);
        let textbook = oracle::Problem {
            shape: [2, 4, 2, 129, 200, 64, 64],
            q: &inputs::gather(&spec.q, &q),
            k: &inputs::gather(&spec.k, &k),
            v: &inputs::gather(&spec.v, &v),
            dtype: DType::BF16,
            scale: f64::from(spec.validate()?.default_scale()),
            masks: &spec.masks,
            lengths: &[],
            sink: None,
            dropout: None,
            narrow: None,
            fixed_point: None,
        };
        let got = inputs::gather(&spec.o, &Operand::BF16(o));
        let stats: Vec<f64> = stats.into_iter().map(f64::from).collect();
        let distance =
            compare(&textbook, &oracle::Closures::default(), &Outputs { o: got, of_rows: [Some(stats), None, None], amax_s: None })?;
        let verdict = if distance.holds() { "passed" } else { "FAIL" };
        println!("{verdict} cudarc {} copied {:?}: {distance:?}", layout.name(), attention.prepared().copied());
        if !distance.holds() {
            return Err("the adapter for cudarc is wrong".into());
        }
        let mut short = uploads.clone_htod(&[bf16::NAN; 4])?;
        let call = Forward::new(&dq, &dk, &dv, &mut short);
        if attention.forward(&compute, call).is_ok() {
            return Err("an output that is too short was taken".into());
        }
    }
    crate::slices::run(executor.library(), &executor.device().stream()?)?;
    captured(&executor)?;
    captures_leave_nothing(&executor)
}

/// Forty captures by cudarc, in the mode that prohibits most, made and destroyed: the workspace of one or two of them is held at any time.
fn captures_leave_nothing(executor: &CudnnExecutor) -> Result<()> {
    let context = CudaContext::new(0)?;
    // SAFETY: as below.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let shape = Shape { batch: 2, heads_q: 16, heads_kv: 16, seq_q: 4096, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal());
    let attention = sdpa::cudarc::Attention::backward_of(executor, &spec.backward())?;
    let workspace = attention.prepared().workspace_bytes();
    let elements = 2 * 16 * 4096 * 128;
    let zeros = || stream.alloc_zeros::<bf16>(elements);
    let (q, k, v, o, d_o) = (zeros()?, zeros()?, zeros()?, zeros()?, zeros()?);
    let (mut dq, mut dk, mut dv) = (zeros()?, zeros()?, zeros()?);
    let stats = stream.alloc_zeros::<f32>(2 * 16 * 4096)?;
    stream.synchronize()?;
    let before = executor.device().memory_free()?;
    let mut most = 0;
    for _ in 0..40 {
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
        let submitted = attention.backward(&stream, Backward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv)));
        let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
        submitted?;
        drop(graph.ok_or("nothing was captured")?);
        most = most.max(before.saturating_sub(executor.device().memory_free()?));
    }
    executor.device().release_retired();
    let left = before.saturating_sub(executor.device().memory_free()?);
    println!("cudarc: 40 captures with {workspace} bytes of workspace each held at most {most} bytes, and {left} afterwards");
    if most > 3 * workspace + (64 << 20) || left > 64 << 20 {
        return Err("captures leave memory behind".into());
    }
    Ok(())
}

fn captured(executor: &CudnnExecutor) -> Result<()> {
    let context = CudaContext::new(0)?;
    // SAFETY: everything happens on one stream. Events from before a capture may not be waited for inside of it.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 300, dim_qk: 64, dim_v: 64 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal());
    let mut random = Random::new(6);
    let [q, k, v] = [&spec.q, &spec.k, &spec.v].map(|t| inputs::random(t, DType::BF16, 1.0, &mut random));
    let [q, k, v] = [stream.clone_htod(bf16s(&q)?)?, stream.clone_htod(bf16s(&k)?)?, stream.clone_htod(bf16s(&v)?)?];
    let poison = vec![bf16::NAN; 2 * 4 * 300 * 64];
    let mut o = stream.clone_htod(&poison)?;
    let attention = sdpa::cudarc::Attention::new(executor, &spec)?;
    macro_rules! call {
        () => {
            attention.forward(&stream, Forward::new(&q, &k, &v, &mut o))
        };
    }
    call!()?;
    let want = stream.clone_dtoh(&o)?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let submitted = call!();
    let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
    submitted?;
    let graph = graph.ok_or("nothing was captured")?;
    drop(attention);
    executor.forward_cache().clear();
    stream.synchronize()?;
    executor.device().release_retired();
    for _ in 0..3 {
        stream.memcpy_htod(&poison, &mut o)?;
        graph.launch()?;
        if stream.clone_dtoh(&o)?.iter().zip(&want).any(|(a, b)| a.to_bits() != b.to_bits()) {
            return Err("a graph that cudarc captured gave something else after its plan had left the cache".into());
        }
    }
    println!("passed cudarc: a captured call, launched 3 times after its plan had left the cache");
    Ok(())
}
