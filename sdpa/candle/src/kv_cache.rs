//! A contiguous KV cache.

use crate::error::none;
use crate::operand::{Order, dtype};
use candle_core::{Result, Tensor};
use sdpa::SpecError;

/// Keys and values of earlier tokens, in memory that is allocated once: (batch, heads_kv, capacity, dim).
///
/// [`KvCache::append`] writes in place, so the cache is **not differentiable**: a tensor that requires a gradient is an error. In a training
/// step, pass `k` and `v` to [`Attention`](crate::Attention) without a cache.
///
/// On a GPU, each number of keys needs a plan of its own. In a serving loop, use [`PagedKvCache`](crate::PagedKvCache), whose plans serve
/// any number of keys.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use sdpa_candle::{Attention, KvCache, Mask};
///
/// let mut cache = KvCache::new(128);
/// let attention = Attention::new().mask(Mask::causal_bottom_right());
/// for tokens in [5, 1, 1] {
///     let x = Tensor::randn(0f32, 1., (2, 4, tokens, 8), &Device::Cpu)?;
///     let (k, v) = cache.append(&x, &x)?;
///     let o = attention.forward(&x, &k, &v)?;
///     assert_eq!(o.dims(), [2, 4, tokens, 8]);
/// }
/// assert_eq!(cache.len(), 7);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    pools: Option<[Tensor; 2]>,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// Creates a cache for at most `capacity` tokens. The first call of [`KvCache::append`] allocates its memory.
    pub fn new(capacity: usize) -> KvCache {
        KvCache { pools: None, len: 0, capacity }
    }

    /// Returns the number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the cache has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the largest number of tokens.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Removes all tokens and keeps the memory. Later calls overwrite the views that [`KvCache::append`] returned before.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    /// Appends `k` (batch, heads_kv, tokens, dim) and `v` (batch, heads_kv, tokens, dim_v). Returns views of all keys and values, which
    /// [`Attention::forward`](crate::Attention::forward) reads in place.
    ///
    /// # Errors
    /// Returns every argument that requires a gradient, does not fit into the capacity, or has another shape, element type or device than
    /// the tokens before. The cache is then unchanged.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        none(self.mistakes(k, v))?;
        let tokens = k.dim(2)?;
        let pools = match self.pools.take() {
            Some(pools) => pools,
            None => {
                let pool = |x: &Tensor| {
                    let (batch, heads, _, dim) = x.dims4()?;
                    Tensor::zeros((batch, heads, self.capacity, dim), x.dtype(), x.device())
                };
                [pool(k)?, pool(v)?]
            }
        };
        let pools = self.pools.insert(pools);
        if tokens > 0 {
            pools[0].slice_set(&k.contiguous()?, 2, self.len)?;
            pools[1].slice_set(&v.contiguous()?, 2, self.len)?;
        }
        self.len += tokens;
        Ok((pools[0].narrow(2, 0, self.len)?, pools[1].narrow(2, 0, self.len)?))
    }

    fn mistakes(&self, k: &Tensor, v: &Tensor) -> Vec<SpecError> {
        let mut errors = Vec::new();
        for (n, (name, x)) in [("k", k), ("v", v)].into_iter().enumerate() {
            if x.track_op() {
                errors.push(differentiable(name));
            }
            let dims = x.dims();
            if dims.len() != Order::Bhsd.rank() {
                errors.push(SpecError::new(format!("{name} shape"), format!("{dims:?}"), "(batch, head, seq, dim)"));
                continue;
            }
            match &self.pools {
                Some(pools) => {
                    let like = pools[n].dims();
                    if [dims[0], dims[1], dims[3]] != [like[0], like[1], like[3]] {
                        let rule = format!("[{}, {}, tokens, {}], as the tokens before", like[0], like[1], like[3]);
                        errors.push(SpecError::new(format!("{name} shape"), format!("{dims:?}"), rule));
                    }
                    errors.extend(unlike(name, x, &pools[n]));
                }
                None if dtype(x.dtype()).is_none() => {
                    errors.push(SpecError::new(format!("{name} dtype"), x.dtype().as_str(), "one of f32, f16, bf16"));
                }
                None => {}
            }
        }
        if let (&[batch, heads, tokens, _], Some(of_v)) = (k.dims(), v.dims().get(..3)) {
            if *of_v != [batch, heads, tokens] {
                let rule = format!("[{batch}, {heads}, {tokens}] as its first three axes, those of k");
                errors.push(SpecError::new("v shape", format!("{:?}", v.dims()), rule));
            }
            if self.len + tokens > self.capacity {
                let rule = format!("at most {}, the capacity of the cache; create a larger one, or call `reset`", self.capacity);
                errors.push(SpecError::new("tokens in the cache", self.len + tokens, rule));
            }
        }
        errors
    }
}

/// Returns the mistake of appending a tensor that requires a gradient.
pub(crate) fn differentiable(name: &str) -> SpecError {
    let rule = "none: a cache is written in place and is not differentiable; pass `detach()` of it, or attend without a cache to train";
    SpecError::new(name, "a tensor that requires a gradient", rule)
}

/// Returns the mistakes of a tensor whose element type or device differs from that of the cache.
pub(crate) fn unlike(name: &str, x: &Tensor, pool: &Tensor) -> Vec<SpecError> {
    let mut errors = Vec::new();
    if x.dtype() != pool.dtype() {
        let rule = format!("{}, the type of the cache", pool.dtype().as_str());
        errors.push(SpecError::new(format!("{name} dtype"), x.dtype().as_str(), rule));
    }
    if !x.device().same_device(pool.device()) {
        let rule = format!("{:?}, the device of the cache", pool.device().location());
        errors.push(SpecError::new(format!("{name} device"), format!("{:?}", x.device().location()), rule));
    }
    errors
}
