//! Answers as short text.

use crate::offline::Answer;
use sdpa::Reason;
use sdpa::cudnn::lower::Form;
use std::collections::{BTreeMap, BTreeSet};

/// Refusals in the order of their first appearance; a table names them by number.
#[derive(Default)]
pub(super) struct Notes(Vec<String>);

impl Notes {
    fn number(&mut self, text: String) -> usize {
        let at = self.0.iter().position(|t| *t == text).unwrap_or_else(|| {
            self.0.push(text);
            self.0.len() - 1
        });
        at + 1
    }

    /// Numbers of what several answers have against problems, each once: `[1] [3]`.
    fn numbers<'a>(&mut self, answers: impl IntoIterator<Item = &'a Answer>) -> String {
        let mut numbers: Vec<usize> = answers.into_iter().flat_map(why).map(|text| self.number(text)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers.iter().map(|n| format!("[{n}]")).collect::<Vec<_>>().join(" ")
    }

    /// Every one, by number.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.0.iter().enumerate().map(|(n, text)| (n + 1, text.as_str()))
    }
}

fn why(answer: &Answer) -> Vec<String> {
    match answer {
        Answer::Supported { .. } => Vec::new(),
        Answer::Unsupported(reasons) => reasons.iter().map(reason).collect(),
        Answer::Fails(text) => vec![format!("failed: {text}")],
    }
}

/// Returns the parts of an answer that are recorded: form and engine, or the reasons.
pub(super) fn recorded_parts(answer: &Answer) -> BTreeSet<String> {
    match answer {
        Answer::Supported { form, engine: tag } => BTreeSet::from([format!("{form} {}", tag.as_deref().map_or("", engine))]),
        Answer::Unsupported(_) | Answer::Fails(_) => why(answer).into_iter().collect(),
    }
}

/// What cuDNN says on offering nothing is one remark per engine, in no order.
fn reason(reason: &Reason) -> String {
    const NONE: &str = "no engine supports the graph:; cuDNN offers none: ";
    match reason {
        Reason::Refused { form, text } => match text.split_once(NONE) {
            Some((_, remarks)) => {
                let mut remarks: Vec<&str> = remarks.split("; ").collect();
                remarks.sort_unstable();
                format!("{form} form: cuDNN offers no engine: {}", remarks.join("; "))
            }
            None => reason.to_string(),
        },
        Reason::Limit { .. } | Reason::KnownBad { .. } | Reason::Absent(_) | Reason::Failed(_) | _ => reason.to_string(),
    }
}

/// An engine without its knobs, which fill a line and say little.
fn engine(tag: &str) -> &str {
    tag.split('_').next().unwrap_or(tag)
}

/// Several answers.
pub(super) fn cell(answers: &[&Answer], notes: &mut Notes) -> String {
    let mut supported: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for answer in answers {
        if let Answer::Supported { form, engine: tag } = answer {
            let engines = supported.entry(form.to_string()).or_default();
            let name = tag.as_deref().map(engine);
            engines.extend(name.filter(|n| !engines.iter().any(|e| e == n)).map(str::to_owned));
        }
    }
    let mut parts: Vec<String> = Vec::new();
    for (form, mut engines) in supported {
        engines.sort_by_key(|e| (e.len(), e.clone()));
        parts.push(format!("{form} {}", engines.join(", ")).trim().to_owned());
    }
    let unsupported = answers.iter().filter(|a| !a.is_supported()).count();
    if unsupported > 0 {
        let count = if unsupported == answers.len() { String::new() } else { format!("{unsupported} ") };
        parts.push(format!("{count}unsupported {}", notes.numbers(answers.iter().copied())));
    }
    parts.join("; ")
}

/// One answer, as short as can be: an engine of the composite form, or why not.
pub(super) fn word(answer: &Answer, notes: &mut Notes) -> String {
    match answer {
        Answer::Supported { form, engine: tag } => {
            let name = tag.as_deref().map_or("supported", engine);
            match form {
                Form::Composite => name.to_owned(),
                Form::Unified => format!("unified {name}"),
            }
        }
        Answer::Unsupported(_) | Answer::Fails(_) => notes.numbers([answer]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_say_what_is_taken_and_why_not() {
        let supported = |engine: &str| Answer::Supported { form: Form::Composite, engine: Some(engine.to_owned()) };
        let unsupported = |why: &str| Answer::Unsupported(vec![Reason::Absent(why.to_owned())]);
        let mut notes = Notes::default();
        let mut cell = |answers: &[Answer]| super::cell(&answers.iter().collect::<Vec<_>>(), &mut notes);
        assert_eq!(cell(&[supported("eng10"), supported("eng9"), supported("eng10")]), "composite eng9, eng10");
        assert_eq!(cell(&[unsupported("x"), unsupported("x")]), "unsupported [1]");
        assert_eq!(cell(&[supported("eng2"), unsupported("y"), unsupported("x")]), "composite eng2; 2 unsupported [1] [2]");
        assert_eq!(word(&supported("eng2_k1=0"), &mut notes), "eng2");
        assert_eq!(word(&unsupported("y"), &mut notes), "[2]");
    }

    #[test]
    fn remarks_in_another_order_are_the_same() {
        let refused = |remarks: &str| {
            let text = format!("no engine supports the graph:; cuDNN offers none: {remarks}");
            reason(&Reason::Refused { form: "composite".to_owned(), text })
        };
        assert_eq!(refused("b; a"), "composite form: cuDNN offers no engine: a; b");
        assert_eq!(refused("a; b"), refused("b; a"));
    }
}
