//! An open plan file: header and index in memory, payloads read on demand.

use super::digest::{Digest, Running};
use super::error::{Fault, PlanFileError};
use super::format::{self, Fields, Slot};
use super::guard;
use super::head::Head;
use super::source::Source;
use std::cmp::Ordering;
use std::io;
use std::path::{Path, PathBuf};

/// An open plan file. It stays readable after another file replaces it.
#[derive(Debug)]
pub struct PlanFile<H> {
    path: PathBuf,
    header: H,
    slots: Vec<Slot>,
    source: Source,
}

/// The index entry of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key of the payload.
    pub key: Digest,
    /// A description of the record, for display.
    pub label: String,
    /// Size of the payload in bytes.
    pub bytes: u64,
}

impl<H: Head> PlanFile<H> {
    /// Opens a file, and reads its header and index.
    ///
    /// # Errors
    /// Returns a [`PlanFileError`] for every file that is not a valid plan file. Nothing is used before its checksum is verified.
    pub fn open(path: impl AsRef<Path>) -> Result<PlanFile<H>, PlanFileError> {
        let path = path.as_ref();
        let source = Source::new(guard::open(path)?);
        let length = source.length().map_err(PlanFileError::io(path, "reading the metadata of"))?;
        let mut head = Beginning { path, source: &source, length, at: 0, checksum: Running::default() };
        let header = head.header()?;
        let slots = head.index()?;
        Ok(PlanFile { path: path.to_owned(), header, slots, source })
    }

    /// Returns the header: the compiler and the target of the records.
    pub fn header(&self) -> &H {
        &self.header
    }

    /// Iterates over every record, in the order of keys.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = &Entry> {
        self.slots.iter().map(|slot| &slot.entry)
    }

    /// Returns the payload of a key; `None` if the file has no such record.
    ///
    /// # Errors
    /// Returns a [`PlanFileError`] if the payload cannot be read or its checksum is wrong.
    pub fn read(&self, key: &Digest) -> Result<Option<Vec<u8>>, PlanFileError> {
        let found = self.slots.binary_search_by(|slot| slot.entry.key.cmp(key)).ok();
        found.and_then(|i| self.slots.get(i)).map(|slot| self.payload(slot)).transpose()
    }

    fn payload(&self, slot: &Slot) -> Result<Vec<u8>, PlanFileError> {
        let what = || format!("payload {:?}", slot.entry.label);
        let bytes = match self.source.read(slot.offset, slot.entry.bytes) {
            // The file was long enough when it was opened, so another process has truncated it.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                let has = self.source.length().map_err(PlanFileError::io(&self.path, "reading the metadata of"))?;
                return Err(PlanFileError::Truncated { path: self.path.clone(), what: what(), needs: slot.end(), has });
            }
            read => read.map_err(PlanFileError::io(&self.path, "reading"))?,
        };
        if Digest::of(&bytes) != slot.checksum {
            return Err(PlanFileError::Damaged { path: self.path.clone(), what: what() });
        }
        Ok(bytes)
    }
}

/// The part of a file before the payloads, during parsing.
#[derive(Debug)]
struct Beginning<'a> {
    path: &'a Path,
    source: &'a Source,
    length: u64,
    at: u64,
    checksum: Running,
}

impl Beginning<'_> {
    fn header<H: Head>(&mut self) -> Result<H, PlanFileError> {
        let lead = self.source.read(0, self.length.min(format::LEAD)).map_err(PlanFileError::io(self.path, "reading"))?;
        let magic = lead.get(..format::MAGIC.len()).unwrap_or(&lead);
        if !format::MAGIC.starts_with(magic) {
            return Err(PlanFileError::NotAPlanFile { path: self.path.to_owned() });
        }
        let mut fields = Fields(lead.get(format::MAGIC.len()..).unwrap_or(&[]));
        let found = fields.u32().ok_or_else(|| self.truncated("format version", format::LEAD))?;
        match found.cmp(&format::VERSION) {
            Ordering::Equal => {}
            Ordering::Greater => return Err(PlanFileError::Newer { path: self.path.to_owned(), found, known: format::VERSION }),
            Ordering::Less => return Err(self.corrupt(Fault::new("format version", found, "at least 1"))),
        }
        let length = fields.u32().ok_or_else(|| self.truncated("header", format::LEAD))?;
        format::HEADER.check(u64::from(length)).map_err(|fault| self.corrupt(fault))?;
        self.checksum.update(&lead);
        self.at = format::LEAD;
        let json = self.checked("header", u64::from(length))?;
        let header: H = serde_json::from_slice(&json).map_err(|e| self.corrupt(Fault::new("header", "unreadable", e.to_string())))?;
        header.check().map_err(|fault| self.corrupt(fault))?;
        Ok(header)
    }

    fn index(&mut self) -> Result<Vec<Slot>, PlanFileError> {
        let counts = self.next("index", format::COUNTS)?;
        let mut fields = Fields(&counts);
        let (Some(records), Some(length)) = (fields.u32(), fields.u32()) else {
            return Err(self.truncated("index", self.at));
        };
        format::check_counts(records, length).map_err(|fault| self.corrupt(fault))?;
        let index = self.checked("index", u64::from(length))?;
        let slots = format::read_index(&index, records, self.at).map_err(|fault| self.corrupt(fault))?;
        let end = slots.last().map_or(self.at, Slot::end);
        match self.length.cmp(&end) {
            Ordering::Equal => Ok(slots),
            Ordering::Less => Err(self.truncated("payloads", end)),
            Ordering::Greater => Err(self.corrupt(Fault::new("length", self.length, format!("{end}, where the last payload ends")))),
        }
    }

    /// Reads the next bytes and the checksum after them, and verifies it over everything so far.
    fn checked(&mut self, what: &str, length: u64) -> Result<Vec<u8>, PlanFileError> {
        let bytes = self.next(what, length)?;
        let holds = self.checksum.so_far();
        if Fields(&self.next(what, format::CHECKSUM)?).digest() != Some(holds) {
            return Err(PlanFileError::Damaged { path: self.path.to_owned(), what: what.to_owned() });
        }
        Ok(bytes)
    }

    fn next(&mut self, what: &str, length: u64) -> Result<Vec<u8>, PlanFileError> {
        let end = self.at.saturating_add(length);
        if end > self.length {
            return Err(self.truncated(what, end));
        }
        let bytes = match self.source.read(self.at, length) {
            // The file has been truncated since its size was queried.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(self.truncated(what, end)),
            read => read.map_err(PlanFileError::io(self.path, "reading"))?,
        };
        self.checksum.update(&bytes);
        self.at = end;
        Ok(bytes)
    }

    fn truncated(&self, what: &str, needs: u64) -> PlanFileError {
        PlanFileError::Truncated { path: self.path.to_owned(), what: what.to_owned(), needs, has: self.length }
    }

    fn corrupt(&self, fault: Fault) -> PlanFileError {
        fault.read(self.path)
    }
}
