//! What a call costs on the host, for counting: `hot PATH CALLS` sets up one problem over the recording library, makes that many
//! calls one way, and prints how often memory was allocated in them. `scripts/instructions.sh` runs it under callgrind, which counts
//! inside [`calls_that_count`] alone.
//!
//! Each path ends in an execution. `prepared`: plan and handle in hand, addresses that come back; `found`: the plan is looked up, and
//! the handle taken from the pool; `functional`: the specification is what is given, and the workspace is kept; `validate`: the
//! specification is validated anew before the plan is looked up; `addresses`: plan in hand, forty sets of addresses in turn, more
//! than the plan keeps packs for.
//!
//! The others are functional calls of more than plain attention: `softcap` (a scalar parameter), `bias` (a tensor), `lengths` (padding),
//! `copies` (operands that engines cannot use in place), `backward`, `backward-softcap`, `backward-bias` (with the gradient of a bias, which is
//! summed); calls through cudarc's slices, plans in hand: `cudarc`, `cudarc-backward`; and one for which the executor is chosen anew, and gives the plan that it
//! has: `chosen`.

use conformance::allocations::{self, Counting};
use conformance::recorder::{self, Recorder, whole};
use cudnn_graph::{Buffer, Search, Stream};
use sdpa::cudnn::{CudnnOptions, DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue};
use sdpa::{AttentionSpec, BackwardSpec, DType, Dispatcher, Layout, Mask, Preference, Problem, ScoreMod, Shape, TensorSpec};
use std::hint::black_box;

#[global_allocator]
static COUNTING: Counting = Counting;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// One call, by its number.
type Call<'a> = Box<dyn FnMut(u64) -> Result<()> + 'a>;

/// Sets of operands; one is enough where addresses come back.
const SETS: usize = 40;
/// Calls before those that count: packs, the cache's front and the pool of handles fill up.
const WARM: u64 = 80;

const SHAPE: Shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: 2048, seq_kv: 2048, dim_qk: 128, dim_v: 128 };

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(calls)) = (arguments.next(), arguments.next()) else { return Err("usage: hot PATH CALLS".into()) };
    let calls: u64 = calls.parse()?;
    let recorder = Recorder::load()?;
    let plain = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).mask(Mask::causal());
    let softcap = || Ok::<_, Box<dyn std::error::Error>>(plain.clone().score_mod("softcap:30".parse::<ScoreMod>()?));
    match path.as_str() {
        "prepared" | "found" | "functional" | "validate" | "addresses" => forward(&path, &recorder, &plain, calls),
        "softcap" => functional(&recorder, &softcap()?, &[("cap", None)], calls),
        "bias" => {
            functional(&recorder, &plain.clone().score_mod("bias:qk".parse::<ScoreMod>()?), &[("bias", Some((DType::F32, 4 << 22)))], calls)
        }
        "lengths" => {
            let lengths = [("seq_len_q", Some((DType::I32, 4))), ("seq_len_kv", Some((DType::I32, 4)))];
            functional(&recorder, &plain.clone().mask(Mask::padding()), &lengths, calls)
        }
        "copies" => {
            let gapped =
                |tensor: TensorSpec| TensorSpec { strides: tensor.strides.map(|s| if s == 1 { 1 } else { s / 128 * 129 }), ..tensor };
            let mut strided = plain.clone();
            (strided.q, strided.o) = (gapped(strided.q), gapped(strided.o));
            functional(&recorder, &strided, &[], calls)
        }
        "backward" => backward(&recorder, &plain.backward(), &[], calls),
        "backward-softcap" => backward(&recorder, &softcap()?.backward(), &[("cap", None)], calls),
        "backward-bias" => {
            let spec = plain.clone().score_mod("bias:h".parse::<ScoreMod>()?).backward().wrt("bias", DType::BF16);
            backward(&recorder, &spec, &[("bias", Some((DType::F32, 4 * 32)))], calls)
        }
        "chosen" => chosen(&recorder, calls),
        #[cfg(not(target_vendor = "apple"))]
        "cudarc" => over_cudarc::forward(&recorder, &plain, calls),
        #[cfg(not(target_vendor = "apple"))]
        "cudarc-backward" => over_cudarc::backward(&recorder, &plain, calls),
        _ => Err(format!(
            "{path}: one of prepared, found, functional, validate, addresses, softcap, bias, lengths, copies, backward, backward-softcap, \
             backward-bias, chosen, cudarc, cudarc-backward"
        )
        .into()),
    }
}

/// Makes the calls, and prints what they allocated.
fn count(recorder: &Recorder, calls: u64, mut one: Call<'_>) -> Result<()> {
    (0..WARM).try_for_each(&mut one)?;
    let (before, executed) = (allocations::count(), recorder.written());
    calls_that_count(calls, &mut one)?;
    let (allocated, executed) = (allocations::count() - before, recorder.written() - executed);
    // One execution, and with it what is copied or converted: the same in each.
    if executed == 0 || executed % calls != 0 {
        return Err(format!("{calls} calls submitted {executed} things").into());
    }
    println!("{allocated}");
    Ok(())
}

/// Callgrind starts and stops counting where this function, which it finds by its name, is entered and left: set-up costs it no second run.
#[inline(never)]
fn calls_that_count(calls: u64, one: &mut Call<'_>) -> Result<()> {
    (0..calls).try_for_each(one)
}

fn bytes(tensor: &TensorSpec) -> u64 {
    tensor.extent().unwrap_or(0).unsigned_abs() * 2
}

/// Plain attention by every way to call it.
fn forward(path: &str, recorder: &Recorder, spec: &AttentionSpec, calls: u64) -> Result<()> {
    let executor = recorder.executor();
    let problem = spec.validate()?;
    let (planned, _) = executor.attention(&problem)?;
    let stream = recorder.stream();
    let workspace = recorder.buffer(planned.workspace_bytes());
    let sets: Vec<[Buffer; 4]> =
        (0..SETS).map(|_| [&spec.q, &spec.k, &spec.v, &spec.o].map(|tensor| recorder.buffer(bytes(tensor)))).collect();
    let call = |set: &[Buffer; 4]| {
        let [q, k, v, o] = set.each_ref().map(whole);
        DeviceForward::new(q, k, v, o).workspace(whole(&workspace))
    };
    let calls_of_sets: Vec<DeviceForward<'_>> = sets.iter().map(call).collect();
    let same = calls_of_sets[0];
    let own = same.workspace(None);
    let handle = executor.library().handle(&stream)?;

    let found = |problem: &Problem| -> Result<()> {
        let (planned, _) = executor.attention(problem)?;
        let handle = executor.library().handle(&stream)?;
        Ok(recorder.forward(&planned, &handle, black_box(&same))?)
    };
    let one: Call<'_> = match path {
        "prepared" => Box::new(|_| Ok(recorder.forward(&planned, &handle, black_box(&same))?)),
        "found" => Box::new(|_| found(black_box(&problem))),
        "functional" => Box::new(|_| Ok(recorder.functional(&stream, black_box(spec), black_box(&own))?)),
        "validate" => Box::new(|_| found(&black_box(spec).validate()?)),
        _ => Box::new(|n| Ok(recorder.forward(&planned, &handle, black_box(&calls_of_sets[(n % SETS as u64) as usize]))?)),
    };
    count(recorder, calls, one)
}

/// A parameter: a scalar, or a tensor of a type and bytes.
type Given = (&'static str, Option<(DType, u64)>);

/// Values of parameters, and the memory of tensors among them.
fn params(recorder: &Recorder, given: &[Given]) -> (Vec<Buffer>, Vec<DeviceParam<'static>>) {
    let mut buffers = Vec::new();
    let value = |given: &Option<(DType, u64)>| match given {
        None => DeviceValue::Scalar(20.0),
        Some((dtype, bytes)) => {
            let buffer = recorder.buffer(*bytes);
            let slice = whole(&buffer);
            buffers.push(buffer);
            DeviceValue::Tensor(*dtype, slice)
        }
    };
    let mut value = value;
    let params = given.iter().map(|(name, given)| DeviceParam::new(name, value(given))).collect();
    (buffers, params)
}

/// A functional call of a specification.
fn functional(recorder: &Recorder, spec: &AttentionSpec, given: &[Given], calls: u64) -> Result<()> {
    let stream = recorder.stream();
    let operands = [&spec.q, &spec.k, &spec.v, &spec.o].map(|tensor| recorder.buffer(bytes(tensor)));
    let [q, k, v, o] = operands.each_ref().map(whole);
    let (_buffers, params) = params(recorder, given);
    let call = DeviceForward::new(q, k, v, o).params(&params);
    count(recorder, calls, Box::new(|_| Ok(recorder.functional(&stream, black_box(spec), black_box(&call))?)))
}

/// Attention with a softcap where the dispatcher chooses the executor at each call. In f16 it chooses cuDNN, whose ledger covers the problem.
fn chosen(recorder: &Recorder, calls: u64) -> Result<()> {
    let shape = Shape { seq_q: 512, seq_kv: 512, dim_qk: 64, dim_v: 64, ..SHAPE };
    let spec = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).score_mod("softcap:30".parse()?);
    let (problem, stream, file) = (spec.validate()?, recorder.stream(), recorder::find()?);
    let search = Search::default().with_library(file.clone()).with_driver(file);
    let all = Dispatcher::new(CudnnOptions::default().with_search(search));
    let operands = [&spec.q, &spec.k, &spec.v, &spec.o].map(|tensor| recorder.buffer(bytes(tensor)));
    let [q, k, v, o] = operands.each_ref().map(whole);
    let (_buffers, params) = params(recorder, &[("cap", None)]);
    let params = &params;
    let call = DeviceForward::new(q, k, v, o).params(params);
    let one = |_| {
        let choice = all.prepare_device(black_box(&problem), Preference::Auto)?;
        Ok(recorder.submit(&*choice.prepared, &stream, &black_box(&call).into())?)
    };
    count(recorder, calls, Box::new(one))
}

/// A functional call of a backward pass.
fn backward(recorder: &Recorder, backward: &BackwardSpec, given: &[Given], calls: u64) -> Result<()> {
    let stream: Stream = recorder.stream();
    let spec = &backward.forward;
    let operands = [&spec.q, &spec.k, &spec.v, &spec.o, &backward.d_o, &backward.dq, &backward.dk, &backward.dv];
    let operands = operands.map(|tensor| recorder.buffer(bytes(tensor)));
    let stats = recorder.buffer((SHAPE.batch * SHAPE.heads_q * SHAPE.seq_q).unsigned_abs() * 4);
    let [q, k, v, o, d_o, dq, dk, dv] = operands.each_ref().map(whole);
    let (_buffers, params) = params(recorder, given);
    let stats = whole(&stats);
    let memory: Vec<Buffer> = backward.wrt.iter().map(|_| recorder.buffer(2 * 32)).collect();
    let gradients: Vec<DeviceGradient<'_>> =
        backward.wrt.iter().zip(&memory).map(|(asked, memory)| DeviceGradient::new(&asked.name, whole(memory))).collect();
    let (params, gradients) = (&params[..], &gradients[..]);
    let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(params).gradients(gradients);
    count(recorder, calls, Box::new(|_| Ok(recorder.functional_backward(&stream, black_box(backward), black_box(&call))?)))
}

/// Plans in hand, through cudarc's slices.
#[cfg(not(target_vendor = "apple"))]
mod over_cudarc {
    use super::{Result, SHAPE, bytes, count};
    use conformance::recorder::Recorder;
    use cudarc::driver::CudaContext;
    use half::bf16;
    use sdpa::cudarc::{Attention, Backward, Forward};
    use sdpa::{AttentionSpec, TensorSpec};
    use std::hint::black_box;

    /// A forward pass.
    pub(super) fn forward(recorder: &Recorder, spec: &AttentionSpec, calls: u64) -> Result<()> {
        let stream = CudaContext::new(0)?.new_stream()?;
        let of = |tensor: &TensorSpec| stream.alloc_zeros::<bf16>((bytes(tensor) / 2) as usize);
        let (q, k, v, mut o) = (of(&spec.q)?, of(&spec.k)?, of(&spec.v)?, of(&spec.o)?);
        let attention = Attention::new(recorder.executor(), spec)?;
        let one = |_| {
            let call = Forward::new(&q, &k, &v, &mut o);
            Ok(attention.forward(&stream, black_box(call))?)
        };
        count(recorder, calls, Box::new(one))
    }

    /// A backward pass.
    pub(super) fn backward(recorder: &Recorder, spec: &AttentionSpec, calls: u64) -> Result<()> {
        let stream = CudaContext::new(0)?.new_stream()?;
        let of = |tensor: &TensorSpec| stream.alloc_zeros::<bf16>((bytes(tensor) / 2) as usize);
        let (q, k, v, o, d_o) = (of(&spec.q)?, of(&spec.k)?, of(&spec.v)?, of(&spec.o)?, of(&spec.o)?);
        let (mut dq, mut dk, mut dv) = (of(&spec.q)?, of(&spec.k)?, of(&spec.v)?);
        let stats = stream.alloc_zeros::<f32>((SHAPE.batch * SHAPE.heads_q * SHAPE.seq_q) as usize)?;
        let attention = Attention::backward_of(recorder.executor(), &spec.backward())?;
        let one = |_| {
            let call = Backward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv));
            Ok(attention.backward(&stream, black_box(call))?)
        };
        count(recorder, calls, Box::new(one))
    }
}
