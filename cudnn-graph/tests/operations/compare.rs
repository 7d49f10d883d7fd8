//! The tolerance of a result, and the comparison with the interpreter.
//!
//! An element may differ from the f64 result by `ulp(want) + factor · magnitude`. `ulp` is twice the unit roundoff of the type of the result (2⁻²⁴ f32,
//! 2⁻¹¹ f16, 2⁻⁸ bf16, 2⁻⁴ f8e4m3, 2⁻³ f8e5m2) times the element: an engine may round twice. `magnitude` is the same graph computed on absolute values,
//! the sum of the absolute products, which bounds the rounding errors of a sum whatever cancels. For norms, softmax, extremes and RoPE, which are no such
//! sums, it is the largest element of the result. The `factor` is the sum of what the graph has of:
//!
//! | part | factor | reason |
//! |---|---|---|
//! | sums in f32 | 2⁻¹⁶ | at most 4,096 terms; each addition rounds by at most 2⁻²³, the errors of a sum average out |
//! | norms, softmax, RoPE | 2⁻¹⁴ | as above, with quotients and roots after sums, and cancellation in gradients |
//! | products of f32 | 2⁻⁹ | tf32 keeps 10 bits of each factor, which may be truncated |
//! | products of 8-bit floats | 2⁻¹⁰ | tensor cores of Hopper add them with 13 fraction bits, a few groups of 32 one after another |
//! | GELU, SiLU, tanh | 2⁻¹¹ | the approximate instruction for tanh has that error |
//! | an inner tensor of 16 bits | 2⁻¹¹, 2⁻⁸ | it may be rounded to its type, f16 or bf16; four times that for its statistics |
//!
//! The position of a maximum is right if the element there is the maximum.

use super::values::results;
use cudnn_graph::ir::interp::{InterpError, Precision, Value, run};
use cudnn_graph::ir::{Mode, Op, ReductionMode, ResampleMode, TensorId, Window};
use cudnn_graph::{DType, Verified};
use std::collections::BTreeMap;

/// The expected result.
pub(crate) struct Expected {
    pub(crate) name: String,
    pub(crate) want: Value,
    kind: Kind,
}

enum Kind {
    /// The tolerance of each element.
    Near(Vec<f64>),
    /// Positions of maxima in the windows of images.
    Position { x: Value, maxima: Vec<f64>, window: Window },
}

/// Half a unit in the last place, relative to a number, and the distance of subnormal numbers.
fn rounding(dtype: DType) -> (f64, f64) {
    let two = |n| 2f64.powi(n);
    match dtype {
        DType::F32 => (two(-24), two(-149)),
        DType::F16 => (two(-11), two(-24)),
        DType::BF16 => (two(-8), two(-133)),
        DType::F8E4M3 => (two(-4), two(-9)),
        DType::F8E5M2 => (two(-3), two(-16)),
        DType::F64
        | DType::I8
        | DType::U8
        | DType::I32
        | DType::I64
        | DType::Bool
        | DType::F8E8M0
        | DType::F4E2M1
        | DType::I4
        | DType::U4 => (0.0, 0.0),
    }
}

/// Whether the graph on absolute values bounds every partial sum of the graph.
fn is_sum(op: &Op) -> bool {
    match op {
        Op::Pointwise(op) => {
            matches!(op.mode, Mode::Add | Mode::Mul | Mode::ReluFwd | Mode::ReluBwd | Mode::GeluFwd | Mode::SwishFwd | Mode::Identity)
        }
        Op::Reduction(op) => op.mode == ReductionMode::Add,
        Op::ResampleForward(op) => op.mode != ResampleMode::Max,
        Op::Matmul(_)
        | Op::ConvForward(_)
        | Op::ConvBackwardData(_)
        | Op::ConvBackwardFilter(_)
        | Op::ResampleBackward(_)
        | Op::Upsample(_)
        | Op::GenStats(_)
        | Op::MoeMatmul(_)
        | Op::MoeMatmulBackward(_)
        | Op::Concat(_)
        | Op::Transpose(_)
        | Op::Slice(_)
        | Op::Reshape(_)
        | Op::BlockScaleDequantize(_) => true,
        Op::NormForward(_)
        | Op::NormBackward(_)
        | Op::BnFinalize(_)
        | Op::BnBackwardWeights(_)
        | Op::Rope(_)
        | Op::RopeBackward(_)
        | Op::Rng(_)
        | Op::Softmax(_)
        | Op::BandMask(_)
        | Op::PagedLoad(_)
        | Op::BlockScaleQuantize(_)
        | Op::SdpaForward(_)
        | Op::SdpaBackward(_) => false,
    }
}

fn is_product(op: &Op) -> bool {
    matches!(
        op,
        Op::Matmul(_)
            | Op::ConvForward(_)
            | Op::ConvBackwardData(_)
            | Op::ConvBackwardFilter(_)
            | Op::MoeMatmul(_)
            | Op::MoeMatmulBackward(_)
    )
}

fn factor(graph: &Verified, sums: bool) -> f64 {
    let mut factor = 2f64.powi(if sums { -16 } else { -14 });
    let reads = |dtypes: &[DType]| {
        let products = graph.ops().iter().filter(|op| is_product(op)).flat_map(|op| op.operands().inputs);
        products.filter_map(|o| graph.get(o.tensor)).any(|t| dtypes.contains(&t.dtype))
    };
    if reads(&[DType::F32]) {
        factor += 2f64.powi(-9);
    }
    if reads(&[DType::F8E4M3, DType::F8E5M2]) {
        factor += 2f64.powi(-10);
    }
    let approximate = |op: &Op| matches!(op, Op::Pointwise(op) if matches!(op.mode, Mode::GeluFwd | Mode::SwishFwd | Mode::TanhFwd));
    if graph.ops().iter().any(approximate) {
        factor += 2f64.powi(-11);
    }
    let inner = graph.tensors().iter().filter(|t| t.is_virtual()).map(|t| t.dtype);
    factor + inner.filter(|dtype| *dtype != DType::F32).map(|dtype| rounding(dtype).0).fold(0.0, f64::max)
}

/// The results of the interpreter, with the tolerance of each.
pub(crate) fn expected(graph: &Verified, inputs: &BTreeMap<TensorId, Value>) -> Result<BTreeMap<TensorId, Expected>, InterpError> {
    // The rounding of a block's scale to a power of two is part of its definition.
    let quantizes = graph.ops().iter().any(|op| matches!(op, Op::BlockScaleQuantize(_)));
    let wanted = run(graph, inputs, if quantizes { Precision::F32 } else { Precision::F64 })?;
    let sums = graph.ops().iter().all(is_sum);
    let floats = |id: &TensorId| graph.get(*id).is_some_and(|t| t.dtype.is_float() || t.dtype == DType::I8);
    let positive = |value: &Value| Value::new(value.dims.clone(), value.data.iter().map(|x| x.abs()).collect::<Vec<_>>());
    // An index stays as it is; weights of 8 bits are numbers.
    let indices: Vec<TensorId> =
        graph.ops().iter().filter_map(|op| if let Op::ResampleBackward(op) = op { op.index } else { None }).collect();
    let absolute =
        |(id, value): (&TensorId, &Value)| (*id, if floats(id) && !indices.contains(id) { positive(value) } else { value.clone() });
    let magnitudes = if sums { run(graph, &inputs.iter().map(absolute).collect(), Precision::F64)? } else { BTreeMap::new() };
    let factor = factor(graph, sums);
    let mut all = BTreeMap::new();
    for id in results(graph) {
        let (Some(tensor), Some(want)) = (graph.get(id), wanted.get(&id)) else { continue };
        let position = graph
            .ops()
            .iter()
            .filter_map(|op| if let Op::ResampleForward(op) = op { Some(op) } else { None })
            .find(|op| op.index == Some(id));
        // The statistics of a result of this graph are those before or after rounding.
        let statistics = graph
            .ops()
            .iter()
            .filter_map(|op| if let Op::GenStats(op) = op { Some(op) } else { None })
            .find(|op| [op.sum, op.square_sum].contains(&id));
        let statistics = statistics.and_then(|op| graph.get(op.x));
        let largest = want.data.iter().fold(2f64.powi(-6), |most, x| most.max(x.abs()));
        let (ulp, subnormal) = (2.0 * rounding(tensor.dtype).0, rounding(tensor.dtype).1);
        let near = |n: usize| {
            let error = match (statistics, magnitudes.get(&id)) {
                (Some(x), _) => (2f64.powi(-14) + 4.0 * rounding(x.dtype).0) * largest,
                (None, Some(magnitude)) => factor * magnitude.data[n],
                (None, None) => factor * largest,
            };
            ulp * want.data[n].abs() + subnormal + error
        };
        let kind = match position {
            Some(op) => {
                let x = inputs.get(&op.x).cloned().unwrap_or_else(|| want.clone());
                let maxima = wanted.get(&op.y).map_or_else(Vec::new, |y| y.data.clone());
                Kind::Position { x, maxima, window: op.window.clone() }
            }
            None => Kind::Near((0..want.data.len()).map(near).collect()),
        };
        all.insert(id, Expected { name: tensor.name.clone(), want: want.clone(), kind });
    }
    Ok(all)
}

/// The index along each axis of a row-major position.
fn index_of(dims: &[i64], mut at: i64) -> Vec<i64> {
    let mut index: Vec<i64> = dims.iter().rev().map(|&n| (at % n, at /= n).0).collect();
    index.reverse();
    index
}

/// The element of `x` at position `tap` of a window, if it is there.
fn member(x: &Value, window: &Window, output: &[i64], tap: f64) -> Option<f64> {
    if !(0.0..window.extent.iter().product::<i64>() as f64).contains(&tap) {
        return None;
    }
    let mut at = output[0] * x.dims[1] + output[1];
    for (axis, tap) in index_of(&window.extent, tap as i64).into_iter().enumerate() {
        let i = output[axis + 2] * window.stride[axis] + tap - window.pre_padding[axis];
        if !(0..x.dims[axis + 2]).contains(&i) {
            return None;
        }
        at = at * x.dims[axis + 2] + i;
    }
    x.data.get(at as usize).copied()
}

impl Expected {
    /// Returns the largest error in tolerances, at most 1.
    ///
    /// # Errors
    /// Returns the element with the largest error if that is more than the tolerance, and how many others have too large ones.
    pub(crate) fn check(&self, got: &[f64]) -> Result<f64, String> {
        if got.len() != self.want.data.len() {
            return Err(format!("{}: got {} elements, expected {}", self.name, got.len(), self.want.data.len()));
        }
        let error = |n: usize| match &self.kind {
            Kind::Near(tolerance) => {
                let error = (got[n] - self.want.data[n]).abs();
                if error == 0.0 { 0.0 } else { error / tolerance[n] }
            }
            Kind::Position { x, maxima, window } => {
                let found = member(x, window, &index_of(&self.want.dims, n as i64), got[n]);
                if found.is_some() && found == maxima.get(n).copied() { 0.0 } else { f64::INFINITY }
            }
        };
        let errors: Vec<f64> = (0..got.len()).map(error).map(|e| if e.is_nan() { f64::INFINITY } else { e }).collect();
        let (worst, &most) =
            errors.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).ok_or_else(|| format!("{} is empty", self.name))?;
        if most <= 1.0 {
            return Ok(most);
        }
        let wrong = errors.iter().filter(|&&e| e > 1.0).count();
        let (at, want) = (index_of(&self.want.dims, worst as i64), self.want.data[worst]);
        Err(format!(
            "{} at {at:?}: got {}, expected {want}, {most:.3} of the tolerance; {wrong} of {} elements are wrong",
            self.name,
            got[worst],
            got.len()
        ))
    }
}
