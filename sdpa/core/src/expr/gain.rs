//! Bounds of derivatives: by how much a gradient may be larger than the upstream gradient, whatever the score and the parameters are.

use super::node::{Binary, Node, NodeId, Type, Unary};
use super::trace::Trace;
use std::collections::BTreeMap;

/// A bound of a magnitude: `most` times powers of the magnitudes of parameters, by the nodes that read them.
#[derive(Clone, Debug, PartialEq)]
struct Bound {
    most: f64,
    powers: BTreeMap<usize, i32>,
    /// Whether the magnitude is exactly this, so that a division by the value is bounded.
    exact: bool,
}

impl Bound {
    fn of(most: f64, exact: bool) -> Bound {
        Bound { most, powers: BTreeMap::new(), exact }
    }

    /// Multiplies by another bound, or divides by it with `sign` −1.
    fn times(&self, other: &Bound, sign: i32) -> Option<Bound> {
        if sign < 0 && (!other.exact || other.most == 0.0) {
            return None;
        }
        let mut powers = self.powers.clone();
        for (node, power) in &other.powers {
            *powers.entry(*node).or_insert(0) += sign * power;
        }
        powers.retain(|_, power| *power != 0);
        let most = if sign < 0 { self.most / other.most } else { self.most * other.most };
        Some(Bound { most, powers, exact: self.exact && other.exact }).filter(|bound| bound.most.is_finite())
    }

    /// Joins two bounds of the same powers by a function of their numbers. A value that is always 0 fits any powers.
    fn join(&self, other: &Bound, most: impl Fn(f64, f64) -> f64) -> Option<Bound> {
        let powers = match (self.most == 0.0, other.most == 0.0) {
            (true, _) => &other.powers,
            (false, true) => &self.powers,
            (false, false) if self.powers == other.powers => &self.powers,
            (false, false) => return None,
        };
        Some(Bound { most: most(self.most, other.most), powers: powers.clone(), exact: false })
    }
}

impl Trace {
    /// Returns a bound of the magnitude of a root, relative to that of the upstream gradient, for any score, any parameters and all indices within
    /// `extents` (batch, head, q, k). Values are taken as real numbers, without rounding. `None` if none was found.
    ///
    /// ```
    /// use sdpa_core::expr::F32;
    /// use sdpa_core::{AttentionSpec, DType, Layout, ScoreMod, Shape};
    ///
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// let gain = |score_mod: &str| {
    ///     let problem = spec.clone().score_mod(score_mod.parse::<ScoreMod>().unwrap()).backward().validate().unwrap();
    ///     problem.gradient().and_then(|gradient| gradient.trace.gain(1, problem.forward().extents()))
    /// };
    /// assert_eq!([gain("alibi"), gain("score * 3.0"), gain("score * score")], [Some(1.0), Some(3.0), None]);
    /// ```
    pub fn gain(&self, root: usize, extents: [i64; 4]) -> Option<f64> {
        let mut bounds: Vec<Option<Bound>> = Vec::with_capacity(self.nodes().len());
        for id in self.ids() {
            let of = |id: NodeId| bounds[id.index()].as_ref();
            let bound = match self.node(id) {
                Node::Score => None,
                Node::Upstream => Some(Bound::of(1.0, false)),
                Node::Index(axis) => Some(Bound::of((extents[axis.place()] - 1).max(0) as f64, false)),
                Node::Extent(axis) => Some(Bound::of(extents[axis.place()] as f64, true)),
                Node::Const(c) => Some(Bound::of(c.to_f64().abs(), true)).filter(|bound| bound.most.is_finite()),
                Node::Param(_) | Node::Read(..) => Some(Bound { most: 1.0, powers: BTreeMap::from([(id.index(), 1)]), exact: true }),
                Node::Unary(f, x) => unary(f, of(x)),
                Node::Binary(f, x, y) => binary(f, of(x), of(y)),
                Node::Select(_, x, y) => of(x).zip(of(y)).and_then(|(x, y)| x.join(y, f64::max)),
            };
            bounds.push(if self.ty(id) == Type::Bool { Some(Bound::of(1.0, false)) } else { bound });
        }
        let root = self.roots().get(root)?;
        bounds[root.index()].as_ref().filter(|bound| bound.powers.is_empty() || bound.most == 0.0).map(|bound| bound.most)
    }
}

fn unary(f: Unary, x: Option<&Bound>) -> Option<Bound> {
    match f {
        Unary::Neg | Unary::Abs | Unary::ToF32 => x.cloned(),
        Unary::ToI32 => x.map(|x| Bound { exact: false, ..x.clone() }),
        Unary::Tanh | Unary::Erf | Unary::Sin | Unary::Cos => Some(Bound::of(1.0, false)),
        Unary::Floor | Unary::Ceil => x.and_then(|x| x.join(&Bound::of(1.0, false), |x, one| x + one)),
        // Booleans have a bound by their type.
        Unary::Sqrt | Unary::Rsqrt | Unary::Exp | Unary::Log | Unary::Not => None,
    }
}

fn binary(f: Binary, x: Option<&Bound>, y: Option<&Bound>) -> Option<Bound> {
    match f {
        Binary::Add | Binary::Sub => x?.join(y?, |x, y| x + y),
        Binary::Min | Binary::Max => x?.join(y?, f64::max),
        Binary::Mul => x?.times(y?, 1),
        Binary::Div => x?.times(y?, -1),
        Binary::Mod => y.map(|y| Bound { exact: false, ..y.clone() }),
        Binary::Pow => None,
        Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::And | Binary::Or => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::{AttentionSpec, DType, Layout, ScoreMod, Shape};

    const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 40, seq_kv: 50, dim_qk: 64, dim_v: 64 };

    fn gain(score_mod: &str) -> Option<f64> {
        let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bshd).score_mod(score_mod.parse::<ScoreMod>().unwrap());
        let problem = spec.backward().validate().unwrap();
        problem.gradient().unwrap().trace.gain(1, problem.forward().extents())
    }

    #[test]
    fn derivatives_of_the_library_have_bounds() {
        for (text, bound) in [("alibi", 1.0), ("bias:hqk", 1.0), ("relative-bias:8,512", 1.0), ("score * 0.5 - f32(k)", 0.5)] {
            assert_eq!(gain(text), Some(bound), "{text}");
        }
        // The derivative is 1 − tanh², whose bound is 2, because the terms are bounded one by one; the cap cancels.
        assert_eq!(gain("softcap:30"), Some(2.0));
        // Both branches count, since their derivatives are added.
        assert_eq!(gain("select(k <= q, score, score * 0.25)"), Some(1.25));
        assert_eq!(gain("score + f32(q - k) * sin(score)").map(|gain| gain > 1.0), Some(true));
        assert_eq!(gain("scalar a = 2.0; score * a / a"), Some(1.0));
    }

    #[test]
    fn derivatives_without_a_bound_are_none() {
        for text in ["score * score", "exp(score)", "scalar a = 2.0; score * a", "sqrt(score)", "scalar a = 2.0; score / a", "1.0 / score"]
        {
            assert_eq!(gain(text), None, "{text}");
        }
    }

    /// The bound holds for numeric derivatives, at any score.
    #[test]
    fn no_slope_is_steeper_than_the_bound() {
        use crate::expr::{Place, Precision};
        for text in [
            "softcap:3",
            "alibi",
            "score * 0.5 - f32(k)",
            "sin(score) * 2.0",
            "tanh(score * 0.25) * 8.0",
            "select(score > 0.0, score, score * 0.1)",
        ] {
            let score_mod: ScoreMod = text.parse().unwrap();
            let bound = gain(text).unwrap_or_else(|| panic!("{text}"));
            let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bshd).score_mod(score_mod);
            let problem = spec.backward().validate().unwrap();
            let trace = &problem.gradient().unwrap().trace;
            let params: Vec<f64> = trace.params().iter().map(|_| 3.0).collect();
            for step in -60..60 {
                let place =
                    Place { score: f64::from(step) * 0.31, upstream: 1.0, index: [0, 1, 5, 7], extents: [2, 4, 40, 50], params: &params };
                let slope = trace.eval(&place, Precision::F64)[1];
                assert!(slope.abs() <= bound, "{text}: {slope} at {}, bound {bound}", place.score);
            }
        }
    }
}
