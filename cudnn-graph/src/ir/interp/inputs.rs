//! Inputs: which tensors need a value, and which values are valid.

use super::axes::count;
use super::{BindingError, InterpError, Precision, Value};
use crate::ir::Verified;
use crate::ir::op::Op;
use crate::ir::print::OpLine;
use crate::ir::shape::{AttentionShape, attention_shape};
use crate::ir::tensor::{Scalar, Storage, Tensor, TensorId};
use std::collections::{BTreeMap, BTreeSet};

/// The largest tensor that is computed here.
const LIMIT: i64 = 1 << 28;

/// Whether the caller has to pass a value for a tensor.
#[derive(Clone)]
enum Need {
    /// No: an op writes it, or the graph supplies it.
    Nothing,
    /// Optional: nothing reads it here.
    Optional,
    Value,
    /// Yes: the random numbers of this op.
    RandomBits(String),
}

/// Returns the values of all tensors before the first op.
pub(super) fn bind(graph: &Verified, inputs: &BTreeMap<TensorId, Value>, precision: Precision) -> Result<Vec<Option<Value>>, InterpError> {
    let mut errors = Vec::new();
    let needs = needs(graph, &mut errors);
    for &tensor in inputs.keys().filter(|id| graph.get(**id).is_none()) {
        errors.push(BindingError::Unknown { tensor });
    }
    let mut values = Vec::with_capacity(needs.len());
    for ((id, tensor), need) in graph.ids().zip(graph.tensors()).zip(needs) {
        let name = || tensor.name.clone();
        let given = inputs.get(&id);
        match (need, given) {
            (Need::Value, None) => errors.push(BindingError::Missing { tensor: id, name: name() }),
            (Need::RandomBits(at), None) => errors.push(BindingError::RandomBits { tensor: id, name: name(), at }),
            (Need::Nothing, Some(_)) => errors.push(BindingError::NotAnInput { tensor: id, name: name() }),
            (Need::Value | Need::RandomBits(_) | Need::Optional, Some(value)) => errors.extend(wrong(id, tensor, value)),
            (Need::Nothing, None) if tensor.dims.elements().is_none_or(|n| n > LIMIT) => {
                errors.push(BindingError::TooLarge { tensor: id, name: name(), limit: LIMIT });
            }
            (Need::Nothing | Need::Optional, None) => {}
        }
        let convert = |x: &f64| precision.convert(*x, tensor.dtype);
        values.push(match (supplied(tensor), given) {
            (Some(scalar), _) => Some(Value::new(tensor.dims.0.clone(), [scalar.to_f64()])),
            (None, Some(value)) => Some(Value::new(value.dims.clone(), value.data.iter().map(convert).collect::<Vec<_>>())),
            (None, None) => None,
        });
    }
    if errors.is_empty() { Ok(values) } else { Err(InterpError::Bindings(errors)) }
}

fn supplied(tensor: &Tensor) -> Option<Scalar> {
    match tensor.storage {
        Storage::ByValue(value) => value,
        Storage::Constant(value) => Some(value),
        Storage::Device | Storage::Virtual => None,
    }
}

fn needs(graph: &Verified, errors: &mut Vec<BindingError>) -> Vec<Need> {
    let mut random: BTreeMap<TensorId, String> = BTreeMap::new();
    let (mut written, mut read) = (BTreeSet::new(), BTreeSet::new());
    let score_ops = graph.ops().iter().filter_map(Op::score).flat_map(|score| &score.ops);
    for op in graph.ops().iter().chain(score_ops) {
        let all = op.operands();
        read.extend(all.inputs.iter().map(|o| o.tensor));
        written.extend(all.outputs.iter().map(|o| o.tensor));
        written.extend(op.score().map(|score| score.input));
        match op {
            Op::Rng(rng) => {
                random.insert(rng.y, OpLine(op).to_string());
            }
            Op::SdpaForward(sdpa) => {
                let at = || OpLine(op).to_string();
                if attention_shape(graph, sdpa).is_ok_and(|shape| too_many(&shape)) {
                    errors.push(BindingError::HiddenTooLarge { at: at(), limit: LIMIT });
                }
                match sdpa.dropout {
                    Some(dropout) if dropout.probability > 0.0 => match dropout.rng_dump {
                        Some(dump) => {
                            random.insert(dump, at());
                        }
                        None => errors.push(BindingError::HiddenRandomBits { at: at() }),
                    },
                    Some(_) | None => {}
                }
            }
            Op::SdpaBackward(sdpa) => {
                let dims = |id: TensorId| graph.get(id).map_or(&[][..], |t| &t.dims.0[..]);
                if AttentionShape::of(dims(sdpa.q), dims(sdpa.k), dims(sdpa.v)).is_ok_and(|shape| too_many(&shape)) {
                    errors.push(BindingError::HiddenTooLarge { at: OpLine(op).to_string(), limit: LIMIT });
                }
            }
            Op::Pointwise(_)
            | Op::Matmul(_)
            | Op::Reduction(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Slice(_)
            | Op::Concat(_)
            | Op::ConvForward(_)
            | Op::ConvBackwardData(_)
            | Op::ConvBackwardFilter(_)
            | Op::NormForward(_)
            | Op::NormBackward(_)
            | Op::GenStats(_)
            | Op::BnFinalize(_)
            | Op::BnBackwardWeights(_)
            | Op::ResampleForward(_)
            | Op::ResampleBackward(_)
            | Op::Upsample(_)
            | Op::MoeMatmul(_)
            | Op::MoeMatmulBackward(_)
            | Op::Rope(_)
            | Op::RopeBackward(_)
            | Op::Softmax(_)
            | Op::BandMask(_)
            | Op::PagedLoad(_)
            | Op::BlockScaleQuantize(_)
            | Op::BlockScaleDequantize(_) => {}
        }
    }
    graph
        .ids()
        .zip(graph.tensors())
        .map(|(id, tensor)| {
            if let Some(at) = random.remove(&id) {
                Need::RandomBits(at)
            } else if written.contains(&id) || supplied(tensor).is_some() {
                Need::Nothing
            } else if read.contains(&id) {
                Need::Value
            } else {
                Need::Optional
            }
        })
        .collect()
}

/// Returns whether there are too many scores: they are all computed, although no tensor holds them.
fn too_many(shape: &AttentionShape) -> bool {
    shape.scores().iter().try_fold(1i64, |n, &d| n.checked_mul(d)).is_none_or(|n| n > LIMIT)
}

fn wrong(id: TensorId, tensor: &Tensor, value: &Value) -> Option<BindingError> {
    let name = || tensor.name.clone();
    if value.dims != tensor.dims.0 {
        return Some(BindingError::Extents { tensor: id, name: name(), want: tensor.dims.0.clone(), got: value.dims.clone() });
    }
    if value.data.len() != count(&value.dims) {
        return Some(BindingError::Elements {
            tensor: id,
            name: name(),
            want: tensor.dims.elements().unwrap_or(i64::MAX),
            got: value.data.len(),
        });
    }
    if tensor.dtype.is_float() {
        return None;
    }
    // The conversion leaves valid integers and booleans of this width unchanged, so an element that changes is invalid.
    let index = value.data.iter().position(|&x| Precision::F64.convert(x, tensor.dtype) != x)?;
    Some(BindingError::Element { tensor: id, name: name(), index, value: value.data[index] })
}
