//! Ops of candle's autograd graph whose forward pass was computed before.

use crate::made::Made;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, MetalStorage, Result, Shape, Tensor};

/// An op over one to three tensors. `backward` computes the gradients of the arguments from the result and its gradient; it
/// returns `None` for an argument that needs none.
struct Op<F> {
    name: &'static str,
    made: Made,
    backward: F,
}

type Gradients<const N: usize> = Result<[Option<Tensor>; N]>;

/// Adds `result`, which was computed from `x` without a graph, to the graph of `x`.
pub(crate) fn unary<F>(name: &'static str, x: &Tensor, result: Tensor, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor, &Tensor) -> Gradients<1> + Send + Sync + 'static,
{
    x.apply_op1(Op { name, made: Made::of(result)?, backward })
}

/// Adds `result`, which was computed from `x` and `y` without a graph, to their graph.
pub(crate) fn binary<F>(name: &'static str, [x, y]: [&Tensor; 2], result: Tensor, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor, &Tensor) -> Gradients<2> + Send + Sync + 'static,
{
    x.apply_op2(y, Op { name, made: Made::of(result)?, backward })
}

/// Adds `result`, which was computed from `x`, `y` and `z` without a graph, to their graph.
pub(crate) fn ternary<F>(name: &'static str, [x, y, z]: [&Tensor; 3], result: Tensor, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor, &Tensor) -> Gradients<3> + Send + Sync + 'static,
{
    x.apply_op3(y, z, Op { name, made: Made::of(result)?, backward })
}

impl<F: Fn(&Tensor, &Tensor) -> Gradients<1>> CustomOp1 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.made.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.made.on_cuda()
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.made.on_metal()
    }

    fn bwd(&self, _: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [x] = (self.backward)(&result.detach(), &gradient.detach())?;
        Ok(x)
    }
}

impl<F: Fn(&Tensor, &Tensor) -> Gradients<2>> CustomOp2 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.made.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.made.on_cuda()
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.made.on_metal()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [x, y] = (self.backward)(&result.detach(), &gradient.detach())?;
        Ok((x, y))
    }
}

impl<F: Fn(&Tensor, &Tensor) -> Gradients<3>> CustomOp3 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
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

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.made.on_metal()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [x, y, z] = (self.backward)(&result.detach(), &gradient.detach())?;
        Ok((x, y, z))
    }
}
