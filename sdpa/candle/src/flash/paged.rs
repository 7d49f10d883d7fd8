//! candle-flash-attn's function over a paged KV cache.

use super::Flash;
use crate::attention::Attention;
use crate::error::{none, one};
use crate::integers;
use crate::pages::Pages;
use candle_core::{DType, Result, Tensor};
use sdpa::expr::{Axis, I32};
use sdpa::{Align, Mask, SpecError};

/// Computes attention of packed queries within a window over a paged KV cache. Shapes: `q` (tokens, heads, dim), `k` and `v` (pages,
/// `page_block_size`, heads_kv, dim), `o` as `q`; `seqlens_q` and `seqlens_k` are offsets of u32, i32 or i64, one more than there are
/// sequences; `block_table` (sequences, pages of a sequence) has the pages of each sequence.
///
/// `mm_prefix_ranges` (sequences, ranges, 2), of u32, i32 or i64, has ranges of positions from a first one up to an end. Within such a range,
/// queries attend to all keys, whatever the window is: images in a prompt, for example. An empty range has no effect.
///
/// On CUDA, offsets and ranges of i32 are converted in host memory, which synchronises; u32 and i64 are not.
///
/// There is no backward pass. Page sizes that a kernel supports are [here](https://github.com/sdpa-rs/sdpa/blob/main/docs/paged.md#support).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use sdpa_candle::flash_attn_varlen_paged_windowed;
///
/// let cpu = &Device::Cpu;
/// let (q, pool) = (Tensor::randn(0f32, 1., (4, 4, 8), cpu)?, Tensor::randn(0f32, 1., (5, 4, 2, 8), cpu)?);
/// let (seqlens_q, seqlens_k) = (Tensor::new(&[0u32, 1, 4], cpu)?, Tensor::new(&[0u32, 6, 9], cpu)?);
/// let table = Tensor::new(&[[3u32, 1], [4, 0]], cpu)?;
/// let o = flash_attn_varlen_paged_windowed(
///     &q, &pool, &pool, &seqlens_q, &seqlens_k, &table, None, 3, 6, 0.35, None, Some(0), 4, None,
/// )?;
/// assert_eq!(o.dims(), [4, 4, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Fails as [`Attention::forward_paged`] does.
#[allow(clippy::too_many_arguments, reason = "those of candle-flash-attn")]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let flash = Flash { scale: softmax_scale, slopes: None, window: (window_size_left, window_size_right), softcap };
    none(mistakes([seqlens_q, seqlens_k], mm_prefix_ranges, k, page_block_size))?;
    let [of_q, of_k] = [lengths(seqlens_q)?, lengths(seqlens_k)?];
    let window = flash.window.0.is_some() || flash.window.1.is_some();
    let attention = match mm_prefix_ranges.filter(|_| window) {
        None => flash.attention(max_seqlen_k, Align::Ends, None)?,
        Some(ranges) => {
            let plain = Flash { window: (None, None), ..flash };
            let attention = plain.attention(max_seqlen_k, Align::Ends, None)?.param("shift", &of_k.sub(&of_q)?);
            with_ranges(attention, plain_window(window_size_left, window_size_right, max_seqlen_k), ranges)?
        }
    };
    attention.forward_paged(&Pages::new(block_table, &of_k).queries(seqlens_q, max_seqlen_q), q, k, v)
}

fn mistakes(seqlens: [&Tensor; 2], ranges: Option<&Tensor>, k: &Tensor, page: usize) -> Vec<SpecError> {
    let mut errors = Vec::new();
    let integers = [DType::U32, DType::I32, DType::I64];
    for (name, offsets) in ["seqlens_q", "seqlens_k"].into_iter().zip(seqlens) {
        if offsets.rank() != 1 || offsets.elem_count() < 2 {
            let rule = "one axis with an offset more than there are sequences, at least 2";
            errors.push(SpecError::new(format!("{name} shape"), format!("{:?}", offsets.dims()), rule));
        }
        if !integers.contains(&offsets.dtype()) {
            errors.push(SpecError::new(format!("{name} dtype"), offsets.dtype().as_str(), "one of u32, i32, i64"));
        }
    }
    let [of_q, of_k] = seqlens.map(Tensor::elem_count);
    if of_q != of_k {
        errors.push(SpecError::new("seqlens_k length", of_k, format!("{of_q}, the length of seqlens_q")));
    }
    if k.rank() == 4 && k.dims()[1] != page {
        errors.push(SpecError::new("page_block_size", page, format!("{}, the second axis of k", k.dims()[1])));
    }
    if let Some(ranges) = ranges {
        let sequences = of_q.saturating_sub(1);
        if !matches!(*ranges.dims(), [rows, _, 2] if rows == sequences) {
            let rule = format!("[{sequences}, ranges, 2]");
            errors.push(SpecError::new("mm_prefix_ranges shape", format!("{:?}", ranges.dims()), rule));
        }
        if !integers.contains(&ranges.dtype()) {
            errors.push(SpecError::new("mm_prefix_ranges dtype", ranges.dtype().as_str(), "one of u32, i32, i64"));
        }
    }
    errors
}

/// Returns the differences of offsets, as i64: unsigned ones would overflow if offsets decrease.
fn lengths(offsets: &Tensor) -> Result<Tensor> {
    let offsets = integers::cast(&offsets.detach(), DType::I64)?;
    let sequences = offsets.dims1()?.saturating_sub(1);
    offsets.narrow(0, 1, sequences)?.sub(&offsets.narrow(0, 0, sequences)?)
}

/// Returns the window as i32, without the bounds that are larger than the number of keys.
fn plain_window(left: Option<usize>, right: Option<usize>, keys: usize) -> [Option<i32>; 2] {
    [left, right].map(|side| side.filter(|side| *side <= keys).map(|side| i32::try_from(side).unwrap_or(i32::MAX)))
}

/// Adds a mask: the window, or one of the ranges that have both the query and the key.
fn with_ranges(attention: Attention, [left, right]: [Option<i32>; 2], ranges: &Tensor) -> Result<Attention> {
    let count = ranges.dim(1)?;
    let name = |side: usize, n: usize| format!("mm_prefix_{}_{n}", ["start", "end"][side]);
    let mask = Mask::new("window or range", |at, p| {
        let query = at.q + p.tensor("shift", [Axis::Batch], I32);
        let after = left.map(|left| at.k.ge(query - left));
        let before = right.map(|right| at.k.le(query + right));
        let window = match (after, before) {
            (Some(after), Some(before)) => after & before,
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => at.k.ge(0),
        };
        (0..count).fold(window, |keep, n| {
            let [start, end] = [0, 1].map(|side| p.tensor(&name(side, n), [Axis::Batch], I32));
            keep | (query.ge(start) & query.lt(end) & at.k.ge(start) & at.k.lt(end))
        })
    });
    let mut attention = attention.mask(mask.map_err(|errors| one("mm_prefix_ranges", count, errors.to_string()))?);
    for n in 0..count {
        for side in 0..2 {
            let column = integers::contiguous(&ranges.detach().narrow(1, n, 1)?.narrow(2, side, 1)?)?.flatten_all()?;
            attention = attention.param(&name(side, n), &column);
        }
    }
    Ok(attention)
}
