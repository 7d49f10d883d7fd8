//! Parses and prints masks: a library name, an expression, or several of either, joined by `|`, `&`, `!` and parentheses.
//!
//! ```text
//! causal & !(document | k < 4)
//! tensor kind[batch, k]: i32; sliding-window:64 | kind == 1
//! ```
//!
//! Operators bind as in expressions. Declarations precede the mask and apply to all of it.

use super::band::Corner;
use super::{Mask, Rule, ends};
use crate::expr::{Builder, ExprErrors, NodeId, Type};
use crate::library::{self, ParseError};
use std::ops::Range;

/// The deepest nesting of parentheses.
const DEPTH: usize = 100;

/// Parses a mask.
pub(super) fn read(text: &str) -> Result<Mask, ParseError> {
    // A library name may have arguments after it, but no operators.
    if let Some(mask) = library::mask(text.trim()).filter(|_| !text.contains(['|', '&', '!', '(', ';', '#'])) {
        return mask;
    }
    match expression(text) {
        // Try the text as one expression first, because a declared tensor may have the name of a library mask.
        Ok(mask) => Ok(mask),
        Err(of_whole) => {
            let last = last_value(text);
            let reader = Reader { text, declared: 0..last.start };
            if reader.names(last.clone()) { reader.any(last, 0) } else { Err(of_whole) }
        }
    }
}

fn expression(text: &str) -> Result<Mask, ParseError> {
    Ok(Mask::Traced(Rule::new("text", library::trace(text, "mask", Type::Bool, 1)?)))
}

/// Iterates over bytes that are neither white space nor in a comment: offset, byte, and the depth of parentheses before it.
fn letters(text: &str) -> impl Iterator<Item = (usize, u8, usize)> {
    let (mut comment, mut depth) = (false, 0usize);
    text.bytes().enumerate().filter_map(move |(at, b)| {
        comment = (comment || b == b'#') && b != b'\n';
        if comment || b.is_ascii_whitespace() {
            return None;
        }
        let before = depth;
        match b {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        Some((at, b, before))
    })
}

/// Returns the value after the last declaration.
fn last_value(text: &str) -> Range<usize> {
    let mut all = letters(text).peekable();
    let mut start = 0;
    while let Some((at, b, _)) = all.next() {
        if b == b';' && all.peek().is_some() {
            start = at + 1;
        }
    }
    start..text.len()
}

struct Reader<'t> {
    text: &'t str,
    declared: Range<usize>,
}

impl Reader<'_> {
    /// Removes white space, comments and a semicolon at the ends.
    fn trim(&self, range: Range<usize>) -> Range<usize> {
        let own = &self.text[range.clone()];
        let inside = letters(own).filter(|(_, b, _)| *b != b';').map(|(at, ..)| range.start + at);
        let (first, last) = inside.fold((None, range.start), |(first, _), at| (first.or(Some(at)), at));
        first.map_or(range.start..range.start, |first| first..last + 1)
    }

    /// Splits a range at operators `sign` outside parentheses.
    fn parts(&self, range: &Range<usize>, sign: u8) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let mut start = range.start;
        for (at, ..) in letters(&self.text[range.clone()]).filter(|(_, b, depth)| *b == sign && *depth == 0) {
            parts.push(start..range.start + at);
            start = range.start + at + 1;
        }
        parts.push(start..range.end);
        parts
    }

    /// Returns the inside of parentheses that enclose the whole part.
    fn inner(&self, part: &Range<usize>) -> Option<Range<usize>> {
        let own = &self.text[part.clone()];
        let whole = own.starts_with('(') && own.ends_with(')') && letters(own).all(|(at, _, depth)| at == 0 || depth > 0);
        whole.then(|| part.start + 1..part.end - 1)
    }

    /// Returns whether some part is a library name.
    fn names(&self, range: Range<usize>) -> bool {
        let words = self.text[range].split(|c: char| c.is_whitespace() || "|&!()#".contains(c));
        words.into_iter().any(|word| library::mask(word).is_some())
    }

    fn any(&self, range: Range<usize>, depth: usize) -> Result<Mask, ParseError> {
        if depth > DEPTH {
            return Err(self.fail(&format!("expected at most {DEPTH} nested parentheses")));
        }
        let all = |range| {
            let parts = self.parts(&range, b'&').into_iter().map(|part| self.one(part, depth)).collect::<Result<Vec<_>, _>>()?;
            Ok(joined(parts, Mask::All))
        };
        let parts = self.parts(&range, b'|').into_iter().map(all).collect::<Result<Vec<_>, ParseError>>()?;
        Ok(joined(parts, Mask::Any))
    }

    fn one(&self, part: Range<usize>, depth: usize) -> Result<Mask, ParseError> {
        let part = self.trim(part);
        let own = &self.text[part.clone()];
        if let Some(mask) = library::mask(own) {
            // A declaration hides the library mask of the same name.
            return self.alone(&part).or(mask);
        }
        if own.starts_with('!') && depth <= DEPTH {
            return Ok(!self.one(part.start + 1..part.end, depth + 1)?);
        }
        match self.inner(&part) {
            Some(inner) => self.any(inner, depth + 1),
            None if own.is_empty() => Err(self.fail("expected a mask on both sides of each operator")),
            None => self
                .alone(&part)
                .map_err(|e| ParseError { rule: format!("{}{}", e.rule, library::meant(own)), ..e })
                .map_err(|e| ParseError { text: self.text.to_owned(), ..e }),
        }
    }

    /// Parses a part as an expression after the declarations. The rest is blanked, so that positions in errors are those of the whole text.
    fn alone(&self, part: &Range<usize>) -> Result<Mask, ParseError> {
        let blank = |(at, c): (usize, char)| if c == '\n' || self.declared.contains(&at) || part.contains(&at) { c } else { ' ' };
        let alone: String = self
            .text
            .char_indices()
            .flat_map(|at| std::iter::repeat_n(blank(at), if blank(at) == at.1 { 1 } else { at.1.len_utf8() }))
            .collect();
        expression(&alone)
    }

    fn fail(&self, rule: &str) -> ParseError {
        ParseError { what: "mask", text: self.text.to_owned(), rule: rule.to_owned() }
    }
}

/// Joins several masks; returns a single one unchanged.
fn joined(mut parts: Vec<Mask>, join: impl FnOnce(Vec<Mask>) -> Mask) -> Mask {
    if parts.len() == 1 { parts.remove(0) } else { join(parts) }
}

/// Prints masks that no single expression can represent, because some windows are bottom-right aligned. All other masks are values of one trace, so
/// their declarations come first, once.
pub(super) fn joined_by_names(mask: &Mask) -> String {
    fn values(mask: &Mask, b: &mut Builder, all: &mut Vec<NodeId>) {
        if !ends::reads(mask) {
            return all.push(mask.build(b, Corner::Extents));
        }
        match mask {
            Mask::All(masks) | Mask::Any(masks) => masks.iter().for_each(|mask| values(mask, b, all)),
            Mask::Not(mask) => values(mask, b, all),
            Mask::Window { .. } | Mask::PrefixLm { .. } | Mask::Traced(_) => {}
        }
    }
    fn words<'t>(mask: &Mask, values: &mut impl Iterator<Item = &'t str>) -> String {
        if !ends::reads(mask) {
            return format!("({})", values.next().unwrap_or_default());
        }
        let mut each = |masks: &[Mask], sign: &str| {
            let parts: Vec<String> = masks.iter().map(|mask| words(mask, values)).collect();
            parts.join(sign)
        };
        match mask {
            Mask::All(masks) => format!("({})", each(masks, " & ")),
            Mask::Any(masks) => format!("({})", each(masks, " | ")),
            Mask::Not(mask) => format!("!{}", words(mask, values)),
            Mask::Window { .. } | Mask::PrefixLm { .. } | Mask::Traced(_) => mask.to_string(),
        }
    }
    let (mut b, mut all) = (Builder::new(), Vec::new());
    values(mask, &mut b, &mut all);
    let (declared, parts) = match values_of(b, &all) {
        Ok(texts) => texts,
        Err(errors) => return format!("# {errors}"),
    };
    let words = words(mask, &mut parts.iter().map(String::as_str));
    // Remove the parentheses around the whole mask.
    let words = words.strip_prefix('(').and_then(|words| words.strip_suffix(')')).unwrap_or(&words);
    format!("{declared}{words}")
}

/// Returns the texts of several values of one trace, and of the declarations that precede them.
fn values_of(b: Builder, values: &[NodeId]) -> Result<(String, Vec<String>), ExprErrors> {
    let trace = b.finish(values).map_err(ExprErrors)?.to_string();
    let last = last_value(&trace);
    let text = trace[last.clone()].trim();
    let mut cuts: Vec<usize> = letters(text).filter(|(_, b, depth)| *b == b',' && *depth == 0).map(|(at, ..)| at).collect();
    cuts.push(text.len());
    let mut start = 0;
    let parts = cuts.into_iter().map(|cut| {
        let part = text[start..cut].trim().to_owned();
        start = cut + 1;
        part
    });
    let parts = if values.is_empty() { Vec::new() } else { parts.collect() };
    let declared = trace[..last.start].trim_end();
    Ok((format!("{declared}{}", if declared.is_empty() { "" } else { " " }), parts))
}

/// Prints a conjunction: the declarations of `values`, then `terms`, which declare nothing, then the values.
pub(super) fn conjunction(terms: &[String], b: Builder, values: &[NodeId]) -> String {
    let (declared, values) = match values_of(b, values) {
        Ok(texts) => texts,
        Err(errors) => return format!("# {errors}"),
    };
    let is_alone = terms.len() + values.len() == 1;
    let values = values.into_iter().map(|value| {
        let is_disjunction = letters(&value).any(|(_, b, depth)| b == b'|' && depth == 0);
        if is_disjunction && !is_alone { format!("({value})") } else { value }
    });
    let all: Vec<String> = terms.iter().cloned().chain(values).collect();
    format!("{declared}{}", all.join(" & "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::Trace;

    fn mask(text: &str) -> Mask {
        text.parse().unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn parentheses_are_nested_as_deep_as_is_said() {
        let nested = |depth| format!("{}causal{}", "(".repeat(depth), ")".repeat(depth)).parse::<Mask>();
        assert_eq!(nested(DEPTH).unwrap(), Mask::causal());
        assert!(nested(DEPTH + 1).unwrap_err().to_string().contains(&format!("at most {DEPTH} nested parentheses")));
    }

    #[test]
    fn names_and_expressions_are_joined_as_expressions_are() {
        let (causal, document, window) = (Mask::causal(), Mask::document(), mask("window:64,0:bottom-right"));
        let near = || mask("q - k < 4");
        for (text, want) in [
            ("causal|document", causal.clone() | document.clone()),
            (" causal & document ", causal.clone() & document.clone()),
            ("!causal", !causal.clone()),
            ("!!causal", !!causal.clone()),
            ("(causal)", causal.clone()),
            ("causal | document & !window:64,0:bottom-right", causal.clone() | (document.clone() & !window.clone())),
            ("(causal | document) & !(window:64,0:bottom-right)", (causal.clone() | document.clone()) & !window),
            ("window:64,0:bottom-right & document", mask("window:64,0:bottom-right") & document.clone()),
            ("natten:5|!dilated:3&causal", mask("natten:5") | (!mask("dilated:3") & causal.clone())),
            ("array:hk & (prefix-lm:3 | shared-prefix:2)", mask("array:hk") & (mask("prefix-lm:3") | mask("shared-prefix:2"))),
            ("causal & q - k < 4", causal.clone() & near()),
            ("causal & (q - k < 4 | k < 2)", causal.clone() & (near() | mask("k < 2"))),
            ("q - k < 4 # not: causal | &\n | document;", near() | document),
            ("!(q - k < 4) & causal", !near() & causal.clone()),
        ] {
            assert_eq!(mask(text), want, "{text}");
        }
        let text = "tensor kind[k]: i32; let odd = k % 2 == 1; causal & kind == 1 | odd";
        let kind = mask("tensor kind[k]: i32; kind == 1");
        assert_eq!(mask(text), (causal & kind) | mask("k % 2 == 1"));
        // `document` is the declared tensor here, not the library mask.
        let own: Trace = "tensor document[k]: bool; document & q < k".parse().unwrap();
        assert_eq!(mask("tensor document[k]: bool; document & q < k"), Mask::Traced(Rule::new("", own)));
    }

    #[test]
    fn windows_at_the_ends_are_printed_by_name_among_others() {
        for (text, printed) in [
            ("causal-ends & k < 3", "causal-ends & (k < 3)"),
            ("!(causal-ends | document)", "tensor doc_q[batch, q]: i32; tensor doc_k[batch, k]: i32; !(causal-ends | (doc_q == doc_k))"),
            ("min(q, 3) < k & !window:3,0:ends | causal-ends", "((min(q, 3) < k) & !window:3,0:ends) | causal-ends"),
        ] {
            let read = mask(text);
            assert_eq!(read.to_string(), printed);
            let kept = |mask: &Mask| crate::Kept::of(&[Mask::padding(), mask.clone()], [2, 1, 7, 9]).unwrap();
            assert_eq!(kept(&mask(printed)), kept(&read), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        for (text, rule) in [
            ("causl & document", "at 1:1: \"causl\" is not declared"),
            ("document &\n k < nope", "at 2:6: \"nope\" is not declared"),
            ("causal &", "expected a mask on both sides of each operator"),
            ("causal | natten:4", "natten:N takes an odd number"),
            ("causal & q + k", "it yields i32, but a mask must yield bool"),
            ("causal & (k < 4", "at 1:"),
            ("causal & score > 1.0", "cannot read the score"),
        ] {
            let said = text.parse::<Mask>().unwrap_err();
            assert!(said.rule.contains(rule) && text.contains(&said.text), "{text}: {said}");
        }
        let deep = format!("{}causal{}", "(".repeat(5000), ")".repeat(5000));
        assert!(deep.parse::<Mask>().is_err());
        assert!(format!("{}causal", "!".repeat(5000)).parse::<Mask>().is_err());
    }

    #[test]
    fn parentheses_that_end_a_part_need_not_be_one_pair() {
        let read = mask("causal & (q + 1) < (k + 2)");
        let kept = |mask: &Mask| crate::Kept::of(std::slice::from_ref(mask), [1, 1, 7, 9]);
        assert_eq!(kept(&read), kept(&(Mask::causal() & mask("q + 1 < k + 2"))));
        assert_ne!(kept(&read), kept(&Mask::causal()));
    }

    #[test]
    fn mistakes_are_told_where_they_are() {
        let told = |text: &str| text.parse::<Mask>().unwrap_err().rule;
        // The position counts lines of the whole text, also for a part after a library name.
        assert!(told("causal &\n  q <\n < k").starts_with("at 3:2"), "{}", told("causal &\n  q <\n < k"));
        // Without a library name, the whole text is one expression.
        assert!(told("q < k | k + 1").starts_with("at 1:"), "{}", told("q < k | k + 1"));
        assert!(told("causal | k + 1").contains("it yields i32"), "{}", told("causal | k + 1"));
    }
}
