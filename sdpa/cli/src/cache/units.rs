//! Numbers with units, short enough for a table.

/// Formats a duration in microseconds.
pub(super) fn time(us: u64) -> String {
    let us = us as f64;
    match us {
        us if us < 1e3 => format!("{us:.0} µs"),
        us if us < 1e6 => format!("{} ms", digits(us / 1e3)),
        us if us < 600e6 => format!("{} s", digits(us / 1e6)),
        us if us < 36_000e6 => format!("{} min", digits(us / 60e6)),
        us => format!("{} h", digits(us / 3600e6)),
    }
}

/// Formats three significant digits without trailing zeros.
fn digits(x: f64) -> String {
    let places = usize::from(x < 99.95) + usize::from(x < 9.995);
    let text = format!("{x:.places$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Formats a number with separators for thousands.
pub(super) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count with its noun.
pub(super) fn many(n: u64, one: &str, more: &str) -> String {
    format!("{} {}", count(n), if n == 1 { one } else { more })
}

/// Formats a fraction as percent. A fraction below 1 is never shown as 100 %.
pub(super) fn percent(part: f64) -> String {
    let percent = part * 100.0;
    let text = match percent {
        p if p > 99.9 && p < 100.0 => format!("{:.2}", p.min(99.99)),
        p => digits(p),
    };
    format!("{text} %")
}

/// Truncates a text that is too long.
pub(super) fn clip(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.to_owned() } else { text.chars().take(most).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0, 999, 1000, 41_600].map(time), ["0 µs", "999 µs", "1 ms", "41.6 ms"]);
        assert_eq!([21_349_000, 60_000_000, 900_000_000, u64::MAX].map(time), ["21.3 s", "60 s", "15 min", "5124095576 h"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 0.123, 0.999_999, 1.0].map(percent), ["0 %", "12.3 %", "99.99 %", "100 %"]);
        assert_eq!((many(1, "build", "builds"), clip("≠≠≠", 2)), ("1 build".to_owned(), "≠≠…".to_owned()));
    }
}
