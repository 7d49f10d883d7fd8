//! Device time of problems that are read from standard input, one JSON object a line, answered by one a line: a script can take
//! turns between this and others in one run.
#![allow(unsafe_code)]

use crate::setup::{Result, executor, median};
use cudnn_graph::{Buffer, DType, DeviceSlice, Event, Stream};
use sdpa::exec::cudnn::{
    CudnnExecutor, CudnnOptions, DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue, PlanOptions, Planned,
};
use sdpa::expr::{Declared, ParamKind};
use sdpa::lower::{Form, Job, Operand};
use sdpa::{AttentionSpec, Layout, Shape};
use serde::{Deserialize, Serialize};
use std::io::BufRead;

const WARM: usize = 5;
const RUNS: usize = 20;
/// Packed documents of the document mask.
const DOCUMENTS: i64 = 8;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    shape: Shape,
    dtype: DType,
    layout: Layout,
    #[serde(default)]
    score_mod: Vec<String>,
    #[serde(default)]
    mask: Vec<String>,
    #[serde(default)]
    backward: bool,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    wrt: Vec<String>,
    /// `composite` or `unified`; else the better one.
    #[serde(default)]
    form: Option<Form>,
}

#[derive(Serialize)]
struct Answer {
    ms: f64,
    tflops: f64,
    engine: String,
    workspace: u64,
}

pub(crate) fn run() -> Result<()> {
    let usual = executor(PlanOptions::default())?;
    let unified = CudnnExecutor::new(options(Form::Unified))?;
    let composite = CudnnExecutor::new(options(Form::Composite))?;
    let stream = usual.device().stream()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = serde_json::from_str(&line).map_err(Into::into).and_then(|question: Question| {
            let executor = match question.form {
                None => &usual,
                Some(Form::Unified) => &unified,
                Some(Form::Composite) => &composite,
            };
            answer(executor, &stream, &question)
        });
        match answer {
            Ok(answer) => println!("{}", serde_json::to_string(&answer)?),
            Err(e) => println!("{}", serde_json::json!({ "refused": e.to_string() })),
        }
    }
    Ok(())
}

fn options(form: Form) -> CudnnOptions {
    CudnnOptions { plan: PlanOptions { form: Some(form), ..PlanOptions::default() }, ..CudnnOptions::default() }
}

fn answer(executor: &CudnnExecutor, stream: &Stream, question: &Question) -> Result<Answer> {
    let mut spec = AttentionSpec::dense(question.dtype, question.shape, question.layout);
    for text in &question.score_mod {
        spec = spec.score_mod(text.parse()?);
    }
    for text in &question.mask {
        spec = spec.mask(text.parse()?);
    }
    spec.stats = question.backward;
    let mut backward = spec.backward();
    backward.deterministic = question.deterministic;
    for name in &question.wrt {
        backward = backward.wrt(name, question.dtype);
    }
    let forward = spec.validate()?;
    let (first, _) = executor.attention(&forward)?;
    let (planned, flops) = if question.backward {
        let problem = backward.validate()?;
        (executor.attention_backward(&problem)?.0, problem.flops())
    } else {
        (first.clone(), forward.flops())
    };
    let call = Memory::new(stream, &planned)?;
    let handle = executor.library().handle(stream)?;
    if question.backward {
        // Real outputs and stats: not-a-number takes less power, and so less time.
        let workspace = Buffer::new(stream.device(), first.workspace_bytes() as usize)?;
        // SAFETY: as below; the stream is waited for before the workspace goes.
        unsafe { call.forward(&first, &handle, slice(&workspace)) }?;
        stream.synchronize()?;
    }
    let mut times = Vec::new();
    for round in 0..WARM + RUNS {
        let start: Event = stream.record(true)?;
        // SAFETY: the memory is whole buffers of this device that outlive the loop; the stream is waited for below.
        unsafe { call.submit(&planned, &handle) }?;
        let end = stream.record(true)?;
        end.synchronize()?;
        if round >= WARM {
            times.push(f64::from(end.since(&start)?));
        }
    }
    let ms = median(times);
    let engine = &planned.engine;
    Ok(Answer { ms, tflops: flops / ms / 1e9, engine: format!("{} {engine}", planned.lowered.form), workspace: planned.workspace_bytes() })
}

/// Everything that one pass is bound to.
struct Memory {
    operands: Vec<(Operand, Buffer)>,
    stats: Option<Buffer>,
    params: Vec<(Declared, Option<Buffer>)>,
    gradients: Vec<(String, Buffer)>,
    workspace: Buffer,
}

pub(crate) fn slice(b: &Buffer) -> DeviceSlice {
    DeviceSlice { address: b.address(), bytes: b.bytes() as u64 }
}

/// A short pattern of random numbers, repeated: random enough for rates, and cheap for gigabytes.
pub(crate) fn random(stream: &Stream, dtype: DType, elements: i64, seed: u64) -> Result<Buffer> {
    let mut random = conformance::random::Random::new(seed);
    let piece: Vec<f32> = (0..65_521).map(|_| random.normal() as f32).collect();
    let all = piece.iter().cycle().take(elements as usize);
    let mut buffer = Buffer::new(stream.device(), dtype.bytes(elements as u64) as usize)?;
    if dtype == DType::BF16 {
        buffer.upload(stream, 0, &all.map(|&x| half::bf16::from_f32(x)).collect::<Vec<_>>())?;
    } else if dtype == DType::F16 {
        buffer.upload(stream, 0, &all.map(|&x| half::f16::from_f32(x)).collect::<Vec<_>>())?;
    } else {
        buffer.upload(stream, 0, &all.copied().collect::<Vec<f32>>())?;
    }
    Ok(buffer)
}

/// Lengths and documents that mean something; anything else is random.
fn param(stream: &Stream, p: &Declared, extents: [i64; 4]) -> Result<Option<Buffer>> {
    let ParamKind::Tensor { axes, dtype } = p.kind else { return Ok(None) };
    let elements: i64 = axes.dims(extents).iter().product();
    if dtype == DType::I32 {
        let last = axes.dims(extents)[2].max(axes.dims(extents)[3]);
        let starts = |document: i64| (document * last + DOCUMENTS - 1) / DOCUMENTS;
        let value = |n: i64| match p.name.as_str() {
            "seq_len_q" => extents[2],
            "seq_len_kv" => extents[3],
            "doc_start" => starts(n % last * DOCUMENTS / last),
            "doc_end" => starts(n % last * DOCUMENTS / last + 1),
            _ => n % last * DOCUMENTS / last,
        };
        let values: Vec<i32> = (0..elements).map(|n| value(n) as i32).collect();
        let mut buffer = Buffer::new(stream.device(), values.len() * 4)?;
        buffer.upload(stream, 0, &values)?;
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
    fn new(stream: &Stream, planned: &Planned) -> Result<Memory> {
        let job = &planned.job;
        let problem = job.problem();
        let mut operands = Vec::new();
        for (n, (operand, tensor)) in job.tensors().into_iter().enumerate() {
            operands.push((operand, random(stream, problem.dtype(), tensor.extent().unwrap_or(0), n as u64 + 1)?));
        }
        let stats = if planned.lowered.stats.is_some() { Some(random(stream, DType::F32, problem.stats_elements(), 7)?) } else { None };
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
        let workspace = Buffer::new(stream.device(), planned.workspace_bytes() as usize)?;
        Ok(Memory { operands, stats, params, gradients, workspace })
    }

    fn at(&self, operand: Operand) -> DeviceSlice {
        self.operands.iter().find(|(o, _)| *o == operand).map_or(slice(&self.workspace), |(_, b)| slice(b))
    }

    fn params(&self) -> Vec<DeviceParam<'_>> {
        let value = |(p, buffer): &'_ (Declared, Option<Buffer>)| match (p.kind, buffer) {
            (ParamKind::Tensor { axes: _, dtype }, Some(b)) => Some(DeviceValue::Tensor(dtype, slice(b))),
            (ParamKind::Scalar, _) => p.default.map(DeviceValue::Scalar),
            (ParamKind::Tensor { .. }, None) => None,
        };
        self.params.iter().filter_map(|p| Some(DeviceParam { name: &p.0.name, value: value(p)? })).collect()
    }

    /// # Safety
    /// The memory and the workspace outlive the call on the stream.
    unsafe fn forward(&self, planned: &Planned, handle: &cudnn_graph::Handle, workspace: DeviceSlice) -> Result<()> {
        let [q, k, v, o] = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| self.at(operand));
        let stats = self.stats.as_ref().map(slice);
        let call = DeviceForward { q, k, v, o, stats, attn_scale: None, params: &self.params(), workspace };
        // SAFETY: the caller's.
        Ok(unsafe { planned.forward(handle, &call) }?)
    }

    /// # Safety
    /// The memory outlives the call on the stream.
    unsafe fn submit(&self, planned: &Planned, handle: &cudnn_graph::Handle) -> Result<()> {
        let workspace = slice(&self.workspace);
        if let Job::Forward(_) = planned.job {
            // SAFETY: the caller's.
            return unsafe { self.forward(planned, handle, workspace) };
        }
        let gradients: Vec<DeviceGradient<'_>> = self.gradients.iter().map(|(name, b)| DeviceGradient { name, slice: slice(b) }).collect();
        let Some(stats) = self.stats.as_ref().map(slice) else { return Err("the backward pass reads stats".into()) };
        let call = DeviceBackward {
            q: self.at(Operand::Q),
            k: self.at(Operand::K),
            v: self.at(Operand::V),
            o: self.at(Operand::O),
            stats,
            d_o: self.at(Operand::DO),
            dq: self.at(Operand::DQ),
            dk: self.at(Operand::DK),
            dv: self.at(Operand::DV),
            attn_scale: None,
            params: &self.params(),
            gradients: &gradients,
            workspace,
        };
        // SAFETY: the caller's.
        Ok(unsafe { planned.backward(handle, &call) }?)
    }
}
