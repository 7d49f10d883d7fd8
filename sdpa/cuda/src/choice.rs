//! Problems for which cuDNN is tried before these kernels: exceptions to a rule, each with its cause and its measurement.
//!
//! If both executors support a problem on Hopper, the dispatcher tries these kernels first. `benches/results/2026-11-26-choice*.jsonl` holds the
//! times of 1,201 problems on an H100. docs/cuda.md, "Executor selection", says for how many of them this order selects the faster executor.

use crate::family::Family;
use sdpa_core::expr::{Node, ParamKind, Trace, Unary};
use sdpa_core::{BackwardProblem, DType, Problem, Side};
use std::fmt;

/// A class of problems for which cuDNN's kernels were faster than the native CUDA kernels, so that cuDNN is tried first.
#[derive(Clone, Copy, Debug)]
pub struct Exception {
    /// A description of the problems, in a phrase.
    pub what: &'static str,
    /// The cause, as far as it is known.
    pub cause: &'static str,
    /// cuDNN's time divided by the time of the native CUDA kernels: the median over the measured problems of this class. Below 1, cuDNN
    /// is faster.
    pub speed: f64,
    passes: Passes,
    holds: fn(&Problem) -> bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passes {
    Forward,
    Backward,
}

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Exception { what, cause, speed, .. } = self;
        write!(f, "cuDNN first: {what}; native kernels are {speed:.2} times as fast as cuDNN in the median ({cause})")
    }
}

/// Returns the exception because of which cuDNN is tried before the kernels of `family` for a forward problem. Returns `None` if no
/// exception covers the problem, or if its element type is neither f16 nor bf16.
pub fn cudnn_first(family: Family, problem: &Problem) -> Option<&'static Exception> {
    found(exceptions(family), Passes::Forward, problem)
}

/// Returns the exception because of which cuDNN is tried before the kernels of `family` for a backward problem; see [`cudnn_first`].
pub fn cudnn_first_backward(family: Family, problem: &BackwardProblem) -> Option<&'static Exception> {
    let ordered = if problem.deterministic() { deterministic_exceptions(family) } else { &[] };
    found(exceptions(family), Passes::Backward, problem.forward()).or_else(|| found(ordered, Passes::Backward, problem.forward()))
}

fn found(exceptions: &'static [Exception], passes: Passes, problem: &Problem) -> Option<&'static Exception> {
    let both = [DType::F16, DType::BF16].contains(&problem.dtype());
    exceptions.iter().find(|row| both && row.passes == passes && (row.holds)(problem))
}

/// Returns the exceptions of a family for deterministic passes, beside those of any backward pass.
fn deterministic_exceptions(family: Family) -> &'static [Exception] {
    match family {
        Family::Wgmma => &DETERMINISTIC_EXCEPTIONS,
        Family::Mma => &[],
    }
}

/// Returns the exceptions of a family. There is deliberately no wildcard arm: the exceptions of one family say nothing about another's kernels.
fn exceptions(family: Family) -> &'static [Exception] {
    match family {
        Family::Wgmma => &EXCEPTIONS,
        // This family is not tuned: cuDNN comes first without exceptions.
        Family::Mma => &[],
    }
}

/// The classes of problems for which cuDNN is tried before the WGMMA kernels, with the speeds measured on an H100.
pub const EXCEPTIONS: [Exception; 8] = [
    Exception {
        what: "more than 128 queries, a score_mod with 2 to 15 calls of sin or cos, no element-wise mask",
        cause: "unknown; with 16 calls or more, cuDNN takes 6 times as long as the native kernels in the median",
        speed: 0.78,
        passes: Passes::Forward,
        holds: |p| p.seq_q() > FEW_QUERIES && (2..=MOST_SINES).contains(&sines(p)) && p.kept().rest.is_none(),
    },
    Exception {
        what: "a score_mod with 3 to 30 calls of sin or cos (to 40 for head dims up to 64), no element-wise mask, no right bound above 0",
        cause: "unknown; with more calls cuDNN is slower",
        speed: 0.75,
        passes: Passes::Backward,
        holds: |p| {
            let most = if widest(p) <= 64 { 40 } else { 30 };
            (3..=most).contains(&sines(p)) && p.kept().rest.is_none() && p.region().upper.is_none_or(|upper| upper <= 0)
        },
    },
    Exception {
        what: "more than 128 queries, a mask that reads document numbers, sequences with fewer than 1,536 queries or keys",
        cause: "unknown; only two problems were timed",
        speed: 0.57,
        passes: Passes::Forward,
        holds: |p| p.seq_q() > FEW_QUERIES && sines(p) <= MOST_SINES && reads_documents(p) && shorter(p) < 1536,
    },
    Exception {
        what: "more than 128 queries, f16, a score_mod with tanh",
        cause: "tanh takes several instructions in f16, because tanh.approx has an error as large as the rounding error of f16",
        speed: 0.83,
        passes: Passes::Forward,
        holds: |p| p.seq_q() > FEW_QUERIES && p.dtype() == DType::F16 && has_tanh(p),
    },
    Exception {
        what: "more than 128 queries, paged KV cache, a head dim above 192",
        cause: "unknown",
        speed: 0.82,
        passes: Passes::Forward,
        holds: |p| p.seq_q() > FEW_QUERIES && sines(p) <= MOST_SINES && p.paged().is_some() && widest(p) > 192,
    },
    Exception {
        what: "more than 64 queries, pages of at most 16 tokens, 64 query tiles or more over batch and heads",
        cause: "a KV block of 128 keys takes eight TMA loads or more",
        speed: 0.86,
        passes: Passes::Forward,
        holds: |p| sines(p) <= MOST_SINES && has_many_small_pieces(p),
    },
    Exception {
        what: "one query, 512 keys or more, not packed",
        cause: "on an H200, cuDNN's kernel reads K and V at 4.0 TB/s, the native kernel at 3.5 TB/s",
        speed: 0.88,
        passes: Passes::Forward,
        holds: |p| p.seq_q() == 1 && p.seq_kv() >= 512 && sines(p) <= MOST_SINES && p.packed().is_none(),
    },
    Exception {
        what: "2 to 128 queries, 512 to 2,799 keys, not packed, 64 heads or more over the batch (64 to 131 without a mask), \
               no GQA with 32 queries or fewer",
        cause: "the heads occupy at least half of the SMs, so split-KV costs more than it gains",
        speed: 0.89,
        passes: Passes::Forward,
        holds: |p| {
            let few = (2..=FEW_QUERIES).contains(&p.seq_q()) && (512..2800).contains(&p.seq_kv()) && p.packed().is_none();
            let share_keys = p.seq_q() <= 32 && p.group() > 1;
            few && !share_keys && sines(p) <= MOST_SINES && tiles(p) >= HALF && (tiles(p) < ALL || !has_no_mask(p))
        },
    },
];

/// The classes of deterministic backward passes for which cuDNN is tried before the WGMMA kernels, with the speeds measured on an H200.
const DETERMINISTIC_EXCEPTIONS: [Exception; 1] = [Exception {
    what: "a deterministic pass over packed sequences of at most 512 tokens",
    cause: "a KV block has few queries, and the bounds of fixed-point sums need another kernel",
    speed: 0.89,
    passes: Passes::Backward,
    holds: |p| p.packed().is_some() && p.seq_q() <= 512 && p.seq_kv() <= 512,
}];

const FEW_QUERIES: i64 = 128;

/// With more sines than this, cuDNN's forward kernels run out of registers.
const MOST_SINES: usize = 15;

/// Tiles for all SMs, and for about half of them. With fewer tiles cuDNN leaves the other SMs idle; its times indicate that it splits keys only for a
/// single query.
const ALL: i64 = 132;
const HALF: i64 = 64;

/// Returns the number of query tiles over all heads.
fn tiles(problem: &Problem) -> i64 {
    problem.batch() * problem.heads_q() * ((problem.seq_q() + 127) / 128)
}

/// Returns whether a KV block needs eight or more copies, for more queries than one warpgroup has.
fn has_many_small_pieces(problem: &Problem) -> bool {
    problem.paged().is_some_and(|paged| paged.page_size <= 16) && problem.seq_q() > 64 && tiles(problem) >= HALF
}

/// Returns the tokens of the shorter side; for packed sequences the average.
fn shorter(problem: &Problem) -> i64 {
    let seq = |side| if problem.packs(side) { problem.total(side) / problem.batch().max(1) } else { problem.seq(side) };
    Side::ALL.map(seq).into_iter().min().unwrap_or(0)
}

fn widest(problem: &Problem) -> i64 {
    problem.dim_qk().max(problem.dim_v())
}

/// Returns the number of sines and cosines in a score_mod.
fn sines(problem: &Problem) -> usize {
    let is_sine = |node: &&Node| matches!(node, Node::Unary(Unary::Sin | Unary::Cos, _));
    problem.score_mod().map_or(0, |trace| trace.nodes().iter().filter(is_sine).count())
}

fn has_tanh(problem: &Problem) -> bool {
    let is_tanh = |id| matches!(id, Node::Unary(Unary::Tanh, _));
    problem.score_mod().is_some_and(|trace| trace.nodes().iter().copied().any(is_tanh))
}

/// Returns whether a mask reads integers, such as document numbers or bounds.
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

fn has_no_mask(problem: &Problem) -> bool {
    let (region, kept) = (problem.region(), problem.kept());
    region.lower.is_none() && region.upper.is_none() && kept.rest.is_none() && !kept.seq_len_q && !kept.seq_len_kv
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

    fn forward(spec: &AttentionSpec) -> Option<&'static str> {
        cudnn_first(Family::Wgmma, &spec.validate().unwrap()).map(|exception| exception.what)
    }

    fn backward(spec: AttentionSpec) -> Option<&'static str> {
        cudnn_first_backward(Family::Wgmma, &spec.backward().validate().unwrap()).map(|exception| exception.what)
    }

    fn what(exception: usize) -> Option<&'static str> {
        Some(EXCEPTIONS[exception].what)
    }

    #[test]
    fn these_kernels_are_the_rule() {
        for mask in ["", "causal", "window:300,20", "prefix-lm:100", "natten:65", "document", "padding", "array:qk"] {
            assert_eq!([forward(&spec(SHAPE, mask)), backward(spec(SHAPE, mask))], [None, None], "{mask}");
        }
        let packed = AttentionSpec::packed(DType::BF16, SHAPE, Packed::new());
        assert_eq!([forward(&packed), backward(packed)], [None, None]);
        let dropped = |seq_q| spec(Shape { seq_q, ..SHAPE }, "causal").with_dropout(0.1);
        assert_eq!([forward(&dropped(2048)), backward(dropped(2048)), forward(&dropped(40))], [None; 3]);
    }

    #[test]
    fn exceptions_begin_and_end_where_they_are_written_to() {
        let sines = what(0);
        let sines_back = what(1);
        let of_sines = |n: usize| {
            let text = (0..n).map(|n| format!(" + sin(f32(k - q) * {n}.5)")).collect::<String>();
            spec(SHAPE, "").score_mod(format!("score{text}").parse().unwrap())
        };
        assert_eq!([1, 2, 15, 16].map(|n| forward(&of_sines(n))), [None, sines, sines, None]);
        assert_eq!([2, 3, 30, 31].map(|n| backward(of_sines(n))), [None, sines_back, sines_back, None]);
        let documents = |seq| forward(&spec(Shape { seq_q: seq, seq_kv: seq, ..SHAPE }, "document"));
        assert_eq!([1535, 1536].map(documents), [what(2), None]);
        let capped = |dtype| spec(SHAPE, "causal").score_mod("softcap:30".parse().unwrap()).with_dtype(dtype);
        assert_eq!([DType::F16, DType::BF16].map(|dtype| forward(&capped(dtype))), [what(3), None]);
        assert_eq!(backward(capped(DType::F16)), None);
        let paged = |heads_q, seq_q, dim_qk, page_size| {
            let shape = Shape { heads_q, seq_q, dim_qk, ..SHAPE };
            forward(&AttentionSpec::paged(DType::BF16, shape, Paged::new(page_size, 2048 / page_size)))
        };
        let small = what(5);
        assert_eq!([paged(4, 2048, 128, 16), paged(4, 1921, 192, 8), paged(64, 65, 128, 16)], [small; 3]);
        assert_eq!([paged(4, 1920, 128, 16), paged(4, 2048, 128, 32), paged(62, 65, 128, 16), paged(132, 65, 128, 64)], [None; 4]);
        assert_eq!([16, 64].map(|page_size| paged(4, 2048, 256, page_size)), [what(4); 2]);
    }

    #[test]
    fn few_queries_are_exceptions_by_heads_and_keys() {
        let few = |heads_q, seq_q, seq_kv, mask| forward(&spec(Shape { heads_q, heads_kv: heads_q, seq_q, seq_kv, ..SHAPE }, mask));
        assert_eq!([few(2, 1, 9000, ""), few(2, 1, 511, ""), few(2, 2, 9000, "")], [what(6), None, None]);
        let shared = |seq_q| forward(&spec(Shape { heads_q: 64, seq_q, seq_kv: 900, ..SHAPE }, ""));
        let short = what(7);
        assert_eq!([shared(32), shared(33)], [None, short]);
        assert_eq!([few(64, 30, 2799, ""), few(131, 30, 900, ""), few(64, 30, 900, "padding"), few(132, 128, 900, "causal")], [short; 4]);
        assert_eq!([few(63, 30, 900, "causal"), few(64, 30, 2800, "causal"), few(132, 30, 900, ""), few(64, 30, 511, "")], [None; 4]);
    }

    #[test]
    fn other_types_have_no_exceptions_and_an_exception_says_why() {
        assert_eq!(forward(&spec(Shape { seq_q: 1, ..SHAPE }, "").with_dtype(DType::F32)), None);
        let one = cudnn_first(Family::Wgmma, &spec(Shape { seq_q: 1, ..SHAPE }, "").validate().unwrap()).unwrap();
        let told = "cuDNN first: one query, 512 keys or more, not packed; native kernels are 0.88 times as fast as cuDNN in the median \
                    (on an H200, cuDNN's kernel reads K and V at 4.0 TB/s, the native kernel at 3.5 TB/s)";
        assert_eq!(one.to_string(), told);
    }
}
