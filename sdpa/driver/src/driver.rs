//! The CUDA driver as tables of functions. Nothing here panics if there is no driver.

use crate::device::Device;
use crate::error::Error;
use crate::load::{Opened, Place, open_first, table};
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;

/// An opaque handle of the driver: a context, a module, a function, an event.
pub type Ptr = *mut c_void;

table! {
    /// Driver functions that are always needed.
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
    /// Driver functions that only a real device needs. A null driver, which has no device and serves only for planning, has none of them.
    DeviceTable {
        device_name: "cuDeviceGetName" fn(*mut c_char, c_int, c_int);
        device_memory: "cuDeviceTotalMem_v2" fn(*mut usize, c_int);
        context_retain: "cuDevicePrimaryCtxRetain" fn(*mut Ptr, c_int);
        context_set: "cuCtxSetCurrent" fn(Ptr);
        context_synchronize: "cuCtxSynchronize" fn();
        is_capturing: "cuStreamIsCapturing" fn(Ptr, *mut c_int);
        memory_info: "cuMemGetInfo_v2" fn(*mut usize, *mut usize);
        alloc: "cuMemAlloc_v2" fn(*mut u64, usize);
        free: "cuMemFree_v2" fn(u64);
        to_device: "cuMemcpyHtoDAsync_v2" fn(u64, *const c_void, usize, Ptr);
        to_host: "cuMemcpyDtoHAsync_v2" fn(*mut c_void, u64, usize, Ptr);
        on_device: "cuMemcpyDtoDAsync_v2" fn(u64, u64, usize, Ptr);
        fill_bytes: "cuMemsetD8Async" fn(u64, u8, usize, Ptr);
        fill_words: "cuMemsetD32Async" fn(u64, c_uint, usize, Ptr);
        module_load: "cuModuleLoadData" fn(*mut Ptr, *const c_void);
        module_function: "cuModuleGetFunction" fn(*mut Ptr, Ptr, *const c_char);
        launch: "cuLaunchKernel" fn(Ptr, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Ptr, *mut Ptr, *mut Ptr);
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

const RELAXED: c_int = 2;

/// The CUDA driver of this process.
#[derive(Debug)]
pub struct Driver {
    pub(crate) library: Opened,
    pub(crate) table: Table,
    /// `cuThreadExchangeStreamCaptureMode`. A null driver may have neither it nor captures.
    capture_mode: Option<unsafe extern "C" fn(*mut c_int) -> i32>,
    /// An error with a null driver.
    device_table: Result<DeviceTable, Error>,
    /// Devices opened so far.
    devices: Mutex<Vec<&'static Device>>,
}

static DRIVER: Mutex<Option<&'static Driver>> = Mutex::new(None);

impl Driver {
    /// Returns the CUDA driver of this process. The first successful call loads it: from `path` if given, else from the path in the
    /// environment variable `CUDNN_GRAPH_DRIVER`, else as `libcuda.so.1`.
    ///
    /// # Errors
    /// Returns the paths that were searched, or the name of a missing function.
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
        // SAFETY: the type is that of the public header.
        let capture_mode = unsafe { library.function("cuThreadExchangeStreamCaptureMode") }.ok();
        let devices = Mutex::new(Vec::new());
        let driver: &'static Driver = Box::leak(Box::new(Driver { library, table, capture_mode, device_table, devices }));
        *slot = Some(driver);
        Ok(driver)
    }

    /// Returns the path of the driver's file.
    pub fn path(&self) -> PathBuf {
        self.library.mapped_path()
    }

    /// Returns the newest CUDA version that the driver supports: 13000 for 13.0.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn cuda_version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDriverGetVersion", unsafe { (self.table.driver_version)(&mut version) })?;
        Ok(version)
    }

    /// Returns the number of devices. It initialises the driver, but opens no device.
    ///
    /// # Errors
    /// Returns a driver error. Without devices, the driver fails to initialise. Failures are not remembered, so a later call tries again.
    pub fn device_count(&self) -> Result<u32, Error> {
        // SAFETY: 0 is the only valid flag.
        self.check("cuInit", unsafe { (self.table.init)(0) })?;
        let mut count = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDeviceGetCount", unsafe { (self.table.device_count)(&mut count) })?;
        Ok(count.unsigned_abs())
    }

    /// Returns the device with this ordinal. The first successful call retains its primary context for the life of the process. It
    /// touches no other device.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if there is no such device, or fails as [`Driver::device_count`] does. Returns a driver error if the
    /// device cannot be used, for example because another process uses it exclusively.
    pub fn device(&'static self, ordinal: u32) -> Result<&'static Device, Error> {
        let mut open = self.devices.lock();
        if let Some(device) = open.iter().find(|device| device.ordinal() == ordinal) {
            return Ok(device);
        }
        let count = self.device_count()?;
        let index = c_int::try_from(ordinal).ok().filter(|_| ordinal < count).ok_or(Error::NoDevice { ordinal, count })?;
        let device: &'static Device = Box::leak(Box::new(Device::open(self, index)?));
        open.push(device);
        Ok(device)
    }

    /// Runs a function that allocates, frees, loads, unloads or waits, so that it does not invalidate a capture by this or another
    /// thread. The function must not touch streams under capture.
    pub(crate) fn relaxed<R>(&self, run: impl FnOnce() -> R) -> R {
        /// Restores the previous mode, even in a panic.
        struct Mode(unsafe extern "C" fn(*mut c_int) -> i32, c_int);
        impl Drop for Mode {
            fn drop(&mut self) {
                // SAFETY: the pointer is to a live integer.
                let _ = unsafe { (self.0)(&mut self.1) };
            }
        }
        let Some(exchange) = self.capture_mode else { return run() };
        let mut mode = RELAXED;
        // SAFETY: the pointer is to a live integer.
        let changed = unsafe { exchange(&mut mode) } == 0;
        let _mode = changed.then_some(Mode(exchange, mode));
        run()
    }

    pub(crate) fn full(&self) -> Result<&DeviceTable, Error> {
        self.device_table.as_ref().map_err(Clone::clone)
    }

    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
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

/// Runs a function as [`Device::relaxed`] does, so that it invalidates no capture on any device of this process. Without a driver it only
/// runs the function.
pub fn relaxed<R>(run: impl FnOnce() -> R) -> R {
    let driver = *DRIVER.lock();
    match driver {
        Some(driver) => driver.relaxed(run),
        None => run(),
    }
}

/// Returns a path made absolute, relative to the current folder. It returns the path unchanged if there is no current folder.
pub fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}
