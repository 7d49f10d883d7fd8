//! The raw tier without a GPU: an executor over the library `tests/recording`, which writes down what is submitted and computes
//! nothing, and what it wrote.
#![allow(unsafe_code)]

#[path = "../recording/src/entry.rs"]
pub mod entry;

use cudnn_graph::ffi::codes::Kind;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Search, Stream};
use entry::Entry;
use sdpa::exec::cudnn::{CudnnExecutor, CudnnOptions, DeviceBackward, DeviceForward, Planned};
use sdpa::{AttentionSpec, BackwardSpec};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const FILE: &str = "librecording.so";

/// The record is the process's: one test at a time reads it.
static TURN: Mutex<()> = Mutex::new(());

type Number = unsafe extern "C" fn() -> u64;
type OfKind = unsafe extern "C" fn(i32) -> u64;
type Read = unsafe extern "C" fn(u64, *mut Entry) -> i32;

/// The recording library, loaded as cuDNN and as the driver of this process.
#[derive(Debug)]
pub struct Recorder {
    executor: CudnnExecutor,
    written: Number,
    read: Read,
    created: OfKind,
    destroyed: OfKind,
    allocated: Number,
    _turn: MutexGuard<'static, ()>,
}

/// Where the recording library is: beside this program or one folder above, as cargo lays them out.
///
/// # Errors
/// That it is not built.
pub fn find() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let file = program.ancestors().skip(1).take(2).map(|folder| folder.join(FILE)).find(|file| file.exists());
    file.ok_or_else(|| "the recording library is not built; cargo build --package recording builds it".to_owned())
}

impl Recorder {
    /// Loads the library and makes an executor on it. Waits for other recorders of this process.
    ///
    /// # Errors
    /// That it is not built.
    ///
    /// # Panics
    /// Where it is there and cannot be used: another cuDNN in this process.
    pub fn load() -> Result<Recorder, String> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let file = find()?;
        let search = Search { library: Some(file.clone()), driver: Some(file.clone()) };
        let executor = CudnnExecutor::new(CudnnOptions { search, ..CudnnOptions::default() }).unwrap_or_else(|e| panic!("{e}"));
        // Nothing here may submit to a real device.
        assert_eq!(executor.library().path(), file);
        Ok(Recorder::of(&file, executor, turn).unwrap_or_else(|e| panic!("{e}")))
    }

    fn of(file: &Path, executor: CudnnExecutor, turn: MutexGuard<'static, ()>) -> Result<Recorder, libloading::Error> {
        // SAFETY: the library is loaded already; the types are those that it exports. It is never closed.
        unsafe {
            let library = std::mem::ManuallyDrop::new(libloading::Library::new(file)?);
            Ok(Recorder {
                executor,
                written: *library.get::<Number>("recording_written")?,
                read: *library.get::<Read>("recording_entry")?,
                created: *library.get::<OfKind>("recording_created")?,
                destroyed: *library.get::<OfKind>("recording_destroyed")?,
                allocated: *library.get::<Number>("recording_allocated")?,
                _turn: turn,
            })
        }
    }

    /// The executor.
    pub fn executor(&self) -> &CudnnExecutor {
        &self.executor
    }

    /// How many entries were written so far.
    pub fn written(&self) -> u64 {
        // SAFETY: no arguments to be wrong about.
        unsafe { (self.written)() }
    }

    /// What was written while `run` ran, at most the last 64 entries, in order.
    pub fn record<T>(&self, run: impl FnOnce() -> T) -> (T, Vec<Entry>) {
        let before = self.written();
        let result = run();
        let entry = |n| {
            let mut entry = Entry::NONE;
            // SAFETY: the pointer is to a live entry.
            (unsafe { (self.read)(n, &mut entry) } == 0).then_some(entry)
        };
        (result, (before..self.written()).filter_map(entry).collect())
    }

    /// Descriptors of a kind that were ever created.
    pub fn created(&self, kind: Kind) -> u64 {
        // SAFETY: a number is no pointer.
        unsafe { (self.created)(kind.0) }
    }

    /// Descriptors of a kind that are alive.
    pub fn alive(&self, kind: Kind) -> u64 {
        // SAFETY: as above.
        self.created(kind) - unsafe { (self.destroyed)(kind.0) }
    }

    /// Bytes of device memory that are allocated.
    pub fn allocated(&self) -> u64 {
        // SAFETY: no arguments to be wrong about.
        unsafe { (self.allocated)() }
    }

    /// A forward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`Planned::forward`]; and what the recording library finds wrong.
    pub fn forward(&self, planned: &Planned, handle: &Handle, call: &DeviceForward<'_>) -> Result<(), sdpa::Error> {
        // SAFETY: the process's cuDNN is the recording library, which does not touch device memory.
        unsafe { planned.forward(handle, call) }
    }

    /// A functional forward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`CudnnExecutor::sdpa`]; and what the recording library finds wrong.
    pub fn functional(&self, stream: &Stream, spec: &AttentionSpec, call: &DeviceForward<'_>) -> Result<(), sdpa::Error> {
        // SAFETY: as above.
        unsafe { self.executor.sdpa(stream, spec, call) }
    }

    /// A functional backward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`CudnnExecutor::sdpa_backward`]; and what the recording library finds wrong.
    pub fn functional_backward(&self, stream: &Stream, spec: &BackwardSpec, call: &DeviceBackward<'_>) -> Result<(), sdpa::Error> {
        // SAFETY: as above.
        unsafe { self.executor.sdpa_backward(stream, spec, call) }
    }

    /// A backward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`Planned::backward`]; and what the recording library finds wrong.
    pub fn backward(&self, planned: &Planned, handle: &Handle, call: &DeviceBackward<'_>) -> Result<(), sdpa::Error> {
        // SAFETY: as above.
        unsafe { planned.backward(handle, call) }
    }

    /// A stream.
    ///
    /// # Panics
    /// If the library makes none.
    pub fn stream(&self) -> Stream {
        self.executor.device().stream().unwrap_or_else(|e| panic!("{e}"))
    }

    /// Device memory.
    ///
    /// # Panics
    /// Past the memory of the device.
    pub fn buffer(&self, bytes: u64) -> Buffer {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Buffer::new(self.executor.device(), bytes).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// All of a buffer.
pub fn whole(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

impl Entry {
    /// What was bound to a tensor of device memory.
    pub fn address(&self, uid: i64) -> Option<u64> {
        self.at(uid).filter(|&n| self.number_bytes[n] == 0).map(|n| self.pointers[n])
    }

    /// The number that was bound to a tensor, where it is of four bytes.
    pub fn number(&self, uid: i64) -> Option<f32> {
        let at = self.at(uid).filter(|&n| self.number_bytes[n] == 4)?;
        let bytes = self.numbers[at].to_ne_bytes();
        Some(f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn at(&self, uid: i64) -> Option<usize> {
        self.uids[..self.tensors as usize].iter().position(|&u| u == uid)
    }
}
