//! Many calls over many shapes through a small cache of real plans, on many threads, with failures on the way: `device soak [CALLS
//! [SHAPES]]`, else 10⁴ calls over 10³ shapes. Bounds are held, memory of host and device is watched, and results are compared with the
//! CPU executor's in samples.
#![allow(unsafe_code)]

use crate::memory::{random, slice};
use crate::setup::{Result, executor};
use conformance::random::Random;
use conformance::soak::resident;
use cudnn_graph::{Buffer, DeviceProfile, Handle, Stream, Target};
use half::bf16;
use sdpa::cache::Limits;
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::Error;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::planfile::{PlanFile, Record, write};
use sdpa::cudnn::{CudnnExecutor, DeviceForward, PlanOptions, Planned, Plans, plan, portable};
use sdpa::{AttentionSpec, DType, Elements, Executor, HostForward, Layout, Mask, Shape};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const THREADS: u64 = 16;
const ENTRIES: usize = 64;
/// Less than so many plans weigh, so that both bounds are met.
const BYTES: u64 = 16 << 20;
const LONGEST: i64 = 1008;
const DIM: i64 = 64;
/// One call of so many is compared.
const SAMPLE: i64 = 20;

fn spec(seq: i64) -> AttentionSpec {
    let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: seq, seq_kv: seq, dim_qk: DIM, dim_v: DIM };
    AttentionSpec::dense(sdpa::DType::BF16, shape, Layout::Bhsd).mask(Mask::causal())
}

/// What happens to a build.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// cuDNN is given half of a plan.
    Compile,
    /// The device is asked for more than it has.
    Memory,
    /// The plan goes through a file that is damaged, and is made anew.
    Damaged,
    /// The plan goes through a file.
    File,
    Built,
}

impl Fate {
    fn draw(random: &mut Random) -> Fate {
        match random.between(0, 99) {
            0..=2 => Fate::Compile,
            3..=5 => Fate::Memory,
            6..=8 => Fate::Damaged,
            9..=14 => Fate::File,
            _ => Fate::Built,
        }
    }
}

/// What builds met.
#[derive(Debug, Default)]
struct Counts {
    built: AtomicU64,
    failed: AtomicU64,
    damaged: AtomicU64,
    from_file: AtomicU64,
    compared: AtomicU64,
}

fn text(e: impl std::fmt::Display) -> Error {
    Error::Backend(cudnn_graph::Error::PlanJson(e.to_string()))
}

struct Builder<'a> {
    executor: &'a CudnnExecutor,
    counts: &'a Counts,
    file: PathBuf,
}

impl Builder<'_> {
    fn new_plan(&self, handle: &Handle, job: &Job) -> std::result::Result<Planned, Error> {
        self.counts.built.fetch_add(1, Ordering::Relaxed);
        plan::build(self.executor.library(), &Target::Handle(handle), job, &PlanOptions::default())
    }

    /// Writes a plan into a file, changes one byte of it where `damage` says which, and reads it back.
    fn through_file(&self, handle: &Handle, job: &Job, payload: Vec<u8>, damage: Option<u64>) -> std::result::Result<Planned, Error> {
        let library = self.executor.library();
        let key = portable::key(library, &Target::Handle(handle), job, &PlanOptions::default())?;
        let header = portable::header(library, &DeviceProfile::of_device(library, self.executor.device())?);
        write(&self.file, &header, [Record { key, label: "soak".to_owned(), payload }]).map_err(text)?;
        if let Some(at) = damage {
            let mut bytes = std::fs::read(&self.file).map_err(text)?;
            let at = (at % bytes.len() as u64) as usize;
            bytes[at] ^= 0x10;
            std::fs::write(&self.file, bytes).map_err(text)?;
        }
        let payload = PlanFile::open(&self.file).map_err(text)?.read(&key).map_err(text)?.ok_or_else(|| text("no such record"))?;
        // SAFETY: the file is this thread's; where a byte of it was changed, its checksum does not hold.
        unsafe { Planned::from_bytes(library, &Target::Handle(handle), job, &payload) }.map_err(text)
    }

    fn build(&self, handle: &Handle, job: &Job, fate: Fate, draw: u64) -> std::result::Result<Arc<Planned>, Error> {
        let made = || self.new_plan(handle, job);
        let planned = match fate {
            Fate::Built => made()?,
            Fate::Memory => {
                let most = usize::MAX / 4;
                let Err(error) = Buffer::new(self.executor.device(), most) else { return Err(text("the device has too much memory")) };
                self.counts.failed.fetch_add(1, Ordering::Relaxed);
                return Err(error.into());
            }
            Fate::Compile => {
                let bytes = made()?.to_bytes()?;
                self.counts.failed.fetch_add(1, Ordering::Relaxed);
                let half = &bytes[..bytes.len() / 2];
                // SAFETY: the bytes are ours, and what is cut off is not taken.
                let half = unsafe { Planned::from_bytes(self.executor.library(), &Target::Handle(handle), job, half) };
                return Err(half.map_or_else(text, |_| Error::Bug("half of a plan was taken".to_owned())));
            }
            Fate::Damaged => {
                let planned = made()?;
                if self.through_file(handle, job, planned.to_bytes()?, Some(draw)).is_ok() {
                    return Err(Error::Bug(format!("a file with byte {draw} changed was taken")));
                }
                self.counts.damaged.fetch_add(1, Ordering::Relaxed);
                planned
            }
            Fate::File => {
                let bytes = made()?.to_bytes()?;
                self.counts.from_file.fetch_add(1, Ordering::Relaxed);
                self.through_file(handle, job, bytes, None)?
            }
        };
        Ok(Arc::new(planned))
    }
}

/// What a thread computes with: room for the longest problem.
struct Room {
    stream: Arc<Stream>,
    buffers: [Buffer; 4],
    host: [Vec<bf16>; 3],
    workspace: Buffer,
}

impl Room {
    fn new(executor: &CudnnExecutor, seed: u64) -> Result<Room> {
        let stream = Arc::new(executor.device().stream()?);
        let longest = spec(LONGEST);
        let extent = |t: &sdpa::TensorSpec| t.extent().unwrap_or(0);
        let make = |t, seed| random(&stream, DType::BF16, extent(t), seed);
        let buffers = [make(&longest.q, seed)?, make(&longest.k, seed + 1)?, make(&longest.v, seed + 2)?, make(&longest.o, seed + 3)?];
        let mut host = [0, 1, 2].map(|n: usize| vec![bf16::ZERO; buffers[n].bytes() / 2]);
        for (host, buffer) in host.iter_mut().zip(&buffers) {
            buffer.download(&stream, 0, host)?;
        }
        let workspace = Buffer::new(executor.device(), 1 << 20)?;
        Ok(Room { stream, buffers, host, workspace })
    }

    fn run(&mut self, handle: &Handle, planned: &Planned) -> Result<()> {
        if planned.workspace_bytes() > self.workspace.bytes() as u64 {
            return Err(format!("{} bytes of workspace", planned.workspace_bytes()).into());
        }
        self.buffers[3].fill(&self.stream, 0xff)?;
        let [q, k, v, o] = [0, 1, 2, 3].map(|n| slice(&self.buffers[n]));
        let call = DeviceForward::new(q, k, v, o).workspace(slice(&self.workspace));
        // SAFETY: whole buffers of this device that outlive the stream's work, which nobody else uses.
        Ok(unsafe { planned.forward(handle, &call) }?)
    }

    /// The largest difference from the CPU executor.
    fn compare(&self, cpu: &CpuExecutor, seq: i64) -> Result<f64> {
        let spec = spec(seq);
        let count = spec.o.extent().unwrap_or(0) as usize;
        let (mut got, mut want) = (vec![bf16::NAN; count], vec![bf16::NAN; count]);
        self.buffers[3].download(&self.stream, 0, &mut got)?;
        let [q, k, v] = [0, 1, 2].map(|n: usize| Elements::BF16(&self.host[n]));
        let call = HostForward::new(q, k, v, &mut want);
        cpu.prepare(&spec.validate()?)?.forward(call)?;
        let difference = |(a, b): (&bf16, &bf16)| (a.to_f64() - b.to_f64()).abs();
        Ok(got.iter().zip(&want).map(difference).fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { f64::max(most, x) }))
    }
}

/// The result of a thread: the worst difference, and failures by their first words.
struct Outcome {
    worst: f64,
    failures: u64,
}

pub(crate) fn run(calls: u64, shapes: u64) -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let shapes = shapes.clamp(16, LONGEST as u64 - 7) as i64;
    let jobs: Vec<Job> = (0..shapes).map(|n| Ok(Job::from(spec(8 + n).validate()?))).collect::<Result<_>>()?;
    let limits =
        Limits::entries(NonZeroUsize::new(ENTRIES).unwrap_or(NonZeroUsize::MIN)).with_bytes(BYTES).with_refusals(Duration::from_millis(5));
    let cache = Plans::new("soak", limits);
    let (counts, next, memory) = (Counts::default(), AtomicU64::new(0), [const { AtomicU64::new(0) }; 2]);
    let folder = std::env::temp_dir().join(format!("soak-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let start = Instant::now();
    let work = |seed: u64, folder: &Path| -> Result<Outcome> {
        let (mut draw, cpu) = (Random::new(seed), CpuExecutor::default());
        let mut room = Room::new(&executor, 16 * seed)?;
        let builder = Builder { executor: &executor, counts: &counts, file: folder.join(format!("{seed}.plans")) };
        let mut outcome = Outcome { worst: 0.0, failures: 0 };
        loop {
            let call = next.fetch_add(1, Ordering::Relaxed);
            if call >= calls {
                return Ok(outcome);
            }
            // Half of the calls are about a few shapes, as in a real run.
            let most = if draw.between(0, 1) == 0 { 15 } else { shapes - 1 };
            let shape = draw.between(0, most);
            let (fate, byte, compare) = (Fate::draw(&mut draw), draw.between(0, i64::MAX / 2) as u64, draw.between(1, SAMPLE) == 1);
            let stream = room.stream.clone();
            let handle = executor.library().handle(&stream)?;
            let job = &jobs[shape as usize];
            match cache.get_or_build(job, || builder.build(&handle, job, fate, byte)) {
                Ok((planned, _)) => {
                    room.run(&handle, &planned)?;
                    drop(planned);
                    if compare {
                        outcome.worst = outcome.worst.max(room.compare(&cpu, 8 + shape)?);
                        counts.compared.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Err(bug @ Error::Bug(_)) => return Err(bug.into()),
                Err(_) => outcome.failures += 1,
            }
            let stats = cache.stats();
            if stats.entries > ENTRIES || stats.weight.bytes() > BYTES {
                return Err(format!("a bound is broken: {stats:?}").into());
            }
            if call == calls / 8 {
                room.stream.synchronize()?;
                executor.device().release_retired();
                memory[0].store(resident(), Ordering::Relaxed);
                memory[1].store(executor.device().memory_free()?, Ordering::Relaxed);
            }
        }
    };
    let outcomes: Vec<std::result::Result<Outcome, String>> = std::thread::scope(|scope| {
        let (work, folder) = (&work, folder.as_path());
        let threads: Vec<_> = (1..=THREADS).map(|seed| scope.spawn(move || work(seed, folder).map_err(|e| e.to_string()))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))).collect()
    });
    std::fs::remove_dir_all(&folder)?;
    let (mut worst, mut failures) = (0f64, 0);
    for outcome in outcomes {
        let Outcome { worst: own, failures: more } = outcome?;
        worst = worst.max(own);
        failures += more;
    }
    executor.device().synchronize()?;
    let (waiting, stats) = (executor.device().release_retired(), cache.stats());
    let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
    println!(
        "{calls} calls over {shapes} shapes on {THREADS} threads in {:.0} s: {} hits, {} builds, {} of them through files, {} after damaged \
         files, {failures} calls failed ({} failures injected), {} evictions, {} entries of {ENTRIES}, {:.1} MiB of {}",
        start.elapsed().as_secs_f64(),
        stats.hits,
        count(&counts.built),
        count(&counts.from_file),
        count(&counts.damaged),
        count(&counts.failed),
        stats.evictions,
        stats.entries,
        stats.weight.bytes() as f64 / f64::from(1 << 20),
        BYTES >> 20,
    );
    println!(
        "{} results compared with the CPU executor's, off by at most {worst:.4}; {waiting} retired plans still wait",
        count(&counts.compared)
    );
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "resident {} MiB after an eighth, {} at the end; device memory free {} MiB, {}",
        mib(count(&memory[0])),
        mib(resident()),
        mib(count(&memory[1])),
        mib(executor.device().memory_free()?)
    );
    if worst > 0.03 || count(&counts.compared) == 0 || waiting > 0 || failures < count(&counts.failed) {
        return Err("the soak found something wrong".into());
    }
    Ok(())
}
