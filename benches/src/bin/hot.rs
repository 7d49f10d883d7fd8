//! What a call costs on the host, for counting: `hot PATH CALLS` sets up one problem over the recording library, makes that many
//! calls one way, and prints how often memory was allocated in them. `scripts/instructions.sh` runs it under callgrind twice, with
//! different numbers of calls: what both spend outside of the calls cancels out.
//!
//! Each path ends in an execution. `prepared`: plan and handle in hand, addresses that come back; `found`: the plan is looked up, and
//! the handle taken from the pool; `functional`: the specification is what is given, and the workspace is kept; `validate`: the
//! specification is validated anew before the plan is looked up; `addresses`: plan in hand, forty sets of addresses in turn, more
//! than the plan keeps packs for.

use conformance::allocations::{self, Counting};
use conformance::recorder::{Recorder, whole};
use cudnn_graph::Buffer;
use sdpa::exec::cudnn::DeviceForward;
use sdpa::{AttentionSpec, DType, Layout, Mask, Problem, Shape};
use std::hint::black_box;

#[global_allocator]
static COUNTING: Counting = Counting;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Sets of operands; one is enough where addresses come back.
const SETS: usize = 40;
/// Calls before those that count: packs, the cache's front and the pool of handles fill up.
const WARM: u64 = 80;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(calls)) = (arguments.next(), arguments.next()) else { return Err("usage: hot PATH CALLS".into()) };
    let calls: u64 = calls.parse()?;

    let recorder = Recorder::load()?;
    let executor = recorder.executor();
    let shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: 2048, seq_kv: 2048, dim_qk: 128, dim_v: 128 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
    let problem = spec.validate()?;
    let (planned, _) = executor.attention(&problem)?;
    let stream = recorder.stream();
    let workspace = recorder.buffer(planned.workspace_bytes());
    let bytes = |tensor: &sdpa::TensorSpec| tensor.extent().unwrap_or(0).unsigned_abs() * 2;
    let sets: Vec<[Buffer; 4]> =
        (0..SETS).map(|_| [&spec.q, &spec.k, &spec.v, &spec.o].map(|tensor| recorder.buffer(bytes(tensor)))).collect();
    let call = |set: &[Buffer; 4]| {
        let [q, k, v, o] = set.each_ref().map(whole);
        DeviceForward { q, k, v, o, stats: None, attn_scale: None, params: &[], workspace: Some(whole(&workspace)) }
    };
    let calls_of_sets: Vec<DeviceForward<'_>> = sets.iter().map(call).collect();
    let same = calls_of_sets[0];
    let own = DeviceForward { workspace: None, ..same };
    let handle = executor.library().handle(&stream)?;

    let found = |problem: &Problem| -> Result<()> {
        let (planned, _) = executor.attention(problem)?;
        let handle = executor.library().handle(&stream)?;
        Ok(recorder.forward(&planned, &handle, black_box(&same))?)
    };
    let mut one: Box<dyn FnMut(u64) -> Result<()>> = match path.as_str() {
        "prepared" => Box::new(|_| Ok(recorder.forward(&planned, &handle, black_box(&same))?)),
        "found" => Box::new(|_| found(black_box(&problem))),
        "functional" => Box::new(|_| Ok(recorder.functional(&stream, black_box(&spec), black_box(&own))?)),
        "validate" => Box::new(|_| found(&black_box(&spec).validate()?)),
        "addresses" => Box::new(|n| Ok(recorder.forward(&planned, &handle, black_box(&calls_of_sets[(n % SETS as u64) as usize]))?)),
        _ => return Err(format!("{path}: one of prepared, found, functional, validate, addresses").into()),
    };
    (0..WARM).try_for_each(&mut one)?;
    let (before, executed) = (allocations::count(), recorder.written());
    (0..calls).try_for_each(&mut one)?;
    let (allocated, executed) = (allocations::count() - before, recorder.written() - executed);
    if executed != calls {
        return Err(format!("{calls} calls submitted {executed} things").into());
    }
    println!("{allocated}");
    Ok(())
}
