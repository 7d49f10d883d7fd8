//! Scales and largest magnitudes of 8-bit floats.

use super::{recorder, spec, what};
use crate::is_newer;
use conformance::recorder::entry::{DOWNLOAD, EXECUTION, FILL, UPLOAD};
use cudnn_graph::Version;
use sdpa::cudnn::lower::{self, Form, Job, Supply};
use sdpa::{Amax, AttentionSpec, DType, Direction, Executor, F8E4M3, F8E5M2, Fp8Scale, HostAmax, HostBackward, HostForward, Param};

fn narrow() -> AttentionSpec {
    let mut spec = spec().with_dtype(DType::F8E4M3);
    let dims = [spec.q.dims, spec.k.dims].map(|[b, _, s, _]| [b, 4, s, 128]);
    for (tensor, dims) in [(&mut spec.q, dims[0]), (&mut spec.k, dims[1]), (&mut spec.v, dims[1]), (&mut spec.o, dims[0])] {
        *tensor = sdpa::TensorSpec::dense(dims, sdpa::Layout::Bshd);
    }
    spec
}

fn scales(direction: Direction) -> Vec<Param<'static>> {
    Fp8Scale::of(direction).iter().map(|scale| Param::new(scale.name(), &[1.0])).collect()
}

/// A forward call over zeros; what is told of it, and how often each thing is done.
fn forward(told: &[Amax], params: &[Param<'_>]) -> Option<Result<Vec<u32>, String>> {
    let recorder = recorder()?;
    let spec = narrow();
    let prepared = recorder.executor().prepare(&spec.validate().unwrap()).unwrap();
    let [q, k, v, mut o] = [&spec.q, &spec.k, &spec.v, &spec.o].map(|t| vec![F8E4M3::default(); t.extent().unwrap() as usize]);
    let mut numbers = vec![0f32; told.len()];
    let call = HostForward::new(&q, &k, &v, &mut o)
        .params(params)
        .amax(told.iter().zip(&mut numbers).map(|(of, value)| HostAmax::new(*of, value)));
    let (result, entries) = recorder.record(|| prepared.forward(call));
    Some(result.map(|_| what(&entries)).map_err(|e| e.to_string()))
}

#[test]
fn scales_go_up_and_largest_magnitudes_come_down() {
    let Some(done) = forward(&[Amax::O, Amax::S], &scales(Direction::Forward)) else { return };
    let done = done.unwrap();
    let count = |kind: u32| done.iter().filter(|entry| **entry == kind).count();
    // Three operands and six scales; the output, two numbers and the workspace.
    assert_eq!([UPLOAD, FILL, EXECUTION, DOWNLOAD].map(count), [9, 4, 1, 3], "{done:?}");
}

#[test]
fn what_is_missing_is_told_by_name() {
    let told = |amax: &[Amax], params: &[Param<'_>]| forward(amax, params).map(Result::unwrap_err);
    let Some(error) = told(&[Amax::O, Amax::DQ], &scales(Direction::Forward)[1..]) else { return };
    for part in ["amax_s: got nothing", "amax_dq: got an output", "parameter descale_q: got nothing"] {
        assert!(error.contains(part), "{error}");
    }
    let Some(error) = told(&[], &scales(Direction::Backward)) else { return };
    assert!(error.contains("parameter scale_o: got nothing") && error.contains("parameter scale_dq: got a value"), "{error}");
}

#[test]
fn each_number_of_a_backward_pass_has_a_tensor_of_its_own() {
    // Older ones are not asked for gradients.
    if !is_newer("calls::fp8::each_number_of_a_backward_pass_has_a_tensor_of_its_own") {
        return;
    }
    let Some(recorder) = recorder() else { return };
    let spec = narrow().backward().with_upstream_in(DType::F8E5M2).with_gradients_in(DType::F8E5M2);
    let problem = spec.validate().unwrap();
    let (planned, _) = recorder.executor().attention_backward(&problem).unwrap();
    for amax in Amax::of(Direction::Backward) {
        assert_eq!(planned.lowered.supplies.iter().filter(|(_, supply)| *supply == Supply::Amax(*amax)).count(), 1, "{amax}");
    }
    let prepared = recorder.executor().prepare_backward(&problem).unwrap();
    let narrow = |t: &sdpa::TensorSpec| vec![F8E4M3::default(); t.extent().unwrap() as usize];
    let wide = |t: &sdpa::TensorSpec| vec![F8E5M2::default(); t.extent().unwrap() as usize];
    let [q, k, v, o] = [&spec.forward.q, &spec.forward.k, &spec.forward.v, &spec.forward.o].map(narrow);
    let (d_o, mut dq, mut dk, mut dv) = (wide(&spec.d_o), wide(&spec.dq), wide(&spec.dk), wide(&spec.dv));
    let stats = vec![0f32; problem.forward().stats_elements() as usize];
    let mut told = [0f32; 4];
    let params = scales(Direction::Backward);
    let call = HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv))
        .params(&params)
        .amax(Amax::of(Direction::Backward).iter().zip(&mut told).map(|(of, value)| HostAmax::new(*of, value)));
    let (result, entries) = recorder.record(|| prepared.backward(call));
    result.unwrap();
    let done = what(&entries);
    let count = |kind: u32| done.iter().filter(|entry| **entry == kind).count();
    // Five operands, stats and twelve scales; three gradients, four numbers and the workspace.
    assert_eq!([UPLOAD, EXECUTION, DOWNLOAD].map(count), [18, 1, 7], "{done:?}");
    assert!(count(FILL) >= 8, "{done:?}");
}

/// Types of results are in the key, and in what is sent.
#[test]
fn passes_of_other_types_are_others() {
    let one = Job::from(narrow().validate().unwrap());
    let other = Job::from(narrow().with_output_in(DType::F8E5M2).validate().unwrap());
    let fields = |a: &Job, b: &Job| {
        let (a, b) = (sdpa::cache::CacheKey::fields(a), sdpa::cache::CacheKey::fields(b));
        b.into_iter().filter(|field| !a.contains(field)).map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(fields(&one, &other), ["dtype of o"]);
    let in_blocks = Job::from(narrow().with_block_scales().validate().unwrap());
    assert_eq!(fields(&one, &in_blocks), ["block_scaled"]);
    let sent = |job: &Job| lower::lower(job, Form::Composite, Version::new(9, 27, 0)).unwrap().graph;
    assert!(one != in_blocks && sent(&one) != sent(&in_blocks));
    let backward = |d_o, gradient| Job::from(narrow().backward().with_upstream_in(d_o).with_gradients_in(gradient).validate().unwrap());
    let plain = backward(DType::F8E4M3, DType::F8E4M3);
    assert_eq!(fields(&plain, &backward(DType::F8E5M2, DType::F8E4M3)), ["dtype of d_o"]);
    assert_eq!(fields(&plain, &backward(DType::F8E4M3, DType::F8E5M2)), ["dtype of gradients"]);
}
