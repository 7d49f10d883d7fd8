//! Notes on the cost of masks. Engines skip tiles outside a diagonal band and compute every tile of any other mask.

mod documents;

use crate::lower::{self, Job};
use crate::pieces::{self, Part};
use crate::plan::Pieces;
use sdpa_core::DType;
use sdpa_core::Side;
use sdpa_core::expr::{Axes, Axis, ParamKind};
use sdpa_core::problem::Problem;

pub use documents::Documents;

/// With one query or one key there is no tile to skip.
const ONE: i64 = 1;

/// The note for masks whose documents are contiguous runs of tokens.
const PACKED: &str = "packed documents (cu_seqlens) compute only the pairs within each document: how many fewer depends on the document lengths, \
                      which are known only at each call; n documents of one length have about n times fewer pairs, unless a window keeps fewer \
                      anyway";

/// Returns sentences about the cost of the masks of a pass. `wanted` says when masks are decomposed into bands. There are none for a mask
/// that consists of a band and lengths, because engines compute only the tiles within these.
pub fn notes(job: &Job, wanted: Pieces) -> Vec<String> {
    let problem = job.problem();
    let whole = problem.kept().rest.is_some() || problem.region().prefix.is_some();
    if !whole || problem.is_empty() || Side::ALL.into_iter().any(|side| problem.seq(side) == ONE) {
        return Vec::new();
    }
    if let Some(parts) = wanted.of(job) {
        return vec![in_pieces(job, &parts)];
    }
    let mut notes = vec![format!("every tile is computed: {}", why(problem))];
    notes.extend(in_one(job, wanted));
    if documents::may_be_packed(problem) {
        notes.push(PACKED.to_owned());
    }
    notes
}

/// The data that a mask reads besides bands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Integers per query or key: a document number, or the bounds of a document.
    Documents,
    /// Other tensors over queries or keys.
    Data,
    /// Positions only.
    Places,
}

fn rule(problem: &Problem) -> Rule {
    let along = |axes: Axes| axes.iter().any(|axis| matches!(axis, Axis::Q | Axis::K));
    let params = problem.kept().rest.iter().flat_map(|rest| rest.params());
    let rules = params.filter_map(|p| match p.kind {
        ParamKind::Tensor { axes, dtype } if along(axes) => Some(if dtype == DType::I32 { Rule::Documents } else { Rule::Data }),
        ParamKind::Tensor { .. } | ParamKind::Scalar => None,
    });
    rules.fold(Rule::Places, |all, one| match (all, one) {
        (Rule::Documents, _) | (_, Rule::Documents) => Rule::Documents,
        (Rule::Data, _) | (_, Rule::Data) => Rule::Data,
        (Rule::Places, Rule::Places) => Rule::Places,
    })
}

fn why(problem: &Problem) -> &'static str {
    match rule(problem) {
        Rule::Documents => "which document a query or key belongs to is known only at each call",
        Rule::Data => "what the mask keeps is known only at each call",
        Rule::Places => "the mask is not a band",
    }
}

fn in_pieces(job: &Job, parts: &[Part]) -> String {
    let problem = job.problem();
    let kept: f64 = parts.iter().map(|part| part.piece.pairs() as f64).sum();
    let share = 100.0 * kept / (problem.seq_q() as f64 * problem.seq_kv() as f64);
    let gain = pieces::gain(job, parts);
    format!(
        "in {} pieces, each a band: {share:.0} % of the pairs are kept, and one masked pass computes every tile; {gain:.1} times as fast, by a model of an H200's times",
        parts.len()
    )
}

/// Returns why a mask that has pieces is computed in one pass.
fn in_one(job: &Job, wanted: Pieces) -> Option<String> {
    let problem = job.problem();
    let bands = problem.kept().pieces(problem.extents()).filter(|bands| bands.len() > 1)?.len();
    let why = match (wanted, pieces::parts(job)) {
        (Pieces::Never, _) => "the options say so".to_owned(),
        (Pieces::Auto | Pieces::Always, Some(parts)) => {
            format!("pieces are {:.1} times as fast by a model of an H200's times, and 1.1 is wanted", pieces::gain(job, &parts))
        }
        (Pieces::Auto | Pieces::Always, None) => match beyond(job) {
            Some(what) => format!("{what} needs all keys of a row"),
            None if !lower::densify(job).1.is_empty() => "operands are copied".to_owned(),
            None => "its pieces would be too many, or leave results unwritten".to_owned(),
        },
    };
    Some(format!("it is {bands} bands over blocks, and computed in one pass: {why}"))
}

/// Returns a feature of the pass that rules pieces out.
fn beyond(job: &Job) -> Option<&'static str> {
    let problem = job.problem();
    let parameters = match job {
        Job::Forward(_) => false,
        Job::Backward(backward) => !backward.wrt().is_empty(),
    };
    let along = |axes: Axes| axes.iter().any(|axis| matches!(axis, Axis::Q | Axis::K));
    let reads = problem.score_mod().is_some_and(|trace| {
        trace.params().iter().any(|p| match p.kind {
            ParamKind::Scalar => false,
            ParamKind::Tensor { axes, dtype: _ } => along(axes),
        })
    });
    let all = [
        (problem.packed().is_some(), "packing"),
        (problem.paged().is_some(), "a page table"),
        (problem.sink(), "a sink"),
        (problem.dropout().is_some(), "dropout"),
        (problem.dtype().is_fp8(), "a scale of 8-bit floats"),
        (problem.row_max() || problem.sum_exp(), "a row maximum or sum"),
        (problem.stats_base() != sdpa_core::StatsBase::Natural, "stats in base two"),
        (parameters, "the gradient of a parameter"),
        (reads, "a tensor over queries or keys in a score_mod"),
    ];
    all.into_iter().find(|(there, _)| *there).map(|(_, what)| what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, Layout, Packed, Shape};

    fn spec(seq: [i64; 2], masks: &[&str]) -> AttentionSpec {
        let shape = Shape { batch: 4, heads_q: 32, heads_kv: 8, seq_q: seq[0], seq_kv: seq[1], dim_qk: 128, dim_v: 128 };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
        spec.masks = masks.iter().map(|mask| mask.parse().unwrap()).collect();
        spec
    }

    fn told(spec: &AttentionSpec, wanted: Pieces) -> String {
        notes(&spec.validate().unwrap().into(), wanted).join("; ")
    }

    #[test]
    fn bands_and_lengths_cost_what_they_keep_and_nothing_is_said_of_them() {
        for masks in [&[][..], &["causal"], &["window:9,3:bottom-right", "padding"], &["causal-ends", "padding"]] {
            assert_eq!(told(&spec([512, 600], masks), Pieces::Auto), "", "{masks:?}");
        }
        // With a single query there is no tile to skip, so there is no note.
        assert_eq!(told(&spec([1, 600], &["document"]), Pieces::Auto), "");
    }

    #[test]
    fn documents_of_a_mask_lead_to_packed_ones_where_those_are_the_same() {
        for mask in ["document", "document-runs"] {
            let said = told(&spec([512, 512], &["causal", mask]), Pieces::Auto);
            assert!(said.starts_with("every tile is computed: which document") && said.contains("packed documents (cu_seqlens)"), "{said}");
        }
        for (seq, masks) in
            [([512, 600], &["document"][..]), ([512, 512], &["causal", "shared-prefix:4"]), ([512, 512], &["document", "prefix-lm:9"])]
        {
            let said = told(&spec(seq, masks), Pieces::Auto);
            assert!(said.contains("which document") && !said.contains("packed"), "{said}");
        }
        let mut packed = spec([512, 512], &["document"]);
        packed.packed = Some(Packed::of(900));
        assert!(!told(&packed, Pieces::Auto).contains("cu_seqlens"));
        assert!(told(&spec([512, 512], &["array:qk"]), Pieces::Auto).contains("what the mask keeps is known"));
        let said = told(&spec([512, 512], &["dilated:2"]), Pieces::Auto);
        assert_eq!(said, "every tile is computed: the mask is not a band");
    }

    #[test]
    fn pieces_are_told_and_why_there_are_none() {
        let prefix = spec([4096, 4096], &["prefix-lm:512"]);
        let said = told(&prefix, Pieces::Auto);
        assert!(said.starts_with("in 2 pieces, each a band: 51 % of the pairs"), "{said}");
        assert!(told(&prefix, Pieces::Never).contains("it is 2 bands over blocks, and computed in one pass: the options say so"));
        let short = spec([256, 256], &["prefix-lm:64"]);
        let said = told(&short, Pieces::Auto);
        assert!(
            said.contains("every tile is computed: the mask is not a band; it is 2 bands") && said.contains("and 1.1 is wanted"),
            "{said}"
        );
        assert!(told(&short, Pieces::Always).starts_with("in 2 pieces"));
        let mut copied = prefix.clone();
        copied.k.strides = Layout::Bshd.strides([4, 8, 4096, 128 + 3]);
        assert!(told(&copied, Pieces::Auto).contains("computed in one pass: operands are copied"));
        assert!(told(&prefix.clone().with_sink(), Pieces::Auto).contains("a sink needs all keys of a row"));
        assert!(told(&prefix.clone().with_row_max(), Pieces::Auto).contains("a row maximum or sum needs all keys of a row"));
        let biased = prefix.clone().score_mod("bias:hqk".parse().unwrap());
        assert!(told(&biased, Pieces::Auto).contains("a tensor over queries or keys in a score_mod needs all keys of a row"));
        let gradient = prefix.score_mod("bias:h".parse().unwrap()).backward().wrt("bias", DType::F32).validate().unwrap();
        assert!(notes(&gradient.into(), Pieces::Auto).join("; ").contains("the gradient of a parameter needs all keys of a row"));
    }
}
