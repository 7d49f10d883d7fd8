//! Graphs over cudarc's slices: what is submitted, every mistake, and how long a plan lives.

use conformance::recorder::Recorder;
use conformance::recorder::entry::EXECUTION;
use conformance::say::skip;
use cudarc::driver::{CudaContext, DevicePtr};
use cudnn_graph::cudarc::{Call, Executable};
use cudnn_graph::ffi::codes::Kind;
use cudnn_graph::ir::{Mode, Scalar, TensorId};
use cudnn_graph::{DType, Error, Graph, Plan, Policy, RawStream, Target};
use half::bf16;
use sdpa::{AttentionSpec, Layout, Shape, library};
use std::sync::Arc;

/// sum = k·a + b and bits = k·a: the graph's tensors in this order, and k.
fn graph() -> (Graph, [TensorId; 4], TensorId) {
    let mut g = Graph::new();
    let (a, b) = (g.input("a", DType::BF16, [4, 64]), g.input("b", DType::F32, [4, 64]));
    let k = g.parameter("k", DType::F32);
    let product = g.pointwise(Mode::Mul, &[a, k]);
    let sum = g.pointwise(Mode::Add, &[product, b]);
    g.output(sum, "sum", DType::F32);
    g.output(product, "product", DType::F8E4M3);
    (g, [a, b, sum, product], k)
}

fn planned(recorder: &Recorder, graph: Graph) -> Arc<Plan> {
    let stream = recorder.stream();
    let library = recorder.executor().library();
    let target = Target::Handle(&library.handle(&stream).unwrap());
    Arc::new(Plan::build(library, Arc::new(graph.verify().unwrap()), &target, &Policy::default()).unwrap())
}

fn recorder(test: &str) -> Option<Recorder> {
    crate::cudarc::loads(test).then(|| Recorder::load().map_err(|why| skip("recording", &why)).ok()).flatten()
}

#[test]
fn a_call_submits_the_addresses_of_its_slices() {
    let Some(recorder) = recorder("slices::a_call_submits_the_addresses_of_its_slices") else { return };
    let (graph, [a, b, sum, product], k) = graph();
    let executable = Executable::new(planned(&recorder, graph));
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let of_a = stream.alloc_zeros::<bf16>(256).unwrap();
    let (rows, mut of_sum) = (stream.alloc_zeros::<f32>(1024).unwrap(), stream.alloc_zeros::<f32>(512).unwrap());
    let mut of_product = stream.alloc_zeros::<u8>(256).unwrap();
    let want = [
        (a, of_a.device_ptr(&stream).0),
        (b, rows.device_ptr(&stream).0 + 256 * 4),
        (sum, of_sum.device_ptr(&stream).0 + 64 * 4),
        (product, of_product.device_ptr(&stream).0),
    ];
    let of_b = rows.slice(256..512);
    let mut end_of_sum = of_sum.slice_mut(64..);
    let call = Call::new().input(a, &of_a).input("b", &of_b).value("k", Scalar::F32(3.0));
    let call = call.output("product", &mut of_product).output(sum, &mut end_of_sum);
    let (done, entries) = recorder.record(|| executable.submit(&stream, call));
    done.unwrap();
    let executions: Vec<_> = entries.iter().filter(|entry| entry.what == EXECUTION).collect();
    let [execution] = executions[..] else { panic!("{entries:?}") };
    for (id, address) in want {
        assert_eq!(execution.address(id.uid()), Some(address), "{id}");
    }
    assert_eq!(execution.number(k.uid()), Some(3.0));
    assert_eq!(execution.stream, stream.cu_stream().addr() as u64);
    assert_eq!(execution.workspace != 0, executable.plan().workspace_bytes() != 0);
    assert_eq!(recorder.faults(), 0);
}

#[test]
fn every_mistake_of_a_call_is_told_before_anything_runs() {
    let Some(recorder) = recorder("slices::every_mistake_of_a_call_is_told_before_anything_runs") else { return };
    let (graph, [a, b, sum, _], _) = graph();
    let plan = planned(&recorder, graph);
    let executable = Executable::new(plan.clone());
    let (context, other) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
    let (stream, far) = (context.new_stream().unwrap(), other.new_stream().unwrap());
    let told = |call: Call<'_>| {
        let (done, entries) = recorder.record(|| executable.submit(&stream, call));
        assert!(entries.iter().all(|entry| entry.what != EXECUTION), "{entries:?}");
        let Err(Error::Bindings(errors)) = done else { panic!("{done:?}") };
        errors.0.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let (of_a, of_b) = (stream.alloc_zeros::<bf16>(256).unwrap(), stream.alloc_zeros::<f32>(512).unwrap());
    let (mut of_sum, mut of_product) = (stream.alloc_zeros::<f32>(256).unwrap(), stream.alloc_zeros::<u8>(256).unwrap());
    let (mut again, mut floats) = (stream.alloc_zeros::<f32>(256).unwrap(), stream.alloc_zeros::<f32>(256).unwrap());
    let short = of_b.slice(1..200);
    let far_b = far.alloc_zeros::<f32>(256).unwrap();
    // No closure, whose calls would all borrow for one lifetime.
    macro_rules! rest {
        () => {
            Call::new().input(a, &of_a).value("k", Scalar::F32(3.0))
        };
    }
    assert_eq!(
        told(Call::new().input(a, &of_sum).input("b", &short).input("sum", &of_b).output("product", &mut floats)),
        [
            "a: got a slice of f32, expected elements of type bf16",
            "sum: got memory for reading, but the plan writes this tensor; bind it as an output",
            "product: got a slice of f32, expected elements of type f8e4m3",
            "sum: the plan writes this tensor, and its memory overlaps that of b; expected memory of its own",
            "b: got 796 bytes, expected at least 1024",
            &format!("b: address {:#x} is not a multiple of 16 bytes", of_b.device_ptr(&stream).0 + 4),
            "k: got no buffer, expected one",
        ]
    );
    let missing = "sum: got no buffer, expected one";
    let unknown = "total: the plan has no tensor of this name, expected one of a, b, product, sum, k";
    assert_eq!(told(rest!().input(b, &of_b).output("total", &mut of_sum).output("product", &mut of_product)), [unknown, missing]);
    // Outputs twice, by name and by id; an input as an output; a slice of another device, of which cudarc keeps no error.
    let call = rest!().input(b, &of_b).output("product", &mut of_product);
    assert_eq!(told(call.output("sum", &mut of_sum).output(sum, &mut again)), ["sum: bound more than once"]);
    let only_read = "b: got memory for writing, but the plan only reads this tensor; bind it as an input";
    assert_eq!(told(rest!().output(b, &mut again).output("product", &mut of_product).output("sum", &mut of_sum)), [only_read]);
    let elsewhere = "b: got memory of device 1, expected device 0, the device of the stream";
    assert_eq!(told(rest!().input(b, &far_b).output("product", &mut of_product).output("sum", &mut of_sum)), [elsewhere]);
    let scalar = "t0: got a scalar for this tensor, but the plan expects none";
    let call = rest!().input(b, &of_b).output("product", &mut of_product).output("sum", &mut of_sum);
    assert_eq!(told(call.value("a", Scalar::F32(1.0))), [scalar]);
    context.check_err().unwrap();
    // A stream of another device.
    let (done, entries) = recorder.record(|| executable.submit(&far, rest!()).map_err(|e| e.to_string()));
    assert_eq!(done.unwrap_err(), "the handle is of device 1, but the plan was made for device 0");
    assert!(entries.is_empty());
}

#[test]
fn plans_that_read_lengths_need_the_caller_to_vouch() {
    let Some(recorder) = recorder("slices::plans_that_read_lengths_need_the_caller_to_vouch") else { return };
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q: 64, seq_kv: 96, dim_qk: 64, dim_v: 128 };
    let spec = AttentionSpec::dense(sdpa::DType::BF16, shape, Layout::Bhsd).mask(library::padding());
    let (planned, _) = recorder.executor().attention(&spec.validate().unwrap()).unwrap();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let (done, entries) = recorder.record(|| Executable::new(planned.plan.clone()).submit(&stream, Call::new()));
    let text = done.unwrap_err().to_string();
    assert!(text.lines().count() == 2 && text.contains("seq_len_q") && text.contains("seq_len_kv") && entries.is_empty(), "{text}");
}

#[test]
fn the_device_keeps_a_plan_until_it_is_done() {
    let Some(recorder) = recorder("slices::the_device_keeps_a_plan_until_it_is_done") else { return };
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let raw = RawStream(stream.cu_stream().cast());
    let (of_a, of_b) = (stream.alloc_zeros::<bf16>(256).unwrap(), stream.alloc_zeros::<f32>(256).unwrap());
    let (mut of_sum, mut of_product) = (stream.alloc_zeros::<f32>(256).unwrap(), stream.alloc_zeros::<u8>(256).unwrap());
    let device = recorder.executor().device();
    let before = recorder.alive(Kind::EXECUTION_PLAN);
    for used in [false, true] {
        let executable = Executable::new(planned(&recorder, graph().0));
        recorder.hold_raw(raw, true);
        if used {
            let call = Call::new().input("a", &of_a).input("b", &of_b).value("k", Scalar::F32(3.0));
            executable.submit(&stream, call.output("product", &mut of_product).output("sum", &mut of_sum)).unwrap();
        }
        drop(executable);
        device.release_retired();
        assert_eq!(recorder.alive(Kind::EXECUTION_PLAN), before + u64::from(used));
        recorder.hold_raw(raw, false);
        device.release_retired();
        assert_eq!(recorder.alive(Kind::EXECUTION_PLAN), before);
    }
    assert_eq!(recorder.faults(), 0);
}
