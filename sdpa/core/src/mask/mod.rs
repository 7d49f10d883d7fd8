//! Attention masks: which keys each query attends to.
//!
//! Masks combine with `&`, `|` and `!`. [`Kept`] is the normal form of a problem's masks. It recognises bands, prefix and per-sequence lengths
//! however they were written, so that executors can use their faster paths.

mod band;
pub(crate) mod ends;
mod kept;
mod linear;
mod pieces;
mod region;
mod text;

pub(crate) use band::{Corner, window};
pub use ends::Ends;
pub(crate) use kept::length_of;
pub use kept::{Kept, SEQ_LEN_KV, SEQ_LEN_Q};
pub use pieces::Piece;
pub use region::Region;

use crate::expr::{At, Binary, Bool, Builder, Const, Expr, ExprErrors, Inputs, NodeId, Params, Trace, Unary};
use crate::library::{self, ParseError};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{BitAnd, BitOr, Not};
use std::sync::Arc;

/// The corner of the score matrix that a diagonal goes through.
///
/// Exhaustive: a new alignment must stop executors from compiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Align {
    /// Query 0 is aligned with key 0 (PyTorch's `is_causal`).
    TopLeft,
    /// The last query is aligned with the last key (MLX's `"causal"`, chunked prefill, decode), both by the extents.
    BottomRight,
    /// The last query of a batch entry is aligned with its last key, by its lengths ([`Ends`]); without lengths, as [`Align::BottomRight`].
    Ends,
}

/// A custom mask: the trace of a closure. The name is used only in messages; masks with equal traces are equal.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rule {
    name: String,
    trace: Arc<Trace>,
}

impl Rule {
    pub(crate) fn new(name: &str, trace: Trace) -> Rule {
        Rule { name: name.to_owned(), trace: Arc::new(trace) }
    }

    /// Returns the name that the caller gave.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the trace of the closure.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }
}

impl PartialEq for Rule {
    fn eq(&self, other: &Rule) -> bool {
        self.trace == other.trace
    }
}

impl Eq for Rule {}

impl std::hash::Hash for Rule {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.trace.hash(state);
    }
}

/// A mask: it decides for each query and key whether the query attends to the key.
///
/// In this table `k` is the key's index and `q` the query's position on the diagonal. That is its index, plus `seq_kv − seq_q` with bottom-right
/// alignment, or plus `len_kv − len_q` of its batch entry with alignment to the ends:
///
/// | mask | attends to |
/// |---|---|
/// | causal | `k ≤ q` |
/// | window | `q − left < k ≤ q + right`, cuDNN's convention; `None` leaves a side open |
/// | prefix_lm | `k ≤ q` or `k < len`, top left |
/// | traced | any function of the indices and of tensors |
///
/// ```
/// use sdpa_core::Mask;
/// // Every third key, up to the query, within each document.
/// let mask = Mask::new("every third", |at, _| ((at.q - at.k) % 3).eq(0))? & Mask::causal() & Mask::document();
/// # Ok::<(), sdpa_core::ExprErrors>(())
/// ```
///
/// Exhaustive: executors and tools that traverse masks must handle every kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// A window: a query attends to keys with `q − left < k ≤ q + right`.
    Window {
        /// The number of keys up to and including the diagonal that a query attends to; at least 1. `None` means all of them.
        left: Option<i64>,
        /// The number of keys past the diagonal that a query attends to; at least 0. `None` means all of them.
        right: Option<i64>,
        /// The corner of the score matrix at which the diagonal starts.
        align: Align,
    },
    /// A causal mask with a prefix: a query attends to keys with `k ≤ q` or `k < len`.
    PrefixLm {
        /// The number of first keys that every query attends to; at least 0.
        len: i64,
    },
    /// A custom mask: [`Mask::new`].
    Traced(Rule),
    /// Attends where all of these masks do.
    All(Vec<Mask>),
    /// Attends where at least one of these masks does.
    Any(Vec<Mask>),
    /// Attends where this mask does not.
    Not(Box<Mask>),
}

impl Mask {
    /// Traces a closure into a mask. The closure receives the position of a score and declares parameters; it returns `true` where the
    /// query attends to the key. It runs once, here. `name` is used only in messages.
    ///
    /// # Errors
    /// Returns every invalid declaration of a parameter.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::Mask;
    /// // Chunks of 64 keys: a query attends to its own chunk.
    /// let chunked = Mask::new("chunked", |at, _| (at.q / 64).eq(at.k / 64))?;
    /// assert_eq!(chunked.to_string(), "q / 64 == k / 64");
    /// # Ok::<(), sdpa_core::ExprErrors>(())
    /// ```
    pub fn new<F>(name: &str, f: F) -> Result<Mask, ExprErrors>
    where
        F: for<'t> FnOnce(At<'t>, Params<'t>) -> Expr<'t, Bool>,
    {
        Ok(Mask::Traced(Rule::new(name, Trace::of_mask(f)?)))
    }

    /// Attends to keys `k ≤ q`; query 0 is aligned with key 0.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
    /// let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal()).validate()?;
    /// assert_eq!(problem.kept().to_string(), "causal");
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn causal() -> Mask {
        Mask::Window { left: None, right: Some(0), align: Align::TopLeft }
    }

    /// Attends to keys `k ≤ q + seq_kv − seq_q`: the last query attends to every key.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
    /// let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal_bottom_right()).validate()?;
    /// assert_eq!(problem.kept().to_string(), "k - q <= 2");
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn causal_bottom_right() -> Mask {
        Mask::Window { left: None, right: Some(0), align: Align::BottomRight }
    }

    /// Attends to keys `k ≤ q + len_kv − len_q`: the last query of a batch entry attends to all its keys.
    ///
    /// Lengths are those of [`Mask::padding`] in the same problem, or of packed sequences; without them, the extents.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// let shape = Shape { batch: 2, heads_q: 1, heads_kv: 1, seq_q: 4, seq_kv: 64, dim_qk: 8, dim_v: 8 };
    /// let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::padding()).mask(Mask::causal_ends());
    /// let names: Vec<String> = spec.validate()?.params().iter().map(|p| p.name.clone()).collect();
    /// assert_eq!(names, ["seq_len_q", "seq_len_kv"]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn causal_ends() -> Mask {
        Mask::Window { left: None, right: Some(0), align: Align::Ends }
    }

    /// Attends to keys `q − left < k ≤ q + right`.
    ///
    /// ```
    /// use sdpa_core::{Align, Mask};
    /// // The last 128 keys up to the query.
    /// let mask = Mask::window(Some(128), Some(0), Align::TopLeft);
    /// assert_eq!(mask.to_string().parse::<Mask>()?, mask);
    /// # Ok::<(), sdpa_core::ParseError>(())
    /// ```
    pub fn window(left: Option<i64>, right: Option<i64>, align: Align) -> Mask {
        Mask::Window { left, right, align }
    }

    /// Attends to keys `k ≤ q`, and to the first `len` keys from every query.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
    /// let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::prefix_lm(3)).validate()?;
    /// assert_eq!(problem.kept().to_string(), "(k <= q | k < 3)");
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn prefix_lm(len: i64) -> Mask {
        Mask::PrefixLm { len }
    }

    /// Returns the mask as a trace. A trace does not know per-sequence lengths, so bottom-right aligned windows use the extents in it.
    ///
    /// # Errors
    /// Fails if two parts of the mask declare a parameter of the same name differently.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::Mask;
    /// assert_eq!((!Mask::causal()).trace()?.to_string(), "!(k - q <= 0)");
    /// # Ok::<(), sdpa_core::ExprErrors>(())
    /// ```
    pub fn trace(&self) -> Result<Trace, ExprErrors> {
        let mut b = Builder::new();
        let root = self.build(&mut b, Corner::Extents);
        b.finish(&[root]).map_err(ExprErrors)
    }

    /// Appends the mask to a trace under construction.
    fn build(&self, b: &mut Builder, ends: Corner) -> NodeId {
        let joined = |b: &mut Builder, masks: &[Mask], f: Binary| {
            let empty = Const::Bool(f == Binary::And);
            let parts: Vec<NodeId> = masks.iter().map(|m| m.build(b, ends)).collect();
            parts.into_iter().reduce(|x, y| b.binary(f, x, y)).unwrap_or_else(|| b.konst(empty))
        };
        match self {
            Mask::Window { left, right, align } => {
                let corner = match align {
                    Align::TopLeft => Corner::Origin,
                    Align::BottomRight => Corner::Extents,
                    Align::Ends => ends,
                };
                band::window(b, *left, *right, corner)
            }
            Mask::PrefixLm { len } => band::prefix(b, *len),
            Mask::Traced(rule) => b.inline(&rule.trace, Inputs::default())[0],
            Mask::All(masks) => joined(b, masks, Binary::And),
            Mask::Any(masks) => joined(b, masks, Binary::Or),
            Mask::Not(mask) => {
                let x = mask.build(b, ends);
                b.unary(Unary::Not, x)
            }
        }
    }
}

impl BitAnd for Mask {
    type Output = Mask;

    /// Attends where both masks do.
    fn bitand(self, other: Mask) -> Mask {
        Mask::All(vec![self, other])
    }
}

impl BitOr for Mask {
    type Output = Mask;

    /// Attends where either mask does.
    fn bitor(self, other: Mask) -> Mask {
        Mask::Any(vec![self, other])
    }
}

impl Not for Mask {
    type Output = Mask;

    /// Attends where this mask does not.
    fn not(self) -> Mask {
        Mask::Not(Box::new(self))
    }
}

impl fmt::Display for Mask {
    /// Writes the notation that the command line parses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |v: &Option<i64>| v.map_or_else(|| "inf".to_owned(), |n| n.to_string());
        match self {
            Mask::Window { left: None, right: Some(0), align: Align::TopLeft } => f.write_str("causal"),
            Mask::Window { left: None, right: Some(0), align: Align::BottomRight } => f.write_str("causal-bottom-right"),
            Mask::Window { left: None, right: Some(0), align: Align::Ends } => f.write_str("causal-ends"),
            Mask::Window { left, right, align } => {
                write!(f, "window:{},{}", side(left), side(right))?;
                match align {
                    Align::TopLeft => Ok(()),
                    Align::BottomRight => f.write_str(":bottom-right"),
                    Align::Ends => f.write_str(":ends"),
                }
            }
            Mask::PrefixLm { len } => write!(f, "prefix-lm:{len}"),
            Mask::Traced(rule) if library::mask(&rule.name).is_some_and(|known| known.as_ref() == Ok(self)) => f.write_str(&rule.name),
            Mask::Traced(rule) => write!(f, "{}", rule.trace),
            Mask::All(_) | Mask::Any(_) | Mask::Not(_) if ends::reads(self) => f.write_str(&text::joined_by_names(self)),
            Mask::All(_) | Mask::Any(_) | Mask::Not(_) => match self.trace() {
                Ok(trace) => write!(f, "{trace}"),
                Err(errors) => write!(f, "# {errors}"),
            },
        }
    }
}

impl std::str::FromStr for Mask {
    type Err = ParseError;

    /// Parses a name of the library ([`crate::library`]), the text of a trace, or several of either joined by `|`, `&`, `!` and parentheses: `causal
    /// & !(document | k < 4)`.
    fn from_str(text: &str) -> Result<Mask, ParseError> {
        text::read(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in the documentation of [`Mask`], row by row.
    fn table(mask: &Mask, q: i64, k: i64, seq_q: i64, seq_kv: i64) -> bool {
        match *mask {
            Mask::Window { left, right, align } => {
                let q = match align {
                    Align::TopLeft => q,
                    Align::BottomRight | Align::Ends => q + seq_kv - seq_q,
                };
                left.is_none_or(|l| q - l < k) && right.is_none_or(|r| k <= q + r)
            }
            Mask::PrefixLm { len } => k <= q || k < len,
            Mask::Traced(_) | Mask::All(_) | Mask::Any(_) | Mask::Not(_) => unreachable!("not in these tests"),
        }
    }

    #[test]
    fn a_region_keeps_what_every_mask_keeps() {
        let sides = [None, Some(0), Some(1), Some(3), Some(100)];
        let mut masks = vec![Mask::prefix_lm(0), Mask::prefix_lm(1), Mask::prefix_lm(3), Mask::prefix_lm(50)];
        for left in [None, Some(1), Some(4), Some(100)] {
            for right in sides {
                for align in [Align::TopLeft, Align::BottomRight, Align::Ends] {
                    masks.push(Mask::window(left, right, align));
                }
            }
        }
        for (seq_q, seq_kv) in [(1, 1), (5, 7), (7, 5), (1, 9), (9, 1)] {
            for a in &masks {
                for b in &masks {
                    let kept = Kept::of(&[a.clone(), b.clone()], [1, 1, seq_q, seq_kv]).unwrap();
                    assert_eq!((kept.seq_len_q, kept.seq_len_kv, kept.rest), (false, false, None), "{a} and {b}");
                    let region = kept.region;
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
        for text in [
            "causal",
            "causal-bottom-right",
            "window:4,0",
            "window:inf,3",
            "window:7,inf:bottom-right",
            "causal-ends",
            "window:7,inf:ends",
            "prefix-lm:12",
            "dilated:3",
            "document",
            "shared-prefix:5",
            "padding",
            "global-local:7,2",
            "natten:9",
            "tensor ids[batch, k]: i32; ids > 3 & q < k",
        ] {
            assert_eq!(text.parse::<Mask>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "caussal",
            "window:4",
            "window:4,x",
            "window:4,0:top",
            "prefix-lm:",
            "prefix-lm:1.5",
            "dilated:0",
            "natten:4",
            "q + k",
            "score > 0.0",
        ] {
            assert!(text.parse::<Mask>().is_err(), "{text:?} was read");
        }
    }

    #[test]
    fn a_rule_keeps_its_name_and_is_its_trace() {
        let rule = |name: &str| {
            let Mask::Traced(rule) = Mask::new(name, |at, _| ((at.q - at.k) % 3).eq(0)).unwrap() else { panic!("{name}") };
            rule
        };
        assert_eq!(rule("every third").name(), "every third");
        assert_eq!(rule("every third"), rule("by another name"));
        assert_eq!(rule("every third").trace().to_string(), "(q - k) % 3 == 0");
    }

    #[test]
    fn rules_that_differ_have_other_hashes() {
        let hash = |text: &str| {
            use std::hash::BuildHasher;
            std::hash::BuildHasherDefault::<std::hash::DefaultHasher>::default().hash_one(text.parse::<Mask>().unwrap())
        };
        assert_eq!(hash("dilated:3"), hash("dilated:3"));
        assert_ne!(hash("dilated:3"), hash("dilated:4"));
    }
}
