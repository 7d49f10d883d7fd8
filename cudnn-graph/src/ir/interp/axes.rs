//! Iterates over elements by index.

use super::Value;

/// Calls `f` with the index of every element, row-major.
pub(super) fn each(dims: &[i64], mut f: impl FnMut(&[i64])) {
    if dims.iter().any(|&d| d < 1) {
        return;
    }
    let mut index = vec![0i64; dims.len()];
    loop {
        f(&index);
        let Some(axis) = (0..dims.len()).rev().find(|&axis| index[axis] + 1 < dims[axis]) else { return };
        index[axis] += 1;
        index[axis + 1..].fill(0);
    }
}

/// Returns the row-major position of an index.
pub(super) fn place(dims: &[i64], index: impl IntoIterator<Item = i64>) -> usize {
    dims.iter().zip(index).fold(0i64, |at, (&d, i)| at * d + i) as usize
}

/// Returns the product of the extents; verified tensors are bounded before they are computed.
pub(super) fn count(dims: &[i64]) -> usize {
    dims.iter().product::<i64>() as usize
}

/// Maps an index of the result to an element of an operand with fewer or shorter axes.
pub(super) struct Broadcast {
    steps: Vec<i64>,
}

impl Broadcast {
    pub(super) fn new(value: &Value, result: &[i64]) -> Broadcast {
        let missing = result.len().saturating_sub(value.dims.len());
        let mut steps = vec![0; result.len()];
        let mut next = 1;
        for (axis, &d) in value.dims.iter().enumerate().rev() {
            if let Some(step) = steps.get_mut(missing + axis).filter(|_| d > 1) {
                *step = next;
            }
            next *= d;
        }
        Broadcast { steps }
    }

    pub(super) fn of(&self, index: &[i64]) -> usize {
        self.steps.iter().zip(index).map(|(s, i)| s * i).sum::<i64>() as usize
    }
}
