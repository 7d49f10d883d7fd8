//! Score_mods and masks at one position in f64, each value with a bound on its error in f32.
//!
//! Errors are propagated to first order: the error of a function is that of its operands times its derivatives, plus its own rounding. With `e` the unit
//! roundoff of f32, arithmetic rounds by `e`, functions by `8·e` of their value, sine and cosine by `(8 + |x|)·e`. If the errors of two numbers may have
//! changed their comparison, either result is accepted. A sum whose rounding may exceed 1 is the nearest f32 ([`Rough::nearest`]).

use crate::params::Bound;
use sdpa::expr::{self, Binary, Declared, Node, NodeId, ParamId, ParamKind, Place, Precision, Trace, Type, Unary};
use sdpa::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa::packed::{CU_SEQLENS, CU_SEQLENS_KV, CU_SEQLENS_Q};
use sdpa::{Align, Mask, TableRead};
use sdpa_oracle::{Align as Corner, F32_ROUNDOFF, Mask as Rule, Modify, Rough, of_difference};

/// A traced score_mod or mask, with the values of its parameters.
#[derive(Debug)]
pub(crate) struct Function<'a> {
    trace: &'a Trace,
    params: Vec<Option<&'a Bound>>,
    extents: [i64; 4],
}

/// The error of a function, in units of roundoff.
const FUNCTION: f64 = 8.0;

fn unary(f: Unary, from: Type, to: Type, x: Rough) -> Rough {
    let value = expr::unary(f, from, to, x.value, Precision::F64);
    let e = F32_ROUNDOFF;
    let own = FUNCTION * e * value.abs();
    let error = match f {
        Unary::Neg | Unary::Abs | Unary::Not => x.error,
        Unary::Sqrt => x.error / (2.0 * value.abs()).max(f64::from(f32::MIN_POSITIVE)) + own,
        Unary::Rsqrt => x.error * value.abs().powi(3) / 2.0 + own,
        Unary::Exp => x.error * value.abs() + own,
        Unary::Log => x.error / x.value.abs().max(f64::from(f32::MIN_POSITIVE)) + own + FUNCTION * e,
        Unary::Sin | Unary::Cos => x.error + (FUNCTION + x.value.abs()) * e,
        Unary::Tanh => x.error * (1.0 - value * value) + own,
        Unary::Erf => x.error * std::f64::consts::FRAC_2_SQRT_PI * (-x.value * x.value).exp() + own,
        // The operand's error may move the operand across a step, so compare the results at both ends of its range.
        Unary::Floor | Unary::Ceil | Unary::ToI32 => {
            let near = |x| expr::unary(f, from, to, x, Precision::F64);
            (near(x.value + x.error) - near(x.value - x.error)).abs()
        }
        // f32 rounds integers above 2^24.
        Unary::ToF32 => {
            if value.abs() > 1.0 / e {
                e * value.abs()
            } else {
                0.0
            }
        }
    };
    Rough { value, error }
}

fn binary(f: Binary, ty: Type, x: Rough, y: Rough) -> Rough {
    let value = expr::binary(f, ty, x.value, y.value, Precision::F64);
    let round = if ty == Type::F32 { F32_ROUNDOFF * value.abs() } else { 0.0 };
    let off = x.error + y.error;
    let error = match f {
        Binary::Add | Binary::Sub => {
            if let Some(nearest) = Some(Rough { value, error: off }).filter(|_| ty == Type::F32).and_then(Rough::nearest) {
                return nearest;
            }
            off + round
        }
        Binary::Mul => x.error * y.value.abs() + y.error * x.value.abs() + round,
        Binary::Div => (x.error + y.error * value.abs()) / y.value.abs().max(f64::from(f32::MIN_POSITIVE)) + round,
        Binary::Mod => x.error + y.error * (x.value / y.value).trunc().abs() + round,
        Binary::Pow => {
            let log = x.value.abs().max(f64::from(f32::MIN_POSITIVE)).ln();
            let relative = x.error * (y.value / x.value).abs() + (y.error + F32_ROUNDOFF * y.value.abs()) * log.abs();
            if value == 0.0 { 0.0 } else { value.abs() * (relative + FUNCTION * F32_ROUNDOFF) }
        }
        Binary::Min | Binary::Max => x.error.max(y.error),
        Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => {
            f64::from(u8::from(off > 0.0 && (x.value - y.value).abs() <= off))
        }
        Binary::And | Binary::Or => off.min(1.0),
    };
    Rough { value, error }
}

impl<'a> Function<'a> {
    pub(crate) fn new(trace: &'a Trace, params: &'a [Bound], extents: [i64; 4]) -> Function<'a> {
        let bound = trace.params().iter().map(|d| params.iter().find(|p| p.name == d.name)).collect();
        Function { trace, params: bound, extents }
    }

    /// Evaluates the parameters at a position.
    fn params(&self, index: [i64; 4], to: &mut Vec<f64>) {
        to.clear();
        // A table is read at a computed index and has no element for a position, so its value here is NaN.
        let value = |(p, declared): (&Option<&Bound>, &Declared)| match p {
            Some(p) if declared.kind.extents().len() == 0 => p.at(index),
            Some(_) | None => f64::NAN,
        };
        to.extend(self.params.iter().zip(self.trace.params()).map(value));
    }

    /// Evaluates the roots (outputs) of the trace in f64, without error bounds.
    pub(crate) fn eval(&self, score: f64, upstream: f64, index: [i64; 4]) -> Vec<f64> {
        let mut params = Vec::new();
        self.params(index, &mut params);
        let place = Place { score, upstream, index, extents: self.extents, params: &params };
        self.trace.eval_reading(&place, Precision::F64, |p, at| self.read(p, at))
    }

    /// Returns an element of a table.
    fn read(&self, table: ParamId, at: usize) -> f64 {
        self.params[table.index()].map_or(f64::NAN, |p| p.nth(at))
    }

    /// Returns the element at a computed index. Its error covers the neighbouring elements that an error of the index may select.
    fn read_roughly(&self, table: ParamId, place: Rough) -> Rough {
        let within = |place: f64| self.trace.params()[table.index()].kind.within(place as i64);
        let value = self.read(table, within(place.value));
        let near = within(place.value - place.error)..=within(place.value + place.error);
        let error = near.map(|at| (self.read(table, at) - value).abs()).fold(0.0, f64::max);
        Rough { value, error }
    }

    /// Evaluates the roots (outputs) of the trace with error bounds, for a score with an error and an upstream gradient of 1. `values` is
    /// scratch memory.
    pub(crate) fn rough(&self, score: Rough, index: [i64; 4], values: &mut Vec<Rough>) -> impl Iterator<Item = Rough> {
        values.clear();
        let trace = self.trace;
        for id in trace.ids() {
            let at = |id: NodeId| values[id.index()];
            let value = match trace.node(id) {
                Node::Score => score,
                Node::Upstream => Rough::exact(1.0),
                Node::Index(axis) => Rough::exact(index[axis.place()] as f64),
                Node::Extent(axis) => Rough::exact(self.extents[axis.place()] as f64),
                Node::Const(c) => Rough::exact(c.to_f64()),
                Node::Param(p) => Rough::exact(self.params[p.index()].map_or(f64::NAN, |p| p.at(index))),
                Node::Read(p, x) => self.read_roughly(p, at(x)),
                Node::Unary(f, x) => unary(f, trace.ty(x), trace.ty(id), at(x)),
                Node::Binary(f, x, y) => binary(f, trace.ty(x), at(x), at(y)),
                Node::Select(c, x, y) => {
                    let (c, x, y) = (at(c), at(x), at(y));
                    let taken = if c.value != 0.0 { x } else { y };
                    let either = if c.error > 0.0 { x.error.max(y.error) + (x.value - y.value).abs() } else { taken.error };
                    Rough { value: taken.value, error: either }
                }
            };
            values.push(value);
        }
        trace.roots().iter().map(|root| values[root.index()])
    }
}

impl Modify for Function<'_> {
    /// Besides its own rounding, executors round the result once more.
    fn value(&self, score: Rough, at: [i64; 4], scratch: &mut Vec<Rough>) -> Rough {
        let Rough { value, error } = self.rough(score, at, scratch).next().unwrap_or(score);
        Rough { value, error: error + of_difference(2.0 * F32_ROUNDOFF * value.abs()) }
    }

    fn slopes(&self, score: Rough, at: [i64; 4], scratch: &mut Vec<Rough>) -> Vec<Rough> {
        self.rough(score, at, scratch).skip(1).collect()
    }

    fn passed_on(&self, score: f64, upstream: f64, at: [i64; 4]) -> Vec<f64> {
        self.eval(score, upstream, at).split_off(1)
    }
}

/// A score_mod with its derivatives: with respect to the score, and to parameters of these extents.
#[derive(Debug)]
pub(crate) struct Gradient<'a> {
    pub(crate) function: Function<'a>,
    pub(crate) along: Vec<[usize; 4]>,
    /// The kind of each parameter.
    pub(crate) kinds: Vec<ParamKind>,
    pub(crate) reads: &'a [TableRead],
}

impl Gradient<'_> {
    /// Selects the roots that the oracle uses, without the first: derivatives by the score and parameters, then those of table reads.
    fn asked<T: Copy>(&self, roots: &[T]) -> Vec<T> {
        let reads = self.reads.iter().map(|read| roots[read.value - 1]);
        roots[..=self.along.len()].iter().copied().chain(reads).collect()
    }
}

impl Modify for Gradient<'_> {
    fn value(&self, score: Rough, at: [i64; 4], scratch: &mut Vec<Rough>) -> Rough {
        self.function.value(score, at, scratch)
    }

    fn slopes(&self, score: Rough, at: [i64; 4], scratch: &mut Vec<Rough>) -> Vec<Rough> {
        self.asked(&self.function.slopes(score, at, scratch))
    }

    fn passed_on(&self, score: f64, upstream: f64, at: [i64; 4]) -> Vec<f64> {
        self.asked(&self.function.passed_on(score, upstream, at))
    }

    fn is_table(&self, which: usize) -> bool {
        self.kinds[which].extents().len() > 0
    }

    fn reads(&self, score: f64, at: [i64; 4]) -> Vec<(usize, usize)> {
        if self.reads.is_empty() {
            return Vec::new();
        }
        let roots = self.function.eval(score, 1.0, at);
        self.reads.iter().map(|read| (read.wrt, self.kinds[read.wrt].within(roots[read.place] as i64))).collect()
    }

    fn along(&self) -> Vec<[usize; 4]> {
        self.along.clone()
    }
}

/// Returns the number of queries and keys of a batch entry, from the bound `cu_seqlens` or lengths.
pub(super) fn entry(params: &[Bound], batch: i64, [_, _, seq_q, seq_kv]: [i64; 4], padded: [bool; 2]) -> [i64; 2] {
    let value = |name: &str| params.iter().map(Bound::param).find(|param| param.name == name).map(|param| param.value);
    let side = |boundaries: &str, length: &str, extent: i64, padded: bool| match (
        value(CU_SEQLENS).or_else(|| value(boundaries)),
        value(length).filter(|_| padded),
    ) {
        (Some(at), _) => at.get(batch as usize + 1) as i64 - at.get(batch as usize) as i64,
        (None, Some(lengths)) => (lengths.get(batch as usize) as i64).clamp(0, extent),
        (None, None) => extent,
    };
    [side(CU_SEQLENS_Q, SEQ_LEN_Q, seq_q, padded[0]), side(CU_SEQLENS_KV, SEQ_LEN_KV, seq_kv, padded[1])]
}

/// Converts a mask to the oracle's form; a traced one becomes a closure that evaluates its trace. `padded` tells whether masks declare
/// lengths of queries and of keys.
pub(crate) fn mask<'a>(mask: &'a Mask, params: &'a [Bound], extents: [i64; 4], padded: [bool; 2]) -> Rule<'a> {
    let each = |masks: &'a [Mask]| masks.iter().map(|m| self::mask(m, params, extents, padded)).collect();
    match mask {
        Mask::Window { left, right, align } => {
            let (left, right) = (*left, *right);
            match align {
                Align::TopLeft => Rule::Window { left, right, align: Corner::TopLeft },
                Align::BottomRight => Rule::Window { left, right, align: Corner::BottomRight },
                Align::Ends => Rule::Ends { left, right, lengths: Box::new(move |batch| entry(params, batch, extents, padded)) },
            }
        }
        Mask::PrefixLm { len } => Rule::Prefix { len: *len },
        Mask::Traced(rule) => {
            let function = Function::new(rule.trace(), params, extents);
            Rule::Rule(Box::new(move |at| function.eval(0.0, 0.0, at)[0] != 0.0))
        }
        Mask::All(masks) => Rule::All(each(masks)),
        Mask::Any(masks) => Rule::Any(each(masks)),
        Mask::Not(mask) => Rule::Not(Box::new(self::mask(mask, params, extents, padded))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_told_word_for_word() {
        let kept = |mask: &Mask, q: i64, seq_q: i64| -> Vec<i64> {
            let extents = [1, 1, seq_q, 6];
            let rule = super::mask(mask, &[], extents, [false; 2]);
            (0..6).filter(|&k| rule.keeps([0, 0, q, k], extents)).collect()
        };
        assert_eq!(kept(&Mask::window(Some(2), Some(1), Align::TopLeft), 3, 6), [2, 3, 4]);
        assert_eq!(kept(&Mask::window(Some(1), Some(0), Align::BottomRight), 0, 2), [4]);
        assert_eq!(kept(&Mask::window(Some(1), Some(0), Align::Ends), 0, 2), [4]);
        assert_eq!(kept(&Mask::prefix_lm(3), 1, 6), [0, 1, 2]);
        let dilated: Mask = "dilated:3".parse().unwrap();
        assert_eq!(kept(&(!dilated.clone() & Mask::causal()), 4, 6), [0, 2, 3]);
        assert_eq!(kept(&(dilated | Mask::prefix_lm(1)), 1, 6), [0, 1, 4]);
    }

    #[test]
    fn errors_are_at_least_what_f32_makes_of_a_function() {
        let texts = [
            "tanh(score / 30.0) * 30.0",
            "scalar c = 0.3; sin(score * c) + erf(score) * exp(-score * score) + sqrt(score * score + 1.0)",
            "select(score > 0.0, score * 3.0 - log(abs(score) + 1.0), pow(abs(score), 1.5) / (1.0 + abs(score)))",
            "max(score, 0.125) * rsqrt(1.0 + score * score) + floor(score) * 0.5 + f32(q * k) % 7.0",
        ];
        for text in texts {
            let trace: Trace = text.parse().unwrap();
            let scalar = Bound { name: "c".to_owned(), dims: [1; 4], values: crate::params::Values::Scalar(0.3) };
            let bound = [scalar];
            let function = Function::new(&trace, &bound, [1, 1, 9, 9]);
            let mut scratch = Vec::new();
            for n in 0..400 {
                let x = (n as f32 - 200.0) * 0.137;
                let index = [0, 0, n % 9, n / 9 % 9];
                let exact = function.eval(f64::from(x), 1.0, index)[0];
                let rough = function.rough(Rough { value: f64::from(x), error: 1e-4 }, index, &mut scratch).next().unwrap();
                assert_eq!(rough.value, exact, "{text} at {x}");
                for moved in [x - 1e-4, x, x + 1e-4] {
                    let params = [f64::from(0.3f32)];
                    let place = Place { score: f64::from(moved), upstream: 1.0, index, extents: [1, 1, 9, 9], params: &params };
                    let got = trace.eval(&place, Precision::F32)[0];
                    assert!((got - exact).abs() <= 1.05 * rough.error + 1e-9, "{text} at {x}: {got}, {exact}, {}", rough.error);
                }
            }
        }
    }
}
