//! A pass that was prepared for tensors of one layout.

use crate::call::{Call, Value, length};
use crate::chosen::Chosen;
use crate::cuda;
use crate::error::{Told, of, one};
use crate::pool;
use crate::program::named;
use pyo3::prelude::*;
use sdpa::cpu::CpuExecutor;
use sdpa::expr::Declared;
use sdpa::nvidia::Job;
use sdpa::{BackwardProblem, Executor, ExecutorName, Prepared, PreparedBackward, Problem, TensorSpec};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of multiply-adds that a processor completes in the time of waking another thread.
const SMALL: i64 = 1 << 16;

/// The problem of a requested pass, forward or backward, before it is prepared.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    Forward(Box<Problem>),
    Backward(Box<BackwardProblem>),
}

impl Asked {
    fn params(&self) -> &[Declared] {
        match self {
            Asked::Forward(problem) => problem.params(),
            Asked::Backward(problem) => problem.params(),
        }
    }

    /// Returns true if a call has memory for stats; stats without elements may have the address 0.
    fn has_stats(&self) -> bool {
        match self {
            Asked::Forward(problem) => problem.stats(),
            Asked::Backward(_) => true,
        }
    }

    /// Returns the number of multiply-adds of a forward pass without a mask.
    fn products(&self) -> i64 {
        let problem = match self {
            Asked::Forward(problem) => problem,
            Asked::Backward(problem) => problem.forward(),
        };
        let ([b, h, q, d], [_, _, k, _], [_, _, _, d_v]) = (problem.q().dims, problem.k().dims, problem.v().dims);
        [h, q, k, d.saturating_add(d_v)].into_iter().fold(b, i64::saturating_mul)
    }

    pub(crate) fn job(&self) -> Job {
        match self.clone() {
            Asked::Forward(problem) => Job::Forward(problem),
            Asked::Backward(problem) => Job::Backward(problem),
        }
    }
}

/// A prepared pass, by the kind of executor that runs it.
#[derive(Debug)]
pub(crate) enum Ready {
    Host(Arc<dyn Prepared>),
    HostBackward(Arc<dyn PreparedBackward>),
    Device(Chosen),
}

/// Returns an error if the selected executor does not read tensors on this device.
fn reads(named: Option<ExecutorName>, device: Option<u32>) -> PyResult<()> {
    let (place, read): (_, &[ExecutorName]) = match device {
        None => ("in host memory", &[ExecutorName::CPU]),
        Some(_) => ("of an NVIDIA GPU", &[ExecutorName::CUDNN, ExecutorName::CUDA]),
    };
    match named {
        Some(named) if !read.contains(&named) => {
            let names: Vec<&str> = read.iter().map(|name| name.name()).collect();
            Err(one("executor", named, format!("one that reads tensors {place}: {}", names.join(", "))))
        }
        Some(_) | None => Ok(()),
    }
}

/// A pass that was prepared on an executor for tensors of one layout.
#[pyclass(frozen, module = "sdpa._native")]
#[derive(Debug)]
pub struct Plan {
    asked: Asked,
    ready: Ready,
    /// Names of the tensors of a call, and whether this pass reads each.
    tensors: Vec<(String, bool)>,
    scalars: Vec<(String, bool)>,
    /// The number of elements of the memory of each operand, in the order of the pass, and of stats.
    elements: (Vec<usize>, usize),
    /// Whether one thread finishes before another would have started.
    small: bool,
    calls: AtomicU64,
    engine: Mutex<Option<String>>,
}

impl Plan {
    /// Prepares a pass over operands in this memory, on the named executor or on the first one that supports it.
    pub(crate) fn new(
        py: Python<'_>,
        asked: Asked,
        memory: &[TensorSpec],
        device: Option<u32>,
        named: Option<ExecutorName>,
        names: (Vec<String>, Vec<String>),
    ) -> PyResult<Plan> {
        reads(named, device)?;
        let ready = match (&asked, device) {
            (Asked::Forward(problem), None) => Ready::Host(CpuExecutor::new().prepare(problem).map_err(of)?),
            (Asked::Backward(problem), None) => Ready::HostBackward(CpuExecutor::new().prepare_backward(problem).map_err(of)?),
            (_, Some(ordinal)) => {
                let all = cuda::dispatcher(py, ordinal)?;
                Ready::Device(py.detach(|| Chosen::new(all, &asked, named)).map_err(of)?)
            }
        };
        let read = |names: Vec<String>| -> Vec<(String, bool)> {
            let is_read = |name: &str| asked.params().iter().any(|p| p.name == name);
            names.into_iter().map(|name| (is_read(&name), name)).map(|(read, name)| (name, read)).collect()
        };
        let (tensors, scalars) = (read(names.0), read(names.1));
        let small = asked.products() <= SMALL;
        let rows = memory.first().map_or(0, |q| q.dims[..3].iter().product());
        let elements = (memory.iter().map(length).collect(), usize::try_from(rows).unwrap_or(0));
        Ok(Plan { asked, elements, ready, tensors, scalars, small, calls: AtomicU64::new(0), engine: Mutex::new(None) })
    }
}

#[pymethods]
impl Plan {
    /// Bytes of device memory that a call needs besides its tensors.
    #[getter]
    fn workspace_bytes(&self) -> u64 {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => 0,
            Ready::Device(chosen) => chosen.pass.workspace_bytes(),
        }
    }

    /// Number of runs.
    #[getter]
    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// The engine that runs it; for the CPU executor known after the first call.
    #[getter]
    fn engine(&self) -> Option<String> {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            Ready::Device(chosen) => Some(format!("{} {}", chosen.executor, chosen.pass.engine())),
        }
    }

    /// Operands that are copied on the device first, because no engine reads their layout.
    #[getter]
    fn copied(&self) -> Vec<&'static str> {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => Vec::new(),
            Ready::Device(chosen) => chosen.pass.copied(),
        }
    }

    /// The name of the executor.
    #[getter]
    fn executor(&self) -> &'static str {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => ExecutorName::CPU.name(),
            Ready::Device(chosen) => chosen.executor.name(),
        }
    }

    /// Features that the ledger of the executor does not cover, for a plan on a GPU.
    #[getter]
    fn unproven(&self) -> Option<String> {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => None,
            Ready::Device(chosen) => chosen.unproven(),
        }
    }

    /// Other executors of a GPU, with their reasons for not running it.
    fn others(&self) -> Vec<Told> {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => Vec::new(),
            Ready::Device(chosen) => chosen.others(&self.asked),
        }
    }

    /// The library that runs it or compiled it: name, version and file; `None` for the CPU executor.
    #[getter]
    fn library(&self) -> PyResult<Option<(&'static str, String, String)>> {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => Ok(None),
            Ready::Device(chosen) => chosen.library().map(Some).map_err(of),
        }
    }

    /// The plan cache's explanation, for a plan on a GPU.
    fn explain(&self) -> PyResult<Option<String>> {
        match &self.ready {
            Ready::Host(_) | Ready::HostBackward(_) => Ok(None),
            Ready::Device(chosen) => chosen.explain(&self.asked.job()).map(Some).map_err(of),
        }
    }

    /// Runs it. Takes addresses of the operands in the order of the pass, of stats, of tensors (with element type and number of elements), values of scalars,
    /// and addresses of gradients. The CPU executor uses `threads` threads and waits; a plan on a GPU is submitted to `stream` without waiting.
    #[pyo3(signature = (operands, stats, params, scalars, gradients, scale, threads, stream, workspace))]
    #[allow(clippy::too_many_arguments, reason = "what Python passes by position, in the hot path")]
    fn run(
        &self,
        py: Python<'_>,
        operands: Vec<u64>,
        stats: u64,
        params: Vec<(u64, String, usize)>,
        scalars: Vec<f32>,
        gradients: Vec<u64>,
        scale: Option<f32>,
        threads: usize,
        stream: u64,
        workspace: u64,
    ) -> PyResult<()> {
        let values = params.into_iter().map(|(address, dtype, elements)| Ok(Value::Tensor { address, dtype: named(&dtype)?, elements }));
        let given = Given { operands: &operands, stats, params: values.collect::<PyResult<_>>()?, scalars, gradients: &gradients, scale };
        self.start(py, given, threads, stream, workspace)
    }
}

/// The arguments of a call.
#[derive(Debug)]
pub(crate) struct Given<'a> {
    pub(crate) operands: &'a [u64],
    pub(crate) stats: u64,
    pub(crate) params: Vec<Value>,
    pub(crate) scalars: Vec<f32>,
    pub(crate) gradients: &'a [u64],
    pub(crate) scale: Option<f32>,
}

impl Plan {
    pub(crate) fn start(&self, py: Python<'_>, given: Given<'_>, threads: usize, stream: u64, workspace: u64) -> PyResult<()> {
        let Given { operands, stats, params, scalars, gradients, scale } = given;
        if params.len() != self.tensors.len() || scalars.len() != self.scalars.len() {
            let rule = format!("{} tensors and {} scalars", self.tensors.len(), self.scalars.len());
            return Err(one("parameters", format!("{} tensors and {} scalars", params.len(), scalars.len()), rule));
        }
        let mut values: Vec<(&str, Value)> = Vec::with_capacity(params.len() + scalars.len());
        for ((name, read), &value) in self.tensors.iter().zip(&params) {
            if *read {
                values.push((name, value));
            }
        }
        for ((name, read), x) in self.scalars.iter().zip(scalars) {
            if *read {
                values.push((name, Value::Scalar(x)));
            }
        }
        let call = Call {
            operands,
            elements: (&self.elements.0, self.elements.1),
            stats: self.asked.has_stats().then_some(stats),
            values: &values,
            gradients,
            scale,
        };
        self.calls.fetch_add(1, Ordering::Relaxed);
        match (&self.ready, &self.asked) {
            (Ready::Host(prepared), Asked::Forward(problem)) => {
                let report = pool::run(py, threads, self.small, || call.forward(problem, &**prepared))?.map_err(of)?;
                *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = Some(report.engine);
            }
            (Ready::HostBackward(prepared), Asked::Backward(problem)) => {
                let report = pool::run(py, threads, self.small, || call.backward(problem, &**prepared))?.map_err(of)?;
                *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = Some(report.engine);
            }
            (Ready::Device(chosen), asked) => {
                cuda::same_process()?;
                py.detach(|| call.submit(asked, chosen.device, &*chosen.pass, stream, workspace)).map_err(of)?;
            }
            (Ready::Host(_) | Ready::HostBackward(_), _) => {
                return Err(one(
                    "pass",
                    "a call of the other direction",
                    "a forward call for a forward plan, or a backward call for a backward plan",
                ));
            }
        }
        Ok(())
    }
}
