//! NVRTC, the CUDA run-time compiler: compiles CUDA C++ to machine code, with or without a GPU.

use crate::driver::{Ptr, absolute};
use crate::error::Error;
use crate::load::{self, Opened, Place, open_first, table};
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;

table! {
    /// The NVRTC functions that are needed.
    Table {
        version: "nvrtcVersion" fn(*mut c_int, *mut c_int);
        create: "nvrtcCreateProgram" fn(*mut Ptr, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        compile: "nvrtcCompileProgram" fn(Ptr, c_int, *const *const c_char);
        destroy: "nvrtcDestroyProgram" fn(*mut Ptr);
        log_size: "nvrtcGetProgramLogSize" fn(Ptr, *mut usize);
        log: "nvrtcGetProgramLog" fn(Ptr, *mut c_char);
        cubin_size: "nvrtcGetCUBINSize" fn(Ptr, *mut usize);
        cubin: "nvrtcGetCUBIN" fn(Ptr, *mut c_char);
        ptx_size: "nvrtcGetPTXSize" fn(Ptr, *mut usize);
        ptx: "nvrtcGetPTX" fn(Ptr, *mut c_char);
    }
}

type Size = unsafe extern "C" fn(Ptr, *mut usize) -> i32;
type Get = unsafe extern "C" fn(Ptr, *mut c_char) -> i32;

/// The variable with the path of the library or its folder, which takes precedence.
const VARIABLE: &str = "SDPA_NVRTC";
/// File names, newest first.
const FILES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];
/// Folders of wheels, in the folder `nvidia` of a Python environment.
const WHEELS: [&str; 2] = ["cu13/lib", "cuda_nvrtc/lib"];

/// NVRTC, CUDA's run-time compiler. It compiles CUDA C++ to machine code or PTX, and needs no GPU.
#[derive(Debug)]
pub struct Nvrtc {
    library: Opened,
    table: Table,
    version: [i32; 2],
}

/// The machine code that a source was compiled to.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code for one architecture.
    pub code: Vec<u8>,
    /// The compiler's log: warnings, and the assembler's report if requested.
    pub log: String,
}

/// An owned program.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    raw: Ptr,
}

impl Nvrtc {
    /// Loads NVRTC (`libnvrtc.so.13` or `libnvrtc.so.12`) from `path`, which is a file or a folder that contains one. With `None`, the
    /// path is the environment variable `SDPA_NVRTC` if it is set. Otherwise the wheels of the active Python environment and then the
    /// search path of the system's loader are searched.
    ///
    /// # Errors
    /// Returns the paths that were searched, or the name of a missing function.
    pub fn load(path: Option<&Path>) -> Result<Nvrtc, Error> {
        let library = open_first("NVRTC (libnvrtc.so.13)", &places(path))?;
        let table = Table::load(&library)?;
        let mut version = [0; 2];
        let [major, minor] = &mut version;
        // SAFETY: both pointers are to live integers.
        let code = unsafe { (table.version)(major, minor) };
        let nvrtc = Nvrtc { library, table, version };
        nvrtc.check("nvrtcVersion", code, "")?;
        Ok(nvrtc)
    }

    /// Returns the path of the library file.
    pub fn path(&self) -> PathBuf {
        self.library.mapped_path()
    }

    /// Returns the version of NVRTC: major, minor.
    pub fn version(&self) -> [i32; 2] {
        self.version
    }

    /// Compiles a source to machine code for an architecture, such as `sm_90a`.
    ///
    /// # Errors
    /// Returns [`Error::Compile`] with the compiler's log.
    pub fn compile(&self, text: &str, architecture: &str, options: &[&str]) -> Result<Compiled, Error> {
        let program = self.program(text, architecture, options)?;
        let code = program.bytes("nvrtcGetCUBIN", self.table.cubin_size, self.table.cubin)?;
        Ok(Compiled { code, log: program.log() })
    }

    /// Compiles a source to PTX that runs on an architecture, such as `compute_80`, and on later ones.
    ///
    /// # Errors
    /// Fails as [`Nvrtc::compile`] does.
    pub fn ptx(&self, text: &str, architecture: &str, options: &[&str]) -> Result<String, Error> {
        let program = self.program(text, architecture, options)?;
        let bytes = program.bytes("nvrtcGetPTX", self.table.ptx_size, self.table.ptx)?;
        Ok(text_of(&bytes))
    }

    fn program(&self, text: &str, architecture: &str, options: &[&str]) -> Result<Program<'_>, Error> {
        let zero = |_| Error::Compile { call: "nvrtcCreateProgram", code: 0, log: "a text with a zero in it".to_owned() };
        let text = CString::new(text).map_err(zero)?;
        let options = [format!("--gpu-architecture={architecture}")].into_iter().chain(options.iter().map(|&o| o.to_owned()));
        let options: Vec<CString> = options.map(|o| CString::new(o).map_err(zero)).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut raw = ptr::null_mut();
        // SAFETY: the texts are zero-terminated, and the pointer is to a live pointer.
        let code = unsafe { (self.table.create)(&mut raw, text.as_ptr(), ptr::null(), 0, ptr::null(), ptr::null()) };
        self.check("nvrtcCreateProgram", code, "")?;
        let program = Program { nvrtc: self, raw };
        // SAFETY: the program is live, and the number of options is right.
        let code = unsafe { (self.table.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
        if code != 0 {
            self.check("nvrtcCompileProgram", code, &program.log())?;
        }
        Ok(program)
    }

    fn check(&self, call: &'static str, code: c_int, log: &str) -> Result<(), Error> {
        if code == 0 { Ok(()) } else { Err(Error::Compile { call, code, log: log.to_owned() }) }
    }
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').trim_end().to_owned()
}

impl Program<'_> {
    fn bytes(&self, call: &'static str, size: Size, get: Get) -> Result<Vec<u8>, Error> {
        let mut count = 0;
        // SAFETY: the program is live, and the pointer is to a live integer.
        self.nvrtc.check(call, unsafe { size(self.raw, &mut count) }, "")?;
        let mut bytes = vec![0u8; count];
        // SAFETY: the buffer has the length that the library returned.
        self.nvrtc.check(call, unsafe { get(self.raw, bytes.as_mut_ptr().cast()) }, "")?;
        Ok(bytes)
    }

    fn log(&self) -> String {
        let table = &self.nvrtc.table;
        self.bytes("nvrtcGetProgramLog", table.log_size, table.log).map_or_else(|_| String::new(), |bytes| text_of(&bytes))
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live, and is not used after this.
        let _ = unsafe { (self.nvrtc.table.destroy)(&mut self.raw) };
    }
}

fn places(path: Option<&Path>) -> Vec<Place> {
    let named = path.map(Path::to_owned).or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
    if let Some(named) = named.map(absolute) {
        let files = FILES.map(|file| named.join(file));
        return if named.is_dir() { files.map(Place::File).into() } else { vec![Place::File(named)] };
    }
    let in_wheels = |nvidia: &Path| WHEELS.iter().flat_map(|w| FILES.map(|file| nvidia.join(w).join(file))).collect();
    let mut places = load::in_python("no NVRTC wheel", in_wheels);
    places.extend(FILES.map(Place::System));
    places
}
