//! Masks, evaluated by their definition at one position.

use crate::Place;

/// The corner of the score matrix that a window's diagonal starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// The diagonal through query 0 and key 0.
    TopLeft,
    /// The diagonal through the last query and the last key.
    BottomRight,
}

/// A mask: it decides to which keys each query attends.
pub enum Mask<'a> {
    /// Attends to the key on the diagonal, to fewer than `left` keys up to and including it, and to at most `right` keys after it. `None`
    /// means no bound.
    Window {
        /// The number of keys up to and including the diagonal; `None` means no bound.
        left: Option<i64>,
        /// The number of keys past the diagonal; `None` means no bound.
        right: Option<i64>,
        /// The corner at which the diagonal starts.
        align: Align,
    },
    /// A window around the diagonal through the last query and the last key of each batch entry (bottom-right aligned per sequence).
    Ends {
        /// The number of keys up to and including the diagonal of the batch entry; `None` means no bound.
        left: Option<i64>,
        /// The number of keys past the diagonal of the batch entry; `None` means no bound.
        right: Option<i64>,
        /// Returns the number of queries and the number of keys of a batch entry, given its index.
        lengths: Box<dyn Fn(i64) -> [i64; 2] + Sync + 'a>,
    },
    /// Attends to the first `len` keys, and to keys that are not after the query.
    Prefix {
        /// Number of keys in the prefix.
        len: i64,
    },
    /// Attends to the keys for which a function of the position returns true.
    Rule(Box<dyn Fn(Place) -> bool + Sync + 'a>),
    /// Attends to the keys to which all of these masks attend.
    All(Vec<Mask<'a>>),
    /// Attends to the keys to which at least one of these masks attends.
    Any(Vec<Mask<'a>>),
    /// Attends to the keys to which this mask does not attend.
    Not(Box<Mask<'a>>),
}

impl Mask<'_> {
    /// Returns true if the query of a position attends to its key; `extents` are (batch, heads_q, seq_q, seq_kv).
    #[must_use]
    pub fn keeps(&self, at: Place, extents: Place) -> bool {
        let ([b, .., q, k], [.., seq_q, seq_kv]) = (at, extents);
        match self {
            Mask::Window { left, right, align } => {
                let q = match align {
                    Align::TopLeft => q,
                    Align::BottomRight => q + seq_kv - seq_q,
                };
                // Compute in i128, which cannot overflow although the bounds may be any i64.
                let (q, k) = (i128::from(q), i128::from(k));
                left.is_none_or(|left| k > q - i128::from(left)) && right.is_none_or(|right| k <= q + i128::from(right))
            }
            Mask::Ends { left, right, lengths } => {
                let [queries, keys] = lengths(b);
                // Count from the ends: the distances of the key from the last key, and of the query from the last query.
                let (of_key, of_query) = (i128::from(keys - 1 - k), i128::from(queries - 1 - q));
                left.is_none_or(|left| of_key - of_query < i128::from(left))
                    && right.is_none_or(|right| of_query - of_key <= i128::from(right))
            }
            Mask::Prefix { len } => k <= q || k < *len,
            Mask::Rule(keeps) => keeps(at),
            Mask::All(masks) => masks.iter().all(|m| m.keeps(at, extents)),
            Mask::Any(masks) => masks.iter().any(|m| m.keeps(at, extents)),
            Mask::Not(mask) => !mask.keeps(at, extents),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(mask: &Mask<'_>, q: i64, seq_q: i64) -> Vec<i64> {
        (0..6).filter(|&k| mask.keeps([0, 0, q, k], [1, 1, seq_q, 6])).collect()
    }

    #[test]
    fn masks_are_read_word_for_word() {
        let window = |left, right, align| Mask::Window { left, right, align };
        let causal = || window(None, Some(0), Align::TopLeft);
        let dilated = || Mask::Rule(Box::new(|[.., q, k]: Place| (q - k) % 3 == 0));
        assert_eq!(kept(&causal(), 2, 6), [0, 1, 2]);
        assert_eq!(kept(&window(Some(2), Some(1), Align::TopLeft), 3, 6), [2, 3, 4]);
        assert_eq!(kept(&window(Some(1), Some(0), Align::BottomRight), 0, 2), [4]);
        let ends = |left, right, lengths: [i64; 2]| Mask::Ends { left, right, lengths: Box::new(move |_| lengths) };
        // With 3 queries and 5 keys, the last query attends up to the last key. With 4 queries and 2 keys, the first two queries attend
        // to no key.
        assert_eq!(kept(&ends(None, Some(0), [3, 5]), 2, 6), [0, 1, 2, 3, 4]);
        assert_eq!(kept(&ends(Some(2), Some(1), [3, 5]), 1, 6), [2, 3, 4]);
        assert_eq!(kept(&ends(None, Some(0), [4, 2]), 1, 6), [] as [i64; 0]);
        assert_eq!(kept(&ends(None, Some(0), [4, 2]), 2, 6), [0]);
        assert_eq!(kept(&Mask::Prefix { len: 3 }, 1, 6), [0, 1, 2]);
        assert_eq!(kept(&window(Some(i64::MAX), Some(i64::MAX), Align::BottomRight), 5, 6).len(), 6);
        assert_eq!(kept(&dilated(), 4, 6), [1, 4]);
        assert_eq!(kept(&Mask::All(vec![Mask::Not(Box::new(dilated())), causal()]), 4, 6), [0, 2, 3]);
        assert_eq!(kept(&Mask::Any(vec![dilated(), Mask::Prefix { len: 1 }]), 1, 6), [0, 1, 4]);
    }
}
