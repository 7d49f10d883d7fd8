//! Attention in candle on the CPU, against candle's own autograd over the textbook formula in f64.

mod dense;
mod empty;
mod errors;
mod flash;
mod packed;
mod params;
mod textbook;
