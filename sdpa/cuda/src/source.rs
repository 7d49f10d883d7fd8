//! Builds the CUDA sources of kernels from constants, the files in `kernels/`, and generated functions.

use crate::backward::{ALONG_PARAMS, ALONG_SCORE, Along, Backward};
use crate::problem::{Forward, Lists};
use crate::tile_config::{BackwardTile, PANEL, Tile};
use crate::warp_partials::WarpPartials;
use crate::wgmma::{BackwardParams, ForwardParams};
use crate::wgmma_wrappers;
use crate::work::steps;
use sdpa_core::expr::{Axis, Trace};
use sdpa_core::{DType, Side, StatsBase};
use sdpa_emit::{Captured, Dialect, EXPRESSION};
use std::fmt::Write;

macro_rules! piece {
    ($name:literal) => {
        ($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $name)))
    };
}
pub(crate) use piece;

/// The beginning of every kernel source, before generated code. All PTX is in `ptx`, `tma`, `cluster`, `wgmma` and `mma`.
const PRELUDE: [(&str, &str); 4] = [piece!("types.cuh"), piece!("ptx.cuh"), piece!("prelude.cuh"), piece!("fragments.cuh")];
/// Functions that traced expressions call.
const FUNCTIONS: (&str, &str) = piece!("functions.cuh");
const HOPPER: [(&str, &str); 3] = [piece!("tma.cuh"), piece!("wgmma_operands.cuh"), piece!("wgmma.cuh")];
pub(crate) const MASK: (&str, &str) = piece!("mask.cuh");
const PIPELINE: (&str, &str) = piece!("pipeline.cuh");
const VARLEN_TMA: (&str, &str) = piece!("varlen_tma.cuh");
pub(crate) const KV_BLOCKS: (&str, &str) = piece!("kv_blocks.cuh");
pub(crate) const BLOCK_SPARSITY: (&str, &str) = piece!("block_sparsity.cuh");
const DROPOUT: (&str, &str) = piece!("dropout.cuh");
/// The piece of kernel source for the row statistics of a forward pass.
pub(crate) const STATISTICS: (&str, &str) = piece!("statistics.cuh");
/// The piece of kernel source for the online softmax of every forward kernel.
pub(crate) const SOFTMAX: (&str, &str) = piece!("softmax.cuh");
pub(crate) const TILE_ORDER: (&str, &str) = piece!("tile_order.cuh");
const TILE_SCHEDULER: (&str, &str) = piece!("tile_scheduler.cuh");
const TILE_LIST: (&str, &str) = piece!("tile_list.cuh");
const FIXED_SPLITS: (&str, &str) = piece!("fixed_splits.cuh");
const COMBINE: (&str, &str) = piece!("combine.cuh");
const FORWARD_KERNEL: (&str, &str) = piece!("forward.cu");
/// The piece of kernel source for the query tiles of a KV block.
pub(crate) const Q_BLOCKS: (&str, &str) = piece!("q_blocks.cuh");
const BACKWARD_LAYOUT: (&str, &str) = piece!("backward_layout.cuh");
/// The piece of kernel source that computes dP and dS, for every backward kernel.
pub(crate) const BACKWARD_SOFTMAX: (&str, &str) = piece!("backward_softmax.cuh");
const BACKWARD_STEPS: (&str, &str) = piece!("backward_steps.cuh");
pub(crate) const PARAMETER_GRADIENTS: (&str, &str) = piece!("parameter_gradients.cuh");
const DQ_FIXED_POINT: (&str, &str) = piece!("dq_fixed_point.cuh");
/// The piece of kernel source that adds the warps' partial sums of parameter gradients, and rounds these gradients.
pub(crate) const GRADIENT_SUMS: (&str, &str) = piece!("gradient_sums.cuh");
const BACKWARD_PREPROCESS: (&str, &str) = piece!("backward_preprocess.cuh");
const SINK_GRADIENT: (&str, &str) = piece!("sink_gradient.cuh");
const BACKWARD_SCHEDULER: (&str, &str) = piece!("backward_scheduler.cuh");
/// Conversion of the dQ accumulator: in the main kernel, or in a separate one.
const DQ_CONVERT_FUSED: (&str, &str) = piece!("dq_convert_fused.cuh");
const DQ_CONVERT: (&str, &str) = piece!("dq_convert.cuh");
const BACKWARD_SCORES: (&str, &str) = piece!("backward_scores.cuh");
const BACKWARD_LOADS: (&str, &str) = piece!("backward_loads.cuh");
const BACKWARD_EPILOGUE: (&str, &str) = piece!("backward_epilogue.cuh");
const BACKWARD_KERNEL: (&str, &str) = piece!("backward.cu");
/// PTX for 2-CTA clusters, and the kernel that runs on them.
const CLUSTER: (&str, &str) = piece!("cluster.cuh");
/// The piece of kernel source for log-sum-exps that are stored as two f32.
pub(crate) const EXACT_LSE: (&str, &str) = piece!("exact_lse.cuh");
const PADDING: (&str, &str) = piece!("padding.cuh");
const BACKWARD_2CTA: (&str, &str) = piece!("backward_2cta.cu");

/// Options with which NVRTC compiles all kernels, in addition to the architecture. They make functions without a qualifier device
/// functions. They do not enable approximate division or flushing to zero, which kernels request where they need it.
pub const OPTIONS: [&str; 4] = ["--std=c++17", "--device-as-default-execution-space", "--generate-line-info", "--ptxas-options=-v"];

/// Shared memory of the kernel [`EntryPoint::BlockLists`](crate::EntryPoint::BlockLists) in bytes: 4 bytes for each of its 32 warps.
pub const MAP_SHARED_BYTES: u32 = 4 * 32;

/// Bytes of shared memory of the sink gradient kernel: a partial sum for each of its 8 warps.
pub(crate) const SINKS_SHARED_BYTES: u32 = 4 * 8;

/// The largest cost of mask and score_mod for one score, in units of an addition, with which they are compiled separately for full and
/// partial blocks. Costlier ones are compiled once for both, because compiling them for 64 scores takes long and the mask costs little in
/// comparison.
pub(crate) const HEAVY: u32 = 24;

/// Returns for how many scores of a thread a trace of this weight is unrolled; 0 for all. Very long traces are compiled once and process scores
/// sequentially from local memory. A copy per score would take a minute to compile and exceed the instruction caches.
fn at_once(weight: u32) -> u32 {
    const LONG: u32 = 120;
    if weight < LONG { 0 } else { (1000 / weight).max(2) }
}

/// Returns the PTX type of WGMMA operands.
fn element(dtype: DType) -> &'static str {
    if dtype == DType::F16 { "f16" } else { "bf16" }
}

/// Returns the structure of captured parameters: scalars by value, tensors by address.
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

/// Returns whether indices are clamped to the extents before traces are evaluated. Tensors have no elements past the extents. For long traces,
/// clamping stops the compiler from keeping values that a thread's scores share, which would exceed the registers.
fn clamps(problem: &Forward, axis: Axis) -> bool {
    problem.captured.reads_along(axis) || problem.weight() > HEAVY
}

/// Returns the constants that both passes derive from the attention.
fn constants(problem: &Forward) -> [(&'static str, u32); 11] {
    [
        ("WITH_SINK", problem.sink.into()),
        ("WITH_SEQ_LEN_Q", problem.seq_len_q.into()),
        ("WITH_SEQ_LEN_KV", problem.seq_len_kv.into()),
        ("WITH_DROPOUT", problem.dropout.is_some().into()),
        ("WITH_ENDS", (!problem.ends.is_full()).into()),
        ("WITH_PREFIX", problem.region.prefix.is_some().into()),
        ("WITH_BLOCK_LISTS", problem.keep.is_some().into()),
        ("WITH_KEEP", problem.keep.is_some().into()),
        ("WITH_SCORE_MOD", problem.score_mod.is_some().into()),
        ("CLAMPS_QUERIES", clamps(problem, Axis::Q).into()),
        ("CLAMPS_KEYS", clamps(problem, Axis::K).into()),
    ]
}

/// Returns the constants that [`STATISTICS`] reads, as names and values.
pub(crate) fn statistics(problem: &Forward) -> [(&'static str, u32); 4] {
    let [stats, row_max, sum_exp] = problem.statistics.map(u32::from);
    let two = u32::from(problem.stats_base == StatsBase::Two);
    [("WITH_STATS", stats), ("WITH_ROW_MAX", row_max), ("WITH_SUM_EXP", sum_exp), ("WITH_BASE_TWO", two)]
}

/// Returns the beginning of a kernel source: constants, common pieces and traced functions, then the pieces `engines`. `weight` is the
/// cost of all traces of the pass for one score.
pub(crate) fn begin(
    problem: &Forward,
    weight: u32,
    own: &[(&str, u32)],
    params: &str,
    traced: &[String],
    engines: &[(&str, &str)],
) -> String {
    let mut text = String::new();
    for (name, value) in own.iter().chain(&constants(problem)).chain(&[("TRACE_UNROLL", at_once(weight))]) {
        let _ = writeln!(text, "#define {name} {value}");
    }
    PRELUDE.into_iter().for_each(|piece| add(&mut text, piece));
    let _ = writeln!(text, "\ntypedef {} Element;\n", Dialect::Cuda.element(problem.dtype));
    text.push_str(params);
    text.push_str(&captured_structure(&problem.captured));
    if !traced.is_empty() {
        add(&mut text, FUNCTIONS);
        add(&mut text, ("expression.inc", EXPRESSION));
        text.push_str("\n#line 1 \"traced\"\n");
        text.extend(traced.iter().map(String::as_str));
    }
    problem.dropout.map(|_| DROPOUT).iter().chain(engines).for_each(|piece| add(&mut text, *piece));
    text
}

/// Precedes the generated WGMMA wrappers.
const GENERATED: &str = "\n#line 1 \"generated\"\n";

/// Returns the declaration of the integer type of `cu_seqlens` offsets.
pub(crate) fn boundary(problem: &Forward) -> String {
    let of = if problem.packed.is_some_and(|packed| packed.wide) { "long" } else { "int" };
    format!("typedef {of} CuSeqlen;\n")
}

/// Columns over which one WGMMA sums.
const COLUMNS: u32 = 16;

/// Returns the number of column panels of a tensor.
fn panels(dim: i64) -> u32 {
    steps(dim, PANEL) as u32
}

/// Returns the registers of a thread that hold this many times 16 columns of an operand's rows, at most all; 1 if there are none.
fn held(sixteens: u32, dim: i64) -> u32 {
    (4 * sixteens.min(steps(dim, COLUMNS) as u32)).max(1)
}

/// Returns the CUDA source of the WGMMA forward kernel of a problem with this tile.
pub fn forward(problem: &Forward, tile: &Tile) -> String {
    let captured = &problem.captured;
    let own = [
        ("DIM_QK", tile.dim_qk),
        ("DIM_V", tile.dim_v),
        ("QK_TENSOR_PANELS", panels(problem.tensors[0].dims[3])),
        ("V_TENSOR_PANELS", panels(problem.tensors[2].dims[3])),
        ("QK_STEPS", steps(problem.tensors[0].dims[3], COLUMNS) as u32),
        ("CONSUMER_WARPGROUPS", tile.groups),
        ("TILE_M", tile.queries()),
        ("TILE_N", tile.keys),
        ("PACKED_HEADS", tile.heads()),
        ("PACK_GQA", tile.few.is_some().into()),
        ("STAGES", tile.stages),
        ("PING_PONG", tile.turns.into()),
        ("O_HAS_SMEM", tile.output_apart.into()),
        ("Q_REGISTERS", held(tile.held, problem.tensors[0].dims[3])),
        ("CONSUMER_REGISTERS", tile.group_registers),
        ("PRODUCER_REGISTERS", tile.bring_registers),
        ("ALWAYS_MASKED", u32::from(problem.weight() > HEAVY)),
        ("APPROXIMATE", (problem.dtype == DType::BF16).into()),
        ("LAZY_RESCALE", 1),
        ("WITH_PACKED_Q", problem.packed.is_some().into()),
        ("WITH_PACKED_KV", problem.packs(Side::Keys).into()),
        ("WITH_PAGES", problem.paged.is_some().into()),
        ("PAGE_SLICE", problem.piece(tile)),
        ("WITH_TILE_LIST", problem.lists_tiles(tile).into()),
        ("WITH_SPLIT_KV", tile.split.into()),
        ("FIXED_SPLIT", tile.fixed_split),
        ("MERGES_SPLITS", tile.merges_splits().into()),
        ("MIN_BLOCKS_PER_SPLIT", problem.least_blocks(tile)),
        ("WITH_SPLIT_MAX", (tile.split && problem.leaves_largest()).into()),
    ];
    let own: Vec<(&str, u32)> = own.into_iter().chain(statistics(problem)).collect();
    let params = format!("{}{}", boundary(problem), ForwardParams::cuda());
    let score_mod = problem.score_mod.as_deref().map(|trace| captured.score_mod(trace));
    let traced: Vec<String> = score_mod.into_iter().chain(problem.keep.as_deref().map(|trace| captured.keep(trace))).collect();
    let mut text = begin(problem, problem.weight(), &own, &params, &traced, &HOPPER);
    text.push_str(GENERATED);
    text.push_str(&wgmma_wrappers::forward(element(problem.dtype), tile.keys, tile.dim_v));
    let map = (problem.lists() == Lists::AtCall).then_some(BLOCK_SPARSITY);
    let fixed = (tile.fixed_split > 0).then_some(FIXED_SPLITS);
    let items = problem.lists_tiles(tile).then_some(TILE_LIST).into_iter().chain(fixed).chain(tile.split.then_some(COMBINE));
    [MASK, VARLEN_TMA, PADDING, KV_BLOCKS, TILE_ORDER, TILE_SCHEDULER, STATISTICS, SOFTMAX, PIPELINE]
        .into_iter()
        .chain(map)
        .chain(items)
        .chain([FORWARD_KERNEL])
        .for_each(|piece| add(&mut text, piece));
    text
}

/// Returns the CUDA source of the WGMMA kernels of a backward pass with this tile.
pub fn backward(problem: &Backward, tile: &BackwardTile) -> String {
    let forward = &problem.forward;
    let tight = forward.is_tight();
    let held_rows = if tight { [0, 0] } else { tile.held };
    let own = [
        ("DIM_QK", tile.dim_qk),
        ("DIM_V", tile.dim_v),
        ("QK_TENSOR_PANELS", panels(forward.tensors[0].dims[3])),
        ("V_TENSOR_PANELS", panels(forward.tensors[2].dims[3])),
        ("QK_STEPS", steps(forward.tensors[0].dims[3], COLUMNS) as u32),
        ("V_STEPS", steps(forward.tensors[2].dims[3], COLUMNS) as u32),
        ("TILE_M", tile.queries),
        ("TILE_N", BackwardTile::KEYS),
        ("COLUMN_PARTS", tile.parts),
        ("TWO_CTA", tile.two_cta.into()),
        ("STAGES", tile.stages),
        ("D_O_STAGES", tile.output_stages),
        ("K_REGISTERS", held(held_rows[0], forward.tensors[0].dims[3])),
        ("LOW_REGISTERS", tight.into()),
        ("V_REGISTERS", held(held_rows[1], forward.tensors[2].dims[3])),
        ("CONSUMER_REGISTERS", tile.group_registers),
        ("PRODUCER_REGISTERS", tile.bring_registers),
        ("ALWAYS_MASKED", u32::from(forward.weight() > HEAVY)),
        ("APPROXIMATE", (forward.dtype == DType::BF16).into()),
        ("DQ_BY_TMA", (tile.sums_bytes() > 0).into()),
        ("FIXED_POINT_DQ", tile.fixed_point.into()),
        ("KEEPS_BY_KEY", forward.keeps_by_key().into()),
        ("BATCH_INVARIANT", forward.batch_invariant.into()),
        ("SCORE_MOD_GAIN_BITS", (problem.gain().unwrap_or(1.0) as f32).next_up().to_bits()),
        ("WITH_HEAD_SPLITS", (tile.shares > 1).into()),
        ("WITH_PARAMETER_GRADIENTS", (!problem.along.is_empty()).into()),
        ("WITH_SINK_GRADIENT", problem.sink_gradient.is_some().into()),
        ("WITH_PACKED_Q", forward.packed.is_some().into()),
        ("WITH_PACKED_KV", forward.packs(Side::Keys).into()),
    ];
    let traced: Vec<String> = score_functions(problem).into_iter().chain(along_functions(problem)).chain(keep_function(forward)).collect();
    let params =
        format!("{}{}typedef BackwardParams Params;\n{}", boundary(forward), BackwardParams::cuda(), gradients_structure(&problem.along));
    let engines: Vec<(&str, &str)> = HOPPER.into_iter().chain(tile.two_cta.then_some(CLUSTER)).collect();
    let mut text = begin(forward, problem.weight(), &own, &params, &traced, &engines);
    text.push_str(GENERATED);
    let columns = if tile.two_cta {
        [0, 2].map(|n: usize| PANEL * panels(forward.tensors[n].dims[3]))
    } else {
        [tile.dim_qk, tile.dim_v].map(|dim| dim / tile.parts)
    };
    text.push_str(&wgmma_wrappers::backward(element(forward.dtype), columns));
    let map = (forward.lists() == Lists::AtCall).then_some(BLOCK_SPARSITY);
    [MASK, VARLEN_TMA, PADDING, Q_BLOCKS]
        .into_iter()
        .chain(map)
        .chain([BACKWARD_LAYOUT, BACKWARD_SOFTMAX, BACKWARD_STEPS])
        .for_each(|piece| add(&mut text, piece));
    if !problem.along.is_empty() {
        add(&mut text, PARAMETER_GRADIENTS);
        text.push_str("\n#line 1 \"parameters\"\n");
        text.push_str(&along_parameters(problem, BackwardTile::KEYS));
    }
    let of_queries = if tile.sums_bytes() > 0 { DQ_CONVERT_FUSED } else { DQ_CONVERT };
    let kernel = if tile.two_cta { BACKWARD_2CTA } else { BACKWARD_KERNEL };
    if tile.fixed_point {
        add(&mut text, DQ_FIXED_POINT);
    }
    let of_sinks = (tile.fixed_point && problem.sink_gradient.is_some()).then_some(SINK_GRADIENT);
    [EXACT_LSE, BACKWARD_PREPROCESS]
        .into_iter()
        .chain(problem.has_other_gradients().then_some(GRADIENT_SUMS))
        .chain(of_sinks)
        .chain([BACKWARD_SCHEDULER, of_queries, BACKWARD_SCORES, PIPELINE, BACKWARD_LOADS, BACKWARD_EPILOGUE, kernel])
        .for_each(|piece| add(&mut text, piece));
    text
}

/// Returns the CUDA functions of a backward pass that apply the score_mod to a score and compute its derivative.
pub(crate) fn score_functions(problem: &Backward) -> Vec<String> {
    let captured = &problem.forward.captured;
    let score_mod = problem.forward.score_mod.as_deref();
    let slope = problem.gradient.as_deref().filter(|_| score_mod.is_some()).map(|trace| captured.gradient(trace, ALONG_SCORE));
    score_mod.map(|trace| captured.score_mod(trace)).into_iter().chain(slope).collect()
}

/// Returns the CUDA function of the part of the mask that is neither a band nor a length; `None` if the mask has no such part.
pub(crate) fn keep_function(forward: &Forward) -> Option<String> {
    forward.keep.as_deref().map(|trace| forward.captured.keep(trace))
}

/// Returns the CUDA functions that compute a score's contribution to the gradient of each parameter.
pub(crate) fn along_functions(problem: &Backward) -> Vec<String> {
    let captured = &problem.forward.captured;
    let of_axes = |trace| {
        (0..problem.along.len())
            .map(move |n| along_function(captured, trace, ALONG_PARAMS + n, &format!("parameter_gradient_{n}"), "float"))
    };
    let of_reads = |trace| {
        problem.along.iter().flat_map(|along| &along.reads).flat_map(move |&[value, place]| {
            [(value, "float"), (place, "int")].map(|(root, ty)| along_function(captured, trace, root, &format!("read_{root}"), ty))
        })
    };
    problem.gradient.as_deref().into_iter().flat_map(|trace| of_axes(trace).chain(of_reads(trace))).collect()
}

/// Returns the CUDA structure with the addresses of the parameter gradients' accumulators.
pub(crate) fn gradients_structure(along: &[Along]) -> String {
    let members: String = (0..along.len()).map(|n| format!("    float* to_{n};\n")).collect();
    format!("struct Gradients {{\n{members}}};\n")
}

/// Returns a root of a gradient as a function with its own name: the gradient of a parameter, or the index of a table read.
fn along_function(captured: &Captured, trace: &Trace, root: usize, name: &str, ty: &str) -> String {
    captured.gradient(trace, root).replacen("float score_mod_gradient(", &format!("{ty} {name}("), 1)
}

/// Returns the CUDA function that adds each score's contribution to the parameter gradients, for kernels with KV blocks of `keys` keys. It adds to
/// the elements of a gradient, or to the warp's partial sums if the order of the additions is fixed.
pub(crate) fn along_parameters(backward: &Backward, keys: u32) -> String {
    let extents = backward.forward.extents;
    let mut text = "inline void parameter_gradients(const float (&raw)[RAW_SCORES], const float (&upstream)[SCORES], const Params& p, const Captured& captured,\n                             \
                    const Gradients& gradients, const FragmentOrigin& origin) {\n    float x[SCORES];\n"
        .to_owned();
    for (n, (along, partials)) in backward.along.iter().zip(backward.warp_partials(keys)).enumerate() {
        for read in &along.reads {
            text.push_str(&along_read(n, along, *read, partials));
        }
        if along.axes.is_table() {
            continue;
        }
        let spans = |axis| if along.axes.has(axis) { "true" } else { "false" };
        let mut at = partials.map_or_else(|| "0L".to_owned(), place_of_warp);
        for (axis, index) in Axis::ALL.into_iter().zip(["at.batch", "at.head", "at.query", "at.key"]) {
            let of_rows = matches!(axis, Axis::Batch | Axis::Head);
            if along.axes.has(axis) && !(of_rows && partials.is_some()) {
                at = format!("({at}) * {}L + {index}", extents[axis.place()]);
            }
        }
        let _ = writeln!(
            text,
            "    for (int n = 0; n < SCORES; n++) x[n] = upstream[n] == 0.0f ? 0.0f : parameter_gradient_{n}(raw[n], upstream[n], place_of_score(p, origin, n), captured);\n    \
             add_parameter_gradient<{}, {}>(x, p, origin, [&](const Place& at) {{ return gradients.to_{n} + ({at}); }});",
            spans(Axis::Q),
            spans(Axis::K)
        );
    }
    text.push_str("}\n");
    text.replace("    for (int n", "#pragma unroll\n    for (int n")
}

/// Returns the expression for this warp's index among all slots of all rows.
fn place_of_warp(partials: WarpPartials) -> String {
    let slot = if partials.slots == 1 { "0" } else { "origin.k / 16" };
    format!("(long(origin.batch) * {}L + origin.head) * {}L + {slot}", partials.rows[1], partials.slots)
}

/// Returns the code that adds to the gradient of a table at the index that a score reads.
fn along_read(n: usize, along: &Along, [value, place]: [usize; 2], partials: Option<WarpPartials>) -> String {
    let last = along.axes.extents().product::<i64>() - 1;
    let to = partials.map_or_else(String::new, |partials| format!(" + ({}) * {}L", place_of_warp(partials), partials.inner));
    let more = format!("read_{value}(raw[n], upstream[n], at, captured)");
    let add = format!("atomicAdd(gradients.to_{n}{to} + min(max(read_{place}(raw[n], upstream[n], at, captured), 0), {last}), more);");
    let each = if partials.is_some() {
        format!("        const float more = upstream[n] == 0.0f ? 0.0f : {more};\n        lane_by_lane(more != 0.0f, [&] {{ {add} }});\n")
    } else {
        format!("        if (upstream[n] == 0.0f) continue;\n        const float more = {more};\n        if (more != 0.0f) {add}\n")
    };
    format!("    for (int n = 0; n < SCORES; n++) {{\n        const Place at = place_of_score(p, origin, n);\n{each}    }}\n")
}

pub(crate) fn add(text: &mut String, (name, piece): (&str, &str)) {
    let _ = write!(text, "\n#line 1 \"{name}\"\n{piece}");
}
