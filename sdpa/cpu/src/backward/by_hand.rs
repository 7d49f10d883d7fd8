//! Compares gradients of score_mods that the caller supplies with the derived ones.

use sdpa_core::backward::BackwardProblem;
use sdpa_core::expr::{Builder, ExprError, Inputs, Place, Precision, Trace};

/// Relative difference above which a warning is printed.
const TOLERANCE: f64 = 1e-3;

/// Warns if the supplied gradient with respect to the score is not the derivative of the score_mod, at a few positions.
///
/// Parameters have made-up values. At a position where the function is not smooth a difference is legitimate, so a few positions are tried.
pub(super) fn compare(problem: &BackwardProblem) {
    let (Some(given), Some(function)) = (problem.gradient(), problem.forward().score_mod()) else { return };
    let Ok(derived) = derive(function) else { return };
    if let Some((score, given, derived)) = difference(&given.trace, &derived, problem.forward().extents()) {
        tracing::warn!(score, given, derived, "a gradient that is written by hand differs from the derivative of its score_mod");
    }
}

/// Derives the gradient of the score_mod with respect to the score.
fn derive(function: &Trace) -> Result<Trace, Vec<ExprError>> {
    let mut b = Builder::new();
    let (score, upstream) = (b.score(), b.upstream());
    let value = b.inline(function, Inputs::default())[0];
    let gradient = b.gradient(value, upstream, &[score])[0].unwrap_or_else(|| b.f32(0.0));
    b.finish(&[value, gradient])
}

/// Returns a score where the second roots differ, and both values.
fn difference(given: &Trace, derived: &Trace, extents: [i64; 4]) -> Option<(f64, f64, f64)> {
    let at = |trace: &Trace, n: usize, score: f64| {
        let values = |p: &sdpa_core::expr::Declared| p.default.map_or(0.37 + 0.11 * p.name.len() as f64, f64::from);
        let params: Vec<f64> = trace.params().iter().map(values).collect();
        let index = extents.map(|extent| (n as i64 * 5 + 1) % extent);
        trace.eval(&Place { score, upstream: 0.7, index, extents, params: &params }, Precision::F64)[1]
    };
    let scores = [-7.3, -1.13, -0.21, 0.17, 0.93, 5.9];
    let found = scores.into_iter().enumerate().map(|(n, score)| (score, at(given, n, score), at(derived, n, score)));
    let mut unlike = found.filter(|(_, x, y)| (x - y).abs() > TOLERANCE * (1.0 + y.abs()) || x.is_nan() != y.is_nan());
    unlike.next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, ExprErrors, Layout, ScoreMod, Shape};

    fn differs(score_mod: ScoreMod) -> bool {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
        let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).score_mod(score_mod).backward().validate().unwrap();
        let (given, function) = (problem.gradient().unwrap(), problem.forward().score_mod().unwrap());
        difference(&given.trace, &derive(function).unwrap(), problem.forward().extents()).is_some()
    }

    #[test]
    fn a_wrong_gradient_is_seen_and_a_right_one_is_not() -> Result<(), ExprErrors> {
        let cube = || ScoreMod::new("cube", |score, _, p| score * score * score * p.scalar("by", 0.5));
        assert!(!differs(cube()?));
        assert!(!differs(cube()?.with_bprop(|g, score, _, p| g * score * score * 3.0 * p.scalar("by", 0.5))?));
        assert!(differs(cube()?.with_bprop(|g, score, _, _| g * score * score * 3.0)?));
        let last = sdpa_core::library::softcap(3.0);
        assert!(!differs(cube()?.with_bprop(|g, score, _, p| g * score * score * 1.5 * (p.scalar("by", 0.5) * 2.0))?.then(last.clone())));
        assert!(differs(cube()?.with_bprop(|g, _, _, _| g)?.then(last)));
        Ok(())
    }
}
