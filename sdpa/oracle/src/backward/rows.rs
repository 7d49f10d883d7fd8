//! Rows that one thread computes together.

use std::ops::Range;

/// A range of queries of all query heads of one GQA group.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) batch: usize,
    pub(super) head_kv: usize,
    pub(super) heads: Range<usize>,
    pub(super) rows: Range<usize>,
}

impl Rows {
    /// Returns the extents of the part of a parameter's gradient that these rows add to.
    pub(super) fn part(&self, dims: [usize; 4]) -> [usize; 4] {
        let own = [1, self.heads.len(), self.rows.len(), dims[3]];
        [0, 1, 2, 3].map(|axis| if dims[axis] == 1 { 1 } else { own[axis] })
    }

    /// Returns the offset of position (`h`, `i`, `j`) in that part, and in the gradient of all rows.
    pub(super) fn elements(&self, dims: [usize; 4], [h, i, j]: [usize; 3]) -> (usize, usize) {
        let at = |dims: [usize; 4], place: [usize; 4]| {
            dims.iter().zip(place).fold(0, |n, (&extent, at)| n * extent + if extent == 1 { 0 } else { at })
        };
        let local = at(self.part(dims), [0, h - self.heads.start, i - self.rows.start, j]);
        (local, at(dims, [self.batch, h, i, j]))
    }

    /// Iterates over (head, query) in the order of a part.
    pub(super) fn queries(&self) -> impl Iterator<Item = [usize; 2]> + use<> {
        let rows = self.rows.clone();
        self.heads.clone().flat_map(move |h| rows.clone().map(move |i| [h, i]))
    }
}
