//! Streams, events, captures and graphs, as the driver has them: which call invalidates whose capture is what was measured on an H200 under
//! driver 580.
//!
//! Work is done at once, unless a test holds a stream: then it waits, events behind it have not passed, and whoever frees memory or destroys a
//! plan that it needs is told on.

use crate::{memory, record};
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// `CU_STREAM_CAPTURE_MODE_…`.
pub(crate) const GLOBAL: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;

pub(crate) const CAPTURE_UNSUPPORTED: c_int = 900;
pub(crate) const CAPTURE_INVALIDATED: c_int = 901;
const CAPTURE_UNMATCHED: c_int = 903;
const CAPTURED_EVENT: c_int = 907;
const NOT_READY: c_int = 600;
const INVALID_HANDLE: c_int = 400;

thread_local! {
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
    static THREAD: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
}

static THREADS: AtomicU64 = AtomicU64::new(1);

/// What one submission needs until it is done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Work {
    /// The plan, by address; 0 for copies and fills.
    pub(crate) plan: usize,
    /// Addresses in device memory.
    pub(crate) memory: Vec<u64>,
}

/// A user object: its destructor, its argument, references.
struct Object {
    destroy: unsafe extern "C" fn(*mut c_void),
    argument: usize,
    references: usize,
}

/// A graph, executable or not.
#[derive(Clone, Default)]
struct Graph {
    nodes: Vec<(usize, Work)>,
    objects: Vec<usize>,
}

struct Capture {
    mode: c_int,
    thread: u64,
    valid: bool,
    graph: usize,
}

#[derive(Default)]
struct Stream {
    id: u64,
    context: usize,
    held: bool,
    /// Work that waits, by its number.
    pending: Vec<(u64, Work)>,
    capture: Option<Capture>,
}

/// What has to be done before an event has passed.
enum Point {
    /// The last is how many entries the record had.
    Before {
        stream: u64,
        work: u64,
        written: u64,
    },
    Captured,
}

#[derive(Default)]
struct All {
    /// By address, which a later stream may have too.
    streams: BTreeMap<usize, Stream>,
    events: BTreeMap<usize, Point>,
    graphs: BTreeMap<usize, Graph>,
    objects: BTreeMap<usize, Object>,
    free_streams: Vec<usize>,
    next: usize,
    ids: u64,
    work: u64,
    /// What was freed while it was needed, and launched when it was gone.
    faults: Vec<String>,
    dead_plans: Vec<usize>,
}

static ALL: Mutex<Option<All>> = Mutex::new(None);

fn with<R>(run: impl FnOnce(&mut All) -> R) -> R {
    run(ALL.lock().get_or_insert_with(|| All { next: 0x5_0000, ..All::default() }))
}

impl All {
    fn made_up(&mut self) -> usize {
        self.next += 16;
        self.next
    }

    fn stream(&mut self, at: usize) -> Option<&mut Stream> {
        if at == 0 {
            // The legacy one is always there.
            self.streams.entry(0).or_default();
        }
        self.streams.get_mut(&at)
    }

    /// What a call that is potentially unsafe does to captures: 0, or what it returns once it has invalidated some.
    fn disturb(&mut self, thread: u64, mode: c_int) -> c_int {
        let mut code = 0;
        for capture in self.streams.values_mut().filter_map(|s| s.capture.as_mut()) {
            let own = capture.thread == thread && capture.mode != RELAXED;
            let hit = match mode {
                GLOBAL => own || capture.mode == GLOBAL,
                THREAD_LOCAL => own,
                _ => false,
            };
            if hit {
                capture.valid = false;
                code = CAPTURE_UNSUPPORTED;
            }
        }
        code
    }

    /// Drops references; what to call for objects that nobody keeps any more.
    fn release(&mut self, objects: &[usize]) -> Vec<(unsafe extern "C" fn(*mut c_void), usize)> {
        let mut gone = Vec::new();
        for id in objects {
            let Some(object) = self.objects.get_mut(id) else { continue };
            object.references -= 1;
            if object.references == 0 {
                gone.push((object.destroy, object.argument));
                self.objects.remove(id);
            }
        }
        gone
    }

    fn needed(&self, needs: impl Fn(&Work) -> bool) -> bool {
        self.streams.values().any(|s| s.pending.iter().any(|(_, work)| needs(work)))
    }
}

fn destroy(gone: Vec<(unsafe extern "C" fn(*mut c_void), usize)>) {
    for (destroy, argument) in gone {
        // SAFETY: the header's contract: once, with the last reference.
        unsafe { destroy(std::ptr::with_exposed_provenance_mut(argument)) };
    }
}

fn thread() -> u64 {
    THREAD.with(|thread| *thread)
}

/// [`All::disturb`] by this thread.
pub(crate) fn disturb() -> c_int {
    with(|all| all.disturb(thread(), MODE.get()))
}

/// What waits for the whole context, or marks its end, does to every capture.
pub(crate) fn disturb_all() -> c_int {
    with(|all| {
        let mut code = 0;
        for capture in all.streams.values_mut().filter_map(|s| s.capture.as_mut()) {
            capture.valid = false;
            code = CAPTURE_UNSUPPORTED;
        }
        code
    })
}

/// Submits work: into a graph, behind what is held, or done at once. `false` where it went into a graph.
pub(crate) fn submit(stream: usize, work: Work) -> Result<bool, c_int> {
    with(|all| {
        if let Some(dead) = all.dead_plans.iter().find(|plan| **plan == work.plan && work.plan != 0) {
            let text = format!("a plan at {dead:#x} is executed after its end");
            all.faults.push(text);
        }
        all.work += 1;
        let number = all.work;
        let node = all.made_up();
        let Some(stream) = all.stream(stream) else { return Err(INVALID_HANDLE) };
        if let Some(capture) = &stream.capture {
            if !capture.valid {
                return Err(CAPTURE_INVALIDATED);
            }
            let graph = capture.graph;
            if let Some(graph) = all.graphs.get_mut(&graph) {
                graph.nodes.push((node, work));
            }
            return Ok(false);
        }
        if stream.held {
            stream.pending.push((number, work));
        }
        Ok(true)
    })
}

/// ScheduleReport on where work that waits needs it.
pub(crate) fn freed(address: u64) {
    with(|all| {
        if all.needed(|work| work.memory.iter().any(|&used| memory::start(used) == Some(address))) {
            all.faults.push(format!("memory at {address:#x} is freed while work that waits needs it"));
        }
    });
}

/// ScheduleReport on where work that waits needs it, or there is no context to unload it from.
pub(crate) fn plan_destroyed(plan: usize, entered: bool) {
    with(|all| {
        if !entered {
            all.faults.push(format!("the plan at {plan:#x} is destroyed without a context"));
        }
        if all.needed(|work| work.plan == plan) {
            all.faults.push(format!("the plan at {plan:#x} is destroyed while work that waits needs it"));
        }
        all.dead_plans.push(plan);
    });
}

pub(crate) fn create_stream(context: usize) -> usize {
    with(|all| {
        // An address comes back, as it may.
        let at = all.free_streams.pop().unwrap_or_else(|| all.made_up());
        all.ids += 1;
        let id = all.ids;
        all.streams.insert(at, Stream { id, context, ..Stream::default() });
        at
    })
}

pub(crate) fn destroy_stream(at: usize) -> c_int {
    with(|all| match all.streams.remove(&at) {
        Some(_) => {
            all.free_streams.push(at);
            0
        }
        None => INVALID_HANDLE,
    })
}

/// Invalidates the capture of a stream; whether there is one.
pub(crate) fn invalidate(at: usize) -> bool {
    with(|all| {
        let capture = all.stream(at).and_then(|s| s.capture.as_mut());
        capture.map(|capture| capture.valid = false).is_some()
    })
}

pub(crate) fn stream_id(at: usize) -> Option<u64> {
    with(|all| all.stream(at).map(|s| s.id))
}

pub(crate) fn stream_context(at: usize) -> Option<usize> {
    with(|all| all.stream(at).map(|s| s.context))
}

pub(crate) fn made_up() -> usize {
    with(All::made_up)
}

pub(crate) fn record(event: usize, stream: usize) -> c_int {
    with(|all| {
        let work = all.work;
        let Some(on) = all.stream(stream) else { return INVALID_HANDLE };
        let point = if on.capture.is_some() { Point::Captured } else { Point::Before { stream: on.id, work, written: record::written() } };
        all.events.insert(event, point);
        0
    })
}

pub(crate) fn query(event: usize) -> c_int {
    let disturbed = disturb();
    if disturbed != 0 {
        return disturbed;
    }
    with(|all| match all.events.get(&event) {
        Some(Point::Captured) => CAPTURED_EVENT,
        Some(Point::Before { stream, work, .. }) => {
            let waits = all.streams.values().any(|s| s.id == *stream && s.pending.iter().any(|(n, _)| n <= work));
            if waits { NOT_READY } else { 0 }
        }
        None => 0,
    })
}

/// How many entries were written between two events.
pub(crate) fn between(start: usize, end: usize) -> u64 {
    let written = |all: &All, event| match all.events.get(&event) {
        Some(Point::Before { written, .. }) => *written,
        Some(Point::Captured) | None => 0,
    };
    with(|all| written(all, end).saturating_sub(written(all, start)))
}

exported! {
    /// Holds the work of a stream from now on, or lets all of it be done.
    fn recording_hold(stream: *mut c_void, hold: c_int) -> c_int {
        with(|all| {
            let Some(stream) = all.stream(stream.addr()) else { return INVALID_HANDLE };
            stream.held = hold != 0;
            if hold == 0 {
                stream.pending.clear();
            }
            0
        })
    }

    /// How often something was freed, destroyed or executed that must not be.
    fn recording_faults() -> u64 {
        with(|all| {
            for fault in &all.faults {
                eprintln!("recording: {fault}");
            }
            all.faults.len() as u64
        })
    }

    /// Captures that go on.
    fn recording_captures() -> u64 {
        with(|all| all.streams.values().filter(|s| s.capture.is_some()).count() as u64)
    }

    /// The mode of this thread, against that from before.
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { mode.write(MODE.replace(mode.read())) };
        0
    }

    /// Whether it is captured: active, or invalidated.
    fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> c_int {
        with(|all| {
            let Some(stream) = all.stream(stream.addr()) else { return INVALID_HANDLE };
            let code = stream.capture.as_ref().map_or(0, |capture| if capture.valid { 1 } else { 2 });
            // SAFETY: the header's contract.
            unsafe { crate::store(status, code) };
            0
        })
    }

    /// Into a graph from now on.
    fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) -> c_int {
        with(|all| {
            let graph = all.made_up();
            let Some(stream) = all.stream(stream.addr()) else { return INVALID_HANDLE };
            if stream.capture.is_some() {
                return CAPTURE_UNSUPPORTED;
            }
            stream.capture = Some(Capture { mode, thread: thread(), valid: true, graph });
            all.graphs.insert(graph, Graph::default());
            0
        })
    }

    /// The graph; none where the capture was invalidated.
    fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int {
        let (code, made, gone) = with(|all| {
            let Some(on) = all.stream(stream.addr()) else { return (INVALID_HANDLE, 0, Vec::new()) };
            let Some(capture) = on.capture.take() else { return (CAPTURE_UNMATCHED, 0, Vec::new()) };
            if capture.valid {
                return (0, capture.graph, Vec::new());
            }
            let objects = all.graphs.remove(&capture.graph).map(|g| g.objects).unwrap_or_default();
            (CAPTURE_INVALIDATED, 0, all.release(&objects))
        });
        destroy(gone);
        // SAFETY: the header's contract.
        unsafe { crate::store(graph, std::ptr::without_provenance_mut(made)) };
        code
    }

    /// The graph that is captured into.
    fn cuStreamGetCaptureInfo_v2(
        stream: *mut c_void, status: *mut c_int, id: *mut u64, graph: *mut *mut c_void, edges: *mut *const *mut c_void, count: *mut usize
    ) -> c_int {
        with(|all| {
            let Some(stream) = all.stream(stream.addr()) else { return INVALID_HANDLE };
            let into = stream.capture.as_ref().map_or(0, |capture| capture.graph);
            // SAFETY: the header's contract.
            unsafe {
                crate::store(status, c_int::from(into != 0));
                crate::store(id, into as u64);
                crate::store(graph, std::ptr::without_provenance_mut(into));
                crate::store(edges, std::ptr::null());
                crate::store(count, 0);
            }
            0
        })
    }

    /// With the same nodes, keeping the same objects.
    fn cuGraphInstantiateWithFlags(exec: *mut *mut c_void, graph: *mut c_void, _flags: u64) -> c_int {
        with(|all| {
            let Some(copy) = all.graphs.get(&graph.addr()).cloned() else { return INVALID_HANDLE };
            for object in &copy.objects {
                if let Some(object) = all.objects.get_mut(object) {
                    object.references += 1;
                }
            }
            let made = all.made_up();
            all.graphs.insert(made, copy);
            // SAFETY: the header's contract.
            unsafe { crate::store(exec, std::ptr::without_provenance_mut(made)) };
            0
        })
    }

    /// Each node again.
    fn cuGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> c_int {
        let Some(nodes) = with(|all| all.graphs.get(&exec.addr()).map(|g| g.nodes.clone())) else { return INVALID_HANDLE };
        for (_, work) in nodes {
            let lost = work.memory.iter().find(|&&address| memory::start(address).is_none()).copied();
            if let Some(lost) = lost {
                with(|all| all.faults.push(format!("a graph is launched whose memory at {lost:#x} was freed")));
            }
            if let Err(code) = submit(stream.addr(), work) {
                return code;
            }
        }
        0
    }

    /// What nobody else keeps goes.
    fn cuGraphDestroy(graph: *mut c_void) -> c_int {
        let gone = with(|all| {
            let objects = all.graphs.remove(&graph.addr()).map(|g| g.objects)?;
            Some(all.release(&objects))
        });
        let Some(gone) = gone else { return INVALID_HANDLE };
        destroy(gone);
        0
    }

    /// The same of an executable one.
    fn cuGraphExecDestroy(exec: *mut c_void) -> c_int {
        // SAFETY: the header's contract.
        unsafe { cuGraphDestroy(exec) }
    }

    /// With so many references.
    fn cuUserObjectCreate(
        object: *mut *mut c_void, argument: *mut c_void, destroy: unsafe extern "C" fn(*mut c_void), references: u32, _flags: u32
    ) -> c_int {
        with(|all| {
            let made = all.made_up();
            all.objects.insert(made, Object { destroy, argument: argument.expose_provenance(), references: references as usize });
            // SAFETY: the header's contract.
            unsafe { crate::store(object, std::ptr::without_provenance_mut(made)) };
            0
        })
    }

    /// One reference less.
    fn cuUserObjectRelease(object: *mut c_void, _count: u32) -> c_int {
        let gone = with(|all| all.release(&[object.addr()]));
        destroy(gone);
        0
    }

    /// The reference moves into the graph.
    fn cuGraphRetainUserObject(graph: *mut c_void, object: *mut c_void, _count: u32, _flags: u32) -> c_int {
        with(|all| match all.graphs.get_mut(&graph.addr()) {
            Some(graph) => {
                graph.objects.push(object.addr());
                0
            }
            None => INVALID_HANDLE,
        })
    }

    /// As many as there is room for; how many there are.
    fn cuGraphGetNodes(graph: *mut c_void, nodes: *mut *mut c_void, count: *mut usize) -> c_int {
        with(|all| {
            let Some(graph) = all.graphs.get(&graph.addr()) else { return INVALID_HANDLE };
            // SAFETY: the header's contract: room for as many as are counted.
            unsafe {
                if !nodes.is_null() {
                    let room = count.read();
                    for (n, (node, _)) in graph.nodes.iter().take(room).enumerate() {
                        nodes.add(n).write(std::ptr::without_provenance_mut(*node));
                    }
                }
                crate::store(count, graph.nodes.len());
            }
            0
        })
    }

    /// One after the other.
    fn cuGraphGetEdges(graph: *mut c_void, from: *mut *mut c_void, to: *mut *mut c_void, count: *mut usize) -> c_int {
        with(|all| {
            let Some(graph) = all.graphs.get(&graph.addr()) else { return INVALID_HANDLE };
            // SAFETY: as above.
            unsafe {
                for (n, pair) in graph.nodes.windows(2).enumerate() {
                    from.add(n).write(std::ptr::without_provenance_mut(pair[0].0));
                    to.add(n).write(std::ptr::without_provenance_mut(pair[1].0));
                }
                crate::store(count, graph.nodes.len().saturating_sub(1));
            }
            0
        })
    }

    /// A kernel.
    fn cuGraphNodeGetType(_node: *mut c_void, kind: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { crate::store(kind, 0) };
        0
    }

    /// Empty.
    fn cuGraphCreate(graph: *mut *mut c_void, _flags: u32) -> c_int {
        with(|all| {
            let made = all.made_up();
            all.graphs.insert(made, Graph::default());
            // SAFETY: the header's contract.
            unsafe { crate::store(graph, std::ptr::without_provenance_mut(made)) };
            0
        })
    }

    /// The node by its number is what is known of it.
    fn cuGraphKernelNodeGetParams_v2(node: *mut c_void, params: *mut u64) -> c_int {
        // SAFETY: the header's contract: room for 72 bytes.
        unsafe { crate::store(params, node.addr() as u64) };
        0
    }

    /// The same work in another graph.
    fn cuGraphAddKernelNode_v2(
        node: *mut *mut c_void, graph: *mut c_void, _depends: *const *mut c_void, _count: usize, params: *const u64
    ) -> c_int {
        // SAFETY: the header's contract.
        let like = unsafe { params.read() } as usize;
        with(|all| {
            let found = all.graphs.values().flat_map(|g| &g.nodes).find(|(known, _)| *known == like);
            let Some(work) = found.map(|(_, work)| work.clone()) else { return INVALID_HANDLE };
            let made = all.made_up();
            let Some(graph) = all.graphs.get_mut(&graph.addr()) else { return INVALID_HANDLE };
            graph.nodes.push((made, work));
            // SAFETY: the header's contract.
            unsafe { crate::store(node, std::ptr::without_provenance_mut(made)) };
            0
        })
    }

    /// There are none.
    fn cuGraphKernelNodeCopyAttributes(_to: *mut c_void, _from: *mut c_void) -> c_int { 0 }
}
