//! Common score_mods and masks, by name.
//!
//! [`SCORE_MODS`] and [`MASKS`] are their tables: notation, description, parser, and the texts that the conformance suites run. The command line's
//! parser, help and pages and the suites use these tables. A new entry is a function in `mods` or `masks` and a row in `names`.
//!
//! ```
//! for named in sdpa_core::library::MASKS {
//!     println!("{}: {}", named.spelling, named.about);
//! }
//! ```
//!
//! [`t5_bias`] expands relative positions that need a table (T5) to a bias.

mod masks;
mod mods;
mod names;
mod t5;
mod written;

pub use masks::{array_mask, dilated, document, document_runs, global_local, natten, padding, shared_prefix, sliding_window};
pub use mods::{alibi, alibi_slopes, alibi_with, bias, relative_bias, sandwich, softcap};
pub use names::{MASKS, SCORE_MODS};
pub(crate) use names::{mask, meant, score_mod};
pub use t5::{T5, t5_bias, t5_bias_gradient, t5_bucket};
pub use written::{Named, Written};

use crate::expr::{ExprErrors, Trace, Type};

/// The error for a text that is not a score_mod or mask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {text:?}: {rule}")]
#[non_exhaustive]
pub struct ParseError {
    /// The expected kind: `mask` or `score_mod`.
    pub what: &'static str,
    /// The text that was to be parsed.
    pub text: String,
    /// The rule that the text breaks.
    pub rule: String,
}

impl ParseError {
    pub(crate) fn new(what: &'static str, text: &str, rule: impl Into<String>) -> ParseError {
        ParseError { what, text: text.to_owned(), rule: rule.into() }
    }
}

/// Parses the text of a trace whose roots (outputs), at most `roots`, have the type `ty`. `what` names the kind of expression in errors.
pub(crate) fn trace(text: &str, what: &'static str, ty: Type, roots: usize) -> Result<Trace, ParseError> {
    let word = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_:,.".contains(c)) && text.parse::<Trace>().is_err();
    if word || text.trim().is_empty() {
        let rule = if what == "mask" {
            written::instead(text, MASKS, "several of them joined by |, & and !, or an expression")
        } else {
            written::instead(text, SCORE_MODS, "or an expression")
        };
        return Err(ParseError::new(what, text, rule));
    }
    let trace: Trace = text.parse().map_err(|e: ExprErrors| ParseError::new(what, text, e.to_string()))?;
    let wrong = trace.roots().iter().map(|&root| trace.ty(root)).find(|&t| t != ty);
    let uses = |node| trace.nodes().contains(&node);
    if let Some(t) = wrong {
        return Err(ParseError::new(what, text, format!("it yields {t}, but a {what} must yield {ty}")));
    }
    if trace.roots().len() > roots {
        return Err(ParseError::new(what, text, format!("it yields {} values, expected at most {roots}", trace.roots().len())));
    }
    if what == "mask" && uses(crate::expr::Node::Score) {
        return Err(ParseError::new(what, text, "a mask cannot read the score, only indices and tensors"));
    }
    if uses(crate::expr::Node::Upstream) && trace.roots().len() < 2 {
        return Err(ParseError::new(what, text, "only the second value, the custom gradient, can read upstream"));
    }
    Ok(trace)
}
