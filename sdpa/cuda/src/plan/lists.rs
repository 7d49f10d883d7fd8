//! Lists of blocks where a rule reads tensors: where they lie in the workspace, and the launch before the pass that makes them.
#![allow(unsafe_code)]

use super::told::{ListsAt, steps};
use super::{CudaPlan, Pass};
use crate::problem::Lists;
use crate::source::MAP_SHARED_BYTES;
use crate::tile::BackwardTile;
use sdpa_driver::{Launch, Submission};
use std::ffi::c_void;

/// Threads of a block that makes one list.
const THREADS: u32 = 1024;

/// How many lists there are, and how many items one may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Made {
    lists: i64,
    most: i64,
    rows: [i64; 2],
}

impl Made {
    /// Of a pass whose rule reads tensors.
    pub(super) fn of(pass: &Pass) -> Option<Made> {
        let forward = pass.attention();
        if forward.lists() != Lists::AtCall {
            return None;
        }
        let [_, _, seq_q, seq_kv] = forward.extents;
        let (tiles, blocks) = match pass {
            Pass::Forward(_, tile) => (steps(seq_q, tile.queries()), steps(seq_kv, tile.keys)),
            Pass::Backward(_, tile) => (steps(seq_q, tile.queries), steps(seq_kv, BackwardTile::KEYS)),
        };
        let (outer, most) = if matches!(pass, Pass::Forward(..)) { (tiles, blocks) } else { (blocks, tiles) };
        let rows = forward.list_rows();
        Some(Made { lists: rows[0] * rows[1] * outer, most, rows })
    }

    /// Bytes of workspace.
    pub(super) fn bytes(self) -> u64 {
        (4 * self.lists * (2 + self.most)).unsigned_abs().next_multiple_of(256)
    }

    /// Where the lists are, in workspace from here on.
    pub(super) fn at(self, address: u64) -> ListsAt {
        let ends = 4 * self.lists.unsigned_abs();
        ListsAt { begin: address, end: address + ends, blocks: address + 2 * ends, rows: self.rows }
    }
}

impl CudaPlan {
    /// Makes the lists of a call.
    ///
    /// # Safety
    /// Parameters are those of the kernels of the pass.
    pub(super) unsafe fn make_lists(
        &self,
        submission: &Submission<'_>,
        [params, captured]: [*const c_void; 2],
    ) -> Result<(), sdpa_driver::Error> {
        let (Some(made), Some(entry)) = (Made::of(&self.pass), self.kept.kernel.entries.last()) else { return Ok(()) };
        let blocks = u32::try_from(made.lists).unwrap_or(u32::MAX);
        let launch = Launch { blocks: [blocks, 1, 1], threads: THREADS, shared_bytes: MAP_SHARED_BYTES };
        // SAFETY: the caller's; such a pass has the kernel last.
        unsafe { submission.launch_entry(entry, launch, &[params, captured]) }
    }
}
