//! Device memory for timing: operands by name, so that contenders read and write the same.
//!
//! Floats are random, lengths the longest that the problem allows, other whole numbers 0.

use crate::error::Error;
use crate::lower::{Job, Lowered, Operand, Supply, Table};
use cudnn_graph::ir::{Scalar, TensorId};
use cudnn_graph::{Buffer, DType, OwnedBindings, Plan, Stream};
use half::{bf16, f16};
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use std::sync::Arc;

/// One tensor.
struct Part {
    name: String,
    dtype: DType,
    /// What a pass writes for its caller.
    result: bool,
    buffer: Arc<Buffer>,
}

/// Everything that contenders read and write.
pub(super) struct Memory<'a> {
    stream: &'a Stream,
    job: &'a Job,
    parts: Vec<Part>,
}

/// Numbers of a tensor, by name.
pub(super) type Results = Vec<(String, Vec<f32>)>;

/// Random numbers are repeated after so many.
const PATTERN: usize = 65_521;

/// Evenly spread between −1 and 1, a tensor's own.
fn pattern(seed: u64) -> impl Iterator<Item = f32> + Clone {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let numbers: Vec<f32> = (0..PATTERN)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    numbers.into_iter().cycle()
}

impl Memory<'_> {
    pub(super) fn new<'a>(stream: &'a Stream, job: &'a Job) -> Memory<'a> {
        Memory { stream, job, parts: Vec::new() }
    }

    /// What a plan takes.
    pub(super) fn bind(&mut self, lowered: &Lowered, plan: &Plan) -> Result<OwnedBindings, Error> {
        let mut bindings = OwnedBindings::new();
        for port in &plan.ports().device {
            let bytes = usize::try_from(port.bytes).unwrap_or(usize::MAX);
            let there = self.parts.iter().find(|part| part.name == port.name && part.buffer.bytes() >= bytes);
            let buffer = match there {
                Some(part) => part.buffer.clone(),
                None => self.make(lowered, port.id, &port.name, bytes)?,
            };
            bindings = bindings.buffer(port.id, &buffer);
        }
        let scale = Scalar::F32(self.job.problem().default_scale());
        for port in &plan.ports().values {
            let value = port.value.unwrap_or(if port.dtype == DType::I32 { Scalar::I32(1) } else { scale });
            bindings = bindings.value(port.id, value);
        }
        Ok(bindings)
    }

    fn make(&mut self, lowered: &Lowered, id: TensorId, name: &str, bytes: usize) -> Result<Arc<Buffer>, Error> {
        let mut buffer = Buffer::new(self.stream.device(), bytes)?;
        let supply = lowered.supplies.iter().find(|(tensor, _)| *tensor == id).map(|(_, supply)| supply);
        let dtype = lowered.graph.graph().get(id).map_or(DType::F32, |t| t.dtype);
        let problem = self.job.problem();
        let longest = match supply {
            Some(Supply::Guarded(guarded)) => Some(guarded.most),
            _ if name == SEQ_LEN_Q => Some(problem.seq_q()),
            _ if name == SEQ_LEN_KV => Some(problem.seq_kv()),
            _ => None,
        };
        match (supply, longest) {
            (Some(Supply::Table(Table::F32(x))), _) => buffer.upload(self.stream, 0, x)?,
            (Some(Supply::Table(Table::I32(x))), _) => buffer.upload(self.stream, 0, x)?,
            (_, Some(longest)) => buffer.upload(self.stream, 0, &vec![longest as i32; bytes / 4])?,
            (_, None) => self.random(&mut buffer, dtype)?,
        }
        let operand = lowered.operands.iter().find(|(_, tensor)| *tensor == id).map(|(operand, _)| *operand);
        let stats = lowered.stats == Some(id) && matches!(self.job, Job::Forward(_));
        let gradient = matches!(supply, Some(Supply::Gradient(_) | Supply::Terms { .. }));
        let result = stats || gradient || operand.is_some_and(|operand: Operand| self.job.writes(operand));
        if result {
            buffer.fill(self.stream, 0xff)?;
        }
        let buffer = Arc::new(buffer);
        self.parts.push(Part { name: name.to_owned(), dtype, result, buffer: buffer.clone() });
        Ok(buffer)
    }

    fn random(&self, buffer: &mut Buffer, dtype: DType) -> Result<(), Error> {
        let numbers = pattern(self.parts.len() as u64 + 1);
        let elements = buffer.bytes() * 8 / dtype.bits() as usize;
        if dtype == DType::BF16 {
            buffer.upload(self.stream, 0, &numbers.map(bf16::from_f32).take(elements).collect::<Vec<_>>())?;
        } else if dtype == DType::F16 {
            buffer.upload(self.stream, 0, &numbers.map(f16::from_f32).take(elements).collect::<Vec<_>>())?;
        } else if dtype == DType::F32 {
            buffer.upload(self.stream, 0, &numbers.take(elements).collect::<Vec<_>>())?;
        } else {
            buffer.fill(self.stream, 0)?;
        }
        Ok(())
    }

    /// Makes every result not-a-number.
    pub(super) fn poison(&mut self) -> Result<(), Error> {
        let device = self.stream.device();
        for part in self.parts.iter_mut().filter(|part| part.result) {
            let mut buffer = Buffer::new(device, part.buffer.bytes())?;
            buffer.fill(self.stream, 0xff)?;
            part.buffer = Arc::new(buffer);
        }
        Ok(())
    }

    /// What the last contender wrote.
    pub(super) fn results(&self) -> Result<Results, Error> {
        let mut all = Vec::new();
        for part in self.parts.iter().filter(|part| part.result) {
            let elements = part.buffer.bytes() * 8 / part.dtype.bits() as usize;
            let numbers: Vec<f32> = if part.dtype == DType::BF16 {
                let mut x = vec![bf16::ZERO; elements];
                part.buffer.download(self.stream, 0, &mut x)?;
                x.into_iter().map(bf16::to_f32).collect()
            } else if part.dtype == DType::F16 {
                let mut x = vec![f16::ZERO; elements];
                part.buffer.download(self.stream, 0, &mut x)?;
                x.into_iter().map(f16::to_f32).collect()
            } else {
                let mut x = vec![0f32; elements];
                part.buffer.download(self.stream, 0, &mut x)?;
                x
            };
            all.push((part.name.clone(), numbers));
        }
        Ok(all)
    }
}
