//! The forward pass: a prepared problem, and one call of it.

use crate::element::Element;
use crate::isa::Isa;
use crate::output::{self, Partial, Sink};
use crate::pack::{Entries, Scratch, View};
use crate::program::{Lengths, Rules, RulesOf};
use crate::schedule::{self, Schedule};
use crate::workspace::{is_there, kept_len, scratch_lens, workspace};
use crate::{decode, fp8, tiles};
use sdpa_core::error::{Error, SpecError, SpecErrors};
use sdpa_core::executor::{Prepared, Report};
use sdpa_core::operand::Side;
use sdpa_core::packed::Documents;
use sdpa_core::paged::Pages;
use sdpa_core::problem::Problem;
use sdpa_core::{ElementsMut, HostForward, Param};
use std::time::Instant;

/// A prepared forward pass: the problem and the instruction set. Each call makes a schedule for its number of threads.
#[derive(Debug)]
pub(crate) struct CpuPrepared {
    pub(crate) isa: Isa,
    pub(crate) problem: Problem,
    pub(crate) rules: Rules,
}

impl Prepared for CpuPrepared {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error> {
        let scale = call.check(&self.problem)?;
        if self.problem.dtype().is_fp8() {
            return self.run_narrow(call, scale);
        }
        let HostForward { q, k, v, o, stats, row_max, sum_exp, attn_scale: _, params, .. } = call;
        // List the statistics in the order of `Statistic::ALL`.
        let statistics = [stats, row_max, sum_exp];
        match o {
            ElementsMut::F32(o) => self.run([f32::of(q), f32::of(k), f32::of(v)], o, statistics, scale, params),
            ElementsMut::F16(o) => self.run([Element::of(q), Element::of(k), Element::of(v)], o, statistics, scale, params),
            ElementsMut::BF16(o) => self.run([Element::of(q), Element::of(k), Element::of(v)], o, statistics, scale, params),
            ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => Err(wrong_types()),
        }
    }
}

/// The data of a call that all pieces of its work read.
#[derive(Debug)]
pub(crate) struct Call<'a, T> {
    pub(crate) schedule: &'a Schedule,
    pub(crate) isa: Isa,
    pub(crate) q: View<'a, T>,
    pub(crate) k: View<'a, T>,
    pub(crate) v: View<'a, T>,
    /// The attention scale, which multiplies queries.
    pub(crate) scale: f32,
    pub(crate) rules: &'a RulesOf<'a>,
    pub(crate) known: Option<&'a Known<'a>>,
}

/// The softmax statistics of each row from an earlier pass. With them, each P belongs to the complete softmax and can be rounded on its
/// own.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    /// The largest score of each row.
    pub(crate) max: View<'a, f32>,
    /// The natural logarithm of the sum of exponentials of each row, relative to `max`.
    pub(crate) log: &'a [f32],
    /// Rounds P to 8 bits.
    pub(crate) weights: &'a fp8::Rounder,
}

/// The division of a call's work: a strip is some rows of one KV head, and a piece is a strip with some or all of its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut<'a> {
    /// Strips are divided into as many pieces as keep threads busy.
    Pieces,
    /// Each strip is one piece. The field has softmax statistics from an earlier pass, if there are any.
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

    /// Runs a call: binds its parameters, divides its work by `cut`, and passes the result to `compute`, with the sinks and the packed
    /// sequences.
    pub(crate) fn with<T: Element>(
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

/// Returns the error for operands of different element types, which the validation of a call excludes.
pub(crate) fn wrong_types() -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new("operands", "several types", "the problem's type for all")]))
}

pub(crate) fn report(started: Instant, isa: Isa, threads: usize, workspace: usize) -> Report {
    let engine = format!("cpu {}, {threads} thread{}", isa.name(), if threads == 1 { "" } else { "s" });
    Report::new(engine, started.elapsed()).with_workspace_bytes(workspace as u64)
}

impl<T: Element> Call<'_, T> {
    /// Computes all pieces of the call, and writes the results of each strip to its target.
    pub(crate) fn run(&self, targets: Vec<output::Target<'_, T>>) {
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
                if few_rows { decode::run(self, scratch, piece, sink) } else { tiles::run(self, scratch, (rules, kept), piece, sink) }
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
