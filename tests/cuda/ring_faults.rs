//! Faults of what becomes of sums beside the walks of a backward pass, and of blocks of threads that take block after block.

use super::NAME;
use super::faults::{Fault, Pass::Backward, all_are_found, all_have_places};

/// More key heads than have a place for their sums at once.
const RINGS: &str = r#"
[[case]]
name = "many heads"
shape = { batch = 2, heads_q = 16, heads_kv = 16, seq_q = 100, seq_kv = 90, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
stats = true

[[case]]
name = "many heads, groups of columns"
shape = { batch = 1, heads_q = 30, heads_kv = 15, seq_q = 150, seq_kv = 140, dim_qk = 128, dim_v = 96 }
dtype = "f16"
stats = true

[[case]]
name = "many heads of documents"
shape = { batch = 3, heads_q = 14, heads_kv = 14, seq_q = 70, seq_kv = 70, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
layout = "bshd"
stats = true
packed = { lengths_q = [65, 0, 31], before = 2, slack = 3 }
"#;

/// Heads that are wider than 128 columns, of documents without queries beside such as have some: their keys get zeros while the next ones' come.
const WIDE: &str = r#"
[[case]]
name = "wide heads of documents without queries"
shape = { batch = 6, heads_q = 4, heads_kv = 4, seq_q = 65, seq_kv = 116, dim_qk = 200, dim_v = 200 }
dtype = "f16"
layout = "bshd"
stats = true
packed = { lengths_q = [40, 0, 65, 0, 0, 31], lengths_kv = [90, 116, 30, 116, 100, 60], before = 2, slack = 3 }
"#;

const FAULTS: [Fault; 19] = [
    (
        "the next keys come to where zeros are",
        Backward,
        ["mbarrier_arrive(smem.kv_full);\n        kv_phase ^= 1;\n    }\n}", "mbarrier_arrive(smem.kv_full);\n    }\n}"],
        WIDE,
    ),
    ("a half of the rows is not scaled", Backward, ["scales[2] = {p.scale, p.scale}", "scales[2] = {p.scale, 1.0f}"], RINGS),
    (
        "rounded rows are stored over one another",
        Backward,
        ["ROW_BYTES + ((lane >> 4 ^ (lane & 7)) << 4);\n    from", "ROW_BYTES + ((lane & 7) << 4);\n    from"],
        RINGS,
    ),
    (
        "a place is told free while gradients of values are there",
        Backward,
        [
            "named_barrier_sync(BARRIER_DQ_FULL + warpgroup, 160);\n    }\n}",
            "named_barrier_arrive(BARRIER_DQ_FULL + warpgroup, 160);\n    }\n}",
        ],
        RINGS,
    ),
    (
        "gradients leave from where the last block's still are",
        Backward,
        ["if (lane == 0) cp_async_bulk_wait_group_read();\n        __syncwarp();\n        // Each consumer", "// Each consumer"],
        RINGS,
    ),
    (
        "gradients of values leave while sums do",
        Backward,
        [
            "named_barrier_sync(BARRIER_DQ_EMPTY + warpgroup, 160);\n        if (complete)",
            "named_barrier_arrive(BARRIER_DQ_EMPTY + warpgroup, 160);\n        if (complete)",
        ],
        RINGS,
    ),
    (
        "keys come before those of a block are done with",
        Backward,
        ["mbarrier_wait_parity(smem.kv_empty, kv_phase ^ 1);\n                mbarrier_arrive_expect_tx", "mbarrier_arrive_expect_tx"],
        RINGS,
    ),
    (
        "one number is read where another is told",
        Backward,
        ["mbarrier_wait_parity(tile_pipeline.empty(smem), tile_pipeline.phase() ^ 1);", ""],
        RINGS,
    ),
    (
        "a block is done before its sums are there",
        Backward,
        ["cp_async_bulk_wait_group();\n            counter_release_add(p.blocks_done", "counter_release_add(p.blocks_done"],
        RINGS,
    ),
    (
        "sums are rounded before they are done",
        Backward,
        ["if (first) counter_acquire_wait(p.blocks_done + slices.section, section_tiles(p, slices.section));", ""],
        RINGS,
    ),
    (
        "sums are added to what has not left",
        Backward,
        [
            "counter_acquire_wait(p.slices_converted + tile.section - p.ring_sections, section_slices(p, tile.section - p.ring_sections));",
            ";",
        ],
        RINGS,
    ),
    (
        "sums of a section before are not cleared",
        Backward,
        ["if (reused) cp_async_bulk_store(slice.sums + n * DQ_PIECE, smem.zeros, DQ_PIECE_BYTES);", ""],
        RINGS,
    ),
    (
        "sums have left before that is done",
        Backward,
        ["cp_async_bulk_wait_group();\n        counter_release_add(p.slices_converted", "counter_release_add(p.slices_converted"],
        RINGS,
    ),
    ("pieces are not waited for", Backward, ["mbarrier_wait_parity(full + 8 * (n & 1), n >> 1);", ""], RINGS),
    (
        "rounded rows are written over before they have left",
        Backward,
        [
            "if (first) cp_async_bulk_wait_group_read<1>();\n            __syncwarp();\n            float scales",
            "__syncwarp();\n            float scales",
        ],
        RINGS,
    ),
    (
        "the copy engine is not told of rounded rows",
        Backward,
        ["fence_proxy_async();\n            __syncwarp();\n            if (!first)", "__syncwarp();\n            if (!first)"],
        RINGS,
    ),
    (
        "the last section does not leave",
        Backward,
        ["p.sections + beyond / p.conversion_items, section", "p.sections - 1 + beyond / p.conversion_items, section"],
        RINGS,
    ),
    (
        "key heads of a section have one place",
        Backward,
        [
            "section % p.ring_sections * p.section_heads + unit : 0;\n    return Tile",
            "section % p.ring_sections * p.section_heads : 0;\n    return Tile",
        ],
        RINGS,
    ),
    (
        "zeros are not told to the copy engine",
        Backward,
        ["0.0f, 0.0f, 0.0f, 0.0f);\n        fence_proxy_async();", "0.0f, 0.0f, 0.0f, 0.0f);"],
        RINGS,
    ),
];

/// Every case of these faults.
pub(super) const CASES: [&str; 2] = [RINGS, WIDE];

#[test]
fn every_fault_of_sums_is_found() {
    all_have_places(&FAULTS, &[]);
    if super::executor().is_none() {
        return;
    }
    all_are_found(&format!("{NAME}, rings"), &FAULTS, &CASES, || conformance::emulated::executor().unwrap());
}
