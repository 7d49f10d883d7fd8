//! Values of declared parameters, checked against the declarations before anything runs.

use crate::check::kind;
use crate::dtype::DType;
use crate::error::{SpecError, SpecErrors};
use crate::expr::{Declared, ParamKind};
use crate::problem::Problem;
use crate::tensor::{Param, ParamValue};

impl ParamValue<'_> {
    /// Returns the element type of a tensor; `None` for a scalar.
    pub fn dtype(&self) -> Option<DType> {
        match self {
            ParamValue::Scalar(_) => None,
            ParamValue::F32(_) => Some(DType::F32),
            ParamValue::F16(_) => Some(DType::F16),
            ParamValue::BF16(_) => Some(DType::BF16),
            ParamValue::I32(_) => Some(DType::I32),
            ParamValue::I64(_) => Some(DType::I64),
            ParamValue::Bool(_) => Some(DType::Bool),
            ParamValue::F8E8M0(_) => Some(DType::F8E8M0),
        }
    }

    /// Returns the number of elements; 1 for a scalar.
    pub fn elements(&self) -> usize {
        match self {
            ParamValue::Scalar(_) => 1,
            ParamValue::F32(x) => x.len(),
            ParamValue::F16(x) => x.len(),
            ParamValue::BF16(x) => x.len(),
            ParamValue::I32(x) => x.len(),
            ParamValue::I64(x) => x.len(),
            ParamValue::Bool(x) => x.len(),
            ParamValue::F8E8M0(x) => x.len(),
        }
    }

    /// Returns the element at index `at` as f64; a boolean is 0 or 1.
    pub fn get(&self, at: usize) -> f64 {
        match self {
            ParamValue::Scalar(x) => f64::from(*x),
            ParamValue::F32(x) => f64::from(x[at]),
            ParamValue::F16(x) => x[at].to_f64(),
            ParamValue::BF16(x) => x[at].to_f64(),
            ParamValue::I32(x) => f64::from(x[at]),
            ParamValue::I64(x) => x[at] as f64,
            ParamValue::Bool(x) => f64::from(u8::from(x[at])),
            ParamValue::F8E8M0(x) => f64::from(x[at].to_f32()),
        }
    }
}

/// Returns the number of elements of a parameter's dense tensor in a problem of extents (batch, heads_q, seq_q, seq_kv); 1 for a scalar.
pub fn elements(declared: &Declared, extents: [i64; 4]) -> i64 {
    match declared.kind {
        ParamKind::Scalar => 1,
        ParamKind::Tensor { axes, dtype: _ } => axes.elements(extents),
    }
}

/// The kind of value that a call passes for a parameter, on the host or on a device.
#[derive(Clone, Copy, Debug)]
pub enum Supplied {
    /// The value of a scalar parameter.
    Scalar(f32),
    /// The value of a tensor parameter: a dense tensor, or the memory that holds it.
    Tensor {
        /// The element type of the tensor.
        dtype: DType,
        /// The number of elements of the tensor.
        elements: u64,
    },
}

fn check_one(p: &Declared, given: Supplied, extents: [i64; 4], at_least: bool) -> Option<SpecError> {
    let name = || format!("parameter {}", p.name);
    let unlike = |said: String| Some(SpecError::new(name(), said, format!("{}, as declared", kind(p.kind))));
    match (p.kind, given) {
        (ParamKind::Scalar, Supplied::Scalar(x)) => x.is_nan().then(|| SpecError::new(name(), x, "a number")),
        (ParamKind::Scalar, Supplied::Tensor { dtype, elements: _ }) => unlike(format!("a tensor of {dtype}")),
        (ParamKind::Tensor { .. }, Supplied::Scalar(_)) => unlike("a scalar".to_owned()),
        (ParamKind::Tensor { axes: _, dtype }, Supplied::Tensor { dtype: given, elements: _ }) if dtype != given => {
            unlike(format!("a tensor of {given}"))
        }
        (ParamKind::Tensor { .. }, Supplied::Tensor { dtype: _, elements: given }) => {
            let need = elements(p, extents);
            let short = i64::try_from(given).is_ok_and(|given| given < need);
            let long = !at_least && i64::try_from(given).is_ok_and(|given| given > need);
            let least = if at_least { "at least " } else { "" };
            let rule = || format!("{least}{need} elements: in this problem the parameter is {}, stored densely", kind(p.kind));
            (short || long).then(|| SpecError::new(format!("{} length", name()), given, rule()))
        }
    }
}

/// Checks the values of a call against the declarations. With `at_least`, memory may be longer than the tensor.
///
/// # Errors
/// Returns every name that is unknown, repeated or missing, every wrong type and every wrong length.
pub fn check(declared: &[Declared], extents: [i64; 4], given: &[(&str, Supplied)], at_least: bool) -> Result<(), SpecErrors> {
    let mut errors = Vec::new();
    for (n, (name, _)) in given.iter().enumerate() {
        if !declared.iter().any(|d| d.name == *name) {
            let names: Vec<&str> = declared.iter().map(|d| d.name.as_str()).collect();
            let rule = if names.is_empty() {
                "none: no parameter is declared".to_owned()
            } else {
                format!("one of the declared parameters: {}", names.join(", "))
            };
            errors.push(SpecError::new(format!("parameter {name}"), "a value", rule));
        } else if given[..n].iter().any(|(before, _)| before == name) {
            errors.push(SpecError::new(format!("parameter {name}"), "two values", "one"));
        }
    }
    for p in declared {
        match given.iter().find(|(name, _)| *name == p.name) {
            Some((_, given)) => errors.extend(check_one(p, *given, extents, at_least)),
            None if p.default.is_some() => {}
            None => errors.push(SpecError::new(format!("parameter {}", p.name), "nothing", format!("{}, as declared", kind(p.kind)))),
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(SpecErrors(errors)) }
}

/// Compares `given`, the names of the parameter gradients for which a call passes memory, with `wanted`, the names of those that the
/// problem computes. Returns a mistake for each one that is missing, unknown or repeated.
pub fn check_gradients<'w>(wanted: impl Iterator<Item = &'w str> + Clone, given: &[&str]) -> Vec<SpecError> {
    let field = |name: &str| format!("gradient of {name}");
    let mut errors = Vec::new();
    for (n, name) in given.iter().enumerate() {
        if !wanted.clone().any(|wanted| wanted == *name) {
            errors.push(SpecError::new(field(name), "an output", "none: the problem does not ask for it"));
        } else if given[..n].contains(name) {
            errors.push(SpecError::new(field(name), "two outputs", "one"));
        }
    }
    let absent = wanted.filter(|name| !given.contains(name));
    errors.extend(absent.map(|name| SpecError::new(field(name), "nothing", "an output: the problem asks for it")));
    errors
}

/// Returns the value of each declared parameter in order, in a problem of extents (batch, heads_q, seq_q, seq_kv). A scalar that the call does not
/// name has its default.
///
/// # Errors
/// Returns every name that is unknown, repeated or missing, every wrong type and every wrong length.
pub fn bind<'a>(declared: &[Declared], extents: [i64; 4], given: &[Param<'a>]) -> Result<Vec<ParamValue<'a>>, SpecErrors> {
    let said: Vec<(&str, Supplied)> = given
        .iter()
        .map(|p| match (p.value, p.value.dtype()) {
            (ParamValue::Scalar(x), _) => (p.name, Supplied::Scalar(x)),
            (_, Some(dtype)) => (p.name, Supplied::Tensor { dtype, elements: p.value.elements() as u64 }),
            (_, None) => (p.name, Supplied::Scalar(f32::NAN)),
        })
        .collect();
    check(declared, extents, &said, false)?;
    let value = |p: &Declared| given.iter().find(|g| g.name == p.name).map(|g| g.value).or(p.default.map(ParamValue::Scalar));
    Ok(declared.iter().filter_map(value).collect())
}

impl Problem {
    /// Returns the value of each of [`Problem::params`], in order.
    ///
    /// # Errors
    /// Fails as [`bind`] does.
    pub fn bind<'a>(&self, given: &[Param<'a>]) -> Result<Vec<ParamValue<'a>>, SpecErrors> {
        bind(self.params(), self.extents(), given)
    }
}
