//! Scaled dot product attention, `o = softmax(mask(q·kᵀ · attn_scale)) · v`, on whatever this machine has.
//!
//! ```
//! use sdpa::{AttentionSpec, DType, Dispatcher, HostForward, Layout, Mask, Preference, Shape};
//!
//! let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
//! let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal_bottom_right()).validate()?;
//!
//! let choice = Dispatcher::default().prepare(&problem, Preference::Auto)?;
//! for who in &choice.declined {
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
//! `cpu`, `cuda`, `cudnn` and `metal` are the executors, all on by default; without `default-features` only what is named is compiled. `cudarc`, on by
//! default: cudarc's streams and slices. `metrics`: counters of the caches of plans.
//!
//! # Crates in signatures
//!
//! [`half`] has the 16-bit floats, [`smallvec`] the lists of device parameters, and `sdpa::cudarc::cudarc` is cudarc: each in the version that this crate is built
//! with.
//!
//! # The data path
//!
//! [`AttentionSpec`] is plain data. [`AttentionSpec::validate`] makes a [`Problem`] of it or says everything that is wrong.
//! The [`Dispatcher`] asks executors for the problem; what it returns is [`Prepared`] and can be called any number of times.
//! [`attention`] does all of it in one call over slices. Every stage can be looked at: `cargo sdpa inspect`.
//!
//! # Executors
//!
//! | name | runs on | types | limits |
//! |---|---|---|---|
//! | [`cudnn`] | NVIDIA GPUs of compute capability 8.0 and newer, through cuDNN 9 found at run time | f16, bf16; 8-bit floats from 9.0 on | dims multiples of 8, at most 256; positive scale |
//! | [`cuda`] | NVIDIA GPUs of compute capability 8.0 and newer, through the driver and NVRTC alone; chosen by itself on Hopper but for a few [exceptions](cuda::EXCEPTIONS), and where cuDNN declines or is not there | f16, bf16, f32 | dims at most 256; pages forward alone |
//! | [`metal`] | Apple GPUs from M1 and A14, on macOS 14 or iOS 17; executed so far on an emulation of MSL and on an NVIDIA GPU | f32, f16, bf16 | dims at most 256 |
//! | [`cpu`] | every machine, all cores, SIMD chosen at run time | f32, f16, bf16, 8-bit floats | none |
//!
//! An automatic choice ([`Preference::Auto`]) keeps every reason against the executors it passed over; an executor that is named
//! ([`Preference::Named`]) never falls back.
//!
//! # Device memory
//!
//! [`Dispatcher::prepare_device`] chooses among the executors on NVIDIA GPUs for callers with device memory of their own, as [`Dispatcher::prepare`] does for
//! those with host memory; `sdpa::cudarc` (feature `cudarc`, on by default) takes cudarc's streams and slices. [`device`] has the calls, and
//! [`cudnn::CudnnExecutor::attention`] the plans of cuDNN themselves.
//!
//! # Where to go next
//!
//! Score_mods and masks of your own: [`ScoreMod::new`], [`Mask::new`]; by name: [`library`]. Gradients: [`AttentionSpec::backward`]. Documents without
//! padding: [`AttentionSpec::packed`]; a paged KV cache: [`AttentionSpec::paged`]; growing lengths: [`seq`]; 8-bit floats: [`fp8`]. An executor of your
//! own: [`Dispatcher::with`]. The [`guide`] has a page for each topic; figures and the glossary are in `docs/` of the repository.

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
#[cfg(all(feature = "cudnn", feature = "cuda"))]
pub use tune::Timed;

#[cfg(any(doc, doctest))]
pub mod guide;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
