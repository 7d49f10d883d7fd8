//! Bottom-right aligned bands: about the diagonal through the last query and the last key of each batch entry.

use super::{Align, Mask};
use serde::Serialize;

/// A bottom-right aligned band: in a batch entry with `len_q` queries and `len_kv` keys, a query attends to keys with
/// `lower < (k − q) − (len_kv − len_q) ≤ upper`.
///
/// Lengths are those of the mask [`padding`](Mask::padding), clamped to the extent, or the extent on a side that has none; packed sequences have
/// their own. A bound that no pair within the lengths violates is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Ends {
    /// Keys at `(k − q) − (len_kv − len_q) ≤ lower` are masked out.
    pub lower: Option<i64>,
    /// Keys at `(k − q) − (len_kv − len_q) > upper` are masked out.
    pub upper: Option<i64>,
}

impl Ends {
    /// Intersects the band with a window.
    fn drop_outside(&mut self, left: Option<i64>, right: Option<i64>) {
        self.lower = [self.lower, left.map(i64::saturating_neg)].into_iter().flatten().max();
        self.upper = [self.upper, right].into_iter().flatten().min();
    }

    /// Removes bounds that no pair within lengths violates, and clamps the others.
    fn normalise(self, [seq_q, seq_kv]: [i64; 2]) -> Ends {
        // The bounds limit `(k − last key) − (q − last query)`. This difference is at least 1 − len_kv and at most len_q − 1.
        let lower = self.lower.filter(|&lower| lower > -seq_kv).map(|lower| lower.min(seq_q - 1));
        let upper = self.upper.filter(|&upper| upper < seq_q - 1).map(|upper| upper.max(-seq_kv));
        Ends { lower, upper }
    }

    /// Returns whether query `q` attends to key `k` in a batch entry with these lengths of queries and of keys.
    pub fn keeps(&self, q: i64, k: i64, [len_q, len_kv]: [i64; 2]) -> bool {
        let past = (k - q) - (len_kv - len_q);
        self.lower.is_none_or(|lower| past > lower) && self.upper.is_none_or(|upper| past <= upper)
    }

    /// Returns the keys to which query `q` attends in a batch entry of these lengths, as a range within `0..len_kv`. Neither end decreases from one
    /// query to the next.
    pub fn key_range(&self, q: i64, [len_q, len_kv]: [i64; 2]) -> std::ops::Range<i64> {
        let corner = q + len_kv - len_q;
        let start = self.lower.map_or(0, |lower| corner + lower + 1).clamp(0, len_kv);
        start..self.upper.map_or(len_kv, |upper| corner + upper + 1).clamp(start, len_kv)
    }

    /// Returns whether the band masks out no key.
    pub fn is_full(&self) -> bool {
        *self == Ends::default()
    }
}

/// The rule for windows that are aligned to the end of each sequence, if keys and queries have different `cu_seqlens`: such a window must
/// not be negated or part of a disjunction.
pub(crate) const UNMIXED: &str = "no | or ! around a window that is aligned to the sequence ends; join it to the other masks by &";

/// Returns whether a mask contains a window that is aligned to the end of each sequence ([`Align::Ends`]).
pub(crate) fn reads(mask: &Mask) -> bool {
    match mask {
        Mask::Window { left: _, right: _, align } => *align == Align::Ends,
        Mask::PrefixLm { .. } | Mask::Traced(_) => false,
        Mask::All(masks) | Mask::Any(masks) => masks.iter().any(reads),
        Mask::Not(mask) => reads(mask),
    }
}

/// Splits bottom-right aligned windows off a conjunction, in extents (seq_q, seq_kv). Returns their intersection and the other terms.
pub(super) fn split(masks: &[Mask], extents: [i64; 2]) -> (Ends, Vec<Mask>) {
    let (mut ends, mut others) = (Ends::default(), Vec::new());
    masks.iter().for_each(|mask| take(mask, true, &mut ends, &mut others));
    (ends.normalise(extents), others)
}

fn take(mask: &Mask, holds: bool, ends: &mut Ends, others: &mut Vec<Mask>) {
    match (mask, holds) {
        (Mask::Window { left, right, align: Align::Ends }, true) => ends.drop_outside(*left, *right),
        (Mask::All(masks), true) | (Mask::Any(masks), false) => masks.iter().for_each(|mask| take(mask, holds, ends, others)),
        (Mask::Not(mask), _) => take(mask, !holds, ends, others),
        (Mask::Window { .. } | Mask::PrefixLm { .. } | Mask::Traced(_) | Mask::Any(_), true) => others.push(mask.clone()),
        (Mask::Window { .. } | Mask::PrefixLm { .. } | Mask::Traced(_) | Mask::All(_), false) => others.push(!mask.clone()),
    }
}

/// Returns whether a window that is aligned to the end of each sequence is negated or part of a disjunction.
pub(crate) fn are_mixed(mask: &Mask) -> bool {
    let (mut ends, mut others) = (Ends::default(), Vec::new());
    take(mask, true, &mut ends, &mut others);
    others.iter().any(reads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kept;

    const EXTENTS: [i64; 4] = [2, 3, 5, 7];

    fn kept(masks: &[&str]) -> Kept {
        let masks: Vec<Mask> = masks.iter().map(|mask| mask.parse().unwrap_or_else(|e| panic!("{e}"))).collect();
        Kept::of(&masks, EXTENTS).unwrap()
    }

    #[test]
    fn ranges_are_what_is_kept() {
        for lower in [None, Some(-9), Some(-3), Some(-1), Some(2)] {
            for upper in [None, Some(-2), Some(0), Some(3), Some(9)] {
                let ends = Ends { lower, upper };
                for lens in [[5, 7], [7, 5], [1, 7], [5, 1], [0, 3], [3, 0]] {
                    for q in 0..lens[0] {
                        let want: Vec<i64> = (0..lens[1]).filter(|&k| ends.keeps(q, k, lens)).collect();
                        assert_eq!(ends.key_range(q, lens).collect::<Vec<_>>(), want, "{ends:?} {lens:?} {q}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_last_query_of_an_entry_meets_its_last_key() {
        let ends = kept(&["padding", "causal-ends"]).ends;
        for lens in [[5, 7], [3, 7], [5, 2], [1, 1]] {
            assert!(ends.keeps(lens[0] - 1, lens[1] - 1, lens) && !ends.keeps(lens[0] - 2, lens[1] - 1, lens), "{lens:?}");
        }
    }

    #[test]
    fn bounds_that_no_pair_within_lengths_violates_are_gone_and_the_others_stay() {
        let of = |lower, upper| {
            let Ends { lower, upper } = Ends { lower, upper }.normalise([5, 7]);
            (lower, upper)
        };
        assert_eq!((of(None, Some(4)), of(None, Some(3))), ((None, None), (None, Some(3))));
        assert_eq!((of(Some(-7), None), of(Some(-6), None)), ((None, None), (Some(-6), None)));
        // Check pair by pair that the removed bounds mask out no key, for any lengths.
        for (lower, upper) in [(None, Some(4)), (Some(-7), None)] {
            for lens in (0..=5).flat_map(|q| (0..=7).map(move |k| [q, k])) {
                let pairs = (0..lens[0]).flat_map(|q| (0..lens[1]).map(move |k| (q, k)));
                assert!(pairs.into_iter().all(|(q, k)| Ends { lower, upper }.keeps(q, k, lens)));
            }
        }
    }

    #[test]
    fn without_lengths_the_ends_are_the_extents() {
        for (ends, corner) in [
            (&["causal-ends"][..], &["causal-bottom-right"][..]),
            (&["window:4,1:ends", "document"], &["window:4,1:bottom-right", "document"]),
            (&["!causal-ends | k < 2"], &["!causal-bottom-right | k < 2"]),
        ] {
            assert_eq!(kept(ends), kept(corner));
        }
    }

    #[test]
    fn windows_of_a_conjunction_are_one_band_beside_the_region() {
        let both = kept(&["padding & window:4,2:ends", "causal", "!(!causal-ends | !window:3,inf:ends)"]);
        assert_eq!(both.ends, Ends { lower: Some(-3), upper: Some(0) });
        assert_eq!(both.region, kept(&["causal"]).region);
        assert!(both.seq_len_q && both.seq_len_kv && both.rest.is_none() && !both.is_full());
        let lengths = "tensor seq_len_q[batch]: i32; tensor seq_len_kv[batch]: i32; ";
        assert_eq!(both.to_string(), format!("{lengths}causal & window:3,0:ends & q < seq_len_q & k < seq_len_kv"));
        assert_ne!(both, kept(&["padding & window:4,0:ends", "causal"]));
        // A mask aligned to the sequence ends needs lengths of one side only.
        let keys = kept(&["tensor seq_len_kv[batch]: i32; causal-ends & k < seq_len_kv"]);
        assert_eq!((keys.seq_len_q, keys.seq_len_kv, keys.ends.upper), (false, true, Some(0)));
    }

    #[test]
    fn what_is_no_term_of_the_conjunction_reads_the_lengths() {
        for text in ["padding & (causal-ends | k < 2)", "padding & !window:3,0:ends"] {
            let kept = kept(&[text]);
            assert!(kept.ends.is_full() && kept.seq_len_q && kept.seq_len_kv, "{text}");
            let rest = kept.rest.unwrap_or_else(|| panic!("{text}"));
            assert!(rest.find("seq_len_q").is_some() && rest.find("seq_len_kv").is_some(), "{rest}");
        }
        let mixed = |text: &str| are_mixed(&text.parse().unwrap());
        assert!(mixed("causal-ends | k < 2") && mixed("!causal-ends") && mixed("document & !(causal & causal-ends)"));
        assert!(!mixed("causal-ends & document") && !mixed("!!causal-ends") && !mixed("!(!causal-ends | document)"));
    }
}
