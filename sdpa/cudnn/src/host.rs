//! Attention over host memory: up, run, down.

use super::guard;
use super::plan::Planned;
use super::raw::{DeviceCall, DeviceGradient, DeviceParam, DeviceValue};
use crate::error::Error;
use crate::lower::Job;
use cudnn_graph::{Buffer, DeviceSlice, Event, Library, Stream};
use sdpa_core::device::{DeviceParams, with_defaults};
use sdpa_core::error::{SpecError, SpecErrors};
use sdpa_core::executor::{Prepared, PreparedBackward, Report};
use sdpa_core::host::{HostBackward, HostCall, HostForward, HostMemory, HostStats};
use sdpa_core::spec::TensorSpec;
use sdpa_core::tensor::{Elements, ElementsMut, Param, ParamValue};
use sdpa_core::{DType, DeviceAmax, F8E4M3, F8E5M2, Operand, Side, packed};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A pass made ready on a GPU.
#[derive(Debug)]
pub struct CudnnPrepared {
    library: &'static Library,
    job: Job,
    planned: Arc<Planned>,
    stream: Stream,
}

/// Declared tensors in device memory, in the order of the call; `None` for scalars.
type Uploaded = Vec<Option<(DType, Buffer)>>;

impl CudnnPrepared {
    pub(crate) fn new(library: &'static Library, job: Job, planned: Arc<Planned>, stream: Stream) -> CudnnPrepared {
        CudnnPrepared { library, job, planned, stream }
    }

    /// The plans that calls run.
    pub fn planned(&self) -> &Arc<Planned> {
        &self.planned
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer, Error> {
        Ok(Buffer::new(self.stream.device(), usize::try_from(bytes).unwrap_or(usize::MAX))?)
    }

    fn upload(&self, place: &Place, data: &Elements<'_>) -> Result<Buffer, Error> {
        let mut buffer = self.buffer(place.bytes(data.dtype()))?;
        let elements = place.elements();
        match data {
            Elements::F32(x) => buffer.upload(&self.stream, 0, &x[..elements]),
            Elements::F16(x) => buffer.upload(&self.stream, 0, &x[..elements]),
            Elements::BF16(x) => buffer.upload(&self.stream, 0, &x[..elements]),
            Elements::F8E4M3(x) => buffer.upload(&self.stream, 0, &x[..elements].iter().map(|x| x.to_bits()).collect::<Vec<u8>>()),
            Elements::F8E5M2(x) => buffer.upload(&self.stream, 0, &x[..elements].iter().map(|x| x.to_bits()).collect::<Vec<u8>>()),
        }?;
        Ok(buffer)
    }

    /// A result, or workspace. All ones is NaN in every float type: an element that no kernel writes shows.
    fn result(&self, bytes: u64) -> Result<Buffer, Error> {
        let mut buffer = self.buffer(bytes)?;
        buffer.fill(&self.stream, 0xff)?;
        Ok(buffer)
    }

    fn upload_params(&self, params: &[Param<'_>]) -> Result<Uploaded, Error> {
        let up = |p: &Param<'_>| {
            let Some(dtype) = p.value.dtype() else { return Ok(None) };
            let mut buffer = self.buffer(dtype.bytes(p.value.elements() as u64))?;
            match p.value {
                ParamValue::Scalar(_) => {}
                ParamValue::F32(x) => buffer.upload(&self.stream, 0, x)?,
                ParamValue::F16(x) => buffer.upload(&self.stream, 0, x)?,
                ParamValue::BF16(x) => buffer.upload(&self.stream, 0, x)?,
                ParamValue::I32(x) => buffer.upload(&self.stream, 0, x)?,
                ParamValue::I64(x) => buffer.upload(&self.stream, 0, x)?,
                ParamValue::Bool(x) => {
                    let bytes: Vec<u8> = x.iter().map(|&b| u8::from(b)).collect();
                    buffer.upload(&self.stream, 0, &bytes)?;
                }
            }
            Ok(Some((dtype, buffer)))
        };
        params.iter().map(up).collect()
    }

    fn download(&self, place: &Place, buffer: &Buffer, data: &mut ElementsMut<'_>) -> Result<(), Error> {
        match data {
            ElementsMut::F32(x) => place.scatter(x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::F16(x) => place.scatter(x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::BF16(x) => place.scatter(x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::F8E4M3(x) => place.scatter(x, |to| self.bytes_down(buffer, to, F8E4M3::from_bits)),
            ElementsMut::F8E5M2(x) => place.scatter(x, |to| self.bytes_down(buffer, to, F8E5M2::from_bits)),
        }?;
        Ok(())
    }

    fn bytes_down<T>(&self, buffer: &Buffer, to: &mut [T], made: fn(u8) -> T) -> Result<(), cudnn_graph::Error> {
        let mut bytes = vec![0u8; to.len()];
        buffer.download(&self.stream, 0, &mut bytes)?;
        to.iter_mut().zip(bytes).for_each(|(to, bits)| *to = made(bits));
        Ok(())
    }

    /// Submits a call over buffers of this device, and waits for it; the time between.
    fn submit(&self, call: &DeviceCall<'_>) -> Result<Duration, Error> {
        let handle = self.library.handle(&self.stream)?;
        let start: Event = self.stream.record(true)?;
        // SAFETY: every slice is a whole buffer of the stream's device that lives until the stream has been waited for, also
        // where this returns early: freeing device memory waits for what uses it.
        #[allow(unsafe_code, reason = "host memory in, host memory out: the raw tier's contract is kept here")]
        let submitted = unsafe { self.planned.submit(&handle, call) };
        let end = self.stream.record(true)?;
        self.stream.synchronize()?;
        submitted?;
        Ok(Duration::from_secs_f32(end.since(&start)? / 1e3))
    }

    fn report(&self, compute: Duration) -> Report {
        let engine = &self.planned.engine;
        Report {
            compute,
            copied: self.planned.copied(),
            engine: format!("{} {engine}", self.planned.lowered.form),
            workspace_bytes: self.planned.workspace_bytes(),
        }
    }
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

fn device_params<'a>(params: &[Param<'a>], uploaded: &Uploaded) -> DeviceParams<'a, DeviceSlice> {
    let value = |(p, up): (&Param<'a>, &Option<(DType, Buffer)>)| match (p.value, up) {
        (_, Some((dtype, buffer))) => DeviceParam { name: p.name, value: DeviceValue::Tensor(*dtype, slice(buffer)) },
        (ParamValue::Scalar(x), None) => DeviceParam { name: p.name, value: DeviceValue::Scalar(x) },
        (
            ParamValue::F32(_) | ParamValue::F16(_) | ParamValue::BF16(_) | ParamValue::I32(_) | ParamValue::I64(_) | ParamValue::Bool(_),
            None,
        ) => DeviceParam { name: p.name, value: DeviceValue::Scalar(f32::NAN) },
    };
    params.iter().zip(uploaded).map(value).collect()
}

/// Where a tensor lies in host memory, and which of its rows are there.
struct Place {
    tensor: TensorSpec,
    rows: Vec<Range<usize>>,
}

impl Place {
    /// Of packed documents, all of them as one batch entry.
    fn new(tensor: &TensorSpec, documents: Option<&[Range<usize>]>) -> Place {
        match documents {
            Some(documents) => {
                let end = documents.last().map_or(0, |last| last.end);
                Place { tensor: packed::memory(tensor, end as i64), rows: documents.to_vec() }
            }
            None => Place { tensor: *tensor, rows: std::iter::once(0..tensor.dims[2] as usize).collect() },
        }
    }

    fn elements(&self) -> usize {
        if self.tensor.dims[2] == 0 { 0 } else { usize::try_from(self.tensor.extent().unwrap_or(0)).unwrap_or(0) }
    }

    fn bytes(&self, dtype: DType) -> u64 {
        // A tensor without elements has an address too.
        dtype.bytes(self.elements().max(1) as u64)
    }

    /// Downloads it and keeps what lies between its elements.
    fn scatter<T: Copy + Default>(
        &self,
        to: &mut [T],
        download: impl FnOnce(&mut [T]) -> Result<(), cudnn_graph::Error>,
    ) -> Result<(), cudnn_graph::Error> {
        let (elements, [batches, heads, seq, dim]) = (self.elements(), self.tensor.dims.map(|d| d as usize));
        let strides = self.tensor.strides.map(|s| s as usize);
        if batches * heads * seq * dim == elements && self.rows.iter().map(Range::len).sum::<usize>() == seq {
            return download(&mut to[..elements]);
        }
        let mut all = vec![T::default(); elements];
        download(&mut all)?;
        for b in 0..batches {
            for h in 0..heads {
                for s in self.rows.iter().cloned().flatten() {
                    let at = b * strides[0] + h * strides[1] + s * strides[2];
                    to[at..at + dim].copy_from_slice(&all[at..at + dim]);
                }
            }
        }
        Ok(())
    }
}

/// A plan of the other direction.
fn other_pass() -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new("pass", "the other one", "what was prepared")]))
}

impl Prepared for CudnnPrepared {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, sdpa_core::Error> {
        let Job::Forward(problem) = &self.job else { return Err(other_pass().into()) };
        let attn_scale = call.check(problem)?;
        Ok(self.run(call.into(), attn_scale)?)
    }
}

impl PreparedBackward for CudnnPrepared {
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, sdpa_core::Error> {
        let Job::Backward(problem) = &self.job else { return Err(other_pass().into()) };
        let attn_scale = call.check(problem)?;
        Ok(self.run(call.into(), attn_scale)?)
    }
}

impl CudnnPrepared {
    /// Either pass, of a call that was checked.
    fn run(&self, call: HostCall<'_>, attn_scale: f32) -> Result<Report, Error> {
        guard::check_scale(attn_scale)?;
        let problem = self.job.problem();
        let documents = problem.documents(call.params)?;
        let of = |side: Side| documents.as_ref().map(|documents| documents.of(side));
        let place = |operand: Operand| Ok::<_, Error>(Place::new(&self.tensor(operand)?, of(operand.side())));
        let mut operands: [Option<Buffer>; Operand::ALL.len()] = std::array::from_fn(|_| None);
        for (operand, memory) in &call.operands {
            let place = place(*operand)?;
            let buffer = match memory {
                HostMemory::Read(data) => self.upload(&place, data)?,
                HostMemory::Write(data) => self.result(place.bytes(data.dtype()))?,
            };
            operands[*operand as usize] = Some(buffer);
        }
        let stats = match &call.stats {
            HostStats::None => None,
            HostStats::Read(x) => {
                let mut buffer = self.buffer(size_of_val(*x).max(4) as u64)?;
                buffer.upload(&self.stream, 0, x)?;
                Some(buffer)
            }
            HostStats::Write(x) => Some(self.result(size_of_val(*x).max(4) as u64)?),
        };
        let written = |x: &Option<&mut [f32]>| x.as_ref().map(|x| self.result(size_of_val(*x).max(4) as u64)).transpose();
        let [row_max, sum_exp] = [written(&call.row_max)?, written(&call.sum_exp)?];
        let uploaded = self.upload_params(call.params)?;
        let params = with_defaults(self.job.params(), device_params(call.params, &uploaded));
        let mut gradients = Vec::new();
        for g in &call.gradients {
            gradients.push((g.name, self.result(g.data.dtype().bytes(g.data.len() as u64))?));
        }
        let device_gradients: Vec<DeviceGradient<'_>> =
            gradients.iter().map(|(name, buffer)| DeviceGradient { name, slice: slice(buffer) }).collect();
        let mut told = Vec::new();
        for amax in &call.amax {
            told.push((amax.of, self.result(size_of::<f32>() as u64)?));
        }
        let amax: Vec<DeviceAmax<DeviceSlice>> = told.iter().map(|(of, buffer)| DeviceAmax { of: *of, slice: slice(buffer) }).collect();
        let workspace = self.result(self.planned.workspace_bytes())?;
        let device = DeviceCall {
            operands: operands.each_ref().map(|buffer| buffer.as_ref().map(slice)),
            stats: stats.as_ref().map(slice),
            row_max: row_max.as_ref().map(slice),
            sum_exp: sum_exp.as_ref().map(slice),
            amax: &amax,
            attn_scale: Some(attn_scale),
            params: &params,
            gradients: &device_gradients,
            workspace: Some(slice(&workspace)),
        };
        let compute = self.submit(&device)?;
        for (operand, memory) in call.operands {
            if let (HostMemory::Write(mut data), Some(buffer)) = (memory, &operands[operand as usize]) {
                self.download(&place(operand)?, buffer, &mut data)?;
            }
        }
        let of_rows = Place::new(&problem.stats_tensor(), of(Side::Queries));
        let stats_to = match call.stats {
            HostStats::Write(to) => Some(to),
            HostStats::None | HostStats::Read(_) => None,
        };
        for pair in [(stats_to, &stats), (call.row_max, &row_max), (call.sum_exp, &sum_exp)] {
            let (Some(to), Some(buffer)) = pair else { continue };
            of_rows.scatter(to, |to| buffer.download(&self.stream, 0, to))?;
        }
        for ((_, buffer), given) in gradients.iter().zip(call.gradients) {
            match given.data {
                ElementsMut::F32(x) => buffer.download(&self.stream, 0, x),
                ElementsMut::F16(x) => buffer.download(&self.stream, 0, x),
                ElementsMut::BF16(x) => buffer.download(&self.stream, 0, x),
                ElementsMut::F8E4M3(x) => self.bytes_down(buffer, x, F8E4M3::from_bits),
                ElementsMut::F8E5M2(x) => self.bytes_down(buffer, x, F8E5M2::from_bits),
            }?;
        }
        for ((_, buffer), given) in told.iter().zip(call.amax) {
            buffer.download(&self.stream, 0, std::slice::from_mut(given.value))?;
        }
        Ok(self.report(compute))
    }

    fn tensor(&self, operand: Operand) -> Result<TensorSpec, Error> {
        self.job.in_memory(operand).ok_or_else(other_pass)
    }
}
