//! The real cuDNN on a machine without a GPU. Both runtimes answer in workers; this process loads 9.19 for what policies do.

mod absent;
mod asked;
mod block_scale;
mod cuda;
mod entries;
mod features;
mod grid;
mod kernels;
mod numbers;
mod pieces;
mod policy;
mod sass;
mod sinks;
mod statistics;
mod sums;
