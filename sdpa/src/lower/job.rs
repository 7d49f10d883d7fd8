//! What is lowered: a pass over an attention problem, and the operands that it reads and writes.

use crate::backward::BackwardProblem;
use crate::problem::Problem;
use crate::spec::TensorSpec;
use cudnn_graph::expr::Declared;
use serde::Serialize;
use std::fmt;

/// An operand of a pass that is strided as the problem says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output: written by the forward pass, read by the backward pass.
    O,
    /// Gradient of the output.
    DO,
    /// Gradient of the queries.
    DQ,
    /// Gradient of the keys.
    DK,
    /// Gradient of the values.
    DV,
}

impl Operand {
    /// The name used in reports and errors.
    pub fn name(self) -> &'static str {
        match self {
            Operand::Q => "q",
            Operand::K => "k",
            Operand::V => "v",
            Operand::O => "o",
            Operand::DO => "d_o",
            Operand::DQ => "dq",
            Operand::DK => "dk",
            Operand::DV => "dv",
        }
    }
}

impl Operand {
    /// The names of its layout and of its alignment among the fields of a key.
    pub(super) fn fields(self) -> [&'static str; 2] {
        match self {
            Operand::Q => ["layout of q", "alignment of q"],
            Operand::K => ["layout of k", "alignment of k"],
            Operand::V => ["layout of v", "alignment of v"],
            Operand::O => ["layout of o", "alignment of o"],
            Operand::DO => ["layout of d_o", "alignment of d_o"],
            Operand::DQ => ["layout of dq", "alignment of dq"],
            Operand::DK => ["layout of dk", "alignment of dk"],
            Operand::DV => ["layout of dv", "alignment of dv"],
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One pass over one problem.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// From `q`, `k` and `v` to `o` and stats.
    Forward(Box<Problem>),
    /// From those and `d_o` to gradients.
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
    /// The attention.
    pub fn problem(&self) -> &Problem {
        match self {
            Job::Forward(problem) => problem,
            Job::Backward(backward) => backward.forward(),
        }
    }

    /// `forward` or `backward`.
    pub fn name(&self) -> &'static str {
        match self {
            Job::Forward(_) => "forward",
            Job::Backward(_) => "backward",
        }
    }

    /// Every strided operand.
    pub fn tensors(&self) -> Vec<(Operand, TensorSpec)> {
        let p = self.problem();
        let mut all = vec![(Operand::Q, *p.q()), (Operand::K, *p.k()), (Operand::V, *p.v()), (Operand::O, *p.o())];
        match self {
            Job::Forward(_) => {}
            Job::Backward(b) => {
                all.extend([(Operand::DO, *b.d_o()), (Operand::DQ, *b.dq()), (Operand::DK, *b.dk()), (Operand::DV, *b.dv())]);
            }
        }
        all
    }

    /// One of them.
    pub fn tensor(&self, operand: Operand) -> Option<TensorSpec> {
        self.tensors().into_iter().find(|(o, _)| *o == operand).map(|(_, t)| t)
    }

    /// Whether the pass writes it.
    pub fn writes(&self, operand: Operand) -> bool {
        match (self, operand) {
            (Job::Forward(_), Operand::O) | (Job::Backward(_), Operand::DQ | Operand::DK | Operand::DV) => true,
            (Job::Forward(_), Operand::Q | Operand::K | Operand::V | Operand::DO | Operand::DQ | Operand::DK | Operand::DV)
            | (Job::Backward(_), Operand::Q | Operand::K | Operand::V | Operand::O | Operand::DO) => false,
        }
    }

    /// Every declared parameter.
    pub fn params(&self) -> &[Declared] {
        match self {
            Job::Forward(problem) => problem.params(),
            Job::Backward(backward) => backward.params(),
        }
    }

    /// Whether the caller asked for the same bits on every run.
    pub fn deterministic(&self) -> bool {
        match self {
            Job::Forward(_) => false,
            Job::Backward(backward) => backward.deterministic(),
        }
    }

    /// The same job with another operand description, for executors that copy an operand first.
    pub(crate) fn with_tensor(self, operand: Operand, tensor: TensorSpec) -> Job {
        match self {
            Job::Forward(problem) => Job::Forward(Box::new(problem.with_tensor(operand, tensor))),
            Job::Backward(backward) => Job::Backward(Box::new(backward.with_tensor(operand, tensor))),
        }
    }
}
