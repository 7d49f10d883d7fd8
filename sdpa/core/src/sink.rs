//! Attention sinks: terms of the softmax's denominator that belong to no key.

use crate::dtype::DType;
use crate::expr::{Axes, Axis, Declared, ParamKind};
use crate::problem::Problem;
use crate::tensor::ParamValue;

/// The name of the declared parameter with the attention sinks: f32 `[heads_q]`. The sink of a query head is one more score in the
/// softmax's
/// denominator, which neither the scale nor score_mods change. −∞ disables it.
pub const SINK: &str = "sink";

/// Returns the declared parameter that holds the attention sinks of a problem.
pub(crate) fn declared() -> Declared {
    let kind = ParamKind::Tensor { axes: Axes::from([Axis::Head]), dtype: DType::F32 };
    Declared { name: SINK.to_owned(), kind, default: None }
}

impl Problem {
    /// Finds the sinks of a call, one per query head, among the `values` of the parameters `declared`; `None` for a problem without
    /// sinks.
    pub fn sinks<'a>(&self, declared: &[Declared], values: &[ParamValue<'a>]) -> Option<&'a [f32]> {
        let at = declared.iter().position(|p| self.sink() && p.name == SINK)?;
        match values.get(at)? {
            ParamValue::F32(sinks) => Some(sinks),
            ParamValue::Scalar(_)
            | ParamValue::F16(_)
            | ParamValue::BF16(_)
            | ParamValue::I32(_)
            | ParamValue::I64(_)
            | ParamValue::Bool(_)
            | ParamValue::F8E8M0(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionSpec, Layout, ScoreMod, Shape};

    fn spec() -> AttentionSpec {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 11, dim_qk: 8, dim_v: 16 };
        AttentionSpec::dense(DType::F16, shape, Layout::Bhsd)
    }

    #[test]
    fn a_sink_is_a_declared_parameter_and_part_of_the_problem() {
        let (plain, sink) = (spec().validate().unwrap(), spec().with_sink().validate().unwrap());
        assert_ne!(plain, sink);
        assert!(sink.sink() && !plain.sink());
        assert_eq!(sink.params(), [declared()]);
        assert_eq!(crate::params::elements(&sink.params()[0], sink.extents()), 4);
    }

    #[test]
    fn its_gradient_is_none_of_the_score_mods() {
        let backward = spec().with_sink().backward();
        let problem = backward.clone().wrt(SINK, DType::F32).validate().unwrap();
        assert_eq!(problem.sink_gradient(), Some(DType::F32));
        assert!(problem.gradient().is_none() && problem.wrt_scores().next().is_none());
        let bias: ScoreMod = "bias:qk".parse().unwrap();
        let mut both = spec().score_mod(bias).with_sink().backward();
        both = both.wrt(SINK, DType::F32).wrt("bias", DType::F16);
        let problem = both.validate().unwrap();
        let names: Vec<&str> = problem.wrt_scores().map(|g| g.name.as_str()).collect();
        assert_eq!((names, problem.wrt().len()), (vec!["bias"], 2));
        assert_eq!(problem.gradient().unwrap().trace.roots().len(), 3);
        let told = spec().backward().wrt(SINK, DType::F32).validate().unwrap_err().to_string();
        assert!(told.contains("wrt[0]"), "{told}");
    }

    #[test]
    fn a_score_mod_cannot_declare_it_too() {
        let own: ScoreMod = "tensor sink[head]: f32;\nscore + sink".parse().unwrap();
        assert!(spec().score_mod(own.clone()).validate().is_ok());
        let told = spec().score_mod(own).with_sink().validate().unwrap_err().to_string();
        assert!(told.contains("parameter sink") && told.contains("a reserved name"), "{told}");
    }
}
