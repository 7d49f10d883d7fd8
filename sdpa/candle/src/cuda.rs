//! Tensors on NVIDIA GPUs, on cuDNN or on native CUDA kernels. Passes use the stream of candle's device and addresses with offsets, and hold cudarc's events
//! during the submission. No call waits for the GPU.
#![allow(unsafe_code)]

use crate::error::{bug, wrap};
use crate::made::Made;
use crate::param::{Bound, Ready};
use crate::pass::{Gradients, Outputs, Pass, Upstream, elements, gradient_elements, span};
use crate::ranks::Plan;
use candle_core::cuda::cudarc::driver::{CudaSlice, CudaStream, CudaView, DevicePtr, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda::{CudaDType, CudaDevice, CudaStorageSlice};
use candle_core::{CudaStorage, Device, Result, Storage, Tensor};
use half::{bf16, f16};
use sdpa::cudarc::{Attention, Backward, CudarcError, Element, Expected, Forward, Param, Value, ValueMut};
use sdpa::cudnn::CudnnOptions;
use sdpa::device::{DeviceBackward, DeviceForward, OnDevice};
use sdpa::distributed::{ParallelError, Planner, SharedCommunicator};
use sdpa::nvidia::{DeviceSlice, RawStream, Stream};
use sdpa::{BackwardProblem, BackwardSpec, DType, Dispatcher, ExecutorName, Preference, Problem};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// An element type of candle, cudarc and this library.
trait Number: CudaDType + Element + DeviceRepr + ValidAsZeroBits {}
impl Number for f32 {}
impl Number for f16 {}
impl Number for bf16 {}

/// Attributes an error of cudarc to the executor that was running.
fn failed(executor: ExecutorName, error: CudarcError) -> candle_core::Error {
    match error {
        CudarcError::Sdpa(error) => wrap(error),
        other @ (CudarcError::Driver(_) | _) => wrap(sdpa::Error::failed(executor, other)),
    }
}

/// Returns the dispatcher for tensors on a device. There is one dispatcher per device and process. Its executors ([`Dispatcher::cudnn`],
/// [`Dispatcher::cuda`]) load and store files of plans and kernels (`attach`, `save`), so that the first calls of another process build
/// nothing. They also report the contents of their caches. If neither executor is available, the next call tries again.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = candle_core::Device::new_cuda(0)?;
/// sdpa_candle::dispatcher(device.as_cuda_device()?).cuda()?.attach("kernels.bin")?;
/// # Ok(())
/// # }
/// ```
pub fn dispatcher(device: &CudaDevice) -> Arc<Dispatcher> {
    static DISPATCHERS: Mutex<Option<HashMap<usize, Arc<Dispatcher>>>> = Mutex::new(None);
    let ordinal = device.cuda_stream().context().ordinal();
    let mut dispatchers = DISPATCHERS.lock().unwrap_or_else(PoisonError::into_inner);
    let dispatchers = dispatchers.get_or_insert_default();
    if let Some(there) = dispatchers.get(&ordinal) {
        return there.clone();
    }
    let options = CudnnOptions::default().with_ordinal(u32::try_from(ordinal).unwrap_or(u32::MAX));
    let made = Arc::new(Dispatcher::new(options));
    if made.device().is_ok() {
        dispatchers.insert(ordinal, made.clone());
    }
    made
}

impl Pass {
    fn preference(&self) -> Preference {
        self.executor.map_or(Preference::Auto, Preference::Named)
    }
}

/// Prepares the parts of a rank on the selected executor.
pub(crate) struct RankPlanner {
    all: Arc<Dispatcher>,
    preference: Preference,
}

pub(crate) fn planner(device: &CudaDevice, executor: Option<ExecutorName>) -> RankPlanner {
    RankPlanner { all: dispatcher(device), preference: executor.map_or(Preference::Auto, Preference::Named) }
}

impl Planner for RankPlanner {
    fn plan(&self, problem: &Problem) -> std::result::Result<OnDevice<DeviceSlice, Stream>, sdpa::Error> {
        self.all.prepare_device(problem, self.preference).map(|choice| choice.prepared)
    }

    fn plan_backward(&self, problem: &BackwardProblem) -> std::result::Result<OnDevice<DeviceSlice, Stream>, sdpa::Error> {
        self.all.prepare_device_backward(problem, self.preference).map(|choice| choice.prepared)
    }

    fn ordinal(&self) -> std::result::Result<u32, sdpa::Error> {
        self.all.ordinal()
    }
}

/// Waits for the stream of candle's device, and meanwhile looks for failures of other ranks.
pub(crate) fn wait(communicator: &SharedCommunicator, device: &CudaDevice) -> std::result::Result<(), ParallelError> {
    let stream = device.cuda_stream();
    // SAFETY: cudarc keeps the stream alive during this call, and the communicator is on the same device.
    let borrowed = unsafe { Stream::borrow(communicator.device(), RawStream(stream.cu_stream().cast())) };
    Ok(communicator.wait(&borrowed)?)
}

/// A pass that one device computes, or that ranks compute together.
enum Chosen {
    One(ExecutorName, Attention),
    Ranks(Arc<Plan>, &'static sdpa::nvidia::Device),
}

/// The name in errors of cudarc during a pass over several ranks.
const RANKS: ExecutorName = ExecutorName::new("ranks");

impl Chosen {
    fn forward<'a, T: Number>(&'a self, stream: &'a Arc<CudaStream>, call: Forward<'a, T>, pass: &'a Pass) -> Result<()> {
        match self {
            Chosen::One(executor, attention) => attention.forward(stream, call).map_err(|error| failed(*executor, error)),
            Chosen::Ranks(plan, device) => {
                let expected = Expected { device, dtype: pass.problem.dtype(), params: &[], wrt: &[] };
                // SAFETY: cudarc's slices are device memory of the stated length, freed in stream order. Its events, recorded when the call ends, keep other
                // streams from using them; the stream passes the rank's transfers first.
                let submit =
                    |stream: &Stream, call: &DeviceForward<'_, DeviceSlice>| plan.on_device(|rank| unsafe { rank.forward(stream, call) });
                call.placed(stream, &expected, submit).map_err(|error| failed(RANKS, error))?
            }
        }
    }

    fn backward<'a, T: Number>(&'a self, stream: &'a Arc<CudaStream>, call: Backward<'a, T>, spec: &'a BackwardSpec) -> Result<()> {
        match self {
            Chosen::One(executor, attention) => attention.backward(stream, call).map_err(|error| failed(*executor, error)),
            Chosen::Ranks(plan, device) => {
                let expected = Expected { device, dtype: spec.forward.dtype, params: &[], wrt: &spec.wrt };
                // SAFETY: as in the forward pass.
                let submit =
                    |stream: &Stream, call: &DeviceBackward<'_, DeviceSlice>| plan.on_device(|rank| unsafe { rank.backward(stream, call) });
                call.placed(stream, &expected, submit).map_err(|error| failed(RANKS, error))?
            }
        }
    }
}

/// Prepares a backward pass on the selected executor.
fn chosen_backward(pass: &Pass, all: &Dispatcher, problem: &BackwardProblem) -> Result<Chosen> {
    let device = all.device().map_err(wrap)?;
    if let Some(plan) = &pass.plan {
        return Ok(Chosen::Ranks(plan.clone(), device));
    }
    let choice = all.prepare_device_backward(problem, pass.preference()).map_err(wrap)?;
    Ok(Chosen::One(choice.executor, Attention::of_backward(choice.prepared, problem, device)))
}

fn storage(guard: &Storage) -> Result<&CudaStorage> {
    match guard {
        Storage::Cuda(storage) => Ok(storage),
        Storage::Cpu(_) | Storage::Metal(_) => Err(bug("a tensor on CUDA is somewhere else")),
    }
}

fn view<'a, T: CudaDType>(guard: &'a Storage, tensor: &Tensor) -> Result<CudaView<'a, T>> {
    let span = span(tensor);
    let slice = storage(guard)?.as_cuda_slice::<T>()?;
    slice.try_slice(span).ok_or_else(|| bug("a tensor reaches past its storage"))
}

/// Returns the alignment of a tensor's first element in bytes, 16 at most: allocations are aligned to 256.
pub(crate) fn alignment(tensor: &Tensor) -> u32 {
    let offset = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
    1 << offset.trailing_zeros().min(4)
}

/// Allocates memory for a result. It is uninitialised if the pass writes all of it, and 0 for packed sequences, where the pass may leave a part.
fn fresh<T: Number>(device: &CudaDevice, elements: usize, packed: bool) -> Result<CudaSlice<T>> {
    // The driver does not allocate 0 bytes, which a rank without tokens asks for.
    let elements = elements.max(1);
    if packed {
        return device.alloc_zeros::<T>(elements);
    }
    // SAFETY: the tensor is dense, so the pass writes every element, on the stream of the allocation.
    unsafe { device.alloc::<T>(elements) }
}

/// A parameter as a view of its memory.
enum Viewed<'a> {
    Scalar(f32),
    F32(CudaView<'a, f32>),
    F16(CudaView<'a, f16>),
    BF16(CudaView<'a, bf16>),
    I32(CudaView<'a, i32>),
    /// Non-negative integers, read as i32.
    U32(CudaView<'a, u32>),
    I64(CudaView<'a, i64>),
    Bool(CudaView<'a, u8>),
}

/// Calls `f` with the values of these parameters, with their storages locked and their events held.
fn with_params<R>(params: &[&Bound], f: impl FnOnce(&[Param<'_>]) -> Result<R>) -> Result<R> {
    // Copy misaligned tensors: kernels read parameters from addresses that are multiples of 16 bytes.
    let aligned: Vec<Option<Tensor>> = params
        .iter()
        .map(|bound| match &bound.value {
            Ready::Tensor(_, tensor) if alignment(tensor) < 16 => tensor.force_contiguous().map(Some),
            Ready::Tensor(_, tensor) => Ok(Some(tensor.clone())),
            Ready::Scalar(_) | Ready::Number(..) => Ok(None),
            Ready::Bools(_) | Ready::I32(_) | Ready::I64(_) => Err(bug("a parameter on CUDA that was read by the host")),
        })
        .collect::<Result<_>>()?;
    let guards: Vec<_> = aligned.iter().map(|tensor| tensor.as_ref().map(|tensor| tensor.storage_and_layout().0)).collect();
    let mut views = Vec::with_capacity(params.len());
    for ((bound, tensor), guard) in params.iter().zip(&aligned).zip(&guards) {
        views.push(match (&bound.value, tensor, guard) {
            (Ready::Scalar(x) | Ready::Number(x, _), ..) => Viewed::Scalar(*x),
            (Ready::Tensor(dtype, _), Some(tensor), Some(guard)) => match dtype {
                DType::F32 => Viewed::F32(view(guard, tensor)?),
                DType::F16 => Viewed::F16(view(guard, tensor)?),
                DType::BF16 => Viewed::BF16(view(guard, tensor)?),
                DType::I32 if tensor.dtype() == candle_core::DType::U32 => Viewed::U32(view(guard, tensor)?),
                DType::I32 => Viewed::I32(view(guard, tensor)?),
                DType::I64 => Viewed::I64(view(guard, tensor)?),
                DType::Bool => Viewed::Bool(view(guard, tensor)?),
                DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => return Err(bug("a parameter of 8 bits")),
            },
            (Ready::Tensor(..) | Ready::Bools(_) | Ready::I32(_) | Ready::I64(_), ..) => {
                return Err(bug("a parameter without its storage"));
            }
        });
    }
    let values: Vec<Param<'_>> = params
        .iter()
        .zip(&views)
        .map(|(bound, viewed)| {
            let value = match viewed {
                Viewed::Scalar(x) => Value::Scalar(*x),
                Viewed::F32(x) => Value::F32(x),
                Viewed::F16(x) => Value::F16(x),
                Viewed::BF16(x) => Value::BF16(x),
                Viewed::I32(x) => Value::I32(x),
                Viewed::U32(x) => Value::U32(x),
                Viewed::I64(x) => Value::I64(x),
                Viewed::Bool(x) => Value::Bool(x),
            };
            Param::new(&bound.name, value)
        })
        .collect();
    f(&values)
}

pub(crate) fn forward(pass: &Pass, device: &CudaDevice) -> Result<Outputs> {
    let all = &dispatcher(device);
    // Choose and build the backward pass now, so that its errors are reported here and not when gradients are computed.
    if let Some(backward) = pass.backward.as_ref().filter(|_| pass.plan.is_none()) {
        chosen_backward(pass, all, &backward.validate().map_err(wrap)?)?;
    }
    let chosen = &match &pass.plan {
        Some(plan) => Chosen::Ranks(plan.clone(), all.device().map_err(wrap)?),
        None => {
            let choice = all.prepare_device(&pass.problem, pass.preference()).map_err(wrap)?;
            Chosen::One(choice.executor, Attention::of(choice.prepared, &pass.problem, all.device().map_err(wrap)?))
        }
    };
    match pass.problem.dtype() {
        DType::F32 => forward_of::<f32>(pass, chosen, device),
        DType::F16 => forward_of::<f16>(pass, chosen, device),
        DType::BF16 => forward_of::<bf16>(pass, chosen, device),
        DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => {
            Err(bug("an operand that is no floating point number"))
        }
    }
}

fn forward_of<T: Number>(pass: &Pass, chosen: &Chosen, device: &CudaDevice) -> Result<Outputs> {
    let stream = device.cuda_stream();
    let mut o = fresh::<T>(device, elements(&pass.out_shape()), pass.packed)?;
    let mut stats = match pass.problem.stats() {
        // The pass does not write rows outside of all sequences, so set them to −∞ first.
        true if pass.packed => {
            let rows = Tensor::full(f32::NEG_INFINITY, elements(&pass.stats_shape()), &Device::Cuda(device.clone()))?;
            let CudaStorageSlice::F32(rows) = Made::of(rows)?.on_cuda()?.0.slice else {
                return Err(bug("stats that are no f32"));
            };
            Some(rows)
        }
        true => Some(fresh::<f32>(device, elements(&pass.stats_shape()), false)?),
        false => None,
    };
    let [q, k, v] = &pass.operands;
    let guards = [q, k, v].map(|x| x.storage_and_layout().0);
    let (q, k, v) = (view::<T>(&guards[0], q)?, view::<T>(&guards[1], k)?, view::<T>(&guards[2], v)?);
    let params: Vec<&Bound> = pass.params.iter().zip(&pass.only_backward).filter(|(_, only)| !**only).map(|(p, _)| p).collect();
    with_params(&params, |params| {
        let mut call = Forward::new(&q, &k, &v, &mut o).attn_scale(pass.attn_scale).params(params);
        call.stats = stats.as_mut().map(|stats| stats as _);
        chosen.forward(&stream, call, pass)
    })?;
    let wrapped = |stats| Storage::Cuda(CudaStorage::wrap_cuda_slice::<f32>(stats, device.clone()));
    Ok(Outputs { o: Storage::Cuda(CudaStorage::wrap_cuda_slice(o, device.clone())), stats: stats.map(wrapped) })
}

pub(crate) fn backward(
    pass: &Pass,
    spec: &BackwardSpec,
    problem: &BackwardProblem,
    upstream: &Upstream<'_>,
    device: &CudaDevice,
) -> Result<Gradients> {
    let chosen = &chosen_backward(pass, &dispatcher(device), problem)?;
    match spec.forward.dtype {
        DType::F32 => backward_of::<f32>(pass, chosen, (spec, problem), upstream, device),
        DType::F16 => backward_of::<f16>(pass, chosen, (spec, problem), upstream, device),
        DType::BF16 => backward_of::<bf16>(pass, chosen, (spec, problem), upstream, device),
        DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => {
            Err(bug("an operand that is no floating point number"))
        }
    }
}

/// The destination of a parameter's gradient.
enum Written {
    F32(CudaSlice<f32>),
    F16(CudaSlice<f16>),
    BF16(CudaSlice<bf16>),
}

fn backward_of<T: Number>(
    pass: &Pass,
    chosen: &Chosen,
    (spec, problem): (&BackwardSpec, &BackwardProblem),
    upstream: &Upstream<'_>,
    device: &CudaDevice,
) -> Result<Gradients> {
    let stream = device.cuda_stream();
    let of = |n: usize| fresh::<T>(device, gradient_elements(pass, n), pass.packed);
    let (mut dq, mut dk, mut dv) = (of(0)?, of(1)?, of(2)?);
    let mut wrt = Vec::new();
    for g in &spec.wrt {
        let elements = problem.gradient_elements(&g.name) as usize;
        wrt.push(match g.dtype {
            DType::F32 => Written::F32(fresh(device, elements, pass.packed)?),
            DType::F16 => Written::F16(fresh(device, elements, pass.packed)?),
            DType::BF16 => Written::BF16(fresh(device, elements, pass.packed)?),
            DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => {
                return Err(bug("a gradient that is no floating point number"));
            }
        });
    }
    let [q, k, v] = &pass.operands;
    let tensors = [q, k, v, upstream.o, upstream.d_o, upstream.stats];
    let guards = tensors.map(|x| x.storage_and_layout().0);
    let read = |n: usize| view::<T>(&guards[n], tensors[n]);
    let (q, k, v, o, d_o) = (read(0)?, read(1)?, read(2)?, read(3)?, read(4)?);
    let stats = view::<f32>(&guards[5], tensors[5])?;
    with_params(&pass.params.iter().collect::<Vec<_>>(), |params| {
        let gradients = spec.wrt.iter().zip(&mut wrt).map(|(g, written)| {
            let value = match written {
                Written::F32(x) => ValueMut::F32(x),
                Written::F16(x) => ValueMut::F16(x),
                Written::BF16(x) => ValueMut::BF16(x),
            };
            (g.name.as_str(), value)
        });
        let call = Backward::new((&q, &k, &v), (&o, &stats), &d_o as &dyn DevicePtr<T>, (&mut dq, &mut dk, &mut dv))
            .attn_scale(pass.attn_scale)
            .params(params)
            .gradients(gradients);
        chosen.backward(&stream, call, spec)
    })?;
    let operands = [dq, dk, dv].map(|x| Storage::Cuda(CudaStorage::wrap_cuda_slice(x, device.clone())));
    let params = wrt.into_iter().map(|written| {
        Storage::Cuda(match written {
            Written::F32(x) => CudaStorage::wrap_cuda_slice(x, device.clone()),
            Written::F16(x) => CudaStorage::wrap_cuda_slice(x, device.clone()),
            Written::BF16(x) => CudaStorage::wrap_cuda_slice(x, device.clone()),
        })
    });
    Ok(Gradients { operands, params: params.collect() })
}
