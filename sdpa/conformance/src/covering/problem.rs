//! The features of attention problems, and the case that a row describes.

use super::{Covering, Factor, Row, Rule, Supports, Wanted, cover};
use crate::case::Case;
use crate::runner::Source;
use sdpa::Executor;

/// Sets of axes of a declared parameter.
const AXES: &[&str] = &["", "b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk"];

/// Every factor of the covered problems, with its values. In addition, each problem has NaN in memory that no query attends to: past
/// lengths, sequences and pages.
pub const FACTORS: [Factor; 19] = [
    Factor { name: "pass", values: &["forward", "backward", "backward of its own forward"] },
    Factor { name: "dtype", values: &["f32", "f16", "bf16", "f8e4m3", "f8e5m2"] },
    Factor { name: "dims", values: &["40", "64", "96", "128", "160", "256", "192 and 128", "72 and 200"] },
    Factor { name: "query heads per KV head", values: &["1", "2", "3", "4", "8", "4 of one KV head"] },
    Factor { name: "layout", values: &["bhsd", "bshd", "sbhd", "bhsd with gaps"] },
    Factor {
        name: "size",
        values: &[
            "no queries",
            "no keys",
            "1 x 1",
            "one query",
            "below a tile",
            "off a tile",
            "whole tiles",
            "many tiles",
            "many keys",
            "split KV",
            "one query, many keys",
            "few queries, whole keys",
            "whole queries",
        ],
    },
    Factor {
        name: "container",
        values: &["dense", "packed", "cross-packed", "paged", "paged, packed queries", "one tensor", "paged by 64"],
    },
    Factor {
        name: "mask",
        values: &[
            "none",
            "causal",
            "causal-bottom-right",
            "window:9,5",
            "prefix-lm:6",
            "dilated:3",
            "padding",
            "causal-ends",
            "document",
            "global-local:9,3",
            "sliding-window:9",
            "causal document",
        ],
    },
    Factor {
        name: "score_mod",
        values: &["none", "softcap:5", "slanted", "smooth", "within", "waves", "ripples", "clamped", "sandwich:4"],
    },
    Factor { name: "scores", values: &["ordinary", "very-low-rows", "very-high-rows"] },
    Factor { name: "parameter", values: &["none", "scalar", "f32", "f16", "bf16", "i32", "bool", "table"] },
    Factor { name: "axes", values: AXES },
    Factor { name: "use", values: &["none", "mask", "added", "multiplied", "inside a function"] },
    Factor { name: "gradient of the parameter", values: &["no", "yes"] },
    Factor { name: "sink", values: &["no", "yes", "with its gradient"] },
    Factor { name: "dropout", values: &["no", "yes"] },
    Factor { name: "statistics", values: &["none", "stats", "stats in base 2", "row maxima and sums"] },
    Factor { name: "deterministic", values: &["no", "yes"] },
    Factor { name: "scale", values: &["default", "0", "-0.1", "0.15"] },
];

/// The factors of which any three values occur together in a problem of [`Strength::Three`]. They are the factors of known faults that
/// tests of two features at a time would not have found.
pub const THREE_WAY: [&str; 8] = ["pass", "dtype", "dims", "parameter", "axes", "use", "gradient of the parameter", "container"];

const TENSORS_AXES: &[&str] = &["b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk"];
const BACKWARD: &[&str] = &["backward", "backward of its own forward"];
const FP8: &[&str] = &["f8e4m3", "f8e5m2"];
const PAGED: &[&str] = &["paged", "paged, packed queries", "paged by 64"];

/// The pairs of values that no problem combines.
pub const RULES: [Rule; 22] = [
    Rule {
        one: ("dtype", FP8),
        other: ("pass", &["backward of its own forward"]),
        why: "gradients from an output of 8 bits have elements that rounding may change beyond recognition",
    },
    Rule { one: ("dtype", FP8), other: ("score_mod", &["smooth"]), why: "cubes of scores beside 8 bits likewise" },
    Rule {
        one: ("size", &["no queries", "no keys"]),
        other: ("container", &["packed", "cross-packed", "paged", "paged, packed queries", "one tensor", "paged by 64"]),
        why: "boundaries and lengths say which documents and entries have no tokens",
    },
    Rule {
        one: ("score_mod", &["smooth"]),
        other: ("scale", &["0.15", "-0.1"]),
        why: "cubes of large scores leave weights that f16 cannot hold",
    },
    Rule { one: ("parameter", &["none"]), other: ("use", &["mask", "added", "multiplied", "inside a function"]), why: "nothing is used" },
    Rule {
        one: ("parameter", &["scalar", "f32", "f16", "bf16", "i32", "bool", "table"]),
        other: ("use", &["none"]),
        why: "what is not used is not declared",
    },
    Rule { one: ("parameter", &["none", "scalar", "table"]), other: ("axes", TENSORS_AXES), why: "only tensors span axes" },
    Rule {
        one: ("parameter", &["table"]),
        other: ("use", &["mask", "inside a function"]),
        why: "the two tables of the harness are a factor and a term",
    },
    Rule {
        one: ("gradient of the parameter", &["yes"]),
        other: ("parameter", &["none", "i32", "bool"]),
        why: "only floating point parameters have gradients",
    },
    Rule { one: ("gradient of the parameter", &["yes"]), other: ("use", &["none", "mask"]), why: "masks have no derivative" },
    Rule { one: ("gradient of the parameter", &["yes"]), other: ("pass", &["forward"]), why: "a forward pass has no gradients" },
    Rule { one: ("sink", &["with its gradient"]), other: ("pass", &["forward"]), why: "a forward pass has no gradients" },
    Rule { one: ("deterministic", &["yes"]), other: ("pass", &["forward"]), why: "it is an option of backward passes" },
    Rule { one: ("container", PAGED), other: ("pass", BACKWARD), why: "pages have no backward pass" },
    Rule {
        one: ("statistics", &["stats in base 2", "row maxima and sums"]),
        other: ("pass", BACKWARD),
        why: "a backward pass has no such results",
    },
    Rule {
        one: ("container", &["packed", "one tensor"]),
        other: ("size", &["one query", "many keys", "split KV", "one query, many keys", "few queries, whole keys"]),
        why: "queries and keys are as many",
    },
    Rule {
        one: ("container", &["packed", "cross-packed", "paged, packed queries"]),
        other: ("mask", &["padding", "document", "causal document"]),
        why: "documents have their lengths",
    },
    Rule {
        one: ("container", &["cross-packed", "paged, packed queries"]),
        other: ("mask", &["causal-bottom-right"]),
        why: "each document has a corner of its own",
    },
    Rule {
        one: ("container", &["one tensor"]),
        other: ("query heads per KV head", &["2", "3", "4", "8", "4 of one KV head"]),
        why: "q, k and v are of one shape",
    },
    Rule { one: ("container", &["one tensor"]), other: ("dims", &["192 and 128", "72 and 200"]), why: "q, k and v are of one shape" },
    Rule {
        one: ("container", &["one tensor"]),
        other: ("layout", &["bhsd", "sbhd", "bhsd with gaps"]),
        why: "the tensor is (batch, seq, 3, head, dim)",
    },
    Rule {
        one: ("container", &["packed", "cross-packed", "paged, packed queries"]),
        other: ("layout", &["sbhd"]),
        why: "a packed tensor is (total, heads, dim)",
    },
];

/// A row, read by the names of its factors.
struct Chosen<'a>(&'a [usize]);

impl Chosen<'_> {
    fn of(&self, name: &str) -> &'static str {
        let n = FACTORS.iter().position(|factor| factor.name == name).unwrap_or_else(|| panic!("{name:?} is no factor"));
        FACTORS[n].values[self.0[n]]
    }

    fn is(&self, name: &str, value: &str) -> bool {
        self.of(name) == value
    }
}

/// Returns the number of queries and keys.
fn seqs(size: &str) -> [i64; 2] {
    match size {
        "no queries" => [0, 7],
        "no keys" => [5, 0],
        "1 x 1" => [1, 1],
        "one query" => [1, 75],
        "below a tile" => [5, 7],
        "off a tile" => [70, 83],
        "whole tiles" => [64, 192],
        "many tiles" => [150, 270],
        "many keys" => [64, 1088],
        "split KV" => [3, 1100],
        "one query, many keys" => [1, 1088],
        "few queries, whole keys" => [5, 320],
        "whole queries" => [128, 83],
        _ => unreachable!("{size:?} is no size"),
    }
}

/// Returns the lengths of three sequences: one is empty, one has the maximum length.
fn documents(longest: i64) -> String {
    format!("[{longest}, 0, {}]", (longest + 1) / 2)
}

/// Returns the values of a combination as texts of the form `factor: value`.
pub fn features(combination: &[(usize, usize)]) -> Vec<String> {
    combination.iter().map(|&(factor, value)| format!("{}: {}", FACTORS[factor].name, FACTORS[factor].values[value])).collect()
}

/// An attention problem that was made from a row of a covering array.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The extents, options and inputs of the problem.
    pub case: Case,
    /// The source of `o` and `stats` for a backward pass; `None` for a forward pass.
    pub source: Option<Source>,
    /// The features of the problem, each as `factor: value`.
    pub features: Vec<String>,
    /// The row of the covering that the problem was made from.
    pub row: Row,
}

/// The number of features that occur together, and the number of problems in which they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// Any two features occur together in at least one problem.
    Two,
    /// Any three features of [`THREE_WAY`] occur together in at least one problem.
    Three,
    /// Any two features occur together in three problems, as many as the ledger requires.
    Ledger,
}

impl Strength {
    /// Every strength.
    pub const ALL: [Strength; 3] = [Strength::Two, Strength::Three, Strength::Ledger];

    /// Parses the name of a strength: `two`, `three` or `ledger`.
    pub fn named(name: &str) -> Option<Strength> {
        Strength::ALL.into_iter().find(|strength| strength.name() == name)
    }

    /// Returns the name of the strength.
    pub fn name(self) -> &'static str {
        match self {
            Strength::Two => "two",
            Strength::Three => "three",
            Strength::Ledger => "ledger",
        }
    }

    /// Returns rows that a function supports and that cover the combinations of features of this strength.
    pub fn rows(self, supports: &Supports<'_>) -> Covering {
        let every: Vec<&str> = FACTORS.iter().map(|factor| factor.name).collect();
        let (of, strength, times) = match self {
            Strength::Two => (&every[..], 2, 1),
            Strength::Three => (&THREE_WAY[..], 3, 1),
            Strength::Ledger => (&every[..], 2, 3),
        };
        let hollow = ("size", &["no queries", "no keys"][..]);
        cover(&Wanted { factors: &FACTORS, rules: &RULES, of, strength, times, hollow }, supports)
    }

    /// Returns the problems of rows that cover the combinations of this strength, whether an executor supports them or not.
    ///
    /// # Errors
    /// Fails if a case does not parse, which is a bug of this crate.
    pub fn problems(self) -> Result<Vec<Problem>, String> {
        self.problems_of(&self.rows(&|_| true).rows)
    }

    /// Returns rows that an executor supports and that cover the combinations of features of this strength.
    pub fn rows_for(self, executor: &dyn Executor) -> Covering {
        self.rows(&|row| Problem::of("", row).is_ok_and(|problem| problem.is_supported(executor)))
    }

    /// Returns the problems of the rows that [`Strength::rows_for`] returns.
    ///
    /// # Errors
    /// Fails as [`Strength::problems`] does.
    pub fn problems_for(self, executor: &dyn Executor) -> Result<Vec<Problem>, String> {
        self.problems_of(&self.rows_for(executor).rows)
    }

    /// Returns the problems of the given rows.
    ///
    /// # Errors
    /// Fails as [`Strength::problems`] does.
    pub fn problems_of(self, rows: &[Row]) -> Result<Vec<Problem>, String> {
        rows.iter().enumerate().map(|(n, row)| Problem::of(&format!("{} {n}", self.label()), row)).collect()
    }

    /// Returns the strength to which the name of a problem belongs: `two-way 5` belongs to [`Strength::Two`].
    pub fn of(problem: &str) -> Option<Strength> {
        let (label, number) = problem.rsplit_once(' ')?;
        number.parse::<usize>().ok()?;
        Strength::ALL.into_iter().find(|strength| strength.label() == label)
    }

    fn label(self) -> &'static str {
        match self {
            Strength::Two => "two-way",
            Strength::Three => "three-way",
            Strength::Ledger => "ledger",
        }
    }
}

impl Problem {
    /// Creates the problem that a row of a covering array describes.
    ///
    /// # Errors
    /// Fails if the row does not fit [`FACTORS`], and as [`Strength::problems`] does.
    pub fn of(name: &str, row: &[usize]) -> Result<Problem, String> {
        if row.len() != FACTORS.len() || FACTORS.iter().zip(row).any(|(factor, value)| *value >= factor.values.len()) {
            return Err(format!("{name}: {row:?} is no row of {} factors", FACTORS.len()));
        }
        let source = match Chosen(row).of("pass") {
            "forward" => None,
            "backward" => Some(Source::Oracle),
            _ => Some(Source::Executor),
        };
        let features = features(&row.iter().copied().enumerate().collect::<Vec<_>>());
        Ok(Problem { case: case_of(name, row)?, source, features, row: row.to_vec() })
    }

    /// Returns whether an executor supports the problem, before it prepares anything.
    ///
    /// # Panics
    /// Panics if the case is not a valid problem, which is a bug of this crate.
    pub fn is_supported(&self, executor: &dyn Executor) -> bool {
        if self.case.skip.contains_key(executor.name().name()) {
            return false;
        }
        match self.source {
            None => self.case.spec().unwrap().validate().is_ok_and(|problem| executor.supports(&problem).is_ok()),
            Some(_) => {
                let problem = self.case.backward_spec().unwrap().validate().unwrap();
                executor.supports_backward(&problem).is_ok() && executor.supports(problem.forward()).is_ok()
            }
        }
    }
}

fn case_of(name: &str, row: &[usize]) -> Result<Case, String> {
    let chosen = Chosen(row);
    let (container, dims) = (chosen.of("container"), chosen.of("dims"));
    let [seq_q, mut seq_kv] = seqs(chosen.of("size"));
    if ["packed", "one tensor"].contains(&container) {
        seq_kv = seq_q;
    }
    let (dim_qk, dim_v) = dims.split_once(" and ").unwrap_or((dims, dims));
    let (group, of_one) = chosen.of("query heads per KV head").split_once(" of ").unwrap_or((chosen.of("query heads per KV head"), ""));
    let group: i64 = group.parse().map_err(|e| format!("{e}"))?;
    // The number of KV heads is derived: as a factor of its own it would add problems, but no new combinations of features.
    let heads_kv = if !of_one.is_empty() || (group > 2 && chosen.is("layout", "bhsd")) { 1 } else { 2 };
    let page_size =
        if container == "paged by 64" || (container == "paged, packed queries" && chosen.is("layout", "bshd")) { 64 } else { 16 };
    let batch = if chosen.is("size", "many tiles") && !container.contains("packed") { 2 } else { 3 };
    let mut lines = vec![
        "[[case]]".to_owned(),
        format!("name = \"{name}\""),
        format!(
            "shape = {{ batch = {batch}, heads_q = {}, heads_kv = {heads_kv}, seq_q = {seq_q}, seq_kv = {seq_kv}, dim_qk = {dim_qk}, dim_v = {dim_v} }}",
            group * heads_kv
        ),
        format!("dtype = \"{}\"", chosen.of("dtype")),
        format!("layout = \"{}\"", chosen.of("layout").trim_end_matches(" with gaps")),
    ];
    let mut flag = |when: bool, line: &str| lines.extend(when.then(|| line.to_owned()));
    flag(chosen.is("layout", "bhsd with gaps"), "q_gap = 8\nkv_gap = 16\no_gap = 8");
    flag(container == "one tensor", "packed_qkv = true");
    flag(container == "packed", &format!("packed = {{ lengths_q = {}, before = 2, slack = 3 }}", documents(seq_q)));
    let both = format!("lengths_q = {}, lengths_kv = {}", documents(seq_q), documents(seq_kv));
    flag(container == "cross-packed", &format!("packed = {{ {both}, before = 1, slack = 2, wide = true }}"));
    // Key lengths are given only with the padding mask. Otherwise each batch entry has all keys (with packed queries, all keys of its
    // sequence).
    let lengths = [seq_kv, 0, (seq_kv + 1) / 2];
    let lengths = if chosen.is("mask", "padding") { format!(", lengths_kv = {:?}", &lengths[..batch]) } else { String::new() };
    flag(container.starts_with("paged"), &format!("paged = {{ page_size = {page_size}{lengths}, spare = 1 }}"));
    flag(container == "paged, packed queries", &format!("packed = {{ {both}, before = 2, slack = 1 }}"));
    flag(!chosen.is("sink", "no"), "sink = true");
    flag(chosen.is("dropout", "yes"), "dropout = 0.3");
    flag(!chosen.is("statistics", "none"), "stats = true");
    flag(chosen.is("statistics", "stats in base 2"), "stats_base = \"two\"");
    flag(chosen.is("statistics", "row maxima and sums"), "row_max = true\nsum_exp = true");
    flag(!chosen.is("scale", "default"), &format!("attn_scale = {}", chosen.of("scale")));
    let of_cudnn = if ["0", "-0.1"].contains(&chosen.of("scale")) {
        Some("its kernels take positive scales alone, and say so at the call")
    } else if !chosen.is("scores", "ordinary") && !chosen.is("pass", "forward") {
        Some("its f32 log-sum-exp cannot hold the logarithm of a sum beside such a score (docs/numerics.md)")
    } else {
        None
    };
    lines.extend(of_cudnn.map(|why| format!("skip = {{ cudnn = \"{why}\" }}")));

    let (parameter, axes) = (chosen.of("parameter"), chosen.of("axes"));
    let (how, wrt) = match (chosen.of("use"), parameter) {
        ("added", "table") => (Some("blocks".to_owned()), "of_blocks"),
        ("multiplied", "table") => (Some("buckets".to_owned()), "gain"),
        ("none", _) => (None, ""),
        ("mask", _) => (Some(format!("parameter:{parameter},{axes}")), "t"),
        (how, _) => (Some(format!("parameter:{},{parameter},{axes}", how.split(' ').next().unwrap_or_default())), "t"),
    };
    let masked = chosen.is("use", "mask");
    let list = |names: &[&str]| {
        let named = names.iter().filter(|name| !["", "none", "ordinary"].contains(name));
        named.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
    };
    let of = |masks: bool| how.as_deref().filter(|_| masks == masked).unwrap_or_default();
    let [mask, second] = if chosen.is("mask", "causal document") { ["causal", "document"] } else { [chosen.of("mask"), ""] };
    lines.push(format!("mask = [{}]", list(&[mask, second, of(true)])));
    // The `scores` score_mod comes last. It makes scores so large that f32 would round away what a later score_mod adds.
    lines.push(format!("score_mod = [{}]", list(&[chosen.of("score_mod"), of(false), chosen.of("scores")])));
    if !chosen.is("pass", "forward") {
        let asked = [
            (chosen.is("gradient of the parameter", "yes"), format!("\"{wrt}:f32\"")),
            (chosen.is("sink", "with its gradient"), "\"sink:f32\"".to_owned()),
        ];
        let wrt: Vec<String> = asked.into_iter().filter(|(asked, _)| *asked).map(|(_, text)| text).collect();
        lines.push(format!("backward = {{ wrt = [{}], deterministic = {} }}", wrt.join(", "), chosen.is("deterministic", "yes")));
    }
    let text = lines.join("\n");
    let cases = Case::parse(&text).map_err(|e| format!("{text}\n{e}"))?;
    cases.into_iter().next().ok_or_else(|| "no case".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_a_problem() {
        let check = |problem: &Problem| match problem.source {
            None => problem.case.spec().map(|spec| spec.validate().map(drop)),
            Some(_) => problem.case.backward_spec().map(|spec| spec.validate().map(drop)),
        };
        let problems = [Strength::Two, Strength::Three].map(|strength| strength.problems().unwrap()).into_iter().flatten();
        let wrong = problems
            .filter_map(|problem| Some(format!("{} ({:?}): {}", problem.case.name, problem.features, check(&problem).unwrap().err()?)));
        let wrong: Vec<String> = wrong.collect();
        assert!(wrong.is_empty(), "{} are no problems:\n{}", wrong.len(), wrong.join("\n"));
    }

    #[test]
    fn names_of_problems_have_their_strength() {
        for strength in Strength::ALL {
            assert_eq!(Strength::of(&strength.problems_of(&vec![vec![0; FACTORS.len()]; 3]).unwrap()[2].case.name), Some(strength));
            assert_eq!(Strength::named(strength.name()), Some(strength));
        }
        assert_eq!(["two-way", "two-way x", "four-way 5", "", " 5"].map(Strength::of), [None; 5]);
    }

    #[test]
    fn few_pairs_have_no_problem() {
        let covering = Strength::Two.rows(&|_| true);
        // No problem has these combinations: gradients with pages or with results that only forward passes return (15), and axes without
        // a parameter (15).
        assert_eq!(covering.impossible.len(), 30, "{:?}", covering.impossible);
        assert!(covering.covered > 4000 && covering.rows.len() < 300, "{} rows cover {} pairs", covering.rows.len(), covering.covered);
    }
}
