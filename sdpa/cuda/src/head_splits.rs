//! Chooses the number of thread blocks that share the query heads of a KV head in a backward pass.

use crate::backward::Backward;
use crate::problem::{Forward, Lists};
use crate::tile_config::BackwardTile;
use crate::work::steps;
use sdpa_core::Side;
use sdpa_core::expr::{Judged, Trace};
use std::ops::Range;

/// Cost of a thread block before and after its loop over query tiles, in steps of the loop.
const AROUND: f64 = 1.0;
/// Cost of the reduction with other thread blocks, in steps.
const ADDED: f64 = 2.0;
/// Further cost for each other thread block if the gradients of all are added in order, in steps.
const ORDERED: f64 = 0.25;
/// If loops over query tiles differ in length, most SMs idle at the end for this part of the longest one.
const UNEVEN: f64 = 0.5;
/// Speedups below this factor do not count.
const CLOSE: f64 = 1.03;
/// The most KV blocks whose loops are sampled.
const LOOKED_AT: i64 = 32;

/// The lengths of the loops over the query tiles of one head in a backward pass, one loop per KV block: the longest and the mean.
pub(crate) struct StepCounts {
    longest: f64,
    mean: f64,
}

impl StepCounts {
    /// Counts the steps that a band and an index-only mask leave, for batch entries of these lengths. Lengths and tensors of a call may leave fewer.
    fn of(forward: &Forward, [seq_q, seq_kv]: [i64; 2], queries: u32) -> StepCounts {
        // A bottom-right aligned band is placed as for full-length batch entries.
        let past = seq_kv - seq_q;
        let lower = [forward.region.lower, forward.ends.lower.map(|lower| lower + past)].into_iter().flatten().max();
        let upper = [forward.region.upper, forward.ends.upper.map(|upper| upper + past)].into_iter().flatten().min();
        let rule = forward.keep.as_deref().filter(|_| forward.lists() == Lists::AtPlan);
        let blocks = steps(seq_kv, BackwardTile::KEYS).max(1);
        let looked_at = blocks.min(LOOKED_AT);
        let walks: Vec<i64> = (0..looked_at)
            .map(|n| {
                let first = n * blocks / looked_at * i64::from(BackwardTile::KEYS);
                let keys = [first, (first + i64::from(BackwardTile::KEYS)).min(seq_kv) - 1];
                let from = [upper.map(|upper| first - upper), forward.region.prefix.filter(|&n| first >= n).map(|_| first)];
                let from = from.into_iter().flatten().max().unwrap_or(0).clamp(0, seq_q);
                let to = lower.map_or(seq_q, |lower| keys[1] - lower).clamp(from, seq_q);
                let walk = if to > from { from / i64::from(queries)..steps(to, queries) } else { 0..0 };
                rule.map_or(walk.end - walk.start, |rule| remaining_steps(rule, forward.extents, walk, queries, keys))
            })
            .collect();
        StepCounts { longest: walks.iter().copied().max().unwrap_or(0) as f64, mean: walks.iter().sum::<i64>() as f64 / looked_at as f64 }
    }

    /// Returns the longest loop as a multiple of the mean.
    pub(crate) fn unevenness(&self) -> f64 {
        self.longest / self.mean.max(1.0)
    }

    /// Returns whether all loops have about the same length.
    fn are_even(&self) -> bool {
        self.mean * 1.25 >= self.longest
    }
}

/// Returns the steps of a loop that the mask does not skip, for the first head.
fn remaining_steps(rule: &Trace, extents: [i64; 4], walk: Range<i64>, queries: u32, keys: [i64; 2]) -> i64 {
    let count = walk.end - walk.start;
    if count <= 0 {
        return 0;
    }
    let of = [walk.start * i64::from(queries), (walk.end * i64::from(queries)).min(extents[2]) - 1];
    match rule.judge([[0, 0], [0, 0], of, keys], extents) {
        Judged::Never => 0,
        Judged::Unknown if count > 1 => {
            let half = walk.start + count / 2;
            remaining_steps(rule, extents, walk.start..half, queries, keys) + remaining_steps(rule, extents, half..walk.end, queries, keys)
        }
        Judged::Always | Judged::Unknown => count,
    }
}

/// Returns the time of this many KV blocks, in steps, if `shares` thread blocks split the heads of each.
fn time(walks: &StepCounts, blocks: i64, [group, shares]: [i64; 2], multiprocessors: i64, is_ordered: bool) -> f64 {
    let in_order = if is_ordered { (shares - 1) as f64 * ORDERED } else { 0.0 };
    let around = AROUND + if shares > 1 { ADDED + in_order } else { 0.0 };
    let longest = walks.longest * steps(group, u32::try_from(shares).unwrap_or(u32::MAX)) as f64 + around;
    let threads = blocks * shares;
    if walks.are_even() || threads <= multiprocessors {
        let rounds = (threads + multiprocessors - 1).div_euclid(multiprocessors);
        return rounds as f64 * longest;
    }
    let mean = walks.mean * group as f64 / shares as f64 + around;
    (threads as f64 / multiprocessors as f64 * mean + UNEVEN * longest).max(longest)
}

impl Backward {
    /// Returns the number of queries or keys of a batch entry; for packed sequences, the average.
    pub(crate) fn length(&self, side: Side) -> i64 {
        let [batch, _, seq_q, seq_kv] = self.forward.extents;
        let extent = if side == Side::Queries { seq_q } else { seq_kv };
        self.forward.packed.map_or(extent, |packs| extent.min(packs.totals[side as usize] / batch.max(1)).max(1))
    }

    /// Returns the lengths of the pass's loops over query tiles, one loop per KV block: the longest and the mean.
    pub(crate) fn walks(&self, tile: &BackwardTile) -> StepCounts {
        StepCounts::of(&self.forward, [Side::Queries, Side::Keys].map(|side| self.length(side)), tile.queries)
    }

    /// Returns the number of thread blocks that share the query heads of a KV head, on a device of this many SMs with one thread block per SM. It is
    /// the smallest number with about the least time (docs/cuda.md, "Backward kernels on Hopper").
    pub(crate) fn shares(&self, tile: &BackwardTile, multiprocessors: u32) -> u32 {
        let forward = &self.forward;
        let [batch, heads_q, ..] = forward.extents;
        let (group, multiprocessors) = (forward.group.max(1), i64::from(multiprocessors.max(1)));
        let walks = self.walks(tile);
        let blocks = batch * (heads_q / group) * steps(self.length(Side::Keys), BackwardTile::KEYS) * i64::from(tile.parts);
        let times: Vec<f64> =
            (1..=group).map(|shares| time(&walks, blocks, [group, shares], multiprocessors, self.deterministic)).collect();
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        times.iter().position(|&time| time <= least * CLOSE).map_or(1, |n| n as u32 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::expr::{Place, Precision};
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};

    fn told([batch, heads_q, heads_kv]: [i64; 3], [seq_q, seq_kv]: [i64; 2], mask: &str) -> Backward {
        let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 128, dim_v: 128 };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(mask.parse::<Mask>().unwrap());
        Backward::of(&spec.backward().validate().unwrap()).unwrap()
    }

    fn of(heads: [i64; 3], seq: i64, mask: &str) -> u32 {
        told(heads, [seq, seq], mask).tile(132).unwrap().shares
    }

    #[test]
    fn walks_are_those_that_a_mask_leaves() {
        for text in [
            "padding",
            "causal",
            "causal-bottom-right",
            "window:300,70",
            "prefix-lm:200",
            "prefix-lm:300 & k <= q + 200",
            "k - q > 650",
            "global-local:130,9",
            "q / 256 == k / 256",
            "k <= q & (k < 32 | q - k < 128)",
        ] {
            let forward = told([1, 2, 1], [1000, 700], text).forward;
            let rule = forward.keep.as_deref();
            let keeps = |q: i64, k: i64| {
                let place = Place { score: 0.0, upstream: 0.0, index: [0, 0, q, k], extents: forward.extents, params: &[] };
                forward.region.keeps(q, k) && rule.is_none_or(|rule| rule.eval_first(&place, Precision::F32) != 0.0)
            };
            let of_block = |block: i64| {
                let keys = 128 * block..(128 * (block + 1)).min(700);
                let kept: Vec<i64> = (0..1000).filter(|&q| keys.clone().any(|k| keeps(q, k))).map(|q| q / 64).collect();
                let gaps = kept.windows(2).filter(|two| two[1] != two[0]).count();
                if kept.is_empty() { 0 } else { gaps as i64 + 1 }
            };
            let expected: Vec<i64> = (0..6).map(of_block).collect();
            let walks = StepCounts::of(&forward, [1000, 700], 64);
            assert_eq!(walks.longest, *expected.iter().max().unwrap() as f64, "{text}: {expected:?}");
            assert_eq!(walks.mean, expected.iter().sum::<i64>() as f64 / 6.0, "{text}: {expected:?}");
        }
    }

    #[test]
    fn heads_are_shared_out_where_that_is_faster() {
        assert_eq!(of([2, 32, 32], 2048, "causal"), 1, "a head of keys each");
        assert_eq!(of([1, 8, 1], 900, "causal"), 8, "eight blocks of keys");
        assert!(of([1, 8, 1], 15_616, "causal") > 1, "fewer blocks of keys than multiprocessors");
        assert!(of([2, 64, 8], 1390, "padding") > 1, "a round and a third");
        assert!(of([1, 64, 8], 7144, "global-local:61,127") > 1, "one walk is much longer than others");
        assert_eq!(of([9, 16, 8], 500, "window:128,128"), 1, "walks too short to share");
        assert_eq!(of([16, 32, 8], 8192, "padding"), 1, "blocks of keys enough");
    }
}
