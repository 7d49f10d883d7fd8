//! Faults of what lies in registers over a walk, of sums that are scaled where scores grow by much, and of gradients of scores that wait for a step.

use super::NAME;
use super::faults::{
    Fault, LONG,
    Pass::{Backward, Forward},
    WIDE, all_are_found, all_have_places,
};

/// Scores that grow by much from block to block, in some rows.
const GROWING: &str = r#"
[[case]]
name = "scores that grow"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 200, seq_kv = 900, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
attn_scale = 0.8
row_max = true
sum_exp = true
stats = true

[[case]]
name = "scores that grow, of heads of 128"
shape = { batch = 1, heads_q = 1, heads_kv = 1, seq_q = 150, seq_kv = 700, dim_qk = 128, dim_v = 128 }
dtype = "f16"
attn_scale = 0.5
mask = ["causal-bottom-right"]
row_max = true
sum_exp = true
"#;

/// So many keys that a block has more of them, and queries lie in registers.
const LONGER: &str = r#"
[[case]]
name = "long walks"
shape = { batch = 1, heads_q = 5, heads_kv = 1, seq_q = 100, seq_kv = 8200, dim_qk = 128, dim_v = 72 }
dtype = "bf16"
mask = ["causal-bottom-right"]
row_max = true
"#;

const FAULTS: [Fault; 16] = [
    ("sums of the second row weigh as the first's", Forward, ["o[m] *= rescale[fragment_half(m)];", "o[m] *= rescale[0];"], GROWING),
    ("sums stay as they are where scores grow", Forward, ["__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)", "false"], GROWING),
    ("sums of weights stay as they are", Forward, ["state.row_sum[half] * rescale[half] + sum", "state.row_sum[half] + sum"], GROWING),
    (
        "weights are next to what is no longer",
        Forward,
        ["state.reference[half] = from;", "if (before == -INFINITE) state.reference[half] = from;"],
        GROWING,
    ),
    (
        "weights are next to the largest score of the block",
        Forward,
        ["const float from = larger ? row_max : before;", "const float from = row_max;"],
        GROWING,
    ),
    ("sums of exponentials are next to what weights are", Forward, ["row.sum * ex2_approx(-row.above)", "row.sum"], GROWING),
    (
        "queries in registers are of another warp",
        Forward,
        ["(rows, (threadIdx.x >> 5 & 3) * 16", "(rows, (threadIdx.x >> 5 & 2) * 16"],
        LONGER,
    ),
    ("a column of queries in registers is another", Forward, ["(at ^ (step & 3) << 5)", "(at ^ (step & 1) << 5)"], LONGER),
    (
        "gradients of scores are read before both groups wrote",
        Backward,
        ["mbarrier_wait_parity(smem.d_s_full + 8 * before, step_state.phase ^ before);", ""],
        LONG,
    ),
    (
        "gradients of scores are written over before both groups read them",
        Backward,
        ["if (sub == 0) mbarrier_wait_parity(smem.d_s_empty + 8 * step_state.stage, step_state.phase ^ 1);", ""],
        LONG,
    ),
    ("gradients of scores have one place", Backward, ["smem.d_s + step_state.stage * D_S_BYTES", "smem.d_s"], LONG),
    (
        "gradients of queries are of this step's scores",
        Backward,
        ["smem.d_s + before * D_S_BYTES", "smem.d_s + step_state.stage * D_S_BYTES"],
        LONG,
    ),
    (
        "the matrix units are not told of what was written",
        Backward,
        [
            "fence_proxy_async();\n                        __syncwarp();\n                        if (lane",
            "__syncwarp();\n                        if (lane",
        ],
        LONG,
    ),
    ("rows in registers are of another warp", Backward, ["(rows, (threadIdx.x >> 5 & 3) * 16", "(rows, (threadIdx.x >> 5 & 2) * 16"], LONG),
    ("a column in registers is another", Backward, ["(at ^ (step & 3) << 5)", "(at ^ (step & 1) << 5)"], LONG),
    (
        "sums of wide heads go to this step's place",
        Backward,
        [
            "values();\n                        gemm_dq_previous",
            "place = dq_slice(p, seq_info, tile, step.head, step.queries, slice);\n                        values();\n                        gemm_dq_previous",
        ],
        WIDE,
    ),
];

/// Every case of these faults.
pub(super) const CASES: [&str; 4] = [GROWING, LONGER, LONG, WIDE];

#[test]
fn every_fault_of_what_waits_is_found() {
    all_have_places(&FAULTS, &[]);
    if super::executor().is_none() {
        return;
    }
    all_are_found(&format!("{NAME}, what waits"), &FAULTS, &CASES, || conformance::emulated::executor().unwrap());
}
