//! When these kernels are asked before cuDNN.

use sdpa_core::{BackwardProblem, Problem};

/// Whether the kernels of this crate are to be asked for a problem before cuDNN. Where they are, they were faster wherever measured (H100 and H200,
/// docs/cuda.md):
///
/// - a mask of places alone that is no plain band, or a prefix, over at least 1,024 queries and keys, by a sixth and more: cuDNN skips what lies outside of a
///   band, and computes every tile of any other mask, or band after band;
/// - packed documents of at least 512 tokens, by a fourteenth and more;
/// - 2 to 128 queries beside at least 8,192 keys, 2.6 times and more: cuDNN splits the keys of one query alone.
///
/// Pages were not measured. Shorter problems take the time of a launch on either.
pub fn is_faster(problem: &Problem) -> bool {
    let [.., seq_q, seq_kv] = problem.extents();
    if problem.paged().is_some() {
        return false;
    }
    if problem.packed().is_some() {
        return seq_q >= DOCUMENT && seq_kv >= DOCUMENT;
    }
    let is_cut = is_rule_of_places(problem) || problem.kept().region.prefix.is_some();
    is_cut && is_long(problem) || FEW.contains(&seq_q) && seq_kv >= MANY
}

/// Whether the kernels of this crate are to be asked for a backward problem before cuDNN: a mask of places alone that is neither a band nor a prefix, over at least 1,024 queries and keys.
///
/// Such problems took 0.3 to 1.15 of cuDNN's time (H200, docs/cuda.md), bands and prefixes 0.95 to 1.3 of it; packed documents were not measured. A pass that has to be `deterministic` is not
/// these kernels'.
pub fn is_faster_backward(problem: &BackwardProblem) -> bool {
    let forward = problem.forward();
    forward.packed().is_none() && is_rule_of_places(forward) && is_long(forward)
}

fn is_rule_of_places(problem: &Problem) -> bool {
    problem.kept().rest.as_ref().is_some_and(|rest| rest.params().is_empty())
}

fn is_long(problem: &Problem) -> bool {
    problem.seq_q() >= SHORT && problem.seq_kv() >= SHORT
}

/// Tokens from which on blocks that are skipped count.
const SHORT: i64 = 1024;
/// Tokens of the longest document from which on packed ones were measured.
const DOCUMENT: i64 = 512;
/// Queries that leave multiprocessors without work where keys are not split, and keys from which on that was measured.
const FEW: std::ops::RangeInclusive<i64> = 2..=128;
const MANY: i64 = 8192;

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Packed, Shape};

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

    #[test]
    fn documents_and_few_queries_beside_many_keys_are() {
        let shape = Shape { batch: 3, heads_q: 2, heads_kv: 1, seq_q: 600, seq_kv: 600, dim_qk: 64, dim_v: 64 };
        let packed = |shape| is_faster(&AttentionSpec::packed(DType::BF16, shape, Packed::default()).validate().unwrap());
        assert!(packed(shape) && !packed(Shape { seq_q: 64, seq_kv: 64, ..shape }));
        let dense = |seq_q, seq_kv| {
            is_faster(&AttentionSpec::dense(DType::BF16, Shape { seq_q, seq_kv, ..shape }, Layout::Bhsd).validate().unwrap())
        };
        assert!(dense(4, 8192) && dense(128, 20_000));
        assert!(!dense(1, 8192) && !dense(4, 4096) && !dense(300, 9000));
    }
}
