//! Shards: which tokens each rank holds.

use sdpa_core::expr::Judged;
use sdpa_core::{Chunk, Problem, Region, SpecError, SpecErrors};
use serde::{Deserialize, Serialize};

/// How tokens are divided over ranks. Lengths need not be multiples of the number of ranks.
///
/// With causal masks, the slowest rank of contiguous shards has up to twice the mean work. Zigzag and striped shards are balanced. Windows are balanced by
/// contiguous shards already, and [`Sharding::balanced`] fits any mask.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// Rank `r` has the `r`th of `ranks` runs.
    Contiguous,
    /// Rank `r` has the `r`th run of `⌈seq / ranks⌉` tokens. The last ranks have fewer or none. PyTorch's DTensors and `torch.chunk` divide tokens so.
    Blocks,
    /// Rank `r` has runs `r` and `2 · ranks − 1 − r` of `2 · ranks`.
    Zigzag,
    /// Rank `r` has the tokens at `r`, `r + ranks`, `r + 2 · ranks`, …
    Striped,
    /// The chunks of each rank, in the order in which the rank stores them. Queries and keys are sharded alike.
    Chunks(Vec<Vec<Chunk>>),
}

/// Returns `parts` runs that divide `0..len`; the first ones are longer by one if `len` is no multiple of `parts`.
fn runs(len: i64, parts: i64) -> impl Iterator<Item = Chunk> {
    (0..parts).map(move |n| {
        let start = |n: i64| n * (len / parts) + n.min(len % parts);
        Chunk::new(start(n), 1, start(n + 1) - start(n))
    })
}

impl Sharding {
    /// Returns the chunks of each rank, for `seq` tokens. Neighbours that are one run are joined.
    ///
    /// ```
    /// use sdpa_parallel::{Chunk, Sharding};
    /// let chunks = Sharding::Zigzag.chunks(2, 10);
    /// assert_eq!(chunks, [vec![Chunk::new(0, 1, 3), Chunk::new(8, 1, 2)], vec![Chunk::new(3, 1, 5)]]);
    /// ```
    pub fn chunks(&self, ranks: usize, seq: i64) -> Vec<Vec<Chunk>> {
        let count = ranks as i64;
        let of = |rank: i64| match self {
            Sharding::Contiguous => runs(seq, count).skip(rank as usize).take(1).collect(),
            Sharding::Blocks => {
                let most = (seq + count - 1) / count;
                let start = (rank * most).min(seq);
                vec![Chunk::new(start, 1, most.min(seq - start))]
            }
            Sharding::Zigzag => {
                let all: Vec<Chunk> = runs(seq, 2 * count).collect();
                vec![all[rank as usize], all[(2 * count - 1 - rank) as usize]]
            }
            Sharding::Striped => vec![Chunk::new(rank, count, (seq - rank + count - 1).div_euclid(count).max(0))],
            Sharding::Chunks(chunks) => chunks.get(rank as usize).cloned().unwrap_or_default(),
        };
        (0..count).map(|rank| joined(of(rank))).collect()
    }

    /// Checks that the chunks divide `seq` tokens over `ranks` ranks.
    ///
    /// # Errors
    /// Returns every mistake: a number of lists other than `ranks`, and tokens that no rank or several ranks hold.
    pub fn check(&self, ranks: usize, seq: i64) -> Result<(), SpecErrors> {
        let errors = self.mistakes(ranks, [seq; 2]);
        if errors.is_empty() { Ok(()) } else { Err(SpecErrors(errors)) }
    }

    /// Returns every mistake: a number of lists other than `ranks`, and tokens that no rank or several ranks hold.
    pub(crate) fn mistakes(&self, ranks: usize, [seq_q, seq_kv]: [i64; 2]) -> Vec<SpecError> {
        let Sharding::Chunks(chunks) = self else { return Vec::new() };
        let mut errors = Vec::new();
        if chunks.len() != ranks {
            errors.push(SpecError::new("sharding.chunks", format!("{} lists", chunks.len()), format!("one for each of {ranks} ranks")));
        }
        if seq_q != seq_kv {
            errors.push(SpecError::new(
                "sharding.chunks",
                format!("seq_q {seq_q} and seq_kv {seq_kv}"),
                "equal lengths: queries and keys share the chunks",
            ));
        }
        let all = chunks.iter().flatten();
        let out =
            all.clone().find(|c| c.start < 0 || c.stride < 1 || c.len < 0 || c.len > seq_q || (c.len > 0 && c.at(c.len - 1) >= seq_q));
        if let Some(out) = out {
            errors.push(SpecError::new(
                "sharding.chunks",
                format!("{out:?}"),
                format!("positions from 0 to {}, and a stride of at least 1", seq_q - 1),
            ));
            return errors;
        }
        let mut held = vec![0u8; seq_q.max(0) as usize];
        for position in all.flat_map(|c| (0..c.len).map(|i| c.at(i))) {
            held[position as usize] = held[position as usize].saturating_add(1);
        }
        if let Some(at) = held.iter().position(|&n| n != 1) {
            let times = if held[at] == 0 { "no rank" } else { "more than one chunk" };
            errors.push(SpecError::new("sharding.chunks", format!("token {at} in {times}"), "every token in exactly one chunk"));
        }
        errors
    }

    /// Divides blocks of `block` tokens over ranks, so that ranks have nearly equal numbers of tokens and sums of `areas`, the work of each block's
    /// queries. Blocks are assigned by decreasing area, each to the rank with the least area among those that may hold one more.
    ///
    /// ```
    /// use sdpa_parallel::Sharding;
    /// // The second half has all the work.
    /// let sharding = Sharding::by_area(&[1.0, 1.0, 5.0, 5.0], 16, 64, 2);
    /// let chunks = sharding.chunks(2, 64);
    /// assert!(chunks.iter().all(|rank| rank.iter().any(|c| c.start >= 32)));
    /// ```
    pub fn by_area(areas: &[f64], block: i64, seq: i64, ranks: usize) -> Sharding {
        let most = areas.len().div_ceil(ranks.max(1));
        let mut order: Vec<usize> = (0..areas.len()).collect();
        order.sort_by(|&a, &b| areas[b].total_cmp(&areas[a]).then(a.cmp(&b)));
        let mut held: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::new()); ranks];
        for n in order {
            let free = held.iter_mut().filter(|(_, blocks)| blocks.len() < most);
            if let Some((area, blocks)) = free.min_by(|a, b| a.0.total_cmp(&b.0)) {
                *area += areas[n];
                blocks.push(n);
            }
        }
        let chunk = |n: usize| Chunk::new(n as i64 * block, 1, (seq - n as i64 * block).clamp(0, block));
        let lists = held.into_iter().map(|(_, mut blocks)| {
            blocks.sort_unstable();
            joined(blocks.into_iter().map(chunk).collect())
        });
        Sharding::Chunks(lists.collect())
    }

    /// Divides blocks of `block` tokens over ranks by the areas of the problem's masks, as [`Sharding::by_area`] does. The area of a block counts the keys
    /// of its queries' bands in the key blocks that the rest of the masks does not rule out. A mask that reads tensors rules nothing out: pass the
    /// areas of its blocks to [`Sharding::by_area`] instead.
    pub fn balanced(problem: &Problem, ranks: usize, block: i64) -> Sharding {
        let (block, seq) = (block.max(1), problem.seq_q());
        let areas: Vec<f64> = runs_of(seq, block).map(|q| area(problem, &q, block)).collect();
        Sharding::by_area(&areas, block, seq, ranks)
    }
}

fn runs_of(seq: i64, block: i64) -> impl Iterator<Item = Chunk> {
    (0..(seq + block - 1).div_euclid(block)).map(move |n| Chunk::new(n * block, 1, (seq - n * block).min(block)))
}

/// Returns the number of pairs of a run of queries that may be attended.
fn area(problem: &Problem, q: &Chunk, block: i64) -> f64 {
    let rest = problem.kept().rest.as_ref();
    let last = |c: &Chunk| c.at(c.len - 1);
    let blocks = runs_of(problem.seq_kv(), block).filter(|k| problem.region().attends(q, k));
    let judged = blocks.filter(|k| {
        let bounds = [[0, problem.batch() - 1], [0, problem.heads_q() - 1], [q.start, last(q)], [k.start, last(k)]];
        rest.is_none_or(|rest| rest.judge(bounds, problem.extents()) != Judged::Never)
    });
    judged.map(|k| pairs(problem.region(), q, &k)).sum()
}

/// Returns the number of pairs of two chunks in a band. With a prefix, it may count some keys between the prefix and the diagonal too.
pub(crate) fn pairs(region: &Region, q: &Chunk, k: &Chunk) -> f64 {
    let end = k.at(k.len - 1) + 1;
    let of = |position: i64| {
        let range = region.key_range(position, end);
        let below = |limit: i64| ((limit - k.start + k.stride - 1).div_euclid(k.stride)).clamp(0, k.len);
        (below(range.end) - below(range.start)).max(0) as f64
    };
    (0..q.len).map(|i| of(q.at(i))).sum()
}

/// Joins neighbours that are one run, and drops empty chunks.
pub(crate) fn joined(chunks: Vec<Chunk>) -> Vec<Chunk> {
    let mut all: Vec<Chunk> = Vec::new();
    for chunk in chunks.into_iter().filter(|c| c.len > 0) {
        let chunk = if chunk.len == 1 { Chunk::new(chunk.start, 1, 1) } else { chunk };
        match all.last_mut() {
            // Runs of stride 1 only: a strided run of two single tokens would have a shape of its own.
            Some(last) if last.stride == 1 && chunk.stride == 1 && last.start + last.len == chunk.start => last.len += chunk.len,
            Some(_) | None => all.push(chunk),
        }
    }
    all
}

/// Returns the chunks in order of their positions: one run if together they have every position between the first and the last.
pub(crate) fn cover(chunks: &[Chunk]) -> Vec<Chunk> {
    let tokens: i64 = chunks.iter().map(|c| c.len).sum();
    let first = chunks.iter().map(|c| c.start).min().unwrap_or(0);
    let end = chunks.iter().map(|c| c.at(c.len - 1) + 1).max().unwrap_or(0);
    if tokens > 0 && tokens == end - first { vec![Chunk::new(first, 1, tokens)] } else { sorted(chunks) }
}

/// Returns the chunks in order of their first positions, joined where they are one run.
pub(crate) fn sorted(chunks: &[Chunk]) -> Vec<Chunk> {
    let mut all = chunks.to_vec();
    all.sort();
    joined(all)
}
