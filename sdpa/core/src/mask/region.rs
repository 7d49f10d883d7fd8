//! The band and prefix of a problem's masks.

use serde::{Deserialize, Serialize};

/// A diagonal band with an optional prefix, from the conjunction of all masks. With plain indices `q` and `k`, a query attends to a key if `lower < k
/// − q ≤ upper` and, with a prefix, `k ≤ q` or `k < prefix`.
///
/// A bound that no pair of indices violates is absent, so equal sets of pairs have equal regions (up to empty bands).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Keys at `k − q ≤ lower` are masked out.
    pub lower: Option<i64>,
    /// Keys at `k − q > upper` are masked out.
    pub upper: Option<i64>,
    /// Keys at `k > q` and `k ≥ prefix` are masked out.
    pub prefix: Option<i64>,
}

impl Region {
    /// Masks out every key.
    pub(super) fn drop_all(&mut self, seq_q: i64) {
        self.drop_past(Some(-seq_q));
    }

    /// Adds `k ≤ q` or `k < len`.
    pub(super) fn prefix_at_most(&mut self, len: i64) {
        self.prefix = Some(self.prefix.map_or(len, |p| p.min(len)));
    }

    /// Masks out keys at `k − q > upper`.
    pub(super) fn drop_past(&mut self, upper: Option<i64>) {
        self.upper = [self.upper, upper].into_iter().flatten().min();
    }

    /// Masks out keys at `k − q ≤ lower`.
    pub(super) fn drop_through(&mut self, lower: Option<i64>) {
        self.lower = [self.lower, lower].into_iter().flatten().max();
    }

    /// Removes bounds that no pair of indices violates, and clamps the others.
    pub(super) fn normalise(mut self, seq_q: i64, seq_kv: i64) -> Region {
        // A single query has index 0, so a prefix of `len` keys is the upper bound `len` − 1.
        if let Some(len) = self.prefix.filter(|_| seq_q == 1) {
            self.prefix = None;
            self.drop_past(Some(len.max(1) - 1));
        }
        // A prefix of one key is causal: key 0 is never past a query.
        if self.prefix.is_some_and(|n| n <= 1) {
            self.prefix = None;
            self.drop_past(Some(0));
        }
        if self.prefix.is_some_and(|n| n >= seq_kv) || self.upper.is_some_and(|u| u <= 0) {
            self.prefix = None;
        }
        self.upper = self.upper.filter(|&u| u < seq_kv - 1);
        self.lower = self.lower.filter(|&l| l >= 1 - seq_q);
        // Bounds past these limits mask out everything. Clamping them keeps index arithmetic inside i32.
        self.upper = self.upper.map(|u| u.max(-seq_q));
        self.lower = self.lower.map(|l| l.min(seq_kv - 1));
        self
    }

    /// Returns whether no query of these extents attends to any key.
    pub fn is_empty(&self, seq_q: i64, seq_kv: i64) -> bool {
        let first = self.lower.map_or(1 - seq_q, |lower| (lower + 1).max(1 - seq_q));
        let last = self.upper.map_or(seq_kv - 1, |upper| upper.min(seq_kv - 1));
        // If all keys of the band come after their queries, the earliest key is that of query 0. A prefix that ends before it keeps no
        // pair.
        seq_q < 1 || seq_kv < 1 || first > last || self.prefix.is_some_and(|prefix| first > 0 && first >= prefix)
    }

    /// Returns whether query `q` attends to key `k`.
    pub fn keeps(&self, q: i64, k: i64) -> bool {
        self.lower.is_none_or(|l| k - q > l) && self.upper.is_none_or(|u| k - q <= u) && self.prefix.is_none_or(|n| k <= q || k < n)
    }

    /// Returns the keys to which query `q` may attend, as a half-open range. With a prefix, some keys inside it may be masked out too.
    pub fn key_range(&self, q: i64, seq_kv: i64) -> std::ops::Range<i64> {
        let start = self.lower.map_or(0, |l| q + l + 1).clamp(0, seq_kv);
        let past_band = self.upper.map_or(seq_kv, |u| q + u + 1);
        let past_prefix = self.prefix.map_or(seq_kv, |n| n.max(q + 1));
        start..past_band.min(past_prefix).clamp(start, seq_kv)
    }

    /// Returns whether no key is masked out.
    pub fn is_full(&self) -> bool {
        *self == Region::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_empty_exactly_where_it_keeps_no_pair() {
        for (seq_q, seq_kv) in [(1, 1), (5, 7), (7, 5), (1, 9), (9, 1), (0, 7), (5, 0), (0, 0)] {
            for bound in -10..10 {
                for other in [None, Some(-3), Some(0), Some(2)] {
                    for prefix in [None, Some(0), Some(3), Some(8)] {
                        for region in
                            [Region { lower: Some(bound), upper: other, prefix }, Region { lower: other, upper: Some(bound), prefix }]
                        {
                            let any = (0..seq_q).any(|q| (0..seq_kv).any(|k| region.keeps(q, k)));
                            assert_eq!(region.is_empty(seq_q, seq_kv), !any, "{region:?} {seq_q} x {seq_kv}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn ranges_of_keys_end_at_the_last_that_is_kept() {
        for prefix in [None, Some(2), Some(5), Some(8)] {
            for upper in [None, Some(0), Some(3), Some(-2)] {
                for lower in [None, Some(-3), Some(1)] {
                    let region = Region { lower, upper, prefix };
                    for q in 0..7 {
                        let kept: Vec<i64> = (0..9).filter(|&k| region.keeps(q, k)).collect();
                        let range = region.key_range(q, 9);
                        if let (Some(first), Some(last)) = (kept.first(), kept.last()) {
                            assert_eq!((range.start, range.end), (*first, last + 1), "{region:?} {q}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn whatever_keeps_nothing_past_a_bound_is_one_region() {
        let of = |lower: i64| Region { lower: Some(lower), ..Region::default() }.normalise(7, 9);
        for far in [9, 10, 11, 1 << 40] {
            assert_eq!(of(far), of(8), "{far}");
        }
        assert_ne!(of(7), of(8));
        let of = |upper: i64| Region { upper: Some(upper), ..Region::default() }.normalise(7, 9);
        for far in [-8, -9, -(1 << 40)] {
            assert_eq!(of(far), of(-7), "{far}");
        }
        assert_ne!(of(-6), of(-7));
    }

    #[test]
    fn bounds_that_no_pair_of_indices_violates_are_gone_and_the_others_stay() {
        let of = |lower, upper, prefix| {
            let Region { lower, upper, prefix } = Region { lower, upper, prefix }.normalise(5, 7);
            (lower, upper, prefix)
        };
        // With 5 queries and 7 keys, the last key is 6 past the first query, and the last query is 4 past the first key.
        assert_eq!(of(None, Some(6), None), (None, None, None));
        assert_eq!(of(None, Some(5), None), (None, Some(5), None));
        assert_eq!(of(Some(-5), None, None), (None, None, None));
        assert_eq!(of(Some(-4), None, None), (Some(-4), None, None));
        // Test prefixes of all 7 keys and of fewer, then prefixes with a bound as strict as `k ≤ q` and with a looser bound.
        assert_eq!(of(None, None, Some(7)), (None, None, None));
        assert_eq!(of(None, None, Some(6)), (None, None, Some(6)));
        assert_eq!(of(None, None, Some(1)), (None, Some(0), None));
        assert_eq!(of(None, None, Some(2)), (None, None, Some(2)));
        assert_eq!(of(None, Some(0), Some(3)), (None, Some(0), None));
        assert_eq!(of(None, Some(1), Some(3)), (None, Some(1), Some(3)));
    }
}
