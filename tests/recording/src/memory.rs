//! Device memory: addresses with nothing behind them.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// As much as an H200 has.
pub(crate) const TOTAL: u64 = 141 << 30;
/// Every allocation begins at a multiple of this.
const ALIGNMENT: u64 = 256;
/// Between two allocations at least, so that what reaches past the end of one does not lie in another.
const GAP: u64 = 1 << 20;
/// Where the first one begins.
const START: u64 = 0x7_0000_0000;

struct Memory {
    allocations: BTreeMap<u64, u64>,
    next: u64,
    used: u64,
    /// Where what is allocated in this turn begins.
    turn: u64,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory { allocations: BTreeMap::new(), next: START, used: 0, turn: START });
/// One more with every piece that is freed.
static FREED: AtomicU64 = AtomicU64::new(0);

/// An address, or `None` where memory is out.
pub(crate) fn allocate(bytes: u64) -> Option<u64> {
    let mut memory = MEMORY.lock();
    memory.used = memory.used.checked_add(bytes).filter(|used| *used <= TOTAL)?;
    let address = memory.next;
    memory.next += (bytes + GAP).next_multiple_of(ALIGNMENT);
    memory.allocations.insert(address, bytes);
    Some(address)
}

/// Whether there was such an allocation.
pub(crate) fn free(address: u64) -> bool {
    let mut memory = MEMORY.lock();
    let Some(bytes) = memory.allocations.remove(&address) else { return false };
    memory.used -= bytes;
    FREED.fetch_add(1, Ordering::Relaxed);
    true
}

/// Whether a piece lies inside of one allocation.
pub(crate) fn holds(address: u64, bytes: u64) -> bool {
    let memory = MEMORY.lock();
    let below = memory.allocations.range(..=address).next_back();
    below.is_some_and(|(start, size)| address.checked_add(bytes).is_some_and(|end| end <= start + size))
}

/// Where the allocation begins that holds an address.
pub(crate) fn start(address: u64) -> Option<u64> {
    let memory = MEMORY.lock();
    let below = memory.allocations.range(..=address).next_back();
    below.filter(|(start, size)| address < *start + *size).map(|(start, _)| *start)
}

pub(crate) fn allocated() -> u64 {
    MEMORY.lock().used
}

/// Of what was allocated since the last [`turn`].
pub(crate) fn allocated_in_turn() -> u64 {
    let memory = MEMORY.lock();
    memory.allocations.range(memory.turn..).map(|(_, bytes)| bytes).sum()
}

/// What is allocated from now on is of another turn.
pub(crate) fn turn() {
    let mut memory = MEMORY.lock();
    memory.turn = memory.next;
}

/// How many pieces were freed so far: what was found to be allocated still is while this stays the same.
pub(crate) fn freed() -> u64 {
    FREED.load(Ordering::Relaxed)
}
