//! Scratch memory of passes: its size, and whether it is available.

use crate::isa::Isa;
use crate::long_sums::Long;
use crate::output::Partial;
use crate::pack::Scratch;
use crate::program::Rules;
use crate::schedule::Schedule;
use crate::{decode, tiles};
use sdpa_core::error::{Error, ExecutorName, Reason, Unsupported};

/// Returns the size in bytes of the scratch memory of a forward pass, for all workers and for partial results.
pub(crate) fn workspace(schedule: &Schedule, isa: Isa, rules: &Rules) -> usize {
    let parts = schedule.strips.iter().filter(|strip| strip.n_pieces > 1);
    let partials: usize = parts.map(|strip| strip.n_pieces * Partial::bytes(strip.rows.len(), schedule.extents.dim_v)).sum();
    schedule.threads.min(schedule.pieces.len()) * of_worker(schedule, isa, rules, Long::bytes) + partials
}

/// Returns the largest size in bytes of the scratch memory of a forward pass, for any lengths of packed sequences. `schedule` is that of
/// the longest sequences.
pub(crate) fn most_workspace(schedule: &Schedule, isa: Isa, rules: &Rules) -> usize {
    let partial = Partial::bytes(schedule.strip_rows_used(), schedule.extents.dim_v);
    schedule.threads * of_worker(schedule, isa, rules, Long::most_bytes) + schedule.most_parts() * partial
}

/// Returns the size in bytes of the scratch memory of one worker. `long` returns the size of its f64 sums for a number of elements and a
/// number of rows.
pub(crate) fn of_worker(schedule: &Schedule, isa: Isa, rules: &Rules, long: fn(&Schedule, usize, usize) -> usize) -> usize {
    let lens = scratch_lens(schedule, isa);
    let kept = 4 * kept_len(schedule, rules.drop());
    Scratch::bytes(&lens, 2 * lens[2]) + rules.bytes() + kept + long(schedule, lens[0].max(lens[1]), lens[2])
}

pub(crate) fn scratch_lens(schedule: &Schedule, isa: Isa) -> Vec<usize> {
    if schedule.blocks.few_rows { decode::scratch_lens(schedule, isa).to_vec() } else { tiles::scratch_lens(schedule, isa).to_vec() }
}

/// Returns the number of mask elements that a worker holds: those of a tile against a block of keys, or 0 if no mask is evaluated
/// (`drop`).
pub(crate) fn kept_len(schedule: &Schedule, drop: bool) -> usize {
    if drop { schedule.blocks.block_keys * schedule.blocks.tile_rows } else { 0 }
}

/// Returns an error if the memory is not available, because a failed allocation would abort the process.
pub(crate) fn is_there(bytes: usize) -> Result<(), Error> {
    let mut memory: Vec<u8> = Vec::new();
    memory.try_reserve_exact(bytes).map_err(|_| {
        let (field, value, limit) = ("workspace".to_owned(), format!("{bytes} bytes"), "at most the available memory".to_owned());
        Error::Unsupported(Unsupported::new(ExecutorName::CPU, vec![Reason::Limit { field, value, limit }]))
    })
}
