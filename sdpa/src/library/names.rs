//! The names of the library: how they are written, and what they are.

use cudnn_graph::expr::nearest;

/// A name of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// How it is written; capitals stand for numbers and axes.
    pub spelling: &'static str,
    /// What it is, in words.
    pub about: &'static str,
}

impl Named {
    /// The name without what follows it.
    pub fn name(&self) -> &'static str {
        self.spelling.split([':', '[']).next().unwrap_or(self.spelling)
    }
}

const fn named(spelling: &'static str, about: &'static str) -> Named {
    Named { spelling, about }
}

/// Every score_mod that has a name: what a score becomes.
pub const SCORE_MODS: [Named; 6] = [
    named("softcap:CAP", "tanh(score / cap) * cap; the scalar cap is CAP"),
    named("alibi", "score + slope(head) * (k - q), the published slopes"),
    named("alibi-slopes", "the same with the tensor slopes[head], f32"),
    named("bias:AXES", "score + the tensor bias, f32; AXES of bhqk, those that it spans"),
    named("bias16:AXES", "the same of a bias in bf16"),
    named("sandwich:N", "score + slope(head) * the sum of cos((k - q) / 10000^(i/N)), N terms"),
];

/// Every mask that has a name: the keys that a query keeps.
pub const MASKS: [Named; 13] = [
    named("causal", "k <= q"),
    named("causal-bottom-right", "k <= q + seq_kv - seq_q"),
    named("window:LEFT,RIGHT[:bottom-right]", "q - LEFT < k <= q + RIGHT; either may be inf"),
    named("sliding-window:N", "the last N keys up to the query"),
    named("prefix-lm:N", "k <= q | k < N"),
    named("dilated:N", "every Nth key, counted from the query"),
    named("document", "keys of the query's document: tensors doc_q[batch, q] and doc_k[batch, k], i32"),
    named("document-runs", "keys from doc_start to doc_end of the query: tensors [batch, q], i32"),
    named("shared-prefix:N", "the first N keys, and those of the query's document"),
    named("padding", "queries and keys within the lengths of their batch entry: tensors seq_len_q[batch] and seq_len_kv[batch], i32"),
    named("global-local:W,G", "keys nearer than W, the first G keys, every key for the first G queries"),
    named("natten:N", "the N keys around the query, moved inwards at both ends; N odd"),
    named("array:AXES", "where the tensor mask holds, bool; AXES of bhqk, those that it spans"),
];

/// All spellings, and what somebody may have meant.
pub(super) fn instead(text: &str, names: &[Named], more: &str) -> String {
    let all: Vec<&str> = names.iter().map(|n| n.spelling).collect();
    format!("one of {}, {more}{}", all.join(", "), near(text, names))
}

fn near(text: &str, names: &[Named]) -> String {
    let word = text.split(':').next().unwrap_or(text).trim();
    let near = nearest(word, names.iter().map(Named::name));
    near.map_or_else(String::new, |near| format!("; did you mean {near}?"))
}

/// The mask that somebody may have meant by a word, as the end of a sentence.
pub(crate) fn meant(word: &str) -> String {
    near(word, &MASKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mask, ScoreMod};

    #[test]
    fn every_name_is_read_as_it_is_written() {
        let with = |named: &Named| {
            let text = named.spelling.split('[').next().unwrap_or_default();
            let text = text.replace("LEFT,RIGHT", "4,0").replace("W,G", "4,2").replace("AXES", "hqk");
            text.replace("CAP", "30").replace(":N", ":3")
        };
        for named in &SCORE_MODS {
            let text = with(named);
            assert_eq!(text.parse::<ScoreMod>().unwrap().to_string(), text);
        }
        for named in &MASKS {
            let text = with(named);
            let mask: Mask = text.parse().unwrap();
            // A sliding window is a window, and is printed as one.
            assert!(mask.to_string() == text || mask == "window:3,0".parse().unwrap(), "{text} is printed as {mask}");
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
