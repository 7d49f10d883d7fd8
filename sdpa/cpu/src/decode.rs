//! Few rows, as in decoding: the lanes of a register are elements of one key or value, and memory is read once, in order.

use super::element::Element;
use super::isa::{Isa, mul_add};
use super::kernel::exp;
use super::long_sums::{Long, Outputs};
use super::output::{Sink, Sums};
use super::pack::{CopyRows, Head, Scratch, overlap, take_out_holes};
use super::schedule::{Piece, Schedule};
use crate::forward::Call;
use pulp::{Simd, WithSimd};

/// Returns the lengths of the scratch slices: queries, output, maxima, sums, keys, values, scores, one row.
pub(super) fn scratch_lens(schedule: &Schedule, isa: Isa) -> [usize; 8] {
    let extents = schedule.extents;
    let rows = schedule.blocks.strip_rows;
    let keys = schedule.blocks.block_keys.next_multiple_of(isa.lanes());
    let dim_qk = extents.dim_qk.next_multiple_of(isa.lanes());
    let dim_v = extents.dim_v.next_multiple_of(isa.lanes());
    [rows * dim_qk, rows * dim_v, rows, rows, keys * dim_qk, keys * dim_v, rows * keys, dim_v]
}

/// Computes one piece of the work (few rows against some keys) and stores the result in `sink`.
pub(super) fn run<T: Element>(call: &Call<'_, T>, scratch: &mut Scratch, piece: &Piece, sink: Sink<'_, T>) {
    let Call { schedule, isa, q: queries, k: keys_view, v: values_view, scale, .. } = call;
    let strip = &schedule.strips[piece.strip];
    let extents = &schedule.extents_of(strip.batch);
    let (batch, head) = (strip.batch, strip.head_kv);
    let dim_qk = extents.dim_qk.next_multiple_of(isa.lanes());
    let dim_v = extents.dim_v.next_multiple_of(isa.lanes());
    let n_rows = strip.rows.len();
    let ([q, o, max, sum, k, v, scores, buffer], bounds, holes) = scratch.split(scratch_lens(schedule, *isa));
    let (start, end) = bounds.split_at_mut(n_rows);
    let (q, o) = (&mut q[..n_rows * dim_qk], &mut o[..n_rows * dim_v]);
    let (max, sum) = (&mut max[..n_rows], &mut sum[..n_rows]);

    q.fill(0.0);
    for (row, q) in strip.rows.clone().zip(q.chunks_exact_mut(dim_qk)) {
        let q = &mut q[..extents.dim_qk];
        T::widen(queries.row(batch, head * extents.group + row % extents.group, row / extents.group), q);
        q.iter_mut().for_each(|x| *x *= scale);
    }
    o.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);

    let mut long = Long::of(piece, &schedule.blocks, n_rows, o.len());
    let keys_of_head = Head { batch, head_kv: head, group: 1 };
    let kept_by_all = extents.keys_of_all(&strip.rows);
    for first_key in piece.keys.clone().step_by(schedule.blocks.block_keys) {
        let keys = first_key..(first_key + schedule.blocks.block_keys).min(piece.keys.end);
        for (row, (start, end)) in strip.rows.clone().zip(start.iter_mut().zip(end.iter_mut())) {
            let kept = overlap(&extents.keys_of_row(row), &keys);
            (*start, *end) = ((kept.start - keys.start) as u32, (kept.end - keys.start) as u32);
        }
        let full = overlap(&kept_by_all, &keys) == keys;
        let (k, k_stride) = keys_view.in_place(batch, head, &keys, 0).filter(|_| extents.dim_qk == dim_qk).unwrap_or_else(|| {
            isa.run(CopyRows { from: keys_view, head: keys_of_head, rows: keys.clone(), width: dim_qk, to: &mut *k });
            (&*k, dim_qk)
        });
        holes.clear();
        let (v, v_stride) = values_view.in_place(batch, head, &keys, 0).filter(|_| full && extents.dim_v == dim_v).unwrap_or_else(|| {
            isa.run(CopyRows { from: values_view, head: keys_of_head, rows: keys.clone(), width: dim_v, to: &mut *v });
            take_out_holes(v, dim_v, &keys, &kept_by_all, holes);
            (&*v, dim_v)
        });
        let n_keys = keys.len();
        isa.run(RowStep { n_keys, dim_qk, dim_v, q, k, k_stride, v, v_stride, start, end, scores, max, sum, o });
        for &key in holes.iter() {
            T::widen(values_view.row(batch, head, key), &mut buffer[..extents.dim_v]);
            let at = key - keys.start;
            for (row, o) in o.chunks_exact_mut(dim_v).enumerate() {
                if (start[row]..end[row]).contains(&(at as u32)) {
                    let weight = scores[row * n_keys.next_multiple_of(isa.lanes()) + at];
                    o.iter_mut().zip(&buffer[..extents.dim_v]).for_each(|(o, x)| *o += weight * x);
                }
            }
        }
        if let Some(long) = long.as_mut().filter(|long| long.is_due(keys.end)) {
            long.take(keys.end, max, sum, by_row(o, dim_v));
        }
    }
    if let Some(mut long) = long {
        long.take(piece.keys.end, max, sum, by_row(o, dim_v));
        long.finish(sum, by_row(o, dim_v));
    }
    sink.take(Sums { max, sum, o, stride: dim_v });
}

/// Splits the outputs by row.
fn by_row(o: &mut [f32], dim_v: usize) -> impl Iterator<Item = Outputs<'_>> {
    o.chunks_exact_mut(dim_v).enumerate().map(|(first, o)| Outputs { first, step: 0, o })
}

/// All rows against one block of keys. Rows of `q`, `k`, `v` and `o` are multiples of a register.
#[derive(Debug)]
struct RowStep<'a> {
    n_keys: usize,
    dim_qk: usize,
    dim_v: usize,
    /// Scaled queries, `[row][dim_qk]`.
    q: &'a [f32],
    k: &'a [f32],
    k_stride: usize,
    v: &'a [f32],
    v_stride: usize,
    /// Range of keys of each row, relative to the first of the block.
    start: &'a [u32],
    end: &'a [u32],
    /// Receives P, `[row][key]`, each row padded to a multiple of a register.
    scores: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    o: &'a mut [f32],
}

/// Number of keys that are multiplied at a time.
const KEYS: usize = 4;

impl WithSimd for RowStep<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let n_rows = self.max.len();
        let mut row = 0;
        while row < n_rows {
            row += match n_rows - row {
                4.. => self.scores::<S, 4>(simd, row),
                2.. => self.scores::<S, 2>(simd, row),
                _ => self.scores::<S, 1>(simd, row),
            };
        }
        for row in 0..n_rows {
            self.softmax(simd, row);
        }
        let mut row = 0;
        while row < n_rows {
            row += match n_rows - row {
                2.. => self.values::<S, 2>(simd, row),
                _ => self.values::<S, 1>(simd, row),
            };
        }
    }
}

impl RowStep<'_> {
    fn width<S: Simd>(&self) -> usize {
        self.n_keys.next_multiple_of(S::F32_LANES)
    }

    /// Computes the scores of `ROWS` rows and returns `ROWS`.
    #[inline(always)]
    fn scores<S: Simd, const ROWS: usize>(&mut self, simd: S, row: usize) -> usize {
        let whole = self.n_keys - self.n_keys % KEYS;
        for key in (0..whole).step_by(KEYS) {
            self.score::<S, ROWS, KEYS>(simd, row, key);
        }
        for key in whole..self.n_keys {
            self.score::<S, ROWS, 1>(simd, row, key);
        }
        ROWS
    }

    #[inline(always)]
    fn score<S: Simd, const ROWS: usize, const KEYS: usize>(&mut self, simd: S, row: usize, key: usize) {
        let n = self.dim_qk / S::F32_LANES;
        let q: [&[S::f32s]; ROWS] = std::array::from_fn(|i| &S::as_simd_f32s(&self.q[(row + i) * self.dim_qk..][..self.dim_qk]).0[..n]);
        let k: [&[S::f32s]; KEYS] = std::array::from_fn(|j| &S::as_simd_f32s(&self.k[(key + j) * self.k_stride..][..self.dim_qk]).0[..n]);
        let mut sums = [[simd.splat_f32s(0.0); KEYS]; ROWS];
        for d in 0..n {
            for (j, key) in k.iter().enumerate() {
                let key = key[d];
                for (sums, q) in sums.iter_mut().zip(&q) {
                    sums[j] = mul_add(simd, q[d], key, sums[j]);
                }
            }
        }
        let width = self.width::<S>();
        for (i, sums) in sums.iter().enumerate() {
            let scores = &mut self.scores[(row + i) * width + key..][..KEYS];
            for (score, sum) in scores.iter_mut().zip(sums) {
                *score = simd.reduce_sum_f32s(*sum);
            }
        }
    }

    /// Replaces the scores of a row by P, and updates its maximum and sum.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, simd: S, row: usize) {
        let width = self.width::<S>();
        let scores = &mut self.scores[row * width..][..width];
        scores[..self.start[row] as usize].fill(f32::NEG_INFINITY);
        scores[self.end[row] as usize..].fill(f32::NEG_INFINITY);
        let scores = S::as_mut_simd_f32s(scores).0;
        let mut max = simd.splat_f32s(self.max[row]);
        for score in scores.iter() {
            max = simd.max_f32s(*score, max);
        }
        let new = simd.reduce_max_f32s(max);
        let shift = simd.splat_f32s(if new == f32::NEG_INFINITY { 0.0 } else { new });
        let scale = exp(simd, simd.sub_f32s(simd.splat_f32s(self.max[row]), shift));
        let mut sum = simd.splat_f32s(0.0);
        for score in scores {
            *score = exp(simd, simd.sub_f32s(*score, shift));
            sum = simd.add_f32s(sum, *score);
        }
        let total = mul_add(simd, simd.splat_f32s(self.sum[row]), scale, simd.splat_f32s(simd.reduce_sum_f32s(sum)));
        self.max[row] = new;
        self.sum[row] = first(simd, total);
        for o in S::as_mut_simd_f32s(&mut self.o[row * self.dim_v..][..self.dim_v]).0 {
            *o = simd.mul_f32s(*o, scale);
        }
    }

    /// Adds P times values to `ROWS` rows of the output, and returns `ROWS`.
    #[inline(always)]
    fn values<S: Simd, const ROWS: usize>(&mut self, simd: S, row: usize) -> usize {
        let n = self.dim_v / S::F32_LANES;
        let mut column = 0;
        while column < n {
            column += match n - column {
                8.. if S::REGISTER_COUNT >= 32 => self.value::<S, ROWS, 8>(simd, row, column),
                4.. => self.value::<S, ROWS, 4>(simd, row, column),
                2.. => self.value::<S, ROWS, 2>(simd, row, column),
                _ => self.value::<S, ROWS, 1>(simd, row, column),
            };
        }
        ROWS
    }

    #[inline(always)]
    fn value<S: Simd, const ROWS: usize, const COLUMNS: usize>(&mut self, simd: S, row: usize, column: usize) -> usize {
        let width = self.width::<S>();
        let p: [&[f32]; ROWS] = std::array::from_fn(|i| &self.scores[(row + i) * width..][..self.n_keys]);
        let mut sums = [[simd.splat_f32s(0.0); COLUMNS]; ROWS];
        for key in 0..self.n_keys {
            let v = S::as_simd_f32s(&self.v[key * self.v_stride + column * S::F32_LANES..][..COLUMNS * S::F32_LANES]).0;
            for (sums, p) in sums.iter_mut().zip(p) {
                let p = simd.splat_f32s(p[key]);
                for (sum, v) in sums.iter_mut().zip(v) {
                    *sum = mul_add(simd, p, *v, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let o = &mut self.o[(row + i) * self.dim_v..][..self.dim_v];
            let o = &mut S::as_mut_simd_f32s(o).0[column..][..COLUMNS];
            for (o, sum) in o.iter_mut().zip(sums) {
                *o = simd.add_f32s(*o, *sum);
            }
        }
        COLUMNS
    }
}

/// Returns the first lane.
#[inline(always)]
fn first<S: Simd>(simd: S, x: S::f32s) -> f32 {
    let mut lane = [0.0];
    simd.partial_store_f32s(&mut lane, x);
    lane[0]
}
