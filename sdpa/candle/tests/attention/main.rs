//! Attention in candle on the CPU, against candle's own autograd over the textbook formula in f64.

mod cache;
mod dense;
mod empty;
mod errors;
mod flash;
mod ops;
mod packed;
mod paged;
mod parallel;
mod params;
mod stats;
mod textbook;
