//! A decode loop over a growing paged cache: nothing is built after its first step, all of its steps are one CUDA graph, and every launch computes what
//! lengths and page table say by then, against the oracle. `device decode [STEPS]`.
#![allow(unsafe_code)]

use crate::memory::{random, slice};
use crate::setup::{Result, executor};
use conformance::compare::{Measured, Outputs, compare};
use conformance::oracle::{Closures, Problem};
use conformance::random::Random;
use cudnn_graph::{Buffer, DeviceSlice, Stream};
use half::bf16;
use sdpa::cudnn::{CudnnExecutor, DeviceForward, DeviceParam, DeviceValue, PlanOptions};
use sdpa::{AttentionSpec, DType, Mask, Paged, Shape};

const BATCH: usize = 4;
const SHAPE: Shape = Shape { batch: BATCH as i64, heads_q: 8, heads_kv: 2, seq_q: 1, seq_kv: 1000, dim_qk: 128, dim_v: 128 };
const PAGE: usize = 16;
/// A few that nobody has.
const PAGES: usize = BATCH * PER_ENTRY + 5;
const PER_ENTRY: usize = (SHAPE.seq_kv as usize).div_ceil(PAGE);
/// Elements of a query, and of an output.
const ROW: usize = BATCH * SHAPE.heads_q as usize * SHAPE.dim_qk as usize;
/// Elements of a token's keys.
const TOKEN: usize = (SHAPE.heads_kv * SHAPE.dim_qk) as usize;

/// What a launch is given: keys that each sequence has before the first step, and where they are.
struct Data {
    before: [i64; BATCH],
    table: Vec<i32>,
}

impl Data {
    fn draw(random: &mut Random, steps: usize) -> Data {
        let most = SHAPE.seq_kv - steps as i64;
        let mut pages: Vec<i32> = (0..PAGES as i32).collect();
        (1..PAGES).for_each(|n| pages.swap(n, random.between(0, n as i64) as usize));
        // A sequence begins, one fills a page, one ends where the cache does.
        let before = [0, 15.min(most), random.between(0, most), most];
        Data { before, table: pages[..BATCH * PER_ENTRY].to_vec() }
    }

    fn keys(&self, step: usize) -> [i64; BATCH] {
        self.before.map(|before| before + step as i64 + 1)
    }
}

/// The memory of a loop whose steps read what the ones before wrote.
struct Loop {
    spec: AttentionSpec,
    /// Keys, and values, on the device and here.
    containers: [(Buffer, Vec<f64>); 2],
    /// What the first step reads, and what each writes.
    rows: Vec<Buffer>,
    queries: (&'static str, Buffer),
    lengths: Buffer,
    table: Buffer,
}

fn numbers(stream: &Stream, buffer: &Buffer) -> Result<Vec<f64>> {
    let mut all = vec![bf16::ZERO; buffer.bytes() / 2];
    buffer.download(stream, 0, &mut all)?;
    Ok(all.into_iter().map(f64::from).collect())
}

impl Loop {
    fn new(stream: &Stream, packed: bool, steps: usize) -> Result<Loop> {
        let cache = Paged::new(PAGE as i64, PAGES as i64);
        let spec = AttentionSpec::paged(DType::BF16, SHAPE, cache);
        let spec = if packed { spec.with_packed_queries(SHAPE.batch) } else { spec.mask(Mask::padding()) };
        let container = |seed| -> Result<(Buffer, Vec<f64>)> {
            let mut random = Random::new(seed);
            let all: Vec<bf16> = (0..PAGES * PAGE * TOKEN).map(|_| bf16::from_f64(random.normal())).collect();
            let mut made = Buffer::new(stream.device(), 2 * all.len())?;
            made.upload(stream, 0, &all)?;
            Ok((made, all.into_iter().map(f64::from).collect()))
        };
        let rows = (0..=steps).map(|n| random(stream, DType::BF16, ROW as i64, 7 + n as u64)).collect::<Result<_>>()?;
        let (name, told) = if packed { ("cu_seqlens_q", (0..=BATCH as i32).collect()) } else { ("seq_len_q", vec![1; BATCH]) };
        let mut queries = Buffer::new(stream.device(), 4 * told.len())?;
        queries.upload(stream, 0, &told)?;
        let numbers = |count: usize| Buffer::new(stream.device(), 4 * count);
        let (lengths, table) = (numbers(BATCH * steps)?, numbers(BATCH * PER_ENTRY)?);
        Ok(Loop { spec, containers: [container(1)?, container(2)?], rows, queries: (name, queries), lengths, table })
    }

    fn steps(&self) -> usize {
        self.rows.len() - 1
    }

    fn put(&mut self, stream: &Stream, data: &Data) -> Result<()> {
        let lengths: Vec<i32> = (0..self.steps()).flat_map(|step| data.keys(step)).map(|n| n as i32).collect();
        self.lengths.upload(stream, 0, &lengths)?;
        self.table.upload(stream, 0, &data.table)?;
        // Not-a-number where nothing is written.
        for row in &mut self.rows[1..] {
            row.fill(stream, 0xff)?;
        }
        Ok(())
    }

    /// # Safety
    /// The memory of the loop outlives the call on the stream.
    unsafe fn step(&self, executor: &CudnnExecutor, stream: &Stream, step: usize) -> std::result::Result<(), sdpa::cudnn::Error> {
        let value = |slice: DeviceSlice| DeviceValue::Tensor(DType::I32, slice);
        let bytes = 4 * BATCH as u64;
        let lengths = DeviceSlice { address: self.lengths.address() + step as u64 * bytes, bytes };
        let (name, queries) = &self.queries;
        let params = [
            DeviceParam::new(name, value(slice(queries))),
            DeviceParam::new("seq_len_kv", value(lengths)),
            DeviceParam::new("page_table", value(slice(&self.table))),
        ];
        let [k, v] = self.containers.each_ref().map(|(container, _)| slice(container));
        let [q, o] = [step, step + 1].map(|n| slice(&self.rows[n]));
        let call = DeviceForward::new(q, k, v, o).params(&params);
        // SAFETY: the caller's.
        unsafe { executor.sdpa(stream, &self.spec, &call) }
    }

    /// Compares every step with the oracle, which is given what the step read; the worst, as a part of its tolerance.
    fn check(&self, stream: &Stream, data: &Data, what: &str) -> Result<f64> {
        let [k, v] = self.containers.each_ref().map(|(_, container)| in_order(container, &data.table));
        let [batch, heads_q, heads_kv, dim] = [SHAPE.batch, SHAPE.heads_q, SHAPE.heads_kv, SHAPE.dim_qk].map(|n| n as usize);
        let scale = f64::from(self.spec.validate()?.default_scale());
        let mut worst = 0f64;
        for step in 0..self.steps() {
            let [q, o] = [step, step + 1].map(|n| numbers(stream, &self.rows[n]));
            let (q, o, keys) = (q?, o?, data.keys(step));
            let shape = [batch, heads_q, heads_kv, 1, SHAPE.seq_kv as usize, dim, dim];
            let problem = Problem {
                shape,
                q: &q,
                k: &k,
                v: &v,
                dtype: DType::BF16,
                scale,
                masks: &[],
                lengths: &[],
                sink: None,
                dropout: None,
                narrow: None,
                fixed_point: None,
            };
            let keep = |[b, _, _, key]: [i64; 4]| key < keys[b as usize];
            let got = Outputs { o, of_rows: [None, None, None], amax_s: None };
            let distance = compare(&problem, &Closures { keep: Some(&keep), ..Closures::default() }, &got)?;
            if !distance.holds() {
                return Err(format!("{what}, step {step} of {keys:?} keys: {}", distance.told()).into());
            }
            worst = worst.max(distance.worst());
        }
        Ok(worst)
    }
}

/// Keys or values of each sequence in their order, (batch, heads_kv, seq_kv, dim).
fn in_order(container: &[f64], table: &[i32]) -> Vec<f64> {
    let (heads, dim) = (SHAPE.heads_kv as usize, SHAPE.dim_qk as usize);
    let mut all = Vec::with_capacity(BATCH * heads * SHAPE.seq_kv as usize * dim);
    for pages in table.chunks_exact(PER_ENTRY) {
        for head in 0..heads {
            for key in 0..SHAPE.seq_kv as usize {
                let at = (pages[key / PAGE] as usize * PAGE + key % PAGE) * TOKEN + head * dim;
                all.extend_from_slice(&container[at..at + dim]);
            }
        }
    }
    all
}

pub(crate) fn run(steps: u64) -> Result<()> {
    let steps = usize::try_from(steps)?.clamp(1, 900);
    for packed in [false, true] {
        let executor = executor(PlanOptions::default())?;
        let stream = executor.device().stream()?;
        let misses = || executor.cache_stats()[0].misses;
        let mut random = Random::new(5);
        let mut decode = Loop::new(&stream, packed, steps)?;
        let all = |decode: &Loop, stream: &Stream| {
            // SAFETY: the memory is whole buffers of this device, which outlive the synchronisations below.
            (0..steps).try_for_each(|step| unsafe { decode.step(&executor, stream, step) })
        };
        // The capture has the first step ever in it.
        let graph = stream.capture(|| all(&decode, &stream))?;
        let built = misses();
        let mut worst = 0f64;
        for launch in 0..3 {
            let data = Data::draw(&mut random, steps);
            decode.put(&stream, &data)?;
            // SAFETY: as above.
            unsafe { graph.launch(&stream) }?;
            worst = worst.max(decode.check(&stream, &data, &format!("launch {launch}"))?);
            decode.put(&stream, &data)?;
            all(&decode, &stream)?;
            worst = worst.max(decode.check(&stream, &data, &format!("calls {launch}"))?);
        }
        if (built, misses()) != (1, 1) {
            return Err(format!("{built} builds for the first loop, {} for all", misses()).into());
        }
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..12 {
            for (turn, times) in times.iter_mut().enumerate() {
                let start = stream.record(true)?;
                match turn {
                    // SAFETY: as above.
                    0 => unsafe { graph.launch(&stream) }?,
                    _ => all(&decode, &stream)?,
                }
                let end = stream.record(true)?;
                end.synchronize()?;
                if round > 1 {
                    times.push(f64::from(end.since(&start)?) * 1e3 / steps as f64);
                }
            }
        }
        let [launched, called] = times.map(crate::setup::median);
        println!(
            "decode, {} queries: {steps} steps in one graph of {} nodes, launched with three sets of lengths and pages, one build in all; worst {worst:.2} of the tolerance; {launched:.2} us a step, {called:.2} by calls",
            if packed { "packed" } else { "dense" },
            graph.nodes()
        );
    }
    Ok(())
}
