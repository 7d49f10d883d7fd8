//! The paged KV cache of a case: the pages of each batch entry, and the contents of unused table entries and pages.

use crate::library::{Bound, Values};
use crate::packing::Packing;
use crate::random::Random;
use sdpa::paged::PAGE_TABLE;
use sdpa::{AttentionSpec, Layout, Mask, Paged, TensorSpec};
use serde::Deserialize;
use std::sync::Arc;

/// The paged KV cache of a case.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paging {
    /// Number of tokens in a page.
    pub page_size: i64,
    /// Memory order of the page pool. `bhsd` has the axes (pages, heads, tokens of a page, dim) in this order.
    #[serde(default = "page_major")]
    pub layout: Layout,
    /// Number of queries of each batch entry, with the mask `padding`; by default drawn at random.
    #[serde(default)]
    pub lengths_q: Option<Vec<i64>>,
    /// Number of keys of each batch entry, with the mask `padding`; by default drawn at random.
    #[serde(default)]
    pub lengths_kv: Option<Vec<i64>>,
    /// Whether pages are in the order of the keys.
    #[serde(default)]
    pub in_order: bool,
    /// Number of leading pages that all batch entries share.
    #[serde(default)]
    pub shared: i64,
    /// Number of pages that no batch entry uses, in addition to those past the lengths.
    #[serde(default)]
    pub spare: i64,
}

fn page_major() -> Layout {
    Layout::Bshd
}

/// A page table, and the number of keys of each batch entry.
#[derive(Clone, Debug)]
pub struct Cache {
    page_size: i64,
    pages: i64,
    keys: Vec<i64>,
    /// One row for each batch entry.
    table: Vec<Vec<i32>>,
}

impl Paging {
    /// Draws the pages of a specification with a paged KV cache. It also draws lengths if the specification has a traced mask.
    pub fn draw(spec: &AttentionSpec, paged: &Paged, random: &mut Random) -> Paging {
        let padded = spec.masks.iter().any(|mask| matches!(mask, Mask::Traced(_)));
        let mut lengths = |most: i64| {
            let batch = 0..spec.q.dims[0];
            padded.then(|| {
                batch.map(|_| [0, most, random.between(0, most), random.between(0, most)][random.between(0, 3) as usize]).collect()
            })
        };
        let (lengths_q, lengths_kv) = (lengths(spec.q.dims[2]), lengths(spec.k.dims[2]));
        let (in_order, spare) = (random.between(0, 3) == 0, paged.pages - spec.q.dims[0] * pages_of(spec.k.dims[2], paged.page_size));
        let shared = if spare > 0 { random.between(0, spare) } else { 0 };
        Paging { page_size: paged.page_size, layout: page_major(), lengths_q, lengths_kv, in_order, shared, spare: spare - shared }
    }

    /// Returns the page size and number of pages for a specification of `batch` entries with up to `seq_kv` keys.
    pub fn paged(&self, batch: i64, seq_kv: i64) -> Paged {
        Paged::new(self.page_size, batch * pages_of(seq_kv, self.page_size) + self.shared + self.spare)
    }

    /// Returns the strides of keys or values, with a gap of `gap` elements between rows.
    pub fn strides(&self, [batch, heads, seq_kv, dim]: [i64; 4], gap: i64) -> [i64; 4] {
        self.layout.strides([self.paged(batch, seq_kv).pages, heads, self.page_size, dim + gap])
    }

    /// Returns the paging for packed queries, with the lengths of the keys of `packing`.
    #[must_use]
    pub fn beside(&self, packing: Option<&Packing>) -> Paging {
        match packing {
            Some(packing) => Paging { lengths_q: None, lengths_kv: packing.lengths_kv.clone(), ..self.clone() },
            None => self.clone(),
        }
    }

    /// Returns the per-sequence lengths of the case as parameters of a call.
    pub fn lengths(&self) -> Vec<Bound> {
        let given = [("seq_len_q", &self.lengths_q), ("seq_len_kv", &self.lengths_kv)];
        given.into_iter().filter_map(|(name, lengths)| Some(bound(name, lengths.as_ref()?.iter().map(|n| *n as i32), 1))).collect()
    }

    /// Draws the page table of a problem of extents (batch, heads_q, seq_q, seq_kv) for the given per-sequence lengths.
    pub fn cache(&self, [batch, _, _, seq_kv]: [i64; 4], lengths: Option<&[f64]>, random: &mut Random) -> Cache {
        let pages = self.paged(batch, seq_kv).pages;
        let mut order: Vec<i32> = (0..pages as i32).collect();
        if !self.in_order {
            (1..order.len()).for_each(|n| order.swap(n, random.between(0, n as i64) as usize));
        }
        let mut own = order.split_off(self.shared as usize).into_iter();
        let keys: Vec<i64> = (0..batch as usize).map(|b| lengths.map_or(seq_kv, |lengths| (lengths[b] as i64).clamp(0, seq_kv))).collect();
        let row = |keys: i64| {
            let there = (0..pages_of(keys, self.page_size)).map(|n| order.get(n as usize).copied().or_else(|| own.next()).unwrap_or(-1));
            let mut row: Vec<i32> = there.collect();
            let behind = pages_of(seq_kv, self.page_size) - row.len() as i64;
            row.extend((0..behind).map(|_| random.pick(&[-1, pages as i32, i32::MAX, i32::MIN, 0])));
            row
        };
        let table = keys.iter().copied().map(row).collect();
        Cache { page_size: self.page_size, pages, keys, table }
    }
}

fn pages_of(keys: i64, page_size: i64) -> i64 {
    (keys + page_size - 1) / page_size
}

fn bound(name: &'static str, values: impl Iterator<Item = i32>, per_entry: i64) -> Bound {
    let values: Vec<i32> = values.collect();
    let widened: Arc<[f64]> = values.iter().map(|x| f64::from(*x)).collect();
    Bound { name, dims: [values.len() as i64 / per_entry, 1, 1, per_entry], values: Values::I32(values), widened }
}

impl Cache {
    /// Returns the page table in the form in which a call receives it.
    pub fn bound(&self) -> Bound {
        bound(PAGE_TABLE, self.table.iter().flatten().copied(), self.table[0].len() as i64)
    }

    /// Returns the page of a key and the key's index in that page; `None` if the batch entry does not have the key.
    pub fn place(&self, batch: i64, key: i64) -> Option<[i64; 2]> {
        let page = |key: i64| i64::from(self.table[batch as usize][(key / self.page_size) as usize]);
        (key < self.keys[batch as usize]).then(|| [page(key), key % self.page_size])
    }

    /// Returns whether the page table has a page for the key of a position (batch, head, query, key).
    pub fn has(&self, [b, _, _, k]: [i64; 4]) -> bool {
        k < self.keys[b as usize]
    }

    /// Returns extents and strides of the page pool that holds the keys or values `tensor`.
    pub fn container(&self, tensor: &TensorSpec) -> TensorSpec {
        let [_, heads, _, dim] = tensor.dims;
        TensorSpec { dims: [self.pages, heads, self.page_size, dim], ..*tensor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::Laid;

    #[test]
    fn keys_are_where_the_table_says_and_nothing_is_behind_them() {
        let paging = Paging {
            page_size: 2,
            layout: Layout::Bhsd,
            lengths_q: None,
            lengths_kv: Some(vec![3, 0, 5]),
            in_order: true,
            shared: 1,
            spare: 1,
        };
        assert_eq!(paging.paged(3, 5), Paged::new(2, 11));
        let cache = paging.cache([3, 4, 1, 5], Some(&[3.0, 0.0, 5.0]), &mut Random::new(1));
        assert_eq!(([&cache.table[0][..2], &cache.table[2]]), [&[0, 1][..], &[0, 2, 3]]);
        assert_eq!(cache.bound().dims, [3, 1, 1, 3]);
        assert_eq!([cache.place(0, 2), cache.place(0, 3), cache.place(1, 0), cache.place(2, 4)], [Some([1, 0]), None, None, Some([3, 0])]);
        let tensor = TensorSpec { dims: [3, 2, 5, 1], strides: paging.strides([3, 2, 5, 1], 0), alignment: 16 };
        let laid = Laid::paged(&tensor, &cache);
        // Pages are head-major. Each page has four elements: two tokens of each of two heads.
        let of_first = [Some(0), Some(1), Some(4), None, None, Some(2), Some(3), Some(6), None, None];
        assert_eq!((laid.elements(), &laid.places()[..10]), (44, &of_first[..]));
        assert!(laid.places()[10..20].iter().all(Option::is_none));
        assert_eq!(laid.places()[24], Some(12));
    }
}
