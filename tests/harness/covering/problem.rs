//! The features of attention problems, and the case of a row.

use super::{Factor, Row, Rule, cover};
use crate::case::Case;
use crate::runner::Source;

/// Sets of axes of a declared parameter.
const AXES: &[&str] = &["", "b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk"];

/// Every feature. Each problem also has NaN wherever its lengths, documents and pages leave memory that no query attends to.
pub const FACTORS: [Factor; 18] = [
    Factor { name: "pass", values: &["forward", "backward", "backward of its own forward"] },
    Factor { name: "dtype", values: &["f32", "f16", "bf16"] },
    Factor { name: "dims", values: &["40", "64", "96", "128", "160", "256", "192 and 128", "72 and 200"] },
    Factor { name: "query heads per KV head", values: &["1", "2", "3", "4", "8"] },
    Factor { name: "layout", values: &["bhsd", "bshd", "sbhd", "bhsd with gaps"] },
    Factor { name: "size", values: &["1 x 1", "one query", "below a tile", "off a tile", "many tiles", "split KV"] },
    Factor { name: "container", values: &["dense", "packed", "cross-packed", "paged", "paged, packed queries", "one tensor"] },
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
        ],
    },
    Factor { name: "score_mod", values: &["none", "softcap:5", "alibi", "smooth"] },
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

/// Factors of which any three values meet: those of the faults that no test of two features would have found.
pub const THREE_WAY: [&str; 8] = ["pass", "dtype", "dims", "parameter", "axes", "use", "gradient of the parameter", "container"];

const TENSORS_AXES: &[&str] = &["b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk"];
const BACKWARD: &[&str] = &["backward", "backward of its own forward"];
const PAGED: &[&str] = &["paged", "paged, packed queries"];

/// Values that no problem has together.
pub const RULES: [Rule; 19] = [
    Rule { one: ("score_mod", &["smooth"]), other: ("scale", &["0.15"]), why: "cubes of large scores leave weights that f16 cannot hold" },
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
        other: ("size", &["one query", "split KV"]),
        why: "queries and keys are as many",
    },
    Rule {
        one: ("container", &["packed", "cross-packed", "paged, packed queries"]),
        other: ("mask", &["padding", "document"]),
        why: "documents have their lengths",
    },
    Rule {
        one: ("container", &["cross-packed", "paged, packed queries"]),
        other: ("mask", &["causal-bottom-right"]),
        why: "each document has a corner of its own",
    },
    Rule {
        one: ("container", &["one tensor"]),
        other: ("query heads per KV head", &["2", "3", "4", "8"]),
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

/// A row by the names of its factors.
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

/// The extents of queries and keys.
fn seqs(size: &str) -> [i64; 2] {
    match size {
        "1 x 1" => [1, 1],
        "one query" => [1, 75],
        "below a tile" => [5, 7],
        "off a tile" => [70, 83],
        "many tiles" => [150, 270],
        "split KV" => [3, 700],
        _ => unreachable!("{size:?} is no size"),
    }
}

/// Lengths of three documents of at most so many tokens: one is empty, one is the longest.
fn documents(longest: i64) -> String {
    format!("[{longest}, 0, {}]", (longest + 1) / 2)
}

/// A problem of a covering.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Its extents, options and inputs.
    pub case: Case,
    /// Where a backward pass takes `o` and `stats` from; none for a forward pass.
    pub source: Option<Source>,
    /// Its features, `factor: value`.
    pub features: Vec<String>,
}

/// Problems in which any two features meet.
///
/// # Errors
/// A case that cannot be read: a bug of this file.
pub fn two_way() -> Result<Vec<Problem>, String> {
    let names: Vec<&str> = FACTORS.iter().map(|factor| factor.name).collect();
    problems("two-way", &cover(&FACTORS, &RULES, &names, 2).rows)
}

/// Problems in which any three features of [`THREE_WAY`] meet.
///
/// # Errors
/// As [`two_way`].
pub fn three_way() -> Result<Vec<Problem>, String> {
    problems("three-way", &cover(&FACTORS, &RULES, &THREE_WAY, 3).rows)
}

fn problems(what: &str, rows: &[Row]) -> Result<Vec<Problem>, String> {
    rows.iter().enumerate().map(|(n, row)| problem(&format!("{what} {n}"), row)).collect()
}

fn problem(name: &str, row: &[usize]) -> Result<Problem, String> {
    let source = match Chosen(row).of("pass") {
        "forward" => None,
        "backward" => Some(Source::Oracle),
        _ => Some(Source::Executor),
    };
    let features = FACTORS.iter().zip(row).map(|(factor, &value)| format!("{}: {}", factor.name, factor.values[value])).collect();
    Ok(Problem { case: case_of(name, row)?, source, features })
}

fn case_of(name: &str, row: &[usize]) -> Result<Case, String> {
    let chosen = Chosen(row);
    let (container, dims) = (chosen.of("container"), chosen.of("dims"));
    let [seq_q, mut seq_kv] = seqs(chosen.of("size"));
    if ["packed", "one tensor"].contains(&container) {
        seq_kv = seq_q;
    }
    let (dim_qk, dim_v) = dims.split_once(" and ").unwrap_or((dims, dims));
    let group: i64 = chosen.of("query heads per KV head").parse().map_err(|e| format!("{e}"))?;
    let heads_kv = if group > 2 { 1 } else { 2 };
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
    // Without the mask every entry has all keys, or those of its document.
    let lengths = [seq_kv, 0, (seq_kv + 1) / 2];
    let lengths = if chosen.is("mask", "padding") { format!(", lengths_kv = {:?}", &lengths[..batch]) } else { String::new() };
    flag(container.starts_with("paged"), &format!("paged = {{ page_size = 16{lengths}, spare = 1 }}"));
    flag(container == "paged, packed queries", &format!("packed = {{ {both}, before = 2, slack = 1 }}"));
    flag(!chosen.is("sink", "no"), "sink = true");
    flag(chosen.is("dropout", "yes"), "dropout = 0.3");
    flag(!chosen.is("statistics", "none"), "stats = true");
    flag(chosen.is("statistics", "stats in base 2"), "stats_base = \"two\"");
    flag(chosen.is("statistics", "row maxima and sums"), "row_max = true\nsum_exp = true");
    flag(!chosen.is("scale", "default"), &format!("attn_scale = {}", chosen.of("scale")));

    let (parameter, axes) = (chosen.of("parameter"), chosen.of("axes"));
    let (how, wrt) = match (chosen.of("use"), parameter) {
        ("added", "table") => (Some("blocks".to_owned()), "of_blocks"),
        ("multiplied", "table") => (Some("buckets".to_owned()), "gain"),
        ("none", _) => (None, ""),
        ("mask", _) => (Some(format!("parameter:{parameter},{axes}")), "t"),
        (how, _) => (Some(format!("parameter:{},{parameter},{axes}", how.split(' ').next().unwrap_or_default())), "t"),
    };
    let masked = chosen.is("use", "mask");
    let list = |first: &str, second: Option<&String>| {
        let first = (first != "none").then(|| first.to_owned());
        first.into_iter().chain(second.cloned()).map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", ")
    };
    lines.push(format!("mask = [{}]", list(chosen.of("mask"), how.as_ref().filter(|_| masked))));
    lines.push(format!("score_mod = [{}]", list(chosen.of("score_mod"), how.as_ref().filter(|_| !masked))));
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
        for problem in two_way().unwrap().iter().chain(&three_way().unwrap()) {
            if let Err(e) = check(problem).unwrap() {
                panic!("{}: {e}\n{:?}", problem.case.name, problem.features);
            }
        }
    }

    #[test]
    fn few_pairs_have_no_problem() {
        let names: Vec<&str> = FACTORS.iter().map(|factor| factor.name).collect();
        let covering = cover(&FACTORS, &RULES, &names, 2);
        // Gradients beside pages and beside results of forward passes alone: 12. Axes without a parameter: 15.
        assert_eq!(covering.impossible.len(), 27, "{:?}", covering.impossible);
        assert!(covering.covered > 4000 && covering.rows.len() < 250, "{} rows cover {} pairs", covering.rows.len(), covering.covered);
    }
}
