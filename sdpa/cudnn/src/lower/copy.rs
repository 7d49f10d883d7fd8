//! Device copies as small graphs, for operands that attention engines cannot read or write in place.
//!
//! cuDNN's pointwise engines support at most three axes, and stride 0 only on the first (9.19 and 9.27 on compute capability 8.0, 9.0 and 10.0). So
//! contiguous axes are merged. If three axes remain besides the last, the copy runs once per index of the outermost.

use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Mode, Tensor, TensorId};
use cudnn_graph::{DType, Graph, Verified};
use sdpa_core::spec::{Layout, TensorSpec};
use sdpa_core::{Operand, packed};
use sdpa_nvidia::Job;

/// A graph that copies a tensor, the tensors to which memory is bound, and the number of times that it runs.
#[derive(Clone, Debug)]
pub struct CopyGraph {
    /// The graph that copies.
    pub graph: Verified,
    /// The tensor that is read.
    pub from: TensorId,
    /// The tensor that is written.
    pub to: TensorId,
    /// A tensor of zeros that the graph reads, with as many elements as the output; `None` if it needs none. It may share the memory of
    /// the output.
    pub zeros: Option<TensorId>,
    /// The number of times that the graph runs in one call.
    pub repeats: u64,
    /// Distance in bytes from the input of one run to the input of the next.
    pub from_step: u64,
    /// Distance in bytes from the output of one run to the output of the next.
    pub to_step: u64,
}

/// An axis of both tensors, with its stride in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    extent: i64,
    from: i64,
    to: i64,
}

/// Returns the outer axes after contiguous ones are merged, outermost first.
fn outer_axes(from: &TensorSpec, to: &TensorSpec) -> Vec<Axis> {
    let mut axes: Vec<Axis> =
        (0..3).filter(|&a| from.dims[a] > 1).map(|a| Axis { extent: from.dims[a], from: from.strides[a], to: to.strides[a] }).collect();
    axes.sort_by_key(|a| std::cmp::Reverse(a.to));
    let mut merged: Vec<Axis> = Vec::new();
    for axis in axes {
        match merged.last_mut() {
            Some(outer) if outer.from == axis.from * axis.extent && outer.to == axis.to * axis.extent => {
                *outer = Axis { extent: outer.extent * axis.extent, ..axis };
            }
            _ => merged.push(axis),
        }
    }
    merged
}

/// Returns the largest power of two, up to 16, that divides an address and every step from it, in bytes.
fn alignment(base: u32, steps: impl IntoIterator<Item = i64>, element: i64) -> u32 {
    let steps = steps.into_iter().map(|s| (s * element).unsigned_abs()).filter(|&s| s > 0);
    let bits = steps.map(u64::trailing_zeros).chain([base.trailing_zeros()]).min().unwrap_or(0);
    1 << bits.min(4)
}

/// Returns a graph that copies a tensor to another one with the same extents and element type but other strides.
///
/// # Errors
/// Returns an error of [`Graph::verify`], which is a bug of the lowering.
pub fn copy(dtype: DType, from: &TensorSpec, to: &TensorSpec) -> Result<CopyGraph, cudnn_graph::Error> {
    convert([dtype, dtype], from, to)
}

/// Returns a graph that copies a tensor to another one with the same extents, and converts its elements from the first to the second of
/// `dtypes`.
///
/// # Errors
/// Fails as [`copy`] does.
pub fn convert(dtypes: [DType; 2], from: &TensorSpec, to: &TensorSpec) -> Result<CopyGraph, cudnn_graph::Error> {
    let [from_element, to_element] = dtypes.map(|dtype| i64::from(dtype.bits() / 8));
    let [from_dtype, to_dtype] = dtypes;
    let row = from.dims[3];
    let mut axes = outer_axes(from, to);
    let repeated = if axes.len() > 2 { axes.remove(0) } else { Axis { extent: 1, from: 0, to: 0 } };
    while axes.len() < 2 {
        axes.insert(0, Axis { extent: 1, from: row, to: row });
    }
    axes.sort_by_key(|a| a.from != 0);
    let dims = [axes[0].extent, axes[1].extent, row];
    let mut g = Graph::new();
    let step = |pick: fn(&Axis) -> i64| axes.iter().chain([&repeated]).map(pick).collect::<Vec<_>>();
    let from_alignment = alignment(from.alignment, step(|a| a.from), from_element);
    let to_alignment = alignment(to.alignment, step(|a| a.to), to_element);
    let to_strides = [axes[0].to, axes[1].to, 1];
    let (x, y, zeros) = if from.strides[3] == 0 {
        // Engines cannot repeat elements of a row, but they broadcast an addend: the source is added to zeros.
        let one = |a: &Axis| if a.from == 0 { 1 } else { a.extent };
        let x =
            Tensor::device("from", from_dtype, [one(&axes[0]), one(&axes[1]), 1]).strides([axes[0].from.max(1), axes[1].from.max(1), 1]);
        let x = g.tensor(x.alignment(from_alignment));
        let zeros = g.tensor(Tensor::device("zeros", to_dtype, dims).strides(to_strides).alignment(to_alignment));
        (x, g.pointwise_as(Mode::Add, &[zeros, x], DType::F32, to_dtype, Params::default()), Some(zeros))
    } else {
        let x = Tensor::device("from", from_dtype, dims).strides([axes[0].from, axes[1].from, 1]);
        let x = g.tensor(x.alignment(from_alignment));
        (x, g.pointwise_as(Mode::Identity, &[x], DType::F32, to_dtype, Params::default()), None)
    };
    g.output(y, "to", to_dtype);
    g.set_strides(y, to_strides);
    g.set_alignment(y, to_alignment);
    let bytes = |elements: i64, element: i64| (elements * element).unsigned_abs();
    Ok(CopyGraph {
        graph: g.verify()?,
        from: x,
        to: y,
        zeros,
        repeats: repeated.extent.unsigned_abs(),
        from_step: bytes(repeated.from, from_element),
        to_step: bytes(repeated.to, to_element),
    })
}

/// Returns a graph that broadcasts a dense declared tensor from the extents `from` to the extents `to`, and converts its elements from
/// the first to the second of `dtypes`.
pub(crate) fn spread(dtypes: [DType; 2], from: [i64; 4], to: [i64; 4]) -> Result<CopyGraph, cudnn_graph::Error> {
    let dense = Layout::Bhsd.strides(from);
    let strides = std::array::from_fn(|axis| if from[axis] == to[axis] { dense[axis] } else { 0 });
    let alignment = 16;
    let mut from = TensorSpec { dims: to, strides, alignment };
    // `convert` reads stride 0 on the last axis as one element that repeats. An axis of extent 1 repeats nothing, so its stride is 1.
    if to[3] == 1 {
        from.strides[3] = 1;
    }
    convert(dtypes, &from, &TensorSpec::dense(to, Layout::Bhsd))
}

/// Bytes of one vectorised access: base addresses and strides must be multiples of it.
const VECTOR_BYTES: i64 = 16;

/// Returns whether engines can use a tensor in place: its last axis is dense, and its address and strides are multiples of 16 bytes.
pub(crate) fn in_place(tensor: &TensorSpec, dtype: DType) -> bool {
    let element = i64::from(dtype.bits() / 8);
    let steps = (0..3).filter(|&axis| tensor.dims[axis] > 1).map(|axis| tensor.strides[axis]);
    let dense = tensor.dims[3] == 1 || tensor.strides[3] == 1;
    dense && tensor.alignment >= VECTOR_BYTES as u32 && steps.into_iter().all(|s| s > 0 && s * element % VECTOR_BYTES == 0)
}

/// Returns the pass with every operand made dense that engines cannot use in place, and a list of these operands.
pub(crate) fn densify(job: &Job) -> (Job, Vec<Operand>) {
    let problem = job.problem();
    // Check packed operands with at least two tokens: a sequence may begin at any token of a row, so the token stride always matters.
    let in_memory = |operand: Operand| match (job.in_memory(operand), problem.packs(operand.side())) {
        (Some(tensor), true) => Some(packed::memory(&tensor, problem.total(operand.side()).max(2))),
        (tensor, _) => tensor,
    };
    let in_place = |operand: Operand| in_memory(operand).is_none_or(|tensor| in_place(&tensor, super::dtype(job.dtype_of(operand))));
    let copied: Vec<Operand> = job.tensors().map(|(operand, _)| operand).filter(|&operand| !in_place(operand)).collect();
    (copied.iter().fold(job.clone(), |job, &operand| job.densely(operand)), copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(from: TensorSpec) -> CopyGraph {
        let to = from.densely();
        let c = copy(DType::BF16, &from, &to).unwrap();
        // Iterate over both tensors as the copy does; each element must be read once and written where it belongs.
        let graph = c.graph.graph();
        let (x, y) = (graph.get(c.from).unwrap(), graph.get(c.to).unwrap());
        let mut pairs = Vec::new();
        for r in 0..c.repeats as i64 {
            for i in 0..x.dims.0[0] {
                for j in 0..x.dims.0[1] {
                    let at = |s: &[i64], step: u64| r * step as i64 / 2 + i * s[0] + j * s[1];
                    pairs.push((at(&x.strides.0, c.from_step), at(&y.strides.0, c.to_step)));
                }
            }
        }
        let mut want = Vec::new();
        for b in 0..from.dims[0] {
            for h in 0..from.dims[1] {
                for s in 0..from.dims[2] {
                    let at = |t: &TensorSpec| b * t.strides[0] + h * t.strides[1] + s * t.strides[2];
                    want.push((at(&from), at(&to)));
                }
            }
        }
        pairs.sort_unstable();
        want.sort_unstable();
        assert_eq!(pairs, want, "{from:?}");
        c
    }

    #[test]
    fn copies_meet_every_row_once() {
        let dims = [2, 3, 5, 8];
        for layout in [Layout::Bhsd, Layout::Bshd, Layout::Sbhd] {
            let gap = TensorSpec { dims, strides: layout.strides([2, 3, 5, 9]), alignment: 2 };
            let c = check(gap);
            assert_eq!(c.repeats, 1);
            assert_eq!(c.graph.graph().get(c.from).unwrap().alignment, 2);
        }
        let nested_gaps = TensorSpec { dims, strides: [301, 60, 9, 1], alignment: 16 };
        assert_eq!(check(nested_gaps).repeats, 2);
        let broadcast_heads = TensorSpec { dims, strides: [45, 0, 9, 1], alignment: 16 };
        check(broadcast_heads);
        let broadcast_all = TensorSpec { dims, strides: [0, 0, 0, 1], alignment: 16 };
        assert_eq!(check(broadcast_all).repeats, 1);
        check(TensorSpec { dims: [1, 1, 1, 8], strides: [8, 8, 8, 1], alignment: 4 });
    }

    /// Returns pairs of read and written offsets, in the order of the written elements.
    fn reads(c: &CopyGraph, element: i64) -> Vec<(i64, i64)> {
        let graph = c.graph.graph();
        let (x, y) = (graph.get(c.from).unwrap(), graph.get(c.to).unwrap());
        let mut all = Vec::new();
        for r in 0..c.repeats as i64 {
            for place in 0..y.dims.0.iter().product::<i64>() {
                let at = [place / (y.dims.0[1] * y.dims.0[2]), place / y.dims.0[2] % y.dims.0[1], place % y.dims.0[2]];
                let of = |t: &Tensor| (0..3).map(|a| if t.dims.0[a] == 1 { 0 } else { at[a] * t.strides.0[a] }).sum::<i64>();
                all.push((r * c.to_step as i64 / element + of(y), r * c.from_step as i64 / element + of(x)));
            }
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn what_is_spread_repeats_its_elements_along_the_axes_that_it_does_not_span() {
        for to in [[2, 3, 5, 8], [2, 3, 5, 1], [1, 4, 6, 7]] {
            for spanned in 0..16 {
                let from: [i64; 4] = std::array::from_fn(|axis| if spanned >> axis & 1 == 1 { to[axis] } else { 1 });
                let c = spread([DType::F32, DType::F32], from, to).unwrap();
                let dense = Layout::Bhsd.strides(from);
                let mut want = Vec::new();
                for place in 0..to.iter().product::<i64>() {
                    let at = [place / (to[1] * to[2] * to[3]), place / (to[2] * to[3]) % to[1], place / to[3] % to[2], place % to[3]];
                    want.push((place, (0..4).map(|a| if from[a] == 1 { 0 } else { at[a] * dense[a] }).sum::<i64>()));
                }
                assert_eq!(reads(&c, 4), want, "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn alignments_hold_for_the_base_and_every_step() {
        assert_eq!(alignment(16, [], 2), 16);
        assert_eq!(alignment(16, [0, 8], 2), 16);
        assert_eq!(alignment(16, [0, 6], 2), 4);
        assert_eq!(alignment(2, [0, 8], 2), 2);
        assert_eq!(alignment(64, [64, 3], 1), 1);
    }

    #[test]
    fn only_what_engines_cannot_read_is_copied() {
        let dense = TensorSpec::dense([2, 3, 5, 8], Layout::Bshd);
        assert!(in_place(&dense, DType::BF16));
        assert!(!in_place(&TensorSpec { alignment: 8, ..dense }, DType::BF16));
        assert!(!in_place(&TensorSpec { strides: [200, 8, 12, 1], ..dense }, DType::BF16));
        assert!(in_place(&TensorSpec { strides: [200, 8, 12, 1], dims: [2, 3, 1, 8], ..dense }, DType::BF16));
    }
}
