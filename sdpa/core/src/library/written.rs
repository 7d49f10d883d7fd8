//! A row of the library, and how a text of it is read.

use super::ParseError;
use crate::expr::{Axes, Axis, nearest};

/// A name of the library, and everything that is said of it.
#[derive(Debug)]
pub struct Named<T: 'static> {
    /// Its notation; capitals stand for numbers and axes.
    pub spelling: &'static str,
    /// Its description.
    pub about: &'static str,
    /// Texts of it that the conformance suites run; the first stands for all.
    pub cases: &'static [&'static str],
    /// Makes it of a text; `None` where the library has nothing of this form.
    pub read: fn(&Written<'_>) -> Option<Result<T, ParseError>>,
}

impl<T> Named<T> {
    /// The name without what follows it.
    pub fn name(&self) -> &'static str {
        self.spelling.split([':', '[']).next().unwrap_or(self.spelling)
    }
}

/// A text that begins with a name of the library.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    what: &'static str,
    text: &'a str,
    /// What follows the name, without the colon.
    rest: Option<&'a str>,
}

impl<'a> Written<'a> {
    /// The name alone.
    pub(super) fn alone<T>(&self, make: fn() -> T) -> Option<Result<T, ParseError>> {
        self.rest.is_none().then(|| Ok(make()))
    }

    /// The name and something behind it.
    pub(super) fn with<T>(&self, read: impl FnOnce(&'a str) -> Result<T, ParseError>) -> Option<Result<T, ParseError>> {
        self.rest.map(read)
    }

    /// A whole number behind the name, at least so large.
    pub(super) fn whole<T>(&self, least: i32, make: fn(i32) -> T) -> Option<Result<T, ParseError>> {
        self.with(|number| self.number(number, least).map(make))
    }

    /// Axes behind the name.
    pub(super) fn axes<T>(&self, make: fn(Axes) -> T) -> Option<Result<T, ParseError>> {
        let of = |letter: char| match letter {
            'b' => Some(Axis::Batch),
            'h' => Some(Axis::Head),
            'q' => Some(Axis::Q),
            'k' => Some(Axis::K),
            _ => None,
        };
        let rule = "the axes that it spans, of b, h, q, k, as in bias:hqk";
        self.with(|letters| letters.chars().map(of).collect::<Option<Axes>>().map(make).ok_or_else(|| self.fail(rule)))
    }

    pub(super) fn number(&self, number: &str, least: i32) -> Result<i32, ParseError> {
        let rule = || format!("takes a whole number from {least} to {}", i32::MAX);
        number.parse().ok().filter(|n| *n >= least).ok_or_else(|| self.fail(rule()))
    }

    pub(super) fn fail(&self, rule: impl Into<String>) -> ParseError {
        ParseError::new(self.what, self.text, rule)
    }

    pub(super) fn rest(&self) -> Option<&'a str> {
        self.rest
    }
}

/// What the library has under a text.
pub(super) fn read<T>(what: &'static str, text: &str, names: &[Named<T>]) -> Option<Result<T, ParseError>> {
    let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
    let row = names.iter().find(|row| row.name() == name)?;
    (row.read)(&Written { what, text, rest })
}

/// All spellings, and what somebody may have meant.
pub(super) fn instead<T>(text: &str, names: &[Named<T>], more: &str) -> String {
    let all: Vec<&str> = names.iter().map(|n| n.spelling).collect();
    format!("one of {}, {more}{}", all.join(", "), near(text, names))
}

pub(super) fn near<T>(text: &str, names: &[Named<T>]) -> String {
    let word = text.split(':').next().unwrap_or(text).trim();
    let near = nearest(word, names.iter().map(Named::name));
    near.map_or_else(String::new, |near| format!("; did you mean {near}?"))
}
