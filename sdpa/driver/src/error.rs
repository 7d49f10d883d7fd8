//! Errors, each with the facts to act on it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// A path at which a library was searched, and the reason why it was not loaded from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Searched {
    /// The path, or the library name that was passed to the system's loader.
    pub place: String,
    /// The loader's message.
    pub problem: String,
}

/// An error of a library, the driver or a device.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shared library was not found, or cannot be loaded.
    #[error("{library} was not loaded; {}", Places(searched))]
    Library {
        /// The name of the library.
        library: &'static str,
        /// Every path that was searched, in order.
        searched: Vec<Searched>,
    },
    /// The library lacks a function.
    #[error("{} has no function {symbol}; a newer version may have it", path.display())]
    MissingSymbol {
        /// The path of the library file.
        path: PathBuf,
        /// The name of the missing function.
        symbol: &'static str,
    },
    /// There is a driver, but not this device.
    #[error("the CUDA driver has no device {ordinal}: the number of visible devices is {count}; check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// The ordinal that was requested.
        ordinal: u32,
        /// The number of devices.
        count: u32,
    },
    /// A call into the CUDA driver failed.
    #[error("{call} failed: {name} ({code}), {text}")]
    Driver {
        /// The driver function that was called.
        call: &'static str,
        /// The `CUresult` that the driver returned.
        code: i32,
        /// The driver's name of the code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's message.
        text: String,
    },
    /// A call into NCCL failed, or its version is too old.
    #[error("{call} returned {code}: {text}")]
    Nccl {
        /// The NCCL function that was called.
        call: &'static str,
        /// The `ncclResult_t` that NCCL returned.
        code: i32,
        /// NCCL's text for the code, or the reason.
        text: String,
    },
    /// Ranks did not do their part in time.
    #[error("waited {after:?} for {what}; a rank may be stopped, or wait for another exchange")]
    Timeout {
        /// The event that did not happen in time.
        what: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// The environment does not say which rank this process is.
    #[error("{launcher}: {problems}")]
    Launcher {
        /// The launcher whose variables were read.
        launcher: &'static str,
        /// Every variable that is missing or wrong, with the rule.
        problems: String,
    },
    /// NVRTC cannot compile a source.
    #[error("{call} returned {code}{}", Log(log))]
    Compile {
        /// The NVRTC function that was called.
        call: &'static str,
        /// The `nvrtcResult` that NVRTC returned.
        code: i32,
        /// The compiler's log.
        log: String,
    },
    /// A request does not fit: a copy past the end of a buffer, a workspace that is too small, or too many kernel arguments.
    #[error("{what} needs {bytes} bytes; {limit}")]
    Memory {
        /// The purpose of the memory, or a description of the object that does not fit.
        what: String,
        /// The requested size in bytes.
        bytes: u64,
        /// The limit that was exceeded, as text.
        limit: String,
    },
    /// A kernel, a plan or a buffer of one device was used with a stream of another.
    #[error("{what} is on device {got}, expected device {expected}, the device of the stream")]
    OtherDevice {
        /// The kind of the object, such as `the kernel`.
        what: &'static str,
        /// The ordinal of the object's device.
        got: u32,
        /// The ordinal of the stream's device.
        expected: u32,
    },
}

impl Error {
    /// Returns whether a driver, library or device is missing, as opposed to failing.
    pub fn is_absence(&self) -> bool {
        /// `CUDA_ERROR_STUB_LIBRARY`, `CUDA_ERROR_NO_DEVICE`.
        const NO_DRIVER: [i32; 2] = [34, 100];
        match self {
            Error::Library { .. } | Error::MissingSymbol { .. } | Error::NoDevice { .. } => true,
            Error::Driver { code, .. } => NO_DRIVER.contains(code),
            Error::Compile { .. }
            | Error::Nccl { .. }
            | Error::Timeout { .. }
            | Error::Launcher { .. }
            | Error::Memory { .. }
            | Error::OtherDevice { .. } => false,
        }
    }

    /// Returns whether the driver failed or is missing, for example because memory ran out, so that trying another option would not help.
    pub fn is_fatal(&self) -> bool {
        match self {
            Error::Library { .. } | Error::MissingSymbol { .. } | Error::NoDevice { .. } | Error::Driver { .. } => true,
            Error::Compile { .. }
            | Error::Nccl { .. }
            | Error::Timeout { .. }
            | Error::Launcher { .. }
            | Error::Memory { .. }
            | Error::OtherDevice { .. } => false,
        }
    }
}

struct Log<'a>(&'a str);

impl fmt::Display for Log<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
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
