//! One call: its problem, tensors and executor.

use crate::error::{bug, one, wrap};
use crate::operand::{self, Order};
use crate::param::Bound;
use crate::ranks::Plan;
use candle_core::{Device, Result, Storage, Tensor};
use sdpa::{BackwardProblem, BackwardSpec, ExecutorName, Problem, Reason, Unsupported};
use std::sync::Arc;

/// A forward pass, and the inputs of its backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    pub(crate) executor: Option<ExecutorName>,
    /// The order of the axes of the operands and of their gradients.
    pub(crate) order: Order,
    /// The order of the axes of the output.
    pub(crate) out: Order,
    pub(crate) problem: Problem,
    /// The specification of the backward pass; `None` if no gradient is needed. The strides of the output's gradient are set at each
    /// call.
    pub(crate) backward: Option<BackwardSpec>,
    /// Queries, keys and values, detached from candle's autograd graph.
    pub(crate) operands: [Tensor; 3],
    pub(crate) params: Arc<[Bound]>,
    /// For each parameter, whether only the backward pass reads it.
    pub(crate) only_backward: Vec<bool>,
    pub(crate) attn_scale: Option<f32>,
    pub(crate) packed: bool,
    /// If the operands are shards of one rank: the plan of the whole problem, which `problem` and `backward` specify.
    pub(crate) plan: Option<Arc<Plan>>,
}

/// The results of a forward pass.
pub(crate) struct Outputs {
    pub(crate) o: Storage,
    pub(crate) stats: Option<Storage>,
}

/// The inputs of a backward pass that its forward pass does not have.
#[derive(Clone, Copy)]
pub(crate) struct Upstream<'a> {
    pub(crate) o: &'a Tensor,
    pub(crate) stats: &'a Tensor,
    pub(crate) d_o: &'a Tensor,
}

/// The results of a backward pass, each contiguous.
pub(crate) struct Gradients {
    /// The gradients of `q`, `k` and `v`.
    pub(crate) operands: [Storage; 3],
    /// The gradients of declared parameters, in the order in which the specification requests them.
    pub(crate) params: Vec<Storage>,
}

impl Pass {
    pub(crate) fn out_shape(&self) -> Vec<usize> {
        let [batch, heads, seq, dim] = self.problem.o().dims.map(|n| n as usize);
        let seq = if self.packed { self.tokens() } else { self.shard().unwrap_or(seq) };
        self.out.shape([batch, heads, seq, dim])
    }

    pub(crate) fn stats_shape(&self) -> Vec<usize> {
        let [batch, heads, seq, _] = self.problem.o().dims.map(|n| n as usize);
        if self.packed { vec![self.tokens(), heads] } else { vec![batch, heads, self.shard().unwrap_or(seq)] }
    }

    /// Returns the number of query tokens of a rank.
    fn shard(&self) -> Option<usize> {
        let [_, seq, _] = self.order.places();
        self.plan.as_ref().map(|_| self.operands[0].dims()[seq])
    }

    /// Returns the number of query tokens of a packed call.
    fn tokens(&self) -> usize {
        self.operands[0].dims().first().copied().unwrap_or_default()
    }

    pub(crate) fn forward(&self) -> Result<Outputs> {
        match self.operands[0].device() {
            Device::Cpu => {
                self.is_for(&[ExecutorName::CPU])?;
                #[cfg(feature = "cpu")]
                return crate::host::forward(self);
                #[cfg(not(feature = "cpu"))]
                Err(wrap(without("cpu")))
            }
            Device::Cuda(_device) => {
                self.is_for(&[ExecutorName::CUDNN, ExecutorName::CUDA])?;
                #[cfg(feature = "cuda")]
                return crate::cuda::forward(self, _device);
                #[cfg(not(feature = "cuda"))]
                Err(wrap(without("cuda")))
            }
            Device::Metal(_) => Err(metal()),
        }
    }

    pub(crate) fn backward(&self, upstream: &Upstream<'_>) -> Result<Gradients> {
        let mut spec = self.backward.clone().ok_or_else(|| bug("a pass that is not differentiated is asked for gradients"))?;
        if let Some(plan) = &self.plan {
            let problem = plan.problem.backward().ok_or_else(|| bug("ranks without a backward pass"))?;
            let d_o = operand::compact(upstream.d_o)?;
            return self.backward_on_device(&spec, problem, &Upstream { d_o: &d_o, ..*upstream });
        }
        let documents = self.packed.then(|| (spec.d_o.dims[0] as usize, spec.d_o.dims[2] as usize));
        spec.d_o = self.out.operand(upstream.d_o.layout(), documents, alignment(upstream.d_o));
        let problem = spec.validate().map_err(wrap)?;
        self.backward_on_device(&spec, &problem, upstream)
    }

    fn backward_on_device(&self, _spec: &BackwardSpec, _problem: &BackwardProblem, _upstream: &Upstream<'_>) -> Result<Gradients> {
        match self.operands[0].device() {
            Device::Cpu => {
                #[cfg(feature = "cpu")]
                return crate::host::backward(self, _problem, _upstream);
                #[cfg(not(feature = "cpu"))]
                Err(wrap(without("cpu")))
            }
            Device::Cuda(_device) => {
                #[cfg(feature = "cuda")]
                return crate::cuda::backward(self, _spec, _problem, _upstream, _device);
                #[cfg(not(feature = "cuda"))]
                Err(wrap(without("cuda")))
            }
            Device::Metal(_) => Err(metal()),
        }
    }

    /// Returns an error if the selected executor does not read tensors on this device.
    fn is_for(&self, reads: &[ExecutorName]) -> Result<()> {
        match self.executor {
            Some(named) if !reads.contains(&named) => {
                let names: Vec<&str> = reads.iter().map(|name| name.name()).collect();
                let rule = format!("{}, which can read tensors on {:?}", names.join(" or "), self.operands[0].device().location());
                Err(one("executor", named, rule))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the alignment of a tensor's first element in bytes, 16 at most. In host memory it does not matter.
pub(crate) fn alignment(tensor: &Tensor) -> u32 {
    #[cfg(feature = "cuda")]
    if tensor.device().is_cuda() {
        return crate::cuda::alignment(tensor);
    }
    let _ = tensor;
    16
}

#[cfg_attr(all(feature = "cpu", feature = "cuda"), expect(dead_code, reason = "every device has its executor"))]
pub(crate) fn without(feature: &str) -> Unsupported {
    let reason = Reason::Absent(format!("sdpa-candle was compiled without the feature `{feature}`"));
    Unsupported::new(ExecutorName::new("none"), vec![reason])
}

fn metal() -> candle_core::Error {
    let reason = Reason::Absent(
        "candle keeps its command encoder to itself, so that nothing can be put between its own kernels without two waits a call; \
         name the CPU executor to compute on the host"
            .to_owned(),
    );
    wrap(Unsupported::new(ExecutorName::METAL, vec![reason]))
}

/// Returns the number of elements of a tensor of these extents.
pub(crate) fn elements(dims: &[usize]) -> usize {
    dims.iter().product()
}

/// Returns the number of elements of operand `n`'s gradient. It is contiguous, whatever memory the operand's elements share.
pub(crate) fn gradient_elements(pass: &Pass, n: usize) -> usize {
    elements(pass.operands[n].dims())
}

/// Returns the part of its storage that a tensor uses, as a range of indices.
pub(crate) fn span(tensor: &Tensor) -> std::ops::Range<usize> {
    operand::span(tensor.layout())
}
