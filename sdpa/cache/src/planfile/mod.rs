//! A container for machine code: one file, written as a whole and read record by record. Each executor has its own [`Head`], which describes the
//! compiler and target of all records.
//!
//! **Records are machine code. Load only files that you trust.** The checks detect accidents and wrong permissions, not malice: a truncated or
//! damaged file is an error, never a wrong plan. A file is read only if it belongs to this user or root, not every user may write it, and no folder
//! on its path lets another user replace it. A user who may write a file can put any code into it, with valid checksums.
//!
//! ```
//! use sdpa_cache::planfile::{self, Digest, Fault, Head, PlanFile, Record};
//!
//! #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
//! struct Compiler {
//!     version: u32,
//! }
//!
//! impl Head for Compiler {
//!     type Mismatch = String;
//!     fn mismatch(&self, here: &Compiler) -> Option<String> {
//!         (self != here).then(|| format!("version: the file has {}, here is {}", self.version, here.version))
//!     }
//! }
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("plans");
//! let here = Compiler { version: 1 };
//! let key = Digest::parts().part(b"problem").part(b"options").finish();
//! planfile::add(&path, &here, [Record { key, label: "causal".to_owned(), payload: b"a plan".to_vec() }])?;
//!
//! let plans: PlanFile<Compiler> = PlanFile::open(&path)?;
//! assert_eq!(plans.header().mismatch(&here), None);
//! assert_eq!(plans.read(&key)?.as_deref(), Some(&b"a plan"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Sharing
//!
//! A file is never changed, only replaced: [`write()`] and [`add`] move a finished file over the old one, and processes that have the old one open
//! keep reading it. [`add`] holds an advisory lock on a file next to it, with `.lock` appended to its name, which is never deleted. [`write()`] and
//! readers take no lock. A process that is killed while it writes may leave a `.sdpa-*.tmp` file.
//!
//! # Format
//!
//! Version 1. Numbers are little endian, texts UTF-8. A checksum is the SHA-256 of *everything before it in the file*, except that those of payloads
//! cover only the payload.
//!
//! | bytes | what | rule |
//! |---|---|---|
//! | 8 | magic | `89 73 64 70 61 0D 0A 1A` |
//! | 4 | format version | 1 |
//! | 4 | length *H* of the header | at most 1 MiB |
//! | *H* | the [`Head`] as JSON | what the executor's type reads and checks |
//! | 32 | checksum | |
//! | 4 | number of records | at most 65 536 |
//! | 4 | length *I* of the index | |
//! | *I* | for each record: | |
//! | · 32 | key | greater than the one before |
//! | · 4 | length *L* of the label | at most 1024 |
//! | · *L* | label | |
//! | · 8 | offset of the payload in the file | where the one before ends; the first: after the index's checksum |
//! | · 8 | length of the payload | at most 64 MiB |
//! | · 32 | SHA-256 of the payload | |
//! | 32 | checksum | |
//! | | payloads | the file ends with the last |
//!
//! Everything up to the version field stays the same in all future versions. A new field needs a new version.

mod digest;
mod error;
mod folder;
mod format;
mod guard;
mod head;
mod read;
mod source;
mod write;

pub use digest::{Digest, NotADigest, Parts};
pub use error::{Fault, PlanFileError};
pub use folder::{Folder, Usage};
pub use head::Head;
pub use read::{Entry, PlanFile};
pub use write::{Record, add, write};
