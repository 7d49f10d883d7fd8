//! Attention in candle's autograd graph.
//!
//! A custom op of candle has at most three arguments. Tracked parameters go through *carriers*: ops of one element over up to three tensors. The last carrier
//! is the third argument of the attention in place of `v`. The attention stores the gradients of the carried tensors in a slot. Carriers come after it in
//! topological order of the backward pass, and take the gradients from the slot.

use crate::error::bug;
use crate::made::{Made, one_element};
use crate::operand::dense;
use crate::pass::{Gradients, Pass, Upstream};
use crate::through_stats;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

/// Gradients by the thread that computes them: `backward` of two threads over one graph must not mix.
#[derive(Debug, Default)]
struct Slot(Mutex<HashMap<(ThreadId, usize), Tensor>>);

impl Slot {
    fn put(&self, place: usize, gradient: Tensor) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((thread::current().id(), place), gradient);
    }

    fn take(&self, place: usize) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(thread::current().id(), place))
    }
}

/// The result of attention that an op stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    O,
    Stats,
}

/// The attention op. A call that returns `stats` has two of them: candle's ops have one result.
struct Node {
    /// For [`Output::Stats`], the pass that [`through_stats`] derives.
    pass: Pass,
    output: Output,
    made: Made,
    stats: Tensor,
    /// With tracked parameters: the slot for gradients of carried tensors, and whether `v` is carried too.
    slot: Option<(Arc<Slot>, bool)>,
    /// Shapes of tracked parameters, in the order of their gradients.
    shapes: Vec<Shape>,
}

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        "sdpa"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.made.on_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.made.on_cuda()
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        third: &Tensor,
        res: &Tensor,
        grad_res: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Gradients { operands: [dq, dk, dv], params } = match self.output {
            Output::O => {
                let d_o = dense("d_o", grad_res, true)?;
                self.pass.backward(&Upstream { o: &res.detach(), stats: &self.stats, d_o: &d_o })?
            }
            Output::Stats => through_stats::backward(&self.pass, &self.stats, &grad_res.detach())?,
        };
        let of = |storage, like: &Tensor| Tensor::from_storage(storage, like.shape(), BackpropOp::none(), false);
        let dv = of(dv, &self.pass.operands[2]);
        let third = match &self.slot {
            None => third.track_op().then_some(dv),
            Some((slot, carries_v)) => {
                for (n, (gradient, shape)) in params.into_iter().zip(&self.shapes).enumerate() {
                    slot.put(n, Tensor::from_storage(gradient, shape, BackpropOp::none(), false));
                }
                if *carries_v {
                    slot.put(self.shapes.len(), dv);
                }
                Some(third.zeros_like()?)
            }
        };
        // Return no gradient for an operand that is not tracked, because candle would keep this unused gradient.
        Ok((q.track_op().then(|| of(dq, q)), k.track_op().then(|| of(dk, k)), third))
    }
}

/// The kind of an argument of a carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Argument {
    /// A carried tensor: its index in the slot.
    Carried(usize),
    /// The previous carrier.
    Before,
    /// An unused argument.
    Filler,
}

/// An op that carries up to three tensors.
struct Carrier {
    arguments: [Argument; 3],
    slot: Arc<Slot>,
    made: Made,
}

impl Carrier {
    fn gradient(&self, n: usize, of: &Tensor) -> Result<Option<Tensor>> {
        Ok(match self.arguments[n] {
            Argument::Carried(place) => {
                let gradient = self.slot.take(place).ok_or_else(|| bug("the gradient of a parameter did not arrive"))?;
                Some(gradient)
            }
            Argument::Before => Some(of.zeros_like()?),
            Argument::Filler => None,
        })
    }
}

impl CustomOp3 for Carrier {
    fn name(&self) -> &'static str {
        "sdpa-carrier"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.made.on_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.made.on_cuda()
    }

    fn bwd(&self, a: &Tensor, b: &Tensor, c: &Tensor, _: &Tensor, _: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((self.gradient(0, a)?, self.gradient(1, b)?, self.gradient(2, c)?))
    }
}

/// Returns the last of a chain of carriers, each over the previous one and two tensors.
fn carry(tensors: &[Tensor], slot: &Arc<Slot>) -> Result<Tensor> {
    let filler = tensors[0].detach();
    let mut places = tensors.iter().enumerate();
    let mut before: Option<Tensor> = None;
    while places.len() > 0 || before.is_none() {
        let first = before.take().map(|carrier| (Argument::Before, carrier));
        let mut next = || places.next().map(|(place, tensor)| (Argument::Carried(place), tensor.clone()));
        let mut arguments = [first.or_else(&mut next), next(), next()].map(|a| a.unwrap_or_else(|| (Argument::Filler, filler.clone())));
        let kinds = [arguments[0].0, arguments[1].0, arguments[2].0];
        let [a, b, c] = arguments.each_mut().map(|(_, tensor)| &*tensor);
        let carrier = Carrier { arguments: kinds, slot: slot.clone(), made: Made::new(one_element(a.device())?, 1) };
        before = Some(a.apply_op3(b, c, carrier)?);
    }
    before.ok_or_else(|| bug("nothing is carried"))
}

/// Adds the output of a computed pass to candle's autograd graph. Gradients flow through it to the operands and to the tracked parameters.
pub(crate) fn apply(
    pass: Pass,
    (o, shape): (Storage, Vec<usize>),
    stats: Tensor,
    operands: [&Tensor; 3],
    carried: &[Tensor],
) -> Result<Tensor> {
    add(pass, Output::O, Made::new(o, shape), stats, operands, carried)
}

/// Adds the stats of a computed pass to candle's autograd graph. They do not depend on `v`.
pub(crate) fn apply_stats(pass: &Pass, stats: &Tensor, [q, k, v]: [&Tensor; 3], carried: &[Tensor]) -> Result<Tensor> {
    if !q.track_op() && !k.track_op() && carried.is_empty() {
        return Ok(stats.clone());
    }
    let derived = through_stats::pass(pass)?;
    add(derived, Output::Stats, Made::of(stats.copy()?)?, stats.clone(), [q, k, &v.detach()], carried)
}

fn add(pass: Pass, output: Output, made: Made, stats: Tensor, [q, k, v]: [&Tensor; 3], carried: &[Tensor]) -> Result<Tensor> {
    let mut tensors = carried.to_vec();
    let shapes: Vec<Shape> = tensors.iter().map(|tensor| tensor.shape().clone()).collect();
    if tensors.is_empty() {
        return q.apply_op3(k, v, Node { pass, output, made, stats, slot: None, shapes });
    }
    if v.track_op() {
        tensors.push(v.clone());
    }
    let slot = Arc::new(Slot::default());
    let carrier = carry(&tensors, &slot)?;
    q.apply_op3(k, &carrier, Node { pass, output, made, stats, slot: Some((slot, v.track_op())), shapes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Result};

    #[test]
    fn a_thread_takes_what_it_put() -> Result<()> {
        let slot = Slot::default();
        let [one, two] = [Tensor::new(1f32, &Device::Cpu)?, Tensor::new(2f32, &Device::Cpu)?];
        slot.put(0, one);
        std::thread::scope(|scope| scope.spawn(|| slot.put(0, two)).join()).map_err(|_| bug("a thread failed"))?;
        assert_eq!(slot.take(0).map(|x| x.to_scalar::<f32>()).transpose()?, Some(1.));
        assert!(slot.take(0).is_none());
        Ok(())
    }
}
