//! What a plan file says of each of its plans, what a recheck compares, and which plans the safe tier takes: over the recording library.

use conformance::code;
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::ir::Scalar;
use cudnn_graph::{Buffer, DeviceSlice, OwnedBindings, Target};
use sdpa::cudnn::Error;
use sdpa::cudnn::lower::{Supply, Table};
use sdpa::cudnn::portable::PayloadError;
use sdpa::cudnn::{CudnnOptions, DeviceBackward, DeviceGradient, DeviceParam, DeviceValue};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape, TensorSpec, library};
use std::sync::Arc;

fn recorder(options: CudnnOptions) -> Option<Recorder> {
    Recorder::with(options).map_err(|why| skip("recording", &why)).ok()
}

fn spec() -> AttentionSpec {
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q: 64, seq_kv: 96, dim_qk: 64, dim_v: 128 };
    AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal())
}

/// Rows with gaps of one element between them, which engines do not read in place.
fn gapped(tensor: TensorSpec) -> TensorSpec {
    let [b, h, s, d] = tensor.dims;
    TensorSpec { strides: Layout::Bhsd.strides([b, h, s, d + 1]), alignment: 2, ..tensor }
}

/// The first line of a plan's bytes, and the rest.
fn head(bytes: &[u8]) -> (serde_json::Value, &[u8]) {
    let end = bytes.iter().position(|b| *b == b'\n').unwrap();
    (serde_json::from_slice(&bytes[..end]).unwrap(), &bytes[end..])
}

#[test]
fn every_plan_in_a_file_says_what_it_is_for_and_which_graph_it_is_of() {
    let Some(recorder) = recorder(CudnnOptions::default()) else { return };
    let mut padded = spec().score_mod(library::alibi()).mask(library::padding());
    (padded.q, padded.o) = (gapped(padded.q), gapped(padded.o));
    let job = padded.validate().unwrap().into();
    let (planned, _) = recorder.executor().attention(&padded.validate().unwrap()).unwrap();
    let stream = recorder.stream();
    let handle = recorder.executor().library().handle(&stream).unwrap();
    let load = |bytes: &[u8]| code::planned(recorder.executor().library(), &Target::Handle(&handle), &job, bytes);
    let bytes = planned.to_bytes().unwrap();
    assert!(load(&bytes).is_ok());
    let (first, rest) = head(&bytes);
    let plans = first["plans"].as_array().unwrap();
    let names: Vec<&str> = plans.iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["copy of q", "attention", "copy of o"]);
    // What another release would have made of any of them is not taken for this one's: neither another graph, nor another's place.
    for n in 0..names.len() {
        let mut other = first.clone();
        other["plans"][n]["graph"] = plans[(n + 1) % names.len()]["graph"].clone();
        let mut renamed = first.clone();
        renamed["plans"][n]["name"] = "copy of everything".into();
        for head in [other, renamed] {
            let bytes = [head.to_string().as_bytes(), rest].concat();
            assert!(matches!(load(&bytes), Err(PayloadError::Graph { .. })), "{}", names[n]);
        }
    }
}

#[test]
fn rechecks_compare_tables_by_their_bits() {
    let Some(recorder) = recorder(CudnnOptions::default().with_recheck(true)) else { return };
    // Of the first head: a table holds what is no number.
    let nan = spec().score_mod("score + sqrt(f32(head) - 1)".parse().unwrap());
    let problem = nan.validate().unwrap();
    let (planned, _) = recorder.executor().attention(&problem).unwrap();
    let is_nan = |table: &Table| matches!(table, Table::F32(x) if x.iter().any(|x| x.is_nan()));
    assert!(planned.lowered.supplies.iter().any(|(_, s)| matches!(s, Supply::Table(t) if is_nan(t))), "{:?}", planned.lowered.supplies);
    let (_, there) = recorder.executor().attention(&problem).unwrap();
    assert!(there);
}

#[test]
fn the_safe_tier_takes_no_plan_whose_tensors_say_where_it_writes() {
    let Some(recorder) = recorder(CudnnOptions::default()) else { return };
    let padded = spec().mask(library::padding());
    let (planned, _) = recorder.executor().attention(&padded.validate().unwrap()).unwrap();
    let stream = Arc::new(recorder.stream());
    let (result, entries) =
        recorder.record(|| cudnn_graph::launch(&planned.plan, &stream, OwnedBindings::new(), recorder.buffer(1 << 20)).map(drop));
    let Err(cudnn_graph::Error::Bindings(errors)) = result else { panic!("{result:?}") };
    let text = errors.to_string();
    assert!(text.contains("seq_len_q") && text.contains("seq_len_kv") && entries.is_empty(), "{text}");
    // Each execution has a workspace of its own, and gives it back.
    let (plain, _) = recorder.executor().attention(&spec().validate().unwrap()).unwrap();
    let mut bindings = OwnedBindings::new().value(plain.lowered.attn_scale, Scalar::F32(0.5));
    for (operand, tensor) in plain.job.tensors() {
        let buffer: Buffer = recorder.buffer(tensor.extent().unwrap().unsigned_abs() * 2);
        bindings = bindings.buffer(plain.lowered.operand(operand).unwrap(), &Arc::new(buffer));
    }
    let room = recorder.buffer(plain.workspace_bytes());
    let address = room.address();
    let running = cudnn_graph::launch(&plain.plan, &stream, bindings, room).unwrap();
    assert_eq!(running.wait().unwrap().address(), address);
}

/// Every mistake of a call, with its field, before anything is submitted.
#[test]
fn what_is_wrong_with_a_call_is_told_at_once() {
    let Some(recorder) = recorder(CudnnOptions::default()) else { return };
    let spec = spec().score_mod("bias:h".parse().unwrap()).score_mod("softcap:30".parse().unwrap()).backward().wrt("bias", DType::BF16);
    let (planned, _) = recorder.executor().attention_backward(&spec.validate().unwrap()).unwrap();
    let stream = recorder.stream();
    let handle = recorder.executor().library().handle(&stream).unwrap();
    let buffer = recorder.buffer(1 << 22);
    let (all, workspace) = (whole(&buffer), recorder.buffer(planned.workspace_bytes()));
    let scalar = |x| DeviceParam::new("cap", DeviceValue::Scalar(x));
    let bias = |dtype| DeviceParam::new("bias", DeviceValue::Tensor(dtype, all));
    let gradient = |name| DeviceGradient::new(name, all);
    let told = |change: &dyn Fn(&mut DeviceBackward<'_>), params: &[DeviceParam<'_>], gradients: &[DeviceGradient<'_>]| {
        let (q, k, v, o, d_o, dq, dk, dv, stats, workspace) = (all, all, all, all, all, all, all, all, all, Some(whole(&workspace)));
        let mut call =
            DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(params).gradients(gradients).workspace(workspace);
        change(&mut call);
        let (result, entries) = recorder.record(|| recorder.backward(&planned, &handle, &call));
        assert!(entries.is_empty() || result.is_ok(), "{entries:?}");
        match result {
            Ok(()) => Vec::new(),
            Err(Error::Spec(errors)) => errors.0.into_iter().map(|e| e.field).collect::<Vec<_>>(),
            Err(other) => panic!("{other}"),
        }
    };
    let (right, wanted) = ([scalar(20.0), bias(DType::F32)], [gradient("bias")]);
    assert_eq!(told(&|_| (), &right, &wanted), [""; 0]);
    assert_eq!(told(&|_| (), &[bias(DType::F32), scalar(20.0)], &wanted), [""; 0]);
    assert_eq!(told(&|_| (), &[scalar(f32::NAN), bias(DType::F32)], &wanted), ["parameter cap"]);
    assert_eq!(told(&|_| (), &[scalar(20.0), bias(DType::F16)], &wanted), ["parameter bias"]);
    assert_eq!(told(&|_| (), &[scalar(20.0), scalar(20.0)], &wanted), ["parameter cap", "parameter bias"]);
    assert_eq!(told(&|_| (), &right, &[gradient("bias"), gradient("bias")]), ["gradient of bias"]);
    assert_eq!(told(&|_| (), &right, &[gradient("cap")]), ["gradient of cap", "gradient of bias"]);
    let much = |call: &mut DeviceBackward<'_>| {
        call.attn_scale = Some(0.0);
        call.q.bytes = 8;
        call.dv.address += 2;
        call.workspace = Some(DeviceSlice { address: whole(&workspace).address + 16, bytes: 0 });
    };
    let fields = ["attn_scale", "parameter bias", "gradient of bias", "q length", "dv address", "workspace address", "workspace length"];
    assert_eq!(told(&much, &[scalar(20.0)], &[]), fields);
}
