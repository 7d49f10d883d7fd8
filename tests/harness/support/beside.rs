//! The comparison of all runtimes: the summary page, and the table of `cargo sdpa support`.

use super::{KINDS, PASSES, answer, capital, devices, index, of_kind};
use crate::matrix::Row;
use crate::offline::{Answer, Asked, PROFILES, RUNTIMES, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const HEAD: &str = "# Support on cuDNN

This page is for users who want to know how much of this library cuDNN supports, by version and GPU. The command line answers for one problem, with the reason and
what would allow it: [`cargo sdpa support`](cli.md#support).

```text
$ cargo sdpa support --shape 4,32,8,1,4096,128 --paged 16 --mask padding --mask causal-ends
```

The numbers are answers of the real cuDNN library, on machines without a GPU. The problems are those of `tests/harness/matrix.rs`: each option combined with the others,
in both passes, for four devices. A supported problem has a plan; nothing has run, because results need a GPU.

Every run of the tests asks ";

const AFTER: &str =
    " again. The others are asked when a change should affect them: `SDPA_RUNTIMES=9.13,9.28 scripts/support-table.sh`, which
also rewrites these pages.
";

type Recorded<'a> = [(&'a str, Vec<Asked>)];

/// Returns how many of the rows each device supports.
fn supported(rows: &[&Row], asked: &[Asked]) -> Vec<usize> {
    let answers = index(asked);
    let on =
        |profile: &str| rows.iter().filter(|row| answer(&answers, Wanted::Any, row, profile).is_some_and(Answer::is_supported)).count();
    PROFILES.iter().map(|(profile, _)| on(profile)).collect()
}

/// A reason without what differs between devices and versions.
fn rule(text: &str) -> String {
    const WRONG: &str = " is known to be wrong here: ";
    const EXPECTED: &str = ", expected ";
    const MOST: usize = 220;
    let rule = match (text.split_once(WRONG), text.split_once(": ")) {
        (Some((_, what)), _) => what.rsplit_once(" (").map_or(what, |(what, _)| what),
        (None, Some((form, _))) if form.ends_with(" form") => text,
        (None, Some((field, told))) if told.starts_with("got ") && told.contains(EXPECTED) => {
            return format!("{field}: {}", told.split_once(EXPECTED).map_or(told, |(_, rule)| rule));
        }
        (None, _) => text,
    };
    match rule.char_indices().nth(MOST) {
        Some((at, _)) => format!("{} …", &rule[..at]),
        None => rule.to_owned(),
    }
}

fn reasons(answer: &Answer) -> Vec<String> {
    match answer {
        Answer::Supported { .. } => Vec::new(),
        Answer::Unsupported(reasons) => reasons.iter().map(ToString::to_string).collect(),
        Answer::Fails(text) => vec![text.clone()],
    }
}

/// Unsupported problems by rule, with a count for each runtime.
fn unsupported<'a>(all: &Recorded<'a>) -> Vec<(String, BTreeMap<&'a str, usize>)> {
    let mut rules: BTreeMap<String, BTreeMap<&str, usize>> = BTreeMap::new();
    for (runtime, asked) in all {
        for one in asked.iter().filter(|one| one.wanted == Wanted::Any) {
            let here: BTreeSet<String> = reasons(&one.answer).iter().map(|text| rule(text)).collect();
            for rule in here {
                *rules.entry(rule).or_default().entry(runtime).or_default() += 1;
            }
        }
    }
    let mut rules: Vec<_> = rules.into_iter().collect();
    rules.sort_by_key(|(rule, counts)| (std::cmp::Reverse(counts.values().sum::<usize>()), rule.clone()));
    rules
}

fn heading(first: &str, all: &Recorded<'_>) -> String {
    let names: Vec<&str> = all.iter().map(|(runtime, _)| *runtime).collect();
    format!("| {first} | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(names.len()))
}

/// `docs/support.md`.
pub fn summary(rows: &[Row], all: &Recorded<'_>) -> String {
    let mut text = format!("{HEAD}{}{AFTER}", RUNTIMES.join(" and "));
    let pages: Vec<String> = all.iter().map(|(runtime, _)| format!("[{runtime}](support/{runtime}.md)")).collect();
    let _ = write!(
        text,
        "\nPages with every feature, engine and reason: {}.\n\n## Supported problems\n\nThe first column has the number of problems. The others have how many of them are supported on {}; one number if all four are equal.\n\n",
        pages.join(", "),
        devices().join(", ")
    );
    text.push_str(&heading("problems", all));
    for (kind, is) in KINDS {
        for (backward, pass) in PASSES {
            let of = of_kind(rows, is, backward);
            if of.is_empty() {
                continue;
            }
            let title = if kind.is_empty() { format!("no option, {pass}") } else { format!("{kind}, {pass}") };
            let _ = write!(text, "| {}: {} |", capital(&title), of.len());
            for (_, asked) in all {
                let counts = supported(&of, asked);
                let words: Vec<String> = counts.iter().map(usize::to_string).collect();
                let _ = write!(text, " {} |", if counts.iter().all(|n| *n == counts[0]) { words[0].clone() } else { words.join(", ") });
            }
            text.push('\n');
        }
    }
    let (differ, alike): (Vec<_>, Vec<_>) = unsupported(all)
        .into_iter()
        .partition(|(_, counts)| counts.len() < all.len() || counts.values().collect::<BTreeSet<_>>().len() > 1);
    let _ = write!(
        text,
        "\n## Reasons that differ between versions\n\nEach number counts the answers with this reason, over all problems and devices. The most frequent reason is first. {} other reasons have equal counts on all versions.\n\n",
        alike.len()
    );
    text.push_str(&heading("reason", all));
    for (rule, counts) in differ {
        let cells: Vec<String> =
            all.iter().map(|(runtime, _)| counts.get(runtime).map_or_else(|| "–".to_owned(), usize::to_string)).collect();
        let _ = writeln!(text, "| {} | {} |", rule.replace('|', "\\|"), cells.join(" | "));
    }
    text
}

/// What `cargo sdpa support` knows where a version is not at hand: tab-separated runtime, kind, pass, device, problems, supported, and the remarks of the engines.
pub fn recorded(rows: &[Row], all: &Recorded<'_>) -> String {
    let mut text = String::new();
    for (runtime, asked) in all {
        let answers = index(asked);
        for (kind, is) in KINDS {
            for (backward, pass) in PASSES {
                let of = of_kind(rows, is, backward);
                for (profile, _) in PROFILES.iter().filter(|_| !of.is_empty()) {
                    let here: Vec<&Answer> = of.iter().filter_map(|row| answer(&answers, Wanted::Any, row, profile)).collect();
                    let by_engines = |text: &&String| text.contains("cuDNN offers no engine");
                    let said: Vec<BTreeSet<String>> =
                        here.iter().map(|a| reasons(a).iter().filter(by_engines).map(|text| rule(text)).collect()).collect();
                    let words: BTreeSet<&String> = said.iter().flatten().collect();
                    let words: Vec<&str> = words.into_iter().map(String::as_str).collect();
                    let by_engines = said.iter().filter(|said| !said.is_empty()).count();
                    let supported = here.iter().filter(|a| a.is_supported()).count();
                    let _ = writeln!(
                        text,
                        "{runtime}\t{kind}\t{pass}\t{profile}\t{}\t{supported}\t{by_engines}\t{}",
                        here.len(),
                        words.join(" / ").replace('\t', " ")
                    );
                }
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_of_devices_and_versions_are_one_rule() {
        let wrong = |runtime: &str| format!("cuDNN {runtime} on sm 90 is known to be wrong here: what goes wrong (at a place (there))");
        assert_eq!(
            [rule(&wrong("9.13.1")), rule(&wrong("9.19.0"))],
            ["what goes wrong (at a place", "what goes wrong (at a place"].map(str::to_owned)
        );
        assert_eq!(rule("device: got sm 80, expected a newer one"), "device: a newer one");
        assert_eq!(rule("composite form: cuDNN offers no engine: x: y"), "composite form: cuDNN offers no engine: x: y");
        assert!(rule(&"long ".repeat(100)).ends_with(" …"));
    }
}
