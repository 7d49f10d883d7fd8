//! Packed documents over the recording library: what kernels beside cuDNN's are launched with, in which order, and that the attention
//! reads what they write. What they compute is for `tests/offline/kernels.rs` and the tests on a GPU.

use crate::is_newer;
use conformance::code;
use conformance::recorder::entry::{EXECUTION, Entry, LAUNCH};
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Stream, Target};
use sdpa::cache::State;
use sdpa::cudnn::lower::{Job, Operand, Side, Supply, Told};
use sdpa::cudnn::schedule::Step;
use sdpa::cudnn::{DeviceBackward, DeviceForward, DeviceParam, DeviceValue, Planned, Replay};
use sdpa::packed::{CU_SEQLENS, CU_SEQLENS_KV, CU_SEQLENS_Q, memory};
use sdpa::{AttentionSpec, DType, Layout, Mask, Packed, Shape, TensorSpec};
use std::sync::Arc;

const BATCH: i64 = 3;
const TOTAL_Q: i64 = 150;
const TOTAL_KV: i64 = 170;
/// Of the plan itself, before what the schedule keeps in the workspace.
const OF_PLAN: u64 = 4096;
/// −∞ in f32.
const NO_KEY: u64 = 0xff80_0000;

fn spec(cross: bool) -> AttentionSpec {
    let (seq_kv, total_kv) = if cross { (96, TOTAL_KV) } else { (64, TOTAL_Q) };
    let shape = Shape { batch: BATCH, heads_q: 8, heads_kv: 2, seq_q: 64, seq_kv, dim_qk: 64, dim_v: 128 };
    let packed = Packed::new().with_cross(cross).with_totals(Some(TOTAL_Q), Some(total_kv));
    AttentionSpec::packed(DType::BF16, shape, packed).mask(Mask::causal()).with_stats()
}

/// Everything for calls of one problem, on memory with exactly the tokens that it has at most.
struct Calls {
    planned: Arc<Planned>,
    stream: Stream,
    operands: Vec<(Operand, Buffer)>,
    stats: Buffer,
    workspace: Buffer,
    boundaries: Vec<(&'static str, DType, Buffer)>,
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
        let packed = *problem.packed().unwrap();
        let of = |(operand, tensor): (Operand, TensorSpec)| {
            let all = memory(&tensor, problem.total(operand.side()));
            (operand, recorder.buffer(all.extent().unwrap().unsigned_abs() * 2))
        };
        let operands = job.tensors().map(of).collect();
        let stats = recorder.buffer(problem.stats_elements().unsigned_abs() * 4);
        let names: &[_] = if packed.cross { &[CU_SEQLENS_Q, CU_SEQLENS_KV] } else { &[CU_SEQLENS] };
        let dtype = if packed.wide { DType::I64 } else { DType::I32 };
        let count = problem.batch().unsigned_abs() + 1;
        let boundaries = names.iter().map(|name| (*name, dtype, recorder.buffer(dtype.bytes(count)))).collect();
        let (workspace, stream) = (recorder.buffer(planned.workspace_bytes()), recorder.stream());
        Some(Calls { planned, stream, operands, stats, workspace, boundaries, recorder })
    }

    fn slice(&self, operand: Operand) -> DeviceSlice {
        whole(&self.operands.iter().find(|(o, _)| *o == operand).unwrap().1)
    }

    /// What is bound to the boundaries of a side.
    fn of(&self, side: Side) -> u64 {
        let n = if self.boundaries.len() == 1 { 0 } else { side as usize };
        self.boundaries[n].2.address()
    }

    fn params(&self) -> Vec<DeviceParam<'static>> {
        let value = |dtype: DType, buffer: &Buffer| DeviceValue::Tensor(dtype, whole(buffer));
        self.boundaries.iter().map(|(name, dtype, buffer)| DeviceParam::new(name, value(*dtype, buffer))).collect()
    }

    fn forward<'a>(&self, params: &'a [DeviceParam<'a>]) -> DeviceForward<'a> {
        let [q, k, v, o] = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| self.slice(operand));
        let (stats, workspace) = (Some(whole(&self.stats)), Some(whole(&self.workspace)));
        DeviceForward::new(q, k, v, o).stats(stats).params(params).workspace(workspace)
    }

    fn handle(&self) -> Handle<'_> {
        self.recorder.executor().library().handle(&self.stream).unwrap()
    }

    fn run(&self, planned: &Planned, call: &DeviceForward<'_>) -> Vec<Entry> {
        let (result, entries) = self.recorder.record(|| self.recorder.forward(planned, &self.handle(), call));
        result.unwrap_or_else(|e| panic!("{e}"));
        entries
    }

    fn run_backward(&self) -> Vec<Entry> {
        let params = &self.params()[..];
        let [q, k, v, o, d_o, dq, dk, dv] =
            [Operand::Q, Operand::K, Operand::V, Operand::O, Operand::DO, Operand::DQ, Operand::DK, Operand::DV].map(|x| self.slice(x));
        let (stats, workspace, gradients) = (whole(&self.stats), Some(whole(&self.workspace)), &[][..]);
        let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(params).gradients(gradients).workspace(workspace);
        let (result, entries) = self.recorder.record(|| self.recorder.backward(&self.planned, &self.handle(), &call));
        result.unwrap_or_else(|e| panic!("{e}"));
        entries
    }

    /// What both kernels begin with.
    fn sides(&self, first: Side, tokens: [u64; 2]) -> Vec<u64> {
        let problem = self.planned.job.problem();
        let second = if first == Side::Queries { Side::Keys } else { Side::Queries };
        let of = |side: Side| [self.of(side), tokens[side as usize], problem.seq(side).unsigned_abs()];
        let wide = u64::from(problem.packed().unwrap().wide);
        // Neither side is one of lengths alone.
        [wide].into_iter().chain(of(first)).chain(of(second)).chain([0]).collect()
    }

    /// The address that the attention reads these of.
    fn told(&self, attention: &Entry, what: Told) -> Option<u64> {
        let supplies = &self.planned.lowered.supplies;
        let (id, _) = supplies.iter().find(|(_, supply)| *supply == Supply::Documents(what))?;
        Some(attention.address(id.uid()).unwrap_or_else(|| panic!("{what:?} is not bound")))
    }

    /// A launch makes the lengths and offsets of these sides, where the attention reads them, and nothing else.
    fn assert_told(&self, entry: &Entry, attention: &Entry, sides: &[Side], tokens: [u64; 2]) -> Vec<[u64; 2]> {
        assert_eq!((entry.what, entry.tensors, entry.from, entry.bytes), (LAUNCH, 28, 1, 128));
        let (begin, rest) = entry.pointers[..28].split_at(8);
        assert_eq!(begin, self.sides(sides[0], tokens));
        assert_eq!(rest[0], BATCH.unsigned_abs());
        let mut pieces = vec![[rest[1], rest[1] + 4 * BATCH.unsigned_abs()]];
        for side in sides {
            let lengths = self.told(attention, Told::Lengths(*side));
            assert_eq!(lengths, Some(rest[1]), "lengths of {side:?}");
        }
        let made: Vec<[u64; 2]> = rest[2..].chunks_exact(2).map(|pair| [pair[0], pair[1]]).filter(|pair| *pair != [0, 0]).collect();
        let graph = self.planned.lowered.graph.graph();
        let mut read = Vec::new();
        let job = &self.planned.job;
        let operands = job.tensors().map(|(operand, tensor)| (operand.side(), self.planned.lowered.operand(operand), tensor));
        let stats = (Side::Queries, self.planned.lowered.stats, job.problem().stats_tensor());
        for (side, id, tensor) in operands.chain([stats]).filter(|(side, ..)| sides.contains(side)) {
            let ragged = graph.get(id.unwrap()).unwrap().ragged.unwrap();
            assert_eq!(ragged.multiplier, None);
            read.push([attention.address(ragged.offsets.uid()).unwrap(), tensor.strides[2].unsigned_abs()]);
            let what = Told::Offsets(side, tensor.strides[2]);
            assert_eq!(self.told(attention, what), read.last().map(|[address, _]| *address), "{what:?}");
        }
        for pair in &made {
            assert!(read.contains(pair), "{pair:?} is made and not read: {read:?}");
        }
        assert!(read.iter().all(|pair| made.contains(pair)), "{read:?} is read, {made:?} made");
        pieces.extend(made.iter().map(|[address, _]| [*address, address + 8 * (BATCH.unsigned_abs() + 1)]));
        pieces
    }

    /// Inside of the workspace, behind the plan's own, apart from one another.
    fn assert_apart(&self, mut pieces: Vec<[u64; 2]>) {
        pieces.sort_unstable();
        let all = whole(&self.workspace);
        assert!(pieces[0][0] >= all.address + OF_PLAN && pieces.iter().all(|[_, end]| *end <= all.address + all.bytes), "{pieces:?}");
        assert!(pieces.windows(2).all(|two| two[0][1] <= two[1][0]), "{pieces:?}");
    }

    /// A launch fills the rows of one result.
    fn assert_fills(&self, entry: &Entry, (to, side): (u64, Side), tensor: &TensorSpec, bits: [u64; 2], tokens: [u64; 2]) {
        assert_eq!((entry.what, entry.tensors, entry.from, entry.bytes), (LAUNCH, 15, BATCH.unsigned_abs(), 128));
        let ([_, heads, _, width], [_, head, token, _]) = (tensor.dims, tensor.strides);
        let row = [heads, head, token, width].map(i64::unsigned_abs);
        let want: Vec<u64> = self.sides(side, tokens).into_iter().chain([to]).chain(bits).chain(row).collect();
        assert_eq!(entry.pointers[..15], want);
    }
}

fn what(entries: &[Entry]) -> Vec<u32> {
    entries.iter().map(|e| e.what).collect()
}

const TOKENS: [u64; 2] = [TOTAL_Q.unsigned_abs(); 2];
const CROSS_TOKENS: [u64; 2] = [TOTAL_Q.unsigned_abs(), TOTAL_KV.unsigned_abs()];

#[test]
fn documents_are_told_before_the_attention_that_reads_them() {
    for wide in [false, true] {
        let mut spec = spec(false);
        spec.packed = spec.packed.map(|packed| packed.with_wide(wide));
        let Some(calls) = Calls::new(spec.validate().unwrap().into()) else { return };
        let params = calls.params();
        let entries = calls.run(&calls.planned, &calls.forward(&params));
        let [told, attention] = &entries[..] else { panic!("{:?}", what(&entries)) };
        assert_eq!((attention.what, told.stream), (EXECUTION, attention.stream));
        assert_eq!(told.pointers[0], u64::from(wide));
        let pieces = calls.assert_told(told, attention, &Side::ALL, TOKENS);
        // One row each of q, k and v, o, and stats: k and v, too, have rows of their own.
        assert_eq!(pieces.len(), 1 + 5);
        calls.assert_apart(pieces);
        // Boundaries of another type are refused.
        let other = if wide { DType::I32 } else { DType::I64 };
        let params = [DeviceParam::new(CU_SEQLENS, DeviceValue::Tensor(other, whole(&calls.boundaries[0].2)))];
        let (result, entries) = calls.recorder.record(|| calls.recorder.forward(&calls.planned, &calls.handle(), &calls.forward(&params)));
        assert!(result.is_err() && entries.is_empty());
    }
}

#[test]
fn tokens_are_as_many_as_the_shortest_memory_holds_and_no_more_than_the_problem_has() {
    for cross in [false, true] {
        let Some(calls) = Calls::new(spec(cross).validate().unwrap().into()) else { return };
        let params = calls.params();
        let call = calls.forward(&params);
        let tokens = |call: &DeviceForward<'_>| {
            let entries = calls.run(&calls.planned, call);
            let of = |entry: &Entry| [entry.pointers[2], entry.pointers[5]];
            let launches: Vec<[u64; 2]> = entries.iter().filter(|e| e.what == LAUNCH).map(of).collect();
            // The first is of queries, the second of keys.
            assert!(!cross || launches[1] == [launches[0][1], launches[0][0]], "{launches:?}");
            launches[0]
        };
        let all = if cross { CROSS_TOKENS } else { TOKENS };
        assert_eq!(tokens(&call), all);
        let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
        let fewer = |side: Side| if cross { std::array::from_fn(|n| all[n] - u64::from(n == side as usize)) } else { all.map(|n| n - 1) };
        assert_eq!(tokens(&call.q(short(call.q))), fewer(Side::Queries));
        assert_eq!(tokens(&call.o(short(call.o))), fewer(Side::Queries));
        assert_eq!(tokens(&call.stats(call.stats.map(short))), fewer(Side::Queries));
        assert_eq!(tokens(&call.k(short(call.k))), fewer(Side::Keys));
        assert_eq!(tokens(&call.v(short(call.v))), fewer(Side::Keys));
        let of_q = calls.planned.job.tensor(Operand::Q).unwrap().strides[2].unsigned_abs() * 2;
        assert_eq!(tokens(&call.q(DeviceSlice { bytes: 7 * of_q, ..call.q }))[0], 7);
        assert_eq!(tokens(&call.q(DeviceSlice { bytes: 7 * of_q - 1, ..call.q }))[0], 6);
        let larger = calls.recorder.buffer(1000 * of_q);
        assert_eq!(tokens(&call.q(whole(&larger))), all);
    }
}

#[test]
fn results_without_the_other_side_are_filled_behind_the_attention() {
    let Some(calls) = Calls::new(spec(true).validate().unwrap().into()) else { return };
    let params = calls.params();
    let entries = calls.run(&calls.planned, &calls.forward(&params));
    let [queries, keys, attention, o, stats] = &entries[..] else { panic!("{:?}", what(&entries)) };
    assert_eq!(attention.what, EXECUTION);
    let mut pieces = calls.assert_told(queries, attention, &[Side::Queries], CROSS_TOKENS);
    pieces.extend(calls.assert_told(keys, attention, &[Side::Keys], CROSS_TOKENS));
    calls.assert_apart(pieces);
    let of_o = calls.planned.job.tensor(Operand::O).unwrap();
    calls.assert_fills(o, (calls.slice(Operand::O).address, Side::Queries), of_o, [2, 0], CROSS_TOKENS);
    let of_stats = calls.planned.job.problem().stats_tensor();
    calls.assert_fills(stats, (calls.stats.address(), Side::Queries), &of_stats, [4, NO_KEY], CROSS_TOKENS);
}

#[test]
fn every_row_statistic_is_filled_and_has_room_for_so_many_tokens() {
    if !is_newer("packed::every_row_statistic_is_filled_and_has_room_for_so_many_tokens") {
        return;
    }
    let Some(calls) = Calls::new(spec(true).with_row_max().with_sum_exp().validate().unwrap().into()) else { return };
    let params = calls.params();
    let rows = calls.planned.job.problem().stats_tensor();
    let [row_max, sum_exp] = [(); 2].map(|()| calls.recorder.buffer(calls.stats.bytes() as u64));
    let call = calls.forward(&params).row_max(whole(&row_max)).sum_exp(whole(&sum_exp));
    let entries = calls.run(&calls.planned, &call);
    let [.., stats_fill, max_fill, sum_fill] = &entries[..] else { panic!("{:?}", what(&entries)) };
    for (fill, of, bits) in [(stats_fill, &calls.stats, NO_KEY), (max_fill, &row_max, NO_KEY), (sum_fill, &sum_exp, 0)] {
        calls.assert_fills(fill, (of.address(), Side::Queries), &rows, [4, bits], CROSS_TOKENS);
    }
    let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
    let fewer = [CROSS_TOKENS[0] - 1, CROSS_TOKENS[1]];
    for call in [call.row_max(call.row_max.map(short)), call.sum_exp(call.sum_exp.map(short))] {
        let entries = calls.run(&calls.planned, &call);
        calls.assert_fills(entries.last().unwrap(), (sum_exp.address(), Side::Queries), &rows, [4, 0], fewer);
    }
}

#[test]
fn gradients_are_told_and_filled_as_results_are() {
    for cross in [false, true] {
        let backward = spec(cross).backward().validate().unwrap();
        let Some(calls) = Calls::new(backward.into()) else { return };
        let tokens = if cross { CROSS_TOKENS } else { TOKENS };
        let entries = calls.run_backward();
        let at = entries.iter().position(|e| e.what == EXECUTION).unwrap();
        let (before, attention, after) = (&entries[..at], &entries[at], &entries[at + 1..]);
        let groups: &[&[Side]] = if cross { &[&[Side::Queries], &[Side::Keys]] } else { &[&Side::ALL] };
        assert_eq!(before.len(), groups.len(), "{:?}", what(&entries));
        let told = before.iter().zip(groups).flat_map(|(entry, sides)| calls.assert_told(entry, attention, sides, tokens));
        calls.assert_apart(told.collect());
        let filled: &[Operand] = if cross { &[Operand::DQ, Operand::DK, Operand::DV] } else { &[] };
        assert_eq!(after.len(), filled.len(), "{:?}", what(&entries));
        for (entry, &operand) in after.iter().zip(filled) {
            let tensor = calls.planned.job.tensor(operand).unwrap();
            calls.assert_fills(entry, (calls.slice(operand).address, operand.side()), tensor, [2, 0], tokens);
        }
    }
}

#[test]
fn many_documents_take_more_blocks() {
    for (batch, blocks) in [(127, 1), (128, 2), (300, 3)] {
        let shape = Shape { batch, heads_q: 2, heads_kv: 2, seq_q: 8, seq_kv: 8, dim_qk: 64, dim_v: 64 };
        let spec = AttentionSpec::packed(DType::F16, shape, Packed::new()).with_stats();
        let Some(calls) = Calls::new(spec.validate().unwrap().into()) else { return };
        let params = calls.params();
        let entries = calls.run(&calls.planned, &calls.forward(&params));
        assert_eq!((what(&entries), entries[0].from), (vec![LAUNCH, EXECUTION], blocks));
        // Where nothing is said of tokens there are as many as documents of the longest.
        assert_eq!([entries[0].pointers[2], entries[0].pointers[8]], [8 * batch, batch].map(i64::unsigned_abs));
    }
}

#[test]
fn launches_are_captured_and_replayed_with_the_attention() {
    let Some(calls) = Calls::new(spec(true).validate().unwrap().into()) else { return };
    let recorder = &calls.recorder;
    let params = calls.params();
    let call = calls.forward(&params);
    let spec = spec(true);
    let (captured, entries) = recorder.record(|| calls.stream.capture(|| recorder.functional(&calls.stream, &spec, &call)).unwrap());
    assert_eq!((captured.nodes(), entries.len()), (5, 0));
    recorder.launch(&captured, &calls.stream).unwrap();
    let mut replay = Replay::new(calls.planned.clone(), Arc::new(recorder.stream())).unwrap();
    for n in 0..3 {
        recorder.replayed(&mut replay, &call).unwrap();
        assert_eq!((replay.captures(), replay.captured_nodes()), (1, Some(5)), "call {n}");
    }
    // Boundaries elsewhere, and memory of another length at the same address, are other launches.
    let elsewhere = recorder.buffer(16);
    let mut others = params.clone();
    others[1].value = DeviceValue::Tensor(DType::I32, whole(&elsewhere));
    recorder.replayed(&mut replay, &calls.forward(&others)).unwrap();
    assert_eq!(replay.captures(), 2);
    let short = DeviceSlice { bytes: call.q.bytes - 1, ..call.q };
    recorder.replayed(&mut replay, &call.q(short).params(&others)).unwrap();
    assert_eq!((replay.captures(), recorder.faults()), (3, 0));
}

#[test]
fn plans_from_bytes_launch_the_same() {
    for cross in [false, true] {
        let Some(calls) = Calls::new(spec(cross).validate().unwrap().into()) else { return };
        let library = calls.recorder.executor().library();
        let bytes = calls.planned.to_bytes().unwrap();
        let mut loaded = code::planned(library, &Target::Handle(&calls.handle()), &calls.planned.job, &bytes).unwrap();
        let launches = |planned: &Planned| {
            let steps = planned.schedule.steps().iter();
            steps.map(|step| if let Step::Launch(launch) = step { Some(launch.clone()) } else { None }).collect::<Vec<_>>()
        };
        assert_eq!(launches(&loaded), launches(&calls.planned));
        let params = calls.params();
        let call = calls.forward(&params);
        // Kernels are put on the device with the tables.
        let (early, entries) = calls.recorder.record(|| calls.recorder.forward(&loaded, &calls.handle(), &call));
        assert!(early.is_err() && entries.is_empty());
        loaded.upload_tables(&calls.stream).unwrap();
        let [first, second] = [&*calls.planned, &loaded].map(|planned| calls.run(planned, &call));
        assert_eq!(what(&first), what(&second));
        for (one, two) in first.iter().zip(&second).filter(|(one, _)| one.what == LAUNCH) {
            assert_eq!((one.pointers, one.from, one.bytes), (two.pointers, two.from, two.bytes));
        }
    }
}

/// What documents cost as a mask is told whether the plans are there or not.
#[test]
fn explain_leads_from_documents_of_a_mask_to_packed_ones() {
    let Some(recorder) = Recorder::load().map_err(|why| skip("recording", &why)).ok() else { return };
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q: 256, seq_kv: 256, dim_qk: 64, dim_v: 64 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal()).mask(Mask::document());
    let problem = spec.validate().unwrap();
    for planned in [false, true] {
        if planned {
            recorder.executor().attention(&problem).unwrap();
        }
        let told = recorder.executor().explain(&problem.clone().into());
        assert_eq!(matches!(told.state, State::Hit(_)), planned);
        let text = told.to_string();
        assert!(
            told.notes.len() == 2 && text.contains("\n  every tile is computed") && text.contains("packed documents (cu_seqlens)"),
            "{text}"
        );
    }
    let packed = self::spec(false).validate().unwrap();
    assert_eq!(recorder.executor().explain(&packed.into()).notes, Vec::<String>::new());
}

type Change = (&'static str, fn(&mut Packed));

#[test]
fn what_differs_in_how_documents_are_packed_is_told() {
    let Some(recorder) = Recorder::load().map_err(|why| skip("recording", &why)).ok() else { return };
    let changes: [Change; 4] = [
        ("wide", |p| p.wide = true),
        ("total_q", |p| p.total_q = Some(TOTAL_Q + 1)),
        ("total_kv", |p| p.total_kv = Some(TOTAL_KV - 1)),
        ("cross", |p| (p.cross, p.total_kv) = (false, p.total_q)),
    ];
    for (name, change) in changes {
        recorder.executor().forward_cache().clear();
        // So that nothing but this differs where keys have no boundaries of their own.
        let mut one = spec(true);
        if name == "cross" {
            one = spec(false);
            one.packed = one.packed.map(|packed| packed.with_cross(true));
        }
        let mut other = one.clone();
        change(other.packed.as_mut().unwrap());
        recorder.executor().attention(&one.validate().unwrap()).unwrap();
        let told = recorder.executor().explain(&other.validate().unwrap().into());
        let fields: Vec<&str> = told.nearest[0].differences.iter().map(|d| d.field.as_str()).collect();
        assert_eq!(fields, ["packed"], "{name}");
    }
}
