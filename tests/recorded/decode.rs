//! A decode loop over a growing paged cache: every step is the same problem, so that nothing is built behind the first, and all of them are one CUDA graph,
//! in which lengths and page table are data.

use conformance::recorder::entry::{EXECUTION, Entry, LAUNCH, UPLOAD};
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::ffi::codes::Kind;
use cudnn_graph::{Buffer, DeviceSlice, Stream};
use sdpa::cudnn::{DeviceForward, DeviceParam, DeviceValue};
use sdpa::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa::paged::PAGE_TABLE;
use sdpa::{AttentionSpec, DType, Mask, Operand, Paged, Shape};

const STEPS: u64 = 40;
const SHAPE: Shape = Shape { batch: 4, heads_q: 8, heads_kv: 2, seq_q: 1, seq_kv: 300, dim_qk: 64, dim_v: 64 };

/// A loop whose steps read what the ones before wrote.
struct Loop {
    stream: Stream,
    spec: AttentionSpec,
    containers: [Buffer; 2],
    /// Of the first step, and what each writes.
    rows: Vec<Buffer>,
    /// Where queries begin, or how many there are.
    queries: (&'static str, Buffer),
    /// Of each step, one behind the other.
    lengths: Buffer,
    table: Buffer,
    /// Last, so that its turn ends when everything else here is gone.
    recorder: Recorder,
}

impl Loop {
    /// One query for each entry, dense or packed.
    fn new(packed: bool) -> Option<Loop> {
        let recorder = Recorder::load().map_err(|why| skip("recording", &why)).ok()?;
        let cache = Paged::new(16, 80);
        let spec = AttentionSpec::paged(DType::BF16, SHAPE, cache);
        let spec = if packed { spec.with_packed_queries(SHAPE.batch) } else { spec.mask(Mask::padding()) };
        let problem = spec.validate().unwrap();
        let bytes = |operand: Operand| problem.in_memory(operand).and_then(|t| t.extent()).unwrap().unsigned_abs() * 2;
        let containers = [Operand::K, Operand::V].map(|operand| recorder.buffer(bytes(operand)));
        let rows = (0..=STEPS).map(|_| recorder.buffer(bytes(Operand::Q))).collect();
        let batch = SHAPE.batch.unsigned_abs();
        let queries = if packed { ("cu_seqlens_q", recorder.buffer(4 * (batch + 1))) } else { (SEQ_LEN_Q, recorder.buffer(4 * batch)) };
        let lengths = recorder.buffer(4 * batch * STEPS);
        let table = recorder.buffer(4 * batch * cache.pages_of(SHAPE.seq_kv).unsigned_abs());
        Some(Loop { stream: recorder.stream(), spec, containers, rows, queries, lengths, table, recorder })
    }

    /// The lengths of a step.
    fn lengths(&self, step: u64) -> DeviceSlice {
        let bytes = 4 * SHAPE.batch.unsigned_abs();
        DeviceSlice { address: self.lengths.address() + step * bytes, bytes }
    }

    fn step(&self, stream: &Stream, step: u64) -> Result<(), sdpa::cudnn::Error> {
        let value = |slice: DeviceSlice| DeviceValue::Tensor(DType::I32, slice);
        let (name, queries) = &self.queries;
        let params = [
            DeviceParam::new(name, value(whole(queries))),
            DeviceParam::new(SEQ_LEN_KV, value(self.lengths(step))),
            DeviceParam::new(PAGE_TABLE, value(whole(&self.table))),
        ];
        let [k, v] = self.containers.each_ref().map(whole);
        let [q, o] = [step, step + 1].map(|n| whole(&self.rows[n as usize]));
        let call = DeviceForward::new(q, k, v, o).params(&params);
        self.recorder.functional(stream, &self.spec, &call)
    }

    /// A step reads its own lengths, the one table, and what the step before wrote.
    fn reads_its_own(&self, step: u64, entries: &[Entry]) {
        let at = entries.iter().position(|entry| entry.what == EXECUTION).unwrap();
        let told: Vec<u64> = entries[..at].iter().flat_map(|entry| entry.pointers[..entry.tensors as usize].to_vec()).collect();
        for read in [self.lengths(step).address, self.table.address(), self.queries.1.address()] {
            assert!(told.contains(&read), "step {step}: {read:x}");
        }
        let bound = &entries[at].pointers[..entries[at].tensors as usize];
        let [q, o] = [step, step + 1].map(|n| self.rows[n as usize].address());
        assert!(bound.contains(&q) && bound.contains(&o), "step {step}");
        assert!(self.containers.iter().all(|container| bound.contains(&container.address())), "step {step}");
    }

    fn misses(&self) -> u64 {
        self.recorder.executor().cache_stats()[0].misses
    }
}

/// What a step submits: kernels that tell engines of entries and of the table, the attention, and what fills rows without keys where queries are packed.
fn kinds(packed: bool) -> &'static [u32] {
    if packed { &[LAUNCH, LAUNCH, EXECUTION, LAUNCH] } else { &[LAUNCH, EXECUTION] }
}

#[test]
fn a_decode_loop_builds_nothing_after_its_first_step() {
    for packed in [false, true] {
        let Some(decode) = Loop::new(packed) else { return };
        let mut built = None;
        for step in 0..STEPS {
            let (result, entries) = decode.recorder.record(|| decode.step(&decode.stream, step));
            result.unwrap();
            // What is built goes up with the first.
            let all: Vec<u32> = entries.iter().map(|entry| entry.what).skip_while(|what| step == 0 && *what == UPLOAD).collect();
            assert_eq!(all, kinds(packed), "step {step}");
            decode.reads_its_own(step, &entries);
            let now = (decode.misses(), decode.recorder.created(Kind::EXECUTION_PLAN), decode.recorder.allocated());
            assert_eq!(*built.get_or_insert(now), now, "step {step}");
        }
        assert_eq!(decode.misses(), 1);
    }
}

#[test]
fn all_steps_of_a_decode_loop_are_one_graph() {
    for packed in [false, true] {
        let Some(decode) = Loop::new(packed) else { return };
        let recorder = &decode.recorder;
        // The first step ever is in the capture.
        let (captured, entries) =
            recorder.record(|| decode.stream.capture(|| (0..STEPS).try_for_each(|step| decode.step(&decode.stream, step))));
        let captured = captured.unwrap();
        let each = kinds(packed);
        assert_eq!(captured.nodes(), each.len() * STEPS as usize);
        // What is built goes up at once, behind nothing that is captured.
        assert!(entries.iter().all(|entry| entry.what == UPLOAD));
        assert_eq!((decode.misses(), recorder.faults()), (1, 0));
        // A second loop asks for no more memory than one step, and builds nothing.
        let (allocated, plans) = (recorder.allocated(), recorder.created(Kind::EXECUTION_PLAN));
        let again = decode.stream.capture(|| (0..STEPS).try_for_each(|step| decode.step(&decode.stream, step))).unwrap();
        let workspace = recorder.executor().attention(&decode.spec.validate().unwrap()).unwrap().0.workspace_bytes();
        assert!(recorder.allocated() - allocated <= 2 * workspace.max(1 << 16), "{} bytes", recorder.allocated() - allocated);
        assert_eq!(recorder.created(Kind::EXECUTION_PLAN), plans);
        drop(again);
        for _ in 0..2 {
            recorder.launch(&captured, &decode.stream).unwrap();
        }
        assert_eq!((decode.misses(), recorder.faults()), (1, 0));
    }
}
