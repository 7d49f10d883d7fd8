//! `docs/options.md`: every command and option, from the tool's own help.

use super::tool::{code, sdpa, stdout};
use conformance::golden;
use std::collections::BTreeSet;
use std::fmt::Write as _;

const COMMANDS: [&str; 12] = [
    "run",
    "inspect",
    "show",
    "support",
    "compile",
    "language",
    "cache report",
    "cache info",
    "cache clear",
    "doctor",
    "prove",
    "completions",
];

const HEAD: &str = "# Command line options

This page lists every command and option. It is generated from `cargo sdpa COMMAND --help`. [The command line](cli.md) explains the commands with examples.
";

/// A group of options and its entries, each an option with its description.
type Group = (String, Vec<String>);

fn help(command: &str) -> String {
    let out = sdpa(command.split(' ').filter(|word| !word.is_empty()).chain(["--help"]));
    assert_eq!(code(&out), 0, "{command}");
    stdout(&out).lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// Splits a help text into what comes before the first group, the groups, and what comes after them.
fn parse(help: &str) -> (String, Vec<Group>, String) {
    let is_heading = |line: &str| line.ends_with(':') && !line.starts_with(' ') && line != "Commands:" && line != "Exit codes:";
    let is_option = |line: &str| {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        (2..=6).contains(&indent) && (text.starts_with('-') || text.starts_with('<'))
    };
    let (mut before, mut groups, mut after) = (String::new(), Vec::<Group>::new(), String::new());
    for line in help.lines() {
        if is_heading(line) && after.is_empty() {
            groups.push((line.trim_end_matches(':').to_owned(), Vec::new()));
        } else if line.starts_with("Exit codes:") || !after.is_empty() {
            after.push_str(line);
            after.push('\n');
        } else if let Some((_, entries)) = groups.last_mut() {
            match entries.last_mut() {
                Some(entry) if !is_option(line) => {
                    entry.push('\n');
                    entry.push_str(line);
                }
                _ if line.is_empty() => {}
                _ => entries.push(line.to_owned()),
            }
        } else {
            before.push_str(line);
            before.push('\n');
        }
    }
    groups.iter_mut().flat_map(|(_, entries)| entries).for_each(|entry| entry.truncate(entry.trim_end().len()));
    (before, groups, after)
}

/// Returns the name of an option, without its value.
fn name(entry: &str) -> &str {
    entry.split([' ', ',', '\n']).find(|word| word.starts_with("--") || word.starts_with('<')).unwrap_or_default()
}

/// Returns the page. An option that `run` has with the same description is only named.
fn page() -> String {
    let mut text = HEAD.to_owned();
    let (_, of_run, _) = parse(&help("run"));
    let of_run: BTreeSet<String> = of_run.into_iter().flat_map(|(_, entries)| entries).collect();
    for command in std::iter::once("").chain(COMMANDS) {
        let (before, groups, after) = parse(&help(command));
        let title = if command.is_empty() { "cargo sdpa".to_owned() } else { format!("cargo sdpa {command}") };
        let _ = write!(text, "\n## `{title}`\n\n```text\n{}\n", before.trim_end());
        let mut shared = Vec::new();
        for (heading, entries) in groups {
            let known =
                |entry: &&String| command != "run" && (of_run.contains(*entry) || name(entry) == "--help" || name(entry) == "--json");
            shared.extend(
                entries.iter().filter(known).map(|entry| name(entry).to_owned()).filter(|name| name != "--help" && name != "--json"),
            );
            let own: Vec<&String> = entries.iter().filter(|entry| command.is_empty() || !known(entry)).collect();
            if !own.is_empty() {
                let _ = write!(text, "\n{heading}:\n{}\n", own.iter().map(|entry| entry.as_str()).collect::<Vec<_>>().join("\n\n"));
            }
        }
        if !after.is_empty() {
            let _ = write!(text, "\n{}\n", after.trim_end());
        }
        text.push_str("```\n");
        if !shared.is_empty() && !command.is_empty() {
            let names: Vec<String> = shared.iter().map(|name| format!("`{name}`")).collect();
            let _ = write!(text, "\nAs for `run`: {}.\n", names.join(", "));
        }
    }
    text
}

#[test]
fn the_page_of_options_is_the_help_of_the_tool() {
    let page = page();
    for option in ["--cu-seqlens-q", "--page-table", "--device-profile", "--strength", "--no-kernel-cache"] {
        assert!(page.contains(&format!("\n      {option} ")) || page.contains(&format!("\n      {option}\n")), "{option} in {page}");
    }
    golden::check("docs/options.md", &page).unwrap();
}
