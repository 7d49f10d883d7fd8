//! Which keys a query attends to.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The corner of the score matrix that a diagonal starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Align {
    /// Query 0 stands at key 0 (PyTorch's `is_causal`).
    TopLeft,
    /// The last query stands at the last key (MLX's `"causal"`, chunked prefill, decode).
    BottomRight,
}

/// A rule that keeps or drops a key for a query.
///
/// With `q` the query's place on the diagonal (its index, plus `seq_kv − seq_q` when aligned to the lower right
/// corner) and `k` the key's index:
///
/// | mask | keeps |
/// |---|---|
/// | causal | `k ≤ q` |
/// | window | `q − left < k ≤ q + right`, cuDNN's convention; `None` leaves a side open |
/// | prefix_lm | `k ≤ q` or `k < len`, top left |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// `q − left < k ≤ q + right`.
    Window {
        /// Keys kept up to and including the diagonal; at least 1. `None`: all of them.
        left: Option<i64>,
        /// Keys kept past the diagonal; at least 0. `None`: all of them.
        right: Option<i64>,
        /// Where the diagonal starts.
        align: Align,
    },
    /// `k ≤ q` or `k < len`.
    PrefixLm {
        /// Keys that every query attends to; at least 0.
        len: i64,
    },
}

impl Mask {
    /// Keeps `k ≤ q`, query 0 standing at key 0.
    pub fn causal() -> Mask {
        Mask::Window { left: None, right: Some(0), align: Align::TopLeft }
    }

    /// Keeps `k ≤ q + seq_kv − seq_q`: the last query sees every key.
    pub fn causal_bottom_right() -> Mask {
        Mask::Window { left: None, right: Some(0), align: Align::BottomRight }
    }

    /// Keeps `q − left < k ≤ q + right`.
    pub fn window(left: Option<i64>, right: Option<i64>, align: Align) -> Mask {
        Mask::Window { left, right, align }
    }

    /// Keeps `k ≤ q` and the first `len` keys.
    pub fn prefix_lm(len: i64) -> Mask {
        Mask::PrefixLm { len }
    }
}

impl fmt::Display for Mask {
    /// The spelling that the command line reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |v: &Option<i64>| v.map_or_else(|| "inf".to_owned(), |n| n.to_string());
        match self {
            Mask::Window { left: None, right: Some(0), align: Align::TopLeft } => f.write_str("causal"),
            Mask::Window { left: None, right: Some(0), align: Align::BottomRight } => f.write_str("causal-bottom-right"),
            Mask::Window { left, right, align } => {
                write!(f, "window:{},{}", side(left), side(right))?;
                match align {
                    Align::TopLeft => Ok(()),
                    Align::BottomRight => f.write_str(":bottom-right"),
                }
            }
            Mask::PrefixLm { len } => write!(f, "prefix-lm:{len}"),
        }
    }
}

impl std::str::FromStr for Mask {
    type Err = ParseMaskError;

    fn from_str(text: &str) -> Result<Mask, ParseMaskError> {
        let fail = |rule: &'static str| ParseMaskError { text: text.to_owned(), rule };
        match text {
            "causal" => return Ok(Mask::causal()),
            "causal-bottom-right" => return Ok(Mask::causal_bottom_right()),
            _ => {}
        }
        if let Some(len) = text.strip_prefix("prefix-lm:") {
            return Ok(Mask::prefix_lm(len.parse().map_err(|_| fail("prefix-lm:N takes a whole number"))?));
        }
        let Some(rest) = text.strip_prefix("window:") else {
            return Err(fail("one of causal, causal-bottom-right, window:LEFT,RIGHT[:bottom-right], prefix-lm:N"));
        };
        let (sides, align) = match rest.split_once(':') {
            None => (rest, Align::TopLeft),
            Some((sides, "bottom-right")) => (sides, Align::BottomRight),
            Some(_) => return Err(fail("the only suffix of a window is :bottom-right")),
        };
        let side = |s: &str| match s {
            "inf" => Ok(None),
            n => n.parse().map(Some).map_err(|_| fail("each side of a window is a whole number or inf")),
        };
        let (left, right) = sides.split_once(',').ok_or_else(|| fail("window takes LEFT,RIGHT"))?;
        Ok(Mask::window(side(left)?, side(right)?, align))
    }
}

/// A mask that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("mask {text:?}: {rule}")]
pub struct ParseMaskError {
    /// What was given.
    pub text: String,
    /// The rule that it breaks.
    pub rule: &'static str,
}

/// The conjunction of all masks of a problem, normalised: with `q` and `k` plain indices, a key is kept where
/// `lower < k − q ≤ upper` and, if there is a prefix, `k ≤ q` or `k < prefix`.
///
/// A bound that no pair of indices violates is absent, so equal sets of kept keys have equal regions
/// (up to bands that keep nothing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Keys at `k − q ≤ lower` are dropped.
    pub lower: Option<i64>,
    /// Keys at `k − q > upper` are dropped.
    pub upper: Option<i64>,
    /// Keys at `k > q` and `k ≥ prefix` are dropped.
    pub prefix: Option<i64>,
}

impl Region {
    /// The conjunction of `masks` for the given lengths. Bounds saturate.
    pub fn of(masks: &[Mask], seq_q: i64, seq_kv: i64) -> Region {
        let mut region = Region::default();
        for mask in masks {
            match *mask {
                Mask::Window { left, right, align } => {
                    let shift = match align {
                        Align::TopLeft => 0,
                        Align::BottomRight => seq_kv - seq_q,
                    };
                    region.drop_past(right.map(|r| shift.saturating_add(r)));
                    region.drop_through(left.map(|l| shift.saturating_sub(l)));
                }
                Mask::PrefixLm { len } => region.prefix = Some(region.prefix.map_or(len, |p| p.min(len))),
            }
        }
        region.normalise(seq_q, seq_kv)
    }

    fn drop_past(&mut self, upper: Option<i64>) {
        self.upper = [self.upper, upper].into_iter().flatten().min();
    }

    fn drop_through(&mut self, lower: Option<i64>) {
        self.lower = [self.lower, lower].into_iter().flatten().max();
    }

    fn normalise(mut self, seq_q: i64, seq_kv: i64) -> Region {
        // A prefix of one key is causal: key 0 is never past a query.
        if self.prefix.is_some_and(|n| n <= 1) {
            self.prefix = None;
            self.drop_past(Some(0));
        }
        if self.prefix.is_some_and(|n| n >= seq_kv) || self.upper.is_some_and(|u| u <= 0) {
            self.prefix = None;
        }
        self.upper = self.upper.filter(|&u| u < seq_kv - 1);
        self.lower = self.lower.filter(|&l| l >= 1 - seq_q);
        // Past this, one bound keeps nothing as well as another; the clamp keeps index arithmetic inside i32.
        self.upper = self.upper.map(|u| u.max(-seq_q));
        self.lower = self.lower.map(|l| l.min(seq_kv - 1));
        self
    }

    /// Whether query `q` attends to key `k`.
    pub fn keeps(&self, q: i64, k: i64) -> bool {
        self.lower.is_none_or(|l| k - q > l) && self.upper.is_none_or(|u| k - q <= u) && self.prefix.is_none_or(|n| k <= q || k < n)
    }

    /// The keys that query `q` may attend to, as a half-open range; with a prefix, keys inside it may be dropped too.
    pub fn key_range(&self, q: i64, seq_kv: i64) -> std::ops::Range<i64> {
        let start = self.lower.map_or(0, |l| q + l + 1).clamp(0, seq_kv);
        let past_band = self.upper.map_or(seq_kv, |u| q + u + 1);
        let past_prefix = self.prefix.map_or(seq_kv, |n| n.max(q + 1));
        start..past_band.min(past_prefix).clamp(start, seq_kv)
    }

    /// True when every key is kept.
    pub fn is_full(&self) -> bool {
        *self == Region::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in the documentation of [`Mask`], word for word.
    fn table(mask: &Mask, q: i64, k: i64, seq_q: i64, seq_kv: i64) -> bool {
        match *mask {
            Mask::Window { left, right, align } => {
                let q = if align == Align::BottomRight { q + seq_kv - seq_q } else { q };
                left.is_none_or(|l| q - l < k) && right.is_none_or(|r| k <= q + r)
            }
            Mask::PrefixLm { len } => k <= q || k < len,
        }
    }

    #[test]
    fn a_region_keeps_what_every_mask_keeps() {
        let sides = [None, Some(0), Some(1), Some(3), Some(100)];
        let mut masks = vec![Mask::prefix_lm(0), Mask::prefix_lm(1), Mask::prefix_lm(3), Mask::prefix_lm(50)];
        for left in [None, Some(1), Some(4), Some(100)] {
            for right in sides {
                for align in [Align::TopLeft, Align::BottomRight] {
                    masks.push(Mask::window(left, right, align));
                }
            }
        }
        for (seq_q, seq_kv) in [(1, 1), (5, 7), (7, 5), (1, 9), (9, 1)] {
            for a in &masks {
                for b in &masks {
                    let region = Region::of(&[*a, *b], seq_q, seq_kv);
                    for q in 0..seq_q {
                        let range = region.key_range(q, seq_kv);
                        for k in 0..seq_kv {
                            let want = table(a, q, k, seq_q, seq_kv) && table(b, q, k, seq_q, seq_kv);
                            assert_eq!(region.keeps(q, k), want, "{a} and {b} at q {q}, k {k} of {seq_q} x {seq_kv}: {region:?}");
                            assert!(!want || range.contains(&k), "{a} and {b}: {k} outside {range:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn masks_are_read_as_they_are_printed() {
        for text in ["causal", "causal-bottom-right", "window:4,0", "window:inf,3", "window:7,inf:bottom-right", "prefix-lm:12"] {
            assert_eq!(text.parse::<Mask>().unwrap().to_string(), text);
        }
        for text in ["", "caussal", "window:4", "window:4,x", "window:4,0:top", "prefix-lm:", "prefix-lm:1.5"] {
            assert!(text.parse::<Mask>().is_err(), "{text:?} was read");
        }
    }
}
