//! cuDNN itself: its search, functions and handles.

use super::codes::Status;
use super::log::{self, SetCallback};
use crate::error::Error;
use crate::version::Version;
use parking_lot::Mutex;
use sdpa_driver::load::{self, Opened, Place, open_file, open_first};
use sdpa_driver::{Device, Driver, Lane, Stream, absolute, table};
use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::path::{Path, PathBuf};

pub(super) type Ptr = *mut c_void;

table! {
    /// The functions of the backend API.
    Table {
        create: "cudnnCreate" fn(*mut Ptr);
        set_stream: "cudnnSetStream" fn(Ptr, Ptr);
        descriptor_create: "cudnnBackendCreateDescriptor" fn(i32, *mut Ptr);
        descriptor_destroy: "cudnnBackendDestroyDescriptor" fn(Ptr);
        descriptor_set: "cudnnBackendSetAttribute" fn(Ptr, i32, i32, i64, *const c_void);
        descriptor_get: "cudnnBackendGetAttribute" fn(Ptr, i32, i32, i64, *mut i64, *mut c_void);
        descriptor_finalize: "cudnnBackendFinalize" fn(Ptr);
        execute: "cudnnBackendExecute" fn(Ptr, Ptr, Ptr);
    }
}

type LastError = unsafe extern "C" fn(*mut c_char, usize);
type GetVersion = unsafe extern "C" fn() -> usize;

/// Paths of cuDNN and of the CUDA driver. Relative paths are relative to the current folder, which itself is never searched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Search {
    /// Path of `libcudnn.so.9`, or of a folder that contains it. With `None`, the path is the environment variable `CUDNN_GRAPH_LIBRARY`
    /// if it is set. Otherwise the wheels of the active Python environment and then the search path of the system's loader are searched.
    pub library: Option<PathBuf>,
    /// Path of the driver, `libcuda.so.1`. With `None`, the environment variable `CUDNN_GRAPH_DRIVER` is used if it is set, and otherwise
    /// the search path of the system's loader.
    pub driver: Option<PathBuf>,
}

impl Search {
    /// Sets the path of `libcudnn.so.9`, or of a folder that contains it.
    #[must_use]
    pub fn with_library(mut self, library: impl Into<Option<PathBuf>>) -> Self {
        self.library = library.into();
        self
    }

    /// Sets the path of the driver, `libcuda.so.1`.
    #[must_use]
    pub fn with_driver(mut self, driver: impl Into<Option<PathBuf>>) -> Self {
        self.driver = driver.into();
        self
    }
}

/// The cuDNN library of this process. There is only one, and it is never unloaded.
#[derive(Debug)]
pub struct Library {
    main: Opened,
    parts: Vec<Opened>,
    nvrtc: Option<Opened>,
    pub(super) table: Table,
    last_error: Option<LastError>,
    version: Version,
    pool: Mutex<Vec<Pooled>>,
}

static LIBRARY: Mutex<Option<&'static Library>> = Mutex::new(None);

const FILE: &str = "libcudnn.so.9";
/// Folders of wheels, in the folder `nvidia` of a Python environment, the full wheel first.
const WHEELS: [&str; 2] = ["cudnn/lib", "cudnn_jit/lib"];
/// Libraries loaded in this order after the first, if they are next to it. The slim wheels contain no others.
const PARTS: [&str; 2] = ["libcudnn_graph.so.9", "libcudnn_engines_runtime_compiled.so.9"];
/// NVRTC's location in wheels, relative to the folder of cuDNN's libraries.
const NVRTC: [&str; 4] =
    ["../../cu13/lib/libnvrtc.so.13", "../../cuda_nvrtc/lib/libnvrtc.so.13", "../../cuda_nvrtc/lib/libnvrtc.so.12", "libnvrtc.so.13"];

impl Library {
    /// Returns the cuDNN library of this process. The first successful call loads it.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] with every path that was searched, or with the missing function; [`Error::TooOld`] for an unsupported
    /// version; [`Error::OtherLibrary`] if `search` requests another file than the one in use.
    pub fn load(search: &Search) -> Result<&'static Library, Error> {
        let mut slot = LIBRARY.lock();
        if let Some(library) = *slot {
            return match &search.library {
                Some(asked) if !library.is(asked) => Err(Error::OtherLibrary { loaded: library.path(), asked: asked.clone() }),
                _ => Ok(library),
            };
        }
        let library: &'static Library = Box::leak(Box::new(Library::open(search)?));
        tracing::debug!(path = %library.path().display(), version = %library.version, "cuDNN loaded");
        *slot = Some(library);
        Ok(library)
    }

    fn open(search: &Search) -> Result<Library, Error> {
        // Load the driver first: the engines link against libcuda.so.1, and find a loaded library of that name wherever its file is.
        Driver::load(search.driver.as_deref())?;
        let main = open_first("cuDNN (libcudnn.so.9)", &places(search))?;
        let folder = main.mapped_path().parent().map(Path::to_owned).unwrap_or_default();
        let nvrtc = NVRTC.iter().map(|n| folder.join(n)).filter(|p| p.is_absolute() && p.exists()).find_map(|p| open_file(&p).ok());
        let mut parts = Vec::new();
        for name in PARTS {
            let path = folder.join(name);
            if path.is_absolute() && path.exists() {
                parts.push(open_first(name, &[Place::File(path)])?);
            }
        }
        // SAFETY: the type is that of the public header.
        let version: GetVersion = unsafe { main.function("cudnnGetVersion") }?;
        // SAFETY: the function has no arguments.
        let version = Version::from_number(unsafe { version() });
        if version < Version::OLDEST {
            return Err(Error::TooOld { path: main.mapped_path(), version });
        }
        let table = Table::load(&main)?;
        // SAFETY: the type is that of the public header.
        let last_error = unsafe { main.function::<LastError>("cudnnGetLastErrorString") }.ok();
        // SAFETY: the type is that of the header; the callback lives as long as the process.
        if let Ok(set_callback) = unsafe { main.function::<SetCallback>("cudnnSetCallback") } {
            // SAFETY: the callback reads its message and nothing else, and never panics.
            let status = unsafe { set_callback(log::MASK, std::ptr::null_mut(), Some(log::hear)) };
            if status != 0 {
                tracing::debug!(status, "cudnnSetCallback");
            }
        }
        Ok(Library { main, parts, nvrtc, table, last_error, version, pool: Mutex::new(Vec::new()) })
    }

    fn is(&self, asked: &Path) -> bool {
        let real = |p: &Path| std::fs::canonicalize(p).unwrap_or_else(|_| p.to_owned());
        let asked = if asked.is_dir() { asked.join(FILE) } else { asked.to_owned() };
        real(&asked) == real(&self.path())
    }

    /// Returns the version that the library reports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the path of the library file.
    pub fn path(&self) -> PathBuf {
        self.main.mapped_path()
    }

    /// Returns the paths of the cuDNN sub-libraries that were loaded with this one, and of NVRTC if it was next to them. cuDNN loads its
    /// other sub-libraries itself.
    pub fn companions(&self) -> Vec<PathBuf> {
        self.parts.iter().chain(&self.nvrtc).map(|o| o.path.clone()).collect()
    }

    #[cold]
    pub(super) fn error(&self, call: &'static str, subject: &str, status: i32) -> Error {
        let mut text = vec![0u8; 8192];
        if let Some(last_error) = self.last_error {
            // SAFETY: the buffer has the stated length; the library terminates the string inside it.
            unsafe { last_error(text.as_mut_ptr().cast(), text.len()) };
        }
        let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
        let text = String::from_utf8_lossy(&text[..end]).trim().replace('\n', "; ");
        Error::Cudnn { call, subject: subject.to_owned(), status: Status(status), text }
    }

    /// Discards what a successful call left as the last-error message, such as notes on engines that cuDNN considered, so that an error of a
    /// later call does not show it.
    pub(super) fn forget_messages(&self) {
        if let Some(last_error) = self.last_error {
            let mut text = [0u8; 1024];
            // SAFETY: the buffer has the stated length. cuDNN clears the message when it returns it.
            unsafe { last_error(text.as_mut_ptr().cast(), text.len()) };
        }
    }

    pub(super) fn check(&self, call: &'static str, subject: &str, status: i32) -> Result<(), Error> {
        if status == 0 { Ok(()) } else { Err(self.error(call, subject, status)) }
    }

    /// Returns a handle that submits to `stream`, from a pool of handles or newly created. Dropping the handle returns it to the pool.
    ///
    /// # Errors
    /// Returns cuDNN's error if it cannot create a handle.
    pub fn handle<'s>(&'static self, stream: &'s Stream) -> Result<Handle<'s>, Error> {
        // A stream under capture may have no id here. Without an id, set the stream on the handle at every call.
        let (device, id) = (stream.device(), stream.id());
        let mut pooled = match near(device, id).or_else(|| take(&mut self.pool.lock(), device, id)) {
            Some(pooled) => pooled,
            None => self.create(device)?,
        };
        if id.is_none() || pooled.stream != id {
            let _entered = device.enter()?;
            // SAFETY: handle and stream are live and of one context.
            let status = unsafe { (self.table.set_stream)(pooled.raw, stream.raw().0) };
            self.check("cudnnSetStream", "a handle", status)?;
            pooled.stream = id;
        }
        Ok(Handle { library: self, stream, pooled: Some(pooled) })
    }

    /// Creates a handle, even during a capture by this or another thread: cuDNN allocates here.
    fn create(&self, device: &'static Device) -> Result<Pooled, Error> {
        let _entered = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one pointer, to the live variable `raw`.
        let status = device.relaxed(|| unsafe { (self.table.create)(&mut raw) });
        self.check("cudnnCreate", device.name(), status)?;
        Ok(Pooled { raw, device, stream: None, lane: device.lane() })
    }
}

fn places(search: &Search) -> Vec<Place> {
    let file = |path: PathBuf| {
        let path = absolute(path);
        Place::File(if path.is_dir() { path.join(FILE) } else { path })
    };
    if let Some(path) = search.library.clone().or_else(|| std::env::var_os("CUDNN_GRAPH_LIBRARY").map(PathBuf::from)) {
        return vec![file(path)];
    }
    let in_wheels = |nvidia: &Path| WHEELS.map(|folder| nvidia.join(folder).join(FILE)).into();
    let mut places = load::in_python("no cuDNN wheel", in_wheels);
    places.push(Place::System(FILE));
    places
}

/// A handle and its binding. Handles live as long as the process: destroying them at its end would race with the driver's own teardown.
#[derive(Debug)]
struct Pooled {
    raw: Ptr,
    device: &'static Device,
    /// The number of its stream. A later stream may have the same address, but not the same number.
    stream: Option<u64>,
    lane: &'static Lane,
}

// SAFETY: a handle may move between threads, and its owner is the only user.
unsafe impl Send for Pooled {}

/// Takes a handle of the stream's device, preferably one that submits to the stream already.
fn take(pool: &mut Vec<Pooled>, device: &Device, stream: Option<u64>) -> Option<Pooled> {
    let ordinal = device.ordinal();
    let same = pool.iter().rposition(|h| stream.is_some() && h.stream == stream && h.device.ordinal() == ordinal);
    same.or_else(|| pool.iter().rposition(|h| h.device.ordinal() == ordinal)).map(|at| pool.swap_remove(at))
}

/// The most handles that a thread keeps, so that calls take no lock that other threads want.
const NEAR: usize = 4;

/// A thread's handles. They go to the shared pool when it ends.
struct ThreadHandles {
    library: Option<&'static Library>,
    handles: Vec<Pooled>,
}

impl Drop for ThreadHandles {
    fn drop(&mut self) {
        if let Some(library) = self.library {
            library.pool.lock().append(&mut self.handles);
        }
    }
}

thread_local! {
    static HANDLES: RefCell<ThreadHandles> = const { RefCell::new(ThreadHandles { library: None, handles: Vec::new() }) };
}

/// Takes one of this thread's handles.
fn near(device: &Device, stream: Option<u64>) -> Option<Pooled> {
    HANDLES.try_with(|near| take(&mut near.try_borrow_mut().ok()?.handles, device, stream)).ok().flatten()
}

/// Gives a handle to this thread; returns it if the thread has enough or is ending.
fn keep_near(library: &'static Library, pooled: Pooled) -> Option<Pooled> {
    let mut pooled = Some(pooled);
    let _ = HANDLES.try_with(|near| {
        if let Ok(mut near) = near.try_borrow_mut()
            && near.handles.len() < NEAR
        {
            near.library = Some(library);
            near.handles.extend(pooled.take());
        }
    });
    pooled
}

/// A cuDNN handle bound to a stream, for use by one thread at a time.
#[derive(Debug)]
pub struct Handle<'s> {
    library: &'static Library,
    stream: &'s Stream,
    /// `None` only during drop.
    pooled: Option<Pooled>,
}

impl<'s> Handle<'s> {
    pub(super) fn raw(&self) -> Ptr {
        self.pooled.as_ref().map_or(std::ptr::null_mut(), |p| p.raw)
    }

    /// Returns the library to which the handle belongs.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// Returns the device of the handle's stream.
    pub fn device(&self) -> &'static Device {
        self.stream.device()
    }

    /// Returns the stream to which the handle submits.
    pub fn stream(&self) -> &'s Stream {
        self.stream
    }

    /// Returns its lane; `None` only during drop.
    pub(super) fn lane(&self) -> Option<&'static Lane> {
        self.pooled.as_ref().map(|p| p.lane)
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if let Some(pooled) = self.pooled.take()
            && let Some(pooled) = keep_near(self.library, pooled)
        {
            self.library.pool.lock().push(pooled);
        }
    }
}
