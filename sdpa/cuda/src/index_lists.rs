//! Block-sparse index lists of index-only masks, made with the plan: the KV blocks over which each query tile iterates.
//!
//! An index-only mask reads no declared parameter. Interval arithmetic evaluates it over a whole block
//! ([`Trace::judge`](sdpa_core::expr::Trace::judge)). If the result is undecided, the kernel evaluates the mask for each pair of the block.

use crate::problem::{Forward, Lists};
use sdpa_core::expr::{Judged, Trace};

/// The bit of an item of [`BlockMap::blocks`] that marks a partial block, in which the mask may mask out some pairs.
pub const PARTLY: u32 = 1 << 31;

/// Block-sparse index lists: the KV blocks of every query tile, or the query tiles of every KV block. The lists of one head are adjacent.
/// If lists differ between heads or batch entries, those of further heads follow, and then those of further batch entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockMap {
    /// Index in `blocks` of the start of each list, and after them the end of the last list.
    pub begin: Vec<u32>,
    /// The items of all lists: KV blocks in descending order, or query tiles in ascending order. [`PARTLY`] marks partial blocks.
    pub blocks: Vec<u32>,
    /// The number of batch entries and the number of heads that have their own lists. A number is 1 if all batch entries or all heads
    /// share them.
    pub rows: [i64; 2],
}

impl BlockMap {
    /// Creates the lists of KV blocks of `keys` keys, one list for each tile of `queries` queries. Returns `None` unless the problem has
    /// an index-only mask.
    pub fn of_queries(problem: &Forward, queries: u32, keys: u32) -> Option<BlockMap> {
        let [queries, keys] = [queries, keys].map(i64::from);
        let [_, _, seq_q, seq_kv] = problem.extents;
        BlockMap::listed(problem, |list, places| {
            for first_q in (0..seq_q).step_by(queries as usize) {
                let last_q = (first_q + queries).min(seq_q) - 1;
                // The first and the last query of the tile determine the range of keys that the band allows.
                let reach = problem.region.key_range(first_q, seq_kv).start..problem.region.key_range(last_q, seq_kv).end;
                for block in (reach.start / keys..(reach.end + keys - 1) / keys).rev() {
                    let last_k = (block * keys + keys).min(seq_kv) - 1;
                    list.judge(places, [[first_q, last_q], [block * keys, last_k]], block);
                }
                list.ends();
            }
        })
    }

    /// Creates the lists of tiles of `queries` queries, one list for each KV block of `keys` keys. Returns `None` unless the problem has
    /// an index-only mask.
    pub fn of_keys(problem: &Forward, queries: u32, keys: u32) -> Option<BlockMap> {
        let [queries, keys] = [queries, keys].map(i64::from);
        let [_, _, seq_q, seq_kv] = problem.extents;
        BlockMap::listed(problem, |list, places| {
            for first_k in (0..seq_kv).step_by(keys as usize) {
                let last_k = (first_k + keys).min(seq_kv) - 1;
                for first_q in (0..seq_q).step_by(queries as usize) {
                    let last_q = (first_q + queries).min(seq_q) - 1;
                    let reach = problem.region.key_range(first_q, seq_kv).start..problem.region.key_range(last_q, seq_kv).end;
                    if reach.start <= last_k && first_k < reach.end {
                        list.judge(places, [[first_q, last_q], [first_k, last_k]], first_q / queries);
                    }
                }
                list.ends();
            }
        })
    }

    /// Builds the lists of each batch entry and head that has its own.
    fn listed(problem: &Forward, of: impl Fn(&mut List<'_>, [i64; 2])) -> Option<BlockMap> {
        let keep = problem.keep.as_deref().filter(|_| problem.lists() == Lists::AtPlan)?;
        let rows = problem.list_rows();
        let mut list = List { keep, extents: problem.extents, map: BlockMap { begin: vec![0], blocks: Vec::new(), rows } };
        for entry in 0..rows[0] {
            for head in 0..rows[1] {
                of(&mut list, [entry, head]);
            }
        }
        Some(list.map)
    }

    /// Returns the size of `begin` and `blocks` in device memory, in bytes.
    pub fn bytes(&self) -> u64 {
        4 * (self.begin.len() + self.blocks.len()) as u64
    }
}

/// A map under construction.
struct List<'a> {
    keep: &'a Trace,
    extents: [i64; 4],
    map: BlockMap,
}

impl List<'_> {
    /// Adds an item unless the mask excludes every pair of these queries and keys; both ends are inclusive.
    fn judge(&mut self, [entry, head]: [i64; 2], [queries, keys]: [[i64; 2]; 2], item: i64) {
        match self.keep.judge([[entry, entry], [head, head], queries, keys], self.extents) {
            Judged::Never => {}
            Judged::Always => self.map.blocks.push(item as u32),
            Judged::Unknown => self.map.blocks.push(item as u32 | PARTLY),
        }
    }

    fn ends(&mut self) {
        self.map.begin.push(self.map.blocks.len() as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile_config::Tile;
    use sdpa_core::expr::{Place, Precision};
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};

    fn forward(mask: Mask, seq_q: i64, seq_kv: i64) -> Forward {
        let shape = Shape { batch: 2, heads_q: 3, heads_kv: 1, seq_q, seq_kv, dim_qk: 64, dim_v: 64 };
        Forward::of(&AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask).validate().unwrap()).unwrap()
    }

    /// Evaluates the mask for every pair of every block.
    #[test]
    fn blocks_that_are_left_out_are_empty_and_those_without_the_rule_are_whole() {
        let masks: Vec<(&str, Mask)> = [
            ("k <= q | k < 200", "prefix"),
            ("(q - k) % 3 == 0 & abs(q - k) < 300", "dilated"),
            ("abs(q / 32 - k / 32) <= 3 & abs(q % 32 - k % 32) <= 5", "neighbours"),
            ("k < 64 | (k <= q & q - k < 450)", "first keys and a window"),
            ("q / 150 == k / 150", "blocks"),
            ("select(head == 1, k <= q, q - k > 256)", "by head"),
            ("q * 2 + batch * 500 > k * 3", "by batch"),
            ("f32(q) * 0.5 < f32(k)", "floats"),
            ("!(k / 100 == 2) & max(q, k) >= 129", "holes"),
        ]
        .into_iter()
        .map(|(text, name)| (name, text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))))
        .collect();
        let tile = Tile::of(128, 128).unwrap();
        let (queries, keys) = (i64::from(tile.queries()), i64::from(tile.keys));
        for (name, mask) in masks {
            let problem = forward(mask, 700, 901);
            let Some(map) = BlockMap::of_queries(&problem, tile.queries(), tile.keys) else {
                assert_eq!(name, "prefix", "{name} has no map");
                continue;
            };
            let (keep, [_, _, seq_q, seq_kv]) = (problem.keep.clone().unwrap(), problem.extents);
            let (mut left_out, mut whole, mut row) = (0, 0, 0);
            for entry in 0..map.rows[0] {
                for head in 0..map.rows[1] {
                    for first_q in (0..seq_q).step_by(queries as usize) {
                        let blocks = &map.blocks[map.begin[row] as usize..map.begin[row + 1] as usize];
                        row += 1;
                        assert!(blocks.windows(2).all(|pair| pair[0] & !PARTLY > pair[1] & !PARTLY), "{name}: the last first");
                        for block in 0..(seq_kv + keys - 1) / keys {
                            let item = blocks.iter().find(|item| i64::from(**item & !PARTLY) == block);
                            let (mut any, mut all) = (false, true);
                            for q in first_q..(first_q + queries).min(seq_q) {
                                for k in block * keys..(block * keys + keys).min(seq_kv) {
                                    let index = [entry, head, q, k];
                                    let place = Place { score: 0.0, upstream: 0.0, index, extents: problem.extents, params: &[] };
                                    let kept = keep.eval_first(&place, Precision::F32) != 0.0;
                                    all &= kept;
                                    any |= kept && problem.region.keeps(q, k);
                                }
                            }
                            match item {
                                None => assert!(!any, "{name}: block {block} of queries from {first_q} keeps something"),
                                Some(item) => {
                                    assert!(item & PARTLY != 0 || all, "{name}: block {block} of queries from {first_q} is not whole")
                                }
                            }
                            left_out += usize::from(item.is_none());
                            whole += usize::from(item.is_some_and(|item| item & PARTLY == 0));
                        }
                    }
                }
            }
            assert_eq!(row + 1, map.begin.len());
            if name != "dilated" && name != "neighbours" {
                assert!(left_out > 0 && whole > 0, "{name}: {left_out} left out, {whole} whole");
            }
        }
    }
}
