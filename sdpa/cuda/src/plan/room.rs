//! What a forward pass keeps in the workspace, in front of lists of blocks.

use super::told::steps;
use crate::problem::Forward;
use crate::tile::Tile;

/// Bytes of an item of the list of tiles.
const ITEM_BYTES: i64 = 16;
/// Bytes of the counter, and of how many items the list has.
const COUNTER_BYTES: u64 = 256;

/// Bytes of each thing, and items of the list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    /// The counter: where there are more tiles than blocks of threads, they are counted, and those of a list always are.
    pub counter: u64,
    /// The list of tiles.
    pub items: u64,
    /// The item that each tile of each batch entry begins with.
    pub firsts: u64,
    /// Log-sum-exps of parts, two f32 each.
    pub logs: u64,
    /// Their largest scores, where row statistics ask for them.
    pub largest: u64,
    /// Outputs of parts.
    pub sums: u64,
    /// Items that the list has room for.
    pub most_items: i64,
}

impl Room {
    /// Of a forward pass on a device of so many multiprocessors.
    pub(super) fn of(forward: &Forward, tile: &Tile, multiprocessors: u32) -> Room {
        let aligned = |bytes: i64| bytes.unsigned_abs().next_multiple_of(256);
        let counted = |counts: bool| if counts { COUNTER_BYTES } else { 0 };
        if !forward.lists_tiles(tile) {
            return Room { counter: counted(forward.most_tiles(tile) > i64::from(multiprocessors)), ..Room::default() };
        }
        let [batch, _, seq_q, _] = forward.extents;
        let (rows, units) = (forward.most_rows(tile), forward.units(tile));
        // A tile has a part for each share of its blocks, and one for what is left.
        let parts = if tile.split { forward.most_parts(tile, multiprocessors) / units + 1 } else { 0 };
        let most_items = rows + parts;
        let room = Room { counter: COUNTER_BYTES, items: aligned(ITEM_BYTES * most_items), most_items, ..Room::default() };
        if !tile.split {
            return room;
        }
        let results = most_items * units * i64::from(tile.queries() * tile.heads());
        Room {
            firsts: aligned(4 * batch * steps(seq_q, tile.queries())),
            logs: aligned(8 * results),
            largest: if forward.leaves_largest() { aligned(4 * results) } else { 0 },
            sums: aligned(4 * results * i64::from(tile.dim_v)),
            ..room
        }
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.counter + self.items + self.firsts + self.logs + self.largest + self.sums
    }
}
