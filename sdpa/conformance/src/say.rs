//! Output that passing tests show too: libtest captures what the print macros write.

use std::io::Write;

/// Writes a line to standard output, past libtest's capture.
pub fn say(line: &str) {
    // One write per line, so that concurrent tests do not mix their lines.
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}

/// Returns true if the comma-separated list `SDPA_REQUIRE` names `what`, which tests may otherwise skip.
pub fn required(what: &str) -> bool {
    std::env::var("SDPA_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name.trim() == what))
}

/// Prints that something is skipped.
///
/// # Panics
/// `SDPA_REQUIRE` names it.
pub fn skip(what: &str, why: &str) {
    assert!(!required(what), "SDPA_REQUIRE asks for {what}: {why}");
    say(&format!("SKIP {what}: {why}"));
}
