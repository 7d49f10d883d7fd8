//! Destinations of results: disjoint rows of the output and stats for each piece.

use super::element::Element;
use super::schedule::Schedule;
use sdpa_core::operand::Side;
use sdpa_core::packed::Documents;
use sdpa_core::problem::Problem;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{Statistic, StatsBase};
use std::f64::consts::LOG2_E;
use std::ops::Range;

/// Rows of one head that are consecutive in memory, without rows of another strip between them.
#[derive(Debug)]
struct Run<'a, T> {
    /// Index of the first row in its strip, and the step to the next.
    place: usize,
    step: usize,
    /// Distance between rows, and the length of a row.
    stride: usize,
    width: usize,
    elements: &'a mut [T],
}

impl<'a, T> Run<'a, T> {
    fn rows(self) -> impl Iterator<Item = (usize, &'a mut [T])> {
        let Run { place, step, stride, width, elements } = self;
        elements.chunks_mut(stride).enumerate().map(move |(i, row)| (place + i * step, &mut row[..width]))
    }
}

/// The rows of a strip in the memory of an output.
#[derive(Debug)]
pub(super) struct Rows<'a, T>(Vec<Run<'a, T>>);

impl<'a, T> Rows<'a, T> {
    /// Iterates over the rows, each with its index in the strip.
    pub(super) fn each(self) -> impl Iterator<Item = (usize, &'a mut [T])> {
        self.0.into_iter().flat_map(Run::rows)
    }
}

impl<T: Element> Rows<'_, T> {
    /// Writes zeros to every row.
    pub(super) fn clear(&mut self) {
        for Run { stride, width, elements, .. } in &mut self.0 {
            let zeros = vec![0.0; *width];
            elements.chunks_mut(*stride).for_each(|row| T::narrow(&zeros, 0.0, &mut row[..*width]));
        }
    }

    /// Writes every row: `factor` times the elements of `from`, with one row every `stride`.
    pub(super) fn write(self, from: &[f32], stride: usize, factor: f32) {
        for (place, row) in self.each() {
            T::narrow(&from[place * stride..][..row.len()], factor, row);
        }
    }
}

/// The destination of the results of a strip: rows of the output and of row statistics.
#[derive(Debug)]
pub(super) struct Target<'a, T> {
    o: Rows<'a, T>,
    /// Indexed by [`Statistic`]; empty for statistics that are not requested.
    statistics: [Rows<'a, f32>; Statistic::ALL.len()],
    base: StatsBase,
    /// Log-sum-exps in two parts, maximum and logarithm; empty if not requested.
    norms: Rows<'a, [f32; 2]>,
    sinks: Option<Sinks<'a>>,
}

/// Memory of the row statistics, indexed by [`Statistic`].
pub(super) type Statistics<'a> = [Option<&'a mut [f32]>; Statistic::ALL.len()];

fn unwanted<'a>() -> [Rows<'a, f32>; Statistic::ALL.len()] {
    [const { Rows(Vec::new()) }; Statistic::ALL.len()]
}

/// The attention sinks of the rows of a strip.
#[derive(Clone, Copy, Debug)]
struct Sinks<'a> {
    /// One per head of the GQA group.
    of_group: &'a [f32],
    /// The first row of the strip, numbered as rows of a group.
    first: usize,
}

impl Sinks<'_> {
    fn of(&self, place: usize) -> f32 {
        self.of_group[(self.first + place) % self.of_group.len()]
    }
}

/// Sums over a part of a strip's keys, stored until the other parts are complete; see [`Sums`].
#[derive(Debug)]
pub(super) struct Partial {
    max: Vec<f32>,
    sum: Vec<f32>,
    o: Vec<f32>,
    dim_v: usize,
}

impl Partial {
    pub(super) fn new(n_rows: usize, dim_v: usize) -> Partial {
        Partial { max: vec![f32::NEG_INFINITY; n_rows], sum: vec![0.0; n_rows], o: vec![0.0; n_rows * dim_v], dim_v }
    }

    /// Returns the bytes that [`Partial::new`] allocates.
    pub(super) fn bytes(n_rows: usize, dim_v: usize) -> usize {
        4 * n_rows * (2 + dim_v)
    }
}

/// Returns one target per strip of the schedule.
pub(super) fn targets<'a, T>(
    schedule: &Schedule,
    (problem, documents): (&Problem, Option<&Documents>),
    sinks: Option<&'a [f32]>,
    o: &'a mut [T],
    statistics: Statistics<'a>,
) -> Vec<Target<'a, T>> {
    let (group, strip_rows) = (schedule.extents.group, schedule.blocks.strip_rows);
    let tokens = documents.map(|documents| documents.of(Side::Queries));
    let o = strips((problem.o(), tokens), group, strip_rows, o);
    let sinks = sinks_of_strips(schedule, sinks);
    let target = |(o, sinks)| Target { o, statistics: unwanted(), base: problem.stats_base(), norms: Rows(Vec::new()), sinks };
    let mut targets: Vec<Target<'a, T>> = o.into_iter().zip(sinks).map(target).collect();
    tell(&mut targets, (problem, tokens), [group, strip_rows], statistics);
    targets
}

/// Adds row statistics to targets.
fn tell<'a, T>(
    targets: &mut [Target<'a, T>],
    (problem, tokens): (&Problem, Option<&[Range<usize>]>),
    [group, strip_rows]: [usize; 2],
    statistics: Statistics<'a>,
) {
    for (which, memory) in statistics.into_iter().enumerate() {
        let Some(memory) = memory else { continue };
        for (target, rows) in targets.iter_mut().zip(strips((&problem.stats_tensor(), tokens), group, strip_rows, memory)) {
            target.statistics[which] = rows;
        }
    }
}

/// Returns one target per strip for statistics without the output, with two-part log-sum-exps.
pub(super) fn told<'a, T>(
    schedule: &Schedule,
    (problem, documents): (&Problem, Option<&Documents>),
    sinks: Option<&'a [f32]>,
    statistics: Statistics<'a>,
    parts: &'a mut [[f32; 2]],
) -> Vec<Target<'a, T>> {
    let mut targets = norms(schedule, (problem, documents), sinks, parts);
    let tokens = documents.map(|documents| documents.of(Side::Queries));
    tell(&mut targets, (problem, tokens), [schedule.extents.group, schedule.blocks.strip_rows], statistics);
    targets
}

/// Returns one target per strip for two-part log-sum-exps only.
pub(super) fn norms<'a, T>(
    schedule: &Schedule,
    (problem, documents): (&Problem, Option<&Documents>),
    sinks: Option<&'a [f32]>,
    norms: &'a mut [[f32; 2]],
) -> Vec<Target<'a, T>> {
    let tokens = documents.map(|documents| documents.of(Side::Queries));
    let norms = strips((&problem.stats_tensor(), tokens), schedule.extents.group, schedule.blocks.strip_rows, norms);
    let sinks = sinks_of_strips(schedule, sinks);
    norms
        .into_iter()
        .zip(sinks)
        .map(|(norms, sinks)| Target { o: Rows(Vec::new()), statistics: unwanted(), base: problem.stats_base(), norms, sinks })
        .collect()
}

/// Returns the sinks of each strip of the schedule.
fn sinks_of_strips<'a>(schedule: &Schedule, sinks: Option<&'a [f32]>) -> impl Iterator<Item = Option<Sinks<'a>>> {
    let group = schedule.extents.group;
    schedule
        .strips
        .iter()
        .map(move |strip| sinks.map(|sinks| Sinks { of_group: &sinks[strip.head_kv * group..][..group], first: strip.rows.start }))
}

/// Returns the axes (batch, head, seq) in memory order, outermost first.
fn axes(spec: &TensorSpec, packed: bool) -> [usize; 3] {
    let [_, heads, ..] = spec.dims;
    let [_, head, token, _] = spec.strides;
    if packed {
        return if heads == 1 || head > token { [1, 0, 2] } else { [0, 2, 1] };
    }
    let mut axes = [0, 1, 2];
    // Sort axes by stride, the largest first: validation ensures that an axis spans all axes with smaller strides. Axes of extent 1 may
    // have any stride.
    axes.sort_by_key(|&axis| std::cmp::Reverse(if spec.dims[axis] == 1 { i64::MAX } else { spec.strides[axis] }));
    axes
}

/// Splits a tensor into strips, numbered by batch entry, by `group` of heads, and by `strip_rows` of the rows of a group. Rows of a group are numbered as in
/// [`Extents`](super::schedule::Extents). In a packed batch, tokens outside of the sequences belong to no strip.
pub(super) fn strips<'a, T>(
    (spec, documents): (&TensorSpec, Option<&[Range<usize>]>),
    group: usize,
    strip_rows: usize,
    mut rest: &'a mut [T],
) -> Vec<Rows<'a, T>> {
    let dims = spec.dims.map(|n| n as usize);
    let groups = dims[1] / group;
    let seq = |batch: usize| documents.map_or(dims[2], |documents| documents[batch].len());
    let mut n_strips = 0;
    // For each batch entry: its first strip, and the number of strips per group.
    let entries: Vec<[usize; 2]> = (0..dims[0])
        .map(|batch| {
            let (first, per_group) = (n_strips, (seq(batch) * group).div_ceil(strip_rows));
            n_strips += groups * per_group;
            [first, per_group]
        })
        .collect();
    let mut strips: Vec<Rows<'a, T>> = (0..n_strips).map(|_| Rows(Vec::new())).collect();
    let strides = spec.strides.map(|n| n as usize);
    let axes = axes(spec, documents.is_some());
    // In packed order the batch axis comes before the token axis, so a sequence's length is known when its tokens are visited.
    let extent = |axis: usize, index: [usize; 3]| if axis == 2 { seq(index[0]) } else { dims[axis] };
    let mut index = [0; 3];
    let mut taken = 0;
    for a in 0..extent(axes[0], index) {
        index[axes[0]] = a;
        for b in 0..extent(axes[1], index) {
            index[axes[1]] = b;
            let mut c = 0;
            while c < extent(axes[2], index) {
                index[axes[2]] = c;
                let [batch, head, query] = index;
                let row = query * group + head % group;
                let strip = row / strip_rows;
                let n_rows = if axes[2] == 2 {
                    let past = ((strip + 1) * strip_rows - head % group).div_ceil(group);
                    past.min(seq(batch)) - query
                } else {
                    1
                };
                let entry = documents.map_or(batch * strides[0], |documents| documents[batch].start * strides[2]);
                let offset = entry + head * strides[1] + query * strides[2];
                let len = (n_rows - 1) * strides[2] + dims[3];
                let (_gap, tail) = std::mem::take(&mut rest).split_at_mut(offset - taken);
                let (elements, tail) = tail.split_at_mut(len);
                rest = tail;
                taken = offset + len;
                c += n_rows;
                let run = Run { place: row % strip_rows, step: group, stride: strides[2].max(dims[3]), width: dims[3], elements };
                let [first, per_group] = entries[batch];
                strips[first + head / group * per_group + strip].0.push(run);
            }
        }
    }
    strips
}

/// The result of a strip: sums of its rows over some or all of their keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums<'a> {
    /// Largest score of each row.
    pub(super) max: &'a [f32],
    /// Sum of exponentials, relative to the maximum.
    pub(super) sum: &'a [f32],
    /// Values times exponentials, with one row every `stride`.
    pub(super) o: &'a [f32],
    pub(super) stride: usize,
}

/// The softmax denominator of a row.
#[derive(Clone, Copy, Debug)]
struct Denominator {
    /// Largest score.
    max: f32,
    /// Logarithm of the sum of exponentials, relative to the maximum.
    log: f64,
    /// Factor of the unnormalised output.
    factor: f32,
    /// Sum of exponentials, relative to the largest score.
    sum: f32,
}

impl Denominator {
    fn new(max: f32, sum: f32, sink: Option<f32>) -> Denominator {
        // A NaN sum is not equal to 0, so NaN propagates.
        let factor = if sum == 0.0 { 0.0 } else { sum.recip() };
        let without = Denominator { max, log: f64::from(sum).ln(), factor, sum };
        let Some(sink) = sink.filter(|&sink| sink != f32::NEG_INFINITY) else { return without };
        let largest = if max.is_nan() { max } else { max.max(sink) };
        let [keys, own] = [max, sink].map(|score| (f64::from(score) - f64::from(largest)).exp());
        let all = f64::from(sum) * keys + own;
        Denominator { max: largest, log: all.ln(), factor: (keys / all) as f32, sum: all as f32 }
    }

    fn statistic(&self, statistic: Statistic, base: StatsBase) -> f32 {
        match statistic {
            Statistic::Stats => {
                let natural = f64::from(self.max) + self.log;
                match base {
                    StatsBase::Natural => natural as f32,
                    StatsBase::Two => (natural * LOG2_E) as f32,
                }
            }
            // The maximum ignores NaN scores, but they make the sum NaN, so test the sum.
            Statistic::RowMax if self.sum.is_nan() => f32::NAN,
            Statistic::RowMax => self.max,
            Statistic::SumExp => self.sum,
        }
    }
}

impl<T: Element> Target<'_, T> {
    /// Normalises the sums of every row of the strip and writes the results.
    pub(super) fn write(self, sums: Sums<'_>) {
        let Target { o, statistics, base, norms, sinks } = self;
        let of = |place: usize| Denominator::new(sums.max[place], sums.sum[place], sinks.map(|sinks| sinks.of(place)));
        for (place, row) in o.each() {
            T::narrow(&sums.o[place * sums.stride..][..row.len()], of(place).factor, row);
        }
        for (statistic, rows) in Statistic::ALL.into_iter().zip(statistics) {
            rows.each().for_each(|(place, row)| row.fill(of(place).statistic(statistic, base)));
        }
        for (place, norm) in norms.each() {
            let Denominator { max, log, .. } = of(place);
            norm.fill([max, log as f32]);
        }
    }
}

/// The destination of the sums that a piece computes: the results, or memory for a later merge.
#[derive(Debug)]
pub(super) enum Sink<'a, T> {
    /// The piece has all keys of its strip.
    Target(Target<'a, T>),
    /// Other pieces have the remaining keys.
    Partial(&'a mut Partial),
}

impl<T: Element> Sink<'_, T> {
    /// Stores the sums of every row of the piece.
    pub(super) fn take(self, sums: Sums<'_>) {
        match self {
            Sink::Target(target) => target.write(sums),
            Sink::Partial(Partial { max, sum, o, dim_v }) => {
                let n_rows = max.len();
                max.copy_from_slice(&sums.max[..n_rows]);
                sum.copy_from_slice(&sums.sum[..n_rows]);
                for (to, from) in o.chunks_exact_mut(*dim_v).zip(sums.o.chunks(sums.stride)) {
                    to.copy_from_slice(&from[..*dim_v]);
                }
            }
        }
    }
}

/// Merges the `partials` of a strip's pieces and writes the strip. The contents of `partials` are overwritten.
pub(super) fn merge<T: Element>(partials: &mut [Partial], target: Target<'_, T>) {
    let Some((first, rest)) = partials.split_first_mut() else { return };
    for place in 0..first.max.len() {
        let max = rest.iter().fold(first.max[place], |max, p| max.max(p.max[place]));
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        // `f32::max` ignores the NaN maximum of a piece, but the weight of that piece is then NaN, so NaN still reaches the output.
        let weight = (first.max[place] - shift).exp();
        let dim_v = first.dim_v;
        let o = &mut first.o[place * dim_v..][..dim_v];
        o.iter_mut().for_each(|x| *x *= weight);
        first.sum[place] *= weight;
        first.max[place] = max;
        for other in rest.iter() {
            let weight = (other.max[place] - shift).exp();
            first.sum[place] += weight * other.sum[place];
            for (x, o) in o.iter_mut().zip(&other.o[place * dim_v..]) {
                *x += weight * o;
            }
        }
    }
    target.write(Sums { max: &first.max, sum: &first.sum, o: &first.o, stride: first.dim_v });
}
