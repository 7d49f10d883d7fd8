//! Lists of blocks where a rule reads tensors: where they lie in the workspace, and the launch before the pass that makes them.
#![allow(unsafe_code)]

use super::told::{ListsAt, steps};
use super::{CudaPlan, Walk};
use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::problem::{Forward, Lists};
use crate::source::MAP_SHARED_BYTES;
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
    /// Of a walk, where the rule reads tensors.
    pub(super) fn of(forward: &Forward, walk: Walk) -> Option<Made> {
        if forward.lists() != Lists::AtCall {
            return None;
        }
        let [_, _, seq_q, seq_kv] = forward.extents;
        let [tiles, blocks] = [steps(seq_q, walk.queries), steps(seq_kv, walk.keys)];
        let (outer, most) = if walk.of_keys { (blocks, tiles) } else { (tiles, blocks) };
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
    pub(super) unsafe fn make_lists(&self, submission: &Submission<'_>, parameters: [*const c_void; 2]) -> Result<(), Error> {
        // SAFETY: the caller's.
        unsafe { self.make_lists_of(&self.kept.kernel, self.pass.walk(), submission, parameters) }
    }

    /// Makes the lists that a kernel walks over.
    ///
    /// # Safety
    /// Parameters are those of the kernel.
    pub(super) unsafe fn make_lists_of(
        &self,
        kernel: &Kernel,
        walk: Walk,
        submission: &Submission<'_>,
        [params, captured]: [*const c_void; 2],
    ) -> Result<(), Error> {
        let made = Made::of(self.pass.attention(), walk).filter(|_| self.makes_lists);
        let Some(made) = made else { return Ok(()) };
        let blocks = u32::try_from(made.lists).unwrap_or(u32::MAX);
        let launch = Launch { blocks: [blocks, 1, 1], threads: THREADS, shared_bytes: MAP_SHARED_BYTES };
        // SAFETY: the caller's.
        Ok(unsafe { submission.launch_entry(kernel.entry(EntryPoint::BlockLists)?, launch, &[params, captured]) }?)
    }
}
