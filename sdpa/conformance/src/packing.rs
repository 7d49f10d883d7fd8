//! Packed sequences (varlen) of a case: their lengths, and the tokens around them.

use crate::library::{Bound, Values};
use crate::paging::Cache;
use crate::random::Random;
use sdpa::packed::memory;
use sdpa::{AttentionSpec, Packed, Side, TensorSpec};
use serde::Deserialize;
use std::ops::Range;

/// The packed sequences of a case.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packing {
    /// Number of query tokens of each sequence, and of key tokens unless `lengths_kv` is given.
    pub lengths_q: Vec<i64>,
    /// Number of key tokens of each sequence; with a paged KV cache, the number of keys of each batch entry.
    #[serde(default)]
    pub lengths_kv: Option<Vec<i64>>,
    /// Number of unused tokens before the first sequence.
    #[serde(default)]
    pub before: i64,
    /// Number of unused tokens after the last sequence.
    #[serde(default)]
    pub slack: i64,
    /// Whether the problem leaves the largest number of tokens open.
    #[serde(default)]
    pub unbounded: bool,
    /// Whether `cu_seqlens` are i64, not i32.
    #[serde(default)]
    pub wide: bool,
}

impl Packing {
    /// Draws sequences that fit a packed specification: empty ones, one of the largest length, and others.
    pub fn draw(spec: &AttentionSpec, packed: &Packed, random: &mut Random) -> Packing {
        let of = |tensor: &TensorSpec, total: Option<i64>, random: &mut Random| {
            let [batch, _, longest, _] = tensor.dims;
            let mut left = total.unwrap_or(batch * longest);
            let lengths: Vec<i64> = (0..batch)
                .map(|_| {
                    let most = longest.min(left);
                    let length = [0, most, random.between(0, most), random.between(0, most)][random.between(0, 3) as usize];
                    left -= length;
                    length
                })
                .collect();
            (lengths, left)
        };
        let (lengths_q, left_q) = of(&spec.q, packed.total_q, random);
        let (lengths_kv, left_kv) = of(&spec.k, packed.total_kv, random);
        let left = if packed.cross && spec.paged.is_none() { left_q.min(left_kv) } else { left_q };
        let before = random.between(0, left.min(4));
        let slack = random.between(0, (left - before).min(5));
        Packing {
            lengths_q,
            lengths_kv: packed.cross.then_some(lengths_kv),
            before,
            slack,
            unbounded: packed.total_q.is_none(),
            wide: packed.wide,
        }
    }

    /// Returns the number of tokens of each sequence on one side: queries or keys.
    pub fn lengths(&self, side: Side) -> &[i64] {
        match side {
            Side::Queries => &self.lengths_q,
            Side::Keys => self.lengths_kv.as_ref().unwrap_or(&self.lengths_q),
        }
    }

    /// Returns the `cu_seqlens` offsets of one side: queries or keys.
    pub fn boundaries(&self, side: Side) -> Vec<i32> {
        let mut at = self.before;
        let ends = self.lengths(side).iter().map(|length| {
            at += length;
            at
        });
        [self.before].into_iter().chain(ends).map(|n| n as i32).collect()
    }

    fn documents(&self, side: Side) -> Vec<Range<i64>> {
        self.boundaries(side).windows(2).map(|pair| i64::from(pair[0])..i64::from(pair[1])).collect()
    }

    /// Returns the number of tokens of one side (queries or keys) in memory, including those outside of any sequence.
    pub fn tokens(&self, side: Side) -> i64 {
        self.before + self.lengths(side).iter().sum::<i64>() + self.slack
    }

    /// Returns the layout of the packed sequences for a specification.
    pub fn packed(&self) -> Packed {
        let total = |side| (!self.unbounded).then(|| self.before + self.lengths(side).iter().sum::<i64>());
        Packed::new().with_cross(self.lengths_kv.is_some()).with_wide(self.wide).with_totals(total(Side::Queries), total(Side::Keys))
    }

    /// Returns the `cu_seqlens` of `sides` (queries, keys) as parameters of a call.
    pub fn bound(&self, sides: &[Side]) -> Vec<Bound> {
        let mut sides: Vec<_> = sides.iter().map(|side| (self.packed().boundaries(*side), *side)).collect();
        sides.dedup_by_key(|(name, _)| *name);
        let bind = |(name, side)| {
            let boundaries = self.boundaries(side);
            let widened = boundaries.iter().map(|n| f64::from(*n)).collect();
            let dims = [self.lengths_q.len() as i64, 1, 1, 1];
            let wide = || Values::I64(boundaries.iter().map(|n| i64::from(*n)).collect());
            Bound { name, dims, values: if self.wide { wide() } else { Values::I32(boundaries) }, widened }
        };
        sides.into_iter().map(bind).collect()
    }

    /// Returns whether both the query and the key of a position (batch, head, query, key) are within their sequences.
    pub fn has(&self, [b, _, q, k]: [i64; 4]) -> bool {
        q < self.lengths(Side::Queries)[b as usize] && k < self.lengths(Side::Keys)[b as usize]
    }
}

/// Extents and strides of a tensor, with the memory layout of its batch entries: at a constant stride, packed, or paged.
#[derive(Clone, Debug)]
pub struct Laid {
    tensor: TensorSpec,
    entries: Entries,
}

#[derive(Clone, Debug)]
enum Entries {
    /// Batch entries are at a constant stride.
    Apart,
    /// Batch entries are packed sequences. The fields are the token range of each, and the total number of tokens.
    Packed(Vec<Range<i64>>, i64),
    /// Batch entries have pages of a KV cache.
    Paged(Cache),
}

impl From<&TensorSpec> for Laid {
    fn from(tensor: &TensorSpec) -> Laid {
        Laid { tensor: *tensor, entries: Entries::Apart }
    }
}

impl Laid {
    /// Returns the layout of a tensor whose rows are queries or keys (`side`), packed if `packing` is given.
    pub fn of(tensor: &TensorSpec, side: Side, packing: Option<&Packing>) -> Laid {
        let packed = |packing: &Packing| Entries::Packed(packing.documents(side), packing.tokens(side));
        Laid { tensor: *tensor, entries: packing.map_or(Entries::Apart, packed) }
    }

    /// Returns the layout of keys or values in the pages of a KV cache.
    pub fn paged(tensor: &TensorSpec, cache: &Cache) -> Laid {
        Laid { tensor: *tensor, entries: Entries::Paged(cache.clone()) }
    }

    /// Returns the number of elements in memory, including gaps.
    pub fn elements(&self) -> usize {
        let whole = match &self.entries {
            Entries::Apart => self.tensor,
            Entries::Packed(_, tokens) => memory(&self.tensor, (*tokens).max(1)),
            Entries::Paged(cache) => cache.container(&self.tensor),
        };
        whole.extent().unwrap_or(0) as usize
    }

    /// Returns the offset of each element, in row-major order of (batch, head, seq, dim). It is `None` past the end of a sequence and past the keys of a page
    /// table.
    pub fn places(&self) -> Vec<Option<usize>> {
        let ([b, h, s, d], [of_b, of_h, of_s, of_d]) = (self.tensor.dims, self.tensor.strides);
        let mut places = Vec::with_capacity((b * h * s * d) as usize);
        for i in 0..b {
            for j in 0..h {
                for k in 0..s {
                    let start = match &self.entries {
                        Entries::Apart => Some(i * of_b + k * of_s),
                        Entries::Packed(documents, _) => {
                            let document = &documents[i as usize];
                            (k < document.end - document.start).then(|| (document.start + k) * of_s)
                        }
                        Entries::Paged(cache) => cache.place(i, k).map(|[page, token]| page * of_b + token * of_s),
                    };
                    places.extend((0..d).map(|e| start.map(|start| (start + j * of_h + e * of_d) as usize)));
                }
            }
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::Layout;

    #[test]
    fn places_are_those_of_documents_alone() {
        let packing = Packing { lengths_q: vec![2, 0, 1], lengths_kv: None, before: 1, slack: 2, unbounded: false, wide: false };
        assert_eq!(packing.boundaries(Side::Keys), [1, 3, 3, 4]);
        let tensor = TensorSpec::dense([3, 2, 2, 1], Layout::Bshd);
        let laid = Laid::of(&tensor, Side::Queries, Some(&packing));
        let there = [Some(2), Some(4), Some(3), Some(5), None, None, None, None, Some(6), None, Some(7), None];
        assert_eq!((laid.elements(), laid.places()), (12, there.to_vec()));
        assert!(packing.has([0, 0, 1, 1]) && !packing.has([1, 0, 0, 0]) && !packing.has([2, 0, 0, 1]));
    }
}
