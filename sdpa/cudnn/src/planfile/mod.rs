//! Files of compiled plans: [`sdpa_nvidia::planfile`] is the container, with its guarantees.
//!
//! **A plan contains machine code. Load only files that you trust.**
//!
//! ```
//! use sdpa_cudnn::planfile::{self, Digest, Header, PlanFile, Record};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("plans");
//! let profile = r#"{"deviceName": "X", "deviceVer": 900, "multiProcessorCount": 132}"#.to_owned();
//! let header = Header { cudnn: "9.19.0".to_owned(), profile, lowering: 1 };
//! let key = Digest::parts().part(b"problem").part(b"options").finish();
//! planfile::add(&path, &header, [Record { key, label: "causal".to_owned(), payload: b"a plan".to_vec() }])?;
//!
//! let plans = PlanFile::open(&path)?;
//! assert_eq!(plans.header().mismatch(&header), None);
//! assert_eq!(plans.read(&key)?.as_deref(), Some(&b"a plan"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(test)]
mod tests;

pub use cudnn_graph::plans::{Header, Mismatch};
pub use sdpa_nvidia::planfile::{Digest, Entry, Fault, Head, NotADigest, Parts, PlanFileError, Record, add, write};

/// A file of compiled cuDNN plans.
pub type PlanFile = sdpa_nvidia::planfile::PlanFile<Header>;
