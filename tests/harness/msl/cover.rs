//! Rows of a table of choices, in which any two choices of different columns meet.

use crate::random::Random;
use std::collections::BTreeSet;

type Pair = [(usize, usize); 2];

fn pairs(row: &[usize]) -> impl Iterator<Item = Pair> {
    (0..row.len()).flat_map(move |a| (0..a).map(move |b| [(b, row[b]), (a, row[a])]))
}

/// Rows over columns with so many choices each; few, not fewest.
pub(super) fn pairwise(columns: &[usize], seed: u64) -> Vec<Vec<usize>> {
    let mut random = Random::new(seed);
    let mut draw = |column: usize| random.between(0, columns[column] as i64 - 1) as usize;
    let mut missing: BTreeSet<Pair> = BTreeSet::new();
    for a in 0..columns.len() {
        for b in 0..a {
            missing.extend((0..columns[b]).flat_map(|y| (0..columns[a]).map(move |x| [(b, y), (a, x)])));
        }
    }
    let mut rows = Vec::new();
    while let Some(&pair) = missing.first() {
        let candidate = |_| {
            let mut row: Vec<usize> = (0..columns.len()).map(&mut draw).collect();
            pair.into_iter().for_each(|(column, choice)| row[column] = choice);
            row
        };
        let candidates: Vec<Vec<usize>> = (0..40).map(candidate).collect();
        let Some(row) = candidates.into_iter().max_by_key(|row| pairs(row).filter(|pair| missing.contains(pair)).count()) else { break };
        pairs(&row).for_each(|pair| {
            missing.remove(&pair);
        });
        rows.push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_two_choices_meet() {
        let columns = [9, 3, 12, 2];
        let rows = pairwise(&columns, 1);
        let met: BTreeSet<Pair> = rows.iter().flat_map(|row| pairs(row)).collect();
        assert_eq!(met.len(), 9 * 3 + 9 * 12 + 9 * 2 + 3 * 12 + 3 * 2 + 12 * 2);
        assert!((108..200).contains(&rows.len()), "{} rows", rows.len());
    }
}
