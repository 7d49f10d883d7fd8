//! The cost of a document mask compared with packed sequences.

use crate::operands::Operands;
use crate::request::Request;
use sdpa::ExecutorName;
use sdpa::cudnn::cost::Documents;
use sdpa::cudnn::lower::Job;

/// Minimum factor in time or in number of pairs for a note to be printed.
const WORTH: f64 = 1.1;

/// The work that an executor does for a document mask although the mask excludes it.
#[derive(Clone, Copy)]
enum Cost {
    /// Every tile within the bands.
    Tiles,
    /// Every pair within the bands.
    Pairs,
}

impl Cost {
    /// `None` for native CUDA kernels, which skip tiles between packed sequences, and for executors of unknown cost.
    fn of(executor: ExecutorName) -> Option<Cost> {
        match executor {
            ExecutorName::CUDNN => Some(Cost::Tiles),
            ExecutorName::CPU | ExecutorName::METAL => Some(Cost::Pairs),
            _ => None,
        }
    }
}

/// Returns a note that packed sequences would cost less than the document mask, if so. If the mask cannot be packed, the note gives the
/// reason.
pub(super) fn advice(operands: &Operands, request: &Request, executor: ExecutorName) -> Option<String> {
    let problem = &request.problem;
    let number = |name: &str, row: i64, token: i64| {
        let bound = operands.params.iter().find(|bound| bound.name == name)?;
        let place = [row, 0, if bound.dims[2] > 1 { token } else { 0 }, if bound.dims[3] > 1 { token } else { 0 }];
        Some(bound.at(place) as i64)
    };
    let documents = Documents::of(problem, number)?;
    let passes = [Some(("forward", Job::from(problem.clone()))), request.backward.as_ref().map(|b| ("backward", b.problem.clone().into()))];
    say(&documents, passes.iter().flatten(), executor)
}

fn say<'a>(documents: &Documents, passes: impl Iterator<Item = &'a (&'static str, Job)>, executor: ExecutorName) -> Option<String> {
    let cost = Cost::of(executor)?;
    let whole = match cost {
        Cost::Tiles => "every tile is computed, also between documents",
        Cost::Pairs => "every query-key pair is computed, also between documents",
    };
    if let Documents::Apart { row, token } = documents {
        return Some(format!(
            "{whole}; they cannot be packed, because some are not one contiguous run of tokens (batch entry {row}, token {token})"
        ));
    }
    let passes: Vec<_> = passes.collect();
    let fewer = documents.fewer_pairs(passes.first()?.1.problem());
    let gain = match cost {
        Cost::Tiles => {
            let gains: Vec<_> = passes.iter().map(|(pass, job)| (pass, documents.gain(job))).filter(|(_, gain)| *gain >= WORTH).collect();
            let each: Vec<String> = gains.iter().map(|(pass, gain)| format!("{gain:.1} times as fast {pass}")).collect();
            (!each.is_empty()).then(|| format!(" and be about {} (estimate for an H200)", each.join(" and ")))?
        }
        Cost::Pairs => (fewer >= WORTH).then(String::new)?,
    };
    Some(format!(
        "{whole}; packing the {} documents (--cu-seqlens) would compute {fewer:.1} times fewer query-key pairs{gain}",
        documents.count()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};

    #[test]
    fn what_is_said_is_what_the_executor_computes() {
        let shape = Shape { batch: 4, heads_q: 32, heads_kv: 32, seq_q: 4096, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats().mask(Mask::document());
        let backward = spec.clone().backward().validate().unwrap();
        let passes = [("forward", Job::from(spec.validate().unwrap())), ("backward", backward.into())];
        let said = |documents: &Documents, executor| say(documents, passes.iter(), executor);
        let eight = Documents::Runs(vec![vec![512; 8]; 4]);
        let told = said(&eight, ExecutorName::CUDNN).unwrap();
        assert!(told.starts_with("every tile is computed, also between documents; packing the 32 documents (--cu-seqlens)"), "{told}");
        assert!(told.contains(" would compute 8.0 times fewer query-key pairs and be about "), "{told}");
        assert!(told.contains(" forward and ") && told.ends_with(" backward (estimate for an H200)"), "{told}");
        // Native CUDA kernels skip tiles whose queries and keys belong to different documents, so there is nothing to advise.
        assert_eq!(said(&eight, ExecutorName::CUDA), None);
        let told = said(&eight, ExecutorName::CPU).unwrap();
        assert!(told.starts_with("every query-key pair is computed") && told.ends_with("8.0 times fewer query-key pairs"), "{told}");
        for executor in [ExecutorName::CUDNN, ExecutorName::CPU] {
            assert_eq!(said(&Documents::Runs(vec![vec![4096]; 4]), executor), None);
            let apart = said(&Documents::Apart { row: 1, token: 7 }, executor).unwrap();
            assert!(apart.contains("not one contiguous run of tokens") && apart.contains("batch entry 1, token 7"), "{apart}");
        }
        // With sequences shorter than a tile, packing is slower than a document mask over rows with few documents, so it is not advised.
        let short = Shape { batch: 256, seq_q: 256, seq_kv: 256, ..shape };
        let short = AttentionSpec::dense(DType::BF16, short, Layout::Bshd).mask(Mask::document()).validate().unwrap();
        assert_eq!(say(&Documents::Runs(vec![vec![64; 4]; 256]), [("forward", short.into())].iter(), ExecutorName::CUDNN), None);
    }
}
