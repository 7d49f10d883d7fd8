//! The text of a kernel: constants, the pieces of `kernels/`, and what was traced.

use crate::matrix::products;
use crate::params::Params;
use crate::problem::Forward;
use crate::tile::Tile;
use sdpa_core::DType;
use sdpa_emit::{Captured, Dialect, EXPRESSION};
use std::fmt::Write;

macro_rules! piece {
    ($name:literal) => {
        ($name, include_str!(concat!("../kernels/", $name)))
    };
}

/// What is in front of every kernel, but for what is generated between.
const PRELUDE: (&str, &str) = piece!("prelude.cuh");
const ENGINES: [(&str, &str); 2] = [piece!("copy.cuh"), piece!("matrix.cuh")];
const FORWARD: [(&str, &str); 2] = [piece!("walk.cuh"), piece!("forward.cu")];

/// Options of the compiler, beside the architecture: functions without a qualifier are the device's; approximate division and flushing to zero only
/// where a kernel says so.
pub const OPTIONS: [&str; 4] = ["--std=c++17", "--device-as-default-execution-space", "--generate-line-info", "--ptxas-options=-v"];

/// The name of the kernel in the text.
pub const ENTRY: &std::ffi::CStr = c"attention_forward";

/// Past this a trace is compiled once for every block, masked or not: a text of 64 scores takes long, and the mask is little beside it.
const HEAVY: u32 = 24;

/// The type of the matrix units' operands.
fn element(dtype: DType) -> &'static str {
    if dtype == DType::F16 { "f16" } else { "bf16" }
}

/// The structure that carries what traces read: scalars by value, tensors by address.
fn captured_structure(captured: &Captured) -> String {
    let mut members = String::new();
    for (n, (_, dtype, _)) in captured.tensors().into_iter().enumerate() {
        let _ = writeln!(members, "    const {}* tensor_{n};", Dialect::Cuda.element(dtype));
    }
    let scalars = captured.scalars().len();
    if scalars > 0 {
        let _ = writeln!(members, "    float scalars[{scalars}];");
    }
    format!("struct Captured {{\n{members}}};\n")
}

/// The whole CUDA text of the forward kernel of a problem, cut into this tile.
pub fn forward(problem: &Forward, tile: &Tile) -> String {
    let captured = &problem.captured;
    let mut text = String::new();
    let constants = [
        ("DIM_QK", tile.dim_qk),
        ("DIM_V", tile.dim_v),
        ("GROUPS", tile.groups),
        ("TILE_M", tile.queries()),
        ("TILE_N", tile.keys),
        ("STAGES", tile.stages),
        ("TURNS", tile.turns.into()),
        ("O_APART", tile.output_apart.into()),
        ("GROUP_REGISTERS", tile.group_registers),
        ("BRING_REGISTERS", tile.bring_registers),
        ("MASKED_ANYWHERE", u32::from(problem.weight() > HEAVY)),
        ("APPROXIMATE", (problem.dtype == DType::BF16).into()),
        ("WITH_STATS", problem.stats.into()),
        ("WITH_SINK", problem.sink.into()),
        ("WITH_SEQ_LEN_Q", problem.seq_len_q.into()),
        ("WITH_SEQ_LEN_KV", problem.seq_len_kv.into()),
        ("WITH_ENDS", (!problem.ends.is_full()).into()),
        ("WITH_PREFIX", problem.region.prefix.is_some().into()),
        ("WITH_MAP", problem.has_map().into()),
        ("WITH_KEEP", problem.keep.is_some().into()),
        ("KEEP_ANYWHERE", (problem.keep.is_some() && !problem.has_map()).into()),
        ("WITH_SCORE_MOD", problem.score_mod.is_some().into()),
    ];
    for (name, value) in constants {
        let _ = writeln!(text, "#define {name} {value}");
    }
    add(&mut text, PRELUDE);
    let _ = writeln!(text, "\ntypedef {} Element;\n", Dialect::Cuda.element(problem.dtype));
    text.push_str(&Params::cuda());
    text.push_str(&captured_structure(captured));
    text.push_str("\n// Where a score stands.\nstruct Place {\n    int batch;\n    int head;\n    int query;\n    int key;\n};\n");
    if problem.score_mod.is_some() || problem.keep.is_some() {
        add(&mut text, ("expression.inc", EXPRESSION));
        text.push_str("\n#line 1 \"traced\"\n");
        text.extend(problem.score_mod.as_deref().map(|trace| captured.score_mod(trace)));
        text.extend(problem.keep.as_deref().map(|trace| captured.keep(trace)));
    }
    ENGINES.into_iter().for_each(|piece| add(&mut text, piece));
    text.push_str("\n#line 1 \"products\"\n");
    text.push_str(&products(element(problem.dtype), tile.keys, tile.dim_v));
    FORWARD.into_iter().for_each(|piece| add(&mut text, piece));
    text
}

fn add(text: &mut String, (name, piece): (&str, &str)) {
    let _ = write!(text, "\n#line 1 \"{name}\"\n{piece}");
}
