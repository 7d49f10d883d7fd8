//! Lengths of lookups, and the buckets that would make them few.

use super::reason::difference;
use std::collections::BTreeSet;

/// Fields that are lengths.
const LENGTHS: [&str; 2] = ["seq_q", "seq_kv"];
/// Number of buckets that counts as few.
const FEW: usize = 16;
/// Minimum multiple for rounding lengths, because engines work in tiles of this size.
const TILE: u64 = 64;

/// Returns every sequence length that appears in the differences between misses and their nearest entries.
pub(super) fn asked<'a>(nearest: impl Iterator<Item = &'a String>) -> BTreeSet<u64> {
    let differences = nearest.map(|text| difference(text)).filter(|d| LENGTHS.contains(&d.field.as_str()));
    differences.filter_map(|d| d.asked.parse().ok()).collect()
}

/// Returns a number to whose multiples lengths can be rounded to get few buckets, and the number of buckets. Returns `None` if there are
/// few lengths already.
pub(super) fn bucket(lengths: &BTreeSet<u64>) -> Option<(u64, usize)> {
    if lengths.len() <= FEW {
        return None;
    }
    let left = |multiple: u64| lengths.iter().map(|length| length.div_ceil(multiple)).collect::<BTreeSet<_>>().len();
    let multiples = std::iter::successors(Some(TILE), |multiple| multiple.checked_mul(2));
    multiples.map(|multiple| (multiple, left(multiple))).find(|(_, left)| *left <= FEW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_lengths_become_few() {
        assert_eq!(bucket(&(1..=4096).collect()), Some((256, 16)));
        assert_eq!(bucket(&(1..=16).collect()), None);
        assert_eq!(bucket(&[1, u64::MAX].into_iter().chain(100..200).collect()), Some((64, 5)));
        let texts = ["seq_q 7 ≠ 8", "seq_kv x ≠ 8", "batch 9 ≠ 8", "seq_kv 5 ≠ 8"].map(str::to_owned);
        assert_eq!(asked(texts.iter()).into_iter().collect::<Vec<_>>(), [5, 7]);
    }
}
