//! A pass as a runner takes it: its plans, and how far they reach into each operand.

use crate::backward::Backward;
use crate::declined::Check;
use crate::forward::Forward;
use crate::kernels::Kernels;
use crate::plan::{Operand, Pass, Plan, Scratch};
use sdpa_core::{DType, Reason, TensorSpec};

/// A pass as a [`Runner`](crate::Runner) takes it: plans that run one after the other, and the bytes that they reach of each operand.
#[derive(Clone, Debug)]
pub struct Task {
    plans: Vec<Plan>,
    reach: Vec<(Operand, u64)>,
}

impl Operand {
    /// How it is called.
    pub fn name(&self) -> &'static str {
        match self {
            Operand::Q => "q",
            Operand::K => "k",
            Operand::V => "v",
            Operand::O => "o",
            Operand::DO => "d_o",
            Operand::DQ => "dq",
            Operand::DK => "dk",
            Operand::DV => "dv",
            Operand::Scratch(_) => "scratch",
            Operand::Gradient { .. } => "a gradient of a parameter",
            Operand::Params => "params",
            Operand::Stats => "stats",
            Operand::SeqLenQ => "seq_len_q",
            Operand::SeqLenKv => "seq_len_kv",
            Operand::Scalars(_) => "scalars",
            Operand::Declared { .. } => "a declared tensor",
        }
    }

    /// Whether it is between kernels of a pass alone: what runs the pass finds the memory, and the caller has nothing to bind.
    pub fn is_scratch(&self) -> bool {
        match self {
            Operand::Scratch(_) => true,
            Operand::Q
            | Operand::K
            | Operand::V
            | Operand::O
            | Operand::DO
            | Operand::DQ
            | Operand::DK
            | Operand::DV
            | Operand::Gradient { .. }
            | Operand::Params
            | Operand::Stats
            | Operand::SeqLenQ
            | Operand::SeqLenKv
            | Operand::Scalars(_)
            | Operand::Declared { .. } => false,
        }
    }
}

/// Bytes from the first to the last element of a tensor; `None` where they are no number.
fn bytes(tensor: &TensorSpec, dtype: DType) -> Option<u64> {
    let forwards = tensor.strides.iter().all(|&stride| stride >= 0);
    u64::try_from(tensor.extent().filter(|_| forwards)?).ok()?.checked_mul(dtype.bytes(1))
}

/// What the tensors of a problem are, for [`Task::new`].
#[derive(Clone, Copy)]
struct Tensors<'p> {
    forward: &'p Forward,
    backward: Option<&'p Backward>,
}

impl Tensors<'_> {
    /// The bytes of an operand that a kernel may touch; `None` where they are no number.
    fn reach(&self, operand: &Operand) -> Option<u64> {
        let Tensors { forward, backward } = *self;
        let element = forward.dtype;
        let [batch, heads_q, seq_q, _] = forward.q.dims;
        let of = |tensor: &TensorSpec| bytes(tensor, element);
        let floats = |dims: &[i64]| dims.iter().try_fold(4u64, |n, &dim| n.checked_mul(u64::try_from(dim).ok()?));
        match operand {
            Operand::Q => of(&forward.q),
            Operand::K => of(&forward.k),
            Operand::V => of(&forward.v),
            Operand::O => of(&forward.o),
            Operand::DO => of(&backward?.d_o),
            Operand::DQ => of(&backward?.dq),
            Operand::DK => of(&backward?.dk),
            Operand::DV => of(&backward?.dv),
            Operand::Stats => floats(&[batch, heads_q, seq_q]),
            Operand::Scratch(Scratch { name: _, elements }) => floats(&[*elements]),
            Operand::SeqLenQ | Operand::SeqLenKv => floats(&[batch]),
            Operand::Scalars(names) => floats(&[names.len() as i64]),
            Operand::Declared { name: _, dtype, elements } | Operand::Gradient { name: _, dtype, elements } => {
                u64::try_from(*elements).ok()?.checked_mul(dtype.bytes(1))
            }
            // Of each plan its own.
            Operand::Params => Some(0),
        }
    }
}

impl Task {
    fn new(Pass { plans }: Pass, tensors: Tensors<'_>) -> Result<Task, Vec<Reason>> {
        let mut reach: Vec<(Operand, u64)> = Vec::new();
        let mut check = Check::default();
        for binding in plans.iter().flat_map(|plan| &plan.buffers) {
            let operand = &binding.operand;
            if *operand == Operand::Params || reach.iter().any(|(o, _)| o == operand) {
                continue;
            }
            let bytes = tensors.reach(operand);
            check.that(bytes.is_some(), operand.name(), "strides that are negative, or too far", "tensors of at most 2^64 bytes");
            reach.extend(bytes.map(|bytes| (operand.clone(), bytes)));
        }
        if check.0.is_empty() { Ok(Task { plans, reach }) } else { Err(check.0) }
    }

    /// The plans, in the order in which they run.
    pub fn plans(&self) -> &[Plan] {
        &self.plans
    }

    /// Every operand but [`Operand::Params`], once, and the bytes that kernels may touch of it.
    pub fn operands(&self) -> &[(Operand, u64)] {
        &self.reach
    }

    /// Bytes of all scratch operands.
    pub fn scratch_bytes(&self) -> u64 {
        self.reach.iter().filter(|(operand, _)| operand.is_scratch()).map(|(_, bytes)| bytes).sum()
    }

    /// The first kernel that uses an operand, and whether any writes it.
    pub(crate) fn user(&self, operand: &Operand) -> (&'static str, bool) {
        let uses = |plan: &Plan| plan.buffers.iter().any(|b| b.operand == *operand);
        let entry = self.plans.iter().find(|plan| uses(plan)).map_or("no kernel", |plan| plan.entry);
        (entry, self.plans.iter().flat_map(|plan| &plan.buffers).any(|b| b.operand == *operand && b.written))
    }

    /// Changes something in each plan: for trying what a fault would do.
    #[must_use]
    pub fn map_plans(self, change: impl FnMut(Plan) -> Plan) -> Task {
        Task { plans: self.plans.into_iter().map(change).collect(), reach: self.reach }
    }
}

impl Forward {
    /// The pass, of these kernels or of those that the planner takes, with what it reaches.
    ///
    /// # Errors
    /// As [`Forward::supports`], and limits of these kernels.
    pub fn task(&self, kernels: Option<Kernels>) -> Result<Task, Vec<Reason>> {
        let pass = kernels.map_or_else(|| self.plan(), |kernels| self.plan_with(kernels))?;
        Task::new(pass, Tensors { forward: self, backward: None })
    }
}

impl Backward {
    /// The pass, of these kernels or of those that the planner takes, with what it reaches.
    ///
    /// # Errors
    /// As [`Backward::supports`], and limits of these kernels.
    pub fn task(&self, kernels: Option<Kernels>) -> Result<Task, Vec<Reason>> {
        let pass = kernels.map_or_else(|| self.plan(), |kernels| self.plan_with(kernels))?;
        Task::new(pass, Tensors { forward: &self.forward, backward: Some(self) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::Region;

    fn forward(strides: [i64; 4]) -> Forward {
        let tensor = |heads, seq, dim| TensorSpec { dims: [2, heads, seq, dim], strides, alignment: 16 };
        Forward {
            dtype: DType::F16,
            q: tensor(4, 10, 16),
            k: tensor(2, 6, 16),
            v: tensor(2, 6, 8),
            o: tensor(4, 10, 8),
            band: Region::default(),
            seq_len_q: false,
            seq_len_kv: true,
            score_mod: None,
            keep: None,
            sink: false,
            stats: true,
        }
    }

    #[test]
    fn a_pass_reaches_the_last_element_of_each_operand_and_no_further() {
        let task = forward([10_000, 1000, 20, 1]).task(None).unwrap();
        let reach = |operand: &Operand| task.operands().iter().find(|(o, _)| o == operand).map(|(_, bytes)| *bytes);
        assert_eq!(reach(&Operand::Q), Some(2 * (10_000 + 3 * 1000 + 9 * 20 + 15 + 1)));
        assert_eq!(reach(&Operand::V), Some(2 * (10_000 + 1000 + 5 * 20 + 7 + 1)));
        assert_eq!(reach(&Operand::Stats), Some(4 * 2 * 4 * 10));
        assert_eq!(reach(&Operand::SeqLenKv), Some(8));
        assert_eq!((reach(&Operand::SeqLenQ), reach(&Operand::Params), task.scratch_bytes()), (None, None, 0));
    }

    #[test]
    fn scratch_counts_once() {
        let forward = forward([10_000, 1000, 20, 1]);
        let Forward { q, k, v, o, .. } = forward;
        let backward = Backward { forward, d_o: o, dq: q, dk: k, dv: v, gradient: None, along: Vec::new(), sink_gradient: None };
        let task = backward.task(None).unwrap();
        assert_eq!((task.plans().len(), task.scratch_bytes()), (3, 4 * 2 * 4 * 10));
        assert_eq!(task.user(&Operand::DK), ("attention_dkv", true));
    }

    #[test]
    fn strides_without_a_reach_are_declined() {
        for strides in [[10_000, 1000, -20, 1], [i64::MAX, i64::MAX, 20, 1]] {
            let declined = forward(strides).task(None).unwrap_err();
            assert!(matches!(&declined[0], Reason::Limit { field, .. } if field == "q"), "{declined:?}");
        }
    }
}
