//! Ledgers: which features of attention a version of cuDNN computes correctly on an architecture.
//!
//! cuDNN's engines compute some graphs wrongly and report success, so results of generated problems were compared with an oracle (`cargo sdpa prove
//! cudnn`). A *ledger* records the outcome. Two features are **proven** together if at least [`ENOUGH`] problems of different shapes with both had
//! right results, and none had a wrong one. A pass is proven if all pairs of its features are. Combinations of features that may cause a wrong result
//! are **refused**, even if the caller asks for cuDNN by name.
//!
//! A ledger covers one version and one compute capability. It says nothing of others, whose engines differ.

mod evidence;
mod feature;
mod of_pass;

use crate::lower::Job;
use cudnn_graph::Version;
pub use evidence::{ENOUGH, Evidence};
pub use feature::{Class, Feature, Features, Order, Part, Spans, Use};
pub use of_pass::features;
use sdpa_core::error::{ExecutorName, Reason};
use sdpa_core::{Unproven, Untested};
use sdpa_nvidia::user::{self, SettingError};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The ledgers of this release: cuDNN version, compute capability times ten, file.
const RELEASED: [(Version, u32, &str); 2] = [
    (Version::new(9, 19, 0), 90, include_str!("../../ledgers/cudnn-9.19.0-sm90.json")),
    (Version::new(9, 27, 0), 90, include_str!("../../ledgers/cudnn-9.27.0-sm90.json")),
];

/// The version of this crate. A ledger stores the version that made it.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// The version of the file format.
const FORMAT: u32 = 1;

/// The folder of ledgers within the user's folder.
const FOLDER: &str = "ledgers";

/// A ledger: the features of attention that one version of cuDNN computes correctly on one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    about: About,
    /// For each feature, the features that it is proven with.
    proven: Vec<(Feature, Features)>,
    /// Combinations of features that some wrong result has and no right one.
    refused: Vec<Features>,
}

/// Scope and origin of a ledger: cuDNN version, architecture, device, release and counts of results.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The version of cuDNN.
    pub cudnn: Version,
    /// The compute capability times ten: 90 is 9.0.
    pub sm: u32,
    /// The name of the device on which the results were computed.
    pub device: String,
    /// The version of this crate that made the ledger. Another version may lower problems to other graphs.
    pub release: String,
    /// The number of problems whose results were right.
    pub right: usize,
    /// The number of problems whose results were wrong, or that crashed the process.
    pub wrong: usize,
}

/// Contents of a ledger file.
#[derive(Serialize, Deserialize)]
struct File {
    format: u32,
    #[serde(flatten)]
    about: About,
    /// Each feature's name and, as ranges of positions in this list, the features up to itself that it is proven with.
    proven: Vec<(String, String)>,
    /// Names of features.
    refused: Vec<Vec<String>>,
}

/// Why a ledger file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The user's folder of ledgers cannot be determined.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The text of the file is not a valid ledger.
    #[error("{path} is not a ledger: {what}")]
    Text {
        /// The path of the file.
        path: PathBuf,
        /// The rule that the text breaks.
        what: String,
    },
}

/// Writes numbers as ranges, such as `0-3 7`.
fn ranges(numbers: impl Iterator<Item = usize>) -> String {
    let mut ranges: Vec<[usize; 2]> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some([_, last]) if *last + 1 == number => *last = number,
            _ => ranges.push([number, number]),
        }
    }
    let text = |[first, last]: &[usize; 2]| if first == last { first.to_string() } else { format!("{first}-{last}") };
    ranges.iter().map(text).collect::<Vec<_>>().join(" ")
}

/// Reads numbers from ranges. Each must be below `end`.
fn numbers(text: &str, end: usize) -> Result<Vec<usize>, String> {
    let mut all = Vec::new();
    for range in text.split_whitespace() {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| *number < end);
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => all.extend(first..=last),
            _ => return Err(format!("got {range:?}, expected the number of a feature, or a range of such numbers, such as 3-7")),
        }
    }
    Ok(all)
}

impl Ledger {
    /// Returns the ledger of this release for a version of cuDNN and a compute capability (`sm`, times ten).
    pub fn released(cudnn: Version, sm: u32) -> Option<Ledger> {
        let (.., text) = RELEASED.iter().find(|(version, architecture, _)| (*version, *architecture) == (cudnn, sm))?;
        // Parsing should never fail: a test parses every released ledger.
        Ledger::parse(text).inspect_err(|error| tracing::error!(%cudnn, sm, error, "a ledger of this release cannot be read")).ok()
    }

    /// Returns the versions of cuDNN and the compute capabilities for which this release has ledgers.
    pub fn all_released() -> impl Iterator<Item = (Version, u32)> {
        RELEASED.iter().map(|(cudnn, sm, _)| (*cudnn, *sm))
    }

    /// Returns the scope and origin of the ledger.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Returns the number of pairs of features that the ledger proves to work together. A single feature counts as a pair with itself.
    pub fn pairs(&self) -> usize {
        let of = |(at, (_, with)): (usize, &(Feature, Features))| self.proven[..=at].iter().filter(|(other, _)| with.has(*other)).count();
        self.proven.iter().enumerate().map(of).sum()
    }

    /// Parses the text of a ledger.
    ///
    /// # Errors
    /// Returns the first rule that the text breaks.
    pub fn parse(text: &str) -> Result<Ledger, String> {
        let File { format, about, proven, refused } = serde_json::from_str(text).map_err(|e| e.to_string())?;
        if format != FORMAT {
            return Err(format!("its format is {format}, expected {FORMAT}"));
        }
        let named = |name: &String| Feature::named(name).ok_or_else(|| format!("got {name:?}, expected the name of a feature"));
        let names = proven.iter().map(|(name, _)| named(name)).collect::<Result<Vec<_>, _>>()?;
        let mut of_each = vec![Features::default(); names.len()];
        for (at, (_, with)) in proven.iter().enumerate() {
            for other in numbers(with, at + 1)? {
                of_each[at].insert(names[other]);
                of_each[other].insert(names[at]);
            }
        }
        let refused = refused.iter().map(|names| names.iter().map(named).collect()).collect::<Result<_, _>>()?;
        Ok(Ledger { about, proven: names.into_iter().zip(of_each).collect(), refused })
    }

    /// Writes the ledger as text that [`Ledger::parse`] reads.
    pub fn text(&self) -> String {
        let of = |(at, (feature, with)): (usize, &(Feature, Features))| {
            let others = self.proven[..=at].iter().enumerate().filter(|(_, (other, _))| with.has(*other));
            (feature.to_string(), ranges(others.map(|(at, _)| at)))
        };
        let proven = self.proven.iter().enumerate().map(of).collect::<Vec<_>>();
        let names = |features: &Features| features.iter().map(|feature| feature.to_string()).collect::<Vec<_>>();
        let refused = self.refused.iter().map(names).collect::<Vec<_>>();
        // One line per feature keeps diffs readable.
        let line = |value: serde_json::Value| format!("    {value}");
        let lines = |values: Vec<serde_json::Value>| match values.is_empty() {
            true => "[]".to_owned(),
            false => format!("[\n{}\n  ]", values.into_iter().map(line).collect::<Vec<_>>().join(",\n")),
        };
        let About { cudnn: Version { major, minor, patch }, sm, device, release, right, wrong } = &self.about;
        format!(
            "{{\n  \"format\": {FORMAT},\n  \"cudnn\": {{ \"major\": {major}, \"minor\": {minor}, \"patch\": {patch} }},\n  \"sm\": {sm},\n  \"device\": {},\n  \"release\": {},\n  \"right\": {right},\n  \"wrong\": {wrong},\n  \"proven\": {},\n  \"refused\": {}\n}}\n",
            serde_json::json!(device),
            serde_json::json!(release),
            lines(proven.into_iter().map(|pair| serde_json::json!(pair)).collect()),
            lines(refused.into_iter().map(|names| serde_json::json!(names)).collect()),
        )
    }

    /// Returns the file name of the ledger for a version of cuDNN and a compute capability, such as `cudnn-9.19.0-sm90.json`.
    pub fn file_name(cudnn: Version, sm: u32) -> String {
        format!("cudnn-{cudnn}-sm{sm}.json")
    }

    /// Returns this user's folder of ledgers: `ledgers` next to the [kernel cache](sdpa_nvidia::user::folder). `None` if the user has no home.
    ///
    /// # Errors
    /// Returns [`LedgerError::Setting`] if an environment variable that determines the folder is invalid.
    pub fn user_folder() -> Result<Option<PathBuf>, LedgerError> {
        Ok(user::folder(FOLDER)?)
    }

    /// Returns the ledger files in a folder, sorted by name; none if the folder does not exist.
    ///
    /// # Errors
    /// Returns [`LedgerError::Io`] if the folder cannot be read.
    pub fn files_in(folder: &Path) -> Result<Vec<PathBuf>, LedgerError> {
        let io = |source| LedgerError::Io { path: folder.to_owned(), source };
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(io(e)),
        };
        let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>().map_err(io)?;
        let is_ledger = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cudnn-"))
                && path.extension().is_some_and(|end| end == "json")
        };
        let mut paths: Vec<PathBuf> = paths.into_iter().filter(is_ledger).collect();
        paths.sort_unstable();
        Ok(paths)
    }

    /// Returns this user's ledgers, for [`CudnnOptions::ledgers`](crate::CudnnOptions::ledgers). Ledgers of another release are skipped.
    ///
    /// # Errors
    /// Returns the error of the first file that is not a valid ledger.
    pub fn all_of_user() -> Result<Vec<Ledger>, LedgerError> {
        let Some(folder) = Ledger::user_folder()? else { return Ok(Vec::new()) };
        let mut ledgers = Ledger::files_in(&folder)?.iter().map(|path| Ledger::load(path)).collect::<Result<Vec<_>, _>>()?;
        ledgers.retain(|ledger| ledger.about.release == RELEASE);
        Ok(ledgers)
    }

    /// Reads a ledger from a file.
    ///
    /// # Errors
    /// Returns the error of the operating system, or the first rule that the text breaks.
    pub fn load(path: &Path) -> Result<Ledger, LedgerError> {
        let text = std::fs::read_to_string(path).map_err(|source| LedgerError::Io { path: path.to_owned(), source })?;
        Ledger::parse(&text).map_err(|what| LedgerError::Text { path: path.to_owned(), what })
    }

    /// Writes the ledger to a file, and creates its folder if needed. Other processes see the old file or the new one, never a part.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn save(&self, path: &Path) -> Result<(), LedgerError> {
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = folder.and_then(|()| std::fs::write(&part, self.text())).and_then(|()| std::fs::rename(&part, path));
        written.map_err(|source| LedgerError::Io { path: path.to_owned(), source })
    }

    /// Returns the features and pairs of features of a pass that are not proven; none if the pass is proven.
    fn missing(&self, of_pass: &Features) -> Vec<String> {
        let none = Features::default();
        let with = |feature: Feature| self.proven.iter().find(|(other, _)| *other == feature).map_or(&none, |(_, with)| with);
        let (known, unknown): (Vec<Feature>, Vec<Feature>) = of_pass.iter().partition(|feature| with(*feature).has(*feature));
        let mut missing: Vec<String> = unknown.iter().map(ToString::to_string).collect();
        for (at, feature) in known.iter().enumerate() {
            let others = known[..at].iter().filter(|other| !with(*feature).has(**other));
            missing.extend(others.map(|other| format!("{feature} with {other}")));
        }
        missing
    }

    /// Returns the features of a pass that the ledger does not prove; `None` if it proves the pass.
    pub fn unproven(&self, job: &Job) -> Option<Unproven> {
        let missing = self.missing(&features(job));
        (!missing.is_empty()).then(|| unproven(self.about.cudnn, self.about.sm, Untested::Features(missing)))
    }

    /// Returns the reason why the ledger refuses a pass, or `None` if it does not. It refuses a pass if some combination of the pass's
    /// features had a wrong result and no right one.
    pub fn refuses(&self, job: &Job) -> Option<Reason> {
        let of_pass = features(job);
        let cause = self.refused.iter().find(|combination| combination.is_within(&of_pass))?;
        let names: Vec<String> = cause.iter().map(|feature| feature.to_string()).collect();
        Some(Reason::KnownBad {
            runtime: format!("cuDNN {} on sm {}", self.about.cudnn, self.about.sm),
            what: format!("results with {}", names.join(", ")),
            source_note: format!("a ledger of {}", self.about.device),
        })
    }
}

/// Describes features that are unproven on a version of cuDNN and an architecture.
pub(crate) fn unproven(cudnn: Version, sm: u32, what: Untested) -> Unproven {
    Unproven::new(ExecutorName::CUDNN, format!("cuDNN {cudnn}, sm {sm}"), what)
}

#[cfg(test)]
mod tests;
