//! Answers of the real cuDNN that are kept, and the pages that are made of them.

use conformance::golden;
use conformance::matrix;
use conformance::offline::{Asked, RECORDED};
use conformance::support;
use std::collections::BTreeSet;

#[test]
fn stored_answers_are_read_back() {
    let (rows, all) = (matrix::rows().unwrap(), support::stored().unwrap());
    let different: Vec<String> =
        support::files(&rows, &all).unwrap().iter().filter_map(|(file, text)| golden::check(file, text).err()).collect();
    assert!(different.is_empty(), "{}", different.join("\n"));
    for (runtime, asked) in &all {
        assert!(asked.len() >= 4 * rows.len(), "{runtime}: {} answers", asked.len());
        let told = |asked: &[Asked]| support::told_out(&support::detail(&rows, asked));
        assert_eq!(told(&support::read(&support::detail(&rows, asked)).unwrap()), told(asked), "{runtime}");
    }
    assert!(support::read("a problem: perhaps").is_err() && support::read("unsupported [1]").is_err());
}

/// The pages of support, and what the command line knows of versions that are not at hand.
#[test]
fn pages_are_made_of_what_is_kept() {
    let (rows, all) = (matrix::rows().unwrap(), support::stored().unwrap());
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
