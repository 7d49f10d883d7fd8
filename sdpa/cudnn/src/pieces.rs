//! Attention in pieces, for a mask that is a union of bands over disjoint keys. In one pass an engine computes every tile; each band alone costs only
//! its own tiles. Forward, results are merged by their stats. Backward, each piece reads the stats and output of the whole pass, and gradients of the
//! same rows are added.

use crate::lower::{self, Job, Operand};
use crate::time_model::Model;
use sdpa_core::{Piece, Side};
use std::ops::Range;

/// One piece of a pass: the attention within one band of its mask.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The block of queries and keys, and the band within it.
    pub piece: Piece,
    /// The pass that computes this piece.
    pub job: Job,
    /// The operands whose rows in this piece an earlier piece has written already. This piece writes them to the workspace, and a kernel
    /// merges them with the earlier rows or adds them.
    pub beside: Vec<Operand>,
}

/// Row ranges that earlier pieces write.
#[derive(Default)]
struct Written(Vec<Range<i64>>);

impl Written {
    /// Returns whether all these rows were written before, or the row at which to split them if only some were.
    fn before(&self, rows: &Range<i64>) -> Result<bool, i64> {
        let ends = self.0.iter().flat_map(|before| [before.start, before.end]);
        match ends.filter(|end| rows.start < *end && *end < rows.end).min() {
            Some(cut) => Err(cut),
            None => Ok(self.0.iter().any(|before| before.contains(&rows.start))),
        }
    }

    fn covers(&self, extent: i64) -> bool {
        self.0.iter().map(|rows| rows.end - rows.start).sum::<i64>() == extent
    }
}

/// The most pieces of a pass.
const MOST: usize = 8;

fn rows(piece: &Piece, side: Side) -> &Range<i64> {
    match side {
        Side::Queries => &piece.queries,
        Side::Keys => &piece.keys,
    }
}

/// Splits a piece in two at row `at`.
fn cut(piece: &Piece, side: Side, at: i64) -> Vec<Piece> {
    let all = || [piece.queries.clone(), piece.keys.clone()];
    let part = |rows: Range<i64>| {
        let mut block = all();
        block[side as usize] = rows;
        piece.within(&block[0], &block[1])
    };
    let Range { start, end } = rows(piece, side).clone();
    [part(start..at), part(at..end)].into_iter().flatten().collect()
}

/// Returns the pieces of a pass, one or more for each band of its mask. `None` if the mask is not a union of several bands, or if a piece
/// cannot be computed alone. In `job`, operands that engines cannot read in place must already be dense.
pub fn parts(job: &Job) -> Option<Vec<Part>> {
    let problem = job.problem();
    let mut pieces = problem.kept().pieces(problem.extents())?;
    if pieces.len() < 2 || !lower::densify(job).1.is_empty() {
        return None;
    }
    pieces.reverse();
    let mut written = [Written::default(), Written::default()];
    let mut parts = Vec::with_capacity(pieces.len());
    // All rows that a piece writes must be new, or all must have been written by earlier pieces. A piece that mixes both is cut in two.
    'pieces: while let Some(piece) = pieces.pop() {
        if parts.len() + pieces.len() >= MOST {
            return None;
        }
        let mut again = [false; 2];
        for side in Side::ALL.into_iter().filter(|&side| results(job, side).next().is_some()) {
            match written[side as usize].before(rows(&piece, side)) {
                Ok(before) => again[side as usize] = before,
                Err(at) => {
                    pieces.extend(cut(&piece, side, at).into_iter().rev());
                    continue 'pieces;
                }
            }
        }
        let mut beside = Vec::new();
        for side in Side::ALL {
            match again[side as usize] {
                true => beside.extend(results(job, side)),
                false => written[side as usize].0.push(rows(&piece, side).clone()),
            }
        }
        let whole = match job {
            Job::Forward(problem) => Job::from(problem.piece(&piece)?),
            Job::Backward(problem) => Job::from(problem.piece(&piece)?),
        };
        let job = beside.iter().fold(whole, |job, &operand| job.densely(operand));
        // Do not split the pass if a piece needs dense copies of its operands: the copies are assumed to cost more than the split saves.
        if !lower::densify(&job).1.is_empty() {
            return None;
        }
        parts.push(Part { piece, job, beside });
    }
    let complete = |side: Side| results(job, side).next().is_none() || written[side as usize].covers(problem.seq(side));
    Side::ALL.into_iter().all(complete).then_some(parts)
}

/// Returns the operands over queries or keys that a pass writes.
fn results(job: &Job, side: Side) -> impl Iterator<Item = Operand> {
    job.tensors().map(|(operand, _)| operand).filter(move |&operand| job.writes(operand) && operand.side() == side)
}

/// The least predicted speedup for which pieces are used. The margin covers errors of the model.
const GAIN: f64 = 1.1;

/// Returns the pieces of a pass, one or more for each band of its mask, if the time model predicts that they are faster than one pass;
/// `None` otherwise.
pub fn worthwhile(job: &Job) -> Option<Vec<Part>> {
    parts(job).filter(|parts| gain(job, parts) > GAIN)
}

/// Returns the predicted speedup of computing the pass in the pieces `parts` instead of as a whole.
pub(crate) fn gain(job: &Job, parts: &[Part]) -> f64 {
    let (problem, model) = (job.problem(), Model::of(job));
    let batch = problem.batch() as f64;
    let time = |pairs: i64, rows: i64| model.attention(problem, batch * pairs as f64, batch * rows as f64);
    let whole = time(problem.seq_q() * problem.seq_kv(), problem.seq_q());
    let pieces = parts.iter().map(|part| {
        let rows = part.piece.queries.end - part.piece.queries.start;
        let merges = part.beside.len() as f64;
        time(part.piece.pairs(), rows) + merges * model.merge(problem, batch * rows as f64)
    });
    whole / pieces.sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};

    fn spec(shape: [i64; 2], mask: &str) -> AttentionSpec {
        let shape = Shape { batch: 4, heads_q: 32, heads_kv: 8, seq_q: shape[0], seq_kv: shape[1], dim_qk: 128, dim_v: 128 };
        let mask: Mask = mask.parse().unwrap();
        AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(mask).with_stats()
    }

    fn job(shape: [i64; 2], mask: &str) -> Job {
        spec(shape, mask).validate().unwrap().into()
    }

    #[test]
    fn pieces_are_taken_where_most_of_the_whole_is_empty() {
        for (seq, mask, taken) in [
            ([4096, 4096], "prefix-lm:512", true),
            ([4096, 4096], "prefix-lm:2048", true),
            ([4096, 4096], "prefix-lm:4000", false),
            ([1024, 1024], "prefix-lm:64", false),
            ([2048, 2048], "prefix-lm:512", true),
            ([256, 256], "prefix-lm:64", false),
            ([4096, 4096], "global-local:256,16", true),
            ([4096, 4096], "natten:65", true),
            ([4096, 4096], "causal", false),
            ([4096, 4096], "k < 4 & k <= q | k - q <= 0 & k - q > -128", true),
            ([4096, 4096], "k % 2 == 0", false),
        ] {
            assert_eq!(worthwhile(&job(seq, mask)).is_some(), taken, "{mask} over {seq:?}");
        }
    }

    #[test]
    fn results_of_rows_that_others_wrote_lie_beside_them() {
        let all = parts(&job([64, 96], "k < 16 | k <= q")).unwrap();
        assert_eq!(all.iter().map(|part| part.beside.clone()).collect::<Vec<_>>(), [vec![], vec![Operand::O]]);
        let [first, second] = [&all[0].piece, &all[1].piece];
        assert_eq!((&first.queries, &first.keys, &second.queries, &second.keys), (&(0..64), &(0..16), &(16..64), &(16..64)));
        let backward = |mask: &str| parts(&spec([64, 64], mask).backward().validate().unwrap().into()).map(|all| all[1].beside.clone());
        assert_eq!(backward("k < 16 | k <= q"), Some(vec![Operand::DQ]));
        // No key from 40 on is attended to. No piece would write its gradients, so the pass is not split.
        assert_eq!(backward("k < 16 | k <= q & k < 40"), None);
    }
}
