//! Compiled and loaded kernels, by source. Problems that differ only in lengths share them.

use crate::disk::Disk;
use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::files::Files;
use crate::source::OPTIONS;
use sdpa_cache::{BuildTime, CacheKey, CacheValue, Fields, PlanCache, Weight};
use sdpa_core::Unsupported;
use sdpa_driver::{Compiled, Device, Entry, Module, Nvrtc};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

/// The key of the kernel cache: everything on which compiled kernels depend. Keys are compared in full.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// The CUDA source.
    pub source: Arc<str>,
    /// The entry points of the source, the main one first, each with the bytes of shared memory of a launch.
    pub entries: Vec<(EntryPoint, u32)>,
    /// A description of the tile configuration, for reports.
    pub tile: String,
    /// The architecture of the machine code, such as `sm_90a`.
    pub architecture: String,
}

impl KernelKey {
    /// Returns a hash of the source, the same in every process of one build of this crate. Reports use it, because they have no room for the source.
    fn digest(&self) -> u64 {
        let mut state = DefaultHasher::new();
        self.source.hash(&mut state);
        state.finish()
    }
}

impl CacheKey for KernelKey {
    fn label(&self) -> String {
        format!("{} {:016x}", self.tile, self.digest())
    }

    fn fields(&self) -> Fields {
        let source = format!("{:016x}, {} bytes", self.digest(), self.source.len());
        vec![("source", source), ("tile", self.tile.clone()), ("architecture", self.architecture.clone())]
    }
}

/// The origin of a kernel's machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// An attached file ([`CudaExecutor::attach`](crate::CudaExecutor::attach)).
    File,
    /// The disk cache of kernels ([`KernelCache`](crate::KernelCache)).
    Cache,
    /// NVRTC compiled the kernel.
    Compiled,
}

/// The kernels of one source, compiled and loaded on one device.
#[derive(Debug)]
pub struct Kernel {
    /// The loaded machine code.
    pub module: Module,
    /// The entry points of the machine code, in the order of [`KernelKey::entries`].
    pub entries: Vec<(EntryPoint, Entry)>,
    /// The machine code, which is kept so that it can be saved to a kernel file.
    pub(crate) code: Vec<u8>,
    /// The origin of the machine code: a file, the disk cache, or NVRTC.
    pub(crate) origin: Origin,
    /// Bytes of the source, which the key keeps.
    source_bytes: u64,
    time: BuildTime,
}

impl CacheValue for Kernel {
    fn weight(&self) -> Weight {
        let code = self.code.len() as u64;
        Weight { host: self.source_bytes + code, device: code, workspace: 0 }
    }

    fn build_time(&self) -> BuildTime {
        self.time
    }
}

/// The cache of loaded kernels in memory, keyed by their source.
pub type Kernels = PlanCache<KernelKey, Arc<Kernel>, Unsupported>;

/// Compiles a kernel source to machine code for compute capability 9.0 (`sm_90a`).
///
/// # Errors
/// Returns [`sdpa_driver::Error::Compile`] with the compiler's log.
pub fn compile(nvrtc: &Nvrtc, source: &str) -> Result<Compiled, sdpa_driver::Error> {
    compile_for(nvrtc, source, "sm_90a")
}

/// Compiles a kernel source to machine code for an architecture, such as `sm_80`.
///
/// # Errors
/// Returns [`sdpa_driver::Error::Compile`] with the compiler's log.
pub fn compile_for(nvrtc: &Nvrtc, source: &str, architecture: &str) -> Result<Compiled, sdpa_driver::Error> {
    nvrtc.compile(source, architecture, &OPTIONS)
}

/// Returns the compiler's warning that it serialised WGMMAs, if there is one. The cause is a shortage of registers or a result that is
/// read too early; the code is correct but slow.
pub fn serialized(compiled: &Compiled) -> Option<&str> {
    compiled.log.lines().find(|line| line.contains("(C75"))
}

/// The oldest NVRTC that keeps WGMMAs concurrent. 12.6 and 12.8 serialise them in kernels of more than one tile configuration.
const SIDE_BY_SIDE_FROM: [i32; 2] = [12, 9];

/// Returns whether NVRTC of this version (major, minor) compiles kernels as fast as the benchmarked ones: 12.9 or later.
pub(crate) fn is_fast(version: [i32; 2]) -> bool {
    version >= SIDE_BY_SIDE_FROM
}

/// The machine code of a kernel, with its key and the compiler's version, as kernel files store it.
#[derive(Debug)]
pub struct MachineCode {
    /// The key of the kernel: its source, its entry points and its architecture.
    pub(crate) key: KernelKey,
    /// The version of NVRTC that compiled it: major, minor.
    pub(crate) compiler: [i32; 2],
    /// The machine code: the bytes of an ELF file.
    pub(crate) code: Vec<u8>,
}

impl MachineCode {
    /// Compiles the kernel of this key. It needs no device.
    ///
    /// # Errors
    /// Returns [`sdpa_driver::Error::Compile`] with the compiler's log.
    pub fn compile(nvrtc: &Nvrtc, key: KernelKey) -> Result<MachineCode, sdpa_driver::Error> {
        let compiled = compile_for(nvrtc, &key.source, &key.architecture)?;
        if let Some(why) = serialized(&compiled) {
            tracing::warn!(kernel = key.label(), why, "products run one after the other");
        }
        Ok(MachineCode { key, compiler: nvrtc.version(), code: compiled.code })
    }

    /// Returns the machine code: the bytes of an ELF file.
    pub fn code(&self) -> &[u8] {
        &self.code
    }
}

impl Kernel {
    /// Loads a kernel from an attached file or the disk cache. If neither has it, compiles it and stores it in the disk cache.
    pub(crate) fn build(nvrtc: &Nvrtc, files: &Files, disk: &Disk, device: &'static Device, key: &KernelKey) -> Result<Kernel, Error> {
        let start = Instant::now();
        if let Some(code) = files.code(key, nvrtc.version()) {
            return Ok(Kernel::load(device, key, code, Origin::File, start)?);
        }
        if let Some(code) = disk.code(key, nvrtc) {
            match Kernel::load(device, key, code, Origin::Cache, start) {
                Ok(kernel) => return Ok(kernel),
                // The caller did not name this file of the kernel cache. If the driver refuses its code, compile the kernel and replace
                // the file.
                Err(error) => {
                    tracing::warn!(%error, kernel = key.label(), "the driver rejected a kernel from the kernel cache; compiling it")
                }
            }
        }
        let compiled = MachineCode::compile(nvrtc, key.clone())?;
        disk.keep(&compiled, nvrtc);
        Ok(Kernel::load(device, key, compiled.code, Origin::Compiled, start)?)
    }

    /// Returns an entry point of the machine code.
    ///
    /// # Errors
    /// Returns [`Error::Bug`] if the code does not have this entry point.
    pub fn entry(&self, point: EntryPoint) -> Result<&Entry, Error> {
        let found = self.entries.iter().find(|(known, _)| *known == point);
        found.map(|(_, entry)| entry).ok_or_else(|| Error::Bug(format!("a kernel source has no {point}")))
    }

    fn load(device: &'static Device, key: &KernelKey, code: Vec<u8>, origin: Origin, start: Instant) -> Result<Kernel, sdpa_driver::Error> {
        let module = Module::load(device, &code)?;
        let entry = |&(point, shared): &(EntryPoint, u32)| Ok((point, module.entry(point.name(), shared)?));
        let entries = key.entries.iter().map(entry).collect::<Result<_, sdpa_driver::Error>>()?;
        let mut time = BuildTime { total: start.elapsed(), ..BuildTime::default() };
        let part = if origin == Origin::Compiled { &mut time.compile } else { &mut time.load };
        *part = time.total;
        Ok(Kernel { module, entries, code, origin, source_bytes: key.source.len() as u64, time })
    }
}

#[cfg(test)]
mod tests {
    use super::is_fast;

    #[test]
    fn old_compilers_make_slow_kernels() {
        assert_eq!([[12, 6], [12, 8], [12, 9], [13, 0]].map(is_fast), [false, false, true, true]);
    }
}
