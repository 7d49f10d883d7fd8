//! The run-time compiler: clang, over the kernels' text with the pieces that hold PTX replaced. What it makes, "machine code", is the architecture that was asked for and
//! the path of a library.

use crate::{Ptr, store};
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

const COMPILATION: c_int = 6;
const INVALID_PROGRAM: c_int = 4;

/// What machine code begins with, as that of GPUs does.
pub(crate) const MAGIC: &[u8] = b"\x7fELF";

/// Pieces of the text by their names, and what stands in for each.
const REPLACED: [(&str, &str); 6] = [
    ("ptx.cuh", "ptx.h"),
    ("tma.cuh", "tma.h"),
    ("cluster.cuh", "cluster.h"),
    ("wgmma.cuh", "wgmma.h"),
    ("mma.cuh", "mma.h"),
    ("generated", ""),
];

/// What a kernel has behind its bounds whose blocks run in pairs.
const IN_PAIRS: &str = "__cluster_dims__(2, 1, 1)";

thread_local! {
    /// What is replaced in kernels by what, so that tests see whether it is found, and in how many texts it was so far.
    static FAULT: RefCell<Option<[String; 2]>> = const { RefCell::new(None) };
    static FAULTY: Cell<c_int> = const { Cell::new(0) };
    /// Whether machine code with the fault is compared with that without, and how many texts had another.
    static COMPARES: Cell<bool> = const { Cell::new(false) };
    static DIFFERENT: Cell<c_int> = const { Cell::new(0) };
    /// Lines of kernels' files in texts that this thread compiles, where somebody asks for them; and what was answered last.
    static LINES: RefCell<Option<BTreeSet<String>>> = const { RefCell::new(None) };
    static TOLD_LINES: RefCell<CString> = RefCell::default();
}

const FLAGS: [&str; 10] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-w",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-ftrivial-auto-var-init=pattern",
];

/// Products go into sums without being rounded, as on a GPU, where this processor does so.
fn flags() -> impl Iterator<Item = &'static str> {
    #[cfg(target_arch = "x86_64")]
    let joined = std::arch::is_x86_feature_detected!("fma").then_some("-mfma");
    #[cfg(not(target_arch = "x86_64"))]
    let joined = None;
    FLAGS.into_iter().chain(joined)
}

struct Program {
    text: String,
    log: String,
    code: Vec<u8>,
}

fn machine() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("machine")
}

/// A piece with empty lines for what says how often a loop is unrolled.
fn without_unrolling(piece: &str) -> String {
    piece.lines().map(|line| if line.trim_start().starts_with("#pragma unroll") { "\n".to_owned() } else { format!("{line}\n") }).collect()
}

/// The text for clang, with its kernels behind names that a launch finds them by.
fn translated(text: &str) -> Result<String, String> {
    let mut made = String::from("#include \"cuda.h\"\n");
    // With how many blocks of each run together.
    let mut kernels: Vec<(String, u32)> = Vec::new();
    for (n, piece) in text.split("#line 1 \"").enumerate() {
        let (name, body) = if n == 0 { ("constants", piece) } else { piece.split_once("\"\n").ok_or("a piece without a name")? };
        match REPLACED.iter().find(|(replaced, _)| *replaced == name) {
            Some((_, "")) => {}
            Some((_, with)) => made.push_str(&format!("#include \"{with}\"\n")),
            None => made.push_str(&format!("#line 1 \"{name}\"\n{}", without_unrolling(body))),
        }
        for kernel in body.split("__global__").skip(1) {
            // Behind the return type and the bounds, which may have parentheses of their own.
            let (_, bounds) = kernel.split_once("__launch_bounds__(").ok_or("a kernel without bounds")?;
            let mut open = 1;
            let end = bounds.find(|c| {
                open += i32::from(c == '(') - i32::from(c == ')');
                open == 0
            });
            let rest = &bounds[end.ok_or("a kernel whose bounds do not end")? + 1..];
            let (rest, together) = match rest.trim_start().strip_prefix(IN_PAIRS) {
                Some(rest) => (rest, 2),
                None => (rest, 1),
            };
            let (name, _) = rest.trim_start().split_once('(').ok_or("a kernel without arguments")?;
            kernels.push((name.to_owned(), together));
        }
    }
    for (name, together) in &kernels {
        made.push_str(&format!(
            "extern \"C\" __attribute__((visibility(\"default\"))) void emulated_{name}(void** arguments) {{ machine::call({name}, arguments); }}\n\
             extern \"C\" __attribute__((visibility(\"default\"))) const unsigned emulated_together_{name} = {together};\n"
        ));
    }
    Ok(made)
}

/// Where programs are kept: beside this library.
fn folder() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let own = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.ends_with("/libemulated.so"));
    own.and_then(|path| Path::new(path).parent()).map_or_else(std::env::temp_dir, Path::to_owned).join("emulated")
}

/// Runs clang and returns its standard output.
fn clang(arguments: &[&OsStr]) -> Result<Vec<u8>, String> {
    let names = ["clang++".to_owned()].into_iter().chain((14..=22).rev().map(|version| format!("clang++-{version}")));
    for name in names {
        match Command::new(&name).args(arguments).output() {
            Ok(done) if done.status.success() => return Ok(done.stdout),
            Ok(done) => return Err(String::from_utf8_lossy(&done.stderr).into_owned()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(format!("{name}: {e}")),
        }
    }
    Err("there is no clang++ (on Debian: apt-get install clang)".to_owned())
}

/// What texts are compiled beside.
const FILES: [&str; 13] = [
    "machine.h",
    "state.h",
    "fibers.h",
    "engines.h",
    "threads.h",
    "machine.cpp",
    "cuda.h",
    "ptx.h",
    "tma.h",
    "cluster.h",
    "wgmma.h",
    "mma.h",
    "../../metal/emulator/numbers.h",
];

/// A number for a text and all that it is compiled beside.
fn digest(text: &str) -> Result<u64, String> {
    let mut state = DefaultHasher::new();
    (text, flags().collect::<Vec<_>>()).hash(&mut state);
    for file in FILES {
        std::fs::read_to_string(machine().join(file)).map_err(|e| format!("{file}: {e}"))?.hash(&mut state);
    }
    Ok(state.finish())
}

/// Notes the lines of kernels' files that the preprocessor leaves of a text, as `file:line`.
fn note_lines(text: &str) -> Result<(), String> {
    let source = folder().join(format!("lines.{}.{:?}.cpp", std::process::id(), std::thread::current().id()));
    std::fs::create_dir_all(folder()).and_then(|()| std::fs::write(&source, text)).map_err(|e| format!("{}: {e}", source.display()))?;
    let include = machine();
    let left = clang(&["-E".as_ref(), "-std=c++17".as_ref(), "-I".as_ref(), include.as_os_str(), source.as_os_str()]);
    let _ = std::fs::remove_file(&source);
    let left = String::from_utf8_lossy(&left?).into_owned();
    let (mut file, mut number) = ("", 0);
    LINES.with_borrow_mut(|lines| {
        let Some(lines) = lines else { return };
        for line in left.lines() {
            let marker = line.strip_prefix("# ").and_then(|rest| rest.split_once(" \""));
            if let Some((next, name)) = marker {
                (file, number) = (name.split('"').next().unwrap_or_default(), next.parse().unwrap_or(0u32));
                continue;
            }
            // Headers have paths.
            if !line.trim().is_empty() && !file.contains('/') {
                lines.insert(format!("{file}:{number}"));
            }
            number += 1;
        }
    });
    Ok(())
}

/// Texts that somebody in this process compiles.
static MADE: Mutex<BTreeMap<u64, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// The file of this name, made by clang if it is not there: never seen half-written.
fn made(name: &str, arguments: &[&OsStr]) -> Result<PathBuf, String> {
    static UNIQUE: AtomicU32 = AtomicU32::new(0);
    let folder = folder();
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let path = folder.join(name);
    if path.exists() {
        return Ok(path);
    }
    let part = folder.join(format!("{name}.{}-{}", std::process::id(), UNIQUE.fetch_add(1, Ordering::Relaxed)));
    let flags: Vec<&str> = flags().collect();
    let all: Vec<&OsStr> =
        flags.iter().map(OsStr::new).chain(arguments.iter().copied()).chain([OsStr::new("-o"), part.as_os_str()]).collect();
    clang(&all)?;
    std::fs::rename(&part, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

fn compiled(text: &str) -> Result<PathBuf, String> {
    let mut text = translated(text)?;
    let right = text.clone();
    if let Some([from, to]) = FAULT.with_borrow(Clone::clone) {
        match text.matches(&from).count() {
            // Of the texts of a pass, one may have it alone.
            0 => {}
            1 => {
                text = text.replace(&from, &to);
                FAULTY.set(FAULTY.get() + 1);
            }
            places => return Err(format!("error: {places} places are as the fault says: {from}")),
        }
    }
    if LINES.with_borrow(Option::is_some) {
        note_lines(&text)?;
    }
    let path = program_of(&text)?;
    if COMPARES.get() && text != right {
        let [found, right] = [path.clone(), program_of(&right)?].map(std::fs::read);
        DIFFERENT.set(DIFFERENT.get() + c_int::from(found.map_err(|e| e.to_string())? != right.map_err(|e| e.to_string())?));
    }
    Ok(path)
}

/// The program of a text, compiled where that was not done before.
fn program_of(text: &str) -> Result<PathBuf, String> {
    let (digest, include) = (digest(text)?, machine());
    let path = folder().join(format!("{digest:016x}.so"));
    // Tests that run side by side have texts in common.
    let turn = MADE.lock().entry(digest).or_default().clone();
    let _turn = turn.lock();
    if path.exists() {
        return Ok(path);
    }
    // Compiled once, and most of what runs.
    let machine =
        made(&format!("{:016x}.o", self::digest("")?), &["-O3".as_ref(), "-c".as_ref(), include.join("machine.cpp").as_os_str()])?;
    let source = folder().join(format!("{digest:016x}.{}.cpp", std::process::id()));
    std::fs::write(&source, text).map_err(|e| format!("{}: {e}", source.display()))?;
    // Without the name of the source, so that the same code is the same file.
    let arguments = ["-shared".as_ref(), "-s".as_ref(), "-I".as_ref(), include.as_os_str(), source.as_os_str(), machine.as_os_str()];
    // A faster linker, where there is one.
    static GOLD: LazyLock<bool> = LazyLock::new(|| clang(&["-fuse-ld=gold".as_ref(), "-Wl,--version".as_ref()]).is_ok());
    let linker = GOLD.then_some(OsStr::new("-fuse-ld=gold"));
    let done = made(&format!("{digest:016x}.so"), &linker.into_iter().chain(arguments).collect::<Vec<_>>());
    // What did not compile is there to be read.
    if done.is_ok() {
        let _ = std::fs::remove_file(&source);
    }
    done
}

/// PTX of this project that runs here, with the source that it was made from. A test of this project compares the two.
const PTX: [(&str, &str); 1] = [(
    include_str!("../../../sdpa/parallel/src/device/kernels/ranks.ptx"),
    include_str!("../../../sdpa/parallel/src/device/kernels/ranks.cu"),
)];

/// Compiles the source of PTX; `None` if it is not known.
pub(crate) fn program_of_ptx(text: &str) -> Option<Result<PathBuf, String>> {
    let (_, source) = PTX.iter().find(|(ptx, _)| *ptx == text)?;
    let elements = include_str!("../../../sdpa/cudnn/src/kernels/elements.cuh");
    // The compiler declares functions and the threads of a block in this way; `cuda.h` has the names of the attention kernels only.
    let before = "#define __device__\nstruct Threads { unsigned x; };\n#define blockDim (Threads{machine::block_threads()})\n";
    Some(compiled(&format!("{before}{}", source.replace("#include \"elements.cuh\"", elements))))
}

/// The program behind a handle.
///
/// # Safety
/// It is null, or one that was created and not destroyed.
unsafe fn program<'a>(handle: Ptr) -> Option<&'a mut Program> {
    // SAFETY: the caller's.
    unsafe { handle.cast::<Program>().as_mut() }
}

/// # Safety
/// `to` has room for the bytes, and a zero.
unsafe fn told(bytes: &[u8], to: *mut c_char) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len());
        to.add(bytes.len()).write(0);
    }
    0
}

exported! {
    /// Not a function of NVRTC: texts that this thread compiles have the second in place of the first, which may stand there once. Null: as they are. In how many
    /// texts it was since it was asked last.
    fn emulated_fault(from: *const c_char, to: *const c_char) -> c_int {
        let told = (!from.is_null()).then(|| {
            // SAFETY: texts that end with a zero.
            [from, to].map(|text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        });
        FAULT.set(told);
        FAULTY.replace(0)
    }

    /// Not a function of NVRTC: in how many texts with the fault the machine code was another since it was asked last. Compares from now on if `on`.
    fn emulated_different(on: bool) -> c_int {
        COMPARES.set(on);
        DIFFERENT.replace(0)
    }

    /// Not a function of NVRTC: the lines of kernels' files that the preprocessor left of the texts that this thread compiled since it asked first, each as
    /// `file:line`, in one text that lasts until it asks again. Asks for those to come if `on`.
    fn emulated_lines(on: bool) -> *const c_char {
        let lines = LINES.replace(on.then(BTreeSet::new)).unwrap_or_default();
        let all: Vec<String> = lines.into_iter().collect();
        TOLD_LINES.set(CString::new(all.join("\n")).unwrap_or_default());
        TOLD_LINES.with_borrow(|told| told.as_ptr())
    }

    /// 13.0.
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(major, 13) + store(minor, 0) }
    }

    /// Keeps the text.
    fn nvrtcCreateProgram(made: *mut Ptr, text: *const c_char, _name: *const c_char, _count: c_int, _headers: *const *const c_char,
                          _names: *const *const c_char) -> c_int {
        // SAFETY: the header's contract: a text that ends with a zero.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        let program = Box::new(Program { text, log: String::new(), code: Vec::new() });
        // SAFETY: the header's contract.
        unsafe { store(made, Box::into_raw(program).cast()) }
    }

    /// Of the options, the architecture counts; the others are the GPU's.
    fn nvrtcCompileProgram(handle: Ptr, count: c_int, options: *const *const c_char) -> c_int {
        // SAFETY: the header's contract.
        let Some(program) = (unsafe { program(handle) }) else { return INVALID_PROGRAM };
        // SAFETY: the header's contract: as many texts that end with a zero.
        let mut options = (0..count.unsigned_abs() as usize).map(|n| unsafe { CStr::from_ptr(*options.add(n)) }.to_string_lossy());
        let architecture = options.find_map(|option| option.strip_prefix("--gpu-architecture=").map(str::to_owned)).unwrap_or_default();
        match compiled(&program.text) {
            Ok(path) => {
                program.code = [MAGIC, architecture.as_bytes(), b"\n", path.as_os_str().as_encoded_bytes()].concat();
                0
            }
            Err(why) => {
                program.log = why.replace('\0', " ");
                COMPILATION
            }
        }
    }

    /// It is gone.
    fn nvrtcDestroyProgram(handle: *mut Ptr) -> c_int {
        // SAFETY: the header's contract: a program that was created here.
        drop(unsafe { Box::from_raw((*handle).cast::<Program>()) });
        0
    }

    /// With the zero.
    fn nvrtcGetProgramLogSize(handle: Ptr, bytes: *mut usize) -> c_int {
        // SAFETY: the header's contract.
        let Some(program) = (unsafe { program(handle) }) else { return INVALID_PROGRAM };
        // SAFETY: the header's contract.
        unsafe { store(bytes, program.log.len() + 1) }
    }

    /// What clang said.
    fn nvrtcGetProgramLog(handle: Ptr, to: *mut c_char) -> c_int {
        // SAFETY: the header's contract.
        let Some(program) = (unsafe { program(handle) }) else { return INVALID_PROGRAM };
        // SAFETY: the header's contract.
        unsafe { told(program.log.as_bytes(), to) }
    }

    /// With the zero.
    fn nvrtcGetCUBINSize(handle: Ptr, bytes: *mut usize) -> c_int {
        // SAFETY: the header's contract.
        let Some(program) = (unsafe { program(handle) }) else { return INVALID_PROGRAM };
        // SAFETY: the header's contract.
        unsafe { store(bytes, program.code.len() + 1) }
    }

    /// Where the library is.
    fn nvrtcGetCUBIN(handle: Ptr, to: *mut c_char) -> c_int {
        // SAFETY: the header's contract.
        let Some(program) = (unsafe { program(handle) }) else { return INVALID_PROGRAM };
        // SAFETY: the header's contract.
        unsafe { told(&program.code, to) }
    }

    /// There is none.
    fn nvrtcGetPTXSize(_handle: Ptr, _bytes: *mut usize) -> c_int { INVALID_PROGRAM }

    /// There is none.
    fn nvrtcGetPTX(_handle: Ptr, _to: *mut c_char) -> c_int { INVALID_PROGRAM }
}
