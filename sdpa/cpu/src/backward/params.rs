//! Gradients of declared parameters: sums in f64 over all pairs that read an element.
//!
//! A cell computes partial sums. They are added to those of the problem in the order of the cells, independent of which cell finishes first.

use crate::isa::Isa;
use crate::program::{CHUNK, strides};
use half::{bf16, f16};
use parking_lot::{Mutex, MutexGuard};
use pulp::{Simd, WithSimd};
use sdpa_core::expr::ParamKind;
use sdpa_core::tensor::ElementsMut;
use sdpa_core::{F8E4M3, F8E5M2};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Number of sums in a cache line.
const LINE: usize = 8;

/// The location of a cell: rows of a KV head against keys of it.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) batch: usize,
    pub(super) head_kv: usize,
    pub(super) group: usize,
    pub(super) rows: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Span {
    /// Returns the first query.
    fn query(&self) -> usize {
        self.rows.start / self.group
    }

    /// Returns the number of (heads, queries, keys).
    fn extents(&self) -> [usize; 3] {
        [self.group, self.rows.end.div_ceil(self.group) - self.query(), self.keys.len()]
    }
}

/// The contribution of one cell to the gradient of a parameter.
#[derive(Debug)]
pub(super) struct Part {
    span: Span,
    /// Strides of the sums along (head, query, key); 0 along axes that share a sum.
    strides: [usize; 3],
    /// For a table, whose sums cover all of its elements, the program's roots that hold a gradient and its index. Empty for other parameters.
    reads: Arc<[[usize; 2]]>,
    sums: Vec<f64>,
}

impl Part {
    /// Returns the program's roots that hold a gradient and its index, for a table.
    pub(super) fn reads(&self) -> Arc<[[usize; 2]]> {
        self.reads.clone()
    }

    /// Adds gradients, `[key][row]`, of `n_rows` rows in `width` lanes to the table elements at `places`. For other parameters see [`Part::add`].
    pub(super) fn add_read(&mut self, [n_rows, width]: [usize; 2], places: &[u32], values: &[u32], dropped: &[u32]) {
        let last = self.sums.len() - 1;
        let values = Values { values, dropped, width };
        for (row, places) in places.chunks_exact(width).enumerate().take(dropped.len() / width) {
            for (lane, place) in places[..n_rows].iter().enumerate() {
                let at = (*place as i32).max(0).unsigned_abs() as usize;
                self.sums[at.min(last)] += values.get(row * width + lane);
            }
        }
    }

    /// Adds gradients, `[key][row]`, of some keys and the rows of a tile: `n_rows` rows from `first` on, in `width` lanes.
    pub(super) fn add(
        &mut self,
        isa: Isa,
        (first, n_rows, width): (usize, usize, usize),
        keys: &Range<usize>,
        values: &[u32],
        dropped: &[u32],
    ) {
        let [of_head, of_query, of_key] = self.strides;
        let place = |lane: usize| {
            let row = first + lane;
            row % self.span.group * of_head + (row / self.span.group - self.span.query()) * of_query
        };
        let from = (keys.start - self.span.keys.start) * of_key;
        let values = Values { values, dropped, width };
        if of_key == 0 {
            let mut sums = [0.0; CHUNK];
            isa.run(OverKeys { values, sums: &mut sums[..width] });
            for (lane, sum) in sums[..n_rows].iter().enumerate() {
                self.sums[place(lane)] += sum;
            }
        } else if of_head == 0 && of_query == 0 {
            isa.run(OverRows { values, n_rows, sums: &mut self.sums[from..][..keys.len()] });
        } else {
            let mut places = [0; CHUNK];
            places[..n_rows].iter_mut().enumerate().for_each(|(lane, to)| *to = place(lane) + from);
            isa.run(EachPair { values, places: &places[..n_rows], n_keys: keys.len(), sums: &mut self.sums });
        }
    }
}

/// Gradients, `[key][row]`.
#[derive(Clone, Copy, Debug)]
struct Values<'a> {
    values: &'a [u32],
    /// Nonzero for pairs that are masked out; their gradient counts as 0.
    dropped: &'a [u32],
    width: usize,
}

impl Values<'_> {
    #[inline(always)]
    fn get(&self, at: usize) -> f64 {
        if self.dropped[at] != 0 { 0.0 } else { f32::from_bits(self.values[at]).into() }
    }

    #[inline(always)]
    fn keys(&self) -> impl Iterator<Item = impl Iterator<Item = f64>> {
        self.values.chunks_exact(self.width).zip(self.dropped.chunks_exact(self.width)).map(|(values, dropped)| {
            values.iter().zip(dropped).map(|(x, dropped)| if *dropped != 0 { 0.0 } else { f64::from(f32::from_bits(*x)) })
        })
    }
}

/// Sums the gradients of each row.
#[derive(Debug)]
struct OverKeys<'a> {
    values: Values<'a>,
    sums: &'a mut [f64],
}

impl WithSimd for OverKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for key in self.values.keys() {
            self.sums.iter_mut().zip(key).for_each(|(sum, x)| *sum += x);
        }
    }
}

/// Adds the gradients of each key to its sum.
#[derive(Debug)]
struct OverRows<'a> {
    values: Values<'a>,
    n_rows: usize,
    sums: &'a mut [f64],
}

impl WithSimd for OverRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (sum, key) in self.sums.iter_mut().zip(self.values.keys()) {
            *sum += key.take(self.n_rows).sum::<f64>();
        }
    }
}

/// Adds to `sums[places[row] + key]`.
#[derive(Debug)]
struct EachPair<'a> {
    values: Values<'a>,
    places: &'a [usize],
    n_keys: usize,
    sums: &'a mut [f64],
}

impl WithSimd for EachPair<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let EachPair { values, places, n_keys, sums } = self;
        let at = |key: usize, lane: usize| values.get(key * values.width + lane);
        for first in (0..places.len()).step_by(LINE) {
            for key in (0..n_keys).step_by(LINE) {
                let places = &places[first..(first + LINE).min(places.len())];
                if let (Some(places), true) = (places.first_chunk::<LINE>(), key + LINE <= n_keys) {
                    let square: [[f64; LINE]; LINE] = std::array::from_fn(|j| std::array::from_fn(|lane| at(key + j, first + lane)));
                    for (lane, place) in places.iter().enumerate() {
                        let to = &mut sums[place + key..][..LINE];
                        to.iter_mut().zip(&square).for_each(|(to, row)| *to += row[lane]);
                    }
                } else {
                    for (lane, place) in places.iter().enumerate() {
                        (key..(key + LINE).min(n_keys)).for_each(|key| sums[place + key] += at(key, first + lane));
                    }
                }
            }
        }
    }
}

/// The gradient of a parameter.
#[derive(Debug)]
pub(super) struct Total<'a> {
    /// Strides of the elements along (batch, head, q, k).
    strides: [usize; 4],
    /// Number of elements of a table; 0 for other parameters.
    table: usize,
    reads: Arc<[[usize; 2]]>,
    state: Mutex<State<'a>>,
}

#[derive(Debug)]
struct State<'a> {
    /// `None` while a worker is adding.
    sums: Option<Sums<'a>>,
    /// Number of parts in the sums, and the parts that wait for an earlier one.
    added: usize,
    waiting: BTreeMap<usize, Part>,
    /// Memory of parts that were added, for reuse.
    spare: Vec<Vec<f64>>,
}

#[derive(Debug)]
struct Sums<'a> {
    target: ElementsMut<'a>,
    /// Empty if each element belongs to one pair, which is then written directly.
    sums: Vec<f64>,
}

impl<'a> Total<'a> {
    /// `reads` are the program's roots that hold the gradient of a table and its index.
    pub(super) fn new(kind: ParamKind, reads: Arc<[[usize; 2]]>, extents: [i64; 4], mut target: ElementsMut<'a>) -> Total<'a> {
        let strides = strides(kind, extents);
        let table = if kind.extents().len() > 0 { target.len() } else { 0 };
        let of_one_pair = table == 0 && strides.iter().zip(extents).all(|(&stride, extent)| stride != 0 || extent == 1);
        clear(&mut target);
        let sums = vec![0.0; if of_one_pair { 0 } else { target.len() }];
        let state = State { sums: Some(Sums { target, sums }), added: 0, waiting: BTreeMap::new(), spare: Vec::new() };
        Total { strides, table, reads, state: Mutex::new(state) }
    }

    /// Returns an empty part for a cell to add to.
    pub(super) fn part(&self, span: &Span) -> Part {
        let mut strides = [0; 3];
        let mut next = 1;
        for axis in (0..3).rev().filter(|axis| self.strides[axis + 1] != 0) {
            strides[axis] = next;
            next *= span.extents()[axis];
            if axis == 2 {
                // Pad to an odd number of cache lines: rows a power of two apart would map to few cache sets.
                next = (next.div_ceil(LINE) | 1) * LINE;
            }
        }
        let mut sums = self.state.lock().spare.pop().unwrap_or_default();
        sums.clear();
        sums.resize(next.max(self.table), 0.0);
        Part { span: span.clone(), strides, reads: self.reads.clone(), sums }
    }

    /// Adds the part with index `number`. No worker waits for an earlier part: the worker that adds that part also adds those that follow.
    pub(super) fn add(&self, number: usize, part: Part) {
        let mut state = self.state.lock();
        state.waiting.insert(number, part);
        while let State { waiting, added, sums, .. } = &mut *state
            && sums.is_some()
            && let Some(part) = waiting.remove(added)
            && let Some(mut sums) = sums.take()
        {
            state.added += 1;
            MutexGuard::unlocked(&mut state, || self.merge(&part, &mut sums));
            state.sums = Some(sums);
            state.spare.push(part.sums);
        }
    }

    fn merge(&self, part: &Part, to: &mut Sums<'_>) {
        let Part { span, strides: [of_head, of_query, of_key], sums: from, .. } = part;
        if self.table > 0 {
            to.sums.iter_mut().zip(from).for_each(|(to, x)| *to += x);
            return;
        }
        let [heads, queries, keys] = span.extents();
        let of = |n: usize, stride: usize| if stride == 0 { 1 } else { n };
        let [batch, head, query, key] = self.strides;
        for h in 0..of(heads, *of_head) {
            for q in 0..of(queries, *of_query) {
                let at = span.batch * batch + (span.head_kv * span.group + h) * head + (span.query() + q) * query + span.keys.start * key;
                let n = of(keys, *of_key);
                let from = &from[h * of_head + q * of_query..][..n];
                if to.sums.is_empty() {
                    add(&mut to.target, at, from);
                } else {
                    to.sums[at..][..n].iter_mut().zip(from).for_each(|(to, x)| *to += x);
                }
            }
        }
    }

    /// Returns the bytes of all sums that were allocated.
    pub(super) fn bytes(&self) -> usize {
        let state = self.state.lock();
        let own = state.sums.as_ref().map_or(0, |sums| sums.sums.len());
        8 * (own + state.spare.iter().map(Vec::capacity).sum::<usize>())
    }

    /// Rounds the sums, once.
    pub(super) fn finish(self) {
        if let Some(Sums { mut target, sums }) = self.state.into_inner().sums {
            add(&mut target, 0, &sums);
        }
    }
}

fn clear(to: &mut ElementsMut<'_>) {
    match to {
        ElementsMut::F32(to) => to.fill(0.0),
        ElementsMut::F16(to) => to.fill(f16::ZERO),
        ElementsMut::BF16(to) => to.fill(bf16::ZERO),
        ElementsMut::F8E4M3(to) => to.fill(F8E4M3::default()),
        ElementsMut::F8E5M2(to) => to.fill(F8E5M2::default()),
    }
}

/// Writes sums, each rounded once.
pub(super) fn store(to: &mut ElementsMut<'_>, sums: &[f64]) {
    clear(to);
    add(to, 0, sums);
}

/// Adds to elements from index `at` on. Each element is 0 before or gets 0 added, so it is rounded once.
fn add(to: &mut ElementsMut<'_>, at: usize, from: &[f64]) {
    match to {
        ElementsMut::F32(to) => to[at..].iter_mut().zip(from).for_each(|(to, x)| *to += *x as f32),
        ElementsMut::F16(to) => to[at..].iter_mut().zip(from).for_each(|(to, x)| *to += f16::from_f32(to_odd(*x))),
        ElementsMut::BF16(to) => to[at..].iter_mut().zip(from).for_each(|(to, x)| *to += bf16::from_f32(to_odd(*x))),
        // No problem has parameter gradients in 8-bit types, so these arms do not run.
        ElementsMut::F8E4M3(to) => to[at..].iter_mut().zip(from).for_each(|(to, x)| *to = F8E4M3::from_f32(to.to_f32() + to_odd(*x))),
        ElementsMut::F8E5M2(to) => to[at..].iter_mut().zip(from).for_each(|(to, x)| *to = F8E5M2::from_f32(to.to_f32() + to_odd(*x))),
    }
}

/// Rounds to f32 toward zero and sets the last bit if that is inexact (round to odd). A second rounding to fewer bits then equals a single one.
fn to_odd(x: f64) -> f32 {
    let y = x as f32;
    if f64::from(y) == x || !y.is_finite() {
        return y;
    }
    let below = if f64::from(y).abs() > x.abs() { y.to_bits() - 1 } else { y.to_bits() };
    f32::from_bits(below | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_rounded_once() {
        // x is a tie in f16 except for a bit below f32 precision, which decides the rounding.
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        for sign in [1.0, -1.0] {
            assert_eq!(f16::from_f32(to_odd(sign * x)).to_f64(), sign * (1.0 + 2f64.powi(-10)));
            assert_eq!(f16::from_f32(to_odd(sign * (x - 2f64.powi(-39)))).to_f64(), sign);
            assert_eq!(to_odd(sign * 0.5), sign as f32 * 0.5);
        }
        assert!(to_odd(f64::NAN).is_nan());
        assert_eq!(to_odd(1e300), f32::INFINITY);
    }

    #[test]
    fn parts_are_added_in_their_order_whoever_is_first() {
        let parts = [1.0, 1e17, -1e17, 3.0];
        let want = parts.iter().sum::<f64>();
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
            let mut sum = [0.0];
            let total = Total::new(ParamKind::Scalar, [].into(), [1, 1, 8, 8], ElementsMut::F32(&mut sum));
            for number in order {
                let mut part = total.part(&Span { batch: 0, head_kv: 0, group: 1, rows: 0..8, keys: 0..8 });
                part.sums[0] = parts[number];
                total.add(number, part);
            }
            total.finish();
            assert_eq!(f64::from(sum[0]), want);
        }
    }
}
