#![doc = include_str!("../README.md")]
//!
//! # How work is divided
//!
//! A problem is split into *strips*: rows of one KV head. If there are too few strips to keep every thread busy, strips are split into *pieces*, which are
//! parts of their keys, and the sums of pieces are merged. Threads process the pieces, the largest first. A piece processes its keys in blocks. Block sizes and
//! the two head dims bound the memory in use; sequence lengths do not.
//!
//! | file | contents |
//! |---|---|
//! | `fact` | the facts of a problem that are supported: all |
//! | `isa` | the instruction set, detected at run time |
//! | `schedule` | strips, pieces, block sizes, threads |
//! | `tiles`, `kernel` | many rows: one row per lane |
//! | `few` | few rows (decode): lanes along a row |
//! | `exp` | `2^x` |
//! | `long` | f64 sums for more keys than an f32 sum is accurate for |
//! | `program` | score_mods, and masks that are not bands |
//! | `dropout` | dropout of P |
//! | `pack`, `element` | operands, packed sequences and pages, scratch memory, f16 and bf16 |
//! | `output` | rows of the output, merging |
//! | `backward` | the backward pass |
//! | `fp8` | 8-bit floats: roundings inside of the passes and around them |
//!
//! # Infinities and NaN
//!
//! A masked-out score has no effect, whatever `q`, `k` and `v` contain. Among unmasked scores:
//!
//! - NaN makes its row NaN, in `o` and `stats`.
//! - +inf does too, because inf - inf is NaN.
//! - -inf has P = 0, and 0 times an inf or NaN value is NaN, as in a matrix product. (Metal kernels treat such a pair as masked out.)
//!
//! A row whose scores are all -inf, or which attends to no key, is 0 with stats -inf. An element of P that dropout removes is 0, and takes part in the
//! products.
//!
//! Gradients follow the same rules: a masked-out (query, key) has no effect on any of them, whatever its `q`, `k`, `v`, `o`, `d_o` and stats contain. A row
//! with stats -inf attends to no key. An unmasked score of -inf has P = 0 and dS = 0, and those take part in the products.

mod backward;
#[cfg(test)]
mod digits;
mod dropout;
mod element;
mod exp;
mod fact;
mod few;
mod fp8;
mod isa;
mod kernel;
mod long;
#[cfg(test)]
mod merge_tests;
mod output;
mod pack;
#[cfg(test)]
mod packed_tests;
#[cfg(test)]
mod paged_tests;
mod program;
#[cfg(test)]
mod rule_tests;
mod schedule;
#[cfg(test)]
mod tests;
mod tiles;

use backward::CpuBackward;
use element::Element;
use fact::supports_fact;
use isa::Isa;
use long::Long;
use output::{Partial, Sink};
use pack::{Entries, Scratch, View};
use program::{Lengths, Rules, RulesOf};
use schedule::Schedule;
use sdpa_core::backward::BackwardProblem;
use sdpa_core::empty;
use sdpa_core::error::{Error, ExecutorName, Reason, SpecError, SpecErrors, Unsupported};
use sdpa_core::executor::{Executor, Prepared, PreparedBackward, Report};
use sdpa_core::fact::{Fact, reasons};
use sdpa_core::operand::{Direction, Side};
use sdpa_core::packed::Documents;
use sdpa_core::paged::Pages;
use sdpa_core::problem::Problem;
use sdpa_core::{ElementsMut, HostForward, Param};
use std::sync::Arc;
use std::time::Instant;

/// Attention on the CPU, on the threads of the rayon pool that calls it.
#[derive(Clone, Copy, Debug)]
pub struct CpuExecutor {
    isa: Isa,
}

impl CpuExecutor {
    /// Detects the instruction set.
    pub fn new() -> CpuExecutor {
        CpuExecutor { isa: Isa::detect() }
    }

    /// Returns the maximum bytes of scratch memory of a forward pass, which a call needs in addition to its operands. It depends on the number of threads in
    /// the calling rayon pool.
    pub fn workspace_bytes(&self, problem: &Problem) -> u64 {
        if problem.is_empty() {
            return 0;
        }
        let rules = Rules::new(problem);
        let threads = rayon::current_num_threads();
        let schedule = Schedule::new(problem, self.isa, threads, Lengths::default(), !rules.is_empty());
        let of = if problem.packed().is_some() { most_workspace } else { workspace };
        of(&schedule, self.isa, &rules) as u64 + fp8::bytes(problem, Direction::Forward, |operand| problem.in_memory(operand))
    }

    /// Returns the maximum bytes of scratch memory of a backward pass.
    pub fn backward_workspace_bytes(&self, problem: &BackwardProblem) -> u64 {
        if problem.forward().is_empty() {
            return 0;
        }
        let backward = CpuBackward::unchecked(self.isa, problem);
        backward.most_workspace() as u64 + backward.narrow_bytes()
    }

    #[cfg(test)]
    fn with_isa(isa: Isa) -> CpuExecutor {
        CpuExecutor { isa }
    }
}

impl Default for CpuExecutor {
    fn default() -> CpuExecutor {
        CpuExecutor::new()
    }
}

/// Returns the reasons if a fact is unsupported.
fn supported<'a>(facts: impl Iterator<Item = Fact<'a>>) -> Result<(), Unsupported> {
    let reasons = reasons(facts, supports_fact);
    if reasons.is_empty() { Ok(()) } else { Err(Unsupported::new(ExecutorName::CPU, reasons)) }
}

impl Executor for CpuExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::CPU
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        supported(problem.facts())
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        self.supports(problem)?;
        let made = || Arc::new(CpuPrepared { isa: self.isa, rules: Rules::new(problem), problem: problem.clone() });
        Ok(empty::forward(problem).unwrap_or_else(|| made()))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        supported(problem.facts())
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        self.supports_backward(problem)?;
        Ok(empty::backward(problem).unwrap_or_else(|| Arc::new(CpuBackward::new(self.isa, problem))))
    }
}

/// A problem and the instruction set. The schedule depends on the threads of a call.
#[derive(Debug)]
struct CpuPrepared {
    isa: Isa,
    problem: Problem,
    rules: Rules,
}

impl Prepared for CpuPrepared {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error> {
        let scale = call.check(&self.problem)?;
        if self.problem.dtype().is_fp8() {
            return self.run_narrow(call, scale);
        }
        let HostForward { q, k, v, o, stats, row_max, sum_exp, attn_scale: _, params, .. } = call;
        // In the order of `Statistic::ALL`.
        let statistics = [stats, row_max, sum_exp];
        match o {
            ElementsMut::F32(o) => self.run([f32::of(q), f32::of(k), f32::of(v)], o, statistics, scale, params),
            ElementsMut::F16(o) => self.run([Element::of(q), Element::of(k), Element::of(v)], o, statistics, scale, params),
            ElementsMut::BF16(o) => self.run([Element::of(q), Element::of(k), Element::of(v)], o, statistics, scale, params),
            ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => Err(wrong_types()),
        }
    }
}

/// The data that every piece reads.
#[derive(Debug)]
struct Call<'a, T> {
    schedule: &'a Schedule,
    isa: Isa,
    q: View<'a, T>,
    k: View<'a, T>,
    v: View<'a, T>,
    /// The attention scale, which multiplies queries.
    scale: f32,
    rules: &'a RulesOf<'a>,
    known: Option<&'a Known<'a>>,
}

/// Softmax statistics of rows from an earlier pass. With them, each P belongs to the complete softmax and can be rounded on its own.
#[derive(Debug)]
struct Known<'a> {
    /// The largest score of each row.
    max: View<'a, f32>,
    /// The logarithm of the sum of exponentials of each row, relative to that.
    log: &'a [f32],
    /// Rounds P to 8 bits.
    weights: &'a fp8::Rounder,
}

/// How a call is split.
#[derive(Clone, Copy, Debug)]
enum Cut<'a> {
    /// Strips in as many pieces as keep threads busy.
    Pieces,
    /// Strips in one piece each.
    Whole(Option<&'a Known<'a>>),
}

impl CpuPrepared {
    fn run<T: Element>(
        &self,
        inputs: [Option<&[T]>; 3],
        o: &mut [T],
        statistics: output::Statistics<'_>,
        scale: f32,
        params: &[Param<'_>],
    ) -> Result<Report, Error> {
        let [Some(q), Some(k), Some(v)] = inputs else {
            return Err(wrong_types());
        };
        let problem = &self.problem;
        self.with([q, k, v], (scale, params), Cut::Pieces, |call, sinks, documents| {
            call.run(output::targets(call.schedule, (problem, documents), sinks, o, statistics));
        })
    }

    /// Binds parameters, splits the problem, and computes the call.
    fn with<T: Element>(
        &self,
        [q, k, v]: [&[T]; 3],
        (scale, params): (f32, &[Param<'_>]),
        cut: Cut<'_>,
        compute: impl FnOnce(&Call<'_, T>, Option<&[f32]>, Option<&Documents>),
    ) -> Result<Report, Error> {
        let started = Instant::now();
        let problem = &self.problem;
        let values = problem.bind(params)?;
        let documents = Documents::new(problem, problem.params(), &values)?;
        let pages = Pages::new(problem, problem.params(), &values)?;
        let lengths = Lengths::new(problem, problem.params(), &values, documents.as_ref());
        let rules = self.rules.bind(problem, self.isa, problem.params(), &values);
        let threads = rayon::current_num_threads();
        let (schedule, known) = match cut {
            Cut::Pieces => (Schedule::new(problem, self.isa, threads, lengths, !self.rules.is_empty()), None),
            Cut::Whole(known) => {
                let mut schedule = Schedule::new(problem, self.isa, 1, lengths, true);
                schedule.threads = threads;
                (schedule, known)
            }
        };
        let workspace = workspace(&schedule, self.isa, &self.rules);
        is_there(workspace)?;
        let of = |side| documents.as_ref().map(|documents| documents.of(side));
        let keys = pages.map_or_else(|| of(Side::Keys).into(), Entries::Paged);
        let call = Call {
            schedule: &schedule,
            isa: self.isa,
            q: View::new(q, problem.q(), of(Side::Queries)),
            k: View::new(k, problem.k(), keys),
            v: View::new(v, problem.v(), keys),
            scale,
            rules: &rules,
            known,
        };
        compute(&call, problem.sinks(problem.params(), &values), documents.as_ref());
        Ok(report(started, self.isa, schedule.threads, workspace))
    }
}

/// Returns the bytes of scratch memory of a forward pass.
fn workspace(schedule: &Schedule, isa: Isa, rules: &Rules) -> usize {
    let parts = schedule.strips.iter().filter(|strip| strip.n_pieces > 1);
    let partials: usize = parts.map(|strip| strip.n_pieces * Partial::bytes(strip.rows.len(), schedule.extents.dim_v)).sum();
    schedule.threads.min(schedule.pieces.len()) * of_worker(schedule, isa, rules, Long::bytes) + partials
}

/// Returns the maximum of these bytes for any lengths of packed sequences. The schedule is that of the longest ones.
fn most_workspace(schedule: &Schedule, isa: Isa, rules: &Rules) -> usize {
    let partial = Partial::bytes(schedule.strip_rows_used(), schedule.extents.dim_v);
    schedule.threads * of_worker(schedule, isa, rules, Long::most_bytes) + schedule.most_parts() * partial
}

/// Returns the bytes of scratch memory of one worker. `long` returns those of its f64 sums for a number of elements and rows.
fn of_worker(schedule: &Schedule, isa: Isa, rules: &Rules, long: fn(&Schedule, usize, usize) -> usize) -> usize {
    let lens = scratch_lens(schedule, isa);
    let kept = 4 * kept_len(schedule, rules.drop());
    Scratch::bytes(&lens, 2 * lens[2]) + rules.bytes() + kept + long(schedule, lens[0].max(lens[1]), lens[2])
}

fn scratch_lens(schedule: &Schedule, isa: Isa) -> Vec<usize> {
    if schedule.blocks.few_rows { few::scratch_lens(schedule, isa).to_vec() } else { tiles::scratch_lens(schedule, isa).to_vec() }
}

/// Returns the number of elements of a mask that a worker holds: those of a tile and a block.
fn kept_len(schedule: &Schedule, drop: bool) -> usize {
    if drop { schedule.blocks.block_keys * schedule.blocks.tile_rows } else { 0 }
}

/// Returns an error if the memory is not available, because a failed allocation would abort the process.
fn is_there(bytes: usize) -> Result<(), Error> {
    let mut memory: Vec<u8> = Vec::new();
    memory.try_reserve_exact(bytes).map_err(|_| {
        let (field, value, limit) = ("workspace".to_owned(), format!("{bytes} bytes"), "at most the available memory".to_owned());
        Error::Unsupported(Unsupported::new(ExecutorName::CPU, vec![Reason::Limit { field, value, limit }]))
    })
}

/// The error for operands of different types. Validation of the call has excluded them.
fn wrong_types() -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new("operands", "several types", "the problem's type for all")]))
}

fn report(started: Instant, isa: Isa, threads: usize, workspace: usize) -> Report {
    let engine = format!("cpu {}, {threads} thread{}", isa.name(), if threads == 1 { "" } else { "s" });
    Report::new(engine, started.elapsed()).with_workspace_bytes(workspace as u64)
}

impl<T: Element> Call<'_, T> {
    /// Computes all pieces.
    fn run(&self, targets: Vec<output::Target<'_, T>>) {
        let schedule = self.schedule;
        let dim_v = schedule.extents.dim_v;
        let mut partials: Vec<Partial> = schedule
            .strips
            .iter()
            .filter(|strip| strip.n_pieces > 1)
            .flat_map(|strip| (0..strip.n_pieces).map(|_| Partial::new(strip.rows.len(), dim_v)))
            .collect();

        let mut pieces = schedule.pieces.iter();
        let mut spare = partials.iter_mut();
        let mut work = Vec::with_capacity(schedule.pieces.len());
        let mut split = Vec::new();
        for (strip, target) in schedule.strips.iter().zip(targets) {
            let pieces = pieces.by_ref().take(strip.n_pieces);
            if strip.n_pieces == 1 {
                work.extend(pieces.zip([Sink::Target(target)]));
            } else {
                work.extend(pieces.zip(spare.by_ref().map(Sink::Partial)));
                split.push((target, strip.n_pieces));
            }
        }
        work.sort_by_key(|(piece, _)| std::cmp::Reverse(piece.pairs));

        let few_rows = schedule.blocks.few_rows;
        let lens = scratch_lens(schedule, self.isa);
        let (n_bounds, n_kept) = (2 * lens[2], kept_len(schedule, self.rules.drop()));
        let workers = schedule.threads.min(work.len());
        schedule::share(
            workers,
            work.into_iter(),
            || (Scratch::new(&lens, n_bounds), self.rules.worker(), vec![0; n_kept]),
            |(scratch, rules, kept), (piece, sink)| {
                if few_rows { few::run(self, scratch, piece, sink) } else { tiles::run(self, scratch, (rules, kept), piece, sink) }
            },
        );

        let mut rest = partials.as_mut_slice();
        let merges: Vec<_> = split
            .into_iter()
            .map(|(target, n)| {
                let (parts, tail) = std::mem::take(&mut rest).split_at_mut(n);
                rest = tail;
                (target, parts)
            })
            .collect();
        schedule::share(schedule.threads.min(merges.len()), merges.into_iter(), || (), |(), (target, parts)| output::merge(parts, target));
    }
}
