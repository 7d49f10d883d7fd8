//! Versions of the cuDNN runtime.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A version of cuDNN, ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// The major version: 9 in 9.19.0.
    pub major: u32,
    /// The minor version: 19 in 9.19.0.
    pub minor: u32,
    /// The patch version: 0 in 9.19.0.
    pub patch: u32,
}

impl Version {
    /// The oldest runtime that this crate supports.
    pub const OLDEST: Version = Version::new(9, 0, 0);

    /// Creates a version from major, minor and patch version.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Version {
        Version { major, minor, patch }
    }

    /// Decodes the number that `cudnnGetVersion` returns: `major * 10000 + minor * 100 + patch`, and `major * 1000` before 9.
    pub fn from_number(number: usize) -> Version {
        let n = u32::try_from(number).unwrap_or(u32::MAX);
        if n < 10_000 { Version::new(n / 1000, n / 100 % 10, n % 100) } else { Version::new(n / 10_000, n / 100 % 100, n % 100) }
    }

    /// Returns whether this is `major.minor` or newer.
    pub fn at_least(self, major: u32, minor: u32) -> bool {
        self >= Version::new(major, minor, 0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_both_encodings_are_read() {
        assert_eq!(Version::from_number(91900), Version::new(9, 19, 0));
        assert_eq!(Version::from_number(91002), Version::new(9, 10, 2));
        assert_eq!(Version::from_number(8907), Version::new(8, 9, 7));
        assert!(Version::from_number(8907) < Version::OLDEST);
    }
}
