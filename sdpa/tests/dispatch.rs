//! The choice among the executors of a build, whichever features it has.

use sdpa::{
    AttentionSpec, BackwardProblem, DType, Dispatcher, Error, Executor, ExecutorName, Layout, Preference, Prepared, PreparedBackward,
    Problem, Reason, Shape, Unsupported,
};
use std::sync::Arc;

/// Without a cuDNN, whatever there is on this machine.
fn dispatcher() -> Dispatcher {
    #[cfg(feature = "cudnn")]
    {
        let nowhere = |name: &str| Some(format!("/nowhere/{name}").into());
        let search = sdpa::cudnn::Search::default().with_library(nowhere("libcudnn.so.9")).with_driver(nowhere("libcuda.so.1"));
        Dispatcher::new(sdpa::cudnn::CudnnOptions::default().with_search(search))
    }
    #[cfg(not(feature = "cudnn"))]
    Dispatcher::default()
}

fn problem() -> Problem {
    let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 3, seq_kv: 5, dim_qk: 8, dim_v: 8 };
    AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).validate().unwrap()
}

/// Refuses everything under some name.
#[derive(Debug)]
struct Refuses(&'static str);

impl Refuses {
    fn no<T>(&self) -> Result<T, Unsupported> {
        Err(Unsupported::new(self.name(), vec![Reason::Absent(format!("{} refuses", self.0))]))
    }
}

impl Executor for Refuses {
    fn name(&self) -> ExecutorName {
        ExecutorName::new(self.0)
    }

    fn supports(&self, _: &Problem) -> Result<(), Unsupported> {
        self.no()
    }

    fn prepare(&self, _: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        Ok(self.no()?)
    }

    fn supports_backward(&self, _: &BackwardProblem) -> Result<(), Unsupported> {
        self.no()
    }

    fn prepare_backward(&self, _: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        Ok(self.no()?)
    }
}

fn own() -> Vec<ExecutorName> {
    let mut own = Vec::new();
    if cfg!(feature = "cudnn") {
        own.push(ExecutorName::CUDNN);
    }
    if cfg!(feature = "cuda") {
        own.push(ExecutorName::CUDA);
    }
    if cfg!(feature = "metal") {
        own.push(ExecutorName::METAL);
    }
    if cfg!(feature = "cpu") {
        own.push(ExecutorName::CPU);
    }
    own
}

#[test]
fn executors_are_those_of_the_build_and_the_callers_come_first() {
    assert_eq!(dispatcher().executors(), own());
    let more = dispatcher().with(Arc::new(Refuses("first"))).with(Arc::new(Refuses("cpu"))).with(Arc::new(Refuses("first")));
    let names: Vec<&str> = more.executors().into_iter().map(ExecutorName::name).collect();
    let others = own().into_iter().map(ExecutorName::name).filter(|name| *name != "cpu");
    assert_eq!(names, ["first", "cpu"].into_iter().chain(others).collect::<Vec<_>>());
}

#[cfg(all(feature = "cpu", not(target_vendor = "apple")))]
#[test]
fn an_automatic_choice_keeps_every_reason() {
    let choice = dispatcher().with(Arc::new(Refuses("mine"))).prepare(&problem(), Preference::Auto).unwrap();
    assert_eq!(choice.executor, ExecutorName::CPU);
    let who: Vec<ExecutorName> = choice.unsupported.iter().map(|d| d.executor).collect();
    let before = dispatcher().executors_for(&problem()).into_iter().filter(|name| *name != ExecutorName::CPU);
    assert_eq!(who, [ExecutorName::new("mine")].into_iter().chain(before).collect::<Vec<_>>());
    assert_eq!(choice.unsupported[0].to_string(), "mine: mine refuses");
    if cfg!(feature = "cudnn") {
        assert!(choice.unsupported[1].to_string().contains("/nowhere/libcuda.so.1"), "{}", choice.unsupported[1]);
    }
}

#[cfg(all(feature = "cudnn", feature = "cuda"))]
#[test]
fn kernels_of_our_own_are_asked_first_but_for_exceptions() {
    let problem = |seq_q: i64, mask: &str| {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q, seq_kv: 2048, dim_qk: 64, dim_v: 64 };
        AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask.parse().unwrap()).validate().unwrap()
    };
    let all = dispatcher().with(Arc::new(Refuses("mine")));
    let two = |seq_q, mask: &str| all.executors_for(&problem(seq_q, mask)).into_iter().map(ExecutorName::name).take(3).collect::<Vec<_>>();
    for mask in ["document", "array:qk", "causal"] {
        assert_eq!(two(2048, mask), ["mine", "cuda", "cudnn"], "{mask}");
    }
    assert_eq!(two(1, "padding"), ["mine", "cudnn", "cuda"]);
    let replaced = dispatcher().with(Arc::new(Refuses("cuda")));
    assert_eq!(replaced.executors_for(&problem(2048, "natten:65"))[..2], [ExecutorName::CUDA, ExecutorName::CUDNN]);
}

#[cfg(all(feature = "cudnn", feature = "cuda"))]
#[test]
fn backward_kernels_of_our_own_are_asked_first_but_for_exceptions() {
    let order = |dim: i64, score_mod: &str, mask: &str| {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 2048, seq_kv: 2048, dim_qk: dim, dim_v: dim };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).score_mod(score_mod.parse().unwrap());
        dispatcher().executors_for_backward(&spec.mask(mask.parse().unwrap()).with_stats().backward().validate().unwrap())
    };
    for (dim, mask) in [(256, "dilated:4 & causal"), (64, "causal"), (192, "causal")] {
        assert_eq!(order(dim, "alibi", mask)[..2], [ExecutorName::CUDA, ExecutorName::CUDNN], "{dim}, {mask}");
    }
    let sines = "score + sin(score) + cos(score) + sin(score * 2.0)";
    assert_eq!(order(64, sines, "causal")[..2], [ExecutorName::CUDNN, ExecutorName::CUDA]);
}

#[test]
fn a_named_executor_never_falls_back() {
    let named = |dispatcher: &Dispatcher, name| dispatcher.prepare(&problem(), Preference::Named(name)).map(|choice| choice.executor);
    let usual = dispatcher();
    #[cfg(feature = "cudnn")]
    assert!(named(&usual, ExecutorName::CUDNN).is_err_and(|e| e.failure::<sdpa::cudnn::BackendError>().is_some()));
    #[cfg(all(feature = "metal", not(target_vendor = "apple")))]
    assert!(named(&usual, ExecutorName::METAL).is_err_and(|e| e.is_unsupported()));
    assert_eq!(named(&usual, ExecutorName::CPU).is_ok(), cfg!(feature = "cpu"));
    let unknown = named(&usual, ExecutorName::new("abacus")).unwrap_err();
    assert!(unknown.is_unsupported() && unknown.to_string().contains("no such executor"), "{unknown}");
    let replaced = usual.with(Arc::new(Refuses("cpu")));
    assert!(named(&replaced, ExecutorName::CPU).is_err_and(|e| e.to_string() == "cpu: cpu refuses"));
}

#[cfg(not(feature = "cpu"))]
#[cfg(not(target_vendor = "apple"))]
#[test]
fn every_reason_is_reported_if_no_executor_supports_a_problem() {
    let refused = dispatcher().with(Arc::new(Refuses("mine"))).prepare(&problem(), Preference::Auto).unwrap_err();
    assert!(refused.is_unsupported() && refused.to_string().contains("mine refuses"), "{refused}");
    if own().is_empty() {
        let error = dispatcher().prepare(&problem(), Preference::Auto).unwrap_err();
        assert!(error.to_string().contains("no executor is compiled in; enable a feature of the crate sdpa, such as `cuda`"), "{error}");
    }
}
