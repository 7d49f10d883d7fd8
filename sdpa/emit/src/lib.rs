#![doc = include_str!("../README.md")]

mod captured;
mod dialect;
mod known;

pub use captured::Captured;
pub use dialect::Dialect;

/// Source code of the functions that emitted expressions call and that the languages lack, or define differently for edge cases. It must
/// precede the output of [`Captured`], and needs `uint`, `abs`, `as_type` and `precise::exp`, which MSL has.
pub const EXPRESSION: &str = include_str!("../expression.inc");
