//! The kernel cache on disk: a process loads kernels that an earlier process compiled.

use crate::files::{self, HERE, KernelFileError};
use crate::kernel::{KernelKey, MachineCode};
use crate::source::OPTIONS;
use sdpa_cache::CacheKey;
use sdpa_driver::Nvrtc;
use sdpa_nvidia::planfile::{Digest, Folder, Record, Usage};
use sdpa_nvidia::user::{self, SettingError};
use std::path::{Path, PathBuf};
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A disk cache of compiled kernels: a folder with one file per kernel source, shared by all processes.
///
/// An executor with [`CudaOptions::kernel_cache`](crate::CudaOptions::kernel_cache) looks there before it compiles, and adds the kernels that it
/// compiles. The key is a SHA-256 of the source, the architecture, the compiler's options, NVRTC's version and size, and the version of this crate. A
/// damaged file is compiled again and replaced. An error of the folder never fails a call: the kernel is compiled, and a warning gives the reason.
///
/// **A kernel is machine code.** The folder is made with mode 0700, and one that another user owns or may write to is refused.
///
/// ```
/// use sdpa_cuda::{CudaOptions, KernelCache};
///
/// # fn main() -> Result<(), sdpa_cuda::SettingError> {
/// // The user's folder, unless SDPA_CACHE=off.
/// let options = CudaOptions::default().with_kernel_cache(KernelCache::of_user()?);
/// // A folder of one's own, of at most 64 MiB.
/// let own = KernelCache::new("/var/cache/service/kernels").with_limit(64 << 20);
/// assert_eq!(own.limit(), 64 << 20);
/// # let _ = options;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCache(Folder);

impl KernelCache {
    /// The default limit for the total size of the files: 256 MiB, which holds about a thousand kernels.
    pub const LIMIT: u64 = 256 << 20;

    /// Creates the description of a cache in this folder. The folder itself is created with the first kernel.
    pub fn new(folder: impl Into<PathBuf>) -> KernelCache {
        KernelCache(Folder::new(folder, KernelCache::LIMIT))
    }

    /// Sets the limit for the total size of the files, in bytes. Beyond it, the least recently used kernels are deleted.
    #[must_use]
    pub fn with_limit(self, bytes: u64) -> KernelCache {
        KernelCache(Folder::new(self.0.path(), bytes))
    }

    /// Returns the disk cache of this user: the folder `kernels` in `SDPA_CACHE_DIR` if that variable is set. Otherwise it is in the
    /// folder `sdpa` in `XDG_CACHE_HOME`, or in `~/.cache/sdpa` (on macOS `~/Library/Caches/sdpa`). Returns `None` if `SDPA_CACHE` is
    /// `off`, or if the user has no home folder. It does not access the disk.
    ///
    /// # Errors
    /// Fails if `SDPA_CACHE` is neither `on` nor `off`, or if `SDPA_CACHE_DIR` is not an absolute path.
    pub fn of_user() -> Result<Option<KernelCache>, SettingError> {
        Ok(if user::are_caches_on()? { KernelCache::of_user_switched_on()? } else { None })
    }

    /// Returns the cache of this user like [`KernelCache::of_user`], but ignores `SDPA_CACHE`. It is for callers with their own switch.
    ///
    /// # Errors
    /// Fails if `SDPA_CACHE_DIR` is not an absolute path.
    pub fn of_user_switched_on() -> Result<Option<KernelCache>, SettingError> {
        Ok(user::folder("kernels")?.map(KernelCache::new))
    }

    /// Returns the path of the folder.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// Returns the limit for the total size of the files, in bytes.
    pub fn limit(&self) -> u64 {
        self.0.limit()
    }

    /// Returns the number of kernels and the total size of their files.
    ///
    /// # Errors
    /// Fails if the folder is refused (because another user owns it or may write to it), or if it cannot be read.
    pub fn usage(&self) -> Result<Usage, KernelFileError> {
        Ok(self.0.usage()?)
    }

    /// Deletes every kernel, and returns the number and total size of the deleted files. Other files in the folder stay.
    ///
    /// # Errors
    /// Fails if the folder is refused (because another user owns it or may write to it), or if a file cannot be deleted.
    pub fn clear(&self) -> Result<Usage, KernelFileError> {
        Ok(self.0.clear()?)
    }
}

/// The disk cache of an executor's kernels. It can be replaced while the executor runs, and is read and written only when a kernel is
/// built.
#[derive(Debug)]
pub(crate) struct Disk {
    cache: RwLock<Option<KernelCache>>,
    /// Whether a warning was logged. Later errors are debug events.
    warned: AtomicBool,
}

impl Disk {
    pub(crate) fn new(cache: Option<KernelCache>) -> Disk {
        Disk { cache: RwLock::new(cache), warned: AtomicBool::new(false) }
    }

    pub(crate) fn cache(&self) -> Option<KernelCache> {
        self.cache.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, cache: Option<KernelCache>) {
        *self.cache.write().unwrap_or_else(std::sync::PoisonError::into_inner) = cache;
        self.warned.store(false, Ordering::Relaxed);
    }

    /// Loads the machine code of a kernel, if the cache has it.
    pub(crate) fn code(&self, key: &KernelKey, nvrtc: &Nvrtc) -> Option<Vec<u8>> {
        let cache = self.cache()?;
        match cache.0.get(&HERE, &digest(key, &Compiler::of(nvrtc))) {
            Ok(code) => code.filter(|code| code.starts_with(files::MAGIC)),
            Err(error) => {
                self.tell(&cache, &error, "could not read a kernel from the kernel cache; compiling it");
                None
            }
        }
    }

    /// Writes a compiled kernel to the cache.
    pub(crate) fn keep(&self, compiled: &MachineCode, nvrtc: &Nvrtc) {
        let Some(cache) = self.cache() else { return };
        let key = digest(&compiled.key, &Compiler::of(nvrtc));
        let record = Record { key, label: compiled.key.label(), payload: compiled.code.clone() };
        if let Err(error) = cache.0.put(&HERE, record) {
            self.tell(&cache, &error, "could not store a kernel in the kernel cache; other processes will compile it again");
        }
    }

    fn tell(&self, cache: &KernelCache, error: &dyn std::fmt::Display, what: &str) {
        let folder = cache.folder().display();
        if self.warned.swap(true, Ordering::Relaxed) {
            tracing::debug!(%folder, %error, "{what}");
        } else {
            tracing::warn!(%folder, %error, "{what}");
        }
    }
}

/// Identifies a build of NVRTC.
#[derive(Debug)]
struct Compiler {
    version: [i32; 2],
    /// Size of the library in bytes. It distinguishes builds of one version, and the emulation.
    bytes: u64,
}

impl Compiler {
    fn of(nvrtc: &Nvrtc) -> Compiler {
        Compiler { version: nvrtc.version(), bytes: std::fs::metadata(nvrtc.path()).map_or(0, |facts| facts.len()) }
    }
}

/// Digests everything on which the machine code of a kernel depends.
fn digest(key: &KernelKey, compiler: &Compiler) -> Digest {
    let Compiler { version: [major, minor], bytes } = compiler;
    let compiler = format!("NVRTC {major}.{minor}, {bytes} bytes");
    let parts = Digest::parts().part(concat!("sdpa-cuda ", env!("CARGO_PKG_VERSION")).as_bytes()).part(compiler.as_bytes());
    let parts = OPTIONS.iter().fold(parts, |parts, option| parts.part(option.as_bytes()));
    parts.part(key.architecture.as_bytes()).part(key.source.as_bytes()).finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_architecture_and_compiler_each_make_another_key() {
        let key = |source: &str, architecture: &str| KernelKey {
            source: source.into(),
            entries: Vec::new(),
            tile: String::new(),
            architecture: architecture.to_owned(),
        };
        let compiler = |version, bytes| Compiler { version, bytes };
        let all = [
            digest(&key("a", "sm_90a"), &compiler([13, 0], 7)),
            digest(&key("b", "sm_90a"), &compiler([13, 0], 7)),
            digest(&key("a", "sm_80"), &compiler([13, 0], 7)),
            digest(&key("a", "sm_90a"), &compiler([13, 1], 7)),
            digest(&key("a", "sm_90a"), &compiler([12, 0], 7)),
            digest(&key("a", "sm_90a"), &compiler([13, 0], 8)),
        ];
        for (n, one) in all.iter().enumerate() {
            assert!(all.iter().skip(n + 1).all(|other| other != one), "{n}");
        }
        assert_eq!(all[0], digest(&key("a", "sm_90a"), &compiler([13, 0], 7)));
    }
}
