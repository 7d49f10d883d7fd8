//! A model of the time of a pass on an H200, fitted to measurements.

use crate::lower::Job;
use sdpa_core::problem::Problem;

/// Times in picoseconds for a head of 128 elements in bf16 under 9.19. Fitted to 60 problems of each direction with prefixes of 64 to 3,500 of 512 to
/// 8,192 keys, each whole and in pieces (`benches/results/2026-11-24-h200-pieces.txt`).
pub(crate) struct Model {
    /// Time per query-key pair.
    pair: f64,
    /// Time per query, whatever its keys.
    row: f64,
    /// Time per merged row.
    merged: f64,
    /// Time per kernel launch, independent of heads.
    launch: f64,
}

const FORWARD: Model = Model { pair: 0.857, row: 128.0, merged: 180.0, launch: 10.2e6 };
const BACKWARD: Model = Model { pair: 2.32, row: 861.0, merged: 21.0, launch: 20.9e6 };

impl Model {
    /// Returns the time model for passes in the direction of `job`, forward or backward.
    pub(crate) fn of(job: &Job) -> &'static Model {
        match job {
            Job::Forward(_) => &FORWARD,
            Job::Backward(_) => &BACKWARD,
        }
    }

    /// Returns the predicted time of one attention, in picoseconds. `pairs` and `rows` are the numbers of query-key pairs and of queries
    /// per head, summed over the batch.
    pub(crate) fn attention(&self, problem: &Problem, pairs: f64, rows: f64) -> f64 {
        heads(problem) * (self.pair * pairs + self.row * rows) + self.launch
    }

    /// Returns the predicted time of merging two results, in picoseconds. `rows` is the number of rows per head, summed over the batch.
    pub(crate) fn merge(&self, problem: &Problem, rows: f64) -> f64 {
        heads(problem) * self.merged * rows + self.launch
    }
}

/// Returns the heads of a batch entry, in units of heads of 128 elements.
fn heads(problem: &Problem) -> f64 {
    (problem.heads_q() * (problem.dim_qk() + problem.dim_v())) as f64 / 256.0
}
