//! Faults that are put into kernels: something has to find each.

use super::{NAME, boundaries, emulation, large, pages, side_by_side, sink, statistics};
use conformance::case::Case;
use conformance::msl::mutations::{
    BACKWARD, BOUNDARIES, CUT, CUT_PARTS, CUT_VECTOR, DROPOUT, DROPOUT_BACKWARD, EDGES, ENDS, FORWARD, LARGE, LARGE_PARTS, LARGE_SINK,
    LARGE_TILED, LARGE_VECTOR, LONG, Mutation, ODD, ODD_SCORES, ODD_VECTOR, PACKED, PACKED_BACKWARD, PACKED_FORWARD, PACKED_PARTS,
    PACKED_TILED, PACKED_TILED_BACKWARD, PACKED_VECTOR, PACKED_VECTOR_BACKWARD, PAGES, PARAMETER, PARTS, PAST, SCALES, SINK, SINK_GRADIENT,
    SINK_PARTS, SINK_VECTOR, STATISTICS, STATISTICS_ODD, STATISTICS_PARTS, STATISTICS_TILED, STATISTICS_VECTOR, TABLES, VECTOR,
    VECTOR_BACKWARD,
};
use conformance::msl::{Check, Emulated, Toolchain};
use conformance::runner::{Drops, Outcome, Source, dropped, rounding, run_backward_case, run_case};
use conformance::say::say;
use conformance::share::{DAYS, of_today};
use metal_fallback::Kernels;
use std::sync::Mutex;

/// Two key heads with two query heads each; rows without keys, lengths, a tensor, dims off the fragments.
pub(super) const SMALL: &str = r#"
[[case]]
name = "rows without keys"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 41, dim_qk = 20, dim_v = 44 }
dtype = "f32"
mask = ["causal-bottom-right"]
score_mod = ["bias:hqk", "softcap:5"]
stats = true

[[case]]
name = "lengths"
shape = { batch = 6, heads_q = 4, heads_kv = 2, seq_q = 97, seq_kv = 70, dim_qk = 32, dim_v = 32 }
dtype = "f16"
mask = ["padding"]
stats = true
"#;

/// Keys for every simdgroup, twice for some; more than one batch of queries for a key.
pub(super) const FEW: &str = r#"
[[case]]
name = "few queries"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 3, seq_kv = 300, dim_qk = 20, dim_v = 44 }
dtype = "f32"
mask = ["causal-bottom-right"]
score_mod = ["bias:hqk", "softcap:5"]
stats = true

[[case]]
name = "many heads"
shape = { batch = 3, heads_q = 10, heads_kv = 1, seq_q = 5, seq_kv = 41, dim_qk = 32, dim_v = 40 }
dtype = "f16"
mask = ["padding"]
stats = true
"#;

/// Elements that one threadgroup has, and sums of many parts.
pub(super) const ALONG: &str = r#"
[[case]]
name = "a table and a scalar"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 41, dim_qk = 20, dim_v = 44 }
dtype = "f32"
mask = ["causal-bottom-right"]
score_mod = ["bias:hqk", "softcap:5"]
backward = { wrt = ["bias:f32", "cap:f32"] }

[[case]]
name = "batch entries and keys"
shape = { batch = 3, heads_q = 4, heads_kv = 2, seq_q = 67, seq_kv = 70, dim_qk = 32, dim_v = 32 }
dtype = "f16"
mask = ["padding"]
score_mod = ["bias:bk"]
backward = { wrt = ["bias:f16"] }
"#;

/// A band whose edge is where a block begins; one of each kind.
pub(super) const ON_BLOCKS: &str = r#"
[[case]]
name = "causal from two keys less"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 66, seq_kv = 64, dim_qk = 64, dim_v = 64 }
dtype = "f16"
mask = ["causal-bottom-right"]
stats = true

[[case]]
name = "a window of a block but one"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 66, seq_kv = 70, dim_qk = 64, dim_v = 64 }
dtype = "f16"
mask = ["window:31,inf"]
stats = true

[[case]]
name = "a prefix of a block but one"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 66, seq_kv = 70, dim_qk = 64, dim_v = 64 }
dtype = "f16"
mask = ["prefix-lm:63"]
stats = true
"#;

/// Few queries with a scale of their own.
pub(super) const SCALED: &str = r#"
[[case]]
name = "a negative scale"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 4, seq_kv = 70, dim_qk = 20, dim_v = 20 }
dtype = "f32"
attn_scale = -0.1
"#;

/// Lengths of many batch entries, some of them past the end.
pub(super) const LENGTHS: &str = r#"
[[case]]
name = "lengths past the end"
shape = { batch = 40, heads_q = 2, heads_kv = 1, seq_q = 60, seq_kv = 37, dim_qk = 20, dim_v = 20 }
dtype = "f32"
mask = ["padding"]
stats = true
"#;

/// Two bands, of which lengths move one; entries with more queries than keys, and with fewer.
pub(super) const ABOUT_ENDS: &str = r#"
[[case]]
name = "bands about both corners"
shape = { batch = 12, heads_q = 2, heads_kv = 1, seq_q = 41, seq_kv = 70, dim_qk = 20, dim_v = 20 }
dtype = "f32"
mask = ["padding", "window:13,5:ends", "window:20,11"]
stats = true
"#;

/// The same of few queries.
pub(super) const FEW_ABOUT_ENDS: &str = r#"
[[case]]
name = "bands about both corners"
shape = { batch = 12, heads_q = 4, heads_kv = 2, seq_q = 7, seq_kv = 70, dim_qk = 20, dim_v = 20 }
dtype = "f32"
mask = ["padding", "window:19,3:ends", "window:inf,30"]
stats = true

[[case]]
name = "a band about the first ones that is narrower on the left"
shape = { batch = 12, heads_q = 2, heads_kv = 1, seq_q = 8, seq_kv = 41, dim_qk = 20, dim_v = 20 }
dtype = "f32"
mask = ["padding", "window:13,5:ends", "window:2,inf"]
stats = true
"#;

/// More than a square of queries and of keys, by large numbers.
pub(super) const DROPPED: &str = r#"
[[case]]
name = "dropped weights 7"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 25, seq_kv = 70, dim_qk = 20, dim_v = 44 }
dtype = "f32"
stats = true
dropout = 0.4

[[case]]
name = "dropped weights 11"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 25, seq_kv = 70, dim_qk = 20, dim_v = 44 }
dtype = "f32"
stats = true
dropout = 0.4

[[case]]
name = "dropped weights 13"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 25, seq_kv = 70, dim_qk = 20, dim_v = 44 }
dtype = "f32"
stats = true
dropout = 0.4
"#;

/// Documents whose keys have boundaries of their own, some of no queries, some of no keys; tokens of none in front and behind.
pub(super) const DOCUMENTS: &str = r#"
[[case]]
name = "documents"
shape = { batch = 5, heads_q = 4, heads_kv = 2, seq_q = 41, seq_kv = 70, dim_qk = 20, dim_v = 44 }
dtype = "f32"
layout = "bshd"
stats = true
sink = true
mask = ["window:31,9"]
score_mod = ["bias:hqk"]
packed = { lengths_q = [33, 0, 41, 9, 20], lengths_kv = [70, 20, 0, 37, 41], before = 2, slack = 30 }
backward = { wrt = ["bias:f32", "sink:f32"] }
"#;

/// The same of few queries.
pub(super) const FEW_DOCUMENTS: &str = r#"
[[case]]
name = "few queries of documents"
shape = { batch = 5, heads_q = 4, heads_kv = 2, seq_q = 7, seq_kv = 300, dim_qk = 20, dim_v = 44 }
dtype = "f32"
layout = "bshd"
stats = true
sink = true
mask = ["causal-ends"]
packed = { lengths_q = [5, 0, 7, 1, 4], lengths_kv = [290, 20, 0, 300, 37], before = 2, slack = 30, wide = true }
backward = { wrt = ["sink:f32"] }
"#;

/// Keys in pages of an odd number of tokens, and of entries of several lengths.
pub(super) const IN_PAGES: &str = r#"
[[case]]
name = "keys in pages"
shape = { batch = 3, heads_q = 4, heads_kv = 2, seq_q = 41, seq_kv = 70, dim_qk = 20, dim_v = 44 }
dtype = "f32"
layout = "bshd"
mask = ["causal-ends", "padding"]
stats = true
paged = { page_size = 7, lengths_q = [41, 9, 30], lengths_kv = [70, 33, 0], spare = 1 }
"#;

/// The same of few queries.
pub(super) const FEW_IN_PAGES: &str = r#"
[[case]]
name = "few queries and keys in pages"
shape = { batch = 3, heads_q = 4, heads_kv = 2, seq_q = 3, seq_kv = 300, dim_qk = 20, dim_v = 44 }
dtype = "f32"
layout = "bshd"
stats = true
paged = { page_size = 5, layout = "bhsd", spare = 1 }
"#;

/// Row maxima and sums, rows without keys among them.
pub(super) const TOLD: &str = r#"
[[case]]
name = "row maxima and sums"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 41, dim_qk = 20, dim_v = 44 }
dtype = "f32"
mask = ["causal-bottom-right"]
row_max = true
sum_exp = true
"#;

/// The same of few queries.
pub(super) const FEW_TOLD: &str = r#"
[[case]]
name = "row maxima and sums of few queries"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 3, seq_kv = 300, dim_qk = 20, dim_v = 44 }
dtype = "f32"
sink = true
row_max = true
sum_exp = true
"#;

/// More keys than the most parts have of a usual length.
pub(super) const MANY_KEYS: &str = r#"
[[case]]
name = "40000 keys"
shape = { batch = 1, heads_q = 1, heads_kv = 1, seq_q = 1, seq_kv = 40000, dim_qk = 32, dim_v = 32 }
dtype = "f32"
stats = true
"#;

/// What a fault is looked for with.
#[derive(Clone, Copy, Debug)]
pub(super) enum With {
    Forward(&'static str),
    Backward(&'static str),
    /// Operands that are dropped and odd.
    Odd(Drops),
    /// Numbers between two of 16 bits.
    Rounding,
    /// Sinks of every size, and rows that their gradient leaves out.
    Sinks,
    SinkGradient,
    /// Boundaries of documents that hold anything.
    Boundaries,
    /// Row statistics of scores that are no numbers.
    OddRows,
    /// Page tables that hold anything.
    Tables,
    /// Scores that are very low or very high.
    Large,
}

type Faults = (&'static [Mutation], Kernels, With);

const ALL: [Faults; 62] = [
    (FORWARD, Kernels::Tiled, With::Forward(SMALL)),
    (BACKWARD, Kernels::Tiled, With::Backward(SMALL)),
    (VECTOR, Kernels::Vector, With::Forward(FEW)),
    (PARTS, Kernels::Parts, With::Forward(FEW)),
    (VECTOR_BACKWARD, Kernels::Vector, With::Backward(FEW)),
    (PARAMETER, Kernels::Tiled, With::Backward(ALONG)),
    (ODD, Kernels::Tiled, With::Odd(Drops::Mask)),
    (ODD_VECTOR, Kernels::Vector, With::Odd(Drops::Mask)),
    (ODD_SCORES, Kernels::Tiled, With::Odd(Drops::ScoreMod)),
    (SCALES, Kernels::Vector, With::Backward(SCALED)),
    (EDGES, Kernels::Tiled, With::Forward(ON_BLOCKS)),
    (ENDS, Kernels::Tiled, With::Forward(ABOUT_ENDS)),
    (ENDS, Kernels::Tiled, With::Backward(ABOUT_ENDS)),
    (ENDS, Kernels::Vector, With::Forward(FEW_ABOUT_ENDS)),
    (ENDS, Kernels::Vector, With::Backward(FEW_ABOUT_ENDS)),
    (DROPOUT, Kernels::Tiled, With::Forward(DROPPED)),
    (DROPOUT, Kernels::Tiled, With::Backward(DROPPED)),
    (DROPOUT, Kernels::Vector, With::Forward(DROPPED)),
    (DROPOUT, Kernels::Vector, With::Backward(DROPPED)),
    (DROPOUT_BACKWARD, Kernels::Tiled, With::Backward(DROPPED)),
    (DROPOUT_BACKWARD, Kernels::Vector, With::Backward(DROPPED)),
    (PACKED, Kernels::Tiled, With::Forward(DOCUMENTS)),
    (PACKED, Kernels::Tiled, With::Backward(DOCUMENTS)),
    (PACKED, Kernels::Vector, With::Forward(FEW_DOCUMENTS)),
    (PACKED, Kernels::Vector, With::Backward(FEW_DOCUMENTS)),
    (PACKED_FORWARD, Kernels::Tiled, With::Forward(DOCUMENTS)),
    (PACKED_FORWARD, Kernels::Vector, With::Forward(FEW_DOCUMENTS)),
    (PACKED_FORWARD, Kernels::Parts, With::Forward(FEW_DOCUMENTS)),
    (PACKED_TILED, Kernels::Tiled, With::Forward(DOCUMENTS)),
    (PACKED_VECTOR, Kernels::Vector, With::Forward(FEW_DOCUMENTS)),
    (PACKED_VECTOR, Kernels::Vector, With::Backward(FEW_DOCUMENTS)),
    (PACKED_PARTS, Kernels::Parts, With::Forward(FEW_DOCUMENTS)),
    (PACKED_BACKWARD, Kernels::Tiled, With::Backward(DOCUMENTS)),
    (PACKED_BACKWARD, Kernels::Vector, With::Backward(FEW_DOCUMENTS)),
    (PACKED_TILED_BACKWARD, Kernels::Tiled, With::Backward(DOCUMENTS)),
    (PACKED_VECTOR_BACKWARD, Kernels::Vector, With::Backward(FEW_DOCUMENTS)),
    (BOUNDARIES, Kernels::Tiled, With::Boundaries),
    (BOUNDARIES, Kernels::Vector, With::Boundaries),
    (PAST, Kernels::Tiled, With::Backward(LENGTHS)),
    (LONG, Kernels::Parts, With::Forward(MANY_KEYS)),
    (CUT, Kernels::Tiled, With::Rounding),
    (CUT_VECTOR, Kernels::Vector, With::Rounding),
    (CUT_PARTS, Kernels::Parts, With::Rounding),
    (SINK, Kernels::Tiled, With::Sinks),
    (SINK_VECTOR, Kernels::Vector, With::Sinks),
    (SINK_PARTS, Kernels::Parts, With::Sinks),
    (SINK_GRADIENT, Kernels::Tiled, With::SinkGradient),
    (STATISTICS, Kernels::Tiled, With::Forward(TOLD)),
    (STATISTICS_TILED, Kernels::Tiled, With::Forward(TOLD)),
    (STATISTICS_VECTOR, Kernels::Vector, With::Forward(FEW_TOLD)),
    (STATISTICS_PARTS, Kernels::Parts, With::Forward(FEW_TOLD)),
    (STATISTICS_ODD, Kernels::Tiled, With::OddRows),
    (PAGES, Kernels::Tiled, With::Forward(IN_PAGES)),
    (PAGES, Kernels::Vector, With::Forward(FEW_IN_PAGES)),
    (TABLES, Kernels::Tiled, With::Tables),
    (TABLES, Kernels::Vector, With::Tables),
    (LARGE, Kernels::Tiled, With::Large),
    (LARGE, Kernels::Vector, With::Large),
    (LARGE_TILED, Kernels::Tiled, With::Large),
    (LARGE_VECTOR, Kernels::Vector, With::Large),
    (LARGE_PARTS, Kernels::Parts, With::Large),
    (LARGE_SINK, Kernels::Tiled, With::Large),
];

fn failure<T>(outcome: Outcome<T>) -> Option<String> {
    match outcome {
        Outcome::Fail(how) => Some(how),
        Outcome::Pass(..) | Outcome::Skip(_) => None,
    }
}

/// Which check finds a fault, and how.
fn caught(toolchain: &Toolchain, mutation: Mutation, kernels: Kernels, with: With) -> Option<String> {
    Check::ALL.into_iter().find_map(|check| caught_by(&toolchain.with(check), [mutation.from, mutation.to], kernels, with))
}

/// How a text in place of another is found, if it is.
pub(super) fn caught_by(toolchain: &Toolchain, [from, to]: [&str; 2], kernels: Kernels, with: With) -> Option<String> {
    // One for all cases, that each source is compiled once.
    let emulated = Emulated::new(toolchain.clone(), 7).forced(kernels).mutated(from, to).executor();
    let forward = |cases: Vec<Case>| cases.iter().find_map(|case| failure(run_case(case, &emulated)));
    let backward = |cases: Vec<Case>| cases.iter().find_map(|case| failure(run_backward_case(case, Source::Oracle, &emulated)));
    let boundaries = || boundaries::hold(&Emulated::new(toolchain.clone(), 7).mutated(from, to), kernels);
    let how = match with {
        With::Boundaries => boundaries().err(),
        With::OddRows => statistics::odd(&emulated).err(),
        With::Tables => pages::hold(&Emulated::new(toolchain.clone(), 7).mutated(from, to), kernels).err(),
        With::Odd(drops) => dropped(drops, &emulated).err(),
        With::Rounding => rounding(&emulated).err(),
        With::Large => large::hold(&emulated, kernels).err(),
        With::Sinks => sink::denominators(&emulated, 7).and_then(|()| sink::denominators(&emulated, 90)).err(),
        With::SinkGradient => sink::gradients(&emulated).err(),
        With::Forward(cases) => forward(Case::parse(cases).unwrap()),
        With::Backward(cases) => backward(Case::parse(cases).unwrap()),
    };
    how.map(|how| format!("{:?}: {how}", toolchain.check()))
}

/// Those of today; a fault must not be one for the compiler: that would show nothing of the checks.
#[test]
fn every_fault_is_found() {
    let faults: Vec<(Mutation, Kernels, With)> =
        ALL.iter().flat_map(|&(list, kernels, with)| list.iter().map(move |mutation| (*mutation, kernels, with))).collect();
    let faults = of_today(&format!("faults {NAME}"), 2 * DAYS, faults, |(_, kernels, with)| vec![format!("{kernels:?} {with:?}")]);
    let Some(toolchain) = emulation(&format!("{} faults in kernels", faults.len())) else { return };
    let missed = Mutex::new(Vec::new());
    side_by_side(&faults, |&(mutation, kernels, with)| {
        let how = caught(&toolchain, mutation, kernels, with);
        let short = how.as_deref().map(|how| how.chars().take(300).collect::<String>().replace('\n', " "));
        println!("fault of {kernels:?}: {}; {}", mutation.name, short.as_deref().unwrap_or("nothing finds it"));
        if how.is_none_or(|how| how.contains("error: ")) {
            missed.lock().unwrap().push((kernels, mutation.name));
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found, or not compiled: {missed:?}");
    say(&format!("faults {NAME}: all of {} found", faults.len()));
}
