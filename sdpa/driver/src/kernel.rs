//! Kernels in PTX, which the driver compiles for its device.

use crate::device::Device;
use crate::driver::Ptr;
use crate::error::Error;
use crate::submission::Submission;
use std::ffi::{CStr, c_uint, c_void};

/// A kernel from PTX that stays loaded on a device for the life of the process, from [`Device::load_kernels`]. In contrast, kernels of a
/// [`Module`](crate::Module) can be unloaded.
#[derive(Debug)]
pub struct Kernel {
    device: &'static Device,
    function: Ptr,
}

// SAFETY: a function of a module may be launched from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Kernel {}

impl Device {
    /// Loads kernels by name from one PTX source. They are never unloaded, so load each source once.
    ///
    /// # Errors
    /// Returns a driver error if the PTX is newer than the driver supports, or if it has no kernel of one of the names.
    pub fn load_kernels<const N: usize>(&'static self, ptx: &CStr, names: [&CStr; N]) -> Result<[Kernel; N], Error> {
        let _entered = self.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the text is zero-terminated, and the pointer is to a live pointer.
        let code = self.relaxed(|| unsafe { (self.table().module_load)(&mut module, ptx.as_ptr().cast()) });
        self.check("cuModuleLoadData", code)?;
        let mut functions = [std::ptr::null_mut(); N];
        for (function, name) in functions.iter_mut().zip(names) {
            // SAFETY: the module is live, the name is zero-terminated, and the pointer is to a live pointer.
            let code = self.relaxed(|| unsafe { (self.table().module_function)(function, module, name.as_ptr()) });
            self.check("cuModuleGetFunction", code)?;
        }
        Ok(functions.map(|function| Kernel { device: self, function }))
    }
}

impl Submission<'_> {
    /// Launches a kernel whose parameters are all 64-bit, on the stream. It returns without waiting.
    ///
    /// # Safety
    /// There are as many arguments as kernel parameters. The kernel accesses only device memory of the stream's device that nothing else uses until
    /// the stream has passed this call.
    ///
    /// # Errors
    /// Returns [`Error::OtherDevice`] for a kernel of another device, [`Error::Memory`] for too many arguments, or a driver error.
    pub unsafe fn launch(&self, kernel: &Kernel, [blocks, threads]: [u32; 2], arguments: &[u64]) -> Result<(), Error> {
        let device = self.device();
        if kernel.device.ordinal() != device.ordinal() {
            return Err(Error::OtherDevice { what: "the kernel", got: kernel.device.ordinal(), expected: device.ordinal() });
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGUMENTS];
        if arguments.len() > ARGUMENTS {
            return Err(Error::Memory {
                what: "the argument list of a kernel".to_owned(),
                bytes: 8 * arguments.len() as u64,
                limit: format!("a kernel has at most {ARGUMENTS} arguments of 8 bytes"),
            });
        }
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = std::ptr::from_ref(argument).cast_mut().cast();
        }
        let one: c_uint = 1;
        // SAFETY: the caller upholds the contract; the driver copies the arguments before it returns.
        let code = unsafe {
            (device.table().launch)(
                kernel.function,
                blocks,
                one,
                one,
                threads,
                one,
                one,
                0,
                self.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        device.check("cuLaunchKernel", code)
    }
}

/// The most arguments of a launch.
const ARGUMENTS: usize = 32;
