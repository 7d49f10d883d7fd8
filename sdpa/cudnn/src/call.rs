//! The functional call: each call looks its plans up by specification.
#![allow(unsafe_code)]

use super::raw::{DeviceBackward, DeviceForward};
use crate::CudnnExecutor;
use crate::error::Error;
use crate::lower::JobQuery;
use cudnn_graph::{Device, Stream};
use sdpa_core::backward::{BackwardProblem, BackwardSpec};
use sdpa_core::error::SpecErrors;
use sdpa_core::problem::Problem;
use sdpa_core::spec::AttentionSpec;
use std::cell::RefCell;
use std::rc::Rc;
use std::thread::LocalKey;

/// How many validated specifications each thread keeps. Validation does not depend on the executor, so all executors share them.
const RECENT: usize = 8;

type Recent<S, P> = RefCell<Vec<(S, Rc<P>)>>;

thread_local! {
    /// The most recently used entry is last.
    static FORWARD: Recent<AttentionSpec, Problem> = const { RefCell::new(Vec::new()) };
    static BACKWARD: Recent<BackwardSpec, BackwardProblem> = const { RefCell::new(Vec::new()) };
}

/// Returns the problem of a specification, from the recent ones of this thread or by validation.
fn validated<S: Clone + PartialEq, P>(
    recent: &'static LocalKey<Recent<S, P>>,
    spec: &S,
    validate: impl FnOnce(&S) -> Result<P, SpecErrors>,
) -> Result<Rc<P>, SpecErrors> {
    let found = recent.try_with(|recent| {
        let mut recent = recent.try_borrow_mut().ok()?;
        let at = recent.iter().rposition(|(s, _)| s == spec)?;
        let last = recent.len() - 1;
        recent.swap(at, last);
        Some(recent[last].1.clone())
    });
    if let Ok(Some(found)) = found {
        return Ok(found);
    }
    let problem = Rc::new(validate(spec)?);
    let _ = recent.try_with(|recent| {
        if let Ok(mut recent) = recent.try_borrow_mut() {
            if recent.len() == RECENT {
                recent.remove(0);
            }
            recent.push((spec.clone(), problem.clone()));
        }
    });
    Ok(problem)
}

impl CudnnExecutor {
    /// Computes attention in one call. It takes the plans of the specification from the cache, or builds them, and submits one forward
    /// pass to a stream. Only the first call waits, for the build.
    ///
    /// A hit takes no lock that another thread wants. It allocates nothing for up to eight parameters and for addresses that recur (`docs/cache.md`).
    /// Defaults of scalars in the specification are ignored: `call` has all values.
    ///
    /// ```no_run
    /// use sdpa_cudnn::{CudnnExecutor, CudnnOptions, DeviceForward};
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// # fn slice(bytes: u64) -> cudnn_graph::DeviceSlice { cudnn_graph::DeviceSlice { address: 0, bytes } }
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let executor = CudnnExecutor::new(CudnnOptions::default())?;
    /// let stream = executor.device().stream()?;
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
    /// let (q, k, v, o) = (slice(8 * 128 * 64 * 2), slice(2 * 128 * 64 * 2), slice(2 * 128 * 64 * 2), slice(8 * 128 * 64 * 2));
    /// let call = DeviceForward::new(q, k, v, o);
    /// // SAFETY: the slices are device memory of this device, as large as said, and nothing else writes them until the stream is done.
    /// unsafe { executor.sdpa(&stream, &spec, &call) }?;
    /// stream.synchronize()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Planned::forward`](super::Planned::forward). All memory is on the device of `stream`.
    ///
    /// # Errors
    /// Returns every rule that the specification breaks, an error if `stream` is of another device, and the errors of [`CudnnExecutor::attention`]
    /// and [`Planned::forward`](super::Planned::forward).
    pub unsafe fn sdpa(&self, stream: &Stream, spec: &AttentionSpec, call: &DeviceForward<'_>) -> Result<(), Error> {
        self.check_device(stream.device())?;
        let problem = validated(&FORWARD, spec, AttentionSpec::validate)?;
        let handle = self.library.handle(stream)?;
        // SAFETY: the caller upholds the contract of `Planned::forward`.
        self.with(&self.forward, &JobQuery::Forward(&problem), |planned| unsafe { planned.forward(&handle, call) })?
    }

    /// Computes the backward pass in one call. It takes the plans of the specification from the cache, or builds them, and submits one
    /// backward pass to a stream.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Planned::backward`](super::Planned::backward). All memory is on the device of `stream`.
    ///
    /// # Errors
    /// Fails as [`CudnnExecutor::sdpa`] does.
    pub unsafe fn sdpa_backward(&self, stream: &Stream, spec: &BackwardSpec, call: &DeviceBackward<'_>) -> Result<(), Error> {
        self.check_device(stream.device())?;
        let problem = validated(&BACKWARD, spec, BackwardSpec::validate)?;
        let handle = self.library.handle(stream)?;
        // SAFETY: the caller upholds the contract of `Planned::backward`.
        self.with(&self.backward, &JobQuery::Backward(&problem), |planned| unsafe { planned.backward(&handle, call) })?
    }

    fn check_device(&self, device: &Device) -> Result<(), SpecErrors> {
        let (there, here) = (device.ordinal(), self.device.ordinal());
        if there == here {
            return Ok(());
        }
        Err(SpecErrors(vec![sdpa_core::SpecError::new("stream device", there, format!("{here}, the device of the executor"))]))
    }
}
