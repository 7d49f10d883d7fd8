//! Kernel arguments: the constant bytes of a schedule, and the values that each call fills in.

use super::{GradientId, ParamId, SlotId};
use sdpa_core::{Operand, Side, Statistic};

/// An address in device memory, named by the object at this address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// Null: the kernels of this problem do not read it.
    Null,
    /// The first element of an operand.
    Operand(Operand),
    /// The first element of a row statistic.
    Statistic(Statistic),
    /// The first element of the tensor of a declared parameter.
    Param(ParamId),
    /// The first element of the gradient of a declared parameter.
    Gradient(GradientId),
    /// The address in a slot at this byte offset.
    Slot(SlotId, u64),
}

/// A 4-byte number that a call fills in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    /// The number 1 if scores are multiplied by the scale before the softmax, and otherwise 0.
    Natural,
    /// The scale of the call, `attn_scale`.
    Scale,
    /// The factor from a score to the exponent in base 2.
    Unit,
    /// The number of packed tokens of one side (queries or keys) for which the call has memory; 0 if the side is not packed.
    Tokens(Side),
}

/// A value that a call fills in: a number, an address or a declared scalar.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Address(Address),
    Number(Number),
    /// The value of a declared scalar, f32.
    Scalar(ParamId),
}

/// A value that a call fills in, and its byte offset in the arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    pub(crate) at: usize,
    pub(crate) value: Value,
}

/// An argument of a kernel, by the index of its first 8-byte word in [`Arguments`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockId(pub(crate) usize);

/// The arguments of all kernels of a schedule, each aligned to 8 bytes. Values that a call fills in are 0 here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arguments {
    words: Vec<u64>,
    bytes: usize,
    fills: Vec<Fill>,
}

impl Arguments {
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    pub(crate) fn fills(&self) -> &[Fill] {
        &self.fills
    }

    /// Adds an argument (a structure) whose members `push` adds. An empty structure takes a byte.
    pub(crate) fn block(&mut self, push: impl FnOnce(&mut Arguments)) -> BlockId {
        self.bytes = 8 * self.words.len();
        let block = BlockId(self.words.len());
        push(self);
        if self.words.len() == block.0 {
            self.words.push(0);
        }
        block
    }

    /// Adds a 4-byte member, and returns its byte offset.
    fn push_u32(&mut self, bits: u32) -> usize {
        let at = self.bytes;
        self.bytes += 4;
        if self.bytes > 8 * self.words.len() {
            self.words.push(0);
        }
        write_u32(&mut self.words, at, bits);
        at
    }

    /// Adds an 8-byte member at the next multiple of 8, as in C, and returns its byte offset.
    fn push_u64(&mut self, bits: u64) -> usize {
        let at = 8 * self.words.len();
        self.words.push(bits);
        self.bytes = at + 8;
        at
    }
}

/// Writes 4 bytes into words, at a multiple of 4 bytes. GPUs and their hosts are little-endian.
pub(crate) fn write_u32(words: &mut [u64], at: usize, bits: u32) {
    let shift = 8 * (at % 8);
    if let Some(word) = words.get_mut(at / 8) {
        *word = *word & !(u64::from(u32::MAX) << shift) | u64::from(bits) << shift;
    }
}

/// A member of a kernel's parameter structure, with C layout.
pub(crate) trait Member {
    fn push(&self, to: &mut Arguments);
}

impl Member for i32 {
    fn push(&self, to: &mut Arguments) {
        to.push_u32(self.cast_unsigned());
    }
}

impl Member for f32 {
    fn push(&self, to: &mut Arguments) {
        to.push_u32(self.to_bits());
    }
}

impl Member for i64 {
    fn push(&self, to: &mut Arguments) {
        to.push_u64(self.cast_unsigned());
    }
}

impl Member for u64 {
    fn push(&self, to: &mut Arguments) {
        to.push_u64(*self);
    }
}

impl Member for Address {
    fn push(&self, to: &mut Arguments) {
        let at = to.push_u64(0);
        if *self != Address::Null {
            to.fills.push(Fill { at, value: Value::Address(*self) });
        }
    }
}

impl Member for Number {
    fn push(&self, to: &mut Arguments) {
        let at = to.push_u32(0);
        to.fills.push(Fill { at, value: Value::Number(*self) });
    }
}

/// The f32 value of a declared scalar, as a member of a structure.
pub(crate) struct Scalar(pub(crate) ParamId);

impl Member for Scalar {
    fn push(&self, to: &mut Arguments) {
        let at = to.push_u32(0);
        to.fills.push(Fill { at, value: Value::Scalar(self.0) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_laid_out_as_c_does() {
        let mut arguments = Arguments::default();
        let first = arguments.block(|to| {
            7_i32.push(to);
            Number::Scale.push(to);
            (-1_i32).push(to);
            Address::Operand(Operand::Q).push(to);
            3_i32.push(to);
        });
        let empty = arguments.block(|_| {});
        let last = arguments.block(|to| 9_u64.push(to));
        assert_eq!([first, empty, last], [BlockId(0), BlockId(4), BlockId(5)]);
        assert_eq!(arguments.words(), [7, 0xffff_ffff, 0, 3, 0, 9]);
        assert_eq!(arguments.fills().iter().map(|fill| fill.at).collect::<Vec<_>>(), [4, 16]);
        let mut words = arguments.words().to_vec();
        write_u32(&mut words, 4, 5);
        assert_eq!(words[0], 5 << 32 | 7);
    }
}
