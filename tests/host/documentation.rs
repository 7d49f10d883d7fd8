//! Documentation names paths, commands, options and variables that exist: what it has in backticks, and in blocks of shell and text.

use crate::cli::tool;
use crate::house::{alternatives, ignored};
use conformance::golden::repository;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is held against the repository. Each check returns the words that it does not find.
type Rule = (&'static str, fn(&Known, &Span) -> Vec<String>);

const RULES: [Rule; 7] = [
    ("paths", paths),
    ("cargo sdpa: subcommands and options", tool_commands),
    ("options by themselves", lone_options),
    ("cargo: subcommands, packages, targets, features, tests", cargo_commands),
    ("scripts and modules: options and parts", script_options),
    ("device: parts", device_parts),
    ("environment variables", variables),
];

/// Words that a page may have though nothing is named so, each with the reason.
const EXCEPTIONS: [(&str, &str); 1] = [("FILE.toml", "stands for a user's file, as in the help of the tool")];

/// Files of the repository end with these. Files of a user, such as `qkv.safetensors`, end with others.
const EXTENSIONS: [&str; 11] = ["rs", "cu", "cuh", "metal", "md", "sh", "py", "tsv", "toml", "supp", "yml"];

/// Subcommands of cargo and of its extensions that the documentation may use.
const CARGO: [&str; 17] = [
    "add",
    "build",
    "check",
    "clippy",
    "deny",
    "doc",
    "fmt",
    "init",
    "install",
    "login",
    "package",
    "publish",
    "run",
    "sdpa",
    "search",
    "semver-checks",
    "test",
];

/// A piece of a page: what is between backticks, or a line of a block.
struct Span {
    page: String,
    text: String,
    /// A block that is a transcript or a picture: commands begin with `$ `.
    transcript: bool,
    /// A line of any block: bare names of files may be a user's.
    block: bool,
}

impl Span {
    /// Words without the punctuation of the sentence around them.
    fn words(&self) -> impl Iterator<Item = &str> {
        self.text.split_whitespace().map(|word| word.trim_matches(['(', ')', ',', ';', ':', '"', '\'', '…']).trim_end_matches('.'))
    }

    /// The words of each command. A pipe or `&&` begins another one; variables that are set in front and what is behind `#` are left out.
    fn commands(&self) -> Vec<Vec<&str>> {
        let text = match self.text.trim_start().strip_prefix("$ ") {
            Some(text) => text,
            None if self.transcript => return Vec::new(),
            None => &self.text,
        };
        let text = text.split(" # ").next().unwrap_or_default();
        let words: Vec<&str> = text.split_whitespace().map(|word| word.trim_matches(['(', ')', ',', ';', '"', '\'', '…'])).collect();
        let is_set = |word: &&str| word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'));
        let commands = words.split(|word| ["|", "&&", ">", "sudo"].contains(word));
        commands.map(|words| words.iter().copied().skip_while(is_set).collect()).filter(|words: &Vec<&str>| !words.is_empty()).collect()
    }
}

/// Pages by their paths from the root; one that is a link to another is left out.
fn pages() -> BTreeMap<String, String> {
    let root = std::fs::canonicalize(repository(".")).unwrap();
    let mut found = Vec::new();
    files(&root, &mut found);
    let named = |path: &PathBuf| path.strip_prefix(&root).unwrap().display().to_string();
    let own = found.iter().filter(|path| path.extension().is_some_and(|e| e == "md") && !path.is_symlink());
    own.map(|path| (named(path), std::fs::read_to_string(path).unwrap())).collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match path.is_dir() {
            true if [".git", ".pytest_cache", "__pycache__"].contains(&name.as_str()) || ignored().contains(&name) => {}
            true => files(&path, found),
            false => found.push(path),
        }
    }
}

fn spans(page: &str, text: &str) -> Vec<Span> {
    let (mut spans, mut prose, mut block, mut continued) = (Vec::new(), String::new(), None, String::new());
    let span = |text: &str, transcript, block| Span { page: page.to_owned(), text: text.to_owned(), transcript, block };
    for line in text.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            prose.push_str("\n\n");
            block = if block.is_some() { None } else { Some(language.trim()) };
        } else if let Some(language) = block {
            continued.push_str(line.trim_end_matches('\\'));
            if ["", "sh", "bash", "console", "text"].contains(&language) && !line.ends_with('\\') {
                spans.push(span(&continued, ["", "console", "text"].contains(&language), true));
            }
            if !line.ends_with('\\') {
                continued.clear();
            }
        } else {
            prose.push_str(line);
            prose.push('\n');
        }
    }
    // A span of code ends in its paragraph.
    for paragraph in prose.split("\n\n") {
        let mut rest = paragraph;
        while let Some(start) = rest.find('`') {
            let marks = rest[start..].chars().take_while(|c| *c == '`').count();
            let inside = &rest[start + marks..];
            let Some(end) = inside.find(&"`".repeat(marks)) else { break };
            spans.push(span(&inside[..end], false, false));
            rest = &inside[end + marks..];
        }
    }
    spans
}

/// Packages, sources and tools of this repository.
struct Known {
    files: BTreeSet<String>,
    /// Folders that a page may leave out in front of a path: the root, crates, their sources.
    bases: Vec<String>,
    packages: BTreeMap<String, Package>,
    /// Everything that reads variables and options.
    sources: String,
    /// What `--help` of the tool has for each subcommand.
    tool: BTreeMap<String, String>,
    /// Parts of the `device` binary, and its usage.
    device: (BTreeSet<String>, String),
}

#[derive(Default)]
struct Package {
    /// Kind and name: ("test", "host").
    targets: BTreeSet<(String, String)>,
    features: BTreeSet<String>,
}

impl Known {
    fn new() -> Known {
        let root = std::fs::canonicalize(repository(".")).unwrap();
        let mut found = Vec::new();
        files(&root, &mut found);
        let files: BTreeSet<String> = found.iter().map(|path| path.strip_prefix(&root).unwrap().display().to_string()).collect();
        // The examples below name what is wrong.
        let code = |file: &&String| {
            !file.ends_with(".md")
                && !file.ends_with("host/documentation.rs")
                && EXTENSIONS.iter().any(|e| file.ends_with(&format!(".{e}")))
                || *file == ".ci/run"
        };
        let sources = files.iter().filter(code).filter_map(|file| std::fs::read_to_string(root.join(file)).ok()).collect();
        let mut packages = BTreeMap::new();
        let mut bases = vec![String::new()];
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
        let out = Command::new(cargo).args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(&root).output().unwrap();
        let metadata: Value = serde_json::from_slice(&out.stdout).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        for package in metadata["packages"].as_array().unwrap() {
            let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
            let folder = folder.strip_prefix(&root).unwrap().display().to_string();
            bases.extend([format!("{folder}/"), format!("{folder}/src/")]);
            let targets = package["targets"].as_array().unwrap();
            let targets = targets.iter().map(|target| (text(&target["kind"][0]), text(&target["name"]))).collect();
            let features = package["features"].as_object().unwrap().keys().cloned().collect();
            packages.insert(text(&package["name"]), Package { targets, features });
        }
        let help = |words: &[&str]| String::from_utf8(tool::sdpa(words.iter().chain(&["--help"])).stdout).unwrap();
        let overview = help(&[]);
        let list = overview.split_once("Commands:").unwrap().1.split("\n\n").next().unwrap().to_owned();
        let names =
            list.lines().filter_map(|line| line.split_whitespace().next().filter(|_| line.starts_with("  ") && !line.starts_with("   ")));
        let mut tool: BTreeMap<String, String> = names.map(|name| (name.to_owned(), help(&[name]))).collect();
        tool.get_mut("cache").unwrap().push_str(&help(&["cache", "report"]));
        tool.insert(String::new(), overview);
        let device = std::fs::read_to_string(root.join("benches/src/device/main.rs")).unwrap();
        let parts = device
            .split("Some(\"")
            .skip(1)
            .filter_map(|rest| rest.split_once("\")").filter(|(_, after)| after.starts_with(" =>") || after.starts_with(" if")));
        let parts = parts.map(|(part, _)| part.to_owned()).collect();
        Known { files, bases, packages, sources, tool, device: (parts, device) }
    }

    /// Whether a path, in which `*` stands for anything, is a file or a folder of a page.
    fn exists(&self, page: &str, path: &str) -> bool {
        let folder = page.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
        let path = path.trim_end_matches('/');
        let Some((before, after)) = path.split_once('*') else {
            let is = |whole: String| {
                self.files.contains(&whole)
                    || self.files.range(format!("{whole}/")..).next().is_some_and(|f| f.starts_with(&format!("{whole}/")))
            };
            return self.bases.iter().chain([&folder]).any(|base| is(format!("{base}{path}")));
        };
        let after = after.trim_start_matches(['*', '/']);
        self.bases.iter().chain([&folder]).any(|base| {
            let before = format!("{base}{before}");
            self.files.iter().any(|file| file.strip_prefix(&before).is_some_and(|rest| rest.contains(after)))
        })
    }

    fn named(&self, name: &str) -> bool {
        let end = format!("/{name}");
        self.files.iter().any(|file| file == name || file.ends_with(&end))
    }

    fn has_target(&self, package: Option<&str>, kind: &str, name: &str) -> bool {
        let target = (kind.to_owned(), name.to_owned());
        match package {
            Some(package) => self.packages.get(package).is_some_and(|p| p.targets.contains(&target)),
            None => self.packages.values().any(|p| p.targets.contains(&target)),
        }
    }

    fn has_feature(&self, package: Option<&str>, feature: &str) -> bool {
        let (package, feature) = feature.split_once('/').map_or((package, feature), |(package, feature)| (Some(package), feature));
        match package {
            Some(package) => self.packages.get(package).is_some_and(|p| p.features.contains(feature)),
            None => self.packages.values().any(|p| p.features.contains(feature)),
        }
    }
}

fn paths(known: &Known, span: &Span) -> Vec<String> {
    let is_path =
        |word: &&str| word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./{}*,".contains(c)) && !word.starts_with(['/', '-', '*']);
    let mut wrong = Vec::new();
    for word in span.words().map(|word| word.strip_prefix("CLONE/").unwrap_or(word)).filter(is_path) {
        let first = word.split('/').next().unwrap_or_default();
        let top = word.contains('/') && known.files.iter().any(|file| file.starts_with(&format!("{first}/")));
        let file = EXTENSIONS.iter().any(|e| word.ends_with(&format!(".{e}")));
        let exists = |path: &String| match path.contains('/') {
            // A feature of a package is spelled like a path.
            true => known.exists(&span.page, path) || known.has_feature(None, path),
            false => known.named(path),
        };
        let asked = if span.block { top } else { top || file && !word.starts_with('.') };
        wrong.extend(alternatives(word).iter().filter(|path| asked && !exists(path)).cloned());
    }
    wrong
}

/// Names of long options among words: `--mask` of `--mask=causal`.
fn options<'a>(words: &'a [&'a str]) -> impl Iterator<Item = &'a str> {
    let named = |word: &&str| word.len() > 2 && word.starts_with("--") && word[2..].starts_with(|c: char| c.is_ascii_lowercase());
    words.iter().copied().filter(named).map(|word| word.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').next().unwrap_or_default())
}

/// Whether a text has an option, and not just one that begins like it.
fn has_option(text: &str, option: &str) -> bool {
    let ends = |rest: &&str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '-');
    text.split(option).skip(1).any(|rest| ends(&rest))
}

fn tool_commands(known: &Known, span: &Span) -> Vec<String> {
    let mut wrong = Vec::new();
    for command in span.commands() {
        let words = match &command[..] {
            ["cargo", "sdpa", words @ ..] | ["cargo-sdpa", words @ ..] => words,
            // `run --check` in prose.
            words @ [first, second, ..] if !span.block && known.tool.contains_key(*first) && second.starts_with("--") => words,
            _ => continue,
        };
        let subcommand = words.first().copied().filter(|word| word.chars().all(|c| c.is_ascii_lowercase())).unwrap_or_default();
        match known.tool.get(subcommand) {
            Some(help) => wrong.extend(options(words).filter(|option| !has_option(help, option)).map(str::to_owned)),
            None => wrong.push(subcommand.to_owned()),
        }
    }
    wrong
}

fn lone_options(known: &Known, span: &Span) -> Vec<String> {
    let words: Vec<&str> = span.words().collect();
    if span.block || !words.first().is_some_and(|word| word.starts_with("--")) {
        return Vec::new();
    }
    let known = |option: &&str| known.tool.values().any(|help| has_option(help, option)) || has_option(&known.sources, option);
    options(&words).filter(|option| !known(option)).map(str::to_owned).collect()
}

fn cargo_commands(known: &Known, span: &Span) -> Vec<String> {
    let mut wrong = Vec::new();
    for command in span.commands() {
        let words = match &command[..] {
            ["cargo", subcommand, ..] if !CARGO.contains(subcommand) && subcommand.chars().all(|c| c.is_ascii_lowercase()) => {
                wrong.push((*subcommand).to_owned());
                continue;
            }
            ["cargo", "test" | "build" | "run" | "check" | "clippy" | "doc", words @ ..] | ["scripts/test.sh", words @ ..] => words,
            ["cargo", "install" | "add", words @ ..] => {
                let ours = words.iter().filter(|word| word.contains("sdpa") && !word.contains('/'));
                wrong.extend(ours.filter(|word| !known.packages.contains_key(**word)).map(|word| (*word).to_owned()));
                continue;
            }
            _ => continue,
        };
        let is_name = |word: &str| word.starts_with(|c: char| c.is_ascii_lowercase());
        let values = |names: &'static [&'static str]| {
            words.windows(2).filter(move |pair| names.contains(&pair[0]) && is_name(pair[1])).map(|pair| pair[1])
        };
        let package = values(&["--package", "-p"]).next();
        wrong.extend(values(&["--package", "-p"]).filter(|name| !known.packages.contains_key(*name)).map(str::to_owned));
        for (option, kind) in [("--test", "test"), ("--example", "example"), ("--bin", "bin")] {
            let named = words.windows(2).filter(|pair| pair[0] == option && is_name(pair[1])).map(|pair| pair[1]);
            wrong.extend(named.filter(|name| !known.has_target(package, kind, name)).map(|name| format!("{option} {name}")));
        }
        let features = values(&["--features"]).flat_map(|list| list.split(','));
        wrong.extend(features.filter(|feature| !known.has_feature(package, feature)).map(|feature| format!("--features {feature}")));
        // What picks tests by their names: parts of what the sources have.
        let after = words.iter().position(|word| *word == "--test").map(|n| &words[(n + 2).min(words.len())..]).unwrap_or_default();
        let filters = after.iter().filter(|word| is_name(word)).flat_map(|word| word.split("::"));
        wrong.extend(filters.filter(|part| !known.sources.contains(part)).map(str::to_owned));
    }
    wrong
}

/// The file that a command runs, and its arguments.
fn run<'a>(command: &'a [&'a str]) -> Option<(String, &'a [&'a str])> {
    match command {
        ["python" | "python3", "-m", module, words @ ..] => Some((format!("sdpa/python/python/{}.py", module.replace('.', "/")), words)),
        ["python" | "python3", file, words @ ..] => Some(((*file).to_owned(), words)),
        ["scripts/test.sh", ..] => None,
        [file, words @ ..] if file.starts_with("scripts/") || file.starts_with("benches/") || *file == ".ci/run" => {
            Some(((*file).to_owned(), words))
        }
        _ => None,
    }
}

fn script_options(known: &Known, span: &Span) -> Vec<String> {
    let mut wrong = Vec::new();
    for command in span.commands() {
        let Some((file, words)) = run(&command) else { continue };
        let ours = file.starts_with("sdpa/python/python/sdpa") || known.files.contains(&file);
        let Ok(text) = std::fs::read_to_string(repository(&file)) else {
            wrong.extend(ours.then_some(file));
            continue;
        };
        wrong.extend(options(words).filter(|option| !has_option(&text, option)).map(|option| format!("{file} {option}")));
        let is_part = |word: &&&str| file == ".ci/run" && word.starts_with(|c: char| c.is_ascii_lowercase());
        wrong.extend(
            words.iter().filter(is_part).filter(|part| !text.contains(&format!("part_{part}()"))).map(|part| format!("{file} {part}")),
        );
    }
    wrong
}

fn device_parts(known: &Known, span: &Span) -> Vec<String> {
    let (parts, usage) = &known.device;
    let mut wrong = Vec::new();
    for command in span.commands() {
        let Some(n) = command.iter().position(|word| *word == "device") else { continue };
        let is_run = n == 0 || command[..n].iter().any(|word| word.ends_with("sanitizer"));
        let [part, arguments @ ..] = &command[n + 1..] else { continue };
        let is_name = |word: &str| word.starts_with(|c: char| c.is_ascii_lowercase());
        if !is_run || !is_name(part) {
            continue;
        }
        wrong.extend((!parts.contains(*part)).then(|| format!("device {part}")));
        wrong.extend(arguments.iter().filter(|word| is_name(word) && !usage.contains(**word)).map(|word| format!("device {part} {word}")));
    }
    wrong
}

fn variables(known: &Known, span: &Span) -> Vec<String> {
    let words = span.text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|word| ["SDPA_", "CUDNN_GRAPH_"].iter().any(|start| word.starts_with(start) && word.len() > start.len()));
    ours.filter(|word| !known.sources.split(word).skip(1).any(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')))
        .map(str::to_owned)
        .collect()
}

#[test]
fn what_the_documentation_names_exists() {
    let known = Known::new();
    let pages = pages();
    let spans: Vec<Span> = pages.iter().flat_map(|(page, text)| spans(page, text)).collect();
    assert!(pages.len() > 40 && spans.len() > 2_000, "{} pages, {} spans", pages.len(), spans.len());
    let (mut wrong, mut excused) = (BTreeSet::new(), BTreeSet::new());
    for span in &spans {
        for (rule, check) in RULES {
            for word in check(&known, span) {
                match EXCEPTIONS.iter().find(|(exception, _)| *exception == word) {
                    Some((exception, _)) => drop(excused.insert(*exception)),
                    None => drop(wrong.insert(format!("{}: `{}`: there is no {word} ({rule})", span.page, span.text.trim()))),
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} names:\n{}", wrong.len(), wrong.into_iter().collect::<Vec<_>>().join("\n"));
    let idle: Vec<&str> = EXCEPTIONS.iter().map(|(word, _)| *word).filter(|word| !excused.contains(word)).collect();
    assert!(idle.is_empty(), "exceptions that no page needs: {idle:?}");
}

/// Each rule, a text that it accepts, and one that it has to refuse.
const EXAMPLES: [(&str, &str, &str); 17] = [
    ("paths", "`scripts/test.sh`", "`scripts/tests.sh`"),
    ("paths", "`sdpa/core/src/{spec,fact}.rs`", "`sdpa/core/src/{spec,facts}.rs`"),
    ("paths", "`sdpa/conformance/cases/*.toml`", "`sdpa/conformance/cases/*.yaml`"),
    ("paths", "`house.rs`", "`houses.rs`"),
    ("paths", "```text\ncudnn-graph/src/plan.rs\n```", "```text\ncudnn-graph/src/planner.rs\n```"),
    ("cargo sdpa", "`cargo sdpa run --check`", "`cargo sdpa run --checks`"),
    ("cargo sdpa", "```text\n$ cargo sdpa doctor\n```", "```text\n$ cargo sdpa nurse\n```"),
    ("options", "`--save-plans`", "`--save-plan`"),
    ("cargo: ", "`cargo test --package conformance --test host`", "`cargo test --package conformance --test hosts`"),
    ("cargo: ", "`cargo test -p sdpa-core`", "`cargo test -p sdpa-kernel`"),
    ("cargo: ", "`cargo test --features sdpa/metrics`", "`cargo test --features sdpa/metric`"),
    ("cargo: ", "`scripts/test.sh --test host lowering::`", "`scripts/test.sh --test host no_such_test`"),
    ("scripts", "`scripts/instructions.sh --bless`", "`scripts/leaks.sh --bless`"),
    ("scripts", "`.ci/run python checks`", "`.ci/run snake`"),
    ("scripts", "```sh\npython -m sdpa.speed --save f.svg\n```", "```sh\npython -m sdpa.speeds\n```"),
    ("device", "`device suite 1 packed 4711`", "`device suites`"),
    ("environment", "`SDPA_BLESS=1`", "`SDPA_BLESSED=1`"),
];

#[test]
fn names_that_do_not_exist_are_found() {
    let known = Known::new();
    for (rule, right, wrong) in EXAMPLES {
        let (_, check) = RULES.iter().find(|(name, _)| name.starts_with(rule)).unwrap();
        let found = |text: &str| -> usize { spans("docs/testing.md", text).iter().map(|span| check(&known, span).len()).sum() };
        assert_eq!((found(right), found(wrong)), (0, 1), "{right}, {wrong}");
    }
    for (rule, _) in RULES {
        assert!(EXAMPLES.iter().any(|(example, ..)| rule.starts_with(example)), "{rule} has no example");
    }
}

/// Every mistake of a table of contents over these pages: pages that it lacks, names twice or has not, and lines that are neither chapter nor section.
fn contents_mistakes(summary: &str, pages: &BTreeSet<&str>) -> Vec<String> {
    let (mut named, mut wrong) = (BTreeMap::<&str, usize>::new(), Vec::new());
    for line in summary.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("# ")) {
        let chapter = line.strip_prefix("- [").and_then(|rest| rest.strip_suffix(')')).and_then(|rest| rest.split_once("]("));
        match chapter {
            Some((title, page)) if !title.is_empty() => *named.entry(page).or_default() += 1,
            Some(_) | None => wrong.push(format!("`{line}` is neither a section nor a chapter")),
        }
    }
    let unnamed = pages.iter().filter(|page| !named.contains_key(**page));
    wrong.extend(unnamed.map(|page| format!("{page} is in no chapter")));
    for (page, times) in named {
        wrong.extend((!pages.contains(page)).then(|| format!("there is no page {page:?}")));
        wrong.extend((times > 1).then(|| format!("{page} is in {times} chapters")));
    }
    wrong
}

#[test]
fn the_table_of_contents_names_every_page_once() {
    let pages = pages();
    let there = pages.keys().filter_map(|page| page.strip_prefix("docs/")).filter(|page| *page != "SUMMARY.md");
    let there: BTreeSet<&str> = there.collect();
    let wrong = contents_mistakes(&pages["docs/SUMMARY.md"], &there);
    assert!(there.len() > 30 && wrong.is_empty(), "docs/SUMMARY.md: {} pages\n{}", there.len(), wrong.join("\n"));
}

#[test]
fn mistakes_of_a_table_of_contents_are_found() {
    let pages = BTreeSet::from(["a.md", "b/c.md", "d.md"]);
    let right = "# Summary\n\n# Guides\n\n- [A](a.md)\n  - [C](b/c.md)\n- [D](d.md)\n";
    assert_eq!(contents_mistakes(right, &pages), [""; 0]);
    let wrong = "# Summary\n\n- [A](a.md)\n- [Again](a.md)\n- [](d.md)\n- [E](e.md)\nMore\n";
    let found = [
        "`- [](d.md)` is neither a section nor a chapter",
        "`More` is neither a section nor a chapter",
        "b/c.md is in no chapter",
        "d.md is in no chapter",
        "a.md is in 2 chapters",
        "there is no page \"e.md\"",
    ];
    assert_eq!(contents_mistakes(wrong, &pages), found);
}
