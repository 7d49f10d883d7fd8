//! Limits of the WGMMA kernels, and the error that lists those that a problem breaks.

use crate::fact::supports_fact;
use sdpa_core::error::{ExecutorName, Reason, Unsupported};
use sdpa_core::spec::TensorSpec;
use sdpa_core::{Operand, Problem};
use sdpa_nvidia::JobQuery;
use std::fmt::Display;

/// Returns the error for a problem that the kernels do not support for these reasons.
pub(crate) fn unsupported(reasons: Vec<Reason>) -> Unsupported {
    Unsupported::new(ExecutorName::CUDA, reasons)
}

/// The limits that a problem breaks, one reason for each.
pub(crate) struct Check(pub(crate) Vec<Reason>);

/// Returns whether TMA can step along an axis of elements of this size.
fn steps(tensor: &TensorSpec, axis: usize, bytes: i64) -> bool {
    let stride = tensor.strides[axis];
    tensor.dims[axis] <= 1 || (stride > 0 && (stride * bytes) % 16 == 0 && stride < (1 << 39))
}

/// Returns whether TMA can read a tensor with two-byte elements in place.
pub(crate) fn copies(tensor: &TensorSpec) -> bool {
    let dense = tensor.strides[3] == 1 || tensor.dims[3] == 1;
    dense && tensor.alignment.is_multiple_of(16) && (0..3).all(|axis| steps(tensor, axis, 2))
}

/// Field of the rule for page sizes.
pub(crate) const PAGE_SIZE: &str = "paged.page_size";

/// Returns whether a reason is one of [`Check::strides`], [`Check::alignment`] or the rule for page sizes: it says where the elements are in memory, but not
/// what they are.
pub(crate) fn is_of_layout(reason: &Reason) -> bool {
    let Reason::Limit { field, .. } = reason else { return false };
    field == PAGE_SIZE || field.ends_with(ALIGNMENT) || field.contains(STRIDES)
}

/// Parts of the names of fields.
const ALIGNMENT: &str = " alignment";
pub(crate) const STRIDES: &str = " strides";

impl Check {
    pub(crate) fn that(&mut self, holds: bool, field: &str, value: impl Display, limit: impl Into<String>) {
        if !holds {
            self.0.push(Reason::Limit { field: field.to_owned(), value: value.to_string(), limit: limit.into() });
        }
    }

    /// Checks that the base address is a multiple of 16 bytes, which TMA requires.
    pub(crate) fn alignment(&mut self, operand: Operand, tensor: &TensorSpec) {
        let limit = "a multiple of 16 bytes, for TMA";
        self.that(tensor.alignment.is_multiple_of(16), &format!("{operand}{ALIGNMENT}"), tensor.alignment, limit);
    }

    /// Checks that rows are multiples of 16 bytes and that no axis has stride 0, which TMA requires.
    pub(crate) fn strides(&mut self, operand: Operand, tensor: &TensorSpec, bytes: i64) {
        for (axis, name) in [(0, "batch"), (1, "head"), (2, "seq")] {
            let limit = "a nonzero multiple of 16 bytes, for TMA";
            self.that(steps(tensor, axis, bytes), &format!("{operand}{STRIDES} ({name})"), tensor.strides[axis], limit);
        }
    }

    /// Checks that a grid with `of_head` thread blocks per query head has fewer than 2³¹ thread blocks.
    pub(crate) fn blocks(&mut self, problem: &Problem, of_head: i64) {
        let blocks = problem.batch() * problem.heads_q() * of_head;
        self.that(blocks < i64::from(i32::MAX), "batch x heads_q x tiles", blocks, "below 2^31 thread blocks");
    }
}

/// Checks a pass against the limits of the kernels, and returns those that it breaks.
pub(crate) fn checked(pass: JobQuery<'_>) -> Check {
    let mut check = Check(Vec::new());
    pass.facts().for_each(|fact| supports_fact(&mut check, pass, &fact));
    check.blocks(pass.problem(), pass.problem().seq_q() / 128 + 1);
    check
}
