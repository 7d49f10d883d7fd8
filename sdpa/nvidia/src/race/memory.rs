//! Device memory for the calls of a pass that is timed. All contenders (executors or configurations) use the same memory.
//!
//! Floats are random, lengths the longest that the problem permits, and pages consecutive. Other integers are 0. Declared scalars are the default
//! scale, which is small and not 0.

use crate::job::Job;
use half::{bf16, f16};
use sdpa_core::device::{DeviceCall, DeviceGradient, DeviceParam, DeviceValue};
use sdpa_core::expr::{Declared, ParamKind};
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::problem::Problem;
use sdpa_core::{Amax, DType, DeviceAmax, F8E4M3, F8E5M2, Fp8Scale, Operand, Packed, Side, Statistic, packed, params};
use sdpa_driver::{Buffer, DeviceSlice, Error, Stream};

/// A dense tensor, or the whole span of a strided one.
struct Tensor {
    dtype: DType,
    buffer: Buffer,
}

/// All memory that a call accesses: operands with random numbers, the longest lengths that the problem permits, and consecutive pages.
pub struct Memory<'a> {
    stream: &'a Stream,
    job: &'a Job,
    operands: [Option<Tensor>; Operand::ALL.len()],
    statistics: [Option<Tensor>; Statistic::ALL.len()],
    /// By index among the declared parameters; `None` for scalars.
    params: Vec<Option<Tensor>>,
    gradients: Vec<(&'a str, Tensor)>,
    /// One f32 each.
    amax: Vec<(Amax, Tensor)>,
    workspace: Buffer,
}

/// Results as numbers, by tensor name.
pub type Results = Vec<(String, Vec<f32>)>;

/// Period of the random numbers.
const PATTERN: usize = 65_521;

/// Returns numbers spread evenly between −1 and 1, different for each seed.
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

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

impl Tensor {
    fn new(stream: &Stream, dtype: DType, elements: i64) -> Result<Tensor, Error> {
        let bytes = usize::try_from(dtype.bytes(elements.unsigned_abs())).unwrap_or(usize::MAX);
        Ok(Tensor { dtype, buffer: Buffer::new(stream.device(), bytes)? })
    }

    fn elements(&self) -> usize {
        self.buffer.bytes() * 8 / self.dtype.bits() as usize
    }

    fn randomise(&mut self, stream: &Stream, seed: u64) -> Result<(), Error> {
        let numbers = pattern(seed).take(self.elements());
        match self.dtype {
            DType::F32 => self.buffer.upload(stream, 0, &numbers.collect::<Vec<_>>())?,
            DType::F16 => self.buffer.upload(stream, 0, &numbers.map(f16::from_f32).collect::<Vec<_>>())?,
            DType::BF16 => self.buffer.upload(stream, 0, &numbers.map(bf16::from_f32).collect::<Vec<_>>())?,
            DType::F8E4M3 => self.buffer.upload(stream, 0, &numbers.map(|x| F8E4M3::from_f32(x).to_bits()).collect::<Vec<_>>())?,
            DType::F8E5M2 => self.buffer.upload(stream, 0, &numbers.map(|x| F8E5M2::from_f32(x).to_bits()).collect::<Vec<_>>())?,
            DType::I32 | DType::I64 | DType::Bool => self.buffer.fill(stream, 0)?,
            // 127 is the bit pattern of 1.0 in F8E8M0.
            DType::F8E8M0 => self.buffer.fill(stream, 127)?,
        }
        Ok(())
    }

    /// Fills `cu_seqlens` with sequences of equal lengths.
    fn boundaries(&mut self, stream: &Stream, packed: &Packed, declared: &Declared, problem: &Problem) -> Result<(), Error> {
        let Some(side) = Side::ALL.into_iter().find(|&side| packed.boundaries(side) == declared.name) else { return Ok(()) };
        let all: Vec<i64> = (0..=problem.batch()).map(|n| n * (problem.total(side) / problem.batch())).collect();
        if packed.wide {
            self.buffer.upload(stream, 0, &all)?;
        } else {
            self.buffer.upload(stream, 0, &all.iter().map(|&n| n as i32).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Returns its floats as f32.
    fn numbers(&self, stream: &Stream) -> Result<Vec<f32>, Error> {
        Ok(match self.dtype {
            DType::F16 => {
                let mut x = vec![f16::ZERO; self.elements()];
                self.buffer.download(stream, 0, &mut x)?;
                x.into_iter().map(f16::to_f32).collect()
            }
            DType::BF16 => {
                let mut x = vec![bf16::ZERO; self.elements()];
                self.buffer.download(stream, 0, &mut x)?;
                x.into_iter().map(bf16::to_f32).collect()
            }
            DType::F8E4M3 | DType::F8E5M2 => {
                let mut x = vec![0u8; self.elements()];
                self.buffer.download(stream, 0, &mut x)?;
                let wide = if self.dtype == DType::F8E4M3 { |x| F8E4M3::from_bits(x).to_f32() } else { |x| F8E5M2::from_bits(x).to_f32() };
                x.into_iter().map(wide).collect()
            }
            // No result has an integer type, so these are f32.
            DType::F32 | DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => {
                let mut x = vec![0f32; self.elements()];
                self.buffer.download(stream, 0, &mut x)?;
                x
            }
        })
    }
}

impl<'a> Memory<'a> {
    /// Allocates the memory for calls of a pass, including a workspace of `workspace_bytes` bytes.
    ///
    /// # Errors
    /// Returns a driver error, typically because there is not enough memory.
    pub fn new(stream: &'a Stream, job: &'a Job, workspace_bytes: u64) -> Result<Memory<'a>, Error> {
        let problem = job.problem();
        let mut operands = [const { None }; Operand::ALL.len()];
        let mut seed = 0;
        let mut random = |mut tensor: Tensor| {
            seed += 1;
            tensor.randomise(stream, seed)?;
            Ok::<_, Error>(tensor)
        };
        for (operand, tensor) in Operand::ALL.into_iter().filter_map(|operand| Some((operand, job.in_memory(operand)?))) {
            let all = if problem.packs(operand.side()) { packed::memory(&tensor, problem.total(operand.side())) } else { tensor };
            let elements = all.extent().unwrap_or(i64::MAX);
            operands[operand as usize] = Some(random(Tensor::new(stream, job.dtype_of(operand), elements)?)?);
        }
        let mut statistics = [const { None }; Statistic::ALL.len()];
        // A backward problem has stats and no other statistic.
        for statistic in Statistic::ALL.into_iter().filter(|statistic| problem.computes(*statistic)) {
            statistics[statistic as usize] = Some(random(Tensor::new(stream, DType::F32, problem.stats_elements())?)?);
        }
        let scales = Fp8Scale::of(job.direction());
        let mut params = Vec::new();
        for p in job.params() {
            let ParamKind::Tensor { axes: _, dtype } = p.kind else {
                params.push(None);
                continue;
            };
            let mut tensor = random(Tensor::new(stream, dtype, params::elements(p, problem.extents()))?)?;
            if let Some(packed) = problem.packed() {
                tensor.boundaries(stream, packed, p, problem)?;
            }
            let longest = match p.name.as_str() {
                SEQ_LEN_Q => Some(problem.seq_q()),
                SEQ_LEN_KV => Some(problem.seq_kv()),
                _ => None,
            };
            // Each batch entry has its own pages, as long as the pool has enough.
            if let Some(paged) = problem.paged().filter(|_| p.name == PAGE_TABLE) {
                let table: Vec<i32> = (0..tensor.elements() as i64).map(|n| (n % paged.pages) as i32).collect();
                tensor.buffer.upload(stream, 0, &table)?;
            }
            if let Some(longest) = longest.filter(|_| dtype == DType::I32) {
                let lengths = vec![i32::try_from(longest).unwrap_or(i32::MAX); tensor.elements()];
                tensor.buffer.upload(stream, 0, &lengths)?;
            }
            if scales.iter().any(|scale| scale.name() == p.name) {
                tensor.buffer.upload(stream, 0, &[1f32])?;
            }
            params.push(Some(tensor));
        }
        let mut gradients = Vec::new();
        if let Job::Backward(backward) = job {
            for wanted in backward.wrt() {
                let elements = backward.gradient_elements(&wanted.name);
                gradients.push((wanted.name.as_str(), Tensor::new(stream, wanted.dtype, elements)?));
            }
        }
        let mut amax = Vec::new();
        for of in Amax::told(problem, job.direction()) {
            amax.push((*of, Tensor::new(stream, DType::F32, 1)?));
        }
        let workspace = Buffer::new(stream.device(), usize::try_from(workspace_bytes).unwrap_or(usize::MAX))?;
        Ok(Memory { stream, job, operands, statistics, params, gradients, amax, workspace })
    }

    /// Calls `submit` with the arguments of a call that uses this memory, and returns its result.
    pub fn call<R>(&self, submit: impl FnOnce(&DeviceCall<'_, DeviceSlice>) -> R) -> R {
        let scale = self.job.problem().default_scale();
        let value = |tensor: &Option<Tensor>| match tensor {
            Some(tensor) => DeviceValue::Tensor(tensor.dtype, slice(&tensor.buffer)),
            None => DeviceValue::Scalar(scale),
        };
        let declared = self.job.params().iter().zip(&self.params);
        let params: Vec<DeviceParam<'_, DeviceSlice>> = declared.map(|(p, tensor)| DeviceParam::new(&p.name, value(tensor))).collect();
        let gradients = self.gradients.iter().map(|(name, tensor)| DeviceGradient::new(name, slice(&tensor.buffer)));
        let amax = self.amax.iter().map(|(of, tensor)| DeviceAmax::new(*of, slice(&tensor.buffer)));
        submit(&DeviceCall {
            operands: self.operands.each_ref().map(|tensor| tensor.as_ref().map(|tensor| slice(&tensor.buffer))),
            stats: self.statistic(Statistic::Stats),
            row_max: self.statistic(Statistic::RowMax),
            sum_exp: self.statistic(Statistic::SumExp),
            amax: &amax.collect::<Vec<_>>(),
            attn_scale: Some(scale),
            params: &params,
            gradients: &gradients.collect::<Vec<_>>(),
            workspace: Some(slice(&self.workspace)),
        })
    }

    fn statistic(&self, statistic: Statistic) -> Option<DeviceSlice> {
        self.statistics[statistic as usize].as_ref().map(|tensor| slice(&tensor.buffer))
    }

    /// Iterates over the results of the pass, by name.
    fn results(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let written = Operand::ALL.into_iter().filter(|operand| self.job.writes(*operand));
        let written = written.filter_map(|operand| Some((operand.name(), self.operands[operand as usize].as_ref()?)));
        let statistics = Statistic::ALL.into_iter().zip(&self.statistics).filter(|_| matches!(self.job, Job::Forward(_)));
        let statistics = statistics.filter_map(|(statistic, tensor)| Some((statistic.name(), tensor.as_ref()?)));
        written.chain(statistics).chain(self.gradients.iter().map(|(name, tensor)| (*name, tensor)))
    }

    /// Fills every result of the pass with NaN, so that elements that are not written show.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn poison(&mut self) -> Result<(), Error> {
        let (job, stream) = (self.job, self.stream);
        let written = Operand::ALL.into_iter().zip(&mut self.operands).filter(|(operand, _)| job.writes(*operand));
        let statistics = self.statistics.iter_mut().flatten().filter(|_| matches!(job, Job::Forward(_)));
        let gradients = self.gradients.iter_mut().map(|(_, tensor)| tensor);
        for tensor in written.filter_map(|(_, tensor)| tensor.as_mut()).chain(statistics).chain(gradients) {
            tensor.buffer.fill(stream, 0xff)?;
        }
        Ok(())
    }

    /// Returns the results by name, after the pass has finished.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn read(&self) -> Result<Results, Error> {
        self.results().map(|(name, tensor)| Ok((name.to_owned(), tensor.numbers(self.stream)?))).collect()
    }

    /// Waits for the pass, and returns the concatenated bytes of all results.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn bytes(&self) -> Result<Vec<u8>, Error> {
        let mut all = Vec::new();
        for (_, tensor) in self.results() {
            let begin = all.len();
            all.resize(begin + tensor.buffer.bytes(), 0);
            tensor.buffer.download(self.stream, 0, &mut all[begin..])?;
        }
        Ok(all)
    }
}
