//! Faults of blocks of threads that run as pairs: what they exchange, and what their groups do.

use super::NAME;
use super::faults::{Fault, Pass::Backward, all_are_found, all_have_places};

/// Wide heads: several steps, a mask, heads that share keys.
const PAIRS: &str = r#"
[[case]]
name = "pairs"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 300, seq_kv = 290, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "pairs, narrower values"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 420, seq_kv = 330, dim_qk = 192, dim_v = 128 }
dtype = "f16"
stats = true
"#;

/// Blocks of threads that share the heads of a group.
const SHARES: &str = r#"
[[case]]
name = "pairs that share heads"
shape = { batch = 1, heads_q = 6, heads_kv = 1, seq_q = 260, seq_kv = 110, dim_qk = 200, dim_v = 256 }
dtype = "f16"
stats = true
"#;

/// Launches enough for what only some turns show.
const MANY: &str = r#"
[[case]]
name = "many pairs, 1"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 300, seq_kv = 290, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "many pairs, 2"
shape = { batch = 1, heads_q = 1, heads_kv = 1, seq_q = 90, seq_kv = 250, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "many pairs, 3"
shape = { batch = 1, heads_q = 3, heads_kv = 3, seq_q = 150, seq_kv = 210, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "many pairs, 4"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 70, seq_kv = 300, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "many pairs, 5"
shape = { batch = 1, heads_q = 4, heads_kv = 4, seq_q = 40, seq_kv = 130, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "many pairs, 6"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 210, seq_kv = 140, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "many pairs, 7"
shape = { batch = 1, heads_q = 1, heads_kv = 1, seq_q = 300, seq_kv = 400, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true

[[case]]
name = "many pairs, 8"
shape = { batch = 1, heads_q = 3, heads_kv = 3, seq_q = 60, seq_kv = 190, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
stats = true
"#;

/// Documents that end within the first half of a block of keys.
const ENDING: &str = r#"
[[case]]
name = "documents of pairs"
shape = { batch = 4, heads_q = 2, heads_kv = 1, seq_q = 200, seq_kv = 200, dim_qk = 256, dim_v = 136 }
dtype = "bf16"
layout = "bshd"
mask = ["causal"]
stats = true
packed = { lengths_q = [20, 130, 0, 200], before = 2, slack = 3 }
"#;

const FAULTS: [Fault; 28] = [
    (
        "gradients of scores of the other block are not waited for",
        Backward,
        ["mbarrier_wait_parity(ctx.smem.d_s_full + 8 * before, step_state.phase ^ before);", ""],
        PAIRS,
    ),
    (
        "gradients of scores are written over before both blocks read them",
        Backward,
        ["mbarrier_wait_parity(ctx.smem.d_s_empty + 8 * step_state.stage, step_state.phase ^ 1);", ""],
        PAIRS,
    ),
    ("the other block is not told what was read", Backward, ["mbarrier_arrive_peer(barrier, tile.part ^ 1);", ""], PAIRS),
    (
        "engines are not told of gradients of scores",
        Backward,
        ["fence_proxy_async();\n    __syncwarp();\n    if (ctx.lane", "__syncwarp();\n    if (ctx.lane"],
        PAIRS,
    ),
    (
        "gradients of scores go to the own block's place",
        Backward,
        ["step_state.stage * D_S_BYTES + tile.part * KV_PANEL_BYTES", "step_state.stage * D_S_BYTES"],
        PAIRS,
    ),
    (
        "gradients of scores have one place",
        Backward,
        ["const uint d_s = ctx.smem.d_s + before * D_S_BYTES;", "const uint d_s = ctx.smem.d_s;"],
        PAIRS,
    ),
    (
        "weights are read before they are there",
        Backward,
        ["mbarrier_wait_parity(smem.p_full + 8 * ctx.warp, step_state.stage);", ""],
        PAIRS,
    ),
    (
        "weights are written over before they are read",
        Backward,
        ["mbarrier_wait_parity(smem.p_empty + 8 * ctx.warp, step_state.stage ^ 1);", ""],
        PAIRS,
    ),
    (
        "weights are those of other queries",
        Backward,
        ["ld_shared_v4_f32(ctx.p_slot() + n * 512)", "ld_shared_v4_f32(ctx.p_slot() + (n ^ 4) * 512)"],
        PAIRS,
    ),
    ("keys of the other block are of this one's columns alone", Backward, ["tile.part * QK_PANELS / 2);", "0);"], PAIRS),
    (
        "the other's gradients of scores are beside this one's keys",
        Backward,
        [
            "descriptor_advance(other, step * 16 * ROW_BYTES), descriptor_advance(k_other,",
            "descriptor_advance(other, step * 16 * ROW_BYTES), descriptor_advance(k_own,",
        ],
        PAIRS,
    ),
    ("both blocks have the first keys", Backward, ["own = tile.block * 2 + tile.part,", "own = tile.block * 2,"], PAIRS),
    (
        "scores stand at the first block's keys",
        Backward,
        ["tile.block * TILE_N + tile.part * KEYS + warp", "tile.block * TILE_N + warp"],
        PAIRS,
    ),
    (
        "both blocks bring the first half of the panels",
        Backward,
        ["panel = tile.part * panels / 2; panel < (tile.part + 1) * panels / 2", "panel = 0; panel < panels / 2"],
        PAIRS,
    ),
    (
        "queries come before both blocks are done with others",
        Backward,
        ["mbarrier_wait_parity(smem.q_empty + 8 * pipeline.stage, pipeline.phase ^ 1);", ""],
        PAIRS,
    ),
    (
        "gradients of outputs come before both blocks are done with others",
        Backward,
        ["mbarrier_wait_parity(smem.d_o_empty + 8 * pipeline.stage, pipeline.phase ^ 1);", ""],
        PAIRS,
    ),
    (
        "gradients of outputs are not waited for",
        Backward,
        [
            "mbarrier_wait_parity(smem.d_o_full + 8 * step_state.d_o_stage(), step_state.d_o_phase());\n        gemm_s_dp<V_STEPS>",
            "gemm_s_dp<V_STEPS>",
        ],
        PAIRS,
    ),
    (
        "gradients of weights are read while they are computed",
        Backward,
        ["wgmma_wait_group<0>();\n        wgmma_fence_operand(d_p);", "wgmma_fence_operand(d_p);"],
        PAIRS,
    ),
    (
        "scores are read while they are computed",
        Backward,
        ["wgmma_wait_group<0>();\n        wgmma_fence_operand(s);", "wgmma_fence_operand(s);"],
        PAIRS,
    ),
    (
        "sums go to this step's place",
        Backward,
        [
            "add_dq(dq, place, scales, ctx);\n        } else {\n            gemm_dk_dv(dv",
            "add_dq(dq, ctx.place(step), scales, ctx);\n        } else {\n            gemm_dk_dv(dv",
        ],
        PAIRS,
    ),
    ("groups add to one slice", Backward, ["step.queries, tile.part * 2 + warpgroup)", "step.queries, tile.part * 2)"], PAIRS),
    (
        "gradients leave from keys that are read",
        Backward,
        ["// Wait until both consumers are done with K and V.\n    warpgroups_sync<warpgroup>(0);", ""],
        PAIRS,
    ),
    ("a barrier is come to again before all have left it", Backward, ["warpgroups_sync(1);", "warpgroups_sync(0);"], SHARES),
    (
        "no group waits for the other",
        Backward,
        [
            "named_barrier_arrive(BARRIER_WARPGROUPS + 2 * time + (warpgroup ^ 1), 256);\n    named_barrier_sync(BARRIER_WARPGROUPS + 2 * time + warpgroup, 256);",
            "named_barrier_sync(BARRIER_WARPGROUPS + 2 * time + warpgroup, 128);",
        ],
        SHARES,
    ),
    (
        "one block alone is told what is next",
        Backward,
        [
            "for (uint other = 0; other < 2; other++) st_mbarrier_arrive_release_cluster",
            "for (uint other = 0; other < 1; other++) st_mbarrier_arrive_release_cluster",
        ],
        SHARES,
    ),
    (
        "a block ends while the other arrives at its barriers",
        Backward,
        ["copies and arrivals to it are done.\n    cluster_sync();", ""],
        MANY,
    ),
    ("groups add their shares to one place", Backward, ["ctx.tile, warpgroup * 128 * DV, 128", "ctx.tile, 0, 128"], SHARES),
    (
        "keys behind a document's end are asked for",
        Backward,
        ["TWO_CTA && block * rows >= seq_info.len_kv ? 0 : tensor_panels", "tensor_panels"],
        ENDING,
    ),
];

/// Every case of these faults.
pub(super) const CASES: [&str; 4] = [PAIRS, SHARES, MANY, ENDING];

#[test]
fn every_fault_of_pairs_is_found() {
    all_have_places(&FAULTS, &[]);
    if super::executor().is_none() {
        return;
    }
    all_are_found(&format!("{NAME}, pairs"), &FAULTS, &CASES, || conformance::emulated::executor().unwrap());
}
