//! Kernel files, in which an executor looks for kernels before it compiles them, and to which it saves compiled ones.

use crate::CudaExecutor;
use crate::kernel::{Kernel, KernelKey, MachineCode};
use sdpa_cache::CacheKey;
use sdpa_nvidia::planfile::{self, Digest, Head, PlanFile, PlanFileError, Record};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, RwLock};

/// The header of a kernel file. It has only the version of the key format: source, architecture and compiler version are in the keys of
/// the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelHead {
    /// Version of the format of kernel keys.
    pub kernels: u32,
}

impl KernelHead {
    /// Returns true for a kernel file, and false for a file of cuDNN plans. Both have the same format with different headers.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or if it is damaged before its first kernel, so that its kind is unknown.
    pub fn is_of(path: impl AsRef<Path>) -> Result<bool, PlanFileError> {
        match PlanFile::<KernelHead>::open(path) {
            Ok(_) => Ok(true),
            // The file is intact, but its header has the fields of the other kind of plan file.
            Err(PlanFileError::Corrupt { what, .. }) if what == "header" => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The header that this build writes to kernel files. Only files with the same header can be used.
pub(crate) const HERE: KernelHead = KernelHead { kernels: 1 };

/// The error for a kernel file whose kernel keys have another format than those of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherKeys {
    file: u32,
}

impl fmt::Display for OtherKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "kernels: the file has version {} of the key format, expected {}; compile it again with this release",
            self.file, HERE.kernels
        )
    }
}

impl Head for KernelHead {
    type Mismatch = OtherKeys;

    fn mismatch(&self, here: &KernelHead) -> Option<OtherKeys> {
        (self != here).then_some(OtherKeys { file: self.kernels })
    }
}

/// The reason why an executor cannot use a kernel file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelFileError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] PlanFileError),
    /// Another version of this crate wrote the file, with another key format.
    #[error("{0}")]
    Mismatch(OtherKeys),
}

/// The kernel files that are attached to an executor, in the order of attachment.
#[derive(Debug, Default)]
pub(crate) struct Files(RwLock<Vec<Arc<PlanFile<KernelHead>>>>);

/// The first bytes of GPU machine code, which is an ELF file.
pub(crate) const MAGIC: &[u8] = b"\x7fELF";

impl Files {
    fn open(&self) -> Vec<Arc<PlanFile<KernelHead>>> {
        self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Returns the machine code of the kernel with this key from the first attached file that has it; `None` if no file has it.
    pub(crate) fn code(&self, key: &KernelKey, nvrtc: [i32; 2]) -> Option<Vec<u8>> {
        self.open().iter().find_map(|file| match of_file(file, key, nvrtc) {
            Ok(code) => Some(code),
            Err(why) => {
                tracing::debug!(%why, kernel = key.label(), "could not read a kernel from a file");
                None
            }
        })
    }
}

/// Returns the machine code of a key from a file, or why there is none.
fn of_file(file: &PlanFile<KernelHead>, key: &KernelKey, nvrtc: [i32; 2]) -> Result<Vec<u8>, String> {
    match file.read(&digest(key, nvrtc)) {
        Ok(Some(code)) if code.starts_with(MAGIC) => Ok(code),
        Ok(Some(_)) => Err("has a kernel for this problem that cannot be used: it is not machine code".to_owned()),
        Ok(None) => Err("has no kernel for this problem".to_owned()),
        Err(error) => {
            tracing::warn!(%error, kernel = key.label(), "could not use a kernel from a file; compiling it");
            Err(format!("has a kernel for this problem that cannot be used: {error}"))
        }
    }
}

/// Digests everything on which the machine code of a key depends.
fn digest(key: &KernelKey, [major, minor]: [i32; 2]) -> Digest {
    let compiler = format!("NVRTC {major}.{minor}");
    Digest::parts().part(compiler.as_bytes()).part(key.architecture.as_bytes()).part(key.source.as_bytes()).finish()
}

/// Checks that [`add`] can add kernels to a file without losing any. The file must not exist, or must be a kernel file of this version in
/// which every kernel is readable, because [`add`] drops unreadable ones.
///
/// # Errors
/// Fails if the file exists but is not such a kernel file.
pub fn takes(path: impl AsRef<Path>) -> Result<(), KernelFileError> {
    match PlanFile::open(path) {
        Ok(file) => {
            if let Some(mismatch) = KernelHead::mismatch(file.header(), &HERE) {
                return Err(KernelFileError::Mismatch(mismatch));
            }
            for entry in file.entries() {
                file.read(&entry.key)?;
            }
            Ok(())
        }
        Err(PlanFileError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Adds kernels that were compiled without a device to a file, and creates the file if needed. Existing kernels stay, except damaged ones.
///
/// ```no_run
/// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
/// use sdpa_cuda::{Nvrtc, Target, files, kernel::MachineCode};
///
/// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 4096, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
/// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
/// let nvrtc = Nvrtc::load(None)?;
/// let keys = Target::new(90, 132).kernels(&spec.validate()?.into())?;
/// let compiled = keys.into_iter().map(|key| MachineCode::compile(&nvrtc, key)).collect::<Result<Vec<_>, _>>()?;
/// files::add("kernels.bin", compiled)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if the file or its folder cannot be used.
pub fn add(path: impl AsRef<Path>, kernels: impl IntoIterator<Item = MachineCode>) -> Result<(), KernelFileError> {
    let record = |MachineCode { key, compiler, code }| Record { key: digest(&key, compiler), label: key.label(), payload: code };
    planfile::add(path, &HERE, kernels.into_iter().map(record))?;
    Ok(())
}

impl CudaExecutor {
    /// Attaches a kernel file: from now on the executor looks for kernels in the file before it compiles them. Only the index is read
    /// now; each kernel is read when it is needed. A damaged kernel is compiled anew, with a warning. Returns the number of kernels in
    /// the file.
    ///
    /// **A kernel is machine code: load only files that you trust.** See [`sdpa_nvidia::planfile`].
    ///
    /// # Errors
    /// Fails if the file is not a valid kernel file.
    pub fn attach(&self, path: impl AsRef<Path>) -> Result<usize, KernelFileError> {
        let file = PlanFile::open(path)?;
        if let Some(mismatch) = KernelHead::mismatch(file.header(), &HERE) {
            return Err(KernelFileError::Mismatch(mismatch));
        }
        let kernels = file.entries().len();
        self.files.0.write().unwrap_or_else(std::sync::PoisonError::into_inner).push(Arc::new(file));
        Ok(kernels)
    }

    /// Returns, for each attached file in order, why it did not supply a kernel that this executor has in memory: the file has no such
    /// kernel, or an unusable one. Kernels that another attached file has do not count. The reason is `None` if attached files have all
    /// kernels.
    pub fn without_kernels(&self) -> Vec<Option<String>> {
        let (files, nvrtc) = (self.files.open(), self.nvrtc().version());
        let keys = self.kernels.values().into_iter().map(|(key, _)| key);
        let compiled: Vec<KernelKey> = keys.filter(|key| !files.iter().any(|file| of_file(file, key, nvrtc).is_ok())).collect();
        files.iter().map(|file| compiled.iter().find_map(|key| of_file(file, key, nvrtc).err())).collect()
    }

    /// Returns the number of attached kernel files.
    pub fn attached(&self) -> usize {
        self.files.open().len()
    }

    /// Adds every kernel that this executor has in memory to a file, and creates the file if needed. Existing kernels stay. Returns the
    /// number of kernels that were in memory.
    ///
    /// ```no_run
    /// use sdpa_cuda::{CudaExecutor, CudaOptions};
    ///
    /// let cuda = CudaExecutor::new(CudaOptions::default())?;
    /// // After the problems that matter have run once: another process compiles none of them.
    /// cuda.save("kernels.bin")?;
    /// CudaExecutor::new(CudaOptions::default())?.attach("kernels.bin")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails if the file or its folder cannot be used.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<usize, KernelFileError> {
        let compiler = self.nvrtc().version();
        let kernel = |(key, kernel): (KernelKey, Arc<Kernel>)| MachineCode { key, compiler, code: kernel.code.clone() };
        let kernels: Vec<MachineCode> = self.kernels.values().into_iter().map(kernel).collect();
        let count = kernels.len();
        add(path, kernels)?;
        Ok(count)
    }
}
