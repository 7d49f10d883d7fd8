//! Makes the schedule of one rank for each strategy.
//!
//! All strategies but the ring are one scheme. Each rank works on some query heads and some queries. It fetches these queries if they are not its own, and
//! the keys that they attend to; it attends; and it returns the results to the ranks that hold the tokens. All-gather works on the own queries and all
//! heads, head exchange on all queries and some heads, and a grid is in between.

use crate::problem::{ParallelProblem, Strategy};
use crate::schedule::{Attend, Extents, Pass, Role, Schedule, Slot, Step, Tensor, Transfer};
use crate::sharding::{cover, sorted};
use sdpa_core::{Chunk, DType, Region};
use std::ops::Range;

/// Query heads and their KV heads.
type Heads = (Range<i64>, Range<i64>);

/// The part of the problem on which one rank works in one phase.
struct Work {
    heads: Heads,
    /// The heads of each call, so that each KV head has equally many query heads.
    calls: Vec<Heads>,
    /// Runs of queries.
    q: Vec<Chunk>,
    /// For each rank that holds keys, those of its tokens that the queries may attend to.
    keys: Vec<Vec<Chunk>>,
    /// Runs of these keys, in the order in which they are stored.
    k: Vec<Chunk>,
}

impl Work {
    /// Returns whether the run of queries that has `chunk` attends to any key.
    fn attends_with(&self, chunk: &Chunk, region: &Region) -> bool {
        let mut runs = self.q.iter().filter(|q| q.find(chunk.start).is_some());
        runs.any(|q| self.k.iter().any(|k| region.attends(q, k)))
    }
}

/// Divides query heads into calls with whole GQA groups or heads of one group.
fn calls(heads: &Range<i64>, group: i64) -> Vec<Heads> {
    if heads.start % group == 0 && heads.end % group == 0 {
        return vec![(heads.clone(), heads.start / group..heads.end / group)];
    }
    let mut all = Vec::new();
    let mut start = heads.start;
    while start < heads.end {
        let kv = start / group;
        let end = heads.end.min((kv + 1) * group);
        all.push((start..end, kv..kv + 1));
        start = end;
    }
    all
}

fn part(n: i64, of: i64, all: i64) -> Range<i64> {
    n * all / of..(n + 1) * all / of
}

/// Makes the schedule of `rank`.
pub(crate) fn schedule(problem: &ParallelProblem, rank: usize, pass: Pass) -> Schedule {
    let whole = problem.problem();
    let extents = Extents { batch: whole.batch(), dim_qk: whole.dim_qk(), dim_v: whole.dim_v() };
    let schedule = Schedule { rank, ranks: problem.ranks(), pass, extents, slots: Vec::new(), steps: Vec::new() };
    let mut maker = Maker { problem, rank, pass, schedule, inputs: Vec::new(), outputs: Vec::new() };
    maker.own_slots();
    match problem.strategy() {
        Strategy::AllGather { head_groups } => {
            let groups = i64::from(head_groups);
            (0..groups).for_each(|n| {
                maker.phase(1, |_| {
                    part(n, groups, whole.heads_kv()).start * whole.group()..part(n, groups, whole.heads_kv()).end * whole.group()
                })
            });
        }
        Strategy::Halo => maker.phase(1, |_| 0..whole.heads_q()),
        Strategy::HeadExchange => {
            let ranks = problem.ranks() as i64;
            maker.phase(problem.ranks(), |rank| part(rank as i64, ranks, whole.heads_q()));
        }
        Strategy::Grid { heads } => {
            maker.phase(heads as usize, |rank| part(rank as i64 % i64::from(heads), i64::from(heads), whole.heads_q()));
        }
        Strategy::Ring => maker.ring(),
        Strategy::Auto => {}
    }
    maker.round_sums();
    maker.schedule
}

struct Maker<'a> {
    problem: &'a ParallelProblem,
    rank: usize,
    pass: Pass,
    schedule: Schedule,
    inputs: Vec<(Tensor, usize)>,
    outputs: Vec<(Tensor, usize)>,
}

/// A receiver's use of a tensor: the slot that receives it, or the accumulator to which it is added.
#[derive(Clone, Copy)]
enum To {
    Slot(usize),
    Sum(usize),
}

impl Maker<'_> {
    fn slot(&mut self, tensor: Tensor, role: Role, dtype: DType, heads: Range<i64>, tokens: Vec<Chunk>) -> usize {
        self.schedule.slots.push(Slot { tensor, role, dtype, heads, tokens });
        self.schedule.slots.len() - 1
    }

    fn dtype(&self, tensor: Tensor) -> DType {
        if tensor.is_statistic() { DType::F32 } else { self.problem.problem().dtype() }
    }

    fn all_heads(&self, tensor: Tensor) -> Range<i64> {
        0..if tensor.is_of_keys() { self.problem.problem().heads_kv() } else { self.problem.problem().heads_q() }
    }

    fn shard(&self, tensor: Tensor, rank: usize) -> &Vec<Chunk> {
        self.problem.shard(rank, tensor.is_of_keys())
    }

    /// Adds the slots of the call's own operands and results.
    fn own_slots(&mut self) {
        let (inputs, outputs) = match self.pass {
            Pass::Forward => (vec![Tensor::Q, Tensor::K, Tensor::V], self.results()),
            Pass::Backward => {
                (vec![Tensor::Q, Tensor::K, Tensor::V, Tensor::O, Tensor::DO, Tensor::Stats], vec![Tensor::DQ, Tensor::DK, Tensor::DV])
            }
        };
        for (tensors, role) in [(inputs, Role::Input), (outputs, Role::Output)] {
            for tensor in tensors {
                let (dtype, heads, tokens) = (self.dtype(tensor), self.all_heads(tensor), self.shard(tensor, self.rank).clone());
                let slot = self.slot(tensor, role, dtype, heads, tokens);
                if role == Role::Input { &mut self.inputs } else { &mut self.outputs }.push((tensor, slot));
            }
        }
        if self.pass == Pass::Backward && self.problem.ranks() > 1 {
            // The owner of keys sums their gradients here.
            for tensor in [Tensor::DK, Tensor::DV] {
                let (heads, tokens) = (self.all_heads(tensor), self.shard(tensor, self.rank).clone());
                let sum = self.slot(tensor, Role::Accumulator, DType::F32, heads, tokens);
                self.inputs.push((tensor, sum));
            }
        }
    }

    /// Returns the output and the statistics that the problem computes.
    fn results(&self) -> Vec<Tensor> {
        let problem = self.problem.problem();
        let statistics = [(problem.stats(), Tensor::Stats), (problem.row_max(), Tensor::RowMax), (problem.sum_exp(), Tensor::SumExp)];
        [Tensor::O].into_iter().chain(statistics.into_iter().filter(|(asked, _)| *asked).map(|(_, tensor)| tensor)).collect()
    }

    fn input(&self, tensor: Tensor) -> usize {
        self.inputs.iter().find(|(t, _)| *t == tensor).map_or(0, |(_, slot)| *slot)
    }

    fn output(&self, tensor: Tensor) -> usize {
        self.outputs.iter().find(|(t, _)| *t == tensor).map_or(0, |(_, slot)| *slot)
    }

    /// Returns the work of a rank that attends with `heads` for the queries of its group of `group` ranks.
    fn work(&self, rank: usize, group: usize, heads: Range<i64>) -> Work {
        let whole = self.problem.problem();
        let first = rank / group * group;
        let held: Vec<Chunk> = (first..first + group).flat_map(|r| self.shard(Tensor::Q, r).clone()).collect();
        let q = if group == 1 { held } else { cover(&held) };
        let calls = calls(&heads, whole.group());
        let kv = calls.first().map_or(0, |(_, kv)| kv.start)..calls.last().map_or(0, |(_, kv)| kv.end);
        let keys: Vec<Vec<Chunk>> = (0..self.problem.ranks()).map(|peer| self.needed(&q, peer)).collect();
        let all: Vec<Chunk> = keys.iter().flatten().copied().collect();
        // Bands move exactly only between chunks with equal strides, so striped queries attend to striped runs of keys.
        let is_striped = q.iter().any(|c| c.stride > 1) && !whole.region().is_full();
        let k = if is_striped { sorted(&all) } else { cover(&all) };
        Work { heads: (heads, kv), calls, q, keys, k }
    }

    /// Returns the tokens of `peer`'s keys that the queries may attend to.
    fn needed(&self, q: &[Chunk], peer: usize) -> Vec<Chunk> {
        if self.problem.ranks() == 1 {
            return self.shard(Tensor::K, peer).clone();
        }
        let region = self.problem.problem().region();
        let attended = self.shard(Tensor::K, peer).iter().filter(|k| q.iter().any(|q| region.attends(q, k)));
        if self.problem.strategy() != Strategy::Halo {
            return attended.copied().collect();
        }
        let within = |k: &Chunk| {
            let mut parts: Vec<Range<i64>> = Vec::new();
            for q in q {
                let last = q.at(q.len - 1);
                let first_key = region.lower.map_or(i64::MIN, |lower| q.start + lower + 1);
                let end_key = region.upper.map_or(i64::MAX, |upper| last + upper + 1);
                let below = |limit: i64| limit.saturating_sub(k.start).saturating_add(k.stride - 1).div_euclid(k.stride).clamp(0, k.len);
                let range = below(first_key)..below(end_key);
                if range.start < range.end {
                    parts.push(range);
                }
            }
            parts.sort_by_key(|range| range.start);
            let mut merged: Vec<Range<i64>> = Vec::new();
            for part in parts {
                match merged.last_mut() {
                    Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                    Some(_) | None => merged.push(part),
                }
            }
            merged.into_iter().map(|range| k.part(range)).collect::<Vec<_>>()
        };
        attended.flat_map(within).collect()
    }

    /// Moves tensors between the ranks that hold tokens and those that work on them. `home` says the direction: true for results that return.
    fn transfer(&mut self, works: &[Work], group: usize, home: bool, items: &[(Tensor, usize, To)]) {
        let (mut sends, mut receives, mut after) = (Vec::new(), Vec::new(), Vec::new());
        for &(tensor, from, to) in items {
            for peer in 0..works.len() {
                for (outgoing, [source, destination]) in [(true, [self.rank, peer]), (false, [peer, self.rank])] {
                    let (worker, owner) = if home { (source, destination) } else { (destination, source) };
                    let work = &works[worker];
                    let (heads, chunks) = if tensor.is_of_keys() {
                        (work.heads.1.clone(), work.keys[owner].clone())
                    } else if worker / group == owner / group {
                        (work.heads.0.clone(), self.shard(tensor, owner).clone())
                    } else {
                        continue;
                    };
                    // Queries that attend to no key are not fetched.
                    let is_used = |chunk: &Chunk| home || tensor.is_of_keys() || work.attends_with(chunk, self.problem.problem().region());
                    for chunk in chunks.into_iter().filter(is_used).collect::<Vec<_>>() {
                        if peer == self.rank {
                            if !outgoing {
                                after.push((from, to, heads.clone(), chunk));
                            }
                        } else if outgoing {
                            sends.push(self.outgoing(tensor, peer, from, &heads, chunk));
                        } else {
                            receives.push(self.incoming(tensor, peer, to, &heads, chunk, &mut after));
                        }
                    }
                }
            }
        }
        if works.len() > 1 {
            self.schedule.steps.push(Step::Exchange { sends, receives });
        }
        for (from, to, heads, chunk) in after {
            match to {
                To::Slot(to) if from == to => {}
                To::Slot(to) => self.schedule.steps.push(Step::Copy { from, to, heads, chunk }),
                To::Sum(to) => self.schedule.steps.push(Step::Add { from, to, heads, chunk }),
            }
        }
    }

    /// Returns the transfer of a chunk of a slot, packed into a slot of its own unless its bytes are contiguous.
    fn outgoing(&mut self, tensor: Tensor, peer: usize, from: usize, heads: &Range<i64>, chunk: Chunk) -> Transfer {
        let (slot, dtype) = (&self.schedule.slots[from], self.dtype(tensor));
        if slot.heads == *heads && slot.dtype == dtype && slot.contiguous(&chunk).is_some() {
            return Transfer { peer, slot: from, chunk };
        }
        let packed = self.slot(tensor, Role::Buffer, dtype, heads.clone(), vec![chunk]);
        self.schedule.steps.push(Step::Copy { from, to: packed, heads: heads.clone(), chunk });
        Transfer { peer, slot: packed, chunk }
    }

    fn incoming(
        &mut self,
        tensor: Tensor,
        peer: usize,
        to: To,
        heads: &Range<i64>,
        chunk: Chunk,
        after: &mut Vec<(usize, To, Range<i64>, Chunk)>,
    ) -> Transfer {
        if let To::Slot(slot) = to
            && self.schedule.slots[slot].heads == *heads
            && self.schedule.slots[slot].contiguous(&chunk).is_some()
        {
            return Transfer { peer, slot, chunk };
        }
        let received = self.slot(tensor, Role::Buffer, self.dtype(tensor), heads.clone(), vec![chunk]);
        after.push((received, to, heads.clone(), chunk));
        Transfer { peer, slot: received, chunk }
    }

    /// Fetches, attends and returns, with the query heads that `heads` gives each rank and the queries of groups of `group` ranks.
    fn phase(&mut self, group: usize, heads: impl Fn(usize) -> Range<i64>) {
        let works: Vec<Work> = (0..self.problem.ranks()).map(|rank| self.work(rank, group, heads(rank))).collect();
        let work = &works[self.rank];
        let mut slots = Vec::new();
        let mut fetched = Vec::new();
        let inputs: Vec<(Tensor, usize)> =
            self.inputs.iter().filter(|(_, slot)| self.schedule.slots[*slot].role == Role::Input).copied().collect();
        for (tensor, own) in inputs {
            let (heads, tokens) = if tensor.is_of_keys() { (&work.heads.1, &work.k) } else { (&work.heads.0, &work.q) };
            let is_here = if tensor.is_of_keys() { works.len() == 1 && self.schedule.slots[own].tokens == *tokens } else { group == 1 };
            let slot = if is_here { own } else { self.slot(tensor, Role::Buffer, self.dtype(tensor), heads.clone(), tokens.clone()) };
            // Ranks of one group need each other's queries. If there is one rank in a group, queries stay where they are.
            if tensor.is_of_keys() || group > 1 {
                fetched.push((tensor, own, To::Slot(slot)));
            }
            slots.push((tensor, slot));
        }
        self.transfer(&works, group, false, &fetched);
        match self.pass {
            Pass::Forward => {
                let mut results = Vec::new();
                for tensor in self.results() {
                    let own = self.output(tensor);
                    let slot = if group == 1 {
                        own
                    } else {
                        self.slot(tensor, Role::Buffer, self.dtype(tensor), work.heads.0.clone(), work.q.clone())
                    };
                    results.push((tensor, slot, To::Slot(own)));
                }
                let written: Vec<usize> = results.iter().map(|(_, slot, _)| *slot).collect();
                let reads = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| of(&slots, tensor));
                let rounds = [(work.k.clone(), [reads[1], reads[2]])];
                let mut merged = Vec::new();
                self.attend(work, reads[0], &rounds[0], &pairs_of(&rounds, work, self.problem), &written, &mut merged);
                self.finish(work, &written, &merged, &rounds);
                if group > 1 {
                    self.transfer(&works, group, true, &results);
                }
            }
            Pass::Backward => self.gradients(&works, group, &slots),
        }
    }

    fn gradients(&mut self, works: &[Work], group: usize, slots: &[(Tensor, usize)]) {
        let work = &works[self.rank];
        let rounds = [(work.k.clone(), [of(slots, Tensor::K), of(slots, Tensor::V)])];
        let partial = pairs_of(&rounds, work, self.problem).iter().sum::<usize>() != 1;
        let sums = [Tensor::DQ, Tensor::DK, Tensor::DV].map(|tensor| {
            let (heads, tokens) = if tensor.is_of_keys() { (&work.heads.1, &work.k) } else { (&work.heads.0, &work.q) };
            self.slot(tensor, Role::Accumulator, DType::F32, heads.clone(), tokens.clone())
        });
        let read = [Tensor::Q, Tensor::O, Tensor::DO, Tensor::Stats].map(|tensor| of(slots, tensor));
        self.differentiate(work, &rounds[0], read, sums, partial);
        let dq = [(Tensor::DQ, sums[0], To::Slot(self.output(Tensor::DQ)))];
        if group > 1 {
            self.transfer(works, group, true, &dq);
        } else {
            let to = self.output(Tensor::DQ);
            for chunk in work.q.clone() {
                self.schedule.steps.push(Step::Copy { from: sums[0], to, heads: work.heads.0.clone(), chunk });
            }
        }
        let to = |tensor: Tensor| if works.len() > 1 { To::Sum(self.input(tensor)) } else { To::Slot(self.output(tensor)) };
        let items = [(Tensor::DK, sums[1], to(Tensor::DK)), (Tensor::DV, sums[2], to(Tensor::DV))];
        self.transfer(works, group, true, &items);
    }

    /// Rounds the sums of the gradients of keys and values into the results.
    fn round_sums(&mut self) {
        if self.pass == Pass::Forward || self.problem.ranks() == 1 {
            return;
        }
        for tensor in [Tensor::DK, Tensor::DV] {
            let (from, to, heads) = (self.input(tensor), self.output(tensor), self.all_heads(tensor));
            for chunk in self.shard(tensor, self.rank).clone() {
                self.schedule.steps.push(Step::Copy { from, to, heads: heads.clone(), chunk });
            }
        }
    }

    /// Attends to one block of keys. `merged` receives the accumulators of runs of queries with several contributions.
    fn attend(
        &mut self,
        work: &Work,
        q_slot: usize,
        (runs, [k_slot, v_slot]): &(Vec<Chunk>, [usize; 2]),
        pairs: &[usize],
        written: &[usize],
        merged: &mut Vec<[usize; 3]>,
    ) {
        if pairs.iter().any(|n| *n != 1) && merged.is_empty() {
            let sums = [Tensor::O, Tensor::RowMax, Tensor::SumExp];
            merged.push(sums.map(|tensor| self.slot(tensor, Role::Accumulator, DType::F32, work.heads.0.clone(), work.q.clone())));
        }
        let region = *self.problem.problem().region();
        for (heads_q, heads_kv) in &work.calls {
            for (n, q) in work.q.iter().enumerate() {
                for k in runs.iter().filter(|k| region.attends(q, k)) {
                    let partial = pairs[n] != 1;
                    let writes = if partial { merged[0].to_vec() } else { written.to_vec() };
                    let (heads_q, heads_kv) = (heads_q.clone(), heads_kv.clone());
                    let reads = vec![q_slot, *k_slot, *v_slot];
                    self.schedule.steps.push(Step::Attend(Attend { q: *q, k: *k, heads_q, heads_kv, partial, reads, writes }));
                }
            }
        }
    }

    fn finish(&mut self, work: &Work, written: &[usize], merged: &[[usize; 3]], rounds: &[(Vec<Chunk>, [usize; 2])]) {
        let Some(reads) = merged.first() else { return };
        for (q, pairs) in work.q.iter().zip(pairs_of(rounds, work, self.problem)) {
            if pairs != 1 {
                self.schedule.steps.push(Step::Finish { q: *q, heads: work.heads.0.clone(), reads: *reads, writes: written.to_vec() });
            }
        }
    }

    fn differentiate(
        &mut self,
        work: &Work,
        (runs, [k, v]): &(Vec<Chunk>, [usize; 2]),
        [q, o, d_o, stats]: [usize; 4],
        sums: [usize; 3],
        partial: bool,
    ) {
        let region = *self.problem.problem().region();
        let reads = vec![q, *k, *v, o, d_o, stats];
        for (heads_q, heads_kv) in &work.calls {
            for (q, k) in work.q.iter().flat_map(|q| runs.iter().map(move |k| (q, k))).filter(|(q, k)| region.attends(q, k)) {
                let (heads_q, heads_kv) = (heads_q.clone(), heads_kv.clone());
                let (reads, writes) = (reads.clone(), sums.to_vec());
                self.schedule.steps.push(Step::Attend(Attend { q: *q, k: *k, heads_q, heads_kv, partial, reads, writes }));
            }
        }
    }

    /// Passes blocks of keys and values from rank to rank. A chunk travels as far as the last rank whose queries attend to it.
    fn ring(&mut self) {
        let (ranks, rank) = (self.problem.ranks(), self.rank);
        let works: Vec<Work> = (0..ranks).map(|r| self.work(r, 1, 0..self.problem.problem().heads_q())).collect();
        // Each chunk of a block travels as far as the last rank that needs it.
        let hops = |owner: usize, chunk: &Chunk| {
            (0..ranks).rev().find(|hop| works[(owner + hop) % ranks].keys[owner].contains(chunk)).unwrap_or(0)
        };
        let owner = |rank: usize, hop: usize| (rank + ranks - hop) % ranks;
        let work = &works[rank];
        let rounds: Vec<(Vec<Chunk>, [usize; 2])> = (0..ranks)
            .map(|hop| {
                let from = owner(rank, hop);
                let tokens = self.shard(Tensor::K, from).clone();
                let slots = [Tensor::K, Tensor::V].map(|tensor| match hop {
                    0 => self.input(tensor),
                    _ => self.slot(tensor, Role::Buffer, self.dtype(tensor), self.all_heads(tensor), tokens.clone()),
                });
                (tokens, slots)
            })
            .collect();
        let pairs = pairs_of(&rounds, work, self.problem);
        let written: Vec<usize> = self.results().into_iter().map(|tensor| self.output(tensor)).collect();
        let partial = pairs.iter().sum::<usize>() != 1;
        let mut merged = Vec::new();
        let mut gradients: Vec<Option<[usize; 2]>> = vec![None; ranks];
        let dq = (self.pass == Pass::Backward)
            .then(|| self.slot(Tensor::DQ, Role::Accumulator, DType::F32, work.heads.0.clone(), work.q.clone()));
        for hop in 0..ranks {
            if hop + 1 < ranks {
                let moves = |block: usize, peer: usize, slots: &[usize; 2]| -> Vec<Transfer> {
                    let chunks: Vec<Chunk> =
                        self.shard(Tensor::K, block).iter().filter(|chunk| hops(block, chunk) > hop).copied().collect();
                    slots.iter().flat_map(|&slot| chunks.iter().map(move |&chunk| Transfer { peer, slot, chunk })).collect()
                };
                let sends = moves(owner(rank, hop), (rank + 1) % ranks, &rounds[hop].1);
                let receives = moves(owner(rank, hop + 1), (rank + ranks - 1) % ranks, &rounds[hop + 1].1);
                // The next block travels while this one is attended to.
                self.schedule.steps.push(Step::Exchange { sends, receives });
            }
            match (self.pass, dq) {
                (Pass::Backward, Some(dq)) => {
                    let from = owner(rank, hop);
                    let heads = self.all_heads(Tensor::K);
                    let sums = [Tensor::DK, Tensor::DV]
                        .map(|tensor| self.slot(tensor, Role::Accumulator, DType::F32, heads.clone(), rounds[hop].0.clone()));
                    let read = [Tensor::Q, Tensor::O, Tensor::DO, Tensor::Stats].map(|tensor| self.input(tensor));
                    self.differentiate(work, &rounds[hop], read, [dq, sums[0], sums[1]], partial);
                    if hop == 0 {
                        gradients[rank] = Some(sums);
                        continue;
                    }
                    let (mut sends, mut receives) = (Vec::new(), Vec::new());
                    for (tensor, sum) in [(Tensor::DK, sums[0]), (Tensor::DV, sums[1])] {
                        for chunk in work.keys[from].clone() {
                            sends.push(self.outgoing(tensor, from, sum, &heads, chunk));
                        }
                    }
                    let worker = (rank + hop) % ranks;
                    let own = works[worker].keys[rank].clone();
                    if !own.is_empty() {
                        let slots = [Tensor::DK, Tensor::DV]
                            .map(|tensor| self.slot(tensor, Role::Buffer, self.dtype(tensor), heads.clone(), own.clone()));
                        for slot in slots {
                            receives.extend(own.iter().map(|&chunk| Transfer { peer: worker, slot, chunk }));
                        }
                        gradients[worker] = Some(slots);
                    }
                    self.schedule.steps.push(Step::Exchange { sends, receives });
                }
                (Pass::Forward | Pass::Backward, _) => {
                    self.attend(work, self.input(Tensor::Q), &rounds[hop], &pairs, &written, &mut merged)
                }
            }
        }
        self.finish(work, &written, &merged, &rounds);
        let Some(dq) = dq else { return };
        let to = self.output(Tensor::DQ);
        for chunk in work.q.clone() {
            self.schedule.steps.push(Step::Copy { from: dq, to, heads: work.heads.0.clone(), chunk });
        }
        for (n, tensor) in [Tensor::DK, Tensor::DV].into_iter().enumerate() {
            for (worker, slots) in gradients.iter().enumerate().filter_map(|(worker, slots)| Some((worker, slots.as_ref()?))) {
                for chunk in works[worker].keys[rank].clone() {
                    let (from, heads) = (slots[n], self.all_heads(tensor));
                    let step = match ranks {
                        1 => Step::Copy { from, to: self.output(tensor), heads, chunk },
                        _ => Step::Add { from, to: self.input(tensor), heads, chunk },
                    };
                    self.schedule.steps.push(step);
                }
            }
        }
    }
}

fn of(slots: &[(Tensor, usize)], tensor: Tensor) -> usize {
    slots.iter().find(|(t, _)| *t == tensor).map_or(0, |(_, slot)| *slot)
}

/// Returns the number of runs of keys that each run of queries attends to.
fn pairs_of(rounds: &[(Vec<Chunk>, [usize; 2])], work: &Work, problem: &ParallelProblem) -> Vec<usize> {
    let region = problem.problem().region();
    let attended = |q: &Chunk| rounds.iter().flat_map(|(runs, _)| runs).filter(|k| region.attends(q, k)).count();
    work.q.iter().map(attended).collect()
}
