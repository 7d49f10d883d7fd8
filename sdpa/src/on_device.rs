//! Executor selection on NVIDIA GPUs, for callers with device memory.

use crate::dispatch::{Choice, Dispatcher, Preference, absent, choose};
use crate::{BackwardProblem, Error, ExecutorName, Problem};
use sdpa_cache::CacheTrace;
use sdpa_nvidia::{Device, DevicePass, NvidiaExecutor};
#[cfg(feature = "distributed")]
use {
    sdpa_core::device::OnDevice,
    sdpa_nvidia::{DeviceSlice, Stream},
};

/// The executors of this build on NVIDIA GPUs, in the order of trying.
const ON_NVIDIA: [ExecutorName; cfg!(feature = "cudnn") as usize + cfg!(feature = "cuda") as usize] = [
    #[cfg(feature = "cudnn")]
    ExecutorName::CUDNN,
    #[cfg(feature = "cuda")]
    ExecutorName::CUDA,
];

/// The device tier, for callers with device memory, has the executors on NVIDIA GPUs. The caller's own executors ([`Dispatcher::with`]), the CPU and
/// Metal compute over host memory and are not tried.
impl Dispatcher {
    /// Returns the device of the first available executor on an NVIDIA GPU.
    ///
    /// # Errors
    /// Returns the failure of the environment if no executor on an NVIDIA GPU is available.
    pub fn device(&self) -> Result<&'static Device, Error> {
        let mut missing = None;
        for name in ON_NVIDIA {
            match self.on_nvidia(name) {
                Ok(executor) => return Ok(executor.device()),
                Err(error) => missing = missing.or(Some(error)),
            }
        }
        Err(missing.unwrap_or_else(|| {
            absent(ExecutorName::new("none"), "no executor is compiled in; enable a feature of the crate sdpa, such as `cuda`".to_owned())
        }))
    }

    /// Selects an executor and prepares the problem on it, for calls over device memory. The order is that of [`Dispatcher::executors_for`]. Like the
    /// selection for host memory, it continues only on *unsupported*, before anything runs.
    ///
    /// Each executor caches plans by problem, so preparing again costs a cache lookup. [`prepared`](Choice::prepared) may be kept: its calls involve
    /// no selection.
    ///
    /// ```
    /// use sdpa::device::{DeviceCall, DeviceForward};
    /// use sdpa::nvidia::{DeviceSlice, Stream};
    /// use sdpa::{AttentionSpec, DType, Dispatcher, Error, Layout, Mask, Preference, Problem, Shape};
    ///
    /// /// # Safety
    /// /// As `DevicePrepared::submit`.
    /// unsafe fn attend(all: &Dispatcher, stream: &Stream, problem: &Problem, [q, k, v, o]: [DeviceSlice; 4]) -> Result<(), Error> {
    ///     let choice = all.prepare_device(problem, Preference::Auto)?;
    ///     let (stats, row_max, sum_exp, attn_scale, workspace) = (None, None, None, None, None);
    ///     let call = DeviceForward::new(q, k, v, o).stats(stats).row_max(row_max).sum_exp(sum_exp).attn_scale(attn_scale).workspace(workspace);
    ///     // SAFETY: the caller upholds the contract.
    ///     unsafe { choice.prepared.submit(stream, &DeviceCall::from(&call)) }
    /// }
    ///
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
    /// let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal()).validate()?;
    /// let all = Dispatcher::default();
    /// match all.device() {
    ///     Ok(device) => println!("{}: on {}", device.name(), all.prepare_device(&problem, Preference::Auto)?.executor),
    ///     Err(missing) => println!("{missing}"),
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// Without batch entries, queries or keys, results are set on the stream. This is unsupported for results with gaps between rows, and for row
    /// statistics with a sink; [`Dispatcher::prepare`] supports these over host memory.
    ///
    /// # Errors
    /// A named executor fails with every reason why it does not support the problem. Automatic selection returns [`Error::Unsupported`]
    /// with the reasons of all tried executors if none of them supports the problem. If none is available at all,
    /// [`Unsupported::is_absence`](crate::Unsupported::is_absence) is true. Any other error is a failure of the environment.
    pub fn prepare_device(&self, problem: &Problem, preference: Preference) -> Result<Choice<DevicePass>, Error> {
        choose(
            preference,
            || in_order(|| self.are_kernels_first(problem)),
            |name| self.on_nvidia(name),
            |executor| executor.prepare_device(problem),
            |executor| executor.unproven(problem),
        )
    }

    /// Selects an executor and prepares the backward problem on it, for calls over device memory, in the order of
    /// [`Dispatcher::executors_for_backward`]. The executor may differ from that of the forward pass.
    ///
    /// # Errors
    /// Fails as [`Dispatcher::prepare_device`] does.
    pub fn prepare_device_backward(&self, problem: &BackwardProblem, preference: Preference) -> Result<Choice<DevicePass>, Error> {
        choose(
            preference,
            || in_order(|| self.are_kernels_first_backward(problem)),
            |name| self.on_nvidia(name),
            |executor| executor.prepare_device_backward(problem),
            |executor| executor.unproven_backward(problem),
        )
    }

    /// Returns a snapshot of the plan caches of all executors on NVIDIA GPUs that were used; `None` if none was used. As JSON it is the
    /// input of `cargo sdpa cache report`.
    pub fn cache_trace(&self) -> Option<CacheTrace> {
        let mut trace: Option<CacheTrace> = None;
        #[cfg(feature = "cudnn")]
        if let Some(Ok(cudnn)) = self.cudnn.get() {
            trace = Some(cudnn.cache_trace());
        }
        #[cfg(feature = "cuda")]
        if let Some(Ok(cuda)) = self.cuda.get() {
            let without_cudnn = || CacheTrace::new("none", cuda.device().name(), Vec::new());
            trace.get_or_insert_with(without_cudnn).caches.extend(cuda.snapshots());
        }
        trace
    }

    /// Returns one of this build's executors by name.
    fn on_nvidia(&self, name: ExecutorName) -> Result<&dyn NvidiaExecutor, Error> {
        #[cfg(feature = "cudnn")]
        if name == ExecutorName::CUDNN {
            return self.cudnn().map(|executor| &**executor as &dyn NvidiaExecutor).map_err(|error| Error::failed(name, error));
        }
        #[cfg(feature = "cuda")]
        if name == ExecutorName::CUDA {
            return self.cuda().map(|executor| &**executor as &dyn NvidiaExecutor).map_err(|error| Error::failed(name, error));
        }
        let known = ON_NVIDIA.map(ExecutorName::name).join(", ");
        Err(absent(name, format!("no executor of this name takes memory of an NVIDIA GPU, expected one of {known}")))
    }
}

/// Selects an executor for each part of a problem over several ranks.
#[cfg(feature = "distributed")]
impl sdpa_parallel::Planner for Dispatcher {
    fn plan(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        self.prepare_device(problem, Preference::Auto).map(|choice| choice.prepared)
    }

    fn plan_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        self.prepare_device_backward(problem, Preference::Auto).map(|choice| choice.prepared)
    }

    fn ordinal(&self) -> Result<u32, Error> {
        self.device().map(Device::ordinal)
    }
}

/// Returns the order of trying without allocating.
fn in_order(kernels_are_first: impl FnOnce() -> bool) -> [ExecutorName; ON_NVIDIA.len()] {
    let mut names = ON_NVIDIA;
    if names.len() > 1 && kernels_are_first() {
        names.reverse();
    }
    names
}
