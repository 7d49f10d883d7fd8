#![doc = include_str!("../README.md")]
//!
//! | file | contents |
//! |---|---|
//! | `executor` | a device, its compiler, its caches |
//! | `target` | the schedule of a pass on a device, which need not be present |
//! | `family` | the families of kernels, and the devices that run them |
//! | `choice` | problems for which cuDNN is tried first |
//! | `fact` | the facts of a problem that the kernels do not support |
//! | `problem`, `backward` | the kernels' view of a problem, and other limits |
//! | `tile_config`, `work`, `head_splits` | tile configurations; how many tiles there are, split-KV, and GQA groups over several thread blocks |
//! | `head_sections` | L2 head sections of the backward pass, and where dQ accumulators are |
//! | `index_lists` | the KV blocks that an index-only mask leaves |
//! | `index_range` | the range of indices for which traces are compiled |
//! | `source`, `wgmma_wrappers` | kernel sources: `kernels/` and generated code |
//! | `wgmma` | the family with `wgmma`: its parameters, and the schedules of its passes |
//! | `mma` | the family with `mma.sync`: what it supports, its tile configurations, sources and schedules |
//! | `entry_point` | the entry points of the kernel sources |
//! | `kernel`, `files`, `disk` | compiled and loaded kernels by source; kernel files; the kernel cache on disk |
//! | `schedule`, `params`, `attention_params`, `parameter_gradients` | a pass as slots and steps; the parameters of kernels; the parameters shared by all kernels; gradients of declared parameters |
//! | `warp_partials` | parameter gradients summed in a fixed order: the partial sums of each warp |
//! | `plan` | a prepared pass: it submits the steps of a schedule |

mod attention_params;
mod backward;
mod choice;
mod disk;
mod entry_point;
mod error;
mod executor;
mod fact;
mod family;
pub mod files;
mod head_sections;
mod head_splits;
#[doc(hidden)]
pub mod index_lists;
mod index_range;
pub mod kernel;
#[doc(hidden)]
pub mod mma;
mod parameter_gradients;
mod params;
mod plan;
mod problem;
mod schedule;
#[doc(hidden)]
pub mod source;
mod target;
pub mod tile_config;
mod unsupported;
mod warp_partials;
mod wgmma;
mod wgmma_wrappers;
mod work;

#[doc(hidden)]
pub use backward::{Along, Backward};
pub use choice::{EXCEPTIONS, Exception, cudnn_first, cudnn_first_backward};
pub use disk::KernelCache;
pub use entry_point::EntryPoint;
pub use error::Error;
pub use executor::{CudaExecutor, CudaOptions};
pub use family::Family;
pub use files::{KernelFileError, KernelHead, OtherKeys};
pub use plan::CudaPlan;
#[doc(hidden)]
pub use problem::{Forward, Packs};
pub use schedule::{LaunchReport, ScheduleReport, SlotReport, StepReport};
pub use sdpa_driver::{Error as DriverError, Nvrtc};
pub use sdpa_nvidia::planfile::Usage;
pub use sdpa_nvidia::user::SettingError;
pub use target::Target;
