//! The CUDA driver: a table of what is needed, devices and streams. Nothing here panics when there is no driver.

use super::capture::GraphTable;
use super::load::{Opened, Place, open_first, table};
use super::retire::Yard;
use crate::error::Error;
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

pub(super) type Ptr = *mut c_void;

table! {
    /// The driver functions that are needed.
    Table {
        init: "cuInit" fn(c_uint);
        driver_version: "cuDriverGetVersion" fn(*mut c_int);
        error_name: "cuGetErrorName" fn(c_int, *mut *const c_char);
        error_string: "cuGetErrorString" fn(c_int, *mut *const c_char);
        device_count: "cuDeviceGetCount" fn(*mut c_int);
        device_get: "cuDeviceGet" fn(*mut c_int, c_int);
        device_attribute: "cuDeviceGetAttribute" fn(*mut c_int, c_int, c_int);
        context_current: "cuCtxGetCurrent" fn(*mut Ptr);
    }
}

table! {
    /// The driver functions that only a real device needs; a stand-in for the driver has none of them.
    DeviceTable {
        device_name: "cuDeviceGetName" fn(*mut c_char, c_int, c_int);
        device_memory: "cuDeviceTotalMem_v2" fn(*mut usize, c_int);
        context_retain: "cuDevicePrimaryCtxRetain" fn(*mut Ptr, c_int);
        context_set: "cuCtxSetCurrent" fn(Ptr);
        context_synchronize: "cuCtxSynchronize" fn();
        memory_info: "cuMemGetInfo_v2" fn(*mut usize, *mut usize);
        alloc: "cuMemAlloc_v2" fn(*mut u64, usize);
        free: "cuMemFree_v2" fn(u64);
        to_device: "cuMemcpyHtoDAsync_v2" fn(u64, *const c_void, usize, Ptr);
        to_host: "cuMemcpyDtoHAsync_v2" fn(*mut c_void, u64, usize, Ptr);
        on_device: "cuMemcpyDtoDAsync_v2" fn(u64, u64, usize, Ptr);
        fill_bytes: "cuMemsetD8Async" fn(u64, u8, usize, Ptr);
        stream_create: "cuStreamCreate" fn(*mut Ptr, c_uint);
        stream_destroy: "cuStreamDestroy_v2" fn(Ptr);
        stream_synchronize: "cuStreamSynchronize" fn(Ptr);
        stream_wait: "cuStreamWaitEvent" fn(Ptr, Ptr, c_uint);
        event_create: "cuEventCreate" fn(*mut Ptr, c_uint);
        event_destroy: "cuEventDestroy_v2" fn(Ptr);
        event_record: "cuEventRecord" fn(Ptr, Ptr);
        event_query: "cuEventQuery" fn(Ptr);
        event_synchronize: "cuEventSynchronize" fn(Ptr);
        event_elapsed: "cuEventElapsedTime" fn(*mut f32, Ptr, Ptr);
    }
}

const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MULTIPROCESSOR_COUNT: c_int = 16;
const EVENT_DISABLE_TIMING: c_uint = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
const NOT_READY: c_int = 600;

/// The CUDA driver of this process.
#[derive(Debug)]
pub struct Driver {
    library: Opened,
    table: Table,
    /// `None` over a stand-in driver.
    device_table: Result<DeviceTable, Error>,
    devices: OnceLock<Result<Vec<Device>, Error>>,
}

static DRIVER: Mutex<Option<&'static Driver>> = Mutex::new(None);

impl Driver {
    /// The process's driver, loaded on the first call that succeeds: from `path` if given then, from the variable
    /// `CUDNN_GRAPH_DRIVER`, else `libcuda.so.1`.
    ///
    /// # Errors
    /// Where it was looked for, or the function that it lacks.
    pub fn load(path: Option<&std::path::Path>) -> Result<&'static Driver, Error> {
        let mut slot = DRIVER.lock();
        if let Some(driver) = *slot {
            return Ok(driver);
        }
        let explicit = path.map(PathBuf::from).or_else(|| std::env::var_os("CUDNN_GRAPH_DRIVER").map(PathBuf::from));
        let places = match explicit {
            Some(path) => vec![Place::File(absolute(path))],
            None => vec![Place::System("libcuda.so.1")],
        };
        let library = open_first("the CUDA driver (libcuda.so.1)", &places)?;
        let table = Table::load(&library)?;
        let device_table = DeviceTable::load(&library);
        let driver: &'static Driver = Box::leak(Box::new(Driver { library, table, device_table, devices: OnceLock::new() }));
        *slot = Some(driver);
        Ok(driver)
    }

    /// Where the driver was loaded from.
    pub fn path(&self) -> PathBuf {
        self.library.mapped_path()
    }

    /// The newest CUDA version that the driver speaks: 13000 for 13.0.
    ///
    /// # Errors
    /// The driver's own.
    pub fn cuda_version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDriverGetVersion", unsafe { (self.table.driver_version)(&mut version) })?;
        Ok(version)
    }

    /// Every device, its primary context retained for the life of the process.
    ///
    /// # Errors
    /// What the driver says; a driver that sees no device fails to start.
    pub fn devices(&'static self) -> Result<&'static [Device], Error> {
        let devices = self.devices.get_or_init(|| {
            // SAFETY: no arguments to be wrong about.
            self.check("cuInit", unsafe { (self.table.init)(0) })?;
            let mut count = 0;
            // SAFETY: the pointer is to a live integer.
            self.check("cuDeviceGetCount", unsafe { (self.table.device_count)(&mut count) })?;
            (0..count).map(|ordinal| Device::open(self, ordinal)).collect()
        });
        devices.as_deref().map_err(Clone::clone)
    }

    /// One device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] past the last one; otherwise as [`Driver::devices`].
    pub fn device(&'static self, ordinal: u32) -> Result<&'static Device, Error> {
        let devices = self.devices()?;
        devices.get(ordinal as usize).ok_or(Error::NoDevice { ordinal, count: devices.len() as u32 })
    }

    fn full(&self) -> Result<&DeviceTable, Error> {
        self.device_table.as_ref().map_err(Clone::clone)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: c_int) -> Error {
        let text = |f: unsafe extern "C" fn(c_int, *mut *const c_char) -> i32| {
            let mut s = std::ptr::null();
            // SAFETY: on success the driver stores a pointer to a static string.
            let found = unsafe { f(code, &mut s) } == 0 && !s.is_null();
            // SAFETY: as above.
            if found { unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned() } else { "unknown".to_owned() }
        };
        Error::Driver { call, code, name: text(self.table.error_name), text: text(self.table.error_string) }
    }
}

pub(super) fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// A GPU with its primary context.
#[derive(Debug)]
pub struct Device {
    driver: &'static Driver,
    table: DeviceTable,
    ordinal: u32,
    context: Ptr,
    name: String,
    memory: u64,
    sm: u32,
    sm_count: u32,
    later: Later,
    yard: Yard,
}

/// Functions that not every driver has.
#[derive(Debug)]
struct Later {
    graphs: Result<GraphTable, Error>,
    /// `cuCtxRecordEvent`, of CUDA 12.5.
    record_all: Option<unsafe extern "C" fn(Ptr, Ptr) -> i32>,
    /// `cuStreamGetId`, of CUDA 12.0.
    stream_id: Option<unsafe extern "C" fn(Ptr, *mut u64) -> i32>,
}

impl Later {
    fn of(library: &Opened) -> Later {
        // SAFETY: the types are those of the public header.
        let (record_all, stream_id) = unsafe { (library.function("cuCtxRecordEvent"), library.function("cuStreamGetId")) };
        Later { graphs: GraphTable::load(library), record_all: record_all.ok(), stream_id: stream_id.ok() }
    }
}

// SAFETY: a context pointer may be made current on any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Device {}

impl Device {
    fn open(driver: &'static Driver, index: c_int) -> Result<Device, Error> {
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
        let (later, yard) = (Later::of(&driver.library), Yard::default());
        Ok(Device { driver, table, ordinal: index.unsigned_abs(), context, name, memory: memory as u64, sm, sm_count, later, yard })
    }

    /// Its number.
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
    /// The driver's own.
    pub fn memory_free(&self) -> Result<u64, Error> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both pointers are to live integers.
        self.check("cuMemGetInfo", unsafe { (self.table.memory_info)(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Compute capability: 90 for 9.0.
    pub fn sm(&self) -> u32 {
        self.sm
    }

    /// Multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.sm_count
    }

    /// Makes its primary context current on this thread, if it is not.
    ///
    /// # Errors
    /// The driver's own.
    pub fn enter(&self) -> Result<(), Error> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        self.check("cuCtxGetCurrent", unsafe { (self.driver.table.context_current)(&mut current) })?;
        if current == self.context {
            return Ok(());
        }
        // SAFETY: the context is retained for the life of the process.
        self.check("cuCtxSetCurrent", unsafe { (self.table.context_set)(self.context) })
    }

    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        self.driver.check(call, code)
    }

    pub(super) fn table(&self) -> &DeviceTable {
        &self.table
    }

    pub(super) fn graphs(&self) -> Result<&GraphTable, Error> {
        self.later.graphs.as_ref().map_err(Clone::clone)
    }

    /// The same where an error would be dropped.
    pub(super) fn graphs_if_any(&self) -> Option<&GraphTable> {
        self.later.graphs.as_ref().ok()
    }

    pub(super) fn yard(&self) -> &Yard {
        &self.yard
    }

    /// An event behind everything that was submitted so far; `None` if the driver cannot.
    pub(super) fn record_all(&'static self) -> Option<Result<Event, Error>> {
        let record_all = self.later.record_all?;
        Some(self.event(EVENT_DISABLE_TIMING).and_then(|event| {
            // SAFETY: both are live and of one context.
            self.check("cuCtxRecordEvent", unsafe { record_all(self.context, event.raw) })?;
            Ok(event)
        }))
    }

    /// Waits for everything submitted so far.
    ///
    /// # Errors
    /// The driver's own: also that of a kernel which failed, and that a stream is being captured.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: no arguments to be wrong about.
        self.check("cuCtxSynchronize", unsafe { (self.table.context_synchronize)() })
    }

    /// A number for a stream that no later stream has; its address, where the driver has no such numbers.
    pub(super) fn stream_id(&self, stream: Ptr) -> u64 {
        let mut id = 0;
        // SAFETY: the stream is live, and the pointer is to a live integer.
        let known = self.later.stream_id.is_some_and(|stream_id| unsafe { stream_id(stream, &mut id) } == 0);
        if known { id } else { stream.expose_provenance() as u64 }
    }

    fn event(&'static self, flags: c_uint) -> Result<Event, Error> {
        self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        self.check("cuEventCreate", unsafe { (self.table.event_create)(&mut raw, flags) })?;
        Ok(Event { device: self, raw })
    }

    /// A new stream.
    ///
    /// # Errors
    /// The driver's own.
    pub fn stream(&'static self) -> Result<Stream, Error> {
        self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        self.check("cuStreamCreate", unsafe { (self.table.stream_create)(&mut raw, STREAM_NON_BLOCKING) })?;
        Ok(Stream { device: self, raw: RawStream(raw), owned: true })
    }
}

/// A stream as every CUDA library passes it: a `CUstream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub *mut c_void);

// SAFETY: a stream may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for RawStream {}

/// A stream of one device.
#[derive(Debug)]
pub struct Stream {
    device: &'static Device,
    raw: RawStream,
    owned: bool,
}

impl Stream {
    /// A stream that somebody else owns.
    ///
    /// # Safety
    /// `raw` is a live stream of `device`'s primary context and outlives the result.
    pub unsafe fn borrow(device: &'static Device, raw: RawStream) -> Stream {
        Stream { device, raw, owned: false }
    }

    /// Its device.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// The `CUstream`.
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// Waits for everything submitted so far.
    ///
    /// # Errors
    /// The driver's own: also that of a kernel which failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.device.enter()?;
        // SAFETY: the stream is live.
        self.device.check("cuStreamSynchronize", unsafe { (self.device.table.stream_synchronize)(self.raw.0) })
    }

    /// Marks the present end of the stream.
    ///
    /// # Errors
    /// The driver's own.
    pub fn record(&self, timing: bool) -> Result<Event, Error> {
        let event = self.device.event(if timing { 0 } else { EVENT_DISABLE_TIMING })?;
        // SAFETY: both are live and of one context.
        self.device.check("cuEventRecord", unsafe { (self.device.table.event_record)(event.raw, self.raw.0) })?;
        Ok(event)
    }

    /// Makes what is submitted from now on wait for an event, of this or another stream.
    ///
    /// # Errors
    /// The driver's own.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        self.device.enter()?;
        // SAFETY: both are live.
        self.device.check("cuStreamWaitEvent", unsafe { (self.device.table.stream_wait)(self.raw.0, event.raw, 0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && self.device.enter().is_ok() {
            // SAFETY: the stream is ours, and the driver lets work in flight finish.
            let code = unsafe { (self.device.table.stream_destroy)(self.raw.0) };
            if code != 0 {
                tracing::warn!(code, "cuStreamDestroy");
            }
        }
    }
}

/// A point on a stream.
#[derive(Debug)]
pub struct Event {
    device: &'static Device,
    raw: Ptr,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// Whether the stream has passed it.
    ///
    /// # Errors
    /// The driver's own: also that of a kernel which failed.
    pub fn passed(&self) -> Result<bool, Error> {
        self.device.enter()?;
        // SAFETY: the event is live.
        match unsafe { (self.device.table.event_query)(self.raw) } {
            NOT_READY => Ok(false),
            code => self.device.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits until the stream has passed it.
    ///
    /// # Errors
    /// The driver's own.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.device.enter()?;
        // SAFETY: the event is live.
        self.device.check("cuEventSynchronize", unsafe { (self.device.table.event_synchronize)(self.raw) })
    }

    /// Device time since `start`, in milliseconds; both recorded with timing and passed.
    ///
    /// # Errors
    /// The driver's own.
    pub fn since(&self, start: &Event) -> Result<f32, Error> {
        self.device.enter()?;
        let mut ms = 0.0;
        // SAFETY: both events are live.
        self.device.check("cuEventElapsedTime", unsafe { (self.device.table.event_elapsed)(&mut ms, start.raw, self.raw) })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the event is ours.
            let code = unsafe { (self.device.table.event_destroy)(self.raw) };
            if code != 0 {
                tracing::warn!(code, "cuEventDestroy");
            }
        }
    }
}
