//! NVIDIA's run-time compiler, for whatever is compiled for a GPU without one.
#![allow(unsafe_code)]

use crate::golden::repository;
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::ptr;

/// Names the library, or its folder, before everywhere else.
const PLACE: &str = "SDPA_NVRTC";

const LIBRARY: &str = "libnvrtc.so.13";

type Program = *mut std::ffi::c_void;

/// The compiler, loaded.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
}

/// A program that is destroyed.
struct Made<'a> {
    compiler: &'a Nvrtc,
    program: Program,
}

impl Nvrtc {
    /// Loads it: from where `SDPA_NVRTC` says, from beside the offline runtimes of cuDNN, from where the system finds it.
    ///
    /// # Errors
    /// Why it is not there.
    pub fn find() -> Result<Nvrtc, String> {
        let named = std::env::var_os(PLACE).map(PathBuf::from).map(|path| if path.is_dir() { path.join(LIBRARY) } else { path });
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository("target"), PathBuf::from);
        let beside = target.join("cudnn/9.27/nvidia/cu13/lib").join(LIBRARY);
        let mut said = Vec::new();
        for place in named.into_iter().chain([beside, PathBuf::from(LIBRARY)]) {
            // SAFETY: loading runs the initialisers of a library of NVIDIA's, which ask nothing of their caller.
            match unsafe { Library::new(&place) } {
                Ok(library) => return Ok(Nvrtc { library }),
                Err(e) => said.push(e.to_string()),
            }
        }
        Err(format!("there is no {LIBRARY} ({}); scripts/setup-tests.sh installs one, {PLACE} names another", said.join("; ")))
    }

    /// # Safety
    /// `F` is the type of the function of this name.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        // SAFETY: the caller's.
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }.map(|f| *f).map_err(|e| e.to_string())
    }

    /// Compiles a text to machine code of an architecture, such as `sm_90`.
    ///
    /// # Errors
    /// What the compiler says.
    pub fn compile(&self, text: &str, architecture: &str, options: &[&str]) -> Result<Vec<u8>, String> {
        self.made(text, architecture, options)?.bytes(c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")
    }

    /// Compiles a text to PTX for an architecture, such as `compute_80`, and those after it.
    ///
    /// # Errors
    /// What the compiler says.
    pub fn ptx(&self, text: &str, architecture: &str, options: &[&str]) -> Result<String, String> {
        let mut ptx = self.made(text, architecture, options)?.bytes(c"nvrtcGetPTXSize", c"nvrtcGetPTX")?;
        // The size counts the zero at the end.
        ptx.pop();
        String::from_utf8(ptx).map_err(|e| e.to_string())
    }

    fn made(&self, text: &str, architecture: &str, options: &[&str]) -> Result<Made<'_>, String> {
        let text = CString::new(text).map_err(|e| e.to_string())?;
        let mut program = ptr::null_mut();
        // SAFETY: the signatures are those of nvrtc.h of CUDA 13; every pointer is to something live, and arrays have the lengths said.
        unsafe {
            type Create = unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int;
            let create: Create = self.function(c"nvrtcCreateProgram")?;
            let code = create(&mut program, text.as_ptr(), ptr::null(), 0, ptr::null(), ptr::null());
            if code != 0 {
                return Err(format!("nvrtcCreateProgram returned {code}"));
            }
        }
        let made = Made { compiler: self, program };
        let options = [format!("--gpu-architecture={architecture}")].into_iter().chain(options.iter().map(|&o| o.to_owned()));
        let options: Vec<CString> = options.map(CString::new).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: as above.
        let code = unsafe {
            type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
            let compile: Compile = self.function(c"nvrtcCompileProgram")?;
            compile(made.program, pointers.len() as c_int, pointers.as_ptr())
        };
        if code != 0 {
            let log = made.bytes(c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")?;
            return Err(format!("nvrtcCompileProgram returned {code}: {}", String::from_utf8_lossy(&log).trim_end_matches('\0')));
        }
        Ok(made)
    }
}

impl Made<'_> {
    fn bytes(&self, size: &CStr, get: &CStr) -> Result<Vec<u8>, String> {
        // SAFETY: as in `made`; the buffer is as long as the library said.
        unsafe {
            let size: unsafe extern "C" fn(Program, *mut usize) -> c_int = self.compiler.function(size)?;
            let get: unsafe extern "C" fn(Program, *mut c_char) -> c_int = self.compiler.function(get)?;
            let mut count = 0;
            let code = size(self.program, &mut count);
            let mut bytes = vec![0u8; count];
            let code = if code == 0 { get(self.program, bytes.as_mut_ptr().cast()) } else { code };
            if code == 0 { Ok(bytes) } else { Err(format!("NVRTC returned {code}")) }
        }
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live, and goes here.
        unsafe {
            type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
            if let Ok(destroy) = self.compiler.function::<Destroy>(c"nvrtcDestroyProgram") {
                let _ = destroy(&mut self.program);
            }
        }
    }
}
