//! The configuration of an attention, and one call of it.

use crate::context_parallel::ContextParallel;
use crate::documents::Documents;
use crate::error::{none, one, wrap};
use crate::node;
use crate::operand::{self, Order};
use crate::pages::Pages;
use crate::param::{self, Bound, Ready, Value};
use crate::pass::{Outputs, Pass, alignment};
use candle_core::op::BackpropOp;
use candle_core::{Result, Tensor};
use sdpa::{AttentionSpec, BackwardSpec, Dropout, ExecutorName, Mask, ScoreMod, SpecError, TensorSpec};

/// The configuration of a differentiable attention over candle's tensors, `softmax(mask(score_mods(q·kᵀ · scale))) · v`.
///
/// It contains no extents, so one value serves calls of every shape. Cloning it is cheap. [`Attention::param`] and [`Attention::scalar`]
/// bind the parameters that score_mods and masks declare, by name. A tensor that is a variable, or computed from one, gets a gradient.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use sdpa_candle::{Attention, Mask, library};
///
/// let (q, k) = (Tensor::randn(0f32, 1., (2, 4, 9, 8), &Device::Cpu)?, Tensor::randn(0f32, 1., (2, 2, 9, 8), &Device::Cpu)?);
/// let slopes = Var::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?;
/// let attention = Attention::new().score_mod(library::alibi_with()).mask(Mask::causal()).param("slopes", &slopes);
/// let o = attention.forward(&q, &k, &k)?; // two heads of keys for four of queries
/// let gradients = o.sqr()?.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&slopes).map(|g| g.dims().to_vec()), Some(vec![4]));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Attention {
    score_mods: Vec<ScoreMod>,
    masks: Vec<Mask>,
    sink: bool,
    dropout: Option<Dropout>,
    attn_scale: Option<f32>,
    deterministic: bool,
    batch_invariant: bool,
    executor: Option<ExecutorName>,
    values: Vec<(String, Value)>,
}

impl Attention {
    /// Creates an attention without score_mods or masks, with the scale `1 / √dim`.
    pub fn new() -> Attention {
        Attention::default()
    }

    /// Appends a score_mod, which is applied after the previous ones.
    #[must_use]
    pub fn score_mod(mut self, score_mod: ScoreMod) -> Attention {
        self.score_mods.push(score_mod);
        self
    }

    /// Adds a mask. A query attends to a key only if all masks attend to it.
    #[must_use]
    pub fn mask(mut self, mask: Mask) -> Attention {
        self.masks.push(mask);
        self
    }

    /// Sets the attention scale, in place of `1 / √dim`.
    #[must_use]
    pub fn attn_scale(mut self, scale: f32) -> Attention {
        self.attn_scale = Some(scale);
        self
    }

    /// Adds an attention sink per query head: `sink` is f32 `[heads]`, as in gpt-oss. It gets a gradient if it is a variable or computed
    /// from one.
    #[must_use]
    pub fn with_sink(mut self, sink: &Tensor) -> Attention {
        self.sink = true;
        self.param(sdpa::SINK, sink)
    }

    /// Applies dropout to P with probability `p`, more than 0 and less than 1. `seed` and `offset`, one i64 each on the device of the
    /// operands, select the elements that are dropped. Each training step should pass different values.
    #[must_use]
    pub fn with_dropout(mut self, p: f32, seed: &Tensor, offset: &Tensor) -> Attention {
        self.dropout = Some(Dropout::new(p));
        self.param(sdpa::DROPOUT_SEED, seed).param(sdpa::DROPOUT_OFFSET, offset)
    }

    /// Binds the declared parameter `name` to a tensor, and replaces an earlier binding of that name. The shape has one extent per
    /// declared axis, or all four extents with ones for the other axes. Integers may be u32, i32 or i64; booleans are u8.
    #[must_use]
    pub fn param(self, name: &str, tensor: &Tensor) -> Attention {
        self.bound(name, Value::Tensor(tensor.clone()))
    }

    /// Binds the declared scalar `name` to a number, and replaces an earlier binding of that name.
    #[must_use]
    pub fn scalar(self, name: &str, value: f32) -> Attention {
        self.bound(name, Value::Scalar(value))
    }

    fn bound(mut self, name: &str, value: Value) -> Attention {
        self.values.retain(|(before, _)| before != name);
        self.values.push((name.to_owned(), value));
        self
    }

    /// Requests bitwise equal results on every run, also in the backward pass.
    #[must_use]
    pub fn deterministic(mut self) -> Attention {
        self.deterministic = true;
        self
    }

    /// Requires that the bits of a sequence's results depend on this sequence alone: see [`AttentionSpec::batch_invariant`].
    #[must_use]
    pub fn batch_invariant(mut self) -> Attention {
        self.batch_invariant = true;
        self
    }

    /// Selects the executor of both passes. A call that it does not support fails. Without a selection, tensors on the CPU run on the CPU
    /// executor. On CUDA, each pass runs on the faster of cuDNN and the native CUDA kernels ([`ExecutorName::CUDA`]) that supports it.
    /// The CPU executor also accepts tensors on a GPU: it copies them to the host and back, and waits.
    #[must_use]
    pub fn executor(mut self, name: ExecutorName) -> Attention {
        self.executor = Some(name);
        self
    }

    /// Computes attention of `q` (batch, heads, seq, dim) with `k` and `v` (batch, heads_kv, seq_kv, dim), in f32, f16 or bf16. `heads_kv` divides `heads`. Any
    /// strides are accepted: a view is read in place if its last axis is dense, and copied otherwise. `o` is (batch, heads, seq, dim_v). If `q` is a transposed
    /// (batch, seq, heads, dim), so is `o`, and the usual reshape after it copies nothing.
    ///
    /// # Errors
    /// Returns every invalid argument with field, value and rule. If the executor does not support the call, returns its reasons. If a
    /// tensor is a variable or computed from one, the backward pass must be supported too.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(self.run(Order::Bhsd, Sequences::Dense, [q, k, v], false)?.0)
    }

    /// Computes [`Attention::forward`], and also returns `stats`: f32 (batch, heads, seq), the log-sum-exp of each row. A row that attends
    /// to nothing has −∞.
    ///
    /// Gradients flow through `o` and through `stats`, in a backward pass for each of the two that a loss uses. `detach()` of `stats` saves
    /// the second one.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use sdpa_candle::Attention;
    ///
    /// let q = Var::from_tensor(&Tensor::randn(0f32, 1., (1, 2, 5, 8), &Device::Cpu)?)?;
    /// let (o, stats) = Attention::new().forward_with_stats(&q, &q, &q)?;
    /// // A z-loss keeps the normalisers small.
    /// let loss = (o.sqr()?.mean_all()? + (stats.sqr()?.mean_all()? * 1e-4)?)?;
    /// assert!(loss.backward()?.get(&q).is_some());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails as [`Attention::forward`] does. A backward pass through `stats` that no executor supports fails when gradients are computed.
    pub fn forward_with_stats(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.told(Order::Bhsd, Sequences::Dense, [q, k, v])
    }

    /// Computes attention within packed sequences (varlen): `q` (tokens, heads, dim), `k` and `v` (tokens, heads_kv, dim), `o` (tokens, heads, dim_v). Rows
    /// outside of all sequences are 0.
    ///
    /// # Errors
    /// Fails as [`Attention::forward`] does.
    pub fn forward_packed(&self, documents: &Documents, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(self.run(Order::Packed, Sequences::Packed(documents), [q, k, v], false)?.0)
    }

    /// Computes [`Attention::forward_packed`], and also returns `stats`: f32 (tokens, heads), the log-sum-exp of each row. Rows outside of all
    /// sequences have −∞. Gradients flow through `stats` as in [`Attention::forward_with_stats`].
    ///
    /// # Errors
    /// Fails as [`Attention::forward`] does.
    pub fn forward_packed_with_stats(&self, documents: &Documents, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.told(Order::Packed, Sequences::Packed(documents), [q, k, v])
    }

    /// Computes attention over a paged KV cache: packed `q` (tokens, heads, dim), pools `k` and `v` (pages, page size, heads_kv, dim), `o`
    /// (tokens, heads, dim_v). [`Mask::causal_ends`] is the causal mask of decoding and chunked prefill: it aligns the last query of a
    /// sequence to its last key. There is no backward pass.
    ///
    /// # Errors
    /// Fails as [`Attention::forward`] does, and if a tensor requires a gradient.
    pub fn forward_paged(&self, pages: &Pages, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(self.run(Order::Packed, Sequences::Paged(&pages.with_queries()?), [q, k, v], false)?.0)
    }

    /// Computes [`Attention::forward_paged`], and also returns `stats`: f32 (tokens, heads), the log-sum-exp of each row. Partial results
    /// over different keys can be merged with them.
    ///
    /// # Errors
    /// Fails as [`Attention::forward_paged`] does.
    pub fn forward_paged_with_stats(&self, pages: &Pages, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.told(Order::Packed, Sequences::Paged(&pages.with_queries()?), [q, k, v])
    }

    /// Computes [`Attention::forward`] over (batch, seq, heads, dim), which is also the layout of `o`.
    pub(crate) fn forward_bshd(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(self.run(Order::Bshd, Sequences::Dense, [q, k, v], false)?.0)
    }

    /// Computes attention over the tokens of all ranks, from shards (batch, seq, heads, dim), which is also the layout of `o`.
    pub(crate) fn forward_shards(&self, rank: &ContextParallel, qkv: [&Tensor; 3]) -> Result<Tensor> {
        Ok(self.run(Order::Bshd, Sequences::Sharded(rank), qkv, false)?.0)
    }

    fn told(&self, order: Order, sequences: Sequences<'_>, qkv: [&Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let (o, stats) = self.run(order, sequences, qkv, true)?;
        Ok((o, stats.ok_or_else(|| crate::error::bug("stats were asked for and not made"))?))
    }

    fn run(&self, order: Order, sequences: Sequences<'_>, [q, k, v]: [&Tensor; 3], told: bool) -> Result<(Tensor, Option<Tensor>)> {
        let of_keys = if matches!(sequences, Sequences::Paged(_)) { Order::Pool } else { order };
        let operands = [("q", order, q), ("k", of_keys, k), ("v", of_keys, v)];
        let mut errors: Vec<SpecError> = operands.into_iter().flat_map(|(name, order, x)| operand::mistakes(name, order, x, q)).collect();
        let mut values = self.values.clone();
        match sequences {
            Sequences::Dense | Sequences::Sharded(_) => {}
            Sequences::Packed(documents) => {
                errors.extend(documents.mistakes());
                values.extend(documents.values());
            }
            Sequences::Paged(pages) => {
                errors.extend(pages.mistakes(k, v)?);
                values.extend(pages.values());
                let bound = values.iter().filter_map(|(name, value)| match value {
                    Value::Tensor(tensor) => Some((format!("parameter {name}"), tensor)),
                    Value::Scalar(_) => None,
                });
                let operands = operands.into_iter().map(|(name, _, x)| (name.to_owned(), x));
                errors.extend(Pages::tracked(operands.chain(bound)));
            }
        }
        for (name, value) in &values {
            if let Value::Tensor(tensor) = value {
                errors.extend(operand::elsewhere(&format!("parameter {name}"), tensor, q));
            }
        }
        none(errors)?;
        let device = q.device();
        if !device.is_cpu() && self.executor == Some(ExecutorName::CPU) {
            return self.on_the_host(order, sequences, [q, k, v], told);
        }
        let call = Call { attention: self, order, sequences, values };
        let (o, stats) = call.run([q, k, v], told)?;
        Ok((o, stats.filter(|_| told)))
    }

    /// Runs on the CPU through copies to the host and back, which candle differentiates.
    fn on_the_host(&self, order: Order, sequences: Sequences<'_>, qkv: [&Tensor; 3], told: bool) -> Result<(Tensor, Option<Tensor>)> {
        let (host, device) = (&candle_core::Device::Cpu, qkv[0].device().clone());
        let mut there = self.clone();
        for (_, value) in &mut there.values {
            if let Value::Tensor(tensor) = value {
                *tensor = tensor.to_device(host)?;
            }
        }
        let [q, k, v] = [qkv[0].to_device(host)?, qkv[1].to_device(host)?, qkv[2].to_device(host)?];
        let run = |sequences| there.run(order, sequences, [&q, &k, &v], told);
        let (o, stats) = match sequences {
            Sequences::Dense | Sequences::Sharded(_) => run(sequences),
            Sequences::Packed(documents) => run(Sequences::Packed(&documents.to_device(host)?)),
            Sequences::Paged(pages) => run(Sequences::Paged(&pages.to_device(host)?)),
        }?;
        Ok((o.to_device(&device)?, stats.map(|stats| stats.to_device(&device)).transpose()?))
    }
}

/// The sequences of a call.
#[derive(Clone, Copy)]
enum Sequences<'a> {
    /// One for each batch entry.
    Dense,
    Packed(&'a Documents),
    /// One for each batch entry, of whose tokens the operands have those of a rank.
    Sharded(&'a ContextParallel),
    /// Packed queries, and keys in pages.
    Paged(&'a Pages),
}

/// One call, whose operands were checked to have one device and one type.
struct Call<'a> {
    attention: &'a Attention,
    order: Order,
    sequences: Sequences<'a>,
    values: Vec<(String, Value)>,
}

impl Call<'_> {
    fn run(&self, operands: [&Tensor; 3], told: bool) -> Result<(Tensor, Option<Tensor>)> {
        let tracked_values = self.values.iter().filter(|(_, value)| matches!(value, Value::Tensor(t) if t.track_op()));
        let names: Vec<String> = tracked_values.map(|(name, _)| name.clone()).collect();
        let tracked = !names.is_empty() || operands.iter().any(|x| x.track_op());
        let [q, k, v] = operands;
        let dense = match self.sequences {
            Sequences::Sharded(_) => [operand::compact(q)?, operand::compact(k)?, operand::compact(v)?],
            Sequences::Dense | Sequences::Packed(_) | Sequences::Paged(_) => {
                [operand::dense("q", q, false)?, operand::dense("k", k, false)?, operand::dense("v", v, false)?]
            }
        };
        let (spec, out) = self.spec(&dense, told || tracked)?;
        let problem = spec.validate().map_err(wrap)?;
        let mut declared = problem.params().to_vec();
        // A custom gradient may declare more parameters. A call without gradients does not read them, but the caller may pass them.
        let more = tracked || self.values.iter().any(|(name, _)| declared.iter().all(|d| d.name != *name));
        if let Some(backward) = more.then(|| spec.backward().validate().ok()).flatten() {
            declared = backward.params().to_vec();
        }
        let mut params: Vec<Bound> = Vec::new();
        let mut errors = Vec::new();
        for (name, value) in &self.values {
            match param::ready(name, value, declared.iter().find(|d| d.name == *name), problem.extents())? {
                Ok(bound) => params.push(bound),
                Err(error) => errors.push(error),
            }
        }
        none(errors)?;
        let mut backward = tracked.then(|| self.backward(&spec));
        for name in &names {
            let dtype = params.iter().find(|p| p.name == *name).map(Bound::gradient_dtype);
            if let (Some(backward), Some(dtype)) = (&mut backward, dtype) {
                *backward = backward.clone().wrt(name, dtype);
            }
        }
        // Report errors of the backward pass now, not when gradients are computed.
        if let Some(backward) = &backward {
            backward.validate().map_err(wrap)?;
        }
        let plan = match self.sequences {
            Sequences::Sharded(rank) => Some(rank.plan(q.device(), &spec, backward.as_ref(), self.attention.executor)?),
            Sequences::Dense | Sequences::Packed(_) | Sequences::Paged(_) => None,
        };
        if plan.is_some() {
            // Problems are equal if only the defaults of their scalars differ, and then they share a plan.
            let defaults: Vec<Bound> = declared
                .iter()
                .filter(|d| params.iter().all(|p| p.name != d.name))
                .filter_map(|d| Some(Bound { name: d.name.clone(), value: Ready::Scalar(d.default?) }))
                .collect();
            params.extend(defaults);
        }
        let read_backward = |name: &str| problem.params().iter().all(|d| d.name != name) && declared.iter().any(|d| d.name == name);
        let only_backward = params.iter().map(|p| read_backward(&p.name)).collect();
        let pass = Pass {
            order: self.order,
            executor: self.attention.executor,
            out,
            problem,
            backward,
            operands: dense,
            params: params.into(),
            only_backward,
            attn_scale: self.attention.attn_scale,
            packed: matches!(self.sequences, Sequences::Packed(_) | Sequences::Paged(_)),
            plan,
        };
        let Outputs { o, stats } = pass.forward()?;
        let mut stats = stats.map(|stats| Tensor::from_storage(stats, pass.stats_shape(), BackpropOp::none(), false));
        let shape = pass.out_shape();
        let transposed = pass.out != pass.order;
        let o = match (tracked, &mut stats) {
            (false, _) => Tensor::from_storage(o, shape, BackpropOp::none(), false),
            (true, Some(stats)) => {
                let carried: Vec<Tensor> = names.iter().filter_map(|name| self.tensor(name)).collect();
                let saved = stats.clone();
                if told {
                    *stats = node::apply_stats(&pass, &saved, operands, &carried)?;
                }
                node::apply(pass, (o, shape), saved, operands, &carried)?
            }
            (true, None) => return Err(crate::error::bug("a pass that is to be differentiated made no stats")),
        };
        Ok((if transposed { o.transpose(1, 2)? } else { o }, stats))
    }

    fn tensor(&self, name: &str) -> Option<Tensor> {
        self.values.iter().find(|(given, _)| given == name).and_then(|(_, value)| match value {
            Value::Tensor(tensor) => Some(tensor.clone()),
            Value::Scalar(_) => None,
        })
    }

    fn backward(&self, spec: &AttentionSpec) -> BackwardSpec {
        let mut backward = spec.backward();
        let [q, k, v] = [spec.q, spec.k, spec.v].map(|t| self.dense_like(t));
        (backward.dq, backward.dk, backward.dv) = (q, k, v);
        backward.deterministic = self.attention.deterministic;
        backward
    }

    /// Returns the contiguous layout of an operand's gradient.
    fn dense_like(&self, tensor: TensorSpec) -> TensorSpec {
        let layout = match self.order {
            Order::Bhsd => sdpa::Layout::Bhsd,
            Order::Bshd | Order::Packed | Order::Pool => sdpa::Layout::Bshd,
        };
        TensorSpec::dense(tensor.dims, layout)
    }

    /// Returns the specification, and the memory order of the output's axes.
    fn spec(&self, dense: &[Tensor; 3], stats: bool) -> Result<(AttentionSpec, Order)> {
        let whole = match self.sequences {
            Sequences::Sharded(rank) => {
                let [_, seq, _] = self.order.places();
                let [q, k, v] = dense.each_ref().map(|x| x.dims()[seq]);
                let [q, k] = rank.lengths([q, k, v])?;
                Some([q, k, k])
            }
            Sequences::Dense | Sequences::Packed(_) | Sequences::Paged(_) => None,
        };
        let operand = |n: usize| {
            let (layout, alignment) = (dense[n].layout(), alignment(&dense[n]));
            match self.sequences {
                Sequences::Dense | Sequences::Sharded(_) => {
                    let own = self.order.operand(layout, None, alignment);
                    // The shards of other ranks have the same order of axes, but may have another number of tokens.
                    whole.map_or(own, |seq| self.dense_like(TensorSpec { dims: [own.dims[0], own.dims[1], seq[n], own.dims[3]], ..own }))
                }
                Sequences::Packed(documents) => {
                    let (batch, longest) = documents.extents();
                    self.order.operand(layout, Some((batch, longest[usize::from(n > 0)])), alignment)
                }
                Sequences::Paged(pages) if n > 0 => pages.operand(&dense[n], alignment),
                Sequences::Paged(pages) => self.order.operand(layout, Some(pages.extents()), alignment),
            }
        };
        let [q, k, v] = [operand(0), operand(1), operand(2)];
        let Some(dtype) = operand::dtype(dense[0].dtype()) else {
            return Err(one("q dtype", dense[0].dtype().as_str(), "one of f32, f16, bf16"));
        };
        let transposed = self.order == Order::Bhsd && q.dims[1] > 1 && q.dims[2] > 1 && q.strides[1] < q.strides[2];
        let out = if transposed { Order::Bshd } else { self.order };
        let dims = [q.dims[0], q.dims[1], q.dims[2], v.dims[3]];
        let layout = if out == Order::Bhsd { sdpa::Layout::Bhsd } else { sdpa::Layout::Bshd };
        let Attention { score_mods, masks, sink, dropout, batch_invariant, .. } = self.attention;
        let mut spec = AttentionSpec::strided(dtype, [q, k, v], TensorSpec::dense(dims, layout))
            .with_score_mods(score_mods.clone())
            .with_masks(masks.clone())
            .with_packed(match self.sequences {
                Sequences::Dense | Sequences::Sharded(_) => None,
                Sequences::Packed(documents) => Some(documents.packed()),
                Sequences::Paged(pages) => Some(pages.packed()),
            });
        if let Sequences::Paged(pages) = self.sequences {
            spec = spec.with_paged(pages.paged(&dense[1]));
        }
        (spec.sink, spec.dropout, spec.stats) = (*sink, *dropout, stats);
        spec.batch_invariant = *batch_invariant;
        Ok((spec, out))
    }
}
