//! A container for machine code: one file, written as a whole, read record by record. Each executor has a [`Head`] of its own, which says what all records of a
//! file were made by and for.
//!
//! **Records are machine code. Load only files that you trust.** What is checked is accident and permissions, not malice:
//! a file that was cut off or damaged is an error and never a wrong plan. A file is read only where it belongs to this user or root and not
//! everybody may write it, and where no folder on the way to it lets anybody else put another one in its place: whoever may write a file can
//! put any code into it, with checksums that hold.
//!
//! ```
//! use sdpa_nvidia::planfile::{self, Digest, Fault, Head, PlanFile, Record};
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
//! A file is never changed, only replaced: [`write()`] and [`add`] move a finished file over the old one, and who has the old one
//! open goes on reading that. [`add`] holds an advisory lock on a file beside it, named like it with `.lock` at the end, which
//! stays; [`write()`] and readers take no lock. A process that is killed while it writes may leave a `.sdpa-*.tmp` behind.
//!
//! # Format
//!
//! Version 1. Numbers are little endian, texts UTF-8. A checksum is the SHA-256 of *everything before it in the file*, but for
//! those of payloads, which are of the payload.
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
//! What is before the version stays as it is in every version to come. A field more is a version more.

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
