//! What was submitted, and how many of everything there are.

use crate::entry::Entry;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many of the last entries are kept.
const KEPT: usize = 64;

struct Record {
    entries: [Entry; KEPT],
    written: u64,
}

static RECORD: Mutex<Record> = Mutex::new(Record { entries: [Entry::NONE; KEPT], written: 0 });

/// Writes an entry in place of the oldest one. `fill` sees an old entry, and sets what is read of the new one.
pub(crate) fn write(fill: impl FnOnce(&mut Entry)) {
    let mut record = RECORD.lock();
    let at = record.written as usize % KEPT;
    fill(&mut record.entries[at]);
    record.written += 1;
}

/// Kinds of descriptors that are counted.
const KINDS: usize = 64;

/// Created and destroyed, by kind.
pub(crate) static CREATED: [AtomicU64; KINDS] = [const { AtomicU64::new(0) }; KINDS];
pub(crate) static DESTROYED: [AtomicU64; KINDS] = [const { AtomicU64::new(0) }; KINDS];

/// One more of a kind.
pub(crate) fn count(of: &[AtomicU64; KINDS], kind: i32) {
    if let Some(counter) = usize::try_from(kind).ok().and_then(|kind| of.get(kind)) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

fn counted(of: &[AtomicU64; KINDS], kind: c_int) -> u64 {
    usize::try_from(kind).ok().and_then(|kind| of.get(kind)).map_or(0, |counter| counter.load(Ordering::Relaxed))
}

thread_local! {
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps the text of a refusal, and gives its status.
#[cold]
pub(crate) fn refuse(status: c_int, text: String) -> c_int {
    SAID.with(|said| *said.borrow_mut() = text);
    status
}

/// The text of the last refusal of this thread.
pub(crate) fn said() -> String {
    SAID.with(|said| said.borrow().clone())
}

/// How many entries were ever written.
pub(crate) fn written() -> u64 {
    RECORD.lock().written
}

exported! {
    /// How many entries were ever written.
    fn recording_written() -> u64 {
        written()
    }

    /// The `n`th entry, counted from 0; 1 where it is not there, or no longer.
    fn recording_entry(n: u64, to: *mut Entry) -> c_int {
        let record = RECORD.lock();
        if n >= record.written || record.written - n > KEPT as u64 {
            return 1;
        }
        // SAFETY: the caller's: a live entry.
        unsafe { crate::store(to, record.entries[n as usize % KEPT]) };
        0
    }

    /// How many descriptors of a kind were ever created.
    fn recording_created(kind: c_int) -> u64 {
        counted(&CREATED, kind)
    }

    /// How many descriptors of a kind were destroyed.
    fn recording_destroyed(kind: c_int) -> u64 {
        counted(&DESTROYED, kind)
    }

    /// Bytes of device memory that are allocated.
    fn recording_allocated() -> u64 {
        crate::memory::allocated()
    }
}
