//! A GPU with its primary context, and how a thread enters it.

use crate::capture::GraphTable;
use crate::driver::{DeviceTable, Driver, Ptr};
use crate::error::Error;
use crate::lane::{Lane, Lanes};
use crate::load::Opened;
use crate::module::ModuleTable;
use crate::retire::Waiting;
use crate::stream::{RawStream, Stream};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::marker::PhantomData;

const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MULTIPROCESSOR_COUNT: c_int = 16;
const STREAM_NON_BLOCKING: c_uint = 1;
const CAPTURE_ACTIVE: c_int = 1;

/// A GPU with its primary context.
#[derive(Debug)]
pub struct Device {
    driver: &'static Driver,
    pub(crate) table: DeviceTable,
    ordinal: u32,
    context: Ptr,
    name: String,
    memory: u64,
    sm: u32,
    sm_count: u32,
    later: Later,
    lanes: Lanes,
    waiting: Waiting,
}

/// Functions that not every driver has.
#[derive(Debug)]
struct Later {
    graphs: Result<GraphTable, Error>,
    modules: Result<ModuleTable, Error>,
    /// `cuStreamGetId`, of CUDA 12.0.
    stream_id: Option<unsafe extern "C" fn(Ptr, *mut u64) -> i32>,
}

impl Later {
    fn of(library: &Opened) -> Later {
        // SAFETY: the type is that of the public header.
        let stream_id = unsafe { library.function("cuStreamGetId") };
        Later { graphs: GraphTable::load(library), modules: ModuleTable::load(library), stream_id: stream_id.ok() }
    }
}

// SAFETY: a context pointer may be made current on any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Device {}

impl Device {
    pub(crate) fn open(driver: &'static Driver, index: c_int) -> Result<Device, Error> {
        let table = *driver.full()?;
        let mut device = 0;
        let (mut context, mut name, mut memory) = (std::ptr::null_mut(), [0 as c_char; 256], 0usize);
        // SAFETY: every pointer is to a live variable of the type that the driver's header names.
        unsafe {
            driver.check("cuDeviceGet", (driver.table.device_get)(&mut device, index))?;
            driver.check("cuDeviceGetName", (table.device_name)(name.as_mut_ptr(), 255, device))?;
            driver.check("cuDeviceTotalMem", (table.device_memory)(&mut memory, device))?;
            driver.check("cuDevicePrimaryCtxRetain", (table.context_retain)(&mut context, device))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: as above.
            driver.check("cuDeviceGetAttribute", unsafe { (driver.table.device_attribute)(&mut value, which, device) })?;
            Ok::<u32, Error>(value.unsigned_abs())
        };
        let sm = attribute(COMPUTE_CAPABILITY_MAJOR)? * 10 + attribute(COMPUTE_CAPABILITY_MINOR)?;
        let sm_count = attribute(MULTIPROCESSOR_COUNT)?;
        // SAFETY: the driver writes a terminated string, and the array began as zeros.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(Device {
            driver,
            table,
            ordinal: index.unsigned_abs(),
            context,
            name,
            memory: memory as u64,
            sm,
            sm_count,
            later: Later::of(&driver.library),
            lanes: Lanes::default(),
            waiting: Waiting::default(),
        })
    }

    /// The device's number, as the driver counts.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The vendor's name for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Device memory, in bytes.
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// Device memory that is free now, in bytes.
    ///
    /// # Errors
    /// A driver error.
    pub fn memory_free(&self) -> Result<u64, Error> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both pointers are to live integers.
        self.check("cuMemGetInfo", unsafe { (self.table.memory_info)(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Compute capability: 90 for 9.0.
    pub fn sm(&self) -> u32 {
        self.sm
    }

    /// Number of multiprocessors of the device.
    pub fn sm_count(&self) -> u32 {
        self.sm_count
    }

    /// Makes the device's primary context current on this thread until the result is dropped. Then the context from before is current again, which is what
    /// others on the thread (cudarc, PyTorch) take for the current device.
    ///
    /// # Errors
    /// A driver error.
    pub fn enter(&self) -> Result<Entered<'_>, Error> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        self.check("cuCtxGetCurrent", unsafe { (self.driver.table.context_current)(&mut current) })?;
        if current == self.context {
            return Ok(Entered { device: self, before: None, on: PhantomData });
        }
        self.make_current()?;
        Ok(Entered { device: self, before: Some(current), on: PhantomData })
    }

    /// Makes the device's primary context current on this thread for good: a thread that has none, and calls often, is spared a change of contexts
    /// at each call.
    ///
    /// # Errors
    /// A driver error.
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained for the life of the process.
        self.check("cuCtxSetCurrent", unsafe { (self.table.context_set)(self.context) })
    }

    /// Runs something that allocates, frees, loads, unloads or waits, which would invalidate a capture by this or another thread otherwise.
    /// Streams that are being captured must not be touched inside.
    pub fn relaxed<R>(&self, run: impl FnOnce() -> R) -> R {
        self.driver.relaxed(run)
    }

    pub(crate) fn is_capturing(&self, stream: Ptr) -> bool {
        let mut status = 0;
        // SAFETY: the stream is live, and the pointer is to a live integer.
        let code = unsafe { (self.table.is_capturing)(stream, &mut status) };
        code == 0 && status == CAPTURE_ACTIVE
    }

    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        self.driver.check(call, code)
    }

    pub(crate) fn table(&self) -> &DeviceTable {
        &self.table
    }

    pub(crate) fn graphs(&self) -> Result<&GraphTable, Error> {
        self.later.graphs.as_ref().map_err(Clone::clone)
    }

    pub(crate) fn modules(&self) -> Result<&ModuleTable, Error> {
        self.later.modules.as_ref().map_err(Clone::clone)
    }

    /// The same where an error would be dropped.
    pub(crate) fn graphs_if_any(&self) -> Option<&GraphTable> {
        self.later.graphs.as_ref().ok()
    }

    /// A capture that ended well and made no graph.
    #[cold]
    pub(crate) fn no_graph(&self) -> Error {
        Error::Driver { call: "cuStreamEndCapture", code: 0, name: "CUDA_SUCCESS".to_owned(), text: "no graph came of it".to_owned() }
    }

    /// A [`Lane`] of the device that nobody else has, for the life of the process: keep it, and use it with one submission at a time.
    pub fn lane(&self) -> &'static Lane {
        self.lanes.take()
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(crate) fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// Waits for everything submitted so far. **Invalidates every capture of the device that is under way**, whoever began it; nothing in
    /// this crate calls it.
    ///
    /// # Errors
    /// A driver error: also that of a kernel which failed, and that a stream is being captured.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.enter()?;
        // SAFETY: no arguments to be wrong about.
        self.check("cuCtxSynchronize", unsafe { (self.table.context_synchronize)() })
    }

    /// A number for a stream that no later stream has; its address, where the driver has no such numbers. None while the stream is captured:
    /// the question would invalidate the capture, in whichever mode (H200, driver 580).
    pub(crate) fn stream_id(&self, stream: Ptr) -> Option<u64> {
        if self.is_capturing(stream) {
            return None;
        }
        let mut id = 0;
        // SAFETY: the stream is live, and the pointer is to a live integer.
        let known = self.later.stream_id.is_some_and(|stream_id| unsafe { stream_id(stream, &mut id) } == 0);
        Some(if known { id } else { stream.expose_provenance() as u64 })
    }

    /// A new stream.
    ///
    /// # Errors
    /// A driver error.
    pub fn stream(&'static self) -> Result<Stream, Error> {
        let _entered = self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        self.check("cuStreamCreate", unsafe { (self.table.stream_create)(&mut raw, STREAM_NON_BLOCKING) })?;
        Ok(Stream::owned(self, RawStream(raw)))
    }
}

/// A thread's stay in the context of a device. The context from before is current again when it is dropped.
#[derive(Debug)]
#[must_use = "the context from before is current again when it is dropped"]
pub struct Entered<'a> {
    device: &'a Device,
    /// `None`: it was this device's.
    before: Option<Ptr>,
    /// Contexts are current on a thread.
    on: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread when this stay began, or null; a context that was destroyed since is refused.
            let code = unsafe { (self.device.table.context_set)(before) };
            if code != 0 {
                tracing::warn!(code, "cuCtxSetCurrent to the context from before");
            }
        }
    }
}
