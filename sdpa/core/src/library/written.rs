//! Rows of the library's tables, and the parser of their texts.

use super::ParseError;
use crate::expr::{Axes, Axis, nearest};

/// A named entry of the library.
#[derive(Debug)]
pub struct Named<T: 'static> {
    /// The notation of the entry; capitals are placeholders for numbers and axes.
    pub spelling: &'static str,
    /// The description of the entry.
    pub about: &'static str,
    /// Texts that the conformance suites run; the first one represents the entry.
    pub cases: &'static [&'static str],
    /// Parses a text; returns `None` if the text does not have the form of this entry.
    pub read: fn(&Written<'_>) -> Option<Result<T, ParseError>>,
}

impl<T> Named<T> {
    /// Returns the name of the entry without arguments.
    pub fn name(&self) -> &'static str {
        self.spelling.split([':', '[']).next().unwrap_or(self.spelling)
    }
}

/// A text that begins with a library name.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    what: &'static str,
    text: &'a str,
    /// The arguments after the name, without the colon.
    rest: Option<&'a str>,
}

impl<'a> Written<'a> {
    /// Parses a name without arguments.
    pub(super) fn alone<T>(&self, make: fn() -> T) -> Option<Result<T, ParseError>> {
        self.rest.is_none().then(|| Ok(make()))
    }

    /// Parses a name with arguments.
    pub(super) fn with<T>(&self, read: impl FnOnce(&'a str) -> Result<T, ParseError>) -> Option<Result<T, ParseError>> {
        self.rest.map(read)
    }

    /// Parses an integer argument of at least `least`.
    pub(super) fn whole<T>(&self, least: i32, make: fn(i32) -> T) -> Option<Result<T, ParseError>> {
        self.with(|number| self.number(number, least).map(make))
    }

    /// Parses axes as the argument.
    pub(super) fn axes<T>(&self, make: fn(Axes) -> T) -> Option<Result<T, ParseError>> {
        let of = |letter: char| match letter {
            'b' => Some(Axis::Batch),
            'h' => Some(Axis::Head),
            'q' => Some(Axis::Q),
            'k' => Some(Axis::K),
            _ => None,
        };
        let rule = "expected letters of b, h, q, k, one for each axis that the tensor spans, as in bias:hqk";
        self.with(|letters| letters.chars().map(of).collect::<Option<Axes>>().map(make).ok_or_else(|| self.fail(rule)))
    }

    pub(super) fn number(&self, number: &str, least: i32) -> Result<i32, ParseError> {
        let rule = || format!("expected an integer from {least} to {}", i32::MAX);
        number.parse().ok().filter(|n| *n >= least).ok_or_else(|| self.fail(rule()))
    }

    pub(super) fn fail(&self, rule: impl Into<String>) -> ParseError {
        ParseError::new(self.what, self.text, rule)
    }

    pub(super) fn rest(&self) -> Option<&'a str> {
        self.rest
    }
}

/// Parses a text as an entry of the library.
pub(super) fn read<T>(what: &'static str, text: &str, names: &[Named<T>]) -> Option<Result<T, ParseError>> {
    let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
    let row = names.iter().find(|row| row.name() == name)?;
    (row.read)(&Written { what, text, rest })
}

/// Returns all notations, and a suggestion for a misspelled name.
pub(super) fn instead<T>(text: &str, names: &[Named<T>], more: &str) -> String {
    let all: Vec<&str> = names.iter().map(|n| n.spelling).collect();
    format!("expected one of {}, {more}{}", all.join(", "), near(text, names))
}

pub(super) fn near<T>(text: &str, names: &[Named<T>]) -> String {
    let word = text.split(':').next().unwrap_or(text).trim();
    let near = nearest(word, names.iter().map(Named::name));
    near.map_or_else(String::new, |near| format!("; did you mean {near}?"))
}
