//! Files of plans and kernels for a run, and the origin of those that ran.

use crate::exit::{Failure, Mistakes};
use crate::request::Request;
use sdpa::cache::{CacheSnapshot, What};
use sdpa::cuda::KernelHead;
use sdpa::cuda::kernel::Origin;
use sdpa::cudnn::AttachError;
use sdpa::cudnn::lower::Job;
use sdpa::{Dispatcher, Preference};
use sdpa::{Error, ExecutorName};
use serde::Serialize;
use std::path::PathBuf;

/// The plan and kernel files that the user named. A file that cannot be used on this machine ends the run.
#[derive(Debug)]
pub(super) struct Plans {
    files: Vec<PathBuf>,
    /// The file to which the run adds its plans or kernels.
    save: Option<PathBuf>,
}

/// Executors with plan or kernel files.
const MAKERS: [ExecutorName; 2] = [ExecutorName::CUDNN, ExecutorName::CUDA];

/// The origin of the plan or kernels with which a pass ran.
#[derive(Serialize)]
pub(super) struct PlanTold {
    pass: String,
    from_file: bool,
    /// Whether it came from the kernel cache on disk.
    from_cache: bool,
    ms: f64,
    /// The reasons why it did not come from a named file.
    why: Option<Vec<String>>,
}

impl PlanTold {
    /// Returns the last plan that was added to a cache.
    fn last(cache: &CacheSnapshot) -> Option<PlanTold> {
        let built = cache.events.iter().rev().find_map(|event| if let What::Built { time, .. } = &event.what { Some(time) } else { None });
        built.map(|time| PlanTold {
            pass: cache.name.clone(),
            from_file: !time.load.is_zero(),
            from_cache: false,
            ms: time.total.as_secs_f64() * 1e3,
            why: None,
        })
    }

    pub(super) fn text(&self) -> String {
        let how = match (self.from_cache, self.from_file) {
            (true, _) => "loaded from the kernel cache",
            (false, true) => "loaded from a file",
            (false, false) => "compiled",
        };
        let why: String = self.why.iter().flatten().map(|why| format!("; {why}")).collect();
        format!("{}: {how} in {:.1} ms{why}", self.pass, self.ms)
    }
}

impl Plans {
    /// Checks the options of plan files.
    ///
    /// # Errors
    /// Fails if files are named for an executor that cannot use them.
    pub(super) fn read(files: &[PathBuf], save: Option<&PathBuf>, preference: Option<Preference>) -> Result<Plans, String> {
        match preference {
            Some(Preference::Named(name)) if !MAKERS.contains(&name) && (!files.is_empty() || save.is_some()) => {
                Err(format!("got --executor {name}, expected cudnn or cuda: no other executor reads plan files"))
            }
            Some(_) | None => Ok(Plans { files: files.to_vec(), save: save.cloned() }),
        }
    }

    /// Attaches the files, which are searched before anything is built. If a file's executor is not available and was not requested, another executor runs
    /// without the file.
    pub(super) fn attach(&self, dispatcher: &Dispatcher, preference: Preference) -> Result<(), Failure> {
        let mut mistakes = Mistakes::default();
        for path in &self.files {
            let about = format!("--plans {}", path.display());
            let of = match KernelHead::is_of(path) {
                Ok(true) => ExecutorName::CUDA,
                Ok(false) => ExecutorName::CUDNN,
                Err(e) => {
                    mistakes.add(about, e);
                    continue;
                }
            };
            if let Preference::Named(name) = preference
                && name != of
            {
                mistakes.add(about, format!("the file is for the executor {of}, but --executor is {name}; pass a file for {name}"));
                continue;
            }
            let absent = |error: Error| match preference {
                Preference::Auto => Ok(()),
                Preference::Named(name) => Err(Failure::Executor(super::lines(name, &error))),
            };
            match of {
                ExecutorName::CUDA => match dispatcher.cuda() {
                    Ok(cuda) => drop(mistakes.take(about, cuda.attach(path))),
                    Err(e) => absent(Error::failed(of, e))?,
                },
                _ => match dispatcher.cudnn() {
                    Ok(cudnn) => match cudnn.attach(path) {
                        Err(AttachError::Other(e)) => return Err(Failure::environment(about, e)),
                        attached => drop(mistakes.take(about, attached)),
                    },
                    Err(e) => absent(Error::failed(of, e))?,
                },
            }
        }
        mistakes.finish(Some(()))
    }

    /// Saves the plans or kernels that ran, if requested.
    pub(super) fn save(&self, dispatcher: &Dispatcher, executor: ExecutorName) -> Result<(), Failure> {
        let Some(path) = &self.save else { return Ok(()) };
        let failed = |e: &dyn std::fmt::Display| Failure::environment(format!("--save-plans {}", path.display()), e);
        match (executor, dispatcher.cudnn(), dispatcher.cuda()) {
            (ExecutorName::CUDNN, Ok(cudnn), _) => cudnn.save(path).map(drop).map_err(|e| failed(&e)),
            (ExecutorName::CUDA, _, Ok(cuda)) => cuda.save(path).map(drop).map_err(|e| failed(&e)),
            _ => Err(failed(&format!("{executor} has no plans to save"))),
        }
    }

    /// Returns the origin of plans and kernels.
    pub(super) fn told(&self, dispatcher: &Dispatcher, executor: ExecutorName, request: &Request) -> Vec<PlanTold> {
        let of_kernels = |path: &&PathBuf| KernelHead::is_of(path).is_ok_and(|is_of_kernels| is_of_kernels);
        if let (ExecutorName::CUDA, Ok(cuda)) = (executor, dispatcher.cuda()) {
            let files = self.files.iter().filter(of_kernels);
            let why: Vec<String> =
                files.zip(cuda.without_kernels()).filter_map(|(path, why)| Some(format!("{} {}", path.display(), why?))).collect();
            let kernels = cuda.snapshots().iter().filter_map(PlanTold::last).filter(|told| told.pass == "cuda kernels").collect::<Vec<_>>();
            // A pass has several kernels. Report the slowest of their origins: the compiler, else the cache, else files.
            let origin = cuda.origins().into_iter().max();
            let told = |told: PlanTold| PlanTold {
                from_file: origin == Some(Origin::File),
                from_cache: origin == Some(Origin::Cache),
                why: (!why.is_empty()).then(|| why.clone()),
                ..told
            };
            return kernels.into_iter().map(told).collect();
        }
        let (ExecutorName::CUDNN, Ok(cudnn)) = (executor, dispatcher.cudnn()) else { return Vec::new() };
        let mut told: Vec<PlanTold> = cudnn.cache_trace().caches.iter().filter_map(PlanTold::last).collect();
        let backward = request.backward.as_ref().map(|backward| Job::from(backward.problem.clone()));
        let jobs: Vec<Job> = [Some(request.problem.clone().into()), backward].into_iter().flatten().collect();
        let files: Vec<&PathBuf> = self.files.iter().filter(|path| !of_kernels(path)).collect();
        for plan in told.iter_mut().filter(|plan| !plan.from_file && !files.is_empty()) {
            let Some(job) = jobs.iter().find(|job| job.name() == plan.pass) else { continue };
            plan.why = Some(match cudnn.without_plan(job) {
                Ok(why) => files.iter().zip(why).filter_map(|(path, why)| Some(format!("{} {}", path.display(), why?))).collect(),
                Err(e) => vec![e.to_string()],
            });
        }
        told
    }
}
