//! Specifications of attention over several ranks, and validated problems.

use crate::machine::Machine;
use crate::plan;
use crate::schedule::{Pass, Schedule, Tensor};
use crate::sharding::Sharding;
use crate::simulate::simulate;
use sdpa_core::expr::Declared;
use sdpa_core::placed::{CHUNK_NUMBERS, PLACEMENT};
use sdpa_core::{
    AttentionSpec, BackwardProblem, Chunk, DType, Error, GradientSpec, Layout, Placement, Problem, Reason, SpecError, SpecErrors,
    TensorSpec, Unsupported,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How ranks exchange what they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Every rank receives the keys and values that its queries attend to, in groups of KV heads. Nothing is merged unless shards are striped.
    AllGather {
        /// The number of groups of KV heads; more groups need less memory at one time.
        head_groups: u32,
    },
    /// Every rank attends with some of the heads for all tokens (DeepSpeed-Ulysses). Needs at least as many query heads as ranks. KV heads may be fewer:
    /// several ranks then receive the same ones.
    HeadExchange,
    /// Blocks of keys and values travel from rank to rank, and each rank merges what it computes. Needs memory for two blocks only in the forward pass.
    Ring,
    /// Every rank receives only those keys that the window of its queries reaches. Needs a mask with a lower and an upper bound of `k − q`.
    Halo,
    /// Head exchange in groups of `heads` neighbouring ranks, and all-gather between the groups.
    Grid {
        /// The number of ranks in a group; divides the number of ranks.
        heads: u32,
    },
    /// Validation simulates every strategy and chooses the fastest one that the memory suffices for: see [`Choice`].
    Auto,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Strategy::AllGather { head_groups: 1 } => f.write_str("all-gather"),
            Strategy::AllGather { head_groups } => write!(f, "all-gather in {head_groups} groups of heads"),
            Strategy::HeadExchange => f.write_str("head exchange"),
            Strategy::Ring => f.write_str("ring"),
            Strategy::Halo => f.write_str("halo"),
            Strategy::Grid { heads } => write!(f, "grid of {heads} by heads"),
            Strategy::Auto => f.write_str("auto"),
        }
    }
}

/// The estimated cost of one strategy. Sums are those of the forward pass, and of the backward pass if the problem has one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// The most bytes that a rank sends.
    pub bytes: u64,
    /// The most buffer bytes that a rank needs at one time.
    pub memory: u64,
    /// The time of attention of the rank with the most, divided by the mean.
    pub imbalance: f64,
    /// The time of the slowest rank in seconds, by [`simulate`](crate::simulate()).
    pub seconds: f64,
    /// Why the strategy cannot be chosen, if it cannot.
    pub refusal: Option<String>,
}

/// The choice of [`Strategy::Auto`], with every strategy that was considered.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Choice {
    /// The chosen strategy.
    pub strategy: Strategy,
    /// All strategies, in the order in which they are preferred at equal times.
    pub candidates: Vec<Candidate>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: the least simulated time", self.strategy)?;
        for c in &self.candidates {
            let cost = format!("{:.3e} s, sends {} bytes, buffers {} bytes, imbalance {:.2}", c.seconds, c.bytes, c.memory, c.imbalance);
            write!(f, "\n  {}: {}", c.strategy, c.refusal.as_ref().unwrap_or(&cost))?;
        }
        Ok(())
    }
}

/// One attention problem over several ranks.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
/// use sdpa_parallel::{ParallelSpec, Pass, Sharding, Strategy};
///
/// let shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: 8192, seq_kv: 8192, dim_qk: 128, dim_v: 128 };
/// let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal());
/// let problem = ParallelSpec::new(attention, 4).sharding(Sharding::Zigzag).strategy(Strategy::Ring).validate()?;
/// let schedule = problem.schedule(0, Pass::Forward);
/// assert!(schedule.bytes_sent() > 0 && schedule.to_string().contains("exchange"));
/// # Ok::<(), sdpa_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ParallelSpec {
    /// The whole problem, as one rank would compute it. The axis order of its tensors is that of the shards.
    pub attention: AttentionSpec,
    /// The number of ranks.
    pub ranks: usize,
    /// The tokens of each rank.
    pub sharding: Sharding,
    /// The exchanges.
    pub strategy: Strategy,
    /// Whether gradients are computed too.
    pub backward: bool,
    /// The declared parameters, and the sink, whose gradients a backward pass computes in addition.
    pub wrt: Vec<GradientSpec>,
    /// The rates by which [`Strategy::Auto`] chooses.
    pub machine: Machine,
}

impl ParallelSpec {
    /// Creates a specification with contiguous shards, and a strategy that validation chooses.
    pub fn new(attention: AttentionSpec, ranks: usize) -> ParallelSpec {
        let (sharding, strategy) = (Sharding::Contiguous, Strategy::Auto);
        ParallelSpec { attention, ranks, sharding, strategy, backward: false, wrt: Vec::new(), machine: Machine::default() }
    }

    /// Sets the tokens of each rank.
    #[must_use]
    pub fn sharding(mut self, sharding: Sharding) -> Self {
        self.sharding = sharding;
        self
    }

    /// Sets the exchanges.
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Requests the backward pass too.
    #[must_use]
    pub fn with_backward(mut self) -> Self {
        self.backward = true;
        self
    }

    /// Requests the backward pass with the gradient of a declared parameter, or of the sink, as [`BackwardSpec::wrt`](sdpa_core::BackwardSpec::wrt) does.
    /// Each rank computes its own contribution, in the extents of the whole parameter. The gradient is their sum over the ranks, as for the weights of a
    /// model.
    #[must_use]
    pub fn wrt(mut self, name: &str, dtype: DType) -> Self {
        self.backward = true;
        self.wrt.extend(self.attention.backward().wrt(name, dtype).wrt);
        self
    }

    /// Sets the rates by which [`Strategy::Auto`] chooses.
    #[must_use]
    pub fn machine(mut self, machine: Machine) -> Self {
        self.machine = machine;
        self
    }

    /// Normalises the specification, or returns every mistake in it.
    ///
    /// # Errors
    /// Returns every rule that a field breaks. Returns [`Error::Unsupported`] for 8-bit floats, paged and block-scaled problems, packed problems that
    /// [`AttentionSpec::unpacked`] refuses, problems without
    /// a batch entry, a query or a key, and for dropout, unless one rank has all tokens of a head and `batch` is 1.
    pub fn validate(&self) -> Result<ParallelProblem, Error> {
        if self.attention.packed.is_some() {
            if let Some(gradient) = self.wrt.first() {
                let limit = "none over the ranks of a packed problem".to_owned();
                let reason = Reason::Limit { field: "gradient of a parameter".to_owned(), value: gradient.name.clone(), limit };
                return Err(Unsupported::new(PLACEMENT, vec![reason]).into());
            }
            // Ranks shard the tokens of all sequences together.
            let packed = Some(Box::new(self.attention.validate()?));
            let dense = ParallelSpec { attention: self.attention.unpacked()?, ..self.clone() };
            return Ok(ParallelProblem { packed, ..dense.validate()? });
        }
        let problem = self.attention.validate()?;
        let limit = |field: &str, value: &str, limit: &str| Reason::Limit { field: field.into(), value: value.into(), limit: limit.into() };
        if problem.is_empty() {
            let reason = limit("extents", "0", "at least one batch entry, query and key");
            return Err(Unsupported::new(PLACEMENT, vec![reason]).into());
        }
        self.attention.placed(&Placement::of(&self.attention))?;
        let mut errors = self.sharding.mistakes(self.ranks, [problem.seq_q(), problem.seq_kv()]);
        if !(1..=1 << 16).contains(&self.ranks) {
            errors.push(SpecError::new("ranks", self.ranks, "between 1 and 65536"));
        }
        let reserved = problem.params().iter().filter(|p| CHUNK_NUMBERS.contains(&p.name.as_str()));
        errors.extend(
            reserved.map(|p| SpecError::new(format!("parameter {}", p.name), "a reserved name", "another name: placement declares it")),
        );
        errors.extend(self.mistakes(self.strategy, &problem));
        if !errors.is_empty() {
            return Err(SpecErrors(errors).into());
        }
        if let Some(why) = self.drops_unlike_one_rank(self.strategy, &problem) {
            return Err(Unsupported::new(PLACEMENT, vec![limit("dropout", "dropout", &why)]).into());
        }
        let shards = [problem.seq_q(), problem.seq_kv()].map(|seq| self.sharding.chunks(self.ranks, seq));
        let mut backward = self.attention.backward();
        backward.wrt.clone_from(&self.wrt);
        let backward = self.backward.then(|| backward.validate().map(Box::new)).transpose()?;
        let mut made =
            ParallelProblem { spec: self.clone(), strategy: self.strategy, problem, shards, choice: None, backward, packed: None };
        if self.strategy == Strategy::Auto {
            let choice = made.choose()?;
            made.strategy = choice.strategy;
            made.choice = Some(choice);
        }
        Ok(made)
    }

    /// Returns why a strategy would drop other elements of P than one rank does.
    fn drops_unlike_one_rank(&self, strategy: Strategy, problem: &Problem) -> Option<String> {
        problem.dropout()?;
        let is_one_run = |seq: i64| self.sharding.chunks(self.ranks, seq).iter().all(|chunks| chunks.len() == 1);
        let has_all_tokens = match strategy {
            _ if self.ranks == 1 => is_one_run(problem.seq_q()) && is_one_run(problem.seq_kv()),
            Strategy::HeadExchange | Strategy::Auto => problem.batch() == 1,
            Strategy::Grid { heads } => problem.batch() == 1 && heads as usize == self.ranks,
            Strategy::AllGather { .. } | Strategy::Ring | Strategy::Halo => false,
        };
        let why = "the strategy head exchange and batch 1, or one rank with one run of tokens: executors count random numbers by positions in a call";
        (!has_all_tokens).then(|| why.to_owned())
    }

    fn mistakes(&self, strategy: Strategy, problem: &Problem) -> Vec<SpecError> {
        let heads = |least: u64| {
            let enough = problem.heads_q().unsigned_abs() >= least;
            (!enough).then(|| {
                SpecError::new("q.dims[1] (heads_q)", problem.heads_q(), format!("at least {least}, the ranks that divide the heads"))
            })
        };
        match strategy {
            Strategy::AllGather { head_groups } => {
                let right = (1..=problem.heads_kv()).contains(&i64::from(head_groups));
                let rule = format!("between 1 and {}, the KV heads", problem.heads_kv());
                (!right).then(|| SpecError::new("strategy.head_groups", head_groups, rule)).into_iter().collect()
            }
            Strategy::HeadExchange => heads(self.ranks as u64).into_iter().collect(),
            Strategy::Grid { heads: parts } => {
                let right = parts > 0 && self.ranks.is_multiple_of(parts as usize);
                let rule = format!("a divisor of {}, the number of ranks", self.ranks);
                let divides = (!right).then(|| SpecError::new("strategy.heads", parts, rule));
                divides.into_iter().chain(heads(u64::from(parts))).collect()
            }
            Strategy::Halo => {
                let region = problem.region();
                let right = region.lower.is_some() && region.upper.is_some() && region.prefix.is_none();
                let rule = "a window: a lower and an upper bound of k - q, and no prefix";
                (!right).then(|| SpecError::new("strategy", "halo", format!("another one, or masks with {rule}"))).into_iter().collect()
            }
            Strategy::Ring | Strategy::Auto => Vec::new(),
        }
    }
}

/// A valid problem over several ranks. Only [`ParallelSpec::validate`] makes one.
#[derive(Clone, Debug, PartialEq)]
pub struct ParallelProblem {
    spec: ParallelSpec,
    strategy: Strategy,
    problem: Problem,
    /// For queries and for keys, the chunks of each rank.
    shards: [Vec<Vec<Chunk>>; 2],
    choice: Option<Choice>,
    backward: Option<Box<BackwardProblem>>,
    /// The packed problem, whose tokens `problem` has as one batch entry.
    packed: Option<Box<Problem>>,
}

impl ParallelProblem {
    /// Returns the specification. That of packed sequences is [unpacked](sdpa_core::unpacked).
    pub fn spec(&self) -> &ParallelSpec {
        &self.spec
    }

    /// Returns the whole problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Returns every declared parameter of a pass. A gradient written by hand may declare more than the forward pass.
    pub fn declared(&self, pass: Pass) -> &[Declared] {
        match (pass, &self.backward) {
            (Pass::Backward, Some(backward)) => backward.params(),
            (Pass::Forward | Pass::Backward, _) => self.problem.params(),
        }
    }

    /// Returns the backward problem of the whole, if there is a backward pass.
    pub fn backward(&self) -> Option<&BackwardProblem> {
        self.backward.as_deref()
    }

    /// Returns the packed problem, if the specification is one. [`ParallelProblem::problem`] then has its tokens as one batch entry.
    pub fn packed(&self) -> Option<&Problem> {
        self.packed.as_deref()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.spec.ranks
    }

    /// Returns the strategy; never [`Strategy::Auto`].
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Returns why [`Strategy::Auto`] chose the strategy; `None` if the specification names one.
    pub fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    /// Returns the positions of a rank's tokens, in the order in which it stores them. `of_keys` selects keys; else queries. Rotary embeddings need the
    /// positions.
    ///
    /// # Panics
    /// Panics if there is no such rank.
    pub fn shard(&self, rank: usize, of_keys: bool) -> &Vec<Chunk> {
        &self.shards[usize::from(of_keys)][rank]
    }

    /// Returns the steps of one rank.
    ///
    /// # Panics
    /// Panics if there is no such rank.
    pub fn schedule(&self, rank: usize, pass: Pass) -> Schedule {
        plan::schedule(self, rank, pass)
    }

    /// Returns extents and strides of a rank's shard of a tensor: dense, in the axis order of the whole operand. A statistic is (batch, heads_q, seq, 1).
    ///
    /// # Panics
    /// Panics if there is no such rank.
    pub fn local(&self, rank: usize, tensor: Tensor) -> TensorSpec {
        let whole = self.whole(tensor);
        let tokens = self.shard(rank, tensor.is_of_keys()).iter().map(|c| c.len).sum();
        TensorSpec { dims: [whole.dims[0], whole.dims[1], tokens, whole.dims[3]], ..whole }.densely()
    }

    /// Returns the dense tensor whose shards [`ParallelProblem::local`] describes.
    pub fn whole(&self, tensor: Tensor) -> TensorSpec {
        let attention = &self.spec.attention;
        let operand = match tensor {
            Tensor::Q | Tensor::DQ => attention.q,
            Tensor::K | Tensor::DK => attention.k,
            Tensor::V | Tensor::DV => attention.v,
            Tensor::O | Tensor::DO => attention.o,
            Tensor::Stats | Tensor::RowMax | Tensor::SumExp if self.packed.is_some() => {
                TensorSpec::dense(self.problem.stats_tensor().dims, Layout::Bshd)
            }
            Tensor::Stats | Tensor::RowMax | Tensor::SumExp => self.problem.stats_tensor(),
        };
        operand.densely()
    }

    /// Returns a rank's shard of a tensor that is dense in the axis order of the whole operand.
    ///
    /// # Panics
    /// Panics if there is no such rank, or if `elements` is too short.
    pub fn split<T: Copy>(&self, rank: usize, tensor: Tensor, elements: &[T]) -> Vec<T> {
        let (whole, local) = (self.whole(tensor), self.local(rank, tensor));
        let mut part = vec![None; local.extent().unwrap_or(0).unsigned_abs() as usize];
        self.each(rank, tensor, |from, to| part[to] = Some(elements[from]));
        debug_assert_eq!(whole.dims[3], local.dims[3]);
        part.into_iter().flatten().collect()
    }

    /// Writes a rank's shard of a tensor to its places in the whole tensor: the inverse of [`ParallelProblem::split`].
    ///
    /// # Panics
    /// Panics if there is no such rank, or if a slice is too short.
    pub fn join<T: Copy>(&self, rank: usize, tensor: Tensor, part: &[T], elements: &mut [T]) {
        self.each(rank, tensor, |whole, local| elements[whole] = part[local]);
    }

    /// Calls `f` with the index in the whole tensor and the index in the shard of each element.
    fn each(&self, rank: usize, tensor: Tensor, mut f: impl FnMut(usize, usize)) {
        let (whole, local) = (self.whole(tensor), self.local(rank, tensor));
        let at = |t: &TensorSpec, index: [i64; 4]| index.iter().zip(t.strides).map(|(i, s)| i * s).sum::<i64>().unsigned_abs() as usize;
        let positions: Vec<i64> = self.shard(rank, tensor.is_of_keys()).iter().flat_map(|c| (0..c.len).map(|i| c.at(i))).collect();
        for (n, &position) in positions.iter().enumerate() {
            for b in 0..whole.dims[0] {
                for h in 0..whole.dims[1] {
                    for d in 0..whole.dims[3] {
                        f(at(&whole, [b, h, position, d]), at(&local, [b, h, n as i64, d]));
                    }
                }
            }
        }
    }

    /// Simulates every strategy, and returns the one with the least time.
    fn choose(&self) -> Result<Choice, Error> {
        let ranks = self.ranks() as u32;
        let mut strategies = vec![Strategy::AllGather { head_groups: 1 }];
        strategies.push(Strategy::AllGather { head_groups: self.problem.heads_kv().clamp(1, 1 << 16) as u32 });
        strategies.extend([Strategy::Halo, Strategy::HeadExchange]);
        strategies.extend((2..ranks).filter(|heads| ranks.is_multiple_of(*heads)).map(|heads| Strategy::Grid { heads }));
        strategies.push(Strategy::Ring);
        strategies.dedup();
        let candidates: Vec<Candidate> = strategies.into_iter().map(|strategy| self.candidate(strategy)).collect();
        let free = candidates.iter().filter(|c| c.refusal.is_none());
        match free.min_by(|a, b| a.seconds.total_cmp(&b.seconds)) {
            Some(best) => Ok(Choice { strategy: best.strategy, candidates }),
            None => {
                let reasons = candidates.iter().filter_map(|c| Some(Reason::Absent(format!("{}: {}", c.strategy, c.refusal.as_ref()?))));
                Err(Unsupported::new(PLACEMENT, reasons.collect()).into())
            }
        }
    }

    fn candidate(&self, strategy: Strategy) -> Candidate {
        let mistakes = self.spec.mistakes(strategy, &self.problem);
        let mut refusal = mistakes.first().map(ToString::to_string).or_else(|| self.spec.drops_unlike_one_rank(strategy, &self.problem));
        let mut candidate = Candidate { strategy, bytes: 0, memory: 0, imbalance: 1.0, seconds: f64::INFINITY, refusal: None };
        if refusal.is_none() {
            let own = ParallelProblem { strategy, ..self.clone() };
            let passes = if self.spec.backward { vec![Pass::Forward, Pass::Backward] } else { vec![Pass::Forward] };
            let (mut bytes, mut schedules) = (vec![0; self.ranks()], Vec::new());
            for (rank, pass) in (0..self.ranks()).flat_map(|rank| passes.iter().map(move |pass| (rank, *pass))) {
                let schedule = own.schedule(rank, pass);
                bytes[rank] += schedule.bytes_sent();
                candidate.memory = candidate.memory.max(schedule.peak_bytes());
                schedules.push(schedule);
            }
            candidate.bytes = bytes.into_iter().max().unwrap_or(0);
            let machine = &self.spec.machine;
            match simulate(&own, &schedules, machine) {
                Ok(simulation) => {
                    let work = simulation.ranks.iter().map(|rank| rank.attention);
                    let (most, mean) = (work.clone().fold(0.0, f64::max), work.sum::<f64>() / self.ranks() as f64);
                    candidate.imbalance = if mean > 0.0 { most / mean } else { 1.0 };
                    candidate.seconds = simulation.time();
                }
                Err(error) => refusal = Some(error.to_string()),
            }
            let too_much = machine.memory.filter(|limit| candidate.memory > *limit);
            refusal = refusal.or(too_much.map(|limit| format!("buffers of {} bytes exceed {limit}", candidate.memory)));
        }
        Candidate { refusal, ..candidate }
    }
}
