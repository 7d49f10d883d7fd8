//! Score_mods and masks as they are written on the command line: a name of the library, an expression, or a file with one.

use crate::exit::Mistakes;
use crate::file;
use sdpa::expr::{Axes, Axis, BF16, ExprError, ExprErrors, F16, F32, Trace};
use sdpa::{AttentionSpec, DType, Layout, Mask, ParseError, ScoreMod, Shape, library};
use std::fmt::Display;
use std::str::FromStr;

/// A shape that breaks no rule, to judge masks by.
const ANY: Shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 8, seq_kv: 8, dim_qk: 8, dim_v: 8 };

/// Larger files hold something else.
const LARGEST: u64 = 1 << 20;

/// What is wrong with an option: what it is about, and why.
type Wrong = (String, String);

/// The place in a text where its last value begins: after the last declaration.
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

/// `FILE:line:column` and the rule that is broken there.
fn located(path: &str, error: &ExprError) -> Wrong {
    match error {
        ExprError::Syntax { line, column, rule } => (format!("{path}:{line}:{column}"), rule.clone()),
        ExprError::Redeclared { .. }
        | ExprError::Name { .. }
        | ExprError::ElementType { .. }
        | ExprError::Default { .. }
        | ExprError::NoDerivative { .. } => (format!("{path}:1:1"), error.to_string()),
    }
}

/// Reads a name, an expression, or a file that holds either.
fn read<T: FromStr<Err = ParseError>>(option: &str, text: &str) -> Result<T, Vec<Wrong>> {
    let Some(path) = text.strip_prefix('@') else {
        return text.parse().map_err(|e: T::Err| vec![(option.to_owned(), format!("{:?}: {}", e.text, e.rule))]);
    };
    let about = |why: &dyn Display| vec![(format!("{option} {text}"), why.to_string())];
    let whole = file::text(path.as_ref(), LARGEST).map_err(|e| about(&e))?;
    whole.trim().parse().map_err(|e: T::Err| {
        let name = whole.trim().chars().all(|c| c.is_ascii_alphanumeric() || "-_:,.".contains(c));
        match whole.parse::<Trace>() {
            Err(ExprErrors(errors)) if !name => errors.iter().map(|e| located(path, e)).collect(),
            Ok(_) | Err(_) => {
                let (line, column) = last_value(&whole);
                vec![(format!("{path}:{line}:{column}"), e.rule)]
            }
        }
    })
}

/// Those that could be read, and whether that is all of them.
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

/// The score_mods, in their order.
pub(crate) fn score_mods(texts: &[String], mistakes: &mut Mistakes) -> AsFarAsRight<ScoreMod> {
    all(texts.iter().map(|text| read("--score-mod", text)).collect(), mistakes)
}

/// One mask, or none. `array` spans `axes`; where they are not known, that has been told.
fn mask(text: &str, axes: Option<Axes>) -> Result<Option<Mask>, Vec<Wrong>> {
    const OPTION: &str = "--mask";
    let mask: Mask = match text {
        "none" => return Ok(None),
        "array" => library::array_mask(axes.ok_or_else(Vec::new)?),
        // The library knows no `none`: there it is the absence of a mask.
        _ => read(OPTION, text).map_err(|wrong| {
            let names = |why: String| why.replace("one of causal", "one of none, causal").replace("array:AXES", "array[:AXES]");
            wrong.into_iter().map(|(about, why)| (about, names(why))).collect::<Vec<_>>()
        })?,
    };
    let Err(errors) = AttentionSpec::dense(DType::F32, ANY, Layout::Bhsd).mask(mask.clone()).validate() else { return Ok(Some(mask)) };
    let wrong = |e: sdpa::SpecError| {
        let field = e.field.trim_start_matches("masks[0].");
        (OPTION.to_owned(), format!("{text:?}: {field} is {}: {}", e.value, e.rule))
    };
    Err(errors.0.into_iter().map(wrong).collect())
}

/// The masks.
pub(crate) fn masks(texts: &[String], axes: Option<Axes>, mistakes: &mut Mistakes) -> AsFarAsRight<Mask> {
    let (read, right) = all(texts.iter().map(|text| mask(text, axes)).collect(), mistakes);
    (read.into_iter().flatten().collect(), right)
}

/// The addition of the tensor `bias`.
pub(crate) fn bias(axes: Axes, dtype: DType) -> Option<ScoreMod> {
    match dtype {
        DType::F32 => Some(library::bias(axes, F32)),
        DType::F16 => Some(library::bias(axes, F16)),
        DType::BF16 => Some(library::bias(axes, BF16)),
        DType::F64
        | DType::I8
        | DType::U8
        | DType::I32
        | DType::I64
        | DType::Bool
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::F8E8M0
        | DType::F4E2M1 => None,
    }
}

/// The axes that a shape spans, where it broadcasts to `extents`.
pub(crate) fn broadcast(shape: &[i64], extents: [i64; 4]) -> Result<Axes, String> {
    let wrong = || format!("has the shape {shape:?}: it must broadcast to {extents:?} (batch, query heads, queries, keys)");
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
    fn the_last_value_is_found() {
        assert_eq!(last_value("q + k"), (1, 1));
        assert_eq!(last_value("# a; b\nscalar c = 1.0;\n  c * 2.0\n"), (3, 3));
        assert_eq!(last_value("let a = 1; # x\n\n a"), (3, 2));
        assert_eq!(last_value(""), (1, 1));
    }
}
