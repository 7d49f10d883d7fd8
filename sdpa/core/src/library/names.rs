//! The tables of the library: one row per name.

use super::ParseError;
use super::masks::{
    array_mask, dilated, document, document_runs, global_local, natten, padding, read_window, shared_prefix, sliding_window,
};
use super::mods::{alibi, alibi_with, bias, relative_bias, sandwich, softcap};
use super::written::{self, Named};
use crate::expr::{BF16, F32};
use crate::mask::Mask;
use crate::score_mod::ScoreMod;

/// Every named score_mod; `about` describes the modified score.
pub const SCORE_MODS: &[Named<ScoreMod>] = &[
    Named {
        spelling: "softcap:CAP",
        about: "tanh(score / cap) * cap, where the default of the scalar cap is CAP",
        cases: &["softcap:30"],
        read: |w| {
            w.with(|cap| {
                let cap = cap.parse().ok().filter(|c: &f32| c.is_finite() && *c > 0.0);
                cap.map(softcap).ok_or_else(|| w.fail("softcap:CAP takes a positive number"))
            })
        },
    },
    Named {
        spelling: "alibi",
        about: "score + slope(head) * (k - q), with the slopes of the ALiBi paper for any number of heads",
        cases: &["alibi"],
        read: |w| w.alone(alibi),
    },
    Named {
        spelling: "alibi-slopes",
        about: "score + slopes[head] * (k - q), where slopes[head] is an f32 tensor",
        cases: &["alibi-slopes"],
        read: |w| w.alone(alibi_with),
    },
    Named {
        spelling: "sandwich:N",
        about: "score + slope(head) * the sum of cos((k - q) / 10000^(i/N)) for i from 0 to N - 1, with the slopes of the ALiBi paper",
        cases: &["sandwich:4"],
        read: |w| {
            w.with(|n| match w.number(n, 1)? {
                n if n <= 64 => Ok(sandwich(n)),
                _ => Err(w.fail("sandwich takes at most 64 terms")),
            })
        },
    },
    Named {
        spelling: "bias:AXES",
        about: "score + bias, where bias is an f32 tensor over AXES, some of the letters bhqk",
        cases: &["bias:bhqk", "bias:hqk", "bias:qk", "bias:bhk", "bias:h", "bias:b"],
        read: |w| w.axes(|axes| bias(axes, F32)),
    },
    Named {
        spelling: "bias16:AXES",
        about: "score + bias, where bias is a bf16 tensor over AXES, some of the letters bhqk",
        cases: &["bias16:bhqk", "bias16:hqk", "bias16:bqk", "bias16:hq", "bias16:q", "bias16:k", "bias16:bh", "bias16:"],
        read: |w| w.axes(|axes| bias(axes, BF16)),
    },
    Named {
        spelling: "relative-bias:HEADS,REACH",
        about: "score + rel[head, clamp(k - q, -REACH, REACH) + REACH], where rel[HEADS, 2 * REACH + 1] is an f32 table",
        cases: &["relative-bias:4,20", "relative-bias:3,100"],
        read: |w| {
            w.with(|rest| {
                let (heads, reach) = rest.split_once(',').ok_or_else(|| w.fail("relative-bias takes HEADS,REACH"))?;
                match [w.number(heads, 1)?, w.number(reach, 0)?] {
                    [heads, reach] if heads <= 65_536 && reach <= 1 << 13 => Ok(relative_bias(heads, reach)),
                    _ => Err(w.fail("relative-bias takes at most 65536 heads and a reach of at most 8192")),
                }
            })
        },
    },
];

/// Every named mask; `about` describes the keys that a query attends to.
pub const MASKS: &[Named<Mask>] = &[
    Named { spelling: "causal", about: "k <= q", cases: &["causal"], read: |w| w.alone(Mask::causal) },
    Named {
        spelling: "causal-bottom-right",
        about: "k <= q + seq_kv - seq_q",
        cases: &["causal-bottom-right"],
        read: |w| w.alone(Mask::causal_bottom_right),
    },
    Named {
        spelling: "causal-ends",
        about: "k <= q + len_kv - len_q, where padding or packing sets the lengths of each sequence; otherwise they are seq_kv and seq_q",
        cases: &["causal-ends"],
        read: |w| w.alone(Mask::causal_ends),
    },
    Named {
        spelling: "window:LEFT,RIGHT[:CORNER]",
        about: "q - LEFT < k <= q + RIGHT; LEFT is at least 1, RIGHT at least 0, and either may be inf; CORNER is bottom-right or ends, \
                which shift the window as causal-bottom-right and causal-ends do",
        cases: &["window:100,0", "window:100,30:bottom-right", "window:100,inf"],
        read: |w| Some(w.rest().ok_or("window takes LEFT,RIGHT").and_then(read_window).map_err(|rule| w.fail(rule))),
    },
    Named {
        spelling: "sliding-window:N",
        about: "the last N keys up to and including position q",
        cases: &["sliding-window:128"],
        read: |w| w.whole(1, |n| sliding_window(n.into())),
    },
    Named {
        spelling: "prefix-lm:N",
        about: "k <= q | k < N",
        cases: &["prefix-lm:77"],
        read: |w| w.with(|n| n.parse().map(Mask::prefix_lm).map_err(|_| w.fail("prefix-lm:N takes an integer"))),
    },
    Named {
        spelling: "dilated:N",
        about: "keys whose distance to q is a multiple of N",
        cases: &["dilated:3"],
        read: |w| w.whole(1, dilated),
    },
    Named {
        spelling: "document",
        about: "doc_q[batch, q] == doc_k[batch, k], two i32 tensors with document numbers; \
                packed sequences are faster if documents are contiguous",
        cases: &["document"],
        read: |w| w.alone(document),
    },
    Named {
        spelling: "document-runs",
        about: "doc_start[batch, q] <= k < doc_end[batch, q], with two i32 tensors; \
                faster than document, but slower than packed sequences",
        cases: &["document-runs"],
        read: |w| w.alone(document_runs),
    },
    Named {
        spelling: "shared-prefix:N",
        about: "the first N keys, and the keys of the query's document (doc_q and doc_k as in document)",
        cases: &["shared-prefix:16"],
        read: |w| w.whole(0, shared_prefix),
    },
    Named {
        spelling: "padding",
        about: "q < seq_len_q[batch] & k < seq_len_kv[batch], with two i32 tensors",
        cases: &["padding"],
        read: |w| w.alone(padding),
    },
    Named {
        spelling: "global-local:W,G",
        about: "keys at a distance below W from q, and the first G keys; the first G queries attend to every key",
        cases: &["global-local:64,16"],
        read: |w| {
            w.with(|rest| match rest.split_once(',') {
                Some((near, globals)) => Ok(global_local(w.number(near, 1)?, w.number(globals, 0)?)),
                None => Err(w.fail("global-local takes WINDOW,GLOBALS")),
            })
        },
    },
    Named {
        spelling: "natten:N",
        about: "the N keys around q; near both ends of the sequence the window moves inwards and keeps its N keys; N must be odd",
        cases: &["natten:31"],
        read: |w| {
            w.with(|n| match w.number(n, 1)? {
                n if n % 2 == 1 => Ok(natten(n)),
                _ => Err(w.fail("natten:N takes an odd number")),
            })
        },
    },
    Named {
        spelling: "array:AXES",
        about: "keys where the bool tensor mask over AXES, some of the letters bhqk, is true",
        cases: &["array:bhqk", "array:hqk", "array:bqk", "array:qk", "array:bk", "array:q", "array:k", "array:h", "array:"],
        read: |w| w.axes(array_mask),
    },
];

/// Returns the score_mod of this name; `None` if the library has none.
pub(crate) fn score_mod(text: &str) -> Option<Result<ScoreMod, ParseError>> {
    written::read("score_mod", text, SCORE_MODS).map(|made| made.map(|m| m.named(text)))
}

/// Returns the mask of this name; `None` if the library has none.
pub(crate) fn mask(text: &str) -> Option<Result<Mask, ParseError>> {
    written::read("mask", text, MASKS)
}

/// Returns the end of a sentence that suggests a mask for a misspelled word; empty if no name is near.
pub(crate) fn meant(word: &str) -> String {
    written::near(word, MASKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mask, ScoreMod};

    #[test]
    fn every_name_is_read_as_it_is_written() {
        let of = |text: &str| text.split_once(':').map_or(text, |(name, _)| name).to_owned();
        for named in SCORE_MODS {
            assert!(!named.cases.is_empty(), "{}", named.spelling);
            for text in named.cases {
                assert_eq!((text.parse::<ScoreMod>().unwrap().to_string(), of(text)), ((*text).to_owned(), named.name().to_owned()));
            }
        }
        for named in MASKS {
            assert!(!named.cases.is_empty(), "{}", named.spelling);
            for text in named.cases {
                let mask: Mask = text.parse().unwrap();
                assert_eq!(of(text), named.name());
                // The mask `sliding-window:N` prints as `window:N,0`.
                let window = text.strip_prefix("sliding-window:").map(|n| format!("window:{n},0"));
                assert_eq!(mask.to_string(), window.unwrap_or_else(|| (*text).to_owned()));
            }
        }
    }

    #[test]
    fn names_that_are_nearly_right_are_told() {
        let of_mask = |text: &str| text.parse::<Mask>().unwrap_err().rule;
        let of_mod = |text: &str| text.parse::<ScoreMod>().unwrap_err().rule;
        assert!(
            of_mask("causl").ends_with("; did you mean causal?") && of_mask("slidng-window:3").ends_with("did you mean sliding-window?")
        );
        assert!(of_mask("wnidow:64,0").ends_with("did you mean window?") && of_mod("sofcap:30").ends_with("did you mean softcap?"));
        assert!(!of_mask("everything").contains("did you mean") && !of_mod("gelu").contains("did you mean"));
    }
}
