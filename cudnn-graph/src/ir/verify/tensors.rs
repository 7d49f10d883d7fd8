//! Rules of single tensors.

use super::{VerifyError, tensor_error};
use crate::ir::Graph;
use crate::ir::tensor::{Storage, Tensor, TensorId};
use crate::ir::ty::{DType, MAX_RANK};
use std::collections::{HashMap, HashSet};

/// Reports mistakes of tensors, and returns for each whether its shape is valid.
pub(super) fn check(graph: &Graph, errors: &mut Vec<VerifyError>) -> Vec<bool> {
    let shapes: Vec<Result<(), String>> = graph.tensors.iter().map(shape).collect();
    let sound: Vec<bool> = shapes.iter().map(Result::is_ok).collect();
    let inherited = inherited(graph, &sound);
    let written: HashSet<TensorId> = graph.ops.iter().flat_map(|op| op.operands().outputs).map(|o| o.tensor).collect();
    let mut names: HashMap<&str, TensorId> = HashMap::new();
    for ((id, tensor), shape) in graph.ids().zip(&graph.tensors).zip(shapes) {
        let mut fail = |message: String| errors.push(tensor_error(graph, id, message));
        if let (Err(message), false) = (&shape, inherited.contains(&id)) {
            fail(message.clone());
        }
        if !tensor.alignment.is_power_of_two() {
            fail(format!("alignment {} is not a power of two", tensor.alignment));
        } else if u64::from(tensor.alignment) < tensor.dtype.bytes(1) {
            fail(format!("alignment {} is below the {} bytes of an element", tensor.alignment, tensor.dtype.bytes(1)));
        }
        if shape.is_ok()
            && written.contains(&id)
            && tensor.is_device()
            && tensor.ragged.is_none()
            && tensor.strides.shares_elements(&tensor.dims)
        {
            fail(format!("an op writes it, but its strides {} place several elements at one index", tensor.strides));
        }
        value(tensor, &mut fail);
        if tensor.is_device() || tensor.storage == Storage::ByValue(None) {
            if tensor.name.is_empty() {
                fail("a caller cannot bind a tensor without a name".to_owned());
            } else if let Some(first) = names.get(tensor.name.as_str()) {
                fail(format!("{first} has the name {:?} already", tensor.name));
            } else {
                names.insert(&tensor.name, id);
            }
        }
        ragged(graph, tensor, &mut fail);
    }
    sound
}

/// Returns misshapen tensors that an op made from an older misshapen tensor: the builder copied the mistake.
fn inherited(graph: &Graph, sound: &[bool]) -> HashSet<TensorId> {
    let broken = |id: TensorId| sound.get(id.index()) == Some(&false);
    let mut inherited = HashSet::new();
    for op in &graph.ops {
        let all = op.operands();
        let Some(cause) = all.inputs.iter().map(|o| o.tensor).filter(|&id| broken(id)).min() else { continue };
        inherited.extend(all.outputs.iter().map(|o| o.tensor).filter(|&id| broken(id) && id > cause));
    }
    inherited
}

fn shape(tensor: &Tensor) -> Result<(), String> {
    let (dims, strides) = (&tensor.dims.0, &tensor.strides.0);
    if dims.is_empty() || dims.len() > MAX_RANK {
        return Err(format!("rank {} is not in 1..={MAX_RANK}", dims.len()));
    }
    if let Some(d) = dims.iter().find(|&&d| !(1..=i64::from(i32::MAX)).contains(&d)) {
        return Err(format!("extent {d} is not in 1..={}", i32::MAX));
    }
    if strides.len() != dims.len() {
        return Err(format!("{} strides for {} axes", strides.len(), dims.len()));
    }
    if let Some(s) = strides.iter().find(|&&s| s < 0) {
        return Err(format!("stride {s} is negative"));
    }
    if tensor.dims.elements().is_none() || tensor.bytes().is_none() {
        return Err("the number of elements or bytes does not fit in 64 bits".to_owned());
    }
    Ok(())
}

fn value(tensor: &Tensor, fail: &mut impl FnMut(String)) {
    let value = match tensor.storage {
        Storage::Device | Storage::Virtual => return,
        Storage::ByValue(value) => value,
        Storage::Constant(value) => Some(value),
    };
    if tensor.dims.0.iter().any(|&d| d != 1) {
        fail(format!("a value has one element, not {}", tensor.dims));
    }
    if let Some(value) = value.filter(|v| v.dtype() != tensor.dtype) {
        fail(format!("its value is {}, the tensor {}", value.dtype(), tensor.dtype));
    }
}

fn ragged(graph: &Graph, tensor: &Tensor, fail: &mut impl FnMut(String)) {
    let Some(ragged) = tensor.ragged else { return };
    if tensor.is_scalar_value() {
        fail("a value cannot be ragged".to_owned());
    }
    if let Some(multiplier) = ragged.multiplier.filter(|&m| m < 1) {
        fail(format!("ragged multiplier {multiplier} is below 1"));
    }
    let id = ragged.offsets;
    let Some(offsets) = graph.get(id) else { return fail(format!("ragged offsets {id} do not exist")) };
    if ![DType::I32, DType::I64].contains(&offsets.dtype) {
        fail(format!("ragged offsets {id} are {}, not i32 or i64", offsets.dtype));
    }
    let batch = tensor.dims.0.first().copied().unwrap_or(0);
    if offsets.dims.0 != [batch.saturating_add(1), 1, 1, 1] {
        fail(format!("ragged offsets {id} are {}, not [{},1,1,1]", offsets.dims, batch.saturating_add(1)));
    }
    if !offsets.is_device() {
        fail(format!("ragged offsets {id} are not in device memory"));
    } else if graph.ops.iter().any(|op| op.operands().outputs.iter().any(|o| o.tensor == id)) {
        fail(format!("ragged offsets {id} are the result of an op"));
    }
}
