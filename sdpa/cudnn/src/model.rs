//! What a pass takes on an H200, by a model of times that were measured.

use crate::lower::Job;
use sdpa_core::problem::Problem;

/// Picoseconds of a head of 128 elements: of bf16 under 9.19, fitted to 60 problems of each direction with prefixes of 64 to 3,500
/// of 512 to 8,192 keys, each as a whole and in pieces (`benches/results/2026-11-24-h200-pieces.txt`).
pub(crate) struct Model {
    /// A query and a key.
    pair: f64,
    /// A query, whatever its keys.
    row: f64,
    /// A row that is merged.
    merged: f64,
    /// A kernel, not by head.
    launch: f64,
}

const FORWARD: Model = Model { pair: 0.857, row: 128.0, merged: 180.0, launch: 10.2e6 };
const BACKWARD: Model = Model { pair: 2.32, row: 861.0, merged: 21.0, launch: 20.9e6 };

impl Model {
    /// That of a pass of this direction.
    pub(crate) fn of(job: &Job) -> &'static Model {
        match job {
            Job::Forward(_) => &FORWARD,
            Job::Backward(_) => &BACKWARD,
        }
    }

    /// Picoseconds of one attention over so many pairs and queries of each head, of all batch entries together.
    pub(crate) fn attention(&self, problem: &Problem, pairs: f64, rows: f64) -> f64 {
        heads(problem) * (self.pair * pairs + self.row * rows) + self.launch
    }

    /// Picoseconds of bringing rows of two results together.
    pub(crate) fn merge(&self, problem: &Problem, rows: f64) -> f64 {
        heads(problem) * self.merged * rows + self.launch
    }
}

/// Heads of a batch entry, as so many of 128 elements.
fn heads(problem: &Problem) -> f64 {
    (problem.heads_q() * (problem.dim_qk() + problem.dim_v())) as f64 / 256.0
}
