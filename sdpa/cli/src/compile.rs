//! `compile`: plans for a device that need not be there, into a plan file.

mod problems;

use crate::args::{CompileArgs, PlaceArgs};
use crate::exit::{Answer, Failure, Line, Mistakes, Outcome};
use crate::file;
use crate::progress::Progress;
use crate::save::Destination;
use crate::table::{Table, list};
use cudnn_graph::{DeviceProfile, Library, Search, Target};
use problems::Named;
use sdpa::cache::CacheKey;
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::planfile::{self, Header, PlanFile, PlanFileError, Record};
use sdpa::cudnn::{plan, portable};
use serde::Serialize;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What became of one pass.
#[derive(Serialize)]
struct Compiled {
    problem: String,
    pass: &'static str,
    plan: String,
    engine: Option<String>,
    workspace_bytes: Option<u64>,
    bytes: Option<usize>,
    ms: u64,
    /// Why there is no plan.
    declined: Option<String>,
}

#[derive(Serialize)]
struct Report {
    output: PathBuf,
    device: String,
    cudnn: String,
    plans: usize,
    declined: usize,
    compiled: Vec<Compiled>,
}

/// Larger files hold something else than the description of a device.
const LARGEST_PROFILE: u64 = 1 << 20;

/// A device as a file describes it.
pub(crate) fn profile(path: &Path) -> Result<DeviceProfile, String> {
    let json = file::text(path, LARGEST_PROFILE)?;
    DeviceProfile::from_json(&json).map_err(|e| e.to_string())
}

/// A device by name, or the file that describes one.
pub(crate) fn device(text: &str) -> Result<DeviceProfile, String> {
    if DeviceProfile::NAMES.contains(&text) {
        return DeviceProfile::named(text).map_err(|e| e.to_string());
    }
    let path = Path::new(text);
    if !path.exists() {
        return Err(format!("{text:?} is none of {}, and no file", list(&DeviceProfile::NAMES)));
    }
    profile(path).map_err(|e| format!("{text}: {e}"))
}

/// Which cuDNN: a path, or a version that the one found must have.
pub(crate) struct Wanted {
    pub(crate) library: Option<PathBuf>,
    pub(crate) version: Option<String>,
}

impl Wanted {
    pub(crate) fn read(text: Option<&str>) -> Wanted {
        let version =
            |text: &str| !text.is_empty() && text.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
        match text {
            Some(text) if version(text) => Wanted { library: None, version: Some(text.to_owned()) },
            Some(text) => Wanted { library: Some(text.into()), version: None },
            None => Wanted { library: None, version: None },
        }
    }

    pub(crate) fn load(&self, driver: Option<&Path>) -> Result<&'static Library, Failure> {
        let failure = |message: String| Failure::Executor(vec![Line::new("cudnn", message)]);
        let search = Search { library: self.library.clone(), driver: driver.map(Path::to_owned).or_else(stand_in) };
        let library = Library::load(&search).map_err(|e| failure(e.to_string()))?;
        let found = library.version().to_string();
        match &self.version {
            Some(wanted) if found != *wanted && !found.starts_with(&format!("{wanted}.")) => {
                Err(failure(format!("--cudnn {wanted}: the one found is {found}, {}", library.path().display())))
            }
            Some(_) | None => Ok(library),
        }
    }
}

/// The stand-in driver beside this program, on a machine that has no other.
fn stand_in() -> Option<PathBuf> {
    if std::env::var_os("CUDNN_GRAPH_DRIVER").is_some() || cudnn_graph::Driver::load(None).is_ok() {
        return None;
    }
    let beside = std::env::current_exe().ok()?.with_file_name("libnull_driver.so");
    beside.exists().then_some(beside)
}

/// Whether a file may be added to: there is none, or one for this device and version that can be read. Another's plans are not thrown
/// away, and neither is what is left in a damaged file.
fn takes(path: &Path, header: &Header) -> Result<(), String> {
    let refused = |why: &dyn Display| Err(format!("{why}; name another file, or remove this one"));
    match PlanFile::open(path) {
        Ok(there) => match there.header().mismatch(header) {
            Some(mismatch) => refused(&mismatch),
            None => there.entries().find_map(|entry| there.read(&entry.key).err()).map_or(Ok(()), |e| refused(&e)),
        },
        Err(PlanFileError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.is_replaceable() => refused(&e),
        Err(e) => Err(e.to_string()),
    }
}

/// Runs the command.
pub(crate) fn run(args: &CompileArgs, json: bool) -> Result<Answer, Failure> {
    let mut mistakes = Mistakes::default();
    let profile = mistakes.take("--device", device(&args.device));
    let problems = problems::read(&args.problems, &mut mistakes);
    let destination = mistakes.take("--out", Destination::new(&args.out, Some(&args.problems)));
    // Beside it will lie the file of its lock.
    let mut lock = args.out.clone().into_os_string();
    lock.push(".lock");
    if let (Some(_), Err(e)) = (destination, std::fs::metadata(lock))
        && e.kind() == std::io::ErrorKind::InvalidFilename
    {
        mistakes.add("--out", format!("cannot be written: with .lock at its end, {e}"));
    }
    let wanted = Wanted::read(args.cudnn.as_deref());
    PlaceArgs { cudnn: wanted.library.clone(), driver: args.driver.clone() }.check(&mut mistakes);
    let (profile, problems) = mistakes.finish(profile.zip(problems))?;
    let library = wanted.load(args.driver.as_deref())?;
    let header = portable::header(library, &profile);
    takes(&args.out, &header).map_err(|why| Failure::Mistakes(vec![Line::new(format!("--out {}", args.out.display()), why)]))?;
    let target = Target::Profile(&profile);
    let (mut compiled, mut records) = (Vec::new(), Vec::new());
    let step = Progress::new(json).bar("compiling", problems.len() as u64);
    for Named { problem, job } in problems {
        let start = Instant::now();
        let (result, record) = match make(library, &target, &job) {
            Ok((planned, record)) => (Ok(planned), Some(record)),
            Err(sdpa::Error::Unsupported(why)) => (Err(why.to_string()), None),
            Err(other) => return Err(Failure::environment(problem, other)),
        };
        let ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (engine, workspace_bytes) = result.as_ref().map_or((None, None), |(engine, bytes)| (Some(engine.clone()), Some(*bytes)));
        let bytes = record.as_ref().map(|record| record.payload.len());
        compiled.push(Compiled {
            problem,
            pass: job.name(),
            plan: job.label(),
            engine,
            workspace_bytes,
            bytes,
            ms,
            declined: result.err(),
        });
        records.extend(record);
        step.advance(1);
    }
    drop(step);
    let plans = records.len();
    if plans > 0 {
        planfile::add(&args.out, &header, records).map_err(|e| Failure::environment("--out", e))?;
    }
    let report = Report {
        output: args.out.clone(),
        device: profile.name().to_owned(),
        cudnn: library.version().to_string(),
        plans,
        declined: compiled.len() - plans,
        compiled,
    };
    let outcome = if report.declined == 0 { Outcome::Good } else { Outcome::NoExecutor };
    Answer::new(json, &report, || report.text(), outcome)
}

type Made = ((String, u64), Record);

fn make(library: &'static Library, target: &Target<'_>, job: &Job) -> Result<Made, sdpa::Error> {
    let options = PlanOptions::default();
    let planned = plan::build(library, target, job, &options)?;
    let record = Record { key: portable::key(library, target, job, &options)?, label: job.label(), payload: planned.to_bytes()? };
    Ok(((planned.engine.clone(), planned.workspace_bytes()), record))
}

impl Report {
    fn text(&self) -> String {
        let mut table = Table::default();
        let output = if self.plans > 0 { self.output.display().to_string() } else { "nothing was written".to_owned() };
        table.row("output", output);
        table.row("device", format!("{}, cuDNN {}", self.device, self.cudnn));
        table.row("plans", format!("{}, {} declined", self.plans, self.declined));
        for c in &self.compiled {
            let what = match (&c.engine, &c.declined) {
                (Some(engine), _) => format!(
                    "{} in {} ms, {} kB, workspace {} bytes",
                    engine,
                    c.ms,
                    c.bytes.unwrap_or(0) / 1000,
                    c.workspace_bytes.unwrap_or(0)
                ),
                (None, why) => format!("declined: {}", why.as_deref().unwrap_or("no reason")),
            };
            table.row(&c.problem, format!("{}: {what}", c.plan));
        }
        table.render()
    }
}
