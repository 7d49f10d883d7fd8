//! Errors, each with what a reader needs to act on it.

use crate::bind::BindingErrors;
use crate::encode::TooNew;
use crate::engine::EngineReport;
use crate::ffi::codes::Status;
use crate::ir::VerifyErrors;
use crate::version::Version;
use std::fmt;
use std::path::PathBuf;

/// Anything that can go wrong between a graph and its result.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Finding a library, the driver or a device failed: see [`DriverError`](crate::DriverError).
    #[error(transparent)]
    Driver(#[from] sdpa_driver::Error),
    /// The library is older than [`Version::OLDEST`], the oldest that this crate speaks.
    #[error("{} is cuDNN {version}; {} or newer is needed", path.display(), Version::OLDEST)]
    TooOld {
        /// The file that it was loaded from.
        path: PathBuf,
        /// The version that it says it is.
        version: Version,
    },
    /// A process holds one cuDNN; another was asked for.
    #[error("this process already uses {}; {} was asked for", loaded.display(), asked.display())]
    OtherLibrary {
        /// The one in use.
        loaded: PathBuf,
        /// The one asked for.
        asked: PathBuf,
    },
    /// A call into cuDNN failed.
    #[error("{call} on {subject} failed: {status}{}", Detail(text))]
    Cudnn {
        /// The function.
        call: &'static str,
        /// The object of the call.
        subject: String,
        /// The status that it returned.
        status: Status,
        /// cuDNN's own last-error text.
        text: String,
    },
    /// The graph breaks rules: a bug of whoever built it.
    #[error(transparent)]
    Verify(#[from] VerifyErrors),
    /// The graph uses what the runtime does not have yet.
    #[error(transparent)]
    TooNew(#[from] TooNew),
    /// A program whose elements are not of the type that they are said to be: a bug of whoever made it.
    #[error("program: {0}")]
    Program(String),
    /// No engine takes the graph.
    #[error("no engine takes the graph:\n{0}")]
    NoEngine(Box<EngineReport>),
    /// The caller's bindings do not fit the plan.
    #[error(transparent)]
    Bindings(#[from] BindingErrors),
    /// A plan's JSON is not one, or not for this library.
    #[error("plan JSON: {0}")]
    PlanJson(String),
    /// A device profile is not one.
    #[error("device profile {field}: {rule}")]
    Profile {
        /// The key of the JSON.
        field: String,
        /// The rule that it breaks.
        rule: String,
    },
    /// A plan, or a graph, was to be executed on another device than it was made for.
    #[error("the plan is of {}, the handle of device {handle}", Of(*.plan))]
    OtherDevice {
        /// The number of the plan's device; `None` for a plan that was made for a profile.
        plan: Option<u32>,
        /// The number of the handle's device.
        handle: u32,
    },
}

impl Error {
    /// True where nothing is wrong with the environment: this graph is not supported, another may be.
    pub fn is_unsupported(&self) -> bool {
        self.class() == Class::Unsupported
    }

    /// True where memory ran out, or the driver failed or is not there: no other engine, form or configuration would fare better.
    pub fn is_fatal(&self) -> bool {
        matches!(self.class(), Class::Fatal | Class::Absent)
    }

    /// True where there is no cuDNN, no driver or no device, as opposed to one that fails.
    pub fn is_absence(&self) -> bool {
        self.class() == Class::Absent
    }

    fn class(&self) -> Class {
        match self {
            Error::NoEngine(_) | Error::TooNew(_) => Class::Unsupported,
            Error::Cudnn { status, .. } if status.is_unsupported() => Class::Unsupported,
            Error::Cudnn { status, .. } if status.is_out_of_memory() || status.is_execution() => Class::Fatal,
            Error::Driver(driver) if driver.is_absence() => Class::Absent,
            Error::Driver(driver) if driver.is_fatal() => Class::Fatal,
            Error::TooOld { .. } => Class::Absent,
            Error::Driver(_)
            | Error::Cudnn { .. }
            | Error::OtherLibrary { .. }
            | Error::Verify(_)
            | Error::Bindings(_)
            | Error::PlanJson(_)
            | Error::Program(_)
            | Error::Profile { .. }
            | Error::OtherDevice { .. } => Class::Other,
        }
    }
}

/// What an error says to who might try something else.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Another graph, engine or executor may do.
    Unsupported,
    /// Nothing will do.
    Fatal,
    /// There is nothing to try it on.
    Absent,
    /// It says nothing about others.
    Other,
}

struct Of(Option<u32>);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(ordinal) => write!(f, "device {ordinal}"),
            None => f.write_str("a device profile and no device: its JSON can be loaded for one"),
        }
    }
}

struct Detail<'a>(&'a str);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ", {}", self.0) }
    }
}
