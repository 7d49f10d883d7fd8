//! What documents cost as a mask, beside packed ones.

use crate::operands::Operands;
use sdpa::Problem;

/// Pairs that are worth a word.
const WORTH: f64 = 1.5;

/// Documents that a mask has one behind the other in each row, where packed ones would have far fewer pairs of a query and a key.
pub(super) fn advice(operands: &Operands, problem: &Problem) -> Option<String> {
    let (seq_q, seq_kv) = (problem.seq_q(), problem.seq_kv());
    let bound = |name: &str| operands.params.iter().find(|bound| bound.name == name);
    let same = |q: i64, batch: i64| Some(bound("doc_q")?.at([batch, 0, q, 0]));
    let number = |place: i64, batch: i64| match (bound("doc_start"), bound("doc_k")) {
        (Some(start), _) => Some(start.at([batch, 0, place, 0])),
        (None, Some(doc_k)) => same(place, batch).filter(|q| *q == doc_k.at([batch, 0, 0, place])),
        (None, None) => None,
    };
    if problem.packed().is_some() || seq_q != seq_kv {
        return None;
    }
    let (mut documents, mut pairs) = (0u64, 0.0);
    for batch in 0..problem.batch() {
        let numbers = (0..seq_q).map(|place| number(place, batch)).collect::<Option<Vec<f64>>>()?;
        let mut seen: Vec<f64> = Vec::new();
        for run in numbers.chunk_by(|a, b| a == b) {
            // One that comes again is not one document behind the other.
            if seen.contains(&run[0]) {
                return None;
            }
            seen.push(run[0]);
            (documents, pairs) = (documents + 1, pairs + (run.len() as f64).powi(2));
        }
    }
    let fewer = (problem.batch() * seq_q * seq_kv) as f64 / pairs;
    (fewer >= WORTH).then(|| {
        format!("every tile is computed for {documents} documents of a mask: packed (--cu-seqlens) they have {fewer:.1} times fewer pairs of a query and a key")
    })
}
