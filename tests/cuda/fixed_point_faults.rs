//! Faults of fixed-point sums of dQ: a test of gradients or a random problem has to find each.

use super::deterministic::{
    NAME, masked_out_keys_may_have_any_size, small_rows_beside_large_ones_keep_their_digits, sums_may_be_as_large_as_their_bound, wgmma,
    what_is_no_number_stays_none,
};
use super::faults::all_have_places_of;
use conformance::Case;
use conformance::emulated::faulty;
use conformance::random::Random;
use conformance::runner::{Draw, Outcome, Source, fixed_point_problems, run_backward, run_backward_case, side_by_side};
use conformance::say::say;
use conformance::share::{DAYS, of_today};
use std::panic::catch_unwind;
use std::sync::Mutex;

/// A description of the fault, the text that it replaces in a kernel, and the replacement.
type Fault = (&'static str, [&'static str; 2]);

/// A part of generated code, which is in no file.
const PLACE_OF_HEAD: &str = "L + origin.head) * ";

const FAULTS: [Fault; 24] = [
    ("parts of any size are rounded by an addition", ["!rounds_right(sums, scales)", "false"]),
    ("converted parts lack the offset", [") + INTEGER_OFFSET_BITS;", ");"]),
    ("the offset of one part is subtracted", ["uint(__ldcg(p.dq_parts + query_tile)) * INTEGER_OFFSET_BITS", "INTEGER_OFFSET_BITS"]),
    ("both slices count a part", ["if (warpgroup == 0) atomicAdd(p.dq_parts", "atomicAdd(p.dq_parts"]),
    (
        "rounded parts of the second query have the first one's scale",
        ["fragment_half(n) ? scales.y : scales.x, INTEGER_OFFSET", "scales.x, INTEGER_OFFSET"],
    ),
    (
        "converted parts of the second query have the first one's scale",
        ["sums[n] * (fragment_half(n) ? scales.y : scales.x)", "sums[n] * scales.x"],
    ),
    ("parts that are no numbers leave no mark", ["stored[fragment_row(n)] = NOT_A_NUMBER, marked = true", "marked = true"]),
    ("the mark is the other query's", ["stored[fragment_row(n)] = NOT_A_NUMBER", "stored[8 - fragment_row(n)] = NOT_A_NUMBER"]),
    (
        "rounded parts are copied without a fence of the async proxy",
        ["rounded_dq(sums, n, scales)); });\n    fence_proxy_async();\n", "rounded_dq(sums, n, scales)); });\n"],
    ),
    (
        "converted parts are copied without a fence of the async proxy",
        ["__uint_as_float(parts[n]); });\n        fence_proxy_async();\n", "__uint_as_float(parts[n]); });\n"],
    ),
    ("infinities of keys count for the bound", ["larger_half(largest_pair) >= exponent_bits(Element{})", "false"]),
    (
        "masked-out keys count for the bound",
        ["return keep(place_at(p, batch, kv_head * p.group, 0, key, 0, 0), captured);", "return true;"],
    ),
    ("KV blocks that no query reads count for the bound", ["if (!BATCH_INVARIANT && !is_read(", "if (false && !is_read("]),
    ("keys that no query reaches count for the bound", ["if (!BATCH_INVARIANT && queries.begin >= queries.end) return false;", ""]),
    ("the elements of the second query are not checked", [" && second * (scales.y * scales.y) < INTEGER_LIMIT * INTEGER_LIMIT", ""]),
    ("the scales stay those of the first step", ["if (SCALES_AHEAD) scales", "if (SCALES_AHEAD && !has_previous) scales"]),
    ("narrow heads: the scales are those of this step", ["(scale_stage(step_state) + 3) & 3", "scale_stage(step_state)"]),
    ("wide heads: parts of any size are rounded by an addition", ["__builtin_expect(rounds_right(sums, scales), 1)", "true"]),
    (
        "wide heads: every slice counts a part",
        ["if (slice == 0 && (threadIdx.x & 127) == 0) atomicAdd(p.dq_parts", "if ((threadIdx.x & 127) == 0) atomicAdd(p.dq_parts"],
    ),
    ("heads add gradients of parameters in one place", [PLACE_OF_HEAD, "L) * "]),
    ("a lane leaves out its last partial sum", ["term < terms; term += lanes", "term + lanes < terms; term += lanes"]),
    ("both column parts add gradients of parameters", ["COLUMN_PARTS == 1 || tile.part == 0", "true"]),
    ("the gradients of all shares lie in one place", ["FIXED_POINT_DQ ? tile.head_split * each : 0", "0"]),
    ("the gradients of a share are left out", ["for (int split = 1; split < sum.splits", "for (int split = 2; split < sum.splits"]),
];

/// Returns the first error of the tests and of random problems.
fn error() -> Option<String> {
    let tests: [(&str, fn()); 4] = [
        ("masked-out keys", masked_out_keys_may_have_any_size),
        ("sums as large as their bound", sums_may_be_as_large_as_their_bound),
        ("what is no number", what_is_no_number_stays_none),
        ("small rows beside large ones", small_rows_beside_large_ones_keep_their_digits),
    ];
    let failed = tests.iter().find_map(|(what, test)| {
        let panic = catch_unwind(test).err()?;
        Some(format!("{what}: {}", panic.downcast_ref::<String>().map_or("", |text| text)))
    });
    failed.or_else(|| {
        let executor = wgmma()?;
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed: 3 };
        let wrong = |outcome| match outcome {
            Outcome::Fail(how) => Some(how),
            Outcome::Pass(..) | Outcome::Skip(_) => None,
        };
        // One case with each set of parameters.
        let parameters = Case::ordered_parameters().unwrap().into_iter().step_by(7);
        let mut problems = fixed_point_problems(&mut Random::new(3)).into_iter();
        let found = problems.find_map(|(_, spec)| wrong(run_backward(&spec, &draw, Source::ALL[0], &executor)));
        found.or_else(|| parameters.into_iter().find_map(|case| wrong(run_backward_case(&case, Source::Oracle, &executor))))
    })
}

#[test]
fn every_fault_is_found() {
    all_have_places_of(FAULTS.iter().map(|fault| (fault.0, fault.1[0])).filter(|(_, text)| *text != PLACE_OF_HEAD));
    if wgmma().is_none() {
        return;
    }
    assert_eq!(error(), None);
    let missed = Mutex::new(Vec::new());
    let faults = of_today(&format!("faults {NAME}"), 2 * DAYS, FAULTS.to_vec(), |(what, _)| vec![(*what).to_owned()]);
    side_by_side(&faults, |(what, fault)| {
        let how = faulty(*fault, error);
        println!("fault: {what}; {}", how.as_deref().map_or("nothing finds it".into(), |how| how.chars().take(200).collect::<String>()));
        if how.is_none_or(|how| how.contains("error: ")) {
            missed.lock().unwrap().push(*what);
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found, or not compiled: {missed:?}");
    say(&format!("faults {NAME}: all of {} found", faults.len()));
}
