//! May one plan execute on many threads at once? Every thread has a stream, a handle, inputs and a scale of its own, all
//! share one plan, and every output is compared bit by bit with what the same inputs gave alone.
#![allow(unsafe_code)]

use crate::setup::{Result, Tensors, executor};
use cudnn_graph::Stream;
use sdpa::exec::cudnn::{CudnnExecutor, PlanOptions, Planned};
use sdpa::lower::Form;
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const THREADS: usize = 16;
/// Executions in flight on a stream before it is checked.
const BURST: usize = 8;

fn specs() -> Vec<(&'static str, AttentionSpec)> {
    let spec = |heads_q, heads_kv, seq_q, seq_kv, masks: &[Mask], layout| {
        let shape = Shape { batch: 2, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 128, dim_v: 128 };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, layout).with_stats();
        spec.masks = masks.to_vec();
        spec
    };
    let mut strided = spec(4, 2, 129, 190, &[Mask::causal()], Layout::Bhsd);
    strided.q.strides = Layout::Bhsd.strides([2, 4, 129, 131]);
    vec![
        ("small causal", spec(8, 2, 129, 129, &[Mask::causal()], Layout::Bhsd)),
        ("chunk with a window", spec(8, 2, 300, 700, &[Mask::window(Some(100), Some(0), sdpa::Align::BottomRight)], Layout::Bshd)),
        ("decode", spec(32, 8, 1, 2000, &[], Layout::Bhsd)),
        ("copied query", strided),
    ]
}

fn output(executor: &CudnnExecutor, stream: &Stream, planned: &Planned, tensors: &mut Tensors, scale: f32, times: usize) -> Result<Vec<u8>> {
    tensors.o().fill(stream, 0xff)?;
    for _ in 0..times {
        let handle = executor.library().handle(stream)?;
        // SAFETY: whole buffers of this device, used by this stream only, which is waited for before they go.
        unsafe { planned.forward(&handle, &tensors.call(Some(scale))) }?;
    }
    let mut bytes = vec![0u8; tensors.o_bytes];
    tensors.o().download(stream, 0, &mut bytes)?;
    Ok(bytes)
}

pub(crate) fn run(seconds: u64) -> Result<()> {
    let forms: &[Option<Form>] = if executor(PlanOptions::default())?.library().version() >= sdpa::lower::UNIFIED_SINCE {
        &[Some(Form::Composite), Some(Form::Unified)]
    } else {
        &[None]
    };
    let each = Duration::from_secs(seconds) / (forms.len() * specs().len()) as u32;
    let mut wrong = 0;
    for &form in forms {
        let executor = executor(PlanOptions { form, ..PlanOptions::default() })?;
        for (name, spec) in specs() {
            let (planned, _) = executor.attention(&spec.validate()?)?;
            wrong += stress(&executor, name, &spec, &planned, each)?;
        }
    }
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} outputs differ").into()) }
}

fn stress(executor: &CudnnExecutor, name: &str, spec: &AttentionSpec, planned: &Arc<Planned>, each: Duration) -> Result<u64> {
    let (runs, wrong) = (AtomicU64::new(0), AtomicU64::new(0));
    // Alone first: what every thread must get again.
    let mut alone = Vec::new();
    for n in 0..THREADS {
        let stream = executor.device().stream()?;
        let scale = 0.05 + 0.01 * n as f32;
        let mut tensors = Tensors::new(&stream, spec, planned.workspace_bytes(), n as u64)?;
        let want = output(executor, &stream, planned, &mut tensors, scale, 1)?;
        if want.chunks(2).any(|c| c == [0xff, 0xff]) {
            return Err(format!("{name}: an element of the output was not written").into());
        }
        alone.push((stream, tensors, scale, want));
    }
    if (1..THREADS).any(|n| alone[n].3 == alone[0].3) {
        return Err(format!("{name}: two threads expect the same output").into());
    }
    let end = Instant::now() + each;
    std::thread::scope(|scope| {
        for (stream, tensors, scale, want) in &mut alone {
            let (runs, wrong) = (&runs, &wrong);
            scope.spawn(move || {
                while Instant::now() < end {
                    match output(executor, stream, planned, tensors, *scale, BURST) {
                        Ok(got) => {
                            runs.fetch_add(BURST as u64, Ordering::Relaxed);
                            if got != *want {
                                wrong.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        Err(e) => {
                            println!("{name}: {e}");
                            wrong.fetch_add(1, Ordering::Relaxed);
                            return;
                        }
                    }
                }
            });
        }
    });
    let (runs, wrong) = (runs.into_inner(), wrong.into_inner());
    println!("{name} ({}): {THREADS} threads, {runs} executions of one plan in {each:?}, {wrong} outputs differ", planned.forward.form);
    Ok(wrong)
}
