//! The facts of a problem that the CPU kernels support.

use sdpa_core::Fact;
use sdpa_core::error::Reason;

/// Returns an error if the CPU executor does not support `fact`, a property of a problem. It supports all facts that exist.
///
/// The match deliberately has no wildcard arm: a new fact needs an arm here, with the file that computes it or with a [`Reason`].
pub(crate) fn supports_fact(fact: &Fact<'_>) -> Result<(), Reason> {
    match fact {
        // Computed in `element` and `fp8`.
        Fact::Dtype(_) | Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) | Fact::BlockScaled(_) => Ok(()),
        // Computed in `schedule`.
        Fact::Batch(_)
        | Fact::HeadsQ(_)
        | Fact::HeadsKv(_)
        | Fact::SeqQ(_)
        | Fact::SeqKv(_)
        | Fact::DimQk(_)
        | Fact::DimV(_)
        | Fact::Band(..)
        | Fact::Prefix(_)
        | Fact::Ends(..)
        | Fact::Lengths(..) => Ok(()),
        // Computed in `pack`, which reads and writes operands element by element, so alignment does not matter.
        Fact::Strides(..)
        | Fact::Alignment(..)
        | Fact::Packed(_)
        | Fact::CrossPacked(_)
        | Fact::WideBoundaries(_)
        | Fact::MostTokens(..)
        | Fact::Pages(_)
        | Fact::PageSize(_) => Ok(()),
        // Computed in `program`.
        Fact::ScoreMod(_) | Fact::Keep(_) | Fact::Parameters(_) => Ok(()),
        // Computed in `output`.
        Fact::Sink(_) | Fact::Statistic(..) | Fact::StatsBase(_) => Ok(()),
        // Computed in `dropout`.
        Fact::Dropout(_) => Ok(()),
        // Computed in `backward`, which sums every gradient in a fixed order, so each run gives identical bits.
        Fact::Gradient(_) | Fact::GradientsOf(_) | Fact::BackwardParameters(_) | Fact::Deterministic(_) => Ok(()),
    }
}
