//! Packed queries over a paged KV cache.

use crate::operand::Order;
use crate::param::Value;
use candle_core::{DType, Device, Result, Tensor};
use sdpa::packed::CU_SEQLENS_Q;
use sdpa::paged::PAGE_TABLE;
use sdpa::{Packed, Paged, SpecError, TensorSpec};

/// The name of the parameter with the number of keys of each sequence.
const SEQ_LEN_KV: &str = "seq_len_kv";

/// The pages of each sequence of a call, its number of keys, and the queries that belong to it.
///
/// The pools of keys and values are (pages, page size, heads_kv, dim). Key `n` of sequence `b` is token `n % page_size` of page
/// `table[b][n / page_size]`. Table entries after the last key of a sequence are not read. On the CPU, all numbers are validated. On a GPU
/// they are not: a page index outside of the pool is clamped.
///
/// The extents of the table and `longest` are part of a compiled plan on a GPU; all numbers in tensors are values of the call. So a serving
/// loop should round the extents up. [`PagedKvCache`](crate::PagedKvCache) does.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use sdpa_candle::{Attention, Mask, Pages};
///
/// let cpu = &Device::Cpu;
/// // A pool of 5 pages of 4 tokens. The first sequence has 6 keys and decodes one token, the second has 3 keys and prefills all of them.
/// let pool = Tensor::randn(0f32, 1., (5, 4, 2, 8), cpu)?;
/// let pages = Pages::new(&Tensor::new(&[[3u32, 1], [4, 0]], cpu)?, &Tensor::new(&[6u32, 3], cpu)?);
/// let pages = pages.queries(&Tensor::new(&[0u32, 1, 4], cpu)?, 3);
/// let q = Tensor::randn(0f32, 1., (4, 4, 8), cpu)?; // (tokens, heads, dim)
/// let o = Attention::new().mask(Mask::causal_ends()).forward_paged(&pages, &q, &pool, &pool)?;
/// assert_eq!(o.dims(), [4, 4, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pages {
    table: Tensor,
    lengths: Tensor,
    queries: Option<(Tensor, usize)>,
    most: Option<usize>,
}

impl Pages {
    /// Creates the pages of sequences with one query each. `table` is (sequences, pages of a sequence), and `lengths` has the number of
    /// keys of each sequence. Both are u32, i32 or i64.
    pub fn new(table: &Tensor, lengths: &Tensor) -> Pages {
        Pages { table: table.clone(), lengths: lengths.clone(), queries: None, most: None }
    }

    /// Sets the `cu_seqlens` offsets of the queries, as in [`Documents`](crate::Documents). No sequence has more than `longest` queries.
    #[must_use]
    pub fn queries(mut self, boundaries: &Tensor, longest: usize) -> Pages {
        self.queries = Some((boundaries.clone(), longest));
        self
    }

    /// Sets the largest number of query tokens in a call. The default is the number of sequences times the longest length.
    #[must_use]
    pub fn at_most(mut self, tokens: usize) -> Pages {
        self.most = Some(tokens);
        self
    }

    /// Returns the offsets of one query for each sequence, if the caller gave none.
    pub(crate) fn with_queries(&self) -> Result<Pages> {
        let mut pages = self.clone();
        if pages.queries.is_none() {
            let sequences = u32::try_from(self.lengths.elem_count()).unwrap_or(u32::MAX - 1);
            pages.queries = Some((Tensor::arange(0, sequences.saturating_add(1), self.lengths.device())?, 1));
        }
        Ok(pages)
    }

    /// Overwrites the numbers in place with tensors of the same shapes.
    pub(crate) fn overwrite(&self, table: &Tensor, lengths: &Tensor, boundaries: &Tensor) -> Result<()> {
        self.table.slice_set(table, 0, 0)?;
        self.lengths.slice_set(lengths, 0, 0)?;
        self.queries.as_ref().map_or(Ok(()), |(there, _)| there.slice_set(boundaries, 0, 0))
    }

    fn longest(&self) -> usize {
        self.queries.as_ref().map_or(1, |(_, longest)| *longest)
    }

    fn sequences(&self) -> usize {
        self.lengths.elem_count()
    }

    /// Returns the number of sequences and the most queries of one.
    pub(crate) fn extents(&self) -> (usize, usize) {
        (self.sequences(), self.longest())
    }

    pub(crate) fn packed(&self) -> Packed {
        let wide = self.queries.as_ref().is_some_and(|(boundaries, _)| boundaries.dtype() == DType::I64);
        let most = self.most.map(|most| i64::try_from(most).unwrap_or(i64::MAX));
        Packed::new().with_cross(true).with_wide(wide).with_totals(most, None)
    }

    /// Returns the paging of a pool (pages, page size, heads_kv, dim).
    pub(crate) fn paged(&self, pool: &Tensor) -> Paged {
        let extent = |n: usize| pool.dims().get(n).map_or(0, |&n| i64::try_from(n).unwrap_or(i64::MAX));
        Paged::new(extent(1), extent(0))
    }

    /// Describes a pool as an operand: its extents are those of the sequences, its strides those of the pool.
    pub(crate) fn operand(&self, pool: &Tensor, alignment: u32) -> TensorSpec {
        let spec = Order::Pool.operand(pool.layout(), None, alignment);
        let [_, heads, page, dim] = spec.dims;
        let per_sequence = self.table.dims().get(1).map_or(0, |&n| i64::try_from(n).unwrap_or(i64::MAX));
        TensorSpec { dims: [self.sequences() as i64, heads, per_sequence.saturating_mul(page), dim], ..spec }
    }

    pub(crate) fn values(&self) -> Vec<(String, Value)> {
        let queries = self.queries.iter().map(|(boundaries, _)| (CU_SEQLENS_Q, boundaries));
        let all = [(PAGE_TABLE, &self.table), (SEQ_LEN_KV, &self.lengths)].into_iter().chain(queries);
        all.map(|(name, tensor)| (name.to_owned(), Value::Tensor(tensor.clone()))).collect()
    }

    /// Returns the mistakes in the numbers, and in the pools `k` and `v`.
    pub(crate) fn mistakes(&self, k: &Tensor, v: &Tensor) -> Result<Vec<SpecError>> {
        let mut errors = Vec::new();
        let integers = [DType::U32, DType::I32, DType::I64];
        let queries = self.queries.iter().map(|(boundaries, _)| (CU_SEQLENS_Q, boundaries));
        for (name, tensor) in [(PAGE_TABLE, &self.table), (SEQ_LEN_KV, &self.lengths)].into_iter().chain(queries) {
            if !integers.contains(&tensor.dtype()) {
                errors.push(SpecError::new(format!("{name} dtype"), tensor.dtype().as_str(), "one of u32, i32, i64"));
            }
        }
        let mut shape = |name: &str, tensor: &Tensor, fits: bool, rule: String| {
            if !fits {
                errors.push(SpecError::new(format!("{name} shape"), format!("{:?}", tensor.dims()), rule));
            }
        };
        let sequences = self.sequences();
        shape(SEQ_LEN_KV, &self.lengths, self.lengths.rank() == 1 && sequences > 0, "one axis with the keys of each sequence".to_owned());
        let fits = matches!(*self.table.dims(), [rows, pages] if rows == sequences && pages > 0);
        shape(PAGE_TABLE, &self.table, fits, format!("[{sequences}, pages of a sequence]"));
        if let Some((boundaries, _)) = &self.queries {
            let fits = *boundaries.dims() == [sequences + 1];
            shape(CU_SEQLENS_Q, boundaries, fits, format!("[{}], an offset more than there are sequences", sequences + 1));
        }
        let same = k.rank() != 4 || v.rank() != 4 || k.dims()[..2] == v.dims()[..2];
        shape("v", v, same, format!("{:?} as its first two axes, the pages and page size of k", k.dims().get(..2).unwrap_or_default()));
        for (name, pool) in [("k", k), ("v", v)] {
            if pool.rank() == 4 && pool.stride()[3] != 1 && pool.dims()[3] > 1 {
                let rule = "a dense last axis: a page pool is not copied";
                errors.push(SpecError::new(format!("{name} strides"), format!("{:?}", pool.stride()), rule));
            }
        }
        if errors.is_empty() && self.lengths.device().is_cpu() {
            let capacity = (self.table.dims()[1] * k.dims().get(1).copied().unwrap_or_default()) as i64;
            let lengths: Vec<i64> = self.lengths.to_dtype(DType::I64)?.to_vec1()?;
            for (n, length) in lengths.into_iter().enumerate().filter(|(_, length)| !(0..=capacity).contains(length)) {
                let rule = format!("between 0 and {capacity}, the keys of a row of {PAGE_TABLE}");
                errors.push(SpecError::new(format!("{SEQ_LEN_KV}[{n}]"), length, rule));
            }
        }
        Ok(errors)
    }

    /// Returns the mistakes of operands that require a gradient, which attention over a paged KV cache does not have.
    pub(crate) fn tracked<'a>(named: impl Iterator<Item = (String, &'a Tensor)>) -> Vec<SpecError> {
        let rule = "none: a paged KV cache has no backward pass; pass `detach()` of it, or train with forward_packed";
        named
            .filter(|(_, tensor)| tensor.track_op())
            .map(|(name, _)| SpecError::new(name, "a tensor that requires a gradient", rule))
            .collect()
    }

    pub(crate) fn to_device(&self, device: &Device) -> Result<Pages> {
        let queries = match &self.queries {
            Some((boundaries, longest)) => Some((boundaries.to_device(device)?, *longest)),
            None => None,
        };
        Ok(Pages { table: self.table.to_device(device)?, lengths: self.lengths.to_device(device)?, queries, most: self.most })
    }
}
