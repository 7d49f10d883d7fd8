//! Faults that rules make: each is found, or the list of those that change nothing says why it cannot be.
//!
//! A share of them on every run, another each day; `SDPA_FAULTS=3/40` runs the third of forty, `keys` those of a file, `all` everything:
//! `scripts/faults.sh`.

use super::faults::{
    ABOUT_ENDS, ALONG, DOCUMENTS, FEW, FEW_ABOUT_ENDS, FEW_DOCUMENTS, FEW_IN_PAGES, FEW_TOLD, IN_PAGES, LENGTHS, ON_BLOCKS, SCALED, SMALL,
    TOLD, With, caught_by,
};
use super::functions::functions_with;
use super::{emulation, side_by_side};
use conformance::edits::{Edit, Equivalent};
use conformance::msl::generated;
use conformance::msl::{Check, Toolchain};
use conformance::runner::Drops;
use conformance::say::say;
use conformance::share::Share;
use metal_fallback::Kernels::{self, Parts, Tiled, Vector};
use std::sync::Mutex;

/// Wide heads, other tiles than those of narrow ones, layouts that are not those of each other, gaps, scales.
const WIDE: &str = r#"
[[case]]
name = "wide f16"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 37, seq_kv = 41, dim_qk = 192, dim_v = 136 }
dtype = "f16"
layout = "sbhd"
mask = ["array:bhqk"]
attn_scale = 0.03
kv_gap = 3
o_gap = 5
stats = true
backward = { d_o = { repeats = [3] }, dq = { layout = "bhsd", gap = 1 }, dk = { layout = "bshd", gap = 2 }, dv = { layout = "bhsd", gap = 4 } }

[[case]]
name = "slices past the end"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 11, seq_kv = 13, dim_qk = 248, dim_v = 248 }
dtype = "f32"
stats = true

[[case]]
name = "one simdgroup"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 19, seq_kv = 21, dim_qk = 256, dim_v = 256 }
dtype = "f32"
mask = ["causal-bottom-right"]
stats = true

[[case]]
name = "bf16"
shape = { batch = 2, heads_q = 6, heads_kv = 2, seq_q = 33, seq_kv = 70, dim_qk = 64, dim_v = 72 }
dtype = "bf16"
layout = "bshd"
mask = ["window:9,3"]
score_mod = ["alibi-slopes"]
spread = 3.0
stats = true

[[case]]
name = "dropout"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 37, seq_kv = 45, dim_qk = 16, dim_v = 24 }
dtype = "f32"
mask = ["causal-bottom-right"]
dropout = 0.3
stats = true
"#;

/// The same of few queries.
const FEW_WIDE: &str = r#"
[[case]]
name = "wide f16"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 5, seq_kv = 141, dim_qk = 192, dim_v = 136 }
dtype = "f16"
layout = "sbhd"
mask = ["array:bhqk"]
attn_scale = 0.03
kv_gap = 3
o_gap = 5
stats = true
backward = { d_o = { repeats = [3] }, dq = { layout = "bhsd", gap = 1 }, dk = { layout = "bshd", gap = 2 }, dv = { layout = "bhsd", gap = 4 } }

[[case]]
name = "many keys alike"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 1, seq_kv = 700, dim_qk = 20, dim_v = 20 }
dtype = "f32"
spread = 0.01
stats = true

[[case]]
name = "a prefix past the end"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 3, seq_kv = 41, dim_qk = 20, dim_v = 20 }
dtype = "f32"
mask = ["prefix-lm:100"]
stats = true

[[case]]
name = "fewer keys than queries"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 7, seq_kv = 3, dim_qk = 20, dim_v = 20 }
dtype = "f32"
mask = ["causal"]
stats = true

[[case]]
name = "bf16"
shape = { batch = 2, heads_q = 6, heads_kv = 2, seq_q = 4, seq_kv = 270, dim_qk = 64, dim_v = 72 }
dtype = "bf16"
layout = "bshd"
mask = ["window:9,3"]
score_mod = ["alibi-slopes"]
spread = 3.0
stats = true

[[case]]
name = "dropout"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 5, seq_kv = 45, dim_qk = 16, dim_v = 24 }
dtype = "f32"
mask = ["causal-bottom-right"]
dropout = 0.3
stats = true
"#;

/// Axes that a gradient spans: with and without heads, batch entries, queries.
const AXES: &str = r#"
[[case]]
name = "over heads"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 41, seq_kv = 39, dim_qk = 8, dim_v = 8 }
dtype = "f32"
score_mod = ["bias:bqk"]
backward = { wrt = ["bias:f32"] }

[[case]]
name = "over everything but heads"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 41, seq_kv = 39, dim_qk = 8, dim_v = 8 }
dtype = "f32"
score_mod = ["alibi-slopes"]
backward = { wrt = ["slopes:f32"] }

[[case]]
name = "over batch entries and queries"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 41, seq_kv = 39, dim_qk = 8, dim_v = 8 }
dtype = "f32"
mask = ["causal-bottom-right"]
score_mod = ["bias:hk"]
backward = { wrt = ["bias:f32"] }

[[case]]
name = "over keys"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 41, seq_kv = 39, dim_qk = 8, dim_v = 8 }
dtype = "f32"
mask = ["padding"]
score_mod = ["bias:hq"]
backward = { wrt = ["bias:f32"] }
"#;

/// What a fault is looked for with, the likeliest first.
type Trial = (Kernels, With);

const FORWARD: &[Trial] = &[
    (Tiled, With::Forward(SMALL)),
    (Tiled, With::Forward(WIDE)),
    (Tiled, With::Odd(Drops::Mask)),
    (Tiled, With::Odd(Drops::Blocks)),
    (Tiled, With::Odd(Drops::One)),
    (Tiled, With::Odd(Drops::Wide)),
    (Tiled, With::Rounding),
    (Tiled, With::Forward(ON_BLOCKS)),
    (Tiled, With::Sinks),
    (Tiled, With::Forward(DOCUMENTS)),
    (Tiled, With::Forward(TOLD)),
    (Tiled, With::OddRows),
];
const VECTOR: &[Trial] = &[
    (Vector, With::Forward(FEW)),
    (Parts, With::Forward(FEW)),
    (Vector, With::Forward(FEW_WIDE)),
    (Parts, With::Forward(FEW_WIDE)),
    (Vector, With::Odd(Drops::Mask)),
    (Vector, With::Rounding),
    (Parts, With::Rounding),
    (Vector, With::Sinks),
    (Parts, With::Sinks),
    (Vector, With::Forward(FEW_DOCUMENTS)),
    (Parts, With::Forward(FEW_DOCUMENTS)),
    (Vector, With::Forward(FEW_TOLD)),
    (Parts, With::Forward(FEW_TOLD)),
    (Vector, With::OddRows),
];
const BACKWARD: &[Trial] = &[
    (Tiled, With::Backward(SMALL)),
    (Tiled, With::Backward(WIDE)),
    (Tiled, With::Odd(Drops::Mask)),
    (Tiled, With::Odd(Drops::Blocks)),
    (Tiled, With::Odd(Drops::One)),
    (Tiled, With::Odd(Drops::Wide)),
    (Tiled, With::Odd(Drops::ScoreMod)),
    (Tiled, With::Rounding),
    (Tiled, With::Backward(DOCUMENTS)),
];
const VECTOR_BACKWARD: &[Trial] = &[
    (Vector, With::Backward(FEW)),
    (Vector, With::Backward(FEW_WIDE)),
    (Vector, With::Backward(SCALED)),
    (Vector, With::Odd(Drops::Mask)),
    (Vector, With::Odd(Drops::ScoreMod)),
    (Vector, With::Rounding),
    (Vector, With::Backward(FEW_DOCUMENTS)),
];
const LARGE: &[Trial] = &[(Tiled, With::Large), (Vector, With::Large), (Parts, With::Large)];
const PARAMETER: &[Trial] = &[(Tiled, With::Backward(ALONG)), (Tiled, With::Backward(AXES)), (Tiled, With::Backward(DOCUMENTS))];
const SINK: &[Trial] = &[(Tiled, With::SinkGradient), (Vector, With::SinkGradient), (Tiled, With::Backward(DOCUMENTS))];
const SPANS: &[Trial] = &[
    (Tiled, With::Forward(DOCUMENTS)),
    (Vector, With::Forward(FEW_DOCUMENTS)),
    (Tiled, With::Backward(DOCUMENTS)),
    (Tiled, With::Boundaries),
    (Vector, With::Boundaries),
];
const PAGES: &[Trial] = &[
    (Tiled, With::Forward(IN_PAGES)),
    (Vector, With::Forward(FEW_IN_PAGES)),
    (Tiled, With::Tables),
    (Vector, With::Tables),
    (Tiled, With::Forward(SMALL)),
    (Tiled, With::Forward(WIDE)),
    (Tiled, With::Odd(Drops::Mask)),
    (Tiled, With::Odd(Drops::One)),
    (Tiled, With::Odd(Drops::Wide)),
    (Tiled, With::Forward(DOCUMENTS)),
    (Vector, With::Forward(FEW)),
    (Vector, With::Forward(FEW_DOCUMENTS)),
];
const BANDS: &[Trial] = &[
    (Tiled, With::Forward(ON_BLOCKS)),
    (Tiled, With::Forward(LENGTHS)),
    (Tiled, With::Backward(ON_BLOCKS)),
    (Tiled, With::Backward(LENGTHS)),
    (Tiled, With::Backward(SMALL)),
    (Tiled, With::Forward(ABOUT_ENDS)),
    // A row behind the end of a document is one of the next, of which the gradient of sinks knows by the keys that it visits alone.
    (Tiled, With::Backward(DOCUMENTS)),
    (Vector, With::Forward(FEW)),
    (Vector, With::Backward(FEW)),
    (Vector, With::Forward(FEW_ABOUT_ENDS)),
    (Vector, With::Forward(FEW_WIDE)),
    (Vector, With::Backward(FEW_WIDE)),
];

/// The trials of a file.
fn trials(file: &str) -> Vec<Trial> {
    let lists: &[&[Trial]] = match file {
        "forward" => &[FORWARD, LARGE],
        "vector" | "merge" => &[VECTOR, LARGE],
        "dq" | "dkv" => &[BACKWARD],
        "delta" => &[BACKWARD, LARGE],
        "exact" => &[LARGE, BACKWARD],
        "vector_dq" | "vector_dkv" => &[VECTOR_BACKWARD],
        "parameter" | "sum" => &[PARAMETER],
        "sink" => &[SINK, LARGE],
        "keys" => &[BANDS],
        "span" => &[SPANS],
        "pages" => &[PAGES],
        "scores" => &[FORWARD, VECTOR, LARGE],
        "weights" => &[BACKWARD, VECTOR_BACKWARD, LARGE],
        "fragment" => &[FORWARD, BACKWARD, PARAMETER],
        "rows" => &[VECTOR, VECTOR_BACKWARD],
        "softmax" => &[FORWARD, VECTOR, LARGE],
        // Functions of expressions have a test of their own.
        "expression" => &[],
        _ => panic!("{file}.metal: nothing looks for its faults"),
    };
    lists.concat()
}

/// What became of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    Found(String),
    /// The compiler does not take it.
    Refused,
    Survived,
}

/// The file of a fault, without its ending.
fn stem(fault: &Edit) -> &str {
    fault.file.split('.').next().unwrap_or_default()
}

fn fate(toolchain: &Toolchain, fault: &Edit) -> Fate {
    let told =
        |how: String| if how.contains("error generated") || how.contains("errors generated") { Fate::Refused } else { Fate::Found(how) };
    let texts = fault.texts();
    let texts = [texts[0].as_str(), texts[1].as_str()];
    let file = stem(fault);
    if file == "expression" {
        return functions_with(toolchain, texts[1]).map_or_else(told, |()| Fate::Survived);
    }
    let trials = trials(file);
    // Sanitizers take a few times as long, and see what the first cases of each kind of kernels show.
    let is_first = |n: usize| trials[..n].iter().all(|(kernels, _)| *kernels != trials[n].0);
    let firsts: Vec<Trial> = (0..trials.len()).filter(|n| is_first(*n)).map(|n| trials[n]).collect();
    let few = Check::SANITIZERS.into_iter().flat_map(|check| firsts.iter().map(move |trial| (check, *trial)));
    let all = trials.iter().map(|trial| (Check::Plain, *trial)).chain(few);
    // What runs for ever is found without a sanitizer; with one, on a machine that is busy, anything may take too long.
    let shows = |check: Check, how: &String| check == Check::Plain || !how.contains("exit status: 124");
    let find = |(check, (kernels, with))| caught_by(&toolchain.with(check), texts, kernels, with).filter(|how| shows(check, how));
    all.into_iter().find_map(find).map_or(Fate::Survived, told)
}

/// Shares of the faults, of which a run tries one where nothing is said: a minute on two cores.
const SHARES: u64 = 32;

#[test]
fn faults_that_rules_make_are_found() {
    let all = generated::all().unwrap();
    let equivalents = generated::equivalents(&all).unwrap();
    let share = Share::wanted("SDPA_FAULTS", SHARES);
    let file = generated::FILES.iter().find(|file| **file == share);
    let of_file: Vec<Edit> = all.into_iter().filter(|fault| file.is_none_or(|file| stem(fault) == *file)).collect();
    let wanted = if file.is_some() { "all" } else { &share };
    let wanted = Share::parse(wanted).unwrap_or_else(|why| panic!("SDPA_FAULTS={why}"));
    let is_known = |fault: &Edit| equivalents.iter().any(|e: &Equivalent| e.is(fault));
    // Those that change nothing are tried where everything is: that nothing finds them is so as long as the list says so.
    let faults: Vec<Edit> = wanted.take(of_file).filter(|fault| file.is_some() || share == "all" || !is_known(fault)).collect();
    let Some(toolchain) = emulation(&format!("{} faults that rules make", faults.len())) else { return };
    let toolchain = toolchain.of_faults();
    let fates = Mutex::new(Vec::new());
    side_by_side(&faults, |fault| {
        let fate = fate(&toolchain, fault);
        let how = match &fate {
            Fate::Found(how) => format!("found, {}", how.chars().take(90).collect::<String>().replace('\n', " ")),
            Fate::Refused => "the compiler refuses it".to_owned(),
            Fate::Survived if is_known(fault) => "equivalent".to_owned(),
            Fate::Survived => "SURVIVED".to_owned(),
        };
        println!("fault {}; {how}", fault.told());
        fates.lock().unwrap().push((fault.clone(), fate));
    });
    let fates = fates.into_inner().unwrap();
    let count = |is: &dyn Fn(&Edit, &Fate) -> bool| fates.iter().filter(|(fault, fate)| is(fault, fate)).count();
    let found = count(&|_, fate| matches!(fate, Fate::Found(_)));
    let refused = count(&|_, fate| *fate == Fate::Refused);
    let equivalent = count(&|fault, fate| *fate == Fate::Survived && is_known(fault));
    say(&format!(
        "faults by rules, SDPA_FAULTS={share}: {} made, {found} found, {refused} refused by the compiler, {equivalent} equivalent",
        fates.len()
    ));
    let wrong: Vec<String> = fates
        .iter()
        .filter(|(fault, fate)| (*fate == Fate::Survived) != is_known(fault) && *fate != Fate::Refused)
        .map(|(fault, fate)| {
            format!("{}; {}", fault.told(), if *fate == Fate::Survived { "nothing finds it" } else { "it is found, and called equivalent" })
        })
        .collect();
    assert!(wrong.is_empty(), "{} faults\n{}", wrong.len(), wrong.join("\n"));
}
