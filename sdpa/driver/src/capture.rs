//! Stream capture and CUDA graphs.

use crate::device::Device;
use crate::driver::Ptr;
use crate::error::Error;
use crate::lane::Lane;
use crate::load::table;
use crate::stream::Stream;
use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

table! {
    /// The driver functions for CUDA graphs.
    GraphTable {
        begin: "cuStreamBeginCapture_v2" fn(Ptr, c_int);
        end: "cuStreamEndCapture" fn(Ptr, *mut Ptr);
        info: "cuStreamGetCaptureInfo_v2" fn(Ptr, *mut c_int, *mut u64, *mut Ptr, *mut *const Ptr, *mut usize);
        instantiate: "cuGraphInstantiateWithFlags" fn(*mut Ptr, Ptr, u64);
        launch: "cuGraphLaunch" fn(Ptr, Ptr);
        destroy: "cuGraphDestroy" fn(Ptr);
        exec_destroy: "cuGraphExecDestroy" fn(Ptr);
        object_create: "cuUserObjectCreate" fn(*mut Ptr, Ptr, unsafe extern "C" fn(Ptr), c_uint, c_uint);
        object_release: "cuUserObjectRelease" fn(Ptr, c_uint);
        retain: "cuGraphRetainUserObject" fn(Ptr, Ptr, c_uint, c_uint);
        nodes: "cuGraphGetNodes" fn(Ptr, *mut Ptr, *mut usize);
        node_type: "cuGraphNodeGetType" fn(Ptr, *mut c_int);
        edges: "cuGraphGetEdges" fn(Ptr, *mut Ptr, *mut Ptr, *mut usize);
        create: "cuGraphCreate" fn(*mut Ptr, c_uint);
        kernel: "cuGraphKernelNodeGetParams_v2" fn(Ptr, *mut KernelParams);
        add_kernel: "cuGraphAddKernelNode_v2" fn(*mut Ptr, Ptr, *const Ptr, usize, *const KernelParams);
        copy_attributes: "cuGraphKernelNodeCopyAttributes" fn(Ptr, Ptr);
    }
}

/// `CUDA_KERNEL_NODE_PARAMS`, 72 bytes in CUDA 12 and 13. It is copied from one node to another and never read.
type KernelParams = [u64; 16];

const KERNEL_NODE: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const NO_DESTRUCTOR_SYNC: c_uint = 1;
const MOVE: c_uint = 1;

/// Resources that calls hand to the capture of their stream.
type Left = Vec<Box<dyn Send>>;

thread_local! {
    /// The streams that this thread captures with [`Stream::capture`], innermost last, and the resources of their graphs. The driver's user objects
    /// would make every launch of a graph slower; they serve captures that other code began.
    static CAPTURING: RefCell<Vec<(Ptr, Left)>> = const { RefCell::new(Vec::new()) };
}

/// A stream in [`CAPTURING`]. Dropping it ends the capture, even in a panic: a later submission to the stream would otherwise be added to a graph
/// that is never launched.
struct Capturing<'a> {
    stream: &'a Stream,
    table: &'a GraphTable,
    ended: bool,
}

impl<'a> Capturing<'a> {
    fn begin(stream: &'a Stream, table: &'a GraphTable) -> Result<Capturing<'a>, Error> {
        // SAFETY: the stream is live.
        stream.device().check("cuStreamBeginCapture", unsafe { (table.begin)(stream.raw().0, THREAD_LOCAL) })?;
        CAPTURING.with_borrow_mut(|all| all.push((stream.raw().0, Left::new())));
        Ok(Capturing { stream, table, ended: false })
    }

    /// Returns the graph, its resources, and the driver's result.
    fn end(&mut self) -> (Option<Graph>, Left, Result<(), Error>) {
        self.ended = true;
        let (_, left) = CAPTURING.with_borrow_mut(Vec::pop).unwrap_or((std::ptr::null_mut(), Left::new()));
        let (device, mut graph) = (self.stream.device(), std::ptr::null_mut());
        // SAFETY: the stream is live, and the pointer is to a live pointer.
        let ended = device.check("cuStreamEndCapture", unsafe { (self.table.end)(self.stream.raw().0, &mut graph) });
        ((!graph.is_null()).then(|| Graph { device, graph }), left, ended)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let (graph, left, _) = self.end();
            // Drop the graph first: it refers to the resources.
            drop(graph);
            self.stream.device().relaxed(|| drop(left));
        }
    }
}

/// A resource that a graph keeps, and its device.
struct Kept {
    device: &'static Device,
    thing: Box<dyn Send>,
}

/// The driver calls this when the last graph that keeps a resource is gone, on a thread that may not call the driver. So the resource is dropped
/// later, with the next retired one.
///
/// # Safety
/// `kept` comes from `Box::into_raw` of a `Kept`, and this is the only call with it.
unsafe extern "C" fn let_go(kept: Ptr) {
    // SAFETY: the caller upholds the contract.
    let Kept { device, thing } = *unsafe { Box::from_raw(kept.cast::<Kept>()) };
    device.waiting().push(thing);
}

impl Device {
    /// Returns the capture of a stream: its number, unique in the process, and its graph.
    fn capture_info(&self, stream: Ptr) -> Result<(u64, Ptr), Error> {
        let table = self.graphs()?;
        let (mut status, mut id, mut graph, mut edges, mut count) = (0, 0, std::ptr::null_mut(), std::ptr::null(), 0);
        // SAFETY: the stream is live, and every pointer is to a live variable.
        let code = unsafe { (table.info)(stream, &mut status, &mut id, &mut graph, &mut edges, &mut count) };
        self.check("cuStreamGetCaptureInfo_v2", code)?;
        Ok((id, graph))
    }

    /// Returns the number of a stream's capture, which is unique in the process.
    pub(crate) fn capture_of(&self, stream: Ptr) -> Result<u64, Error> {
        self.capture_info(stream).map(|(id, _)| id)
    }

    /// Makes the CUDA graph that a stream's capture builds keep a resource alive.
    pub(crate) fn keep(&'static self, stream: Ptr, thing: Box<dyn Send>) -> Result<(), Error> {
        let thing = CAPTURING.with_borrow_mut(|all| match all.iter_mut().find(|(captured, _)| *captured == stream) {
            Some((_, left)) => {
                left.push(thing);
                None
            }
            None => Some(thing),
        });
        let Some(thing) = thing else { return Ok(()) };
        let table = self.graphs()?;
        let (_, graph) = self.capture_info(stream)?;
        let kept = Box::into_raw(Box::new(Kept { device: self, thing })).cast();
        let mut object = std::ptr::null_mut();
        // SAFETY: `let_go` frees `kept` once, with the last reference.
        let code = unsafe { (table.object_create)(&mut object, kept, let_go, 1, NO_DESTRUCTOR_SYNC) };
        if let Err(error) = self.check("cuUserObjectCreate", code) {
            // SAFETY: no user object was created, so nothing else refers to `kept`.
            drop(unsafe { Box::from_raw(kept.cast::<Kept>()) });
            return Err(error);
        }
        // SAFETY: the graph and the user object are live; the only reference moves into the graph.
        let code = unsafe { (table.retain)(graph, object, 1, MOVE) };
        self.check("cuGraphRetainUserObject", code).inspect_err(|_| {
            // SAFETY: the graph did not take the reference.
            let _ = unsafe { (table.object_release)(object, 1) };
        })
    }
}

/// How long [`Device::wait_for_destructors`] waits at most.
const DESTRUCTORS: Duration = Duration::from_secs(1);

/// Tells [`Device::wait_for_destructors`] that the driver has come to its user object.
///
/// # Safety
/// `flag` comes from `Arc::into_raw` of an `Arc<AtomicBool>`, and this is the only call with it.
unsafe extern "C" fn reached(flag: Ptr) {
    // SAFETY: the caller upholds the contract.
    unsafe { Arc::from_raw(flag.cast::<AtomicBool>()) }.store(true, Ordering::Release);
}

impl Device {
    /// Waits until the driver has called the destructors of all user objects of graphs that are destroyed. It calls them on a thread of its own, after
    /// the graph is gone, one after the other: so this destroys a graph with a user object and waits for its destructor. NCCL's destructors use their
    /// communicator until they return.
    pub(crate) fn wait_for_destructors(&self) {
        let (Ok(_entered), Some(table)) = (self.enter(), self.graphs_if_any()) else { return };
        let (mut graph, mut object) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the pointer is to a live pointer.
        if unsafe { (table.create)(&mut graph, 0) } != 0 {
            return;
        }
        let flag = Arc::new(AtomicBool::new(false));
        let raw = Arc::into_raw(flag.clone()).cast_mut().cast();
        // SAFETY: `reached` takes the flag's reference, once, unless there is no user object. The graph is owned here, and takes the only reference to the
        // user object, unless that fails.
        unsafe {
            if (table.object_create)(&mut object, raw, reached, 1, NO_DESTRUCTOR_SYNC) != 0 {
                reached(raw);
            } else if (table.retain)(graph, object, 1, MOVE) != 0 {
                let _ = (table.object_release)(object, 1);
            }
            self.relaxed(|| (table.destroy)(graph));
        }
        let began = Instant::now();
        while !flag.load(Ordering::Acquire) && began.elapsed() < DESTRUCTORS {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// An owned graph.
struct Graph {
    device: &'static Device,
    graph: Ptr,
}

// SAFETY: a graph may be destroyed from any thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(table) = self.device.graphs_if_any() {
            // SAFETY: the graph is owned here; executable graphs made from it are independent.
            let _ = self.device.relaxed(|| unsafe { (table.destroy)(self.graph) });
        }
    }
}

impl Graph {
    /// Copies a linear chain of kernels to a graph that keeps nothing alive. A graph with user objects, as cuDNN 9.27 makes them, is 3 µs slower per
    /// launch. `None` if the graph is anything but a chain of kernels, or if the driver has no functions to read it.
    fn bare(&self, table: &GraphTable, count: usize) -> Option<Graph> {
        let mut nodes = vec![std::ptr::null_mut(); count];
        let (mut from, mut to) = (nodes.clone(), nodes.clone());
        let (mut found, mut edges) = (count, count);
        // SAFETY: the graph is live, and the arrays have the stated lengths.
        let told = unsafe {
            (table.nodes)(self.graph, nodes.as_mut_ptr(), &mut found) == 0
                && (table.edges)(self.graph, from.as_mut_ptr(), to.as_mut_ptr(), &mut edges) == 0
        };
        if !told || found != count || edges + 1 != count {
            return None;
        }
        let mut graph = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        (unsafe { (table.create)(&mut graph, 0) } == 0).then_some(())?;
        let bare = Graph { device: self.device, graph };
        let mut at = *nodes.iter().find(|node| !to[..edges].contains(node))?;
        let mut before: Option<Ptr> = None;
        for n in 0..count {
            let (mut kind, mut params, mut node) = (KERNEL_NODE + 1, KernelParams::default(), std::ptr::null_mut());
            let depends = before.as_slice();
            // SAFETY: nodes live as long as their graphs. The parameters belong to the original node, which is live while the new node
            // copies them.
            let copied = unsafe {
                (table.node_type)(at, &mut kind) == 0
                    && kind == KERNEL_NODE
                    && (table.kernel)(at, &mut params) == 0
                    && (table.add_kernel)(&mut node, graph, depends.as_ptr(), depends.len(), &params) == 0
                    && (table.copy_attributes)(node, at) == 0
            };
            copied.then_some(())?;
            before = Some(node);
            if n + 1 < count {
                at = to[from[..edges].iter().position(|&f| f == at)?];
            }
        }
        Some(bare)
    }
}

/// A CUDA graph of work that [`Stream::capture`] captured from a stream. It can be launched any number of times.
pub struct Captured {
    device: &'static Device,
    exec: Ptr,
    nodes: usize,
    left: Left,
    /// Marks the end of its launches.
    lane: &'static Lane,
}

impl std::fmt::Debug for Captured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Captured").field("nodes", &self.nodes).field("kept", &self.left.len()).finish_non_exhaustive()
    }
}

// SAFETY: a graph may be launched and destroyed from any thread, and its resources are `Send`.
unsafe impl Send for Captured {}

impl Stream {
    /// Captures the work that `submit` submits to this stream, without running it. The graph keeps the resources that calls pass to it
    /// ([`Submission::keep_in_graph`](crate::Submission::keep_in_graph)).
    ///
    /// # Errors
    /// Returns the error of `submit`, or a driver error, for example for work that cannot be captured.
    pub fn capture<E: From<Error>>(&self, submit: impl FnOnce() -> Result<(), E>) -> Result<Captured, E> {
        let device = self.device();
        let _entered = device.enter()?;
        let table = device.graphs()?;
        let mut capturing = Capturing::begin(self, table)?;
        let submitted = submit();
        let (original, mut left, ended) = capturing.end();
        submitted?;
        ended?;
        let Some(original) = original else { return Err(device.no_graph().into()) };
        let graph = original.graph;
        let (mut exec, mut nodes) = (std::ptr::null_mut(), 0);
        // SAFETY: the graph is live; without an array the driver only counts nodes.
        device.check("cuGraphGetNodes", unsafe { (table.nodes)(graph, std::ptr::null_mut(), &mut nodes) })?;
        let bare = original.bare(table, nodes);
        let launched = bare.as_ref().map_or(graph, |bare| bare.graph);
        // SAFETY: the graph is live, and the pointer is to a live pointer.
        device.check("cuGraphInstantiate", device.relaxed(|| unsafe { (table.instantiate)(&mut exec, launched, 0) }))?;
        if bare.is_some() {
            // Keep the original graph, because the executable graph needs its resources. It is dropped before what it refers to.
            left.insert(0, Box::new(original));
        }
        Ok(Captured { device, exec, nodes, left, lane: device.lanes().take() })
    }
}

impl Captured {
    /// Returns the number of nodes of the captured graph: kernels, copies and other captured work.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Launches the graph on a stream of its device. It returns without waiting.
    ///
    /// # Safety
    /// All captured work may run again: its memory is live, and nothing else uses it until the stream has passed this call.
    ///
    /// # Errors
    /// Returns a driver error.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let entered = self.device.enter()?;
        // SAFETY: the executable graph and the stream are live; the caller upholds the rest of the contract.
        self.device.check("cuGraphLaunch", unsafe { (self.device.graphs()?.launch)(self.exec, stream.raw().0) })?;
        if self.device.is_capturing(stream.raw().0) {
            // This launch becomes part of another graph, which copies this one but not its resources.
            return Ok(());
        }
        self.lane.mark(&entered, self.device, stream.raw().0, stream.id())
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if let (Ok(_entered), Some(table)) = (self.device.enter(), self.device.graphs_if_any()) {
            // SAFETY: the executable graph is owned here. If it is running, the driver frees it when it ends.
            let code = self.device.relaxed(|| unsafe { (table.exec_destroy)(self.exec) });
            if code != 0 {
                tracing::warn!(code, "cuGraphExecDestroy");
            }
        }
        // A launch may still be running, so retire the resources instead of dropping them.
        if !self.left.is_empty() {
            self.device.retire(Box::new(std::mem::take(&mut self.left)));
        }
        self.device.lanes().give_back(self.lane);
    }
}
