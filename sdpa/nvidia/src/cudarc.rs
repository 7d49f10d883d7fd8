//! Attention over cudarc's streams and slices, on any executor on NVIDIA GPUs. Slices may be views (`CudaView`) that begin at any element with the
//! alignment in the specification.
//!
//! ```no_run
//! use sdpa_core::half::bf16;
//! use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
//! use sdpa_nvidia::NvidiaExecutor;
//! use sdpa_nvidia::cudarc::driver::CudaContext;
//! use sdpa_nvidia::cudarc::{Attention, Forward};
//!
//! // `CudnnExecutor`, `CudaExecutor`: made before cudarc is touched, which panics where there is no driver.
//! fn run(executor: &impl NvidiaExecutor) -> Result<(), Box<dyn std::error::Error>> {
//!     let stream = CudaContext::new(0)?.new_stream()?;
//!     let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
//!     let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
//!     let (q, k) = (stream.alloc_zeros::<bf16>(8 * 128 * 64)?, stream.alloc_zeros::<bf16>(2 * 128 * 64)?);
//!     let (v, mut o) = (k.clone(), q.clone());
//!     let attention = Attention::new(executor, &spec)?;
//!     attention.forward(&stream, Forward::new(&q, &k, &v, &mut o))?;
//!     stream.synchronize()?;
//!     Ok(())
//! }
//! ```
#![allow(unsafe_code)]

/// The module of cudarc with contexts, streams and slices.
pub use cudarc::driver;
/// The `cudarc` crate, in the version whose streams and slices calls use.
pub use sdpa_driver::cudarc::cudarc;

use crate::executor::NvidiaExecutor;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError};
use sdpa_core::DType;
use sdpa_core::backward::{BackwardProblem, BackwardSpec, GradientSpec};
use sdpa_core::device::{
    DeviceBackward, DeviceCall, DeviceForward, DeviceGradient, DeviceParam, DeviceParams, DeviceValue, OnDevice, with_defaults,
};
use sdpa_core::error::{Error, SpecError, SpecErrors};
use sdpa_core::expr::Declared;
use sdpa_core::problem::Problem;
use sdpa_core::spec::AttentionSpec;
use sdpa_driver::cudarc::Elsewhere;
use sdpa_driver::{Device, DeviceSlice, RawStream, Stream};
use smallvec::SmallVec;
use std::sync::Arc;

/// An element type of cudarc's slices that attention supports.
pub trait Element: DeviceRepr {
    /// The element type as a value.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
}

/// An error of attention over cudarc's slices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudarcError {
    /// An error of the specification, the executor or the environment.
    #[error(transparent)]
    Sdpa(#[from] Error),
    /// A driver error from cudarc.
    #[error("cudarc: {0}")]
    Driver(#[from] DriverError),
}

impl From<SpecErrors> for CudarcError {
    fn from(errors: SpecErrors) -> CudarcError {
        CudarcError::Sdpa(errors.into())
    }
}

/// A declared parameter over cudarc's slices.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Param<'a> {
    /// The name under which the parameter was declared.
    pub name: &'a str,
    /// The value of the parameter in this call.
    pub value: Value<'a>,
}

/// The value of a declared parameter: a number, or the slice of a tensor.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Value<'a> {
    /// The number of a scalar.
    Scalar(f32),
    /// A tensor of f32, dense.
    F32(&'a dyn DevicePtr<f32>),
    /// A tensor of f16, dense.
    F16(&'a dyn DevicePtr<half::f16>),
    /// A tensor of bf16, dense.
    BF16(&'a dyn DevicePtr<half::bf16>),
    /// A tensor of i32, dense.
    I32(&'a dyn DevicePtr<i32>),
    /// A tensor of i32, dense, passed as u32 with the same bits. All numbers are below 2³¹.
    U32(&'a dyn DevicePtr<u32>),
    /// A tensor of i64, dense: `cu_seqlens`, or the seed and offset of dropout.
    I64(&'a dyn DevicePtr<i64>),
    /// A tensor of booleans, dense: bytes, 0 or 1.
    Bool(&'a dyn DevicePtr<u8>),
}

/// One forward call over cudarc's slices.
#[non_exhaustive]
pub struct Forward<'a, T> {
    /// Queries, strided as the specification says.
    pub q: &'a dyn DevicePtr<T>,
    /// Keys, strided as the specification says.
    pub k: &'a dyn DevicePtr<T>,
    /// Values, strided as the specification says.
    pub v: &'a dyn DevicePtr<T>,
    /// Output, strided as the specification says.
    pub o: &'a mut dyn DevicePtrMut<T>,
    /// The log-sum-exp of each row: (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense. Required if the specification
    /// requests `stats`, and otherwise `None`.
    pub stats: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// The largest score of each row, in the layout of `stats`. Required if the specification requests `row_max`, and otherwise `None`.
    pub row_max: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// The sum of exponentials of each row, in the layout of `stats`. Required if the specification requests `sum_exp`, and otherwise
    /// `None`.
    pub sum_exp: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// Factor of the scores; must be positive. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters. A scalar that is not named here has its default.
    pub params: &'a [Param<'a>],
}

/// One backward call over cudarc's slices.
#[non_exhaustive]
pub struct Backward<'a, T> {
    /// Queries, strided as the specification says.
    pub q: &'a dyn DevicePtr<T>,
    /// Keys, strided as the specification says.
    pub k: &'a dyn DevicePtr<T>,
    /// Values, strided as the specification says.
    pub v: &'a dyn DevicePtr<T>,
    /// Output of the forward pass, strided as the specification says.
    pub o: &'a dyn DevicePtr<T>,
    /// `stats` of the forward pass: (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense.
    pub stats: &'a dyn DevicePtr<f32>,
    /// Gradient of the output, strided as the specification says.
    pub d_o: &'a dyn DevicePtr<T>,
    /// Gradient of the queries, strided as the specification says.
    pub dq: &'a mut dyn DevicePtrMut<T>,
    /// Gradient of the keys, strided as the specification says.
    pub dk: &'a mut dyn DevicePtrMut<T>,
    /// Gradient of the values, strided as the specification says.
    pub dv: &'a mut dyn DevicePtrMut<T>,
    /// Factor of the scores, as in the forward pass. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters, as in the forward pass.
    pub params: &'a [Param<'a>],
    /// Destinations of gradients of declared parameters, by name: one for each gradient that the specification requests, with its element
    /// type.
    pub gradients: Vec<(&'a str, ValueMut<'a>)>,
}

impl<'a> Param<'a> {
    /// Binds a value to the declared parameter `name`.
    pub fn new(name: &'a str, value: Value<'a>) -> Param<'a> {
        Param { name, value }
    }
}

impl<'a, T> Forward<'a, T> {
    /// Creates a call over these slices with the default scale and no parameters, which writes only `o`.
    pub fn new(
        q: &'a dyn DevicePtr<T>,
        k: &'a dyn DevicePtr<T>,
        v: &'a dyn DevicePtr<T>,
        o: &'a mut dyn DevicePtrMut<T>,
    ) -> Forward<'a, T> {
        Forward { q, k, v, o, stats: None, row_max: None, sum_exp: None, attn_scale: None, params: &[] }
    }

    /// Sets the destination of `stats`, for a specification that requests them.
    #[must_use]
    pub fn stats(mut self, stats: &'a mut dyn DevicePtrMut<f32>) -> Self {
        self.stats = Some(stats);
        self
    }

    /// Sets the destination of the largest score of each row, for a specification that requests it.
    #[must_use]
    pub fn row_max(mut self, row_max: &'a mut dyn DevicePtrMut<f32>) -> Self {
        self.row_max = Some(row_max);
        self
    }

    /// Sets the destination of the sum of exponentials of each row, for a specification that requests it.
    #[must_use]
    pub fn sum_exp(mut self, sum_exp: &'a mut dyn DevicePtrMut<f32>) -> Self {
        self.sum_exp = Some(sum_exp);
        self
    }

    /// Sets the factor of the scores; `None` for `1 / √dim_qk`.
    #[must_use]
    pub fn attn_scale(mut self, attn_scale: impl Into<Option<f32>>) -> Self {
        self.attn_scale = attn_scale.into();
        self
    }

    /// Sets the values of declared parameters.
    #[must_use]
    pub fn params(mut self, params: &'a [Param<'a>]) -> Self {
        self.params = params;
        self
    }
}

impl<'a, T> Backward<'a, T> {
    /// Creates a call that reads the forward pass's operands, output and `stats`, and the output's gradient `d_o`. It writes the gradients of `q`,
    /// `k` and `v`, with the default scale and no parameters.
    pub fn new(
        (q, k, v): (&'a dyn DevicePtr<T>, &'a dyn DevicePtr<T>, &'a dyn DevicePtr<T>),
        (o, stats): (&'a dyn DevicePtr<T>, &'a dyn DevicePtr<f32>),
        d_o: &'a dyn DevicePtr<T>,
        (dq, dk, dv): (&'a mut dyn DevicePtrMut<T>, &'a mut dyn DevicePtrMut<T>, &'a mut dyn DevicePtrMut<T>),
    ) -> Backward<'a, T> {
        Backward { q, k, v, o, stats, d_o, dq, dk, dv, attn_scale: None, params: &[], gradients: Vec::new() }
    }

    /// Sets the factor of the scores; `None` for `1 / √dim_qk`.
    #[must_use]
    pub fn attn_scale(mut self, attn_scale: impl Into<Option<f32>>) -> Self {
        self.attn_scale = attn_scale.into();
        self
    }

    /// Sets the values of declared parameters.
    #[must_use]
    pub fn params(mut self, params: &'a [Param<'a>]) -> Self {
        self.params = params;
        self
    }

    /// Adds destinations of gradients of declared parameters, by name.
    #[must_use]
    pub fn gradients(mut self, gradients: impl IntoIterator<Item = (&'a str, ValueMut<'a>)>) -> Self {
        self.gradients.extend(gradients);
        self
    }
}

/// The destination of the dense gradient of a parameter.
#[non_exhaustive]
pub enum ValueMut<'a> {
    /// A gradient in f32.
    F32(&'a mut dyn DevicePtrMut<f32>),
    /// A gradient in f16.
    F16(&'a mut dyn DevicePtrMut<half::f16>),
    /// A gradient in bf16.
    BF16(&'a mut dyn DevicePtrMut<half::bf16>),
}

impl ValueMut<'_> {
    fn dtype(&self) -> DType {
        match self {
            ValueMut::F32(_) => DType::F32,
            ValueMut::F16(_) => DType::F16,
            ValueMut::BF16(_) => DType::BF16,
        }
    }
}

/// A prepared pass of one specification, for calls with cudarc's slices.
#[derive(Debug)]
pub struct Attention {
    device: &'static Device,
    dtype: DType,
    /// The declared parameters, with the defaults of this specification.
    params: Vec<Declared>,
    /// Parameters whose gradients a backward pass computes.
    wrt: Vec<GradientSpec>,
    prepared: OnDevice<DeviceSlice, Stream>,
}

/// Slices of one call, and the mistakes in them.
struct Slices<'a> {
    placed: sdpa_driver::cudarc::Slices<'a>,
    errors: Vec<SpecError>,
}

impl<'a> Slices<'a> {
    fn new(stream: &'a Arc<CudaStream>) -> Slices<'a> {
        Slices { placed: sdpa_driver::cudarc::Slices::new(stream), errors: Vec::new() }
    }

    fn read<T>(&mut self, name: &str, slice: &'a dyn DevicePtr<T>) -> DeviceSlice {
        let placed = self.placed.read(slice);
        self.placed(name, placed)
    }

    fn write<T>(&mut self, name: &str, slice: &'a mut dyn DevicePtrMut<T>) -> DeviceSlice {
        let placed = self.placed.write(slice);
        self.placed(name, placed)
    }

    fn all_placed(&mut self) -> Result<(), SpecErrors> {
        if self.errors.is_empty() { Ok(()) } else { Err(SpecErrors(std::mem::take(&mut self.errors))) }
    }

    /// Returns no memory for a slice of another device: the call is then refused.
    fn placed(&mut self, name: &str, placed: Result<DeviceSlice, Elsewhere>) -> DeviceSlice {
        placed.unwrap_or_else(|Elsewhere { got, expected }| {
            self.errors.push(SpecError::new(format!("{name} device"), got, format!("{expected}, the device of the stream")));
            DeviceSlice { address: 0, bytes: 0 }
        })
    }

    fn gradient(&mut self, wrt: &[GradientSpec], name: &str, value: ValueMut<'a>) -> DeviceSlice {
        let (given, asked) = (value.dtype(), wrt.iter().find(|g| g.name == name));
        if let Some(asked) = asked.filter(|asked| asked.dtype != given) {
            self.errors.push(SpecError::new(
                format!("gradient of {name}"),
                given,
                format!("{}, the type of the specification", asked.dtype),
            ));
        }
        match value {
            ValueMut::F32(x) => self.write(name, x),
            ValueMut::F16(x) => self.write(name, x),
            ValueMut::BF16(x) => self.write(name, x),
        }
    }

    fn params(&mut self, params: &'a [Param<'a>]) -> DeviceParams<'a, DeviceSlice> {
        let value = |p: &'a Param<'a>, slices: &mut Slices<'a>| match p.value {
            Value::Scalar(x) => DeviceValue::Scalar(x),
            Value::F32(x) => DeviceValue::Tensor(DType::F32, slices.read(p.name, x)),
            Value::F16(x) => DeviceValue::Tensor(DType::F16, slices.read(p.name, x)),
            Value::BF16(x) => DeviceValue::Tensor(DType::BF16, slices.read(p.name, x)),
            Value::I32(x) => DeviceValue::Tensor(DType::I32, slices.read(p.name, x)),
            Value::U32(x) => DeviceValue::Tensor(DType::I32, slices.read(p.name, x)),
            Value::I64(x) => DeviceValue::Tensor(DType::I64, slices.read(p.name, x)),
            Value::Bool(x) => DeviceValue::Tensor(DType::Bool, slices.read(p.name, x)),
        };
        params.iter().map(|p| DeviceParam::new(p.name, value(p, self))).collect()
    }
}

impl Attention {
    /// Returns a prepared forward pass, from the executor's cache if it is there.
    ///
    /// # Errors
    /// Returns every rule that the specification breaks, or every reason why the executor does not support it. Any other error is a
    /// failure of the environment.
    pub fn new<E: NvidiaExecutor + ?Sized>(executor: &E, spec: &AttentionSpec) -> Result<Attention, Error> {
        let problem = spec.validate()?;
        Ok(Attention::of(executor.prepare_device(&problem)?, &problem, executor.device()))
    }

    /// Returns a prepared backward pass, from the executor's cache if it is there.
    ///
    /// # Errors
    /// Fails as [`Attention::new`] does.
    pub fn backward_of<E: NvidiaExecutor + ?Sized>(executor: &E, spec: &BackwardSpec) -> Result<Attention, Error> {
        let problem = spec.validate()?;
        Ok(Attention::of_backward(executor.prepare_device_backward(&problem)?, &problem, executor.device()))
    }

    /// Wraps a forward pass that any executor prepared for this problem on this device.
    pub fn of(prepared: OnDevice<DeviceSlice, Stream>, problem: &Problem, device: &'static Device) -> Attention {
        let params = problem.params().to_vec();
        Attention { device, dtype: problem.dtype(), params, wrt: Vec::new(), prepared }
    }

    /// Wraps a backward pass that any executor prepared for this problem on this device.
    pub fn of_backward(prepared: OnDevice<DeviceSlice, Stream>, problem: &BackwardProblem, device: &'static Device) -> Attention {
        let (params, wrt) = (problem.params().to_vec(), problem.wrt().to_vec());
        Attention { device, dtype: problem.forward().dtype(), params, wrt, prepared }
    }

    /// Returns the prepared pass that calls run.
    pub fn prepared(&self) -> &OnDevice<DeviceSlice, Stream> {
        &self.prepared
    }

    /// Submits one forward pass to `stream`, which must be on the executor's device. It returns without waiting. cudarc's events order
    /// the pass with work on other streams.
    ///
    /// # Errors
    /// Before anything runs, fails if slices have another element type or device, are too short or are misaligned, or if parameters are
    /// missing or unlike their declaration. Any other error is from cudarc or the executor.
    pub fn forward<'a, T: Element>(&'a self, stream: &'a Arc<CudaStream>, call: Forward<'a, T>) -> Result<(), CudarcError> {
        // SAFETY: cudarc's slices are device memory of the stated length, freed in stream order. Its events, recorded when the guards are dropped,
        // keep other streams from using them.
        let submit =
            |stream: &Stream, call: &DeviceForward<'_, DeviceSlice>| unsafe { self.prepared.submit(stream, &DeviceCall::from(call)) };
        Ok(call.placed(stream, &self.expected(), submit)??)
    }

    /// Submits one backward pass to `stream`; see [`Attention::forward`].
    ///
    /// # Errors
    /// Fails as [`Attention::forward`] does.
    pub fn backward<'a, T: Element>(&'a self, stream: &'a Arc<CudaStream>, call: Backward<'a, T>) -> Result<(), CudarcError> {
        // SAFETY: as in the forward pass.
        let submit =
            |stream: &Stream, call: &DeviceBackward<'_, DeviceSlice>| unsafe { self.prepared.submit(stream, &DeviceCall::from(call)) };
        Ok(call.placed(stream, &self.expected(), submit)??)
    }

    fn expected(&self) -> Expected<'_> {
        Expected { device: self.device, dtype: self.dtype, params: &self.params, wrt: &self.wrt }
    }
}

/// The device and the types for which a pass was prepared.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// The device.
    pub device: &'static Device,
    /// The element type of the operands.
    pub dtype: DType,
    /// The declared parameters, whose defaults a call may omit.
    pub params: &'a [Declared],
    /// Parameters whose gradients a backward pass computes.
    pub wrt: &'a [GradientSpec],
}

impl Expected<'_> {
    fn check<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<(), SpecErrors> {
        let mut errors = Vec::new();
        if T::DTYPE != self.dtype {
            errors.push(SpecError::new("slice dtype", T::DTYPE, format!("{}, the type of the specification", self.dtype)));
        }
        let ordinal = stream.context().ordinal();
        if ordinal != self.device.ordinal() as usize {
            errors.push(SpecError::new("stream device", ordinal, format!("{}, the device of the executor", self.device.ordinal())));
        }
        if errors.is_empty() { Ok(()) } else { Err(SpecErrors(errors)) }
    }

    fn borrow(&self, stream: &Arc<CudaStream>) -> Stream {
        // SAFETY: callers drop it while they borrow cudarc's stream, and the device was checked.
        unsafe { Stream::borrow(self.device, RawStream(stream.cu_stream().cast())) }
    }
}

impl<'a, T: Element> Forward<'a, T> {
    /// Calls `submit` with the addresses of this call and with the stream. cudarc's events order what it submits with work on other streams, so it submits
    /// to this stream, or to streams that it orders with this one, and need not wait. [`Attention::forward`] is this call for one prepared pass.
    ///
    /// # Errors
    /// Fails before `submit` if slices have another element type or device. The result of `submit` is returned as it is.
    pub fn placed<R>(
        self,
        stream: &'a Arc<CudaStream>,
        expected: &Expected<'a>,
        submit: impl FnOnce(&Stream, &DeviceForward<'_, DeviceSlice>) -> R,
    ) -> Result<R, CudarcError> {
        expected.check::<T>(stream)?;
        let mut slices = Slices::new(stream);
        let params = with_defaults(expected.params, slices.params(self.params));
        let device =
            DeviceForward::new(slices.read("q", self.q), slices.read("k", self.k), slices.read("v", self.v), slices.write("o", self.o))
                .stats(self.stats.map(|s| slices.write("stats", s)))
                .row_max(self.row_max.map(|s| slices.write("row_max", s)))
                .sum_exp(self.sum_exp.map(|s| slices.write("sum_exp", s)))
                .attn_scale(self.attn_scale)
                .params(&params);
        slices.all_placed()?;
        Ok(submit(&expected.borrow(stream), &device))
    }
}

impl<'a, T: Element> Backward<'a, T> {
    /// Calls `submit` with the addresses of this call and with the stream; see [`Forward::placed`].
    ///
    /// # Errors
    /// Fails as [`Forward::placed`] does.
    pub fn placed<R>(
        self,
        stream: &'a Arc<CudaStream>,
        expected: &Expected<'a>,
        submit: impl FnOnce(&Stream, &DeviceBackward<'_, DeviceSlice>) -> R,
    ) -> Result<R, CudarcError> {
        expected.check::<T>(stream)?;
        let mut slices = Slices::new(stream);
        let gradients: SmallVec<[DeviceGradient<'_, DeviceSlice>; 4]> =
            self.gradients.into_iter().map(|(name, value)| DeviceGradient::new(name, slices.gradient(expected.wrt, name, value))).collect();
        let params = with_defaults(expected.params, slices.params(self.params));
        let device = DeviceBackward::new(
            (slices.read("q", self.q), slices.read("k", self.k), slices.read("v", self.v)),
            (slices.read("o", self.o), slices.read("stats", self.stats)),
            slices.read("d_o", self.d_o),
            (slices.write("dq", self.dq), slices.write("dk", self.dk), slices.write("dv", self.dv)),
        )
        .attn_scale(self.attn_scale)
        .params(&params)
        .gradients(&gradients);
        slices.all_placed()?;
        Ok(submit(&expected.borrow(stream), &device))
    }
}
