//! Device passes of problems without a batch entry, a query or a key: they set results on the stream and run no kernel.
#![allow(unsafe_code)]

use crate::call;
use crate::job::Job;
use crate::key::JobQuery;
use sdpa_cache::Query;
use sdpa_core::device::{DeviceCall, DevicePrepared, OnDevice};
use sdpa_core::error::{Error, ExecutorName, Reason, SpecErrors, Unsupported};
use sdpa_core::{DType, Operand, Statistic, empty};
use sdpa_driver::{DeviceSlice, Stream};

/// A pass that only sets results.
#[derive(Debug)]
struct Empty {
    job: Job,
    failed: fn(sdpa_driver::Error) -> Error,
}

/// Prepares the pass of a problem without batch entries, queries or keys; returns `None` for any other problem. Executors try it before
/// they look for a kernel. `failed` converts a driver error to an error of the executor.
///
/// # Errors
/// Fails for results with gaps between their rows, and for row statistics of a problem with a sink, because the value of the sink is in
/// device memory.
pub fn prepare(
    query: &JobQuery<'_>,
    executor: ExecutorName,
    failed: fn(sdpa_driver::Error) -> Error,
) -> Result<Option<OnDevice<DeviceSlice, Stream>>, Unsupported> {
    let problem = match query {
        JobQuery::Forward(problem) => problem,
        JobQuery::Backward(backward) => backward.forward(),
    };
    if !problem.is_empty() {
        return Ok(None);
    }
    let pass = Empty { job: query.to_key(), failed };
    let reasons = pass.reasons();
    if reasons.is_empty() { Ok(Some(std::sync::Arc::new(pass))) } else { Err(Unsupported::new(executor, reasons)) }
}

impl Empty {
    /// Iterates over written operands that have elements.
    fn written(&self) -> impl Iterator<Item = Operand> {
        let writes = |(operand, tensor): &(Operand, sdpa_core::TensorSpec)| self.job.writes(*operand) && !tensor.is_empty();
        self.job.tensors().filter(writes).map(|(operand, _)| operand)
    }

    /// Iterates over written row statistics that have elements.
    fn statistics(&self) -> impl Iterator<Item = Statistic> {
        let written = match &self.job {
            Job::Forward(problem) if problem.stats_elements() > 0 => Statistic::ALL.map(|which| problem.computes(which)),
            Job::Forward(_) | Job::Backward(_) => [false; 3],
        };
        Statistic::ALL.into_iter().zip(written).filter_map(|(which, written)| written.then_some(which))
    }

    fn reasons(&self) -> Vec<Reason> {
        let limit = |field: String, value: String, limit: &str| Reason::Limit { field, value, limit: limit.to_owned() };
        let is_dense = |operand: &Operand| {
            let tensor = self.job.tensor(*operand);
            tensor.is_none_or(|tensor| tensor.extent() == Some(tensor.dims.iter().product()))
        };
        let gaps = self.written().filter(|operand| !is_dense(operand)).map(|operand| {
            let strides = self.job.tensor(operand).map_or([0; 4], |tensor| tensor.strides);
            let rule = "a dense layout: when there are no queries or no keys, one memset fills the whole output";
            limit(format!("{operand}.strides"), format!("{strides:?}"), rule)
        });
        let beside_sink = self.statistics().filter(|_| self.job.problem().sink()).map(|which| {
            let rule = "no request when there are no keys: the value is then computed from the sink, which this executor cannot \
                        read from device memory; use a call with tensors in host memory";
            limit(which.name().to_owned(), "a request".to_owned(), rule)
        });
        gaps.chain(beside_sink).collect()
    }

    /// Returns the memory to set in a checked call, with the values.
    fn results(&self, call: &DeviceCall<'_, DeviceSlice>) -> Result<Vec<(DeviceSlice, f32)>, SpecErrors> {
        let (problem, mut errors, mut results) = (self.job.problem(), Vec::new(), Vec::new());
        let exactly =
            |slice: DeviceSlice, dtype: DType, elements: i64| DeviceSlice { bytes: dtype.bytes(elements.unsigned_abs()), ..slice };
        for operand in self.written() {
            let elements = self.job.tensor(operand).and_then(|tensor| tensor.extent()).unwrap_or(0);
            results.extend(call.operand(operand).map(|slice| (exactly(slice, self.job.dtype_of(operand), elements), 0.0)));
        }
        for which in self.statistics() {
            let value = empty::row_statistic(which, problem.stats_base(), None);
            results.extend(call.statistic(which).map(|slice| (exactly(slice, DType::F32, problem.stats_elements()), value)));
        }
        if let Job::Backward(backward) = &self.job {
            for wanted in backward.wrt() {
                let Some(given) = call.gradients.iter().find(|given| given.name == wanted.name) else { continue };
                let slice = exactly(given.slice, wanted.dtype, backward.gradient_elements(&wanted.name));
                if slice.bytes > 0 {
                    call::memory(&mut errors, &format!("gradient of {}", wanted.name), given.slice, slice.bytes, 16);
                    results.push((slice, 0.0));
                }
            }
        }
        for amax in call.amax {
            call::memory(&mut errors, amax.of.name(), amax.slice, DType::F32.bytes(1), 16);
            results.push((exactly(amax.slice, DType::F32, 1), 0.0));
        }
        if errors.is_empty() { Ok(results) } else { Err(SpecErrors(errors)) }
    }
}

impl DevicePrepared for Empty {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn workspace_bytes(&self) -> u64 {
        0
    }

    fn engine(&self) -> String {
        empty::ENGINE.to_owned()
    }

    unsafe fn submit(&self, stream: &Stream, call: &DeviceCall<'_, DeviceSlice>) -> Result<(), Error> {
        call::check(&self.job, call, 0)?;
        let results = self.results(call)?;
        let submission = stream.begin().map_err(self.failed)?;
        for (slice, value) in results {
            // SAFETY: the slice is within memory of the call. The caller promises its size, and that nothing else uses it.
            let set = unsafe { if value == 0.0 { submission.zero(slice) } else { submission.fill(slice, value) } };
            set.map_err(self.failed)?;
        }
        Ok(())
    }
}
