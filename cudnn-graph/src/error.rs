//! Errors, each with the facts to act on it.

use crate::bind::BindingErrors;
use crate::encode::TooNew;
use crate::engine::EngineReport;
use crate::ffi::codes::Status;
use crate::ir::VerifyErrors;
use crate::version::Version;
use std::fmt;
use std::path::PathBuf;

/// Any error of this crate.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Finding a library, the driver or a device failed: see [`DriverError`](crate::DriverError).
    #[error(transparent)]
    Driver(#[from] sdpa_driver::Error),
    /// The library is older than [`Version::OLDEST`].
    #[error("{} is cuDNN {version}; {} or newer is needed", path.display(), Version::OLDEST)]
    TooOld {
        /// The path of the library file.
        path: PathBuf,
        /// The version of the library.
        version: Version,
    },
    /// This process already uses another cuDNN file than the requested one.
    #[error("this process already uses {} and cannot load {} as well", loaded.display(), asked.display())]
    OtherLibrary {
        /// The path of the library file that is in use.
        loaded: PathBuf,
        /// The path of the library file that was requested.
        asked: PathBuf,
    },
    /// A call into cuDNN failed.
    #[error("{call} on {subject} failed: {status}{}", Detail(text))]
    Cudnn {
        /// The function that was called.
        call: &'static str,
        /// The object that the call was about, such as a descriptor.
        subject: String,
        /// The status that cuDNN returned.
        status: Status,
        /// cuDNN's last-error message.
        text: String,
    },
    /// The graph breaks rules: a bug of the code that built it.
    #[error(transparent)]
    Verify(#[from] VerifyErrors),
    /// The graph uses features that this version of cuDNN does not have.
    #[error(transparent)]
    TooNew(#[from] TooNew),
    /// A program breaks a rule of [`Program::check`](crate::Program::check).
    #[error("the program is invalid: {0}")]
    Program(String),
    /// No engine supports the graph.
    #[error("no engine supports the graph:\n{0}")]
    NoEngine(Box<EngineReport>),
    /// The caller's bindings do not fit the plan.
    #[error(transparent)]
    Bindings(#[from] BindingErrors),
    /// The JSON of a plan is invalid, or belongs to another version of the library.
    #[error("plan JSON: {0}")]
    PlanJson(String),
    /// A device profile is invalid.
    #[error("device profile {field}: {rule}")]
    Profile {
        /// The key of the profile's JSON that is invalid.
        field: String,
        /// The rule that the value breaks.
        rule: String,
    },
    /// A plan or a graph was used on another device than the one for which it was made.
    #[error("the handle is of device {handle}, but the plan was made for {}", Of(*.plan))]
    OtherDevice {
        /// The ordinal of the plan's device; `None` for a plan made for a profile.
        plan: Option<u32>,
        /// The ordinal of the device of the handle that was to execute the plan.
        handle: u32,
    },
}

impl Error {
    /// Returns whether only this graph is unsupported, so that another graph may work.
    pub fn is_unsupported(&self) -> bool {
        self.class() == Class::Unsupported
    }

    /// Returns whether memory ran out, or whether cuDNN or the driver failed or is missing. No other engine, graph pattern or
    /// configuration would help.
    pub fn is_fatal(&self) -> bool {
        matches!(self.class(), Class::Fatal | Class::Absent)
    }

    /// Returns whether cuDNN, the driver or the device is missing, as opposed to failing.
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

/// The consequence of an error for a caller that could try an alternative.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Another graph, engine or executor may work.
    Unsupported,
    /// No alternative would work.
    Fatal,
    /// The library, driver or device is missing.
    Absent,
    /// Alternatives may or may not work.
    Other,
}

struct Of(Option<u32>);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(ordinal) => write!(f, "device {ordinal}"),
            None => f.write_str("a device profile; load its JSON for the device of the handle"),
        }
    }
}

struct Detail<'a>(&'a str);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ", {}", self.0) }
    }
}
