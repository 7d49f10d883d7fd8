//! Random values of inputs, and the bytes of tensors.

use super::draw::Problem;
use super::draw::dice::Dice;
use cudnn_graph::ir::interp::{Precision, Value};
use cudnn_graph::ir::{Graph, Reordering, Storage, Tensor, TensorId};
use cudnn_graph::{DType, Verified};
use half::{bf16, f16};
use std::collections::{BTreeMap, BTreeSet};

/// The tensors in device memory that an op writes.
pub(crate) fn results(graph: &Graph) -> BTreeSet<TensorId> {
    let written = graph.ops().iter().flat_map(|op| op.operands().outputs).map(|o| o.tensor);
    written.filter(|id| graph.get(*id).is_some_and(Tensor::is_device)).collect()
}

/// A value for every input, which its type represents exactly. Scales and statistics that an op divides by are positive, and other floats are from -1 to 1.
pub(crate) fn inputs(problem: &Problem, graph: &Verified, seed: u64) -> BTreeMap<TensorId, Value> {
    let (written, mut dice) = (results(graph), Dice(seed ^ 0x5eed));
    let read = graph.ids().zip(graph.tensors()).filter(|(id, t)| t.storage == Storage::Device && !written.contains(id));
    let mut values = BTreeMap::new();
    for (id, tensor) in read {
        let n = tensor.dims.elements().unwrap_or(0) as usize;
        let positive = ["scale", "descale", "inv", "variance"].iter().any(|name| tensor.name.starts_with(name));
        let mut number = || match tensor.dtype {
            dtype if dtype.is_integer() => dice.from(-8, 7) as f64,
            dtype => {
                let x = dice.roll(1 << 30) as f64 / f64::from(1 << 29) - 1.0;
                Precision::F32.convert(if positive { 1.0 + x / 2.0 } else { x }, dtype)
            }
        };
        let data = problem.given.get(&id).cloned().unwrap_or_else(|| (0..n).map(|_| number()).collect());
        values.insert(id, Value::new(tensor.dims.0.clone(), data));
    }
    values
}

/// The index in memory of each element, row-major.
fn places(tensor: &Tensor) -> Vec<usize> {
    let axes = tensor.dims.0.iter().zip(&tensor.strides.0);
    axes.fold(vec![0], |places, (&n, &stride)| places.iter().flat_map(|at| (0..n).map(move |i| at + (i * stride) as usize)).collect())
}

fn eight_bits(bits: u8, dtype: DType) -> f64 {
    let (fraction_bits, bias) = if dtype == DType::F8E4M3 { (3, 7) } else { (2, 15) };
    let (exponent, fraction) = (i32::from((bits & 0x7f) >> fraction_bits), f64::from(bits & ((1 << fraction_bits) - 1)));
    let part = fraction / f64::from(1 << fraction_bits);
    let magnitude = match (dtype, bits & 0x7f) {
        (DType::F8E4M3, 0x7f) => f64::NAN,
        (DType::F8E5M2, 0x7c) => f64::INFINITY,
        (DType::F8E5M2, 0x7d..) => f64::NAN,
        _ if exponent == 0 => part * 2f64.powi(1 - bias),
        _ => (1.0 + part) * 2f64.powi(exponent - bias),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

fn unknown(tensor: &Tensor) -> Result<(), String> {
    use DType::{BF16, F8E4M3, F8E5M2, F16, F32, I8, I32};
    let known = [F32, F16, BF16, F8E4M3, F8E5M2, I8, I32].contains(&tensor.dtype) && tensor.reordering == Reordering::None;
    let what = || format!("{}: no bytes for type {} in order {:?}", tensor.name, tensor.dtype, tensor.reordering);
    if known { Ok(()) } else { Err(what()) }
}

/// The memory of a tensor with these elements.
pub(crate) fn to_bytes(tensor: &Tensor, value: &Value) -> Result<Vec<u8>, String> {
    unknown(tensor)?;
    let width = tensor.dtype.bits() as usize / 8;
    let mut bytes = vec![0u8; tensor.bytes().unwrap_or(0) as usize];
    let codes: Vec<f64> = (0..=255).map(|bits| eight_bits(bits, tensor.dtype)).collect();
    for (at, &x) in places(tensor).into_iter().zip(&value.data) {
        let element = &mut bytes[at * width..(at + 1) * width];
        match tensor.dtype {
            DType::F32 => element.copy_from_slice(&(x as f32).to_ne_bytes()),
            DType::F16 => element.copy_from_slice(&f16::from_f64(x).to_ne_bytes()),
            DType::BF16 => element.copy_from_slice(&bf16::from_f64(x).to_ne_bytes()),
            DType::I32 => element.copy_from_slice(&(x as i32).to_ne_bytes()),
            DType::I8 => element.copy_from_slice(&(x as i8).to_ne_bytes()),
            DType::F64
            | DType::U8
            | DType::I64
            | DType::Bool
            | DType::F8E4M3
            | DType::F8E5M2
            | DType::F8E8M0
            | DType::F4E2M1
            | DType::I4
            | DType::U4 => {
                element[0] =
                    codes.iter().position(|&code| code == x).ok_or_else(|| format!("{}: {x} is no {}", tensor.name, tensor.dtype))? as u8
            }
        }
    }
    Ok(bytes)
}

/// The elements of a tensor with this memory.
pub(crate) fn from_bytes(tensor: &Tensor, bytes: &[u8]) -> Result<Vec<f64>, String> {
    unknown(tensor)?;
    let width = tensor.dtype.bits() as usize / 8;
    let two = |at: usize| [bytes[at], bytes[at + 1]];
    let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let one = |at: usize| match tensor.dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(four(at))),
        DType::I32 => f64::from(i32::from_ne_bytes(four(at))),
        DType::F16 => f16::from_ne_bytes(two(at)).to_f64(),
        DType::BF16 => bf16::from_ne_bytes(two(at)).to_f64(),
        DType::I8 => f64::from(bytes[at] as i8),
        DType::F64
        | DType::U8
        | DType::I64
        | DType::Bool
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::F8E8M0
        | DType::F4E2M1
        | DType::I4
        | DType::U4 => eight_bits(bytes[at], tensor.dtype),
    };
    Ok(places(tensor).into_iter().map(|at| one(at * width)).collect())
}
