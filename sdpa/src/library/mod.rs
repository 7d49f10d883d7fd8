//! Score_mods and masks that are used everywhere, by name.
//!
//! | score_mod | a score becomes | parameters |
//! |---|---|---|
//! | `softcap:CAP` | `tanh(score / cap) · cap` | scalar `cap` |
//! | `alibi` | `score + slope(head) · (k − q)`, the published slopes for any number of heads | |
//! | `alibi-slopes` | the same with slopes of one's own | tensor `slopes[head]` |
//! | `bias:AXES` | `score + bias`; AXES of `bhqk`, those that it spans | tensor `bias`, f32 |
//! | `bias16:AXES` | the same of 16 bits | tensor `bias`, bf16 |
//! | `sandwich:N` | `score + slope(head) · Σ cos((k − q) / 10000^(i/N))`, N terms | |
//!
//! | mask | keeps | parameters |
//! |---|---|---|
//! | `causal`, `causal-bottom-right` | `k ≤ q` | |
//! | `window:LEFT,RIGHT[:bottom-right]` | `q − left < k ≤ q + right` | |
//! | `sliding-window:N` | the last N keys up to the query | |
//! | `prefix-lm:N` | `k ≤ q` or `k < N` | |
//! | `dilated:N` | every Nth key, counted from the query | |
//! | `document` | keys of the query's document | tensors `doc_q[batch, q]`, `doc_k[batch, k]`, i32 |
//! | `document-runs` | keys from `doc_start` to `doc_end` of the query | tensors `doc_start[batch, q]`, `doc_end[batch, q]`, i32 |
//! | `shared-prefix:N` | the first N keys, and those of the query's document | the same |
//! | `padding` | queries and keys within the lengths of their batch entry | tensors `seq_len_q[batch]`, `seq_len_kv[batch]`, i32 |
//! | `global-local:W,G` | keys nearer than W; the first G keys; all keys for the first G queries | |
//! | `natten:N` | the N keys around the query, moved inwards at both ends (N odd) | |
//! | `array:AXES` | where a tensor holds | tensor `mask`, bool |
//!
//! Relative positions that need a table (T5) are materialised to a bias by [`t5_bias`].

mod masks;
mod mods;
mod names;
mod t5;

pub use masks::{array_mask, dilated, document, document_runs, global_local, natten, padding, shared_prefix, sliding_window};
pub use mods::{alibi, alibi_slopes, alibi_with, bias, sandwich, softcap};
pub(crate) use names::meant;
pub use names::{MASKS, Named, SCORE_MODS};
pub use t5::{T5, t5_bias, t5_bias_gradient, t5_bucket};

use crate::mask::Mask;
use crate::score_mod::ScoreMod;
use cudnn_graph::expr::{Axes, Axis, BF16, ExprErrors, F32, Trace, Type};

/// A score_mod or mask that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {text:?}: {rule}")]
pub struct ParseError {
    /// `mask` or `score_mod`.
    pub what: &'static str,
    /// What was given.
    pub text: String,
    /// The rule that it breaks.
    pub rule: String,
}

impl ParseError {
    fn new(what: &'static str, text: &str, rule: impl Into<String>) -> ParseError {
        ParseError { what, text: text.to_owned(), rule: rule.into() }
    }
}

/// Reads the text of a trace of a given type, with at most so many roots.
pub(crate) fn trace(text: &str, what: &'static str, ty: Type, roots: usize) -> Result<Trace, ParseError> {
    let word = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_:,.".contains(c)) && text.parse::<Trace>().is_err();
    if word || text.trim().is_empty() {
        let rule = if what == "mask" {
            names::instead(text, &MASKS, "several of them joined by |, & and !, or an expression")
        } else {
            names::instead(text, &SCORE_MODS, "or an expression")
        };
        return Err(ParseError::new(what, text, rule));
    }
    let trace: Trace = text.parse().map_err(|e: ExprErrors| ParseError::new(what, text, e.to_string()))?;
    let wrong = trace.roots().iter().map(|&root| trace.ty(root)).find(|&t| t != ty);
    let uses = |node| trace.nodes().contains(&node);
    if let Some(t) = wrong {
        return Err(ParseError::new(what, text, format!("it yields {t}, a {what} yields {ty}")));
    }
    if trace.roots().len() > roots {
        return Err(ParseError::new(what, text, format!("it yields {} values, at most {roots} are used", trace.roots().len())));
    }
    if what == "mask" && uses(cudnn_graph::expr::Node::Score) {
        return Err(ParseError::new(what, text, "a mask knows indices and tensors, not the score"));
    }
    if uses(cudnn_graph::expr::Node::Upstream) && trace.roots().len() < 2 {
        return Err(ParseError::new(what, text, "upstream is for the second value, the gradient by hand"));
    }
    Ok(trace)
}

fn whole(what: &'static str, text: &str, number: &str, least: i32) -> Result<i32, ParseError> {
    let rule = || format!("takes a whole number from {least} to {}", i32::MAX);
    number.parse().ok().filter(|n| *n >= least).ok_or_else(|| ParseError::new(what, text, rule()))
}

fn axes(what: &'static str, text: &str, letters: &str) -> Result<Axes, ParseError> {
    let of = |letter: char| match letter {
        'b' => Some(Axis::Batch),
        'h' => Some(Axis::Head),
        'q' => Some(Axis::Q),
        'k' => Some(Axis::K),
        _ => None,
    };
    let rule = "the axes that it spans, of b, h, q, k, as in bias:hqk";
    letters.chars().map(of).collect::<Option<Axes>>().ok_or_else(|| ParseError::new(what, text, rule))
}

/// The score_mod of this name, or `None` where the library has none.
pub(crate) fn score_mod(text: &str) -> Option<Result<ScoreMod, ParseError>> {
    const WHAT: &str = "score_mod";
    let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
    let made = match (name, rest) {
        ("softcap", Some(cap)) => {
            let cap = cap.parse().ok().filter(|c: &f32| c.is_finite() && *c > 0.0);
            cap.map(softcap).ok_or_else(|| ParseError::new(WHAT, text, "softcap:CAP takes a positive number"))
        }
        ("alibi", None) => Ok(alibi()),
        ("alibi-slopes", None) => Ok(alibi_with()),
        ("bias", Some(letters)) => axes(WHAT, text, letters).map(|axes| bias(axes, F32)),
        ("bias16", Some(letters)) => axes(WHAT, text, letters).map(|axes| bias(axes, BF16)),
        ("sandwich", Some(n)) => whole(WHAT, text, n, 1)
            .and_then(|n| if n <= 64 { Ok(sandwich(n)) } else { Err(ParseError::new(WHAT, text, "at most 64 terms")) }),
        _ => return None,
    };
    Some(made.map(|m| m.named(text)))
}

/// The mask of this name, or `None` where the library has none.
pub(crate) fn mask(text: &str) -> Option<Result<Mask, ParseError>> {
    const WHAT: &str = "mask";
    let fail = |rule: &str| ParseError::new(WHAT, text, rule);
    let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
    let number = |n: &str, least: i32| whole(WHAT, text, n, least);
    let long = |n: &str| n.parse::<i64>().ok();
    Some(match (name, rest) {
        ("causal", None) => Ok(Mask::causal()),
        ("causal-bottom-right", None) => Ok(Mask::causal_bottom_right()),
        ("prefix-lm", Some(n)) => long(n).map(Mask::prefix_lm).ok_or_else(|| fail("prefix-lm:N takes a whole number")),
        ("window", Some(rest)) => masks::read_window(rest).map_err(fail),
        ("window", None) => Err(fail("window takes LEFT,RIGHT")),
        ("sliding-window", Some(n)) => number(n, 1).map(|n| sliding_window(n.into())),
        ("dilated", Some(n)) => number(n, 1).map(dilated),
        ("document", None) => Ok(document()),
        ("document-runs", None) => Ok(document_runs()),
        ("shared-prefix", Some(n)) => number(n, 0).map(shared_prefix),
        ("padding", None) => Ok(padding()),
        ("global-local", Some(rest)) => match rest.split_once(',') {
            Some((w, g)) => number(w, 1).and_then(|w| Ok(global_local(w, number(g, 0)?))),
            None => Err(fail("global-local takes WINDOW,GLOBALS")),
        },
        ("natten", Some(n)) => {
            number(n, 1).and_then(|n| if n % 2 == 1 { Ok(natten(n)) } else { Err(fail("natten:N takes an odd number")) })
        }
        ("array", Some(letters)) => axes(WHAT, text, letters).map(array_mask),
        _ => return None,
    })
}
