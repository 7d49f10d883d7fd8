//! Rows of more than plain attention: each beside bare executions of the same plans, of which there are as many.
#![allow(unsafe_code)]

use super::{BATCH, least};
use crate::memory::Memory;
use crate::setup::Result;
use cudnn_graph::ffi::pack::Pack;
use cudnn_graph::ir::Scalar;
use cudnn_graph::{Buffer, Handle, Plan, Stream};
use sdpa::cudnn::schedule::{Number, Port, Step};
use sdpa::cudnn::{CudnnExecutor, Planned};
use sdpa::{AttentionSpec, Mask, ScoreMod};
use std::sync::Arc;

const ROUNDS: usize = 1000;

/// The executions that a call comes to, with nothing around them.
struct Bare {
    packs: Vec<(Arc<Plan>, Pack)>,
    _memory: Vec<Buffer>,
}

impl Bare {
    fn new(planned: &Planned, stream: &Stream) -> Result<Bare> {
        let buffer = |bytes: u64| -> Result<Buffer> {
            let mut buffer = Buffer::new(stream.device(), usize::try_from(bytes)?)?;
            buffer.fill(stream, 0)?;
            Ok(buffer)
        };
        let mut memory = planned.schedule.slots().iter().map(|slot| buffer(slot.bytes)).collect::<Result<Vec<_>>>()?;
        let workspace = buffer(planned.workspace_bytes())?;
        let mut packs = Vec::new();
        for step in planned.schedule.steps() {
            let run = match step {
                Step::Run(run) => run,
                // A kernel of ours beside the plans is what a call costs over them.
                Step::Launch(_) => continue,
                Step::Zero(_) | Step::Move(..) => return Err("a row for plans alone fills or moves memory".into()),
            };
            let ids: Vec<i64> = run.ports.iter().map(|port| port.tensor.uid()).collect();
            let numbers: Vec<i64> = run.numbers.iter().map(|(tensor, _)| tensor.uid()).collect();
            for repeat in 0..run.repeats {
                let address = |port: &Port| memory[port.slot.index()].address() + repeat * port.step;
                let addresses: Vec<u64> = run.ports.iter().map(address).collect();
                let mut pack = Pack::new(run.plan.library(), &ids, &addresses, &numbers, workspace.address())?;
                for (n, (_, number)) in run.numbers.iter().enumerate() {
                    match number {
                        Number::Fixed(Scalar::I32(x)) => pack.set_value(n, &x.to_ne_bytes()),
                        Number::Fixed(value) => pack.set_value(n, &(value.to_f64() as f32).to_ne_bytes()),
                        Number::Scale => pack.set_value(n, &planned.job.problem().default_scale().to_ne_bytes()),
                        Number::Param(_) => pack.set_value(n, &20f32.to_ne_bytes()),
                        Number::Of(..) => pack.set_value(n, &0.05f32.to_ne_bytes()),
                    }
                }
                packs.push((run.plan.clone(), pack));
            }
        }
        memory.push(workspace);
        Ok(Bare { packs, _memory: memory })
    }

    /// With what the driver is asked at each call: the context, whether the stream is captured, and to mark the end.
    fn execute_marked(&mut self, handle: &Handle<'_>) -> Result<()> {
        let submission = handle.begin()?;
        std::hint::black_box(submission.is_capturing());
        self.execute(handle)?;
        Ok(submission.mark()?)
    }

    fn execute(&mut self, handle: &Handle<'_>) -> Result<()> {
        for (plan, pack) in &mut self.packs {
            // SAFETY: every address is memory of this, as large as the slot.
            unsafe { pack.execute(handle, plan.descriptor()) }?;
        }
        Ok(())
    }
}

/// A call of either pass: least times in microseconds.
struct Row {
    name: &'static str,
    plans: usize,
    bare: f64,
    marked: f64,
    prepared: f64,
    functional: f64,
}

/// One way after the other, in rounds.
fn measure(
    name: &'static str,
    stream: &Stream,
    handle: &Handle<'_>,
    mut bare: Bare,
    mut prepared: impl FnMut() -> Result<()>,
    mut functional: impl FnMut() -> Result<()>,
) -> Result<Row> {
    let none = f64::INFINITY;
    let mut row = Row { name, plans: bare.packs.len(), bare: none, marked: none, prepared: none, functional: none };
    for _ in 0..ROUNDS {
        least(&mut row.bare, || bare.execute(handle))?;
        stream.synchronize()?;
        least(&mut row.marked, || bare.execute_marked(handle))?;
        stream.synchronize()?;
        least(&mut row.prepared, &mut prepared)?;
        stream.synchronize()?;
        least(&mut row.functional, &mut functional)?;
        stream.synchronize()?;
    }
    Ok(row)
}

fn forward(executor: &CudnnExecutor, stream: &Stream, name: &'static str, spec: &AttentionSpec) -> Result<Row> {
    let (planned, _) = executor.attention(&spec.validate()?)?;
    let memory = Memory::new(stream, &planned, planned.workspace_bytes())?;
    let handle = executor.library().handle(stream)?;
    let params = memory.params();
    let given = memory.forward_call(&params, None, Some(memory.workspace()));
    let kept = given.workspace(None);
    // SAFETY: the memory outlives the last synchronisation.
    let prepared = || Ok(unsafe { planned.forward(&handle, &given) }?);
    // SAFETY: as above.
    let functional = || Ok(unsafe { executor.sdpa(stream, spec, &kept) }?);
    measure(name, stream, &handle, Bare::new(&planned, stream)?, prepared, functional)
}

fn backward(executor: &CudnnExecutor, stream: &Stream, name: &'static str, spec: &AttentionSpec) -> Result<Row> {
    let spec = spec.clone().with_stats().backward();
    let (planned, _) = executor.attention_backward(&spec.validate()?)?;
    let mut memory = Memory::new(stream, &planned, planned.workspace_bytes())?;
    memory.forward_first(executor, stream, &spec.forward)?;
    let handle = executor.library().handle(stream)?;
    let (params, gradients) = (memory.params(), memory.gradients());
    let given = memory.backward_call(&params, &gradients, None)?;
    let kept = given.workspace(None);
    // SAFETY: as in the forward pass.
    let prepared = || Ok(unsafe { planned.backward(&handle, &given) }?);
    // SAFETY: as above.
    let functional = || Ok(unsafe { executor.sdpa_backward(stream, &spec, &kept) }?);
    measure(name, stream, &handle, Bare::new(&planned, stream)?, prepared, functional)
}

pub(super) fn run(executor: &CudnnExecutor, stream: &Stream, plain: &AttentionSpec) -> Result<()> {
    let softcap = plain.clone().score_mod("softcap:30".parse::<ScoreMod>()?);
    let bias = plain.clone().score_mod("bias:h".parse::<ScoreMod>()?);
    let lengths = plain.clone().mask(Mask::padding());
    let rows = [
        forward(executor, stream, "plain", plain)?,
        forward(executor, stream, "softcap", &softcap)?,
        forward(executor, stream, "bias", &bias)?,
        forward(executor, stream, "lengths", &lengths)?,
        backward(executor, stream, "backward", plain)?,
        backward(executor, stream, "backward, softcap", &softcap)?,
    ];
    println!(
        "microseconds per call, least of {ROUNDS} batches of {BATCH}: bare executions of the same plans; how much more are these with what"
    );
    println!("the driver is asked at each call, plans in hand, functional");
    for Row { name, plans, bare, marked, prepared, functional } in rows {
        let [marked, prepared, functional] = [marked, prepared, functional].map(|us| us - bare);
        println!("    {bare:8.3}  {marked:+.3}  {prepared:+.3}  {functional:+.3}  {name}, {plans} plans");
    }
    Ok(())
}
