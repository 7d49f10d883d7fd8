//! A paged KV cache for many sequences, with its page tables.

use crate::attention::Attention;
use crate::error::{none, one};
use crate::kv_cache::{differentiable, unlike};
use crate::operand::dtype;
use crate::pages::Pages;
use candle_core::{DType, Device, Result, Tensor};
use sdpa::SpecError;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The extents of a [`PagedKvCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedShape {
    /// Attention layers of the model; each has its own pools.
    pub layers: usize,
    /// Pages of a pool. All sequences share them.
    pub pages: usize,
    /// Tokens of a page. [These numbers](https://github.com/sdpa-rs/sdpa/blob/main/docs/paged.md#support) are supported.
    pub page_size: usize,
    /// Heads of keys and values.
    pub heads_kv: usize,
    /// Elements of a key.
    pub dim_qk: usize,
    /// Elements of a value.
    pub dim_v: usize,
}

/// A sequence in a [`PagedKvCache`]. No two sequences of a process are equal, whatever their caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

/// Returns a number that no other sequence or step of the process has, so that a cache recognises its own.
fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Divides tokens with these slots into runs of consecutive slots.
fn runs(slots: &[u32]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (token, slot) in slots.iter().map(|slot| *slot as usize).enumerate() {
        match runs.last_mut() {
            Some(run) if run.slot + run.len == slot => run.len += 1,
            _ => runs.push(Run { token, slot, len: 1 }),
        }
    }
    runs
}

/// A sequence: its pages, and the number of tokens in them.
#[derive(Debug, Default)]
struct Sequence {
    pages: Vec<u32>,
    len: usize,
}

/// Tokens of a step whose slots in the pools follow one another.
#[derive(Clone, Copy, Debug)]
struct Run {
    token: usize,
    slot: usize,
    len: usize,
}

/// The shortest run that is copied as a whole. candle's scatter kernel writes the tokens of a step one after the other, and a copy is a launch.
const COPIED: usize = 16;

/// The tokens of a step in no long run, such as those of decoding. They are scattered.
#[derive(Debug)]
struct Rest {
    /// The tokens: u32; `None` if these are all tokens of the step.
    tokens: Option<Tensor>,
    /// Their slots, repeated along (heads_kv · dim) of keys and of values: candle scatters elements, not rows.
    slots: [Tensor; 2],
}

/// The tokens of one call of a model, over all of its layers. [`PagedKvCache::step`] creates it.
#[derive(Debug)]
pub struct PagedStep {
    pages: Pages,
    runs: Vec<Run>,
    rest: Option<Rest>,
    positions: Tensor,
    last: Tensor,
    tokens: usize,
    /// For a step that [`PagedKvCache::refill`] overwrites, the number of pages of a sequence.
    columns: Option<usize>,
    version: u64,
}

impl PagedStep {
    /// Returns the pages of the sequences, for [`Attention::forward_paged`].
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Returns the position of each token in its sequence: u32 (tokens), for rotary embeddings.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Returns the index of the last token of each sequence of the call: u32 (sequences). Their logits are sampled.
    pub fn last(&self) -> &Tensor {
        &self.last
    }

    /// Returns the number of tokens in the call.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Keys and values of many sequences, in pages that are allocated as sequences grow, and reused when they end.
///
/// A serving loop opens a sequence per request. For each call of the model it creates a [`PagedStep`] with the number of new tokens of each
/// sequence, 1 to decode or more to prefill a chunk, and calls [`PagedKvCache::attend`] in every layer.
///
/// The cache is **not differentiable**: a tensor that requires a gradient is an error. On a GPU, extents of steps are rounded up to powers of
/// two, so that few plans serve all steps. A page that is reused keeps its old elements until they are overwritten.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use sdpa_candle::{Attention, Mask, PagedKvCache, PagedShape};
///
/// let shape = PagedShape { layers: 1, pages: 8, page_size: 4, heads_kv: 2, dim_qk: 8, dim_v: 8 };
/// let mut cache = PagedKvCache::new(shape, DType::F32, &Device::Cpu)?;
/// let (first, second) = (cache.open(), cache.open());
/// let attention = Attention::new().mask(Mask::causal_ends());
/// // The first sequence prefills 6 tokens, then decodes one while the second prefills 3.
/// for new in [vec![(first, 6)], vec![(first, 1), (second, 3)]] {
///     let step = cache.step(&new)?;
///     let q = Tensor::randn(0f32, 1., (step.tokens(), 4, 8), &Device::Cpu)?; // (tokens, heads, dim)
///     let k = Tensor::randn(0f32, 1., (step.tokens(), 2, 8), &Device::Cpu)?;
///     let o = cache.attend(0, &step, &attention, &q, &k, &k)?;
///     assert_eq!(o.dims(), [step.tokens(), 4, 8]);
/// }
/// assert_eq!((cache.len(first), cache.free_pages()), (Some(7), 5));
/// cache.close(first)?;
/// assert_eq!(cache.free_pages(), 7);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedKvCache {
    shape: PagedShape,
    /// Keys and values of each layer: (pages, page size, heads_kv, dim).
    pools: Vec<[Tensor; 2]>,
    free: Vec<u32>,
    sequences: BTreeMap<SequenceId, Sequence>,
    /// The latest step that may write. Changes with every step, and with every sequence that ends.
    version: u64,
}

impl PagedKvCache {
    /// Creates a cache whose pools have zeros.
    ///
    /// # Errors
    /// Returns every extent that is 0 or too large, and a wrong element type.
    pub fn new(shape: PagedShape, of: DType, device: &Device) -> Result<PagedKvCache> {
        let PagedShape { layers, pages, page_size, heads_kv, dim_qk, dim_v } = shape;
        let named =
            [("layers", layers), ("pages", pages), ("page_size", page_size), ("heads_kv", heads_kv), ("dim_qk", dim_qk), ("dim_v", dim_v)];
        let mut errors: Vec<SpecError> =
            named.into_iter().filter(|(_, n)| *n == 0).map(|(name, n)| SpecError::new(name, n, "at least 1")).collect();
        let tokens = pages.checked_mul(page_size).filter(|tokens| i32::try_from(*tokens).is_ok());
        if tokens.is_none() {
            let rule = format!("pages · page_size of at most {}", i32::MAX);
            errors.push(SpecError::new("pages, page_size", format!("{pages}, {page_size}"), rule));
        }
        if dtype(of).is_none() {
            errors.push(SpecError::new("dtype", of.as_str(), "one of f32, f16, bf16"));
        }
        none(errors)?;
        let pool = |dim: usize| Tensor::zeros((pages, page_size, heads_kv, dim), of, device);
        let pools = (0..layers).map(|_| Ok([pool(dim_qk)?, pool(dim_v)?])).collect::<Result<_>>()?;
        let free = (0..pages as u32).rev().collect();
        Ok(PagedKvCache { shape, pools, free, sequences: BTreeMap::new(), version: unique() })
    }

    /// Adds a sequence without tokens.
    pub fn open(&mut self) -> SequenceId {
        let id = SequenceId(unique());
        self.sequences.insert(id, Sequence::default());
        id
    }

    /// Removes a sequence and frees its pages.
    ///
    /// # Errors
    /// Fails if the sequence was removed before.
    pub fn close(&mut self, id: SequenceId) -> Result<()> {
        let Some(sequence) = self.sequences.remove(&id) else {
            return Err(one("sequence", format!("{id:?}"), OPEN));
        };
        self.free.extend(sequence.pages.into_iter().rev());
        self.version = unique();
        Ok(())
    }

    /// Returns the number of tokens of a sequence; `None` if it was removed.
    pub fn len(&self, id: SequenceId) -> Option<usize> {
        self.sequences.get(&id).map(|sequence| sequence.len)
    }

    /// Returns true if the cache has no sequences.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Returns the number of pages that no sequence has.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Returns the extents of the cache.
    pub fn shape(&self) -> PagedShape {
        self.shape
    }

    /// Returns the pools of a layer, keys and values: (pages, page size, heads_kv, dim); `None` after the last layer.
    pub fn pools(&self, layer: usize) -> Option<[&Tensor; 2]> {
        self.pools.get(layer).map(|[k, v]| [k, v])
    }

    /// Returns the number of pages that a sequence needs in addition for `tokens` more tokens. A sequence that was removed counts as new.
    pub fn pages_for(&self, id: SequenceId, tokens: usize) -> usize {
        let (len, pages) = self.sequences.get(&id).map_or((0, 0), |sequence| (sequence.len, sequence.pages.len()));
        len.saturating_add(tokens).div_ceil(self.shape.page_size).saturating_sub(pages)
    }

    /// Allocates pages for `new` tokens of each sequence, in the order of the call. Then append the tokens in every layer
    /// ([`PagedKvCache::attend`]) before the next step.
    ///
    /// # Errors
    /// Returns every sequence that was removed, is named twice or has no new token. If too few pages are free, returns how many are missing;
    /// the caller can [`close`](PagedKvCache::close) a sequence or wait for one to end. The cache is then unchanged.
    pub fn step(&mut self, new: &[(SequenceId, usize)]) -> Result<PagedStep> {
        self.allocate(new, Vec::new())?;
        self.described(new)
    }

    /// Creates a step for decoding whose tensors stay where they are, so that a CUDA graph can read them: `sequences` tokens, of sequences
    /// with at most `keys` keys. [`PagedKvCache::refill`] gives it sequences.
    ///
    /// # Errors
    /// Fails if `sequences` or `keys` is 0, or if there are more keys than tokens in all pages.
    pub fn decode_step(&self, sequences: usize, keys: usize) -> Result<PagedStep> {
        let all = self.shape.pages * self.shape.page_size;
        let mut errors = Vec::new();
        if sequences == 0 || i32::try_from(sequences).is_err() {
            errors.push(SpecError::new("sequences", sequences, format!("between 1 and {}", i32::MAX)));
        }
        if keys == 0 || keys > all {
            errors.push(SpecError::new("keys", keys, format!("between 1 and {all}, the tokens of all pages")));
        }
        none(errors)?;
        let columns = keys.div_ceil(self.shape.page_size);
        let device = self.pools[0][0].device();
        let zeros = |rows: usize| Tensor::zeros(rows, DType::U32, device);
        let pages = Pages::new(&Tensor::zeros((sequences, columns), DType::U32, device)?, &zeros(sequences)?);
        let slots = vec![u32::MAX; sequences];
        let tokens = Run { token: 0, slot: 0, len: sequences };
        Ok(PagedStep {
            pages: pages.queries(&zeros(sequences + 1)?, 1),
            runs: Vec::new(),
            rest: Some(self.rest(&[tokens], &slots)?),
            positions: zeros(sequences)?,
            last: Tensor::arange(0, sequences as u32, device)?,
            tokens: sequences,
            columns: Some(columns),
            version: 0,
        })
    }

    /// Allocates a token for each of these sequences, and overwrites a step that [`PagedKvCache::decode_step`] created. Row `n` of the step's
    /// tokens belongs to sequence `n`. Rows after the last sequence belong to none: they are not written to the cache, and their output is 0.
    ///
    /// # Errors
    /// Fails as [`PagedKvCache::step`] does, and if the step has fewer rows than there are sequences, or fewer pages than one needs.
    pub fn refill(&mut self, step: &mut PagedStep, sequences: &[SequenceId]) -> Result<()> {
        let Some(columns) = step.columns else {
            return Err(one("step", "a step of `step`", "a step of `decode_step`, whose tensors may be overwritten"));
        };
        let new: Vec<(SequenceId, usize)> = sequences.iter().map(|id| (*id, 1)).collect();
        let mut errors = Vec::new();
        if sequences.len() > step.tokens {
            errors.push(SpecError::new("sequences of the step", sequences.len(), format!("at most {}, the rows of the step", step.tokens)));
        }
        let most = columns * self.shape.page_size;
        for (n, keys) in sequences.iter().enumerate().filter_map(|(n, id)| Some((n, self.len(*id)? + 1))) {
            if keys > most {
                errors.push(SpecError::new(format!("keys of sequence {n}"), keys, format!("at most {most}, the keys of the step")));
            }
        }
        self.allocate(&new, errors)?;
        let size = self.shape.page_size;
        let (mut table, mut lengths) = (vec![0u32; step.tokens * columns], vec![0u32; step.tokens]);
        let (mut slots, mut positions) = (vec![u32::MAX; step.tokens], vec![0u32; step.tokens]);
        for (n, sequence) in sequences.iter().filter_map(|id| self.sequences.get(id)).enumerate() {
            let last = sequence.len - 1;
            table[n * columns..][..sequence.pages.len()].copy_from_slice(&sequence.pages);
            (lengths[n], positions[n]) = (sequence.len as u32, last as u32);
            slots[n] = sequence.pages[last / size] * size as u32 + (last % size) as u32;
        }
        let offsets: Vec<u32> = (0..=step.tokens).map(|n| n.min(sequences.len()) as u32).collect();
        let device = self.pools[0][0].device();
        step.pages.overwrite(
            &Tensor::from_vec(table, (step.tokens, columns), device)?,
            &Tensor::new(lengths, device)?,
            &Tensor::new(offsets, device)?,
        )?;
        step.positions.slice_set(&Tensor::new(positions, device)?, 0, 0)?;
        let filled = self.rest(&[Run { token: 0, slot: 0, len: step.tokens }], &slots)?;
        if let Some(rest) = &step.rest {
            rest.slots[0].slice_set(&filled.slots[0], 0, 0)?;
            if self.shape.dim_v != self.shape.dim_qk {
                rest.slots[1].slice_set(&filled.slots[1], 0, 0)?;
            }
        }
        step.version = self.version;
        Ok(())
    }

    /// Allocates pages for new tokens and counts them, or returns these errors and all others.
    fn allocate(&mut self, new: &[(SequenceId, usize)], mut errors: Vec<SpecError>) -> Result<()> {
        if new.is_empty() {
            errors.push(SpecError::new("sequences of the step", 0, "at least 1"));
        }
        for (n, (id, tokens)) in new.iter().enumerate() {
            if !self.sequences.contains_key(id) {
                errors.push(SpecError::new(format!("sequence {n}"), format!("{id:?}"), OPEN));
            } else if new[..n].iter().any(|(before, _)| before == id) {
                errors.push(SpecError::new(format!("sequence {n}"), format!("{id:?}, twice"), "each sequence once in a step"));
            }
            if *tokens == 0 {
                errors.push(SpecError::new(format!("tokens of sequence {n}"), 0, "at least 1"));
            }
        }
        let needed = new.iter().fold(0usize, |sum, (id, tokens)| sum.saturating_add(self.pages_for(*id, *tokens)));
        if needed > self.free.len() {
            let rule =
                format!("at most {}, the free pages of {}; close a sequence, or wait for one to end", self.free.len(), self.shape.pages);
            errors.push(SpecError::new("new pages of the step", needed, rule));
        }
        none(errors)?;
        for (id, tokens) in new {
            let pages = self.pages_for(*id, *tokens);
            let kept = self.free.len() - pages;
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.pages.extend(self.free.drain(kept..).rev());
                sequence.len += tokens;
            }
        }
        self.version = unique();
        Ok(())
    }

    /// Describes a step whose tokens are already counted in the lengths of their sequences.
    fn described(&self, new: &[(SequenceId, usize)]) -> Result<PagedStep> {
        let size = self.shape.page_size;
        let sequences: Vec<(&Sequence, usize)> =
            new.iter().filter_map(|(id, tokens)| self.sequences.get(id).map(|sequence| (sequence, *tokens))).collect();
        // Empty sequences fill the batch, so that few extents occur.
        let rows = sequences.len().next_power_of_two();
        let columns = sequences.iter().map(|(sequence, _)| sequence.pages.len()).max().unwrap_or(1).next_power_of_two();
        let longest = sequences.iter().map(|(_, tokens)| *tokens).max().unwrap_or(1).next_power_of_two();
        let (mut table, mut lengths, mut offsets) = (vec![0u32; rows * columns], vec![0u32; rows], vec![0u32]);
        let (mut slots, mut positions, mut last) = (Vec::new(), Vec::new(), Vec::new());
        for (n, (sequence, tokens)) in sequences.iter().enumerate() {
            table[n * columns..][..sequence.pages.len()].copy_from_slice(&sequence.pages);
            lengths[n] = sequence.len as u32;
            for position in sequence.len - tokens..sequence.len {
                slots.push(sequence.pages[position / size] * size as u32 + (position % size) as u32);
                positions.push(position as u32);
            }
            offsets.push(slots.len() as u32);
            last.push(slots.len() as u32 - 1);
        }
        let tokens = slots.len();
        let (runs, short): (Vec<Run>, Vec<Run>) = runs(&slots).into_iter().partition(|run| run.len >= COPIED);
        offsets.resize(rows + 1, tokens as u32);
        let device = self.pools[0][0].device();
        let pages = Pages::new(&Tensor::from_vec(table, (rows, columns), device)?, &Tensor::new(lengths, device)?);
        let pages = pages.queries(&Tensor::new(offsets, device)?, longest);
        let rest = if short.is_empty() { None } else { Some(self.rest(&short, &slots)?) };
        let (positions, last) = (Tensor::new(positions, device)?, Tensor::new(last, device)?);
        Ok(PagedStep { pages, runs, rest, positions, last, tokens, columns: None, version: self.version })
    }

    fn rest(&self, short: &[Run], slots: &[u32]) -> Result<Rest> {
        let device = self.pools[0][0].device();
        let tokens: Vec<u32> = short.iter().flat_map(|run| run.token as u32..(run.token + run.len) as u32).collect();
        let chosen: Vec<u32> = tokens.iter().filter_map(|token| slots.get(*token as usize).copied()).collect();
        let count = chosen.len();
        let chosen = Tensor::from_vec(chosen, (count, 1), device)?;
        let repeated = |dim: usize| chosen.broadcast_as((count, self.shape.heads_kv * dim))?.contiguous();
        let of_k = repeated(self.shape.dim_qk)?;
        let of_v = if self.shape.dim_v == self.shape.dim_qk { of_k.clone() } else { repeated(self.shape.dim_v)? };
        let tokens = if count == slots.len() { None } else { Some(Tensor::new(tokens, device)?) };
        Ok(Rest { tokens, slots: [of_k, of_v] })
    }

    /// Writes the keys and values of a step's tokens to a layer: `k` (tokens, heads_kv, dim_qk) and `v` (tokens, heads_kv, dim_v).
    ///
    /// # Errors
    /// Returns every argument that requires a gradient or has a wrong shape, element type or device, a layer that does not exist, and a
    /// step that is not the latest.
    pub fn append(&self, layer: usize, step: &PagedStep, k: &Tensor, v: &Tensor) -> Result<()> {
        let PagedShape { layers, pages, page_size, heads_kv, dim_qk, dim_v } = self.shape;
        let mut errors = Vec::new();
        if layer >= layers {
            errors.push(SpecError::new("layer", layer, format!("below {layers}, the layers of the cache")));
        }
        if step.version != self.version {
            let rule = "the latest step of this cache: call `step`, append in every layer, then close sequences or call `step` again";
            errors.push(SpecError::new("step", "an earlier step", rule));
        }
        let pools = self.pools.get(layer).unwrap_or(&self.pools[0]);
        for ((name, x), (dim, pool)) in [("k", k), ("v", v)].into_iter().zip([dim_qk, dim_v].into_iter().zip(pools)) {
            if x.track_op() {
                errors.push(differentiable(name));
            }
            if *x.dims() != [step.tokens, heads_kv, dim] {
                errors.push(SpecError::new(
                    format!("{name} shape"),
                    format!("{:?}", x.dims()),
                    format!("[{}, {heads_kv}, {dim}]", step.tokens),
                ));
            }
            errors.extend(unlike(name, x, pool));
        }
        none(errors)?;
        for (n, (x, pool)) in [k, v].into_iter().zip(pools).enumerate() {
            let width = heads_kv * x.dim(2)?;
            let (x, pool) = (x.reshape((step.tokens, width))?.contiguous()?, pool.reshape((pages * page_size, width))?);
            for run in &step.runs {
                pool.slice_set(&x.narrow(0, run.token, run.len)?, 0, run.slot)?;
            }
            if let Some(Rest { tokens, slots }) = &step.rest {
                let x = tokens.as_ref().map_or(Ok(x.clone()), |tokens| x.index_select(tokens, 0))?;
                pool.scatter_set(&slots[n], &x, 0)?;
            }
        }
        Ok(())
    }

    /// Appends the keys and values of a step's tokens to a layer, and computes attention of their queries `q` (tokens, heads, dim_qk) over
    /// all keys of each sequence. `attention` has the masks; use [`Mask::causal_ends`](crate::Mask::causal_ends).
    ///
    /// # Errors
    /// Fails as [`PagedKvCache::append`] and [`Attention::forward_paged`] do.
    pub fn attend(&self, layer: usize, step: &PagedStep, attention: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.append(layer, step, k, v)?;
        let [k, v] = &self.pools[layer];
        attention.forward_paged(&step.pages, q, k, v)
    }
}

const OPEN: &str = "a sequence of this cache that `open` returned and `close` did not remove";
