//! Executors timed beside one another, over the recording library, whose clock counts what was submitted.

use conformance::nvrtc;
use conformance::recorder::entry::{EXECUTION, LAUNCH};
use conformance::recorder::{self, Recorder};
use conformance::say::skip;
use cudnn_graph::Search;
use sdpa::cuda::CudaOptions;
use sdpa::cudnn::CudnnOptions;
use sdpa::{AttentionSpec, DType, Dispatcher, ExecutorName, Layout, Preference, Shape};
use std::time::Duration;

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 300, dim_qk: 64, dim_v: 64 };

fn dispatcher(tune: bool) -> Option<(Recorder, Dispatcher)> {
    let recorder = Recorder::load().map_err(|why| skip("recording", &why)).ok()?;
    let file = recorder::find().unwrap();
    let compiler = nvrtc::find().map_err(|why| skip("recording", &why)).ok()?.path();
    let search = Search::default().with_library(file.clone()).with_driver(file.clone());
    let kernels = CudaOptions::default().with_driver(file).with_nvrtc(compiler);
    Some((
        recorder,
        Dispatcher::new(CudnnOptions::default().with_search(search).with_tune(tune).with_use_ledger(false)).with_kernels(kernels),
    ))
}

fn spec(mask: &str) -> AttentionSpec {
    AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).mask(mask.parse().unwrap()).with_stats()
}

/// Who is chosen forward and backward, and how long both took, in submissions.
type Chosen = [(ExecutorName, Option<[Option<Duration>; 2]>); 2];

fn chosen(all: &Dispatcher, spec: &AttentionSpec) -> Chosen {
    let (problem, gradient) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
    let times = |timed: Option<std::sync::Arc<sdpa::Timed>>| timed.map(|timed| [timed.times[0].1, timed.times[1].1]);
    [
        (all.prepare_device(&problem, Preference::Auto).unwrap().executor, times(all.timed(&problem))),
        (all.prepare_device_backward(&gradient, Preference::Auto).unwrap().executor, times(all.timed_backward(&gradient))),
    ]
}

/// Submissions that a pass takes on each: lengths are clamped before cuDNN has them, gradients of our own are more than one kernel.
#[test]
fn the_faster_one_is_asked_first_and_is_timed_once() {
    let Some((recorder, tuned)) = dispatcher(true) else { return };
    let ms = |[cudnn, cuda]: [u64; 2]| Some([cudnn, cuda].map(|ms| Some(Duration::from_millis(ms))));
    let rows = [
        ("causal", (ExecutorName::CUDNN, ms([1, 1]))),
        ("padding", (ExecutorName::CUDA, ms([2, 1]))),
        // Native CUDA kernels were faster for its kind.
        ("dilated:4 & causal", (ExecutorName::CUDNN, ms([1, 1]))),
    ];
    for (mask, forward) in rows {
        let (all, entries) = recorder.record(|| chosen(&tuned, &spec(mask)));
        assert!([EXECUTION, LAUNCH].iter().all(|what| entries.iter().any(|entry| entry.what == *what)), "{mask}");
        assert_eq!((all[0], all[1].0), (forward, ExecutorName::CUDNN), "{mask}");
        let (again, entries) = recorder.record(|| chosen(&tuned, &spec(mask)));
        assert_eq!((again, entries.len()), (all, 0), "{mask}");
        // The tier of host memory has the same order.
        let order = tuned.executors_for(&spec(mask).validate().unwrap());
        assert_eq!(order[0], forward.0, "{mask}");
    }
    let timed = tuned.timed(&spec("padding").validate().unwrap()).unwrap();
    assert_eq!((timed.fastest(), timed.to_string().as_str()), (Some(ExecutorName::CUDA), "cudnn 2.0000 ms, cuda 1.0000 ms"));
    assert_eq!(tuned.timed_snapshot().stats.misses, 6);
}

#[test]
fn nothing_is_timed_where_that_is_not_asked_for_or_one_is_unsupported() {
    let Some((recorder, usual)) = dispatcher(false) else { return };
    assert_eq!(chosen(&usual, &spec("dilated:4 & causal")), [(ExecutorName::CUDA, None); 2]);
    drop(recorder);
    let Some((_recorder, tuned)) = dispatcher(true) else { return };
    let wide = spec("causal").with_dtype(DType::F32);
    assert_eq!(chosen(&tuned, &wide), [(ExecutorName::CUDA, None); 2]);
}

#[test]
fn timing_in_the_middle_of_a_capture_does_not_disturb_it() {
    let Some((recorder, tuned)) = dispatcher(true) else { return };
    let stream = recorder.stream();
    let ((), graph) = recorder.captured_by_hand(&stream, || assert!(chosen(&tuned, &spec("padding"))[0].1.is_some()));
    assert!(graph.is_some() && recorder.faults() == 0, "the capture was invalidated");
}
