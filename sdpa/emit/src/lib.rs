#![doc = include_str!("../README.md")]

mod captured;
mod dialect;
mod known;

pub use captured::Captured;
pub use dialect::Dialect;

/// The text of functions that traced expressions use and the languages do not have, or have with another meaning at the edges. It stands in front of what
/// [`Captured`] writes. It asks for `uint`, `abs`, `as_type` and `precise::exp` before it, which MSL has.
pub const EXPRESSION: &str = include_str!("../expression.inc");
