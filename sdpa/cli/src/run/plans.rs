//! Plan files of a run, and where its plans came from.

use crate::exit::{Failure, Mistakes};
use crate::request::Request;
use sdpa::cache::{CacheSnapshot, What};
use sdpa::cudnn::AttachError;
use sdpa::cudnn::lower::Job;
use sdpa::{Dispatcher, Preference};
use sdpa::{Error, ExecutorName};
use serde::Serialize;
use std::path::PathBuf;

/// Files whose plans are used. Whoever names files wants them read: one that is of no use here ends the run.
#[derive(Debug)]
pub(super) struct Plans(Vec<PathBuf>);

/// The plan of a pass.
#[derive(Serialize)]
pub(super) struct PlanTold {
    pass: String,
    from_file: bool,
    ms: f64,
    /// Why it is of none of the files that were named.
    why: Option<Vec<String>>,
}

impl PlanTold {
    /// The last plan that a cache got.
    fn last(cache: &CacheSnapshot) -> Option<PlanTold> {
        let built = cache.events.iter().rev().find_map(|event| if let What::Built { time, .. } = &event.what { Some(time) } else { None });
        built.map(|time| PlanTold {
            pass: cache.name.clone(),
            from_file: !time.load.is_zero(),
            ms: time.total.as_secs_f64() * 1e3,
            why: None,
        })
    }

    pub(super) fn text(&self) -> String {
        let how = if self.from_file { "loaded from a file" } else { "compiled" };
        let why: String = self.why.iter().flatten().map(|why| format!("; {why}")).collect();
        format!("{}: {how} in {:.1} ms{why}", self.pass, self.ms)
    }
}

impl Plans {
    /// # Errors
    /// Files for an executor that has no use for them.
    pub(super) fn read(files: &[PathBuf], preference: Option<Preference>) -> Result<Plans, String> {
        match preference {
            Some(Preference::Named(name)) if name != ExecutorName::CUDNN && !files.is_empty() => {
                Err(format!("plans are cuDNN's, and the --executor is {name}"))
            }
            Some(_) | None => Ok(Plans(files.to_vec())),
        }
    }

    /// Has the files searched before a plan is built. Where cuDNN is not there and nobody asked for it, another executor runs, which
    /// has no plans.
    pub(super) fn attach(&self, dispatcher: &Dispatcher, preference: Preference) -> Result<(), Failure> {
        if self.0.is_empty() {
            return Ok(());
        }
        let cudnn = match (dispatcher.cudnn(), preference) {
            (Ok(cudnn), _) => cudnn,
            (Err(_), Preference::Auto) => return Ok(()),
            (Err(e), Preference::Named(_)) => {
                return Err(Failure::Executor(super::lines(ExecutorName::CUDNN, &Error::failed(ExecutorName::CUDNN, e))));
            }
        };
        let mut mistakes = Mistakes::default();
        for path in &self.0 {
            let about = format!("--plans {}", path.display());
            match cudnn.attach(path) {
                Err(AttachError::Other(e)) => return Err(Failure::environment(about, e)),
                attached => mistakes.take(about, attached),
            };
        }
        mistakes.finish(Some(()))
    }

    /// Where cuDNN's plans came from.
    pub(super) fn told(&self, dispatcher: &Dispatcher, executor: ExecutorName, request: &Request) -> Vec<PlanTold> {
        let (ExecutorName::CUDNN, Ok(cudnn)) = (executor, dispatcher.cudnn()) else { return Vec::new() };
        let mut told: Vec<PlanTold> = cudnn.cache_trace().caches.iter().filter_map(PlanTold::last).collect();
        let backward = request.backward.as_ref().map(|backward| Job::from(backward.problem.clone()));
        let jobs: Vec<Job> = [Some(request.problem.clone().into()), backward].into_iter().flatten().collect();
        for plan in told.iter_mut().filter(|plan| !plan.from_file && !self.0.is_empty()) {
            let Some(job) = jobs.iter().find(|job| job.name() == plan.pass) else { continue };
            plan.why = Some(match cudnn.without_plan(job) {
                Ok(why) => self.0.iter().zip(why).filter_map(|(path, why)| Some(format!("{} {}", path.display(), why?))).collect(),
                Err(e) => vec![e.to_string()],
            });
        }
        told
    }
}
