//! Machine code that is loaded on a device until it is dropped, and its launches.

use crate::device::Device;
use crate::driver::Ptr;
use crate::error::Error;
use crate::load::table;
use crate::submission::Submission;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

table! {
    /// Driver functions for native kernels. A null driver, which has no device and serves only for planning, may lack them.
    ModuleTable {
        unload: "cuModuleUnload" fn(Ptr);
        attribute: "cuFuncGetAttribute" fn(*mut c_int, c_int, Ptr);
        set_attribute: "cuFuncSetAttribute" fn(Ptr, c_int, c_int);
        encode: "cuTensorMapEncodeTiled" fn(Ptr, c_int, c_uint, u64, *const u64, *const u64, *const u32, *const u32, c_int, c_int, c_int, c_int);
    }
}

const MAX_DYNAMIC_SHARED: c_int = 8;
const REGISTERS: c_int = 4;
const LOCAL_BYTES: c_int = 3;

/// Machine code that is loaded on a device. Dropping the module unloads it. If the device may still run the code, drop the module through
/// [`Device::retire`].
#[derive(Debug)]
pub struct Module {
    device: &'static Device,
    raw: Ptr,
}

// SAFETY: a module may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Module {}

/// A kernel of a [`Module`], for [`Submission::launch_entry`].
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    function: Ptr,
    /// Number of 32-bit registers per thread.
    pub registers: u32,
    /// Local memory per thread, in bytes; 0 if no register is spilled.
    pub local_bytes: u32,
}

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// The grid, the block size and the shared memory of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launch {
    /// Number of thread blocks along each axis.
    pub blocks: [u32; 3],
    /// Number of threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block in bytes, at most the number that was passed to [`Module::entry`].
    pub shared_bytes: u32,
}

impl Module {
    /// Loads machine code, or zero-terminated PTX, on a device.
    ///
    /// # Errors
    /// Returns a driver error, for example for code for another architecture, or if there is no memory.
    pub fn load(device: &'static Device, code: &[u8]) -> Result<Module, Error> {
        let _entered = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the code contains its own length, and the pointer is to a live pointer.
        let status = device.relaxed(|| unsafe { (device.table().module_load)(&mut raw, code.as_ptr().cast()) });
        device.check("cuModuleLoadData", status)?;
        Ok(Module { device, raw })
    }

    /// Returns the device on which the module is loaded.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns a kernel of the module, for launches with up to `shared_bytes` bytes of dynamic shared memory per block.
    ///
    /// # Errors
    /// Returns a driver error if the module has no kernel of this name, or if the device has less shared memory.
    pub fn entry(&self, name: &CStr, shared_bytes: u32) -> Result<Entry, Error> {
        let device = self.device;
        let _entered = device.enter()?;
        let modules = device.modules()?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is live, the name is zero-terminated, and the pointer is to a live pointer.
        let status =
            device.relaxed(|| unsafe { (device.table().module_function)(&mut function, self.raw, name.as_ptr().cast::<c_char>()) });
        device.check("cuModuleGetFunction", status)?;
        let shared = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is live.
        device.check("cuFuncSetAttribute", unsafe { (modules.set_attribute)(function, MAX_DYNAMIC_SHARED, shared) })?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the function is live, and the pointer is to a live integer.
            device.check("cuFuncGetAttribute", unsafe { (modules.attribute)(&mut value, which, function) })?;
            Ok::<u32, Error>(value.unsigned_abs())
        };
        Ok(Entry { function, registers: attribute(REGISTERS)?, local_bytes: attribute(LOCAL_BYTES)? })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let (Ok(_entered), Ok(modules)) = (self.device.enter(), self.device.modules()) {
            // SAFETY: the module is owned here, and none of its kernels runs any more.
            let code = self.device.relaxed(|| unsafe { (modules.unload)(self.raw) });
            if code != 0 {
                tracing::warn!(code, "cuModuleUnload");
            }
        }
    }
}

/// The most parameters of a kernel.
const PARAMETERS: usize = 16;

impl Submission<'_> {
    /// Launches a kernel of a module on the stream, with pointers to its parameters. It returns without waiting.
    ///
    /// # Safety
    /// The module is loaded on the stream's device, and stays loaded until the stream has passed this call. Parameters have the number, sizes and
    /// alignment that the kernel expects. The kernel accesses only device memory of the stream's device that nothing else uses until then.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] for more than 16 parameters, or a driver error.
    pub unsafe fn launch_entry(&self, entry: &Entry, launch: Launch, parameters: &[*const c_void]) -> Result<(), Error> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); PARAMETERS];
        if parameters.len() > PARAMETERS {
            let limit = format!("a kernel has at most {PARAMETERS} parameters");
            return Err(Error::Memory { what: "the parameter list of a kernel".to_owned(), bytes: 8 * parameters.len() as u64, limit });
        }
        for (pointer, parameter) in pointers.iter_mut().zip(parameters) {
            *pointer = parameter.cast_mut();
        }
        let [x, y, z] = launch.blocks;
        // SAFETY: the caller upholds the contract; the driver copies the parameters before it returns.
        let code = unsafe {
            (self.device().table().launch)(
                entry.function,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.device().check("cuLaunchKernel", code)
    }
}
