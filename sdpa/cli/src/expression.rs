//! Score_mods and masks on the command line: a name of the library, an expression, or a file with one.

use crate::exit::Mistakes;
use crate::file;
use sdpa::expr::{Axes, Axis, BF16, ExprError, ExprErrors, F16, F32, Trace};
use sdpa::library::T5;
use sdpa::{AttentionSpec, DType, Layout, Mask, ParseError, ScoreMod, Shape, library};
use std::fmt::Display;
use std::str::FromStr;

/// A shape without errors, to validate masks with.
const ANY: Shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 8, seq_kv: 8, dim_qk: 8, dim_v: 8 };

/// A larger file does not hold an expression.
const LARGEST: u64 = 1 << 20;

/// A mistake: the option or file, and the message.
type Wrong = (String, String);

/// Returns the position of a text's last value: after the last declaration.
fn last_value(text: &str) -> (usize, usize) {
    let (mut line, mut column) = (1, 1);
    let mut place = None;
    let mut comment = false;
    for c in text.chars() {
        comment = (comment || c == '#') && c != '\n';
        if c == ';' && !comment {
            place = None;
        } else if place.is_none() && !comment && !c.is_whitespace() {
            place = Some((line, column));
        }
        (line, column) = if c == '\n' { (line + 1, 1) } else { (line, column + c.len_utf8()) };
    }
    place.unwrap_or((line, column))
}

/// Splits a rule that begins with a position, `at 2:14: …`, into the position and the rest.
fn place_of(rule: &str) -> Option<(String, String)> {
    let (at, rule) = rule.strip_prefix("at ")?.split_once(": ")?;
    let (line, column) = at.split_once(':')?;
    let number = |text: &str| text.parse::<usize>().is_ok();
    (number(line) && number(column) && !rule.contains('\n')).then(|| (at.to_owned(), rule.to_owned()))
}

/// Returns `FILE:line:column` and the rule that is violated there.
fn located(path: &str, error: &ExprError) -> Wrong {
    match error {
        ExprError::Syntax { line, column, rule } => (format!("{path}:{line}:{column}"), rule.clone()),
        ExprError::Redeclared { .. }
        | ExprError::Name { .. }
        | ExprError::Default { .. }
        | ExprError::Extents { .. }
        | ExprError::Indices { .. }
        | ExprError::NoDerivative { .. }
        | _ => (format!("{path}:1:1"), error.to_string()),
    }
}

/// Parses a name, an expression, or a file that holds either.
fn read<T: FromStr<Err = ParseError>>(option: &str, text: &str) -> Result<T, Vec<Wrong>> {
    let Some(path) = text.strip_prefix('@') else {
        return text.parse().map_err(|e: T::Err| vec![(option.to_owned(), format!("{:?}: {}", e.text, e.rule))]);
    };
    let about = |why: &dyn Display| vec![(format!("{option} {text}"), why.to_string())];
    let whole = file::text(path.as_ref(), LARGEST).map_err(|e| about(&e))?;
    whole.trim().parse().map_err(|e: T::Err| {
        // A mask that joins others by operators does not parse as one trace, but the `rule` of its error contains the position.
        let placed = whole.parse::<T>().err().and_then(|e| place_of(&e.rule).map(|(at, rule)| (format!("{path}:{at}"), rule)));
        if let Some(placed) = placed {
            return vec![placed];
        }
        let name = whole.trim().chars().all(is_of_name);
        match whole.parse::<Trace>() {
            Err(ExprErrors(errors)) if !name => errors.iter().map(|e| located(path, e)).collect(),
            Ok(_) | Err(_) => {
                let (line, column) = last_value(&whole);
                vec![(format!("{path}:{line}:{column}"), e.rule)]
            }
        }
    })
}

/// The values that could be parsed, and whether these are all.
type AsFarAsRight<T> = (Vec<T>, bool);

fn all<T>(read: Vec<Result<T, Vec<Wrong>>>, mistakes: &mut Mistakes) -> AsFarAsRight<T> {
    let mut values = Vec::new();
    let mut right = true;
    for one in read {
        match one {
            Ok(value) => values.push(value),
            Err(wrong) => {
                right = false;
                wrong.into_iter().for_each(|(about, why)| mistakes.add(about, why));
            }
        }
    }
    (values, right)
}

/// Parses a name of the library with renamed parameters: `softcap:30[cap=outer_cap]`. Returns `None` for any other text.
fn renamed(option: &str, text: &str) -> Option<Result<ScoreMod, Vec<Wrong>>> {
    let (name, list) = text.trim().strip_suffix(']')?.split_once('[')?;
    if !name.chars().all(is_of_name) {
        return None;
    }
    let fail = |rule: String| vec![(option.to_owned(), format!("{text:?}: {rule}"))];
    let read = || {
        let mut score_mod: ScoreMod = name.parse().map_err(|e: ParseError| fail(e.rule))?;
        for pair in list.split(',') {
            let (from, to) = pair.split_once('=').ok_or_else(|| fail(format!("got {pair:?}, expected OLD=NEW")))?;
            let (from, to) = (from.trim(), to.trim());
            let names: Vec<&str> = score_mod.stages().iter().flat_map(|stage| stage.params()).map(|p| p.name.as_str()).collect();
            if !names.contains(&from) {
                return Err(fail(format!("{name} declares no {from}; it declares {}", crate::table::list(&names))));
            }
            score_mod = score_mod.rename(from, to).map_err(|e| fail(e.to_string()))?;
        }
        Ok(score_mod)
    };
    Some(read())
}

/// The name of the parameter that the score_mod `t5` adds, and of its table in the input file.
pub(crate) const T5_NAME: &str = "t5";

/// Parses the buckets of a T5 bias, `t5:BUCKETS,FAR[,both]`. Returns `None` for any other text.
pub(crate) fn t5(text: &str) -> Option<Result<T5, String>> {
    let rest = text.trim().strip_prefix("t5")?;
    let rule = || {
        format!(
            "{text:?}: expected t5:BUCKETS,FAR[,both] with BUCKETS at most {MOST_BUCKETS}, and FAR above BUCKETS / 2 (above BUCKETS / 4 if `,both` is given)"
        )
    };
    if !rest.is_empty() && !rest.starts_with(':') {
        return None;
    }
    let read = || {
        let parts: Vec<&str> = rest.strip_prefix(':')?.split(',').collect();
        let (buckets, far, both) = match parts[..] {
            [buckets, far] => (buckets, far, false),
            [buckets, far, "both"] => (buckets, far, true),
            _ => return None,
        };
        let t5 = T5 { buckets: buckets.parse().ok()?, max_distance: far.parse().ok()?, bidirectional: both };
        let own = t5.buckets / if both { 2 } else { 1 };
        (t5.buckets <= MOST_BUCKETS && own >= 2 && t5.max_distance > own / 2).then_some(t5)
    };
    Some(read().ok_or_else(rule))
}

/// Maximum number of buckets; no table has more.
const MOST_BUCKETS: usize = 1 << 16;

/// Adds the bias that is computed from a table of relative positions.
fn t5_bias() -> Result<ScoreMod, String> {
    let axes = [Axis::Head, Axis::Q, Axis::K];
    ScoreMod::new(T5_NAME, |score, _, p| score + p.tensor(T5_NAME, axes, F32)).map_err(|e| e.to_string())
}

/// Returns true for a character of a library name or its numbers.
fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_:,.".contains(c)
}

/// Parses the values of `--score-mod`, in order, and adds a mistake for each that is invalid. The flag is true if all are valid.
pub(crate) fn score_mods(texts: &[String], mistakes: &mut Mistakes) -> AsFarAsRight<ScoreMod> {
    const OPTION: &str = "--score-mod";
    let one = |text: &String| match t5(text) {
        Some(read) => read.and_then(|_| t5_bias()).map_err(|why| vec![(OPTION.to_owned(), why)]),
        None => renamed(OPTION, text).unwrap_or_else(|| read(OPTION, text)),
    };
    all(texts.iter().map(one).collect(), mistakes)
}

/// Returns the positions of the word `array`, a mask that is a tensor of the input with that tensor's axes. Returns none if the text declares that name.
fn arrays(text: &str) -> Vec<usize> {
    let word = |&(at, _): &(usize, &str)| {
        let part_of_more = |c: Option<char>| c.is_some_and(|c| is_of_name(c) || c == '_');
        !part_of_more(text[..at].chars().next_back()) && !part_of_more(text[at + ARRAY.len()..].chars().next())
    };
    if text.starts_with('@') || text.contains("tensor") || text.contains("let") {
        Vec::new()
    } else {
        text.match_indices(ARRAY).filter(word).map(|(at, _)| at).collect()
    }
}

/// The mask that has the axes of the input's tensor.
const ARRAY: &str = "array";

/// Returns whether a mask contains the word `array`, which stands for a mask tensor in the input file.
pub(crate) fn uses_array(text: &str) -> bool {
    !arrays(text).is_empty()
}

/// Adds the axes to every `array` of a mask.
fn with_axes(text: &str, axes: Axes) -> String {
    let letters: String = axes.iter().filter_map(|axis| axis.name().chars().next()).collect();
    let mut parts = text.to_owned();
    arrays(text).into_iter().rev().for_each(|at| parts.insert_str(at + ARRAY.len(), &format!(":{letters}")));
    parts
}

/// Parses one mask, or `none`. `array` spans `axes`; if they are not known, the mistake was reported already.
fn mask(text: &str, axes: Option<Axes>) -> Result<Option<Mask>, Vec<Wrong>> {
    const OPTION: &str = "--mask";
    let text = &if uses_array(text) { with_axes(text, axes.ok_or_else(Vec::new)?) } else { text.to_owned() };
    let mask: Mask = match text.as_str() {
        "none" => return Ok(None),
        // `none` means that there is no mask. The library does not know this name, so add it here to the names that its errors list.
        _ => read(OPTION, text).map_err(|wrong| {
            let names = |why: String| why.replace("one of causal", "one of none, causal").replace("array:AXES", "array[:AXES]");
            wrong.into_iter().map(|(about, why)| (about, names(why))).collect::<Vec<_>>()
        })?,
    };
    let Err(errors) = AttentionSpec::dense(DType::F32, ANY, Layout::Bhsd).mask(mask.clone()).validate() else { return Ok(Some(mask)) };
    let wrong = |e: sdpa::SpecError| {
        let field = e.field.trim_start_matches("masks[0].");
        (OPTION.to_owned(), format!("{text:?}: {field}: got {}, expected {}", e.value, e.rule))
    };
    Err(errors.0.into_iter().map(wrong).collect())
}

/// Parses the values of `--mask`, and adds a mistake for each that is invalid. The flag is true if all are valid. `axes` are the axes of
/// `array`.
pub(crate) fn masks(texts: &[String], axes: Option<Axes>, mistakes: &mut Mistakes) -> AsFarAsRight<Mask> {
    let (read, right) = all(texts.iter().map(|text| mask(text, axes)).collect(), mistakes);
    (read.into_iter().flatten().collect(), right)
}

/// Returns the score_mod that adds the tensor `bias`, which spans these axes.
pub(crate) fn bias(axes: Axes, dtype: DType) -> Option<ScoreMod> {
    match dtype {
        DType::F32 => Some(library::bias(axes, F32)),
        DType::F16 => Some(library::bias(axes, F16)),
        DType::BF16 => Some(library::bias(axes, BF16)),
        DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => None,
    }
}

/// Returns the axes along which a tensor of this shape has more than one element, or an error if it does not broadcast to `extents`.
pub(crate) fn broadcast(shape: &[i64], extents: [i64; 4]) -> Result<Axes, String> {
    let wrong = || format!("got shape {shape:?}, expected one that broadcasts to {extents:?} (batch, query heads, queries, keys)");
    let first = 4usize.checked_sub(shape.len()).ok_or_else(wrong)?;
    let mut axes = Axes::NONE;
    for ((&axis, &extent), &have) in Axis::ALL.iter().zip(&extents).skip(first).zip(shape) {
        if have != 1 && have != extent {
            return Err(wrong());
        }
        if have == extent && extent > 1 {
            axes = axes.with(axis);
        }
    }
    Ok(axes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_broadcast_span_the_axes_that_they_have() {
        let extents = [2, 4, 5, 7];
        let names = |shape: &[i64]| broadcast(shape, extents).map(|axes| axes.iter().map(Axis::name).collect::<Vec<_>>().join(" "));
        for (shape, want) in [
            (&[][..], ""),
            (&[7], "k"),
            (&[5, 1], "q"),
            (&[1, 1, 5, 7], "q k"),
            (&[2, 1, 1, 7], "batch k"),
            (&[4, 5, 7], "head q k"),
            (&[2, 4, 5, 7], "batch head q k"),
        ] {
            assert_eq!(names(shape), Ok(want.to_owned()), "{shape:?}");
        }
        for shape in [&[5][..], &[0], &[3, 1, 1, 1], &[1, 2, 4, 5, 7]] {
            assert!(names(shape).is_err(), "{shape:?}");
        }
        assert_eq!(broadcast(&[1, 1], [1; 4]), Ok(Axes::NONE));
    }

    #[test]
    fn arrays_get_their_axes() {
        let axes = Axes::from([Axis::Q, Axis::K]);
        for (text, want) in [
            ("array", "array:qk"),
            ("array & !(causal|array)", "array:qk & !(causal|array:qk)"),
            ("array:k | an_array | arrays", "array:k | an_array | arrays"),
        ] {
            assert_eq!(with_axes(text, axes), want);
        }
        assert!(!uses_array("tensor array[q]: bool; array") && !uses_array("@array") && !uses_array("causal") && uses_array("!array"));
    }

    #[test]
    fn the_last_value_is_found() {
        assert_eq!(last_value("q + k"), (1, 1));
        assert_eq!(last_value("# a; b\nscalar c = 1.0;\n  c * 2.0\n"), (3, 3));
        assert_eq!(last_value("let a = 1; # x\n\n a"), (3, 2));
        assert_eq!(last_value(""), (1, 1));
    }
}
