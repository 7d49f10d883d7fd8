//! Plans in files: the folder of a cache, and attached files.

use super::header::{Header, Mismatch};
use crate::encode::encode;
use crate::engine::Policy;
use crate::error::Error;
use crate::ffi::Library;
use crate::ir::Verified;
use crate::known_faults::KnownFault;
use crate::plan::Plan;
use crate::profile::{DeviceProfile, Target};
use parking_lot::RwLock;
use sdpa_cache::planfile::{Digest, Folder, PlanFile, PlanFileError, Record};
use std::path::Path;
use std::sync::Arc;

/// The version of the payloads, each of which is the JSON of one plan.
const VERSION: u32 = 1;

/// Why a plan file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] PlanFileError),
    /// The file was made for another cuDNN or device.
    #[error("{0}; build the plan file for this device and this cuDNN")]
    Mismatch(Mismatch),
    /// cuDNN or the driver failed.
    #[error(transparent)]
    Other(#[from] Error),
}

/// The files in which a cache looks before it builds a plan.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) folder: Option<Folder>,
    attached: RwLock<Vec<Arc<PlanFile<Header>>>>,
}

/// Returns the header of files for a target.
fn header(library: &'static Library, target: &Target<'_>) -> Result<Header, Error> {
    let profile = match target {
        Target::Handle(handle) => DeviceProfile::of_device(library, handle.device())?.to_string(),
        Target::Profile(profile) => profile.to_string(),
    };
    Ok(Header { cudnn: library.version().to_string(), profile, lowering: VERSION })
}

/// Returns the key of a plan in files, which is equal on all devices that can use the same kernels. It covers everything that decides the build: the
/// descriptors, the graph, the policy, the known faults of engines and the version of cuDNN. `None` if the graph needs a newer cuDNN, so that it has no plan.
pub(super) fn digest(library: &'static Library, graph: &Verified, policy: &Policy, tuned: bool) -> Option<Digest> {
    let program = serde_json::to_vec(&encode(graph, library.version()).ok()?).ok()?;
    // A release that knows more faults of the graph plans it again.
    let faults = KnownFault::of(graph, library.version(), policy.dynamic_shapes);
    let policy = serde_json::to_vec(policy).ok()?;
    let faults: Vec<String> = faults.iter().map(|fault| format!("{:?} {}", fault.engine, fault.condition)).collect();
    let parts = Digest::parts().part(library.version().to_string().as_bytes()).part(&program).part(graph.to_string().as_bytes());
    Some(parts.part(&policy).part(faults.join("\n").as_bytes()).part(&[u8::from(tuned)]).finish())
}

impl Files {
    fn are_there(&self) -> bool {
        self.folder.is_some() || !self.attached.read().is_empty()
    }

    pub(super) fn attach(&self, library: &'static Library, target: &Target<'_>, path: &Path) -> Result<usize, AttachError> {
        let file = PlanFile::open(path)?;
        if let Some(mismatch) = Header::mismatch(file.header(), &header(library, target)?) {
            return Err(AttachError::Mismatch(mismatch));
        }
        let plans = file.entries().len();
        self.attached.write().push(Arc::new(file));
        Ok(plans)
    }

    /// Loads a plan from the first file that has it. A damaged file is skipped with a warning: the plan is built instead.
    pub(super) fn load(&self, library: &'static Library, graph: &Verified, target: &Target<'_>, key: &Digest) -> Option<Plan> {
        if !self.are_there() {
            return None;
        }
        let here = header(library, target).inspect_err(|error| tracing::warn!(%error, "plan files are not searched")).ok()?;
        let attached = self.attached.read().clone();
        let fitting = attached.iter().filter(|file| Header::mismatch(file.header(), &here).is_none());
        let from_files = fitting.map(|file| file.read(key));
        for found in self.folder.iter().map(|folder| folder.get(&here, key)).chain(from_files) {
            match found.map_err(|e| e.to_string()).and_then(|bytes| bytes.map(|bytes| plan(library, graph, target, bytes)).transpose()) {
                Ok(Some(plan)) => return Some(plan),
                Ok(None) => {}
                Err(error) => tracing::warn!(error, "a plan in a file was not loaded; it is built instead"),
            }
        }
        None
    }

    /// Writes a plan to the folder, if there is one. Failures leave the plan usable, so they are only reported.
    pub(super) fn keep(&self, library: &'static Library, target: &Target<'_>, key: Digest, label: &str, plan: &Plan) {
        let Some(folder) = &self.folder else { return };
        let kept = record(key, label, plan).and_then(|record| Ok((header(library, target)?, record)));
        match kept.map_err(|e| e.to_string()).and_then(|(here, record)| folder.put(&here, record).map_err(|e| e.to_string())) {
            Ok(()) => {}
            Err(error) => tracing::warn!(error, label, "a plan is not written to the folder"),
        }
    }
}

/// Adds plans to a file, and returns their number. Plans without JSON are skipped.
pub(super) fn save(
    library: &'static Library,
    target: &Target<'_>,
    path: &Path,
    plans: impl Iterator<Item = (Digest, String, Arc<Plan>)>,
) -> Result<usize, AttachError> {
    let mut records = Vec::new();
    for (key, label, plan) in plans {
        match record(key, &label, &plan) {
            Ok(record) => records.push(record),
            Err(error) => tracing::warn!(%error, label, "a plan is not written to a file"),
        }
    }
    let count = records.len();
    sdpa_cache::planfile::add(path, &header(library, target)?, records)?;
    Ok(count)
}

/// The longest label that a record may have, in bytes.
const LABEL: usize = 1024;

fn record(key: Digest, label: &str, plan: &Plan) -> Result<Record, Error> {
    let end = (0..=LABEL.min(label.len())).rev().find(|&end| label.is_char_boundary(end)).unwrap_or(0);
    Ok(Record { key, label: label[..end].to_owned(), payload: plan.to_json()?.into_bytes() })
}

fn plan(library: &'static Library, graph: &Verified, target: &Target<'_>, bytes: Vec<u8>) -> Result<Plan, String> {
    let json = String::from_utf8(bytes).map_err(|e| e.to_string())?;
    // SAFETY: the record has the key of this graph and an intact checksum, and only this user and root could write it. Its code is trusted like shared
    // libraries that the same users can write.
    #[allow(unsafe_code, reason = "machine code from files, as a loader of libraries has it")]
    unsafe { Plan::from_json(library, &json, graph, target) }.map_err(|e| e.to_string())
}
