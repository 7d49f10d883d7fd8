//! Values of declared parameters: shapes, element types, conversions.

use crate::integers;
use crate::operand::{self, theirs};
use candle_core::{Result, Tensor};
use sdpa::expr::{Axes, Declared, ParamKind};
use sdpa::{DType, SpecError};

/// The value that a caller bound to the name of a parameter.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Scalar(f32),
    Tensor(Tensor),
}

/// The value of a parameter, in a form that a pass can read.
#[derive(Debug)]
#[cfg_attr(not(feature = "cpu"), expect(dead_code, reason = "the host alone reads what it converted"))]
pub(crate) enum Ready {
    Scalar(f32),
    /// A tensor that is read in place: contiguous and detached from the autograd graph. The type is the one that the pass reads: bytes as
    /// booleans, u32 as i32.
    Tensor(DType, Tensor),
    /// The number in a one-element tensor, and the tensor's element type.
    Number(f32, DType),
    Bools(Vec<bool>),
    I32(Vec<i32>),
    I64(Vec<i64>),
}

/// A parameter of a call, with its name and value.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) name: String,
    pub(crate) value: Ready,
}

impl Bound {
    /// Returns the element type of the parameter's gradient.
    pub(crate) fn gradient_dtype(&self) -> DType {
        match &self.value {
            Ready::Scalar(_) => DType::F32,
            Ready::Tensor(dtype, _) | Ready::Number(_, dtype) => *dtype,
            Ready::Bools(_) => DType::Bool,
            Ready::I32(_) => DType::I32,
            Ready::I64(_) => DType::I64,
        }
    }
}

/// Prepares the value of the parameter `name` for a problem of these extents, or returns the mistake in its shape or type. The executor
/// later checks the names and types of all parameters, and reports every mistake.
pub(crate) fn ready(
    name: &str,
    value: &Value,
    declared: Option<&Declared>,
    extents: [i64; 4],
) -> Result<std::result::Result<Bound, SpecError>> {
    let bound = |value| Ok(Ok(Bound { name: name.to_owned(), value }));
    let tensor = match value {
        Value::Scalar(x) => return bound(Ready::Scalar(*x)),
        Value::Tensor(tensor) => tensor,
    };
    let wrong = |value: String, rule: String| Ok(Err(SpecError::new(format!("parameter {name}"), value, rule)));
    let kind = declared.map(|d| d.kind);
    let wanted = match kind {
        Some(ParamKind::Scalar) => return Ok(number(name, tensor)?.map(|value| Bound { name: name.to_owned(), value })),
        Some(ParamKind::Tensor { axes, dtype }) => {
            if let Some(rule) = unlike(axes, extents, tensor.dims()) {
                return wrong(format!("shape {:?}", tensor.dims()), rule);
            }
            dtype
        }
        // No score_mod or mask declares this parameter.
        None => operand::dtype(tensor.dtype()).unwrap_or(DType::F32),
    };
    if tensor.dtype() != theirs(wanted) && !converts(tensor.dtype(), wanted) {
        return wrong(tensor.dtype().as_str().to_owned(), format!("{}, as declared", told(wanted)));
    }
    let tensor = integers::contiguous(&tensor.detach())?;
    if !tensor.device().is_cpu() {
        // The kernels read u32 as i32.
        let tensor = if wanted == DType::I32 { integers::to_32_bits(&tensor)? } else { integers::cast(&tensor, theirs(wanted))? };
        return bound(Ready::Tensor(wanted, tensor));
    }
    if wanted == DType::Bool {
        let bytes = tensor.flatten_all()?.to_vec1::<u8>()?;
        return bound(Ready::Bools(bytes.into_iter().map(|x| x != 0).collect()));
    }
    if tensor.dtype() == theirs(wanted) {
        return bound(Ready::Tensor(wanted, tensor));
    }
    let numbers = tensor.to_dtype(candle_core::DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    if wanted == DType::I64 {
        return bound(Ready::I64(numbers));
    }
    match numbers.iter().map(|&x| i32::try_from(x)).collect::<std::result::Result<Vec<i32>, _>>() {
        Ok(numbers) => bound(Ready::I32(numbers)),
        Err(_) => wrong("a number that does not fit an i32".to_owned(), "numbers from -2^31 to 2^31 - 1".to_owned()),
    }
}

fn told(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "u8, 0 or 1",
        DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::I64 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => dtype.name(),
    }
}

/// Returns true if integers of one type are accepted for another.
fn converts(from: candle_core::DType, to: DType) -> bool {
    use candle_core::DType::{I32, I64, U32};
    match to {
        DType::I32 | DType::I64 => [U32, I32, I64].contains(&from),
        DType::F32 | DType::F16 | DType::BF16 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => false,
    }
}

/// Reads a scalar, which must be in host memory: a tensor on the CPU is accepted.
fn number(name: &str, tensor: &Tensor) -> Result<std::result::Result<Ready, SpecError>> {
    let field = format!("parameter {name}");
    if tensor.elem_count() != 1 || tensor.dtype() != candle_core::DType::F32 {
        let value = format!("a tensor of {} {:?}", tensor.dtype().as_str(), tensor.dims());
        return Ok(Err(SpecError::new(field, value, "one f32, because the parameter is declared as a scalar")));
    }
    if !tensor.device().is_cpu() {
        let rule = "a tensor in host memory, as the host reads scalars; to pass it on the device, declare a tensor without axes";
        return Ok(Err(SpecError::new(field, format!("a tensor on {:?}", tensor.device().location()), rule)));
    }
    Ok(Ok(Ready::Number(tensor.flatten_all()?.to_vec1::<f32>()?[0], DType::F32)))
}

/// Returns the rule that a shape violates: an extent for each declared axis, or four with ones for the others.
fn unlike(axes: Axes, extents: [i64; 4], dims: &[usize]) -> Option<String> {
    let given: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
    let all = axes.dims(extents);
    if axes.has_end() {
        return (given != [all[0] + 1]).then(|| format!("[{}]: {axes}", all[0] + 1));
    }
    let own: Vec<i64> = if axes.is_table() { axes.extents().collect() } else { axes.iter().map(|axis| all[axis.place()]).collect() };
    if given == own || given == all || (own.is_empty() && given == [1]) {
        return None;
    }
    Some(format!("{own:?} ({axes}) or {all:?}"))
}
