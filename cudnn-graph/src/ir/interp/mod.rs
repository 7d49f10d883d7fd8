//! The definition of every op: computes the results of a [`Verified`] graph from values of its inputs.
//!
//! Written for clarity and correctness, not for speed. Every executor is compared with it; `docs/numerics.md` collects its conventions.
//!
//! - A [`Value`] holds the logical elements of a tensor in row-major order. Strides matter to reshapes that are views only;
//!   ragged packing, reordering and alignment do not matter, and offsets of ragged tensors need no value.
//! - Every op computes in f64, rounded as [`Precision`] determines: once per pointwise op, once per term of a sum, and once more when the result is
//!   stored in its tensor.
//! - Norms compute statistics and results in f64 and round once, when they are stored. Of max pooling, the first of equal elements is the maximum.
//! - Random bits are specific to the library. The caller passes the result of an rng op, and the random numbers of dropout.
//!
//! ```
//! use cudnn_graph::ir::interp::{run, Precision, Value};
//! use cudnn_graph::ir::{Graph, Mode};
//! use cudnn_graph::DType;
//!
//! let mut g = Graph::new();
//! let x = g.input("x", DType::F32, [2, 2]);
//! let y = g.pointwise(Mode::Exp, &[x]);
//! g.output(y, "y", DType::F32);
//! let g = g.verify().unwrap();
//! let out = run(&g, &[(x, Value::new([2, 2], [0.0, 0.0, 0.0, f64::NEG_INFINITY]))].into(), Precision::F64).unwrap();
//! assert_eq!(out[&y].data, [1.0, 1.0, 1.0, 0.0]);
//! ```

mod attention;
mod axes;
mod convolution;
mod error;
mod experts;
mod gradient;
mod inputs;
mod linear;
mod moves;
mod norms;
mod number;
mod pages;
mod scalar;
mod softmax;

pub use error::{BindingError, InterpError};
pub use number::Precision;
pub use scalar::{Operand, pointwise};

use super::Verified;
use super::op::{Op, Pointwise};
use super::pointwise::Mode;
use super::print::OpLine;
use super::tensor::{Tensor, TensorId};
use super::ty::DType;
use axes::{Broadcast, each};
use std::collections::BTreeMap;

/// The elements of one tensor, row-major. Bools are 0 and 1, integers are exact below 2⁵³.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Extents of the axes, outermost first.
    pub dims: Vec<i64>,
    /// The elements; their number is the product of the extents.
    pub data: Vec<f64>,
}

impl Value {
    /// Creates a value from extents and elements.
    pub fn new(dims: impl Into<Vec<i64>>, data: impl Into<Vec<f64>>) -> Value {
        Value { dims: dims.into(), data: data.into() }
    }

    /// Creates a value of one number, of rank 4 like a parameter.
    pub fn scalar(x: f64) -> Value {
        Value::new([1, 1, 1, 1], [x])
    }
}

/// Returns the contents of every device tensor that an op writes.
///
/// # Errors
/// Fails as [`run_all`] does.
pub fn run(graph: &Verified, inputs: &BTreeMap<TensorId, Value>, precision: Precision) -> Result<BTreeMap<TensorId, Value>, InterpError> {
    let mut all = run_all(graph, inputs, precision)?;
    let written: std::collections::BTreeSet<TensorId> = graph.ops().iter().flat_map(|op| op.operands().outputs).map(|o| o.tensor).collect();
    all.retain(|id, _| written.contains(id) && graph.get(*id).is_some_and(Tensor::is_device));
    Ok(all)
}

/// Returns the contents of every tensor, including inputs, scalars and virtual results.
///
/// # Errors
/// Returns every mistake in the inputs, or else the first op whose operands cannot be read or that the interpreter does not define.
pub fn run_all(
    graph: &Verified,
    inputs: &BTreeMap<TensorId, Value>,
    precision: Precision,
) -> Result<BTreeMap<TensorId, Value>, InterpError> {
    let mut state = State { graph, precision, inputs, values: inputs::bind(graph, inputs, precision)?, op: None };
    for op in graph.ops() {
        state.op = Some(op);
        step(&mut state, op)?;
    }
    Ok(graph.ids().zip(state.values).filter_map(|(id, value)| Some((id, value?))).collect())
}

fn step(state: &mut State<'_>, op: &Op) -> Result<(), InterpError> {
    match op {
        Op::Pointwise(op) => elementwise(state, op),
        Op::Matmul(op) => linear::matmul(state, op),
        Op::Reduction(op) => linear::reduction(state, op),
        Op::Reshape(op) => moves::reshape(state, op),
        Op::Transpose(op) => moves::transpose(state, op),
        Op::Slice(op) => moves::slice(state, op),
        Op::Concat(op) => experts::concat(state, op),
        Op::ConvForward(op) => convolution::forward(state, op),
        Op::ConvBackwardData(op) => convolution::backward_data(state, op),
        Op::ConvBackwardFilter(op) => convolution::backward_filter(state, op),
        Op::NormForward(op) => norms::forward(state, op),
        Op::NormBackward(op) => norms::backward(state, op),
        Op::GenStats(op) => norms::gen_stats(state, op),
        Op::BnFinalize(op) => norms::bn_finalize(state, op),
        Op::BnBackwardWeights(op) => norms::bn_backward_weights(state, op),
        Op::ResampleForward(op) => convolution::resample(state, op),
        Op::ResampleBackward(op) => convolution::resample_backward(state, op),
        Op::Upsample(op) => convolution::upsample(state, op),
        Op::MoeMatmul(op) => experts::moe_matmul(state, op),
        Op::MoeMatmulBackward(op) => experts::moe_matmul_backward(state, op),
        Op::Rope(op) => experts::rope(state, op),
        Op::RopeBackward(op) => experts::rope_backward(state, op),
        // The caller passed the random numbers as an input.
        Op::Rng(_) => Ok(()),
        Op::Softmax(op) => softmax::softmax(state, op),
        Op::BandMask(op) => softmax::band_mask(state, op),
        Op::PagedLoad(op) => pages::paged_load(state, op),
        Op::BlockScaleQuantize(op) => pages::quantize(state, op),
        Op::BlockScaleDequantize(op) => pages::dequantize(state, op),
        Op::SdpaForward(op) => attention::forward(state, op),
        Op::SdpaBackward(op) => gradient::backward(state, op),
    }
}

/// The values of all tensors so far.
struct State<'g> {
    graph: &'g Verified,
    precision: Precision,
    inputs: &'g BTreeMap<TensorId, Value>,
    values: Vec<Option<Value>>,
    /// The current op, for messages.
    op: Option<&'g Op>,
}

impl State<'_> {
    fn at(&self) -> String {
        self.op.map_or_else(String::new, |op| OpLine(op).to_string())
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, InterpError> {
        self.graph.get(id).ok_or_else(|| InterpError::NoValue { at: self.at(), tensor: id })
    }

    fn value(&self, id: TensorId) -> Result<&Value, InterpError> {
        let value = self.values.get(id.index()).and_then(Option::as_ref);
        value.ok_or_else(|| InterpError::NoValue { at: self.at(), tensor: id })
    }

    fn optional(&self, id: Option<TensorId>) -> Result<Option<&Value>, InterpError> {
        id.map(|id| self.value(id)).transpose()
    }

    /// Returns the single element of an optional operand.
    fn number(&self, id: Option<TensorId>) -> Result<Option<f64>, InterpError> {
        Ok(self.optional(id)?.and_then(|value| value.data.first().copied()))
    }

    fn dims(&self, id: TensorId) -> Result<Vec<i64>, InterpError> {
        Ok(self.tensor(id)?.dims.0.clone())
    }

    /// Stores `data` as the elements of `id`, rounded to its element type.
    fn store(&mut self, id: TensorId, mut data: Vec<f64>) -> Result<(), InterpError> {
        let tensor = self.tensor(id)?;
        let (dtype, dims) = (tensor.dtype, tensor.dims.0.clone());
        for x in &mut data {
            *x = self.precision.convert(*x, dtype);
        }
        if let Some(place) = self.values.get_mut(id.index()) {
            *place = Some(Value { dims, data });
        }
        Ok(())
    }

    fn store_optional(&mut self, id: Option<TensorId>, data: Vec<f64>) -> Result<(), InterpError> {
        id.map_or(Ok(()), |id| self.store(id, data))
    }
}

fn elementwise(state: &mut State<'_>, op: &Pointwise) -> Result<(), InterpError> {
    let dims = state.dims(op.y)?;
    // An index generator reads only the extents of x, which may have no value.
    let x = if op.mode == Mode::GenIndex { None } else { Some(state.value(op.x)?) };
    let [x, b, t, dy] =
        [x, state.optional(op.b)?, state.optional(op.t)?, state.optional(op.dy)?].map(|v| v.map(|v| (Broadcast::new(v, &dims), v)));
    let axis = op.params.axis.and_then(|axis| usize::try_from(axis).ok());
    let mut y = Vec::new();
    each(&dims, |index| {
        let at = |operand: &Option<(Broadcast, &Value)>| operand.as_ref().map_or(0.0, |(place, value)| value.data[place.of(index)]);
        let operand =
            Operand { x: at(&x), b: at(&b), t: at(&t), dy: at(&dy), index: axis.and_then(|a| index.get(a).copied()).unwrap_or(0) };
        y.push(pointwise(op.mode, &op.params, op.compute, state.precision, operand));
    });
    state.store(op.y, y)
}

/// Adds a term to a sum. Every accumulation uses this rule.
fn accumulate(precision: Precision, compute: DType, sum: f64, term: f64) -> f64 {
    precision.convert(sum + term, compute)
}
