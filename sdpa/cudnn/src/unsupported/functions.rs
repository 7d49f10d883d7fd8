//! Functions that engines compute with hardware approximations, accurate only on part of their domain.
//!
//! The angle of a sine is off by 1.2e-7 of itself. A power is `exp2(y · log2(x))`: NaN for a negative base, and for 0 to the power 0. Values computed
//! on the host are right, and so are small integer powers, which are lowered to products.

use super::floats::text;
use crate::lower::Job;
use sdpa_core::error::Reason;
use sdpa_core::expr::{Binary, Const, Node, NodeId, Trace, Type, Unary};

/// At this angle the error is half of f16's last digit next to 16. Most angles computed from positions are exact in f32.
const MOST: f64 = 65_536.0;

const WAVE: &str = "an argument that depends on the score, or is known to be at most 65,536: the error of sine and cosine in cuDNN's engines is 1.2e-7 of the argument";
const POWER: &str = "a base that is known to be positive, or an exponent of 0, 1, 2, 3 or 4: cuDNN's engines compute powers by logarithms, which are NaN for a negative base";

/// Returns a lower bound of each value, where it is not NaN.
fn least(trace: &Trace, ranges: &[Option<[f64; 2]>]) -> Vec<Option<f64>> {
    let mut all: Vec<Option<f64>> = Vec::with_capacity(ranges.len());
    for (id, range) in trace.ids().zip(ranges) {
        let at = |x: NodeId| all[x.index()];
        let both = |x: NodeId, y: NodeId, f: fn(f64, f64) -> f64| Some(f(at(x)?, at(y)?));
        let not_negative = |x: NodeId| at(x).is_some_and(|least| least >= 0.0);
        let found = match trace.node(id) {
            _ if trace.ty(id) != Type::F32 => None,
            Node::Unary(f, x) => match f {
                Unary::Abs | Unary::Sqrt | Unary::Rsqrt | Unary::Exp => Some(0.0),
                Unary::Sin | Unary::Cos | Unary::Tanh | Unary::Erf => Some(-1.0),
                Unary::Floor | Unary::Ceil => at(x).map(f64::floor),
                Unary::ToF32 => at(x),
                Unary::Neg | Unary::Log | Unary::Not | Unary::ToI32 => None,
            },
            Node::Binary(f, x, y) => match f {
                Binary::Add => both(x, y, |x, y| x + y),
                Binary::Mul | Binary::Div if x == y || (not_negative(x) && not_negative(y)) => Some(0.0),
                Binary::Pow if not_negative(x) => Some(0.0),
                Binary::Max => [at(x), at(y)].into_iter().flatten().reduce(f64::max),
                Binary::Min => both(x, y, f64::min),
                Binary::Sub | Binary::Mul | Binary::Div | Binary::Mod | Binary::Pow | Binary::And | Binary::Or => None,
                Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => None,
            },
            Node::Select(_, x, y) => both(x, y, f64::min),
            Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) | Node::Read(..) => None,
        };
        all.push([found, range.map(|[least, _]| least)].into_iter().flatten().reduce(f64::max));
    }
    all
}

/// Returns the first value that engines may compute wrongly, with the supported range.
fn wrong(trace: &Trace, extents: [i64; 4]) -> Option<(NodeId, &'static str)> {
    let ranges = trace.ranges(extents.map(|extent| [0, (extent - 1).max(0)]), extents);
    let (depends, least) = (trace.depends(), least(trace, &ranges));
    let is_within = |x: NodeId| ranges[x.index()].is_some_and(|range| range.into_iter().all(|end| end.abs() <= MOST));
    let is_nonzero = |y: NodeId| matches!(trace.node(y), Node::Const(Const::F32(bits)) if f32::from_bits(bits) != 0.0);
    // The host computes scalars and tables over batch and heads, so engines only read them.
    let is_given = |id: &NodeId| depends[id.index()].is_uniform() || depends[id.index()].is_of_heads();
    trace.ids().filter(|id| !is_given(id)).find_map(|id| match trace.node(id) {
        Node::Unary(Unary::Sin | Unary::Cos, x) => (!depends[x.index()].score && !is_within(x)).then_some((id, WAVE)),
        Node::Binary(Binary::Pow, x, y) => {
            let taken =
                trace.small_power(id).is_some() || least[x.index()].is_some_and(|least| least > 0.0 || (least == 0.0 && is_nonzero(y)));
            (!taken).then_some((id, POWER))
        }
        Node::Unary(..) | Node::Binary(..) | Node::Select(..) | Node::Read(..) => None,
        Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => None,
    })
}

pub(super) fn reasons(job: &Job) -> Option<Reason> {
    let problem = job.problem();
    let trace = problem.score_mod()?;
    let (id, limit) = wrong(trace, problem.extents())?;
    Some(Reason::Limit { field: "score_mod".to_owned(), value: text(trace, id), limit: limit.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, ScoreMod, Shape};

    const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 4, seq_q: 1000, seq_kv: 3000, dim_qk: 64, dim_v: 64 };

    fn found(score_mod: &str) -> Option<(String, &'static str)> {
        let trace: Trace = score_mod.parse().unwrap_or_else(|e| panic!("{score_mod}: {e}"));
        wrong(&trace, [2, 4, 1000, 3000]).map(|(id, limit)| (text(&trace, id), limit))
    }

    #[test]
    fn what_units_have_wrong_is_found() {
        for (score_mod, value, limit) in [
            ("tensor t[k]: f32; score + cos(t)", "tensor t[k]: f32; cos(t)", WAVE),
            ("score * sin(f32(q * k) * 0.1)", "sin(f32(q * k) * 0.1)", WAVE),
            ("scalar pace = 3.0; score + cos(pace * f32(k))", "scalar pace = 3.0; cos(pace * f32(k))", WAVE),
            ("pow(score, 0.5)", "pow(score, 0.5)", POWER),
            ("pow(score, 5.0)", "pow(score, 5.0)", POWER),
            ("tensor base[k]: f32; score * pow(base, f32(q))", "tensor base[k]: f32; pow(base, f32(q))", POWER),
            ("score + pow(f32(k), f32(q))", "pow(f32(k), f32(q))", POWER),
            ("pow(abs(score) - 1.0, 2.5)", "pow(abs(score) - 1.0, 2.5)", POWER),
        ] {
            assert_eq!(found(score_mod), Some((value.to_owned(), limit)), "{score_mod}");
        }
    }

    #[test]
    fn what_units_have_right_is_taken() {
        for score_mod in [
            "sandwich:16",
            "score + cos(f32(k - q) * 0.1)",
            "sin(score * 3.0) + cos(score * f32(q * k))",
            "scalar pace = 3.0; score + cos(pace)",
            "score + sin(f32(head) * 1000000.0)",
            "pow(score, 2.0) + pow(score, 3.0)",
            "pow(abs(score) + 0.5, 1.5) + pow(2.0, score)",
            "pow(score * score, 0.25)",
            "score * pow(0.99, f32(abs(q - k)))",
            "pow(max(score, 0.1), -2.0) + pow(exp(score), 0.5)",
            "score + pow(f32(k) + 1.0, -0.5)",
            "tensor decay[head]: f32; score * pow(exp(decay) + 0.1, f32(q - k))",
        ] {
            let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).score_mod(score_mod.parse::<ScoreMod>().unwrap());
            let problem = spec.validate().unwrap();
            assert_eq!(reasons(&problem.into()), None, "{score_mod}");
        }
    }
}
