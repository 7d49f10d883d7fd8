//! `compile`: writes cuDNN plans or native CUDA kernels to a file, for a device that need not be present.

mod cudnn;
mod kernels;
mod problems;

use crate::args::CompileArgs;
use crate::exit::{Answer, Failure, Line, Mistakes, Outcome};
use crate::file;
use crate::progress::Progress;
use crate::save::Destination;
use crate::table::{Table, list};
use cudnn_graph::DeviceProfile;
use problems::Named;
use sdpa::ExecutorName;
use sdpa::cache::CacheKey;
use sdpa::cudnn::lower::Job;
use serde::Serialize;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(crate) use cudnn::Wanted;

/// The result for one pass.
#[derive(Serialize)]
struct Compiled {
    problem: String,
    pass: &'static str,
    plan: String,
    #[serde(flatten)]
    made: Option<Made>,
    ms: u64,
    /// The reason why there is no plan.
    unsupported: Option<String>,
}

/// The plan or kernels of one pass.
#[derive(Serialize)]
struct Made {
    engine: String,
    /// `None` if it is not known before the plan is loaded.
    workspace_bytes: Option<u64>,
    bytes: usize,
}

#[derive(Serialize)]
struct Report {
    output: PathBuf,
    executor: &'static str,
    device: String,
    /// The compiler with its version.
    compiler: String,
    plans: usize,
    unsupported: usize,
    compiled: Vec<Compiled>,
}

/// A larger file is not the description of a device.
const LARGEST_PROFILE: u64 = 1 << 20;

/// Reads the description of a device from a file.
pub(crate) fn profile(path: &Path) -> Result<DeviceProfile, String> {
    let json = file::text(path, LARGEST_PROFILE)?;
    DeviceProfile::from_json(&json).map_err(|e| e.to_string())
}

/// Returns the device with this name, or the device that the file with this path describes.
pub(crate) fn device(text: &str) -> Result<DeviceProfile, String> {
    if DeviceProfile::NAMES.contains(&text) {
        return DeviceProfile::named(text).map_err(|e| e.to_string());
    }
    let path = Path::new(text);
    if !path.exists() {
        return Err(format!("got {text:?}, expected one of {}, or the file of a device profile", list(&DeviceProfile::NAMES)));
    }
    profile(path).map_err(|e| format!("{text}: {e}"))
}

/// Compiles plans or kernels, and holds them until all are complete.
trait Maker {
    /// The executor that runs them.
    const EXECUTOR: ExecutorName;

    /// Compiles one pass.
    ///
    /// # Errors
    /// [`sdpa::Error::Unsupported`] if the pass is unsupported; errors of the environment.
    fn make(&mut self, job: &Job) -> Result<Made, sdpa::Error>;

    /// The compiler with its version.
    fn compiler(&self) -> String;

    /// Writes everything that was compiled.
    ///
    /// # Errors
    /// The reason why the file cannot be written.
    fn write(self, path: &Path) -> Result<(), String>;
}

/// The mistake for a file that cannot be extended. Its contents are never discarded.
fn untaken(path: &Path, why: &dyn Display) -> Failure {
    let why = format!("{why}; name another file, or remove this one");
    Failure::Mistakes(vec![Line::new(format!("--out {}", path.display()), why)])
}

/// Runs the command `compile` and returns its output.
pub(crate) fn run(args: &CompileArgs, json: bool) -> Result<Answer, Failure> {
    let mut mistakes = Mistakes::default();
    let profile = mistakes.take("--device", device(&args.device));
    let problems = problems::read(&args.problems, &mut mistakes);
    let destination = mistakes.take("--out", Destination::new(&args.out, Some(&args.problems)));
    // Writing creates a lock file next to the output file, so check that its longer name is valid too.
    let mut lock = args.out.clone().into_os_string();
    lock.push(".lock");
    if let (Some(_), Err(e)) = (destination, std::fs::metadata(lock))
        && e.kind() == std::io::ErrorKind::InvalidFilename
    {
        mistakes.add("--out", format!("cannot create the lock file {}.lock: {e}; choose a shorter file name", args.out.display()));
    }
    let kernels = args.executor.as_deref() == Some(ExecutorName::CUDA.name());
    let (given, rule): (&[(&str, bool)], _) = match kernels {
        true => (
            &[("--cudnn", args.cudnn.is_some()), ("--driver", args.driver.is_some())],
            "has no effect with --executor cuda, whose compiler is NVRTC; use --nvrtc",
        ),
        false => (&[("--nvrtc", args.nvrtc.is_some())], "has no effect without --executor cuda: cuDNN compiles the plans; use --cudnn"),
    };
    for (option, _) in given.iter().filter(|(_, given)| *given) {
        mistakes.add(*option, rule);
    }
    match kernels {
        true => kernels::check(args, &mut mistakes),
        false => cudnn::check(args, &mut mistakes),
    }
    let (profile, problems) = mistakes.finish(profile.zip(problems))?;
    match kernels {
        true => all(kernels::Kernels::new(args, &profile)?, args, &profile, problems, json),
        false => all(cudnn::Plans::new(args, &profile)?, args, &profile, problems, json),
    }
}

/// Compiles each problem, and writes the results.
fn all<M: Maker>(mut maker: M, args: &CompileArgs, profile: &DeviceProfile, problems: Vec<Named>, json: bool) -> Result<Answer, Failure> {
    let mut compiled = Vec::new();
    let step = Progress::new(json).bar("compiling", problems.len() as u64);
    for Named { problem, job } in problems {
        let start = Instant::now();
        let (made, unsupported) = match maker.make(&job) {
            Ok(made) => (Some(made), None),
            Err(sdpa::Error::Unsupported(why)) => (None, Some(why.to_string())),
            Err(other) => return Err(Failure::environment(problem, other)),
        };
        let ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        compiled.push(Compiled { problem, pass: job.name(), plan: job.label(), made, ms, unsupported });
        step.advance(1);
    }
    drop(step);
    let plans = compiled.iter().filter(|c| c.made.is_some()).count();
    let compiler = maker.compiler();
    if plans > 0 {
        maker.write(&args.out).map_err(|why| Failure::environment("--out", why))?;
    }
    let report = Report {
        output: args.out.clone(),
        executor: M::EXECUTOR.name(),
        device: profile.name().to_owned(),
        compiler,
        plans,
        unsupported: compiled.len() - plans,
        compiled,
    };
    let outcome = if report.unsupported == 0 { Outcome::Good } else { Outcome::NoExecutor };
    Answer::new(json, &report, || report.text(), outcome)
}

impl Report {
    fn text(&self) -> String {
        let mut table = Table::default();
        let output = if self.plans > 0 { self.output.display().to_string() } else { "nothing was written".to_owned() };
        table.row("output", output);
        table.row("device", format!("{}, {}", self.device, self.compiler));
        table.row("plans", format!("{}, {} unsupported", self.plans, self.unsupported));
        for c in &self.compiled {
            let what = match (&c.made, &c.unsupported) {
                (Some(Made { engine, workspace_bytes, bytes }), _) => {
                    let workspace = workspace_bytes.map_or_else(String::new, |bytes| format!(", workspace {bytes} bytes"));
                    format!("{engine} in {} ms, {} kB{workspace}", c.ms, bytes / 1000)
                }
                (None, why) => format!("unsupported: {}", why.as_deref().unwrap_or("no reason")),
            };
            table.row(&c.problem, format!("{}: {what}", c.plan));
        }
        table.render()
    }
}
