//! Time of the first call in a fresh process: `device first [PROBLEMS [small]]`, of native kernels with an empty and with a filled kernel cache on disk, and of
//! cuDNN. A fresh process prepares one problem, executes it and waits for it, each time. The processes turn CUDA's caches off (`CUDA_CACHE_DISABLE`): NVRTC
//! has had one on disk since CUDA 12.9, which would answer in place of the compiler. `small` divides lengths by 32, for the emulation.
#![allow(unsafe_code)]

use crate::cuda_speed::{Pass, ready};
use crate::setup::{Result, median};
use crate::time::{Question, asked};
use sdpa::cuda::kernel::Origin;
use sdpa::cuda::{CudaExecutor, CudaOptions, KernelCache};
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::nvidia::NvidiaExecutor;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Number of processes per problem and executor; the median is printed.
const TIMES: usize = 3;
/// Prefix of the line in which a process prints its times.
const ANSWER: &str = "first: ";

/// A problem: its name; batch, query heads, key heads, queries, keys, dim, dim of values; type; score_mod; mask; the rest.
struct Row(&'static str, [i64; 7], &'static str, &'static str, &'static str, Kind);

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Forward,
    Backward,
    /// As many documents as batch entries, of these lengths or shorter.
    Packed,
    PackedBackward,
    /// Keys are in pages of 16.
    Paged,
    Sink,
}

use Kind::{Backward, Forward, Packed, PackedBackward, Paged, Sink};

const ROWS: [Row; 20] = [
    Row("causal", [2, 16, 4, 2048, 2048, 128, 128], "bf16", "", "causal", Forward),
    Row("causal, f16", [2, 16, 4, 2048, 2048, 128, 128], "f16", "", "causal", Forward),
    Row("no mask, dim 64", [2, 16, 16, 2048, 2048, 64, 64], "bf16", "", "", Forward),
    Row("causal, dim 256", [1, 16, 16, 2048, 2048, 256, 256], "bf16", "", "causal", Forward),
    Row("causal, dims 192 and 128", [1, 16, 16, 2048, 2048, 192, 128], "bf16", "", "causal", Forward),
    Row("causal, softcap", [2, 16, 4, 2048, 2048, 128, 128], "bf16", "softcap:30", "causal", Forward),
    Row("causal, ALiBi", [2, 16, 16, 2048, 2048, 128, 128], "bf16", "alibi", "causal", Forward),
    Row("window, dim 64, f16", [2, 16, 4, 2048, 2048, 64, 64], "f16", "", "window:256,0", Forward),
    Row("prefix", [2, 16, 4, 2048, 2048, 128, 128], "bf16", "", "prefix-lm:512", Forward),
    Row("causal, dilated", [2, 16, 4, 2048, 2048, 128, 128], "bf16", "", "k % 4 == q % 4 & k <= q", Forward),
    Row("causal, sink, f16", [2, 16, 4, 2048, 2048, 128, 128], "f16", "", "causal", Sink),
    Row("packed, causal", [4, 16, 4, 2048, 2048, 128, 128], "bf16", "", "causal", Packed),
    Row("decode", [16, 32, 8, 1, 8192, 128, 128], "bf16", "", "", Forward),
    Row("decode, paged", [16, 32, 8, 1, 8192, 128, 128], "bf16", "", "padding", Paged),
    Row("backward, dim 64", [2, 16, 16, 2048, 2048, 64, 64], "bf16", "", "", Backward),
    Row("backward, causal", [2, 16, 4, 2048, 2048, 128, 128], "bf16", "", "causal", Backward),
    Row("backward, causal, f16", [2, 16, 4, 2048, 2048, 128, 128], "f16", "", "causal", Backward),
    Row("backward, causal, dim 256", [1, 16, 16, 2048, 2048, 256, 256], "bf16", "", "causal", Backward),
    Row("backward, causal, softcap", [2, 16, 4, 2048, 2048, 128, 128], "bf16", "softcap:30", "causal", Backward),
    Row("backward, packed, causal", [4, 16, 4, 2048, 2048, 128, 128], "bf16", "", "causal", PackedBackward),
];

impl Row {
    /// As `device time` is asked.
    fn question(&self, divisor: i64) -> serde_json::Value {
        let Row(_, [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v], dtype, score_mod, mask, kind) = self;
        let [seq_q, seq_kv] = [seq_q, seq_kv].map(|seq| (seq / divisor).max(1));
        let texts = |text: &&str| if text.is_empty() { Vec::new() } else { vec![(*text).to_owned()] };
        let documents = matches!(kind, Packed | PackedBackward).then(|| (0..*batch).map(|n| seq_q - n * seq_q / 8).collect::<Vec<_>>());
        json!({
            "shape": { "batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq_q, "seq_kv": seq_kv, "dim_qk": dim_qk, "dim_v": dim_v },
            "dtype": dtype,
            "layout": "bshd",
            "score_mod": texts(score_mod),
            "mask": texts(mask),
            "backward": matches!(kind, Backward | PackedBackward),
            "documents": documents,
            "paged": (*kind == Paged).then_some(16),
            "sink": *kind == Sink,
        })
    }
}

/// The executor, and the state of its kernel cache.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Native kernels with an empty kernel cache on disk.
    Cold,
    /// Native kernels, loaded from the kernel cache on disk.
    Warm,
    Cudnn,
}

impl Way {
    const ALL: [Way; 3] = [Way::Cold, Way::Warm, Way::Cudnn];

    fn name(self) -> &'static str {
        match self {
            Way::Cold => "cold",
            Way::Warm => "warm",
            Way::Cudnn => "cudnn",
        }
    }
}

/// Times of one process, in milliseconds.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// The device, and the version of NVRTC or cuDNN.
    on: String,
    /// Loading the driver and the libraries, creating the context and the executor: once per process.
    setup: f64,
    /// Preparing the pass, which compiles or loads its kernels.
    prepare: f64,
    /// Submitting the call and synchronizing the stream.
    execute: f64,
    engine: String,
}

impl Answer {
    fn first(&self) -> f64 {
        self.prepare + self.execute
    }
}

/// Measures one problem in this process, and prints the answer.
///
/// # Errors
/// An executor that is not there or does not take the problem; a kernel that came from elsewhere than is said.
pub(crate) fn worker(way: &str, folder: &str, question: &str) -> Result<()> {
    let way = Way::ALL.into_iter().find(|known| known.name() == way).ok_or("a way is cold, warm or cudnn")?;
    let question: Question = serde_json::from_str(question)?;
    let start = Instant::now();
    let answer = if way == Way::Cudnn {
        let cudnn = CudnnExecutor::new(CudnnOptions::default())?;
        measured(&cudnn, format!("{}, cuDNN {}", cudnn.device().name(), cudnn.library().version()), &question, start)?
    } else {
        let cuda = CudaExecutor::new(CudaOptions::default().with_kernel_cache(KernelCache::new(folder)))?;
        let [major, minor] = cuda.nvrtc().version();
        let answer = measured(&cuda, format!("{}, NVRTC {major}.{minor}", cuda.device().name()), &question, start)?;
        let wanted = if way == Way::Cold { Origin::Compiled } else { Origin::Cache };
        let origins = cuda.origins();
        if origins.is_empty() || origins.iter().any(|origin| *origin != wanted) {
            return Err(format!("kernels came from {origins:?}, all were to be {wanted:?}").into());
        }
        answer
    };
    println!("{ANSWER}{}", serde_json::to_string(&answer)?);
    Ok(())
}

fn measured(executor: &impl NvidiaExecutor, on: String, question: &Question, start: Instant) -> Result<Answer> {
    let milliseconds = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
    let stream = executor.device().stream()?;
    let setup = milliseconds(start);
    let backward = asked(question)?;
    let start = Instant::now();
    let (job, pass) = if question.backward {
        let problem = backward.validate()?;
        let pass = executor.prepare_device_backward(&problem)?;
        (Job::from(problem), pass)
    } else {
        let problem = backward.forward.validate()?;
        let pass = executor.prepare_device(&problem)?;
        (Job::from(problem), pass)
    };
    let prepare = milliseconds(start);
    // Allocating operands is not measured. A backward pass gets random `o` and `stats`: its time does not depend on them.
    let pass: &Pass = &*pass;
    let memory = ready(&stream, &job, &[pass], None, question.documents.as_deref())?;
    let (params, gradients, whole) = (memory.params(), memory.gradients(), Some(memory.workspace()));
    let call = match &job {
        Job::Forward(_) => (&memory.forward_call(&params, None, whole)).into(),
        Job::Backward(_) => (&memory.backward_call(&params, &gradients, None)?).into(),
    };
    stream.synchronize()?;
    let start = Instant::now();
    // SAFETY: the memory is whole buffers of this device that outlive the call; the stream is waited for here.
    unsafe { pass.submit(&stream, &call) }?;
    stream.synchronize()?;
    Ok(Answer { on, setup, prepare, execute: milliseconds(start), engine: pass.engine() })
}

/// Starts a process that measures one problem, and returns its times.
fn process(way: Way, folder: &Path, question: &serde_json::Value) -> std::result::Result<Answer, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    command.args(["first-worker", way.name()]).arg(folder).arg(question.to_string()).env("CUDA_CACHE_DISABLE", "1");
    let output = command.stderr(Stdio::inherit()).output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.lines().find_map(|line| line.strip_prefix(ANSWER)) {
        Some(answer) => serde_json::from_str(answer).map_err(|e| e.to_string()),
        None => Err(format!("{} ({})", said.trim().trim_start_matches("FAILED: ").replace('\n', "; "), output.status)),
    }
}

/// Calls `run` with the path of a folder that does not exist, and deletes that folder afterwards.
fn with_folder<T>(number: usize, run: impl FnOnce(&Path) -> T) -> T {
    let folder: PathBuf = std::env::temp_dir().join(format!("sdpa-first-{}-{number}", std::process::id()));
    let result = run(&folder);
    let _ = std::fs::remove_dir_all(&folder);
    result
}

/// The times of each way, or the reason why there are none.
type Answers = [std::result::Result<Vec<Answer>, String>; 3];

fn answers(row: &Row, divisor: i64, times: usize) -> Answers {
    let question = row.question(divisor);
    let mut all: Answers = [(); 3].map(|()| Ok(Vec::new()));
    for n in 0..times {
        with_folder(n, |folder| {
            // A way that failed once would fail again.
            for (way, answers) in Way::ALL.into_iter().zip(&mut all).filter(|(_, answers)| answers.is_ok()) {
                match (process(way, folder, &question), &mut *answers) {
                    (Ok(answer), Ok(answers)) => answers.push(answer),
                    (Err(why), answers) => *answers = Err(why),
                    (Ok(_), Err(_)) => {}
                }
            }
        });
    }
    all
}

/// Median milliseconds per way; `None` for a way that failed.
type Medians = [Option<f64>; 3];

/// Returns the median of one part of the times, per way.
fn medians(answers: &Answers, part: impl Fn(&Answer) -> f64) -> Medians {
    answers.each_ref().map(|answers| answers.as_ref().ok().map(|answers| median(answers.iter().map(&part).collect())))
}

fn cell(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Measures the first `problems` rows of the table, and prints a line for each, medians and ratios.
///
/// # Errors
/// Native kernels do not run one of them.
pub(crate) fn run(problems: usize, small: bool) -> Result<()> {
    let (divisor, times) = if small { (32, 1) } else { (1, TIMES) };
    let rows = &ROWS[..problems.min(ROWS.len())];
    let Some(first) = rows.first() else { return Ok(()) };
    // The first process also reads each library from the disk, so its times are not used.
    for answers in answers(first, divisor, 1) {
        println!("{}", answers.map_or_else(|why| why, |answers| answers.iter().map(|answer| answer.on.clone()).collect()));
    }
    println!(
        "milliseconds of the first call (prepare, execute, wait) in a fresh process, medians of {times}; native kernels with an empty and a filled cache on disk, and cuDNN"
    );
    println!("{:28} {:>9} {:>9} {:>9} {:>11} {:>11}   engines", "problem", "cold", "warm", "cuDNN", "cold/cuDNN", "warm/cuDNN");
    let (mut firsts, mut setups, mut failed): (Vec<Medians>, Vec<Medians>, usize) = (Vec::new(), Vec::new(), 0);
    for row in rows {
        let answers = answers(row, divisor, times);
        let [cold, warm, cudnn] = medians(&answers, Answer::first);
        let ratio = |own: Option<f64>| own.zip(cudnn).map(|(own, cudnn)| own / cudnn);
        let [of_cold, of_warm] = [cold, warm].map(ratio);
        let engine =
            |n: usize| answers[n].as_ref().map_or_else(Clone::clone, |of| of.first().map_or_else(String::new, |of| of.engine.clone()));
        println!(
            "{:28} {:>9} {:>9} {:>9} {:>11} {:>11}   {}; {}",
            row.0,
            cell(cold, 1),
            cell(warm, 1),
            cell(cudnn, 1),
            cell(of_cold, 2),
            cell(of_warm, 2),
            engine(1),
            engine(2)
        );
        failed += usize::from(cold.is_none() || warm.is_none());
        firsts.push([cold, warm, cudnn]);
        setups.push(medians(&answers, |answer| answer.setup));
    }
    let over = |all: &[Medians], n: usize| {
        let there: Vec<f64> = all.iter().filter_map(|of| of[n]).collect();
        (!there.is_empty()).then(|| median(there))
    };
    let told = |name: &str, all: &[Medians]| {
        let [cold, warm, cudnn] = [0, 1, 2].map(|n| cell(over(all, n), 1));
        println!("{name:28} {cold:>9} {warm:>9} {cudnn:>9}");
    };
    told("median", &firsts);
    // Only problems that both executors ran have a ratio.
    let ratios = |n: usize| {
        let both: Vec<f64> = firsts.iter().filter_map(|of| Some(of[n]? / of[2]?)).collect();
        (both.len(), (!both.is_empty()).then(|| median(both)))
    };
    let ((count, cold), (_, warm)) = (ratios(0), ratios(1));
    println!("native / cuDNN, median of {count}: cold {}, warm {}", cell(cold, 2), cell(warm, 2));
    told("setup before it, median", &setups);
    if failed > 0 { Err(format!("native kernels did not run {failed} of {} problems", rows.len()).into()) } else { Ok(()) }
}
