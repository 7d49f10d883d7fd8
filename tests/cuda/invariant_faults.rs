//! Faults of splits of fixed size: a comparison of bits or a result has to find each.

use super::faults::{ORDERS, all_have_places_of};
use super::invariant::{NAME, executor};
use conformance::case::Case;
use conformance::emulated::faulty;
use conformance::invariance::{Features, compare};
use conformance::runner::{Outcome, run_case, side_by_side};
use conformance::say::say;
use conformance::share::{DAYS, of_today};
use sdpa::DType;
use sdpa::cuda::CudaExecutor;
use std::sync::Mutex;

const FEATURES: Features = Features {
    dtype: DType::BF16,
    heads: [2, 2],
    dims: [64, 64],
    score_mods: &[],
    masks: &["window:2600,0:ends"],
    sink: true,
    lengths: &[[1, 4700], [70, 6300]],
    from_the_end: true,
    gradients: false,
    batch_invariant: true,
};

/// Tiles of 128 queries and few queries, with scores that grow from block to block. In the last case, row maxima of splits differ so much that only
/// exponentials relative to the largest one are finite.
const CASES: &str = r#"
[[case]]
name = "all splits of a tile"
shape = { batch = 3, heads_q = 2, heads_kv = 2, seq_q = 300, seq_kv = 4300, dim_qk = 64, dim_v = 128 }
dtype = "bf16"
attn_scale = 0.6
stats = true
row_max = true
sum_exp = true
batch_invariant = true

[[case]]
name = "splits of a few queries"
shape = { batch = 1, heads_q = 4, heads_kv = 2, seq_q = 3, seq_kv = 6300, dim_qk = 64, dim_v = 128 }
dtype = "f16"
attn_scale = 0.6
sink = true
stats = true
row_max = true
sum_exp = true
batch_invariant = true

[[case]]
name = "splits whose maxima differ by much"
shape = { batch = 3, heads_q = 2, heads_kv = 2, seq_q = 300, seq_kv = 4300, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
attn_scale = 40.0
stats = true
batch_invariant = true
"#;

/// A description of the fault, the text that it replaces in a kernel, and the replacement.
type Fault = (&'static str, [&'static str; 2]);

const FAULTS: [Fault; 19] = [
    ("splits count from the first key", ["(r.begin / FIXED_SPLIT + tile.split) * FIXED_SPLIT", "tile.split * FIXED_SPLIT"]),
    (
        "splits begin where the tile's blocks begin",
        ["(r.begin / FIXED_SPLIT + tile.split) * FIXED_SPLIT", "r.begin + tile.split * FIXED_SPLIT"],
    ),
    (
        "a tile has the fewest splits",
        ["(r.end - 1) / FIXED_SPLIT - r.begin / FIXED_SPLIT + 1", "(r.end - r.begin + FIXED_SPLIT - 1) / FIXED_SPLIT"],
    ),
    (
        "weights of O are swapped",
        [
            "float both = __fmaf_rn(merge.before, before, __fmul_rn(merge.next, next))",
            "float both = __fmaf_rn(merge.next, before, __fmul_rn(merge.before, next))",
        ],
    ),
    (
        "the sum before has no weight",
        ["__fmaf_rn(merge.before, row.sum, __fmul_rn(merge.next, next.sum))", "__fmaf_rn(1.0f, row.sum, __fmul_rn(merge.next, next.sum))"],
    ),
    ("the maximum is the last split's", ["fmaxf(row.row_max, next.row_max)", "next.row_max"]),
    ("sums are relative to the last split", ["reference = fmaxf(row.reference, next.reference)", "reference = next.reference"]),
    ("a split before the last has the sum of one thread", ["                    finish_split(state);\n", ""]),
    ("the softmax does not begin anew", ["                    state = empty_softmax();\n", ""]),
    ("only two splits are merged", ["                    merges = true;\n", "                    merges = split > 0;\n"]),
    ("O is stored before it is complete", ["                    wgmma_wait_group<0>();\n", ""]),
    (
        "the result of a split takes the memory of an output that TMA reads",
        ["                    if (lane == 0) cp_async_bulk_wait_group_read();\n                    __syncwarp();\n", ""],
    ),
    ("the maximum of a split is scaled twice", ["            natural_max[half] = state.row_max[half];\n", ""]),
    ("O of a split is normalised", ["inverse_sum[half] = total.sum == 0.0f ? 0.0f : 1.0f;", "inverse_sum[half] = total.inverse_sum;"]),
    (
        "splits are merged from the first to the last",
        [
            "for (int split = splits - 1; split >= 0 && q < seq_info.len_q; split--)",
            "for (int split = 0; split < splits && q < seq_info.len_q; split++)",
        ],
    ),
    ("merged splits have no sink", ["    add_sink(total, p.sink[head]);\n", ""]),
    ("the second panel of O is the first", ["p.split_o + at * DIM_V + 64 * n + 2 * lane", "p.split_o + at * DIM_V + 2 * lane"]),
    ("two rows share their sums", ["(thread_row(threadIdx.x & 31) + 8 * half) * 12", "thread_row(threadIdx.x & 31) * 12"]),
    ("panels of O share memory", ["n / 16 * (CTA_ROWS * 128) + n % 16 * 128", "n % 16 * 128"]),
];

/// Returns the first error of the comparison and the cases.
fn error(executor: &CudaExecutor) -> Option<String> {
    let wrong = |case: &Case| match run_case(case, executor) {
        Outcome::Fail(how) | Outcome::Skip(how) => Some(how),
        Outcome::Pass(..) => None,
    };
    Case::parse(CASES).unwrap().iter().find_map(wrong).or_else(|| compare(executor, &FEATURES).err())
}

#[test]
fn every_fault_is_found() {
    all_have_places_of(FAULTS.iter().map(|fault| (fault.0, fault.1[0])));
    let Some(right) = executor() else { return };
    assert_eq!(error(&right), None);
    let missed = Mutex::new(Vec::new());
    let faults = of_today(&format!("faults {NAME}"), 2 * DAYS, FAULTS.to_vec(), |(what, _)| vec![(*what).to_owned()]);
    side_by_side(&faults, |(what, fault)| {
        let how = faulty(*fault, || {
            let executor = executor().unwrap();
            (0..ORDERS).find_map(|_| error(&executor))
        });
        println!("fault: {what}; {}", how.as_deref().map_or("nothing finds it".into(), |how| how.chars().take(200).collect::<String>()));
        if how.is_none_or(|how| how.contains("error: ")) {
            missed.lock().unwrap().push(*what);
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found, or not compiled: {missed:?}");
    say(&format!("faults {NAME}: all of {} found", faults.len()));
}
