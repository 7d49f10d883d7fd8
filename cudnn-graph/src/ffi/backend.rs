//! cuDNN itself: finding it, its functions, handles.

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

/// Where to look for the libraries. Relative paths are taken from the current folder and made absolute; the current folder
/// itself is never searched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Search {
    /// `libcudnn.so.9`, or a folder that holds it. Else the variable `CUDNN_GRAPH_LIBRARY`, else the wheels of the active
    /// Python environment, else the system's loader.
    pub library: Option<PathBuf>,
    /// `libcuda.so.1`. Else the variable `CUDNN_GRAPH_DRIVER`, else the system's loader.
    pub driver: Option<PathBuf>,
}

impl Search {
    /// Sets `libcudnn.so.9`, or a folder that holds it.
    #[must_use]
    pub fn with_library(mut self, library: impl Into<Option<PathBuf>>) -> Self {
        self.library = library.into();
        self
    }

    /// Sets the file of the driver, `libcuda.so.1`.
    #[must_use]
    pub fn with_driver(mut self, driver: impl Into<Option<PathBuf>>) -> Self {
        self.driver = driver.into();
        self
    }
}

/// The cuDNN of this process: one, never unloaded.
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
/// Where wheels have it, in the folder `nvidia` of a Python environment, the full wheel first.
const WHEELS: [&str; 2] = ["cudnn/lib", "cudnn_jit/lib"];
/// Loaded in this order after the first, where they lie beside it: the slim wheels hold no others.
const PARTS: [&str; 2] = ["libcudnn_graph.so.9", "libcudnn_engines_runtime_compiled.so.9"];
/// The run-time compiler, as the wheels lay it out relative to the folder of cuDNN's libraries.
const NVRTC: [&str; 4] =
    ["../../cu13/lib/libnvrtc.so.13", "../../cuda_nvrtc/lib/libnvrtc.so.13", "../../cuda_nvrtc/lib/libnvrtc.so.12", "libnvrtc.so.13"];

impl Library {
    /// The process's cuDNN, loaded on the first call that succeeds.
    ///
    /// # Errors
    /// [`Error::Driver`] with every place searched, or with the function that the library lacks; [`Error::TooOld`]; [`Error::OtherLibrary`] when
    /// another file is asked for than the one in use.
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
        // The engines link against libcuda.so.1: loaded first by path, it is found under that name.
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
        // SAFETY: no arguments to be wrong about.
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

    /// The version that the library says it is.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the file that the library was loaded from.
    pub fn path(&self) -> PathBuf {
        self.main.mapped_path()
    }

    /// The parts of it that were loaded with it, and the run-time compiler if it lay beside them. The rest it loads itself.
    pub fn companions(&self) -> Vec<PathBuf> {
        self.parts.iter().chain(&self.nvrtc).map(|o| o.path.clone()).collect()
    }

    #[cold]
    pub(super) fn error(&self, call: &'static str, subject: &str, status: i32) -> Error {
        let mut text = vec![0u8; 8192];
        if let Some(last_error) = self.last_error {
            // SAFETY: the buffer is as long as is said; the library terminates the string inside it.
            unsafe { last_error(text.as_mut_ptr().cast(), text.len()) };
        }
        let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
        let text = String::from_utf8_lossy(&text[..end]).trim().replace('\n', "; ");
        Error::Cudnn { call, subject: subject.to_owned(), status: Status(status), text }
    }

    pub(super) fn check(&self, call: &'static str, subject: &str, status: i32) -> Result<(), Error> {
        if status == 0 { Ok(()) } else { Err(self.error(call, subject, status)) }
    }

    /// A handle that submits to `stream`: one from the pool, or a new one. It goes back when dropped.
    ///
    /// # Errors
    /// cuDNN's own.
    pub fn handle<'s>(&'static self, stream: &'s Stream) -> Result<Handle<'s>, Error> {
        // Of a stream that is captured, asked for each time.
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

    /// Also in the middle of a capture, by this or another thread: cuDNN allocates here.
    fn create(&self, device: &'static Device) -> Result<Pooled, Error> {
        let _entered = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
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

/// A handle and what it is bound to. Handles live as long as the process: destroying them while it ends races with the
/// driver's own teardown.
#[derive(Debug)]
struct Pooled {
    raw: Ptr,
    device: &'static Device,
    /// By its number: another stream may come to have the same address.
    stream: Option<u64>,
    lane: &'static Lane,
}

// SAFETY: a handle may move between threads; it is used by one at a time because it is owned.
unsafe impl Send for Pooled {}

/// One of the device of a stream; rather one that submits to the stream already.
fn take(pool: &mut Vec<Pooled>, device: &Device, stream: Option<u64>) -> Option<Pooled> {
    let ordinal = device.ordinal();
    let same = pool.iter().rposition(|h| stream.is_some() && h.stream == stream && h.device.ordinal() == ordinal);
    same.or_else(|| pool.iter().rposition(|h| h.device.ordinal() == ordinal)).map(|at| pool.swap_remove(at))
}

/// Handles that a thread keeps, so that calls take no lock that other threads want.
const NEAR: usize = 4;

/// A thread's handles. They go to the pool of all when it ends.
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

/// One of this thread's.
fn near(device: &Device, stream: Option<u64>) -> Option<Pooled> {
    HANDLES.try_with(|near| take(&mut near.try_borrow_mut().ok()?.handles, device, stream)).ok().flatten()
}

/// Gives a handle to this thread; back, if it has enough or is ending.
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

/// A cuDNN handle bound to a stream, for the use of one thread at a time.
#[derive(Debug)]
pub struct Handle<'s> {
    library: &'static Library,
    stream: &'s Stream,
    /// Empty only while it is dropped.
    pooled: Option<Pooled>,
}

impl<'s> Handle<'s> {
    pub(super) fn raw(&self) -> Ptr {
        self.pooled.as_ref().map_or(std::ptr::null_mut(), |p| p.raw)
    }

    /// The library that it belongs to.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// The device that it submits to.
    pub fn device(&self) -> &'static Device {
        self.stream.device()
    }

    /// The stream that it submits to.
    pub fn stream(&self) -> &'s Stream {
        self.stream
    }

    /// Empty only while it is dropped.
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
