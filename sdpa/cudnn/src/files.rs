//! Plan files of an executor: it looks plans up there before it builds them, and saves built plans there.

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

/// Why an executor cannot use a plan file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] PlanFileError),
    /// The file was made for another runtime or device.
    #[error("{0}; compile the plan file for this device and this cuDNN")]
    Mismatch(Mismatch),
    /// cuDNN or the environment failed.
    #[error(transparent)]
    Other(#[from] Error),
}

impl From<cudnn_graph::Error> for AttachError {
    fn from(error: cudnn_graph::Error) -> AttachError {
        AttachError::Other(error.into())
    }
}

/// Files that are searched before a plan is built, and the plans in use.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// Attached files, in the order of attachment.
    open: RwLock<Vec<Arc<PlanFile>>>,
    /// Plans in use, by key. Passes that differ only in sent numbers, such as window bounds or constants of a score_mod, share a key.
    live: Mutex<HashMap<Digest, Weak<Planned>>>,
}

impl CudnnExecutor {
    /// Attaches a plan file: from now on the executor looks for plans in the file before it builds them. Only the index is read now; each
    /// plan is read when it is needed. A plan that is damaged or of another release is built anew, with a warning. Returns the number of
    /// plans in the file.
    ///
    /// **A plan contains machine code: load only files that you trust.** See [`crate::planfile`].
    ///
    /// # Errors
    /// Fails if the file is not a valid plan file, or if it was made for another runtime or device.
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

    /// Returns the number of attached files.
    pub fn attached(&self) -> usize {
        self.files.open.read().len()
    }

    /// Adds the plans in the executor's forward and backward caches to a file, and creates the file if needed. Plans that are already
    /// there stay. Plans of engines that were not compiled at run time have no JSON and are skipped. Returns the number of plans that
    /// were written.
    ///
    /// # Errors
    /// Fails if the file or its folder cannot be used, or if the environment fails.
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

    /// Adds the plan of one pass to a file. Builds the plan now if it is not cached.
    ///
    /// # Errors
    /// Fails as [`CudnnExecutor::save`] does, and if no plan can be built for the pass.
    pub fn save_plan(&self, job: &Job, path: impl AsRef<Path>) -> Result<(), AttachError> {
        let (planned, _) = self.plans(job)?;
        let record = self.record(job, &planned)?;
        self.write(path.as_ref(), vec![record]).map(|_| ())
    }

    /// Returns, for each attached file in order, why it has no usable plan for the pass `job`, or `None` if it has one.
    ///
    /// # Errors
    /// Fails if the environment does. A pass without a plan is not an error.
    pub fn without_plan(&self, job: &Job) -> Result<Vec<Option<String>>, Error> {
        let handle = self.library.handle(self.setup_stream()?)?;
        let target = Target::Handle(&handle);
        let key = portable::key(self.library, &target, job, &self.options)?;
        let files = self.files.open.read().clone();
        let against = |file: &Arc<PlanFile>| match file.read(&key) {
            Ok(None) => Some("has no plan for this problem".to_owned()),
            Ok(Some(bytes)) => {
                self.loaded(&target, job, &bytes).err().map(|e| format!("has a plan for this problem that cannot be used: {e}"))
            }
            Err(e) => Some(format!("has a plan for this problem that cannot be used: {e}")),
        };
        Ok(files.iter().map(against).collect())
    }

    /// Loads plans from the bytes of a record in this process or in an attached file.
    fn loaded(&self, target: &Target<'_>, job: &Job, bytes: &[u8]) -> Result<Planned, PayloadError> {
        // SAFETY: only this user and root could write an attached file. Its code is trusted like shared libraries that the same users can write.
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

    /// Returns the plans of a pass: plans in use with the same key, else plans from the first file that has the key, else built ones.
    pub(super) fn make(
        &self,
        target: &Target<'_>,
        job: &Job,
        finish: impl Fn(&mut Planned) -> Result<(), Error>,
    ) -> Result<Arc<Planned>, Error> {
        // If a pass has no key, it has no plan either: `plan::build` below fails and reports the reason.
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

    /// Returns the plans with the fastest configuration, if the options ask for timing and the target is a device.
    fn tuned(&self, target: &Target<'_>, job: &Job, built: Planned) -> Result<Planned, Error> {
        if !self.tune || matches!(target, Target::Profile(_)) {
            return Ok(built);
        }
        let start = Instant::now();
        let mut planned = match tune::fastest(self.library, self.device, &self.options, job, &built) {
            Ok(Some(mut fastest)) => {
                fastest.time = built.time;
                // `fastest` uploaded the tables to time the plans. Drop them: a caller that needs tables uploads them itself.
                fastest.tables.clear();
                fastest
            }
            Ok(None) => built,
            // Keep the untimed plan, which is usable. Timing typically fails for lack of memory: it needs all operands at once.
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
                Err(error) => tracing::warn!(error, key = sdpa_cache::CacheKey::label(job), "{what} was not loaded; it is built instead"),
            }
        }
        None
    }
}
