#![doc = include_str!("../README.md")]

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
compile_error!("no executor is enabled: turn on the feature `cpu` or `cuda`");

mod attention;
mod context_parallel;
#[cfg(feature = "cuda")]
mod cuda;
mod documents;
mod error;
pub mod flash;
#[cfg(feature = "cpu")]
mod host;
mod integers;
mod kv_cache;
mod made;
mod node;
mod op;
mod operand;
pub mod ops;
mod paged_kv_cache;
mod pages;
mod param;
mod pass;
mod ranks;
mod through_stats;

pub use attention::Attention;
pub use context_parallel::ContextParallel;
#[cfg(feature = "cuda")]
pub use cuda::dispatcher;
pub use documents::Documents;
pub use flash::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap, flash_attn_varlen, flash_attn_varlen_alibi,
    flash_attn_varlen_alibi_windowed, flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed,
    flash_attn_varlen_windowed, flash_attn_windowed,
};
pub use kv_cache::KvCache;
pub use paged_kv_cache::{PagedKvCache, PagedShape, PagedStep, SequenceId};
pub use pages::Pages;
pub use sdpa::{Align, Dispatcher, ExecutorName, Mask, ScoreMod, distributed, expr, library};

#[cfg(doctest)]
#[doc = include_str!("../../../docs/candle.md")]
struct Guide;
