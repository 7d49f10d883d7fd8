//! One attention over several ranks: context parallelism with every mask, score_mod and sink.
//!
//! Each rank holds a shard of the tokens. [`ParallelSpec`] says how tokens are divided ([`Sharding`]) and what ranks exchange ([`Strategy`]). A validated
//! [`ParallelProblem`] gives each rank a [`Schedule`], plain data that can be printed and [proven](prove), and [`ContextParallel`] runs it over host
//! memory with any [`Executor`](sdpa_core::Executor). Masks and score_mods see positions in the whole problem, with every strategy.
//!
//! # What runs today
//!
//! - Ranks over host memory: threads of one process ([`InProcess`]), or any process group for which the caller implements [`Exchange`].
//! - With the feature `nccl`, ranks over device memory of NVIDIA GPUs (`DeviceContextParallel`): tested under emulation and on two H200s.
//! - The Python package runs the same schedules over PyTorch process groups: tested on CPUs, and on two H200s.
//!
//! # Example
//!
//! ```
//! use sdpa_core::{AttentionSpec, DType, HostForward, Layout, Mask, Shape};
//! use sdpa_cpu::CpuExecutor;
//! use sdpa_parallel::{ContextParallel, InProcess, ParallelSpec, Sharding, Tensor};
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 32, seq_kv: 32, dim_qk: 8, dim_v: 8 };
//! let attention = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal());
//! let problem = Arc::new(ParallelSpec::new(attention, 2).sharding(Sharding::Zigzag).validate()?);
//!
//! let (q, k, v) = (vec![0.5f32; 4 * 32 * 8], vec![0.25f32; 2 * 32 * 8], vec![2.0f32; 2 * 32 * 8]);
//! let run = |exchange: InProcess| -> Result<Vec<f32>, sdpa_parallel::ParallelError> {
//!     let mut rank = ContextParallel::new(&CpuExecutor::default(), problem.clone(), exchange)?;
//!     // A program has the shards already. This one splits whole tensors.
//!     let split = |tensor, whole: &[f32]| problem.split(rank.rank(), tensor, whole);
//!     let (q, k, v) = (split(Tensor::Q, &q), split(Tensor::K, &k), split(Tensor::V, &v));
//!     let mut o = vec![0.0; q.len()];
//!     rank.forward(HostForward::new(&q, &k, &v, &mut o))?;
//!     Ok(o)
//! };
//! let outputs: Vec<_> = std::thread::scope(|scope| {
//!     let ranks = InProcess::group(2, Duration::from_secs(10)).into_iter();
//!     let threads: Vec<_> = ranks.map(|exchange| scope.spawn(|| run(exchange))).collect();
//!     threads.into_iter().map(|thread| thread.join().unwrap()).collect()
//! });
//! for o in outputs {
//!     assert!(o?.iter().all(|x| (x - 2.0).abs() < 1e-6));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "nccl")]
mod device;
mod digest;
mod error;
mod exchange;
mod host;
mod in_process;
mod machine;
mod memory;
mod params;
mod part;
mod plan;
mod problem;
mod prove;
mod run;
mod schedule;
mod sharding;
mod simulate;

#[cfg(feature = "nccl")]
pub use device::{DeviceContextParallel, Partials, Planner, SharedCommunicator};
pub use error::ParallelError;
pub use exchange::{Exchange, ExchangeError, Incoming, Outgoing};
pub use host::ContextParallel;
pub use in_process::InProcess;
pub use machine::{Kernel, Machine};
pub use problem::{Candidate, Choice, ParallelProblem, ParallelSpec, Strategy};
pub use prove::{ProofError, prove};
pub use schedule::{Attend, Extents, Pass, Role, Schedule, Slot, Step, Tensor, Transfer, places};
pub use sdpa_core::Chunk;
#[cfg(feature = "nccl")]
pub use sdpa_driver::{Communicator, Nccl, Rank, UniqueId};
pub use sharding::Sharding;
pub use simulate::{RankTime, Simulation, simulate};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
