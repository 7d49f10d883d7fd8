//! A pass for a runner: its plans, and the bytes that they access of each operand.

use crate::backward::Backward;
use crate::forward::Forward;
use crate::kernels::Kernels;
use crate::packed::Tokens;
use crate::plan::{Operand, Pass, Plan, Scratch};
use crate::unsupported::Check;
use sdpa_core::{DType, Reason, Side, TensorSpec};

/// A pass for a [`Runner`](crate::Runner): plans that run in order, and the bytes that they access of each operand.
#[derive(Clone, Debug)]
pub struct Task {
    plans: Vec<Plan>,
    reach: Vec<(Operand, u64)>,
    packed: Option<Packed>,
}

/// Data to compute the bytes that a pass accesses in a packed call with fewer tokens than the maximum.
#[derive(Clone, Debug)]
struct Packed {
    most: Tokens,
    /// Bytes from one token to the next, of operands that have tokens.
    steps: Vec<(Operand, Side, u64)>,
}

impl Operand {
    /// Returns the name of the operand in errors.
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
            Operand::RowMax => "row_max",
            Operand::SumExp => "sum_exp",
            Operand::SeqLenQ => "seq_len_q",
            Operand::SeqLenKv => "seq_len_kv",
            Operand::Scalars(_) => "scalars",
            Operand::Declared { .. } => "a declared tensor",
        }
    }

    /// Returns whether only kernels of the pass access the operand. The runner then allocates it, and the caller passes no memory for it.
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
            | Operand::RowMax
            | Operand::SumExp
            | Operand::SeqLenQ
            | Operand::SeqLenKv
            | Operand::Scalars(_)
            | Operand::Declared { .. } => false,
        }
    }
}

/// Returns the bytes from the first to the last element of a tensor; `None` on overflow.
fn bytes(tensor: &TensorSpec, dtype: DType) -> Option<u64> {
    let forwards = tensor.strides.iter().all(|&stride| stride >= 0);
    u64::try_from(tensor.extent().filter(|_| forwards)?).ok()?.checked_mul(dtype.bytes(1))
}

/// The tensors of a problem, for [`Task::new`].
#[derive(Clone, Copy)]
struct Tensors<'p> {
    forward: &'p Forward,
    backward: Option<&'p Backward>,
}

impl Tensors<'_> {
    /// Returns a strided operand, and the side of its tokens.
    fn strided(&self, operand: &Operand) -> Option<(&TensorSpec, Side)> {
        let Tensors { forward, backward } = *self;
        match operand {
            Operand::Q => Some((&forward.q, Side::Queries)),
            Operand::K => Some((&forward.k, Side::Keys)),
            Operand::V => Some((&forward.v, Side::Keys)),
            Operand::O => Some((&forward.o, Side::Queries)),
            Operand::DO => Some((&backward?.d_o, Side::Queries)),
            Operand::DQ => Some((&backward?.dq, Side::Queries)),
            Operand::DK => Some((&backward?.dk, Side::Keys)),
            Operand::DV => Some((&backward?.dv, Side::Keys)),
            Operand::Scratch(_)
            | Operand::Gradient { .. }
            | Operand::Params
            | Operand::Stats
            | Operand::RowMax
            | Operand::SumExp
            | Operand::SeqLenQ
            | Operand::SeqLenKv
            | Operand::Scalars(_)
            | Operand::Declared { .. } => None,
        }
    }

    /// Returns the bytes of an operand that a kernel may access; `None` on overflow.
    fn reach(&self, operand: &Operand) -> Option<u64> {
        let forward = self.forward;
        let batch = forward.q.dims[0];
        let floats = |dims: &[i64]| dims.iter().try_fold(4u64, |n, &dim| n.checked_mul(u64::try_from(dim).ok()?));
        match operand {
            Operand::Q | Operand::K | Operand::V | Operand::O | Operand::DO | Operand::DQ | Operand::DK | Operand::DV => {
                let (tensor, side) = self.strided(operand)?;
                let memory = forward.memory(tensor, side);
                if memory.dims[2] == 0 { Some(0) } else { bytes(&memory, forward.dtype) }
            }
            Operand::Stats | Operand::RowMax | Operand::SumExp => floats(&forward.row_memory().0),
            Operand::Scratch(Scratch { name: _, elements }) => floats(&[*elements]),
            Operand::SeqLenQ | Operand::SeqLenKv => floats(&[batch]),
            Operand::Scalars(names) => floats(&[names.len() as i64]),
            Operand::Declared { name: _, dtype, elements } | Operand::Gradient { name: _, dtype, elements } => {
                u64::try_from(*elements).ok()?.checked_mul(dtype.bytes(1))
            }
            // Each plan holds its own parameters, so the caller provides no bytes for them.
            Operand::Params => Some(0),
        }
    }

    /// Returns the bytes from one token of a packed operand to the next.
    fn step(&self, operand: &Operand) -> Option<(Side, u64)> {
        if [Operand::Stats, Operand::RowMax, Operand::SumExp].contains(operand) {
            return Some((Side::Queries, 4 * self.forward.q.dims[1].unsigned_abs()));
        }
        let (tensor, side) = self.strided(operand)?;
        Some((side, tensor.strides[2].unsigned_abs().saturating_mul(self.forward.dtype.bytes(1))))
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
            check.that(
                bytes.is_some(),
                operand.name(),
                "strides that are negative or too large",
                "strides of at least 0 and fewer than 2^64 bytes",
            );
            reach.extend(bytes.map(|bytes| (operand.clone(), bytes)));
        }
        let steps = reach.iter().filter_map(|(operand, _)| tensors.step(operand).map(|(side, bytes)| (operand.clone(), side, bytes)));
        let packed = tensors.forward.tokens().map(|most| Packed { most, steps: steps.collect() });
        if check.0.is_empty() { Ok(Task { plans, reach, packed }) } else { Err(check.0) }
    }

    /// Returns the plans of the pass, in the order in which they run.
    pub fn plans(&self) -> &[Plan] {
        &self.plans
    }

    /// Returns every operand except [`Operand::Params`] once, with the number of bytes that kernels may access. For packed sequences,
    /// this number is that of the largest number of tokens.
    pub fn operands(&self) -> &[(Operand, u64)] {
        &self.reach
    }

    /// Returns the number of bytes of an operand that kernels may access in a packed call with this many tokens.
    pub fn reach(&self, operand: &Operand, tokens: Option<Tokens>) -> u64 {
        let most = self.reach.iter().find(|(o, _)| o == operand).map_or(0, |(_, bytes)| *bytes);
        let Some(packed) = &self.packed else { return most };
        let Some((_, side, step)) = packed.steps.iter().find(|(o, ..)| o == operand) else { return most };
        let (all, there) = (packed.most.of(*side), packed.most.up_to(tokens).of(*side));
        if there == 0 { 0 } else { most - (all - there).unsigned_abs() * step }
    }

    /// Returns the size of all scratch buffers, in bytes.
    pub fn scratch_bytes(&self) -> u64 {
        self.reach.iter().filter(|(operand, _)| operand.is_scratch()).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the name of the first kernel that uses an operand, and whether any kernel writes the operand.
    pub(crate) fn user(&self, operand: &Operand) -> (&'static str, bool) {
        let uses = |plan: &Plan| plan.buffers.iter().any(|b| b.operand == *operand);
        let entry = self.plans.iter().find(|plan| uses(plan)).map_or("no kernel", |plan| plan.entry);
        (entry, self.plans.iter().flat_map(|plan| &plan.buffers).any(|b| b.operand == *operand && b.written))
    }

    /// Returns the task with `change` applied to each plan, for tests that inject faults.
    #[must_use]
    pub fn map_plans(self, change: impl FnMut(Plan) -> Plan) -> Task {
        Task { plans: self.plans.into_iter().map(change).collect(), ..self }
    }
}

impl Forward {
    /// Returns the pass with these kernels (with `None`, those that the planner chooses), and the bytes that it accesses of each operand.
    ///
    /// # Errors
    /// Fails as [`Forward::supports`] does, and with every limit of these kernels that the problem breaks.
    pub fn task(&self, kernels: Option<Kernels>) -> Result<Task, Vec<Reason>> {
        let pass = kernels.map_or_else(|| self.plan(), |kernels| self.plan_with(kernels))?;
        Task::new(pass, Tensors { forward: self, backward: None })
    }
}

impl Backward {
    /// Returns the pass with these kernels (with `None`, those that the planner chooses), and the bytes that it accesses of each operand.
    ///
    /// # Errors
    /// Fails as [`Backward::supports`] does, and with every limit of these kernels that the problem breaks.
    pub fn task(&self, kernels: Option<Kernels>) -> Result<Task, Vec<Reason>> {
        let pass = kernels.map_or_else(|| self.plan(), |kernels| self.plan_with(kernels))?;
        Task::new(pass, Tensors { forward: &self.forward, backward: Some(self) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{Ends, Region};

    fn forward(strides: [i64; 4]) -> Forward {
        let tensor = |heads, seq, dim| TensorSpec { dims: [2, heads, seq, dim], strides, alignment: 16 };
        Forward {
            dtype: DType::F16,
            q: tensor(4, 10, 16),
            k: tensor(2, 6, 16),
            v: tensor(2, 6, 8),
            o: tensor(4, 10, 8),
            band: Region::default(),
            ends: Ends::default(),
            seq_len_q: false,
            seq_len_kv: true,
            packed: None,
            paged: None,
            score_mod: None,
            keep: None,
            sink: false,
            dropout: None,
            stats: true,
            row_max: false,
            sum_exp: false,
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
    fn documents_reach_as_far_as_their_tokens() {
        let mut forward = forward([-3, 1000, 20, 1]);
        (forward.seq_len_kv, forward.packed) = (false, Some(sdpa_core::Packed::new().with_cross(true).with_wide(true)));
        let task = forward.task(None).unwrap();
        let reach = |operand: &Operand, said: Option<[i64; 2]>| task.reach(operand, said.map(|[queries, keys]| Tokens { queries, keys }));
        // The memory covers as many tokens as if every sequence were as long as the longest one.
        for most in [None, Some([20, 12]), Some([21, 1000])] {
            assert_eq!(reach(&Operand::Q, most), 2 * (3 * 1000 + 19 * 20 + 15 + 1));
            assert_eq!(reach(&Operand::V, most), 2 * (1000 + 11 * 20 + 7 + 1));
            assert_eq!(reach(&Operand::Stats, most), 4 * 4 * 20);
        }
        let few = Some([7, 1]);
        assert_eq!(reach(&Operand::O, few), 2 * (3 * 1000 + 6 * 20 + 7 + 1));
        assert_eq!((reach(&Operand::K, few), reach(&Operand::Stats, few)), (2 * (1000 + 15 + 1), 4 * 4 * 7));
        for none in [Some([0, 0]), Some([-1, i64::MIN])] {
            assert_eq!([Operand::Q, Operand::K, Operand::Stats].map(|operand| reach(&operand, none)), [0; 3]);
        }
        let boundaries = Operand::Declared { name: "cu_seqlens_kv".to_owned(), dtype: DType::I64, elements: 3 };
        assert_eq!((reach(&boundaries, None), reach(&boundaries, few)), (24, 24));
        let beside_lengths = Forward { seq_len_q: true, ..forward }.supports().unwrap_err();
        assert!(matches!(&beside_lengths[..], [Reason::Limit { field, .. }] if field == "masks"), "{beside_lengths:?}");
    }

    #[test]
    fn scratch_counts_once() {
        let forward = forward([10_000, 1000, 20, 1]);
        let Forward { q, k, v, o, .. } = forward;
        let backward = Backward { forward, d_o: o, dq: q, dk: k, dv: v, gradient: None, along: Vec::new(), sink_gradient: None };
        let task = backward.task(None).unwrap();
        // The sum of o·dO of each row, and two floats for its log-sum-exp.
        assert_eq!((task.plans().len(), task.scratch_bytes()), (3, 3 * 4 * 2 * 4 * 10));
        assert_eq!(task.user(&Operand::DK), ("attention_dkv", true));
    }

    #[test]
    fn strides_without_a_reach_are_unsupported() {
        for strides in [[10_000, 1000, -20, 1], [i64::MAX, i64::MAX, 20, 1]] {
            let unsupported = forward(strides).task(None).unwrap_err();
            assert!(matches!(&unsupported[0], Reason::Limit { field, .. } if field == "q"), "{unsupported:?}");
        }
    }
}
