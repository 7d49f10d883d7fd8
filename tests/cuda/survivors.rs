//! Problems for faults that survived the other tests. All of them run every day; each fault is one that was once not found, or by one problem in hundreds.

use super::faults::{
    Fault,
    Pass::{Backward, Forward},
    all_are_found, all_have_places,
};
use super::{NAME, executor, mma};

/// Upstream gradients that lie as no other tensor does: no stride of theirs is one of `o`.
const UPSTREAM: &str = r#"
[[case]]
name = "upstream gradients in another layout"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 83, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
layout = "bshd"
stats = true
backward = { d_o = { layout = "bhsd", gap = 8 } }

[[case]]
name = "upstream gradients in another layout, copied"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 83, dim_qk = 64, dim_v = 64 }
dtype = "f16"
layout = "bshd"
stats = true
backward = { d_o = { layout = "sbhd", gap = 3 } }
"#;

/// Queries without keys next to others with many, in tiles whose keys are split.
const SPLIT: &str = r#"
[[case]]
name = "queries without keys in a split tile"
shape = { batch = 1, heads_q = 4, heads_kv = 2, seq_q = 7, seq_kv = 2000, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["parameter:bool,q"]
stats = true
"#;

/// Several tiles of several batch entries, each of them split.
const SPLIT_TILES: &str = r#"
[[case]]
name = "tiles of two entries, all split"
shape = { batch = 2, heads_q = 1, heads_kv = 1, seq_q = 200, seq_kv = 2100, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["causal-bottom-right"]
stats = true
"#;

/// Scores so large and so far apart that row maxima grow past any rescale threshold.
const GROWING: &str = r#"
[[case]]
name = "row maxima that grow by hundreds"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 140, seq_kv = 700, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
attn_scale = 20.0
stats = true
"#;

/// The same for weights in f16, whose largest number is 65,504.
const GROWING_F16: &str = r#"
[[case]]
name = "row maxima that grow past f16"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 140, seq_kv = 700, dim_qk = 64, dim_v = 64 }
dtype = "f16"
attn_scale = 1.0
row_max = true
sum_exp = true
"#;

/// More blocks in a list than the 32 that a CTA classifies at a time, and lists that differ by batch entry.
const LISTS: &str = r#"
[[case]]
name = "lists of more than 32 blocks of queries"
shape = { batch = 6, heads_q = 1, heads_kv = 1, seq_q = 4300, seq_kv = 70, dim_qk = 40, dim_v = 40 }
dtype = "bf16"
mask = ["document"]
stats = true

[[case]]
name = "lists of more than 32 blocks of keys"
shape = { batch = 2, heads_q = 3, heads_kv = 3, seq_q = 70, seq_kv = 4300, dim_qk = 40, dim_v = 40 }
dtype = "bf16"
mask = ["document"]
stats = true
"#;

/// Minima and maxima, in score_mods that are computed in both ways: contracted and exact.
const EXTREMA: &str = r#"
[[case]]
name = "minima and maxima"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 70, seq_kv = 83, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["clamped"]
stats = true
"#;

/// Scales that reverse the order of the scores, without a score_mod that would hold the scale.
const NEGATIVE_SCALE: &str = r#"
[[case]]
name = "a negative scale"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 83, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
attn_scale = -0.2
stats = true
"#;

/// Rows whose statistics are recomputed, the first of a tile among them.
const LARGE_ROWS: &str = r#"
[[case]]
name = "a very high first row of a tile"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 200, seq_kv = 83, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
score_mod = ["very-high-rows"]
stats = true
"#;

const FAULTS: [Fault; 9] = [
    ("dO has the head stride of o", Backward, ["p.d_o_batch, p.d_o_head, p.d_o_row", "p.d_o_batch, p.o_head, p.d_o_row"], UPSTREAM),
    ("a row without keys has no maximum to subtract", Forward, ["if (row_max.log == -INFINITE) row_max.log = 0.0f;", ""], SPLIT),
    (
        "splits are found with another entry's tile",
        Forward,
        ["p.first_items[mine * p.tiles + tile]", "p.first_items[mine + tile]"],
        SPLIT_TILES,
    ),
    ("sums are rescaled too late for f32", Forward, ["RESCALE_THRESHOLD = 8.0f", "RESCALE_THRESHOLD = 1.0e30f"], GROWING),
    ("a list repeats its first 32 blocks", Backward, ["range.begin + from + warp", "range.begin + warp"], LISTS),
    (
        "lists are those of another batch entry",
        Backward,
        ["block_iterator(p, range, tile.batch, head", "block_iterator(p, range, tile.head, head"],
        LISTS,
    ),
    (
        "a negative scale is added to the unit",
        Backward,
        [
            "p.softmax_scale_log2 : p.softmax_scale_log2 * p.scale;\nUNROLL_TRACES",
            "p.softmax_scale_log2 : p.softmax_scale_log2 + p.scale;\nUNROLL_TRACES",
        ],
        NEGATIVE_SCALE,
    ),
    (
        "the first row of a tile keeps its rounded statistic",
        Backward,
        ["if (lane == at && log2_sums)", "if (lane + 1 == at && log2_sums)"],
        LARGE_ROWS,
    ),
    ("sums are rescaled too late for f16", Forward, ["RESCALE_THRESHOLD = 8.0f", "RESCALE_THRESHOLD = 20.0f"], GROWING_F16),
];

/// Every case of these faults.
pub(super) const CASES: [&str; 9] = [UPSTREAM, SPLIT, SPLIT_TILES, GROWING, GROWING_F16, LISTS, EXTREMA, NEGATIVE_SCALE, LARGE_ROWS];

#[test]
fn faults_that_survived_are_found() {
    all_have_places(&FAULTS, &[]);
    if executor().is_some() {
        all_are_found(&format!("{NAME}, survivors"), &FAULTS, &CASES, || executor().unwrap());
    }
    if mma::executor().is_some() {
        all_are_found(&format!("{}, survivors", mma::NAME), &[], &CASES, || mma::executor().unwrap());
    }
}
