//! Proofs about the schedules of all ranks, without running them on numbers.
//!
//! Every element of a slot is represented by its meaning: an element of an operand, with its head and position, or the set of pairs that a result has summed. The
//! steps of all ranks move and join these meanings.

use crate::problem::ParallelProblem;
use crate::schedule::{Attend, Pass, Role, Schedule, Slot, Step, Tensor, Transfer};
use sdpa_core::Chunk;
use std::collections::BTreeSet;
use std::ops::Range;

/// A property that the schedules of a problem do not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, step {step}: {what}")]
#[non_exhaustive]
pub struct ProofError {
    /// The rank whose schedule is wrong.
    pub rank: usize,
    /// The step; the number of steps for a result that is wrong at the end.
    pub step: usize,
    /// The error.
    pub what: String,
}

/// The meaning of one token and head of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Meaning {
    Unwritten,
    /// An operand's row.
    Row(Tensor, i64, i64),
    /// A result's row, with the pairs that it has summed: keys for rows of queries, (query head, query) for rows of keys.
    Sum(Tensor, BTreeSet<[i64; 2]>),
}

#[derive(Clone, Debug)]
struct Cell {
    meaning: Meaning,
    /// Whether another rank sent it and no step has read it.
    unread: bool,
}

struct Rank<'a> {
    schedule: &'a Schedule,
    cells: Vec<Vec<Cell>>,
    step: usize,
}

/// Proves the schedules `schedules`, one for each rank, of a pass:
///
/// - Sends and receives of the `n`th exchange of all ranks match in pairs, in order, tensor, heads, tokens and type. So no order of the ranks can deadlock.
/// - No exchange receives into tokens that it sends or receives twice, and no step reads tokens that were never written.
/// - Steps attend with the operands that they say, and every pair that bands keep is attended exactly once for each head.
/// - Every byte that is received is read, and every result has all of its contributions and is written once.
///
/// The time and memory grow with the number of pairs, so use small problems. Schedules for large ones are made by the same code.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
/// use sdpa_parallel::{ParallelSpec, Pass, Strategy, prove};
///
/// let shape = Shape { batch: 1, heads_q: 4, heads_kv: 1, seq_q: 13, seq_kv: 13, dim_qk: 8, dim_v: 8 };
/// let attention = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal());
/// let problem = ParallelSpec::new(attention, 4).strategy(Strategy::HeadExchange).validate()?;
/// let mut schedules: Vec<_> = (0..4).map(|rank| problem.schedule(rank, Pass::Forward)).collect();
/// assert_eq!(prove(&problem, &schedules), Ok(()));
/// // Without its last step, a rank misses results.
/// schedules[2].steps.pop();
/// assert!(prove(&problem, &schedules).is_err());
/// # Ok::<(), sdpa_core::Error>(())
/// ```
///
/// # Errors
/// Returns the first property that does not hold.
pub fn prove(problem: &ParallelProblem, schedules: &[Schedule]) -> Result<(), ProofError> {
    let mut ranks: Vec<Rank<'_>> = schedules.iter().map(Rank::new).collect();
    loop {
        let mut waiting = Vec::new();
        for rank in &mut ranks {
            waiting.push(rank.run(problem)?);
        }
        if waiting.iter().all(Option::is_none) {
            break;
        }
        if let Some(n) = waiting.iter().position(Option::is_none) {
            return Err(ranks[n].error("it ends while other ranks exchange".to_owned()));
        }
        exchange(&mut ranks)?;
    }
    ranks.iter().try_for_each(|rank| rank.finished(problem))
}

fn exchange(ranks: &mut [Rank<'_>]) -> Result<(), ProofError> {
    let transfers = |rank: &Rank<'_>| match &rank.schedule.steps[rank.step] {
        Step::Exchange { sends, receives } => (sends.clone(), receives.clone()),
        Step::Copy { .. } | Step::Add { .. } | Step::Attend(_) | Step::Finish { .. } => (Vec::new(), Vec::new()),
    };
    let all: Vec<(Vec<Transfer>, Vec<Transfer>)> = ranks.iter().map(transfers).collect();
    for (n, (sends, receives)) in all.iter().enumerate() {
        for (i, receive) in receives.iter().enumerate() {
            let overlaps = |other: &Transfer| {
                other.slot == receive.slot && (0..receive.chunk.len).any(|i| other.chunk.find(receive.chunk.at(i)).is_some())
            };
            if sends.iter().any(overlaps) || receives[..i].iter().any(overlaps) {
                return Err(ranks[n].error(format!("slot {} is received while it is sent or received", receive.slot)));
            }
        }
        let mut moved = Vec::new();
        for peer in 0..ranks.len() {
            let to_here: Vec<&Transfer> = all[peer].0.iter().filter(|t| t.peer == n).collect();
            let from_there: Vec<&Transfer> = receives.iter().filter(|t| t.peer == peer).collect();
            if to_here.len() != from_there.len() || (peer == n && !to_here.is_empty()) {
                return Err(ranks[n].error(format!(
                    "it receives {} transfers of rank {peer}, which sends {}",
                    from_there.len(),
                    to_here.len()
                )));
            }
            for (sent, received) in to_here.into_iter().zip(from_there) {
                let (from, to) = (&ranks[peer].schedule.slots[sent.slot], &ranks[n].schedule.slots[received.slot]);
                if (from.tensor, &from.heads, from.dtype, sent.chunk) != (to.tensor, &to.heads, to.dtype, received.chunk) {
                    return Err(ranks[n].error(format!("rank {peer} sends another part than slot {} receives", received.slot)));
                }
                if from.contiguous(&sent.chunk).is_none() || to.contiguous(&received.chunk).is_none() {
                    return Err(ranks[n].error("a transfer is not contiguous in memory".to_owned()));
                }
                moved.push((peer, sent.clone(), received.clone()));
            }
        }
        for (peer, sent, received) in moved {
            let heads = ranks[n].schedule.slots[received.slot].heads.clone();
            let cells = ranks[peer].read(sent.slot, &heads, &sent.chunk)?;
            let places = ranks[n].places(received.slot, &heads, &received.chunk)?;
            for (place, cell) in places.into_iter().zip(cells) {
                ranks[n].cells[received.slot][place] = Cell { meaning: cell, unread: true };
            }
        }
    }
    ranks.iter_mut().for_each(|rank| rank.step += 1);
    Ok(())
}

impl<'a> Rank<'a> {
    fn new(schedule: &'a Schedule) -> Rank<'a> {
        let cells = |slot: &Slot| {
            let positions = slot.tokens.iter().flat_map(|c| (0..c.len).map(|i| c.at(i)));
            let meaning = |position: i64, head: i64| match slot.role {
                Role::Input => Meaning::Row(slot.tensor, head, position),
                Role::Output | Role::Buffer => Meaning::Unwritten,
                Role::Accumulator => Meaning::Sum(slot.tensor, BTreeSet::new()),
            };
            let heads = slot.heads.clone();
            positions.flat_map(|position| heads.clone().map(move |head| Cell { meaning: meaning(position, head), unread: false })).collect()
        };
        Rank { schedule, cells: schedule.slots.iter().map(cells).collect(), step: 0 }
    }

    fn error(&self, what: String) -> ProofError {
        ProofError { rank: self.schedule.rank, step: self.step, what }
    }

    /// Returns the places of some tokens and heads of a slot, tokens outermost.
    fn places(&self, slot: usize, heads: &Range<i64>, chunk: &Chunk) -> Result<Vec<usize>, ProofError> {
        let found = self.schedule.slots.get(slot).ok_or_else(|| self.error(format!("there is no slot {slot}")))?;
        if heads.start < found.heads.start || heads.end > found.heads.end {
            return Err(self.error(format!("slot {slot} does not have heads {heads:?}")));
        }
        let count = found.heads.end - found.heads.start;
        let mut all = Vec::new();
        for i in 0..chunk.len {
            let token = found.find(chunk.at(i)).ok_or_else(|| self.error(format!("slot {slot} does not have token {}", chunk.at(i))))?;
            all.extend(heads.clone().map(|head| (token * count + head - found.heads.start) as usize));
        }
        Ok(all)
    }

    fn read(&mut self, slot: usize, heads: &Range<i64>, chunk: &Chunk) -> Result<Vec<Meaning>, ProofError> {
        let mut all = Vec::new();
        for place in self.places(slot, heads, chunk)? {
            let cell = &mut self.cells[slot][place];
            cell.unread = false;
            if cell.meaning == Meaning::Unwritten {
                return Err(self.error(format!("slot {slot} is read before it is written")));
            }
            all.push(cell.meaning.clone());
        }
        Ok(all)
    }

    /// Runs to the next exchange. Returns its step, or `None` at the end.
    fn run(&mut self, problem: &ParallelProblem) -> Result<Option<usize>, ProofError> {
        while let Some(step) = self.schedule.steps.get(self.step) {
            match step {
                Step::Exchange { .. } => return Ok(Some(self.step)),
                Step::Copy { from, to, heads, chunk } => {
                    let values = self.read(*from, heads, chunk)?;
                    let target = self.schedule.slots[*to].tensor;
                    for (place, value) in self.places(*to, heads, chunk)?.into_iter().zip(values) {
                        let same = match &value {
                            Meaning::Row(tensor, ..) | Meaning::Sum(tensor, _) => *tensor == target,
                            Meaning::Unwritten => false,
                        };
                        if !same || self.cells[*to][place].meaning != Meaning::Unwritten {
                            return Err(self.error(format!("slot {to} is written twice, or with another tensor")));
                        }
                        self.cells[*to][place].meaning = value;
                    }
                }
                Step::Add { from, to, heads, chunk } => {
                    let values = self.read(*from, heads, chunk)?;
                    for (place, value) in self.places(*to, heads, chunk)?.into_iter().zip(values) {
                        let Meaning::Sum(tensor, pairs) = value else { return Err(self.error(format!("slot {from} is no result"))) };
                        if tensor != self.schedule.slots[*to].tensor {
                            return Err(self.error(format!("slot {from} is added to another tensor")));
                        }
                        self.add(*to, place, pairs)?;
                    }
                }
                Step::Attend(attend) => self.attend(attend, problem)?,
                Step::Finish { q, heads, reads, writes } => {
                    let sums = self.read(reads[0], heads, q)?;
                    if self.read(reads[1], heads, q)?.len() != sums.len() || self.read(reads[2], heads, q)?.len() != sums.len() {
                        return Err(self.error("accumulators differ in their rows".to_owned()));
                    }
                    for &to in writes {
                        for (place, sum) in self.places(to, heads, q)?.into_iter().zip(&sums) {
                            let Meaning::Sum(_, pairs) = sum else { return Err(self.error("an output is no sum".to_owned())) };
                            self.write(to, place, pairs.clone())?;
                        }
                    }
                }
            }
            self.step += 1;
        }
        Ok(None)
    }

    fn add(&mut self, to: usize, place: usize, pairs: BTreeSet<[i64; 2]>) -> Result<(), ProofError> {
        let twice = match &mut self.cells[to][place].meaning {
            Meaning::Sum(_, sum) => pairs.into_iter().find(|pair| !sum.insert(*pair)),
            Meaning::Unwritten | Meaning::Row(..) => return Err(self.error(format!("slot {to} is no accumulator"))),
        };
        twice.map_or(Ok(()), |pair| Err(self.error(format!("slot {to} has pair {pair:?} twice"))))
    }

    fn write(&mut self, to: usize, place: usize, pairs: BTreeSet<[i64; 2]>) -> Result<(), ProofError> {
        if self.cells[to][place].meaning != Meaning::Unwritten {
            return Err(self.error(format!("slot {to} is written twice")));
        }
        self.cells[to][place].meaning = Meaning::Sum(self.schedule.slots[to].tensor, pairs);
        Ok(())
    }

    fn attend(&mut self, attend: &Attend, problem: &ParallelProblem) -> Result<(), ProofError> {
        let wanted: &[Tensor] = match self.schedule.pass {
            Pass::Forward => &[Tensor::Q, Tensor::K, Tensor::V],
            Pass::Backward => &[Tensor::Q, Tensor::K, Tensor::V, Tensor::O, Tensor::DO, Tensor::Stats],
        };
        let of = |tensor: Tensor| if tensor.is_of_keys() { (&attend.heads_kv, &attend.k) } else { (&attend.heads_q, &attend.q) };
        if attend.reads.len() != wanted.len() {
            return Err(self.error("a step has another number of operands".to_owned()));
        }
        for (&slot, &tensor) in attend.reads.iter().zip(wanted) {
            let (heads, chunk) = of(tensor);
            let rows = (0..chunk.len).flat_map(|i| heads.clone().map(move |head| Meaning::Row(tensor, head, chunk.at(i))));
            if !self.read(slot, heads, chunk)?.into_iter().eq(rows) {
                return Err(self.error(format!("slot {slot} does not hold {} of tokens {chunk}, heads {heads:?}", tensor.name())));
            }
        }
        let (whole, region) = (problem.problem(), problem.problem().region());
        let group = (attend.heads_q.end - attend.heads_q.start) / (attend.heads_kv.end - attend.heads_kv.start).max(1);
        if attend.heads_q.clone().any(|head| head / whole.group() != attend.heads_kv.start + (head - attend.heads_q.start) / group.max(1)) {
            return Err(self.error("query heads attend with other KV heads".to_owned()));
        }
        for &to in &attend.writes {
            let tensor = self.schedule.slots[to].tensor;
            let (heads, chunk) = of(tensor);
            let mut places = self.places(to, heads, chunk)?.into_iter();
            for (row, head) in (0..chunk.len).flat_map(|i| heads.clone().map(move |head| (chunk.at(i), head))) {
                let pairs: BTreeSet<[i64; 2]> = if tensor.is_of_keys() {
                    let queries = (0..attend.q.len).map(|i| attend.q.at(i)).filter(|q| region.keeps(*q, row));
                    let heads = (attend.heads_q.clone()).filter(|h| h / whole.group() == head);
                    queries.flat_map(|q| heads.clone().map(move |h| [h, q])).collect()
                } else {
                    (0..attend.k.len).map(|i| attend.k.at(i)).filter(|k| region.keeps(row, *k)).map(|k| [k, 0]).collect()
                };
                let Some(place) = places.next() else { return Err(self.error(format!("slot {to} is too short"))) };
                match self.schedule.slots[to].role {
                    Role::Accumulator => self.add(to, place, pairs)?,
                    Role::Input | Role::Output | Role::Buffer => self.write(to, place, pairs)?,
                }
            }
        }
        Ok(())
    }

    /// Checks the results, and that everything received was read.
    fn finished(&self, problem: &ParallelProblem) -> Result<(), ProofError> {
        let (whole, region) = (problem.problem(), problem.problem().region());
        for (n, slot) in self.schedule.slots.iter().enumerate() {
            if self.cells[n].iter().any(|cell| cell.unread) {
                return Err(self.error(format!("slot {n} has received bytes that no step reads")));
            }
            if slot.role != Role::Output {
                continue;
            }
            let rows = slot.tokens.iter().flat_map(|c| (0..c.len).map(|i| c.at(i)));
            for ((row, head), cell) in rows.flat_map(|row| slot.heads.clone().map(move |head| (row, head))).zip(&self.cells[n]) {
                let pairs: BTreeSet<[i64; 2]> = if slot.tensor.is_of_keys() {
                    let heads = head * whole.group()..(head + 1) * whole.group();
                    let queries = (0..whole.seq_q()).filter(|q| region.keeps(*q, row));
                    queries.flat_map(|q| heads.clone().map(move |h| [h, q])).collect()
                } else {
                    (0..whole.seq_kv()).filter(|k| region.keeps(row, *k)).map(|k| [k, 0]).collect()
                };
                if cell.meaning != Meaning::Sum(slot.tensor, pairs) {
                    return Err(self.error(format!("{} of token {row}, head {head} lacks contributions or has others", slot.tensor.name())));
                }
            }
        }
        Ok(())
    }
}
