//! L2 head sections of a backward pass: the KV heads that are processed together, and the location of each section's dQ accumulators.

use crate::backward::Backward;
use crate::problem::Lists;
use crate::tile_config::BackwardTile;
use crate::work::{heads_in_cache, steps};
use sdpa_core::Side;

/// Number of work items until those of a section are done, and then until its accumulators are converted, relative to the concurrent thread blocks.
/// Larger values need more memory than L2 has; smaller ones make thread blocks wait. Measured (docs/lab/2026-11-27-hopper-kernels.md).
const DONE: f64 = 0.9;
const CONVERTED: f64 = 1.5;
/// Loops up to this many times the mean length, including those of causal masks, need no extra delay.
const EVEN: f64 = 2.5;
/// The assumed ratio of the longest to the mean loop over query tiles, for a mask that reads tensors.
const UNKNOWN: f64 = 4.0;

/// The L2 head sections of a backward pass: groups of KV heads that are processed together, so that their operands fit L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadSections {
    /// Number of KV heads per section; the last section may have fewer.
    pub heads: i64,
    /// Number of sections.
    pub count: i64,
    /// Number of sections whose dQ accumulators are in memory at once; 0 if every query tile has its own accumulator.
    pub ring: i64,
    /// Number of later sections that are processed before the dQ accumulators of a section are converted.
    pub behind: i64,
    /// Number of query tiles that have a dQ accumulator in memory.
    pub places: i64,
    /// Number of work items that process KV blocks, over all KV heads and column parts.
    pub blocks: i64,
    /// Number of work items that convert the dQ accumulators of each of the last `behind` sections. They come after the work items for KV
    /// blocks.
    pub tail: i64,
}

impl HeadSections {
    /// Returns the sections on a device of this many SMs, with one thread block per SM at a time. If heads are short, a section has half as many
    /// thread blocks as there are SMs.
    pub(crate) fn of(backward: &Backward, tile: &BackwardTile, multiprocessors: u32) -> HeadSections {
        let forward = &backward.forward;
        let ([batch, heads_q, seq_q, seq_kv], group) = (forward.extents, forward.group.max(1));
        let heads_kv = batch * heads_q / group;
        let blocks = heads_kv * steps(seq_kv, BackwardTile::KEYS) * i64::from(tile.parts);
        let own =
            if forward.packed.is_some() { heads_q * head_tiles(backward, tile) } else { batch * heads_q * steps(seq_q, tile.queries) };
        let whole = HeadSections { heads: 1, count: heads_kv, ring: 0, behind: 0, places: own, blocks, tail: 0 };
        if tile.sums_bytes() == 0 {
            // For each KV head, L2 has to hold Q and dO in 16 bits and the dQ accumulator in f32.
            let [dim_qk, dim_v] = [0, 2].map(|n: usize| forward.tensors[n].dims[3]);
            let heads = heads_in_cache(group * seq_q * (2 * (dim_qk + dim_v) + 4 * dim_qk));
            return HeadSections { heads: heads.min(heads_kv), ..whole }.counted(heads_kv);
        }
        let multiprocessors = i64::from(multiprocessors.max(1));
        let of_head = (steps(backward.length(Side::Keys), BackwardTile::KEYS) * i64::from(tile.shares)).max(1);
        let heads = (multiprocessors / (2 * of_head)).clamp(1, heads_kv.max(1));
        let since = |of_all: f64| 1 + (multiprocessors as f64 * of_all) as i64 / (heads * of_head);
        let sections = HeadSections { heads, ..whole }.counted(heads_kv);
        let behind = (1 + since(DONE * uneven(backward, tile))).min(sections.count);
        // After the last KV block only the conversion of dQ remains. It gets two work items per SM.
        let sections = HeadSections { behind, tail: 2 * multiprocessors / behind.max(1) + 1, ..sections };
        let ring = sections.count.min(1 + sections.behind + since(CONVERTED));
        let places = ring * heads * group * steps(seq_q, tile.queries);
        if forward.packed.is_some() && places >= own { sections } else { HeadSections { ring, places, ..sections } }
    }

    fn counted(self, heads_kv: i64) -> HeadSections {
        HeadSections { count: heads_kv.div_euclid(self.heads.max(1)) + i64::from(heads_kv % self.heads.max(1) != 0), ..self }
    }
}

/// Returns the length of the longest loop over query tiles as a multiple of the mean: its dQ accumulators are converted that much later.
fn uneven(backward: &Backward, tile: &BackwardTile) -> f64 {
    match backward.forward.lists() {
        Lists::AtCall => UNKNOWN,
        Lists::AtPlan | Lists::None => Some(backward.walks(tile).unevenness()).filter(|&uneven| uneven > EVEN).unwrap_or(1.0),
    }
}

/// Returns the number of query tiles of a head: in one batch entry, or over all packed sequences. Packed sequences fill at most the tiles
/// of their tokens, plus one partial tile per sequence.
pub(crate) fn head_tiles(backward: &Backward, tile: &BackwardTile) -> i64 {
    let ([batch, _, seq_q, _], packed) = (backward.forward.extents, backward.forward.packed);
    packed.map_or(steps(seq_q, tile.queries), |packs| packs.totals[Side::Queries as usize] / i64::from(tile.queries) + batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Packed, Shape};

    const MULTIPROCESSORS: u32 = 132;

    fn of(spec: AttentionSpec, mask: &str) -> (HeadSections, BackwardTile) {
        let spec = if mask.is_empty() { spec } else { spec.mask(mask.parse::<Mask>().unwrap()) };
        let backward = Backward::of(&spec.backward().validate().unwrap()).unwrap();
        let tile = backward.tile(MULTIPROCESSORS).unwrap();
        (HeadSections::of(&backward, &tile, MULTIPROCESSORS), tile)
    }

    fn dense([batch, heads_q, heads_kv]: [i64; 3], seq: i64, dim: i64, mask: &str) -> (HeadSections, BackwardTile) {
        let shape = Shape { batch, heads_q, heads_kv, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim };
        of(AttentionSpec::dense(DType::BF16, shape, Layout::Bshd), mask)
    }

    #[test]
    fn sections_have_accumulators_for_what_runs_at_once() {
        for (heads, seq, mask) in [
            ([4, 32, 32], 4096, ""),
            ([2, 16, 16], 16384, "causal"),
            ([16, 16, 4], 1000, "window:300,0"),
            ([1, 1, 1], 70, ""),
            ([1, 8, 2], 400, ""),
        ] {
            let (sections, tile) = dense(heads, seq, 128, mask);
            let each = sections.heads * steps(seq, BackwardTile::KEYS) * i64::from(tile.shares);
            let behind = sections.behind * each;
            assert!(sections.heads * sections.count >= heads[0] * heads[2], "{sections:?}");
            assert!(sections.ring > sections.behind || sections.ring == sections.count, "{sections:?}");
            assert!(behind >= i64::from(MULTIPROCESSORS) || sections.behind == sections.count, "{behind} blocks behind: {sections:?}");
            assert!(sections.tail * sections.behind >= i64::from(MULTIPROCESSORS), "{sections:?}");
        }
    }

    #[test]
    fn sums_take_what_the_ring_has_and_not_all_heads() {
        let (sections, tile) = dense([4, 32, 32], 4096, 128, "");
        assert_eq!(sections.places, sections.ring * sections.heads * 64);
        assert!(sections.places * i64::from(tile.sums_of_queries()) < 48 << 20, "{sections:?}");
        let (wide, _) = dense([4, 32, 32], 4096, 256, "");
        assert_eq!((wide.ring, wide.places), (0, 4 * 32 * 64));
    }

    #[test]
    fn loops_that_are_much_longer_than_others_have_more_time() {
        let behind = |mask| dense([4, 32, 32], 4096, 128, mask).0.behind;
        assert_eq!(behind("causal"), behind(""));
        assert!(behind("global-local:256,64") > 3 * behind(""), "{}", behind("global-local:256,64"));
        assert!(behind("array:qk") > behind(""));
    }

    #[test]
    fn documents_of_many_lengths_have_places_of_their_own_where_that_is_less() {
        let packed = |longest: i64, total: i64| {
            let shape = Shape { batch: 32, heads_q: 4, heads_kv: 4, seq_q: longest, seq_kv: longest, dim_qk: 64, dim_v: 64 };
            of(AttentionSpec::packed(DType::BF16, shape, Packed::of(total)), "").0
        };
        assert!(packed(512, 32 * 512).ring > 0);
        let sections = packed(32_768, 40_000);
        assert_eq!((sections.ring, sections.places), (0, 4 * (40_000 / 128 + 32)));
    }
}
