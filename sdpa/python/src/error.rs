//! Errors as exceptions of the package.

use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use sdpa::{Error, SpecError, SpecErrors, Unsupported};

/// An exception of the class `name` of `sdpa.errors`.
fn exception(name: &str, arguments: impl for<'py> PyCallArgs<'py>) -> PyErr {
    Python::attach(|py| {
        let made = || -> PyResult<Bound<'_, PyAny>> { py.import("sdpa.errors")?.getattr(name)?.call1(arguments) };
        made().map_or_else(|failed| failed, PyErr::from_value)
    })
}

/// Everything that is wrong, each with field, value and rule.
pub(crate) fn spec(errors: SpecErrors) -> PyErr {
    let told: Vec<(String, String, String)> =
        errors.0.into_iter().map(|SpecError { field, value, rule, .. }| (field, value, rule)).collect();
    exception("SpecError", (told,))
}

/// One thing that is wrong.
pub(crate) fn one(field: &str, value: impl std::fmt::Display, rule: impl Into<String>) -> PyErr {
    spec(SpecErrors(vec![SpecError::new(field, value, rule)]))
}

/// An executor and its reasons, in words.
pub(crate) type Told = (&'static str, Vec<String>);

/// What an executor does not take.
pub(crate) fn told(refusal: &Unsupported) -> Told {
    (refusal.executor.name(), refusal.reasons.iter().map(ToString::to_string).collect())
}

/// What no executor takes, with the reasons of each that was asked. Where none of them is there, it is the environment that fails.
pub(crate) fn unsupported(refusal: &Unsupported) -> PyErr {
    if refusal.is_absence() {
        return environment(refusal.to_string());
    }
    let ((executor, reasons), before) = (told(refusal), refusal.before.iter().map(told).collect::<Vec<_>>());
    exception("UnsupportedError", (executor, reasons, before))
}

/// What an executor runs on failed.
pub(crate) fn environment(text: String) -> PyErr {
    exception("EnvironmentError", (text,))
}

/// An error of the library.
pub(crate) fn of(error: Error) -> PyErr {
    match error {
        Error::Spec(errors) => spec(errors),
        Error::Unsupported(refusal) => unsupported(&refusal),
        Error::Failed(failure) => environment(format!("{}: {failure}", failure.executor)),
        other @ (Error::Bug(_) | _) => environment(other.to_string()),
    }
}
