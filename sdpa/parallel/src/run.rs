//! Runs the steps of one call over host memory.

use crate::error::ParallelError;
use crate::exchange::{Exchange, Incoming, Outgoing};
use crate::host::{Part, Plan, Program, bug};
use crate::memory::{Memory, Typed, each, element, rounded, set, view};
use crate::params::Owned;
use crate::problem::ParallelProblem;
use crate::schedule::{Attend, Role, Slot, Step, Tensor, Transfer};
use sdpa_core::expr::Declared;
use sdpa_core::{
    BackwardProblem, Chunk, DType, Elements, ElementsMut, HostBackward, HostForward, HostGradient, Param, ParamValue, Placed, Prepared,
    PreparedBackward, Problem, SINK, SpecError, SpecErrors, StatsBase, TensorSpec,
};
use std::collections::HashMap;
use std::ops::Range;

/// One call in progress.
pub(crate) struct Run<'a> {
    pub(crate) problem: &'a ParallelProblem,
    pub(crate) program: &'a Program,
    pub(crate) memory: Vec<Memory>,
    /// This rank's contributions to gradients of parameters, by name.
    pub(crate) sums: HashMap<String, Vec<f32>>,
    pub(crate) scale: f32,
    pub(crate) declared: &'a [Declared],
    pub(crate) values: &'a [ParamValue<'a>],
}

impl Run<'_> {
    fn slot(&self, n: usize) -> &Slot {
        &self.program.schedule.slots[n]
    }

    /// Calls `f` with the index in the slot and the index in the caller's shard of each element.
    fn each_own(&self, slot: &Slot, mut f: impl FnMut(usize, usize)) {
        let local = self.problem.local(self.program.schedule.rank, slot.tensor);
        let (mut here, mut there, mut first) = (Vec::new(), Vec::new(), 0);
        for chunk in &slot.tokens {
            if let Some(found) = view(slot, &self.program.schedule.extents, &slot.heads, chunk) {
                each(found, |n| here.push(n));
                let part = TensorSpec { dims: found.0.dims, ..local };
                each((part, (first * local.strides[2]).unsigned_abs() as usize), |n| there.push(n));
            }
            first += chunk.len;
        }
        here.into_iter().zip(there).for_each(|(here, there)| f(here, there));
    }

    pub(crate) fn load(&mut self, inputs: &[(Tensor, Elements<'_>)]) {
        for (n, slot) in self.program.schedule.slots.iter().enumerate().filter(|(_, slot)| slot.role == Role::Input) {
            let Some((_, elements)) = inputs.iter().find(|(tensor, _)| *tensor == slot.tensor) else { continue };
            let mut memory = std::mem::take(&mut self.memory[n].elements);
            self.each_own(slot, |here, there| memory[here] = element(elements, there));
            self.memory[n].elements = memory;
        }
    }

    pub(crate) fn store(&self, outputs: Vec<(Tensor, ElementsMut<'_>)>) {
        for (tensor, mut elements) in outputs {
            let found = self.program.schedule.slots.iter().enumerate().find(|(_, slot)| slot.role == Role::Output && slot.tensor == tensor);
            let Some((n, slot)) = found else { continue };
            self.each_own(slot, |here, there| set(&mut elements, there, self.memory[n].elements[here]));
        }
    }

    /// Adds this rank's contribution to the gradient of the sinks: `−Σ e^(sink − stats) · (o · d_o)` over its rows. Rows need no exchange: `stats` covers
    /// all keys.
    pub(crate) fn sink_gradient(&mut self, inputs: &[(Tensor, Elements<'_>)]) {
        let Some(sums) = self.sums.get_mut(SINK) else { return };
        let find = |tensor: Tensor| inputs.iter().find(|(t, _)| *t == tensor).map(|(_, elements)| elements);
        let sinks = self.declared.iter().position(|p| p.name == SINK).and_then(|n| self.values.get(n));
        let (Some(o), Some(d_o), Some(stats), Some(sinks)) = (find(Tensor::O), find(Tensor::DO), find(Tensor::Stats), sinks) else {
            return;
        };
        let rank = self.program.schedule.rank;
        let [of_o, of_d_o, of_stats] = [Tensor::O, Tensor::DO, Tensor::Stats].map(|tensor| self.problem.local(rank, tensor));
        let [batch, heads, seq, dim] = of_o.dims;
        let at = |t: &TensorSpec, index: [i64; 4]| {
            index.iter().zip(t.strides).map(|(i, stride)| i * stride).sum::<i64>().unsigned_abs() as usize
        };
        for (h, sum) in (0..heads).zip(sums) {
            let mut total = 0.0f64;
            for (b, s) in (0..batch).flat_map(|b| (0..seq).map(move |s| (b, s))) {
                let stat = f64::from(element(stats, at(&of_stats, [b, h, s, 0])));
                let product = |d: i64| f64::from(element(o, at(&of_o, [b, h, s, d]))) * f64::from(element(d_o, at(&of_d_o, [b, h, s, d])));
                // A row without keys and with a sink of −∞ has no weights.
                if stat != f64::NEG_INFINITY {
                    total -= (sinks.get(h.unsigned_abs() as usize) - stat).exp() * (0..dim).map(product).sum::<f64>();
                }
            }
            *sum += total as f32;
        }
    }

    pub(crate) fn steps(&mut self, exchange: &mut impl Exchange) -> Result<(), ParallelError> {
        let mut parts = self.program.parts.iter();
        for step in &self.program.schedule.steps {
            match step {
                Step::Copy { from, to, heads, chunk } => self.moved(*from, *to, |x, _| x, (heads, chunk))?,
                Step::Add { from, to, heads, chunk } => self.moved(*from, *to, |x, sum| sum + x, (heads, chunk))?,
                Step::Exchange { sends, receives } => self.exchanged(exchange, sends, receives)?,
                Step::Attend(attend) => {
                    let part = parts.next().ok_or_else(|| bug("a step without a plan"))?;
                    match &part.ready {
                        Some((placed, Plan::Forward(prepared, problem))) => {
                            self.forward(attend, part, placed, prepared.as_ref(), problem)?
                        }
                        Some((placed, Plan::Backward(prepared, problem))) => {
                            self.backward(attend, part, placed, prepared.as_ref(), problem)?
                        }
                        None => return Err(bug("a part without a pair")),
                    }
                }
                Step::Finish { q, heads, reads, writes } => self.finished(q, heads, reads, writes)?,
            }
        }
        Ok(())
    }

    /// Writes `f(element of from, element of to)` to `to`, rounded to its type. Positions are looked up in both slots.
    fn moved(
        &mut self,
        from: usize,
        to: usize,
        f: impl Fn(f32, f32) -> f32,
        (heads, chunk): (&Range<i64>, &Chunk),
    ) -> Result<(), ParallelError> {
        let extents = &self.program.schedule.extents;
        let dtype = self.slot(to).dtype;
        for i in 0..chunk.len {
            let one = chunk.part(i..i + 1);
            let found = [from, to].map(|n| view(self.slot(n), extents, heads, &one));
            let [Some(source), Some(target)] = found else { return Err(bug("a copy of tokens that a slot does not have")) };
            let (mut values, mut n) = (Vec::new(), 0);
            each(source, |at| values.push(self.memory[from].elements[at]));
            let elements = &mut self.memory[to].elements;
            each(target, |at| {
                elements[at] = rounded(f(values[n], elements[at]), dtype);
                n += 1;
            });
        }
        Ok(())
    }

    fn exchanged(&mut self, exchange: &mut impl Exchange, sends: &[Transfer], receives: &[Transfer]) -> Result<(), ParallelError> {
        let extents = self.program.schedule.extents;
        let place =
            |t: &Transfer| self.slot(t.slot).contiguous(&t.chunk).ok_or_else(|| bug("a transfer of tokens that are not neighbours"));
        let mut sent = Vec::new();
        for t in sends {
            sent.push((t.peer, self.memory[t.slot].encode(self.slot(t.slot), &extents, place(t)?, t.chunk.len)));
        }
        let mut received = Vec::new();
        for t in receives {
            let bytes = extents.bytes(self.slot(t.slot), t.chunk.len) as usize;
            received.push((t, place(t)?, vec![0u8; bytes]));
        }
        let outgoing: Vec<Outgoing<'_>> = sent.iter().map(|(peer, bytes)| Outgoing { peer: *peer, bytes }).collect();
        let mut incoming: Vec<Incoming<'_>> = received.iter_mut().map(|(t, _, bytes)| Incoming { peer: t.peer, bytes }).collect();
        exchange.exchange(&outgoing, &mut incoming)?;
        for (t, first, bytes) in received {
            let slot = &self.program.schedule.slots[t.slot];
            self.memory[t.slot].decode(slot, &extents, first, t.chunk.len, &bytes);
        }
        Ok(())
    }

    /// Returns the elements of a slot from the first one of a part on, in the type of the part's problem.
    fn operand(&self, n: usize, attend: &Attend, dtype: DType) -> Result<Typed, ParallelError> {
        let slot = self.slot(n);
        let (heads, chunk) = if slot.tensor.is_of_keys() { (&attend.heads_kv, &attend.k) } else { (&attend.heads_q, &attend.q) };
        let (tensor, offset) =
            view(slot, &self.program.schedule.extents, heads, chunk).ok_or_else(|| bug("tokens that are not neighbours"))?;
        let len = tensor.extent().unwrap_or(0).unsigned_abs() as usize;
        Ok(Typed::of(&self.memory[n].elements[offset..offset + len], dtype))
    }

    fn params(&self, part: &Part, placed: &Placed, declared: &[Declared]) -> Result<Vec<(String, Owned)>, ParallelError> {
        let extents = self.problem.problem().extents();
        let mut all: Vec<(String, Owned)> =
            placed.numbers(declared).into_iter().map(|(name, x)| (name.to_owned(), Owned::Scalar(x))).collect();
        for p in declared {
            if all.iter().any(|(name, _)| *name == p.name) {
                continue;
            }
            let value = self.declared.iter().position(|d| d.name == p.name).and_then(|n| self.values.get(n));
            let value = value.ok_or_else(|| {
                SpecErrors(vec![SpecError::new(format!("parameter {}", p.name), "a gradient's own parameter", "none over several ranks")])
            })?;
            all.push((p.name.clone(), crate::params::part(p, *value, &part.at, extents, placed.dropout_offset)));
        }
        Ok(all)
    }

    fn forward(
        &mut self,
        attend: &Attend,
        part: &Part,
        placed: &Placed,
        prepared: &dyn Prepared,
        problem: &Problem,
    ) -> Result<(), ParallelError> {
        let owned = self.params(part, placed, problem.params())?;
        let given: Vec<Param<'_>> = owned.iter().map(|(name, value)| value.param(name)).collect();
        let dtype = problem.dtype();
        let [q, k, v] = [0, 1, 2].map(|n| self.operand(attend.reads[n], attend, dtype));
        let (q, k, v) = (q?, k?, v?);
        let rows = problem.stats_elements().unsigned_abs() as usize;
        let len = problem.o().extent().unwrap_or(0).unsigned_abs() as usize;
        let mut o = Typed::of(&vec![f32::NAN; len], dtype);
        let mut statistics = [(problem.stats(), Tensor::Stats), (problem.row_max(), Tensor::RowMax), (problem.sum_exp(), Tensor::SumExp)]
            .map(|(asked, tensor)| (tensor, asked.then(|| vec![f32::NAN; rows])));
        let call = HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut());
        let memory = statistics.each_mut().map(|(_, memory)| memory.as_deref_mut());
        prepared.forward(call.statistics(memory).attn_scale(self.scale).params(&given))?;
        let mut results = vec![(Tensor::O, (0..len).map(|n| element(&o.elements(), n)).collect::<Vec<f32>>())];
        results.extend(statistics.into_iter().filter_map(|(tensor, memory)| Some((tensor, memory?))));
        if attend.partial {
            return self.merge(attend, &results);
        }
        for &to in &attend.writes {
            let Some((_, values)) = results.iter().find(|(tensor, _)| *tensor == self.slot(to).tensor) else {
                return Err(bug("a result that is not computed"));
            };
            self.write(to, attend, values, |x, _| x)?;
        }
        Ok(())
    }

    /// Writes the values of a part, row-major in (batch, head, seq, dim), to a slot.
    fn write(&mut self, to: usize, attend: &Attend, values: &[f32], f: impl Fn(f32, f32) -> f32) -> Result<(), ParallelError> {
        let slot = &self.program.schedule.slots[to];
        let (heads, chunk) = if slot.tensor.is_of_keys() { (&attend.heads_kv, &attend.k) } else { (&attend.heads_q, &attend.q) };
        let found = view(slot, &self.program.schedule.extents, heads, chunk).ok_or_else(|| bug("tokens that are not neighbours"))?;
        let (elements, mut n) = (&mut self.memory[to].elements, 0);
        each(found, |at| {
            elements[at] = rounded(f(values[n], elements[at]), slot.dtype);
            n += 1;
        });
        Ok(())
    }

    /// Merges a partial output into the accumulators. With `m` the larger row maximum and `w = sum_exp · e^(row_max − m)` of each side,
    /// `o = (w₁·o₁ + w₂·o₂) / (w₁ + w₂)`. A row without keys has `row_max` −∞ and `sum_exp` 0.
    fn merge(&mut self, attend: &Attend, results: &[(Tensor, Vec<f32>)]) -> Result<(), ParallelError> {
        let [o, row_max, sum_exp] =
            [Tensor::O, Tensor::RowMax, Tensor::SumExp].map(|t| results.iter().find(|(tensor, _)| *tensor == t).map(|(_, x)| x));
        let (Some(o), Some(row_max), Some(sum_exp)) = (o, row_max, sum_exp) else { return Err(bug("a partial result without statistics")) };
        let &[o_slot, max_slot, sum_slot] = &attend.writes[..] else { return Err(bug("a partial result without accumulators")) };
        let (heads, q) = (&attend.heads_q, &attend.q);
        let extents = &self.program.schedule.extents;
        let rows_of = |n: usize| view(self.slot(n), extents, heads, q).ok_or_else(|| bug("tokens that are not neighbours"));
        let (o_view, max_view, sum_view) = (rows_of(o_slot)?, rows_of(max_slot)?, rows_of(sum_slot)?);
        let (mut o_at, mut max_at, mut sum_at) = (Vec::new(), Vec::new(), Vec::new());
        each(o_view, |n| o_at.push(n));
        each(max_view, |n| max_at.push(n));
        each(sum_view, |n| sum_at.push(n));
        let dim = extents.dim_v.unsigned_abs() as usize;
        for row in 0..row_max.len() {
            let (before, sum_before) = (self.memory[max_slot].elements[max_at[row]], self.memory[sum_slot].elements[sum_at[row]]);
            let merged = Merged::of([before, row_max[row]], [sum_before, sum_exp[row]]);
            self.memory[max_slot].elements[max_at[row]] = merged.max;
            self.memory[sum_slot].elements[sum_at[row]] = merged.sum;
            for d in row * dim..(row + 1) * dim {
                let x = &mut self.memory[o_slot].elements[o_at[d]];
                *x = merged.output([*x, o[d]]);
            }
        }
        Ok(())
    }

    fn finished(&mut self, q: &Chunk, heads: &Range<i64>, reads: &[usize; 3], writes: &[usize]) -> Result<(), ParallelError> {
        let extents = self.program.schedule.extents;
        let sinks = self.declared.iter().position(|p| p.name == SINK).filter(|_| self.problem.problem().sink()).map(|n| self.values[n]);
        let base = match self.problem.problem().stats_base() {
            StatsBase::Natural => 1.0,
            StatsBase::Two => std::f32::consts::LOG2_E,
        };
        let indices = |n: usize| -> Result<Vec<usize>, ParallelError> {
            let mut all = Vec::new();
            each(view(self.slot(n), &extents, heads, q).ok_or_else(|| bug("tokens that are not neighbours"))?, |n| all.push(n));
            Ok(all)
        };
        let (o_at, max_at, sum_at) = (indices(reads[0])?, indices(reads[1])?, indices(reads[2])?);
        let targets = writes.iter().map(|&n| Ok((n, indices(n)?))).collect::<Result<Vec<_>, ParallelError>>()?;
        let (per_head, dim) = (q.len.unsigned_abs() as usize, extents.dim_v.unsigned_abs() as usize);
        let count = (heads.end - heads.start).unsigned_abs() as usize;
        for row in 0..max_at.len() {
            let head = heads.start.unsigned_abs() as usize + row / per_head % count;
            let (max, sum) = (self.memory[reads[1]].elements[max_at[row]], self.memory[reads[2]].elements[sum_at[row]]);
            let merged = match sinks {
                Some(sinks) => Merged::of([max, sinks.get(head) as f32], [sum, 1.0]),
                None => Merged { max, sum, weights: None },
            };
            for (n, at) in &targets {
                let slot = &self.program.schedule.slots[*n];
                match slot.tensor {
                    Tensor::O => {
                        for d in row * dim..(row + 1) * dim {
                            let x = self.memory[reads[0]].elements[o_at[d]];
                            self.memory[*n].elements[at[d]] = rounded(merged.output([x, 0.0]), slot.dtype);
                        }
                    }
                    Tensor::Stats => self.memory[*n].elements[at[row]] = (merged.max + merged.sum.ln()) * base,
                    Tensor::RowMax => self.memory[*n].elements[at[row]] = merged.max,
                    Tensor::SumExp => self.memory[*n].elements[at[row]] = merged.sum,
                    Tensor::Q | Tensor::K | Tensor::V | Tensor::DO | Tensor::DQ | Tensor::DK | Tensor::DV => {
                        return Err(bug("a result that is not computed"));
                    }
                }
            }
        }
        Ok(())
    }

    fn backward(
        &mut self,
        attend: &Attend,
        part: &Part,
        placed: &Placed,
        prepared: &dyn PreparedBackward,
        problem: &BackwardProblem,
    ) -> Result<(), ParallelError> {
        let owned = self.params(part, placed, problem.params())?;
        let given: Vec<Param<'_>> = owned.iter().map(|(name, value)| value.param(name)).collect();
        let dtype = problem.forward().dtype();
        let operands = (0..5).map(|n| self.operand(attend.reads[n], attend, dtype)).collect::<Result<Vec<_>, _>>()?;
        let [q, k, v, o, d_o] = &operands[..] else { return Err(bug("a backward step without operands")) };
        let (tensor, offset) =
            view(self.slot(attend.reads[5]), &self.program.schedule.extents, &attend.heads_q, &attend.q).ok_or_else(|| bug("stats"))?;
        let mut stats = Vec::new();
        each((tensor, offset), |n| stats.push(self.memory[attend.reads[5]].elements[n]));
        let mut gradients = [problem.dq(), problem.dk(), problem.dv()]
            .map(|t| Typed::of(&vec![f32::NAN; t.extent().unwrap_or(0).unsigned_abs() as usize], dtype));
        let [dq, dk, dv] = &mut gradients;
        let call = HostBackward::new(
            (q.elements(), k.elements(), v.elements()),
            (o.elements(), &stats),
            d_o.elements(),
            (dq.elements_mut(), dk.elements_mut(), dv.elements_mut()),
        );
        let mut of_params: Vec<(&str, Vec<f32>)> = problem
            .wrt()
            .iter()
            .map(|g| (&g.name[..], vec![f32::NAN; problem.gradient_elements(&g.name).unsigned_abs() as usize]))
            .collect();
        let destinations = of_params.iter_mut().map(|(name, sums)| HostGradient::new(name, &mut sums[..]));
        prepared.backward(call.attn_scale(self.scale).params(&given).gradients(destinations))?;
        let extents = self.problem.problem().extents();
        for (name, part_sums) in &of_params {
            let declared = self.declared.iter().find(|p| p.name == *name).ok_or_else(|| bug("a gradient of an unknown parameter"))?;
            let sums = self.sums.get_mut(*name).ok_or_else(|| bug("a gradient that the call does not ask for"))?;
            crate::params::indices(declared.kind, &part.at, extents).into_iter().zip(part_sums).for_each(|(n, x)| sums[n] += x);
        }
        for (&to, values) in attend.writes.iter().zip(&gradients) {
            let elements = values.elements();
            let values: Vec<f32> = (0..elements.len()).map(|n| element(&elements, n)).collect();
            self.write(to, attend, &values, |x, sum| sum + x)?;
        }
        Ok(())
    }
}

/// A row of two merged outputs.
struct Merged {
    max: f32,
    sum: f32,
    /// The weights of both outputs; `None` if they are the first output itself.
    weights: Option<[f32; 2]>,
}

impl Merged {
    fn of([a, b]: [f32; 2], [sum_a, sum_b]: [f32; 2]) -> Merged {
        // `f32::max` would hide a NaN.
        let max = if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) };
        if max == f32::NEG_INFINITY {
            return Merged { max, sum: 0.0, weights: None };
        }
        let (wa, wb) = (sum_a * (a - max).exp(), sum_b * (b - max).exp());
        let sum = wa + wb;
        Merged { max, sum, weights: Some([wa / sum, wb / sum]) }
    }

    fn output(&self, [a, b]: [f32; 2]) -> f32 {
        self.weights.map_or(a, |[wa, wb]| wa * a + wb * b)
    }
}
