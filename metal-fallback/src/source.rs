//! Assembles kernel sources from a prelude, shared pieces and the kernel.

use crate::captured::declaration;
use crate::forward::Forward;
use crate::packed::boundary;
use sdpa_core::expr::Trace;
use sdpa_core::{DROPOUT_OFFSET, DROPOUT_SEED};
use sdpa_emit::{Captured, EXPRESSION};
use std::fmt::Write;

macro_rules! piece {
    ($name:literal) => {
        Piece { name: $name, text: include_str!(concat!("../kernels/", $name, ".metal")) }
    };
}

/// A file of `kernels/`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    name: &'static str,
    text: &'static str,
}

/// A kernel: its name, the pieces of its source, and whether it computes scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    pub(crate) entry: &'static str,
    pieces: &'static [Piece],
    scores: bool,
}

const SOFTMAX: Piece = piece!("softmax");
const SPAN: Piece = piece!("span");
const PAGES: Piece = piece!("pages");
const KEYS: Piece = piece!("keys");
const SCORES: Piece = piece!("scores");
const DROPOUT: Piece = piece!("dropout");
const EXACT: Piece = piece!("exact");
const WEIGHTS: Piece = piece!("weights");
const FRAGMENT: Piece = piece!("fragment");
const ROWS: Piece = piece!("rows");

macro_rules! kernels {
    ($($constant:ident = $entry:literal, scores: $scores:literal, [$($piece:expr),*];)*) => {
        $(pub(crate) const $constant: Kernel = Kernel { entry: $entry, pieces: &[$($piece),*], scores: $scores };)*
    };
}
kernels! {
    FORWARD = "attention_forward", scores: true, [SOFTMAX, FRAGMENT, SPAN, PAGES, KEYS, SCORES, DROPOUT, piece!("forward")];
    VECTOR = "attention_vector", scores: true, [SOFTMAX, ROWS, SPAN, PAGES, KEYS, SCORES, DROPOUT, piece!("vector")];
    MERGE = "attention_merge", scores: false, [SOFTMAX, SPAN, piece!("merge")];
    DELTA = "attention_delta", scores: true, [SOFTMAX, SPAN, KEYS, SCORES, EXACT, piece!("delta")];
    DQ = "attention_dq", scores: true, [SOFTMAX, FRAGMENT, SPAN, KEYS, SCORES, DROPOUT, EXACT, WEIGHTS, piece!("dq")];
    DKV = "attention_dkv", scores: true, [SOFTMAX, FRAGMENT, SPAN, KEYS, SCORES, DROPOUT, EXACT, WEIGHTS, piece!("dkv")];
    VECTOR_DQ = "attention_vector_dq", scores: true, [SOFTMAX, ROWS, SPAN, KEYS, SCORES, DROPOUT, EXACT, WEIGHTS, piece!("vector_dq")];
    VECTOR_DKV = "attention_vector_dkv", scores: true, [SOFTMAX, ROWS, SPAN, KEYS, SCORES, DROPOUT, EXACT, WEIGHTS, piece!("vector_dkv")];
    PARAMETER = "attention_parameter", scores: true, [SOFTMAX, FRAGMENT, SPAN, KEYS, SCORES, DROPOUT, EXACT, WEIGHTS, piece!("parameter")];
    SUM = "attention_sum", scores: false, [piece!("sum")];
    SINK = "attention_sink", scores: false, [SOFTMAX, SPAN, KEYS, EXACT, piece!("sink")];
}

/// Buffer slot of the parameter structure. This slot and those below are the same in all kernels.
pub(crate) const PARAMS_SLOT: u32 = 4;
pub(crate) const STATS_SLOT: u32 = 5;
pub(crate) const SEQ_LEN_Q_SLOT: u32 = 6;
pub(crate) const SEQ_LEN_KV_SLOT: u32 = 7;
/// Buffer slot of the `cu_seqlens` of queries, which packed sequences have instead of lengths.
pub(crate) const BOUNDARIES_Q_SLOT: u32 = SEQ_LEN_Q_SLOT;
pub(crate) const BOUNDARIES_KV_SLOT: u32 = SEQ_LEN_KV_SLOT;
pub(crate) const SCALARS_SLOT: u32 = 8;
pub(crate) const SINK_SLOT: u32 = 11;
pub(crate) const ROW_MAX_SLOT: u32 = 12;
pub(crate) const SUM_EXP_SLOT: u32 = 13;
pub(crate) const PAGES_SLOT: u32 = 14;
pub(crate) const TENSORS_SLOT: u32 = 15;
/// The largest number of buffers that Metal binds to a kernel.
pub(crate) const SLOTS: u32 = 31;

/// Everything on which the source of a kernel depends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) problem: &'a Forward,
    /// MSL's type of elements.
    pub(crate) element: &'a str,
    pub(crate) captured: &'a Captured,
    /// The trace of a score_mod's gradient, and the index of the root (output) that the kernel uses.
    pub(crate) gradient: Option<(&'a Trace, usize)>,
    /// MSL's type of a parameter's gradient, if the kernel writes one.
    pub(crate) along: Option<&'a str>,
    /// The parameter structure of the kernel, in MSL.
    pub(crate) params: &'a str,
}

impl Source<'_> {
    /// Returns the MSL source of a kernel. `constants` is its tile configuration, as names and values.
    pub(crate) fn text(&self, kernel: &Kernel, constants: &[(&str, u32)]) -> String {
        let Source { problem, captured, .. } = *self;
        let mut text = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n\n".to_owned();
        // Unroll fully: accumulators are arrays that must stay in registers.
        text.push_str("#ifndef UNROLL\n#define UNROLL _Pragma(\"clang loop unroll(full)\")\n#endif\n\n");
        let _ = writeln!(text, "typedef {} Element;", self.element);
        if let Some(along) = self.along {
            let _ = writeln!(text, "typedef {along} Gradient;");
        }
        if let Some(packed) = &problem.packed {
            let _ = writeln!(text, "typedef {} Boundary;", boundary(packed));
        }
        // Kernels that compute no scores have the same source for all masks and score_mods.
        let features = [
            ("WITH_STATS", problem.stats.into()),
            ("WITH_ROW_MAX", problem.row_max.into()),
            ("WITH_SUM_EXP", problem.sum_exp.into()),
            ("WITH_PACKED", problem.packed.is_some().into()),
            ("WITH_PAGES", problem.paged.is_some().into()),
            ("WITH_SEQ_LEN_Q", problem.seq_len_q.into()),
            ("WITH_SEQ_LEN_KV", problem.seq_len_kv.into()),
            ("WITH_ENDS", (!problem.ends.is_full()).into()),
            ("WITH_SCORE_MOD", problem.score_mod.is_some().into()),
            ("WITH_GRADIENT", self.gradient.is_some().into()),
            ("WITH_KEEP", problem.keep.is_some().into()),
            ("WITH_DROPOUT", problem.dropout.is_some().into()),
        ];
        let features = if kernel.scores { &features[..] } else { &features[..4] };
        for (constant, value) in constants.iter().chain(features) {
            let _ = writeln!(text, "#define {constant} {value}");
        }
        if let Some(paged) = problem.paged.filter(|_| kernel.scores) {
            let of_entry = paged.pages_of(problem.k.dims[2]);
            let _ =
                writeln!(text, "#define PAGE_TOKENS {}\n#define PAGES {}\n#define PAGES_OF_ENTRY {of_entry}", paged.page_size, paged.pages);
        }
        if let Some(dropout) = problem.dropout.filter(|_| kernel.scores) {
            let [seed, offset] = [DROPOUT_SEED, DROPOUT_OFFSET].map(|name| captured.number(name));
            let _ = writeln!(text, "#define DROPOUT_SEED {seed}\n#define DROPOUT_OFFSET {offset}");
            let _ = writeln!(text, "#define DROPOUT_MOST {}u\n#define DROPOUT_SCALE {}u", dropout.most(), dropout.scale().to_bits());
        }
        let _ = write!(text, "\n{}\n", self.params);
        if kernel.scores {
            self.traced(&mut text, captured);
        }
        kernel.pieces.iter().for_each(|piece| add(&mut text, piece));
        text
    }

    fn traced(&self, text: &mut String, captured: &Captured) {
        let Forward { score_mod, keep, .. } = self.problem;
        text.push_str(&declaration(captured, SCALARS_SLOT, TENSORS_SLOT));
        if score_mod.is_some() || keep.is_some() || self.gradient.is_some() {
            text.push_str("\n// Position of a score.\nstruct Place {\n    int batch;\n    int head;\n    int query;\n    int key;\n};\n");
            let _ = write!(text, "\n#line 1 \"expression.inc\"\n{EXPRESSION}");
            text.push_str("\n#line 1 \"traced\"\n");
        }
        text.extend(score_mod.as_deref().map(|trace| captured.score_mod(trace)));
        text.extend(self.gradient.map(|(trace, root)| captured.gradient(trace, root)));
        text.extend(keep.as_deref().map(|trace| captured.keep(trace)));
    }
}

fn add(text: &mut String, piece: &Piece) {
    let _ = write!(text, "\n#line 1 \"{}.metal\"\n{}", piece.name, piece.text);
}
