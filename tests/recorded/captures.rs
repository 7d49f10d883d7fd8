//! Captures, retirement, contexts and failures over the recording library, which invalidates captures as the driver does: who captures is
//! disturbed by nobody and leaves nothing behind, and nothing that the device needs goes early.

use conformance::emulated;
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::ffi::codes::Kind;
use cudnn_graph::{Buffer, Driver, Stream};
use sdpa::cache::Limits;
use sdpa::cuda::CudaOptions;
use sdpa::cudnn::Error;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, DeviceForward, Planned, Replay};
use sdpa::{AttentionSpec, DType, Executor, Layout, Mask, Shape};
use sdpa_driver::{Communicator, Nccl, Rank};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn recorder() -> Option<Recorder> {
    Recorder::load().map_err(|why| skip("recording", &why)).ok()
}

/// One with room for a single plan.
fn narrow() -> Option<Recorder> {
    let options = CudnnOptions::default().with_forward(Limits::entries(NonZeroUsize::MIN));
    Recorder::with(options).map_err(|why| skip("recording", &why)).ok()
}

fn spec(seq: i64) -> AttentionSpec {
    let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: seq, seq_kv: seq, dim_qk: 64, dim_v: 64 };
    AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal())
}

/// Device memory for calls of one specification.
struct Memory {
    buffers: [Buffer; 4],
}

impl Memory {
    fn new(recorder: &Recorder, spec: &AttentionSpec) -> Memory {
        Memory { buffers: [&spec.q, &spec.k, &spec.v, &spec.o].map(|t| recorder.buffer(t.extent().unwrap().unsigned_abs() * 2)) }
    }

    fn call(&self) -> DeviceForward<'static> {
        let [q, k, v, o] = self.buffers.each_ref().map(whole);
        DeviceForward::new(q, k, v, o)
    }
}

fn planned(recorder: &Recorder, seq: i64) -> Arc<Planned> {
    recorder.executor().attention(&spec(seq).validate().unwrap()).unwrap().0
}

#[test]
fn a_call_that_misses_and_evicts_inside_its_own_capture_is_captured() {
    let Some(recorder) = narrow() else { return };
    let (stream, aside) = (recorder.stream(), recorder.stream());
    let (first, second) = (spec(64), spec(96));
    let (a, b) = (Memory::new(&recorder, &first), Memory::new(&recorder, &second));
    // What is evicted has been used, and is so retired behind its work.
    recorder.functional(&aside, &first, &a.call()).unwrap();
    let captured = stream.capture(|| recorder.functional(&stream, &second, &b.call())).unwrap();
    assert_eq!(captured.nodes(), 1);
    // What was never executed is dropped at once, in the middle of a capture too.
    recorder.executor().forward_cache().clear();
    planned(&recorder, 128);
    let again = stream.capture(|| recorder.functional(&stream, &second, &b.call())).unwrap();
    for graph in [&captured, &again] {
        recorder.launch(graph, &stream).unwrap();
    }
    assert_eq!(recorder.faults(), 0);
}

#[test]
fn nothing_that_another_thread_does_disturbs_a_capture() {
    let Some(recorder) = narrow() else { return };
    let stream = recorder.stream();
    let spec_here = spec(64);
    let memory = Memory::new(&recorder, &spec_here);
    let recorder = &recorder;
    // Everything that may be done elsewhere, while the stream is captured in the mode that prohibits most.
    let ((), graph) = recorder.captured_by_hand(&stream, || {
        recorder.functional(&stream, &spec_here, &memory.call()).unwrap();
        std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| {
                let stream = Arc::new(recorder.stream());
                for seq in [72, 80, 88, 96, 72, 80] {
                    let spec = spec(seq);
                    let memory = Memory::new(recorder, &spec);
                    recorder.functional(&stream, &spec, &memory.call()).unwrap();
                    let mut replay = Replay::new(planned(recorder, seq), stream.clone()).unwrap();
                    recorder.replayed(&mut replay, &memory.call()).unwrap();
                    drop(replay);
                    recorder.executor().supports(&spec.validate().unwrap()).unwrap();
                    recorder.executor().forward_cache().clear();
                    recorder.executor().device().release_retired();
                    stream.synchronize().unwrap();
                }
                recorder.executor().device().retire(Box::new(recorder.buffer(1 << 20)));
                stream.record(false).unwrap().synchronize().unwrap();
                let mut up = recorder.buffer(64);
                up.upload(&stream, 0, &[0u8; 64]).unwrap();
                up.download(&stream, 0, &mut [0u8; 64]).unwrap();
            });
            elsewhere.join().unwrap();
        });
    });
    assert!(graph.is_some(), "the capture was invalidated");
    assert_eq!(recorder.faults(), 0);
}

#[test]
fn replays_on_many_threads_capture_again_and_again() {
    let Some(recorder) = recorder() else { return };
    let planned = planned(&recorder, 64);
    let spec = spec(64);
    let recorder = &recorder;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = Arc::new(recorder.stream());
                let memories = [Memory::new(recorder, &spec), Memory::new(recorder, &spec)];
                let mut replay = Replay::new(planned.clone(), stream).unwrap();
                for n in 0..200 {
                    recorder.replayed(&mut replay, &memories[n % 2].call()).unwrap();
                }
                assert_eq!(replay.captures(), 200);
            });
        }
    });
    assert_eq!((recorder.faults(), recorder.captures()), (0, 0));
}

#[test]
fn the_first_call_of_a_thread_may_be_inside_a_capture() {
    let Some(recorder) = recorder() else { return };
    let recorder = &recorder;
    // None is left in the pool, so that one has to be made.
    let streams: Vec<Stream> = (0..200).map(|_| recorder.stream()).collect();
    let _held: Vec<_> = streams.iter().map(|stream| recorder.executor().library().handle(stream).unwrap()).collect();
    std::thread::scope(|scope| {
        for seq in [64, 72, 80] {
            scope.spawn(move || {
                let (stream, spec) = (recorder.stream(), spec(seq));
                let memory = Memory::new(recorder, &spec);
                let captured = stream.capture(|| recorder.functional(&stream, &spec, &memory.call())).unwrap();
                assert_eq!(captured.nodes(), 1);
            });
        }
    });
}

#[test]
fn captures_that_others_began_leave_no_workspace_behind() {
    let Some(recorder) = recorder() else { return };
    let (stream, spec) = (recorder.stream(), spec(64));
    let memory = Memory::new(&recorder, &spec);
    let bytes = planned(&recorder, 64).workspace_bytes();
    recorder.functional(&stream, &spec, &memory.call()).unwrap();
    let before = recorder.allocated();
    for _ in 0..40 {
        // Handed over in the middle of the capture, as adapters do at each call.
        let (called, graph) =
            recorder.captured_by_hand(&stream, || recorder.functional(&recorder.borrowed(&stream), &spec, &memory.call()));
        called.unwrap();
        drop(graph.expect("the capture was invalidated"));
        assert!(recorder.allocated() <= before + 2 * bytes.max(1 << 16), "{} bytes", recorder.allocated() - before);
    }
    recorder.executor().device().release_retired();
    assert_eq!(recorder.allocated(), before);
}

#[test]
fn calls_that_are_captured_one_behind_the_other_share_a_workspace_and_captures_do_not() {
    let Some(recorder) = recorder() else { return };
    let (streams, spec) = ([recorder.stream(), recorder.stream()], spec(64));
    let memory = Memory::new(&recorder, &spec);
    planned(&recorder, 64);
    let calls = |stream: &Stream, count: usize| (0..count).try_for_each(|_| recorder.functional(stream, &spec, &memory.call()));
    // What a capture of so many calls keeps; by the library's own hand, and by another's.
    let own = |stream: &Stream, count| {
        let before = recorder.allocated();
        let graph = stream.capture(|| calls(stream, count)).unwrap();
        (recorder.allocated() - before, graph)
    };
    let (one, first) = own(&streams[0], 1);
    assert!(one > 0);
    let (same, second) = own(&streams[0], 9);
    let (elsewhere, third) = own(&streams[1], 9);
    assert_eq!([same, elsewhere], [one; 2]);
    let before = recorder.allocated();
    let (called, by_hand) = recorder.captured_by_hand(&streams[0], || calls(&streams[0], 9));
    called.unwrap();
    assert_eq!(recorder.allocated() - before, one);
    // Each has its own: one that is gone takes nothing from the others.
    drop(by_hand.expect("the capture was invalidated"));
    drop(first);
    recorder.executor().device().release_retired();
    for graph in [&second, &third] {
        recorder.launch(graph, &streams[0]).unwrap();
    }
    assert_eq!(recorder.faults(), 0);
    // Who needs more gets more, and what was captured before keeps what it has.
    let mut large = self::spec(512);
    // Queries are copied.
    large.q.strides = Layout::Bhsd.strides([1, 4, 512, 64 + 3]);
    let of_large = Memory::new(&recorder, &large);
    let bytes = |spec: &AttentionSpec| recorder.executor().attention(&spec.validate().unwrap()).unwrap().0.workspace_bytes();
    assert!(bytes(&large) > bytes(&spec));
    let mixed = streams[0]
        .capture(|| {
            calls(&streams[0], 1)?;
            recorder.functional(&streams[0], &large, &of_large.call())?;
            calls(&streams[0], 1)
        })
        .unwrap();
    recorder.launch(&mixed, &streams[0]).unwrap();
    assert_eq!((mixed.nodes(), recorder.faults()), (4, 0));
}

#[test]
fn a_panic_ends_the_capture_and_frees_what_it_kept() {
    let Some(recorder) = recorder() else { return };
    let (stream, spec) = (recorder.stream(), spec(64));
    let memory = Memory::new(&recorder, &spec);
    recorder.functional(&stream, &spec, &memory.call()).unwrap();
    let before = recorder.allocated();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.capture(|| -> Result<(), Error> {
            recorder.functional(&stream, &spec, &memory.call())?;
            panic!("in the middle")
        })
    }));
    assert!(panicked.is_err());
    assert_eq!((recorder.captures(), recorder.allocated(), recorder.faults()), (0, before, 0));
    // The stream is as good as before.
    let captured = stream.capture(|| recorder.functional(&stream, &spec, &memory.call())).unwrap();
    assert_eq!(captured.nodes(), 1);
}

#[test]
fn plans_and_workspace_outlive_the_work_that_needs_them() {
    let Some(recorder) = narrow() else { return };
    let (stream, device) = (recorder.stream(), recorder.executor().device());
    let alive = || recorder.alive(Kind::EXECUTION_PLAN);
    let specs = [spec(64), spec(96), spec(128)];
    let memories: Vec<Memory> = specs.iter().map(|spec| Memory::new(&recorder, spec)).collect();
    device.release_retired();
    let before = alive();
    recorder.hold(&stream, true);
    for (spec, memory) in specs.iter().zip(&memories) {
        recorder.functional(&stream, spec, &memory.call()).unwrap();
    }
    recorder.executor().forward_cache().clear();
    // Other streams go on, and say nothing about this one.
    let other = recorder.stream();
    recorder.functional(&other, &specs[0], &memories[0].call()).unwrap();
    recorder.executor().forward_cache().clear();
    assert_eq!((device.release_retired() >= 3, alive() >= before + 3), (true, true), "what was evicted is gone while its work waits");
    assert_eq!(recorder.faults(), 0);
    recorder.hold(&stream, false);
    assert_eq!((device.release_retired(), alive()), (0, before));
    assert_eq!(recorder.faults(), 0);
}

#[test]
fn a_stream_that_is_gone_still_holds_what_it_was_given() {
    let Some(recorder) = narrow() else { return };
    let device = recorder.executor().device();
    let spec = spec(64);
    let memory = Memory::new(&recorder, &spec);
    let stream = recorder.stream();
    recorder.functional(&stream, &spec, &memory.call()).unwrap();
    let address = stream.raw();
    drop(stream);
    // The next has the same address, and is another stream.
    let next = recorder.stream();
    assert_eq!(next.raw(), address);
    recorder.functional(&next, &spec, &memory.call()).unwrap();
    recorder.executor().forward_cache().clear();
    assert_eq!((device.release_retired(), recorder.faults()), (0, 0));
}

#[test]
fn a_graph_keeps_its_plan_and_workspace_for_as_long_as_it_lives() {
    let Some(recorder) = narrow() else { return };
    let (stream, device, spec) = (recorder.stream(), recorder.executor().device(), spec(64));
    let memory = Memory::new(&recorder, &spec);
    device.release_retired();
    let before = recorder.alive(Kind::EXECUTION_PLAN);
    let captured = stream.capture(|| recorder.functional(&stream, &spec, &memory.call())).unwrap();
    recorder.executor().forward_cache().clear();
    device.release_retired();
    assert_eq!(recorder.alive(Kind::EXECUTION_PLAN), before + 1, "the plan is gone before its graph");
    recorder.launch(&captured, &stream).unwrap();
    recorder.hold(&stream, true);
    recorder.launch(&captured, &stream).unwrap();
    drop(captured);
    device.release_retired();
    assert_eq!(recorder.alive(Kind::EXECUTION_PLAN), before + 1, "the plan is gone before the launch was done");
    recorder.hold(&stream, false);
    device.release_retired();
    assert_eq!((recorder.alive(Kind::EXECUTION_PLAN), recorder.faults()), (before, 0));
}

#[test]
fn the_callers_context_is_as_it_was_after_every_call() {
    let Some(recorder) = recorder() else { return };
    let (first, second) = (recorder.executor().device(), Driver::load(None).unwrap().device(1).unwrap());
    let (stream, spec) = (recorder.stream(), spec(64));
    let memory = Memory::new(&recorder, &spec);
    let other = CudnnExecutor::new(CudnnOptions::default().with_ordinal(1)).unwrap();
    let bytes = |t: &sdpa::TensorSpec| Buffer::new(second, t.extent().unwrap().unsigned_abs() as usize * 2).unwrap();
    let on_second = Memory { buffers: [&spec.q, &spec.k, &spec.v, &spec.o].map(bytes) };
    let second_stream = second.stream().unwrap();
    assert_eq!(recorder.current(), 0, "a thread without a context has got one");
    for device in [first, second] {
        device.make_current().unwrap();
        let here = recorder.current();
        for seq in [64, 200 + i64::from(device.ordinal())] {
            planned(&recorder, seq);
        }
        // Handles of two devices on one thread, whichever is current.
        recorder.functional(&stream, &spec, &memory.call()).unwrap();
        let planned = other.attention(&spec.validate().unwrap()).unwrap().0;
        let handle = other.library().handle(&second_stream).unwrap();
        recorder.forward(&planned, &handle, &on_second.call()).unwrap();
        let captured = stream.capture(|| recorder.functional(&stream, &spec, &memory.call())).unwrap();
        recorder.launch(&captured, &stream).unwrap();
        drop(captured);
        drop(recorder.buffer(100));
        drop(stream.record(false).unwrap());
        stream.synchronize().unwrap();
        recorder.executor().forward_cache().clear();
        first.release_retired();
        assert_eq!(recorder.current(), here);
        // On a thread of its own, which has no context.
        let (planned, on_second, recorder) = (&planned, &on_second, &recorder);
        let there = std::thread::scope(|scope| {
            let called = move || recorder.forward(planned, &handle, &on_second.call()).map(|()| recorder.current());
            scope.spawn(called).join().unwrap()
        });
        assert_eq!(there.unwrap(), 0);
    }
}

#[test]
fn plans_of_one_device_are_refused_on_another() {
    let Some(recorder) = recorder() else { return };
    let second = Driver::load(None).unwrap().device(1).unwrap();
    let spec = spec(64);
    let memory = Memory::new(&recorder, &spec);
    let stream = second.stream().unwrap();
    let handle = recorder.executor().library().handle(&stream).unwrap();
    let (result, entries) = recorder.record(|| recorder.forward(&planned(&recorder, 64), &handle, &memory.call()));
    assert!(matches!(result, Err(Error::Backend(cudnn_graph::Error::OtherDevice { plan: Some(0), handle: 1 }))), "{result:?}");
    assert!(entries.is_empty());
}

#[test]
fn a_device_that_somebody_else_has_is_no_harm_to_the_others() {
    let Some(recorder) = recorder() else { return };
    let driver = Driver::load(None).unwrap();
    assert_eq!(driver.device_count().unwrap(), 2);
    let opened = recorder.opened();
    recorder.take_device(Some(1));
    if opened & 2 == 0 {
        let refused = driver.device(1);
        assert!(matches!(refused, Err(cudnn_graph::DriverError::Driver { code: 46, .. })), "{refused:?}");
    }
    assert_eq!(driver.device(0).unwrap().ordinal(), 0);
    assert!(matches!(driver.device(2), Err(cudnn_graph::DriverError::NoDevice { ordinal: 2, count: 2 })));
    recorder.take_device(None);
    // The refusal is not remembered.
    assert_eq!(driver.device(1).unwrap().ordinal(), 1);
}

#[test]
fn a_failure_is_not_taken_for_a_refusal_and_not_remembered() {
    let Some(recorder) = recorder() else { return };
    // Not supported, compilation failed, out of memory on the device, a CUDA error.
    for (status, unsupported) in [(3000, true), (4001, false), (4004, false), (5003, false)] {
        let problem = spec(1000 + i64::from(status)).validate().unwrap();
        recorder.fail_plans(status, 20);
        let failed = recorder.executor().attention(&problem).unwrap_err();
        recorder.fail_plans(0, 0);
        assert_eq!(failed.is_unsupported(), unsupported, "{status}: {failed}");
        let again = recorder.executor().attention(&problem);
        assert_eq!(again.is_err(), unsupported, "{status}: {again:?}");
    }
}

#[test]
fn an_automatic_choice_does_not_turn_a_failure_into_the_cpu() {
    let Some(recorder) = recorder() else { return };
    let library = recorder.executor().library().path();
    let search = cudnn_graph::Search::default().with_library(library.clone()).with_driver(library.clone());
    // Native kernels would take the problem if another test had loaded an NVRTC.
    let kernels = CudaOptions::default().with_driver(library).with_nvrtc(std::path::PathBuf::from("/nowhere/libnvrtc.so.13"));
    let dispatcher = sdpa::Dispatcher::new(CudnnOptions::default().with_search(search).with_use_ledger(false)).with_kernels(kernels);
    let problem = spec(72).validate().unwrap();
    recorder.fail_plans(4004, 20);
    let failed = dispatcher.prepare(&problem, sdpa::Preference::Auto).unwrap_err();
    recorder.fail_plans(0, 0);
    assert!(matches!(failed.failure(), Some(cudnn_graph::Error::Cudnn { .. })), "{failed}");
    let chosen = dispatcher.prepare(&problem, sdpa::Preference::Auto).unwrap();
    assert_eq!(chosen.executor, sdpa::ExecutorName::CUDNN);
}

#[test]
fn cudnn_comes_first_where_plan_files_are_attached_to_it() {
    let Some(recorder) = recorder() else { return };
    let library = recorder.executor().library().path();
    let search = cudnn_graph::Search::default().with_library(library.clone()).with_driver(library);
    let dispatcher = sdpa::Dispatcher::new(CudnnOptions::default().with_search(search).with_use_ledger(false));
    let problem = spec(2048).mask("natten:65".parse().unwrap()).validate().unwrap();
    let first = || dispatcher.executors_for(&problem)[0];
    assert_eq!(first(), sdpa::ExecutorName::CUDA);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plans");
    let cudnn = dispatcher.cudnn().unwrap();
    cudnn.save_plan(&spec(88).validate().unwrap().into(), &file).unwrap();
    assert_eq!(first(), sdpa::ExecutorName::CUDA);
    cudnn.attach(&file).unwrap();
    assert_eq!(first(), sdpa::ExecutorName::CUDNN);
}

#[test]
fn one_configuration_that_does_not_compile_is_passed_over() {
    let Some(recorder) = recorder() else { return };
    // Of the first form; another may do.
    recorder.fail_plans(4001, 1);
    let made = recorder.executor().attention(&spec(104).validate().unwrap());
    recorder.fail_plans(0, 0);
    // The stand-in offers one configuration in one form: the failure is said as it is.
    assert!(matches!(made, Err(Error::Backend(cudnn_graph::Error::Cudnn { .. }))), "{made:?}");
}

#[test]
fn retirement_from_many_threads_loses_nothing() {
    let Some(recorder) = narrow() else { return };
    let device = recorder.executor().device();
    device.release_retired();
    let before = recorder.alive(Kind::EXECUTION_PLAN);
    let (recorder, stop) = (&recorder, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        let capturing = scope.spawn(move || {
            let (stream, spec) = (recorder.stream(), spec(64));
            let memory = Memory::new(recorder, &spec);
            let mut captures = 0;
            while !stop.load(Ordering::Relaxed) || captures < 20 {
                stream.capture(|| recorder.functional(&stream, &spec, &memory.call())).unwrap();
                captures += 1;
            }
            captures
        });
        let workers: Vec<_> = (0..3)
            .map(|n| {
                scope.spawn(move || {
                    let stream: Stream = recorder.stream();
                    for seq in (0..60).map(|i| 64 + 8 * ((i + n) % 5)) {
                        let spec = spec(seq);
                        let memory = Memory::new(recorder, &spec);
                        recorder.functional(&stream, &spec, &memory.call()).unwrap();
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|w| w.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        assert!(capturing.join().unwrap() >= 20);
    });
    recorder.executor().forward_cache().clear();
    assert_eq!((device.release_retired(), recorder.alive(Kind::EXECUTION_PLAN), recorder.faults()), (0, before, 0));
}

/// A CUDA graph shares the communicator whose transfers it captured: NCCL frees a communicator after such graphs, and waits for them without end.
#[test]
fn graphs_share_the_communicator_of_their_transfers() {
    const DEADLINE: Duration = Duration::from_millis(300);
    let Some(recorder) = recorder() else { return };
    let Some(emulated) = emulated::find().map_err(|why| skip("nccl", &why)).ok() else { return };
    let nccl = Arc::new(Nccl::load(Some(&emulated)).unwrap());
    let (device, stream, aside) = (recorder.executor().device(), recorder.stream(), recorder.stream());
    let rank = Rank { rank: 0, size: 1, local: 0 };
    let communicator = || Communicator::new(&nccl, device, &nccl.unique_id().unwrap(), rank, DEADLINE).unwrap();
    let capture = |own: &mut Communicator| stream.capture(|| (0..2).try_for_each(|_| emulated::exchange(own, &stream, &[], &[]))).unwrap();
    let mut own = communicator();
    let graph = capture(&mut own);
    let error = own.finish().unwrap_err().to_string();
    assert!(error.contains("CUDA graphs with transfers of the communicator to be dropped"), "{error}");
    drop(graph);
    // Launched graphs are retired; the communicator can be finished when the device has passed them.
    let mut own = communicator();
    let graphs = [capture(&mut own), capture(&mut own)];
    recorder.launch(&graphs[1], &aside).unwrap();
    drop(graphs);
    own.finish().unwrap();
    // An abort ends at once, though a graph lives.
    let mut own = communicator();
    let graph = capture(&mut own);
    let began = Instant::now();
    own.abort("a rank is gone");
    drop(own);
    drop(graph);
    assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
}
