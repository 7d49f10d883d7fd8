//! Calls of native CUDA kernels over the recording library: what is launched reaches the operands and nothing else, and wrong calls are told whole.

use conformance::nvrtc;
use conformance::recorder::entry::{FILL, LAUNCH};
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::{Buffer, Stream};
use sdpa::cache::Limits;
use sdpa::cuda::{CudaExecutor, CudaOptions};
use sdpa::cudnn::{DeviceForward, DeviceParam, DeviceSlice, DeviceValue};
use sdpa::{AttentionSpec, DType, DeviceExecutor, Error, Layout, Mask, Operand, Packed, Paged, Shape, TensorSpec, packed};
use std::num::NonZeroUsize;

fn executor(entries: usize) -> Option<(Recorder, CudaExecutor)> {
    let recorder = Recorder::load().map_err(|why| skip("recording", &why)).ok()?;
    let nvrtc = nvrtc::find().map_err(|why| skip("recording", &why)).ok()?.path();
    let plans = Limits::entries(NonZeroUsize::new(entries)?);
    let options = CudaOptions::default().with_nvrtc(nvrtc).with_plans(plans).with_kernels(plans);
    Some((recorder, CudaExecutor::new(options).unwrap_or_else(|e| panic!("{e}"))))
}

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 200, dim_qk: 72, dim_v: 40 };

fn spec() -> AttentionSpec {
    AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bshd).mask(Mask::causal())
}

/// Device memory for the operands of a specification.
fn memory(recorder: &Recorder, spec: &AttentionSpec) -> [Buffer; 4] {
    [&spec.q, &spec.k, &spec.v, &spec.o].map(|t| recorder.buffer(t.extent().unwrap().unsigned_abs() * 2))
}

fn call<'a>([q, k, v, o]: &[Buffer; 4], params: &'a [DeviceParam<'a>]) -> DeviceForward<'a> {
    let [q, k, v, o] = [q, k, v, o].map(whole);
    DeviceForward::new(q, k, v, o).params(params)
}

/// A call over memory of the recording library.
fn submit(
    (recorder, executor): (&Recorder, &CudaExecutor),
    stream: &Stream,
    spec: &AttentionSpec,
    call: &DeviceForward<'_>,
) -> Result<(), Error> {
    let ready = executor.prepare_device(&spec.validate().unwrap())?;
    recorder.submit(&*ready, stream, &call.into())
}

#[test]
fn one_launch_reaches_the_operands_and_tiles_past_the_multiprocessors_are_counted() {
    let Some((recorder, executor)) = executor(8) else { return };
    let stream = recorder.stream();
    let many = Shape { batch: 8, heads_q: 16, heads_kv: 4, ..SHAPE };
    let gaps = |mut spec: AttentionSpec| {
        spec.k.strides = [200 * 3 * 80, 80, 3 * 80, 1];
        spec.o.strides[0] += 64;
        spec
    };
    let shapes = [spec(), gaps(spec()), AttentionSpec::dense(DType::F16, many, Layout::Bhsd).mask("k % 3 != q % 3".parse().unwrap())];
    for (spec, tiles) in shapes.into_iter().zip([24, 24, 384]) {
        let buffers = memory(&recorder, &spec);
        submit((&recorder, &executor), &stream, &spec, &call(&buffers, &[])).unwrap();
        let (done, entries) = recorder.record(|| submit((&recorder, &executor), &stream, &spec, &call(&buffers, &[])));
        done.unwrap();
        let launches: Vec<_> = entries.iter().filter(|e| e.what == LAUNCH).collect();
        let [launch] = launches[..] else { panic!("{} launches", launches.len()) };
        assert_eq!(launch.pointers[..4], buffers.each_ref().map(Buffer::address));
        let blocks = executor.device().sm_count().min(tiles);
        assert_eq!((launch.from, launch.bytes), (u64::from(blocks), 384), "{tiles} tiles");
        // The counter is zeroed in front, where there is one.
        let zeroed: Vec<_> = entries.iter().filter(|e| e.what == FILL).collect();
        assert_eq!(zeroed.iter().map(|e| e.bytes).collect::<Vec<_>>(), if blocks < tiles { vec![4] } else { vec![] });
    }
    assert_eq!(recorder.faults(), 0);
}

/// Of packed documents, tiles are listed first; what the maps of operands reach is the tokens of the call's memory, and no more than the problem's.
#[test]
fn tiles_of_documents_are_listed_and_maps_reach_the_tokens_there_are() {
    let Some((recorder, executor)) = executor(8) else { return };
    let stream = recorder.stream();
    let shape = Shape { seq_kv: SHAPE.seq_q, ..SHAPE };
    let spec = AttentionSpec::packed(DType::BF16, shape, Packed::of(400)).mask(Mask::causal()).with_stats();
    let ready = executor.prepare_device(&spec.validate().unwrap()).unwrap();
    for tokens in [400, 250, 1] {
        let operand = |tensor: &TensorSpec| recorder.buffer(packed::memory(tensor, tokens).extent().unwrap().unsigned_abs() * 2);
        let buffers = [&spec.q, &spec.k, &spec.v, &spec.o].map(operand);
        let (stats, boundaries) = (recorder.buffer(tokens as u64 * 4 * 4), recorder.buffer(12));
        let params = [DeviceParam::new("cu_seqlens", DeviceValue::Tensor(DType::I32, whole(&boundaries)))];
        let right = call(&buffers, &params).stats(whole(&stats));
        recorder.submit(&*ready, &stream, &(&right).into()).unwrap();
        let (done, entries) = recorder.record(|| recorder.submit(&*ready, &stream, &(&right).into()));
        done.unwrap();
        let launches: Vec<_> = entries.iter().filter(|e| e.what == LAUNCH).collect();
        let [listing, attention] = launches[..] else { panic!("{} launches", launches.len()) };
        assert_eq!((listing.from, listing.bytes), (1, 256));
        assert_eq!(attention.pointers[..4], buffers.each_ref().map(Buffer::address));
        assert!(entries.iter().all(|e| e.what != FILL), "the list zeroes the counter");
    }
    assert_eq!(recorder.faults(), 0);
}

/// Of few queries, tiles are listed, keys are met in parts, and parts are merged; containers of pages are what maps of keys reach.
#[test]
fn keys_of_few_queries_are_met_in_parts() {
    let Some((recorder, executor)) = executor(8) else { return };
    let stream = recorder.stream();
    let shape = Shape { batch: 3, heads_q: 12, heads_kv: 2, seq_q: 2, seq_kv: 9000, dim_qk: 64, dim_v: 64 };
    let dense = AttentionSpec::dense(DType::F16, shape, Layout::Bshd).mask(Mask::padding());
    let cache = Paged::new(16, 700);
    let paged = AttentionSpec::paged(DType::F16, shape, cache).mask(Mask::padding());
    let [lengths_q, lengths_kv] = [(); 2].map(|()| recorder.buffer(12));
    let table = recorder.buffer(4 * 3 * 563);
    let named = |name, buffer| DeviceParam::new(name, DeviceValue::Tensor(DType::I32, whole(buffer)));
    let params = [named("seq_len_q", &lengths_q), named("seq_len_kv", &lengths_kv), named("page_table", &table)];
    for (spec, params) in [(dense, &params[..2]), (paged, &params)] {
        let problem = spec.validate().unwrap();
        let of = |operand| recorder.buffer(problem.in_memory(operand).unwrap().extent().unwrap().unsigned_abs() * 2);
        let buffers = [Operand::Q, Operand::K, Operand::V, Operand::O].map(of);
        submit((&recorder, &executor), &stream, &spec, &call(&buffers, params)).unwrap();
        let (done, entries) = recorder.record(|| submit((&recorder, &executor), &stream, &spec, &call(&buffers, params)));
        done.unwrap();
        let launches: Vec<_> = entries.iter().filter(|e| e.what == LAUNCH).collect();
        let [listing, attention, merging] = launches[..] else { panic!("{} launches", launches.len()) };
        assert_eq!((listing.from, listing.bytes), (1, 256));
        assert_eq!((attention.from, attention.bytes), (u64::from(executor.device().sm_count()), 256));
        assert_eq!(attention.pointers[..4], buffers.each_ref().map(Buffer::address));
        // Two queries of six heads are twelve rows, four to a block, of each batch entry and key head.
        assert_eq!((merging.from, merging.bytes), (3 * 2 * 3, 128));
    }
    assert_eq!(recorder.faults(), 0);
}

#[test]
fn what_is_wrong_with_a_call_is_told_at_once_and_nothing_is_launched() {
    let Some((recorder, executor)) = executor(8) else { return };
    let stream = recorder.stream();
    let spec = spec().score_mod("bias:hqk".parse().unwrap()).mask(Mask::padding()).with_stats();
    let buffers = memory(&recorder, &spec);
    let short = |buffer: &Buffer| DeviceSlice { bytes: buffer.bytes() as u64 - 2, ..whole(buffer) };
    let lengths = recorder.buffer(8);
    let params = [
        DeviceParam::new("seq_len_q", DeviceValue::Tensor(DType::I32, whole(&lengths))),
        DeviceParam::new("seq_len_kv", DeviceValue::Scalar(3.0)),
        DeviceParam::new("slope", DeviceValue::Scalar(1.0)),
    ];
    let [q, ..] = &buffers;
    let right = call(&buffers, &params);
    let wrong = right.q(short(q)).k(DeviceSlice { address: right.k.address + 8, ..right.k }).attn_scale(f32::NAN);
    let (done, entries) = recorder.record(|| submit((&recorder, &executor), &stream, &spec, &wrong));
    let Err(Error::Spec(errors)) = done else { panic!("{done:?}") };
    let told: Vec<&str> = errors.0.iter().map(|e| e.field.as_str()).collect();
    let wanted = ["q length", "k address", "stats", "parameter slope", "parameter bias", "parameter seq_len_kv", "attn_scale"];
    for field in wanted {
        assert!(told.contains(&field), "{field} in {told:?}");
    }
    assert_eq!(told.len(), wanted.len(), "{told:?}");
    assert!(entries.iter().all(|e| e.what != LAUNCH));
}

#[test]
fn a_plan_that_was_evicted_stays_until_its_work_is_done_and_in_graphs() {
    let Some((recorder, executor)) = executor(1) else { return };
    let (stream, aside) = (recorder.stream(), recorder.stream());
    let (first, second) = (spec(), spec().with_sink());
    let buffers = memory(&recorder, &first);
    let sink = recorder.buffer(16);
    let params = [DeviceParam::new("sink", DeviceValue::Tensor(DType::F32, whole(&sink)))];
    let once = |stream: &Stream, spec: &AttentionSpec, params: &[DeviceParam<'_>]| {
        submit((&recorder, &executor), stream, spec, &call(&buffers, params))
    };
    recorder.hold(&aside, true);
    once(&aside, &first, &[]).unwrap();
    // Each build evicts the plan and the kernel before it, in the middle of a capture too.
    let captured = stream.capture(|| -> Result<(), Box<dyn std::error::Error>> { Ok(once(&stream, &second, &params)?) });
    let captured = captured.unwrap_or_else(|e| panic!("{e}"));
    assert!(executor.device().release_retired() > 0, "a kernel was unloaded under the work that runs it");
    recorder.hold(&aside, false);
    assert_eq!(executor.device().release_retired(), 0);
    once(&aside, &first, &[]).unwrap();
    recorder.launch(&captured, &stream).unwrap();
    drop(captured);
    executor.device().release_retired();
    assert_eq!(recorder.faults(), 0);
}
