//! The facts of a problem that the WGMMA kernels support. `mma/fact.rs` has those of the `mma.sync` kernels.

use crate::params::FAR;
use crate::tile_config::MOST_DIM;
use crate::unsupported::{Check, PAGE_SIZE};
use crate::work::FIXED_SPLIT_DIM;
use sdpa_core::{DType, Direction, Fact, Operand, Side, TensorSpec, packed};
use sdpa_nvidia::JobQuery;

/// Rows of a TMA swizzle pattern. Pages must be whole multiples.
const LEAST_PIECE: i64 = 8;

/// Checks that `extent`, the number of queries or keys per head, is below the limit of the kernels of both families.
pub(crate) fn extent(check: &mut Check, name: &str, extent: i64) {
    // Kernels add indices and bounds in i32, so their sums must also fit in i32.
    check.that(extent < i64::from(FAR) / 4, name, extent, format!("below {}", FAR / 4));
}

/// Checks that `dim`, a head dim, is at most the limit of the kernels of both families.
pub(crate) fn dim(check: &mut Check, name: &str, dim: i64) {
    check.that(dim <= MOST_DIM, name, dim, format!("at most {MOST_DIM}"));
}

/// Checks that the packed tokens of one side (queries or keys) are below the limit of the kernels of both families, which count them in
/// i32.
pub(crate) fn tokens(check: &mut Check, pass: JobQuery<'_>, side: Side) {
    if pass.problem().packs(side) {
        let total = pass.problem().total(side);
        check.that(total < i64::from(FAR), side.total(), total, format!("below {FAR}"));
    }
}

/// Returns an operand as TMA sees it; `None` if no rule of TMA applies.
fn through_tma(pass: JobQuery<'_>, operand: Operand) -> Option<TensorSpec> {
    let packs = pass.problem().packs(operand.side());
    let tensor = pass.in_memory(operand).map(|tensor| if packs { packed::memory(&tensor, 2) } else { tensor });
    // No rule of TMA applies to f32, which the rule for `dtype` refuses, or to `d_o`, which is copied if TMA does not support its layout.
    tensor.filter(|_| pass.problem().dtype() != DType::F32 && operand != Operand::DO)
}

/// Adds a reason to `check` if the WGMMA kernels do not support `fact`, a property of the problem of a pass.
///
/// There is deliberately no wildcard arm: a new fact needs an arm here once the kernels compute it, or a reason.
pub(crate) fn supports_fact(check: &mut Check, pass: JobQuery<'_>, fact: &Fact<'_>) {
    match fact {
        Fact::Dtype(dtype) => check.that(matches!(dtype, DType::F16 | DType::BF16), "dtype", dtype, "f16 or bf16"),
        // These differ from `dtype` only in FP8 problems, which the rule for `dtype` refuses.
        Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) => {}
        Fact::BlockScaled(is_scaled) => check.that(!is_scaled, "block_scaled", is_scaled, "false: the kernels read no block scales"),
        // These only affect the number of thread blocks, which is checked for the whole problem.
        Fact::Batch(_) | Fact::HeadsQ(_) | Fact::HeadsKv(_) => {}
        Fact::SeqQ(seq_q) => extent(check, "seq_q", *seq_q),
        Fact::SeqKv(seq_kv) => extent(check, "seq_kv", *seq_kv),
        Fact::DimQk(dim_qk) => dim(check, "dim_qk", *dim_qk),
        Fact::DimV(dim_v) => dim(check, "dim_v", *dim_v),
        Fact::Strides(operand, _) => {
            if let Some(tensor) = through_tma(pass, *operand) {
                check.strides(*operand, &tensor, 2);
            }
        }
        Fact::Alignment(operand, _) => {
            if let Some(tensor) = through_tma(pass, *operand) {
                check.alignment(*operand, &tensor);
            }
        }
        // The kernels support packing: `Packs` in `problem` represents it, and `backward` checks the strides of a packed `d_o`.
        Fact::Packed(_) | Fact::CrossPacked(_) | Fact::WideBoundaries(_) => {}
        Fact::MostTokens(side, _) => tokens(check, pass, *side),
        Fact::Pages(pages) => {
            let reads_pages = Direction::Forward == pass.direction() || pages.is_none();
            check.that(reads_pages, "paged", "a paged KV cache", "none: the backward kernels read contiguous keys");
        }
        Fact::PageSize(None) => {}
        Fact::PageSize(Some(page_size)) => {
            let limit = format!("a multiple of {LEAST_PIECE}, the rows that TMA swizzles together");
            check.that(page_size % LEAST_PIECE == 0, PAGE_SIZE, page_size, limit);
        }
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
        Fact::BatchInvariant(is_invariant) => {
            let [dim_qk, dim_v] = [pass.problem().dim_qk(), pass.problem().dim_v()];
            // `backward` checks what a batch-invariant backward pass needs.
            if *is_invariant && pass.direction() == Direction::Forward && dim_qk.max(dim_v) > FIXED_SPLIT_DIM {
                let limit = format!("false for head dims above {FIXED_SPLIT_DIM}: the shape of a call determines tiles and split-KV");
                check.that(false, "batch_invariant", "true", limit);
            }
        }
        Fact::Parameters(_) | Fact::BackwardParameters(_) => {}
        Fact::Gradient(_) | Fact::GradientsOf(_) => {}
        // `backward` checks what a deterministic pass needs.
        Fact::Deterministic(_) => {}
    }
}
