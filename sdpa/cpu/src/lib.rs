#![doc = include_str!("../README.md")]
//!
//! # How work is divided
//!
//! A problem is split into *strips*: rows of one KV head. If there are too few strips to keep every thread busy, strips are split into *pieces*, which are
//! parts of their keys, and the sums of pieces are merged. Threads process the pieces, the largest first. A piece processes its keys in blocks. Block sizes and
//! the two head dims bound the memory in use; sequence lengths do not.
//!
//! | file | contents |
//! |---|---|
//! | `executor`, `forward`, `workspace` | the executor, a prepared forward pass, and its scratch memory |
//! | `fact` | the facts of a problem that are supported: all |
//! | `isa` | the instruction set, detected at run time |
//! | `schedule` | strips, pieces, block sizes, threads |
//! | `tiles`, `kernel` | many rows: one row per lane |
//! | `decode` | few rows (decode): lanes along a row |
//! | `exp` | `2^x` |
//! | `long_sums` | f64 sums for more keys than an f32 sum is accurate for |
//! | `program` | score_mods, and masks that are not bands |
//! | `dropout` | dropout of P |
//! | `pack`, `element` | operands, packed sequences and pages, scratch memory, f16 and bf16 |
//! | `output` | rows of the output, merging |
//! | `backward` | the backward pass |
//! | `fp8` | 8-bit floats: roundings inside of the passes and around them |
//!
//! # Infinities and NaN
//!
//! A masked-out score has no effect, whatever `q`, `k` and `v` contain. Among unmasked scores:
//!
//! - NaN makes its row NaN, in `o` and `stats`.
//! - +inf does too, because inf - inf is NaN.
//! - -inf has P = 0, and 0 times an inf or NaN value is NaN, as in a matrix product. (Metal kernels treat such a pair as masked out.)
//!
//! A row whose scores are all -inf, or which attends to no key, is 0 with stats -inf. An element of P that dropout removes is 0, and takes part in the
//! products.
//!
//! Gradients follow the same rules: a masked-out (query, key) has no effect on any of them, whatever its `q`, `k`, `v`, `o`, `d_o` and stats contain. A row
//! with stats -inf attends to no key. An unmasked score of -inf has P = 0 and dS = 0, and those take part in the products.

mod backward;
mod decode;
mod dropout;
mod element;
mod executor;
mod exp;
mod fact;
mod forward;
mod fp8;
mod isa;
mod kernel;
mod long_sums;
#[cfg(test)]
mod merge_tests;
mod output;
mod pack;
#[cfg(test)]
mod packed_tests;
#[cfg(test)]
mod paged_tests;
#[cfg(test)]
mod precision_tests;
mod program;
#[cfg(test)]
mod rule_tests;
mod schedule;
#[cfg(test)]
mod tests;
mod tiles;
mod workspace;

pub use executor::CpuExecutor;
