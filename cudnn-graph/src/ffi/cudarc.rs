//! Plans over the streams and slices of cudarc (feature `cudarc`). Slices may be views (`CudaView`) that begin at any element with the alignment of
//! the tensor. Element types, lengths and devices are checked, so no call needs an address.
//!
//! ```no_run
//! use cudnn_graph::cudarc::driver::CudaContext;
//! use cudnn_graph::cudarc::{Call, Executable};
//! use cudnn_graph::ir::Mode;
//! use cudnn_graph::{DType, Driver, Graph, Library, Plan, Policy, Search, Target};
//! use std::sync::Arc;
//!
//! // y = relu(a · b)
//! let mut g = Graph::new();
//! let (a, b) = (g.input("a", DType::F32, [1, 256, 128]), g.input("b", DType::F32, [1, 128, 512]));
//! let product = g.matmul(a, b);
//! let y = g.pointwise(Mode::ReluFwd, &[product]);
//! g.output(y, "y", DType::F32);
//! // Before cudarc is used, which panics where there is no driver.
//! let library = Library::load(&Search::default())?;
//! let planning = Driver::load(None)?.device(0)?.stream()?;
//! let target = Target::Handle(&library.handle(&planning)?);
//! let plan = Plan::build(library, Arc::new(g.verify()?), &target, &Policy::default())?;
//!
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let (a, b) = (stream.clone_htod(&vec![1f32; 256 * 128])?, stream.clone_htod(&vec![1f32; 128 * 512])?);
//! let mut y = stream.alloc_zeros::<f32>(256 * 512)?;
//! let executable = Executable::new(Arc::new(plan));
//! executable.submit(&stream, Call::new().input("a", &a).input("b", &b).output("y", &mut y))?;
//! assert_eq!(stream.clone_dtoh(&y)?[0], 128.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// The module of cudarc with contexts, streams and slices.
pub use cudarc::driver;
/// The `cudarc` crate, in the version whose streams and slices calls use.
pub use sdpa_driver::cudarc::cudarc;

use crate::bind::{BindingError, BindingErrors, Bindings, Bound};
use crate::error::Error;
use crate::ir::ty::DType;
use crate::ir::{Scalar, TensorId};
use crate::plan::Plan;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use half::{bf16, f16};
use sdpa_driver::cudarc::{Elsewhere, Slices};
use sdpa_driver::{Device, DeviceSlice, RawStream, Stream};
use smallvec::SmallVec;
use std::sync::{Arc, OnceLock};

mod sealed {
    pub trait Sealed {}
}

/// An element type of cudarc's slices that tensors may have.
pub trait Element: DeviceRepr + Sized + sealed::Sealed {
    /// The name of the type, for errors.
    const NAME: &'static str;
    /// Types of tensors whose memory may be a slice of this type. Tensors of 8-bit and 4-bit floats, of 4-bit integers and of booleans are
    /// slices of `u8`.
    const TENSORS: &'static [DType];
    /// Returns the slice as memory that a plan reads.
    fn input(slice: &dyn DevicePtr<Self>) -> Input<'_>;
    /// Returns the slice as memory that a plan writes.
    fn output(slice: &mut dyn DevicePtrMut<Self>) -> Output<'_>;
}

macro_rules! elements {
    ($($name:ident($type:ty): [$($tensor:ident),+]),+ $(,)?) => {
        /// A slice that a plan reads.
        #[derive(Clone, Copy)]
        #[non_exhaustive]
        pub enum Input<'a> {
            $(#[doc = concat!("A slice of `", stringify!($type), "`.")] $name(&'a dyn DevicePtr<$type>),)+
        }

        /// A slice that a plan writes.
        #[non_exhaustive]
        pub enum Output<'a> {
            $(#[doc = concat!("A slice of `", stringify!($type), "`.")] $name(&'a mut dyn DevicePtrMut<$type>),)+
        }

        $(
            impl sealed::Sealed for $type {}

            impl Element for $type {
                const NAME: &'static str = stringify!($type);
                const TENSORS: &'static [DType] = &[$(DType::$tensor),+];

                fn input(slice: &dyn DevicePtr<Self>) -> Input<'_> {
                    Input::$name(slice)
                }

                fn output(slice: &mut dyn DevicePtrMut<Self>) -> Output<'_> {
                    Output::$name(slice)
                }
            }
        )+

        impl<'a> Slice<'a> {
            /// Returns the name of the slice's element type, and the types of tensors that it may hold.
            fn element(&self) -> (&'static str, &'static [DType]) {
                match self {
                    $(Slice::Input(Input::$name(_)) | Slice::Output(Output::$name(_)) => (<$type>::NAME, <$type>::TENSORS),)+
                }
            }

            /// Adds the slice to those of a call.
            fn place<'s>(self, slices: &mut Slices<'s>) -> Result<DeviceSlice, Elsewhere>
            where
                'a: 's,
            {
                match self {
                    $(
                        Slice::Input(Input::$name(slice)) => slices.read(slice),
                        Slice::Output(Output::$name(slice)) => slices.write(slice),
                    )+
                }
            }
        }
    };
}

elements! {
    F32(f32): [F32],
    F64(f64): [F64],
    F16(f16): [F16],
    BF16(bf16): [BF16],
    I8(i8): [I8],
    U8(u8): [U8, Bool, F8E4M3, F8E5M2, F8E8M0, F4E2M1, I4, U4],
    I32(i32): [I32],
    I64(i64): [I64],
}

/// A slice of a call.
enum Slice<'a> {
    Input(Input<'a>),
    Output(Output<'a>),
}

/// A tensor of a plan, by its id in the graph or by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Named<'a> {
    /// The id of the tensor in the graph.
    Id(TensorId),
    /// The name of the tensor.
    Name(&'a str),
}

impl From<TensorId> for Named<'_> {
    fn from(id: TensorId) -> Self {
        Named::Id(id)
    }
}

impl<'a> From<&'a str> for Named<'a> {
    fn from(name: &'a str) -> Self {
        Named::Name(name)
    }
}

/// The slices and scalars of one execution.
#[derive(Default)]
pub struct Call<'a> {
    // Inline storage, so that a call whose plan is cached allocates nothing.
    slices: SmallVec<[(Named<'a>, Slice<'a>); 8]>,
    values: SmallVec<[(Named<'a>, Scalar); 4]>,
}

impl<'a> Call<'a> {
    /// Creates a call that binds no tensor yet.
    pub fn new() -> Call<'a> {
        Call::default()
    }

    /// Binds a tensor that the plan reads. A plan of a [`Program`](crate::Program) does not say what it writes, so it takes outputs only.
    #[must_use]
    pub fn input<T: Element>(mut self, tensor: impl Into<Named<'a>>, slice: &'a dyn DevicePtr<T>) -> Self {
        self.slices.push((tensor.into(), Slice::Input(T::input(slice))));
        self
    }

    /// Binds a tensor that the plan writes.
    #[must_use]
    pub fn output<T: Element>(mut self, tensor: impl Into<Named<'a>>, slice: &'a mut dyn DevicePtrMut<T>) -> Self {
        self.slices.push((tensor.into(), Slice::Output(T::output(slice))));
        self
    }

    /// Binds a tensor to a scalar from host memory.
    #[must_use]
    pub fn value(mut self, tensor: impl Into<Named<'a>>, value: Scalar) -> Self {
        self.values.push((tensor.into(), value));
        self
    }
}

/// A plan for calls over the slices of cudarc. It keeps the plan alive until the device has finished all calls; a graph that captures a call keeps it
/// alive too. Dropping it does not wait.
#[derive(Debug)]
pub struct Executable {
    plan: Arc<Plan>,
    used: OnceLock<&'static Device>,
}

impl Executable {
    /// Wraps a plan, which must have been made for a device.
    pub fn new(plan: Arc<Plan>) -> Executable {
        Executable { plan, used: OnceLock::new() }
    }

    /// Returns the plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Submits one execution to `stream`, which must be on the plan's device. It returns without waiting. cudarc's events order the execution
    /// with work on other streams. The workspace is memory of the library, one buffer per thread and stream.
    ///
    /// # Errors
    /// Before anything runs, returns [`Error::OtherDevice`] if the plan was not made for the stream's device, and otherwise every mistake in
    /// the call:
    /// - tensors without memory, with two slices, or unknown
    /// - slices of another element type or device, and slices that are too short or misaligned
    /// - inputs bound as outputs and the reverse, and memory of an output that another tensor uses
    /// - scalars that are missing or of another type
    ///
    /// Returns [`BindingError::Addressing`] for a plan that reads lengths, offsets or pages, which needs [`Executable::submit_addressed`]. Any
    /// other error is from the driver or cuDNN.
    pub fn submit(&self, stream: &Arc<CudaStream>, call: Call<'_>) -> Result<(), Error> {
        self.plan.ports().refuse_addressing()?;
        // SAFETY: as checked above, no tensor determines which addresses the plan accesses.
        unsafe { self.submit_addressed(stream, call) }
    }

    /// Submits an execution like [`Executable::submit`], but also of plans with tensors whose contents determine the addresses that the plan
    /// accesses.
    ///
    /// # Safety
    /// Until the device is done, the contents of such tensors ([`DevicePort::addressing`](crate::bind::DevicePort::addressing)) are in range:
    /// lengths from 0 to the extent, offsets within the slice, pages within the pool.
    ///
    /// # Errors
    /// Fails as [`Executable::submit`] does.
    pub unsafe fn submit_addressed(&self, stream: &Arc<CudaStream>, call: Call<'_>) -> Result<(), Error> {
        let device = self.device_of(stream)?;
        let mut slices = Slices::new(stream);
        let bound = self.bind(&mut slices, call)?;
        // SAFETY: cudarc keeps the stream of its primary context alive during this borrow, and the device was checked.
        let borrowed = unsafe { Stream::borrow(device, RawStream(stream.cu_stream().cast())) };
        let handle = self.plan.library().handle(&borrowed)?;
        let submission = handle.begin()?;
        let workspace = submission.workspace(self.plan.workspace_bytes())?;
        self.used.get_or_init(|| device);
        if submission.is_capturing() {
            submission.keep_in_graph(Box::new(self.plan.clone()))?;
        }
        // SAFETY: cudarc's slices are device memory of the stated length, freed in stream order, and `bind` checked that each is as large as its
        // tensor. cudarc's events, recorded when `slices` is dropped, keep other streams from using them. The plan is kept by the graph or, until the
        // device has passed the mark below, by `drop`.
        let submitted = unsafe { self.plan.execute_in_order(&submission, &bound.addresses, &bound.values, workspace) };
        if !submission.is_capturing() {
            // Part of the work may be queued even if the submission failed. Without a mark, wait: the plan must not be freed before.
            submission.mark().or_else(|error| borrowed.synchronize().and(Err(error)))?;
        }
        drop(slices);
        submitted
    }

    /// Returns the device of the plan if the stream is on it.
    fn device_of(&self, stream: &CudaStream) -> Result<&'static Device, Error> {
        let ordinal = stream.context().ordinal();
        let device = self.plan.device().filter(|device| device.ordinal() as usize == ordinal);
        let plan = self.plan.device().map(Device::ordinal);
        device.ok_or(Error::OtherDevice { plan, handle: u32::try_from(ordinal).unwrap_or(u32::MAX) })
    }

    /// Checks the call, and makes the stream wait for earlier work on its slices.
    fn bind<'s, 'a: 's>(&self, slices: &mut Slices<'s>, call: Call<'a>) -> Result<Bound, BindingErrors> {
        let ports = self.plan.ports();
        let (mut bindings, mut errors) = (Bindings::new(), Vec::new());
        let mut elsewhere = Vec::new();
        for (tensor, slice) in call.slices {
            let Some(id) = self.id(tensor, &mut errors) else { continue };
            let Some(port) = ports.device.iter().find(|port| port.id == id) else {
                errors.push(BindingError::Unknown { id, what: "device memory for" });
                continue;
            };
            let name = || port.name.clone();
            let (given, holds) = slice.element();
            if !holds.contains(&port.dtype) {
                errors.push(BindingError::WrongElement { name: name(), given, wanted: port.dtype });
            }
            match (&slice, port.written) {
                (Slice::Input(_), true) => errors.push(BindingError::Written { name: name() }),
                (Slice::Output(_), false) => errors.push(BindingError::OnlyRead { name: name() }),
                (Slice::Input(_), false) | (Slice::Output(_), true) => {}
            }
            match slice.place(slices) {
                Ok(slice) => bindings.push_slice(id, slice),
                Err(Elsewhere { got, expected }) => {
                    errors.push(BindingError::WrongDevice { name: name(), got, expected });
                    elsewhere.push(BindingError::Missing { name: name() });
                }
            }
        }
        for (tensor, value) in call.values {
            if let Some(id) = self.id(tensor, &mut errors) {
                bindings.push_value(id, value);
            }
        }
        errors.extend(ports.overlaps(&bindings));
        match ports.bind(&bindings) {
            Ok(bound) if errors.is_empty() => Ok(bound),
            Ok(_) => Err(BindingErrors(errors)),
            Err(BindingErrors(more)) => {
                errors.extend(more.into_iter().filter(|error| !elsewhere.contains(error)));
                Err(BindingErrors(errors))
            }
        }
    }

    /// Returns the id of a tensor, which names a port or not.
    fn id(&self, tensor: Named<'_>, errors: &mut Vec<BindingError>) -> Option<TensorId> {
        let name = match tensor {
            Named::Id(id) => return Some(id),
            Named::Name(name) => name,
        };
        let ports = self.plan.ports();
        let all = || ports.device.iter().map(|p| (p.id, &p.name)).chain(ports.values.iter().map(|p| (p.id, &p.name)));
        let found = all().find(|(_, known)| *known == name).map(|(id, _)| id);
        if found.is_none() {
            let known: Vec<&str> = all().map(|(_, name)| name.as_str()).collect();
            errors.push(BindingError::UnknownName { name: name.to_owned(), known: known.join(", ") });
        }
        found
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Some(device) = self.used.get() {
            device.retire(Box::new(self.plan.clone()));
        }
    }
}
