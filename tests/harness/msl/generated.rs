//! Faults that are made by rules, and not written down: every comparison, bound, step, scale, barrier and index of the kernels' texts, one
//! change at a time. Whoever writes kernels and tests has no say in which.

use crate::golden::repository;
use serde::Deserialize;
use std::collections::BTreeMap;

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

/// One change of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The file, without its ending.
    pub file: &'static str,
    /// Its line, from 1.
    pub line: usize,
    /// The line as it is, and as it is with the fault: without the spaces around it.
    pub change: [String; 2],
    /// Which of the same changes of the same lines this is, from 1.
    pub nth: usize,
    /// The file as it is, and as it is with the fault.
    pub texts: [String; 2],
}

impl Generated {
    /// In a line.
    pub fn told(&self) -> String {
        format!("{}:{}: {} => {}", named(self.file).0, self.line, self.change[0], self.change[1])
    }
}

/// What of a line is code, and may be changed.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim_end()
}

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
    let applied = |(from, to): (&str, &str), within: &dyn Fn(usize) -> bool| -> Vec<String> {
        let places = line.match_indices(from).filter(|(at, _)| !is_within_word(line, *at, from.len()) && within(*at));
        places.map(|(at, _)| replaced(line, at, from.len(), to)).collect()
    };
    let anywhere = |_: usize| true;
    let mut all: Vec<String> = OPERATORS
        .iter()
        .filter(|(from, _)| *from != " < " || !is_over_registers(line))
        .filter_map(|rule| choose(nth, applied(*rule, &anywhere)))
        .collect();
    let indices = |at: usize| is_index(line, at);
    let of_index = ARITHMETIC.iter().flat_map(|rule| applied(*rule, &indices)).chain(numbers(line, &indices));
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

fn replaced(line: &str, at: usize, length: usize, with: &str) -> String {
    format!("{}{with}{}", &line[..at], &line[at + length..])
}

/// A name is no part of another: `max(` of `simd_max(`.
fn is_within_word(line: &str, at: usize, length: usize) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    let (before, name, after) = (&line[..at], &line[at..at + length], &line[at + length..]);
    (name.starts_with(is_word) && before.ends_with(is_word)) || (name.ends_with(is_word) && after.starts_with(is_word))
}

/// Whole numbers are one more.
fn numbers(line: &str, within: &dyn Fn(usize) -> bool) -> Vec<String> {
    let (mut all, mut at) = (Vec::new(), 0);
    while at < line.len() {
        let rest = &line[at..];
        let digits = rest.chars().take_while(char::is_ascii_digit).count();
        if digits == 0 {
            at += rest.chars().next().map_or(1, char::len_utf8);
            continue;
        }
        let after = rest[digits..].chars().next().unwrap_or(' ');
        let before = line[..at].chars().next_back().unwrap_or(' ');
        // Parts of names, of hexadecimal numbers and of fractions.
        let whole =
            !(before.is_alphanumeric() || "_.-".contains(before) || (after.is_alphanumeric() && after != 'u') || "_.".contains(after));
        if let Some(number) = rest[..digits].parse::<u64>().ok().filter(|_| whole && within(at)) {
            all.push(replaced(line, at, digits, &(number + 1).to_string()));
        }
        at += digits;
        // The rest of a name or number.
        at += line[at..].chars().take_while(|c| c.is_alphanumeric() || *c == '.' || *c == '_').count();
    }
    all
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
pub fn of(file: &'static str) -> Result<Vec<Generated>, String> {
    let (_, path) = named(file);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let lines: Vec<&str> = text.lines().collect();
    let mut all: Vec<Generated> = Vec::new();
    let mut seen: BTreeMap<[String; 2], usize> = BTreeMap::new();
    for (n, line) in lines.iter().enumerate() {
        let code = code(line);
        if is_declaration(code.trim_start()) {
            continue;
        }
        // Lines next to each other are often alike.
        for changed in changes(code, n) {
            let change = [code.trim().to_owned(), changed.trim().to_owned()];
            let nth = seen.entry(change.clone()).or_default();
            *nth += 1;
            let mut other = lines.clone();
            other[n] = &changed;
            let fault = other.join("\n") + "\n";
            all.push(Generated { file, line: n + 1, nth: *nth, change, texts: [text.clone(), fault] });
        }
    }
    Ok(all)
}

/// Every fault of every file.
///
/// # Errors
/// As [`of`].
pub fn all() -> Result<Vec<Generated>, String> {
    FILES.iter().map(|file| of(file)).collect::<Result<Vec<_>, _>>().map(|all| all.into_iter().flatten().collect())
}

/// A change after which a kernel computes the same, and why.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Equivalent {
    /// The file, without its ending.
    pub file: String,
    /// The line as it is.
    pub from: String,
    /// The line as it is with the change.
    pub to: String,
    /// Which of the same changes; absent: all of them.
    pub nth: Option<usize>,
    /// Why nothing can find it.
    pub why: String,
}

impl Equivalent {
    /// Whether a fault is this one.
    pub fn is(&self, fault: &Generated) -> bool {
        self.file == fault.file && self.from == fault.change[0] && self.to == fault.change[1] && self.nth.is_none_or(|nth| nth == fault.nth)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    #[serde(default)]
    equivalent: Vec<Equivalent>,
}

/// The list of changes that change nothing.
///
/// # Errors
/// What does not parse; a change that is not made; a reason that is missing.
pub fn equivalents(all: &[Generated]) -> Result<Vec<Equivalent>, String> {
    let list: List = toml::from_str(include_str!("../../metal/equivalent.toml")).map_err(|e| e.to_string())?;
    for one in &list.equivalent {
        if one.why.trim().is_empty() {
            return Err(format!("{}: {}: equivalent, without a reason", named(&one.file).0, one.from));
        }
        if !all.iter().any(|fault| one.is(fault)) {
            return Err(format!("{}: no rule makes {} of {}", named(&one.file).0, one.to, one.from));
        }
    }
    Ok(list.equivalent)
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
            assert!(faults.iter().all(|fault| fault.texts[0] != fault.texts[1]));
        }
        all().unwrap().iter().for_each(|fault| println!("{}", fault.told()));
    }

    #[test]
    fn equivalents_are_of_faults_that_are_made() {
        equivalents(&all().unwrap()).unwrap();
    }
}
