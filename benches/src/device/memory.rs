//! Device memory for one pass, whatever it reads and writes.
#![allow(unsafe_code)]

use crate::setup::Result;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Stream};
use sdpa::AttentionSpec;
use sdpa::cudnn::lower::{Job, Operand};
use sdpa::cudnn::{CudnnExecutor, DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue, Planned, Replay};
use sdpa::expr::{Declared, ParamKind};
use sdpa::{Amax, DType, DeviceAmax, Direction, F8E4M3, F8E5M2, Fp8Scale, packed};

/// Packed documents of the document mask.
const DOCUMENTS: i64 = 8;

/// Everything that one pass is bound to.
pub(crate) struct Memory {
    operands: Vec<(Operand, Buffer)>,
    stats: Option<Buffer>,
    params: Vec<(Declared, Option<Buffer>)>,
    gradients: Vec<(String, Buffer)>,
    /// One f32 each, 16 bytes apart.
    amax: Vec<DeviceAmax<DeviceSlice>>,
    _told: Buffer,
    workspace: Buffer,
}

pub(crate) fn slice(b: &Buffer) -> DeviceSlice {
    DeviceSlice { address: b.address(), bytes: b.bytes() as u64 }
}

/// A short pattern of random numbers, repeated: random enough for rates, and cheap for gigabytes.
pub(crate) fn random(stream: &Stream, dtype: DType, elements: i64, seed: u64) -> Result<Buffer> {
    let mut random = conformance::random::Random::new(seed);
    let piece: Vec<f32> = (0..65_521).map(|_| random.normal() as f32).collect();
    let mut buffer = Buffer::new(stream.device(), dtype.bytes(elements as u64) as usize)?;
    let elements = elements as usize;
    match dtype {
        DType::BF16 => buffer.upload(stream, 0, &repeated(&piece, elements, half::bf16::from_f32))?,
        DType::F16 => buffer.upload(stream, 0, &repeated(&piece, elements, half::f16::from_f32))?,
        DType::F8E4M3 => buffer.upload(stream, 0, &repeated(&piece, elements, |x| F8E4M3::from_f32(x).to_bits()))?,
        DType::F8E5M2 => buffer.upload(stream, 0, &repeated(&piece, elements, |x| F8E5M2::from_f32(x).to_bits()))?,
        // Ones.
        DType::F8E8M0 => buffer.fill(stream, 127)?,
        DType::F32 | DType::I32 | DType::I64 | DType::Bool => buffer.upload(stream, 0, &repeated(&piece, elements, |x| x))?,
    }
    Ok(buffer)
}

fn repeated<T: Copy>(piece: &[f32], elements: usize, of: impl Fn(f32) -> T) -> Vec<T> {
    let piece: Vec<T> = piece.iter().map(|&x| of(x)).collect();
    let mut all = piece.repeat(elements.div_ceil(piece.len()));
    all.truncate(elements);
    all
}

/// Lengths and documents that mean something, seed and offset of dropout, scales of 8-bit floats; anything else is random.
fn param(stream: &Stream, p: &Declared, extents: [i64; 4]) -> Result<Option<Buffer>> {
    let ParamKind::Tensor { axes, dtype } = p.kind else { return Ok(None) };
    let elements = axes.elements(extents);
    if dtype == DType::I32 {
        let last = axes.dims(extents)[2].max(axes.dims(extents)[3]);
        let starts = |document: i64| (document * last + DOCUMENTS - 1) / DOCUMENTS;
        let value = |n: i64| match p.name.as_str() {
            "seq_len_q" => extents[2],
            "seq_len_kv" => extents[3],
            "cu_seqlens" | "cu_seqlens_q" => n * extents[2],
            "cu_seqlens_kv" => n * extents[3],
            // A prime away from one another, as pages of a cache that has been in use are.
            "page_table" => n * 7919 % elements,
            "doc_start" => starts(n % last * DOCUMENTS / last),
            "doc_end" => starts(n % last * DOCUMENTS / last + 1),
            _ => n % last * DOCUMENTS / last,
        };
        let values: Vec<i32> = (0..elements).map(|n| value(n) as i32).collect();
        let mut buffer = Buffer::new(stream.device(), values.len() * 4)?;
        buffer.upload(stream, 0, &values)?;
        return Ok(Some(buffer));
    }
    let directions = [Direction::Forward, Direction::Backward];
    if directions.into_iter().flat_map(Fp8Scale::of).any(|scale| scale.name() == p.name) {
        // Operands are their own scale; weights are not above 1, and gradients of scores are about one over the keys.
        let number = match p.name.as_str() {
            "scale_s" | "scale_dp" => 256.0,
            "descale_s" | "descale_dp" => 1.0 / 256.0,
            _ => 1f32,
        };
        let mut buffer = Buffer::new(stream.device(), 4)?;
        buffer.upload(stream, 0, &[number])?;
        return Ok(Some(buffer));
    }
    if dtype == DType::I64 {
        let mut buffer = Buffer::new(stream.device(), 8 * elements as usize)?;
        buffer.upload(stream, 0, &vec![5i64; elements as usize])?;
        return Ok(Some(buffer));
    }
    if dtype == DType::Bool {
        let mut buffer = Buffer::new(stream.device(), elements as usize)?;
        buffer.upload(stream, 0, &(0..elements).map(|n| u8::from(n % 3 != 0)).collect::<Vec<_>>())?;
        return Ok(Some(buffer));
    }
    Ok(Some(random(stream, dtype, elements, 11)?))
}

impl Memory {
    /// For any plans of the pass that need no more workspace than this.
    pub(crate) fn new(stream: &Stream, planned: &Planned, workspace: u64) -> Result<Memory> {
        Memory::seeded(stream, &planned.job, workspace, 0)
    }

    /// The same for whoever runs the pass, with other numbers.
    pub(crate) fn seeded(stream: &Stream, job: &Job, workspace: u64, seed: u64) -> Result<Memory> {
        let problem = job.problem();
        let mut operands = Vec::new();
        for (n, (operand, tensor)) in job.tensors().enumerate() {
            let tensor = match (problem.packs(operand.side()), problem.paged(), operand) {
                (true, _, _) => packed::memory(&tensor, problem.total(operand.side())),
                (false, Some(paged), Operand::K | Operand::V) => paged.container(&tensor),
                (false, _, _) => tensor,
            };
            operands.push((operand, random(stream, job.dtype_of(operand), tensor.extent().unwrap_or(0), seed * 16 + n as u64 + 1)?));
        }
        let stats = if problem.stats() { Some(random(stream, DType::F32, problem.stats_elements(), 7)?) } else { None };
        let mut params = Vec::new();
        for p in job.params() {
            params.push((p.clone(), param(stream, p, problem.extents())?));
        }
        let mut gradients = Vec::new();
        if let Job::Backward(backward) = job {
            for g in backward.wrt() {
                let bytes = g.dtype.bytes(backward.gradient_elements(&g.name) as u64);
                gradients.push((g.name.clone(), Buffer::new(stream.device(), bytes as usize)?));
            }
        }
        let told = Amax::told(problem, job.direction());
        let numbers = Buffer::new(stream.device(), 16 * told.len().max(1))?;
        let place = |n: usize| DeviceSlice { address: numbers.address() + 16 * n as u64, bytes: 4 };
        let amax = told.iter().enumerate().map(|(n, of)| DeviceAmax::new(*of, place(n))).collect();
        let workspace = Buffer::new(stream.device(), workspace as usize)?;
        Ok(Memory { operands, stats, params, gradients, amax, _told: numbers, workspace })
    }

    /// The same lengths, of queries and keys, for every batch entry, where they are parameters.
    pub(crate) fn set_lengths(&mut self, stream: &Stream, [q, kv]: [i64; 2]) -> Result<()> {
        for (name, length) in [("seq_len_q", q), ("seq_len_kv", kv)] {
            for buffer in self.params.iter_mut().filter(|(p, _)| p.name == name).filter_map(|(_, buffer)| buffer.as_mut()) {
                let values = vec![i32::try_from(length)?; buffer.bytes() / 4];
                buffer.upload(stream, 0, &values)?;
            }
        }
        Ok(())
    }

    /// How long packed documents are, one behind the other from the first token on.
    pub(crate) fn set_documents(&mut self, stream: &Stream, lengths: &[i32]) -> Result<()> {
        let mut boundaries = vec![0];
        boundaries.extend(lengths.iter().scan(0, |at, length| {
            *at += length;
            Some(*at)
        }));
        for buffer in self.params.iter_mut().filter(|(p, _)| p.name.starts_with("cu_seqlens")).filter_map(|(_, buffer)| buffer.as_mut()) {
            buffer.upload(stream, 0, &boundaries)?;
        }
        Ok(())
    }

    /// Outputs and stats of the forward pass: not-a-number takes less power, and so less time.
    pub(crate) fn forward_first(&mut self, executor: &CudnnExecutor, stream: &Stream, spec: &AttentionSpec) -> Result<()> {
        let first = executor.attention(&spec.validate()?)?.0;
        if spec.dtype.is_fp8() {
            return self.narrow_forward_first(executor, stream, &first);
        }
        let workspace = Buffer::new(stream.device(), first.workspace_bytes() as usize)?;
        let handle = executor.library().handle(stream)?;
        // SAFETY: the memory is whole buffers of this device; the stream is waited for before the workspace goes.
        unsafe { self.forward(&first, &handle, slice(&workspace)) }?;
        Ok(stream.synchronize()?)
    }

    /// Scales and amaxes of 8-bit floats are others in either pass: the same operands in memory of its own.
    fn narrow_forward_first(&mut self, executor: &CudnnExecutor, stream: &Stream, first: &Planned) -> Result<()> {
        let own = Memory::new(stream, first, first.workspace_bytes())?;
        let handle = executor.library().handle(stream)?;
        // SAFETY: the memory is whole buffers of this device; the stream is waited for before it goes.
        unsafe { own.submit(first, &handle) }?;
        stream.synchronize()?;
        let o = |(operand, _): &&(Operand, Buffer)| *operand == Operand::O;
        let from = own.operands.iter().find(o).map(|(_, buffer)| buffer).into_iter().chain(&own.stats);
        let to = self
            .operands
            .iter_mut()
            .find(|(operand, _)| *operand == Operand::O)
            .map(|(_, buffer)| buffer)
            .into_iter()
            .chain(&mut self.stats);
        for (from, to) in from.zip(to) {
            let mut bytes = vec![0u8; from.bytes()];
            from.download(stream, 0, &mut bytes)?;
            to.upload(stream, 0, &bytes)?;
        }
        Ok(())
    }

    fn at(&self, operand: Operand) -> DeviceSlice {
        self.operands.iter().find(|(o, _)| *o == operand).map_or(slice(&self.workspace), |(_, b)| slice(b))
    }

    /// The values of parameters.
    pub(crate) fn params(&self) -> Vec<DeviceParam<'_>> {
        let value = |(p, buffer): &'_ (Declared, Option<Buffer>)| match (p.kind, buffer) {
            (ParamKind::Tensor { axes: _, dtype }, Some(b)) => Some(DeviceValue::Tensor(dtype, slice(b))),
            (ParamKind::Scalar, _) => p.default.map(DeviceValue::Scalar),
            (ParamKind::Tensor { .. }, None) => None,
        };
        self.params.iter().filter_map(|p| Some(DeviceParam::new(&p.0.name, value(p)?))).collect()
    }

    /// The workspace that it was made with.
    pub(crate) fn workspace(&self) -> DeviceSlice {
        slice(&self.workspace)
    }

    /// A forward call over it.
    pub(crate) fn forward_call<'a>(
        &'a self,
        params: &'a [DeviceParam<'a>],
        attn_scale: Option<f32>,
        workspace: Option<DeviceSlice>,
    ) -> DeviceForward<'a> {
        let [q, k, v, o] = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| self.at(operand));
        DeviceForward::new(q, k, v, o)
            .stats(self.stats.as_ref().map(slice))
            .attn_scale(attn_scale)
            .params(params)
            .amax(&self.amax)
            .workspace(workspace)
    }

    /// # Safety
    /// The memory and the workspace outlive the call on the stream.
    unsafe fn forward(&self, planned: &Planned, handle: &Handle, workspace: DeviceSlice) -> Result<()> {
        // SAFETY: the caller's.
        Ok(unsafe { planned.forward(handle, &self.forward_call(&self.params(), None, Some(workspace))) }?)
    }

    /// A forward pass whose plans the executor finds by the specification.
    ///
    /// # Safety
    /// The memory outlives the call on the stream.
    pub(crate) unsafe fn functional(&self, executor: &CudnnExecutor, stream: &Stream, spec: &AttentionSpec) -> Result<()> {
        // SAFETY: the caller's.
        Ok(unsafe { executor.sdpa(stream, spec, &self.forward_call(&self.params(), None, None)) }?)
    }

    /// The pass of a replay.
    ///
    /// # Safety
    /// The memory outlives the call on the stream.
    pub(crate) unsafe fn replay(&self, replay: &mut Replay, attn_scale: Option<f32>) -> Result<()> {
        if let Job::Forward(_) = replay.planned().job {
            // SAFETY: the caller's.
            return Ok(unsafe { replay.forward(&self.forward_call(&self.params(), attn_scale, None)) }?);
        }
        let (params, gradients) = (self.params(), self.gradients());
        let call = self.backward_call(&params, &gradients, attn_scale)?.workspace(None);
        // SAFETY: the caller's.
        Ok(unsafe { replay.backward(&call) }?)
    }

    /// Makes everything that a call writes not-a-number.
    pub(crate) fn poison(&mut self, stream: &Stream) -> Result<()> {
        let backward = self.operands.iter().any(|(operand, _)| *operand == Operand::DQ);
        for (operand, buffer) in &mut self.operands {
            if matches!(operand, Operand::DQ | Operand::DK | Operand::DV) || (*operand == Operand::O && !backward) {
                buffer.fill(stream, 0xff)?;
            }
        }
        for (_, buffer) in &mut self.gradients {
            buffer.fill(stream, 0xff)?;
        }
        Ok(())
    }

    /// The bytes of everything that a call writes.
    pub(crate) fn results(&self, stream: &Stream) -> Result<Vec<Vec<u8>>> {
        let mut all = Vec::new();
        let outputs =
            self.operands.iter().filter(|(o, _)| matches!(o, Operand::O | Operand::DQ | Operand::DK | Operand::DV)).map(|(_, b)| b);
        for buffer in outputs.chain(self.gradients.iter().map(|(_, b)| b)) {
            let mut bytes = vec![0u8; buffer.bytes()];
            buffer.download(stream, 0, &mut bytes)?;
            all.push(bytes);
        }
        Ok(all)
    }

    /// Memory for gradients of parameters.
    pub(crate) fn gradients(&self) -> Vec<DeviceGradient<'_>> {
        self.gradients.iter().map(|(name, b)| DeviceGradient::new(name, slice(b))).collect()
    }

    /// # Safety
    /// The memory outlives the call on the stream.
    pub(crate) unsafe fn submit(&self, planned: &Planned, handle: &Handle) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.submit_scaled(planned, handle, None) }
    }

    /// # Safety
    /// The memory outlives the call on the stream.
    pub(crate) unsafe fn submit_scaled(&self, planned: &Planned, handle: &Handle, attn_scale: Option<f32>) -> Result<()> {
        let params = self.params();
        if let Job::Forward(_) = planned.job {
            // SAFETY: the caller's.
            return Ok(unsafe { planned.forward(handle, &self.forward_call(&params, attn_scale, Some(slice(&self.workspace)))) }?);
        }
        // SAFETY: the caller's.
        Ok(unsafe { planned.backward(handle, &self.backward_call(&params, &self.gradients(), attn_scale)?) }?)
    }

    /// A backward call over it.
    pub(crate) fn backward_call<'a>(
        &'a self,
        params: &'a [DeviceParam<'a>],
        gradients: &'a [DeviceGradient<'a>],
        attn_scale: Option<f32>,
    ) -> Result<DeviceBackward<'a>> {
        let Some(stats) = self.stats.as_ref().map(slice) else { return Err("the backward pass reads stats".into()) };
        Ok(DeviceBackward::new(
            (self.at(Operand::Q), self.at(Operand::K), self.at(Operand::V)),
            (self.at(Operand::O), stats),
            self.at(Operand::DO),
            (self.at(Operand::DQ), self.at(Operand::DK), self.at(Operand::DV)),
        )
        .attn_scale(attn_scale)
        .params(params)
        .gradients(gradients)
        .amax(&self.amax)
        .workspace(slice(&self.workspace)))
    }
}
