//! Lines that a passing test shows too: libtest hides what the print macros write.

use std::io::Write;

/// Writes a line to standard output, past libtest.
pub fn say(line: &str) {
    // Whole lines at once, so that tests that run side by side do not mix theirs.
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}

/// Whether `SDPA_REQUIRE`, a list with commas, names something that tests may otherwise skip.
pub fn required(what: &str) -> bool {
    std::env::var("SDPA_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name.trim() == what))
}

/// Says that something is skipped.
///
/// # Panics
/// Where `SDPA_REQUIRE` names it.
pub fn skip(what: &str, why: &str) {
    assert!(!required(what), "SDPA_REQUIRE asks for {what}: {why}");
    say(&format!("SKIP {what}: {why}"));
}
