//! Names and numbers of the command line.

use clap::ValueEnum;
use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use cudnn_graph::Version;
use sdpa::cudnn::lower::Form;
use sdpa::{ExecutorName, Layout, Preference, Shape};
use sdpa_conformance::covering::Strength;

use crate::data::Element;

/// A list of named values.
type Names<T> = Vec<(PossibleValue, T)>;

/// Parses one of a list of names.
fn one_of<T: Copy>(text: &str, list: &Names<T>) -> Result<T, String> {
    let names = || list.iter().map(|(name, _)| name.get_name()).collect::<Vec<_>>().join(", ");
    list.iter()
        .find(|(name, _)| name.get_name() == text)
        .map(|(_, thing)| *thing)
        .ok_or_else(|| format!("got {text:?}, expected one of {}", names()))
}

/// A value parser for options that take a name. It keeps the text, so that a wrong name is reported together with all other mistakes. Shells can complete the
/// names.
#[derive(Clone)]
pub(crate) struct Named(Vec<PossibleValue>);

impl Named {
    fn of<T>(list: Names<T>) -> Named {
        Named(list.into_iter().map(|(name, _)| name).collect())
    }

    pub(crate) fn elements() -> Named {
        Named::of(elements())
    }

    pub(crate) fn layouts() -> Named {
        Named::of(layouts())
    }

    pub(crate) fn forms() -> Named {
        Named::of(forms())
    }

    pub(crate) fn executors() -> Named {
        Named::of(executors())
    }

    pub(crate) fn strengths() -> Named {
        Named::of(strengths())
    }

    pub(crate) fn stages() -> Named {
        Named::of(stages())
    }

    pub(crate) fn schedulers() -> Named {
        Named::of(schedulers())
    }
}

impl TypedValueParser for Named {
    type Value = String;

    fn parse_ref(&self, cmd: &clap::Command, arg: Option<&clap::Arg>, value: &std::ffi::OsStr) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(cmd, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().cloned()))
    }
}

fn elements() -> Names<Element> {
    Element::ALL.map(|e| (PossibleValue::new(e.dtype().name()), e)).to_vec()
}

fn layouts() -> Names<Layout> {
    [Layout::Bhsd, Layout::Bshd, Layout::Sbhd].map(|l| (PossibleValue::new(l.name()), l)).to_vec()
}

fn forms() -> Names<Form> {
    [Form::Composite, Form::Unified].map(|f| (PossibleValue::new(f.name()), f)).to_vec()
}

fn executors() -> Names<Preference> {
    let named = [ExecutorName::CPU, ExecutorName::CUDA, ExecutorName::CUDNN, ExecutorName::METAL]
        .map(|name| (PossibleValue::new(name.name()), Preference::Named(name)));
    std::iter::once((PossibleValue::new("auto"), Preference::Auto)).chain(named).collect()
}

fn strengths() -> Names<Strength> {
    Strength::ALL.map(|strength| (PossibleValue::new(strength.name()), strength)).to_vec()
}

fn stages() -> Names<Stage> {
    Stage::value_variants().iter().filter_map(|stage| Some((stage.to_possible_value()?, *stage))).collect()
}

pub(crate) fn element(text: &str) -> Result<Element, String> {
    one_of(text, &elements())
}

pub(crate) fn layout(text: &str) -> Result<Layout, String> {
    one_of(text, &layouts())
}

pub(crate) fn form(text: &str) -> Result<Form, String> {
    one_of(text, &forms())
}

pub(crate) fn executor(text: &str) -> Result<Preference, String> {
    one_of(text, &executors())
}

/// Parses the name of a strength, which says how many features occur together in a problem of `prove`.
pub(crate) fn strength(text: &str) -> Result<Strength, String> {
    one_of(text, &strengths())
}

/// Parses a count of at least one.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("got {text:?}, expected an integer of at least 1"))
}

/// A stage on the way from a specification to a plan, which `inspect` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stage {
    Spec,
    Problem,
    Trace,
    Gradient,
    Graph,
    Program,
    Schedule,
    Plan,
    Kernel,
}

pub(crate) fn stage(text: &str) -> Result<Stage, String> {
    one_of(text, &stages())
}

/// The executors of which `inspect` can print the schedule of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheduler {
    Cudnn,
    Cuda,
}

fn schedulers() -> Names<Scheduler> {
    [(ExecutorName::CUDNN, Scheduler::Cudnn), (ExecutorName::CUDA, Scheduler::Cuda)]
        .map(|(name, scheduler)| (PossibleValue::new(name.name()), scheduler))
        .to_vec()
}

pub(crate) fn scheduler(text: &str) -> Result<Scheduler, String> {
    one_of(text, &schedulers())
}

/// Parses the value of a declared scalar, `NAME=VALUE`.
pub(crate) fn param(text: &str) -> Result<(&str, f32), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("got {text:?}, expected NAME=VALUE"))?;
    let number: f32 = value.trim().parse().map_err(|_| format!("{name}: got {value:?}, expected a number"))?;
    if number.is_nan() { Err(format!("{name}: got {value}, expected a number")) } else { Ok((name.trim(), number)) }
}

/// Parses an index along an axis.
pub(crate) fn index(text: &str) -> Result<i64, String> {
    text.parse::<u32>().map(i64::from).map_err(|_| format!("got {text:?}, expected an integer of at least 0"))
}

pub(crate) fn scale(text: &str) -> Result<f32, String> {
    let number: f32 = text.parse().map_err(|_| format!("got {text:?}, expected a number"))?;
    if number.is_finite() { Ok(number) } else { Err(format!("got {text}, expected a finite f32")) }
}

pub(crate) fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("got {text:?}, expected a 64-bit integer"))
}

pub(crate) fn runtime(text: &str) -> Result<Version, String> {
    let parts: Result<Vec<u32>, _> = text.split('.').map(str::parse).collect();
    let version = match parts.as_deref() {
        Ok(&[major, minor]) => Version::new(major, minor, 0),
        Ok(&[major, minor, patch]) => Version::new(major, minor, patch),
        Ok(_) | Err(_) => return Err(format!("got {text:?}, expected a version such as 9.19.0")),
    };
    if version < Version::OLDEST { Err(format!("got {version}, expected {} or newer", Version::OLDEST)) } else { Ok(version) }
}

/// The extents of a shape, with their minimums.
const EXTENTS: [(&str, i64); 7] = [("B", 0), ("HQ", 1), ("HKV", 1), ("SQ", 0), ("SKV", 0), ("D", 1), ("DV", 1)];

/// Parses a shape, or returns all of its invalid numbers.
pub(crate) fn shape(text: &str) -> Result<Shape, Vec<String>> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let mut wrong = Vec::new();
    let mut numbers = Vec::new();
    for ((name, least), part) in EXTENTS.into_iter().zip(&parts) {
        match part.parse::<i64>() {
            Ok(n) if (least..=i64::from(i32::MAX)).contains(&n) => numbers.push(n),
            Ok(n) => wrong.push(format!("{name}: got {n}, expected between {least} and {}", i32::MAX)),
            Err(_) => wrong.push(format!("{name}: got {part:?}, expected an integer between {least} and {}", i32::MAX)),
        }
    }
    if !(6..=7).contains(&parts.len()) {
        wrong.push(format!("{text:?} has {} numbers, expected B,HQ,HKV,SQ,SKV,D or B,HQ,HKV,SQ,SKV,D,DV", parts.len()));
    }
    match *numbers {
        [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk] if wrong.is_empty() => {
            Ok(Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v: dim_qk })
        }
        [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] if wrong.is_empty() => {
            Ok(Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v })
        }
        _ => Err(wrong),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_extent_is_named() {
        assert_eq!(shape("1,2,1,3,4,8").map(|s| s.dim_v), Ok(8));
        assert_eq!(shape("1,2,1,3,4,8, 16").map(|s| s.dim_v), Ok(16));
        assert_eq!(shape("0,2,1,0,0,8").map(|s| [s.batch, s.seq_q, s.seq_kv]), Ok([0; 3]));
        assert_eq!(shape("0,0,0,0,0,0,0").unwrap_err().len(), 4);
        let wrong = shape("-1,x,1,-3,99999999999999999999,8").unwrap_err();
        assert_eq!(wrong.len(), 4, "{wrong:?}");
        assert_eq!(shape("1,2").unwrap_err().len(), 1);
        assert_eq!(shape("1,2,3,4,5,6,7,8").unwrap_err().len(), 1);
        assert_eq!(shape("").unwrap_err().len(), 2);
    }

    #[test]
    fn names_are_read_and_wrong_ones_are_told_the_right_ones() {
        assert_eq!(element("bf16"), Ok(Element::BF16));
        assert_eq!(layout("bsdh").unwrap_err(), r#"got "bsdh", expected one of bhsd, bshd, sbhd"#);
        assert_eq!(param("cap=-inf"), Ok(("cap", f32::NEG_INFINITY)));
        assert!(param("cap").is_err() && param("cap=x").is_err() && param("cap=nan").is_err());
        assert!(index("3") == Ok(3) && index("-1").is_err());
        assert_eq!(scale("-0.5"), Ok(-0.5));
        assert!(scale("nan").is_err() && scale("1e39").is_err() && scale("").is_err());
        assert_eq!(runtime("9.19"), Ok(Version::new(9, 19, 0)));
        assert!(runtime("8.9.7").is_err() && runtime("9").is_err() && runtime("9.x.0").is_err());
        assert!(seed("-1").is_err());
        assert_eq!((count("3"), strength("ledger")), (Ok(3), Ok(Strength::Ledger)));
        assert!(count("0").is_err() && count("-1").is_err() && count("many").is_err());
        assert_eq!(strength("four").unwrap_err(), r#"got "four", expected one of two, three, ledger"#);
    }
}
