//! Loads elements of bound tensors into registers.

use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use sdpa_core::F8E8M0;
use sdpa_core::tensor::ParamValue;

/// A bound parameter, and the strides of its elements along (batch, head, q, k); 0 along axes that it does not span.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor<'a> {
    pub(super) value: ParamValue<'a>,
    pub(super) strides: [usize; 4],
}

impl Tensor<'_> {
    /// Reads the elements of a table at these i32 indices; indices out of range are clamped.
    pub(super) fn read(&self, places: &[u32], to: &mut [u32]) {
        let last = self.value.elements().saturating_sub(1);
        let within = |place: u32| (place as i32).max(0).unsigned_abs() as usize;
        let mut each = |bits: &dyn Fn(usize) -> u32| {
            to.iter_mut().zip(places).for_each(|(to, place)| *to = bits(within(*place).min(last)));
        };
        match self.value {
            ParamValue::Scalar(x) => each(&|_| x.to_bits()),
            ParamValue::F32(x) => each(&|at| x[at].to_bits()),
            ParamValue::F16(x) => each(&|at| widen_f16(x[at])),
            ParamValue::BF16(x) => each(&|at| u32::from(x[at].to_bits()) << 16),
            ParamValue::I32(x) => each(&|at| x[at] as u32),
            ParamValue::I64(x) => each(&|at| x[at] as u32),
            ParamValue::Bool(x) => each(&|at| u32::from(x[at])),
            ParamValue::F8E8M0(x) => each(&|at| x[at].to_f32().to_bits()),
        }
    }
}

/// `to[key][row]` becomes the element at `rows[row] + key · step`.
#[derive(Debug)]
pub(super) struct Gather<'a> {
    pub(super) value: ParamValue<'a>,
    pub(super) rows: &'a [usize],
    pub(super) n_keys: usize,
    pub(super) step: usize,
    pub(super) to: &'a mut [u32],
}

impl WithSimd for Gather<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        match self.value {
            ParamValue::Scalar(x) => self.to.fill(x.to_bits()),
            ParamValue::F32(x) => self.gather(x, f32::to_bits),
            ParamValue::F16(x) => self.gather(x, widen_f16),
            ParamValue::BF16(x) => self.gather(x, |x: bf16| u32::from(x.to_bits()) << 16),
            ParamValue::I32(x) => self.gather(x, |x| x as u32),
            ParamValue::I64(x) => self.gather(x, |x| x as u32),
            ParamValue::Bool(x) => self.gather(x, u32::from),
            ParamValue::F8E8M0(x) => self.gather(x, |x: F8E8M0| x.to_f32().to_bits()),
        }
    }
}

/// Converts to f32 bits. The conversion of the crate `half` would query the processor's features each time.
#[inline(always)]
fn widen_f16(x: f16) -> u32 {
    let bits = u32::from(x.to_bits());
    // The exponent biases of f16 and f32 differ by 127 − 15. The multiplication corrects this, for subnormal numbers too.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((254 - 15) << 23);
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    magnitude.to_bits() | special | (bits & 0x8000) << 16
}

/// Side length of the squares that are transposed at a time.
const SIDE: usize = 8;

impl Gather<'_> {
    #[inline(always)]
    fn gather<T: Copy>(self, from: &[T], bits: impl Fn(T) -> u32) {
        let Gather { rows, n_keys, step, to, .. } = self;
        let width = rows.len();
        if step != 1 {
            for (key, to) in to.chunks_exact_mut(width).take(n_keys).enumerate() {
                for (to, row) in to.iter_mut().zip(rows) {
                    *to = bits(from[row + key * step]);
                }
            }
            return;
        }
        for key in (0..n_keys).step_by(SIDE) {
            for first in (0..width).step_by(SIDE) {
                let rows = &rows[first..(first + SIDE).min(width)];
                if let (Some(rows), true) = (rows.first_chunk::<SIDE>(), key + SIDE <= n_keys) {
                    let mut square = [[0; SIDE]; SIDE];
                    for (square, row) in square.iter_mut().zip(rows) {
                        let Some(from) = from[row + key..].first_chunk::<SIDE>() else { return };
                        *square = from.map(&bits);
                    }
                    for j in 0..SIDE {
                        let to = &mut to[(key + j) * width + first..][..SIDE];
                        for (to, row) in to.iter_mut().zip(&square) {
                            *to = row[j];
                        }
                    }
                } else {
                    for (lane, row) in rows.iter().enumerate() {
                        for j in key..(key + SIDE).min(n_keys) {
                            to[j * width + first + lane] = bits(from[row + j]);
                        }
                    }
                }
            }
        }
    }
}
