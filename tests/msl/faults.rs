//! Faults that are put into kernels: something has to find each.

use super::dropped::spoiled;
use super::{NAME, emulation, side_by_side};
use conformance::case::Case;
use conformance::msl::mutations::{BACKWARD, FORWARD, Mutation, ODD, ODD_VECTOR, PARAMETER, PARTS, VECTOR, VECTOR_BACKWARD};
use conformance::msl::{Check, Emulated, Toolchain};
use conformance::runner::{Outcome, Source, run_backward_case, run_case};
use conformance::say::say;
use metal_fallback::Kernels;
use std::sync::Mutex;

/// Two key heads with two query heads each; rows without keys, lengths, a tensor, dims off the fragments.
const SMALL: &str = r#"
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
const FEW: &str = r#"
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
const ALONG: &str = r#"
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

/// What a fault is looked for with.
#[derive(Clone, Copy, Debug)]
enum With {
    Forward(&'static str),
    Backward(&'static str),
    /// Operands that are dropped and odd.
    Odd,
}

type Faults = (&'static [Mutation], Kernels, With);

const ALL: [Faults; 8] = [
    (FORWARD, Kernels::Tiled, With::Forward(SMALL)),
    (BACKWARD, Kernels::Tiled, With::Backward(SMALL)),
    (VECTOR, Kernels::Vector, With::Forward(FEW)),
    (PARTS, Kernels::Parts, With::Forward(FEW)),
    (VECTOR_BACKWARD, Kernels::Vector, With::Backward(FEW)),
    (PARAMETER, Kernels::Tiled, With::Backward(ALONG)),
    (ODD, Kernels::Tiled, With::Odd),
    (ODD_VECTOR, Kernels::Vector, With::Odd),
];

fn failure<T>(outcome: Outcome<T>) -> Option<String> {
    match outcome {
        Outcome::Fail(how) => Some(how),
        Outcome::Pass(..) | Outcome::Skip(_) => None,
    }
}

/// Which check finds a fault, and how.
fn caught(toolchain: &Toolchain, mutation: Mutation, kernels: Kernels, with: With) -> Option<String> {
    let emulated = |check, seed| Emulated::new(toolchain.with(check), seed).forced(kernels).mutated(mutation);
    for check in Check::ALL {
        let how = match with {
            With::Odd => spoiled(&emulated(check, 1)).err(),
            With::Forward(cases) => {
                Case::parse(cases).unwrap().iter().find_map(|case| failure(run_case(case, &emulated(check, case.seed()))))
            }
            With::Backward(cases) => {
                let run = |case: &Case| run_backward_case(case, Source::Oracle, &emulated(check, case.seed()));
                Case::parse(cases).unwrap().iter().find_map(|case| failure(run(case)))
            }
        };
        if let Some(how) = how {
            return Some(format!("{check:?}: {how}"));
        }
    }
    None
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
