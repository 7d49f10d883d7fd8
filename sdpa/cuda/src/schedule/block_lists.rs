//! Block-sparse index lists that a kernel reads: a constant table of the plan, or made by a launch before the pass if the mask reads
//! tensors.

use super::{Address, Argument, Builder, KernelId, Launch, Source, Step};
use crate::entry_point::EntryPoint;
use crate::index_lists::BlockMap;
use crate::problem::{Forward, Lists};
use crate::source::MAP_SHARED_BYTES;
use crate::work::steps;
use smallvec::smallvec;

/// Threads per block of the kernel that makes lists, one list per block.
const THREADS: u32 = 1024;

/// The extents of the query tiles and KV blocks that a kernel iterates over, and the direction of its lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocking {
    /// Number of queries in a query tile.
    pub(crate) queries: u32,
    /// Number of keys in a KV block.
    pub(crate) keys: u32,
    /// Whether there is a list of query tiles for each KV block; otherwise there is a list of KV blocks for each query tile.
    pub(crate) by_keys: bool,
}

impl Blocking {
    /// Returns the lists of an index-only mask.
    fn map(self, attention: &Forward) -> Option<BlockMap> {
        let of = if self.by_keys { BlockMap::of_keys } else { BlockMap::of_queries };
        of(attention, self.queries, self.keys)
    }
}

/// Device addresses of the block-sparse index lists that a kernel reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockLists {
    /// Address of the start index of each list in `blocks`. `end` has the end indices.
    pub(crate) begin: Address,
    pub(crate) end: Address,
    /// Address of the items of all lists.
    pub(crate) blocks: Address,
    /// Distances between the lists of adjacent batch entries and of adjacent heads, in units of the lists of a head; 0 if they share
    /// lists.
    pub(crate) strides: [i32; 2],
    /// The number of lists that a launch makes at each call.
    made: Option<i64>,
}

/// Returns the strides; 0 along an axis whose entries share lists.
fn strides([batch, head]: [i64; 2]) -> [i32; 2] {
    [if batch > 1 { head as i32 } else { 0 }, i32::from(head > 1)]
}

impl Builder<'_> {
    /// Adds the slot of the block-sparse index lists that a kernel reads, and returns their addresses.
    pub(crate) fn block_lists(&mut self, name: &'static str, blocking: Blocking) -> BlockLists {
        let none = BlockLists { begin: Address::Null, end: Address::Null, blocks: Address::Null, strides: [0; 2], made: None };
        match self.attention.lists() {
            Lists::None => none,
            Lists::AtPlan => blocking.map(self.attention).map_or(none, |BlockMap { begin, blocks, rows }| {
                let items = 4 * begin.len() as u64;
                let numbers: Vec<u32> = begin.into_iter().chain(blocks).collect();
                let slot = self.push_slot(name.into(), size_of_val(&numbers[..]) as u64, Source::Table(numbers));
                let [begin, end, blocks] = [0, 4, items].map(|offset| Address::Slot(slot, offset));
                BlockLists { begin, end, blocks, strides: strides(rows), made: None }
            }),
            Lists::AtCall => {
                let [_, _, seq_q, seq_kv] = self.attention.extents;
                let [tiles, kv_blocks] = [steps(seq_q, blocking.queries), steps(seq_kv, blocking.keys)];
                let (outer, most) = if blocking.by_keys { (kv_blocks, tiles) } else { (tiles, kv_blocks) };
                let rows = self.attention.list_rows();
                let lists = rows[0] * rows[1] * outer;
                let slot = self.push_slot(name.into(), (4 * lists * (2 + most)).unsigned_abs(), Source::BlockLists);
                let ends = 4 * lists.unsigned_abs();
                let [begin, end, blocks] = [0, ends, 2 * ends].map(|offset| Address::Slot(slot, offset));
                BlockLists { begin, end, blocks, strides: strides(rows), made: Some(lists) }
            }
        }
    }

    /// Adds the launch that makes the block-sparse index lists, if the mask reads tensors.
    pub(crate) fn make_block_lists(&mut self, lists: &BlockLists, kernel: KernelId, arguments: [Argument; 2]) {
        if let Some(made) = lists.made {
            self.step(Step::Launch(Launch {
                kernel,
                entry: EntryPoint::BlockLists,
                grid: super::grid(made),
                threads: THREADS,
                shared_bytes: MAP_SHARED_BYTES,
                arguments: smallvec![arguments[0], arguments[1]],
            }));
        }
    }
}
