//! Sinks over the recording library: who reads them, what kernels beside cuDNN's are launched with, and in which order. What they compute is
//! for `tests/offline/kernels.rs` and the tests on a GPU.

use conformance::recorder::entry::{EXECUTION, Entry, LAUNCH};
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Stream};
use sdpa::cache::CacheKey;
use sdpa::cudnn::lower::{Guarded, Job, Operand, Side, Supply, Told};
use sdpa::cudnn::{DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue, Planned};
use sdpa::expr::ParamKind;
use sdpa::packed::{CU_SEQLENS, memory};
use sdpa::{AttentionSpec, DType, Layout, Mask, Packed, SINK, Shape, TensorSpec};
use std::sync::Arc;

const SHAPE: Shape = Shape { batch: 3, heads_q: 8, heads_kv: 2, seq_q: 64, seq_kv: 96, dim_qk: 64, dim_v: 128 };

fn spec() -> AttentionSpec {
    AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bshd).mask(Mask::causal()).with_sink().with_stats()
}

fn decode() -> AttentionSpec {
    AttentionSpec::dense(DType::F16, Shape { seq_q: 1, ..SHAPE }, Layout::Bshd).with_sink().with_stats()
}

/// A call of one problem, and the memory of each thing that it is given.
struct Calls {
    planned: Arc<Planned>,
    stream: Stream,
    operands: Vec<(Operand, Buffer)>,
    stats: Buffer,
    workspace: Buffer,
    params: Vec<(String, DType, Buffer)>,
    gradient: Buffer,
    /// Last, so that its turn ends when everything else here is gone.
    recorder: Recorder,
}

impl Calls {
    fn new(job: Job) -> Option<Calls> {
        let recorder = Recorder::load().map_err(|why| skip("recording", &why)).ok()?;
        let (planned, _) = match &job {
            Job::Forward(problem) => recorder.executor().attention(problem),
            Job::Backward(problem) => recorder.executor().attention_backward(problem),
        }
        .unwrap_or_else(|e| panic!("{e}"));
        let problem = job.problem();
        let elements = |operand: Operand, tensor: &TensorSpec| match problem.packed() {
            Some(_) => memory(tensor, problem.total(operand.side())).extent().unwrap(),
            None => tensor.extent().unwrap(),
        };
        let operands = job.tensors().map(|(operand, t)| (operand, recorder.buffer(elements(operand, &t).unsigned_abs() * 2))).collect();
        let stats = recorder.buffer(problem.stats_elements().unsigned_abs() * 4);
        let params = problem.params().iter().map(|p| {
            let ParamKind::Tensor { axes, dtype } = p.kind else { panic!("{} is a scalar", p.name) };
            let elements = axes.elements(problem.extents()).unsigned_abs();
            (p.name.clone(), dtype, recorder.buffer(dtype.bytes(elements)))
        });
        let params = params.collect();
        let (workspace, stream) = (recorder.buffer(planned.workspace_bytes()), recorder.stream());
        let gradient = recorder.buffer(4 * problem.heads_q().unsigned_abs());
        Some(Calls { planned, stream, operands, stats, workspace, params, gradient, recorder })
    }

    fn slice(&self, operand: Operand) -> DeviceSlice {
        whole(&self.operands.iter().find(|(o, _)| *o == operand).unwrap().1)
    }

    fn address(&self, name: &str) -> u64 {
        self.params.iter().find(|(n, ..)| n == name).unwrap().2.address()
    }

    fn handle(&self) -> Handle<'_> {
        self.recorder.executor().library().handle(&self.stream).unwrap()
    }

    /// What is submitted, with memory for the gradient of the sink or without.
    fn run(&self, gradient: bool) -> Vec<Entry> {
        let value = |dtype: DType, buffer: &Buffer| DeviceValue::Tensor(dtype, whole(buffer));
        let params: Vec<DeviceParam<'_>> =
            self.params.iter().map(|(name, dtype, buffer)| DeviceParam::new(name, value(*dtype, buffer))).collect();
        let workspace = Some(whole(&self.workspace));
        let [q, k, v, o] = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| self.slice(operand));
        let (result, entries) = match &self.planned.job {
            Job::Forward(problem) => {
                let stats = problem.stats().then(|| whole(&self.stats));
                let call = DeviceForward::new(q, k, v, o).stats(stats).params(&params).workspace(workspace);
                self.recorder.record(|| self.recorder.forward(&self.planned, &self.handle(), &call))
            }
            Job::Backward(_) => {
                let [d_o, dq, dk, dv] = [Operand::DO, Operand::DQ, Operand::DK, Operand::DV].map(|operand| self.slice(operand));
                let gradients = gradient.then(|| DeviceGradient::new(SINK, whole(&self.gradient)));
                let (stats, gradients) = (whole(&self.stats), gradients.as_slice());
                let call =
                    DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(&params).gradients(gradients).workspace(workspace);
                self.recorder.record(|| self.recorder.backward(&self.planned, &self.handle(), &call))
            }
        };
        result.unwrap_or_else(|e| panic!("{e}"));
        entries
    }

    /// What the attention has been given for the tensor that this is supplied to.
    fn given(&self, attention: &Entry, wanted: &Supply) -> u64 {
        let (id, _) = self.planned.lowered.supplies.iter().find(|(_, supply)| supply == wanted).unwrap();
        attention.address(id.uid()).unwrap()
    }
}

fn launched(entry: &Entry) -> &[u64] {
    assert_eq!(entry.what, LAUNCH);
    &entry.pointers[..entry.tensors as usize]
}

#[test]
fn the_softmax_of_many_queries_reads_the_sink() {
    let Some(calls) = Calls::new(spec().validate().unwrap().into()) else { return };
    let entries = calls.run(false);
    let [attention] = &entries[..] else { panic!("{} submissions", entries.len()) };
    assert_eq!(attention.what, EXECUTION);
    assert_eq!(calls.given(attention, &Supply::Param(SINK.to_owned())), calls.address(SINK));
}

#[test]
fn rows_of_one_query_get_theirs_behind_the_attention() {
    for told in [true, false] {
        let mut spec = decode();
        spec.stats = told;
        let problem = spec.validate().unwrap();
        let Some(calls) = Calls::new(problem.clone().into()) else { return };
        let entries = calls.run(false);
        let [attention, rows] = &entries[..] else { panic!("{} submissions", entries.len()) };
        let stats = attention.address(calls.planned.lowered.stats.unwrap().uid()).unwrap();
        assert_eq!((attention.what, stats == calls.stats.address()), (EXECUTION, told));
        let [entry, head, row] = problem.o().outer().map(i64::unsigned_abs);
        let (sink, o) = (calls.address(SINK), calls.slice(Operand::O).address);
        assert_eq!(launched(rows), [24, 8, 1, sink, stats, u64::from(told), o, 1, 128, entry, head, row]);
        // A warp for each row, 256 threads to a block.
        assert_eq!((rows.from, rows.bytes), (3, 256));
    }
}

#[test]
fn the_gradient_is_summed_of_what_the_backward_pass_leaves() {
    for (dtype, number) in [(DType::F32, 0), (DType::F16, 1), (DType::BF16, 2)] {
        // Row sums are those of what dropout leaves, times what it leaves.
        let (spec, factor) = if dtype == DType::F16 { (spec().with_dropout(0.75), 4f32) } else { (spec(), 1.0) };
        let problem = spec.backward().wrt(SINK, dtype).validate().unwrap();
        let Some(calls) = Calls::new(problem.into()) else { return };
        let entries = calls.run(true);
        let at = entries.iter().position(|entry| entry.what == LAUNCH).unwrap();
        let [parts, sums] = &entries[at..] else { panic!("{} submissions from the first launch on", entries.len() - at) };
        let attention = entries[..at].iter().rfind(|entry| entry.what == EXECUTION).unwrap();
        let row_sum = attention.address(calls.planned.lowered.row_sum.unwrap().uid()).unwrap();
        let [batch, heads, rows] = [3, 8, 64];
        let want = [batch, heads, rows, 0, 0, calls.address(SINK), calls.stats.address(), heads * rows, rows, 1, row_sum, 0];
        let (given, place) = launched(parts).split_at(12);
        assert_eq!(given, want);
        assert_eq!((parts.from, parts.bytes), (heads, 256));
        assert_eq!(launched(sums), [heads, place[0], 256, calls.gradient.address(), number, u64::from(factor.to_bits())]);
        let inside = place[0] >= calls.workspace.address()
            && place[0] + 4 * 256 * heads <= calls.workspace.address() + whole(&calls.workspace).bytes;
        assert!(inside && place[0] != row_sum);
    }
    let Some(calls) = Calls::new(spec().backward().validate().unwrap().into()) else { return };
    assert!(calls.run(false).iter().all(|entry| entry.what != LAUNCH));
}

#[test]
fn rows_past_a_length_and_outside_of_documents_are_left_out() {
    let padded = spec().mask("padding".parse().unwrap()).backward().wrt(SINK, DType::F32).validate().unwrap();
    let Some(calls) = Calls::new(padded.into()) else { return };
    let entries = calls.run(true);
    let attention = entries.iter().rfind(|entry| entry.what == EXECUTION).unwrap();
    let [_, parts, _] = entries.iter().filter(|entry| entry.what == LAUNCH).map(launched).collect::<Vec<_>>()[..] else { panic!() };
    let guarded = |supply: &&Supply| matches!(supply, Supply::Guarded(Guarded { of: Side::Queries, .. }));
    let lengths = calls.planned.lowered.supplies.iter().map(|(_, supply)| supply).find(guarded).unwrap();
    assert_eq!(parts[3..5], [calls.given(attention, lengths), 0]);
    drop(calls);

    let documents = AttentionSpec::packed(DType::BF16, Shape { seq_kv: 64, ..SHAPE }, Packed::of(150));
    let problem = documents.mask(Mask::causal()).with_sink().backward().wrt(SINK, DType::F32).validate().unwrap();
    let Some(calls) = Calls::new(problem.into()) else { return };
    assert!(calls.address(CU_SEQLENS) > 0);
    let entries = calls.run(true);
    let attention = entries.iter().rfind(|entry| entry.what == EXECUTION).unwrap();
    let parts = launched(entries.iter().rev().nth(1).unwrap());
    let [lengths, begins] =
        [Told::Lengths(Side::Queries), Told::Offsets(Side::Queries, 8)].map(|told| calls.given(attention, &Supply::Documents(told)));
    assert_eq!(parts[..5], [3, 8, 64, lengths, begins]);
    // Stats lie as (total, heads), and so do sums of rows where that takes less.
    assert_eq!((parts[8], parts[9], parts[11]), (1, 8, 1));
}

#[test]
fn a_sink_is_of_the_key() {
    let (with, mut without) = (spec(), spec());
    without.sink = false;
    for (one, two) in [
        (Job::from(with.validate().unwrap()), Job::from(without.validate().unwrap())),
        (with.backward().validate().unwrap().into(), without.backward().validate().unwrap().into()),
        (with.backward().validate().unwrap().into(), with.backward().wrt(SINK, DType::F32).validate().unwrap().into()),
    ] {
        let differ: Vec<_> = one.fields().iter().zip(two.fields()).filter(|(a, b)| **a != *b).map(|(a, _)| a.0).collect();
        assert!(one != two && (differ == ["sink"] || differ == ["wrt"]), "{differ:?}");
    }
}
