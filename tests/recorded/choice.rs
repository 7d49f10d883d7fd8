//! The choice of the device tier over the recording library: who is asked, in which order, and that nothing is submitted by a call that is wrong.

use crate::alone;
use conformance::nvrtc;
use conformance::recorder::entry::{EXECUTION, Entry, LAUNCH};
use conformance::recorder::{self, Recorder, whole};
use conformance::say::skip;
use cudnn_graph::{Buffer, Driver, Search, Version};
use half::bf16;
use sdpa::cuda::CudaOptions;
use sdpa::cudnn::ledger::{About, Evidence, RELEASE};
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, DeviceBackward, DeviceForward, DeviceSlice};
use sdpa::nvidia::{DevicePass, Job};
use sdpa::{
    AttentionSpec, Choice, DType, Dispatcher, Error, Executor, ExecutorName, HostBackward, HostForward, Layout, Packed, Preference,
    PreparedBackward, Shape,
};
use std::path::PathBuf;

const SHAPE: Shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 512, seq_kv: 512, dim_qk: 64, dim_v: 64 };

/// The compiler, and all executors over the recording library.
fn all(cudnn: Option<PathBuf>, nvrtc: Option<PathBuf>) -> Option<Dispatcher> {
    let file = recorder::find().map_err(|why| skip("recording", &why)).ok()?;
    let compiler = nvrtc::find().map_err(|why| skip("recording", &why)).ok()?.path();
    let search = Search::default().with_library(cudnn.unwrap_or_else(|| file.clone())).with_driver(file.clone());
    let kernels = CudaOptions::default().with_driver(file).with_nvrtc(nvrtc.unwrap_or(compiler));
    Some(Dispatcher::new(CudnnOptions::default().with_search(search).with_use_ledger(false)).with_kernels(kernels))
}

fn both() -> Option<(Recorder, Dispatcher)> {
    Some((Recorder::load().map_err(|why| skip("recording", &why)).ok()?, all(None, None)?))
}

/// Three sines under a causal mask, of which cuDNN comes first in either pass; or a mask, of which native CUDA kernels do.
fn spec(text: &str) -> AttentionSpec {
    let plain = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).with_stats();
    match text {
        SINES => plain.score_mod(text.parse().unwrap()).mask("causal".parse().unwrap()),
        mask => plain.mask(mask.parse().unwrap()),
    }
}

const SINES: &str = "score + sin(score) + cos(score) + sin(score * 2.0)";

/// A rule of places that is no band.
const RULE: &str = "dilated:4 & causal";

fn forward(all: &Dispatcher, spec: &AttentionSpec, preference: Preference) -> Result<Choice<DevicePass>, Error> {
    all.prepare_device(&spec.validate().unwrap(), preference)
}

fn backward(all: &Dispatcher, spec: &AttentionSpec, preference: Preference) -> Result<Choice<DevicePass>, Error> {
    all.prepare_device_backward(&spec.backward().validate().unwrap(), preference)
}

/// Memory of a call, and the call.
struct Memory {
    q: Buffer,
    k: Buffer,
    o: Buffer,
    stats: Buffer,
}

impl Memory {
    fn new(recorder: &Recorder) -> Memory {
        let [q, k, o] = [4, 2, 4].map(|heads| recorder.buffer(heads * 512 * 64 * 2));
        Memory { q, k, o, stats: recorder.buffer(4 * 512 * 4) }
    }

    fn forward(&self) -> DeviceForward<'static> {
        let (q, k, o) = (whole(&self.q), whole(&self.k), whole(&self.o));
        let stats = Some(whole(&self.stats));
        DeviceForward::new(q, k, k, o).stats(stats)
    }

    fn backward(&self, written: &[Buffer; 3]) -> DeviceBackward<'static> {
        let (q, k, o) = (whole(&self.q), whole(&self.k), whole(&self.o));
        let ([dq, dk, dv], stats, gradients) = (written.each_ref().map(whole), whole(&self.stats), &[]);
        DeviceBackward::new((q, k, k), (o, stats), o, (dq, dk, dv)).gradients(gradients)
    }
}

/// How many plans of cuDNN's were executed, and how many kernels launched.
fn counted(entries: &[Entry]) -> [usize; 2] {
    [EXECUTION, LAUNCH].map(|what| entries.iter().filter(|entry| entry.what == what).count())
}

#[test]
fn kernels_come_first_but_for_exceptions_and_a_name_is_kept() {
    let Some((recorder, all)) = both() else { return };
    let (stream, memory) = (recorder.stream(), Memory::new(&recorder));
    let gradients = [4, 2, 2].map(|heads| recorder.buffer(heads * 512 * 64 * 2));
    let named = Preference::Named;
    let rows = [
        (RULE, Preference::Auto, ExecutorName::CUDA),
        ("causal", Preference::Auto, ExecutorName::CUDA),
        (SINES, Preference::Auto, ExecutorName::CUDNN),
        (RULE, named(ExecutorName::CUDNN), ExecutorName::CUDNN),
        (SINES, named(ExecutorName::CUDA), ExecutorName::CUDA),
    ];
    for (mask, preference, who) in rows {
        let spec = spec(mask);
        let [there, back] = [forward(&all, &spec, preference).unwrap(), backward(&all, &spec, preference).unwrap()];
        assert_eq!([there.executor, back.executor], [who; 2], "{mask}, {preference:?}");
        assert!(there.unsupported.is_empty() && back.unsupported.is_empty());
        let calls = [(&memory.forward()).into(), (&memory.backward(&gradients)).into()];
        for (choice, call) in [there, back].iter().zip(&calls) {
            recorder.submit(&*choice.prepared, &stream, call).unwrap();
            let (done, entries) = recorder.record(|| recorder.submit(&*choice.prepared, &stream, call));
            done.unwrap();
            let [plans, kernels] = counted(&entries);
            assert_eq!((plans > 0, kernels > 0 && plans == 0), (who == ExecutorName::CUDNN, who == ExecutorName::CUDA), "{mask}");
        }
        // A call of the other pass is wrong, whoever runs it.
        for (choice, call) in [forward(&all, &spec, preference), backward(&all, &spec, preference)].iter().zip(calls.iter().rev()) {
            let (done, entries) = recorder.record(|| recorder.submit(&*choice.as_ref().unwrap().prepared, &stream, call));
            assert!(matches!(done, Err(Error::Spec(_))) && entries.is_empty(), "{mask}: {done:?}");
        }
    }
    assert_eq!(recorder.faults(), 0);
}

#[test]
fn an_unsupported_problem_falls_through_and_both_reasons_are_reported() {
    let Some((_recorder, all)) = both() else { return };
    let wide = spec("causal").with_dtype(DType::F32);
    let choice = forward(&all, &wide, Preference::Auto).unwrap();
    assert_eq!((choice.executor, choice.unsupported.len()), (ExecutorName::CUDA, 1));
    assert!(
        choice.unsupported[0].executor == ExecutorName::CUDNN && choice.unsupported[0].to_string().contains("f32"),
        "{:?}",
        choice.unsupported
    );
    let packed = AttentionSpec::packed(DType::BF16, SHAPE, Packed::new()).mask(RULE.parse().unwrap());
    let one_order = packed.backward().deterministic().validate().unwrap();
    // An exception: these sequences are short, and have few KV blocks.
    let choice = all.prepare_device_backward(&one_order, Preference::Auto).unwrap();
    assert_eq!((choice.executor, choice.unsupported.len()), (ExecutorName::CUDNN, 0));
    let many = AttentionSpec::dense(DType::BF16, Shape { batch: 40, ..SHAPE }, Layout::Bhsd).mask("causal".parse().unwrap());
    let choice = all.prepare_device_backward(&many.backward().deterministic().validate().unwrap(), Preference::Auto).unwrap();
    assert_eq!((choice.executor, choice.unsupported.len()), (ExecutorName::CUDA, 0));
    let shape = Shape { dim_qk: 264, dim_v: 264, ..SHAPE };
    let neither = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).with_stats();
    let asked = [forward(&all, &neither, Preference::Auto), backward(&all, &neither, Preference::Auto)];
    for (refused, order) in asked.into_iter().zip([["cudnn", "cuda"]; 2]) {
        let Err(Error::Unsupported(refused)) = refused else { panic!("{refused:?}") };
        let who: Vec<&str> = refused.all().map(|one| one.executor.name()).collect();
        assert_eq!((who, refused.is_absence()), (order.to_vec(), false));
        let said = refused.to_string();
        assert!(["cudnn: ", "cuda: "].iter().all(|who| said.lines().any(|line| line.starts_with(who) && line.contains("264"))), "{said}");
    }
}

/// The executors over the recording library, with this ledger of its version and architecture.
fn with_ledger(evidence: &Evidence) -> Option<Dispatcher> {
    let file = recorder::find().map_err(|why| skip("recording", &why)).ok()?;
    let nvrtc = nvrtc::find().map_err(|why| skip("recording", &why)).ok()?.path();
    let search = Search::default().with_library(file.clone()).with_driver(file.clone());
    let (device, release) = ("a test".to_owned(), RELEASE.to_owned());
    let about = About { cudnn: Version::new(9, 19, 0), sm: 90, device, release, right: 0, wrong: 0 };
    let options = CudnnOptions::default().with_search(search).with_ledgers(vec![evidence.ledger(about)]);
    Some(Dispatcher::new(options).with_kernels(CudaOptions::default().with_driver(file).with_nvrtc(nvrtc)))
}

/// Both passes of a problem in three shapes.
fn passes(of: &AttentionSpec) -> Vec<Job> {
    let of_shape = |seq: i64| {
        let shape = Shape { seq_q: seq, seq_kv: seq, ..SHAPE };
        let dense = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd);
        let spec = of.clone().with_q(dense.q).with_k(dense.k).with_v(dense.v).with_o(dense.o);
        [spec.validate().unwrap().into(), spec.backward().validate().unwrap().into()]
    };
    [512, 256, 128].into_iter().flat_map(of_shape).collect()
}

#[test]
fn cudnn_comes_first_only_where_its_ledger_covers_the_problem() {
    let spec = spec(SINES);
    let all_right = |evidence: &mut Evidence| passes(&spec).iter().for_each(|job| evidence.add(job, true));
    let executors = |all: &Dispatcher| {
        let [there, back] = [forward(all, &spec, Preference::Auto).unwrap(), backward(all, &spec, Preference::Auto).unwrap()];
        assert!(there.unsupported.is_empty() && back.unsupported.is_empty() && there.unproven.is_none() && back.unproven.is_none());
        [there.executor, back.executor]
    };
    let Some(none) = with_ledger(&Evidence::default()) else { return };
    assert_eq!(executors(&none), [ExecutorName::CUDA; 2]);
    let named = forward(&none, &spec, Preference::Named(ExecutorName::CUDNN)).unwrap();
    let why = named.unproven.unwrap().to_string();
    assert!(why.starts_with("unproven on cuDNN 9.19.0, sm 90: forward pass; "), "{why}");
    let host = none.prepare(&spec.validate().unwrap(), Preference::Auto).unwrap();
    assert_eq!((host.executor, none.executors_for(&spec.validate().unwrap())[0]), (ExecutorName::CUDA, ExecutorName::CUDA));

    let mut evidence = Evidence::default();
    all_right(&mut evidence);
    assert_eq!(executors(&with_ledger(&evidence).unwrap()), [ExecutorName::CUDNN; 2]);

    // A wrong result of the backward pass: cuDNN refuses it by name too, and the forward pass stays proven.
    let mut evidence = Evidence::default();
    passes(&spec).iter().for_each(|job| evidence.add(job, job.name() == "forward"));
    let all = with_ledger(&evidence).unwrap();
    assert_eq!(executors(&all), [ExecutorName::CUDNN, ExecutorName::CUDA]);
    let Err(Error::Unsupported(refused)) = backward(&all, &spec, Preference::Named(ExecutorName::CUDNN)) else { panic!("it ran") };
    assert!(refused.to_string().contains("results with backward pass (a ledger of a test)"), "{refused}");
    let cudnn = all.cudnn().unwrap();
    assert!(cudnn.supports_backward(&spec.backward().validate().unwrap()).is_err() && cudnn.supports(&spec.validate().unwrap()).is_ok());
}

#[test]
fn cudnn_computes_unproven_problems_that_kernels_do_not_support() {
    let Some(all) = with_ledger(&Evidence::default()) else { return };
    let packed = AttentionSpec::packed(DType::BF16, SHAPE, Packed::new()).mask(RULE.parse().unwrap());
    let one_order = packed.backward().deterministic().validate().unwrap();
    let choice = all.prepare_device_backward(&one_order, Preference::Auto).unwrap();
    let unsupported: Vec<ExecutorName> = choice.unsupported.iter().map(|unsupported| unsupported.executor).collect();
    assert!(choice.executor == ExecutorName::CUDA || choice.unproven.is_some(), "{:?}", choice.unproven);
    assert_eq!(unsupported.is_empty(), choice.executor == ExecutorName::CUDA);
}

#[test]
fn the_ledger_of_the_release_is_in_use_unless_it_is_turned_off() {
    let Ok(file) = recorder::find().map_err(|why| skip("recording", &why)) else { return };
    let unproven = |use_ledger: bool| {
        let search = Search::default().with_library(file.clone()).with_driver(file.clone());
        let cudnn = CudnnExecutor::new(CudnnOptions::default().with_search(search).with_use_ledger(use_ledger)).unwrap();
        let job = spec("causal").validate().unwrap();
        (cudnn.ledger().is_some(), cudnn.unproven(&job).map(|unproven| unproven.to_string()))
    };
    assert_eq!(unproven(true), (true, None));
    let why = "unproven on cuDNN 9.19.0, sm 90: there is no ledger for this version and architecture";
    assert_eq!(unproven(false), (false, Some(why.to_owned())));
}

#[test]
fn a_name_never_falls_back() {
    let Some((recorder, all)) = both() else { return };
    let wide = spec("causal").with_dtype(DType::F32);
    let (refused, entries) = recorder.record(|| forward(&all, &wide, Preference::Named(ExecutorName::CUDNN)));
    let Err(Error::Unsupported(refused)) = refused else { panic!("{refused:?}") };
    assert_eq!((refused.executor, refused.before.len(), entries.len()), (ExecutorName::CUDNN, 0, 0));
    for name in [ExecutorName::CPU, ExecutorName::METAL, ExecutorName::new("abacus")] {
        let Err(Error::Unsupported(refused)) = forward(&all, &spec("causal"), Preference::Named(name)) else { panic!("{name}") };
        assert_eq!(
            refused.to_string(),
            format!("{name}: no executor of this name takes memory of an NVIDIA GPU, expected one of cudnn, cuda")
        );
    }
}

/// In a process of its own, where no cuDNN was loaded: there the kernels alone are enough, and where there is no NVRTC cuDNN is.
#[test]
fn who_is_absent_is_passed_over_and_told() {
    if !alone("choice::who_is_absent_is_passed_over_and_told") {
        return;
    }
    let nowhere = |name: &str| Some(PathBuf::from(format!("/nowhere/{name}")));
    let Some(kernels) = all(nowhere("libcudnn.so.9"), None) else { return };
    let choice = forward(&kernels, &spec(SINES), Preference::Auto).unwrap();
    assert_eq!((choice.executor, choice.unsupported.len()), (ExecutorName::CUDA, 1));
    assert!(choice.unsupported[0].is_absence() && choice.unsupported[0].to_string().contains("/nowhere/libcudnn.so.9"));
    assert_eq!(kernels.device().unwrap().ordinal(), 0);
    let neither = all(nowhere("libcudnn.so.9"), nowhere("libnvrtc.so.13")).unwrap();
    let Err(Error::Unsupported(refused)) = forward(&neither, &spec(RULE), Preference::Auto) else { panic!("somebody took it") };
    let said = refused.to_string();
    assert!(refused.is_absence() && said.contains("/nowhere/libcudnn.so.9") && said.contains("/nowhere/libnvrtc.so.13"), "{said}");
    assert!(neither.device().is_err_and(|missing| missing.failure::<sdpa::cudnn::BackendError>().is_some()));
    let plans = all(None, nowhere("libnvrtc.so.13")).unwrap();
    let choice = forward(&plans, &spec(RULE), Preference::Auto).unwrap();
    assert_eq!((choice.executor, choice.unsupported[0].executor), (ExecutorName::CUDNN, ExecutorName::CUDA));
}

/// The first call of a program may be captured, by somebody else and in the mode that prohibits most: executors, plans and kernels are made meanwhile.
#[test]
fn a_first_choice_in_the_middle_of_a_capture_does_not_disturb_it() {
    let Some((recorder, all)) = both() else { return };
    let (stream, memory) = (recorder.stream(), Memory::new(&recorder));
    let gradients = [4, 2, 2].map(|heads| recorder.buffer(heads * 512 * 64 * 2));
    for mask in [RULE, SINES] {
        let ((), graph) = recorder.captured_by_hand(&stream, || {
            let here = &recorder.borrowed(&stream);
            let [there, back] =
                [forward(&all, &spec(mask), Preference::Auto), backward(&all, &spec(mask), Preference::Auto)].map(Result::unwrap);
            recorder.submit(&*there.prepared, here, &(&memory.forward()).into()).unwrap();
            recorder.submit(&*back.prepared, here, &(&memory.backward(&gradients)).into()).unwrap();
        });
        assert!(graph.is_some(), "{mask}: the capture was invalidated");
    }
    assert_eq!(recorder.faults(), 0);
}

/// What is prepared goes on when the program has let go of those who made it, and what the caches kept is what is given again.
#[test]
fn what_is_prepared_is_kept_by_problem_and_by_the_caller() {
    let Some((recorder, all)) = both() else { return };
    for mask in [RULE, SINES] {
        let [one, other] = [(); 2].map(|()| forward(&all, &spec(mask), Preference::Auto).unwrap().prepared);
        assert!(std::sync::Arc::ptr_eq(&one, &other), "{mask}");
    }
    let kept = forward(&all, &spec(RULE), Preference::Auto).unwrap().prepared;
    let (device, stream, memory) = (all.device().unwrap(), recorder.stream(), Memory::new(&recorder));
    assert!(std::ptr::eq(device, Driver::load(None).unwrap().device(0).unwrap()));
    drop(all);
    recorder.submit(&*kept, &stream, &(&memory.forward()).into()).unwrap();
    let short = DeviceSlice { bytes: 8, ..whole(&memory.q) };
    let wrong = memory.forward().q(short);
    let (done, entries) = recorder.record(|| recorder.submit(&*kept, &stream, &(&wrong).into()));
    assert!(done.is_err_and(|e| e.to_string().contains("q length")) && entries.is_empty());
    drop(kept);
    device.release_retired();
    assert_eq!(recorder.faults(), 0);
}

/// cuDNN was chosen, and refuses a scale below 0 at the call. Without NVRTC there are no native kernels, so the CPU computes these calls.
#[test]
fn a_call_that_cudnn_refuses_for_its_scale_runs_elsewhere() {
    let Some(all) = all(None, Some(PathBuf::from("/nowhere/libnvrtc.so"))) else { return };
    let shape = Shape { seq_q: 70, seq_kv: 70, ..SHAPE };
    let plain = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).with_stats();
    let spec = plain.score_mod(SINES.parse().unwrap()).mask("causal".parse().unwrap());
    let (problem, gradient) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
    let (chosen, chosen_backward) =
        (all.prepare(&problem, Preference::Auto).unwrap(), all.prepare_backward(&gradient, Preference::Auto).unwrap());
    assert_eq!([chosen.executor, chosen_backward.executor], [ExecutorName::CUDNN; 2]);
    let on = ExecutorName::CPU.into();
    let (cpu, cpu_backward) = (all.prepare(&problem, on).unwrap(), all.prepare_backward(&gradient, on).unwrap());

    let values = |n: i64, seed: i64| (0..n).map(|i| bf16::from_f32(((i * seed) % 13 - 6) as f32 / 4.0)).collect::<Vec<_>>();
    let (q, k, v, d_o) = (values(4 * 70 * 64, 7), values(2 * 70 * 64, 5), values(2 * 70 * 64, 3), values(4 * 70 * 64, 11));
    for attn_scale in [0.0, -0.25] {
        let forward = |choice: &Choice| {
            let (mut o, mut stats) = (vec![bf16::ZERO; q.len()], vec![0f32; 4 * 70]);
            choice.prepared.forward(HostForward::new(&q, &k, &v, &mut o).stats(&mut stats).attn_scale(attn_scale)).unwrap();
            (o, stats)
        };
        let (o, stats) = forward(&cpu);
        assert!(o.iter().any(|x| *x != bf16::ZERO));
        assert_eq!(forward(&chosen), (o.clone(), stats.clone()));
        let backward = |choice: &Choice<dyn PreparedBackward>| {
            let [mut dq, mut dk, mut dv] = [q.len(), k.len(), v.len()].map(|n| vec![bf16::ZERO; n]);
            let call = HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv)).attn_scale(attn_scale);
            choice.prepared.backward(call).unwrap();
            [dq, dk, dv]
        };
        assert_eq!(backward(&chosen_backward), backward(&cpu_backward));
    }

    // An executor that is named computes the call, or says why not.
    let named = all.prepare(&problem, ExecutorName::CUDNN.into()).unwrap();
    let (mut o, mut stats) = (vec![bf16::ZERO; q.len()], vec![0f32; 4 * 70]);
    let refused = named.prepared.forward(HostForward::new(&q, &k, &v, &mut o).stats(&mut stats).attn_scale(0.0)).unwrap_err();
    assert!(refused.to_string().contains("attn_scale"), "{refused}");
}
