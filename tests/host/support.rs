//! Answers of the real cuDNN that are kept, and the pages that are made of them.

use conformance::golden::{self, repository};
use conformance::matrix;
use conformance::offline::{Asked, RECORDED};
use conformance::support;
use std::collections::BTreeSet;

fn kept(runtime: &str) -> String {
    std::fs::read_to_string(repository(&format!("tests/snapshots/support/{runtime}.txt"))).unwrap()
}

fn all() -> Vec<(&'static str, Vec<Asked>)> {
    RECORDED.iter().map(|runtime| (*runtime, support::read(&kept(runtime)).unwrap())).collect()
}

#[test]
fn what_is_kept_is_read_back() {
    let rows = matrix::rows().unwrap();
    for (runtime, asked) in all() {
        assert_eq!(support::detail(&rows, &asked), kept(runtime), "{runtime}");
        assert!(asked.len() >= 4 * rows.len(), "{runtime}: {} answers", asked.len());
    }
    assert!(support::read("a problem: perhaps").is_err() && support::read("unsupported [1]").is_err());
}

/// The pages of support, and what the command line knows of versions that are not at hand.
#[test]
fn pages_are_made_of_what_is_kept() {
    let (rows, all) = (matrix::rows().unwrap(), all());
    let mut made = vec![
        ("docs/support.md".to_owned(), support::summary(&rows, &all)),
        ("sdpa/cli/src/support/recorded.tsv".to_owned(), support::recorded(&rows, &all)),
    ];
    made.extend(all.iter().map(|(runtime, asked)| (format!("docs/support/{runtime}.md"), support::page(&rows, runtime, asked))));
    let different: Vec<String> = made.iter().filter_map(|(file, text)| golden::check(file, text).err()).collect();
    assert!(different.is_empty(), "{}", different.join("\n"));
    for (folder, ending) in [("docs/support", "md"), ("tests/snapshots/support", "txt")] {
        let names: BTreeSet<String> = RECORDED.iter().map(|runtime| format!("{runtime}.{ending}")).collect();
        golden::no_others(folder, &names).unwrap_or_else(|e| panic!("{e}"));
    }
}
