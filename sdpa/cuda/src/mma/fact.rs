//! The facts of a problem that the `mma.sync` kernels support.

use crate::fact::{dim, extent, tokens};
use crate::unsupported::Check;
use sdpa_core::{DType, Direction, Fact};
use sdpa_nvidia::JobQuery;

/// Adds a reason to `check` if the `mma.sync` kernels do not support `fact`, a property of the problem of a pass.
///
/// There is deliberately no wildcard arm: a new fact needs an arm here once the kernels compute it, or a reason.
pub(crate) fn supports_fact(check: &mut Check, pass: JobQuery<'_>, fact: &Fact<'_>) {
    match fact {
        Fact::Dtype(dtype) => {
            let floats = [DType::F16, DType::BF16, DType::F32];
            check.that(floats.contains(dtype), "dtype", dtype, "f16, bf16 or f32");
        }
        // These differ from `dtype` only in FP8 problems, which the rule for `dtype` refuses.
        Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) => {}
        Fact::BlockScaled(is_scaled) => check.that(!is_scaled, "block_scaled", is_scaled, "false: the kernels read no block scales"),
        // These only affect the number of thread blocks, which is checked for the whole problem.
        Fact::Batch(_) | Fact::HeadsQ(_) | Fact::HeadsKv(_) => {}
        Fact::SeqQ(seq_q) => extent(check, "seq_q", *seq_q),
        Fact::SeqKv(seq_kv) => extent(check, "seq_kv", *seq_kv),
        Fact::DimQk(dim_qk) => dim(check, "dim_qk", *dim_qk),
        Fact::DimV(dim_v) => dim(check, "dim_v", *dim_v),
        // All strides and alignments are supported: threads copy single elements if they cannot copy 16 bytes at once.
        Fact::Strides(..) | Fact::Alignment(..) => {}
        // The kernels support packing, which `Packs` in `problem` represents.
        Fact::Packed(_) | Fact::CrossPacked(_) | Fact::WideBoundaries(_) => {}
        Fact::MostTokens(side, _) => tokens(check, pass, *side),
        Fact::Pages(pages) => {
            let reads_pages = Direction::Forward == pass.direction() || pages.is_none();
            check.that(reads_pages, "paged", "a paged KV cache", "none: the backward kernels read contiguous keys");
        }
        Fact::PageSize(_) => {}
        // The kernels support all of these. `Forward` in `problem` and `Backward` in `backward` represent them.
        Fact::Sink(_)
        | Fact::Dropout(_)
        | Fact::ScoreMod(_)
        | Fact::Band(..)
        | Fact::Prefix(_)
        | Fact::Ends(..)
        | Fact::Lengths(..)
        | Fact::Keep(_) => {}
        Fact::Statistic(..) | Fact::StatsBase(_) => {}
        // Holds for every problem: tile shapes depend on dims and element type alone, a thread block has all keys of its queries (or all queries of its
        // keys), and it adds in the order of blocks.
        Fact::BatchInvariant(_) => {}
        Fact::Parameters(_) | Fact::BackwardParameters(_) => {}
        Fact::Gradient(_) => {}
        // `problem` checks the workspace of a deterministic sum.
        Fact::GradientsOf(_) | Fact::Deterministic(_) => {}
    }
}
