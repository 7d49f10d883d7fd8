//! Faults that are put into kernels: something has to find each.

use super::{NAME, emulation, side_by_side, sink};
use conformance::case::Case;
use conformance::msl::mutations::{
    BACKWARD, CUT, CUT_PARTS, CUT_VECTOR, EDGES, FORWARD, LONG, Mutation, ODD, ODD_SCORES, ODD_VECTOR, PARAMETER, PARTS, PAST, SCALES,
    SINK, SINK_GRADIENT, SINK_PARTS, SINK_VECTOR, VECTOR, VECTOR_BACKWARD,
};
use conformance::msl::{Check, Emulated, Toolchain};
use conformance::runner::{Drops, Outcome, Source, dropped, rounding, run_backward_case, run_case};
use conformance::say::say;
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
}

type Faults = (&'static [Mutation], Kernels, With);

const ALL: [Faults; 20] = [
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
    (PAST, Kernels::Tiled, With::Backward(LENGTHS)),
    (LONG, Kernels::Parts, With::Forward(MANY_KEYS)),
    (CUT, Kernels::Tiled, With::Rounding),
    (CUT_VECTOR, Kernels::Vector, With::Rounding),
    (CUT_PARTS, Kernels::Parts, With::Rounding),
    (SINK, Kernels::Tiled, With::Sinks),
    (SINK_VECTOR, Kernels::Vector, With::Sinks),
    (SINK_PARTS, Kernels::Parts, With::Sinks),
    (SINK_GRADIENT, Kernels::Tiled, With::SinkGradient),
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
    let how = match with {
        With::Odd(drops) => dropped(drops, &emulated).err(),
        With::Rounding => rounding(&emulated).err(),
        With::Sinks => sink::denominators(&emulated, 7).and_then(|()| sink::denominators(&emulated, 90)).err(),
        With::SinkGradient => sink::gradients(&emulated).err(),
        With::Forward(cases) => forward(Case::parse(cases).unwrap()),
        With::Backward(cases) => backward(Case::parse(cases).unwrap()),
    };
    how.map(|how| format!("{:?}: {how}", toolchain.check()))
}

/// A fault must not be one for the compiler: that would show nothing of the checks.
#[test]
fn every_fault_is_found() {
    let faults: Vec<(Mutation, Kernels, With)> =
        ALL.iter().flat_map(|&(list, kernels, with)| list.iter().map(move |mutation| (*mutation, kernels, with))).collect();
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
