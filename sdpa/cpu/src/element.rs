//! Element types, and conversion to and from f32.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use sdpa_core::tensor::{Elements, ElementsMut};

/// The element type of operands.
pub(super) trait Element: Copy + Send + Sync + 'static {
    /// Returns the elements if they are of this type.
    fn of(elements: Elements<'_>) -> Option<&[Self]>;

    /// Returns writable elements if they are of this type.
    fn of_mut(elements: ElementsMut<'_>) -> Option<&mut [Self]>;

    /// Returns the memory as f32 if this type is f32.
    fn as_f32(elements: &[Self]) -> Option<&[f32]>;

    /// Converts to f32, exactly. Both slices have the same length.
    fn widen(from: &[Self], to: &mut [f32]);

    /// Converts f32 times `factor`, rounding to nearest even. Both slices have the same length.
    fn narrow(from: &[f32], factor: f32, to: &mut [Self]);
}

/// Number of elements that are converted at a time.
const CHUNK: usize = 64;

impl Element for f32 {
    fn of(elements: Elements<'_>) -> Option<&[f32]> {
        match elements {
            Elements::F32(x) => Some(x),
            Elements::F16(_) | Elements::BF16(_) | Elements::F8E4M3(_) | Elements::F8E5M2(_) => None,
        }
    }

    fn of_mut(elements: ElementsMut<'_>) -> Option<&mut [f32]> {
        match elements {
            ElementsMut::F32(x) => Some(x),
            ElementsMut::F16(_) | ElementsMut::BF16(_) | ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => None,
        }
    }

    #[inline(always)]
    fn as_f32(elements: &[f32]) -> Option<&[f32]> {
        Some(elements)
    }

    #[inline(always)]
    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn narrow(from: &[f32], factor: f32, to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
    }
}

impl Element for f16 {
    fn of(elements: Elements<'_>) -> Option<&[f16]> {
        match elements {
            Elements::F16(x) => Some(x),
            Elements::F32(_) | Elements::BF16(_) | Elements::F8E4M3(_) | Elements::F8E5M2(_) => None,
        }
    }

    fn of_mut(elements: ElementsMut<'_>) -> Option<&mut [f16]> {
        match elements {
            ElementsMut::F16(x) => Some(x),
            ElementsMut::F32(_) | ElementsMut::BF16(_) | ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => None,
        }
    }

    #[inline(always)]
    fn as_f32(_: &[f16]) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn narrow(from: &[f32], factor: f32, to: &mut [f16]) {
        for (to, from) in to.chunks_mut(CHUNK).zip(from.chunks(CHUNK)) {
            let mut scaled = [0.0; CHUNK];
            let scaled = &mut scaled[..from.len()];
            f32::narrow(from, factor, scaled);
            to.convert_from_f32_slice(scaled);
        }
    }
}

impl Element for bf16 {
    fn of(elements: Elements<'_>) -> Option<&[bf16]> {
        match elements {
            Elements::BF16(x) => Some(x),
            Elements::F32(_) | Elements::F16(_) | Elements::F8E4M3(_) | Elements::F8E5M2(_) => None,
        }
    }

    fn of_mut(elements: ElementsMut<'_>) -> Option<&mut [bf16]> {
        match elements {
            ElementsMut::BF16(x) => Some(x),
            ElementsMut::F32(_) | ElementsMut::F16(_) | ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => None,
        }
    }

    #[inline(always)]
    fn as_f32(_: &[bf16]) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn widen(from: &[bf16], to: &mut [f32]) {
        // Do not call the loop of the crate `half`: it quiets NaN, and is not compiled for the detected instruction set.
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn narrow(from: &[f32], factor: f32, to: &mut [bf16]) {
        for (to, from) in to.chunks_mut(CHUNK).zip(from.chunks(CHUNK)) {
            let mut scaled = [0.0; CHUNK];
            let scaled = &mut scaled[..from.len()];
            f32::narrow(from, factor, scaled);
            to.convert_from_f32_slice(scaled);
        }
    }
}
