//! Plan files of an executor: where it looks before it builds, and where it keeps what it has built.

use super::portable::{self, PayloadError};
use super::{CudnnExecutor, Planned};
use super::{plan, tune};
use crate::error::Error;
use crate::lower::Job;
use crate::planfile::{self, Digest, Mismatch, PlanFile, PlanFileError, Record};
use cudnn_graph::{DeviceProfile, Target};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Why a plan file is of no use to an executor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] PlanFileError),
    /// It was made for something else.
    #[error("{0}")]
    Mismatch(Mismatch),
    /// cuDNN's error, or the environment's.
    #[error(transparent)]
    Other(#[from] Error),
}

impl From<cudnn_graph::Error> for AttachError {
    fn from(error: cudnn_graph::Error) -> AttachError {
        AttachError::Other(error.into())
    }
}

/// Where plans are looked for before they are built.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// In the order in which they came.
    open: RwLock<Vec<Arc<PlanFile>>>,
    /// Plans that live: another pass may be the same program with other numbers, such as the bounds of a window or a constant of a
    /// score_mod.
    live: Mutex<HashMap<Digest, Weak<Planned>>>,
}

impl CudnnExecutor {
    /// Looks for plans in a file from now on, before they are built. Only its index is read; plans are read one by one when they
    /// are asked for. A plan that turns out to be damaged or of another release is built as if it were not there, with a warning.
    ///
    /// **A plan contains machine code: load only files that you trust.** See [`crate::planfile`].
    ///
    /// # Errors
    /// What is wrong with the file; that it was made for another runtime or device.
    pub fn attach(&self, path: impl AsRef<Path>) -> Result<usize, AttachError> {
        let file = PlanFile::open(path)?;
        let here = portable::header(self.library, &DeviceProfile::of_device(self.library, self.device)?);
        if let Some(mismatch) = file.header().mismatch(&here) {
            return Err(AttachError::Mismatch(mismatch));
        }
        let plans = file.entries().len();
        self.files.open.write().push(Arc::new(file));
        Ok(plans)
    }

    /// How many files are attached.
    pub fn attached(&self) -> usize {
        self.files.open.read().len()
    }

    /// Adds every plan of both caches to a file, which is made where there is none. What is there already stays. Plans of engines
    /// that were not compiled at run time have no JSON and are left out. Says how many were written.
    ///
    /// # Errors
    /// What is wrong with the file or its folder; the environment's.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<usize, AttachError> {
        let (forward, backward) = (self.forward.values(), self.backward.values());
        let plans = forward.into_iter().chain(backward);
        let mut records = Vec::new();
        for (job, planned) in plans {
            match self.record(&job, &planned) {
                Ok(record) => records.push(record),
                Err(error) => tracing::warn!(%error, key = sdpa_cache::CacheKey::label(&job), "a plan is not written to a file"),
            }
        }
        self.write(path.as_ref(), records)
    }

    /// Adds the plan of one pass to a file, built now if it is not there.
    ///
    /// # Errors
    /// As [`CudnnExecutor::save`]; that there is no plan for the pass.
    pub fn save_plan(&self, job: &Job, path: impl AsRef<Path>) -> Result<(), AttachError> {
        let (planned, _) = self.plans(job)?;
        let record = self.record(job, &planned)?;
        self.write(path.as_ref(), vec![record]).map(|_| ())
    }

    /// Why each of the attached files is of no use for a pass, in their order: that it has no plan for it, or what is wrong with the
    /// one that it has; `None` of one that has a plan of use.
    ///
    /// # Errors
    /// The environment's; that nothing runs the pass.
    pub fn without_plan(&self, job: &Job) -> Result<Vec<Option<String>>, Error> {
        let handle = self.library.handle(self.setup_stream()?)?;
        let target = Target::Handle(&handle);
        let key = portable::key(self.library, &target, job, &self.options)?;
        let files = self.files.open.read().clone();
        let against = |file: &Arc<PlanFile>| match file.read(&key) {
            Ok(None) => Some("has no plan for this".to_owned()),
            Ok(Some(bytes)) => self.loaded(&target, job, &bytes).err().map(|e| format!("has a plan for this that is not used: {e}")),
            Err(e) => Some(format!("has a plan for this that is not used: {e}")),
        };
        Ok(files.iter().map(against).collect())
    }

    /// Plans from the bytes of a plan of this process, or of an attached file.
    fn loaded(&self, target: &Target<'_>, job: &Job, bytes: &[u8]) -> Result<Planned, PayloadError> {
        // SAFETY: nobody but this user and root could write an attached file, whose code is trusted as that of the libraries in the same
        // hands.
        #[allow(unsafe_code, reason = "machine code from files, as a loader of libraries has it")]
        unsafe {
            Planned::from_bytes(self.library, target, job, bytes)
        }
    }

    fn write(&self, path: &Path, records: Vec<Record>) -> Result<usize, AttachError> {
        let here = portable::header(self.library, &DeviceProfile::of_device(self.library, self.device)?);
        let count = records.len();
        planfile::add(path, &here, records)?;
        Ok(count)
    }

    fn record(&self, job: &Job, planned: &Planned) -> Result<Record, Error> {
        let handle = self.library.handle(self.setup_stream()?)?;
        let key = portable::key(self.library, &Target::Handle(&handle), job, &self.options)?;
        Ok(Record { key, label: sdpa_cache::CacheKey::label(job), payload: planned.to_bytes()? })
    }

    /// The plans of a pass: those of the same program that live already, out of the first file that has them, or built.
    pub(super) fn make(
        &self,
        target: &Target<'_>,
        job: &Job,
        finish: impl Fn(&mut Planned) -> Result<(), Error>,
    ) -> Result<Arc<Planned>, Error> {
        // Where there is no key there is no plan either, and the build says why.
        let key = portable::key(self.library, target, job, &self.options).ok();
        let mut planned = match key.as_ref().and_then(|key| self.load(target, job, key)) {
            Some(planned) => planned,
            None => self.tuned(target, job, plan::build(self.library, target, job, &self.options)?)?,
        };
        finish(&mut planned)?;
        let planned = Arc::new(planned);
        let mut live = self.files.live.lock();
        live.retain(|_, planned| planned.strong_count() > 0);
        live.extend(key.map(|key| (key, Arc::downgrade(&planned))));
        Ok(planned)
    }

    /// The same plans with the fastest configuration of the attention, where the device is there and the options ask for that.
    fn tuned(&self, target: &Target<'_>, job: &Job, built: Planned) -> Result<Planned, Error> {
        if !self.tune || matches!(target, Target::Profile(_)) {
            return Ok(built);
        }
        let start = Instant::now();
        let mut planned = match tune::fastest(self.library, self.device, &self.options, job, &built) {
            Ok(Some(mut fastest)) => {
                fastest.time = built.time;
                // Whoever asked for the plans uploads them to where it wants them.
                fastest.tables.clear();
                fastest
            }
            Ok(None) => built,
            // There is a plan, and memory for all operands at once may be what there is not.
            Err(error) => {
                tracing::warn!(%error, key = sdpa_cache::CacheKey::label(job), "not timed");
                built
            }
        };
        planned.time.tune = start.elapsed();
        Ok(planned)
    }

    fn load(&self, target: &Target<'_>, job: &Job, key: &Digest) -> Option<Planned> {
        let twin = self.files.live.lock().get(key).and_then(Weak::upgrade);
        let twin = twin.map(|twin| ("a plan that lives", twin.to_bytes().map(Some).map_err(|e| e.to_string())));
        let files = self.files.open.read().clone();
        let files = files.iter().map(|file| ("a plan of a file", file.read(key).map_err(|e| e.to_string())));
        for (what, bytes) in twin.into_iter().chain(files) {
            let loaded = bytes.and_then(|bytes| {
                let load = |bytes: Vec<u8>| self.loaded(target, job, &bytes).map_err(|e| e.to_string());
                bytes.map(load).transpose()
            });
            match loaded {
                Ok(Some(planned)) => return Some(planned),
                Ok(None) => {}
                Err(error) => tracing::warn!(error, key = sdpa_cache::CacheKey::label(job), "{what} is not used; it is built"),
            }
        }
        None
    }
}
