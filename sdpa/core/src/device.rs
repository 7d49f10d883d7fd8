//! Calls over device memory, and the trait of executors that run them.
//!
//! The executor defines the types of device memory and stream: an address with a length and a CUDA stream, or a buffer with an offset and a command
//! queue. The rest of a call is common to all executors.
#![allow(unsafe_code, reason = "the tier's contract is its callers': see DevicePrepared::submit")]

use crate::backward::BackwardProblem;
use crate::dtype::DType;
use crate::error::Error;
use crate::executor::Executor;
use crate::expr::Declared;
use crate::fp8::Amax;
use crate::operand::Operand;
use crate::problem::Problem;
use crate::statistic::Statistic;
use smallvec::SmallVec;
use std::fmt::Debug;
use std::sync::Arc;

/// A declared parameter and its value in one call.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceParam<'a, M> {
    /// The name under which the parameter was declared.
    pub name: &'a str,
    /// The value of the parameter in this call.
    pub value: DeviceValue<M>,
}

/// The value of a declared parameter: a number, or the memory of a tensor. Exhaustive, because executors match every kind of value.
#[derive(Clone, Copy, Debug)]
pub enum DeviceValue<M> {
    /// The value of a scalar parameter.
    Scalar(f32),
    /// The memory of a tensor: dense, of this element type, 16-byte aligned. A boolean is a byte, 0 or 1.
    Tensor(DType, M),
    /// The memory of a tensor of lengths (`seq_len_q`, `seq_len_kv`), like [`DeviceValue::Tensor`]. The caller promises that each length
    /// is between 0 and the extent of its axis, so executors need not clamp them (cuDNN from 9.26 on). **If a length breaks the promise,
    /// results are written past the end of `stats` and of gradients.**
    WithinExtent(DType, M),
}

impl<'a, M> DeviceParam<'a, M> {
    /// Binds a value to the declared parameter `name`.
    pub fn new(name: &'a str, value: DeviceValue<M>) -> DeviceParam<'a, M> {
        DeviceParam { name, value }
    }
}

impl<M: Copy> DeviceValue<M> {
    /// Returns the element type and the memory of a tensor; `None` for a scalar.
    pub fn tensor(&self) -> Option<(DType, M)> {
        match *self {
            DeviceValue::Scalar(_) => None,
            DeviceValue::Tensor(dtype, memory) | DeviceValue::WithinExtent(dtype, memory) => Some((dtype, memory)),
        }
    }

    /// Returns whether this is a tensor of lengths that the caller promises to be within the extent of their axis.
    pub fn is_within_extent(&self) -> bool {
        match self {
            DeviceValue::Scalar(_) | DeviceValue::Tensor(..) => false,
            DeviceValue::WithinExtent(..) => true,
        }
    }
}

/// The parameters of a call. The list allocates nothing for up to eight of them.
pub type DeviceParams<'a, M> = SmallVec<[DeviceParam<'a, M>; 8]>;

/// Adds the default values of the declared scalars that a call does not name.
pub fn with_defaults<'a, M: Copy>(declared: &'a [Declared], mut given: DeviceParams<'a, M>) -> DeviceParams<'a, M> {
    for p in declared {
        if let Some(default) = p.default.filter(|_| given.iter().all(|g| g.name != p.name)) {
            given.push(DeviceParam { name: &p.name, value: DeviceValue::Scalar(default) });
        }
    }
    given
}

/// The destination of the gradient of a declared parameter.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceGradient<'a, M> {
    /// The name of the declared parameter whose gradient is written.
    pub name: &'a str,
    /// Memory for the gradient: dense, in the element type that the problem requests, 16-byte aligned.
    pub slice: M,
}

/// The destination of a tensor's amax, which a call of 8-bit floats writes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceAmax<M> {
    /// The tensor whose amax is written.
    pub of: Amax,
    /// Memory for the amax: one f32, 16-byte aligned.
    pub slice: M,
}

/// Device memory and scalars of one forward call. Memory of a tensor without elements may have the address 0.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceForward<'a, M> {
    /// Queries, strided as the problem says.
    pub q: M,
    /// Keys, strided as the problem says; for a paged problem, the page pool.
    pub k: M,
    /// Values, strided as the problem says; for a paged problem, the page pool.
    pub v: M,
    /// Output, strided as the problem says; only elements that belong to the tensor are written.
    pub o: M,
    /// The log-sum-exp of each row: f32, (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense, 16-byte aligned. Required
    /// if the problem computes `stats`, and otherwise `None`.
    pub stats: Option<M>,
    /// The largest score of each row, in the layout of `stats`. Required if the problem computes
    /// [`row_max`](crate::AttentionSpec::row_max), and otherwise `None`.
    pub row_max: Option<M>,
    /// The sum of exponentials of each row, in the layout of `stats`. Required if the problem computes
    /// [`sum_exp`](crate::AttentionSpec::sum_exp), and otherwise `None`.
    pub sum_exp: Option<M>,
    /// Factor of the scores; must be positive on cuDNN. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of all declared parameters, including scalars that have a default. The executor does not know the defaults, because
    /// specifications that differ only in defaults share a plan; [`with_defaults`] adds them.
    pub params: &'a [DeviceParam<'a, M>],
    /// Destinations of amax values, one for each value that the pass computes; empty for a pass without 8-bit floats.
    pub amax: &'a [DeviceAmax<M>],
    /// Workspace of at least [`DevicePrepared::workspace_bytes`] bytes, 256-byte aligned. With `None`, the executor uses memory that it
    /// keeps for calls of this thread on this stream.
    pub workspace: Option<M>,
}

/// Device memory and scalars of one backward call. Memory of a tensor without elements may have the address 0.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceBackward<'a, M> {
    /// Queries, strided as the problem says.
    pub q: M,
    /// Keys, strided as the problem says.
    pub k: M,
    /// Values, strided as the problem says.
    pub v: M,
    /// Output of the forward pass, strided as the problem says.
    pub o: M,
    /// `stats` of the forward pass: f32, (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense, 16-byte aligned.
    pub stats: M,
    /// Gradient of the output, strided as the problem says.
    pub d_o: M,
    /// Gradient of the queries, strided as the problem says; only elements that belong to the tensor are written.
    pub dq: M,
    /// Gradient of the keys, strided as the problem says; only elements that belong to the tensor are written.
    pub dk: M,
    /// Gradient of the values, strided as the problem says; only elements that belong to the tensor are written.
    pub dv: M,
    /// Factor of the scores, as in the forward pass. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of all declared parameters, as in the forward pass.
    pub params: &'a [DeviceParam<'a, M>],
    /// Destinations of gradients of declared parameters, one for each gradient that the problem computes.
    pub gradients: &'a [DeviceGradient<'a, M>],
    /// Destinations of amax values, one for each value that the pass computes; empty for a pass without 8-bit floats.
    pub amax: &'a [DeviceAmax<M>],
    /// Workspace of at least [`DevicePrepared::workspace_bytes`] bytes, 256-byte aligned. With `None`, the executor uses memory that it
    /// keeps for calls of this thread on this stream.
    pub workspace: Option<M>,
}

impl<'a, M> DeviceGradient<'a, M> {
    /// Creates the request to write the gradient of the declared parameter `name` to `slice`.
    pub fn new(name: &'a str, slice: M) -> DeviceGradient<'a, M> {
        DeviceGradient { name, slice }
    }
}

impl<M> DeviceAmax<M> {
    /// Creates the request to write the amax of the tensor `of` to `slice`.
    pub fn new(of: Amax, slice: M) -> DeviceAmax<M> {
        DeviceAmax { of, slice }
    }
}

impl<'a, M> DeviceForward<'a, M> {
    /// Creates a call over these operands with the default scale and no parameters, which writes only `o`.
    ///
    /// ```
    /// use sdpa_core::device::DeviceForward;
    /// // Memory is what the executor takes, such as an address with a length.
    /// let call = DeviceForward::new(0x1000u64, 0x2000, 0x3000, 0x4000).stats(0x5000).attn_scale(0.125);
    /// assert_eq!((call.stats, call.workspace), (Some(0x5000), None));
    /// ```
    pub fn new(q: M, k: M, v: M, o: M) -> DeviceForward<'a, M> {
        DeviceForward { q, k, v, o, stats: None, row_max: None, sum_exp: None, attn_scale: None, params: &[], amax: &[], workspace: None }
    }

    /// Sets the queries.
    #[must_use]
    pub fn q(mut self, q: M) -> Self {
        self.q = q;
        self
    }

    /// Sets the keys.
    #[must_use]
    pub fn k(mut self, k: M) -> Self {
        self.k = k;
        self
    }

    /// Sets the values.
    #[must_use]
    pub fn v(mut self, v: M) -> Self {
        self.v = v;
        self
    }

    /// Sets the output.
    #[must_use]
    pub fn o(mut self, o: M) -> Self {
        self.o = o;
        self
    }

    /// Sets the destination of `stats`, for a problem that computes them.
    #[must_use]
    pub fn stats(mut self, stats: impl Into<Option<M>>) -> Self {
        self.stats = stats.into();
        self
    }

    /// Sets the destination of the largest score of each row, for a problem that computes it.
    #[must_use]
    pub fn row_max(mut self, row_max: impl Into<Option<M>>) -> Self {
        self.row_max = row_max.into();
        self
    }

    /// Sets the destination of the sum of exponentials of each row, for a problem that computes it.
    #[must_use]
    pub fn sum_exp(mut self, sum_exp: impl Into<Option<M>>) -> Self {
        self.sum_exp = sum_exp.into();
        self
    }

    /// Sets the factor of the scores; `None` for `1 / √dim_qk`.
    #[must_use]
    pub fn attn_scale(mut self, attn_scale: impl Into<Option<f32>>) -> Self {
        self.attn_scale = attn_scale.into();
        self
    }

    /// Sets the values of all declared parameters; see [`with_defaults`].
    #[must_use]
    pub fn params(mut self, params: &'a [DeviceParam<'a, M>]) -> Self {
        self.params = params;
        self
    }

    /// Sets the destinations of amax values, for a pass of 8-bit floats.
    #[must_use]
    pub fn amax(mut self, amax: &'a [DeviceAmax<M>]) -> Self {
        self.amax = amax;
        self
    }

    /// Sets the workspace; `None` for memory that the executor keeps for calls of this thread on this stream.
    #[must_use]
    pub fn workspace(mut self, workspace: impl Into<Option<M>>) -> Self {
        self.workspace = workspace.into();
        self
    }
}

impl<'a, M> DeviceBackward<'a, M> {
    /// Creates a call that reads the forward pass's operands, output and `stats`, and the output's gradient `d_o`. It writes the gradients of `q`,
    /// `k` and `v`, with the default scale and no parameters.
    ///
    /// ```
    /// use sdpa_core::device::DeviceBackward;
    /// let call = DeviceBackward::new((1u64, 2, 3), (4, 5), 6, (7, 8, 9)).workspace(10);
    /// assert_eq!((call.stats, call.d_o, call.dv), (5, 6, 9));
    /// ```
    pub fn new((q, k, v): (M, M, M), (o, stats): (M, M), d_o: M, (dq, dk, dv): (M, M, M)) -> DeviceBackward<'a, M> {
        DeviceBackward { q, k, v, o, stats, d_o, dq, dk, dv, attn_scale: None, params: &[], gradients: &[], amax: &[], workspace: None }
    }

    /// Sets the stats of the forward pass.
    #[must_use]
    pub fn stats(mut self, stats: M) -> Self {
        self.stats = stats;
        self
    }

    /// Sets the gradient of the output.
    #[must_use]
    pub fn d_o(mut self, d_o: M) -> Self {
        self.d_o = d_o;
        self
    }

    /// Sets the gradient of the queries.
    #[must_use]
    pub fn dq(mut self, dq: M) -> Self {
        self.dq = dq;
        self
    }

    /// Sets the gradient of the keys.
    #[must_use]
    pub fn dk(mut self, dk: M) -> Self {
        self.dk = dk;
        self
    }

    /// Sets the gradient of the values.
    #[must_use]
    pub fn dv(mut self, dv: M) -> Self {
        self.dv = dv;
        self
    }

    /// Sets the factor of the scores; `None` for `1 / √dim_qk`.
    #[must_use]
    pub fn attn_scale(mut self, attn_scale: impl Into<Option<f32>>) -> Self {
        self.attn_scale = attn_scale.into();
        self
    }

    /// Sets the values of all declared parameters; see [`with_defaults`].
    #[must_use]
    pub fn params(mut self, params: &'a [DeviceParam<'a, M>]) -> Self {
        self.params = params;
        self
    }

    /// Sets the destinations of gradients of declared parameters.
    #[must_use]
    pub fn gradients(mut self, gradients: &'a [DeviceGradient<'a, M>]) -> Self {
        self.gradients = gradients;
        self
    }

    /// Sets the destinations of amax values, for a pass of 8-bit floats.
    #[must_use]
    pub fn amax(mut self, amax: &'a [DeviceAmax<M>]) -> Self {
        self.amax = amax;
        self
    }

    /// Sets the workspace; `None` for memory that the executor keeps for calls of this thread on this stream.
    #[must_use]
    pub fn workspace(mut self, workspace: impl Into<Option<M>>) -> Self {
        self.workspace = workspace.into();
        self
    }
}

/// A call of a forward or backward pass, with its operands in an array. [`DeviceForward`] and [`DeviceBackward`] convert into it.
/// Exhaustive, so that executors can list the fields.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCall<'a, M> {
    /// Memory of each [`Operand`], in the order of [`Operand::ALL`]; `None` for operands that the pass does not have.
    pub operands: [Option<M>; Operand::ALL.len()],
    /// The log-sum-exp of each row: f32, (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense, 16-byte aligned. A
    /// forward pass writes it on request; the backward pass reads it.
    pub stats: Option<M>,
    /// The largest score of each row, in the layout of `stats`. A forward pass writes it on request.
    pub row_max: Option<M>,
    /// The sum of exponentials of each row, in the layout of `stats`. A forward pass writes it on request.
    pub sum_exp: Option<M>,
    /// Factor of the scores. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of all declared parameters.
    pub params: &'a [DeviceParam<'a, M>],
    /// Destinations of gradients of declared parameters, one for each gradient that the problem computes.
    pub gradients: &'a [DeviceGradient<'a, M>],
    /// Destinations of amax values, one for each value that the pass computes; empty for a pass without 8-bit floats.
    pub amax: &'a [DeviceAmax<M>],
    /// Workspace of at least [`DevicePrepared::workspace_bytes`] bytes, 256-byte aligned. With `None`, the executor uses memory that it
    /// keeps for calls of this thread on this stream.
    pub workspace: Option<M>,
}

impl<M: Copy> DeviceCall<'_, M> {
    /// Returns the memory of an operand; `None` if the call has none.
    pub fn operand(&self, operand: Operand) -> Option<M> {
        self.operands[operand as usize]
    }

    /// Returns the memory that the call passes for a row statistic; `None` if it passes none.
    pub fn statistic(&self, statistic: Statistic) -> Option<M> {
        match statistic {
            Statistic::Stats => self.stats,
            Statistic::RowMax => self.row_max,
            Statistic::SumExp => self.sum_exp,
        }
    }
}

impl<'a, M: Copy> From<&DeviceForward<'a, M>> for DeviceCall<'a, M> {
    fn from(call: &DeviceForward<'a, M>) -> DeviceCall<'a, M> {
        let DeviceForward { q, k, v, o, stats, row_max, sum_exp, attn_scale, params, amax, workspace } = *call;
        let operands = [Some(q), Some(k), Some(v), Some(o), None, None, None, None];
        DeviceCall { operands, stats, row_max, sum_exp, attn_scale, params, gradients: &[], amax, workspace }
    }
}

impl<'a, M: Copy> From<&DeviceBackward<'a, M>> for DeviceCall<'a, M> {
    fn from(call: &DeviceBackward<'a, M>) -> DeviceCall<'a, M> {
        let DeviceBackward { q, k, v, o, stats, d_o, dq, dk, dv, attn_scale, params, gradients, amax, workspace } = *call;
        let operands = [q, k, v, o, d_o, dq, dk, dv].map(Some);
        DeviceCall { operands, stats: Some(stats), row_max: None, sum_exp: None, attn_scale, params, gradients, amax, workspace }
    }
}

/// A forward or backward pass, prepared on any executor with this memory and stream type.
pub type OnDevice<M, S> = Arc<dyn DevicePrepared<Memory = M, Stream = S>>;

/// An executor that also runs on device memory of the caller.
pub trait DeviceExecutor: Executor {
    /// A piece of device memory, as calls name it.
    type Memory: Copy + Debug;
    /// The stream to which work is submitted.
    type Stream: ?Sized;

    /// Returns the prepared problem, from the executor's cache if it is there.
    ///
    /// # Errors
    /// Fails as [`Executor::prepare`] does.
    fn prepare_device(&self, problem: &Problem) -> Result<OnDevice<Self::Memory, Self::Stream>, Error>;

    /// Returns the prepared backward problem, from the executor's cache if it is there.
    ///
    /// # Errors
    /// Fails as [`Executor::prepare`] does.
    fn prepare_device_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<Self::Memory, Self::Stream>, Error>;
}

/// A pass prepared on one executor, for device memory.
pub trait DevicePrepared: Debug + Send + Sync {
    /// A piece of device memory, as calls name it.
    type Memory: Copy + Debug;
    /// The stream to which work is submitted.
    type Stream: ?Sized;

    /// Returns the size of the workspace that a call needs, in bytes.
    fn workspace_bytes(&self) -> u64;

    /// Returns a description of the engine with its knobs, or of the kernel with its tile, for reports.
    fn engine(&self) -> String;

    /// Returns the names of the operands that each call copies first, because no kernel can read them in place.
    fn copied(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Submits one pass, without waiting.
    ///
    /// # Safety
    /// These must hold until the stream has passed this call:
    /// - Every slice is memory of the stream's device and as large as stated.
    /// - Lengths are as [`DeviceValue::WithinExtent`] requires.
    /// - Nothing else uses the written memory or the workspace, and nothing writes the memory that is read.
    ///
    /// `self` may be dropped earlier. Resources that the device needs live until the work is done and every graph that captured the call is gone.
    ///
    /// # Errors
    /// Returns every mistake in the call before anything runs:
    /// - operands of the other pass, or a scale that the executor does not support
    /// - row statistics that are missing or superfluous
    /// - parameters and gradients that are missing, unknown, repeated or of another type
    /// - memory that is too short or misaligned
    ///
    /// Any other error is a failure of the environment.
    unsafe fn submit(&self, stream: &Self::Stream, call: &DeviceCall<'_, Self::Memory>) -> Result<(), Error>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operand::Direction;

    #[test]
    fn each_operand_comes_to_its_own_place() {
        let params = [];
        let forward = DeviceForward {
            q: 0,
            k: 1,
            v: 2,
            o: 3,
            stats: Some(9),
            row_max: Some(10),
            sum_exp: Some(11),
            attn_scale: None,
            params: &params,
            amax: &[],
            workspace: None,
        };
        let backward = DeviceBackward {
            q: 0,
            k: 1,
            v: 2,
            o: 3,
            stats: 9,
            d_o: 4,
            dq: 5,
            dk: 6,
            dv: 7,
            attn_scale: None,
            params: &params,
            gradients: &[],
            amax: &[],
            workspace: None,
        };
        for (direction, call) in [(Direction::Forward, DeviceCall::from(&forward)), (Direction::Backward, DeviceCall::from(&backward))] {
            let forward = direction == Direction::Forward;
            let statistics = Statistic::ALL.map(|statistic| call.statistic(statistic));
            assert_eq!(statistics, [Some(9), forward.then_some(10), forward.then_some(11)]);
            for (place, operand) in Operand::ALL.into_iter().enumerate() {
                let there = operand.written(direction).is_some().then_some(place);
                assert_eq!(call.operand(operand), there, "{operand} of {}", direction.name());
            }
        }
    }
}
