//! Support checks of the `mma.sync` kernels, and their form of a problem. They support any strides, and head dims up to 256.

use super::fact::supports_fact;
use super::tile_config::TileConfig;
use crate::backward::Backward;
use crate::problem::Forward;
use crate::tile_config::MOST_DIM;
use crate::unsupported::{Check, unsupported};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::error::Unsupported;
use sdpa_core::{Direction, Problem};
use sdpa_nvidia::JobQuery;

fn checked(pass: JobQuery<'_>) -> Check {
    let mut check = Check(Vec::new());
    pass.facts().for_each(|fact| supports_fact(&mut check, pass, &fact));
    // The grid is largest for the smallest tile, of 32 rows, with two column parts.
    let longest = pass.problem().seq_q().max(pass.problem().seq_kv());
    check.blocks(pass.problem(), 2 * (longest / 32 + 1));
    check
}

/// Creates the form of a forward problem that the `mma.sync` kernels use.
///
/// # Errors
/// Returns every limit of the kernels that the problem breaks.
pub fn forward(problem: &Problem) -> Result<Forward, Unsupported> {
    let check = checked(JobQuery::Forward(problem));
    if check.0.is_empty() { Ok(Forward::of_supported(problem)) } else { Err(unsupported(check.0)) }
}

/// Creates the form of a backward problem that the `mma.sync` kernels use.
///
/// # Errors
/// Returns every limit of the kernels that the problem breaks.
pub fn backward(problem: &BackwardProblem) -> Result<Backward, Unsupported> {
    let mut check = checked(JobQuery::Backward(problem));
    if !check.0.is_empty() {
        return Err(unsupported(check.0));
    }
    let backward = Backward::of_supported(problem, Forward::of_supported(problem.forward()));
    backward.check_partials(&mut check, TileConfig::of_backward(&backward)?.own);
    if check.0.is_empty() { Ok(backward) } else { Err(unsupported(check.0)) }
}

impl TileConfig {
    /// Returns the tile configuration of a forward pass.
    ///
    /// # Errors
    /// Fails for head dims above 256.
    pub fn of_forward(forward: &Forward) -> Result<TileConfig, Unsupported> {
        TileConfig::of_attention(Direction::Forward, forward)
    }

    /// Returns the tile configuration of a backward pass.
    ///
    /// # Errors
    /// Fails for head dims above 256.
    pub fn of_backward(backward: &Backward) -> Result<TileConfig, Unsupported> {
        TileConfig::of_attention(Direction::Backward, &backward.forward)
    }

    fn of_attention(direction: Direction, forward: &Forward) -> Result<TileConfig, Unsupported> {
        let [q, _, v, _] = forward.tensors;
        TileConfig::of(direction, forward.dtype, q.dims[3], v.dims[3]).ok_or_else(|| {
            let mut check = Check(Vec::new());
            check.that(false, "dim", q.dims[3].max(v.dims[3]), format!("at most {MOST_DIM}"));
            unsupported(check.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::error::Reason;
    use sdpa_core::{AttentionSpec, BackwardSpec, DType, Layout, Mask, Packed, Paged, SINK, Shape, StatsBase};

    const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 9, dim_qk: 13, dim_v: 7 };

    fn fields<T>(refused: Result<T, Unsupported>) -> Vec<String> {
        let field = |reason: Reason| match reason {
            Reason::Limit { field, .. } => field,
            Reason::KnownBad { .. } | Reason::Refused { .. } | Reason::Absent(_) | Reason::Failed(_) | _ => format!("{reason:?}"),
        };
        refused.err().map_or_else(Vec::new, |refused| refused.reasons.into_iter().map(field).collect())
    }

    #[test]
    fn any_strides_and_dims_are_supported_and_reasons_name_the_field() {
        let of = |spec: &AttentionSpec| fields(forward(&spec.validate().unwrap()));
        let mut odd = AttentionSpec::dense(DType::F32, SHAPE, Layout::Sbhd).mask(Mask::padding()).with_sink().with_stats();
        assert_eq!(of(&odd), [""; 0]);
        (odd.k.strides[0], odd.v.strides[1], odd.q.alignment) = (0, 0, 4);
        assert_eq!(of(&odd), [""; 0]);
        assert_eq!(of(&odd.clone().with_row_max().with_sum_exp().with_stats_in(StatsBase::Two)), [""; 0]);
        assert_eq!(of(&odd.with_dropout(0.5)), [""; 0]);
        for page_size in [1, 7, 48] {
            let paged = AttentionSpec::paged(DType::F16, SHAPE, Paged::new(page_size, 9));
            assert_eq!(of(&paged), [""; 0]);
            assert_eq!(of(&paged.with_packed_queries(9)), [""; 0]);
        }
        assert_eq!(of(&AttentionSpec::packed(DType::F16, SHAPE, Packed::new())), [""; 0]);
        assert_eq!(of(&AttentionSpec::packed(DType::F16, SHAPE, Packed::of(1 << 30))), ["total_q", "total_kv"]);
        let wide = Shape { dim_qk: 260, dim_v: 300, ..SHAPE };
        assert_eq!(of(&AttentionSpec::dense(DType::F16, wide, Layout::Bhsd)), ["dim_qk", "dim_v"]);
    }

    #[test]
    fn a_deterministic_pass_bounds_the_partial_sums_of_warps() {
        let of = |spec: &BackwardSpec| fields(backward(&spec.validate().unwrap()));
        let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).score_mod("bias:hqk".parse().unwrap()).with_sink().backward();
        assert_eq!(of(&spec.clone().deterministic().wrt(SINK, DType::F32)), [""; 0]);
        assert_eq!(of(&spec.clone().wrt("bias", DType::F32)), [""; 0]);
        assert_eq!(of(&spec.deterministic().wrt("bias", DType::F32)), [""; 0]);
        // The partial sums have 2 · 4 · 9,000² elements (batch, heads, queries, keys); the batch is summed.
        let long = Shape { seq_q: 9000, seq_kv: 9000, ..SHAPE };
        let spec = AttentionSpec::dense(DType::BF16, long, Layout::Bhsd).score_mod("bias:hqk".parse().unwrap()).backward();
        assert_eq!(of(&spec.clone().wrt("bias", DType::F32)), [""; 0]);
        let refused = backward(&spec.deterministic().wrt("bias", DType::F32).validate().unwrap()).unwrap_err().to_string();
        assert!(refused.contains("deterministic, gradients of bias: got 2592000000 bytes, expected at most 1073741824 bytes"), "{refused}");
    }
}
