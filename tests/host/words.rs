//! Words that a stranger has to decode, and how often pages and comments may still have them. These numbers only fall.

use conformance::golden::repository;
use std::path::Path;

/// Sentences that open without naming a thing or an action.
const OPENERS: [&str; 9] = ["What ", "Who ", "Whose ", "Whoever ", "Of ", "Likewise", "Those ", "The same ", "Whether what "];

/// Words that this project once coined, and what the field says.
const COINED: [(&str, &str); 7] = [
    ("copy engine", "TMA"),
    ("blocks of threads", "thread blocks"),
    ("matrix units", "tensor cores"),
    ("kernels of our own", "native CUDA kernels"),
    ("second cache", "L2"),
    ("side roads", "other paths"),
    ("word for word", "verbatim"),
];

/// How often: openers of comments in products, openers of lines in pages, coined terms in both.
const ALLOWED: [(&str, usize); 3] = [("openers of comments", 0), ("openers of paragraphs", 1), ("coined terms", 0)];

const PRODUCTS: [&str; 3] = ["sdpa", "cudnn-graph", "metal-fallback"];
const PAGES: [&str; 4] = ["docs", "README.md", "CONTRIBUTING.md", "sdpa/README.md"];

fn files(path: &Path, extensions: &[&str], found: &mut Vec<(String, String)>) {
    if path.is_dir() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with('.') || super::house::ignored().contains(&name) {
            return;
        }
        let mut entries: Vec<_> = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries.iter().for_each(|entry| files(entry, extensions, found));
    } else if path.extension().is_some_and(|e| extensions.iter().any(|extension| e == *extension)) {
        found.push((path.display().to_string(), std::fs::read_to_string(path).unwrap()));
    }
}

fn under(paths: &[&str], extensions: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    paths.iter().for_each(|path| files(&repository(path), extensions, &mut found));
    assert!(!found.is_empty());
    found
}

/// The text of a comment line, if the line is one and the line before it is none.
fn opening<'a>(line: &'a str, before: &str) -> Option<&'a str> {
    let text = |line: &'a str| ["///", "//!", "//"].iter().find_map(|mark| line.trim_start().strip_prefix(mark)).map(str::trim_start);
    let continues =
        before.trim_start().starts_with("//") && !before.trim_start().trim_start_matches('/').trim_start_matches('!').trim().is_empty();
    text(line).filter(|_| !continues)
}

fn is_opener(text: &str) -> bool {
    OPENERS.iter().any(|opener| text.starts_with(opener))
}

#[test]
fn words_that_strangers_decode_become_fewer() {
    let comments: Vec<(String, Vec<String>)> = under(&PRODUCTS, &["rs", "cu", "cuh", "metal"])
        .into_iter()
        .map(|(file, text)| {
            let lines: Vec<&str> = text.lines().collect();
            let found = lines.iter().enumerate().filter_map(|(n, line)| opening(line, if n == 0 { "" } else { lines[n - 1] }));
            (file, found.filter(|text| is_opener(text)).map(str::to_owned).collect())
        })
        .collect();
    let paragraphs: Vec<String> = under(&PAGES, &["md"])
        .into_iter()
        .flat_map(|(_, text)| text.split("\n\n").map(|paragraph| paragraph.trim_start_matches("- ").to_owned()).collect::<Vec<_>>())
        .filter(|paragraph| is_opener(paragraph))
        .collect();
    let mut coined = Vec::new();
    for (file, text) in under(&PRODUCTS, &["rs", "cu", "cuh", "metal"]).into_iter().chain(under(&PAGES, &["md"])) {
        for (n, line) in text.lines().enumerate() {
            let low = line.to_lowercase();
            coined.extend(
                COINED.iter().filter(|(word, _)| low.contains(word)).map(|(word, term)| format!("{file}:{}: {word}, say {term}", n + 1)),
            );
        }
    }
    let found = [comments.iter().map(|(_, found)| found.len()).sum(), paragraphs.len(), coined.len()];
    let list = std::env::var("SDPA_WORDS").is_ok();
    if list {
        comments.iter().for_each(|(file, found)| found.iter().for_each(|text| println!("{file}: {text}")));
        paragraphs.iter().chain(&coined).for_each(|text| println!("{text}"));
    }
    let wrong: Vec<String> = ALLOWED
        .iter()
        .zip(found)
        .filter(|((_, allowed), found)| allowed != found)
        .map(|((name, allowed), found)| {
            let how =
                if found < *allowed { "lower the allowance in tests/host/words.rs" } else { "see them with SDPA_WORDS=1 and --nocapture" };
            format!("{name}: {found}, allowed {allowed}: {how}")
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
