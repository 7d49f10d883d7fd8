//! 8-bit floats: the roundings of the graphs that cuDNN receives, around passes in f32.
//!
//! Operands are converted to f32 as elements times descales, of tensors or of blocks. P belongs to the complete softmax, so a first pass computes the sums of
//! rows, and a second one the output. P is multiplied by its scale, rounded, and divided by the scale; so is dS. Results are multiplied by their scales and
//! rounded once.

use super::backward::CpuBackward;
use super::output::{self, Statistics, strips};
use super::pack::View;
use crate::forward::{CpuPrepared, Cut, Known};
use sdpa_core::error::Error;
use sdpa_core::executor::Report;
use sdpa_core::operand::{Direction, Operand};
use sdpa_core::packed::Documents;
use sdpa_core::spec::TensorSpec;
use sdpa_core::tensor::{Elements, ElementsMut, ParamValue};
use sdpa_core::{
    Amax, BlockScales, DType, F8E4M3, F8E5M2, F8E8M0, Fp8Scale, Fp8Scales, HostAmax, HostBackward, HostForward, HostGradient, Param,
    Problem, params,
};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Rounds numbers to an 8-bit type and back, and records the largest magnitude before the rounding.
#[derive(Debug)]
pub(super) struct Rounder {
    dtype: DType,
    /// A factor that is applied before the scale.
    factor: f32,
    scale: f32,
    descale: f32,
    /// The bits of the largest magnitude. Bits of non-negative floats are ordered like the floats, with NaN above all.
    amax: AtomicU32,
}

impl Rounder {
    fn new(dtype: DType, factor: f32, [scale, descale]: [f32; 2]) -> Rounder {
        Rounder { dtype, factor, scale, descale, amax: AtomicU32::new(0) }
    }

    /// Rounds numbers in place.
    pub(super) fn round(&self, numbers: &mut [f32]) {
        let amax = match self.dtype {
            DType::F8E4M3 => self.each(numbers, F8E4M3::round),
            DType::F8E5M2 => self.each(numbers, F8E5M2::round),
            // P and dS are only rounded to 8-bit types, so these types do not occur.
            DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => self.each(numbers, |x| x),
        };
        self.amax.fetch_max(amax, Ordering::Relaxed);
    }

    fn each(&self, numbers: &mut [f32], round: impl Fn(f32) -> f32) -> u32 {
        let mut largest = 0;
        for x in numbers {
            let real = *x * self.factor;
            largest = largest.max(real.to_bits() & !(1 << 31));
            *x = round(real * self.scale) * self.descale;
        }
        largest
    }

    fn amax(&self) -> f32 {
        f32::from_bits(self.amax.load(Ordering::Relaxed))
    }
}

/// The roundings inside of a backward pass.
#[derive(Debug)]
pub(super) struct Inside {
    /// P, before the GEMM of dV.
    pub(super) weights: Rounder,
    /// dS, times the attention scale.
    pub(super) slopes: Rounder,
}

/// Converts an operand to f32 with a tensor's descale.
fn widen(elements: &Elements<'_>, descale: f32) -> Vec<f32> {
    match elements {
        Elements::F32(x) => x.iter().map(|x| x * descale).collect(),
        Elements::F16(x) => x.iter().map(|x| x.to_f32() * descale).collect(),
        Elements::BF16(x) => x.iter().map(|x| x.to_f32() * descale).collect(),
        Elements::F8E4M3(x) => x.iter().map(|x| x.to_f32() * descale).collect(),
        Elements::F8E5M2(x) => x.iter().map(|x| x.to_f32() * descale).collect(),
    }
}

/// Converts an operand to f32 with block scales.
fn widen_blocks(elements: &Elements<'_>, scales: &BlockScales, of_blocks: &[F8E8M0]) -> Vec<f32> {
    let mut wide = widen(elements, 1.0);
    for [element, scale] in scales.places() {
        wide[element] *= of_blocks[scale].to_f32();
    }
    wide
}

/// The memory layout of a result.
type Place<'a> = (&'a TensorSpec, Option<&'a [Range<usize>]>);

/// Writes a result from f32 numbers of the same layout, and returns their largest magnitude.
fn store(to: ElementsMut<'_>, from: &mut [f32], place: Place<'_>, scale: f32) -> f32 {
    match to {
        ElementsMut::F32(to) => rows(to, from, place, |x| x * scale),
        ElementsMut::F16(to) => rows(to, from, place, |x| half::f16::from_f32(x * scale)),
        ElementsMut::BF16(to) => rows(to, from, place, |x| half::bf16::from_f32(x * scale)),
        ElementsMut::F8E4M3(to) => rows(to, from, place, |x| F8E4M3::from_f32(x * scale)),
        ElementsMut::F8E5M2(to) => rows(to, from, place, |x| F8E5M2::from_f32(x * scale)),
    }
}

fn rows<T>(to: &mut [T], from: &mut [f32], (spec, documents): Place<'_>, make: impl Fn(f32) -> T) -> f32 {
    let n_rows = usize::try_from(spec.dims[2]).unwrap_or(1);
    let from = strips((spec, documents), 1, n_rows, from).into_iter().flat_map(output::Rows::each);
    let mut amax = 0;
    for ((_, to), (_, from)) in strips((spec, documents), 1, n_rows, to).into_iter().flat_map(output::Rows::each).zip(from) {
        for (to, from) in to.iter_mut().zip(from) {
            amax = amax.max(from.to_bits() & !(1 << 31));
            *to = make(*from);
        }
    }
    f32::from_bits(amax)
}

/// Rounds to the nearest number of a type.
fn rounded(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F8E4M3 => F8E4M3::round(x),
        DType::F8E5M2 => F8E5M2::round(x),
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
        DType::F32 | DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => x,
    }
}

fn tell(all: Vec<HostAmax<'_>>, number: impl Fn(Amax) -> f32) {
    for amax in all {
        *amax.value = number(amax.of);
    }
}

/// Returns the bytes of the operands of a pass in f32.
pub(super) fn bytes(problem: &Problem, direction: Direction, of: impl Fn(Operand) -> Option<TensorSpec>) -> u64 {
    if !problem.dtype().is_fp8() {
        return 0;
    }
    let operands = direction.operands().iter().filter_map(|operand| of(*operand)?.extent());
    let rows = 8 * problem.stats_elements();
    operands.map(|elements| 4 * elements).chain([rows]).sum::<i64>().unsigned_abs()
}

impl CpuPrepared {
    /// Runs a forward pass over operands of 8-bit floats.
    pub(super) fn run_narrow(&self, call: HostForward<'_>, scale: f32) -> Result<Report, Error> {
        let HostForward { q, k, v, o, stats, row_max, sum_exp, attn_scale: _, params, amax, .. } = call;
        let problem = &self.problem;
        let values = problem.bind(params)?;
        let scales = Fp8Scales::new(problem.params(), &values);
        let documents = Documents::new(problem, problem.params(), &values)?;
        let tokens = documents.as_ref().map(|documents| documents.of(sdpa_core::Side::Queries));
        crate::workspace::is_there(usize::try_from(self.narrow_bytes()).unwrap_or(usize::MAX))?;
        let [q, k, v] = [(Operand::Q, q), (Operand::K, k), (Operand::V, v)].map(|(operand, x)| {
            match problem.block_scales(operand).zip(problem.block_scale_values(operand, &values)) {
                Some((blocks, of_blocks)) => widen_blocks(&x, &blocks, of_blocks),
                None => widen(&x, scales.get(Fp8Scale::of_operand(operand, false))),
            }
        });
        let inputs = [&q[..], &k, &v];

        let n_rows = tokens
            .map_or(problem.stats_elements() as usize, |tokens| tokens.last().map_or(0, |last| last.end) * problem.heads_q() as usize);
        let mut norms = vec![[f32::NEG_INFINITY, 0.0]; n_rows];
        let statistics = [stats, row_max, sum_exp];
        self.with(inputs, (scale, params), Cut::Whole(None), |call, sinks, documents| {
            call.run(output::told(call.schedule, (problem, documents), sinks, statistics, &mut norms));
        })?;
        let (max, log): (Vec<f32>, Vec<f32>) = norms.into_iter().map(|[max, log]| (max, log)).unzip();
        let weights = Rounder::new(problem.dtype(), 1.0, [Fp8Scale::ScaleS, Fp8Scale::DescaleS].map(|by| scales.get(by)));
        let known = Known { max: View::new(&max, &problem.stats_tensor(), tokens), log: &log, weights: &weights };
        let mut wide = vec![0.0; o.len()];
        let mut report = self.with(inputs, (scale, params), Cut::Whole(Some(&known)), |call, _, documents| {
            let none: Statistics<'_> = [None, None, None];
            call.run(output::targets(call.schedule, (problem, documents), None, &mut wide, none));
        })?;
        let of_o = store(o, &mut wide, (problem.o(), tokens), scales.get(Fp8Scale::ScaleO));
        // A block-scaled output has no scale of the whole tensor, so report the amax of the rounded output, as graphs do.
        let of_o = if problem.block_scaled() { rounded(of_o, problem.dtype_of(Operand::O)) } else { of_o };
        tell(amax, |amax| if amax == Amax::S { weights.amax() } else { of_o });
        report.workspace_bytes += self.narrow_bytes();
        Ok(report)
    }

    /// Returns the bytes of the operands in f32.
    pub(super) fn narrow_bytes(&self) -> u64 {
        bytes(&self.problem, Direction::Forward, |operand| self.problem.in_memory(operand))
    }
}

impl CpuBackward {
    /// Runs a backward pass over operands of 8-bit floats.
    pub(super) fn run_narrow(&self, call: HostBackward<'_>, scale: f32) -> Result<Report, Error> {
        let HostBackward { q, k, v, o, d_o, stats, dq, dk, dv, attn_scale: _, params, gradients, amax, .. } = call;
        let problem = self.problem();
        let declared = problem.params();
        let values: Vec<ParamValue<'_>> = params::bind(declared, problem.forward().extents(), params)?;
        let scales = Fp8Scales::new(declared, &values);
        crate::workspace::is_there(usize::try_from(self.narrow_bytes()).unwrap_or(usize::MAX))?;
        let read = [(Operand::Q, q), (Operand::K, k), (Operand::V, v), (Operand::O, o), (Operand::DO, d_o)];
        let wide = read.map(|(operand, x)| widen(&x, scales.get(Fp8Scale::of_operand(operand, false))));
        let pair = |scale, descale| [scale, descale].map(|by| scales.get(by));
        let inside = Inside {
            weights: Rounder::new(problem.forward().dtype(), 1.0, pair(Fp8Scale::ScaleS, Fp8Scale::DescaleS)),
            slopes: Rounder::new(problem.dtype_of(Operand::DO), scale, pair(Fp8Scale::ScaleDP, Fp8Scale::DescaleDP)),
        };
        let [mut wide_dq, mut wide_dk, mut wide_dv] = [&dq, &dk, &dv].map(|x| vec![0.0; x.len()]);
        let results: [ElementsMut<'_>; 2] = [ElementsMut::F32(&mut wide_dk), ElementsMut::F32(&mut wide_dv)];
        let all: (&[Param<'_>], Vec<HostGradient<'_>>) = (params, gradients);
        let inputs = wide.each_ref().map(|x| Elements::F32(x));
        let mut report = self.run::<f32>(inputs, stats, (&mut wide_dq, results), (scale, Some(&inside)), all)?;
        let documents = Documents::new(problem.forward(), declared, &values)?;
        let results = [(Operand::DQ, dq, wide_dq), (Operand::DK, dk, wide_dk), (Operand::DV, dv, wide_dv)];
        let told = results.map(|(operand, to, mut from)| {
            let tokens = documents.as_ref().map(|documents| documents.of(operand.side()));
            store(to, &mut from, (problem.tensor(operand), tokens), scales.get(Fp8Scale::of_operand(operand, true)))
        });
        tell(amax, |amax| match amax {
            Amax::S => inside.weights.amax(),
            Amax::DP => inside.slopes.amax(),
            Amax::DQ => told[0],
            Amax::DK => told[1],
            Amax::DV | Amax::O => told[2],
        });
        report.workspace_bytes += self.narrow_bytes();
        Ok(report)
    }

    /// Returns the bytes of the operands in f32.
    pub(super) fn narrow_bytes(&self) -> u64 {
        bytes(self.problem().forward(), Direction::Backward, |operand| Some(*self.problem().tensor(operand)))
    }
}
