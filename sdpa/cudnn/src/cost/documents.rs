//! Documents of a mask: whether they are contiguous, and how much less work packed sequences would be.

use crate::lower::Job;
use crate::time_model::Model;
use sdpa_core::expr::Trace;
use sdpa_core::mask::{Kept, SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::problem::Problem;
use sdpa_core::{Mask, library};
use std::collections::HashSet;

/// Tile edge in queries and keys. Engines compute a tile fully or skip it.
const TILE: i64 = 128;

/// The tensors by which a mask identifies documents.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Document numbers of queries and of keys.
    Numbers,
    /// First and last key of each query's document.
    Ends,
}

impl Rule {
    const ALL: [Rule; 2] = [Rule::Numbers, Rule::Ends];

    fn mask(self) -> Mask {
        match self {
            Rule::Numbers => Mask::document(),
            Rule::Ends => library::document_runs(),
        }
    }

    /// Recognises the part of a mask that is not a band or a length.
    fn of(rest: &Trace, extents: [i64; 4]) -> Option<Rule> {
        let is = |rule: &Rule| Kept::of(&[rule.mask()], extents).is_ok_and(|kept| kept.rest.as_deref() == Some(rest));
        Rule::ALL.into_iter().find(is)
    }
}

/// Returns whether packed sequences can replace the mask: besides bands and lengths it requires only the same document, and there are as many keys as
/// queries.
pub(super) fn may_be_packed(problem: &Problem) -> bool {
    rule(problem).is_some()
}

fn rule(problem: &Problem) -> Option<Rule> {
    let kept = problem.kept();
    let square = problem.seq_q() == problem.seq_kv() && kept.seq_len_q == kept.seq_len_kv && kept.region.prefix.is_none();
    if !square || problem.packed().is_some() || problem.paged().is_some() || problem.dtype().is_fp8() {
        return None;
    }
    Rule::of(kept.rest.as_deref()?, problem.extents())
}

/// The positions of a document mask's documents in each batch entry.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
/// use sdpa_cudnn::cost::Documents;
///
/// let shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: 4096, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
/// let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::document()).validate()?;
/// // Which document a token is of, as `doc_q` and `doc_k` have it: eight of 512 tokens.
/// let documents = Documents::of(&problem, |_name, _row, token| Some(token / 512)).expect("a mask of documents");
/// assert_eq!((documents.count(), documents.fewer_pairs(&problem)), (8, 8.0));
/// assert!(documents.gain(&problem.into()) > 4.0);
/// # Ok::<(), sdpa_core::SpecErrors>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Documents {
    /// Every document is a contiguous run of tokens. The field has the length of each run, for each batch entry.
    Runs(Vec<Vec<i64>>),
    /// A document is not contiguous, or a token belongs to one document as a query and to another as a key. The fields describe the first
    /// such token.
    Apart {
        /// The batch entry of the token.
        row: i64,
        /// The index of the token within the batch entry.
        token: i64,
    },
}

impl Documents {
    /// Returns the documents of a document mask, which may also have bands and lengths; `None` for any other mask.
    /// `number(name, row, token)` returns the value of the declared parameter `name` at a token of a batch entry.
    pub fn of(problem: &Problem, number: impl Fn(&str, i64, i64) -> Option<i64>) -> Option<Documents> {
        let rule = rule(problem)?;
        let mut rows = Vec::new();
        for row in 0..problem.batch() {
            let length = |name: &str| Some(number(name, row, 0)?.clamp(0, problem.seq_q()));
            let tokens = match problem.kept().seq_len_kv {
                true => [length(SEQ_LEN_Q)?, length(SEQ_LEN_KV)?],
                false => [problem.seq_q(); 2],
            };
            if tokens[0] != tokens[1] {
                return None;
            }
            let all = |name: &str| (0..tokens[0]).map(|token| number(name, row, token)).collect::<Option<Vec<i64>>>();
            let runs = match rule {
                Rule::Numbers => by_number(&all("doc_q")?, &all("doc_k")?),
                Rule::Ends => by_ends(&all("doc_start")?, &all("doc_end")?),
            };
            match runs {
                Ok(lengths) => rows.push(lengths),
                Err(token) => return Some(Documents::Apart { row, token: token as i64 }),
            }
        }
        Some(Documents::Runs(rows))
    }

    /// Returns the number of documents in all batch entries; 0 if they are not contiguous.
    pub fn count(&self) -> usize {
        self.rows().iter().map(Vec::len).sum()
    }

    /// Returns by which factor packing reduces the number of query-key pairs: the pairs within the mask's bands, divided by those that
    /// remain if the documents are packed as sequences.
    pub fn fewer_pairs(&self, problem: &Problem) -> f64 {
        let pairs = |tokens: i64| (0..tokens).map(|q| problem.kept().key_range(q, [tokens; 2]).count() as f64).sum::<f64>();
        let of = |tokens: &[i64]| tokens.iter().map(|&tokens| pairs(tokens)).sum::<f64>();
        let whole: f64 = self.rows().iter().map(|row| pairs(row.iter().sum())).sum();
        whole / self.rows().iter().map(|row| of(row)).sum::<f64>().max(1.0)
    }

    /// Returns the predicted speedup of packing the documents as sequences. The model has times that were measured on an H200, and counts
    /// the tiles within the mask's bands.
    pub fn gain(&self, job: &Job) -> f64 {
        let (problem, model) = (job.problem(), Model::of(job));
        let time = |all: &mut dyn Iterator<Item = i64>| {
            let (pairs, rows) = all.fold((0, 0), |(pairs, rows), tokens| {
                let tiles = (tokens + TILE - 1) / TILE;
                (pairs + tiles_kept(problem, tokens) * TILE * TILE, rows + tiles * TILE)
            });
            model.attention(problem, pairs as f64, rows as f64)
        };
        time(&mut self.rows().iter().map(|row| row.iter().sum())) / time(&mut self.rows().iter().flatten().copied())
    }

    fn rows(&self) -> &[Vec<i64>] {
        match self {
            Documents::Runs(rows) => rows,
            Documents::Apart { .. } => &[],
        }
    }
}

/// Counts the tiles in which the bands keep a pair, for a square of `tokens` queries and keys.
fn tiles_kept(problem: &Problem, tokens: i64) -> i64 {
    let range = |q: i64| problem.kept().key_range(q, [tokens; 2]);
    let of_tile = |first: i64| {
        let keys = range(first).start..range((first + TILE).min(tokens) - 1).end;
        (keys.end + TILE - 1) / TILE - keys.start / TILE
    };
    (0..tokens).step_by(TILE as usize).map(of_tile).sum()
}

/// Returns the lengths of runs of equal numbers, or the first token that is in no contiguous run.
fn by_number(of_queries: &[i64], of_keys: &[i64]) -> Result<Vec<i64>, usize> {
    if let Some(token) = of_queries.iter().zip(of_keys).position(|(q, k)| q != k) {
        return Err(token);
    }
    let mut seen = HashSet::new();
    let mut token = 0;
    let mut lengths = Vec::new();
    for run in of_queries.chunk_by(|a, b| a == b) {
        if !seen.insert(run[0]) {
            return Err(token);
        }
        lengths.push(run.len() as i64);
        token += run.len();
    }
    Ok(lengths)
}

/// Returns the lengths of documents from the bounds of each query's document, or the first token that contradicts its run.
fn by_ends(starts: &[i64], ends: &[i64]) -> Result<Vec<i64>, usize> {
    let mut token = 0;
    let mut lengths = Vec::new();
    while token < starts.len() {
        let bounds = (starts[token], ends[token]);
        let there = starts.iter().zip(ends).skip(token).take_while(|&(&start, &end)| (start, end) == bounds).count();
        if bounds != (token as i64, (token + there) as i64) {
            return Err(token);
        }
        lengths.push(there as i64);
        token += there;
    }
    Ok(lengths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Shape};

    fn spec(batch: i64, seq: i64, masks: &[&str]) -> AttentionSpec {
        let shape = Shape { batch, heads_q: 32, heads_kv: 32, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
        spec.masks = masks.iter().map(|mask| mask.parse().unwrap()).collect();
        spec
    }

    fn problem(batch: i64, seq: i64, masks: &[&str]) -> Problem {
        spec(batch, seq, masks).validate().unwrap()
    }

    fn equal(len: i64) -> impl Fn(&str, i64, i64) -> Option<i64> {
        move |name, _, token| match name {
            "doc_q" | "doc_k" => Some(token / len),
            "doc_start" => Some(token / len * len),
            "doc_end" => Some(token / len * len + len),
            _ => None,
        }
    }

    #[test]
    fn documents_are_read_as_they_lie() {
        for mask in ["document", "document-runs"] {
            for beside in [&["causal"][..], &["window:100,3"], &[]] {
                let masks = [&[mask], beside].concat();
                assert_eq!(Documents::of(&problem(2, 12, &masks), equal(4)), Some(Documents::Runs(vec![vec![4; 3]; 2])), "{masks:?}");
                let masks = [beside, &[mask]].concat();
                assert_eq!(Documents::of(&problem(1, 12, &masks), equal(6)), Some(Documents::Runs(vec![vec![6; 2]])), "{masks:?}");
            }
        }
        // Three inputs that are not contiguous runs: a document number that recurs, a token whose document differs as query and as key,
        // and bounds that leave out a token.
        let again = |name: &str, _: i64, token: i64| name.starts_with("doc_").then_some(token / 4 % 2);
        assert_eq!(Documents::of(&problem(2, 12, &["document"]), again), Some(Documents::Apart { row: 0, token: 8 }));
        let other = |name: &str, row: i64, token: i64| Some(if name == "doc_k" && (row, token) == (1, 5) { 9 } else { token / 6 });
        assert_eq!(Documents::of(&problem(2, 12, &["document"]), other), Some(Documents::Apart { row: 1, token: 5 }));
        let short = |name: &str, row: i64, token: i64| Some(equal(4)(name, row, token)? - i64::from(name == "doc_end" && token == 7));
        assert_eq!(Documents::of(&problem(1, 12, &["document-runs"]), short), Some(Documents::Apart { row: 0, token: 4 }));
        // Tokens past the sequence length belong to no document.
        let padded =
            |name: &str, row: i64, token: i64| if name.starts_with("seq_len") { Some(6 + row) } else { equal(4)(name, row, token) };
        let runs = Documents::Runs(vec![vec![4, 2], vec![4, 3]]);
        assert_eq!(Documents::of(&problem(2, 12, &["document", "padding"]), padded), Some(runs));
    }

    #[test]
    fn of_masks_that_ask_for_more_there_are_no_packed_ones() {
        for masks in [&["shared-prefix:4"][..], &["document", "prefix-lm:4"], &["document", "dilated:2"], &["causal"], &["array:qk"]] {
            assert_eq!(Documents::of(&problem(1, 12, masks), equal(4)), None, "{masks:?}");
        }
        // The document numbers are unknown, so the runs cannot be derived.
        assert_eq!(Documents::of(&problem(1, 12, &["document"]), |_, _, _| None), None);
    }

    #[test]
    fn pairs_are_those_that_bands_leave() {
        let runs = Documents::Runs(vec![vec![2, 2], vec![3, 1]]);
        // Expected ratios of the query-key pairs of whole rows to those of packed documents. No band: (16 + 16) / (4 + 4 + 9 + 1).
        // Causal: (10 + 10) / (3 + 3 + 6 + 1). Window of two keys: (7 + 7) / (3 + 3 + 5 + 1).
        for (masks, fewer) in
            [(&["document"][..], 32.0 / 18.0), (&["document", "causal"], 20.0 / 13.0), (&["document", "window:2,0"], 14.0 / 12.0)]
        {
            assert_eq!(runs.fewer_pairs(&problem(2, 4, masks)), fewer, "{masks:?}");
        }
        assert_eq!((runs.count(), Documents::Apart { row: 0, token: 1 }.count()), (4, 0));
    }

    /// Measured forward times (`docs/benchmarks.md`): eight causal documents of 512 in each of four rows, 1.11 and 2.97 ms by mask, 0.216 and 0.792
    /// ms packed. Documents of 64 in rows of four, 0.173 ms by mask and 0.287 ms packed.
    #[test]
    fn gains_are_near_what_was_measured() {
        let near = |gain: f64, measured: f64| assert!((gain / measured - 1.0).abs() < 0.15, "{gain:.2} beside {measured:.2}");
        let documents = Documents::Runs(vec![vec![512; 8]; 4]);
        let spec = spec(4, 4096, &["document-runs", "causal"]);
        near(documents.gain(&spec.validate().unwrap().into()), 1.11 / 0.216);
        near(documents.gain(&spec.backward().validate().unwrap().into()), 2.97 / 0.792);
        let short = Documents::Runs(vec![vec![64; 4]; 64]);
        near(short.gain(&problem(64, 256, &["document", "causal"]).into()), 0.173 / 0.287);
    }
}
