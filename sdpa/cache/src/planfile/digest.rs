//! SHA-256, used as keys and checksums.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;

/// A SHA-256, used as a key or checksum. Its text form is 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Returns the SHA-256 of these bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    /// Starts a digest of several byte strings (parts). It depends on the parts and on the boundaries between them.
    pub fn parts() -> Parts {
        Parts(Sha256::new())
    }
}

/// A digest under construction. The length of each part is hashed before the part.
#[derive(Clone, Debug)]
pub struct Parts(Sha256);

impl Parts {
    /// Adds a part to the digest.
    #[must_use]
    pub fn part(mut self, bytes: &[u8]) -> Parts {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// Returns the digest of the parts.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// The running checksum of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Running(Sha256);

impl Running {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn so_far(&self) -> Digest {
        Digest(self.0.clone().finalize().into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// The error for a text that is not a digest; it holds the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("digest: got {0:?}, expected 64 hexadecimal digits")]
pub struct NotADigest(pub String);

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Digest, NotADigest> {
        let fail = || NotADigest(text.to_owned());
        let digits: Vec<u8> =
            text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect::<Option<_>>().ok_or_else(fail)?;
        let (pairs, rest) = digits.as_chunks::<2>();
        let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
        if !rest.is_empty() {
            return Err(fail());
        }
        Ok(Digest(bytes.try_into().map_err(|_| fail())?))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = NotADigest;

    fn try_from(text: String) -> Result<Digest, NotADigest> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn a_digest_is_sha_256_and_its_text_is_read_back() {
        let empty = Digest::of(b"");
        assert_eq!(empty.to_string(), EMPTY);
        assert_eq!(EMPTY.parse(), Ok(empty));
        assert_eq!(EMPTY.to_uppercase().parse(), Ok(empty));
        assert_eq!(serde_json::to_string(&empty).unwrap(), format!("\"{EMPTY}\""));
        assert_eq!(serde_json::from_str::<Digest>(&format!("\"{EMPTY}\"")).unwrap(), empty);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "e3", &EMPTY[1..], &format!("{EMPTY}0"), &format!("{EMPTY}00"), &EMPTY.replacen("e3", "+3", 1), &"é".repeat(32)] {
            assert_eq!(text.parse::<Digest>(), Err(NotADigest(text.to_owned())));
            assert!(serde_json::from_str::<Digest>(&format!("\"{text}\"")).is_err());
        }
    }

    #[test]
    fn parts_have_borders() {
        let digest = |parts: &[&str]| parts.iter().fold(Digest::parts(), |all, p| all.part(p.as_bytes())).finish();
        let all = [digest(&["ab", "c"]), digest(&["a", "bc"]), digest(&["abc"]), digest(&["abc", ""]), digest(&[]), Digest::of(b"abc")];
        for (i, a) in all.iter().enumerate() {
            assert!(all.iter().skip(i + 1).all(|b| a != b));
        }
        assert_eq!(digest(&["ab", "c"]), all[0]);
    }
}
