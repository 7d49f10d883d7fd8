//! Strided operands with random contents, in the operands' own element type.

use crate::packing::Laid;
use crate::random::Random;
use half::{bf16, f16};
use sdpa::{DType, Elements, ElementsMut, F8E4M3, F8E5M2, TensorSpec};

/// The elements of one operand in host memory, including the gaps between them.
#[derive(Clone, Debug)]
pub enum Operand {
    /// binary32.
    F32(Vec<f32>),
    /// binary16.
    F16(Vec<f16>),
    /// bfloat16.
    BF16(Vec<bf16>),
    /// 8-bit floats with 4 exponent bits.
    F8E4M3(Vec<F8E4M3>),
    /// 8-bit floats with 5 exponent bits.
    F8E5M2(Vec<F8E5M2>),
}

impl Operand {
    /// Returns an operand whose `len` elements, including those in gaps, are all `value`.
    pub fn filled(dtype: DType, len: usize, value: f32) -> Operand {
        match dtype {
            DType::F16 => Operand::F16(vec![f16::from_f32(value); len]),
            DType::BF16 => Operand::BF16(vec![bf16::from_f32(value); len]),
            DType::F8E4M3 => Operand::F8E4M3(vec![F8E4M3::from_f32(value); len]),
            DType::F8E5M2 => Operand::F8E5M2(vec![F8E5M2::from_f32(value); len]),
            DType::F32 | DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => Operand::F32(vec![value; len]),
        }
    }

    /// Returns the elements of the operand, gaps included, for a call that reads them.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Operand::F32(x) => Elements::F32(x),
            Operand::F16(x) => Elements::F16(x),
            Operand::BF16(x) => Elements::BF16(x),
            Operand::F8E4M3(x) => Elements::F8E4M3(x),
            Operand::F8E5M2(x) => Elements::F8E5M2(x),
        }
    }

    /// Returns the elements of the operand, gaps included, for a call that writes them.
    pub fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Operand::F32(x) => ElementsMut::F32(x),
            Operand::F16(x) => ElementsMut::F16(x),
            Operand::BF16(x) => ElementsMut::BF16(x),
            Operand::F8E4M3(x) => ElementsMut::F8E4M3(x),
            Operand::F8E5M2(x) => ElementsMut::F8E5M2(x),
        }
    }

    /// Returns the elements of the operand if they are f32, and otherwise `None`.
    pub fn numbers_mut(&mut self) -> Option<&mut [f32]> {
        match self {
            Operand::F32(x) => Some(x),
            Operand::F16(_) | Operand::BF16(_) | Operand::F8E4M3(_) | Operand::F8E5M2(_) => None,
        }
    }

    /// Returns the elements of the operand if they are f32, and otherwise an empty slice.
    pub fn numbers(&self) -> &[f32] {
        match self {
            Operand::F32(x) => x,
            Operand::F16(_) | Operand::BF16(_) | Operand::F8E4M3(_) | Operand::F8E5M2(_) => &[],
        }
    }

    pub(crate) fn set(&mut self, at: usize, value: f64) {
        match self {
            Operand::F32(x) => x[at] = value as f32,
            Operand::F16(x) => x[at] = f16::from_f64(value),
            Operand::BF16(x) => x[at] = bf16::from_f64(value),
            // Operands of 8-bit floats are drawn as f32 and converted later, so these arms do not run.
            Operand::F8E4M3(x) => x[at] = F8E4M3::from_f32(value as f32),
            Operand::F8E5M2(x) => x[at] = F8E5M2::from_f32(value as f32),
        }
    }

    /// Returns the element at offset `at`, which may be in a gap, exactly.
    pub fn get(&self, at: usize) -> f64 {
        match self {
            Operand::F32(x) => f64::from(x[at]),
            Operand::F16(x) => x[at].to_f64(),
            Operand::BF16(x) => x[at].to_f64(),
            Operand::F8E4M3(x) => x[at].to_f32().into(),
            Operand::F8E5M2(x) => x[at].to_f32().into(),
        }
    }
}

/// Returns an operand with random elements of standard deviation `spread`, and NaN in the gaps between them, so that reading a gap shows
/// in the result.
pub fn random(tensor: impl Into<Laid>, dtype: DType, spread: f64, random: &mut Random) -> Operand {
    random_about(0.0, tensor, dtype, spread, random)
}

/// Returns an operand with random elements of mean `mean` and standard deviation `spread`, and NaN in the gaps between them.
pub fn random_about(mean: f64, tensor: impl Into<Laid>, dtype: DType, spread: f64, random: &mut Random) -> Operand {
    fill(&tensor.into(), dtype, || f64::from((mean + random.normal() * spread) as f32))
}

/// Sets the rows of an operand past the length of their batch entry to NaN.
pub fn spoil_rows(tensor: &TensorSpec, operand: &mut Operand, lengths: &[f64]) {
    let [_, heads, rows, dim] = tensor.dims.map(|d| d as usize);
    for (n, place) in Laid::from(tensor).places().into_iter().enumerate() {
        let row = n / dim % rows;
        if lengths.get(n / (dim * rows * heads)).is_some_and(|length| row as f64 >= *length) {
            place.into_iter().for_each(|place| operand.set(place, f64::NAN));
        }
    }
}

/// Replaces NaN in the gaps of an operand by numbers.
pub fn number_gaps(tensor: &TensorSpec, operand: &mut Operand) {
    for place in Laid::from(tensor).places().into_iter().flatten() {
        if operand.get(place).is_nan() {
            operand.set(place, 0.5);
        }
    }
}

/// Returns an operand with elements that are given in row-major order, rounded to the type `dtype`, and NaN in the gaps between them.
pub fn scatter(tensor: impl Into<Laid>, dtype: DType, elements: &[f64]) -> Operand {
    let laid = tensor.into();
    let mut operand = Operand::filled(dtype, laid.elements(), f32::NAN);
    for (place, x) in laid.places().into_iter().zip(elements) {
        place.into_iter().for_each(|place| operand.set(place, *x));
    }
    operand
}

fn fill(laid: &Laid, dtype: DType, mut next: impl FnMut() -> f64) -> Operand {
    let mut operand = Operand::filled(dtype, laid.elements(), f32::NAN);
    for place in laid.places().into_iter().flatten() {
        operand.set(place, next());
    }
    operand
}

/// Marks gaps in results, so that a write to a gap can be detected. Every type can represent it.
const GAP: f32 = 384.0;

/// Returns memory for a result. Its elements are NaN, so that elements that are not written, or only added to, show. Its gaps hold a
/// marker.
pub fn poisoned(tensor: impl Into<Laid>, dtype: DType) -> Operand {
    let laid = tensor.into();
    let mut operand = Operand::filled(dtype, laid.elements(), GAP);
    for place in laid.places().into_iter().flatten() {
        operand.set(place, f64::NAN);
    }
    operand
}

/// Returns the offset of a gap of a [`poisoned`] result in which something was written; `None` if there is none.
pub fn written_gap(tensor: impl Into<Laid>, operand: &Operand) -> Option<usize> {
    let laid = tensor.into();
    let mut belongs = vec![false; laid.elements()];
    laid.places().into_iter().flatten().for_each(|at| belongs[at] = true);
    (0..belongs.len()).find(|&at| !belongs[at] && operand.get(at) != f64::from(GAP))
}

/// Returns the elements of an operand in row-major order, exactly; 0 past the end of a sequence.
pub fn gather(tensor: impl Into<Laid>, operand: &Operand) -> Vec<f64> {
    gather_or(0.0, tensor, operand)
}

/// Returns the elements of an operand in row-major order, exactly, with `rest` past the end of a sequence.
pub fn gather_or(rest: f64, tensor: impl Into<Laid>, operand: &Operand) -> Vec<f64> {
    tensor.into().places().into_iter().map(|at| at.map_or(rest, |at| operand.get(at))).collect()
}
