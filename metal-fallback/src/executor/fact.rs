//! The facts of a problem that the kernels support.

use crate::unsupported::Check;
use sdpa_core::{Fact, Reason, StatsBase};

/// Adds a reason for each fact that no kernel here supports, on any device. [`Forward::supports`](crate::Forward::supports) and
/// [`Backward::supports`](crate::Backward::supports) have the limits of the plans.
///
/// There is deliberately no wildcard arm: a new fact needs an arm here once the kernels compute it, or a reason.
fn supports_fact(check: &mut Check, fact: &Fact<'_>) {
    match fact {
        Fact::Dtype(dtype) => check.that(!dtype.is_fp8(), "dtype", dtype, "f32, f16 or bf16"),
        // These differ from `dtype` only in FP8 problems, which the rule for `dtype` refuses.
        Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) => {}
        Fact::BlockScaled(is_scaled) => check.that(!is_scaled, "block_scaled", is_scaled, "false: the kernels read no block scales"),
        // `supports` of the plans limits extents and head dims, and requires dense rows.
        Fact::Batch(_) | Fact::HeadsQ(_) | Fact::HeadsKv(_) | Fact::SeqQ(_) | Fact::SeqKv(_) | Fact::DimQk(_) | Fact::DimV(_) => {}
        Fact::Strides(..) | Fact::Alignment(..) => {}
        // `packed` checks the number of tokens.
        Fact::Packed(_) | Fact::CrossPacked(_) | Fact::WideBoundaries(_) | Fact::MostTokens(..) => {}
        // `supports` of the plans refuses pages together with packed queries.
        Fact::Pages(_) | Fact::PageSize(_) => {}
        // The kernel sources `forward`, `backward`, `sink` and `captured` implement all of the following.
        Fact::Sink(_)
        | Fact::Dropout(_)
        | Fact::ScoreMod(_)
        | Fact::Band(..)
        | Fact::Prefix(_)
        | Fact::Ends(..)
        | Fact::Lengths(..)
        | Fact::Keep(_) => {}
        Fact::Parameters(_) | Fact::BackwardParameters(_) => {}
        Fact::Statistic(..) => {}
        Fact::BatchInvariant(is_invariant) => {
            check.that(!is_invariant, "batch_invariant", "true", "false: kernels for few queries split keys by the shape of the call");
        }
        Fact::StatsBase(base) => check.that(*base == StatsBase::Natural, "stats_base", base, "natural"),
        Fact::Gradient(None) => {}
        Fact::Gradient(Some(gradient)) => {
            for name in gradient.reads.iter().map(|read| &gradient.wrt[read.wrt]) {
                check.that(
                    false,
                    "wrt",
                    name,
                    "a parameter that is not a table: the Metal kernels cannot sum gradients at computed indices",
                );
            }
        }
        Fact::GradientsOf(_) => {}
        // Gradients are always summed in a fixed order.
        Fact::Deterministic(_) => {}
    }
}

/// Checks whether the kernels support every fact.
///
/// # Errors
/// Returns a reason for each fact that the kernels do not support.
pub(super) fn supported<'a>(facts: impl Iterator<Item = Fact<'a>>) -> Result<(), Vec<Reason>> {
    let mut check = Check::default();
    facts.for_each(|fact| supports_fact(&mut check, &fact));
    if check.0.is_empty() { Ok(()) } else { Err(check.0) }
}
