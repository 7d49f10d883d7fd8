//! Output that passing tests show too: libtest captures what the print macros write.

use std::io::Write;

/// Writes a line to standard output, past libtest's capture.
pub fn say(line: &str) {
    // Write each line with a single call, so that concurrent tests do not mix their lines.
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}

/// Returns whether the environment variable `SDPA_REQUIRE`, a comma-separated list, names `what`. Tests may skip anything that it does
/// not name.
pub fn required(what: &str) -> bool {
    std::env::var("SDPA_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name.trim() == what))
}

/// Prints that the test of `what` is skipped, for the reason `why`.
///
/// # Panics
/// Panics if `SDPA_REQUIRE` names `what`.
pub fn skip(what: &str, why: &str) {
    assert!(!required(what), "SDPA_REQUIRE asks for {what}: {why}");
    say(&format!("SKIP {what}: {why}"));
}
