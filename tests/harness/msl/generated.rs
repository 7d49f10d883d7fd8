//! Faults that are made by rules, and not written down: every comparison, bound, step, scale, barrier and index of the kernels' texts, one
//! change at a time. Whoever writes kernels and tests has no say in which.

use crate::edits::{self, Edit, Equivalent, numbers, replaced, swaps};
use crate::golden::repository;

/// The files of kernels and what they are made of.
pub const FILES: [&str; 21] = [
    "softmax",
    "span",
    "pages",
    "keys",
    "scores",
    "exact",
    "weights",
    "fragment",
    "rows",
    "expression",
    "forward",
    "vector",
    "merge",
    "delta",
    "dq",
    "dkv",
    "vector_dq",
    "vector_dkv",
    "parameter",
    "sum",
    "sink",
];

/// The name of a file, and where it is: functions of expressions are those of every GPU.
fn named(file: &str) -> (String, std::path::PathBuf) {
    let (name, folder) = match file {
        "expression" => ("expression.inc".to_owned(), "sdpa/emit"),
        _ => (format!("{file}.metal"), "metal-fallback/kernels"),
    };
    let path = repository(folder).join(&name);
    (name, path)
}

/// What a rule replaces, and by what. Operators stand between spaces, as templates and pointers do not.
const OPERATORS: [(&str, &str); 18] = [
    // Comparisons.
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    (" != ", " == "),
    (" && ", " || "),
    (" || ", " && "),
    ("!(", "("),
    // Bounds.
    ("min(", "max("),
    ("max(", "min("),
    // Scales and factors.
    (" * params.scale", ""),
    (" * inverse", ""),
    (" *= ", " = "),
    // Bits.
    (" << ", " >> "),
    (" >> ", " << "),
    (" |= ", " = "),
    ("/ params.group", "% params.group"),
];

/// What is changed of an index, and of a step.
const ARITHMETIC: [(&str, &str); 5] = [(" + ", " - "), (" - ", " + "), (" * ", " + "), (" / ", " * "), (" % ", " / ")];

/// Whether nothing of a line says what is computed: what the preprocessor decides, declarations of templates, structures, arguments, and of
/// arrays, whose extents are counted in the sources (`registers`).
fn is_declaration(line: &str) -> bool {
    if ["float", "float2", "uint"].iter().any(|ty| line.strip_prefix(ty).is_some_and(|rest| rest.starts_with(' ')))
        && line.ends_with("];")
        && !line.contains(" = ")
    {
        return true;
    }
    let begins = |with: &[&str]| with.iter().any(|with| line.starts_with(with));
    line.is_empty()
        || begins(&["#if", "#else", "#endif", "#line", "#define ODD", "#define SEQ_LEN", "template <", "struct", "typedef"])
        || line.contains("[[")
}

/// The changes of a line, one by each rule: of the places that a rule fits, the `nth`.
fn changes(line: &str, nth: usize) -> Vec<String> {
    let applied = |(from, to): (&str, &str), within: &dyn Fn(usize) -> bool| swaps(line, from, to, within);
    let anywhere = |_: usize| true;
    let mut all: Vec<String> = OPERATORS
        .iter()
        .filter(|(from, _)| *from != " < " || !is_over_registers(line))
        .filter_map(|rule| choose(nth, applied(*rule, &anywhere)))
        .collect();
    let indices = |at: usize| is_index(line, at);
    let of_index = ARITHMETIC.iter().flat_map(|rule| applied(*rule, &indices)).chain(numbers(line, &indices, |number| number + 1));
    all.extend(choose(nth, of_index.collect()));
    bounds(line, &mut all);
    let body = line.trim_start();
    let indent = &line[..line.len() - body.len()];
    if let Some(condition) = body.strip_prefix("if (").and_then(|rest| rest.strip_suffix(") {")) {
        all.extend(["true", "false"].iter().filter(|_| !condition.is_empty()).map(|value| format!("{indent}if ({value}) {{")));
    }
    if body.starts_with("threadgroup_barrier(") || body == "continue;" {
        all.push(format!("{indent};"));
    }
    // What is stored is cut off, not rounded.
    if let Some((place, value)) = ["Element(", "Part(", "Gradient("].iter().find_map(|ty| {
        let (place, rest) = line.split_once(&format!("] = {ty}"))?;
        Some((format!("{place}] = {ty}"), rest.strip_suffix(");")?))
    }) {
        all.push(format!("{place}as_type<float>(as_type<uint>({value}) & 0xffff0000u));"));
    }
    all
}

/// A loop over an array in registers: its extent is known to the compiler, which is asked about one that is too short elsewhere.
fn is_over_registers(line: &str) -> bool {
    let Some((_, condition)) = line.split_once("= 0; ") else { return false };
    let extent = condition.split(" < ").nth(1).and_then(|rest| rest.split(';').next()).unwrap_or_default();
    line.trim_start().trim_start_matches("UNROLL ").starts_with("for (int ")
        && !extent.is_empty()
        && extent.chars().all(|c| !c.is_lowercase())
}

/// Whether a place of a line is between brackets, or is a step from one tensor's row to the next.
fn is_index(line: &str, at: usize) -> bool {
    let before = &line[..at];
    let open = before.matches('[').count() > before.matches(']').count();
    open || line.contains("_strides[")
}

fn choose(nth: usize, mut of: Vec<String>) -> Option<String> {
    (!of.is_empty()).then(|| of.swap_remove(nth % of.len()))
}

/// `clamp(x, least, most)` without either bound.
fn bounds(line: &str, all: &mut Vec<String>) {
    for (at, _) in line.match_indices("clamp(") {
        let inside = &line[at + "clamp(".len()..];
        let Some((inside, _)) = inside.split_once(')') else { continue };
        if let [x, least, most] = inside.split(", ").collect::<Vec<_>>()[..] {
            let length = "clamp(".len() + inside.len() + 1;
            all.extend([format!("max({x}, {least})"), format!("min({x}, {most})")].map(|with| replaced(line, at, length, &with)));
        }
    }
}

/// Every fault of a file.
///
/// # Errors
/// A file that cannot be read.
pub fn of(file: &str) -> Result<Vec<Edit>, String> {
    let (name, path) = named(file);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    // A rule that fits a line in several places changes the place that the line number selects, because neighbouring lines are often alike.
    // So a comment that gets longer by a line changes the faults of the lines after it, and `equivalent.toml` has to follow.
    let of_line = |code: &str, n| if is_declaration(code.trim_start()) { Vec::new() } else { changes(code, n) };
    Ok(edits::of(&name, &text, |code, n| of_line(code, n).into_iter().map(|changed| ("", changed)).collect()))
}

/// Every fault of every file.
///
/// # Errors
/// As [`of`].
pub fn all() -> Result<Vec<Edit>, String> {
    FILES.iter().map(|file| of(file)).collect::<Result<Vec<_>, _>>().map(|all| all.into_iter().flatten().collect())
}

/// The list of changes that change nothing.
///
/// # Errors
/// As [`edits::equivalents`].
pub fn equivalents(all: &[Edit]) -> Result<Vec<Equivalent>, String> {
    edits::equivalents(include_str!("../../metal/equivalent.toml"), all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_change_what_they_should() {
        let of = |line: &str| changes(line, 0);
        assert_eq!(
            of("x = min(a, simd_max(b)) + q_strides[2];"),
            ["x = max(a, simd_max(b)) + q_strides[2];", "x = min(a, simd_max(b)) - q_strides[2];",]
        );
        assert_eq!(changes("x = min(a, b) + q_strides[2];", 1)[1], "x = min(a, b) + q_strides[3];");
        assert_eq!(of("    if (row == 0) {"), ["    if (row != 0) {", "    if (true) {", "    if (false) {"]);
        assert_eq!(of("clamp(seq_len_q[batch], 0, params.seq_q)"), ["max(seq_len_q[batch], 0)", "min(seq_len_q[batch], params.seq_q)"]);
        assert_eq!(of("threadgroup_barrier(mem_flags::mem_threadgroup);"), [";"]);
        assert_eq!(
            of("out[d + e] = Element(sum * inverse);"),
            [
                "out[d + e] = Element(sum);",
                "out[d - e] = Element(sum * inverse);",
                "out[d + e] = Element(as_type<float>(as_type<uint>(sum * inverse) & 0xffff0000u));",
            ]
        );
        assert_eq!(of("for (int s = 0; s < count; s++) {"), ["for (int s = 0; s <= count; s++) {"]);
        assert!(of("UNROLL for (int j = 0; j < PASSING / 8; j++) {").is_empty());
        assert!(of("const float x = y * z;").is_empty());
    }

    #[test]
    fn every_file_has_some() {
        for file in FILES {
            let faults = super::of(file).unwrap();
            assert!(!faults.is_empty(), "{file} has {}", faults.len());
            assert!(faults.iter().all(|fault| fault.texts()[0] != fault.texts()[1]));
        }
        all().unwrap().iter().for_each(|fault| println!("{}", fault.told()));
    }

    #[test]
    fn equivalents_are_of_faults_that_are_made() {
        equivalents(&all().unwrap()).unwrap();
    }
}
