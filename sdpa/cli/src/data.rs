//! Tensors in host memory.

use half::{bf16, f16};
use sdpa::{DType, Elements, ElementsMut, F8E4M3, F8E5M2, F8E8M0};
use std::io::Write;

/// An element type of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
}

impl Element {
    pub(crate) const ALL: [Element; 5] = [Element::F32, Element::F16, Element::BF16, Element::F8E4M3, Element::F8E5M2];

    /// Returns the element type of attention that corresponds to `dtype`; `None` for a type that attention does not use.
    pub(crate) fn of(dtype: DType) -> Option<Element> {
        Element::ALL.into_iter().find(|e| e.dtype() == dtype)
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            Element::F32 => DType::F32,
            Element::F16 => DType::F16,
            Element::BF16 => DType::BF16,
            Element::F8E4M3 => DType::F8E4M3,
            Element::F8E5M2 => DType::F8E5M2,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::BF16 => 2,
            Element::F8E4M3 | Element::F8E5M2 => 1,
        }
    }
}

/// The factor by which stored 8-bit floats are multiplied to get real numbers.
#[derive(Debug)]
pub(crate) enum Descale {
    /// One factor for all elements of the tensor.
    One(f32),
    /// One factor per element, from block scales.
    Each(Vec<F8E8M0>),
}

impl Descale {
    fn of(&self, at: usize) -> f64 {
        match self {
            Descale::One(descale) => f64::from(*descale),
            Descale::Each(descales) => f64::from(descales[at].to_f32()),
        }
    }
}

/// The elements of one tensor.
#[derive(Debug)]
pub(crate) enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    /// 8-bit floats with 4 exponent bits, and their descale.
    F8E4M3(Vec<F8E4M3>, Descale),
    /// 8-bit floats with 5 exponent bits, and their descale.
    F8E5M2(Vec<F8E5M2>, Descale),
}

fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>, String> {
    let mut v = Vec::new();
    v.try_reserve_exact(len).map_err(|e| format!("no memory for {len} elements: {e}"))?;
    v.resize(len, T::default());
    Ok(v)
}

impl Data {
    /// Returns memory filled with zeros, or a message if there is not enough memory.
    pub(crate) fn zeros(element: Element, len: usize) -> Result<Data, String> {
        Ok(match element {
            Element::F32 => Data::F32(zeros(len)?),
            Element::F16 => Data::F16(zeros(len)?),
            Element::BF16 => Data::BF16(zeros(len)?),
            Element::F8E4M3 => Data::F8E4M3(zeros(len)?, Descale::One(1.0)),
            Element::F8E5M2 => Data::F8E5M2(zeros(len)?, Descale::One(1.0)),
        })
    }

    /// Returns the element type.
    pub(crate) fn element(&self) -> Element {
        match self {
            Data::F32(_) => Element::F32,
            Data::F16(_) => Element::F16,
            Data::BF16(_) => Element::BF16,
            Data::F8E4M3(..) => Element::F8E4M3,
            Data::F8E5M2(..) => Element::F8E5M2,
        }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.elements().len()
    }

    /// Returns the descale of 8-bit floats; 1 for other types and for block scales.
    pub(crate) fn descale(&self) -> f32 {
        match self {
            Data::F32(_) | Data::F16(_) | Data::BF16(_) => 1.0,
            Data::F8E4M3(_, Descale::One(descale)) | Data::F8E5M2(_, Descale::One(descale)) => *descale,
            Data::F8E4M3(_, Descale::Each(_)) | Data::F8E5M2(_, Descale::Each(_)) => 1.0,
        }
    }

    /// Sets one descale for all elements of a tensor of 8-bit floats.
    pub(crate) fn set_descale(&mut self, to: f32) {
        self.stands_for(Descale::One(to));
    }

    /// Sets a descale for each element of a tensor of 8-bit floats.
    pub(crate) fn set_descales(&mut self, to: Vec<F8E8M0>) {
        self.stands_for(Descale::Each(to));
    }

    fn stands_for(&mut self, to: Descale) {
        match self {
            Data::F32(_) | Data::F16(_) | Data::BF16(_) => {}
            Data::F8E4M3(_, descale) | Data::F8E5M2(_, descale) => *descale = to,
        }
    }

    /// Stores a number at index `at`, rounded to the element type. The descale is not applied.
    pub(crate) fn set(&mut self, at: usize, value: f32) {
        match self {
            Data::F32(x) => x[at] = value,
            Data::F16(x) => x[at] = f16::from_f32(value),
            Data::BF16(x) => x[at] = bf16::from_f32(value),
            Data::F8E4M3(x, _) => x[at] = F8E4M3::from_f32(value),
            Data::F8E5M2(x, _) => x[at] = F8E5M2::from_f32(value),
        }
    }

    /// Returns an element times its descale. It is exact except for that product.
    pub(crate) fn get(&self, at: usize) -> f64 {
        match self {
            Data::F32(x) => f64::from(x[at]),
            Data::F16(x) => x[at].to_f64(),
            Data::BF16(x) => x[at].to_f64(),
            Data::F8E4M3(x, descale) => f64::from(x[at].to_f32()) * descale.of(at),
            Data::F8E5M2(x, descale) => f64::from(x[at].to_f32()) * descale.of(at),
        }
    }

    /// Returns the number of elements that are NaN.
    pub(crate) fn not_numbers(&self) -> usize {
        match self {
            Data::F32(x) => x.iter().filter(|x| x.is_nan()).count(),
            Data::F16(x) => x.iter().filter(|x| x.is_nan()).count(),
            Data::BF16(x) => x.iter().filter(|x| x.is_nan()).count(),
            Data::F8E4M3(x, _) => x.iter().filter(|x| x.to_f32().is_nan()).count(),
            Data::F8E5M2(x, _) => x.iter().filter(|x| x.to_f32().is_nan()).count(),
        }
    }

    /// Returns the elements of the tensor, for a call that reads them.
    pub(crate) fn elements(&self) -> Elements<'_> {
        match self {
            Data::F32(x) => Elements::F32(x),
            Data::F16(x) => Elements::F16(x),
            Data::BF16(x) => Elements::BF16(x),
            Data::F8E4M3(x, _) => Elements::F8E4M3(x),
            Data::F8E5M2(x, _) => Elements::F8E5M2(x),
        }
    }

    /// Returns the elements of the tensor, for a call that writes them.
    pub(crate) fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Data::F32(x) => ElementsMut::F32(x),
            Data::F16(x) => ElementsMut::F16(x),
            Data::BF16(x) => ElementsMut::BF16(x),
            Data::F8E4M3(x, _) => ElementsMut::F8E4M3(x),
            Data::F8E5M2(x, _) => ElementsMut::F8E5M2(x),
        }
    }

    /// Reads `to.len()` consecutive elements times their descale.
    pub(crate) fn row(&self, at: usize, to: &mut [f64]) {
        let end = at + to.len();
        match self {
            Data::F32(x) => to.iter_mut().zip(&x[at..end]).for_each(|(to, x)| *to = f64::from(*x)),
            Data::F16(x) => to.iter_mut().zip(&x[at..end]).for_each(|(to, x)| *to = x.to_f64()),
            Data::BF16(x) => to.iter_mut().zip(&x[at..end]).for_each(|(to, x)| *to = x.to_f64()),
            Data::F8E4M3(..) | Data::F8E5M2(..) => to.iter_mut().zip(at..end).for_each(|(to, at)| *to = self.get(at)),
        }
    }

    /// Writes the elements to `out`, little-endian.
    pub(crate) fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        match self {
            Data::F32(x) => write_blocks(x, out, |x| x.to_le_bytes()),
            Data::F16(x) => write_blocks(x, out, |x| x.to_le_bytes()),
            Data::BF16(x) => write_blocks(x, out, |x| x.to_le_bytes()),
            Data::F8E4M3(x, _) => write_blocks(x, out, |x| [x.to_bits()]),
            Data::F8E5M2(x, _) => write_blocks(x, out, |x| [x.to_bits()]),
        }
    }
}

/// Writes the bytes of numbers to `out`, a block at a time.
pub(crate) fn write_blocks<T: Copy, const N: usize>(x: &[T], out: &mut impl Write, bytes: impl Fn(T) -> [u8; N]) -> std::io::Result<()> {
    let mut block = Vec::new();
    for part in x.chunks(1 << 16) {
        block.clear();
        block.extend(part.iter().flat_map(|&x| bytes(x)));
        out.write_all(&block)?;
    }
    Ok(())
}
