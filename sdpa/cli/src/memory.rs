//! Checks the available memory before allocations.

/// Returns the number of bytes of memory that are available without swapping; `None` if the system does not report it.
pub(crate) fn available() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns an error if fewer than `need` bytes of memory are available.
pub(crate) fn check(need: u128, available: Option<u64>) -> Result<(), String> {
    match available {
        Some(there) if need > u128::from(there) => Err(format!("{} are needed, {} are available", human(need), human(u128::from(there)))),
        Some(_) | None => Ok(()),
    }
}

/// Formats bytes, as in `1.5 GiB`.
pub(crate) fn human(bytes: u128) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut amount = bytes as f64;
    let mut unit = "bytes";
    for larger in units {
        if amount < 1024.0 {
            break;
        }
        amount /= 1024.0;
        unit = larger;
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{amount:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_counts_is_found() {
        assert_eq!(parse("MemTotal:       24 kB\nMemFree:  3 kB\nMemAvailable:   20 kB\n"), Some(20 * 1024));
        assert_eq!(parse("MemTotal: 24 kB\n"), None);
        assert_eq!(parse("MemAvailable: x kB\n"), None);
        assert_eq!(parse("MemAvailable: 99999999999999999999 kB\n"), None);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_what_is_unknown_is_not() {
        assert!(check(100, Some(100)).is_ok() && check(u128::MAX, None).is_ok());
        assert_eq!(check(3 << 30, Some(1 << 20)), Err("3.0 GiB are needed, 1.0 MiB are available".to_owned()));
        assert_eq!(human(1000), "1000 bytes");
    }
}
