//! Schedules: the steps of one rank, as plain data that can be printed, stored and [proven](crate::prove).

use sdpa_core::{Chunk, DType};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// A direction of the computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Computes `o` and the row statistics.
    Forward,
    /// Computes `dq`, `dk` and `dv`.
    Backward,
}

/// A tensor of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tensor {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output.
    O,
    /// Log-sum-exp of each row.
    Stats,
    /// Largest score of each row.
    RowMax,
    /// Sum of exponentials of each row, relative to its largest score.
    SumExp,
    /// Gradient of the output.
    DO,
    /// Gradient of the queries.
    DQ,
    /// Gradient of the keys.
    DK,
    /// Gradient of the values.
    DV,
}

impl Tensor {
    /// Returns the name used in printed schedules.
    pub fn name(self) -> &'static str {
        match self {
            Tensor::Q => "q",
            Tensor::K => "k",
            Tensor::V => "v",
            Tensor::O => "o",
            Tensor::Stats => "stats",
            Tensor::RowMax => "row_max",
            Tensor::SumExp => "sum_exp",
            Tensor::DO => "d_o",
            Tensor::DQ => "dq",
            Tensor::DK => "dk",
            Tensor::DV => "dv",
        }
    }

    /// Returns whether the tensor has rows of keys and KV heads.
    pub fn is_of_keys(self) -> bool {
        match self {
            Tensor::K | Tensor::V | Tensor::DK | Tensor::DV => true,
            Tensor::Q | Tensor::O | Tensor::Stats | Tensor::RowMax | Tensor::SumExp | Tensor::DO | Tensor::DQ => false,
        }
    }

    /// Returns whether the tensor is a row statistic, which is always f32.
    pub fn is_statistic(self) -> bool {
        match self {
            Tensor::Stats | Tensor::RowMax | Tensor::SumExp => true,
            Tensor::Q | Tensor::K | Tensor::V | Tensor::O | Tensor::DO | Tensor::DQ | Tensor::DK | Tensor::DV => false,
        }
    }
}

/// The purpose of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The rank's shard of an operand, which the call passes.
    Input,
    /// The rank's shard of a result.
    Output,
    /// Memory that a step fills before another one reads it.
    Buffer,
    /// A sum or a merged output, in f32. It begins as the result of no contribution.
    Accumulator,
}

/// Memory of one rank: heads and tokens of one tensor, dense in the order (token, batch, head, dim).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// The tensor.
    pub tensor: Tensor,
    /// The purpose.
    pub role: Role,
    /// Element type.
    pub dtype: DType,
    /// The heads: KV heads for tensors of keys, else query heads.
    pub heads: Range<i64>,
    /// The positions of the tokens in the whole problem, in memory order.
    pub tokens: Vec<Chunk>,
}

impl Slot {
    /// Returns the number of tokens.
    pub fn len(&self) -> i64 {
        self.tokens.iter().map(|c| c.len).sum()
    }

    /// Returns whether the slot has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the place of a position in memory order, if the slot has it.
    pub fn find(&self, position: i64) -> Option<i64> {
        let mut before = 0;
        for chunk in &self.tokens {
            match chunk.find(position) {
                Some(i) => return Some(before + i),
                None => before += chunk.len,
            }
        }
        None
    }

    /// Returns the place of the first token of `chunk`, if its tokens are neighbours in memory, in order.
    pub fn contiguous(&self, chunk: &Chunk) -> Option<i64> {
        let first = self.find(chunk.start)?;
        // Long chunks are mostly parts of one run. Looking up their tokens would take most of the time in which a strategy is chosen.
        let is_part = |run: &Chunk| run.stride == chunk.stride && run.find(chunk.start).is_some_and(|at| at + chunk.len <= run.len);
        if self.tokens.iter().any(is_part) {
            return Some(first);
        }
        (0..chunk.len).all(|i| self.find(chunk.at(i)) == Some(first + i)).then_some(first)
    }
}

/// Returns the places of the chunk's tokens in two slots, in memory order of the chunk, as runs with one distance in each slot. `None` if a slot lacks a
/// token. [`Step::Copy`] and [`Step::Add`] move these elements.
///
/// ```
/// use sdpa_core::{Chunk, DType};
/// use sdpa_parallel::{Role, Slot, Tensor, places};
/// let slot = |tokens: Vec<Chunk>| Slot { tensor: Tensor::K, role: Role::Buffer, dtype: DType::F32, heads: 0..1, tokens };
/// let (shard, whole) = (slot(vec![Chunk::new(1, 2, 4)]), slot(vec![Chunk::new(0, 1, 8)]));
/// assert_eq!(places(&shard, &whole, &Chunk::new(1, 2, 4)), Some(vec![(Chunk::new(0, 1, 4), Chunk::new(1, 2, 4))]));
/// // Token 6 is stored between tokens 2 and 3.
/// let apart = slot(vec![Chunk::new(0, 1, 3), Chunk::new(6, 1, 1), Chunk::new(3, 1, 3)]);
/// let (first, second) = (Chunk::new(0, 1, 3), (Chunk::new(4, 1, 3), Chunk::new(3, 1, 3)));
/// assert_eq!(places(&apart, &whole, &Chunk::new(0, 1, 6)), Some(vec![(first, first), second]));
/// assert_eq!(places(&shard, &whole, &Chunk::new(0, 1, 2)), None);
/// ```
pub fn places(from: &Slot, to: &Slot, chunk: &Chunk) -> Option<Vec<(Chunk, Chunk)>> {
    let mut runs: Vec<(Chunk, Chunk)> = Vec::new();
    for position in (0..chunk.len).map(|i| chunk.at(i)) {
        let (a, b) = (from.find(position)?, to.find(position)?);
        match runs.last_mut() {
            Some((x, y)) if x.len == 1 && a > x.start && b > y.start => {
                (*x, *y) = (Chunk::new(x.start, a - x.start, 2), Chunk::new(y.start, b - y.start, 2));
            }
            Some((x, y)) if x.len > 1 && a == x.at(x.len) && b == y.at(y.len) => (x.len, y.len) = (x.len + 1, y.len + 1),
            Some(_) | None => runs.push((Chunk::new(a, 1, 1), Chunk::new(b, 1, 1))),
        }
    }
    Some(runs)
}

/// A contiguous part of a slot that one rank sends to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// The slot, all of whose heads are sent.
    pub slot: usize,
    /// The tokens.
    pub chunk: Chunk,
}

/// The slots of a step that computes, and the part of the problem for which it computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attend {
    /// Positions of the queries.
    pub q: Chunk,
    /// Positions of the keys.
    pub k: Chunk,
    /// Query heads.
    pub heads_q: Range<i64>,
    /// KV heads.
    pub heads_kv: Range<i64>,
    /// Whether the result is one of several contributions: computed in f32 and merged into, or added to, accumulators.
    pub partial: bool,
    /// Slots that are read.
    pub reads: Vec<usize>,
    /// Slots that are written.
    pub writes: Vec<usize>,
}

/// One step of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Copies tokens between slots, and rounds if the types differ.
    Copy {
        /// The slot that is read.
        from: usize,
        /// The slot that is written.
        to: usize,
        /// The heads.
        heads: Range<i64>,
        /// The tokens.
        chunk: Chunk,
    },
    /// Adds tokens of a slot to an accumulator.
    Add {
        /// The slot that is read.
        from: usize,
        /// The accumulator.
        to: usize,
        /// The heads.
        heads: Range<i64>,
        /// The tokens.
        chunk: Chunk,
    },
    /// Sends to and receives from other ranks. All transfers of one exchange progress together, so their order cannot deadlock.
    Exchange {
        /// The parts that this rank sends.
        sends: Vec<Transfer>,
        /// The parts that this rank receives.
        receives: Vec<Transfer>,
    },
    /// Computes attention or its gradients for a part of the problem.
    Attend(Attend),
    /// Adds the sink to a merged output, if there is one, and writes the output and the statistics.
    Finish {
        /// Positions of the queries.
        q: Chunk,
        /// Query heads.
        heads: Range<i64>,
        /// The accumulators of `o`, `row_max` and `sum_exp`.
        reads: [usize; 3],
        /// Slots of the output and of the statistics that the problem computes.
        writes: Vec<usize>,
    },
}

/// Extents that all slots of a problem share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extents {
    /// Batch entries.
    pub batch: i64,
    /// Elements of a query and of a key.
    pub dim_qk: i64,
    /// Elements of a value and of an output row.
    pub dim_v: i64,
}

impl Extents {
    /// Returns the elements of one row of a tensor.
    pub fn dim(&self, tensor: Tensor) -> i64 {
        match tensor {
            Tensor::Q | Tensor::K | Tensor::DQ | Tensor::DK => self.dim_qk,
            Tensor::V | Tensor::O | Tensor::DO | Tensor::DV => self.dim_v,
            Tensor::Stats | Tensor::RowMax | Tensor::SumExp => 1,
        }
    }

    /// Returns the elements of one token of a slot.
    pub fn per_token(&self, slot: &Slot) -> i64 {
        self.batch * (slot.heads.end - slot.heads.start) * self.dim(slot.tensor)
    }

    /// Returns the bytes of `tokens` tokens of a slot.
    pub fn bytes(&self, slot: &Slot, tokens: i64) -> u64 {
        (tokens * self.per_token(slot)).unsigned_abs() * u64::from(slot.dtype.bits() / 8)
    }
}

/// Everything that one rank does in one pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The direction.
    pub pass: Pass,
    /// The extents that all slots share.
    pub extents: Extents,
    /// Memory.
    pub slots: Vec<Slot>,
    /// Steps, in order.
    pub steps: Vec<Step>,
}

impl Schedule {
    fn transferred(&self, of: impl Fn(&Step) -> Option<&Vec<Transfer>>) -> u64 {
        self.steps.iter().filter_map(of).flatten().map(|t| self.extents.bytes(&self.slots[t.slot], t.chunk.len)).sum()
    }

    /// Returns the bytes that the rank sends.
    pub fn bytes_sent(&self) -> u64 {
        self.transferred(|step| match step {
            Step::Exchange { sends, receives: _ } => Some(sends),
            Step::Copy { .. } | Step::Add { .. } | Step::Attend(_) | Step::Finish { .. } => None,
        })
    }

    /// Returns the bytes that the rank receives.
    pub fn bytes_received(&self) -> u64 {
        self.transferred(|step| match step {
            Step::Exchange { sends: _, receives } => Some(receives),
            Step::Copy { .. } | Step::Add { .. } | Step::Attend(_) | Step::Finish { .. } => None,
        })
    }

    /// Returns the largest sum of the sizes of buffers and accumulators that are in use at one time, in bytes. A slot is in use from the first step that
    /// names it to the last one. The call's own operands and results are not counted.
    pub fn peak_bytes(&self) -> u64 {
        let mut lives: Vec<Option<[usize; 2]>> = vec![None; self.slots.len()];
        for (n, step) in self.steps.iter().enumerate() {
            for slot in step.slots() {
                lives[slot] = Some([lives[slot].map_or(n, |[first, _]| first), n]);
            }
        }
        let size = |n: usize| match self.slots[n].role {
            Role::Input | Role::Output => 0,
            Role::Buffer | Role::Accumulator => self.extents.bytes(&self.slots[n], self.slots[n].len()),
        };
        let at = |step: usize| {
            lives.iter().enumerate().filter(|(_, life)| life.is_some_and(|[a, b]| a <= step && step <= b)).map(|(n, _)| size(n)).sum()
        };
        (0..self.steps.len()).map(at).max().unwrap_or(0)
    }

    /// Iterates over the steps that compute.
    pub fn attends(&self) -> impl Iterator<Item = &Attend> {
        self.steps.iter().filter_map(|step| match step {
            Step::Attend(attend) => Some(attend),
            Step::Copy { .. } | Step::Add { .. } | Step::Exchange { .. } | Step::Finish { .. } => None,
        })
    }
}

impl Step {
    /// Returns the slots that the step reads, and those that it writes.
    pub fn uses(&self) -> [Vec<usize>; 2] {
        match self {
            Step::Copy { from, to, .. } | Step::Add { from, to, .. } => [vec![*from], vec![*to]],
            Step::Exchange { sends, receives } => [sends, receives].map(|all| all.iter().map(|t| t.slot).collect()),
            Step::Attend(attend) => [attend.reads.clone(), attend.writes.clone()],
            Step::Finish { reads, writes, .. } => [reads.to_vec(), writes.clone()],
        }
    }

    /// Returns the slots that the step reads or writes.
    pub fn slots(&self) -> Vec<usize> {
        self.uses().concat()
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        let (sent, peak) = (self.bytes_sent(), self.peak_bytes());
        writeln!(f, "rank {} of {}, {pass}: sends {sent} bytes, buffers of {peak} bytes", self.rank, self.ranks)?;
        for (n, slot) in self.slots.iter().enumerate() {
            let tokens: Vec<String> = slot.tokens.iter().map(ToString::to_string).collect();
            let role = format!("{:?}", slot.role).to_lowercase();
            writeln!(f, "  #{n} {} {} heads {:?} tokens {} ({role})", slot.tensor.name(), slot.dtype, slot.heads, tokens.join(" "))?;
        }
        let list = |all: &[usize]| all.iter().map(|n| format!("#{n}")).collect::<Vec<_>>().join(" ");
        for step in &self.steps {
            match step {
                Step::Copy { from, to, heads, chunk } => writeln!(f, "  copy #{from} -> #{to} heads {heads:?} tokens {chunk}")?,
                Step::Add { from, to, heads, chunk } => writeln!(f, "  add #{from} -> #{to} heads {heads:?} tokens {chunk}")?,
                Step::Exchange { sends, receives } => {
                    writeln!(f, "  exchange")?;
                    for (word, all) in [("send to", sends), ("receive from", receives)] {
                        for t in all {
                            writeln!(f, "    {word} {}: #{} tokens {}", t.peer, t.slot, t.chunk)?;
                        }
                    }
                }
                Step::Attend(a) => {
                    let partial = if a.partial { ", partial" } else { "" };
                    let heads = format!("heads {:?} with {:?}", a.heads_q, a.heads_kv);
                    writeln!(f, "  attend q {} k {} {heads}: {} -> {}{partial}", a.q, a.k, list(&a.reads), list(&a.writes))?;
                }
                Step::Finish { q, heads, reads, writes } => {
                    writeln!(f, "  finish q {q} heads {heads:?}: {} -> {}", list(reads), list(writes))?;
                }
            }
        }
        Ok(())
    }
}
