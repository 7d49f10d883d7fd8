//! A declared parameter of any type and axes, used in any way: `parameter:USE,TYPE,AXES` in a score_mod, `parameter:TYPE,AXES` in a mask.

use super::masks::Keep;
use super::{Drawing, Here, Stage, Tensor, Values, axes};
use crate::random::Random;
use half::{bf16, f16};

/// The ways in which a score_mod uses its parameter; a mask has only one.
const USES: [&str; 3] = ["added", "multiplied", "inside"];

/// Parses the use, the type and the axes of a parameter.
fn typed(rest: &str) -> Option<(Option<&str>, &str, &str)> {
    let mut parts = rest.split(',');
    let first = parts.next()?;
    let (using, dtype) = if USES.contains(&first) { (Some(first), parts.next()?) } else { (None, first) };
    Some((using, dtype, parts.next().unwrap_or_default()))
}

/// Returns the text of the score_mod or mask.
pub(super) fn text(rest: &str) -> Option<String> {
    let (using, dtype, axes) = typed(rest)?;
    let letters = [('b', "batch"), ('h', "head"), ('q', "q"), ('k', "k")];
    let names: Vec<&str> = letters.iter().filter(|(letter, _)| axes.contains(*letter)).map(|(_, name)| *name).collect();
    let declared = match dtype {
        "scalar" => "scalar t = 0.75".to_owned(),
        _ => format!("tensor t[{}]: {dtype}", names.join(", ")),
    };
    let value = match dtype {
        "i32" => "f32(t % 8) * 0.25",
        "bool" => "select(t, 1.25, 0.5)",
        _ => "t",
    };
    let expression = match using {
        Some("added") => format!("score + {value}"),
        Some("multiplied") => format!("score * {value}"),
        Some(_) => format!("score + tanh(score * 0.25 + {value})"),
        None => match dtype {
            "bool" => "t".to_owned(),
            // An i32 tensor over batch entries or heads is used as a length.
            "i32" => "k < t".to_owned(),
            _ => "t < 0.75".to_owned(),
        },
    };
    Some(format!("{declared}; {expression}"))
}

fn bind(dtype: &str, letters: &str, drawing: &mut Drawing<'_>) -> Result<Tensor, String> {
    let keys = drawing.extents[3];
    // Draw numbers that every floating-point type represents exactly, so that rounding cannot change a comparison.
    let number = |random: &mut Random| 0.5 + random.between(0, 64) as f32 / 64.0;
    if dtype == "scalar" {
        return Ok(drawing.bind("t", &[], |random, _| Values::Scalar(number(random))));
    }
    let make = |random: &mut Random, n: usize| {
        let mut numbers = |n| (0..n).map(|_| number(random)).collect::<Vec<f32>>();
        Ok(match dtype {
            "f32" => Values::F32(numbers(n)),
            "f16" => Values::F16(numbers(n).into_iter().map(f16::from_f32).collect()),
            "bf16" => Values::BF16(numbers(n).into_iter().map(bf16::from_f32).collect()),
            "i32" => Values::I32((0..n).map(|_| random.between(-2, keys + 2) as i32).collect()),
            "bool" => Values::Bool((0..n).map(|_| random.unit() < 0.6).collect()),
            _ => return Err(format!("{dtype:?} is no type of a parameter")),
        })
    };
    make(&mut Random::new(0), 0)?;
    Ok(drawing.bind("t", &axes(letters)?, |random, n| make(random, n).unwrap_or_else(|e| unreachable!("{e}, which was tried"))))
}

/// Returns the score_mod.
pub(super) fn stage(rest: &str, drawing: &mut Drawing<'_>) -> Result<Stage, String> {
    let (using, dtype, letters) = typed(rest).ok_or_else(|| format!("{rest:?}: USE,TYPE,AXES"))?;
    let tensor = bind(dtype, letters, drawing)?;
    let kind = dtype.to_owned();
    let of = move |here: Here| match (kind.as_str(), tensor.at(here)) {
        ("i32", t) => t % 8.0 * 0.25,
        ("bool", t) => 0.5 + 0.75 * t,
        (_, t) => t,
    };
    let angle = {
        let of = of.clone();
        move |score: f64, here: Here| (score * 0.25 + of(here)).tanh()
    };
    let (value, slope, own, bounded) = (angle.clone(), angle.clone(), angle.clone(), angle);
    let (term, factor, size) = (of.clone(), of.clone(), of);
    Ok(match using {
        Some("added") => Stage {
            value: Box::new(move |score, here| score + term(here)),
            slope: Box::new(|_, _| 1.0),
            rounding: Box::new(move |score, here| (score + size(here)).abs()),
            tanh: None,
            partials: vec![("t", Box::new(|_, _| 1.0))],
            reads: Vec::new(),
        },
        Some("multiplied") => Stage {
            value: Box::new(move |score, here| score * term(here)),
            slope: Box::new(move |_, here| factor(here)),
            rounding: Box::new(move |score, here| (score * size(here)).abs()),
            tanh: None,
            partials: vec![("t", Box::new(|score, _| score))],
            reads: Vec::new(),
        },
        Some("inside") => Stage {
            value: Box::new(move |score, here| score + value(score, here)),
            slope: Box::new({
                let slope = slope.clone();
                move |score, here| 1.0 + 0.25 * (1.0 - slope(score, here).powi(2))
            }),
            rounding: Box::new(move |score, here| {
                score.abs() + 8.0 * own(score, here).abs() + 2.0 * (score * 0.25).abs() + 2.0 * size(here).abs()
            }),
            tanh: Some(Box::new(bounded)),
            partials: vec![("t", Box::new(move |score, here| 1.0 - slope(score, here).powi(2)))],
            reads: Vec::new(),
        },
        Some(other) => return Err(format!("{other:?} is no use")),
        None => return Err(format!("{rest:?} is a mask")),
    })
}

/// Returns the mask.
pub(super) fn keep(rest: &str, drawing: &mut Drawing<'_>) -> Result<Keep, String> {
    let (_, dtype, letters) = typed(rest).ok_or_else(|| format!("{rest:?}: TYPE,AXES"))?;
    let tensor = bind(dtype, letters, drawing)?;
    Ok(match dtype {
        "bool" => Box::new(move |here| tensor.at(here) != 0.0),
        "i32" => Box::new(move |here| (here[3] as f64) < tensor.at(here)),
        _ => Box::new(move |here| tensor.at(here) < 0.75),
    })
}
