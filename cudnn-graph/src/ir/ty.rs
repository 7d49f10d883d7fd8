//! Element types, extents and strides.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a tensor, or the compute type of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// A boolean (one bit in cuDNN's virtual tensors).
    Bool,
    /// 8-bit float, 4 exponent bits, no infinities (OCP E4M3).
    F8E4M3,
    /// 8-bit float, 5 exponent bits (OCP E5M2).
    F8E5M2,
    /// 8-bit power-of-two scale (OCP E8M0), since cuDNN 9.7.
    F8E8M0,
    /// 4-bit float (OCP E2M1), since cuDNN 9.7.
    F4E2M1,
    /// Signed 4-bit integer, since cuDNN 9.11.
    I4,
    /// Unsigned 4-bit integer, since cuDNN 9.11.
    U4,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [DType; 15] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::U8,
        DType::I32,
        DType::I64,
        DType::Bool,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::F8E8M0,
        DType::F4E2M1,
        DType::I4,
        DType::U4,
    ];

    /// Returns the name used in printed graphs, files and options.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::F8E8M0 => "f8e8m0",
            DType::F4E2M1 => "f4e2m1",
            DType::I4 => "i4",
            DType::U4 => "u4",
        }
    }

    /// Returns the number of bits of one element in device memory.
    pub fn bits(self) -> u32 {
        match self {
            DType::F64 | DType::I64 => 64,
            DType::F32 | DType::I32 => 32,
            DType::F16 | DType::BF16 => 16,
            DType::I8 | DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => 8,
            DType::F4E2M1 | DType::I4 | DType::U4 => 4,
        }
    }

    /// Returns the number of bytes that `elements` elements take, rounded up.
    pub fn bytes(self, elements: u64) -> u64 {
        (elements * u64::from(self.bits())).div_ceil(8)
    }

    /// Returns whether this is a floating-point type, including the 8-bit and 4-bit ones.
    pub fn is_float(self) -> bool {
        match self {
            DType::F32 | DType::F64 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::F4E2M1 => true,
            DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::Bool | DType::I4 | DType::U4 => false,
        }
    }

    /// Returns whether this is an integer type; `Bool` is not one.
    pub fn is_integer(self) -> bool {
        !self.is_float() && self != DType::Bool
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The largest rank that cuDNN's tensors have (`CUDNN_DIM_MAX`).
pub const MAX_RANK: usize = 8;

/// The extents of a tensor, outermost axis first; at most [`MAX_RANK`] of them.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dims(pub Vec<i64>);

/// The strides of a tensor: the distance between neighbours along each axis, in elements.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Strides(pub Vec<i64>);

impl Dims {
    /// Returns the product of the extents; `None` if it does not fit an `i64`.
    pub fn elements(&self) -> Option<i64> {
        self.0.iter().try_fold(1i64, |n, &d| n.checked_mul(d))
    }

    /// Returns the strides of a dense tensor of these extents, with the last axis innermost. Strides saturate if a product does not fit;
    /// [`crate::ir::verify`] reports that.
    pub fn packed(&self) -> Strides {
        let mut next = 1i64;
        let mut strides: Vec<i64> = self
            .0
            .iter()
            .rev()
            .map(|&d| {
                let here = next;
                next = next.saturating_mul(d.max(1));
                here
            })
            .collect();
        strides.reverse();
        Strides(strides)
    }

    /// Returns the strides of a dense tensor of these extents whose second axis, the channels, is innermost (NHWC). With fewer than three
    /// axes, they are those of [`Dims::packed`].
    pub fn channels_last(&self) -> Strides {
        if self.rank() < 3 {
            return self.packed();
        }
        let mut order = self.0.clone();
        let channels = order.remove(1);
        order.push(channels);
        let mut strides = Dims(order).packed().0;
        if let Some(channels) = strides.pop() {
            strides.insert(1, channels);
        }
        Strides(strides)
    }

    /// Returns the number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Returns the extents of two operands broadcast against each other, axis by axis from the last; `None` if two extents differ and neither is 1.
    pub fn broadcast(&self, other: &Dims) -> Option<Dims> {
        let rank = self.rank().max(other.rank());
        let at = |d: &Dims, axis: usize| -> i64 {
            let missing = rank - d.rank();
            if axis < missing { 1 } else { d.0[axis - missing] }
        };
        (0..rank)
            .map(|axis| match (at(self, axis), at(other, axis)) {
                (a, b) if a == b => Some(a),
                (1, b) => Some(b),
                (a, 1) => Some(a),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()
            .map(Dims)
    }
}

impl Strides {
    /// Returns the index of the last element plus one, which is the number of elements that a buffer must have. `None` if it does not fit
    /// an `i64`, or if a stride is negative.
    pub fn extent(&self, dims: &Dims) -> Option<i64> {
        self.0.iter().zip(&dims.0).try_fold(1i64, |n, (&s, &d)| {
            if s < 0 || d < 1 {
                return None;
            }
            n.checked_add(s.checked_mul(d - 1)?)
        })
    }

    /// Returns stride and extent of every axis with more than one element, the smallest stride first.
    fn axes(&self, dims: &Dims) -> Vec<(i64, i64)> {
        let mut axes: Vec<(i64, i64)> = self.0.iter().copied().zip(dims.0.iter().copied()).filter(|&(_, d)| d > 1).collect();
        axes.sort_unstable();
        axes
    }

    /// Returns whether an axis has a smaller stride than the axes inside of it cover, as cuDNN counts: stride 0 is a broadcast, and no overlap.
    pub(crate) fn overlap(&self, dims: &Dims) -> bool {
        let axes: Vec<(i64, i64)> = self.axes(dims).into_iter().filter(|&(s, _)| s > 0).collect();
        axes.windows(2).any(|pair| pair[1].0 < pair[0].0.saturating_mul(pair[0].1))
    }

    /// Returns whether two elements may be at the same index: an axis has a stride of 0, or one that is not above the last index of the axes
    /// inside of it.
    pub(crate) fn shares_elements(&self, dims: &Dims) -> bool {
        let mut last = 0i64;
        self.axes(dims).into_iter().any(|(s, d)| {
            let shared = s <= last;
            last = last.saturating_add(s.saturating_mul(d - 1));
            shared
        })
    }

    /// Returns whether the elements fill their memory without gaps, in any order of the axes.
    pub(crate) fn dense(&self, dims: &Dims) -> bool {
        let mut next = 1i64;
        self.axes(dims).into_iter().all(|(s, d)| {
            let here = s == next;
            next = next.saturating_mul(d);
            here
        })
    }

    /// Returns whether two tensors of extents `dims` have the same strides. Those of axes with one element do not count.
    pub(crate) fn same(&self, other: &Strides, dims: &Dims) -> bool {
        self.0.iter().zip(&other.0).zip(&dims.0).all(|((a, b), &d)| d == 1 || a == b)
    }
}

macro_rules! list {
    ($t:ty) => {
        impl<T: Into<Vec<i64>>> From<T> for $t {
            fn from(values: T) -> Self {
                Self(values.into())
            }
        }
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[")?;
                for (i, d) in self.0.iter().enumerate() {
                    if i > 0 {
                        f.write_str(",")?;
                    }
                    write!(f, "{d}")?;
                }
                f.write_str("]")
            }
        }
        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}
list!(Dims);
list!(Strides);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_strides_of_bhsd() {
        assert_eq!(Dims::from([2, 3, 5, 7]).packed(), Strides::from([105, 35, 7, 1]));
    }

    #[test]
    fn channels_are_innermost_in_nhwc() {
        assert_eq!(Dims::from([2, 3, 5, 7]).channels_last(), Strides::from([105, 1, 21, 3]));
        assert_eq!(Dims::from([2, 3]).channels_last(), Strides::from([3, 1]));
    }

    #[test]
    fn broadcast_takes_the_larger_and_refuses_a_mismatch() {
        let a = Dims::from([2, 1, 5]);
        assert_eq!(a.broadcast(&Dims::from([3, 1])), Some(Dims::from([2, 3, 5])));
        assert_eq!(a.broadcast(&Dims::from([4, 5])), Some(Dims::from([2, 4, 5])));
        assert_eq!(a.broadcast(&Dims::from([4])), None);
    }

    #[test]
    fn extent_counts_the_last_element_and_survives_overflow() {
        assert_eq!(Strides::from([10, 1]).extent(&Dims::from([3, 4])), Some(24));
        assert_eq!(Strides::from([i64::MAX, 1]).extent(&Dims::from([3, 4])), None);
    }

    #[test]
    fn overlaps_and_gaps_are_found_in_any_order_of_the_axes() {
        let dims = Dims::from([2, 1, 4]);
        let of = |strides: [i64; 3]| {
            let s = Strides::from(strides);
            (s.overlap(&dims), s.shares_elements(&dims), s.dense(&dims))
        };
        assert_eq!(of([4, 7, 1]), (false, false, true));
        assert_eq!(of([1, 0, 2]), (false, false, true));
        assert_eq!(of([5, 4, 1]), (false, false, false));
        assert_eq!(of([3, 4, 1]), (true, true, false));
        assert_eq!(of([7, 4, 2]), (true, false, false));
        assert_eq!(of([0, 4, 1]), (false, true, false));
        assert!(Strides::from([4, 7, 1]).same(&Strides::from([4, 9, 1]), &dims));
        assert!(!Strides::from([4, 7, 1]).same(&Strides::from([5, 7, 1]), &dims));
    }
}
