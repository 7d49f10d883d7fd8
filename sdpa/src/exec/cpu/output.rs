//! Where results go: rows of the output and stats, handed out so that no two pieces share an element.

use super::element::Element;
use super::schedule::Schedule;
use crate::spec::TensorSpec;
use std::f64::consts::LN_2;

/// What a strip writes to.
#[derive(Debug)]
pub(super) struct Target<'a, T> {
    /// Rows of the output, each with its place in the strip; in no particular order.
    pub(super) rows: Vec<(usize, &'a mut [T])>,
    /// Elements of stats, likewise; empty where none are wanted.
    pub(super) stats: Vec<(usize, &'a mut f32)>,
}

/// Sums over a part of a row's keys. Relative to `max`, in units of log2, as all weights are.
#[derive(Debug)]
pub(super) struct Partial {
    pub(super) max: Vec<f32>,
    pub(super) sum: Vec<f32>,
    /// `[row][dim_v]`, not normalised.
    pub(super) o: Vec<f32>,
}

impl Partial {
    pub(super) fn new(n_rows: usize, dim_v: usize) -> Partial {
        Partial { max: vec![f32::NEG_INFINITY; n_rows], sum: vec![0.0; n_rows], o: vec![0.0; n_rows * dim_v] }
    }

    pub(super) fn bytes(&self) -> usize {
        4 * (self.max.len() + self.sum.len() + self.o.len())
    }
}

/// One target per strip of the schedule.
pub(super) fn targets<'a, T>(schedule: &Schedule, spec: &TensorSpec, o: &'a mut [T], stats: Option<&'a mut [f32]>) -> Vec<Target<'a, T>> {
    let extents = &schedule.extents;
    let strip_rows = schedule.blocks.strip_rows;
    let strips_per_head = (extents.seq_q * extents.group).div_ceil(strip_rows);
    let place = |[batch, head, query]: [usize; 3]| {
        let row = query * extents.group + head % extents.group;
        let strip = (batch * extents.heads_kv + head / extents.group) * strips_per_head + row / strip_rows;
        (strip, row % strip_rows)
    };
    let with_stats = stats.is_some();
    let mut targets: Vec<Target<'a, T>> = schedule
        .strips
        .iter()
        .map(|strip| Target {
            rows: Vec::with_capacity(strip.rows.len()),
            stats: Vec::with_capacity(if with_stats { strip.rows.len() } else { 0 }),
        })
        .collect();
    each_row(spec, o, |index, row| {
        let (strip, place) = place(index);
        targets[strip].rows.push((place, row));
    });
    let n_heads = extents.heads_kv * extents.group;
    for (i, stat) in stats.into_iter().flatten().enumerate() {
        let index = [i / extents.seq_q / n_heads, i / extents.seq_q % n_heads, i % extents.seq_q];
        let (strip, place) = place(index);
        targets[strip].stats.push((place, stat));
    }
    targets
}

/// Calls `visit` with (batch, head, query) and the elements of every row, in the order of memory.
fn each_row<'a, T>(spec: &TensorSpec, mut rest: &'a mut [T], mut visit: impl FnMut([usize; 3], &'a mut [T])) {
    let dims = spec.dims.map(|n| n as usize);
    let strides = spec.strides.map(|n| n as usize);
    let mut axes = [0, 1, 2];
    // Validation has made sure that a longer stride spans all of the shorter ones. Axes of extent 1 may lie anywhere.
    axes.sort_by_key(|&axis| std::cmp::Reverse(if dims[axis] == 1 { usize::MAX } else { strides[axis] }));
    let mut index = [0; 3];
    let mut taken = 0;
    for a in 0..dims[axes[0]] {
        for b in 0..dims[axes[1]] {
            for c in 0..dims[axes[2]] {
                for (axis, at) in axes.into_iter().zip([a, b, c]) {
                    index[axis] = at;
                }
                let offset = index.iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>();
                let (_gap, tail) = std::mem::take(&mut rest).split_at_mut(offset - taken);
                let (row, tail) = tail.split_at_mut(dims[3]);
                visit(index, row);
                rest = tail;
                taken = offset + dims[3];
            }
        }
    }
}

impl<T: Element> Target<'_, T> {
    /// Writes every row. `fetch` puts a row's sums in the buffer, and returns its maximum and sum of weights.
    pub(super) fn write(self, buffer: &mut [f32], mut fetch: impl FnMut(usize, &mut [f32]) -> (f32, f32)) {
        let mut lse = vec![0.0; self.stats.len()];
        for (place, row) in self.rows {
            let (max, sum) = fetch(place, buffer);
            // NaN is not equal to 0, and stays.
            let factor = if sum == 0.0 { 0.0 } else { sum.recip() };
            buffer.iter_mut().for_each(|x| *x *= factor);
            T::narrow(buffer, row);
            if let Some(lse) = lse.get_mut(place) {
                *lse = ((f64::from(max) + f64::from(sum).log2()) * LN_2) as f32;
            }
        }
        for (place, stat) in self.stats {
            *stat = lse[place];
        }
    }
}

/// Where one piece leaves its sums.
#[derive(Debug)]
pub(super) enum Sink<'a, T> {
    /// The piece is the whole of its strip.
    Target(Target<'a, T>),
    /// Other pieces have the rest of the keys.
    Partial(&'a mut Partial),
}

impl<T: Element> Sink<'_, T> {
    /// Takes every row. `fetch` puts a row's sums in a buffer of `dim_v`, and returns its maximum and sum of weights.
    pub(super) fn take(self, buffer: &mut [f32], mut fetch: impl FnMut(usize, &mut [f32]) -> (f32, f32)) {
        match self {
            Sink::Target(target) => target.write(buffer, fetch),
            Sink::Partial(Partial { max, sum, o }) => {
                for (place, (o, (max, sum))) in o.chunks_exact_mut(buffer.len()).zip(max.iter_mut().zip(sum)).enumerate() {
                    (*max, *sum) = fetch(place, o);
                }
            }
        }
    }
}

/// Writes the strip whose pieces left `partials`.
pub(super) fn merge<T: Element>(partials: &[Partial], dim_v: usize, target: Target<'_, T>) {
    target.write(&mut vec![0.0; dim_v], |place, buffer| {
        let max = partials.iter().fold(f32::NEG_INFINITY, |max, p| max.max(p.max[place]));
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let mut sum = 0.0;
        buffer.fill(0.0);
        for partial in partials {
            // A maximum that is NaN, which f32::max passes over, makes its weight NaN.
            let weight = (partial.max[place] - shift).exp2();
            sum += weight * partial.sum[place];
            for (x, o) in buffer.iter_mut().zip(&partial.o[place * dim_v..]) {
                *x += weight * o;
            }
        }
        (max, sum)
    });
}
