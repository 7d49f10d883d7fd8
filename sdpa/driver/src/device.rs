//! GPUs with their primary contexts, and how a thread enters them.

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

/// Functions that older drivers lack.
#[derive(Debug)]
struct Later {
    graphs: Result<GraphTable, Error>,
    modules: Result<ModuleTable, Error>,
    /// `cuStreamGetId`, from CUDA 12.0 on.
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
        // SAFETY: every pointer is to a live variable of the type in the driver's header.
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
        // SAFETY: the driver writes a terminated string, and the array is initialised with zeros.
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

    /// Returns the ordinal of the device in the driver.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the vendor's name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size of the device memory in bytes.
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// Returns the size of the free device memory in bytes.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn memory_free(&self) -> Result<u64, Error> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both pointers are to live integers.
        self.check("cuMemGetInfo", unsafe { (self.table.memory_info)(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Returns the compute capability: 90 for 9.0.
    pub fn sm(&self) -> u32 {
        self.sm
    }

    /// Returns the number of SMs.
    pub fn sm_count(&self) -> u32 {
        self.sm_count
    }

    /// Makes the device's primary context current on this thread until the returned guard is dropped. The previous context is then
    /// current again, as other code on the thread (cudarc, PyTorch) expects.
    ///
    /// # Errors
    /// Returns a driver error.
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

    /// Makes the device's primary context current on this thread permanently. This saves a thread without another context one context
    /// switch per call.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained for the life of the process.
        self.check("cuCtxSetCurrent", unsafe { (self.table.context_set)(self.context) })
    }

    /// Runs a function that allocates, frees, loads, unloads or waits, so that it does not invalidate a capture by this or another
    /// thread. The function must not touch streams under capture.
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

    /// Returns the driver functions for CUDA graphs; `None` if the driver lacks them. It is for callers that would ignore the error.
    pub(crate) fn graphs_if_any(&self) -> Option<&GraphTable> {
        self.later.graphs.as_ref().ok()
    }

    /// Returns the error of a capture that ended without a graph.
    #[cold]
    pub(crate) fn no_graph(&self) -> Error {
        Error::Driver { call: "cuStreamEndCapture", code: 0, name: "CUDA_SUCCESS".to_owned(), text: "no graph came of it".to_owned() }
    }

    /// Returns an unused [`Lane`] of the device, which lives as long as the process. A lane may be used by one submission at a time.
    pub fn lane(&self) -> &'static Lane {
        self.lanes.take()
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(crate) fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// Waits for all work submitted to the device so far. **Invalidates every running capture of the device**, including those of other
    /// code. Nothing in this crate calls it.
    ///
    /// # Errors
    /// Returns a driver error, also if a kernel failed or a stream is under capture.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.enter()?;
        // SAFETY: the function has no arguments.
        self.check("cuCtxSynchronize", unsafe { (self.table.context_synchronize)() })
    }

    /// Returns a number that no later stream shares, or the stream's address if the driver has no such numbers. Returns `None` during
    /// capture: the query would invalidate the capture in any mode (H200, driver 580).
    pub(crate) fn stream_id(&self, stream: Ptr) -> Option<u64> {
        if self.is_capturing(stream) {
            return None;
        }
        let mut id = 0;
        // SAFETY: the stream is live, and the pointer is to a live integer.
        let known = self.later.stream_id.is_some_and(|stream_id| unsafe { stream_id(stream, &mut id) } == 0);
        Some(if known { id } else { stream.expose_provenance() as u64 })
    }

    /// Creates a stream of the device.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn stream(&'static self) -> Result<Stream, Error> {
        let _entered = self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        self.check("cuStreamCreate", unsafe { (self.table.stream_create)(&mut raw, STREAM_NON_BLOCKING) })?;
        Ok(Stream::owned(self, RawStream(raw)))
    }
}

/// A guard that keeps the context of a device current on this thread. Dropping it restores the previous context.
#[derive(Debug)]
#[must_use = "the context from before is current again when it is dropped"]
pub struct Entered<'a> {
    device: &'a Device,
    /// The previous context; `None` if it was this device's.
    before: Option<Ptr>,
    /// Contexts are current per thread, so the guard is not `Send`.
    on: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: the context was current on this thread before, or null. If it has been destroyed since, the driver returns an
            // error.
            let code = unsafe { (self.device.table.context_set)(before) };
            if code != 0 {
                tracing::warn!(code, "cuCtxSetCurrent to the context from before");
            }
        }
    }
}
