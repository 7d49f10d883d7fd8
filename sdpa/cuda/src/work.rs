//! How much work a forward pass is: its tile, how many tiles there are, and whether their keys are split.

use crate::problem::{Forward, unsupported};
use crate::source::HEAVY;
use crate::tile::{Few, GROUP_QUERIES, MOST_DIM, Tile};
use sdpa_core::error::{Reason, Unsupported};
use sdpa_core::{Operand, Side};

/// Blocks of keys that a part has at least, where queries are few and where they are not: merging costs as much as some.
const LEAST_BLOCKS: [u32; 2] = [2, 8];
/// How many parts all multiprocessors together have, as a multiple of theirs.
const PARTS_EACH: [i64; 2] = [4, 2];

/// Keys from which on walks are long. Measured on an H200: at 4,096 keys blocks of 160 are 1 % faster without a mask and 1 % slower beside a causal one, at 16,384 2 and 3 % faster.
const LONG: i64 = 8192;

/// Bytes of the second cache that operands may take: of its 50 MB, those that are near to all multiprocessors.
const CACHE_BYTES: i64 = 32 << 20;

/// How many heads fit the second cache together, of so many bytes each: a power of two.
pub(crate) fn heads_in_cache(bytes: i64) -> i64 {
    1 << (CACHE_BYTES / bytes.max(1)).max(1).ilog2()
}

/// How many of `step` hold `extent`.
pub(crate) fn steps(extent: i64, step: u32) -> i64 {
    let step = i64::from(step);
    extent.div_euclid(step) + i64::from(extent % step != 0)
}

impl Forward {
    /// The tile of the kernel, on a device of so many multiprocessors.
    ///
    /// # Errors
    /// Head dims that there is no tile for.
    pub fn tile(&self, multiprocessors: u32) -> Result<Tile, Unsupported> {
        let [q, _, v, _] = self.tensors;
        let (dim_qk, dim_v) = (q.dims[3], v.dims[3]);
        let tile = self.few().map_or_else(|| Tile::of(dim_qk, dim_v), |few| Tile::of_few(dim_qk, dim_v, few));
        let tile = tile.ok_or_else(|| {
            let limit = format!("at most {MOST_DIM}");
            unsupported(vec![Reason::Limit { field: "dim".to_owned(), value: dim_qk.max(dim_v).to_string(), limit }])
        })?;
        let split = self.splits(&tile, multiprocessors);
        let long = Tile::of_long(dim_qk, dim_v).filter(|_| tile.few.is_none() && !split && self.is_long());
        Ok(Tile { split, ..long.unwrap_or(tile) })
    }

    /// Whether registers are short: random numbers and long traces need them.
    pub(crate) fn is_tight(&self) -> bool {
        self.dropout.is_some() || self.weight() > HEAVY
    }

    /// Whether walks are over many keys in a row, and nothing else takes registers: blocks of more keys are worth their edges.
    fn is_long(&self) -> bool {
        let Forward { region, ends, extents, .. } = self;
        let unbounded = region.lower.is_none() && region.prefix.is_none() && ends.lower.is_none();
        let traced = self.keep.is_some() || self.score_mod.is_some() || self.dropout.is_some();
        let lies_apart = self.packed.is_some() || self.paged.is_some();
        extents[3] >= LONG && unbounded && !traced && !lies_apart
    }

    /// How few queries share a tile: where a group of threads has them all, of as many heads as it has rows for. Heads that a rule tells apart have
    /// lists of blocks of their own, and share none.
    fn few(&self) -> Option<Few> {
        let [.., seq_q, _] = self.extents;
        let queries = u32::try_from(seq_q.max(1)).ok()?.checked_next_power_of_two().filter(|n| *n <= GROUP_QUERIES)?;
        let most = if self.list_rows()[1] == 1 { i64::from(GROUP_QUERIES / queries) } else { 1 };
        // As many in each tile of a group.
        let tiles = (self.group + most - 1) / most;
        let heads = (self.group + tiles - 1) / tiles;
        Some(Few { queries, heads: heads as u32 })
    }

    /// Whether there are keys enough for parts, and too few tiles without. Where queries are few and keys as many as a call says, one entry may have most of
    /// them: more tiles than otherwise are too few.
    fn splits(&self, tile: &Tile, multiprocessors: u32) -> bool {
        let few = tile.few.is_some();
        let enough = steps(self.extents[3], tile.keys) >= 2 * i64::from(self.least_blocks(tile));
        let unknown = self.seq_len_kv || self.packs(Side::Keys);
        let each = match (few, unknown) {
            (true, true) => 16,
            (true, false) => 4,
            (false, _) => 1,
        };
        enough && self.most_tiles(tile) < each * i64::from(multiprocessors)
    }

    /// Blocks of keys that a part of a tile has at least.
    pub(crate) fn least_blocks(&self, tile: &Tile) -> u32 {
        LEAST_BLOCKS[usize::from(tile.few.is_none())]
    }

    /// Parts that are asked for: some tiles have one more.
    pub(crate) fn most_parts(&self, tile: &Tile, multiprocessors: u32) -> i64 {
        PARTS_EACH[usize::from(tile.few.is_none())] * i64::from(multiprocessors)
    }

    /// Keys that are brought at once, of a block: of pages as many as both are multiples of.
    pub(crate) fn piece(&self, tile: &Tile) -> u32 {
        let common = |mut a: i64, mut b: i64| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        self.paged.map_or(tile.keys, |paged| common(paged.page_size, tile.keys.into()) as u32)
    }

    /// Tiles of the heads of a group.
    pub(crate) fn head_tiles(&self, tile: &Tile) -> i64 {
        steps(self.group, tile.heads())
    }

    /// Heads, or groups of heads that share a tile, of a batch entry.
    pub(crate) fn units(&self, tile: &Tile) -> i64 {
        self.extents[1] / self.group * self.head_tiles(tile)
    }

    /// Whether a list of tiles is made on the device before each call.
    pub fn lists_tiles(&self, tile: &Tile) -> bool {
        self.packed.is_some() || tile.split
    }

    /// Tiles of queries of a head, of all batch entries, at most. Documents that do not overlap have no more than tokens fill, and one each that is not
    /// full.
    pub(crate) fn most_rows(&self, tile: &Tile) -> i64 {
        let [batch, _, seq_q, _] = self.extents;
        let each = batch * steps(seq_q, tile.queries());
        // Parts are of tiles of any documents.
        let packs = self.packed.filter(|_| !tile.split);
        packs.map_or(each, |packs| each.min(packs.totals[Operand::Q.side() as usize] / i64::from(tile.queries()) + batch))
    }

    /// Tiles of queries of all heads, at most.
    pub(crate) fn most_tiles(&self, tile: &Tile) -> i64 {
        self.units(tile) * self.most_rows(tile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};

    fn of([batch, heads_q, heads_kv, seq_q, seq_kv]: [i64; 5], masks: &[&str]) -> Tile {
        let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 128, dim_v: 128 };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
        let spec = masks.iter().fold(spec, |spec, mask| spec.mask(mask.parse::<Mask>().unwrap()));
        Forward::of(&spec.validate().unwrap()).unwrap().tile(132).unwrap()
    }

    #[test]
    fn few_queries_of_heads_that_share_keys_share_a_tile() {
        let few = |extents, masks: &[&str]| of(extents, masks).few.map(|few| (few.queries, few.heads));
        assert_eq!(few([2, 32, 8, 1, 900], &[]), Some((1, 4)));
        assert_eq!(few([2, 20, 4, 3, 900], &["padding"]), Some((4, 5)));
        // Of 20 heads 16 would fit: two tiles of ten.
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
        // Edges of bands on both sides, and blocks that a rule leaves, are finer.
        for mask in ["sliding-window:512", "prefix-lm:512", "natten:65", "document"] {
            assert_eq!(keys([1, 32, 8, 16_384, 16_384], &[mask]), 128, "{mask}");
        }
        assert_eq!(keys([1, 4, 4, 100, 30_000], &[]), 128, "parts");
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
}
