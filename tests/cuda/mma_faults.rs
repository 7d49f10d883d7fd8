//! Faults that are put into kernels with `mma.sync`.

use super::faults::{
    DROPPED, Fault,
    Pass::{Backward, Forward},
    STATISTICS, all_are_found, all_have_places,
};
use super::mma::executor;
use conformance::emulated::{Emulated, executor_on};

/// Several tiles, each of several blocks; heads that share keys; one stage and two.
const LONG: &str = r#"
[[case]]
name = "windows"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 200, seq_kv = 330, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["window:90,100"]
stats = true

[[case]]
name = "every key"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 140, seq_kv = 300, dim_qk = 128, dim_v = 128 }
dtype = "f16"
stats = true
"#;

/// One stage of operands, parts of the columns.
const WIDE: &str = r#"
[[case]]
name = "wide"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 100, seq_kv = 150, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true
"#;

/// Rows that end within 16 bytes, and such as no copy reads.
const ODD: &str = r#"
[[case]]
name = "odd rows"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 70, seq_kv = 90, dim_qk = 37, dim_v = 21 }
dtype = "bf16"
stats = true
"#;

/// Rows of columns that are no multiple of 32, at multiples of 16 bytes.
const NARROW: &str = r#"
[[case]]
name = "narrow rows"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 70, seq_kv = 90, dim_qk = 40, dim_v = 24 }
dtype = "f16"
stats = true
"#;

/// Numbers in parts.
const SINGLE: &str = r#"
[[case]]
name = "f32"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 90, seq_kv = 140, dim_qk = 64, dim_v = 48 }
dtype = "f32"
mask = ["causal"]
stats = true
"#;

/// A rule that keeps all keys of some heads and none of others.
const MAPPED: &str = r#"
[[case]]
name = "other heads, other keys"
shape = { batch = 1, heads_q = 12, heads_kv = 3, seq_q = 70, seq_kv = 80, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["array:h"]
stats = true
"#;

/// Lengths of entries.
const LENGTHS: &str = r#"
[[case]]
name = "lengths and a sink"
shape = { batch = 3, heads_q = 2, heads_kv = 1, seq_q = 200, seq_kv = 270, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["padding", "causal"]
sink = true
stats = true
backward = { wrt = ["sink:f32"] }
"#;

/// Rows that have no keys, beside such as have.
const EMPTY: &str = r#"
[[case]]
name = "rows without keys"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 140, seq_kv = 100, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["causal-bottom-right"]
stats = true
"#;

/// Traces, and gradients of what they read, in parts of the columns.
const ALONG: &str = r#"
[[case]]
name = "a bias"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 80, seq_kv = 90, dim_qk = 160, dim_v = 64 }
dtype = "f16"
score_mod = ["bias:hqk"]
stats = true
backward = { wrt = ["bias:f32"] }
"#;

/// Gradients of parameters that are added up in one order: of queries of all heads, and of a table.
const ORDERED: &str = r#"
[[case]]
name = "a bias of queries in one order"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 150, seq_kv = 170, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["bias:q"]
stats = true
backward = { wrt = ["bias:f32"], deterministic = true }

[[case]]
name = "a table in one order"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 90, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
score_mod = ["relative-bias:4,20"]
stats = true
backward = { wrt = ["rel:bf16"], deterministic = true }
"#;

/// Keys in pages, of tokens that are no multiple of anything, whose table ends with anything.
const PAGED: &str = r#"
[[case]]
name = "odd pages"
shape = { batch = 3, heads_q = 4, heads_kv = 2, seq_q = 5, seq_kv = 300, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
layout = "bshd"
mask = ["padding"]
stats = true
paged = { page_size = 7, lengths_q = [5, 4, 5], lengths_kv = [300, 65, 0], spare = 2 }
"#;

/// Documents of several tiles, of one, and of none, between other tokens.
const PACKED: &str = r#"
[[case]]
name = "documents and a sink"
shape = { batch = 4, heads_q = 4, heads_kv = 2, seq_q = 150, seq_kv = 150, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
layout = "bshd"
mask = ["causal"]
sink = true
stats = true
packed = { lengths_q = [70, 150, 0, 61], before = 2, slack = 3 }
backward = { wrt = ["sink:f32"] }
"#;

const FAULTS: [Fault; 59] = [
    (
        "keys are not waited for",
        Forward,
        [
            "cp_async_wait_group<1>();\n        __syncthreads();\n        if (STAGES == 2) {\n            if (any) load_k",
            "__syncthreads();\n        if (STAGES == 2) {\n            if (any) load_k",
        ],
        LONG,
    ),
    (
        "values are not waited for",
        Forward,
        [
            "cp_async_wait_group<1>();\n        __syncthreads();\n        if (STAGES == 2) {\n            if (any) load_v",
            "__syncthreads();\n        if (STAGES == 2) {\n            if (any) load_v",
        ],
        LONG,
    ),
    (
        "a thread reads keys that another waited for",
        Forward,
        ["__syncthreads();\n        if (STAGES == 2) {\n            if (any) load_k", "if (STAGES == 2) {\n            if (any) load_k"],
        LONG,
    ),
    (
        "a thread reads keys that another stored",
        Forward,
        ["__syncthreads();\n        if (STAGES == 2) {\n            if (any) load_k", "if (STAGES == 2) {\n            if (any) load_k"],
        ODD,
    ),
    (
        "keys come before those of a block are done with",
        Forward,
        ["__syncthreads();\n            if (any) load_k", "if (any) load_k"],
        WIDE,
    ),
    (
        "values come before those of a block are done with",
        Forward,
        ["__syncthreads();\n            if (any) load_v", "if (any) load_v"],
        WIDE,
    ),
    ("both stages are one", Forward, ["load_k(k_at + next * K_BYTES", "load_k(k_at + stage * K_BYTES"], LONG),
    ("a stage is walked over twice", Forward, ["stage = next;", ""], LONG),
    ("sums of the second row weigh as the first's", Forward, ["o[n] *= rescale[fragment_half(n)];", "o[n] *= rescale[0];"], LONG),
    (
        "half of the lanes have another largest score",
        Forward,
        ["fmaxf(x, __shfl_xor_sync(~0u, x, 2))", "fmaxf(x, __shfl_xor_sync(~0u, x, 1))"],
        LONG,
    ),
    (
        "the last rows of a matrix come first",
        Forward,
        ["ldmatrix_x4(y, from_b + 2 * n * row_bytes", "ldmatrix_x4(y, from_b + 2 * (n ^ 8) * row_bytes"],
        LONG,
    ),
    (
        "neighbours change places",
        Forward,
        ["a_fragments[step + 2 * m], a_fragments[step + 2 * m + 1]", "a_fragments[step + 2 * m + 1], a_fragments[step + 2 * m]"],
        LONG,
    ),
    ("what is behind a row is read", Forward, ["max(0, min(PER, dim - column))", "PER"], NARROW),
    ("what is behind a row that no copy reads is read", Forward, ["max(0, min(PER, dim - column))", "PER"], ODD),
    ("rows behind the last are read", Forward, ["first + row < seq ?", "first + row <= seq ?"], NARROW),
    ("of two elements the second is lost", Forward, ["<< (m * ELEMENT_BYTES % 4 * 8)", "<< 0"], ODD),
    ("an odd row ends a column late", Forward, ["if (column + 1 < dim) store_one(", "if (column < dim) store_one("], ODD),
    ("the lower parts are left out", Forward, ["low = cvt_rna_tf32(x - __uint_as_float(high));", "low = 0;"], SINGLE),
    ("neighbours of a row are those of the next", Forward, ["ld_shared(from + row_bytes + n * 8)", "ld_shared(from + n * 8)"], SINGLE),
    ("the second row keeps what the first does", Forward, ["const int rows[2] = {q, q + 8};", "const int rows[2] = {q, q};"], LONG),
    ("stats in base two are natural", Forward, ["WITH_BASE_TWO ? total.origin * LOG2_E + total.log :", "false ? total.log :"], STATISTICS),
    ("the largest score is not scaled", Forward, ["p.natural ? x : x * p.scale", "p.natural ? x : x"], STATISTICS),
    ("the sink is no score", Forward, ["row.natural_max = fmaxf(row.natural_max, sink);", ""], STATISTICS),
    (
        "rows behind lengths have a largest score",
        Forward,
        ["p.row_max[at] = there ? row_max", "p.row_max[at] = true ? row_max"],
        STATISTICS,
    ),
    ("pages of the first entry for all", Forward, ["p.page_table[long(tile.batch) * p.table_row", "p.page_table[0 * p.table_row"], PAGED),
    ("every token of a page is its first", Forward, ["head, key % p.page_size)", "head, 0)"], PAGED),
    ("rows of the map of another head's", Forward, ["head * p.block_list_head) * p.tiles", "0 * p.block_list_head) * p.tiles"], MAPPED),
    ("steps are not waited for", Backward, ["cp_async_wait_group<1>();", ""], LONG),
    ("both stages are one", Backward, ["steps_at + next * STEP_BYTES", "steps_at + stage * STEP_BYTES"], LONG),
    (
        "keys come before others are done with",
        Backward,
        [
            "warp_gemm_ab(dq, s, k_at, QK_ROW);\n        // Wait until all warps are done with this stage.\n        __syncthreads();",
            "warp_gemm_ab(dq, s, k_at, QK_ROW);",
        ],
        WIDE,
    ),
    (
        "queries come before others are done with",
        Backward,
        [
            "// Wait until all warps are done with this stage.\n        __syncthreads();\n        if (STAGES == 1 && any) load_step(steps_at, p, batch, heads.head",
            "if (STAGES == 1 && any) load_step(steps_at, p, batch, heads.head",
        ],
        WIDE,
    ),
    ("the second query of two has the first's sum", Backward, ["d_p[n + 1], delta.y", "d_p[n + 1], delta.x"], LONG),
    (
        "the second row has the first's stats",
        Backward,
        [
            "float2{row_statistics.lse[fragment_half(n)], row_statistics.lse[fragment_half(n)]}",
            "float2{row_statistics.lse[0], row_statistics.lse[0]}",
        ],
        LONG,
    ),
    ("both parts are the first", Backward, ["part * (DIM_V / COLUMN_PARTS) * ELEMENT_BYTES", "0"], WIDE),
    (
        "one head gives all gradients",
        Backward,
        ["heads.head = kv_head * p.group + heads.head_in_group;", "heads.head = kv_head * p.group;"],
        LONG,
    ),
    (
        "a head walks as the first of its group",
        Backward,
        [
            "heads.iterator = block_iterator(p, range, batch, heads.head, block);",
            "heads.iterator = block_iterator(p, range, batch, kv_head * p.group, block);",
        ],
        MAPPED,
    ),
    ("parts add the same gradient of a parameter", Backward, ["if (part == 0) parameter", "parameter"], ALONG),
    ("warps leave gradients in one place", Backward, ["* 12L + origin.k / 16", "* 12L + 0 * origin.k"], ORDERED),
    ("heads leave gradients in one place", Backward, ["* 4L + origin.head) * 12L", "* 4L) * 12L"], ORDERED),
    ("lanes add what others read", Backward, ["(threadIdx.x & 31) == 1) something", "(threadIdx.x & 31) > 0) something"], ORDERED),
    ("batch entries are left out", Backward, ["(of_batch + term / slots / more_heads) * heads", "of_batch * heads"], ORDERED),
    ("one lane's gradients are the sum", Backward, ["for (int apart = int(lanes) / 2;", "for (int apart = 0;"], ORDERED),
    ("lanes begin with one term", Backward, ["for (long term = thread % lanes;", "for (long term = 0;"], ORDERED),
    ("weights that stay are as they were", Forward, ["inverse_sum[half] *= p.dropout_scale;", ""], DROPPED),
    (
        "weights of other keys are dropped",
        Forward,
        ["tile.batch, tile.head, q, column, [&]", "tile.batch, tile.head, q, first_k, [&]"],
        DROPPED,
    ),
    (
        "dropped weights have gradients",
        Backward,
        ["return dropout_mask >> n & 1 ? d_p * p.dropout_scale : 0.0f;", "return d_p * p.dropout_scale;"],
        DROPPED,
    ),
    ("values have gradients of dropped weights", Backward, ["left[n] = dropout_p(s[n], dropout_mask, n)", "left[n] = s[n]"], DROPPED),
    ("gradients of values are not scaled", Backward, ["WITH_DROPOUT ? p.dropout_scale : 1.0f", "1.0f"], DROPPED),
    ("queries drop as keys do", Backward, ["dropout_of_queries<SCORES>", "dropout_of_keys<SCORES>"], DROPPED),
    ("the sink's gradient has the other sign", Backward, ["sum -= sink_probability(", "sum += sink_probability("], LENGTHS),
    ("warps have the same rows", Backward, ["(block * 8 + warp) * ROWS_OF_WARP", "block * 8 * ROWS_OF_WARP"], EMPTY),
    (
        "rows of every document are the first's",
        Forward,
        ["row_of(from, batch, head, extent.begin + row)", "row_of(from, batch, head, row)"],
        PACKED,
    ),
    ("results of every document go to the first", Forward, ["extent.begin + row + 8 * half", "row + 8 * half"], PACKED),
    ("rows behind a document are its own", Forward, ["WITH_PACKED_Q ? s.len_q : p.seq_q", "p.seq_q"], PACKED),
    ("keys behind a document are its own", Backward, ["WITH_PACKED_KV ? s.len_kv : p.seq_kv", "p.seq_kv"], PACKED),
    ("stats of documents as those of batch entries", Forward, ["(s.begin_q + q) * p.heads_q + head", "(s.begin_q + q) + head"], PACKED),
    ("documents begin a token late", Backward, ["s.begin_q = queries.begin;", "s.begin_q = queries.begin + 1;"], PACKED),
    (
        "outputs of every document are the first's",
        Backward,
        ["row_of(p.o, batch, head, seq_info.begin_q + row)", "row_of(p.o, batch, head, row)"],
        PACKED,
    ),
    ("sinks have gradients of what is between documents", Backward, ["if (row >= rows_q(p, seq_info)) continue;", ""], PACKED),
];

/// Every case of these faults.
pub(super) const CASES: [&str; 14] =
    [LONG, WIDE, ODD, NARROW, SINGLE, MAPPED, LENGTHS, EMPTY, ALONG, STATISTICS, ORDERED, DROPPED, PAGED, PACKED];

#[test]
fn every_fault_is_found_of_mma_sync() {
    all_have_places(&FAULTS, &["* 12L + origin.k / 16", "* 4L + origin.head) * 12L"]);
    if executor().is_none() {
        return;
    }
    all_are_found("cuda-mma-emulated", &FAULTS, &CASES, || executor_on(Emulated::A100, None).unwrap());
}
