//! The work of a forward pass: its tile, the number of tiles, and whether their keys are split.

use crate::problem::Forward;
use crate::source::HEAVY;
use crate::tile_config::{Few, GROUP_QUERIES, MOST_DIM, Tile};
use crate::unsupported::unsupported;
use sdpa_core::error::{Reason, Unsupported};
use sdpa_core::{Operand, Side};
use std::ops::Range;

/// The fewest KV blocks of a split, with few queries and otherwise. Combining costs as much as some KV blocks.
const LEAST_BLOCKS: [u32; 2] = [2, 8];
/// Splits per SM, with few queries and otherwise.
const PARTS_EACH: [i64; 2] = [4, 2];

/// Keys from which on a row counts as long. Measured on an H200: at 4,096 keys, blocks of 160 are 1 % faster without a mask and 1 % slower with a
/// causal one; at 16,384, 2 and 3 % faster.
const LONG: i64 = 8192;

/// Number of keys in a split of fixed size. It is a multiple of the block sizes of [`FIXED_SPLIT_DIM`].
const FIXED_SPLIT_KEYS: u32 = 2048;

/// The largest head dim with splits of fixed size. All tiles for these dims have the same number of keys in a KV block, and shared memory for
/// the results of splits.
pub(crate) const FIXED_SPLIT_DIM: i64 = 128;

/// The most bytes of outputs of fixed splits in the workspace. If there were more, a thread block processes all splits of a tile.
const MOST_SPLIT_BYTES: i64 = 256 << 20;

/// Bytes of L2 for operands. Of its 50 MB, this much is near all SMs.
const CACHE_BYTES: i64 = 32 << 20;

/// Returns the number of heads whose operands, `bytes` bytes for each head, fit L2 together: at least 1, rounded down to a power of two.
pub(crate) fn heads_in_cache(bytes: i64) -> i64 {
    1 << (CACHE_BYTES / bytes.max(1)).max(1).ilog2()
}

/// Returns the number of steps of length `step` that cover `extent`.
pub(crate) fn steps(extent: i64, step: u32) -> i64 {
    let step = i64::from(step);
    extent.div_euclid(step) + i64::from(extent % step != 0)
}

impl Forward {
    /// Returns the tile of the forward kernel on a device with this many SMs.
    ///
    /// # Errors
    /// Fails if there is no tile for the head dims.
    pub fn tile(&self, multiprocessors: u32) -> Result<Tile, Unsupported> {
        let [q, _, v, _] = self.tensors;
        let (dim_qk, dim_v) = (q.dims[3], v.dims[3]);
        let tile = self.few().map_or_else(|| Tile::of(dim_qk, dim_v), |few| Tile::of_few(dim_qk, dim_v, few));
        let tile = tile.ok_or_else(|| {
            let limit = format!("at most {MOST_DIM}");
            unsupported(vec![Reason::Limit { field: "dim".to_owned(), value: dim_qk.max(dim_v).to_string(), limit }])
        })?;
        if self.batch_invariant {
            return Ok(self.with_fixed_splits(tile, multiprocessors));
        }
        let split = self.splits(&tile, multiprocessors);
        let long = Tile::of_long(dim_qk, dim_v).filter(|_| tile.few.is_none() && !split && self.is_long());
        Ok(Tile { split, ..long.unwrap_or(tile) })
    }

    /// Returns the tile for a batch-invariant problem. Every row sums over the same KV blocks and splits in the same order in any call, and whether
    /// thread blocks share the splits of a tile changes no bit.
    fn with_fixed_splits(&self, tile: Tile, multiprocessors: u32) -> Tile {
        if self.most_splits(&tile) <= 1 {
            return tile;
        }
        let tile = Tile { split: true, ..tile };
        let bytes =
            4 * self.most_items(&tile, multiprocessors) * self.head_groups(&tile) * i64::from(tile.queries() * tile.heads() * tile.dim_v);
        let split = bytes <= MOST_SPLIT_BYTES && self.splits(&tile, multiprocessors);
        Tile { split, ..tile }.with_fixed_splits(FIXED_SPLIT_KEYS)
    }

    /// Returns the most fixed splits that a tile may have. Bands of a call may begin anywhere, so this counts from the first key.
    fn most_splits(&self, tile: &Tile) -> i64 {
        debug_assert_eq!(FIXED_SPLIT_KEYS % tile.keys, 0, "KV blocks must not cross splits");
        steps(self.extents[3], FIXED_SPLIT_KEYS)
    }

    /// Returns the most items of the tile list: one for each query tile, or for each split of one.
    pub(crate) fn most_items(&self, tile: &Tile, multiprocessors: u32) -> i64 {
        let rows = self.most_rows(tile);
        match (tile.split, self.batch_invariant) {
            (false, _) => rows,
            (true, true) => rows * self.most_splits(tile),
            // The number of splits of each tile is rounded up, so the list may have one item per tile more than the requested splits.
            (true, false) => rows + self.most_parts(tile, multiprocessors) / self.head_groups(tile) + 1,
        }
    }

    /// Returns whether registers are short, because dropout or long traces need many.
    pub(crate) fn is_tight(&self) -> bool {
        self.dropout.is_some() || self.weight() > HEAVY
    }

    /// Returns whether rows attend to many consecutive keys and nothing else needs registers, so that larger KV blocks are worth their partial
    /// blocks.
    fn is_long(&self) -> bool {
        let Forward { region, ends, extents, .. } = self;
        let unbounded = region.lower.is_none() && region.prefix.is_none() && ends.lower.is_none();
        let traced = self.keep.is_some() || self.score_mod.is_some() || self.dropout.is_some();
        let lies_apart = self.packed.is_some() || self.paged.is_some();
        // Without a left bound the last query attends to the most keys.
        let last = extents[2] - 1;
        self.keys_of([last, last]).end >= LONG && unbounded && !traced && !lies_apart
    }

    /// Returns the keys to which bands and prefix let these queries attend, in full-length batch entries. Lengths of a call may leave fewer.
    fn keys_of(&self, [first_q, last_q]: [i64; 2]) -> Range<i64> {
        let [.., seq_q, seq_kv] = self.extents;
        let of = |q| [self.region.key_range(q, seq_kv), self.ends.key_range(q, [seq_q, seq_kv])];
        let ([a, b], [c, d]) = (of(first_q), of(last_q));
        a.start.max(b.start)..c.end.min(d.end)
    }

    /// Returns the most KV blocks of a tile.
    fn most_kv_blocks(&self, tile: &Tile) -> i64 {
        let (queries, seq_q) = (tile.queries(), self.extents[2]);
        let blocks = |first: i64| {
            let keys = self.keys_of([first, (first + i64::from(queries)).min(seq_q) - 1]);
            if keys.is_empty() { 0 } else { steps(keys.end, tile.keys) - keys.start / i64::from(tile.keys) }
        };
        (0..seq_q).step_by(queries as usize).map(blocks).max().unwrap_or(0)
    }

    /// Returns the packed GQA tile, if one warpgroup holds all queries of a head: as many heads as it has rows for. Heads with different masks have
    /// block lists of their own, so they cannot share a tile.
    fn few(&self) -> Option<Few> {
        let [.., seq_q, _] = self.extents;
        let queries = u32::try_from(seq_q.max(1)).ok()?.checked_next_power_of_two().filter(|n| *n <= GROUP_QUERIES)?;
        let most = if self.list_rows()[1] == 1 { i64::from(GROUP_QUERIES / queries) } else { 1 };
        // Distribute the heads of a GQA group evenly over its tiles.
        let tiles = (self.group + most - 1) / most;
        let heads = (self.group + tiles - 1) / tiles;
        Some(Few { queries, heads: heads as u32 })
    }

    /// Returns whether to split keys: there are too few tiles, and the longest one, which delays the kernel, has keys for two splits. With few
    /// queries and lengths of keys from the call, one batch entry may have most keys, so the threshold for the number of tiles is higher.
    fn splits(&self, tile: &Tile, multiprocessors: u32) -> bool {
        let few = tile.few.is_some();
        let unknown = self.seq_len_kv || self.packs(Side::Keys);
        let each = match (few, unknown) {
            (true, true) => 16,
            (true, false) => 4,
            (false, _) => 1,
        };
        let enough = || self.most_kv_blocks(tile) >= 2 * i64::from(self.least_blocks(tile));
        self.most_tiles(tile) < each * i64::from(multiprocessors) && enough()
    }

    /// Returns the smallest number of KV blocks that a split of split-KV may have.
    pub(crate) fn least_blocks(&self, tile: &Tile) -> u32 {
        LEAST_BLOCKS[usize::from(tile.few.is_none())]
    }

    /// Returns the requested number of splits over all tiles, for split-KV; some tiles have one more.
    pub(crate) fn most_parts(&self, tile: &Tile, multiprocessors: u32) -> i64 {
        PARTS_EACH[usize::from(tile.few.is_none())] * i64::from(multiprocessors)
    }

    /// Returns the number of keys that one TMA load of a KV block brings to shared memory. For a paged KV cache, it is the greatest
    /// common divisor of page size and block size.
    pub(crate) fn piece(&self, tile: &Tile) -> u32 {
        let common = |mut a: i64, mut b: i64| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        self.paged.map_or(tile.keys, |paged| common(paged.page_size, tile.keys.into()) as u32)
    }

    /// Returns the number of tiles that cover the query heads of a GQA group.
    pub(crate) fn head_tiles(&self, tile: &Tile) -> i64 {
        steps(self.group, tile.heads())
    }

    /// Returns the number of tiles that cover the query heads of a batch entry.
    pub(crate) fn head_groups(&self, tile: &Tile) -> i64 {
        self.extents[1] / self.group * self.head_tiles(tile)
    }

    /// Returns whether a kernel lists the query tiles on the device before each call.
    pub fn lists_tiles(&self, tile: &Tile) -> bool {
        self.packed.is_some() || tile.split
    }

    /// Returns the largest number of query tiles of a head, over all batch entries. Packed sequences that do not overlap have at most
    /// those that their tokens fill, plus one partial tile per sequence.
    pub(crate) fn most_rows(&self, tile: &Tile) -> i64 {
        let [batch, _, seq_q, _] = self.extents;
        let each = batch * steps(seq_q, tile.queries());
        // With split-KV, any sequence may have splits.
        let packs = self.packed.filter(|_| !tile.split);
        packs.map_or(each, |packs| each.min(packs.totals[Operand::Q.side() as usize] / i64::from(tile.queries()) + batch))
    }

    /// Returns the largest number of query tiles over all heads.
    pub(crate) fn most_tiles(&self, tile: &Tile) -> i64 {
        self.head_groups(tile) * self.most_rows(tile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};

    fn attention([batch, heads_q, heads_kv, seq_q, seq_kv]: [i64; 5], dim: i64, masks: &[&str]) -> Forward {
        let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: dim, dim_v: dim };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
        let spec = masks.iter().fold(spec, |spec, mask| spec.mask(mask.parse::<Mask>().unwrap()));
        Forward::of(&spec.validate().unwrap()).unwrap()
    }

    fn of(extents: [i64; 5], masks: &[&str]) -> Tile {
        attention(extents, 128, masks).tile(132).unwrap()
    }

    #[test]
    fn few_queries_of_heads_that_share_keys_share_a_tile() {
        let few = |extents, masks: &[&str]| of(extents, masks).few.map(|few| (few.queries, few.heads));
        assert_eq!(few([2, 32, 8, 1, 900], &[]), Some((1, 4)));
        assert_eq!(few([2, 20, 4, 3, 900], &["padding"]), Some((4, 5)));
        // At most 16 of the 20 heads fit in one tile, so they are split evenly into two tiles of ten.
        assert_eq!(few([2, 20, 1, 4, 900], &[]), Some((4, 10)));
        assert_eq!(few([2, 8, 1, 64, 900], &[]), Some((64, 1)));
        assert_eq!(few([2, 8, 1, 65, 900], &[]), None);
        assert_eq!(few([2, 8, 1, 1, 900], &["array:hqk"]), Some((1, 1)));
    }

    #[test]
    fn long_walks_have_more_keys_a_block() {
        let keys = |extents, masks: &[&str]| of(extents, masks).keys;
        assert_eq!([&["causal"][..], &[], &["padding", "window:inf,100"]].map(|masks| keys([1, 32, 8, 16_384, 16_384], masks)), [160; 3]);
        assert_eq!(keys([4, 32, 8, 4096, 8191], &["causal"]), 128);
        // With these masks, partial blocks matter more, so blocks stay smaller.
        for mask in ["sliding-window:512", "prefix-lm:512", "natten:65", "document"] {
            assert_eq!(keys([1, 32, 8, 16_384, 16_384], &[mask]), 128, "{mask}");
        }
        assert_eq!(keys([1, 4, 4, 100, 30_000], &[]), 128, "parts");
        assert_eq!(keys([1, 32, 8, 6000, 16_384], &["causal"]), 128, "no query keeps more keys than there are queries");
    }

    #[test]
    fn keys_are_split_where_tiles_are_too_few() {
        let split = |extents, masks: &[&str]| of(extents, masks).split;
        assert!(split([16, 32, 8, 1, 8192], &[]) && split([1, 4, 4, 100, 30_000], &[]));
        assert!(!split([16, 32, 8, 1, 300], &[]), "too few keys");
        assert!(!split([100, 32, 8, 1, 8192], &[]), "tiles enough");
        assert!(split([100, 32, 8, 1, 8192], &["padding"]), "one entry may have them all");
        assert!(!split([300, 32, 8, 1, 8192], &["padding"]), "tiles enough all the same");
        assert!(!split([2, 32, 32, 4096, 4096], &["causal"]));
    }

    #[test]
    fn keys_that_no_query_of_a_tile_keeps_are_no_reason_to_split() {
        let split = |extents, dim, mask: &str| attention(extents, dim, &[mask]).tile(132).unwrap().split;
        for (extents, dim) in [([1, 16, 16, 896, 8135], 256), ([2, 8, 1, 512, 6656], 64)] {
            assert!(!split(extents, dim, "causal"), "{extents:?}");
            assert!(split(extents, dim, "causal-bottom-right") && split(extents, dim, "padding"), "{extents:?}");
            assert!(!split(extents, dim, "window:300,300") && !split(extents, dim, "prefix-lm:1000"), "{extents:?}");
            assert!(split(extents, dim, "prefix-lm:4000") && split(extents, dim, "window:300,4000"), "{extents:?}");
        }
        assert!(split([1, 8, 8, 2048, 8192], 128, "causal"), "the last tile keeps 16 blocks");
        // With few queries, splits are smaller.
        assert!(
            split([2, 8, 1, 4, 8192], 128, "window:600,0:ends & padding") && !split([2, 8, 1, 4, 8192], 128, "window:200,0:ends & padding")
        );
        assert!(split([2, 8, 1, 4, 8192], 128, "causal-bottom-right") && !split([2, 8, 1, 4, 8192], 128, "causal"));
    }

    #[test]
    fn the_most_kv_blocks_is_over_the_blocks_that_some_tile_keeps() {
        for text in [
            "padding",
            "causal",
            "causal-bottom-right",
            "window:300,70",
            "prefix-lm:400",
            "prefix-lm:300 & k <= q + 200",
            "k - q > 650",
            "k - q < -990",
        ] {
            for (seq_q, seq_kv) in [(1000, 700), (300, 1500), (5, 1000)] {
                let forward = attention([1, 2, 1, seq_q, seq_kv], 128, &[text]);
                let tile = forward.tile(132).unwrap();
                let (queries, keys) = (i64::from(tile.queries()), i64::from(tile.keys));
                let blocks_of = |tile: i64| {
                    let within = (tile * queries..((tile + 1) * queries).min(seq_q)).flat_map(|q| (0..seq_kv).map(move |k| (q, k)));
                    let kept = within.filter(|&(q, k)| forward.region.keeps(q, k) && forward.ends.keeps(q, k, [seq_q, seq_kv]));
                    kept.map(|(_, k)| k / keys).collect::<std::collections::BTreeSet<i64>>().len()
                };
                let expected = (0..steps(seq_q, tile.queries())).map(blocks_of).max();
                assert_eq!(Some(forward.most_kv_blocks(&tile) as usize), expected, "{text} at {seq_q}, {seq_kv}");
            }
        }
    }
}
