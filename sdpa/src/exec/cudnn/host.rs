//! Attention over host memory: up, run, down.

use super::guard;
use super::plan::Planned;
use super::raw::DeviceForward;
use crate::error::Error;
use crate::exec::{Prepared, Report};
use crate::problem::Problem;
use crate::spec::TensorSpec;
use crate::tensor::{Elements, ElementsMut, HostForward};
use cudnn_graph::{Buffer, DeviceSlice, Library, Stream};
use std::sync::Arc;

/// A problem made ready on a GPU.
#[derive(Debug)]
pub struct CudnnPrepared {
    library: &'static Library,
    problem: Problem,
    planned: Arc<Planned>,
    stream: Stream,
}

impl CudnnPrepared {
    pub(crate) fn new(library: &'static Library, problem: Problem, planned: Arc<Planned>, stream: Stream) -> CudnnPrepared {
        CudnnPrepared { library, problem, planned, stream }
    }

    /// The plans.
    pub fn planned(&self) -> &Arc<Planned> {
        &self.planned
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer, Error> {
        Ok(Buffer::new(self.stream.device(), usize::try_from(bytes).unwrap_or(usize::MAX))?)
    }

    fn bytes(&self, tensor: &TensorSpec) -> u64 {
        extent(tensor) as u64 * u64::from(self.problem.dtype().bits() / 8)
    }

    fn upload(&self, tensor: &TensorSpec, data: &Elements<'_>) -> Result<Buffer, Error> {
        let mut buffer = self.buffer(self.bytes(tensor))?;
        let elements = extent(tensor);
        match data {
            Elements::F32(x) => buffer.upload(&self.stream, 0, &x[..elements]),
            Elements::F16(x) => buffer.upload(&self.stream, 0, &x[..elements]),
            Elements::BF16(x) => buffer.upload(&self.stream, 0, &x[..elements]),
        }?;
        Ok(buffer)
    }

    fn download(&self, buffer: &Buffer, data: &mut ElementsMut<'_>) -> Result<(), Error> {
        let o = self.problem.o();
        match data {
            ElementsMut::F32(x) => scatter(o, x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::F16(x) => scatter(o, x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::BF16(x) => scatter(o, x, |to| buffer.download(&self.stream, 0, to)),
        }?;
        Ok(())
    }
}

fn extent(tensor: &TensorSpec) -> usize {
    usize::try_from(tensor.extent().unwrap_or(0)).unwrap_or(0)
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

/// Downloads a strided tensor and keeps what lies between its elements.
fn scatter<T: Copy + Default>(
    tensor: &TensorSpec,
    to: &mut [T],
    download: impl FnOnce(&mut [T]) -> Result<(), cudnn_graph::Error>,
) -> Result<(), cudnn_graph::Error> {
    let extent = extent(tensor);
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
        let [q, k, v] = [(&call.q, 0), (&call.k, 1), (&call.v, 2)].map(|(data, n)| self.upload(&self.problem.tensors()[n], data));
        let (q, k, v) = (q?, k?, v?);
        let workspace = self.buffer(self.planned.workspace_bytes())?;
        let mut o = self.buffer(self.bytes(self.problem.o()))?;
        // All ones is NaN in every float type: an element that no kernel writes shows.
        o.fill(&self.stream, 0xff)?;
        let mut stats = None;
        if self.problem.stats() {
            let bytes = u64::try_from(self.problem.stats_elements()).unwrap_or(0) * size_of::<f32>() as u64;
            let mut buffer = self.buffer(bytes)?;
            buffer.fill(&self.stream, 0xff)?;
            stats = Some(buffer);
        }
        let device = DeviceForward {
            q: slice(&q),
            k: slice(&k),
            v: slice(&v),
            o: slice(&o),
            stats: stats.as_ref().map(slice),
            attn_scale: Some(attn_scale),
            workspace: slice(&workspace),
        };
        let handle = self.library.handle(&self.stream)?;
        let start = self.stream.record(true)?;
        // SAFETY: every slice is a whole buffer of the stream's device that lives until the stream has been waited for, also
        // where this returns early: freeing device memory waits for what uses it.
        #[allow(unsafe_code, reason = "host memory in, host memory out: the raw tier's contract is kept here")]
        let submitted = unsafe { self.planned.forward(&handle, &device) };
        let end = self.stream.record(true)?;
        self.stream.synchronize()?;
        submitted?;
        let mut out = call.o;
        self.download(&o, &mut out)?;
        if let (Some(buffer), Some(to)) = (stats, call.stats) {
            buffer.download(&self.stream, 0, to)?;
        }
        let engine = self.planned.plan.engine().map(|c| c.tag()).unwrap_or_default();
        Ok(Report {
            compute_ms: f64::from(end.since(&start)?),
            copied: self.planned.copied(),
            engine: format!("{} {engine}", self.planned.forward.form),
            workspace_bytes: self.planned.workspace_bytes(),
        })
    }
}
