#![doc = include_str!("../README.md")]
//!
//! | file | what it has |
//! |---|---|
//! | `executor` | a device, its compiler, its caches |
//! | `target` | what passes are compiled from for a device, which need not be there |
//! | `family` | the families of kernels, and the devices that these run on |
//! | `choice` | when cuDNN is asked before it |
//! | `fact` | the facts of a problem, and which of them the kernels decline |
//! | `problem`, `backward` | problems as kernels are told of them, and what else they decline |
//! | `tile`, `work`, `shares` | how a problem is cut; how many tiles that makes, and whether their keys are split, or heads that share keys |
//! | `sections` | which key heads follow one another backward, and where sums lie meanwhile |
//! | `map` | which blocks of keys a rule of places leaves |
//! | `places` | at which places traces are asked |
//! | `source`, `matrix` | the text of a kernel, `kernels/` and what is generated |
//! | `mma` | the family with `mma.sync`: what it takes, its cuts, its texts |
//! | `kernel`, `files`, `disk` | kernels compiled and loaded, by their text; files of them; the kernel cache on disk |
//! | `plan`, `params` | a pass made ready, and what a call tells it |

mod backward;
mod choice;
mod disk;
mod error;
mod executor;
mod fact;
mod family;
pub mod files;
pub mod kernel;
#[doc(hidden)]
pub mod map;
mod matrix;
#[doc(hidden)]
pub mod mma;
#[allow(unreachable_pub, reason = "a table makes the structures, and no path leads to them")]
mod params;
mod places;
mod plan;
mod problem;
mod sections;
mod shares;
#[doc(hidden)]
pub mod source;
mod target;
pub mod tile;
mod work;

#[doc(hidden)]
pub use backward::{Along, Backward};
pub use choice::{EXCEPTIONS, Exception, cudnn_first, cudnn_first_backward};
pub use disk::KernelCache;
pub use error::Error;
pub use executor::{CudaExecutor, CudaOptions};
pub use family::Family;
pub use files::{KernelFileError, KernelHead, OtherKeys};
pub use plan::CudaPlan;
#[doc(hidden)]
pub use problem::{Forward, Packs};
pub use sdpa_driver::{Error as DriverError, Nvrtc};
pub use sdpa_nvidia::planfile::Usage;
pub use sdpa_nvidia::user::SettingError;
pub use target::Target;
