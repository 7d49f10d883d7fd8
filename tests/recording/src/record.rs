//! What was submitted, and how many of everything there are.

use crate::entry::Entry;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::ffi::c_int;

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

/// Descriptors by kind.
struct Descriptors {
    /// The reader of now. What an earlier one's threads still destroy is of an earlier turn.
    turn: u64,
    created: [u64; KINDS],
    /// Of this turn.
    alive: [u64; KINDS],
}

static DESCRIPTORS: Mutex<Descriptors> = Mutex::new(Descriptors { turn: 0, created: [0; KINDS], alive: [0; KINDS] });

fn place(kind: c_int) -> Option<usize> {
    usize::try_from(kind).ok().filter(|kind| *kind < KINDS)
}

/// One more of a kind; the turn that it is of.
pub(crate) fn created(kind: c_int) -> u64 {
    let mut all = DESCRIPTORS.lock();
    if let Some(kind) = place(kind) {
        all.created[kind] += 1;
        all.alive[kind] += 1;
    }
    all.turn
}

/// One less of a kind and turn.
pub(crate) fn destroyed(kind: c_int, turn: u64) {
    let mut all = DESCRIPTORS.lock();
    if let Some(kind) = place(kind).filter(|_| turn == all.turn) {
        all.alive[kind] -= 1;
    }
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
        place(kind).map_or(0, |kind| DESCRIPTORS.lock().created[kind])
    }

    /// How many of a kind that were created in this turn are alive.
    fn recording_alive(kind: c_int) -> u64 {
        place(kind).map_or(0, |kind| DESCRIPTORS.lock().alive[kind])
    }

    /// Bytes of device memory that were allocated in this turn and are not freed.
    fn recording_allocated() -> u64 {
        crate::memory::allocated_in_turn()
    }

    /// Another reader begins, whose number this is: threads that an earlier one has left may still free and destroy what they have, which is not the new one's.
    fn recording_turn() -> u64 {
        crate::memory::turn();
        let mut all = DESCRIPTORS.lock();
        all.turn += 1;
        all.alive = [0; KINDS];
        all.turn
    }
}
