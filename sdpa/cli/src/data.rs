//! Tensors in host memory.

use half::{bf16, f16};
use sdpa::{DType, Elements, ElementsMut};
use std::io::Write;

/// An element type that attention is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    BF16,
}

impl Element {
    pub(crate) const ALL: [Element; 3] = [Element::F32, Element::F16, Element::BF16];

    /// `None` for what attention is not computed in.
    pub(crate) fn of(dtype: DType) -> Option<Element> {
        Element::ALL.into_iter().find(|e| e.dtype() == dtype)
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            Element::F32 => DType::F32,
            Element::F16 => DType::F16,
            Element::BF16 => DType::BF16,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::BF16 => 2,
        }
    }
}

/// The elements of one tensor.
#[derive(Debug)]
pub(crate) enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>, String> {
    let mut v = Vec::new();
    v.try_reserve_exact(len).map_err(|e| format!("no memory for {len} elements: {e}"))?;
    v.resize(len, T::default());
    Ok(v)
}

impl Data {
    /// Zeros, or a message where memory does not suffice.
    pub(crate) fn zeros(element: Element, len: usize) -> Result<Data, String> {
        Ok(match element {
            Element::F32 => Data::F32(zeros(len)?),
            Element::F16 => Data::F16(zeros(len)?),
            Element::BF16 => Data::BF16(zeros(len)?),
        })
    }

    /// The element type.
    pub(crate) fn element(&self) -> Element {
        match self {
            Data::F32(_) => Element::F32,
            Data::F16(_) => Element::F16,
            Data::BF16(_) => Element::BF16,
        }
    }

    /// One element, exactly.
    pub(crate) fn get(&self, at: usize) -> f64 {
        match self {
            Data::F32(x) => f64::from(x[at]),
            Data::F16(x) => x[at].to_f64(),
            Data::BF16(x) => x[at].to_f64(),
        }
    }

    /// How many elements are not a number.
    pub(crate) fn not_numbers(&self) -> usize {
        match self {
            Data::F32(x) => x.iter().filter(|x| x.is_nan()).count(),
            Data::F16(x) => x.iter().filter(|x| x.is_nan()).count(),
            Data::BF16(x) => x.iter().filter(|x| x.is_nan()).count(),
        }
    }

    /// For a call to read.
    pub(crate) fn elements(&self) -> Elements<'_> {
        match self {
            Data::F32(x) => Elements::F32(x),
            Data::F16(x) => Elements::F16(x),
            Data::BF16(x) => Elements::BF16(x),
        }
    }

    /// For a call to write.
    pub(crate) fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Data::F32(x) => ElementsMut::F32(x),
            Data::F16(x) => ElementsMut::F16(x),
            Data::BF16(x) => ElementsMut::BF16(x),
        }
    }

    /// As many neighbours as `to` holds, exactly.
    pub(crate) fn row(&self, at: usize, to: &mut [f64]) {
        let end = at + to.len();
        match self {
            Data::F32(x) => to.iter_mut().zip(&x[at..end]).for_each(|(to, x)| *to = f64::from(*x)),
            Data::F16(x) => to.iter_mut().zip(&x[at..end]).for_each(|(to, x)| *to = x.to_f64()),
            Data::BF16(x) => to.iter_mut().zip(&x[at..end]).for_each(|(to, x)| *to = x.to_f64()),
        }
    }

    /// Writes the elements, little end first.
    pub(crate) fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        match self {
            Data::F32(x) => write_blocks(x, out, |x| x.to_le_bytes()),
            Data::F16(x) => write_blocks(x, out, |x| x.to_le_bytes()),
            Data::BF16(x) => write_blocks(x, out, |x| x.to_le_bytes()),
        }
    }
}

/// Writes numbers in blocks.
pub(crate) fn write_blocks<T: Copy, const N: usize>(x: &[T], out: &mut impl Write, bytes: impl Fn(T) -> [u8; N]) -> std::io::Result<()> {
    let mut block = Vec::new();
    for part in x.chunks(1 << 16) {
        block.clear();
        block.extend(part.iter().flat_map(|&x| bytes(x)));
        out.write_all(&block)?;
    }
    Ok(())
}
