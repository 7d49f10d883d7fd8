//! Results of compared passes, from which a ledger is made.

use super::feature::{Feature, Features};
use super::{About, Ledger, features};
use crate::lower::Job;
use ahash::{AHashMap, AHashSet};

/// The number of problems of different shapes that must have right results to prove that cuDNN computes a pair of features correctly.
pub const ENOUGH: usize = 3;

/// Features in a refused combination, at most, unless no smaller combination can be the cause of a wrong result.
const MOST_REFUSED: usize = 3;

/// Batch, query heads, KV heads, `seq_q`, `seq_kv`, `dim_qk`, `dim_v`.
type Extents = [i64; 7];

/// Right and wrong results of passes on one version of cuDNN and one architecture, from which a ledger is made.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    right: Vec<(Features, Extents)>,
    wrong: Vec<Features>,
}

impl Evidence {
    /// Adds the result of a pass that was compared with an oracle. `is_right` is true if both agreed.
    ///
    /// A pass counts as wrong if its process crashed or returned no result in time.
    pub fn add(&mut self, job: &Job, is_right: bool) {
        let problem = job.problem();
        let [batch, heads_q, seq_q, seq_kv] = problem.extents();
        let extents = [batch, heads_q, problem.heads_kv(), seq_q, seq_kv, problem.dim_qk(), problem.dim_v()];
        match is_right {
            true => self.right.push((features(job), extents)),
            false => self.wrong.push(features(job)),
        }
    }

    /// Creates the ledger of proven and refused features from these results. It replaces the counts of right and wrong results in
    /// `about`.
    pub fn ledger(&self, about: About) -> Ledger {
        let mut shapes: AHashMap<(Feature, Feature), AHashSet<Extents>> = AHashMap::new();
        for (of_pass, extents) in &self.right {
            let all: Vec<Feature> = of_pass.iter().collect();
            for (at, feature) in all.iter().enumerate() {
                for other in &all[..=at] {
                    let shapes = shapes.entry((*feature, *other)).or_default();
                    if shapes.len() < ENOUGH {
                        shapes.insert(*extents);
                    }
                }
            }
        }
        let refused = self.refused();
        let is_refused = |pair: Features| refused.iter().any(|combination| combination.is_within(&pair));
        let mut proven: Vec<(Feature, Features)> = Feature::all().iter().map(|feature| (*feature, Features::default())).collect();
        for (feature, with) in &mut proven {
            for other in Feature::all() {
                let seen = [(*feature, *other), (*other, *feature)].into_iter().find_map(|pair| shapes.get(&pair));
                if seen.is_some_and(|shapes| shapes.len() >= ENOUGH) && !is_refused([*feature, *other].into_iter().collect()) {
                    with.insert(*other);
                }
            }
        }
        proven.retain(|(feature, with)| with.has(*feature));
        let about = About { right: self.right.len(), wrong: self.wrong.len(), ..about };
        Ledger { about, proven, refused }
    }

    /// Returns the combinations of features that may cause a wrong result: minimal ones of at most [`MOST_REFUSED`] features that no right result
    /// has. If right results have all of these, returns all features of the pass.
    fn refused(&self) -> Vec<Features> {
        let mut refused: Vec<Features> = Vec::new();
        for wrong in &self.wrong {
            let all: Vec<Feature> = wrong.iter().collect();
            let is_right = |combination: &Features| self.right.iter().any(|(right, _)| combination.is_within(right));
            let mut suspects: Vec<Features> = Vec::new();
            let mut larger: Vec<(Features, usize)> = vec![(Features::default(), 0)];
            for _ in 0..MOST_REFUSED {
                let mut innocent = Vec::new();
                for (part, first) in larger {
                    for (at, feature) in all.iter().enumerate().skip(first) {
                        let mut combination = part;
                        combination.insert(*feature);
                        match suspects.iter().any(|suspect| suspect.is_within(&combination)) {
                            true => {}
                            false if is_right(&combination) => innocent.push((combination, at + 1)),
                            false => suspects.push(combination),
                        }
                    }
                }
                larger = innocent;
            }
            if suspects.is_empty() {
                suspects.push(*wrong);
            }
            refused.extend(suspects.into_iter().filter(|suspect| !refused.contains(suspect)).collect::<Vec<_>>());
        }
        refused
    }
}
