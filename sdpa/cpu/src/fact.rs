//! The facts of a problem that the CPU kernels support.

use sdpa_core::Fact;
use sdpa_core::error::Reason;

/// Returns an error if the CPU executor does not support `fact`, a property of a problem. It supports all facts that exist.
///
/// The match deliberately has no wildcard arm: a new fact needs an arm here, with the file that computes it or with a [`Reason`].
pub(crate) fn supports_fact(fact: &Fact<'_>) -> Result<(), Reason> {
    match fact {
        // The modules `element` and `fp8` handle these facts.
        Fact::Dtype(_) | Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) | Fact::BlockScaled(_) => Ok(()),
        // The module `schedule` handles these facts.
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
        // The modules `schedule` and `backward::cut` handle this fact: blocks, strips and sums have the same borders in every call.
        Fact::BatchInvariant(_) => Ok(()),
        // The module `pack` handles these facts. It reads and writes operands element by element, so alignment does not matter.
        Fact::Strides(..)
        | Fact::Alignment(..)
        | Fact::Packed(_)
        | Fact::CrossPacked(_)
        | Fact::WideBoundaries(_)
        | Fact::MostTokens(..)
        | Fact::Pages(_)
        | Fact::PageSize(_) => Ok(()),
        // The module `program` handles these facts.
        Fact::ScoreMod(_) | Fact::Keep(_) | Fact::Parameters(_) => Ok(()),
        // The module `output` handles these facts.
        Fact::Sink(_) | Fact::Statistic(..) | Fact::StatsBase(_) => Ok(()),
        // The module `dropout` handles this fact.
        Fact::Dropout(_) => Ok(()),
        // The module `backward` handles these facts. It sums every gradient in a fixed order, so each run gives identical bits.
        Fact::Gradient(_) | Fact::GradientsOf(_) | Fact::BackwardParameters(_) | Fact::Deterministic(_) => Ok(()),
    }
}
