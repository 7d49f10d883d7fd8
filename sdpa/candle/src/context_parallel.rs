//! Attention over the tokens of several ranks.

use crate::attention::Attention;
use crate::error::{none, one, wrap};
use crate::operand::{self, Order};
use crate::ranks::{Group, PLANS, Plan, Plans};
use candle_core::{Device, Result, Tensor};
use sdpa::distributed::{Chunk, Exchange, ParallelError, ParallelSpec, Sharding, Strategy};
use sdpa::{AttentionSpec, BackwardSpec, ExecutorName, SpecError};
use std::sync::Arc;
#[cfg(feature = "cuda")]
use {
    candle_core::cuda::CudaDevice,
    sdpa::distributed::{Communicator, Partials},
};

/// One of several ranks, each of which holds some tokens of every sequence: context parallelism.
///
/// [`Attention::forward_parallel`] computes attention over the tokens of all ranks. Each rank has one value of this type, made once from its end of a group:
/// threads of this process ([`InProcess`](sdpa::distributed::InProcess)), any process group for which you implement [`Exchange`], or NCCL for tensors on
/// CUDA devices. All ranks must make the same calls in the same order, backward passes too.
///
/// A clone is the same rank, with the same plans. It may have other options, such as [`ContextParallel::seq`].
///
/// ```
/// use candle_core::{Device, Result, Tensor, Var};
/// use sdpa_candle::distributed::{InProcess, Sharding};
/// use sdpa_candle::{Attention, ContextParallel, Mask, library};
/// use std::time::Duration;
///
/// let whole = Tensor::randn(0f32, 1., (1, 4, 37, 8), &Device::Cpu)?; // (batch, heads, tokens, dim)
/// let attention = Attention::new().score_mod(library::alibi()).mask(Mask::causal());
/// let run = |end: InProcess| -> Result<[Tensor; 2]> {
///     let rank = ContextParallel::new(end).sharding(Sharding::Zigzag).seq(37, 37);
///     let x = Var::from_tensor(&rank.shard(&whole, 2)?)?; // this rank's tokens
///     let o = attention.forward_parallel(&rank, &x, &x, &x)?;
///     let dx = o.sum_all()?.backward()?.get(&x).unwrap().clone();
///     Ok([rank.unshard(&o.detach(), 2)?, rank.unshard(&dx, 2)?])
/// };
/// let results: Vec<Result<[Tensor; 2]>> = std::thread::scope(|scope| {
///     let ends = InProcess::group(2, Duration::from_secs(10)).into_iter();
///     let ranks: Vec<_> = ends.map(|end| scope.spawn(|| run(end))).collect();
///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
/// });
/// let x = Var::from_tensor(&whole)?;
/// let o = attention.forward(&x, &x, &x)?;
/// let dx = o.sum_all()?.backward()?.get(&x).unwrap().clone();
/// for result in results {
///     for (got, one_rank) in result?.iter().zip([&o, &dx]) {
///         let furthest = (got - one_rank)?.abs()?.max_all()?.to_scalar::<f32>()?;
///         assert!(furthest < 1e-4);
///     }
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ContextParallel {
    group: Arc<Group>,
    plans: Arc<Plans>,
    sharding: Sharding,
    strategy: Strategy,
    seq: Option<[usize; 2]>,
    most: usize,
}

/// The numbers of the record that ranks exchange before [`ContextParallel::unshard`]: element type, dim and extents.
const RECORD: usize = 10;

impl ContextParallel {
    /// Creates this rank of a group over host memory, for tensors on the CPU, with contiguous shards and an automatic strategy. The deadline is that of the
    /// exchange.
    pub fn new(exchange: impl Exchange + 'static) -> ContextParallel {
        ContextParallel::of(Group::on_host(exchange))
    }

    /// Creates this rank of an NCCL communicator, for tensors on `device`, with contiguous shards and an automatic strategy. The deadline is that of the
    /// communicator. `partials` is the type of contributions that are merged or summed.
    ///
    /// # Errors
    /// Fails if the communicator is on another device.
    #[cfg(feature = "cuda")]
    pub fn on_cuda(device: &CudaDevice, communicator: Communicator, partials: Partials) -> Result<ContextParallel> {
        let (got, expected) = (communicator.device().ordinal(), device.cuda_stream().context().ordinal());
        if usize::try_from(got) != Ok(expected) {
            let error = ParallelError::Devices { got, expected: u32::try_from(expected).unwrap_or(u32::MAX) };
            return Err(candle_core::Error::wrap(error));
        }
        Ok(ContextParallel::of(Group::on_cuda(communicator.into(), device.clone(), partials)))
    }

    fn of(group: Group) -> ContextParallel {
        let (sharding, strategy) = (Sharding::Contiguous, Strategy::Auto);
        ContextParallel { group: Arc::new(group), plans: Arc::default(), sharding, strategy, seq: None, most: PLANS }
    }

    /// Sets the tokens of each rank.
    #[must_use]
    pub fn sharding(mut self, sharding: Sharding) -> ContextParallel {
        self.sharding = sharding;
        self
    }

    /// Sets the exchanges of the ranks.
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> ContextParallel {
        self.strategy = strategy;
        self
    }

    /// Sets the numbers of queries and of keys of all ranks together. Without it, every rank is taken to have as many as this one, unless the sharding is
    /// [`Sharding::Chunks`], which has all tokens.
    #[must_use]
    pub fn seq(mut self, queries: usize, keys: usize) -> ContextParallel {
        self.seq = Some([queries, keys]);
        self
    }

    /// Sets the number of problems whose plans are kept, 8 unless it is set. On CUDA, each has memory for the tokens that it exchanges. Pass the same number
    /// on all ranks.
    #[must_use]
    pub fn kept_plans(mut self, plans: usize) -> ContextParallel {
        self.most = plans;
        self
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.group.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.group.size
    }

    /// Returns the error of the first call that failed. After it, every call of this rank returns [`ParallelError::Broken`]: make a new group. A mistake in
    /// this rank's own call is [`ParallelError::Broken`] with the text of the error that the call returned.
    pub fn failure(&self) -> Option<Arc<ParallelError>> {
        self.group.failure()
    }

    /// Waits for the work of this rank's CUDA device, until the deadline of the communicator. Calls only submit work, so a rank that stopped is noticed here
    /// and in the first calls of a problem. Synchronising the device instead might never return. Over host memory, it returns at once.
    ///
    /// # Errors
    /// Fails at the deadline, or with the failure of the device, of NCCL, or of an earlier call.
    pub fn wait(&self) -> Result<()> {
        self.group.wait()
    }

    /// Returns the positions in a sequence of `seq` tokens of this rank's tokens, u32 in the order of the shard. Rotary embeddings need them:
    /// `cos.index_select(&positions, 0)`.
    ///
    /// # Errors
    /// Fails if the chunks of [`Sharding::Chunks`] do not divide `seq` tokens.
    pub fn positions(&self, seq: usize, device: &Device) -> Result<Tensor> {
        Tensor::new(self.places(self.rank(), seq)?, device)
    }

    /// Returns this rank's part of a tensor that has the tokens of all ranks along `dim`. Gradients flow through it.
    ///
    /// # Errors
    /// Fails as [`ContextParallel::positions`] does, and if the tensor has no such dim.
    pub fn shard(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        let seq = tensor.dim(dim)?;
        match &self.chunks(seq)?[self.rank()][..] {
            [] => tensor.narrow(dim, 0, 0),
            [one] if one.stride == 1 => tensor.narrow(dim, one.start.unsigned_abs() as usize, one.len.unsigned_abs() as usize),
            _ => tensor.contiguous()?.index_select(&self.positions(seq, tensor.device())?, dim),
        }
    }

    /// Returns the tokens of all ranks, in the order of their positions, from shards with the tokens of each rank along `dim`. All ranks must call it. Shards
    /// on a GPU are copied through host memory. There is no gradient: pass `detach()` of a tensor that is computed from variables.
    ///
    /// # Errors
    /// Fails if the tensor requires a gradient, if the ranks' tensors do not fit together, or if a rank fails or does not answer.
    pub fn unshard(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        self.group.noted(self.unshard_noted(tensor, dim))
    }

    fn unshard_noted(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        self.group.is_for("tensor", tensor.device())?;
        tensor.dim(dim)?;
        if tensor.track_op() {
            return Err(one("tensor", "a tensor that requires a gradient", "detach() of it: unshard has no gradient"));
        }
        if tensor.rank() > RECORD - 2 {
            return Err(one("tensor shape", format!("{:?}", tensor.dims()), format!("at most {} dims", RECORD - 2)));
        }
        let mut own = vec![tensor.dtype() as u64, dim as u64];
        own.extend(tensor.dims().iter().map(|n| *n as u64));
        own.resize(RECORD, u64::MAX);
        let bytes = |record: &[u64]| record.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let records: Vec<Vec<u64>> = self
            .group
            .gather(&bytes(&own), &vec![8 * RECORD; self.ranks()])?
            .iter()
            .map(|record| record.as_chunks::<8>().0.iter().map(|n| u64::from_le_bytes(*n)).collect())
            .collect();
        let lengths: Vec<usize> = records.iter().map(|record| record[2 + dim.min(RECORD - 3)] as usize).collect();
        let like = |record: &[u64]| record.iter().enumerate().all(|(n, x)| n == 2 + dim || *x == own[n]);
        let unlike: Vec<usize> = (0..self.ranks()).filter(|rank| !like(&records[*rank])).collect();
        if !unlike.is_empty() {
            let (field, rank) = ("the tensor of unshard (type, dim or extents)", self.rank());
            return Err(candle_core::Error::wrap(ParallelError::Mismatch { field, rank, ranks: unlike }));
        }
        let all: usize = lengths.iter().sum();
        let expected: Vec<usize> = (0..self.ranks()).map(|rank| Ok(self.places(rank, all)?.len())).collect::<Result<_>>()?;
        if lengths != expected {
            let got = format!("{lengths:?} tokens on the ranks");
            return Err(one(format!("tensor dim {dim}"), got, format!("{expected:?}, the shards of {all} tokens")));
        }
        let mut data = Vec::new();
        tensor.write_bytes(&mut data)?;
        let elements: usize = tensor.dims().iter().enumerate().filter(|(n, _)| *n != dim).map(|(_, extent)| extent).product();
        let per_token = elements * tensor.dtype().size_in_bytes();
        let parts = self.group.gather(&data, &lengths.iter().map(|n| n * per_token).collect::<Vec<_>>())?;
        let part = |(bytes, tokens): (&Vec<u8>, &usize)| {
            let mut dims = tensor.dims().to_vec();
            dims[dim] = *tokens;
            Tensor::from_raw_buffer(bytes, tensor.dtype(), &dims, &Device::Cpu)
        };
        let parts: Vec<Tensor> = parts.iter().zip(&lengths).filter(|(_, n)| **n > 0).map(part).collect::<Result<_>>()?;
        if parts.is_empty() {
            return Ok(tensor.clone());
        }
        // For each position, its place among the tokens in the order of the ranks.
        let mut order = vec![0u32; all];
        let positions = (0..self.ranks()).map(|rank| self.places(rank, all)).collect::<Result<Vec<_>>>()?;
        positions.into_iter().flatten().enumerate().for_each(|(place, position)| order[position as usize] = place as u32);
        Tensor::cat(&parts, dim)?.index_select(&Tensor::new(order, &Device::Cpu)?, dim)?.to_device(tensor.device())
    }

    fn chunks(&self, seq: usize) -> Result<Vec<Vec<Chunk>>> {
        let tokens = i64::try_from(seq).unwrap_or(i64::MAX);
        self.sharding.check(self.ranks(), tokens).map_err(wrap)?;
        Ok(self.sharding.chunks(self.ranks(), tokens))
    }

    /// Returns the positions of a rank's tokens.
    fn places(&self, rank: usize, seq: usize) -> Result<Vec<u32>> {
        let chunks = &self.chunks(seq)?[rank];
        Ok(chunks.iter().flat_map(|chunk| (0..chunk.len).map(|n| u32::try_from(chunk.at(n)).unwrap_or(u32::MAX))).collect())
    }

    /// Returns the numbers of queries and keys of all ranks, or the mistakes in those of this rank.
    pub(crate) fn lengths(&self, [q, k, v]: [usize; 3]) -> Result<[i64; 2]> {
        let held = match &self.sharding {
            Sharding::Chunks(lists) => Some(lists.iter().flatten().map(|chunk| chunk.len.max(0)).sum::<i64>().unsigned_abs() as usize),
            Sharding::Contiguous | Sharding::Blocks | Sharding::Zigzag | Sharding::Striped => None,
        };
        let all = self.seq.unwrap_or_else(|| [q, k].map(|tokens| held.unwrap_or(tokens * self.ranks())));
        let mut errors = Vec::new();
        for (name, got, seq) in [("q", q, all[0]), ("k", k, all[1]), ("v", v, all[1])] {
            let expected = self.chunks(seq)?[self.rank()].iter().map(|chunk| chunk.len).sum::<i64>();
            if i64::try_from(got) != Ok(expected) {
                let rule = format!(
                    "{expected}, the shard of rank {} of {} with {seq} tokens in all (ContextParallel::seq)",
                    self.rank(),
                    self.ranks()
                );
                errors.push(SpecError::new(format!("{name} tokens"), got, rule));
            }
        }
        none(errors)?;
        Ok(all.map(|n| i64::try_from(n).unwrap_or(i64::MAX)))
    }

    /// Returns the plan of a problem whose tensors are on `device`.
    pub(crate) fn plan(
        &self,
        device: &Device,
        spec: &AttentionSpec,
        backward: Option<&BackwardSpec>,
        executor: Option<ExecutorName>,
    ) -> Result<Arc<Plan>> {
        self.group.is_for("q", device)?;
        let mut all = ParallelSpec::new(spec.clone(), self.ranks()).sharding(self.sharding.clone()).strategy(self.strategy);
        if let Some(backward) = backward {
            all = all.with_backward();
            all.wrt.clone_from(&backward.wrt);
        }
        self.plans.find_or_make(&self.group, (all, executor), self.most)
    }
}

impl Attention {
    /// Computes [`Attention::forward`] over the tokens of all ranks: `q`, `k` and `v` are the shards of this rank, (batch, heads, tokens of the rank, dim), and
    /// so is `o`. Masks and score_mods see positions in the whole sequence. Parameters have the extents of the whole problem, on every rank.
    ///
    /// Gradients flow to the shards of `q`, `k` and `v`. Gradients of parameters and sinks are the contributions of this rank: sum them over the ranks, as
    /// those of a model's weights. `o` has the memory order (batch, tokens, heads, dim), so the usual reshape copies nothing.
    ///
    /// # Errors
    /// Fails as [`Attention::forward`] does, also if several ranks do not support the call, if the ranks run different problems, or if a rank fails or does
    /// not answer. After any error the group is of no further use, because the other ranks may wait for this one: see [`ContextParallel::failure`].
    pub fn forward_parallel(&self, rank: &ContextParallel, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let run = || {
            let operands = [("q", q), ("k", k), ("v", v)];
            none(operands.into_iter().flat_map(|(name, x)| operand::mistakes(name, Order::Bhsd, x, q)).collect())?;
            self.forward_shards(rank, [&q.transpose(1, 2)?, &k.transpose(1, 2)?, &v.transpose(1, 2)?])?.transpose(1, 2)
        };
        rank.group.noted(run())
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use sdpa::distributed::InProcess;
    use sdpa::{DType, Layout, Mask, Shape};
    use std::time::Duration;

    #[test]
    fn equal_problems_have_one_plan_and_few_are_kept() -> Result<()> {
        let rank = ContextParallel::new(InProcess::group(1, Duration::from_secs(1)).remove(0)).kept_plans(2);
        let of = |seq: i64| {
            let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: seq, seq_kv: seq, dim_qk: 8, dim_v: 8 };
            AttentionSpec::dense(DType::F32, shape, Layout::Bshd).mask(Mask::causal())
        };
        let plan = |spec: &AttentionSpec| rank.plan(&Device::Cpu, spec, None, None);
        let (first, second) = (plan(&of(3))?, plan(&of(4))?);
        assert!(Arc::ptr_eq(&first, &plan(&of(3))?) && !Arc::ptr_eq(&first, &second));
        // The second was not used for longest.
        plan(&of(5))?;
        assert!(Arc::ptr_eq(&first, &plan(&of(3))?) && !Arc::ptr_eq(&second, &plan(&of(4))?));
        let turned = rank.clone().sharding(Sharding::Striped);
        assert!(!Arc::ptr_eq(&first, &turned.plan(&Device::Cpu, &of(3), None, None)?));
        let backward = rank.plan(&Device::Cpu, &of(3), Some(&of(3).backward()), None)?;
        assert!(backward.problem.backward().is_some() && first.problem.backward().is_none());
        Ok(())
    }
}
