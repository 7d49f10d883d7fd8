//! Errors, each with what a reader needs to act on it.

use crate::bind::BindingErrors;
use crate::encode::TooNew;
use crate::engine::EngineReport;
use crate::ffi::codes::Status;
use crate::ir::VerifyErrors;
use crate::version::Version;
use std::fmt;
use std::path::PathBuf;

/// A place where a library was looked for, and why it was not taken from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Searched {
    /// A path, or a name given to the system's loader.
    pub place: String,
    /// What the loader said.
    pub problem: String,
}

/// Anything that can go wrong between a graph and its result.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shared library is nowhere to be found, or does not load.
    #[error("{library} was not loaded; {}", Places(searched))]
    Library {
        /// Which one.
        library: &'static str,
        /// Every place searched, in order.
        searched: Vec<Searched>,
    },
    /// The library is older than the oldest that is spoken.
    #[error("{} is cuDNN {version}; {} or newer is needed", path.display(), Version::OLDEST)]
    TooOld {
        /// Where it was loaded from.
        path: PathBuf,
        /// What it says it is.
        version: Version,
    },
    /// The library lacks a function.
    #[error("{} has no function {symbol}", path.display())]
    MissingSymbol {
        /// Where the library was loaded from.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// A process holds one cuDNN; another was asked for.
    #[error("this process already uses {}; {} was asked for", loaded.display(), asked.display())]
    OtherLibrary {
        /// The one in use.
        loaded: PathBuf,
        /// The one asked for.
        asked: PathBuf,
    },
    /// The driver is there and no device is.
    #[error("the CUDA driver sees no device (asked for number {ordinal} of {count})")]
    NoDevice {
        /// The device asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A call into the CUDA driver failed.
    #[error("{call} failed: {name} ({code}), {text}")]
    Driver {
        /// The function.
        call: &'static str,
        /// `CUresult`.
        code: i32,
        /// Its name.
        name: String,
        /// The driver's own text.
        text: String,
    },
    /// A call into cuDNN failed.
    #[error("{call} on {subject} failed: {status}{}", Detail(text))]
    Cudnn {
        /// The function.
        call: &'static str,
        /// What it was called on.
        subject: String,
        /// What it returned.
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
        /// What it must be.
        rule: String,
    },
    /// A plan, or a graph, was to be executed on another device than it was made for.
    #[error("the plan is of {}, the handle of device {handle}", Of(*.plan))]
    OtherDevice {
        /// The plan's; none for a plan that was made of a profile.
        plan: Option<u32>,
        /// The handle's.
        handle: u32,
    },
    /// Device memory ran out, or a workspace is over its limit.
    #[error("{what} needs {bytes} bytes; {limit}")]
    Memory {
        /// What for.
        what: String,
        /// How much.
        bytes: u64,
        /// Which limit.
        limit: String,
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
        /// `CUDA_ERROR_STUB_LIBRARY`, `CUDA_ERROR_NO_DEVICE`.
        const NO_DRIVER: [i32; 2] = [34, 100];
        match self {
            Error::NoEngine(_) | Error::TooNew(_) => Class::Unsupported,
            Error::Cudnn { status, .. } if status.is_unsupported() => Class::Unsupported,
            Error::Cudnn { status, .. } if status.is_out_of_memory() || status.is_execution() => Class::Fatal,
            Error::Driver { code, .. } if NO_DRIVER.contains(code) => Class::Absent,
            Error::Driver { .. } => Class::Fatal,
            Error::Library { .. } | Error::TooOld { .. } | Error::MissingSymbol { .. } | Error::NoDevice { .. } => Class::Absent,
            Error::Cudnn { .. }
            | Error::OtherLibrary { .. }
            | Error::Verify(_)
            | Error::Bindings(_)
            | Error::PlanJson(_)
            | Error::Program(_)
            | Error::Profile { .. }
            | Error::OtherDevice { .. }
            | Error::Memory { .. } => Class::Other,
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

struct Places<'a>(&'a [Searched]);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("searched")?;
        for (i, s) in self.0.iter().enumerate() {
            write!(f, "{} {} ({})", if i == 0 { "" } else { "," }, s.place, s.problem)?;
        }
        Ok(())
    }
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
