//! A call captured into a CUDA graph, and launched repeatedly at the cost of one launch.
#![allow(unsafe_code)]

use super::plan::Planned;
use super::raw::{DeviceBackward, DeviceCall, DeviceForward, DeviceValue};
use crate::error::Error;
use cudnn_graph::{Buffer, Captured, DeviceSlice, Stream};
use smallvec::SmallVec;
use std::sync::Arc;

/// A pass on one stream, captured into a CUDA graph and launched repeatedly at the cost of one launch.
///
/// The first call captures, and so does every call with a changed address or number. A graph contains both, including numbers that cuDNN reads from
/// host memory.
///
/// Launches of a captured call are ordered on its stream. Plans and workspace live until the launches finish, even if this value is dropped first.
#[derive(Debug)]
pub struct Replay {
    planned: Arc<Planned>,
    stream: Arc<Stream>,
    /// The stream for captures: the caller's stream may not allow capture.
    capture_stream: Stream,
    /// `None` only during drop.
    workspace: Option<Buffer>,
    captured: Option<Captured>,
    /// Addresses and numbers of the captured call.
    baked: Baked,
    captures: u64,
}

/// All addresses and numbers that a graph contains.
type Baked = SmallVec<[u64; 32]>;

impl Replay {
    /// Creates a replay of plans from [`CudnnExecutor::attention`](crate::CudnnExecutor::attention), for calls on `stream`. It captures
    /// nothing yet.
    ///
    /// # Errors
    /// Returns a driver error, typically because there is no memory for the workspace.
    pub fn new(planned: Arc<Planned>, stream: Arc<Stream>) -> Result<Replay, Error> {
        let device = stream.device();
        let bytes = usize::try_from(planned.workspace_bytes()).unwrap_or(usize::MAX);
        let (capture_stream, workspace) = (device.stream()?, Some(Buffer::new(device, bytes)?));
        Ok(Replay { planned, stream, capture_stream, workspace, captured: None, baked: Baked::new(), captures: 0 })
    }

    /// Returns the plans that calls run.
    pub fn planned(&self) -> &Arc<Planned> {
        &self.planned
    }

    /// Returns the number of captures: one for the first call, and one for each call that differed from the call before.
    pub fn captures(&self) -> u64 {
        self.captures
    }

    /// Returns the number of kernels, copies and other nodes of the captured call; `None` before the first call.
    pub fn captured_nodes(&self) -> Option<usize> {
        self.captured.as_ref().map(Captured::nodes)
    }

    /// Submits one forward pass. If `call.workspace` is `None`, it uses the replay's workspace.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Planned::forward`], on the stream of this replay.
    ///
    /// # Errors
    /// Fails as [`Planned::forward`] does, or with a driver error.
    pub unsafe fn forward(&mut self, call: &DeviceForward<'_>) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of `submit`.
        unsafe { self.submit(call.into()) }
    }

    /// Submits one backward pass. If `call.workspace` is `None`, it uses the replay's workspace.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Planned::backward`], on the stream of this replay.
    ///
    /// # Errors
    /// Fails as [`Planned::backward`] does, or with a driver error.
    pub unsafe fn backward(&mut self, call: &DeviceBackward<'_>) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of `submit`.
        unsafe { self.submit(call.into()) }
    }

    /// # Safety
    /// As for [`Planned::submit`], on the stream of this replay.
    unsafe fn submit(&mut self, call: DeviceCall<'_>) -> Result<(), Error> {
        let baked = baked(&call);
        let call = DeviceCall { workspace: self.room(call.workspace), ..call };
        // SAFETY: the caller upholds the contract of `submit`.
        self.replay(baked, |planned, handle| unsafe { planned.submit(handle, &call) })
    }

    fn room(&self, given: Option<DeviceSlice>) -> Option<DeviceSlice> {
        given.or_else(|| self.workspace.as_ref().map(|b| DeviceSlice { address: b.address(), bytes: b.bytes() as u64 }))
    }

    fn replay(&mut self, baked: Baked, submit: impl FnOnce(&Planned, &cudnn_graph::Handle<'_>) -> Result<(), Error>) -> Result<(), Error> {
        let captured = match &self.captured {
            Some(captured) if baked == self.baked => captured,
            Some(_) | None => {
                let handle = self.planned.plan.library().handle(&self.capture_stream)?;
                let captured = self.capture_stream.capture(|| submit(&self.planned, &handle))?;
                self.captures += 1;
                self.baked = baked;
                self.captured.insert(captured)
            }
        };
        // SAFETY: the captured call equals the requested call, for which the caller vouches.
        Ok(unsafe { captured.launch(&self.stream) }?)
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        if let Some(workspace) = self.workspace.take() {
            self.stream.device().retire(Box::new(workspace));
        }
    }
}

/// Returns bits that differ for different calls.
fn baked(call: &DeviceCall<'_>) -> Baked {
    let DeviceCall { operands, stats, row_max, sum_exp, amax, attn_scale, params, gradients, workspace } = call;
    let mut all = Baked::new();
    let slice = |all: &mut Baked, s: DeviceSlice| all.extend([s.address, s.bytes]);
    for given in operands.iter().chain([stats, row_max, sum_exp, workspace]) {
        match given {
            Some(given) => slice(&mut all, *given),
            None => all.push(u64::MAX),
        }
    }
    all.push(attn_scale.map_or(u64::MAX, |x| u64::from(x.to_bits())));
    for p in *params {
        name(&mut all, p.name);
        match p.value {
            DeviceValue::Scalar(x) => all.push(u64::from(x.to_bits())),
            DeviceValue::Tensor(dtype, given) | DeviceValue::WithinExtent(dtype, given) => {
                all.push(u64::MAX - 1 - 2 * dtype as u64 - u64::from(p.value.is_within_extent()));
                slice(&mut all, given);
            }
        }
    }
    for g in *gradients {
        name(&mut all, g.name);
        slice(&mut all, g.slice);
    }
    for told in *amax {
        name(&mut all, told.of.name());
        slice(&mut all, told.slice);
    }
    all
}

/// Appends the whole name: different names must give different bits.
fn name(all: &mut Baked, name: &str) {
    all.push(name.len() as u64);
    all.extend(name.as_bytes().chunks(8).map(|bytes| bytes.iter().fold(0, |word, &b| word << 8 | u64::from(b))));
}

#[cfg(test)]
mod tests {
    use super::super::raw::{DeviceGradient, DeviceParam};
    use super::*;

    #[test]
    fn calls_that_differ_in_anything_differ_in_bits() {
        let slice = |address| DeviceSlice { address, bytes: 64 };
        let scalar = |name, x| DeviceParam::new(name, DeviceValue::Scalar(x));
        let (stats, row_max, sum_exp) = (None, None, None);
        let call = DeviceCall {
            operands: [None; 8],
            stats,
            row_max,
            sum_exp,
            amax: &[],
            attn_scale: None,
            params: &[],
            gradients: &[],
            workspace: None,
        };
        let [q, k, other] = [256, 512, 768].map(slice).map(Some);
        let operands = [q, k, None, None, None, None, None, None];
        let of = |operands: [Option<DeviceSlice>; 8]| baked(&DeviceCall { operands, ..call });
        let at = |place: usize, slice| of(std::array::from_fn(|n| if n == place { slice } else { operands[n] }));
        let params = |params: &[DeviceParam<'_>]| baked(&DeviceCall { operands, params, ..call });
        let gradient = |name| baked(&DeviceCall { operands, gradients: &[DeviceGradient::new(name, slice(1024))], ..call });
        let tensor = |dtype| params(&[DeviceParam::new("cap", DeviceValue::Tensor(dtype, slice(1024)))]);
        let calls = [
            of(operands),
            baked(&DeviceCall { operands, attn_scale: Some(0.5), ..call }),
            baked(&DeviceCall { operands, attn_scale: Some(0.25), ..call }),
            baked(&DeviceCall { operands, stats: other, ..call }),
            baked(&DeviceCall { operands, row_max: other, ..call }),
            baked(&DeviceCall { operands, sum_exp: other, ..call }),
            baked(&DeviceCall { operands, workspace: other, ..call }),
            at(1, other),
            at(1, Some(DeviceSlice { address: 512, bytes: 65 })),
            at(2, other),
            of([q, None, k, None, None, None, None, None]),
            params(&[scalar("cap", 1.0), scalar("pac", 2.0)]),
            params(&[scalar("pac", 1.0), scalar("cap", 2.0)]),
            params(&[scalar("cap", 2.0), scalar("pac", 1.0)]),
            tensor(sdpa_core::DType::F32),
            tensor(sdpa_core::DType::F16),
            params(&[DeviceParam::new("cap", DeviceValue::WithinExtent(sdpa_core::DType::F16, slice(1024)))]),
            gradient("cap"),
            gradient("cup"),
        ];
        for (n, a) in calls.iter().enumerate() {
            for (m, b) in calls.iter().enumerate() {
                assert_eq!(n == m, a == b, "{n} {m}");
            }
        }
    }
}
