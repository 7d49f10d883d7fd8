//! Edits of kernels' sources that rules make: each is one change of one line, and a fault that some test has to find.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One change of one line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The name of the file.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
    /// The rule that makes the change.
    pub rule: &'static str,
    /// The line as it is, and as it is with the change: code alone, without the spaces around it.
    pub change: [String; 2],
    /// Number of this edit among those of the file with the same change, from 1.
    pub nth: usize,
    /// The file as it is.
    text: Arc<str>,
}

impl Edit {
    /// The edit in a line of text.
    pub fn told(&self) -> String {
        format!("{}:{}: {} => {}", self.file, self.line, self.change[0], self.change[1])
    }

    /// The file as it is, and as it is with the change.
    pub fn texts(&self) -> [String; 2] {
        let mut lines: Vec<&str> = self.text.lines().collect();
        let line = lines[self.line - 1];
        let indent = &line[..line.len() - line.trim_start().len()];
        let changed = format!("{indent}{}", self.change[1]);
        lines[self.line - 1] = &changed;
        [self.text.to_string(), lines.join("\n") + "\n"]
    }
}

/// Every edit of a file. `changes` makes those of a line of code, each with its rule; it receives the number of the line, from 0.
pub fn of(file: &str, text: &str, changes: impl Fn(&str, usize) -> Vec<(&'static str, String)>) -> Vec<Edit> {
    let whole: Arc<str> = text.into();
    let mut seen: BTreeMap<[String; 2], usize> = BTreeMap::new();
    let mut all = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let code = code(line);
        for (rule, changed) in changes(code, n) {
            let change = [code.trim().to_owned(), changed.trim().to_owned()];
            let nth = seen.entry(change.clone()).or_default();
            *nth += 1;
            all.push(Edit { file: file.to_owned(), line: n + 1, rule, change, nth: *nth, text: whole.clone() });
        }
    }
    all
}

/// The part of a line that is code.
pub fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim_end()
}

/// A line with other text in place of so many bytes.
pub fn replaced(line: &str, at: usize, length: usize, with: &str) -> String {
    format!("{}{with}{}", &line[..at], &line[at + length..])
}

/// The line with the second text in place of the first, once for each place where the first is no part of a longer word.
pub fn swaps(line: &str, from: &str, to: &str, within: &dyn Fn(usize) -> bool) -> Vec<String> {
    let places = line.match_indices(from).filter(|(at, _)| !is_within_word(line, *at, from.len()) && within(*at));
    places.map(|(at, _)| replaced(line, at, from.len(), to)).collect()
}

/// A name is no part of another: `max(` of `simd_max(`.
fn is_within_word(line: &str, at: usize, length: usize) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    let (before, name, after) = (&line[..at], &line[at..at + length], &line[at + length..]);
    (name.starts_with(is_word) && before.ends_with(is_word)) || (name.ends_with(is_word) && after.starts_with(is_word))
}

/// The line with one whole number replaced, once for each number: `with` is what stands in its place.
pub fn numbers(line: &str, within: &dyn Fn(usize) -> bool, with: impl Fn(u64) -> u64) -> Vec<String> {
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
            all.push(replaced(line, at, digits, &with(number).to_string()));
        }
        at += digits;
        // The rest of a name or number.
        at += line[at..].chars().take_while(|c| c.is_alphanumeric() || *c == '.' || *c == '_').count();
    }
    all
}

/// An edit after which a kernel computes the same, and the reason.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Equivalent {
    /// The name of the file.
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
    /// Whether an edit is this one.
    pub fn is(&self, edit: &Edit) -> bool {
        self.file == edit.file && self.from == edit.change[0] && self.to == edit.change[1] && self.nth.is_none_or(|nth| nth == edit.nth)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    #[serde(default)]
    equivalent: Vec<Equivalent>,
}

/// Reads a list of edits that change nothing.
///
/// # Errors
/// Text that does not parse; an edit that no rule makes; a missing reason.
pub fn equivalents(list: &str, all: &[Edit]) -> Result<Vec<Equivalent>, String> {
    let list: List = toml::from_str(list).map_err(|e| e.to_string())?;
    for one in &list.equivalent {
        if one.why.trim().is_empty() {
            return Err(format!("{}: {}: equivalent, without a reason", one.file, one.from));
        }
        if !all.iter().any(|edit| one.is(edit)) {
            return Err(format!("{}: no rule makes {} of {}", one.file, one.to, one.from));
        }
    }
    Ok(list.equivalent)
}
