//! Scaled dot product attention, `o = softmax(mask(q·kᵀ · attn_scale)) · v`, on the hardware of this machine.
//!
//! ```
//! use sdpa::{AttentionSpec, DType, Dispatcher, HostForward, Layout, Mask, Preference, Shape};
//!
//! let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
//! let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal_bottom_right()).validate()?;
//!
//! let choice = Dispatcher::default().prepare(&problem, Preference::Auto)?;
//! for who in &choice.unsupported {
//!     println!("not on {}: {who}", who.executor);
//! }
//! let (q, k, v) = (vec![0.5; 4 * 5 * 8], vec![0.25; 2 * 7 * 8], vec![2.0; 2 * 7 * 8]);
//! let mut o = vec![f32::NAN; 4 * 5 * 8];
//! choice.prepared.forward(HostForward::new(&q, &k, &v, &mut o))?;
//! assert!(o.iter().all(|x| (x - 2.0).abs() < 1e-6));
//! # Ok::<(), sdpa::Error>(())
//! ```
//!
//! # Features
//!
//! `cpu`, `cuda`, `cudnn` and `metal` are the executors, all enabled by default; without `default-features` only the named ones are compiled.
//! `cudarc`, enabled by default, supports cudarc's streams and slices. `distributed`, enabled by default, is one problem over several ranks.
//! `metrics` adds counters of the plan caches.
//!
//! # Crates in signatures
//!
//! [`half`] has the 16-bit floats, [`smallvec`] the lists of device parameters, and `sdpa::cudarc::cudarc` is cudarc: each in the version with which
//! this crate is built.
//!
//! # The data path
//!
//! [`AttentionSpec`] is plain data. [`AttentionSpec::validate`] makes a [`Problem`] of it, or returns every mistake. The [`Dispatcher`] selects an
//! executor for the problem; its result is [`Prepared`] and can be called any number of times. [`attention`] does all of this in one call over
//! slices. `cargo sdpa inspect` prints every stage.
//!
//! # Executors
//!
//! | name | runs on | types | limits |
//! |---|---|---|---|
//! | [`cudnn`] | NVIDIA GPUs of compute capability 8.0 and newer, through cuDNN 9 found at run time | f16, bf16; 8-bit floats from 9.0 on | dims multiples of 8, at most 256; positive scale |
//! | [`cuda`] | NVIDIA GPUs of compute capability 8.0 and newer, through the driver and NVRTC alone; selected automatically on Hopper except for a few [exceptions](cuda::EXCEPTIONS), and where cuDNN is unsupported or missing | f16, bf16, f32 | dims at most 256; pages only in the forward pass |
//! | [`metal`] | Apple GPUs from M1 and A14, on macOS 14 or iOS 17; tested so far only on an emulation of MSL and on an NVIDIA GPU | f32, f16, bf16 | dims at most 256 |
//! | [`cpu`] | every machine, all cores, SIMD chosen at run time | f32, f16, bf16, 8-bit floats | none |
//!
//! Automatic selection ([`Preference::Auto`]) keeps every reason against the executors it passes over. An executor selected by name
//! ([`Preference::Named`]) never falls back.
//!
//! # Device memory
//!
//! [`Dispatcher::prepare_device`] selects among the executors on NVIDIA GPUs for callers with device memory, as [`Dispatcher::prepare`] does for host
//! memory. `sdpa::cudarc` (feature `cudarc`, enabled by default) takes cudarc's streams and slices. [`device`] has the calls, and
//! [`cudnn::CudnnExecutor::attention`] returns cuDNN's plans.
//!
//! # Where to go next
//!
//! Custom score_mods and masks: [`ScoreMod::new`], [`Mask::new`]; by name: [`library`]. Gradients: [`AttentionSpec::backward`]. Packed sequences:
//! [`AttentionSpec::packed`]; a paged KV cache: [`AttentionSpec::paged`]; growing lengths: [`seq`]; 8-bit floats: [`fp8`]. Custom executors:
//! [`Dispatcher::with`]. The [`guide`] has a page for each topic; benchmarks and the glossary are in `docs/` of the repository.

#[cfg(feature = "cudnn")]
mod any_scale;
mod attention;
mod dispatch;
#[cfg(any(feature = "cudnn", feature = "cuda"))]
mod on_device;
#[cfg(all(feature = "cudnn", feature = "cuda"))]
mod tune;

pub use attention::{AttentionCall, Execution, Pass, attention};
pub use dispatch::{Choice, Dispatcher, Preference};
#[cfg(feature = "metal")]
pub use metal_fallback as metal;
pub use sdpa_cache as cache;
pub use sdpa_core::*;
#[cfg(feature = "cpu")]
pub use sdpa_cpu as cpu;
#[cfg(feature = "cuda")]
pub use sdpa_cuda as cuda;
#[cfg(feature = "cudnn")]
pub use sdpa_cudnn as cudnn;
#[cfg(any(feature = "cudnn", feature = "cuda", feature = "cudarc"))]
pub use sdpa_nvidia as nvidia;
#[cfg(all(feature = "cudarc", not(target_vendor = "apple")))]
pub use sdpa_nvidia::cudarc;
#[cfg(feature = "distributed")]
pub use sdpa_parallel as distributed;
#[cfg(all(feature = "cudnn", feature = "cuda"))]
pub use tune::Timed;

#[cfg(any(doc, doctest))]
pub mod guide;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
