//! Attention over host memory: upload, run, download.

use crate::job::Job;
use sdpa_core::device::{DeviceCall, DeviceGradient, DeviceParam, DeviceParams, DeviceValue, OnDevice, with_defaults};
use sdpa_core::error::{Error, SpecError, SpecErrors};
use sdpa_core::executor::{Prepared, PreparedBackward, Report};
use sdpa_core::host::{HostBackward, HostCall, HostForward, HostMemory, HostStats};
use sdpa_core::spec::TensorSpec;
use sdpa_core::tensor::{Elements, ElementsMut, Param, ParamValue};
use sdpa_core::{DType, DeviceAmax, F8E4M3, F8E5M2, Operand, Side, packed};
use sdpa_driver::{Buffer, DeviceSlice, Event, Stream};
use std::ops::Range;
use std::time::Duration;

/// A pass prepared on a GPU, for callers with host memory. Each call uploads operands, runs the pass, and downloads results. The type
/// implements [`Prepared`] and [`PreparedBackward`].
#[derive(Debug)]
pub struct Hosted {
    job: Job,
    ready: OnDevice<DeviceSlice, Stream>,
    stream: Stream,
    failed: fn(sdpa_driver::Error) -> Error,
}

/// Declared tensors in device memory, in the order of the call; `None` for scalars.
type Uploaded = Vec<Option<(DType, Buffer)>>;

impl Hosted {
    /// Wraps the prepared pass `ready`, which runs on `stream`. Nothing else may use this stream. `failed` converts a driver error to an
    /// error of the executor.
    pub fn new(job: Job, ready: OnDevice<DeviceSlice, Stream>, stream: Stream, failed: fn(sdpa_driver::Error) -> Error) -> Hosted {
        Hosted { job, ready, stream, failed }
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer, sdpa_driver::Error> {
        Buffer::new(self.stream.device(), usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    fn upload(&self, place: &Place, data: &Elements<'_>) -> Result<Buffer, sdpa_driver::Error> {
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

    /// Allocates a result, or workspace, filled with ones. These are NaN in every float type, so an element that no kernel writes is visible.
    fn result(&self, bytes: u64) -> Result<Buffer, sdpa_driver::Error> {
        let mut buffer = self.buffer(bytes)?;
        buffer.fill(&self.stream, 0xff)?;
        Ok(buffer)
    }

    fn upload_params(&self, params: &[Param<'_>]) -> Result<Uploaded, sdpa_driver::Error> {
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
                ParamValue::F8E8M0(x) => buffer.upload(&self.stream, 0, &x.iter().map(|x| x.to_bits()).collect::<Vec<u8>>())?,
            }
            Ok(Some((dtype, buffer)))
        };
        params.iter().map(up).collect()
    }

    fn download(&self, place: &Place, buffer: &Buffer, data: &mut ElementsMut<'_>) -> Result<(), sdpa_driver::Error> {
        match data {
            ElementsMut::F32(x) => place.scatter(x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::F16(x) => place.scatter(x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::BF16(x) => place.scatter(x, |to| buffer.download(&self.stream, 0, to)),
            ElementsMut::F8E4M3(x) => place.scatter(x, |to| self.bytes_down(buffer, to, F8E4M3::from_bits)),
            ElementsMut::F8E5M2(x) => place.scatter(x, |to| self.bytes_down(buffer, to, F8E5M2::from_bits)),
        }?;
        Ok(())
    }

    fn bytes_down<T>(&self, buffer: &Buffer, to: &mut [T], made: fn(u8) -> T) -> Result<(), sdpa_driver::Error> {
        let mut bytes = vec![0u8; to.len()];
        buffer.download(&self.stream, 0, &mut bytes)?;
        to.iter_mut().zip(bytes).for_each(|(to, bits)| *to = made(bits));
        Ok(())
    }

    /// Submits a call over buffers of this device, waits for it, and returns the time.
    fn submit(&self, call: &DeviceCall<'_, DeviceSlice>) -> Result<Duration, Error> {
        let start: Event = self.stream.record(true).map_err(self.failed)?;
        // SAFETY: every slice is a whole buffer of the stream's device that lives until the stream was waited for. After an early return, freeing
        // device memory waits for work that uses it.
        #[allow(unsafe_code, reason = "host memory in, host memory out: the device tier's contract is kept here")]
        let submitted = unsafe { self.ready.submit(&self.stream, call) };
        let end = self.stream.record(true).map_err(self.failed)?;
        self.stream.synchronize().map_err(self.failed)?;
        submitted?;
        Ok(Duration::from_secs_f32(end.since(&start).map_err(self.failed)? / 1e3))
    }

    fn report(&self, compute: Duration) -> Report {
        let ready = &self.ready;
        Report::new(ready.engine(), compute).with_copied(ready.copied()).with_workspace_bytes(ready.workspace_bytes())
    }
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

fn device_params<'a>(params: &[Param<'a>], uploaded: &Uploaded) -> DeviceParams<'a, DeviceSlice> {
    let value = |(p, up): (&Param<'a>, &Option<(DType, Buffer)>)| match (p.value, up) {
        (_, Some((dtype, buffer))) => DeviceParam::new(p.name, DeviceValue::Tensor(*dtype, slice(buffer))),
        (ParamValue::Scalar(x), None) => DeviceParam::new(p.name, DeviceValue::Scalar(x)),
        (
            ParamValue::F32(_)
            | ParamValue::F16(_)
            | ParamValue::BF16(_)
            | ParamValue::I32(_)
            | ParamValue::I64(_)
            | ParamValue::Bool(_)
            | ParamValue::F8E8M0(_),
            None,
        ) => DeviceParam::new(p.name, DeviceValue::Scalar(f32::NAN)),
    };
    params.iter().zip(uploaded).map(value).collect()
}

/// The layout of a tensor in host memory, and its rows.
struct Place {
    tensor: TensorSpec,
    rows: Vec<Range<usize>>,
}

impl Place {
    /// Returns the layout of a tensor; packed sequences count as one batch entry.
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
        // A tensor without elements needs an address too.
        dtype.bytes(self.elements().max(1) as u64)
    }

    /// Downloads the tensor and keeps the gaps between its elements.
    fn scatter<T: Copy + Default>(
        &self,
        to: &mut [T],
        download: impl FnOnce(&mut [T]) -> Result<(), sdpa_driver::Error>,
    ) -> Result<(), sdpa_driver::Error> {
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

/// Returns the error of a plan for the other direction.
fn other_pass() -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new(
        "pass",
        "a call of the other direction",
        "a forward call for a forward plan, or a backward call for a backward plan",
    )]))
}

impl Prepared for Hosted {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error> {
        let Job::Forward(problem) = &self.job else { return Err(other_pass()) };
        let attn_scale = call.check(problem)?;
        self.run(call.into(), attn_scale)
    }
}

impl PreparedBackward for Hosted {
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, Error> {
        let Job::Backward(problem) = &self.job else { return Err(other_pass()) };
        let attn_scale = call.check(problem)?;
        self.run(call.into(), attn_scale)
    }
}

impl Hosted {
    /// Runs either pass of a checked call.
    fn run(&self, call: HostCall<'_>, attn_scale: f32) -> Result<Report, Error> {
        let problem = self.job.problem();
        let failed = self.failed;
        let documents = problem.documents(call.params)?;
        // Paged keys are uploaded as a whole pool of pages, even if queries are packed.
        let of = |side: Side| documents.as_ref().filter(|_| problem.packs(side)).map(|documents| documents.of(side));
        let place = |operand: Operand| Ok::<_, Error>(Place::new(&self.tensor(operand)?, of(operand.side())));
        let mut operands: [Option<Buffer>; Operand::ALL.len()] = std::array::from_fn(|_| None);
        for (operand, memory) in &call.operands {
            let place = place(*operand)?;
            let buffer = match memory {
                HostMemory::Read(data) => self.upload(&place, data).map_err(failed)?,
                HostMemory::Write(data) => self.result(place.bytes(data.dtype())).map_err(failed)?,
            };
            operands[*operand as usize] = Some(buffer);
        }
        let stats = match &call.stats {
            HostStats::None => None,
            HostStats::Read(x) => {
                let mut buffer = self.buffer(size_of_val(*x).max(4) as u64).map_err(failed)?;
                buffer.upload(&self.stream, 0, x).map_err(failed)?;
                Some(buffer)
            }
            HostStats::Write(x) => Some(self.result(size_of_val(*x).max(4) as u64).map_err(failed)?),
        };
        let written = |x: &Option<&mut [f32]>| x.as_ref().map(|x| self.result(size_of_val(*x).max(4) as u64)).transpose();
        let [row_max, sum_exp] = [written(&call.row_max).map_err(failed)?, written(&call.sum_exp).map_err(failed)?];
        let uploaded = self.upload_params(call.params).map_err(failed)?;
        let params = with_defaults(self.job.params(), device_params(call.params, &uploaded));
        let mut gradients = Vec::new();
        for g in &call.gradients {
            gradients.push((g.name, self.result(g.data.dtype().bytes(g.data.len() as u64)).map_err(failed)?));
        }
        let device_gradients: Vec<DeviceGradient<'_, DeviceSlice>> =
            gradients.iter().map(|(name, buffer)| DeviceGradient::new(name, slice(buffer))).collect();
        let mut told = Vec::new();
        for amax in &call.amax {
            told.push((amax.of, self.result(size_of::<f32>() as u64).map_err(failed)?));
        }
        let amax: Vec<DeviceAmax<DeviceSlice>> = told.iter().map(|(of, buffer)| DeviceAmax::new(*of, slice(buffer))).collect();
        let workspace = self.result(self.ready.workspace_bytes()).map_err(failed)?;
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
                self.download(&place(operand)?, buffer, &mut data).map_err(failed)?;
            }
        }
        let of_rows = Place::new(&problem.stats_tensor(), of(Side::Queries));
        let stats_to = match call.stats {
            HostStats::Write(to) => Some(to),
            HostStats::None | HostStats::Read(_) => None,
        };
        for pair in [(stats_to, &stats), (call.row_max, &row_max), (call.sum_exp, &sum_exp)] {
            let (Some(to), Some(buffer)) = pair else { continue };
            of_rows.scatter(to, |to| buffer.download(&self.stream, 0, to)).map_err(failed)?;
        }
        for ((_, buffer), given) in gradients.iter().zip(call.gradients) {
            match given.data {
                ElementsMut::F32(x) => buffer.download(&self.stream, 0, x),
                ElementsMut::F16(x) => buffer.download(&self.stream, 0, x),
                ElementsMut::BF16(x) => buffer.download(&self.stream, 0, x),
                ElementsMut::F8E4M3(x) => self.bytes_down(buffer, x, F8E4M3::from_bits),
                ElementsMut::F8E5M2(x) => self.bytes_down(buffer, x, F8E5M2::from_bits),
            }
            .map_err(failed)?;
        }
        for ((_, buffer), given) in told.iter().zip(call.amax) {
            buffer.download(&self.stream, 0, std::slice::from_mut(given.value)).map_err(failed)?;
        }
        Ok(self.report(compute))
    }

    fn tensor(&self, operand: Operand) -> Result<TensorSpec, Error> {
        self.job.in_memory(operand).ok_or_else(other_pass)
    }
}
