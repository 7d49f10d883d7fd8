//! Compiles cuDNN plans.

use super::{Made, Maker, untaken};
use crate::args::{CompileArgs, PlaceArgs};
use crate::exit::{Failure, Line, Mistakes};
use crate::stand_in;
use cudnn_graph::{DeviceProfile, Library, Search, Target};
use sdpa::ExecutorName;
use sdpa::cache::CacheKey;
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::planfile::{self, Header, PlanFile, PlanFileError, Record};
use sdpa::cudnn::{plan, portable};
use std::path::{Path, PathBuf};

/// The requested cuDNN: a path, or a version that the library must have.
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
        let search = Search::default().with_library(self.library.clone()).with_driver(driver.map(Path::to_owned));
        let library = stand_in::load(&search).map_err(|e| failure(e.to_string()))?;
        let found = library.version().to_string();
        match &self.version {
            Some(wanted) if found != *wanted && !found.starts_with(&format!("{wanted}.")) => {
                Err(failure(format!("--cudnn {wanted}: found cuDNN {found} instead, {}", library.path().display())))
            }
            Some(_) | None => Ok(library),
        }
    }
}

/// Checks that a file may be extended: it does not exist, or it can be read and is for this device and version. Plans for other devices and the contents of
/// damaged files are never discarded.
fn takes(path: &Path, header: &Header) -> Result<(), Failure> {
    let refused = |why: &dyn std::fmt::Display| Err(untaken(path, why));
    match PlanFile::open(path) {
        Ok(there) => match there.header().mismatch(header) {
            Some(mismatch) => refused(&mismatch),
            None => there.entries().find_map(|entry| there.read(&entry.key).err()).map_or(Ok(()), |e| refused(&e)),
        },
        Err(PlanFileError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.is_replaceable() => refused(&e),
        Err(e) => Err(Failure::Mistakes(vec![Line::new(format!("--out {}", path.display()), e.to_string())])),
    }
}

/// Checks that library paths are files or folders.
pub(super) fn check(args: &CompileArgs, mistakes: &mut Mistakes) {
    let wanted = Wanted::read(args.cudnn.as_deref());
    PlaceArgs { cudnn: wanted.library, driver: args.driver.clone() }.check(mistakes);
}

/// Plans for one device, made by one cuDNN.
pub(super) struct Plans<'a> {
    library: &'static Library,
    profile: &'a DeviceProfile,
    header: Header,
    records: Vec<Record>,
}

impl Plans<'_> {
    pub(super) fn new<'a>(args: &CompileArgs, profile: &'a DeviceProfile) -> Result<Plans<'a>, Failure> {
        let library = Wanted::read(args.cudnn.as_deref()).load(args.driver.as_deref())?;
        let header = portable::header(library, profile);
        takes(&args.out, &header)?;
        Ok(Plans { library, profile, header, records: Vec::new() })
    }
}

impl Maker for Plans<'_> {
    const EXECUTOR: ExecutorName = ExecutorName::CUDNN;

    fn make(&mut self, job: &Job) -> Result<Made, sdpa::Error> {
        let (target, options) = (Target::Profile(self.profile), PlanOptions::default());
        let planned = plan::build(self.library, &target, job, &options)?;
        let key = portable::key(self.library, &target, job, &options)?;
        let payload = planned.to_bytes()?;
        let bytes = payload.len();
        self.records.push(Record { key, label: job.label(), payload });
        Ok(Made { engine: planned.engine.clone(), workspace_bytes: Some(planned.workspace_bytes()), bytes })
    }

    fn compiler(&self) -> String {
        format!("cuDNN {}", self.library.version())
    }

    fn write(self, path: &Path) -> Result<(), String> {
        planfile::add(path, &self.header, self.records).map_err(|e| e.to_string())
    }
}
