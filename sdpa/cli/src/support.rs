//! `support`: reports which executors support a problem on which devices. If none does, it reports the reasons and the changes that would help.

mod changes;
mod recorded;

use crate::args::{PlaceArgs, SupportArgs};
use crate::compile::{Wanted as Named, device};
use crate::exit::{Answer, Failure, Mistakes, Outcome};
use crate::inspect::ASSUMED;
use crate::progress::Progress;
use crate::request::{Request, Wanted};
use crate::table::Table;
use cudnn_graph::{DeviceProfile, Library, Target, Version};
use recorded::Recorded;
use sdpa::cache::CacheKey;
use sdpa::cpu::CpuExecutor;
use sdpa::cuda;
use sdpa::cudnn::cost;
use sdpa::cudnn::lower::{self, Job};
use sdpa::cudnn::unsupported;
use sdpa::cudnn::{Pieces, PlanOptions, plan};
use sdpa::metal::MetalExecutor;
use sdpa::{Error, Executor, Reason, Unsupported};
use serde::Serialize;

/// The source of answers about cuDNN: the library, or the known rules of a version that is not installed.
enum Asked {
    Library(&'static Library),
    Rules(Version),
}

impl Asked {
    fn version(&self) -> Version {
        match self {
            Asked::Library(library) => library.version(),
            Asked::Rules(version) => *version,
        }
    }

    /// Returns the form in which a pass is supported.
    fn form(&self, job: &Job, profile: &DeviceProfile) -> Result<&'static str, Vec<Reason>> {
        match self {
            Asked::Library(library) => match plan::supports(library, &Target::Profile(profile), job, &PlanOptions::default()) {
                Ok(form) => Ok(form.name()),
                Err(e) => Err(reasons(e)),
            },
            Asked::Rules(version) => {
                let known = unsupported::reasons(job, *version, profile.sm(), job.deterministic());
                if !known.is_empty() {
                    return Err(known);
                }
                let mut refused = Vec::new();
                for &form in lower::forms(job, *version) {
                    match plan::schedule(job, form, *version, Pieces::default()) {
                        Ok(_) => return Ok(form.name()),
                        Err(e) => refused.extend(reasons(e)),
                    }
                }
                Err(refused)
            }
        }
    }
}

/// Returns the reasons of an error; a failure of the environment becomes a reason too.
fn reasons(error: sdpa::cudnn::Error) -> Vec<Reason> {
    let error = Error::from(error);
    if let Error::Unsupported(unsupported) = error { unsupported.reasons } else { vec![Reason::Absent(error.to_string())] }
}

/// Support of a problem on one device.
#[derive(Serialize)]
struct OnDevice {
    device: String,
    sm: u32,
    /// `None` if it is unsupported.
    form: Option<&'static str>,
    reasons: Vec<String>,
    /// Supported alternatives: after one change, else after two.
    allowed: Vec<String>,
    /// Recorded answers of the library, if only rules were checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<Recorded>,
}

/// Support of the problem by native CUDA kernels on one device.
#[derive(Serialize)]
struct Kernels {
    device: String,
    /// The tile configuration; `None` if the problem is unsupported.
    tile: Option<String>,
    reasons: Vec<String>,
}

impl Kernels {
    fn of(job: &Job, name: &str, profile: &DeviceProfile) -> Kernels {
        let made = cuda::Target::new(profile.sm(), profile.sm_count()).kernels(job);
        let (tile, reasons) = match made {
            Ok(kernels) => (kernels.into_iter().next().map(|kernel| kernel.tile), Vec::new()),
            Err(why) => (None, why.reasons.iter().map(ToString::to_string).collect()),
        };
        Kernels { device: name.to_owned(), tile, reasons }
    }

    fn text(&self) -> String {
        match &self.tile {
            Some(tile) => format!("{}: supported, {tile}", self.device),
            None => format!("{}: unsupported: {}", self.device, self.reasons.join("; ")),
        }
    }
}

/// Support of a problem on the CPU or on Metal.
#[derive(Serialize)]
struct Elsewhere {
    supported: bool,
    reasons: Vec<String>,
}

impl Elsewhere {
    /// A missing device on this machine is not a reason against a problem.
    fn new(said: Result<(), Unsupported>) -> Elsewhere {
        let of_problem = |reason: &Reason| match reason {
            Reason::Absent(_) | Reason::Failed(_) => false,
            Reason::Limit { .. } | Reason::KnownBad { .. } | Reason::Refused { .. } | _ => true,
        };
        let reasons: Vec<Reason> = said.err().map_or_else(Vec::new, |e| e.reasons).into_iter().filter(of_problem).collect();
        Elsewhere { supported: reasons.is_empty(), reasons: reasons.iter().map(ToString::to_string).collect() }
    }

    fn of(executor: &dyn Executor, job: &Job) -> Elsewhere {
        Elsewhere::new(match job {
            Job::Forward(problem) => executor.supports(problem),
            Job::Backward(problem) => executor.supports_backward(problem),
        })
    }

    fn text(&self) -> String {
        if self.supported { "supported".to_owned() } else { format!("unsupported: {}", self.reasons.join("\n")) }
    }
}

#[derive(Serialize)]
struct Report {
    problem: String,
    /// The version of the library, or of the rules.
    cudnn: String,
    /// `None` if rules were checked, not engines.
    library: Option<String>,
    devices: Vec<OnDevice>,
    /// Notes on the cost of masks on cuDNN.
    notes: Vec<String>,
    /// Native CUDA kernels, on the same devices.
    cuda: Vec<Kernels>,
    cpu: Elsewhere,
    metal: Elsewhere,
}

/// Runs the command `support` and returns its output.
pub(crate) fn run(args: &SupportArgs, json: bool) -> Result<Answer, Failure> {
    let mut mistakes = Mistakes::default();
    let request = Request::read(&args.problem, &Wanted { gradient: Some(&args.backward), ..Wanted::default() }, &mut mistakes);
    let names: Vec<&str> = match &args.device[..] {
        [] => DeviceProfile::NAMES.to_vec(),
        given => given.iter().map(String::as_str).collect(),
    };
    let profiles: Vec<Option<DeviceProfile>> = names.iter().map(|name| mistakes.take("--device", device(name))).collect();
    let wanted = Named::read(args.cudnn.as_deref());
    PlaceArgs { cudnn: wanted.library.clone(), driver: args.driver.clone() }.check(&mut mistakes);
    let rules = wanted.version.as_deref().map(|text| mistakes.take("--cudnn", crate::names::runtime(text)));
    let profiles: Option<Vec<DeviceProfile>> = profiles.into_iter().collect();
    let (request, profiles) = mistakes.finish(request.zip(profiles))?;
    let asked = match (wanted.load(args.driver.as_deref()), rules.flatten()) {
        (Ok(library), _) => Asked::Library(library),
        (Err(_), Some(version)) => Asked::Rules(version),
        (Err(_), None) if args.cudnn.is_none() => Asked::Rules(ASSUMED),
        (Err(failure), None) => return Err(failure),
    };
    let job = request.job();
    let step = Progress::new(json).bar("asking", profiles.len() as u64);
    let devices = names.iter().zip(&profiles).map(|(name, profile)| {
        let answer = on_device(&asked, &job, &request, name, profile);
        step.advance(1);
        answer
    });
    let devices = devices.collect();
    drop(step);
    let report = Report {
        problem: job.label(),
        cudnn: asked.version().to_string(),
        library: match &asked {
            Asked::Library(library) => Some(library.path().display().to_string()),
            Asked::Rules(_) => None,
        },
        devices,
        notes: cost::notes(&job, Pieces::default()),
        cuda: names.iter().zip(&profiles).map(|(name, profile)| Kernels::of(&job, name, profile)).collect(),
        cpu: Elsewhere::of(&CpuExecutor::default(), &job),
        metal: Elsewhere::of(&MetalExecutor::new(), &job),
    };
    Answer::new(json, &report, || report.text(), Outcome::Good)
}

fn on_device(asked: &Asked, job: &Job, request: &Request, name: &str, profile: &DeviceProfile) -> OnDevice {
    let (device, sm) = (name.to_owned(), profile.sm());
    let recorded = match asked {
        Asked::Library(_) => None,
        Asked::Rules(version) => Recorded::of(job, *version, name),
    };
    let reasons = match asked.form(job, profile) {
        Ok(form) => return OnDevice { device, sm, form: Some(form), reasons: Vec::new(), allowed: Vec::new(), recorded },
        Err(reasons) => reasons,
    };
    let mut allowed = changes::supported(request, |job| asked.form(job, profile).ok());
    allowed.extend(changes::newer(job, asked.version(), sm).map(|version| format!("by cuDNN {version}, according to the rules")));
    OnDevice { device, sm, form: None, reasons: reasons.iter().map(ToString::to_string).collect(), allowed, recorded }
}

impl Report {
    fn text(&self) -> String {
        let mut table = Table::default();
        table.row("problem", &self.problem);
        let library =
            self.library.clone().unwrap_or_else(|| "which is not installed: only the rules were checked, not the engines".to_owned());
        table.row("cudnn", format!("{}, {library}", self.cudnn));
        for on in &self.devices {
            let text = match on.form {
                Some(form) => format!("supported, {form}"),
                None => {
                    let reasons = on.reasons.iter().map(|reason| format!("unsupported: {reason}"));
                    reasons.chain(on.allowed.iter().map(|what| format!("supported {what}"))).collect::<Vec<_>>().join("\n")
                }
            };
            table.row(&on.device, text);
            table.rows("", on.recorded.as_ref().map(Recorded::text));
        }
        table.rows("mask", self.notes.clone());
        table.rows("cuda", self.cuda.iter().map(Kernels::text));
        table.row("cpu", self.cpu.text());
        table.row("metal", self.metal.text());
        table.render()
    }
}
