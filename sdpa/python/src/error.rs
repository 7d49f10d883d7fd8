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

/// Converts invalid arguments to one Python exception, with field, value and rule of each.
pub(crate) fn spec(errors: SpecErrors) -> PyErr {
    let told: Vec<(String, String, String)> =
        errors.0.into_iter().map(|SpecError { field, value, rule, .. }| (field, value, rule)).collect();
    exception("SpecError", (told,))
}

/// Returns a Python exception for one invalid argument: its field, its value, and the rule that it breaks.
pub(crate) fn one(field: &str, value: impl std::fmt::Display, rule: impl Into<String>) -> PyErr {
    spec(SpecErrors(vec![SpecError::new(field, value, rule)]))
}

/// The name of an executor, and its reasons as text for not running a pass.
pub(crate) type Told = (&'static str, Vec<String>);

/// Returns the name of the executor that does not support a pass, and its reasons as text.
pub(crate) fn told(refusal: &Unsupported) -> Told {
    (refusal.executor.name(), refusal.reasons.iter().map(ToString::to_string).collect())
}

/// Returns a Python exception for a pass that no executor supports, with the reasons of each. If no executor is available, it is an error
/// of the environment.
pub(crate) fn unsupported(refusal: &Unsupported) -> PyErr {
    if refusal.is_absence() {
        return environment(refusal.to_string());
    }
    let ((executor, reasons), before) = (told(refusal), refusal.before.iter().map(told).collect::<Vec<_>>());
    exception("UnsupportedError", (executor, reasons, before))
}

/// Returns a Python exception for a failure of the environment: a library, a driver or a device.
pub(crate) fn environment(text: String) -> PyErr {
    exception("EnvironmentError", (text,))
}

/// Converts an error of the library to a Python exception.
pub(crate) fn of(error: Error) -> PyErr {
    match error {
        Error::Spec(errors) => spec(errors),
        Error::Unsupported(refusal) => unsupported(&refusal),
        Error::Failed(failure) => environment(format!("{}: {failure}", failure.executor)),
        other @ (Error::Bug(_) | _) => environment(other.to_string()),
    }
}
