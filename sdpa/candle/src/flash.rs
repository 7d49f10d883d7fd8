//! The functions of candle-flash-attn, with its names and arguments, differentiable and on every device that [`Attention`] supports.
//!
//! A program that uses `candle_flash_attn::flash_attn` only changes that import:
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use sdpa_candle::flash_attn;
//!
//! let q = Var::from_tensor(&Tensor::randn(0f32, 1., (2, 5, 4, 8), &Device::Cpu)?)?; // (batch, seq, heads, dim)
//! let k = Tensor::randn(0f32, 1., (2, 9, 2, 8), &Device::Cpu)?;
//! let o = flash_attn(&q, &k, &k, 0.35, true)?;
//! assert!(o.sum_all()?.backward()?.get(&q).is_some());
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! The arguments have FlashAttention's meaning. A window attends to `left` keys before and `right` keys after the query's own position. `None` means no bound;
//! causal is `(None, Some(0))`. Queries are bottom-right aligned: the last query attends to the last key. The softcap applies before ALiBi, which adds
//! `-slope[head] · |distance|`. Softcap 0 means none.

mod paged;

pub use paged::flash_attn_varlen_paged_windowed;

use crate::attention::Attention;
use crate::documents::Documents;
use crate::error::one;
use crate::integers;
use candle_core::{DType, Result, Tensor};
use sdpa::expr::{Axis, F32};
use sdpa::{Align, Mask, ScoreMod, library};

/// The arguments that all functions have.
struct Flash<'a> {
    scale: f32,
    slopes: Option<&'a Tensor>,
    window: (Option<usize>, Option<usize>),
    softcap: Option<f32>,
}

fn up_to_itself(causal: bool) -> (Option<usize>, Option<usize>) {
    (None, causal.then_some(0))
}

impl Flash<'_> {
    /// Returns the attention. `align` is the alignment of queries and keys in a sequence, and `shift` the offset of query positions.
    fn attention(&self, seq_kv: usize, align: Align, shift: Option<Tensor>) -> Result<Attention> {
        let mut attention = Attention::new().attn_scale(self.scale);
        if let Some(cap) = self.softcap {
            if !(cap >= 0.0 && cap.is_finite()) {
                return Err(one("softcap", cap, "a number above 0, or 0 for none"));
            }
            if cap > 0.0 {
                attention = attention.score_mod(library::softcap(cap));
            }
        }
        if let Some(slopes) = self.slopes {
            if slopes.dtype() != DType::F32 {
                return Err(one("alibi_slopes dtype", slopes.dtype().as_str(), "f32"));
            }
            attention = attention.score_mod(alibi(shift.is_some())?).param("slopes", slopes);
            if let Some(shift) = shift {
                attention = attention.param("shift", &shift);
            }
        }
        // As in candle-flash-attn, a bound larger than the number of keys means no bound.
        let [left, right] = [self.window.0, self.window.1].map(|side| side.filter(|&side| side <= seq_kv));
        if left.is_none() && right.is_none() {
            return Ok(attention);
        }
        // `Mask::window` counts the diagonal among the keys to the left, so add 1.
        let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        Ok(attention.mask(Mask::window(left.map(|left| signed(left).saturating_add(1)), right.map(signed), align)))
    }

    fn dense(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let seq_kv = k.dims().get(1).copied().unwrap_or_default();
        self.attention(seq_kv, Align::BottomRight, None)?.forward_bshd(q, k, v)
    }

    fn packed(&self, [q, k, v]: [&Tensor; 3], seqlens: [&Tensor; 2], longest: [usize; 2]) -> Result<Tensor> {
        let documents = Documents::new(seqlens[0], longest[0]);
        let same = seqlens[0].id() == seqlens[1].id() && longest[0] == longest[1];
        let documents = if same { documents } else { documents.keys(seqlens[1], longest[1]) };
        let shift = if self.slopes.is_some() && !same { Some(shift(seqlens)?) } else { None };
        let align = if same { Align::TopLeft } else { Align::Ends };
        self.attention(longest[1], align, shift)?.forward_packed(&documents, q, k, v)
    }
}

/// Returns `score - slopes[head] · |q + shift - k|`. The shift is a parameter of each packed sequence, or `seq_kv - seq_q`.
fn alibi(of_documents: bool) -> Result<ScoreMod> {
    let made = ScoreMod::new("alibi-distance", |score, at, p| {
        let query = at.q.to_f32();
        let query = if of_documents { query + p.tensor("shift", [Axis::Batch], F32) } else { query + (at.seq_kv - at.seq_q).to_f32() };
        score - p.tensor("slopes", [Axis::Head], F32) * (query - at.k.to_f32()).abs()
    });
    made.map_err(candle_core::Error::wrap)
}

/// Returns how many more keys than queries each sequence has.
fn shift([q, k]: [&Tensor; 2]) -> Result<Tensor> {
    let lengths = |boundaries: &Tensor| {
        let boundaries = integers::cast(&boundaries.detach(), DType::I64)?;
        let documents = boundaries.dims1()?.saturating_sub(1);
        boundaries.narrow(0, 1, documents)?.sub(&boundaries.narrow(0, 0, documents)?)
    };
    lengths(k)?.sub(&lengths(q)?)?.to_dtype(DType::F32)
}

/// Computes attention. Shapes: `q` (batch, seq, heads, dim), `k` and `v` (batch, seq_kv, heads_kv, dim), `o` as `q`.
///
/// # Errors
/// Fails as [`Attention::forward`] does.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: None, window: up_to_itself(causal), softcap: None };
    flash.dense(q, k, v)
}

/// Computes attention within a window. Shapes: `q` (batch, seq, heads, dim), `k` and `v` (batch, seq_kv, heads_kv, dim), `o` as `q`.
///
/// # Errors
/// Fails as [`Attention::forward`] does.
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: None, window: (window_size_left, window_size_right), softcap: None };
    flash.dense(q, k, v)
}

/// Computes attention with ALiBi. Shapes: `q` (batch, seq, heads, dim), `k` and `v` (batch, seq_kv, heads_kv, dim), `o` as `q`;
/// `alibi_slopes` f32 (heads), which get a gradient if they are a variable.
///
/// # Errors
/// Fails as [`Attention::forward`] does.
pub fn flash_attn_alibi(q: &Tensor, k: &Tensor, v: &Tensor, alibi_slopes: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: Some(alibi_slopes), window: up_to_itself(causal), softcap: None };
    flash.dense(q, k, v)
}

/// Computes attention with ALiBi within a window. Shapes: `q` (batch, seq, heads, dim), `k` and `v` (batch, seq_kv, heads_kv, dim), `o`
/// as `q`; `alibi_slopes` f32 (heads), which get a gradient if they are a variable.
///
/// # Errors
/// Fails as [`Attention::forward`] does.
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: Some(alibi_slopes), window: (window_size_left, window_size_right), softcap: None };
    flash.dense(q, k, v)
}

/// Computes attention within a window, with a softcap, and with ALiBi if slopes are given. Shapes: `q` (batch, seq, heads, dim), `k` and
/// `v` (batch, seq_kv, heads_kv, dim), `o` as `q`; `alibi_slopes` f32 (heads), which get a gradient if they are a variable.
///
/// # Errors
/// Fails as [`Attention::forward`] does.
#[allow(clippy::too_many_arguments, reason = "those of candle-flash-attn")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: alibi_slopes, window: (window_size_left, window_size_right), softcap: Some(softcap) };
    flash.dense(q, k, v)
}

/// Computes attention within packed sequences. Shapes: `q` (tokens, heads, dim), `k` and `v` (tokens, heads_kv, dim), `o` as `q`;
/// `seqlens_q` and `seqlens_k` are offsets of u32, i32 or i64, one more than there are sequences.
///
/// # Errors
/// Fails as [`Attention::forward_packed`] does.
#[allow(clippy::too_many_arguments, reason = "those of candle-flash-attn")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: None, window: up_to_itself(causal), softcap: None };
    flash.packed([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// Computes attention within a window, for packed sequences. Shapes: `q` (tokens, heads, dim), `k` and `v` (tokens, heads_kv, dim), `o`
/// as `q`; `seqlens_q` and `seqlens_k` are offsets of u32, i32 or i64, one more than there are sequences.
///
/// # Errors
/// Fails as [`Attention::forward_packed`] does.
#[allow(clippy::too_many_arguments, reason = "those of candle-flash-attn")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: None, window: (window_size_left, window_size_right), softcap: None };
    flash.packed([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// Computes attention with ALiBi, for packed sequences. Shapes: `q` (tokens, heads, dim), `k` and `v` (tokens, heads_kv, dim), `o` as
/// `q`; `seqlens_q` and `seqlens_k` are offsets of u32, i32 or i64, one more than there are sequences; `alibi_slopes` f32 (heads), which
/// get a gradient if they are a variable.
///
/// # Errors
/// Fails as [`Attention::forward_packed`] does.
#[allow(clippy::too_many_arguments, reason = "those of candle-flash-attn")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: Some(alibi_slopes), window: up_to_itself(causal), softcap: None };
    flash.packed([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// Computes attention with ALiBi within a window, for packed sequences. Shapes: `q` (tokens, heads, dim), `k` and `v` (tokens, heads_kv,
/// dim), `o` as `q`; `seqlens_q` and `seqlens_k` are offsets of u32, i32 or i64, one more than there are sequences; `alibi_slopes` f32
/// (heads), which get a gradient if they are a variable.
///
/// # Errors
/// Fails as [`Attention::forward_packed`] does.
#[allow(clippy::too_many_arguments, reason = "those of candle-flash-attn")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: Some(alibi_slopes), window: (window_size_left, window_size_right), softcap: None };
    flash.packed([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// Computes attention within a window, with a softcap, and with ALiBi if slopes are given, for packed sequences. Shapes: `q` (tokens,
/// heads, dim), `k` and `v` (tokens, heads_kv, dim), `o` as `q`; `seqlens_q` and `seqlens_k` are offsets of u32, i32 or i64, one more
/// than there are sequences; `alibi_slopes` f32 (heads), which get a gradient if they are a variable.
///
/// # Errors
/// Fails as [`Attention::forward_packed`] does.
#[allow(clippy::too_many_arguments, reason = "those of candle-flash-attn")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: alibi_slopes, window: (window_size_left, window_size_right), softcap: Some(softcap) };
    flash.packed([q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}
