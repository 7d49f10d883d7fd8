//! Sources of kernels: a prelude, the pieces that a kernel is made of, the kernel.

use crate::emit::Captured;
use crate::forward::Forward;
use crate::tiles::Tiles;
use cudnn_graph::expr::Trace;
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

pub(crate) const FORWARD: Piece = piece!("forward");
pub(crate) const DELTA: Piece = piece!("delta");
pub(crate) const DQ: Piece = piece!("dq");
pub(crate) const DKV: Piece = piece!("dkv");
pub(crate) const WEIGHTS: Piece = piece!("weights");
const FRAGMENT: Piece = piece!("fragment");
const KEYS: Piece = piece!("keys");
const EXPRESSION: Piece = piece!("expression");

/// Slots of the buffers that a problem may have, in all kernels.
pub(crate) const STATS_SLOT: u32 = 5;
pub(crate) const SEQ_LEN_Q_SLOT: u32 = 6;
pub(crate) const SEQ_LEN_KV_SLOT: u32 = 7;
pub(crate) const SCALARS_SLOT: u32 = 8;
pub(crate) const DELTA_SLOT: u32 = 9;
pub(crate) const TENSORS_SLOT: u32 = 13;
/// Buffers that Metal binds to a kernel.
pub(crate) const SLOTS: u32 = 31;

/// What the text of a kernel depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) problem: &'a Forward,
    pub(crate) element: &'a str,
    pub(crate) tiles: &'a Tiles,
    pub(crate) captured: &'a Captured,
    /// The derivative of the score_mod.
    pub(crate) gradient: Option<&'a Trace>,
    /// The structure of parameters, in MSL.
    pub(crate) params: &'a str,
}

impl Source<'_> {
    /// The text with these pieces at its end.
    pub(crate) fn text(&self, kernel: &[Piece]) -> String {
        let Source { problem, tiles, captured, .. } = *self;
        let mut text = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n\n".to_owned();
        // Full: accumulators are arrays that must be registers.
        text.push_str("#ifndef UNROLL\n#define UNROLL _Pragma(\"clang loop unroll(full)\")\n#endif\n\n");
        let _ = writeln!(text, "typedef {} Element;", self.element);
        let constants = [
            ("DIM_QK", problem.q.dims[3]),
            ("DIM_V", problem.v.dims[3]),
            ("PADDED_QK", tiles.padded_qk.into()),
            ("PADDED_V", tiles.padded_v.into()),
            ("PITCH_QK", tiles.pitch_qk.into()),
            ("PITCH_V", tiles.pitch_v.into()),
            ("OWN", tiles.own.into()),
            ("PASSING", tiles.passing.into()),
            ("THREADS", tiles.threads().into()),
            ("SPLITS", tiles.splits().into()),
            ("SLICE_QK", tiles.slice(tiles.padded_qk).into()),
            ("SLICE_V", tiles.slice(tiles.padded_v).into()),
            ("WITH_STATS", problem.stats.into()),
            ("WITH_SEQ_LEN_Q", problem.seq_len_q.into()),
            ("WITH_SEQ_LEN_KV", problem.seq_len_kv.into()),
            ("WITH_SCORE_MOD", problem.score_mod.is_some().into()),
            ("WITH_KEEP", problem.keep.is_some().into()),
        ];
        for (constant, value) in constants {
            let _ = writeln!(text, "#define {constant} {value}");
        }
        let _ = write!(text, "\n{}\n", self.params);
        text.push_str(&captured.declaration(SCALARS_SLOT, TENSORS_SLOT));
        let traces = [problem.score_mod.as_deref(), problem.keep.as_deref(), self.gradient];
        if traces.iter().any(Option::is_some) {
            text.push_str("\n// Where a score stands.\nstruct Place {\n    int batch;\n    int head;\n    int query;\n    int key;\n};\n");
            add(&mut text, &EXPRESSION);
            text.push_str("\n#line 1 \"traced\"\n");
        }
        text.extend(problem.score_mod.as_deref().map(|trace| captured.score_mod(trace)));
        text.extend(self.gradient.map(|trace| captured.gradient(trace)));
        text.extend(problem.keep.as_deref().map(|trace| captured.keep(trace)));
        for piece in [FRAGMENT, KEYS].iter().chain(kernel) {
            add(&mut text, piece);
        }
        text
    }
}

fn add(text: &mut String, piece: &Piece) {
    let _ = write!(text, "\n#line 1 \"{}.metal\"\n{}", piece.name, piece.text);
}
