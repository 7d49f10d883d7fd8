//! One pass over an attention problem, with the operands that it reads and writes.

use crate::key::JobQuery;
use sdpa_core::backward::BackwardProblem;
use sdpa_core::expr::Declared;
use sdpa_core::operand::{Direction, Operand};
use sdpa_core::problem::Problem;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{DType, Fact};
use serde::Serialize;

/// A forward or backward pass over one problem. It is the unit for which executors on NVIDIA GPUs create plans, and the key of plan
/// caches.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// A forward pass, from `q`, `k` and `v` to `o` and row statistics.
    Forward(Box<Problem>),
    /// A backward pass, from `q`, `k`, `v`, `o`, `stats` and `d_o` to gradients.
    Backward(Box<BackwardProblem>),
}

impl From<Problem> for Job {
    fn from(problem: Problem) -> Job {
        Job::Forward(Box::new(problem))
    }
}

impl From<BackwardProblem> for Job {
    fn from(problem: BackwardProblem) -> Job {
        Job::Backward(Box::new(problem))
    }
}

impl Job {
    /// Returns the attention problem of either pass.
    pub fn problem(&self) -> &Problem {
        match self {
            Job::Forward(problem) => problem,
            Job::Backward(backward) => backward.forward(),
        }
    }

    /// Returns the direction of the pass.
    pub fn direction(&self) -> Direction {
        match self {
            Job::Forward(_) => Direction::Forward,
            Job::Backward(_) => Direction::Backward,
        }
    }

    /// Returns the name of the direction: `forward` or `backward`.
    pub fn name(&self) -> &'static str {
        self.direction().name()
    }

    /// Iterates over every operand of the pass that has strides, with its extents, strides and alignment.
    pub fn tensors(&self) -> impl Iterator<Item = (Operand, TensorSpec)> {
        self.direction().operands().iter().filter_map(|&operand| Some((operand, *self.tensor(operand)?)))
    }

    /// Returns the extents, strides and alignment of an operand; `None` if the pass does not have it.
    pub fn tensor(&self, operand: Operand) -> Option<&TensorSpec> {
        match self {
            Job::Forward(problem) => problem.tensor(operand),
            Job::Backward(backward) => Some(backward.tensor(operand)),
        }
    }

    /// Iterates over the properties of the pass that an executor must support: see [`Problem::facts`].
    pub fn facts(&self) -> impl Iterator<Item = Fact<'_>> {
        JobQuery::from(self).facts()
    }

    /// Returns extents and strides of an operand as it is stored, in pages or packed: see [`Problem::in_memory`]. `None` if the pass does
    /// not have the operand.
    pub fn in_memory(&self, operand: Operand) -> Option<TensorSpec> {
        JobQuery::from(self).in_memory(operand)
    }

    /// Returns the element type of an operand of the pass.
    pub fn dtype_of(&self, operand: Operand) -> DType {
        match self {
            Job::Forward(problem) => problem.dtype_of(operand),
            Job::Backward(backward) => backward.dtype_of(operand),
        }
    }

    /// Returns whether the pass writes an operand.
    pub fn writes(&self, operand: Operand) -> bool {
        operand.written(self.direction()) == Some(true)
    }

    /// Returns every parameter (tensor or scalar) that the pass declares.
    pub fn params(&self) -> &[Declared] {
        match self {
            Job::Forward(problem) => problem.params(),
            Job::Backward(backward) => backward.params(),
        }
    }

    /// Returns whether the caller requires bitwise equal results on every run.
    pub fn deterministic(&self) -> bool {
        match self {
            Job::Forward(_) => false,
            Job::Backward(backward) => backward.deterministic(),
        }
    }

    /// Returns the pass with the strides of one operand replaced by [dense](TensorSpec::densely) ones.
    pub fn densely(self, operand: Operand) -> Job {
        match self {
            Job::Forward(problem) => Job::Forward(Box::new(problem.densely(operand))),
            Job::Backward(backward) => Job::Backward(Box::new(backward.densely(operand))),
        }
    }
}
