//! May one plan execute on many threads at once? Every thread has a stream, buffers, inputs and a scale of its own, and every
//! output is compared bit by bit with what the same inputs gave alone. What the threads share is varied, so that a difference
//! can be traced to what causes it.
//!
//! Decode is allowed to differ in the last place: its engines combine parts in the order in which they arrive, so the bits
//! change with other work on the device even where nothing is shared. Anything more fails, and any difference elsewhere.
#![allow(unsafe_code)]

use crate::setup::{Result, Tensors, executor};
use cudnn_graph::{Handle, Stream, Target};
use half::bf16;
use sdpa::cudnn::lower::Form;
use sdpa::cudnn::{CudnnExecutor, PlanOptions, Planned, plan};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const THREADS: usize = 16;
/// Executions in flight on a stream before it is checked.
const BURST: usize = 8;

/// What the threads have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sharing {
    /// One thread, nothing to share.
    Alone,
    /// One plan; each thread keeps a handle.
    Plan,
    /// A plan each; handles go back to the pool after each call.
    Handles,
    /// One plan, and handles go back to the pool after each call.
    PlanAndHandles,
    /// A plan and a handle each.
    Nothing,
}

fn specs() -> Vec<(&'static str, AttentionSpec)> {
    let spec = |heads_q, heads_kv, seq_q, seq_kv, masks: &[Mask], layout| {
        let shape = Shape { batch: 2, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 128, dim_v: 128 };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, layout).with_stats();
        spec.masks = masks.to_vec();
        spec
    };
    let mut strided = spec(4, 2, 129, 190, &[Mask::causal()], Layout::Bhsd);
    strided.q.strides = Layout::Bhsd.strides([2, 4, 129, 131]);
    let window = Mask::window(Some(100), Some(0), sdpa::Align::BottomRight);
    vec![
        ("decode", spec(32, 8, 1, 2000, &[], Layout::Bhsd)),
        ("small causal", spec(8, 2, 129, 129, &[Mask::causal()], Layout::Bhsd)),
        ("chunk with a window", spec(8, 2, 300, 700, &[window], Layout::Bshd)),
        ("copied query", strided),
    ]
}

/// Fills the output with NaN, runs the plan `times` times, and reads the output.
fn output<'s>(
    handle: &mut dyn FnMut() -> Result<Rc<Handle<'s>>>,
    stream: &Stream,
    planned: &Planned,
    tensors: &mut Tensors,
    scale: f32,
    times: usize,
) -> Result<Vec<bf16>> {
    tensors.o().fill(stream, 0xff)?;
    for _ in 0..times {
        let handle = handle()?;
        // SAFETY: whole buffers of this device, used by this stream only, which is waited for before they go.
        unsafe { planned.forward(&handle, &tensors.call(Some(scale))) }?;
    }
    let mut elements = vec![bf16::ZERO; tensors.o_bytes / 2];
    tensors.o().download(stream, 0, &mut elements)?;
    Ok(elements)
}

pub(crate) fn run(seconds: u64) -> Result<()> {
    let first = executor(PlanOptions::default())?;
    let version = first.library().version();
    let forms: &[Form] = if version >= sdpa::cudnn::lower::UNIFIED_SINCE { &[Form::Composite, Form::Unified] } else { &[Form::Composite] };
    let sharings = [Sharing::Alone, Sharing::Nothing, Sharing::Plan, Sharing::Handles, Sharing::PlanAndHandles];
    let each = Duration::from_secs(seconds) / (forms.len() * specs().len() * sharings.len()) as u32;
    let mut wrong = 0;
    for &form in forms {
        let executor = executor(PlanOptions::default().with_form(form))?;
        for (name, spec) in specs() {
            for sharing in sharings {
                wrong += stress(&executor, form, name, &spec, sharing, each)?;
            }
        }
    }
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} outputs are wrong").into()) }
}

/// One thread's own things, and what it must get.
struct Worker {
    stream: Stream,
    tensors: Tensors,
    planned: Arc<Planned>,
    scale: f32,
    want: Vec<bf16>,
}

fn workers(executor: &CudnnExecutor, form: Form, spec: &AttentionSpec, sharing: Sharing) -> Result<Vec<Worker>> {
    let problem = spec.validate()?;
    let count = if sharing == Sharing::Alone { 1 } else { THREADS };
    let shared = matches!(sharing, Sharing::Alone | Sharing::Plan | Sharing::PlanAndHandles);
    let mut workers: Vec<Worker> = Vec::new();
    for n in 0..count {
        let stream = executor.device().stream()?;
        let handle = Rc::new(executor.library().handle(&stream)?);
        let planned = if shared {
            executor.attention(&problem)?.0
        } else {
            let options = PlanOptions::default().with_form(form);
            Arc::new(plan::build(executor.library(), &Target::Handle(&handle), &problem.clone().into(), &options)?)
        };
        let scale = 0.05 + 0.01 * n as f32;
        let mut tensors = Tensors::new(&stream, spec, planned.workspace_bytes(), n as u64)?;
        let want = output(&mut || Ok(handle.clone()), &stream, &planned, &mut tensors, scale, 1)?;
        if want.iter().any(|x| x.is_nan()) {
            return Err("an element of the output was not written".into());
        }
        if workers.iter().any(|w| w.want == want) {
            return Err("two threads expect the same output".into());
        }
        drop(handle);
        workers.push(Worker { stream, tensors, planned, scale, want });
    }
    Ok(workers)
}

/// How many numbers lie between two, counting the second; far apart with a NaN. Around zero, where a place is smaller than the
/// rounding of the f32 sums behind it, at most one.
fn apart(a: bf16, b: bf16) -> u64 {
    // Of numbers with one sign, the bits are ordered as the numbers are.
    let place = |x: bf16| {
        let magnitude = i64::from(x.to_bits() & 0x7fff);
        if x.is_sign_negative() { -magnitude } else { magnitude }
    };
    if a.to_bits() == b.to_bits() {
        0
    } else if a.is_nan() || b.is_nan() {
        u64::MAX
    } else if (a.to_f32() - b.to_f32()).abs() < 1e-6 {
        1
    } else {
        place(a).abs_diff(place(b)).max(1)
    }
}

fn stress(executor: &CudnnExecutor, form: Form, name: &str, spec: &AttentionSpec, sharing: Sharing, each: Duration) -> Result<u64> {
    let (checks, differ, wrong, worst) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let last_place = spec.q.dims[2] == 1;
    let mut workers = workers(executor, form, spec, sharing)?;
    let end = Instant::now() + each;
    std::thread::scope(|scope| {
        for worker in &mut workers {
            let (checks, differ, wrong, worst) = (&checks, &differ, &wrong, &worst);
            scope.spawn(move || {
                let mut work = || -> Result<()> {
                    let pooled = matches!(sharing, Sharing::Handles | Sharing::PlanAndHandles);
                    let own = Rc::new(executor.library().handle(&worker.stream)?);
                    while Instant::now() < end {
                        let mut handle = || if pooled { Ok(Rc::new(executor.library().handle(&worker.stream)?)) } else { Ok(own.clone()) };
                        let got = output(&mut handle, &worker.stream, &worker.planned, &mut worker.tensors, worker.scale, BURST)?;
                        checks.fetch_add(1, Ordering::Relaxed);
                        let places = got.iter().zip(&worker.want).map(|(a, b)| apart(*a, *b)).max().unwrap_or(0);
                        if places > 0 {
                            differ.fetch_add(1, Ordering::Relaxed);
                            worst.fetch_max(places, Ordering::Relaxed);
                            wrong.fetch_add(u64::from(!last_place || places > 1), Ordering::Relaxed);
                        }
                    }
                    Ok(())
                };
                if let Err(e) = work() {
                    println!("{name}: {e}");
                    wrong.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let (checks, differ, wrong, worst) = (checks.into_inner(), differ.into_inner(), wrong.into_inner(), worst.into_inner());
    println!(
        "{form} {name}, sharing {sharing:?}: {} threads, {} executions, {checks} checks, {differ} differ (by {worst} in the last place at most), {wrong} wrong",
        workers.len(),
        checks * BURST as u64
    );
    Ok(wrong)
}
