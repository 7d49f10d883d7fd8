//! Textbook attention in f64, its gradients, and the tolerance of an executor's results.
//!
//! The oracle shares no code with the executors: it depends on no other crate of the project. It evaluates masks by their definition, and receives everything
//! else as closures and numbers in memory. The command line's `--check` and the tests compare with it.
//!
//! A score is the scaled product of a query and a key. A score_mod may modify it, then masks apply, and P is the softmax over the unmasked keys of a row.
//! Neighbouring query heads form a GQA group with one KV head. Extents are always (batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v). A position is
//! (batch, query head, query, key).

mod backward;
mod dropout;
mod forward;
mod mask;
mod narrow;
mod score;
mod tolerance;

pub use backward::{Gradients, Results, check_each_gradients, check_gradients, gradient_bytes, gradients, largest_slope};
pub use dropout::Dropout;
pub use forward::{Answer, Statistics, attention, bytes, check, check_each};
pub use mask::{Align, Mask};
pub use narrow::{Narrow, products_of};
pub use score::{Along, Closures, Modify, Real, Rough};
pub use tolerance::gradients::{First, Gradient, GradientDistance, Tally};
pub use tolerance::norm::{Norms, Verdict};
pub use tolerance::{Distance, Element, F32_ROUNDOFF, Largest, Worst, of_difference, sum_of};

/// A position: (batch, query head, query, key).
pub type Place = [i64; 4];

/// Numbers in memory, which are widened to f64 when they are read.
pub trait Numbers: Sync {
    /// Returns the number at an offset, exactly. A [`Tensor`] reads only offsets that its strides and extents allow.
    fn get(&self, at: usize) -> f64;

    /// Reads `to.len()` consecutive numbers, from offset `at` on.
    fn row(&self, at: usize, to: &mut [f64]) {
        to.iter_mut().enumerate().for_each(|(n, to)| *to = self.get(at + n));
    }
}

macro_rules! numbers {
    ($($ty:ty),*) => {
        $(impl Numbers for $ty {
            fn get(&self, at: usize) -> f64 {
                self[at].into()
            }
        })*
    };
}
numbers!(Vec<f64>, &[f64], Vec<f32>, &[f32]);

/// An operand or a result.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// The memory that holds the numbers.
    pub numbers: &'a dyn Numbers,
    /// Strides along (batch, head, sequence, dim), in elements.
    pub strides: [usize; 4],
}

impl<'a> Tensor<'a> {
    /// Creates a row-major tensor of extents (batch, head, sequence, dim).
    #[must_use]
    pub fn dense(numbers: &'a dyn Numbers, [_, heads, rows, dim]: [usize; 4]) -> Tensor<'a> {
        Tensor { numbers, strides: [heads * rows * dim, rows * dim, dim, 1] }
    }

    /// Returns the offset of a row.
    fn place(&self, row: [usize; 3]) -> usize {
        row.iter().zip(self.strides).map(|(at, stride)| at * stride).sum()
    }

    fn read(&self, row: [usize; 3], to: &mut [f64]) {
        let from = self.place(row);
        match self.strides[3] {
            1 => self.numbers.row(from, to),
            stride => to.iter_mut().enumerate().for_each(|(n, to)| *to = self.numbers.get(from + n * stride)),
        }
    }
}

/// An attention problem with its operands, as the oracle receives it.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    /// The extents: batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v.
    pub shape: [usize; 7],
    /// Queries.
    pub q: Tensor<'a>,
    /// Keys.
    pub k: Tensor<'a>,
    /// Values.
    pub v: Tensor<'a>,
    /// The type to which P and `dS` are rounded before the GEMMs that read them.
    pub element: Element,
    /// The type to which results are rounded.
    pub stored: Element,
    /// The factor of the scores.
    pub scale: f64,
    /// The masks. A query attends to a key if all of them attend to it.
    pub masks: &'a [Mask<'a>],
    /// The score_mod, applied to scaled scores.
    pub modify: Option<&'a dyn Modify>,
    /// The attention sink of each query head: a score without key and value that is added to the softmax denominator of each row.
    pub sink: Option<&'a dyn Numbers>,
    /// Dropout of P, after the softmax.
    pub dropout: Option<Dropout>,
    /// Types and scales of a problem with 8-bit floats.
    pub narrow: Option<Narrow>,
    /// A bound of the score_mod's derivative (1 without one), if the executor may sum `dq` in fixed point. Then `dq` may have an absolute error too.
    pub fixed_point: Option<f64>,
}

/// The `o` and stats that an executor's backward pass receives.
#[derive(Clone, Copy)]
pub enum Given<'a> {
    /// `o` and stats of an exact forward pass, rounded to the types in which executors store them.
    Rounded,
    /// `o` and stats of the executor's own forward pass.
    Own,
    /// The given `o` and stats: the oracle computes the gradient of a pass that receives them. Stats are in row-major (batch, heads_q,
    /// seq_q).
    These {
        /// The output that the pass receives.
        o: Tensor<'a>,
        /// The stats that the pass receives, in natural logarithms.
        stats: &'a dyn Numbers,
    },
}

impl Problem<'_> {
    /// (batch, heads_q, seq_q, seq_kv).
    fn extents(&self) -> Place {
        let [batch, heads_q, _, seq_q, seq_kv, ..] = self.shape;
        place([batch, heads_q, seq_q, seq_kv])
    }

    /// Number of query heads per KV head.
    fn group(&self) -> usize {
        self.shape[1] / self.shape[2]
    }

    /// The sink of a query head; −∞ without a sink.
    fn sink_of(&self, head: usize) -> f64 {
        self.sink.map_or(f64::NEG_INFINITY, |sink| sink.get(head))
    }

    /// The dropout factor of P at a position.
    fn factor(&self, at: Place) -> f64 {
        self.dropout.map_or(1.0, |dropout| dropout.factor(at, self.extents()))
    }

    fn keeps(&self, at: Place) -> bool {
        self.masks.iter().all(|mask| mask.keeps(at, self.extents()))
    }
}

fn place(at: [usize; 4]) -> Place {
    at.map(|n| i64::try_from(n).unwrap_or(i64::MAX))
}

/// Returns Σ x·y and Σ |x·y|, in eight partial sums.
fn dot(x: &[f64], y: &[f64]) -> (f64, f64) {
    const LANES: usize = 8;
    let (mut sums, mut sizes) = ([0f64; LANES], [0f64; LANES]);
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
            sizes[lane] += (x[lane] * y[lane]).abs();
        }
    }
    for ((x, y), (sum, size)) in x_rest.iter().zip(y_rest).zip(sums.iter_mut().zip(&mut sizes)) {
        *sum += x * y;
        *size += (x * y).abs();
    }
    (sums.iter().sum(), sizes.iter().sum())
}

/// Returns the largest score: NaN if one of them is NaN, −∞ if there are none.
fn largest(scores: impl Iterator<Item = f64>) -> f64 {
    scores.fold(f64::NEG_INFINITY, |a, b| {
        if b.is_nan() {
            b
        } else if a.is_nan() {
            a
        } else {
            a.max(b)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_in_lanes_are_sums() {
        for n in [0usize, 1, 7, 8, 9, 31] {
            let x: Vec<f64> = (0..n).map(|i| i as f64 - 3.0).collect();
            let y: Vec<f64> = (0..n).map(|i| 2.0 * i as f64 - 9.0).collect();
            let want: (f64, f64) = x.iter().zip(&y).fold((0.0, 0.0), |(a, b), (x, y)| (a + x * y, b + (x * y).abs()));
            assert_eq!(dot(&x, &y), want, "{n}");
        }
    }

    #[test]
    fn strides_say_where_rows_are() {
        let numbers: Vec<f64> = (0..24).map(f64::from).collect();
        let read = |tensor: Tensor<'_>, at| {
            let mut row = [0.0; 2];
            tensor.read(at, &mut row);
            row
        };
        assert_eq!(read(Tensor::dense(&numbers, [2, 3, 2, 2]), [1, 2, 1]), [22.0, 23.0]);
        assert_eq!(read(Tensor { numbers: &numbers, strides: [12, 2, 6, 3] }, [1, 1, 0]), [14.0, 17.0]);
        assert_eq!(read(Tensor { numbers: &&numbers[3..], strides: [0; 4] }, [1, 2, 3]), [3.0, 3.0]);
    }
}
