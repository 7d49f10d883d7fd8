//! When these kernels are asked before cuDNN.

use sdpa_core::{BackwardProblem, Problem};

/// Whether the kernels of this crate are to be asked for a problem before cuDNN: a mask of places alone that is no plain band, or a prefix, over at least
/// 1,024 queries and keys.
///
/// Wherever such problems were measured they were faster than cuDNN's engines, by a sixth and more (H100, docs/cuda.md): cuDNN skips what lies outside
/// of a band, and computes every tile of any other mask, or band after band. Shorter problems take the time of a launch on either. Packed documents and pages
/// were not measured.
pub fn is_faster(problem: &Problem) -> bool {
    let measured = problem.packed().is_none() && problem.paged().is_none();
    measured && (is_rule_of_places(problem) || problem.kept().region.prefix.is_some()) && is_long(problem)
}

/// The same for a backward problem: a mask of places alone that is neither a band nor a prefix, over at least 1,024 queries and keys.
///
/// Such problems took 0.3 to 1.15 of cuDNN's time (H200, docs/cuda.md), bands and prefixes 1.0 to 1.3 of it. A pass that has to be `deterministic` is not
/// these kernels'.
pub fn is_faster_backward(problem: &BackwardProblem) -> bool {
    is_rule_of_places(problem.forward()) && is_long(problem.forward())
}

fn is_rule_of_places(problem: &Problem) -> bool {
    problem.kept().rest.as_ref().is_some_and(|rest| rest.params().is_empty())
}

fn is_long(problem: &Problem) -> bool {
    problem.seq_q() >= SHORT && problem.seq_kv() >= SHORT
}

/// Tokens from which on blocks that are skipped count.
const SHORT: i64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};

    #[test]
    fn masks_that_are_no_bands_and_read_nothing_are() {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 2048, seq_kv: 2048, dim_qk: 64, dim_v: 64 };
        let of =
            |mask: Mask, shape: Shape| is_faster(&AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask).validate().unwrap());
        let text = |text: &str| text.parse::<Mask>().unwrap();
        for faster in [Mask::prefix_lm(100), text("natten:65"), text("dilated:4 & causal"), text("k < 4 | q - k < 512")] {
            assert!(of(faster.clone(), shape), "{faster}");
            assert!(!of(faster, Shape { seq_q: 512, ..shape }));
        }
        for band in [Mask::causal(), text("sliding-window:300"), Mask::document(), Mask::padding()] {
            assert!(!of(band.clone(), shape), "{band}");
        }
    }
}
