//! Mutants of the CUDA kernels: one edit each, made by rules, of which a seed chooses some.
//!
//! Statements that only synchronise are never removed: the emulation has no memory model of global memory, so it cannot see each missing fence or barrier.
//! `tests/cuda/faults.rs` lists faults of synchronisation by hand.

use crate::edits::{self, Edit, Equivalent, numbers, replaced, swaps};
use crate::golden::repository;
use crate::random::Random;
use std::collections::BTreeMap;

/// Files that the emulation replaces by its own: an edit of theirs is never compiled.
const REPLACED: [&str; 5] = ["cluster.cuh", "mma.cuh", "ptx.cuh", "tma.cuh", "wgmma.cuh"];

/// A rule: its name, and what it makes of a line of code.
type Rule = (&'static str, fn(&str) -> Vec<String>);

/// Every rule.
pub const RULES: [Rule; 14] = [
    ("sum", |line| swapped(line, &[(" + ", " - "), (" - ", " + "), (" += ", " -= "), (" -= ", " += ")])),
    ("product", |line| swapped(line, &[(" * ", " + "), (" / ", " * "), (" % ", " / "), (" << ", " >> "), (" >> ", " << ")])),
    ("comparison", |line| {
        swapped(line, &[(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == ")])
    }),
    ("logic", |line| swapped(line, &[(" && ", " || "), (" || ", " && "), (" & ", " | "), (" | ", " & "), (" ^ ", " | "), ("!", "")])),
    ("bound", |line| swapped(line, &[("min(", "max("), ("max(", "min("), ("fminf(", "fmaxf("), ("fmaxf(", "fminf(")])),
    ("constant", constants),
    ("term", |line| without(line, &[" + ", " - "])),
    ("factor", |line| without(line, &[" * ", " / ", " % "])),
    ("condition", conditions),
    ("choice", choices),
    ("arguments", arguments),
    ("statement", statements),
    ("axis", axes),
    ("thread", threads),
];

/// Words of calls that synchronise.
const SYNCHRONISES: [&str; 10] = ["sync", "barrier", "arrive", "wait", "commit", "fence", "ping_pong", "setmaxnreg", "expect", "asm"];

/// Numbers of threads, and of what threads share.
const THREADS: [&str; 10] = ["lane", "warp", "warpgroup", "part", "split", "half", "stage", "group", "slice", "slot"];

/// Whether nothing of a line says what is computed.
fn is_declaration(line: &str) -> bool {
    let begins = ["#", "template <", "struct ", "static_assert", "extern \"C\""];
    let array = ["float ", "uint ", "int ", "float2 ", "float4 "].iter().any(|ty| line.starts_with(ty)) && line.ends_with("];");
    line.is_empty() || begins.iter().any(|with| line.starts_with(with)) || (array && !line.contains(" = "))
}

fn swapped(line: &str, pairs: &[(&str, &str)]) -> Vec<String> {
    let is_less = |from: &str| from == " < ";
    let declares = |at: usize| line[..at].contains("template");
    pairs
        .iter()
        .flat_map(|(from, to)| {
            swaps(line, from, to, &|at| !(is_less(from) && declares(at) || *from == "!" && line[at..].starts_with("!=")))
        })
        .collect()
}

/// Whole numbers are one more or one less, in turn; 0 and 1 as floats are each other.
fn constants(line: &str) -> Vec<String> {
    let turn = |number: u64| if number > 0 && (line.len() as u64 + number).is_multiple_of(2) { number - 1 } else { number + 1 };
    let mut all = numbers(line, &|_| true, turn);
    for (from, to) in [("0.0f", "1.0f"), ("1.0f", "0.0f")] {
        all.extend(swaps(line, from, to, &|_| true));
    }
    all
}

/// How long the operand is that a text begins with: a name, a number, a call, an element.
fn operand(text: &str) -> usize {
    let mut at = text.chars().take_while(|c| c.is_alphanumeric() || *c == '_' || *c == '.').map(char::len_utf8).sum();
    while let Some(open) = text[at..].chars().next().filter(|c| "([".contains(*c)) {
        let Some(end) = closed(&text[at..], open) else { return 0 };
        at += end;
    }
    at
}

/// How long the text is up to the bracket that closes its first.
fn closed(text: &str, open: char) -> Option<usize> {
    let close = if open == '(' { ')' } else { ']' };
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        depth += i32::from(c == open) - i32::from(c == close);
        if depth == 0 {
            return Some(at + 1);
        }
    }
    None
}

/// An operator and what is behind it are left out; behind a sum, a whole product.
fn without(line: &str, operators: &[&str]) -> Vec<String> {
    let mut all = Vec::new();
    for operator in operators {
        for (at, _) in line.match_indices(operator) {
            let mut end = at + operator.len();
            let first = operand(&line[end..]);
            end += first;
            let sum = [" + ", " - "].contains(operator);
            while sum && [" * ", " / ", " % "].iter().any(|product| line[end..].starts_with(product)) {
                let next = operand(&line[end + 3..]);
                if next == 0 {
                    break;
                }
                end += 3 + next;
            }
            if first > 0 {
                all.push(replaced(line, at, end - at, ""));
            }
        }
    }
    all
}

/// Conditions are negated.
fn conditions(line: &str) -> Vec<String> {
    let mut all = Vec::new();
    for keyword in ["if (", "while ("] {
        for (at, _) in line.match_indices(keyword) {
            let open = at + keyword.len() - 1;
            let Some(length) = closed(&line[open..], '(') else { continue };
            let condition = &line[open..open + length];
            if condition != "(true)" {
                all.push(replaced(line, open, length, &format!("(!{condition})")));
            }
        }
    }
    all
}

/// What a condition chooses between is swapped.
fn choices(line: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (at, _) in line.match_indices(" ? ") {
        let Some((first, second)) = line[at + 3..].split_once(" : ") else { continue };
        let mut depth = 0;
        let end = second.char_indices().find(|(_, c)| {
            depth += i32::from("([{".contains(*c)) - i32::from(")]}".contains(*c));
            depth < 0 || (depth == 0 && ",;".contains(*c))
        });
        let Some((end, _)) = end else { continue };
        if !first.contains(" ? ") && !second[..end].contains(" ? ") {
            all.push(replaced(line, at + 3, first.len() + 3 + end, &format!("{} : {first}", &second[..end])));
        }
    }
    all
}

/// Two neighbours among the arguments of a call are swapped.
fn arguments(line: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (at, _) in line.match_indices(", ") {
        let before = line[..at].rfind(['(', '{', ' ']).map_or(0, |n| n + 1);
        let (first, behind) = (&line[before..at], &line[at + 2..]);
        let second = &behind[..operand(behind)];
        let opens = line[..before].ends_with(['(', '{']) || line[..before].ends_with(", ");
        let ends = behind[second.len()..].starts_with([',', ')', '}']);
        let is_name = |text: &str| text.starts_with(|c: char| c.is_alphabetic()) && !text.contains(['(', ')']);
        if opens && ends && first != second && is_name(first) && is_name(second) {
            all.push(replaced(line, before, at + 2 + second.len() - before, &format!("{second}, {first}")));
        }
    }
    all
}

/// Statements that compute are left out.
fn statements(line: &str) -> Vec<String> {
    let body = line.trim_start();
    let word = body.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default();
    let keeps =
        ["return", "const", "constexpr", "for", "else", "using", "struct", "inline", "while", "do", "case", "break", "UNROLL_TRACES"];
    // Of a declaration a second name is next.
    let declares = word != "if" && body[word.len()..].trim_start_matches(['&', '*']).starts_with(' ') && {
        let next = body[word.len()..].trim_start_matches(['&', '*', ' ']);
        next.starts_with(|c: char| c.is_alphabetic()) || next.starts_with(['(', '*', '&'])
    };
    let template = body[word.len()..].starts_with('<') && body.contains("> ") && !body.contains(">(");
    let balanced = body.matches('(').count() == body.matches(')').count() && body.matches('{').count() == body.matches('}').count();
    if word.is_empty()
        || keeps.contains(&word)
        || declares
        || template
        || !balanced
        || !body.ends_with(';')
        || SYNCHRONISES.iter().any(|name| body.contains(name))
    {
        return Vec::new();
    }
    vec![format!("{};", &line[..line.len() - body.len()])]
}

/// Heads are batch entries, and batch entries heads; rows are heads.
fn axes(line: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (from, to) in [("batch", "head"), ("head", "batch"), ("row", "head")] {
        for (at, _) in line.match_indices(from) {
            let word = line[..at].rfind(|c: char| !(c.is_alphanumeric() || c == '_')).map_or(0, |n| n + 1);
            let ends = !line[at + from.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_');
            let member = word > 0 && line.as_bytes()[word - 1] == b'.';
            if ends && member && (at == word || line[..at].ends_with('_')) {
                all.push(replaced(line, at, from.len(), to));
            }
        }
    }
    all
}

/// Numbers of threads, and of what threads share, are one more or one less, in turn.
fn threads(line: &str) -> Vec<String> {
    let mut all = Vec::new();
    for name in THREADS {
        let used = |at: usize| {
            let (before, behind) = (&line[..at], &line[at + name.len()..]);
            let declared = ["int ", "uint ", "bool ", "&", "++", "--", "."].iter().any(|ty| before.ends_with(ty));
            let assigned =
                [" = ", " += ", " ^= ", "++", "(", ".", ",", ";"].iter().any(|with| behind.starts_with(with)) && !before.contains('(');
            !declared && !assigned && !behind.starts_with(['(', '.']) && !behind.starts_with(" = ")
        };
        let sign = if line.len().is_multiple_of(2) { '+' } else { '-' };
        all.extend(swaps(line, name, &format!("({name} {sign} 1)"), &used));
    }
    all
}

/// Every mutant of a file of kernels.
fn of(file: &str, text: &str) -> Vec<Edit> {
    edits::of(file, text, |code, _| {
        if is_declaration(code.trim_start()) {
            return Vec::new();
        }
        RULES.iter().flat_map(|(name, rule)| rule(code).into_iter().map(move |changed| (*name, changed))).collect()
    })
}

/// Every mutant of every file that the emulation compiles.
///
/// # Errors
/// Files that cannot be read.
pub fn all() -> Result<Vec<Edit>, String> {
    let folder = repository("sdpa/cuda/kernels");
    let mut files: Vec<String> = std::fs::read_dir(&folder)
        .map_err(|e| format!("{}: {e}", folder.display()))?
        .filter_map(|file| Some(file.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| !REPLACED.contains(&name.as_str()))
        .collect();
    files.sort();
    let of_file = |name: &String| {
        let text = std::fs::read_to_string(folder.join(name)).map_err(|e| format!("{name}: {e}"))?;
        Ok(of(name, &text))
    };
    files.iter().map(of_file).collect::<Result<Vec<_>, String>>().map(|all| all.into_iter().flatten().collect())
}

/// The list of mutants that change nothing observable.
///
/// # Errors
/// As [`edits::equivalents`].
pub fn equivalents(all: &[Edit]) -> Result<Vec<Equivalent>, String> {
    edits::equivalents(include_str!("../cuda/equivalent.toml"), all)
}

/// The order in which a seed takes mutants, by their places in the list: rules take turns, and each takes the file that has had the fewest turns.
pub fn order(all: &[Edit], seed: u64) -> Vec<usize> {
    let random = &mut Random::new(seed);
    let mut left: BTreeMap<&str, BTreeMap<&str, Vec<usize>>> = BTreeMap::new();
    for (n, edit) in all.iter().enumerate() {
        left.entry(edit.rule).or_default().entry(&edit.file).or_default().push(n);
    }
    let mut turns: BTreeMap<&str, usize> = BTreeMap::new();
    let mut order = Vec::new();
    while order.len() < all.len() {
        for (rule, _) in RULES {
            let Some(files) = left.get_mut(rule) else { continue };
            let least = files.keys().map(|file| turns.get(file).copied().unwrap_or(0)).min();
            let fewest: Vec<&str> = files.keys().copied().filter(|file| Some(turns.get(file).copied().unwrap_or(0)) == least).collect();
            if fewest.is_empty() {
                continue;
            }
            let file = random.pick(&fewest);
            *turns.entry(file).or_default() += 1;
            if let Some(of_file) = files.get_mut(file) {
                let at = random.between(0, of_file.len() as i64 - 1) as usize;
                order.push(of_file.swap_remove(at));
                if of_file.is_empty() {
                    files.remove(file);
                }
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a rule makes of a line.
    fn made(rule: &str, line: &str) -> Vec<String> {
        RULES.iter().find(|(name, _)| *name == rule).map(|(_, rule)| rule(line)).unwrap_or_default()
    }

    #[test]
    fn rules_change_what_they_should() {
        let table: [(&str, &str, &[&str]); 16] = [
            ("sum", "x = a + b;", &["x = a - b;"]),
            ("comparison", "if (a < b && c == d) {", &["if (a <= b && c == d) {", "if (a < b && c != d) {"]),
            ("logic", "any = a && !b;", &["any = a || !b;", "any = a && b;"]),
            ("logic", "if (a != b) {", &[]),
            ("bound", "x = min(a, fmaxf(b, c));", &["x = max(a, fmaxf(b, c));", "x = min(a, fminf(b, c));"]),
            ("constant", "x[8] = 0.0f;", &["x[7] = 0.0f;", "x[8] = 1.0f;"]),
            ("term", "at + batch * of.batch + of(a, b);", &["at + of(a, b);", "at + batch * of.batch;"]),
            ("factor", "at + batch * of.batch + head;", &["at + batch + head;"]),
            ("condition", "if (f(a) > b) return;", &["if (!(f(a) > b)) return;"]),
            ("choice", "x = a ? f(b, c) : d;", &["x = a ? d : f(b, c);"]),
            ("arguments", "f(p, batch, head + 1);", &["f(batch, p, head + 1);"]),
            ("statement", "    x[n] = 3;", &["    ;"]),
            ("statement", "Tile tile = of(p);", &[]),
            ("statement", "mbarrier_wait_parity(at.q_full, phase);", &[]),
            ("axis", "at + batch * p.o_batch;", &["at + batch * p.o_head;"]),
            ("thread", "const int lane = x + warp * 16;", &["const int lane = x + (warp - 1) * 16;"]),
        ];
        for (rule, line, wanted) in table {
            assert_eq!(made(rule, line), wanted, "{rule}");
        }
    }

    #[test]
    fn a_seed_takes_every_rule_and_file() {
        let all = all().unwrap();
        let order = order(&all, 1);
        let some: Vec<&Edit> = order.iter().take(100).map(|n| &all[*n]).collect();
        let distinct = |of: fn(&Edit) -> &str| some.iter().map(|edit| of(edit)).collect::<std::collections::BTreeSet<_>>().len();
        assert_eq!(distinct(|edit| edit.rule), RULES.len());
        assert!(distinct(|edit| &edit.file) > 30, "{} files", distinct(|edit| &edit.file));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..all.len()));
        let changed = |edit: &Edit| edit.texts()[0] != edit.texts()[1];
        assert!(some.iter().all(|edit| changed(edit)));
    }

    #[test]
    fn equivalents_are_mutants_that_rules_make() {
        equivalents(&all().unwrap()).unwrap();
    }
}
