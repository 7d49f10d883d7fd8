//! The CUDA driver: tables of what is needed. Nothing here panics when there is no driver.

use crate::device::Device;
use crate::error::Error;
use crate::load::{Opened, Place, open_first, table};
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;

/// An opaque handle of the driver's: a context, a module, a function, an event.
pub type Ptr = *mut c_void;

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
    /// `cuThreadExchangeStreamCaptureMode`; a stand-in for the driver may have none, and no captures.
    capture_mode: Option<unsafe extern "C" fn(*mut c_int) -> i32>,
    /// An error over a stand-in for the driver.
    device_table: Result<DeviceTable, Error>,
    /// Those that are open.
    devices: Mutex<Vec<&'static Device>>,
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
        // SAFETY: the type is that of the public header.
        let capture_mode = unsafe { library.function("cuThreadExchangeStreamCaptureMode") }.ok();
        let devices = Mutex::new(Vec::new());
        let driver: &'static Driver = Box::leak(Box::new(Driver { library, table, capture_mode, device_table, devices }));
        *slot = Some(driver);
        Ok(driver)
    }

    /// Returns the file that the driver was loaded from.
    pub fn path(&self) -> PathBuf {
        self.library.mapped_path()
    }

    /// The newest CUDA version that the driver speaks: 13000 for 13.0.
    ///
    /// # Errors
    /// A driver error.
    pub fn cuda_version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDriverGetVersion", unsafe { (self.table.driver_version)(&mut version) })?;
        Ok(version)
    }

    /// Returns the number of devices that the driver sees. Starts the driver, and opens no device.
    ///
    /// # Errors
    /// What the driver says; a driver that sees no device fails to start. Nothing is remembered: a later call asks again.
    pub fn device_count(&self) -> Result<u32, Error> {
        // SAFETY: no arguments to be wrong about.
        self.check("cuInit", unsafe { (self.table.init)(0) })?;
        let mut count = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDeviceGetCount", unsafe { (self.table.device_count)(&mut count) })?;
        Ok(count.unsigned_abs())
    }

    /// One device, its primary context retained for the life of the process from the first call that succeeds. No other device is touched.
    ///
    /// # Errors
    /// [`Error::NoDevice`] past the last one; otherwise as [`Driver::device_count`], and the driver's own for this device, such as that
    /// another process has it for itself.
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

    /// Runs something that allocates, frees, loads, unloads or waits, which would invalidate a capture by this or another thread otherwise.
    /// Streams that are being captured must not be touched inside.
    pub(crate) fn relaxed<R>(&self, run: impl FnOnce() -> R) -> R {
        /// Restores the mode from before, in a panic too.
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

/// Runs something that allocates, frees, loads, unloads or waits, as [`Device::relaxed`] does, for every device of the driver of this process, if there is one.
pub fn relaxed<R>(run: impl FnOnce() -> R) -> R {
    let driver = *DRIVER.lock();
    match driver {
        Some(driver) => driver.relaxed(run),
        None => run(),
    }
}

/// The path made absolute from the current folder; unchanged where there is none.
pub fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}
