//! Ranks over device memory: the schedules of [`ParallelProblem`], with transfers over NCCL.
#![allow(unsafe_code, reason = "calls take addresses of device memory: see DeviceContextParallel::forward")]

mod call;
mod kernels;
mod program;
mod run;
mod shared;
mod view;

pub use shared::SharedCommunicator;

use crate::device::kernels::Kernels;
use crate::device::program::Program;
use crate::device::run::{Run, sink_bytes};
use crate::device::view::{View, bytes};
use crate::digest::{FIELDS, digest};
use crate::error::ParallelError;
use crate::problem::ParallelProblem;
use crate::schedule::{Pass, Tensor};
use sdpa_core::device::{DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceParams, DeviceValue, OnDevice, with_defaults};
use sdpa_core::error::Reason;
use sdpa_core::packed::CU_SEQLENS;
use sdpa_core::placed::PLACEMENT;
use sdpa_core::unpacked::PACKED_TENSORS;
use sdpa_core::{BackwardProblem, DType, Error, Problem, SINK, Unsupported};
use sdpa_driver::{Buffer, DeviceSlice, Event, Stream, Submission};
use sdpa_nvidia::NvidiaExecutor;
use std::sync::Arc;

/// The names of what ranks compare: those of a digest, then the type of partial results.
const COMPARED: usize = FIELDS.len() + 1;

/// Prepares the parts of a problem for device memory.
///
/// Every [`NvidiaExecutor`] is a planner, and so is `sdpa::Dispatcher`, which selects an executor for each part.
pub trait Planner {
    /// Prepares a forward pass.
    ///
    /// # Errors
    /// Fails as [`Executor::prepare`](sdpa_core::Executor::prepare) does.
    fn plan(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, Error>;

    /// Prepares a backward pass.
    ///
    /// # Errors
    /// Fails as [`Executor::prepare`](sdpa_core::Executor::prepare) does.
    fn plan_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, Error>;

    /// Returns the ordinal of the device for which it prepares passes.
    ///
    /// # Errors
    /// Fails if there is no such device.
    fn ordinal(&self) -> Result<u32, Error>;
}

impl<E: NvidiaExecutor> Planner for E {
    fn plan(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        self.prepare_device(problem)
    }

    fn plan_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        self.prepare_device_backward(problem)
    }

    fn ordinal(&self) -> Result<u32, Error> {
        Ok(self.device().ordinal())
    }
}

/// The type of results that are merged or summed. Merges and sums themselves are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partials {
    /// The type of the operands. Each contribution is rounded to it.
    #[default]
    Operands,
    /// f32: kernels convert the operands. On GPUs, attention in f32 is many times slower than in f16 and bf16.
    F32,
}

/// One rank of a problem over device memory: its plans, its memory and its NCCL communicator.
///
/// It is made in the same way as [`ContextParallel`](crate::ContextParallel), and computes the same results. Transfers run on a stream of their own.
/// Meanwhile, the GPU computes parts of the problem whose operands have arrived. Tensors of a call are the rank's shards ([`ParallelProblem::local`]), and declared
/// parameters are whole, on every rank. A shard with one batch entry in (token, head, dim) order is read and sent in place; others are copied.
///
/// Calls return when the work is submitted. [`DeviceContextParallel::wait`] waits with the deadline of the communicator. The first call of each pass compares
/// the ranks' problems, which waits for the other ranks; capture a CUDA graph only after it. A graph uses the memory of this value, which must live as long.
/// Dropping the value waits for the last call.
#[derive(Debug)]
pub struct DeviceContextParallel {
    problem: Arc<ParallelProblem>,
    communicator: SharedCommunicator,
    partials: Partials,
    resources: Resources,
    /// The end of the last call.
    end: Option<Event>,
    agreed: [bool; 2],
    broken: Option<String>,
}

/// The tensors and values of one call.
struct Call<'a> {
    pass: Pass,
    tensors: Vec<(Tensor, DeviceSlice)>,
    attn_scale: Option<f32>,
    params: &'a [DeviceParam<'a, DeviceSlice>],
    gradients: &'a [DeviceGradient<'a, DeviceSlice>],
}

impl DeviceContextParallel {
    /// Makes every plan of this rank and allocates its memory. It exchanges nothing. `planner` prepares the parts on the device of the communicator. Pass a
    /// `Communicator`, or a [`SharedCommunicator`] if the rank has several problems.
    ///
    /// # Errors
    /// Fails if the communicator has another number of ranks than the problem or another device than the planner, or if a part of the problem is not
    /// supported. The communicator is then aborted, so that the other ranks fail too.
    pub fn new(
        planner: &dyn Planner,
        problem: Arc<ParallelProblem>,
        communicator: impl Into<SharedCommunicator>,
        partials: Partials,
    ) -> Result<DeviceContextParallel, ParallelError> {
        let communicator = communicator.into();
        match Resources::new(planner, &problem, &communicator, partials) {
            Ok(resources) => {
                let (end, agreed, broken) = (None, [false; 2], None);
                Ok(DeviceContextParallel { problem, communicator, partials, resources, end, agreed, broken })
            }
            Err(error) => {
                communicator.abort(&error.to_string());
                Err(error)
            }
        }
    }

    /// Returns the problem.
    pub fn problem(&self) -> &ParallelProblem {
        &self.problem
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Returns the bytes of device memory that this value has allocated.
    pub fn memory_bytes(&self) -> usize {
        self.resources.memory.bytes()
    }

    /// Submits the forward pass of this rank's queries. `q`, `k`, `v`, `o` and the statistics are shards; parameters are whole. The workspace of the call is
    /// not used. All ranks must call it.
    ///
    /// # Safety
    /// As [`DevicePrepared::submit`](sdpa_core::DevicePrepared::submit): until the stream has passed this call, every slice is memory of the stream's device
    /// as large as stated, nothing else uses the memory that is written, and nothing writes the memory that is read.
    ///
    /// # Errors
    /// Returns every mistake in the call before anything is submitted or exchanged; such a call can be repeated. Fails if the ranks run different problems, or
    /// if a driver or NCCL call fails; after this every later call fails too, and the other ranks fail by their deadlines.
    pub unsafe fn forward(&mut self, stream: &Stream, call: &DeviceForward<'_, DeviceSlice>) -> Result<(), ParallelError> {
        let DeviceForward { q, k, v, o, stats, row_max, sum_exp, attn_scale, params, .. } = *call;
        let mut tensors = vec![(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v), (Tensor::O, o)];
        let statistics = [(Tensor::Stats, stats), (Tensor::RowMax, row_max), (Tensor::SumExp, sum_exp)];
        tensors.extend(statistics.into_iter().filter_map(|(tensor, slice)| Some((tensor, slice?))));
        self.run(stream, &Call { pass: Pass::Forward, tensors, attn_scale, params, gradients: &[] })
    }

    /// Submits the backward pass: the gradients of this rank's queries, keys and values. Operands are shards, as in the forward pass; `stats` are natural
    /// logarithms. A gradient of a declared parameter or of the sink is this rank's contribution, in the extents of the whole parameter: sum it over the ranks.
    ///
    /// # Safety
    /// As [`DeviceContextParallel::forward`].
    ///
    /// # Errors
    /// As [`DeviceContextParallel::forward`]. Fails if the problem has no backward pass.
    pub unsafe fn backward(&mut self, stream: &Stream, call: &DeviceBackward<'_, DeviceSlice>) -> Result<(), ParallelError> {
        let DeviceBackward { q, k, v, o, stats, d_o, dq, dk, dv, attn_scale, params, gradients, .. } = *call;
        let operands = [(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v), (Tensor::O, o), (Tensor::Stats, stats), (Tensor::DO, d_o)];
        let tensors = operands.into_iter().chain([(Tensor::DQ, dq), (Tensor::DK, dk), (Tensor::DV, dv)]).collect();
        self.run(stream, &Call { pass: Pass::Backward, tensors, attn_scale, params, gradients })
    }

    /// Waits until a stream has passed the calls so far, and meanwhile looks for failures of other ranks.
    ///
    /// # Errors
    /// Returns [`sdpa_driver::Error::Timeout`] at the deadline of the communicator, or the failure. Every later call then fails too.
    pub fn wait(&mut self, stream: &Stream) -> Result<(), ParallelError> {
        self.usable()?;
        let waited = self.communicator.wait(stream);
        self.noted(waited.map_err(ParallelError::from))
    }

    fn usable(&self) -> Result<(), ParallelError> {
        self.broken.as_ref().map_or(Ok(()), |why| Err(ParallelError::Broken(why.clone())))
    }

    fn noted(&mut self, result: Result<(), ParallelError>) -> Result<(), ParallelError> {
        if let Err(error) = &result {
            self.communicator.abort(&error.to_string());
            self.broken = Some(error.to_string());
        }
        result
    }

    fn run(&mut self, stream: &Stream, call: &Call<'_>) -> Result<(), ParallelError> {
        self.usable()?;
        let program = self.resources.program(call.pass);
        call::check(&self.problem, self.rank(), program, call)?;
        if stream.device().ordinal() != self.communicator.device().ordinal() {
            let (got, expected) = (stream.device().ordinal(), self.communicator.device().ordinal());
            return Err(sdpa_driver::Error::OtherDevice { what: "the stream", got, expected }.into());
        }
        let scale = call.attn_scale.unwrap_or_else(|| self.problem.problem().default_scale());
        let capturing = stream.begin_on(None)?.is_capturing();
        let agreed = self.agreed[call.pass as usize];
        if capturing && !agreed {
            let reason =
                "the first call of a pass under capture: ranks compare their problems, which waits; make one call before the capture";
            return Err(Error::from(Unsupported::new(PLACEMENT, vec![Reason::Absent(reason.to_owned())])).into());
        }
        let result = self.submitted(stream, call, scale, capturing);
        self.noted(result)
    }

    fn submitted(&mut self, stream: &Stream, call: &Call<'_>, scale: f32, capturing: bool) -> Result<(), ParallelError> {
        if !self.agreed[call.pass as usize] {
            self.agree(call.pass, scale)?;
            self.agreed[call.pass as usize] = true;
        }
        let (problem, rank) = (self.problem.clone(), self.communicator.rank());
        let whole = problem.problem();
        let program = self.resources.program(call.pass);
        let program = program.ok_or_else(|| crate::host::bug("a pass without a program"))?;
        let on = stream.begin_on(None)?;
        // A captured graph may not wait for work before the capture. The caller orders graphs and calls, as for all memory that they share.
        if let Some(end) = self.end.as_ref().filter(|_| !capturing) {
            stream.wait(end)?;
        }
        let view = |(tensor, slice): &(Tensor, DeviceSlice)| {
            let dtype = if tensor.is_statistic() { DType::F32 } else { whole.dtype() };
            (*tensor, View::new(slice.address, dtype, &problem.local(rank, *tensor)))
        };
        let shards: Vec<(Tensor, View)> = call.tensors.iter().map(view).collect();
        // Sums lie behind the scratch memory of the parts.
        let mut sums = Vec::new();
        let mut at = self.resources.scratch + program.scratch_bytes;
        for gradient in call.gradients {
            let bytes = sum_bytes(&problem, gradient.name);
            sums.push((gradient.name.to_owned(), DeviceSlice { address: at, bytes }));
            at += bytes.next_multiple_of(256);
        }
        let params = self.params(&on, &problem, call)?;
        let memory = [self.resources.memory.address(), self.resources.scratch];
        let values = (&sums[..], scale);
        let streams = (&on, &self.resources.transfers);
        let mut communicator = self.communicator.lock();
        let mut run = Run::new((&problem, program), self.resources.kernels, &mut communicator, streams, memory, &shards, &params, values);
        run.steps()?;
        run.sink_gradient(at)?;
        for (gradient, (_, sum)) in call.gradients.iter().zip(&sums) {
            let asked = problem.spec().wrt.iter().find(|g| g.name == gradient.name).map_or(DType::F32, |g| g.dtype);
            let dims = [1, 1, 1, (sum.bytes / 4).cast_signed()];
            let (from, to) = (View::dense(sum.address, DType::F32, dims), View::dense(gradient.slice.address, asked, dims));
            // SAFETY: the sum is memory of this rank, and the caller vouches for the gradient.
            unsafe { self.resources.kernels.transfer(&on, &from, &to, kernels::Mode::Copy) }?;
        }
        if !capturing {
            self.end = Some(stream.record(false)?);
        }
        Ok(())
    }

    /// Returns the values of the declared parameters, with defaults. For packed sequences, it submits the kernel that computes those of the dense problem.
    fn params<'a>(
        &self,
        on: &Submission<'_>,
        problem: &'a ParallelProblem,
        call: &Call<'a>,
    ) -> Result<DeviceParams<'a, DeviceSlice>, ParallelError> {
        let declared = problem.declared(call.pass);
        let given = call.params.iter().filter(|p| p.name != CU_SEQLENS).copied().collect();
        let mut params = with_defaults(declared, given);
        let Some(packed) = problem.packed() else { return Ok(params) };
        let offsets = call.params.iter().find(|p| p.name == CU_SEQLENS).and_then(|p| p.value.tensor());
        let (dtype, offsets) = offsets.ok_or_else(|| crate::host::bug("packed sequences without offsets"))?;
        let (tokens, step) = (problem.problem().seq_q(), token_bytes(problem));
        let mut to = [0; PACKED_TENSORS.len()];
        for (n, name) in PACKED_TENSORS.into_iter().enumerate().filter(|(_, name)| declared.iter().any(|p| p.name == *name)) {
            to[n] = self.resources.tokens + n as u64 * step;
            let slice = DeviceSlice { address: to[n], bytes: bytes(DType::I32, tokens) };
            params.push(DeviceParam::new(name, DeviceValue::Tensor(DType::I32, slice)));
        }
        // SAFETY: the tensors are memory of this rank, and the caller vouches for the offsets.
        unsafe { self.resources.kernels.tokens(on, (packed.batch(), offsets, dtype), tokens, to) }?;
        Ok(params)
    }

    /// Compares the digests of all ranks, and waits for them.
    fn agree(&mut self, pass: Pass, scale: f32) -> Result<(), ParallelError> {
        let (rank, size) = (self.communicator.rank(), self.communicator.size());
        let own: Vec<u64> = digest(&self.problem, pass, scale).into_iter().chain([self.partials as u64]).collect();
        let bytes: Vec<u8> = own.iter().flat_map(|n| n.to_le_bytes()).collect();
        let all = self.communicator.gather(&bytes, &vec![bytes.len(); size])?;
        for n in 0..COMPARED {
            let field = FIELDS.get(n).copied().unwrap_or("partials");
            let ranks: Vec<usize> = (0..size).filter(|peer| all[*peer][8 * n..8 * n + 8] != bytes[8 * n..8 * n + 8]).collect();
            if !ranks.is_empty() {
                return Err(ParallelError::Mismatch { field, rank, ranks });
            }
        }
        Ok(())
    }
}

impl Drop for DeviceContextParallel {
    /// Waits for the last call, at most until the deadline: dropping the communicator would abort its transfers.
    fn drop(&mut self) {
        let Some(end) = self.end.as_ref().filter(|_| self.broken.is_none()) else { return };
        let waited = self.resources.transfers.wait(end).and_then(|()| self.communicator.wait(&self.resources.transfers));
        if let Err(error) = waited {
            tracing::warn!(%error, "a rank was dropped during a call");
        }
    }
}

/// Returns the bytes of one number for each token of packed sequences, up to the boundary of a tensor.
fn token_bytes(problem: &ParallelProblem) -> u64 {
    bytes(DType::I32, problem.problem().seq_q()).next_multiple_of(256)
}

/// Returns the bytes of a parameter's gradient in f32.
fn sum_bytes(problem: &ParallelProblem, name: &str) -> u64 {
    let extents = problem.problem().extents();
    let declared = problem.declared(Pass::Backward).iter().find(|p| p.name == name);
    bytes(DType::F32, declared.map_or(0, |p| sdpa_core::params::elements(p, extents)))
}

/// The plans, the memory and the stream of a rank.
#[derive(Debug)]
struct Resources {
    kernels: &'static Kernels,
    forward: Program,
    backward: Option<Program>,
    transfers: Stream,
    /// Memory of slots and of scratch, which both passes use.
    memory: Buffer,
    /// The first byte of the sequences and positions of packed tokens, and of the scratch memory.
    tokens: u64,
    scratch: u64,
}

impl Resources {
    /// Returns the program of a pass; `None` if the problem has no such pass.
    fn program(&self, pass: Pass) -> Option<&Program> {
        match pass {
            Pass::Forward => Some(&self.forward),
            Pass::Backward => self.backward.as_ref(),
        }
    }

    fn new(
        planner: &dyn Planner,
        problem: &ParallelProblem,
        communicator: &SharedCommunicator,
        partials: Partials,
    ) -> Result<Resources, ParallelError> {
        if communicator.size() != problem.ranks() {
            return Err(ParallelError::Ranks { got: communicator.size(), expected: problem.ranks() });
        }
        let (got, expected) = (communicator.device().ordinal(), planner.ordinal()?);
        if got != expected {
            return Err(ParallelError::Devices { got, expected });
        }
        let (device, rank) = (communicator.device(), communicator.rank());
        let make = |pass: Pass| Program::new(planner, problem, rank, pass, partials);
        let forward = make(Pass::Forward)?;
        let backward = problem.spec().backward.then(|| make(Pass::Backward)).transpose()?;
        let programs = || std::iter::once(&forward).chain(&backward);
        let slots = programs().map(|program| program.slot_bytes).max().unwrap_or(0);
        let sums: u64 = problem.spec().wrt.iter().map(|g| sum_bytes(problem, &g.name).next_multiple_of(256)).sum();
        let has_sink = problem.spec().wrt.iter().any(|g| g.name == SINK);
        let sink = if has_sink { sink_bytes(problem.problem().heads_q()) } else { 0 };
        let scratch = programs().map(|program| program.scratch_bytes).max().unwrap_or(0);
        let tokens = if problem.packed().is_some() { PACKED_TENSORS.len() as u64 * token_bytes(problem) } else { 0 };
        let all = usize::try_from(slots + tokens + scratch + sums + sink).unwrap_or(usize::MAX);
        let memory = Buffer::new(device, all)?;
        let (tokens, scratch) = (memory.address() + slots, memory.address() + slots + tokens);
        Ok(Resources { kernels: Kernels::on(device)?, forward, backward, transfers: device.stream()?, memory, tokens, scratch })
    }
}
