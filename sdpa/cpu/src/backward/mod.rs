//! The backward pass: recomputes the scores from `q`, `k` and stats, then runs the four GEMMs of the gradients.
//!
//! With `s` the scores, `p = exp(s - stats)`, `dp = d_o · vᵀ` and `delta = Σ d_o · o`: `ds = p ∘ (dp - delta)`. Then `dq = scale · ds · k`, `dk = scale · dsᵀ ·
//! q` and `dv = pᵀ · d_o`. `dk` and `dv` are summed over the query heads of a GQA group. No intermediate has the size of the scores. With a score_mod, `ds` is
//! first multiplied by its derivative, which also gives the gradients of declared parameters.
//!
//! A problem is split into *cells*: rows of one KV head against keys of it. A cell computes partial sums for its rows and its keys, and these are added in a
//! fixed order. The split does not depend on the number of threads, so results have identical bits for any number. The gradients of the incomplete heads bound
//! the memory, with those of parameters in f64 if several pairs share an element.
//!
//! | file | contents |
//! |---|---|
//! | `cut` | the split into cells |
//! | `tile` | one cell |
//! | `rows` | its rows, packed |
//! | `kernel` | steps that the forward pass does not have |
//! | `modified` | the gradient of a score_mod |
//! | `params` | gradients of declared parameters |
//! | `sink` | the gradient of attention sinks |
//! | `norms` | softmax denominators, recomputed where stats are too large to hold them |
//! | `by_hand` | supplied gradients, compared with derived ones in debug builds |
//! | `sums` | sums of partial results |

mod by_hand;
mod cut;
mod kernel;
mod modified;
mod norms;
mod params;
mod rows;
mod sink;
mod sums;
#[cfg(test)]
mod tests;
mod tile;

use super::element::Element;
use super::fp8::Inside;
use super::isa::Isa;
use super::output::{Rows, strips};
use super::pack::{Aligned, Scratch, Transpose, View};
use super::program::{Lengths, Rules, RulesOf, Worker};
use super::schedule::share;
use crate::forward::wrong_types;
use cut::{Cell, Cut, Grid};
pub(super) use kernel::Slopes;
use modified::Rulings;
use norms::Norms;
use params::{Span, Total};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::error::Error;
use sdpa_core::executor::{PreparedBackward, Report};
use sdpa_core::operand::Side;
use sdpa_core::packed::Documents;
use sdpa_core::{Elements, ElementsMut, Gradient, HostBackward, HostGradient, Param, SINK};
use std::ops::Range;
use std::time::Instant;
use sums::{Pool, Sum};
use tile::Gradients;

/// A prepared backward pass: the problem and the instruction set.
#[derive(Debug)]
pub(super) struct CpuBackward {
    isa: Isa,
    problem: BackwardProblem,
    rules: Rules,
}

impl CpuBackward {
    pub(super) fn new(isa: Isa, problem: &BackwardProblem) -> CpuBackward {
        if cfg!(debug_assertions) {
            by_hand::compare(problem);
        }
        CpuBackward::unchecked(isa, problem)
    }

    /// Prepares a backward pass without comparing supplied gradients of score_mods with derived ones.
    pub(super) fn unchecked(isa: Isa, problem: &BackwardProblem) -> CpuBackward {
        CpuBackward { isa, problem: problem.clone(), rules: Rules::with_gradient(problem) }
    }

    /// Returns the largest size in bytes of the scratch memory, without that for rows with large statistics.
    pub(super) fn most_workspace(&self) -> usize {
        let cut = Cut::new(self.problem.forward(), self.isa, rayon::current_num_threads(), Lengths::default());
        // Count the sums that may be incomplete at the same time: those of all strips of up to `threads` + 1 heads, and two more per
        // thread.
        let Grid { parts_of_rows, parts_of_keys, .. } = cut.grid(0);
        let sums = |parts: &[usize]| parts.len() * cut.heads.min(cut.threads + 1) + 2 * cut.threads;
        let [dk_len, dv_len] = cut.key_sums();
        let rows = sums(parts_of_rows) * Aligned::bytes(cut.row_sums());
        let keys = sums(parts_of_keys) * Aligned::bytes(dk_len + dv_len);
        let params: usize = self.problem.wrt().iter().map(|wanted| 8 * self.problem.gradient_elements(&wanted.name) as usize).sum();
        cut.threads * of_worker(&cut, &self.rules) + rows + keys + 2 * params
    }
}

impl PreparedBackward for CpuBackward {
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, Error> {
        let scale = call.check(&self.problem)?;
        if self.problem.forward().dtype().is_fp8() {
            return self.run_narrow(call, scale);
        }
        let HostBackward { q, k, v, o, d_o, stats, dq, dk, dv, attn_scale: _, params, gradients, .. } = call;
        let inputs = [q, k, v, o, d_o];
        let params = (params, gradients);
        match dq {
            ElementsMut::F32(dq) => self.run(inputs, stats, (dq, [dk, dv]), (scale, None), params),
            ElementsMut::F16(dq) => self.run(inputs, stats, (dq, [dk, dv]), (scale, None), params),
            ElementsMut::BF16(dq) => self.run(inputs, stats, (dq, [dk, dv]), (scale, None), params),
            ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => Err(wrong_types()),
        }
    }
}

/// Returns the bytes of scratch memory of one worker.
fn of_worker(cut: &Cut, rules: &Rules) -> usize {
    Scratch::bytes(&tile::scratch_lens(cut), 2 * cut.band_rows) + rules.bytes() + 4 * kept_len(cut, rules.drop())
}

/// Returns the number of elements of a mask that a worker holds: those of a band and a block.
fn kept_len(cut: &Cut, drop: bool) -> usize {
    if drop { cut.band_rows * cut.block_keys } else { 0 }
}

/// The data that every cell reads.
#[derive(Debug)]
struct Call<'a, T> {
    cut: &'a Cut,
    isa: Isa,
    q: View<'a, T>,
    k: View<'a, T>,
    v: View<'a, T>,
    o: View<'a, T>,
    d_o: View<'a, T>,
    stats: View<'a, f32>,
    norms: &'a Norms,
    /// The attention scale that queries are multiplied by before the scores.
    scale: f32,
    rules: &'a RulesOf<'a>,
    inside: Option<&'a Inside>,
}

impl CpuBackward {
    pub(super) fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// Computes the gradients of one call. With `inside`, P and dS are rounded to 8-bit floats.
    pub(super) fn run<T: Element>(
        &self,
        inputs: [Elements<'_>; 5],
        stats: &[f32],
        (dq, gradients_of_keys): (&mut [T], [ElementsMut<'_>; 2]),
        (scale, inside): (f32, Option<&Inside>),
        (params, mut gradients): (&[Param<'_>], Vec<HostGradient<'_>>),
    ) -> Result<Report, Error> {
        let ([Some(q), Some(k), Some(v), Some(o), Some(d_o)], [Some(dk), Some(dv)]) = (inputs.map(T::of), gradients_of_keys.map(T::of_mut))
        else {
            return Err(wrong_types());
        };
        let started = Instant::now();
        let problem = self.problem.forward();
        let values = sdpa_core::params::bind(self.problem.params(), problem.extents(), params)?;
        let sinks = problem.sinks(self.problem.params(), &values);
        let documents = Documents::new(problem, self.problem.params(), &values)?;
        let lengths = Lengths::new(problem, self.problem.params(), &values, documents.as_ref());
        let rules = self.rules.bind(problem, self.isa, self.problem.params(), &values);
        let totals: Vec<Total<'_>> = self.problem.wrt_scores().filter_map(|wanted| self.total(&wanted.name, &mut gradients)).collect();
        crate::workspace::is_there(self.most_workspace())?;
        let [queries, keys] = Side::ALL.map(|side| documents.as_ref().map(|documents| documents.of(side)));
        let [q, k, v] = [View::new(q, problem.q(), queries), View::new(k, problem.k(), keys), View::new(v, problem.v(), keys)];
        let stats = View::new(stats, &problem.stats_tensor(), queries);
        let norms = Norms::new(problem, self.isa, [q, k, v], &stats, scale, (&lengths, documents.as_ref(), &rules, sinks));
        let cut = Cut::new(problem, self.isa, rayon::current_num_threads(), lengths);
        let call = Call {
            cut: &cut,
            isa: self.isa,
            q,
            k,
            v,
            o: View::new(o, problem.o(), queries),
            d_o: View::new(d_o, self.problem.d_o(), queries),
            stats,
            scale,
            norms: &norms,
            rules: &rules,
            inside,
        };
        let group = cut.extents.group;
        let rows = strips((self.problem.dq(), queries), group, cut.strip_rows, dq);
        let dk = strips((self.problem.dk(), keys), 1, cut.strip_keys, dk);
        let dv = strips((self.problem.dv(), keys), 1, cut.strip_keys, dv);
        // With FP8, the scale was multiplied into dS before dS was rounded, so no factor is left.
        let left = if inside.is_some() { 1.0 } else { scale };
        let pools = call.run(rows, dk.into_iter().zip(dv).collect(), &totals, left);
        if let (Some(sinks), Some(n)) = (sinks, gradients.iter().position(|gradient| gradient.name == SINK)) {
            sink::gradient(&call, sinks, gradients.swap_remove(n).data);
        }
        let workspace = cut.threads * of_worker(&cut, &self.rules) + pools + totals.iter().map(Total::bytes).sum::<usize>() + norms.bytes();
        totals.into_iter().for_each(Total::finish);
        Ok(crate::forward::report(started, self.isa, cut.threads, workspace))
    }

    fn total<'a>(&self, name: &str, gradients: &mut Vec<HostGradient<'a>>) -> Option<Total<'a>> {
        let declared = self.problem.params().iter().find(|p| p.name == name)?;
        let given = gradients.iter().position(|gradient| gradient.name == name)?;
        let gradient = self.problem.gradient();
        let of = |gradient: &Gradient| {
            let own = gradient.reads.iter().filter(|read| gradient.wrt[read.wrt] == name);
            own.map(|read| [read.value, read.place]).collect::<Vec<_>>()
        };
        let reads = gradient.map_or_else(Vec::new, |gradient| of(gradient)).into();
        Some(Total::new(declared.kind, reads, self.problem.forward().extents(), gradients.swap_remove(given).data))
    }
}

impl<T: Element> Call<'_, T> {
    /// Computes everything and returns the bytes of incomplete sums. `scale` applies to the gradients, `totals` are those of parameters.
    fn run(&self, rows: Vec<Rows<'_, T>>, keys: Vec<(Rows<'_, T>, Rows<'_, T>)>, totals: &[Total<'_>], scale: f32) -> usize {
        let cut = self.cut;
        let rows = rows.into_iter().zip((0..cut.heads).flat_map(|head| &cut.grid(head).parts_of_rows));
        let sums_of_rows: Vec<_> = rows
            .map(|(mut dq, &n_parts)| {
                if n_parts == 0 {
                    dq.clear();
                }
                Sum::new(n_parts, dq)
            })
            .collect();
        let keys = keys.into_iter().zip((0..cut.heads).flat_map(|head| &cut.grid(head).parts_of_keys));
        let sums_of_keys: Vec<_> = keys
            .map(|((mut dk, mut dv), &n_parts)| {
                if n_parts == 0 {
                    dk.clear();
                    dv.clear();
                }
                Sum::new(n_parts, (dk, dv))
            })
            .collect();
        let [dk_len, dv_len] = cut.key_sums();
        let (row_pool, key_pool) = (Pool::new(cut.row_sums()), Pool::new(dk_len + dv_len));
        let lens = tile::scratch_lens(cut);
        let n_bounds = 2 * cut.band_rows;
        let work = (0..cut.heads).flat_map(|head| cut.grid(head).cells.iter().map(move |cell| (head, cell))).enumerate();
        let n_kept = kept_len(cut, self.rules.drop());
        let job = |(scratch, worker, kept): &mut (Scratch, Worker<'_>, Vec<u32>), (number, (head, cell)): (usize, (usize, &Cell))| {
            let (mut dq, mut dkv) = (row_pool.take(), key_pool.take());
            let (dk, dv) = dkv.get_mut().split_at_mut(dk_len);
            let mut parts: Vec<_> = totals.iter().map(|total| total.part(&self.span(head, cell))).collect();
            let mut rulings = Rulings { worker, kept, parts: &mut parts };
            tile::run(self, scratch, &mut rulings, (head, cell), Gradients { dq: dq.get_mut(), dk, dv });
            totals.iter().zip(parts).for_each(|(total, part)| total.add(number, part));
            let [rows, keys] = cut.strips(head, cell);
            let sum = &sums_of_rows[rows];
            if let Some((target, sum)) = sum.add(self.isa, &row_pool, cell.part_of_rows, dq) {
                let mut dense = row_pool.take();
                self.write_rows(self.span(head, cell).rows, target, sum.get(), dense.get_mut(), scale);
                row_pool.give(sum);
                row_pool.give(dense);
            }
            let sum = &sums_of_keys[keys];
            if let Some(((dk, dv), sum)) = sum.add(self.isa, &key_pool, cell.part_of_keys, dkv) {
                dk.write(&sum.get()[..dk_len], cut.columns_qk, scale);
                dv.write(&sum.get()[dk_len..], cut.columns_v, 1.0);
                key_pool.give(sum);
            }
        };
        share(cut.threads, work, || (Scratch::new(&lens, n_bounds), self.rules.worker(), vec![0; n_kept]), job);
        row_pool.bytes() + key_pool.bytes()
    }

    fn span(&self, head: usize, cell: &Cell) -> Span {
        let (batch, head_kv) = (head / self.cut.extents.heads_kv, head % self.cut.extents.heads_kv);
        let extents = &self.cut.extents_of(batch);
        Span { batch, head_kv, group: extents.group, rows: self.cut.rows(extents, cell), keys: self.cut.keys(extents, cell) }
    }

    /// Writes the gradients of a strip of queries from `[tile][dim_qk][row]`.
    fn write_rows(&self, rows: Range<usize>, target: Rows<'_, T>, sums: &[f32], dense: &mut [f32], scale: f32) {
        let (dim, lanes, tile_rows) = (self.cut.extents.dim_qk, self.isa.lanes(), self.cut.tile_rows);
        let n_rows = rows.len();
        for first in (0..n_rows).step_by(tile_rows) {
            let width = tile_rows.min(n_rows - first).next_multiple_of(lanes);
            let tile = first * dim..(first + width) * dim;
            self.isa.run(Transpose { n_columns: width, factor: 1.0, from: &sums[tile.clone()], to: &mut dense[tile] });
        }
        target.write(dense, dim, scale);
    }
}
