//! The bytes of a plan file: see the table in [`super`].

use super::digest::{Digest, Running};
use super::error::Fault;
use super::head::Head;
use super::read::Entry;
use super::write::Record;
use std::collections::BTreeMap;

pub(super) const MAGIC: [u8; 8] = *b"\x89sdpa\r\n\x1a";
pub(super) const VERSION: u32 = 1;

/// Bytes of magic, version and header length.
pub(super) const LEAD: u64 = 16;
/// Bytes of the number of records and the length of the index.
pub(super) const COUNTS: u64 = 8;
pub(super) const CHECKSUM: u64 = 32;
/// Bytes of an index entry with an empty label.
const SMALLEST_ENTRY: u64 = 32 + 4 + 8 + 8 + 32;

/// The largest value of a field, for readers and writers.
#[derive(Debug)]
pub(super) struct Limit {
    what: &'static str,
    most: u64,
}

pub(super) const HEADER: Limit = Limit { what: "length of the header", most: 1 << 20 };
pub(super) const RECORDS: Limit = Limit { what: "number of records", most: 1 << 16 };
pub(super) const LABEL: Limit = Limit { what: "length of a label", most: 1 << 10 };
pub(super) const PAYLOAD: Limit = Limit { what: "length of a payload", most: 1 << 26 };

impl Limit {
    pub(super) fn check(&self, value: u64) -> Result<(), Fault> {
        if value > self.most {
            return Err(Fault::new(self.what, value, format!("at most {}", self.most)));
        }
        Ok(())
    }

    /// Converts a value to its form in the file.
    fn number(&self, value: usize) -> Result<u32, Fault> {
        self.check(value as u64)?;
        u32::try_from(value).map_err(|_| Fault::new(self.what, value, format!("at most {}", u32::MAX)))
    }
}

/// The position of a payload in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) entry: Entry,
    pub(super) offset: u64,
    pub(super) checksum: Digest,
}

impl Slot {
    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.entry.bytes)
    }
}

/// Parses consecutive fields.
#[derive(Debug)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn digest(&mut self) -> Option<Digest> {
        self.array().map(Digest)
    }
}

/// Checks that an index of this size can have this many records.
pub(super) fn check_counts(records: u32, bytes: u32) -> Result<(), Fault> {
    let (records, bytes) = (u64::from(records), u64::from(bytes));
    RECORDS.check(records)?;
    let (least, most) = (records * SMALLEST_ENTRY, records * (SMALLEST_ENTRY + LABEL.most));
    if bytes < least || bytes > most {
        return Err(Fault::new("length of the index", bytes, format!("from {least} to {most} for {records} records")));
    }
    Ok(())
}

/// Parses the index; payloads begin at `start`.
pub(super) fn read_index(bytes: &[u8], records: u32, start: u64) -> Result<Vec<Slot>, Fault> {
    let mut fields = Fields(bytes);
    let mut slots: Vec<Slot> = Vec::new();
    let mut start = start;
    for i in 0..records {
        let slot = read_slot(&mut fields, i, start)?;
        if slots.last().is_some_and(|before| before.entry.key >= slot.entry.key) {
            return Err(Fault::new(format!("key of record {i}"), slot.entry.key, "greater than the one before"));
        }
        start = slot.end();
        slots.push(slot);
    }
    match fields.0.len() {
        0 => Ok(slots),
        left => Err(Fault::new("index", format!("{left} bytes too long"), "an index that ends with its last record")),
    }
}

fn read_slot(fields: &mut Fields<'_>, i: u32, start: u64) -> Result<Slot, Fault> {
    let short = || Fault::new(format!("record {i} of the index"), "cut off", "a complete record");
    let key = fields.digest().ok_or_else(short)?;
    let length = fields.u32().ok_or_else(short)?;
    LABEL.check(u64::from(length))?;
    let label = fields.bytes(length as usize).ok_or_else(short)?;
    let label = std::str::from_utf8(label).map_err(|e| Fault::new(format!("label of record {i}"), format!("not text: {e}"), "UTF-8"))?;
    let offset = fields.u64().ok_or_else(short)?;
    if offset != start {
        return Err(Fault::new(format!("offset of record {i}"), offset, format!("{start}, where the one before ends")));
    }
    let bytes = fields.u64().ok_or_else(short)?;
    PAYLOAD.check(bytes)?;
    let checksum = fields.digest().ok_or_else(short)?;
    Ok(Slot { entry: Entry { key, label: label.to_owned(), bytes }, offset, checksum })
}

/// Returns the bytes of a file before the payloads, which follow in the order of their keys.
pub(super) fn head(header: &impl Head, records: &BTreeMap<Digest, Record>) -> Result<Vec<u8>, Fault> {
    header.check()?;
    let json = serde_json::to_vec(header).map_err(|e| Fault::new("header", e, "JSON"))?;
    let mut out = Vec::new();
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend(HEADER.number(json.len())?.to_le_bytes());
    out.extend(json);
    sign(&mut out);

    let index: u64 = records.values().map(|r| SMALLEST_ENTRY + r.label.len() as u64).sum();
    out.extend(RECORDS.number(records.len())?.to_le_bytes());
    // The limits on records and labels keep the index below 2³².
    out.extend((index as u32).to_le_bytes());
    let mut offset = out.len() as u64 + index + CHECKSUM;
    for record in records.values() {
        let length = record.payload.len() as u64;
        PAYLOAD.check(length)?;
        out.extend(record.key.0);
        out.extend(LABEL.number(record.label.len())?.to_le_bytes());
        out.extend(record.label.as_bytes());
        out.extend(offset.to_le_bytes());
        out.extend(length.to_le_bytes());
        out.extend(Digest::of(&record.payload).0);
        offset += length;
    }
    sign(&mut out);
    Ok(out)
}

/// Appends the checksum of everything so far.
fn sign(out: &mut Vec<u8>) {
    let mut running = Running::default();
    running.update(out);
    out.extend(running.so_far().0);
}
