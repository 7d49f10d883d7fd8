//! When these kernels are asked before cuDNN: where they were faster.

use crate::tile::BackwardTile;
use sdpa_core::expr::{Axes, Axis, Node, ParamKind, Trace, Unary};
use sdpa_core::{BackwardProblem, DType, Problem, Side};
use std::fmt;

/// How these kernels and cuDNN compared over problems of a kind: medians of 643 problems drawn at random, of sines also of 267 others, on an H100 under
/// cuDNN 9.19 (docs/cuda.md, "The choice").
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

/// Returns the speed that was measured for problems like this one. `None` for types and kinds that were not measured, and where an extent is 0.
pub fn measured(problem: &Problem) -> Option<Measured> {
    let rows = if problem.seq_q() <= FEW_QUERIES { FEW } else { FORWARD };
    found(rows, problem)
}

/// What was measured of backward problems like this one; `None` of types and kinds that were not.
pub fn measured_backward(problem: &BackwardProblem) -> Option<Measured> {
    found(BACKWARD, problem.forward())
}

fn found(rows: &[Row], problem: &Problem) -> Option<Measured> {
    if problem.is_empty() || ![DType::F16, DType::BF16].contains(&problem.dtype()) {
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
    row("a score_mod of 16 sines or more", 6.45, |p| sines(p) > 15),
    row("a mask of documents, 1,536 tokens or more", 2.82, |p| reads_documents(p) && shorter(p) >= 1536),
    row("a mask of documents", 0.57, reads_documents),
    unmeasured("a mask that reads other tensors", reads_tensors),
    row("a mask of places that is no band", 2.17, is_rule_of_places),
    row("a prefix", 1.35, has_prefix),
    row("a score_mod of 2 to 15 sines", 0.78, |p| (2..=15).contains(&sines(p))),
    row("f16, a score_mod with tanh", 0.88, |p| p.dtype() == DType::F16 && has_tanh(p)),
    row("packed documents", 1.17, |p| p.packed().is_some()),
    row("keys in pages, heads wider than 192", 0.82, |p| p.paged().is_some() && widest(p) > 192),
    row("keys in pages of 16, 64 tiles of queries or more", 0.81, has_many_small_pieces),
    row("keys in pages", 1.12, |p| p.paged().is_some()),
    row("heads of 64, at most 1,024 tokens, causal", 0.89, |p| widest(p) <= 64 && shorter(p) <= 1024 && is_causal(p)),
    row("a band or no mask", 1.12, |_| true),
];

/// Forward passes of at most [`FEW_QUERIES`] queries.
const FEW: &[Row] = &[
    unmeasured("dropout", |p| p.dropout().is_some()),
    row("a score_mod of 16 sines or more", 8.17, |p| sines(p) > 15),
    row("packed documents", 1.35, |p| p.packed().is_some()),
    unmeasured("few queries, fewer than 512 keys", |p| p.seq_kv() < 512),
    row("one query", 0.87, |p| p.seq_q() == 1),
    row("at most 32 queries, heads that share keys", 2.74, |p| p.seq_q() <= 32 && p.group() > 1),
    row("more than 64 queries of 64 heads or more, keys in pages of 16", 0.84, has_many_small_pieces),
    row("more than 64 queries of 64 heads or more, heads of 64", 0.77, |p| p.seq_q() > 64 && tiles(p) >= HALF && widest(p) <= 64),
    row("few queries of 64 heads or more, of at most 131 where there is no mask, fewer than 2,800 keys", 0.86, |p| {
        p.seq_kv() < 2800 && tiles(p) >= HALF && (tiles(p) < ALL || !has_no_mask(p))
    }),
    row("few queries", 1.48, |_| true),
];

/// Backward passes.
const BACKWARD: &[Row] = &[
    unmeasured("dropout", |p| p.dropout().is_some()),
    row("a bias over queries and keys", 1.87, has_bias),
    row("a mask of places that is no band", 2.63, is_rule_of_places),
    row("a mask of documents, 384 tokens or more", 5.91, |p| reads_documents(p) && shorter(p) >= 384),
    row("a mask of documents", 0.96, reads_documents),
    unmeasured("a mask that reads other tensors", reads_tensors),
    row("a band on both sides, 300 tokens or more", 3.21, |p| looks_ahead(p) && shorter(p) >= 300),
    unmeasured("a band on both sides", looks_ahead),
    row("a prefix", 1.41, has_prefix),
    row("a score_mod of 3 to 30 sines, to 40 with heads of 64", 0.75, |p| {
        (3..=30).contains(&sines(p)) || ((3..=40).contains(&sines(p)) && widest(p) <= 64)
    }),
    row("a score_mod of more sines", 1.73, |p| sines(p) > 30),
    row("heads wider than 128, packed documents or a score_mod with tanh", 1.29, |p| {
        widest(p) > 128 && (p.packed().is_some() || has_tanh(p))
    }),
    row("heads wider than 128, at most 192", 0.95, |p| widest(p) > 128 && widest(p) <= 192),
    row("at most 512 tokens, fewer than 300 blocks of keys", 0.92, |p| p.packed().is_none() && shorter(p) <= 512 && key_blocks(p) < 300),
    row("a band or no mask", 1.21, |_| true),
];

/// Tiles that every multiprocessor has one of, and about half of them: with fewer, cuDNN leaves the others idle, as by its times it splits no keys but
/// those of one query.
const ALL: i64 = 132;
const HALF: i64 = 64;

/// Tiles of queries of all heads.
fn tiles(problem: &Problem) -> i64 {
    problem.batch() * problem.heads_q() * ((problem.seq_q() + 127) / 128)
}

/// Whether a block of keys comes as eight copies or more, for more queries than one group has.
fn has_many_small_pieces(problem: &Problem) -> bool {
    problem.paged().is_some_and(|paged| paged.page_size <= 16) && problem.seq_q() > 64 && tiles(problem) >= HALF
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

/// Sines and cosines that a score_mod computes.
fn sines(problem: &Problem) -> usize {
    let is_sine = |node: &&Node| matches!(node, Node::Unary(Unary::Sin | Unary::Cos, _));
    problem.score_mod().map_or(0, |trace| trace.nodes().iter().filter(is_sine).count())
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
        let of_dim = |dim_qk| backward(spec(Shape { dim_qk, ..SHAPE }, "causal"));
        assert_eq!([192, 193].map(of_dim), ["heads wider than 128, at most 192", "a band or no mask"]);
        let wide = "heads wider than 128, packed documents or a score_mod with tanh";
        assert_eq!(backward(spec(Shape { dim_qk: 192, ..SHAPE }, "causal").score_mod("softcap:30".parse().unwrap())), wide);
        assert_eq!(backward(AttentionSpec::packed(DType::BF16, Shape { dim_v: 256, ..SHAPE }, Packed::default())), wide);
        let short = |heads, seq| backward(spec(Shape { heads_q: heads, heads_kv: heads, seq_q: seq, seq_kv: seq, ..SHAPE }, "causal"));
        assert_eq!([short(2, 512), short(80, 512)], ["at most 512 tokens, fewer than 300 blocks of keys", "a band or no mask"]);
        assert_eq!(short(2, 513), "a band or no mask");
        let bias = |letters: &str| backward(spec(SHAPE, "").score_mod(format!("bias:{letters}").parse().unwrap()));
        assert_eq!([bias("hqk"), bias("h")], ["a bias over queries and keys", "a band or no mask"]);
        assert_eq!(backward(spec(SHAPE, "").score_mod("sandwich:32".parse().unwrap())), "a score_mod of more sines");
        let packed = AttentionSpec::packed(DType::BF16, SHAPE, Packed::default());
        assert_eq!([forward(&packed), backward(packed)], ["packed documents", "a band or no mask"]);
        let capped = |dtype| forward(&AttentionSpec { dtype, ..spec(SHAPE, "causal").score_mod("softcap:30".parse().unwrap()) });
        assert_eq!([capped(DType::F16), capped(DType::BF16)], ["f16, a score_mod with tanh", "a band or no mask"]);
        let narrow = |seq_kv, mask| forward(&spec(Shape { seq_q: seq_kv - 100, seq_kv, dim_qk: 64, dim_v: 64, ..SHAPE }, mask));
        assert_eq!(["causal", "causal-bottom-right"].map(|mask| narrow(1124, mask)), ["heads of 64, at most 1,024 tokens, causal"; 2]);
        assert_eq!([narrow(1125, "causal"), narrow(400, "window:20,0"), narrow(400, "padding"), narrow(400, "")], ["a band or no mask"; 4]);
    }

    #[test]
    fn pages_are_of_a_kind_by_their_size() {
        let paged = |heads_q, seq_q, dim_qk, page_size| {
            let shape = Shape { heads_q, seq_q, dim_qk, ..SHAPE };
            forward(&AttentionSpec::paged(DType::BF16, shape, Paged { page_size, pages: 2048 / page_size }))
        };
        let small = "keys in pages of 16, 64 tiles of queries or more";
        assert_eq!([paged(4, 2048, 128, 16), paged(4, 1921, 192, 8)], [small; 2]);
        assert_eq!([paged(4, 1920, 128, 16), paged(4, 2048, 128, 32)], ["keys in pages"; 2]);
        assert_eq!([16, 64].map(|page_size| paged(4, 2048, 256, page_size)), ["keys in pages, heads wider than 192"; 2]);
        let [small, usual] = ["more than 64 queries of 64 heads or more, keys in pages of 16", "few queries"];
        assert_eq!([paged(64, 65, 128, 16), paged(64, 65, 256, 16)], [small; 2]);
        // Without a mask fewer than 2,800 keys are as many, but where there are heads enough.
        assert_eq!([paged(132, 64, 128, 16), paged(62, 65, 128, 16), paged(132, 65, 128, 64)], [usual; 3]);
    }

    #[test]
    fn few_queries_are_of_a_kind_by_heads_and_keys() {
        let few = |heads_q, seq_q, seq_kv, mask| forward(&spec(Shape { heads_q, heads_kv: heads_q, seq_q, seq_kv, ..SHAPE }, mask));
        assert_eq!(few(2, 1, 9000, ""), "one query");
        let shared = |seq_q| forward(&spec(Shape { heads_q: 64, seq_q, seq_kv: 900, ..SHAPE }, ""));
        let short = "few queries of 64 heads or more, of at most 131 where there is no mask, fewer than 2,800 keys";
        assert_eq!([shared(32), shared(33)], ["at most 32 queries, heads that share keys", short]);
        assert_eq!([few(64, 30, 2799, ""), few(131, 30, 900, ""), few(64, 30, 900, "padding"), few(132, 128, 900, "causal")], [short; 4]);
        assert_eq!([few(63, 30, 900, "causal"), few(64, 30, 2800, "causal"), few(132, 30, 900, "")], ["few queries"; 3]);
        let narrow = |heads, seq_q| forward(&spec(Shape { heads_q: heads, seq_q, seq_kv: 9000, dim_qk: 64, dim_v: 64, ..SHAPE }, ""));
        assert_eq!([narrow(64, 65), narrow(64, 128)], ["more than 64 queries of 64 heads or more, heads of 64"; 2]);
        assert_eq!([narrow(62, 65), narrow(64, 64)], ["few queries"; 2]);
    }

    #[test]
    fn other_types_and_kinds_were_not_measured() {
        let dropped = |seq_q| spec(Shape { seq_q, ..SHAPE }, "causal").with_dropout(0.1);
        for spec in [spec(SHAPE, "array:qk"), spec(Shape { seq_q: 200, ..SHAPE }, "array:qk"), dropped(2048), dropped(1)] {
            assert_eq!((measured(&spec.validate().unwrap()), measured_backward(&spec.backward().validate().unwrap())), (None, None));
        }
        let ahead = spec(Shape { seq_q: 200, ..SHAPE }, "window:30,20").backward().validate().unwrap();
        assert_eq!(measured_backward(&ahead), None);
        let few = |seq_kv| measured(&spec(Shape { seq_q: 72, seq_kv, ..SHAPE }, "causal").validate().unwrap());
        assert_eq!((few(511), few(512).map(|few| few.what)), (None, Some("few queries")));
        let f32 = AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd).validate().unwrap();
        assert_eq!(measured(&f32), None);
        let prefix = measured(&spec(SHAPE, "prefix-lm:9").validate().unwrap()).unwrap();
        assert_eq!(prefix.to_string(), "asked before cuDNN: a prefix, 1.35 times as fast as cuDNN in the median of those measured");
        assert!(!Measured { what: "", speed: 1.02 }.is_faster() && Measured { what: "", speed: 1.03 }.is_faster());
    }
}
