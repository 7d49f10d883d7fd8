//! NCCL over the ranks of one process: communicators that do not block, with transfers within groups. Sends are copied when their group ends, so that only receives wait.
//! Streams do everything at once, so a communicator is in progress until its receives are done.
//!
//! A thread may ask for late transfers ([`emulated_late`]). They then read and write memory only when a stream or the host waits for an event behind them, so that
//! a wait that is missing changes results.

use crate::memory::holds;
use crate::{Ptr, store};
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

const SUCCESS: c_int = 0;
const INTERNAL_ERROR: c_int = 3;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;
const MAGIC: u32 = 0xcafe_beef;

/// The 128 bytes of an id.
type Id = [u8; 128];

/// The id of a group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(Id);

/// The first members of `ncclConfig_t`.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// A group of ranks.
#[derive(Default)]
struct Group {
    size: usize,
    joined: Vec<usize>,
    /// Ranks that aborted.
    gone: Vec<usize>,
    finished: usize,
    /// Bytes on their way, by sender and receiver.
    mail: BTreeMap<[usize; 2], VecDeque<Vec<u8>>>,
}

/// A rank's communicator.
struct Rank {
    id: Id,
    rank: usize,
    /// Receives in progress: sender, address, bytes.
    receives: VecDeque<(usize, u64, usize)>,
    finalized: bool,
}

#[derive(Default)]
struct State {
    groups: BTreeMap<Id, Group>,
    /// By their handles.
    ranks: BTreeMap<usize, Rank>,
}

static STATE: Mutex<State> = Mutex::new(State { groups: BTreeMap::new(), ranks: BTreeMap::new() });
static NEXT: AtomicU64 = AtomicU64::new(1);

/// The sends and receives of the group that a thread has open.
#[derive(Default)]
struct Open {
    depth: usize,
    /// Communicator, peer, address, bytes.
    sends: Vec<(usize, usize, u64, usize)>,
    receives: Vec<(usize, usize, u64, usize)>,
    stream: usize,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
    static LATE: Cell<bool> = const { Cell::new(false) };
}

/// The transfers of one group that are not done yet.
struct Deferred {
    /// Communicator, peer, address, bytes.
    sends: Vec<(usize, usize, u64, usize)>,
    receives: Vec<(usize, usize, u64, usize)>,
}

/// The late transfers of a stream, and the number of those that are done.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<Deferred>,
    done: usize,
}

/// By streams.
static QUEUES: Mutex<BTreeMap<usize, Queue>> = Mutex::new(BTreeMap::new());
/// The stream of each event, and the number of late transfers before it.
static EVENTS: Mutex<BTreeMap<usize, (usize, usize)>> = Mutex::new(BTreeMap::new());

/// Notes the place of an event on a stream.
pub(crate) fn recorded(event: usize, stream: usize) {
    let place = QUEUES.lock().get(&stream).map_or(0, |queue| queue.done + queue.waiting.len());
    EVENTS.lock().insert(event, (stream, place));
}

/// Does the late transfers before an event, and waits for what they receive.
pub(crate) fn passed(event: usize) -> c_int {
    let Some((stream, place)) = EVENTS.lock().get(&event).copied() else { return SUCCESS };
    passed_until(stream, place)
}

/// Does the late transfers of a stream up to a number of them.
pub(crate) fn passed_until(stream: usize, place: usize) -> c_int {
    loop {
        let next = QUEUES.lock().get_mut(&stream).filter(|queue| queue.done < place).and_then(|queue| queue.waiting.pop_front());
        let Some(next) = next else { return SUCCESS };
        let communicator = next.sends.first().or(next.receives.first()).map(|(communicator, ..)| *communicator);
        let sends = next.sends.into_iter().map(|(own, peer, from, bytes)| (own, peer, bytes_of(from, bytes))).collect();
        let mut code = posted(sends, next.receives);
        while code == IN_PROGRESS {
            std::thread::yield_now();
            code = communicator.map_or(SUCCESS, |communicator| STATE.lock().progress(communicator));
        }
        if code != SUCCESS {
            return code;
        }
        if let Some(queue) = QUEUES.lock().get_mut(&stream) {
            queue.done += 1;
        }
    }
}

/// Returns the bytes of device memory that [`holds`] has found.
fn bytes_of(from: u64, bytes: usize) -> Vec<u8> {
    // SAFETY: an allocation holds the bytes; callers free memory after its transfers are done.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(from as usize), bytes) }.to_vec()
}

/// Puts what is sent into the mail, and begins to receive.
fn posted(sends: Vec<(usize, usize, Vec<u8>)>, receives: Vec<(usize, usize, u64, usize)>) -> c_int {
    let mut state = STATE.lock();
    for (from, peer, bytes) in sends {
        let Some((id, rank)) = state.ranks.get(&from).map(|own| (own.id, own.rank)) else { return INVALID_ARGUMENT };
        state.groups.entry(id).or_default().mail.entry([rank, peer]).or_default().push_back(bytes);
    }
    let mut any = false;
    for (own, peer, to, bytes) in receives {
        let Some(own) = state.ranks.get_mut(&own) else { return INVALID_ARGUMENT };
        own.receives.push_back((peer, to, bytes));
        any = true;
    }
    if any { IN_PROGRESS } else { SUCCESS }
}

impl State {
    /// Receives the bytes that have arrived, in the order of each sender, and returns the state of a communicator.
    fn progress(&mut self, handle: usize) -> c_int {
        let Some(own) = self.ranks.get_mut(&handle) else { return INVALID_ARGUMENT };
        let Some(group) = self.groups.get_mut(&own.id) else { return INTERNAL_ERROR };
        if group.joined.len() < group.size {
            return IN_PROGRESS;
        }
        let mut waiting: Vec<(usize, u64, usize)> = Vec::new();
        for (peer, to, bytes) in std::mem::take(&mut own.receives) {
            let earlier = waiting.iter().any(|(other, ..)| *other == peer);
            let mail = group.mail.get_mut(&[peer, own.rank]).filter(|_| !earlier).and_then(VecDeque::pop_front);
            let Some(mail) = mail else {
                if group.gone.contains(&peer) {
                    return REMOTE_ERROR;
                }
                waiting.push((peer, to, bytes));
                continue;
            };
            if mail.len() != bytes || !holds(to, bytes as u64) {
                return INVALID_USAGE;
            }
            // SAFETY: an allocation holds the bytes, by the line above.
            unsafe { std::ptr::copy_nonoverlapping(mail.as_ptr(), std::ptr::with_exposed_provenance_mut(to as usize), bytes) };
        }
        own.receives = waiting.into();
        if !own.receives.is_empty() || own.finalized && group.finished < group.size {
            return IN_PROGRESS;
        }
        SUCCESS
    }
}

fn handle(communicator: Ptr) -> usize {
    communicator.addr()
}

exported! {
    /// The oldest supported version.
    fn ncclGetVersion(version: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(version, 21_805) }
    }

    /// Makes another id each time.
    fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
        let mut bytes = [7; 128];
        bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        // SAFETY: the header's contract.
        unsafe { store(id, UniqueId(bytes)) }
    }

    /// NCCL's texts.
    fn ncclGetErrorString(code: c_int) -> *const c_char {
        let text: &CStr = match code {
            SUCCESS => c"no error",
            INTERNAL_ERROR => c"internal error",
            INVALID_ARGUMENT => c"invalid argument",
            INVALID_USAGE => c"invalid usage",
            REMOTE_ERROR => c"remote process exited or there was a network error",
            IN_PROGRESS => c"NCCL operation in progress",
            _ => c"unknown result code",
        };
        text.as_ptr()
    }

    /// In progress until all ranks have joined. Only communicators that do not block are made.
    fn ncclCommInitRankConfig(made: *mut Ptr, size: c_int, id: UniqueId, rank: c_int, config: *const Config) -> c_int {
        // SAFETY: the header's contract.
        let config = unsafe { &*config };
        let (size, rank) = (size as usize, rank as usize);
        if config.magic != MAGIC || config.size < size_of::<Config>() || config.version < 21_700 || config.blocking != 0 || rank >= size {
            return INVALID_ARGUMENT;
        }
        let mut state = STATE.lock();
        let group = state.groups.entry(id.0).or_default();
        if group.joined.contains(&rank) || group.size != 0 && group.size != size {
            return INVALID_USAGE;
        }
        group.size = size;
        group.joined.push(rank);
        let handle = NEXT.fetch_add(1, Ordering::Relaxed) as usize;
        state.ranks.insert(handle, Rank { id: id.0, rank, receives: VecDeque::new(), finalized: false });
        // SAFETY: the header's contract.
        unsafe { store(made, std::ptr::without_provenance_mut(handle)) };
        IN_PROGRESS
    }

    /// Receives the bytes that have arrived, and stores the state of the communicator.
    fn ncclCommGetAsyncError(communicator: Ptr, code: *mut c_int) -> c_int {
        let now = STATE.lock().progress(handle(communicator));
        // SAFETY: the header's contract.
        unsafe { store(code, now) }
    }

    /// In progress until all ranks have done so.
    fn ncclCommFinalize(communicator: Ptr) -> c_int {
        let mut state = STATE.lock();
        let Some(own) = state.ranks.get_mut(&handle(communicator)) else { return INVALID_ARGUMENT };
        own.finalized = true;
        let id = own.id;
        state.groups.entry(id).or_default().finished += 1;
        IN_PROGRESS
    }

    /// Only after it is finalised.
    fn ncclCommDestroy(communicator: Ptr) -> c_int {
        match STATE.lock().ranks.remove(&handle(communicator)) {
            Some(own) if own.finalized => SUCCESS,
            Some(_) => INVALID_USAGE,
            None => INVALID_ARGUMENT,
        }
    }

    /// Other ranks receive an error when they wait for this one.
    fn ncclCommAbort(communicator: Ptr) -> c_int {
        let mut state = STATE.lock();
        let Some(own) = state.ranks.remove(&handle(communicator)) else { return INVALID_ARGUMENT };
        state.groups.entry(own.id).or_default().gone.push(own.rank);
        SUCCESS
    }

    /// May be nested.
    fn ncclGroupStart() -> c_int {
        OPEN.with_borrow_mut(|open| open.depth += 1);
        SUCCESS
    }

    /// Not a function of NCCL: transfers of this thread are late from now on if `on`.
    fn emulated_late(on: bool) -> c_int {
        LATE.set(on);
        SUCCESS
    }

    /// Copies what is sent, unless transfers are late.
    fn ncclGroupEnd() -> c_int {
        let Some(open) = OPEN.with_borrow_mut(|open| {
            open.depth = open.depth.checked_sub(1)?;
            Some(if open.depth == 0 { std::mem::take(open) } else { Open::default() })
        }) else {
            return INVALID_USAGE;
        };
        if LATE.get() {
            let deferred = Deferred { sends: open.sends, receives: open.receives };
            QUEUES.lock().entry(open.stream).or_default().waiting.push_back(deferred);
            return SUCCESS;
        }
        posted(open.sends.into_iter().map(|(own, peer, from, bytes)| (own, peer, bytes_of(from, bytes))).collect(), open.receives)
    }

    /// Bytes of device memory, within a group.
    fn ncclSend(from: *const c_void, count: usize, kind: c_int, peer: c_int, communicator: Ptr, stream: Ptr) -> c_int {
        if kind != 0 || !holds(from.addr() as u64, count as u64) {
            return INVALID_ARGUMENT;
        }
        OPEN.with_borrow_mut(|open| {
            open.stream = stream.addr();
            open.sends.push((handle(communicator), peer as usize, from.addr() as u64, count));
            if open.depth > 0 { SUCCESS } else { INVALID_USAGE }
        })
    }

    /// To device memory, within a group.
    fn ncclRecv(to: Ptr, count: usize, kind: c_int, peer: c_int, communicator: Ptr, stream: Ptr) -> c_int {
        if kind != 0 || !holds(to.addr() as u64, count as u64) {
            return INVALID_ARGUMENT;
        }
        OPEN.with_borrow_mut(|open| {
            open.stream = stream.addr();
            open.receives.push((handle(communicator), peer as usize, to.addr() as u64, count));
            if open.depth > 0 { SUCCESS } else { INVALID_USAGE }
        })
    }
}
