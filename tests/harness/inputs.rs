//! Strided operands with random contents, in the operands' own type.

use crate::random::Random;
use half::{bf16, f16};
use sdpa::{DType, Elements, ElementsMut, TensorSpec};

/// One operand in host memory.
#[derive(Clone, Debug)]
pub enum Operand {
    /// binary32.
    F32(Vec<f32>),
    /// binary16.
    F16(Vec<f16>),
    /// bfloat16.
    BF16(Vec<bf16>),
}

impl Operand {
    /// All elements, those between rows too, set to one number.
    pub fn filled(dtype: DType, len: usize, value: f32) -> Operand {
        match dtype {
            DType::F16 => Operand::F16(vec![f16::from_f32(value); len]),
            DType::BF16 => Operand::BF16(vec![bf16::from_f32(value); len]),
            DType::F32 | DType::I32 | DType::I64 | DType::Bool => Operand::F32(vec![value; len]),
        }
    }

    /// For a call to read.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Operand::F32(x) => Elements::F32(x),
            Operand::F16(x) => Elements::F16(x),
            Operand::BF16(x) => Elements::BF16(x),
        }
    }

    /// For a call to write.
    pub fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Operand::F32(x) => ElementsMut::F32(x),
            Operand::F16(x) => ElementsMut::F16(x),
            Operand::BF16(x) => ElementsMut::BF16(x),
        }
    }

    fn set(&mut self, at: usize, value: f64) {
        match self {
            Operand::F32(x) => x[at] = value as f32,
            Operand::F16(x) => x[at] = f16::from_f64(value),
            Operand::BF16(x) => x[at] = bf16::from_f64(value),
        }
    }

    /// An element, exactly.
    pub fn get(&self, at: usize) -> f64 {
        match self {
            Operand::F32(x) => f64::from(x[at]),
            Operand::F16(x) => x[at].to_f64(),
            Operand::BF16(x) => x[at].to_f64(),
        }
    }
}

/// Where each element of a strided tensor is, in row-major order of its extents.
pub fn places(tensor: &TensorSpec) -> Vec<usize> {
    let [b, h, s, d] = tensor.dims;
    let mut places = Vec::with_capacity((b * h * s * d) as usize);
    for i in 0..b {
        for j in 0..h {
            for k in 0..s {
                let row = i * tensor.strides[0] + j * tensor.strides[1] + k * tensor.strides[2];
                places.extend((0..d).map(|e| (row + e * tensor.strides[3]) as usize));
            }
        }
    }
    places
}

/// Random elements where the tensor has some, NaN between them: whoever reads a gap shows it.
pub fn random(tensor: &TensorSpec, dtype: DType, spread: f64, random: &mut Random) -> Operand {
    random_about(0.0, tensor, dtype, spread, random)
}

/// The same about a mean.
pub fn random_about(mean: f64, tensor: &TensorSpec, dtype: DType, spread: f64, random: &mut Random) -> Operand {
    fill(tensor, dtype, || f64::from((mean + random.normal() * spread) as f32))
}

/// Makes rows past a length of their batch entry NaN.
pub fn spoil_rows(tensor: &TensorSpec, operand: &mut Operand, lengths: &[f64]) {
    let [_, heads, rows, dim] = tensor.dims.map(|d| d as usize);
    for (n, place) in places(tensor).into_iter().enumerate() {
        let row = n / dim % rows;
        if lengths.get(n / (dim * rows * heads)).is_some_and(|length| row as f64 >= *length) {
            operand.set(place, f64::NAN);
        }
    }
}

/// Elements in row-major order, rounded; NaN between them.
pub fn scatter(tensor: &TensorSpec, dtype: DType, elements: &[f64]) -> Operand {
    let mut elements = elements.iter().copied();
    fill(tensor, dtype, || elements.next().unwrap_or(f64::NAN))
}

fn fill(tensor: &TensorSpec, dtype: DType, mut next: impl FnMut() -> f64) -> Operand {
    let len = tensor.extent().unwrap_or(0) as usize;
    let mut operand = Operand::filled(dtype, len, f32::NAN);
    for place in places(tensor) {
        operand.set(place, next());
    }
    operand
}

/// What lies between the elements of a result, to be found again; every type has it.
const GAP: f32 = 12352.0;

/// Memory for a result: NaN where it has elements, so that none is left out or added to, and a number between them.
pub fn poisoned(tensor: &TensorSpec, dtype: DType) -> Operand {
    let len = tensor.extent().unwrap_or(0) as usize;
    let mut operand = Operand::filled(dtype, len, GAP);
    for place in places(tensor) {
        operand.set(place, f64::NAN);
    }
    operand
}

/// A place between the elements of a result that was [`poisoned`], and was written.
pub fn written_gap(tensor: &TensorSpec, operand: &Operand) -> Option<usize> {
    let mut belongs = vec![false; tensor.extent().unwrap_or(0) as usize];
    places(tensor).into_iter().for_each(|at| belongs[at] = true);
    (0..belongs.len()).find(|&at| !belongs[at] && operand.get(at) != f64::from(GAP))
}

/// The elements in row-major order, exactly.
pub fn gather(tensor: &TensorSpec, operand: &Operand) -> Vec<f64> {
    places(tensor).into_iter().map(|at| operand.get(at)).collect()
}
