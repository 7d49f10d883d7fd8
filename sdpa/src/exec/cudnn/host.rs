//! Attention over host memory: up, copies, attention, copies, down. Everything is owned, so nothing here is unsafe.

use super::guard;
use super::plan::Planned;
use crate::error::Error;
use crate::exec::{Prepared, Report};
use crate::problem::{OPERANDS, Problem};
use crate::spec::TensorSpec;
use crate::tensor::{Elements, ElementsMut, HostForward};
use cudnn_graph::ir::Scalar;
use cudnn_graph::{Buffer, OwnedBindings, Stream, launch};
use std::sync::Arc;

/// A problem made ready on a GPU.
#[derive(Debug)]
pub struct CudnnPrepared {
    problem: Problem,
    planned: Arc<Planned>,
    stream: Arc<Stream>,
}

impl CudnnPrepared {
    pub(crate) fn new(problem: Problem, planned: Arc<Planned>, stream: Arc<Stream>) -> CudnnPrepared {
        CudnnPrepared { problem, planned, stream }
    }

    /// The plans.
    pub fn planned(&self) -> &Arc<Planned> {
        &self.planned
    }

    fn bytes(&self, tensor: &TensorSpec) -> usize {
        let elements = usize::try_from(tensor.extent().unwrap_or(0)).unwrap_or(0);
        elements * (self.problem.dtype().bits() / 8) as usize
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer, Error> {
        Ok(Buffer::new(self.stream.device(), bytes)?)
    }

    fn upload(&self, tensor: &TensorSpec, data: &Elements<'_>) -> Result<Arc<Buffer>, Error> {
        let mut buffer = self.buffer(self.bytes(tensor))?;
        let elements = usize::try_from(tensor.extent().unwrap_or(0)).unwrap_or(0);
        match data {
            Elements::F32(x) => buffer.upload(&self.stream, 0, &x[..elements]),
            Elements::F16(x) => buffer.upload(&self.stream, 0, &x[..elements]),
            Elements::BF16(x) => buffer.upload(&self.stream, 0, &x[..elements]),
        }?;
        Ok(Arc::new(buffer))
    }

    fn download(&self, buffer: &Buffer, data: &mut ElementsMut<'_>) -> Result<(), Error> {
        match data {
            ElementsMut::F32(x) => scatter(self.problem.o(), x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::F16(x) => scatter(self.problem.o(), x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::BF16(x) => scatter(self.problem.o(), x, |to| buffer.download(&self.stream, 0, to)),
        }?;
        Ok(())
    }

    fn copy(&self, operand: usize, from: &Arc<Buffer>, to: &Arc<Buffer>, scratch: &Arc<Buffer>) -> Result<(), Error> {
        for c in self.planned.copies.iter().filter(|c| c.operand == operand) {
            for n in 0..c.copy.repeats {
                let bindings =
                    OwnedBindings::new().buffer_at(c.copy.from, from, n * c.copy.from_step).buffer_at(c.copy.to, to, n * c.copy.to_step);
                launch(&c.plan, &self.stream, bindings, scratch)?.wait()?;
            }
        }
        Ok(())
    }

    fn is_copied(&self, operand: usize) -> bool {
        self.planned.copies.iter().any(|c| c.operand == operand)
    }
}

/// Downloads a strided tensor and keeps what lies between its elements.
fn scatter<T: Copy + Default>(
    tensor: &TensorSpec,
    to: &mut [T],
    download: impl FnOnce(&mut [T]) -> Result<(), cudnn_graph::Error>,
) -> Result<(), cudnn_graph::Error> {
    let extent = usize::try_from(tensor.extent().unwrap_or(0)).unwrap_or(0);
    let dims = tensor.dims.map(|d| usize::try_from(d).unwrap_or(0));
    let strides = tensor.strides.map(|s| usize::try_from(s).unwrap_or(0));
    if dims.iter().product::<usize>() == extent {
        return download(&mut to[..extent]);
    }
    let mut all = vec![T::default(); extent];
    download(&mut all)?;
    for b in 0..dims[0] {
        for h in 0..dims[1] {
            for s in 0..dims[2] {
                let at = b * strides[0] + h * strides[1] + s * strides[2];
                to[at..at + dims[3]].copy_from_slice(&all[at..at + dims[3]]);
            }
        }
    }
    Ok(())
}

impl Prepared for CudnnPrepared {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error> {
        let attn_scale = call.check(&self.problem)?;
        guard::check_scale(attn_scale)?;
        let planned = &self.planned;
        let scratch_bytes = planned.copies.iter().map(|c| c.plan.workspace_bytes()).chain([planned.plan.workspace_bytes()]).max().unwrap_or(0);
        let scratch = Arc::new(self.buffer(usize::try_from(scratch_bytes).unwrap_or(usize::MAX))?);
        let mut used = Vec::new();
        for (n, data) in [&call.q, &call.k, &call.v].into_iter().enumerate() {
            let given = self.upload(&self.problem.tensors()[n], data)?;
            if self.is_copied(n) {
                let dense = Arc::new(self.buffer(self.bytes(&planned.problem.tensors()[n]))?);
                self.copy(n, &given, &dense, &scratch)?;
                used.push(dense);
            } else {
                used.push(given);
            }
        }
        let mut o = self.buffer(self.bytes(planned.problem.o()))?;
        // All ones is NaN in every float type: an element that no kernel writes shows.
        o.fill(&self.stream, 0xff)?;
        let o = Arc::new(o);
        let graph = &planned.forward;
        let mut bindings = OwnedBindings::new()
            .buffer(graph.q, &used[0])
            .buffer(graph.k, &used[1])
            .buffer(graph.v, &used[2])
            .buffer(graph.o, &o)
            .value(graph.attn_scale, Scalar::F32(attn_scale));
        let mut stats = None;
        if let Some(id) = graph.stats {
            let elements = usize::try_from(self.problem.stats_elements()).unwrap_or(0);
            let mut buffer = self.buffer(elements * size_of::<f32>())?;
            buffer.fill(&self.stream, 0xff)?;
            let buffer = Arc::new(buffer);
            bindings = bindings.buffer(id, &buffer);
            stats = Some(buffer);
        }
        let start = self.stream.record(true)?;
        let running = launch(&planned.plan, &self.stream, bindings, &scratch)?;
        let end = self.stream.record(true)?;
        running.wait()?;
        end.synchronize()?;
        let compute_ms = f64::from(end.since(&start)?);
        let mut out = call.o;
        if self.is_copied(3) {
            let strided = Arc::new(self.buffer(self.bytes(self.problem.o()))?);
            self.copy(3, &o, &strided, &scratch)?;
            self.download(&strided, &mut out)?;
        } else {
            self.download(&o, &mut out)?;
        }
        if let (Some(buffer), Some(to)) = (stats, call.stats) {
            buffer.download(&self.stream, 0, to)?;
        }
        let engine = planned.plan.engine().map(|c| c.tag()).unwrap_or_default();
        Ok(Report {
            compute_ms,
            copied: planned.copies.iter().map(|c| OPERANDS[c.operand]).collect(),
            engine: format!("{} {engine}", graph.form),
            workspace_bytes: scratch_bytes,
        })
    }
}
