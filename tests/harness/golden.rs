//! Files that hold what the code makes. Comparing is the rule; `SDPA_BLESS=1` rewrites them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A folder of the repository.
pub fn repository(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder)
}

/// Whether golden files are rewritten.
pub fn blessing() -> bool {
    std::env::var_os("SDPA_BLESS").is_some_and(|value| value == "1")
}

/// Compares a text with a file of the repository; rewrites the file instead where `SDPA_BLESS=1`.
///
/// # Errors
/// The first line that differs, or what went wrong with the file.
pub fn check(file: &str, text: &str) -> Result<(), String> {
    let path = repository(file);
    if blessing() {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| format!("{file}: {e}"))?;
        }
        return std::fs::write(&path, text).map_err(|e| format!("{file}: {e}"));
    }
    let written = std::fs::read_to_string(&path).map_err(|e| format!("{file}: {e}; SDPA_BLESS=1 writes it"))?;
    match first_difference(&written, text) {
        None => Ok(()),
        Some(difference) => Err(format!("{file} is not what the code makes; SDPA_BLESS=1 rewrites it\n{difference}")),
    }
}

fn first_difference(written: &str, made: &str) -> Option<String> {
    if written == made {
        return None;
    }
    let (mut left, mut right) = (written.lines(), made.lines());
    for n in 1.. {
        let (a, b) = (left.next(), right.next());
        if a != b {
            let show = |line: Option<&str>| line.unwrap_or("(the end)").to_owned();
            return Some(format!("line {n}\n  written: {}\n  made:    {}", show(a), show(b)));
        }
        if a.is_none() {
            break;
        }
    }
    Some("only the ends of lines differ".to_owned())
}

/// Files of a folder that nothing makes any more; removes them instead where `SDPA_BLESS=1`.
///
/// # Errors
/// Which.
pub fn no_others(folder: &str, made: &BTreeSet<String>) -> Result<(), String> {
    let entries = std::fs::read_dir(repository(folder)).map_err(|e| format!("{folder}: {e}; SDPA_BLESS=1 writes it"))?;
    let mut stale = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| format!("{folder}: {e}"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if made.contains(&name) {
            continue;
        }
        if blessing() {
            std::fs::remove_file(entry.path()).map_err(|e| format!("{folder}/{name}: {e}"))?;
        } else {
            stale.push(format!("{folder}/{name} is made by nothing; SDPA_BLESS=1 removes it"));
        }
    }
    if stale.is_empty() { Ok(()) } else { Err(stale.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found_and_named() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert!(first_difference("a\nb\n", "a\nc\n").unwrap().contains("line 2"));
        assert!(first_difference("a\n", "a\nb\n").unwrap().contains("(the end)"));
        assert!(first_difference("a\n", "a").is_some());
        assert!(check("tests/snapshots/no_such_file", "").is_err() || blessing());
    }
}
