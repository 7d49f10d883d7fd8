//! `doctor`: reports which executors work here, and what the others lack.

use crate::args::DoctorArgs;
use crate::cache::kernels::{self, KernelCacheFacts};
use crate::data::Element;
use crate::exit::{Answer, Failure, Mistakes, Outcome};
use crate::ledger::{self, LedgerFacts};
use crate::memory;
use crate::operands::Operands;
use crate::progress::{Progress, Step};
use crate::run;
use crate::table::Table;
use cudnn_graph::{Device, Driver, Library};
use metal_fallback::{Facts, Unavailable};
use sdpa::cuda::KernelCache;
use sdpa::{AttentionSpec, ExecutorName, Layout, Mask, Shape};
use sdpa::{Dispatcher, Preference};
use sdpa_driver::Nvrtc;
use serde::Serialize;

/// Something that is missing or does not work.
#[derive(Debug, Serialize)]
struct Missing {
    what: &'static str,
    why: String,
    /// How to install or repair it.
    install: String,
}

#[derive(Debug, Serialize)]
struct DriverFacts {
    path: String,
    cuda_version: Option<String>,
}

#[derive(Debug, Serialize)]
struct DeviceFacts {
    ordinal: u32,
    name: String,
    sm: u32,
    multiprocessors: u32,
    memory_bytes: u64,
}

#[derive(Debug, Serialize)]
struct LibraryFacts {
    name: &'static str,
    path: String,
    version: String,
    companions: Vec<String>,
}

/// The properties that an Apple GPU reports.
#[derive(Debug, Serialize)]
struct GpuFacts {
    name: String,
    family: Option<String>,
    system: String,
    threads: u64,
    threadgroup_bytes: u64,
    working_set_bytes: u64,
    unified_memory: bool,
}

/// The findings about one executor.
#[derive(Debug, Serialize)]
struct Finding {
    executor: ExecutorName,
    works: bool,
    /// The engine that ran a small problem correctly.
    engine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<DriverFacts>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<DeviceFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    library: Option<LibraryFacts>,
    /// The kernel cache on disk, for native kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel_cache: Option<KernelCacheFacts>,
    /// The ledger of cuDNN, if the cudnn executor works.
    #[serde(skip_serializing_if = "Option::is_none")]
    ledger: Option<LedgerFacts>,
    missing: Vec<Missing>,
}

impl Finding {
    fn new(executor: ExecutorName) -> Finding {
        let (devices, missing) = (Vec::new(), Vec::new());
        let (engine, driver, gpu, library, kernel_cache, ledger) = (None, None, None, None, None, None);
        Finding { executor, works: false, engine, driver, devices, gpu, library, kernel_cache, ledger, missing }
    }

    fn lacks(&mut self, what: &'static str, why: impl ToString, install: impl Into<String>) {
        self.missing.push(Missing { what, why: why.to_string().replace('\n', "; "), install: install.into() });
    }

    /// Runs a small problem on the executor.
    fn try_out(&mut self, dispatcher: &Dispatcher, install: &str) {
        match trial(dispatcher, self.executor) {
            Ok(engine) => {
                self.works = true;
                self.engine = Some(engine);
            }
            Err(why) => self.lacks("result", why, install),
        }
    }
}

#[derive(Serialize)]
struct Findings {
    executors: Vec<Finding>,
}

/// Runs the command `doctor` and returns its output.
pub(crate) fn run(args: &DoctorArgs, json: bool) -> Result<Answer, Failure> {
    let mut mistakes = Mistakes::default();
    args.places.check(&mut mistakes);
    let kernel_cache = kernels::of_user(&mut mistakes);
    let ledgers = ledger::of_user(&mut mistakes);
    mistakes.finish(Some(()))?;
    let _step = Progress::new(json).spinner("looking around");
    let dispatcher = Dispatcher::new(args.places.options().with_ledgers(ledgers)).with_kernel_cache(kernel_cache.clone());
    let executors = vec![cpu(&dispatcher), cuda(&dispatcher, args, kernel_cache.as_ref()), cudnn(&dispatcher, args), metal(&dispatcher)];
    let findings = Findings { executors };
    let outcome = if findings.executors.iter().any(|f| f.works) { Outcome::Good } else { Outcome::NoExecutor };
    Answer::new(json, &findings, || text(&findings), outcome)
}

/// Runs a small problem on an executor, checks it, and returns its engine.
fn trial(dispatcher: &Dispatcher, name: ExecutorName) -> Result<String, String> {
    let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
    let spec = AttentionSpec::dense(Element::BF16.dtype(), shape, Layout::Bhsd).mask(Mask::causal()).with_stats();
    let problem = spec.validate().map_err(|e| e.to_string())?;
    let against = |e: &sdpa::Error| run::lines(name, e).into_iter().map(|line| line.message).collect::<Vec<_>>().join("; ");
    let choice = dispatcher.prepare(&problem, Preference::Named(name)).map_err(|e| against(&e))?;
    let mut operands = Operands::random(&spec, Element::BF16, 0)?;
    let scale = problem.default_scale();
    let report = operands.forward(choice.prepared.as_ref(), &problem, scale).map_err(|e| e.to_string())?;
    let distance = operands.check(&spec, &problem, scale, &Step::hidden());
    if distance.verdict() == sdpa_oracle::Verdict::Passed {
        Ok(report.engine)
    } else {
        Err(format!("wrong result: the largest error is {:.1e} ({})", distance.o.error, report.engine))
    }
}

fn cpu(dispatcher: &Dispatcher) -> Finding {
    let mut finding = Finding::new(ExecutorName::CPU);
    finding.try_out(dispatcher, "nothing: this is a bug, please report it");
    finding
}

fn metal(dispatcher: &Dispatcher) -> Finding {
    let mut finding = Finding::new(ExecutorName::METAL);
    match dispatcher.metal().facts() {
        Ok(facts) => {
            finding.gpu = Some(gpu(facts));
            finding.try_out(dispatcher, "nothing: this is a bug, please report it with what metal-fallback/README.md asks for");
        }
        Err(why) => finding.lacks("device", why, install_gpu(why)),
    }
    finding
}

/// Returns the advice for a machine without an Apple GPU.
fn install_gpu(why: &Unavailable) -> String {
    match why {
        Unavailable::NoDevice { .. } => "nothing: Metal is on Apple machines".to_owned(),
        Unavailable::NoGpu => "run it in a session that sees the GPU: a virtual machine or a sandbox may hide it".to_owned(),
        Unavailable::System { needs, .. } => format!("update the system to {needs}"),
        Unavailable::Gpu { .. } | _ => "nothing on this machine: the kernels need Apple silicon, M1 or A14 and newer".to_owned(),
    }
}

fn gpu(facts: &Facts) -> GpuFacts {
    GpuFacts {
        name: facts.name.clone(),
        family: facts.family.map(|family| format!("Apple{family}")),
        system: facts.system.clone(),
        threads: facts.threads,
        threadgroup_bytes: facts.threadgroup_bytes,
        working_set_bytes: facts.working_set_bytes,
        unified_memory: facts.unified_memory,
    }
}

const INSTALL_DRIVER: &str = "install the NVIDIA driver, or name its libcuda.so.1 with --driver or CUDNN_GRAPH_DRIVER";
const SHOW_DEVICE: &str = "see that nvidia-smi lists a GPU; a container must be started with its GPUs (--gpus all)";

/// Returns the cuDNN wheel for a driver.
fn install_library(cuda: Option<i32>) -> String {
    let wheel = if cuda.is_some_and(|v| v < 13_000) { "nvidia-cudnn-cu12" } else { "nvidia-cudnn-cu13" };
    format!("pip install {wheel} in the active Python environment, or name libcudnn.so.9 with --cudnn or CUDNN_GRAPH_LIBRARY")
}

/// The advice for a machine without NVRTC.
pub(crate) const INSTALL_COMPILER: &str =
    "pip install nvidia-cuda-nvrtc in the active Python environment, or name libnvrtc.so.13 with the variable SDPA_NVRTC";

/// Lists the driver and its devices; returns `None` without a driver.
fn devices(finding: &mut Finding, args: &DoctorArgs) -> Option<Option<i32>> {
    let driver = match Driver::load(args.places.driver.as_deref()) {
        Ok(driver) => driver,
        Err(e) => {
            finding.lacks("driver", e, INSTALL_DRIVER);
            return None;
        }
    };
    let cuda = driver.cuda_version().ok();
    let dotted = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
    finding.driver = Some(DriverFacts { path: driver.path().display().to_string(), cuda_version: cuda.map(dotted) });
    match driver.device_count() {
        Ok(0) => finding.lacks("device", "the driver sees none", SHOW_DEVICE),
        Ok(count) => {
            for ordinal in 0..count {
                match driver.device(ordinal) {
                    Ok(found) => finding.devices.push(device(found)),
                    // Report this device and continue: other devices may work.
                    Err(e) => finding.lacks("device", format!("number {ordinal}: {e}"), SHOW_DEVICE),
                }
            }
        }
        Err(e) => finding.lacks("device", e, SHOW_DEVICE),
    }
    Some(cuda)
}

/// Checks native CUDA kernels, which need the driver and NVRTC only.
fn cuda(dispatcher: &Dispatcher, args: &DoctorArgs, kernel_cache: Option<&KernelCache>) -> Finding {
    let mut finding = Finding::new(ExecutorName::CUDA);
    devices(&mut finding, args);
    match Nvrtc::load(None) {
        Ok(nvrtc) => {
            let [major, minor] = nvrtc.version();
            let (path, version) = (nvrtc.path().display().to_string(), format!("{major}.{minor}"));
            finding.library = Some(LibraryFacts { name: "NVRTC", path, version, companions: Vec::new() });
        }
        Err(e) => finding.lacks("compiler", e, INSTALL_COMPILER),
    }
    if finding.missing.is_empty() {
        finding.try_out(dispatcher, "nothing, where the compute capability is below 8.0; else report it, please");
    }
    finding.kernel_cache = kernel_cache.map(KernelCacheFacts::of);
    finding
}

fn cudnn(dispatcher: &Dispatcher, args: &DoctorArgs) -> Finding {
    let mut finding = Finding::new(ExecutorName::CUDNN);
    let Some(cuda) = devices(&mut finding, args) else {
        finding.lacks("library", "not looked for: it cannot be loaded without a driver", install_library(None));
        return finding;
    };
    match Library::load(&args.places.options().search) {
        Ok(library) => {
            finding.library = Some(LibraryFacts {
                name: "cuDNN",
                path: library.path().display().to_string(),
                version: library.version().to_string(),
                companions: library.companions().iter().map(|p| p.display().to_string()).collect(),
            });
        }
        Err(e) => finding.lacks("library", e, install_library(cuda)),
    }
    if finding.missing.is_empty() {
        finding.try_out(dispatcher, "what the message asks for; RUST_LOG=debug tells more");
        finding.ledger = dispatcher.cudnn().ok().and_then(|executor| LedgerFacts::of(executor));
    }
    finding
}

fn device(device: &Device) -> DeviceFacts {
    DeviceFacts {
        ordinal: device.ordinal(),
        name: device.name().to_owned(),
        sm: device.sm(),
        multiprocessors: device.sm_count(),
        memory_bytes: device.memory(),
    }
}

fn text(findings: &Findings) -> String {
    let mut table = Table::default();
    for finding in &findings.executors {
        table.row(finding.executor.name(), if finding.works { "works" } else { "does not work here" });
        table.rows("  tried", finding.engine.iter().map(|e| format!("{e}: right")));
        if let Some(driver) = &finding.driver {
            table.row("  driver", format!("{}, CUDA {}", driver.path, driver.cuda_version.as_deref().unwrap_or("unknown")));
        }
        table.rows(
            "  device",
            finding.devices.iter().map(|d| {
                let memory = memory::human(u128::from(d.memory_bytes));
                format!("{}: {}, sm {}, {} multiprocessors, {memory}", d.ordinal, d.name, d.sm, d.multiprocessors)
            }),
        );
        if let Some(gpu) = &finding.gpu {
            let family = gpu.family.as_deref().unwrap_or("no family of Apple's");
            let sizes = [gpu.threadgroup_bytes, gpu.working_set_bytes].map(|bytes| memory::human(u128::from(bytes)));
            let [threadgroup, working_set] = sizes;
            let threads = format!("threadgroups of {} threads and {threadgroup}", gpu.threads);
            table.row("  device", format!("{}, {family}, {threads}, working set {working_set}", gpu.name));
            table.row("  memory", if gpu.unified_memory { "shared with the CPU" } else { "apart from the CPU's" });
            table.row("  system", gpu.system.clone());
        }
        if let Some(library) = &finding.library {
            table.row("  library", format!("{} {}, {}", library.name, library.version, library.path));
            table.rows("  beside it", library.companions.iter().cloned());
        }
        table.rows("  kernels", finding.kernel_cache.iter().map(KernelCacheFacts::text));
        if finding.executor == ExecutorName::CUDNN && finding.works {
            table.row("  ledger", finding.ledger.as_ref().map_or_else(|| ledger::NONE.to_owned(), LedgerFacts::text));
        }
        for missing in &finding.missing {
            table.row(format!("  no {}", missing.what), missing.why.clone());
            table.row("  to do", missing.install.clone());
        }
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_apple_gpu_is_told_in_its_own_words() {
        let facts = Facts {
            name: "Apple M1".to_owned(),
            family: Some(7),
            system: "macos, Version 14.6".to_owned(),
            threads: 1024,
            threadgroup_bytes: 32 * 1024,
            working_set_bytes: 11 << 30,
            unified_memory: true,
        };
        let finding = Finding { gpu: Some(gpu(&facts)), works: true, ..Finding::new(ExecutorName::METAL) };
        let text = text(&Findings { executors: vec![finding] });
        for what in ["metal", "works", "Apple M1, Apple7, threadgroups of 1024 threads", "shared with the CPU", "Version 14.6"] {
            assert!(text.contains(what), "{what} in {text}");
        }
    }

    #[test]
    fn every_reason_against_a_gpu_has_something_to_do() {
        let text = |text: &str| text.to_owned();
        let gpu = Unavailable::Gpu { gpu: text("AMD"), field: text("the family"), value: text("none"), limit: text("Apple7") };
        for (why, said) in [
            (Unavailable::NoDevice { target_os: text("linux") }, "Metal is on Apple machines"),
            (Unavailable::NoGpu, "a session that sees the GPU"),
            (Unavailable::System { system: text("13.6"), needs: text("macos 14") }, "update the system to macos 14"),
            (gpu, "M1 or A14"),
        ] {
            assert!(install_gpu(&why).contains(said), "{why}");
        }
    }
}
