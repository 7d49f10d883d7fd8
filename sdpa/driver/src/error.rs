//! Errors, each with what a reader needs to act on it.

use std::fmt;
use std::path::PathBuf;

/// A place where a library was looked for, and why it was not taken from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Searched {
    /// A path, or a name given to the system's loader.
    pub place: String,
    /// The message of the loader.
    pub problem: String,
}

/// An error of a library, the driver or a device.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shared library is nowhere to be found, or does not load.
    #[error("{library} was not loaded; {}", Places(searched))]
    Library {
        /// The name of the library.
        library: &'static str,
        /// Every place searched, in order.
        searched: Vec<Searched>,
    },
    /// The library lacks a function.
    #[error("{} has no function {symbol}", path.display())]
    MissingSymbol {
        /// Returns the file that the library was loaded from.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The driver is there and no device is.
    #[error("the CUDA driver sees no device (asked for number {ordinal} of {count})")]
    NoDevice {
        /// The device asked for.
        ordinal: u32,
        /// Number of devices that the driver sees.
        count: u32,
    },
    /// A call into the CUDA driver failed.
    #[error("{call} failed: {name} ({code}), {text}")]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's `CUresult`.
        code: i32,
        /// The driver's name for the code, as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's own text.
        text: String,
    },
    /// The run-time compiler refused a text.
    #[error("{call} returned {code}{}", Log(log))]
    Compile {
        /// The function.
        call: &'static str,
        /// NVRTC's `nvrtcResult`.
        code: i32,
        /// The log of the compiler.
        log: String,
    },
    /// Device memory ran out, or something does not fit: a copy past the end of a buffer, a workspace over its limit.
    #[error("{what} needs {bytes} bytes; {limit}")]
    Memory {
        /// The purpose of the memory, or the thing that does not fit.
        what: String,
        /// Requested size in bytes.
        bytes: u64,
        /// The limit that was met, in words.
        limit: String,
    },
}

impl Error {
    /// True where there is no driver, no library or no device, as opposed to one that fails.
    pub fn is_absence(&self) -> bool {
        /// `CUDA_ERROR_STUB_LIBRARY`, `CUDA_ERROR_NO_DEVICE`.
        const NO_DRIVER: [i32; 2] = [34, 100];
        match self {
            Error::Library { .. } | Error::MissingSymbol { .. } | Error::NoDevice { .. } => true,
            Error::Driver { code, .. } => NO_DRIVER.contains(code),
            Error::Compile { .. } | Error::Memory { .. } => false,
        }
    }

    /// True where memory ran out, or the driver failed or is not there: whatever else is tried would fare no better.
    pub fn is_fatal(&self) -> bool {
        match self {
            Error::Library { .. } | Error::MissingSymbol { .. } | Error::NoDevice { .. } | Error::Driver { .. } => true,
            Error::Compile { .. } | Error::Memory { .. } => false,
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
