//! A pass that was prepared on a GPU: the selected executor, and the reasons against the other.

use crate::error::{Told, told};
use crate::plan::Asked;
use sdpa::cuda::{Family, cudnn_first, cudnn_first_backward};
use sdpa::nvidia::{Device, DevicePass, Job};
use sdpa::{Choice, Dispatcher, Error, Executor, ExecutorName, Preference, Unproven, Unsupported};
use std::sync::Arc;

/// The executors that read tensors of a GPU.
const BOTH: [ExecutorName; 2] = [ExecutorName::CUDNN, ExecutorName::CUDA];

/// A pass that was prepared on a GPU: the selected executor with its plan, and why the other was not selected.
#[derive(Debug)]
pub(crate) struct Chosen {
    all: Arc<Dispatcher>,
    pub(crate) device: &'static Device,
    pub(crate) executor: ExecutorName,
    pub(crate) pass: Arc<DevicePass>,
    unsupported: Vec<Unsupported>,
    unproven: Option<Arc<Unproven>>,
    named: bool,
}

impl Chosen {
    pub(crate) fn new(all: Arc<Dispatcher>, asked: &Asked, named: Option<ExecutorName>) -> Result<Chosen, Error> {
        let preference = named.map_or(Preference::Auto, Preference::Named);
        let Choice { executor, prepared, unsupported, unproven, .. } = match asked {
            Asked::Forward(problem) => all.prepare_device(problem, preference),
            Asked::Backward(problem) => all.prepare_device_backward(problem, preference),
        }?;
        Ok(Chosen { device: all.device()?, all, executor, pass: prepared, unsupported, unproven, named: named.is_some() })
    }

    /// Returns the features of the pass that the ledger of its executor does not list as computed correctly together; `None` if there are
    /// none.
    pub(crate) fn unproven(&self) -> Option<String> {
        self.unproven.as_ref().map(ToString::to_string)
    }

    /// Returns the executors that do not run the pass, with their reasons. An executor that was not tried has a reason for that.
    pub(crate) fn others(&self, asked: &Asked) -> Vec<Told> {
        let others = BOTH.into_iter().filter(|other| *other != self.executor);
        let why = |other: ExecutorName| match self.unsupported.iter().find(|unsupported| unsupported.executor == other) {
            Some(unsupported) => told(unsupported),
            None => (other.name(), vec![self.not_tried(asked)]),
        };
        others.map(why).collect()
    }

    fn not_tried(&self, asked: &Asked) -> String {
        let before = self.executor;
        if self.named {
            return format!("not tried: the caller named {before}");
        }
        let exception = match asked {
            Asked::Forward(problem) => cudnn_first(Family::Wgmma, problem),
            Asked::Backward(problem) => cudnn_first_backward(Family::Wgmma, problem),
        };
        match exception {
            Some(exception) if before == ExecutorName::CUDNN => format!("not tried: {exception}"),
            Some(_) if before == ExecutorName::CUDA => match self.of_cudnn(asked) {
                Some(unproven) => format!("not tried: {unproven}"),
                None => "not tried: native CUDA kernels were faster in timed runs".to_owned(),
            },
            Some(_) | None if before == ExecutorName::CUDA => "not tried: native CUDA kernels come first on this device".to_owned(),
            Some(_) | None => format!(
                "not tried: {before} comes first, because native CUDA kernels are not tuned for this device or NVRTC is older than 12.9"
            ),
        }
    }

    /// Returns the features of a pass that cuDNN's ledger does not cover.
    fn of_cudnn(&self, asked: &Asked) -> Option<Arc<Unproven>> {
        let cudnn = self.all.cudnn().ok()?;
        match asked {
            Asked::Forward(problem) => cudnn.unproven(problem),
            Asked::Backward(problem) => cudnn.unproven_backward(problem),
        }
    }

    /// The error of an executor that prepared this pass and is no longer available.
    fn gone(&self, error: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::failed(self.executor, error)
    }

    /// Returns the name, the version and the file of the library that the selected executor uses: cuDNN or NVRTC.
    pub(crate) fn library(&self) -> Result<(&'static str, String, String), Error> {
        if self.executor == ExecutorName::CUDNN {
            let library = self.all.cudnn().map_err(|error| self.gone(error))?.library();
            return Ok(("cuDNN", library.version().to_string(), library.path().display().to_string()));
        }
        let nvrtc = self.all.cuda().map_err(|error| self.gone(error))?.nvrtc();
        let [major, minor] = nvrtc.version();
        Ok(("NVRTC", format!("{major}.{minor}"), nvrtc.path().display().to_string()))
    }

    /// Returns the plan cache's explanation of whether this pass was cached, and why not.
    pub(crate) fn explain(&self, job: &Job) -> Result<String, Error> {
        if self.executor == ExecutorName::CUDNN {
            return Ok(self.all.cudnn().map_err(|error| self.gone(error))?.explain(job).to_string());
        }
        Ok(self.all.cuda().map_err(|error| self.gone(error))?.explain(job).to_string())
    }
}
