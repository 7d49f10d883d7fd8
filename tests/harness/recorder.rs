//! The raw tier without a GPU: an executor over the library `tests/recording`, which writes down what is submitted and computes
//! nothing, and what it wrote.
#![allow(unsafe_code)]

#[path = "../recording/src/entry.rs"]
pub mod entry;

use cudnn_graph::ffi::codes::Kind;
use cudnn_graph::ir::TensorId;
use cudnn_graph::{Buffer, Captured, DeviceSlice, Handle, Plan, RawStream, Search, Stream};
use entry::Entry;
use sdpa::cudnn::schedule::{Port, Role, Run};
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, DeviceBackward, DeviceCall, DeviceForward, Planned, Replay};
use sdpa::{AttentionSpec, BackwardSpec, DevicePrepared};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const FILE: &str = "librecording.so";

/// The record is the process's: one test at a time reads it.
static TURN: Mutex<()> = Mutex::new(());

type Number = unsafe extern "C" fn() -> u64;
type OfKind = unsafe extern "C" fn(i32) -> u64;
type Read = unsafe extern "C" fn(u64, *mut Entry) -> i32;
type Hold = unsafe extern "C" fn(*mut std::ffi::c_void, i32) -> i32;
type Fail = unsafe extern "C" fn(i32, i32) -> i32;
type Take = unsafe extern "C" fn(i32) -> i32;

/// The recording library, loaded as cuDNN and as the driver of this process.
#[derive(Debug)]
pub struct Recorder {
    executor: CudnnExecutor,
    written: Number,
    read: Read,
    created: OfKind,
    alive: OfKind,
    allocated: Number,
    faults: Number,
    captures: Number,
    opened: Number,
    current: Number,
    hold: Hold,
    fail: Fail,
    take: Take,
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
        Recorder::with(CudnnOptions::default())
    }

    /// The same with an executor set up as told.
    ///
    /// # Errors
    /// As [`Recorder::load`].
    ///
    /// # Panics
    /// As [`Recorder::load`].
    pub fn with(options: CudnnOptions) -> Result<Recorder, String> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let file = find()?;
        let search = Search::default().with_library(file.clone()).with_driver(file.clone());
        let executor = CudnnExecutor::new(options.with_search(search)).unwrap_or_else(|e| panic!("{e}"));
        // Nothing here may submit to a real device.
        assert_eq!(executor.library().path(), file);
        Ok(Recorder::of(&file, executor, turn).unwrap_or_else(|e| panic!("{e}")))
    }

    fn of(file: &Path, executor: CudnnExecutor, turn: MutexGuard<'static, ()>) -> Result<Recorder, libloading::Error> {
        // SAFETY: the library is loaded already; the types are those that it exports. It is never closed.
        unsafe {
            let library = std::mem::ManuallyDrop::new(libloading::Library::new(file)?);
            (*library.get::<Number>("recording_turn")?)();
            Ok(Recorder {
                executor,
                written: *library.get::<Number>("recording_written")?,
                read: *library.get::<Read>("recording_entry")?,
                created: *library.get::<OfKind>("recording_created")?,
                alive: *library.get::<OfKind>("recording_alive")?,
                allocated: *library.get::<Number>("recording_allocated")?,
                faults: *library.get::<Number>("recording_faults")?,
                captures: *library.get::<Number>("recording_captures")?,
                opened: *library.get::<Number>("recording_opened")?,
                current: *library.get::<Number>("recording_current")?,
                hold: *library.get::<Hold>("recording_hold")?,
                fail: *library.get::<Fail>("recording_fail_plans")?,
                take: *library.get::<Take>("recording_take_device")?,
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

    /// Descriptors of a kind that were created in this recorder's turn and are alive.
    pub fn alive(&self, kind: Kind) -> u64 {
        // SAFETY: as above.
        unsafe { (self.alive)(kind.0) }
    }

    /// Bytes of device memory that were allocated in this recorder's turn and are not freed.
    pub fn allocated(&self) -> u64 {
        // SAFETY: no arguments to be wrong about.
        unsafe { (self.allocated)() }
    }

    /// How often something was freed, destroyed or executed that must not be; each is told on standard error.
    pub fn faults(&self) -> u64 {
        // SAFETY: no arguments to be wrong about.
        unsafe { (self.faults)() }
    }

    /// Captures that go on.
    pub fn captures(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.captures)() }
    }

    /// Contexts of devices that were opened, a bit each.
    pub fn opened(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.opened)() }
    }

    /// The context that is current on this thread, as a number; 0: none.
    pub fn current(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.current)() }
    }

    /// Holds the work of a stream from now on, or lets all of it be done.
    pub fn hold(&self, stream: &Stream, hold: bool) {
        self.hold_raw(stream.raw(), hold);
    }

    /// Holds the work of a stream that another library made, or lets all of it be done.
    pub fn hold_raw(&self, stream: RawStream, hold: bool) {
        // SAFETY: the library takes the stream as a number.
        let code = unsafe { (self.hold)(stream.0, i32::from(hold)) };
        assert_eq!(code, 0);
    }

    /// So many finalizations of plans return this status from now on.
    pub fn fail_plans(&self, status: i32, count: i32) {
        // SAFETY: numbers are no pointers.
        unsafe { (self.fail)(status, count) };
    }

    /// Another process takes a device for itself, or gives it back.
    pub fn take_device(&self, device: Option<i32>) {
        // SAFETY: as above.
        unsafe { (self.take)(device.unwrap_or(-1)) };
    }

    /// Runs a capture by hand, as another library would: in the mode that prohibits most.
    ///
    /// # Panics
    /// Where the driver stand-in refuses to begin or end it.
    pub fn captured_by_hand<T>(&self, stream: &Stream, run: impl FnOnce() -> T) -> (T, Option<ByHand>) {
        type Begin = unsafe extern "C" fn(*mut std::ffi::c_void, i32) -> i32;
        type End = unsafe extern "C" fn(*mut std::ffi::c_void, *mut *mut std::ffi::c_void) -> i32;
        /// # Safety
        /// `F` is the type of the function.
        unsafe fn found<F: Copy>(library: &libloading::Library, name: &str) -> F {
            // SAFETY: the caller's.
            unsafe { library.get::<F>(name) }.map_or_else(|e| panic!("{e}"), |f| *f)
        }
        // SAFETY: the library is loaded already and never closed; the types are those of the public header.
        let (begin, end, destroy): (Begin, End, Destroy) = unsafe {
            let path = self.executor.library().path();
            let library = std::mem::ManuallyDrop::new(libloading::Library::new(path).unwrap_or_else(|e| panic!("{e}")));
            (found(&library, "cuStreamBeginCapture_v2"), found(&library, "cuStreamEndCapture"), found(&library, "cuGraphDestroy"))
        };
        // SAFETY: the stream is live.
        assert_eq!(unsafe { begin(stream.raw().0, 0) }, 0);
        let result = run();
        let mut graph = std::ptr::null_mut();
        // SAFETY: as above, and the pointer is to a live pointer.
        let code = unsafe { end(stream.raw().0, &mut graph) };
        (result, (code == 0).then_some(ByHand { graph: graph.expose_provenance(), destroy }))
    }

    /// A forward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`Planned::forward`]; and what the recording library finds wrong.
    pub fn forward(&self, planned: &Planned, handle: &Handle<'_>, call: &DeviceForward<'_>) -> Result<(), sdpa::cudnn::Error> {
        // SAFETY: the process's cuDNN is the recording library, which does not touch device memory.
        unsafe { planned.forward(handle, call) }
    }

    /// A call of a pass on whichever executor over this driver. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`DevicePrepared::submit`]; and what the recording library finds wrong.
    pub fn submit(
        &self,
        ready: &dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>,
        stream: &Stream,
        call: &DeviceCall<'_>,
    ) -> Result<(), sdpa::Error> {
        // SAFETY: the process's driver is the recording library, which does not touch device memory.
        unsafe { ready.submit(stream, call) }
    }

    /// A functional forward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`CudnnExecutor::sdpa`]; and what the recording library finds wrong.
    pub fn functional(&self, stream: &Stream, spec: &AttentionSpec, call: &DeviceForward<'_>) -> Result<(), sdpa::cudnn::Error> {
        // SAFETY: as above.
        unsafe { self.executor.sdpa(stream, spec, call) }
    }

    /// A functional backward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`CudnnExecutor::sdpa_backward`]; and what the recording library finds wrong.
    pub fn functional_backward(&self, stream: &Stream, spec: &BackwardSpec, call: &DeviceBackward<'_>) -> Result<(), sdpa::cudnn::Error> {
        // SAFETY: as above.
        unsafe { self.executor.sdpa_backward(stream, spec, call) }
    }

    /// A backward call. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`Planned::backward`]; and what the recording library finds wrong.
    pub fn backward(&self, planned: &Planned, handle: &Handle<'_>, call: &DeviceBackward<'_>) -> Result<(), sdpa::cudnn::Error> {
        // SAFETY: as above.
        unsafe { planned.backward(handle, call) }
    }

    /// Submits a call through the trait of the device tier.
    pub fn through_the_trait(
        &self,
        prepared: &dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>,
        stream: &Stream,
        call: &DeviceCall<'_>,
    ) -> Result<(), sdpa::Error> {
        // SAFETY: the library reads and writes nothing.
        unsafe { prepared.submit(stream, call) }
    }

    /// A forward call of a replay. Safe here: nobody follows an address, nor reads a size.
    ///
    /// # Errors
    /// As [`Replay::forward`]; and what the recording library finds wrong.
    pub fn replayed(&self, replay: &mut Replay, call: &DeviceForward<'_>) -> Result<(), sdpa::cudnn::Error> {
        // SAFETY: as above.
        unsafe { replay.forward(call) }
    }

    /// Launches a captured graph. Safe here: nothing is computed.
    ///
    /// # Errors
    /// As [`Captured::launch`].
    pub fn launch(&self, captured: &Captured, stream: &Stream) -> Result<(), cudnn_graph::DriverError> {
        // SAFETY: as above.
        unsafe { captured.launch(stream) }
    }

    /// A stream.
    ///
    /// # Panics
    /// If the library makes none.
    pub fn stream(&self) -> Stream {
        self.executor.device().stream().unwrap_or_else(|e| panic!("{e}"))
    }

    /// The same stream as another library would hand it over.
    pub fn borrowed(&self, stream: &Stream) -> Stream {
        // SAFETY: tests keep the stream for longer.
        unsafe { Stream::borrow(stream.device(), stream.raw()) }
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

type Destroy = unsafe extern "C" fn(*mut std::ffi::c_void) -> i32;

/// A graph that was captured by hand.
#[derive(Debug)]
pub struct ByHand {
    graph: usize,
    destroy: Destroy,
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // SAFETY: it is ours.
        unsafe { (self.destroy)(std::ptr::with_exposed_provenance_mut(self.graph)) };
    }
}

/// The graph that runs for this.
pub fn run<'a>(planned: &'a Planned, role: &Role) -> &'a Run<Arc<Plan>> {
    planned.schedule.runs().find(|run| run.role == *role).unwrap_or_else(|| panic!("there is no {role}"))
}

/// The tensor of this name, of a graph that runs.
pub fn tensor(run: &Run<Arc<Plan>>, name: &str) -> TensorId {
    let named = |port: &&Port| run.graph.graph().get(port.tensor).is_some_and(|tensor| tensor.name == name);
    run.ports.iter().find(named).unwrap_or_else(|| panic!("{} has no {name}", run.role)).tensor
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
