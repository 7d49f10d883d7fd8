//! The facts of a problem, as the kernels on the CPU support them.

use sdpa_core::Fact;
use sdpa_core::error::Reason;

/// Returns why this executor does not compute a fact. It computes all that there are.
///
/// There is no wildcard arm, on purpose: a new fact belongs here once a file below computes it, or with a [`Reason`].
pub(crate) fn supports_fact(fact: &Fact<'_>) -> Result<(), Reason> {
    match fact {
        // `element`, `fp8`.
        Fact::Dtype(_) | Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) | Fact::BlockScaled(_) => Ok(()),
        // `schedule`.
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
        // `pack`: operands are read and written element by element, so no alignment matters.
        Fact::Strides(..)
        | Fact::Alignment(..)
        | Fact::Packed(_)
        | Fact::CrossPacked(_)
        | Fact::WideBoundaries(_)
        | Fact::MostTokens(..)
        | Fact::Pages(_)
        | Fact::PageSize(_) => Ok(()),
        // `program`.
        Fact::ScoreMod(_) | Fact::Keep(_) | Fact::Parameters(_) => Ok(()),
        // `output`.
        Fact::Sink(_) | Fact::Statistic(..) | Fact::StatsBase(_) => Ok(()),
        // `dropout`.
        Fact::Dropout(_) => Ok(()),
        // `backward`: every gradient is added up in one order, so each run gives the same bits.
        Fact::Gradient(_) | Fact::GradientsOf(_) | Fact::BackwardParameters(_) | Fact::Deterministic(_) => Ok(()),
    }
}
