//! The raw tier over the recording library: what a call submits, in which order, on what; and that a call which is refused submits
//! nothing. The library is strict about what it is given (see `tests/recording`), so that every call here is checked by it too.

mod fp8;
mod statistics;
mod tier;

use conformance::recorder::entry::{COPY, DOWNLOAD, EXECUTION, Entry, FILL, UPLOAD};
use conformance::recorder::{Recorder, run, tensor, whole};
use conformance::say::skip;
use cudnn_graph::ffi::codes::Kind;
use cudnn_graph::ir::TensorId;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Stream};
use half::bf16;
use sdpa::cudnn::Error;
use sdpa::cudnn::lower::{Operand, Supply};
use sdpa::cudnn::schedule::Role;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue, Planned};
use sdpa::{AttentionSpec, BackwardSpec, DType, Executor, HostForward, Layout, Mask, Shape, TensorSpec, library};
use std::sync::Arc;

/// The recorder, or a word about it.
fn recorder() -> Option<Recorder> {
    Recorder::load().map_err(|why| skip("recording", &why)).ok()
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

fn bytes(tensor: &TensorSpec) -> u64 {
    tensor.extent().unwrap().unsigned_abs() * 2
}

/// Device memory for the operands of a pass.
struct Memory {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    o: Buffer,
    stats: Buffer,
    workspace: Buffer,
    /// d_o, dq, dk, dv.
    gradients: Option<[Buffer; 4]>,
}

impl Memory {
    fn forward(recorder: &Recorder, spec: &AttentionSpec, workspace: u64) -> Memory {
        let of = |tensor| recorder.buffer(bytes(tensor));
        let [b, h, s, _] = spec.q.dims;
        let stats = recorder.buffer((b * h * s).unsigned_abs() * 4);
        let workspace = recorder.buffer(workspace);
        Memory { q: of(&spec.q), k: of(&spec.k), v: of(&spec.v), o: of(&spec.o), stats, workspace, gradients: None }
    }

    fn backward(recorder: &Recorder, spec: &BackwardSpec, workspace: u64) -> Memory {
        let gradients = [&spec.d_o, &spec.dq, &spec.dk, &spec.dv].map(|tensor| recorder.buffer(bytes(tensor)));
        Memory { gradients: Some(gradients), ..Memory::forward(recorder, &spec.forward, workspace) }
    }

    fn call(&self, stats: bool, attn_scale: Option<f32>) -> DeviceForward<'_> {
        let [q, k, v, o] = [&self.q, &self.k, &self.v, &self.o].map(whole);
        let (stats, workspace) = (stats.then(|| whole(&self.stats)), Some(whole(&self.workspace)));
        DeviceForward::new(q, k, v, o).stats(stats).attn_scale(attn_scale).workspace(workspace)
    }

    fn backward_call(&self) -> DeviceBackward<'_> {
        let [q, k, v, o] = [&self.q, &self.k, &self.v, &self.o].map(whole);
        let [d_o, dq, dk, dv] = self.gradients.as_ref().unwrap().each_ref().map(whole);
        let (stats, workspace) = (whole(&self.stats), Some(whole(&self.workspace)));
        DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).workspace(workspace)
    }
}

/// Everything for calls of one forward problem.
struct Forward {
    planned: Arc<Planned>,
    spec: AttentionSpec,
    memory: Memory,
    stream: Stream,
    /// Last, so that its turn ends when everything else here is gone.
    recorder: Recorder,
}

fn forward(spec: AttentionSpec) -> Option<Forward> {
    let recorder = recorder()?;
    let (planned, _) = recorder.executor().attention(&spec.validate().unwrap()).unwrap();
    let memory = Memory::forward(&recorder, &spec, planned.workspace_bytes());
    let stream = recorder.stream();
    Some(Forward { recorder, planned, spec, memory, stream })
}

impl Forward {
    fn handle(&self) -> Handle<'_> {
        self.recorder.executor().library().handle(&self.stream).unwrap()
    }

    fn run(&self, call: &DeviceForward<'_>) -> Vec<Entry> {
        let (result, entries) = self.recorder.record(|| self.recorder.forward(&self.planned, &self.handle(), call));
        result.unwrap_or_else(|e| panic!("{e}"));
        entries
    }

    /// A call that has to be refused by this library, and not by what stands in for cuDNN.
    fn refused(&self, what: &str, call: &DeviceForward<'_>) {
        let (result, entries) = self.recorder.record(|| self.recorder.forward(&self.planned, &self.handle(), call));
        is_refused(what, &result, &entries);
    }
}

fn is_refused(what: &str, result: &Result<(), Error>, entries: &[Entry]) {
    match result {
        Ok(()) => panic!("{what}: taken"),
        Err(Error::Backend(e @ cudnn_graph::Error::Cudnn { .. })) => panic!("{what}: submitted, {e}"),
        Err(_) => assert!(entries.is_empty(), "{what}: refused after {} submissions", entries.len()),
    }
}

fn uid(planned: &Planned, operand: Operand) -> i64 {
    planned.lowered.operand(operand).unwrap().uid()
}

/// The entry of the attention plan binds these addresses to these operands.
fn assert_bound(planned: &Planned, entry: &Entry, operands: &[(Operand, u64)]) {
    assert_eq!(entry.what, EXECUTION);
    for &(operand, address) in operands {
        assert_eq!(entry.address(uid(planned, operand)), Some(address), "{operand}");
    }
}

fn what(entries: &[Entry]) -> Vec<u32> {
    entries.iter().map(|e| e.what).collect()
}

#[test]
fn it_is_an_h200_under_9_19() {
    let Some(recorder) = recorder() else { return };
    let (device, library) = (recorder.executor().device(), recorder.executor().library());
    assert_eq!((device.name(), device.sm(), device.sm_count()), ("NVIDIA H200", 90, 132));
    assert_eq!(library.version(), cudnn_graph::Version::new(9, 19, 0));
    // What is freed is free again. More than threads that have ended may be giving back meanwhile.
    let before = (recorder.allocated(), device.memory_free().unwrap());
    let buffer = recorder.buffer(64 << 30);
    assert_eq!(recorder.allocated(), before.0 + (64 << 30));
    assert!(device.memory_free().unwrap() < before.1 - (32 << 30));
    drop(buffer);
    assert_eq!(recorder.allocated(), before.0);
    assert!(device.memory_free().unwrap() >= before.1);
    assert!(Buffer::new(device, 200 << 30).is_err());
}

#[test]
fn a_forward_call_is_one_execution_on_exactly_what_it_names() {
    let Some(f) = forward(spec().with_stats()) else { return };
    let other = Memory::forward(&f.recorder, &f.spec, f.planned.workspace_bytes());
    for (memory, scale) in [(&f.memory, None), (&other, None), (&f.memory, Some(0.25)), (&f.memory, Some(3.0)), (&other, Some(3.0))] {
        let entries = f.run(&memory.call(true, scale));
        let [entry] = &entries[..] else { panic!("{} entries", entries.len()) };
        let operands = [
            (Operand::Q, memory.q.address()),
            (Operand::K, memory.k.address()),
            (Operand::V, memory.v.address()),
            (Operand::O, memory.o.address()),
        ];
        assert_bound(&f.planned, entry, &operands);
        let lowered = &f.planned.lowered;
        assert_eq!(entry.address(lowered.stats.unwrap().uid()), Some(memory.stats.address()));
        assert_eq!(entry.workspace, memory.workspace.address());
        assert_eq!(entry.number(lowered.attn_scale.uid()), Some(scale.unwrap_or(0.125)));
        assert_eq!(entry.stream, f.stream.raw().0.addr() as u64);
        let ports = f.planned.plan.ports();
        assert_eq!(entry.tensors as usize, ports.device.len() + ports.values.len());
        // Numbers that are the graph's own.
        for port in &ports.values {
            if let Some(value) = port.value
                && value.dtype() == cudnn_graph::DType::F32
            {
                assert_eq!(entry.number(port.id.uid()).map(f64::from), Some(value.to_f64()), "{}", port.name);
            }
        }
    }
}

#[test]
fn the_workspace_of_a_plan_is_what_the_library_says() {
    let Some(f) = forward(spec()) else { return };
    assert_eq!(f.planned.workspace_bytes(), 4096);
    assert!(f.planned.lowered.stats.is_none_or(|id| f.planned.plan.ports().device.iter().all(|p| p.id != id)));
    assert_eq!(what(&f.run(&f.memory.call(false, None))), [EXECUTION]);
}

#[test]
fn packs_are_made_for_new_addresses_and_for_nothing_else() {
    let Some(f) = forward(spec()) else { return };
    let made = |run: &dyn Fn()| {
        let before = f.recorder.created(Kind::VARIANT_PACK);
        run();
        f.recorder.created(Kind::VARIANT_PACK) - before
    };
    let call = f.memory.call(false, None);
    let alive = f.recorder.alive(Kind::VARIANT_PACK);
    assert_eq!(made(&|| drop(f.run(&call))), 1);
    assert_eq!(made(&|| drop(f.run(&call))), 0);
    assert_eq!(made(&|| drop(f.run(&f.memory.call(false, Some(2.0))))), 0);
    // Any address that differs, and the workspace.
    let other = Memory::forward(&f.recorder, &f.spec, f.planned.workspace_bytes());
    let swaps = [
        call.q(whole(&other.q)),
        call.k(whole(&other.k)),
        call.v(whole(&other.v)),
        call.o(whole(&other.o)),
        call.workspace(whole(&other.workspace)),
    ];
    for swap in &swaps {
        assert_eq!((made(&|| drop(f.run(swap))), made(&|| drop(f.run(swap)))), (1, 0));
    }
    // So many are kept, the last ones; one more in turn comes too late each time.
    const KEPT: usize = 32;
    let sets: Vec<Memory> = (0..=KEPT).map(|_| Memory::forward(&f.recorder, &f.spec, f.planned.workspace_bytes())).collect();
    let round = |sets: &[Memory]| sets.iter().for_each(|set| drop(f.run(&set.call(false, None))));
    assert_eq!((made(&|| round(&sets[..KEPT])), made(&|| round(&sets[..KEPT]))), (KEPT as u64, 0));
    assert_eq!((made(&|| round(&sets)), made(&|| round(&sets))), (1, KEPT as u64 + 1));
    assert_eq!(f.recorder.alive(Kind::VARIANT_PACK) - alive, KEPT as u64);
}

#[test]
fn a_call_goes_to_the_stream_of_its_handle() {
    let Some(f) = forward(spec()) else { return };
    let (executor, call) = (f.recorder.executor(), f.memory.call(false, None));
    for stream in [f.recorder.stream(), f.recorder.stream()] {
        // The second time the pool gives the handle that the first one left, bound to the other stream.
        let handle = executor.library().handle(&stream).unwrap();
        let (result, entries) = f.recorder.record(|| f.recorder.forward(&f.planned, &handle, &call));
        result.unwrap();
        assert_eq!(entries[0].stream, stream.raw().0.addr() as u64);
    }
}

#[test]
fn a_forward_call_that_is_wrong_submits_nothing() {
    let Some(f) = forward(spec().with_stats()) else { return };
    let call = f.memory.call(true, None);
    let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
    let off = |slice: DeviceSlice| DeviceSlice { address: slice.address + 8, ..slice };
    for (how, wrong) in [("short", &short as &dyn Fn(DeviceSlice) -> DeviceSlice), ("misaligned", &off)] {
        f.refused(&format!("q {how}"), &call.q(wrong(call.q)));
        f.refused(&format!("k {how}"), &call.k(wrong(call.k)));
        f.refused(&format!("v {how}"), &call.v(wrong(call.v)));
        f.refused(&format!("o {how}"), &call.o(wrong(call.o)));
        f.refused(&format!("stats {how}"), &call.stats(call.stats.map(wrong)));
        f.refused(&format!("workspace {how}"), &call.workspace(call.workspace.map(wrong)));
    }
    f.refused("no stats", &call.stats(None));
    for scale in [0.0, -1.0, f32::NAN] {
        f.refused(&format!("a scale of {scale}"), &call.attn_scale(scale));
    }
    let params = [DeviceParam::new("cap", DeviceValue::Scalar(1.0))];
    f.refused("a parameter too many", &call.params(&params));
    assert_eq!(what(&f.run(&call)), [EXECUTION], "the call itself is right");
}

/// The piece of the workspace that a copy goes through, seen from both of its ends.
fn assert_copy(entry: &Entry, [from, to]: [(TensorId, u64); 2]) {
    assert_eq!((entry.what, entry.operations), (EXECUTION, 1));
    assert_eq!((entry.address(from.0.uid()), entry.address(to.0.uid())), (Some(from.1), Some(to.1)));
}

#[test]
fn operands_are_copied_before_and_results_after_the_attention() {
    let mut strided = spec();
    (strided.q, strided.v, strided.o) = (gapped(strided.q), gapped(strided.v), gapped(strided.o));
    let Some(f) = forward(strided) else { return };
    assert_eq!(f.planned.copied(), ["q", "v", "o"]);
    let entries = f.run(&f.memory.call(false, Some(0.5)));
    let [q, v, attention, o] = &entries[..] else { panic!("{} entries", entries.len()) };
    assert!(attention.operations > 1);
    assert_eq!(attention.number(f.planned.lowered.attn_scale.uid()), Some(0.5));
    assert_bound(&f.planned, attention, &[(Operand::K, f.memory.k.address())]);
    let mut pieces = Vec::new();
    for (n, (entry, given)) in [(q, &f.memory.q), (v, &f.memory.v), (o, &f.memory.o)].into_iter().enumerate() {
        let operand = [Operand::Q, Operand::V, Operand::O][n];
        let copy = run(&f.planned, &Role::Copy(operand));
        let piece = attention.address(uid(&f.planned, operand)).unwrap();
        let ends = [(tensor(copy, "from"), given.address()), (tensor(copy, "to"), piece)];
        let back = [(tensor(copy, "from"), piece), (tensor(copy, "to"), given.address())];
        assert_copy(entry, if operand == Operand::O { back } else { ends });
        let tensor = f.planned.job.tensor(operand).unwrap();
        pieces.push((piece, piece + bytes(tensor)));
    }
    // Inside of the workspace, behind the plans' own scratch, apart from one another.
    let workspace = whole(&f.memory.workspace);
    pieces.sort_unstable();
    assert!(pieces[0].0 >= workspace.address + 4096 && pieces[2].1 <= workspace.address + workspace.bytes);
    assert!(pieces.windows(2).all(|two| two[0].1 <= two[1].0));
}

#[test]
fn a_copy_over_three_axes_runs_once_per_index_of_the_outermost() {
    let mut strided = spec();
    let [b, h, s, d] = strided.q.dims;
    // A gap behind each row, another behind each head, and another behind each batch entry.
    let (row, head) = (d + 1, (d + 1) * s + 3);
    strided.q = TensorSpec { strides: [head * h + 5, head, row, 1], alignment: 2, ..strided.q };
    let Some(f) = forward(strided) else { return };
    let copy = run(&f.planned, &Role::Copy(Operand::Q));
    let step = |name| copy.ports.iter().find(|port| port.tensor == tensor(copy, name)).unwrap().step;
    assert_eq!((copy.repeats, step("from")), (b.unsigned_abs(), (head * h + 5).unsigned_abs() * 2));
    let entries = f.run(&f.memory.call(false, None));
    assert_eq!(what(&entries), [EXECUTION; 3]);
    let piece = entries[2].address(uid(&f.planned, Operand::Q)).unwrap();
    for (n, entry) in (0..).zip(&entries[..2]) {
        assert_copy(entry, [("from", f.memory.q.address()), ("to", piece)].map(|(name, at)| (tensor(copy, name), at + n * step(name))));
    }
}

#[test]
fn a_wrong_call_with_copied_operands_submits_nothing() {
    let mut strided = spec();
    (strided.q, strided.v, strided.o) = (gapped(strided.q), gapped(strided.v), gapped(strided.o));
    let Some(f) = forward(strided) else { return };
    let call = f.memory.call(false, None);
    let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
    let off = |slice: DeviceSlice| DeviceSlice { address: slice.address + 1, ..slice };
    for (how, wrong) in [("short", &short as &dyn Fn(DeviceSlice) -> DeviceSlice), ("misaligned", &off)] {
        f.refused(&format!("k, which is read in place, {how}"), &call.k(wrong(call.k)));
        f.refused(&format!("q {how}"), &call.q(wrong(call.q)));
        f.refused(&format!("v {how}"), &call.v(wrong(call.v)));
        f.refused(&format!("o {how}"), &call.o(wrong(call.o)));
        f.refused(&format!("workspace {how}"), &call.workspace(call.workspace.map(wrong)));
    }
}

/// A backward pass with its memory.
fn backward(recorder: &Recorder, spec: &BackwardSpec) -> (Arc<Planned>, Memory) {
    let (planned, _) = recorder.executor().attention_backward(&spec.validate().unwrap()).unwrap();
    let memory = Memory::backward(recorder, spec, planned.workspace_bytes());
    (planned, memory)
}

#[test]
fn a_backward_call_is_one_execution_on_exactly_what_it_names() {
    let Some(recorder) = recorder() else { return };
    let spec = spec().backward();
    let (planned, memory) = backward(&recorder, &spec);
    let stream = recorder.stream();
    let handle = recorder.executor().library().handle(&stream).unwrap();
    let before = recorder.created(Kind::VARIANT_PACK);
    for scale in [None, Some(2.0)] {
        let call = memory.backward_call().attn_scale(scale);
        let (result, entries) = recorder.record(|| recorder.backward(&planned, &handle, &call));
        result.unwrap();
        let [entry] = &entries[..] else { panic!("{} entries", entries.len()) };
        let operands = [
            (Operand::Q, call.q),
            (Operand::K, call.k),
            (Operand::V, call.v),
            (Operand::O, call.o),
            (Operand::DO, call.d_o),
            (Operand::DQ, call.dq),
            (Operand::DK, call.dk),
            (Operand::DV, call.dv),
        ];
        assert_bound(&planned, entry, &operands.map(|(operand, slice)| (operand, slice.address)));
        assert_eq!(entry.address(planned.lowered.stats.unwrap().uid()), Some(call.stats.address));
        assert_eq!(entry.number(planned.lowered.attn_scale.uid()), Some(scale.unwrap_or(0.125)));
        assert_eq!(Some(entry.workspace), call.workspace.map(|w| w.address));
    }
    assert_eq!(recorder.created(Kind::VARIANT_PACK) - before, 1);
    let call = memory.backward_call();
    let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
    let wrong = [
        ("d_o", call.d_o(short(call.d_o))),
        ("dq", call.dq(short(call.dq))),
        ("dk", call.dk(short(call.dk))),
        ("dv", call.dv(short(call.dv))),
        ("stats", call.stats(short(call.stats))),
        ("workspace", call.workspace(call.workspace.map(short))),
    ];
    for (name, call) in &wrong {
        let (result, entries) = recorder.record(|| recorder.backward(&planned, &handle, call));
        is_refused(name, &result, &entries);
    }
}

#[test]
fn the_gradient_of_a_sum_is_added_to_zeros_in_the_workspace() {
    let Some(recorder) = recorder() else { return };
    let mut spec = spec().backward();
    spec.d_o = TensorSpec { strides: [0; 4], alignment: 2, ..spec.d_o };
    spec.dq = gapped(spec.dq);
    let (planned, memory) = backward(&recorder, &spec);
    assert_eq!(planned.copied(), ["d_o", "dq"]);
    let stream = recorder.stream();
    let handle = recorder.executor().library().handle(&stream).unwrap();
    let call = memory.backward_call();
    let (result, entries) = recorder.record(|| recorder.backward(&planned, &handle, &call));
    result.unwrap();
    assert_eq!(what(&entries), [FILL, EXECUTION, EXECUTION, EXECUTION]);
    let [fill, d_o, attention, dq] = &entries[..] else { panic!() };
    let copy = run(&planned, &Role::Copy(Operand::DO));
    let piece = attention.address(uid(&planned, Operand::DO)).unwrap();
    assert_eq!((fill.to, fill.from), (piece, 0));
    assert!(fill.bytes >= bytes(planned.job.tensor(Operand::DO).unwrap()));
    assert_copy(d_o, [(tensor(copy, "from"), call.d_o.address), (tensor(copy, "to"), piece)]);
    assert_eq!(d_o.address(tensor(copy, "zeros").uid()), Some(piece));
    let copy = run(&planned, &Role::Copy(Operand::DQ));
    let piece = attention.address(uid(&planned, Operand::DQ)).unwrap();
    assert_copy(dq, [(tensor(copy, "from"), piece), (tensor(copy, "to"), call.dq.address)]);
    for (name, wrong) in
        [("d_o", call.d_o(DeviceSlice { bytes: 0, ..call.d_o })), ("dq", call.dq(DeviceSlice { bytes: call.dq.bytes - 1, ..call.dq }))]
    {
        let (result, entries) = recorder.record(|| recorder.backward(&planned, &handle, &wrong));
        is_refused(name, &result, &entries);
    }
}

#[test]
fn the_gradient_of_a_bias_is_summed_after_the_attention() {
    let Some(recorder) = recorder() else { return };
    let spec = spec().score_mod("bias:h".parse().unwrap()).backward().wrt("bias", DType::BF16);
    let (planned, memory) = backward(&recorder, &spec);
    let stream = recorder.stream();
    let handle = recorder.executor().library().handle(&stream).unwrap();
    let (bias, gradient) = (recorder.buffer(8 * 4), recorder.buffer(8 * 2));
    let params = [DeviceParam::new("bias", DeviceValue::Tensor(DType::F32, whole(&bias)))];
    let gradients = [DeviceGradient::new("bias", whole(&gradient))];
    let call = memory.backward_call().params(&params).gradients(&gradients);
    let (result, entries) = recorder.record(|| recorder.backward(&planned, &handle, &call));
    result.unwrap();
    let steps: Vec<_> = planned.schedule.runs().filter(|run| matches!(run.role, Role::Sum(..))).collect();
    let conversions = planned.schedule.runs().take_while(|run| run.role != Role::Attention).count();
    let [attention, sums @ .., rounded, copy] = &entries[conversions..] else { panic!() };
    assert_bound(&planned, attention, &[(Operand::DQ, call.dq.address)]);
    assert_eq!((sums.len(), copy.what), (steps.len(), COPY));
    let terms = planned.lowered.supplies.iter().find(|(_, supply)| matches!(supply, Supply::Terms { .. })).unwrap().0;
    let mut from = attention.address(terms.uid()).unwrap();
    for (entry, sum) in sums.iter().zip(steps) {
        assert_eq!(entry.address(tensor(sum, "from").uid()), Some(from));
        from = entry.address(tensor(sum, "to").uid()).unwrap();
    }
    let rounding = run(&planned, &Role::Rounding("bias".to_owned()));
    assert_eq!(rounded.address(tensor(rounding, "from").uid()), Some(from));
    let end = rounded.address(tensor(rounding, "to").uid());
    assert_eq!((Some(copy.from), copy.to, copy.bytes), (end, gradient.address(), 8 * 2));
    let short = [DeviceGradient::new("bias", DeviceSlice { bytes: 8 * 2 - 1, ..whole(&gradient) })];
    let off = [DeviceParam::new("bias", DeviceValue::Tensor(DType::F32, DeviceSlice { address: bias.address() + 2, ..whole(&bias) }))];
    for (name, wrong) in [
        ("no gradient", call.gradients(&[])),
        ("a short gradient", call.gradients(&short)),
        ("no bias", call.params(&[])),
        ("a misaligned bias", call.params(&off)),
    ] {
        let (result, entries) = recorder.record(|| recorder.backward(&planned, &handle, &wrong));
        is_refused(name, &result, &entries);
    }
}

#[test]
fn scalars_of_a_score_mod_are_numbers_of_the_call() {
    let Some(f) = forward(spec().score_mod(library::softcap(30.0))) else { return };
    let scalars = |cap: f32| {
        let params = [DeviceParam::new("cap", DeviceValue::Scalar(cap))];
        let entries = f.run(&f.memory.call(false, None).params(&params));
        let [entry] = &entries[..] else { panic!("{} entries", entries.len()) };
        let numbers: Vec<f32> = f.planned.plan.ports().values.iter().filter_map(|p| entry.number(p.id.uid())).collect();
        numbers
    };
    let before = f.recorder.created(Kind::VARIANT_PACK);
    assert!(scalars(30.0).contains(&30.0) && scalars(50.0).contains(&50.0) && !scalars(50.0).contains(&30.0));
    assert_eq!(f.recorder.created(Kind::VARIANT_PACK) - before, 1);
    f.refused("no cap", &f.memory.call(false, None));
}

#[test]
fn threads_on_one_plan_do_not_mix_their_numbers() {
    let Some(f) = forward(spec()) else { return };
    // Sixteen calls of each of four threads are what the record keeps. Two of the threads share their addresses.
    let other = Memory::forward(&f.recorder, &f.spec, f.planned.workspace_bytes());
    let (recorder, planned) = (&f.recorder, &f.planned);
    // All at once: a stream may come to have the address of one that is gone.
    let streams = [(); 4].map(|()| recorder.stream());
    let ((), entries) = recorder.record(|| {
        std::thread::scope(|scope| {
            for (thread, stream) in (0..4u8).zip(&streams) {
                let memory = if thread < 2 { &f.memory } else { &other };
                scope.spawn(move || {
                    let handle = recorder.executor().library().handle(stream).unwrap();
                    for n in 0..16u8 {
                        let scale = f32::from(thread * 16 + n) + 1.0;
                        recorder.forward(planned, &handle, &memory.call(false, Some(scale))).unwrap();
                    }
                });
            }
        });
    });
    let scale = |e: &Entry| e.number(planned.lowered.attn_scale.uid()).unwrap();
    let mut scales: Vec<f32> = entries.iter().map(scale).collect();
    for entry in &entries {
        let memory = if scale(entry) <= 32.0 { &f.memory } else { &other };
        assert_bound(planned, entry, &[(Operand::Q, memory.q.address()), (Operand::O, memory.o.address())]);
        // One stream, one thread, its own numbers in their order.
        let own: Vec<f32> = entries.iter().filter(|e| e.stream == entry.stream).map(scale).collect();
        assert!(own.len() == 16 && own.windows(2).all(|two| two[1] == two[0] + 1.0), "{own:?}");
    }
    scales.sort_unstable_by(f32::total_cmp);
    assert_eq!(scales, (1..=64u8).map(f32::from).collect::<Vec<_>>());
}

#[test]
fn host_memory_goes_up_and_comes_down_and_nothing_of_it_stays() {
    let Some(recorder) = recorder() else { return };
    let spec = spec();
    let prepared = recorder.executor().prepare(&spec.validate().unwrap()).unwrap();
    let [q, k, v, mut o] = [&spec.q, &spec.k, &spec.v, &spec.o].map(|t| vec![bf16::ZERO; t.extent().unwrap() as usize]);
    let before = recorder.allocated();
    let call = HostForward::new(&q, &k, &v, &mut o);
    let (result, entries) = recorder.record(|| prepared.forward(call));
    assert_eq!(result.unwrap().workspace_bytes, 4096);
    assert_eq!(what(&entries), [UPLOAD, UPLOAD, UPLOAD, FILL, FILL, EXECUTION, DOWNLOAD]);
    let [.., execution, download] = &entries[..] else { panic!() };
    assert_eq!(entries[..3].iter().map(|e| e.bytes).collect::<Vec<_>>(), [&spec.q, &spec.k, &spec.v].map(bytes));
    assert_eq!((download.bytes, download.to), (bytes(&spec.o), o.as_ptr().addr() as u64));
    assert!(execution.pointers[..execution.tensors as usize].contains(&download.from));
    assert_eq!(recorder.allocated(), before);
}

#[test]
fn plans_out_of_a_file_submit_what_those_in_it_did() {
    let Some(recorder) = recorder() else { return };
    let mut strided = spec().score_mod(library::alibi());
    (strided.q, strided.o) = (gapped(strided.q), gapped(strided.o));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plans");
    let problem = strided.validate().unwrap();
    let executors = [(); 2].map(|()| CudnnExecutor::new(CudnnOptions::default()).unwrap());
    let mut submitted = Vec::new();
    for (n, executor) in executors.iter().enumerate() {
        if n == 1 {
            assert_eq!(executor.attach(&file).unwrap(), 1);
        }
        let asked = recorder.created(Kind::ENGINEHEUR);
        let (planned, there) = executor.attention(&problem).unwrap();
        assert!(!there);
        // The first executor asks for engines; the second one has plans without.
        assert_eq!(recorder.created(Kind::ENGINEHEUR) > asked, n == 0);
        if n == 0 {
            assert_eq!(executor.save(&file).unwrap(), 1);
        }
        let stream = recorder.stream();
        let handle = executor.library().handle(&stream).unwrap();
        let memory = Memory::forward(&recorder, &strided, planned.workspace_bytes());
        let (result, entries) = recorder.record(|| recorder.forward(&planned, &handle, &memory.call(false, Some(0.75))));
        result.unwrap();
        assert_eq!(entries[1].number(planned.lowered.attn_scale.uid()), Some(0.75));
        let shape = |e: &Entry| (e.what, e.operations, e.uids[..e.tensors as usize].to_vec());
        submitted.push(entries.iter().map(shape).collect::<Vec<_>>());
    }
    assert_eq!(submitted[0].len(), 3);
    assert_eq!(submitted[0], submitted[1]);
}

#[test]
fn an_executor_takes_its_descriptors_with_it() {
    let Some(recorder) = recorder() else { return };
    let alive = || Kind::ALL.iter().map(|&kind| (kind, recorder.alive(kind))).collect::<Vec<_>>();
    let before = (alive(), recorder.allocated());
    let mut strided = spec().score_mod(library::alibi());
    strided.q = gapped(strided.q);
    let executor = CudnnExecutor::new(CudnnOptions::default()).unwrap();
    let (planned, there) = executor.attention(&strided.validate().unwrap()).unwrap();
    assert!(!there && executor.attention(&strided.validate().unwrap()).unwrap().1);
    let memory = Memory::forward(&recorder, &strided, planned.workspace_bytes());
    let stream = recorder.stream();
    let handle = executor.library().handle(&stream).unwrap();
    recorder.forward(&planned, &handle, &memory.call(false, None)).unwrap();
    assert_ne!(alive(), before.0);
    drop((executor, planned, memory));
    assert_eq!((alive(), recorder.allocated()), before);
}
