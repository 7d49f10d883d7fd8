//! Converts a specification into a problem of the oracle: numbers in row-major order, masks, and closures for everything traced.

use sdpa::{Align, DType, Mask};
use sdpa_oracle::{Align as Corner, Element, Mask as Rule, Tensor};
pub use sdpa_oracle::{Along, Answer, Closures, Dropout, Given, Gradient, Gradients};

/// An attention problem for the oracle, with its numbers in row-major order (batch, head, seq, dim).
#[derive(Clone, Debug)]
pub struct Problem<'a> {
    /// The extents: batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v.
    pub shape: [usize; 7],
    /// Queries, (batch, heads_q, seq_q, dim_qk).
    pub q: &'a [f64],
    /// Keys, (batch, heads_kv, seq_kv, dim_qk).
    pub k: &'a [f64],
    /// Values, (batch, heads_kv, seq_kv, dim_v).
    pub v: &'a [f64],
    /// The type in which an executor computes.
    pub dtype: DType,
    /// The attention scale.
    pub scale: f64,
    /// The masks that the oracle evaluates itself. A query attends to a key if all of them attend to it. Traced masks are passed as
    /// closures instead.
    pub masks: &'a [Mask],
    /// The number of queries and keys of each batch entry; empty if all entries have all of them.
    pub lengths: &'a [[i64; 2]],
    /// The attention sink of each query head.
    pub sink: Option<&'a [f64]>,
    /// Dropout of P.
    pub dropout: Option<Dropout>,
    /// The scales of a problem with 8-bit floats; `None` for other types.
    pub narrow: Option<Narrow>,
    /// A bound of the score_mod's derivative, if the executor may sum `dq` in fixed point.
    pub fixed_point: Option<f64>,
}

/// Scales of 8-bit floats, and the type of the output.
#[derive(Clone, Copy, Debug)]
pub struct Narrow {
    /// The scales in the form that the oracle receives.
    pub told: sdpa_oracle::Narrow,
    /// Element type of `o`.
    pub o: DType,
}

fn word_for_word<'a>(mask: &Mask, lengths: &'a (dyn Fn(i64) -> [i64; 2] + Sync)) -> Rule<'a> {
    let each = |masks: &[Mask]| masks.iter().map(|mask| word_for_word(mask, lengths)).collect();
    match mask {
        Mask::Window { left, right, align } => {
            let (left, right) = (*left, *right);
            match align {
                Align::TopLeft => Rule::Window { left, right, align: Corner::TopLeft },
                Align::BottomRight => Rule::Window { left, right, align: Corner::BottomRight },
                Align::Ends => Rule::Ends { left, right, lengths: Box::new(lengths) },
            }
        }
        Mask::PrefixLm { len } => Rule::Prefix { len: *len },
        Mask::All(masks) => Rule::All(each(masks)),
        Mask::Any(masks) => Rule::Any(each(masks)),
        Mask::Not(mask) => Rule::Not(Box::new(word_for_word(mask, lengths))),
        // The oracle does not evaluate traces: otherwise it would share code with the executors that it checks.
        Mask::Traced(rule) => panic!("{} is given to the oracle as a closure", rule.name()),
    }
}

/// Returns the oracle's equivalent of an element type.
pub fn element(dtype: DType) -> Element {
    match dtype {
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
        DType::F32 => Element::F32,
        DType::F8E4M3 => Element::E4M3,
        DType::F8E5M2 => Element::E5M2,
        DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => panic!("attention has no results in {dtype}"),
    }
}

impl Problem<'_> {
    /// Converts this problem, with the closures, to the oracle's form, and passes the result to `call`.
    pub fn with<T>(&self, closures: &Closures<'_>, call: impl FnOnce(&sdpa_oracle::Problem<'_>) -> T) -> T {
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = self.shape;
        let lengths = |b: i64| self.lengths.get(b as usize).copied().unwrap_or([seq_q as i64, seq_kv as i64]);
        let masks: Vec<Rule<'_>> = self.masks.iter().map(|mask| word_for_word(mask, &lengths)).collect();
        let problem = sdpa_oracle::Problem {
            shape: self.shape,
            q: Tensor::dense(&self.q, [batch, heads_q, seq_q, dim_qk]),
            k: Tensor::dense(&self.k, [batch, heads_kv, seq_kv, dim_qk]),
            v: Tensor::dense(&self.v, [batch, heads_kv, seq_kv, dim_v]),
            element: element(self.dtype),
            stored: element(self.narrow.map_or(self.dtype, |narrow| narrow.o)),
            scale: self.scale,
            masks: &masks,
            modify: None,
            sink: self.sink.as_ref().map(|sink| sink as &dyn sdpa_oracle::Numbers),
            dropout: self.dropout,
            narrow: self.narrow.map(|narrow| narrow.told),
            fixed_point: self.fixed_point,
        };
        closures.with(&problem, call)
    }

    /// Returns the extents of `o` and its gradient: (batch, heads_q, seq_q, dim_v).
    pub fn o_dims(&self) -> [usize; 4] {
        let [batch, heads_q, _, seq_q, _, _, dim_v] = self.shape;
        [batch, heads_q, seq_q, dim_v]
    }
}

/// Computes the output and row statistics of a problem with the oracle.
pub fn attention(p: &Problem<'_>, closures: &Closures<'_>) -> Answer {
    p.with(closures, sdpa_oracle::attention)
}

/// Computes the gradients of `Σ o∘d_o` with the oracle. `d_o` is in row-major order.
pub fn gradients(p: &Problem<'_>, closures: &Closures<'_>, d_o: &[f64]) -> Gradients {
    p.with(closures, |told| sdpa_oracle::gradients(told, Tensor::dense(&d_o, p.o_dims()), Given::Rounded))
}

/// Returns the dropout mask: 1 where P is kept and 0 elsewhere, in row-major order of (batch, heads_q, seq_q, seq_kv).
pub fn stays(dropout: &Dropout, extents: [i64; 4]) -> Vec<f64> {
    let axis = |n: i64, axis: usize| n / extents[axis + 1..].iter().product::<i64>() % extents[axis];
    let places = (0..extents.iter().product::<i64>()).map(|n| [0, 1, 2, 3].map(|a| axis(n, a)));
    places.map(|at| f64::from(u8::from(dropout.factor(at, extents) > 0.0))).collect()
}
