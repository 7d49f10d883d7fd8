//! Paged caches over the recording library: the page table is checked by a kernel before the attention that reads it, and containers stay where
//! they are. What the kernel computes is for `tests/offline/pages.rs`.

use conformance::code;
use conformance::recorder::entry::{EXECUTION, Entry, LAUNCH, UPLOAD};
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Stream, Target};
use half::bf16;
use sdpa::cudnn::lower::{Form, Guarded, Operand, Side, Supply, Told};
use sdpa::cudnn::schedule::Step;
use sdpa::cudnn::{CudnnOptions, DeviceForward, DeviceParam, DeviceValue, Planned, Replay};
use sdpa::packed::memory;
use sdpa::paged::PAGE_TABLE;
use sdpa::{AttentionSpec, DType, Executor, HostForward, Layout, Mask, Paged, Param, Shape};
use std::sync::Arc;

const SHAPE: Shape = Shape { batch: 3, heads_q: 8, heads_kv: 2, seq_q: 66, seq_kv: 333, dim_qk: 64, dim_v: 128 };
/// Of the plan itself, before what the schedule keeps in the workspace.
const OF_PLAN: u64 = 4096;

fn cache(page_size: i64) -> Paged {
    Paged::new(page_size, 50)
}

fn spec(page_size: i64) -> AttentionSpec {
    AttentionSpec::paged(DType::BF16, SHAPE, cache(page_size)).mask(Mask::causal_bottom_right()).with_stats()
}

fn decode(page_size: i64) -> AttentionSpec {
    AttentionSpec::paged(DType::F16, Shape { seq_q: 1, ..SHAPE }, cache(page_size))
}

/// A call of one problem, on memory of exactly the size that it needs.
struct Calls {
    planned: Arc<Planned>,
    stream: Stream,
    operands: Vec<(Operand, Buffer)>,
    stats: Buffer,
    workspace: Buffer,
    params: Vec<(String, Buffer)>,
    /// Last, so that its turn ends when everything else here is gone.
    recorder: Recorder,
}

impl Calls {
    fn new(spec: &AttentionSpec) -> Option<Calls> {
        let recorder = Recorder::load().map_err(|why| skip("recording", &why)).ok()?;
        let problem = spec.validate().unwrap();
        let (planned, _) = recorder.executor().attention(&problem).unwrap_or_else(|e| panic!("{e}"));
        let bytes = |operand: Operand| {
            let tensor = problem.in_memory(operand).unwrap();
            let all = if problem.packs(operand.side()) { memory(&tensor, problem.total(operand.side())) } else { tensor };
            all.extent().unwrap().unsigned_abs() * 2
        };
        let operands = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| (operand, recorder.buffer(bytes(operand)))).into();
        let stats = recorder.buffer(problem.stats_elements().unsigned_abs() * 4);
        let elements = |p| sdpa::params::elements(p, problem.extents()).unsigned_abs();
        let params = problem.params().iter().map(|p| (p.name.clone(), recorder.buffer(4 * elements(p)))).collect();
        let (workspace, stream) = (recorder.buffer(planned.workspace_bytes()), recorder.stream());
        Some(Calls { planned, stream, operands, stats, workspace, params, recorder })
    }

    fn slice(&self, operand: Operand) -> DeviceSlice {
        whole(&self.operands.iter().find(|(o, _)| *o == operand).unwrap().1)
    }

    fn given(&self, name: &str) -> u64 {
        self.params.iter().find(|(n, _)| n == name).unwrap().1.address()
    }

    fn params(&self) -> Vec<DeviceParam<'_>> {
        let value = |buffer: &Buffer| DeviceValue::Tensor(DType::I32, whole(buffer));
        self.params.iter().map(|(name, buffer)| DeviceParam::new(name, value(buffer))).collect()
    }

    fn call<'a>(&self, params: &'a [DeviceParam<'a>]) -> DeviceForward<'a> {
        let [q, k, v, o] = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| self.slice(operand));
        let stats = self.planned.job.problem().stats().then(|| whole(&self.stats));
        DeviceForward::new(q, k, v, o).stats(stats).params(params).workspace(whole(&self.workspace))
    }

    fn handle(&self) -> Handle<'_> {
        self.recorder.executor().library().handle(&self.stream).unwrap()
    }

    fn run(&self, planned: &Planned, call: &DeviceForward<'_>) -> Vec<Entry> {
        let (result, entries) = self.recorder.record(|| self.recorder.forward(planned, &self.handle(), call));
        result.unwrap_or_else(|e| panic!("{e}"));
        entries
    }

    fn refused(&self, call: &DeviceForward<'_>) -> String {
        let (result, entries) = self.recorder.record(|| self.recorder.forward(&self.planned, &self.handle(), call));
        assert!(entries.is_empty(), "{} submissions", entries.len());
        result.unwrap_err().to_string()
    }

    /// What the attention has been given for the tensor that is supplied so.
    fn supplied(&self, attention: &Entry, wanted: impl Fn(&Supply) -> bool) -> Option<u64> {
        let (id, _) = self.planned.lowered.supplies.iter().find(|(_, supply)| wanted(supply))?;
        Some(attention.address(id.uid()).unwrap())
    }

    /// The launch checks the caller's table into the one that the attention reads, in pieces of so many tokens; and the attention reads
    /// containers where they are.
    fn assert_checks(&self, launch: &Entry, attention: &Entry, [tokens, parts]: [u64; 2], padded: bool) {
        assert_eq!((launch.what, attention.what, launch.stream), (LAUNCH, EXECUTION, attention.stream));
        let problem = self.planned.job.problem();
        let [batch, seq_kv] = [problem.batch(), problem.seq_kv()].map(i64::unsigned_abs);
        let paged = problem.paged().unwrap();
        let (each, given) = (seq_kv.div_ceil(tokens), seq_kv.div_ceil(tokens * parts));
        let to = self.supplied(attention, |supply| matches!(supply, Supply::Pages(_))).unwrap();
        let mut want = vec![batch];
        for (side, name) in [(Side::Queries, "seq_len_q"), (Side::Keys, "seq_len_kv")] {
            let clamped = self.supplied(attention, |supply| matches!(supply, Supply::Guarded(Guarded { of, .. }) if *of == side));
            assert_eq!(clamped.is_some(), padded, "{name}");
            let [from, to] = clamped.map_or([0; 2], |to| [self.given(name), to]);
            want.extend([from, problem.seq(side).unsigned_abs(), to]);
        }
        want.extend([u64::from(padded), each, parts, tokens, paged.pages.unsigned_abs(), self.given(PAGE_TABLE), given, to]);
        assert_eq!(launch.pointers[..launch.tensors as usize], want);
        assert_eq!((launch.from, launch.bytes), ((batch * each).div_ceil(128), 128));
        let all = whole(&self.workspace);
        assert!(to >= all.address + OF_PLAN && to + 4 * batch * each <= all.address + all.bytes, "{to:x}");
        for operand in [Operand::K, Operand::V] {
            let tensor = self.planned.lowered.operand(operand).unwrap();
            assert_eq!(attention.address(tensor.uid()), Some(self.slice(operand).address), "{operand}");
        }
    }
}

/// Page sizes, with the tokens and parts of each as engines take them.
const PAGES: [(i64, [u64; 2]); 5] = [(1, [1, 1]), (16, [16, 1]), (48, [16, 3]), (7, [1, 7]), (512, [512, 1])];

#[test]
fn the_table_is_checked_before_the_attention_that_reads_it() {
    for (page_size, pieces) in PAGES {
        for spec in [spec(page_size), decode(page_size)] {
            let Some(calls) = Calls::new(&spec) else { return };
            let params = calls.params();
            let entries = calls.run(&calls.planned, &calls.call(&params));
            let [launch, attention] = &entries[..] else { panic!("{} submissions", entries.len()) };
            // No lengths: all keys are there.
            calls.assert_checks(launch, attention, pieces, false);
            // Engines for one query know pages in the unified op.
            let form = if spec.q.dims[2] == 1 { Form::Unified } else { Form::Composite };
            assert_eq!(calls.planned.lowered.form, form, "{page_size}");
        }
    }
}

#[test]
fn lengths_are_clamped_and_the_table_is_checked_by_one_launch() {
    for (page_size, pieces) in PAGES {
        for spec in [spec(page_size).mask(Mask::padding()), decode(page_size).mask(Mask::padding())] {
            let Some(calls) = Calls::new(&spec) else { return };
            let params = calls.params();
            let entries = calls.run(&calls.planned, &calls.call(&params));
            let [launch, attention] = &entries[..] else { panic!("{} submissions", entries.len()) };
            calls.assert_checks(launch, attention, pieces, true);
        }
    }
}

/// Queries that are copied first are so before the check; containers never are.
#[test]
fn a_copy_of_queries_leaves_the_check_beside_the_attention() {
    let mut spec = spec(16).mask(Mask::padding());
    spec.q.strides = Layout::Bshd.strides([3, 8, 66, 64 + 3]);
    let Some(calls) = Calls::new(&spec) else { return };
    let params = calls.params();
    let entries = calls.run(&calls.planned, &calls.call(&params));
    let at = entries.iter().position(|entry| entry.what == LAUNCH).unwrap();
    assert!(at == 1 && entries[0].what == EXECUTION && entries.len() == 3, "{at} of {}", entries.len());
    assert!(entries[..at].iter().any(|entry| entry.pointers.contains(&calls.slice(Operand::Q).address)));
    assert_ne!(entries[at + 1].address(calls.planned.lowered.operand(Operand::Q).unwrap().uid()), Some(calls.slice(Operand::Q).address));
}

#[test]
fn a_table_or_a_container_that_is_too_short_is_refused() {
    for page_size in [16, 7] {
        let Some(calls) = Calls::new(&spec(page_size).mask(Mask::padding())) else { return };
        let params = calls.params();
        let call = calls.call(&params);
        let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
        assert!(calls.refused(&call.k(short(call.k))).contains("k length"));
        assert!(calls.refused(&call.v(short(call.v))).contains("v length"));
        let slice = whole(&calls.params.iter().find(|(name, _)| name == PAGE_TABLE).unwrap().1);
        for value in [
            DeviceValue::Tensor(DType::I32, DeviceSlice { bytes: slice.bytes - 4, ..slice }),
            DeviceValue::Tensor(DType::I32, DeviceSlice { address: slice.address + 2, ..slice }),
            DeviceValue::Tensor(DType::I64, slice),
            DeviceValue::Scalar(1.0),
        ] {
            let mut wrong = calls.params();
            wrong.iter_mut().filter(|param| param.name == PAGE_TABLE).for_each(|param| param.value = value);
            assert!(calls.refused(&calls.call(&wrong)).contains(PAGE_TABLE), "{value:?}");
        }
        let without: Vec<_> = calls.params().into_iter().filter(|param| param.name != PAGE_TABLE).collect();
        assert!(calls.refused(&calls.call(&without)).contains(PAGE_TABLE));
    }
}

#[test]
fn the_functional_call_plans_from_bytes_and_replays_launch_the_same() {
    let spec = spec(48).mask(Mask::padding());
    let Some(calls) = Calls::new(&spec) else { return };
    let recorder = &calls.recorder;
    let params = calls.params();
    let call = calls.call(&params);
    let usual = calls.run(&calls.planned, &call);
    // Tables of other plans and numbers in host memory are elsewhere; launches know of neither.
    let launched = |entries: &[Entry]| {
        let launches = entries.iter().filter(|entry| entry.what == LAUNCH);
        let all: Vec<u32> = entries.iter().map(|entry| entry.what).collect();
        (all, launches.map(|entry| (entry.pointers, entry.from, entry.bytes)).collect::<Vec<_>>())
    };
    let (result, entries) = recorder.record(|| recorder.functional(&calls.stream, &spec, &call));
    result.unwrap();
    assert_eq!(launched(&entries), launched(&usual));

    let bytes = calls.planned.to_bytes().unwrap();
    let library = recorder.executor().library();
    let mut loaded = code::planned(library, &Target::Handle(&calls.handle()), &calls.planned.job, &bytes).unwrap();
    let launches = |planned: &Planned| {
        let steps = planned.schedule.steps().iter();
        steps.filter_map(|step| if let Step::Launch(launch) = step { Some(launch.clone()) } else { None }).collect::<Vec<_>>()
    };
    assert_eq!((launches(&loaded).len(), launches(&loaded)), (1, launches(&calls.planned)));
    // The kernel is put on the device with the tables.
    let (early, entries) = recorder.record(|| recorder.forward(&loaded, &calls.handle(), &call));
    assert!(early.is_err() && entries.is_empty());
    loaded.upload_tables(&calls.stream).unwrap();
    assert_eq!(launched(&calls.run(&loaded, &call)), launched(&usual));

    let mut replay = Replay::new(calls.planned.clone(), Arc::new(recorder.stream())).unwrap();
    for n in 0..3 {
        recorder.replayed(&mut replay, &call).unwrap();
        assert_eq!((replay.captures(), replay.captured_nodes()), (1, Some(usual.len())), "call {n}");
    }
    let elsewhere = recorder.buffer(whole(&calls.params.iter().find(|(name, _)| name == PAGE_TABLE).unwrap().1).bytes);
    let mut others = params.clone();
    let table = others.iter_mut().find(|param| param.name == PAGE_TABLE).unwrap();
    table.value = DeviceValue::Tensor(DType::I32, whole(&elsewhere));
    recorder.replayed(&mut replay, &calls.call(&others)).unwrap();
    assert_eq!((replay.captures(), recorder.faults()), (2, 0));
}

/// Sequences that decode beside chunks of prompts, at most so many queries in all.
const TOTAL: i64 = 90;

fn packed() -> AttentionSpec {
    AttentionSpec::paged(DType::BF16, SHAPE, cache(16)).with_packed_queries(TOTAL).mask(Mask::causal_ends()).with_stats()
}

/// −∞ in f32.
const NO_KEY: u64 = 0xff80_0000;

#[test]
fn packed_queries_are_told_beside_the_table_and_filled_where_there_are_no_keys() {
    let Some(calls) = Calls::new(&packed()) else { return };
    let params = calls.params();
    let call = calls.call(&params);
    let entries = calls.run(&calls.planned, &call);
    let [told, checked, attention, o, stats] = &entries[..] else { panic!("{} submissions", entries.len()) };
    let [batch, seq_q, seq_kv] = [3, 66, 333];
    // Lengths stand where boundaries of keys would.
    let sides = [0, calls.given("cu_seqlens_q"), TOTAL.unsigned_abs(), seq_q, calls.given("seq_len_kv"), 0, seq_kv, 1];
    let lengths = calls.supplied(attention, |supply| *supply == Supply::Documents(Told::Lengths(Side::Queries))).unwrap();
    assert_eq!((told.what, &told.pointers[..8]), (LAUNCH, &sides[..]));
    assert_eq!(told.pointers[8..10], [batch, lengths]);
    // Rows of q, of o, and of stats.
    let graph = calls.planned.lowered.graph.graph();
    let offsets = |tensor| attention.address(graph.get(tensor).unwrap().ragged.unwrap().offsets.uid()).unwrap();
    let made: Vec<u64> = told.pointers[10..28].chunks_exact(2).filter(|pair| pair[0] != 0).flat_map(|pair| [pair[0], pair[1]]).collect();
    let [q, of_o] = [Operand::Q, Operand::O].map(|operand| offsets(calls.planned.lowered.operand(operand).unwrap()));
    let of_stats = offsets(calls.planned.lowered.stats.unwrap());
    assert_eq!(made, [q, 8 * 64, of_o, 8 * 128, of_stats, 8]);
    // Keys are clamped and the table is checked as of any cache; of queries that launch knows nothing.
    let to = calls.supplied(attention, |supply| matches!(supply, Supply::Guarded(Guarded { of: Side::Keys, .. }))).unwrap();
    let table = calls.supplied(attention, |supply| matches!(supply, Supply::Pages(_))).unwrap();
    let want = [batch, 0, seq_q, 0, calls.given("seq_len_kv"), seq_kv, to];
    assert_eq!((checked.what, &checked.pointers[..7]), (LAUNCH, &want[..]));
    assert_eq!(checked.pointers[8..15], [21, 1, 16, 50, calls.given(PAGE_TABLE), 21, table]);
    for (fill, to, rest) in
        [(o, calls.slice(Operand::O).address, [2, 0, 8, 128, 8 * 128, 128]), (stats, calls.stats.address(), [4, NO_KEY, 8, 1, 8, 1])]
    {
        let want: Vec<u64> = sides.into_iter().chain([to]).chain(rest).collect();
        assert_eq!((fill.what, fill.from, &fill.pointers[..15]), (LAUNCH, batch, &want[..]));
    }
    for operand in [Operand::K, Operand::V] {
        let tensor = calls.planned.lowered.operand(operand).unwrap();
        assert_eq!((attention.address(tensor.uid()), graph.get(tensor).unwrap().ragged), (Some(calls.slice(operand).address), None));
    }
    // Fewer queries fit into shorter memory; a container that is shorter is none.
    let rows = |call: &DeviceForward<'_>| calls.run(&calls.planned, call)[0].pointers[2];
    let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
    for shorter in [call.q(short(call.q)), call.stats(call.stats.map(short))] {
        assert_eq!(rows(&shorter), TOTAL.unsigned_abs() - 1);
    }
    assert!(calls.refused(&call.v(short(call.v))).contains("v length"));
}

/// Containers have pages, and may have fewer or more tokens than all entries together; packed queries beside them have what their boundaries say.
#[test]
fn host_memory_goes_up_as_containers() {
    for (pages, packs) in [(2, false), (400, false), (400, true)] {
        let spec = AttentionSpec::paged(DType::BF16, SHAPE, Paged::new(16, pages));
        let spec = if packs { spec.with_packed_queries(TOTAL) } else { spec };
        let problem = spec.validate().unwrap();
        let Some(recorder) = Recorder::load().map_err(|why| skip("recording", &why)).ok() else { return };
        let prepared = recorder.executor().prepare(&problem).unwrap();
        let elements = |operand: Operand| {
            let tensor = problem.in_memory(operand).unwrap();
            let all = if problem.packs(operand.side()) { memory(&tensor, TOTAL) } else { tensor };
            all.extent().unwrap() as usize
        };
        let [q, k, v, mut o] = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| vec![bf16::ZERO; elements(operand)]);
        let table: Vec<i32> = (0..3 * 21).map(|n| n % 2).collect();
        let (boundaries, lengths) = ([0, 1, 31, 90], [5, 0, 333]);
        let mut params = vec![Param::new(PAGE_TABLE, &table)];
        if packs {
            params.extend([Param::new("cu_seqlens_q", &boundaries), Param::new("seq_len_kv", &lengths)]);
        }
        let call = HostForward::new(&q, &k, &v, &mut o).params(&params);
        let (result, entries) = recorder.record(|| prepared.forward(call));
        result.unwrap();
        let uploads: Vec<u64> = entries.iter().filter(|entry| entry.what == UPLOAD).map(|entry| entry.bytes).collect();
        let containers = [pages * 16 * 2 * 64 * 2, pages * 16 * 2 * 128 * 2].map(i64::unsigned_abs);
        let given = params.iter().map(|param| 4 * param.value.elements() as u64);
        let wanted: Vec<u64> = [q.len() as u64 * 2, containers[0], containers[1]].into_iter().chain(given).collect();
        assert_eq!(uploads, wanted, "{pages} pages");
    }
}

/// Timing calls each form on memory of its own, which is as long as containers are.
#[test]
fn forms_are_timed_over_whole_containers() {
    for pages in [2, 400] {
        let problem = AttentionSpec::paged(DType::F16, Shape { seq_q: 1, ..SHAPE }, Paged::new(16, pages)).validate().unwrap();
        let options = CudnnOptions::default().with_tune(true);
        let Some(recorder) = Recorder::with(options).map_err(|why| skip("recording", &why)).ok() else { return };
        let (built, entries) = recorder.record(|| recorder.executor().attention(&problem).map(|_| ()));
        built.unwrap();
        for operand in [Operand::K, Operand::V] {
            let bytes = problem.in_memory(operand).and_then(|t| t.extent()).unwrap().unsigned_abs() * 2;
            assert!(entries.iter().any(|entry| entry.what == UPLOAD && entry.bytes == bytes), "{operand} of {pages} pages");
        }
    }
}
