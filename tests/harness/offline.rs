//! The real cuDNN on a machine without a GPU: two runtimes, a stand-in driver, device profiles, and a worker per runtime.
//!
//! A process holds one cuDNN, so tests start the worker (`bin/offline.rs`) once per runtime and read its JSON lines.

use sdpa::Reason;
use sdpa::cudnn::lower::Form;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The runtimes that tests plan with.
pub const RUNTIMES: [&str; 2] = ["9.19", "9.27"];

/// Those whose answers are kept. Tests ask the others only where `SDPA_RUNTIMES` names them, with commas between.
pub const RECORDED: [&str; 4] = ["9.13", "9.19", "9.27", "9.28"];

/// The runtimes that are asked about every problem today.
///
/// # Panics
/// Where `SDPA_RUNTIMES` names another than those whose answers are kept.
pub fn asked_today() -> Vec<&'static str> {
    let named = std::env::var("SDPA_RUNTIMES").unwrap_or_default();
    let named: Vec<&str> = named.split(',').filter(|name| !name.is_empty()).collect();
    assert!(named.iter().all(|name| RECORDED.contains(name)), "SDPA_RUNTIMES is {named:?}: some of {RECORDED:?}");
    RECORDED.into_iter().filter(|name| RUNTIMES.contains(name) || named.contains(name)).collect()
}

/// Devices that need not be there: name and profile.
pub const PROFILES: [(&str, &str); 4] = [
    ("a100", include_str!("../../cudnn-graph/devprops/a100.json")),
    ("l40s", include_str!("../../cudnn-graph/devprops/l40s.json")),
    ("h200", include_str!("../../cudnn-graph/devprops/h200.json")),
    ("b200", include_str!("../../cudnn-graph/devprops/b200.json")),
];

/// Where a runtime and the stand-in driver are.
#[derive(Clone, Debug)]
pub struct Runtime {
    /// One of [`RECORDED`].
    pub name: &'static str,
    /// The folder of `libcudnn.so.9`.
    pub library: PathBuf,
    /// The stand-in for `libcuda.so.1`.
    pub driver: PathBuf,
}

impl Runtime {
    /// A runtime, looked for beside the worker: `target/debug/offline`, `target/cudnn`.
    ///
    /// # Errors
    /// What is missing and what makes it.
    pub fn find(name: &'static str, worker: &Path) -> Result<Runtime, String> {
        let library = Path::new("cudnn").join(name).join("nvidia/cudnn_jit/lib");
        let library = worker
            .ancestors()
            .map(|folder| folder.join(&library))
            .find(|folder| folder.join("libcudnn.so.9").exists())
            .ok_or_else(|| format!("there is no cuDNN {name} in the target folder; scripts/setup-tests.sh installs it"))?;
        let driver = worker.with_file_name("libnull_driver.so");
        if !driver.exists() {
            return Err("the stand-in driver is not built; cargo build --package null-driver builds it".to_owned());
        }
        Ok(Runtime { name, library, driver })
    }

    /// Runs the worker over this runtime. Each line of its output is one value.
    ///
    /// # Errors
    /// How it ended, with what it said.
    pub fn worker<T: for<'a> Deserialize<'a>>(&self, worker: &Path, arguments: &[&str]) -> Result<Vec<T>, String> {
        let output = Command::new(worker)
            .args(arguments)
            .env("CUDNN_GRAPH_LIBRARY", &self.library)
            .env("CUDNN_GRAPH_DRIVER", &self.driver)
            .env_remove("CUDNN_LOGLEVEL_DBG")
            .output()
            .map_err(|e| format!("{}: {e}", worker.display()))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let lines: Result<Vec<T>, String> =
            said.lines().map(|line| serde_json::from_str(line).map_err(|e| format!("{e} in {line}"))).collect();
        if !output.status.success() {
            let last = said.lines().last().unwrap_or("nothing");
            let error = String::from_utf8_lossy(&output.stderr);
            return Err(format!("cuDNN {}: the worker ended with {}; its last line was {last}; {error}", self.name, output.status));
        }
        lines
    }
}

/// What support was asked of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// Any form, as an executor asks.
    Any,
    /// The unified form only.
    Unified,
}

impl Wanted {
    /// Both.
    pub const ALL: [Wanted; 2] = [Wanted::Any, Wanted::Unified];
}

/// What became of a question.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// There is an engine.
    Supported {
        /// The form that was taken.
        form: Form,
        /// The first offer; absent where operands are copied first.
        engine: Option<String>,
    },
    /// There is none.
    Unsupported(Vec<Reason>),
    /// Something else went wrong.
    Fails(String),
}

impl Answer {
    /// Whether there is an engine.
    pub fn is_supported(&self) -> bool {
        match self {
            Answer::Supported { .. } => true,
            Answer::Unsupported(_) | Answer::Fails(_) => false,
        }
    }
}

/// One question and its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// One of [`PROFILES`].
    pub profile: String,
    /// A row's name.
    pub row: String,
    /// Which forms.
    pub wanted: Wanted,
    /// What became of it.
    pub answer: Answer,
}

/// One plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compiled {
    /// One of [`PROFILES`].
    pub profile: String,
    /// A row's name.
    pub row: String,
    /// Which forms.
    pub wanted: Wanted,
    /// Whether support was unsupported, so that no plan was tried.
    pub unsupported: bool,
    /// Plans that copy operands.
    pub copies: usize,
    /// Plans that convert declared tensors.
    pub conversions: usize,
    /// What is wrong; empty when nothing is.
    pub wrong: Vec<String>,
}
