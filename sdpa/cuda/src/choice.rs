//! When these kernels are asked before cuDNN: where they were faster.

use crate::problem::trace_weight;
use crate::tile::BackwardTile;
use sdpa_core::expr::{Axes, Axis, Node, ParamKind, Trace, Unary};
use sdpa_core::{BackwardProblem, DType, Problem, Side};
use std::fmt;

/// How these kernels and cuDNN compared over problems of a kind: medians of 655 problems drawn at random, forward on an H200, backward on an
/// H100, under cuDNN 9.19 (docs/cuda.md, "The choice").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// The kind, as a phrase.
    pub what: &'static str,
    /// How many times as fast as cuDNN these kernels are.
    pub speed: f64,
}

impl Measured {
    /// Whether these kernels are to be asked first: a gain of less than three hundredths is none, as a kernel of a text that is new takes longer to compile
    /// than a plan of cuDNN's.
    pub fn is_faster(&self) -> bool {
        self.speed >= 1.03
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = if self.is_faster() { "asked before cuDNN" } else { "asked after cuDNN" };
        write!(f, "{first}: {}, {:.2} times as fast as cuDNN in the median of those measured", self.what, self.speed)
    }
}

/// What was measured of problems like this one; `None` of types and kinds that were not.
pub fn measured(problem: &Problem) -> Option<Measured> {
    let rows = if problem.seq_q() <= FEW_QUERIES { FEW } else { FORWARD };
    found(rows, problem)
}

/// What was measured of backward problems like this one; `None` of types and kinds that were not.
pub fn measured_backward(problem: &BackwardProblem) -> Option<Measured> {
    found(BACKWARD, problem.forward())
}

fn found(rows: &[Row], problem: &Problem) -> Option<Measured> {
    if ![DType::F16, DType::BF16].contains(&problem.dtype()) {
        return None;
    }
    let row = rows.iter().find(|row| (row.holds)(problem))?;
    row.speed.map(|speed| Measured { what: row.what, speed })
}

/// A kind of problem, by its first row that holds.
struct Row {
    what: &'static str,
    /// `None` where no problem of the kind was measured.
    speed: Option<f64>,
    holds: fn(&Problem) -> bool,
}

const fn row(what: &'static str, speed: f64, holds: fn(&Problem) -> bool) -> Row {
    Row { what, speed: Some(speed), holds }
}

const fn unmeasured(what: &'static str, holds: fn(&Problem) -> bool) -> Row {
    Row { what, speed: None, holds }
}

const FEW_QUERIES: i64 = 128;

/// Forward passes of more than [`FEW_QUERIES`] queries.
const FORWARD: &[Row] = &[
    unmeasured("dropout", |p| p.dropout().is_some()),
    row("a mask of documents, 1,536 tokens or more", 2.86, |p| reads_documents(p) && shorter(p) >= 1536),
    row("a mask of documents", 0.56, reads_documents),
    unmeasured("a mask that reads other tensors", reads_tensors),
    row("a mask of places that is no band", 2.4, is_rule_of_places),
    row("a prefix", 1.26, has_prefix),
    row("f16, a score_mod with tanh", 0.87, |p| p.dtype() == DType::F16 && has_tanh(p)),
    row("packed documents", 1.17, |p| p.packed().is_some()),
    row("keys in pages, heads wider than 192", 0.78, |p| p.paged().is_some() && widest(p) > 192),
    row("keys in pages, heads wider than 128", 1.10, |p| p.paged().is_some() && widest(p) > 128),
    row("keys in pages, fewer than 6e10 operations", 1.13, |p| p.paged().is_some() && operations(p) < LITTLE),
    row("keys in pages", 0.91, |p| p.paged().is_some()),
    row("heads of 96 or less, a score_mod, no mask", 0.97, |p| widest(p) <= 96 && p.score_mod().is_some() && has_no_mask(p)),
    row("heads of 64, fewer than 1,024 tokens, causal", 0.85, |p| widest(p) <= 64 && shorter(p) < 1024 && is_causal(p)),
    row("heads of 64, fewer than 1,024 tokens", 1.05, |p| widest(p) <= 64 && shorter(p) < 1024),
    row("a band or no mask", 1.07, |_| true),
];

/// Forward passes of at most [`FEW_QUERIES`] queries.
const FEW: &[Row] = &[
    unmeasured("dropout", |p| p.dropout().is_some()),
    row("packed documents", 1.41, |p| p.packed().is_some()),
    row("a score_mod of many sines", 0.83, is_heavy),
    row("one query", 0.88, |p| p.seq_q() == 1),
    row("few queries, 8 heads or more of which share keys", 4.27, |p| p.group() >= 8 && p.group() * p.seq_q() <= 64),
    row("at most 24 queries of 400 heads or more", 1.82, |p| p.batch() * p.heads_q() >= 400 && p.seq_q() <= 24),
    row("few queries, fewer than 2,800 keys, no mask", 1.13, |p| p.seq_kv() < 2800 && has_no_mask(p)),
    row("few queries, fewer than 2,800 keys, heads wider than 192", 1.12, |p| p.seq_kv() < 2800 && widest(p) > 192),
    row("few queries, fewer than 2,800 keys", 0.87, |p| p.seq_kv() < 2800),
    row("48 queries or more of 132 heads or more, of 96 where they are of 64", 1.02, |p| {
        p.seq_q() >= 48 && p.batch() * p.heads_q() >= if widest(p) <= 64 { 96 } else { 132 }
    }),
    row("few queries beside many keys", 2.5, |_| true),
];

/// Backward passes.
const BACKWARD: &[Row] = &[
    unmeasured("dropout", |p| p.dropout().is_some()),
    row("a score_mod of many sines", 0.20, is_heavy),
    row("a bias over queries and keys", 1.53, has_bias),
    row("a mask of places that is no band", 2.53, is_rule_of_places),
    row("a mask of documents, 384 tokens or more", 5.87, |p| reads_documents(p) && shorter(p) >= 384),
    row("a mask of documents", 0.96, reads_documents),
    unmeasured("a mask that reads other tensors", reads_tensors),
    row("a band on both sides, 300 tokens or more", 3.00, |p| looks_ahead(p) && shorter(p) >= 300),
    unmeasured("a band on both sides", looks_ahead),
    row("a prefix", 1.18, has_prefix),
    row("heads wider than 128, a score_mod with tanh", 1.20, |p| widest(p) > 128 && has_tanh(p)),
    row("heads wider than 128, packed documents", 1.12, |p| widest(p) > 128 && p.packed().is_some()),
    row("heads wider than 128", 0.87, |p| widest(p) > 128),
    row("fewer than 700 tokens and 300 blocks of keys", 0.89, |p| p.packed().is_none() && shorter(p) < 700 && key_blocks(p) < 300),
    row("a band or no mask", 1.13, |_| true),
];

/// What a score_mod weighs, in additions, that has 12 sines and more.
const HEAVY: u32 = 500;

/// Operations that few multiprocessors are busy with.
const LITTLE: f64 = 6e10;

/// Those of a pass without a mask.
fn operations(problem: &Problem) -> f64 {
    let of = [problem.batch(), problem.heads_q(), problem.seq_q(), problem.seq_kv(), problem.dim_qk() + problem.dim_v()];
    of.into_iter().map(|n| n as f64).product::<f64>() * 2.0
}

/// Tokens of the shorter side; of packed documents on average.
fn shorter(problem: &Problem) -> i64 {
    let seq = |side| if problem.packs(side) { problem.total(side) / problem.batch().max(1) } else { problem.seq(side) };
    Side::ALL.map(seq).into_iter().min().unwrap_or(0)
}

fn widest(problem: &Problem) -> i64 {
    problem.dim_qk().max(problem.dim_v())
}

/// Blocks of keys of all heads that have keys of their own.
fn key_blocks(problem: &Problem) -> i64 {
    let [heads_kv, tokens] = [problem.heads_q() / problem.group(), problem.seq_kv()];
    let tokens = if problem.packs(Side::Keys) { problem.total(Side::Keys) } else { problem.batch() * tokens };
    heads_kv * tokens / i64::from(BackwardTile::KEYS)
}

fn is_heavy(problem: &Problem) -> bool {
    problem.score_mod().is_some_and(|trace| trace_weight(trace) >= HEAVY)
}

fn has_tanh(problem: &Problem) -> bool {
    let is_tanh = |id| matches!(id, Node::Unary(Unary::Tanh, _));
    problem.score_mod().is_some_and(|trace| trace.nodes().iter().copied().any(is_tanh))
}

fn is_rule_of_places(problem: &Problem) -> bool {
    problem.kept().rest.as_ref().is_some_and(|rest| rest.params().is_empty())
}

/// Whether a mask reads whole numbers: which document a token is of, or where it begins or ends.
fn reads_documents(problem: &Problem) -> bool {
    let documents = |rest: &Trace| {
        rest.params().iter().all(|p| match p.kind {
            ParamKind::Tensor { dtype, .. } => dtype == DType::I32,
            ParamKind::Scalar => true,
        })
    };
    reads_tensors(problem) && problem.kept().rest.as_deref().is_some_and(documents)
}

fn reads_tensors(problem: &Problem) -> bool {
    problem.kept().rest.as_ref().is_some_and(|rest| !rest.params().is_empty())
}

fn has_prefix(problem: &Problem) -> bool {
    problem.region().prefix.is_some()
}

/// Whether each query keeps the keys up to its own place, or up to as many before the last key.
fn is_causal(problem: &Problem) -> bool {
    let region = problem.region();
    region.lower.is_none() && region.upper.is_some_and(|upper| upper == 0 || upper == problem.seq_kv() - problem.seq_q())
}

fn has_no_mask(problem: &Problem) -> bool {
    let (region, kept) = (problem.region(), problem.kept());
    region.lower.is_none() && region.upper.is_none() && kept.rest.is_none() && !kept.seq_len_q && !kept.seq_len_kv
}

/// Whether keys behind a query are kept, and not all of them.
fn looks_ahead(problem: &Problem) -> bool {
    problem.region().upper.is_some_and(|upper| upper > 0)
}

fn has_bias(problem: &Problem) -> bool {
    let along = |axes: Axes| axes.has(Axis::Q) && axes.has(Axis::K);
    problem.score_mod().is_some_and(|trace| trace.params().iter().any(|p| matches!(p.kind, ParamKind::Tensor { axes, .. } if along(axes))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, Layout, Mask, Packed, Paged, Shape};

    const SHAPE: Shape = Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 2048, seq_kv: 2048, dim_qk: 128, dim_v: 128 };

    fn spec(shape: Shape, mask: &str) -> AttentionSpec {
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).with_stats();
        if mask.is_empty() { spec } else { spec.mask(mask.parse::<Mask>().unwrap()) }
    }

    fn forward(spec: &AttentionSpec) -> &'static str {
        measured(&spec.validate().unwrap()).unwrap().what
    }

    fn backward(spec: AttentionSpec) -> &'static str {
        measured_backward(&spec.backward().validate().unwrap()).unwrap().what
    }

    #[test]
    fn every_problem_is_of_a_kind() {
        for (mask, what, gradient) in [
            ("", "a band or no mask", "a band or no mask"),
            ("causal", "a band or no mask", "a band or no mask"),
            ("window:300,20", "a band or no mask", "a band on both sides, 300 tokens or more"),
            ("prefix-lm:100", "a prefix", "a prefix"),
            ("natten:65", "a mask of places that is no band", "a mask of places that is no band"),
            ("document", "a mask of documents, 1,536 tokens or more", "a mask of documents, 384 tokens or more"),
            ("padding", "a band or no mask", "a band or no mask"),
        ] {
            assert_eq!([forward(&spec(SHAPE, mask)), backward(spec(SHAPE, mask))], [what, gradient], "{mask}");
        }
        assert_eq!(forward(&spec(Shape { seq_q: 300, ..SHAPE }, "document")), "a mask of documents");
        assert_eq!(forward(&spec(Shape { seq_q: 300, dim_qk: 64, dim_v: 64, ..SHAPE }, "")), "heads of 64, fewer than 1,024 tokens");
        assert_eq!(backward(spec(Shape { dim_qk: 192, ..SHAPE }, "causal")), "heads wider than 128");
        let softcap = spec(Shape { dim_qk: 192, ..SHAPE }, "causal").score_mod("softcap:30".parse().unwrap());
        assert_eq!(backward(softcap), "heads wider than 128, a score_mod with tanh");
        let short = |heads| backward(spec(Shape { heads_q: heads, heads_kv: heads, seq_q: 600, seq_kv: 600, ..SHAPE }, "causal"));
        assert_eq!([short(2), short(70)], ["fewer than 700 tokens and 300 blocks of keys", "a band or no mask"]);
        let bias = |letters: &str| backward(spec(SHAPE, "").score_mod(format!("bias:{letters}").parse().unwrap()));
        assert_eq!([bias("hqk"), bias("h")], ["a bias over queries and keys", "a band or no mask"]);
        assert_eq!(backward(spec(SHAPE, "").score_mod("sandwich:32".parse().unwrap())), "a score_mod of many sines");
        let packed = AttentionSpec::packed(DType::BF16, SHAPE, Packed::default());
        assert_eq!([forward(&packed), backward(packed)], ["packed documents", "a band or no mask"]);
        let wide = AttentionSpec::packed(DType::BF16, Shape { dim_v: 256, ..SHAPE }, Packed::default());
        assert_eq!(backward(wide), "heads wider than 128, packed documents");
        let paged = |heads_q, dim_qk| {
            let shape = Shape { heads_q, dim_qk, ..SHAPE };
            forward(&AttentionSpec::paged(DType::BF16, shape, Paged { page_size: 16, pages: 128 }))
        };
        assert_eq!([paged(2, 128), paged(64, 128)], ["keys in pages, fewer than 6e10 operations", "keys in pages"]);
        assert_eq!([paged(2, 192), paged(2, 256)], ["keys in pages, heads wider than 128", "keys in pages, heads wider than 192"]);
        let capped = |dtype| forward(&AttentionSpec { dtype, ..spec(SHAPE, "causal").score_mod("softcap:30".parse().unwrap()) });
        assert_eq!([capped(DType::F16), capped(DType::BF16)], ["f16, a score_mod with tanh", "a band or no mask"]);
        let alibi = |mask| forward(&spec(Shape { dim_qk: 64, dim_v: 96, ..SHAPE }, mask).score_mod("alibi".parse().unwrap()));
        assert_eq!([alibi(""), alibi("causal")], ["heads of 96 or less, a score_mod, no mask", "a band or no mask"]);
        let narrow = |mask| forward(&spec(Shape { seq_q: 300, seq_kv: 400, dim_qk: 64, dim_v: 64, ..SHAPE }, mask));
        let causal = "heads of 64, fewer than 1,024 tokens, causal";
        assert_eq!(["causal", "causal-bottom-right"].map(narrow), [causal; 2]);
        assert_eq!(["window:20,0", "padding"].map(narrow), ["heads of 64, fewer than 1,024 tokens"; 2]);
        let few = |heads_q, seq_q, seq_kv| forward(&spec(Shape { heads_q, seq_q, seq_kv, ..SHAPE }, ""));
        assert_eq!(few(2, 1, 9000), "one query");
        assert_eq!(few(16, 4, 9000), "few queries, 8 heads or more of which share keys");
        assert_eq!(few(400, 16, 900), "at most 24 queries of 400 heads or more");
        assert_eq!([few(2, 30, 900), few(2, 30, 9000)], ["few queries, fewer than 2,800 keys, no mask", "few queries beside many keys"]);
        let masked = Shape { seq_q: 30, seq_kv: 900, ..SHAPE };
        assert_eq!(["padding", "causal"].map(|mask| forward(&spec(masked, mask))), ["few queries, fewer than 2,800 keys"; 2]);
        let wide = Shape { dim_qk: 256, ..masked };
        assert_eq!(forward(&spec(wide, "causal")), "few queries, fewer than 2,800 keys, heads wider than 192");
        assert_eq!(few(140, 60, 9000), "48 queries or more of 132 heads or more, of 96 where they are of 64");
        let narrow = |heads_q| forward(&spec(Shape { heads_q, seq_q: 60, seq_kv: 9000, dim_qk: 64, dim_v: 64, ..SHAPE }, ""));
        assert_eq!([narrow(90), narrow(100)], ["few queries beside many keys", few(140, 60, 9000)]);
    }

    #[test]
    fn other_types_and_kinds_were_not_measured() {
        let dropped = |seq_q| spec(Shape { seq_q, ..SHAPE }, "causal").with_dropout(0.1);
        for spec in [spec(SHAPE, "array:qk"), spec(Shape { seq_q: 200, ..SHAPE }, "array:qk"), dropped(2048), dropped(1)] {
            assert_eq!((measured(&spec.validate().unwrap()), measured_backward(&spec.backward().validate().unwrap())), (None, None));
        }
        let ahead = spec(Shape { seq_q: 200, ..SHAPE }, "window:30,20").backward().validate().unwrap();
        assert_eq!(measured_backward(&ahead), None);
        let f32 = AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd).validate().unwrap();
        assert_eq!(measured(&f32), None);
        let prefix = measured(&spec(SHAPE, "prefix-lm:9").validate().unwrap()).unwrap();
        assert_eq!(prefix.to_string(), "asked before cuDNN: a prefix, 1.26 times as fast as cuDNN in the median of those measured");
        assert!(!Measured { what: "", speed: 1.02 }.is_faster() && Measured { what: "", speed: 1.03 }.is_faster());
    }
}
