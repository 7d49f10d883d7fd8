//! Simulates the schedules of all ranks in time, without running them.
//!
//! A rank has a host and two streams, one that computes and one for exchanges. The host submits the steps in order and waits for nothing. An exchange begins
//! when the stream that computes has done all that was submitted before it, when the rank's exchange before it has ended, and when the other rank of each
//! transfer has come as far. Steps that do not use its slots run while it progresses. A step that reads or overwrites a slot that it receives, or overwrites one that it sends,
//! waits for it. The Python package runs schedules over streams of a GPU in this way.

use crate::machine::Machine;
use crate::problem::ParallelProblem;
use crate::prove::ProofError;
use crate::schedule::{Attend, Pass, Role, Schedule, Step, Transfer};
use crate::sharding::pairs;
use sdpa_core::Chunk;
use std::collections::BTreeMap;
use std::fmt;

/// The simulated times of one rank, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RankTime {
    /// All steps, until the host and both streams are done.
    pub time: f64,
    /// Attention alone, without copies, sums and merges.
    pub attention: f64,
    /// Exchanges, each from when the rank is ready for it to its end. It includes the time in which the rank waits for its peers.
    pub exchanges: f64,
    /// The part of `exchanges` that is not overlapped: the stream that computes has nothing else to do.
    pub exposed: f64,
    /// Bytes sent.
    pub bytes: u64,
    /// The time of one device for the whole problem, divided by the ranks and by `time`.
    pub of_ideal: f64,
}

/// The simulated times of all ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Simulation {
    /// The ranks in order.
    pub ranks: Vec<RankTime>,
    /// The time of one device for the whole problem, in seconds: one launch in each pass.
    pub alone: f64,
}

impl Simulation {
    /// Returns the time of the slowest rank, in seconds.
    pub fn time(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.time).fold(0.0, f64::max)
    }

    /// Returns the fraction of ideal of the slowest rank: the time of one device for the whole problem, divided by the ranks and by [`Simulation::time`].
    pub fn of_ideal(&self) -> f64 {
        self.alone / (self.ranks.len() as f64 * self.time())
    }
}

impl fmt::Display for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| seconds * 1e3;
        writeln!(f, "simulated; one device for the whole problem: {:.3} ms", ms(self.alone))?;
        write!(f, "rank    time ms  attention ms  exchanges ms  exposed ms      MB sent  of ideal")?;
        for (n, rank) in self.ranks.iter().enumerate() {
            let [time, attention, exchanges, exposed] = [rank.time, rank.attention, rank.exchanges, rank.exposed].map(ms);
            let (sent, ideal) = (rank.bytes as f64 / 1e6, rank.of_ideal);
            write!(f, "\n{n:>4} {time:>10.3} {attention:>13.3} {exchanges:>13.3} {exposed:>11.3} {sent:>12.3} {ideal:>9.2}")?;
        }
        Ok(())
    }
}

/// An exchange in progress: when it ends, and the slots that it reads and writes.
struct Pending {
    end: f64,
    reads: Vec<usize>,
    writes: Vec<usize>,
}

struct Rank<'a> {
    problem: &'a ParallelProblem,
    machine: &'a Machine,
    /// The schedules that are left, in order. The first one is in progress.
    schedules: Vec<&'a Schedule>,
    step: usize,
    /// When the host has submitted all steps before this one.
    host: f64,
    /// When the stream that computes has done them.
    compute: f64,
    /// When the last exchange ends.
    exchange: f64,
    pending: Vec<Pending>,
    /// The accumulators that are filled.
    filled: Vec<usize>,
    found: RankTime,
}

/// Simulates `schedules` on ranks with the rates of `machine`. It takes the schedules of all ranks. A rank with several, such as those of the forward and of
/// the backward pass, runs them one after the other, in the order in which they are given.
///
/// Transfers of an exchange share the bandwidth of their ranks. Each one takes as long as its own bytes over the link, all bytes that its sender sends, or all
/// that its receiver receives, whichever is the longest. Transfers do not slow attention down, and partial results have the type of the operands.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
/// use sdpa_parallel::{Machine, ParallelSpec, Pass, Sharding, Strategy, simulate};
///
/// let shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: 65536, seq_kv: 65536, dim_qk: 128, dim_v: 128 };
/// let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal());
/// let problem = ParallelSpec::new(attention, 4).sharding(Sharding::Zigzag).strategy(Strategy::Ring).validate()?;
/// let schedules: Vec<_> = (0..4).map(|rank| problem.schedule(rank, Pass::Forward)).collect();
/// let simulation = simulate(&problem, &schedules, &Machine::default())?;
/// assert!(simulation.of_ideal() > 0.5 && simulation.ranks[0].bytes == schedules[0].bytes_sent());
/// println!("{simulation}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error for schedules whose exchanges do not match, as [`prove`](crate::prove) does.
pub fn simulate(problem: &ParallelProblem, schedules: &[Schedule], machine: &Machine) -> Result<Simulation, ProofError> {
    let mut ranks: Vec<Rank<'_>> = (0..problem.ranks()).map(|_| Rank::new(problem, machine)).collect();
    let mut alone = 0.0;
    for schedule in schedules {
        let Some(rank) = ranks.get_mut(schedule.rank) else {
            let what = format!("there is no such rank among {}", problem.ranks());
            return Err(ProofError { rank: schedule.rank, step: 0, what });
        };
        rank.schedules.push(schedule);
        if schedule.rank == 0 {
            let kernel = machine.kernel(schedule.pass);
            alone += kernel.launch + problem.all_flops(schedule.pass) / kernel.flops;
        }
    }
    for rank in &mut ranks {
        rank.begin();
    }
    loop {
        for rank in &mut ranks {
            rank.run();
        }
        let waiting = ranks.iter().filter(|rank| !rank.schedules.is_empty()).count();
        if waiting == 0 {
            break;
        }
        if let Some(n) = ranks.iter().position(|rank| rank.schedules.is_empty()) {
            return Err(ranks[n].error(n, "it ends while other ranks exchange".to_owned()));
        }
        exchange(&mut ranks)?;
    }
    let of = |rank: Rank<'_>| {
        let time = rank.compute.max(rank.host);
        RankTime { time, of_ideal: alone / (problem.ranks() as f64 * time), ..rank.found }
    };
    Ok(Simulation { ranks: ranks.into_iter().map(of).collect(), alone })
}

/// Runs the exchange at which all ranks are.
fn exchange(ranks: &mut [Rank<'_>]) -> Result<(), ProofError> {
    let ready: Vec<f64> = ranks.iter_mut().map(Rank::ready).collect();
    // The bytes of each transfer, in order, between each pair of ranks.
    let mut sent: BTreeMap<(usize, usize), Vec<u64>> = BTreeMap::new();
    let mut received = sent.clone();
    let mut totals = vec![[0u64; 2]; ranks.len()];
    for (n, rank) in ranks.iter().enumerate() {
        let (sends, receives) = rank.transfers();
        for transfer in sends {
            let bytes = rank.bytes(transfer);
            totals[n][0] += bytes;
            sent.entry((n, transfer.peer)).or_default().push(bytes);
        }
        for transfer in receives {
            let bytes = rank.bytes(transfer);
            totals[n][1] += bytes;
            received.entry((transfer.peer, n)).or_default().push(bytes);
        }
    }
    if sent != received {
        let unlike = sent.keys().chain(received.keys()).find(|pair| sent.get(pair) != received.get(pair));
        let (from, to) = unlike.copied().unwrap_or_default();
        let told = |all: &BTreeMap<(usize, usize), Vec<u64>>| format!("{:?}", all.get(&(from, to)).map_or(&[][..], Vec::as_slice));
        let what = format!("it sends {} bytes to rank {to}, which receives {}", told(&sent), told(&received));
        return Err(ranks[from].error(from, what));
    }
    let mut ends: Vec<Option<f64>> = vec![None; ranks.len()];
    for ((from, to), bytes) in sent {
        let machine = ranks[from].machine;
        let begin = ready[from].max(ready[to]);
        let over = |bytes: u64, rate: f64| bytes as f64 / rate;
        let shared = over(totals[from][0].max(totals[to][1]), machine.bandwidth);
        let end = begin + machine.latency + shared.max(over(bytes.iter().sum(), machine.link));
        for n in [from, to] {
            ends[n] = Some(ends[n].map_or(end, |other| other.max(end)));
        }
    }
    for (n, rank) in ranks.iter_mut().enumerate() {
        rank.exchanged(ready[n], ends[n], totals[n][0]);
    }
    Ok(())
}

impl<'a> Rank<'a> {
    fn new(problem: &'a ParallelProblem, machine: &'a Machine) -> Rank<'a> {
        Rank {
            problem,
            machine,
            schedules: Vec::new(),
            step: 0,
            host: 0.0,
            compute: 0.0,
            exchange: 0.0,
            pending: Vec::new(),
            filled: Vec::new(),
            found: RankTime::default(),
        }
    }

    fn error(&self, rank: usize, what: String) -> ProofError {
        ProofError { rank, step: self.step, what }
    }

    fn begin(&mut self) {
        if !self.schedules.is_empty() {
            self.host += self.machine.call;
        }
    }

    /// Runs steps until an exchange or the end.
    fn run(&mut self) {
        while let Some(&schedule) = self.schedules.first() {
            match schedule.steps.get(self.step) {
                Some(Step::Exchange { .. }) => return,
                Some(step) => {
                    self.compute(schedule, step);
                    self.step += 1;
                }
                None => {
                    self.wait(|_| true);
                    self.schedules.remove(0);
                    (self.step, self.filled) = (0, Vec::new());
                    self.begin();
                }
            }
        }
    }

    fn transfers(&self) -> (&'a [Transfer], &'a [Transfer]) {
        match self.schedules.first().and_then(|schedule| schedule.steps.get(self.step)) {
            Some(Step::Exchange { sends, receives }) => (sends, receives),
            _ => (&[], &[]),
        }
    }

    fn bytes(&self, transfer: &Transfer) -> u64 {
        let schedule = self.schedules[0];
        schedule.extents.bytes(&schedule.slots[transfer.slot], transfer.chunk.len)
    }

    /// The stream that computes waits for exchanges.
    fn wait(&mut self, hinders: impl Fn(&Pending) -> bool) {
        let end = self.pending.iter().filter(|p| hinders(p)).map(|p| p.end).fold(0.0, f64::max);
        self.pending.retain(|p| !hinders(p));
        let free = self.compute.max(self.host);
        if end > free {
            self.found.exposed += end - free;
            self.compute = end;
        }
    }

    /// Waits for exchanges that write to a slot that a step uses, or read one that it writes.
    fn wait_for_slots(&mut self, reads: &[usize], writes: &[usize]) {
        self.wait(|p| {
            p.writes.iter().any(|slot| reads.contains(slot) || writes.contains(slot)) || p.reads.iter().any(|slot| writes.contains(slot))
        });
    }

    /// Submits the exchange at which the rank is. Returns when the rank is ready for it.
    fn ready(&mut self) -> f64 {
        let (reads, writes) = self.slots();
        self.wait_for_slots(&reads, &writes);
        self.host += self.machine.submit * (reads.len() + writes.len()) as f64;
        self.compute.max(self.host).max(self.exchange)
    }

    /// Returns the slots of the transfers at which the rank is.
    fn slots(&self) -> (Vec<usize>, Vec<usize>) {
        let (sends, receives) = self.transfers();
        (sends.iter().map(|t| t.slot).collect(), receives.iter().map(|t| t.slot).collect())
    }

    fn exchanged(&mut self, ready: f64, end: Option<f64>, bytes: u64) {
        if let Some(end) = end {
            let (reads, writes) = self.slots();
            self.exchange = end;
            self.found.exchanges += end - ready;
            self.found.bytes += bytes;
            self.pending.push(Pending { end, reads, writes });
        }
        self.step += 1;
    }

    /// Runs a step that computes or moves memory.
    fn compute(&mut self, schedule: &Schedule, step: &Step) {
        let [reads, writes] = step.uses();
        let machine = self.machine;
        for &slot in reads.iter().chain(&writes) {
            if schedule.slots[slot].role == Role::Accumulator && !self.filled.contains(&slot) {
                self.filled.push(slot);
                let bytes = schedule.extents.bytes(&schedule.slots[slot], schedule.slots[slot].len());
                self.submit(machine.submit, bytes as f64 / machine.copies);
            }
        }
        self.wait_for_slots(&reads, &writes);
        let elements = |slot: usize, heads: i64, chunk: &Chunk| {
            (schedule.extents.batch * heads * chunk.len * schedule.extents.dim(schedule.slots[slot].tensor)) as f64
        };
        let size = |slot: usize| f64::from(schedule.slots[slot].dtype.bits() / 8);
        let operand = f64::from(self.problem.problem().dtype().bits() / 8);
        match step {
            Step::Copy { from, to, heads, chunk } => {
                let bytes = elements(*from, heads.end - heads.start, chunk) * (size(*from) + size(*to));
                self.submit(machine.submit, bytes / machine.copies);
            }
            Step::Add { from, to, heads, chunk } => {
                let bytes = elements(*from, heads.end - heads.start, chunk) * (size(*from) + 2.0 * size(*to));
                self.submit(machine.submit, bytes / machine.copies);
            }
            Step::Attend(attend) => {
                let kernel = machine.kernel(schedule.pass);
                let seconds = self.problem.flops_of(schedule.pass, attend) / kernel.flops;
                self.found.attention += seconds;
                self.submit(kernel.launch, seconds);
                let merges = attend.partial && schedule.pass == Pass::Forward;
                for &slot in &writes {
                    let of_keys = schedule.slots[slot].tensor.is_of_keys();
                    let (heads, chunk) = if of_keys { (&attend.heads_kv, &attend.k) } else { (&attend.heads_q, &attend.q) };
                    let n = elements(slot, heads.end - heads.start, chunk);
                    let made = if schedule.slots[slot].tensor.is_statistic() { 4.0 } else { operand };
                    let is_sum = schedule.slots[slot].role == Role::Accumulator;
                    let moved = n * if is_sum { made + 2.0 * size(slot) } else { made + size(slot) };
                    self.submit(machine.submit, moved / if merges { machine.merges } else { machine.copies });
                }
            }
            Step::Finish { q, heads, reads, writes } => {
                let all = reads.iter().chain(writes);
                let bytes: f64 = all.map(|&slot| elements(slot, heads.end - heads.start, q) * size(slot)).sum();
                self.submit(machine.submit * writes.len() as f64, bytes / machine.merges);
            }
            Step::Exchange { .. } => {}
        }
    }

    /// Submits work of `seconds` to the stream that computes.
    fn submit(&mut self, host: f64, seconds: f64) {
        self.host += host;
        self.compute = self.compute.max(self.host) + seconds;
    }
}

impl ParallelProblem {
    /// Simulates the passes of the problem on ranks with the rates of `machine`: forward, and then backward if there is one. See [`simulate`].
    ///
    /// # Errors
    /// See [`simulate`].
    pub fn simulate(&self, machine: &Machine) -> Result<Simulation, ProofError> {
        let passes: &[Pass] = if self.backward().is_some() { &[Pass::Forward, Pass::Backward] } else { &[Pass::Forward] };
        let schedules: Vec<Schedule> =
            passes.iter().flat_map(|&pass| (0..self.ranks()).map(move |rank| self.schedule(rank, pass))).collect();
        simulate(self, &schedules, machine)
    }

    /// Returns the floating-point operations of a step, over the pairs that bands attend to.
    fn flops_of(&self, pass: Pass, attend: &Attend) -> f64 {
        let heads = attend.heads_q.end - attend.heads_q.start;
        self.flops_per_pair(pass) * heads as f64 * pairs(self.problem().region(), &attend.q, &attend.k)
    }

    /// Returns the floating-point operations of the whole problem.
    fn all_flops(&self, pass: Pass) -> f64 {
        let problem = self.problem();
        let [q, k] = [problem.seq_q(), problem.seq_kv()].map(|seq| Chunk::new(0, 1, seq));
        self.flops_per_pair(pass) * problem.heads_q() as f64 * pairs(problem.region(), &q, &k)
    }

    /// Returns the floating-point operations of one pair in all batch entries.
    fn flops_per_pair(&self, pass: Pass) -> f64 {
        let (qk, v) = (self.problem().dim_qk() as f64, self.problem().dim_v() as f64);
        let operations = match pass {
            Pass::Forward => 2.0 * (qk + v),
            Pass::Backward => 2.0 * (3.0 * qk + 2.0 * v),
        };
        operations * self.problem().batch() as f64
    }
}
