//! The backend interface.

use crate::descriptor::{BAD_PARAM, NOT_FINALIZED, Node, State, attribute, kind, ty, unreadable};
use crate::entry::EXECUTION;
use crate::graph::{WORKSPACE, version};
use crate::record::{self, refuse, said};
use crate::timeline::{self, Work};
use crate::{driver, memory, store};
use parking_lot::Mutex;
use std::ffi::{c_char, c_int, c_void};

type Ptr = *mut c_void;

const NULL: c_int = 2002;
const EXECUTION_FAILED: c_int = 5000;
/// The number of the engine that is offered for every graph.
const ENGINE: i64 = 0;
/// The profile of the device.
const H200: &[u8] = include_bytes!("../../../cudnn-graph/devprops/h200.json");

/// What a handle points to.
struct Stand {
    context: usize,
    stream: u64,
    /// The stream's own number: another may be at its address.
    id: u64,
}

/// What the next finalizations of plans return in place of success, and how many of them.
static FAULT: Mutex<(c_int, c_int)> = Mutex::new((0, 0));

/// # Safety
/// Null, or a pointer that was given out.
unsafe fn node<'a>(raw: Ptr) -> Option<&'a mut Node> {
    // SAFETY: the caller's; nodes are never freed.
    unsafe { raw.cast::<Node>().as_mut() }
}

/// Copies elements out, as many as are asked for and there are; says how many there are where none is asked for.
///
/// # Safety
/// As of `cudnnBackendGetAttribute`.
unsafe fn answer<T: Copy>(values: &[T], requested: i64, count: *mut i64, elements: Ptr) -> c_int {
    let room = usize::try_from(requested).unwrap_or(0);
    let given = if room == 0 { 0 } else { room.min(values.len()) };
    // SAFETY: the caller's: there is room for what is requested.
    unsafe {
        if given > 0 {
            std::ptr::copy_nonoverlapping(values.as_ptr(), elements.cast(), given);
        }
        store(count, if room == 0 { values.len() } else { given } as i64);
    }
    0
}

/// Fills descriptors that the caller made; there is one to be given.
///
/// # Safety
/// As of `cudnnBackendGetAttribute`.
unsafe fn fill(from: &Node, requested: i64, count: *mut i64, elements: Ptr) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(count, 1) };
    if requested > 0 {
        // SAFETY: the elements are descriptors that were given out.
        let Some(to) = (unsafe { node(elements.cast::<Ptr>().read()) }) else { return refuse(NULL, "no descriptor".to_owned()) };
        to.give(from.graph.clone());
    }
    0
}

exported! {
    /// 9.19.0, or what the environment says.
    fn cudnnGetVersion() -> usize { version() }

    /// Why the last call of this thread was refused.
    fn cudnnGetLastErrorString(text: *mut c_char, length: usize) -> () {
        let said = said();
        let bytes = &said.as_bytes()[..said.len().min(length.saturating_sub(1))];
        if length > 0 {
            // SAFETY: there is room for as many and a zero.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), text, bytes.len());
                text.add(bytes.len()).write(0);
            }
        }
    }

    /// For the device of the context.
    fn cudnnCreate(handle: *mut Ptr) -> c_int {
        if !driver::entered() {
            return refuse(BAD_PARAM, "a handle without a context".to_owned());
        }
        if timeline::disturb() != 0 {
            return refuse(EXECUTION_FAILED, "a handle allocates while a stream is captured".to_owned());
        }
        let stand = Stand { context: driver::current(), stream: 0, id: 0 };
        // SAFETY: the header's contract.
        unsafe { store(handle, Box::into_raw(Box::new(stand)).cast()) };
        0
    }

    /// From now on.
    fn cudnnSetStream(handle: Ptr, stream: Ptr) -> c_int {
        // SAFETY: handles are never freed.
        let Some(stand) = (unsafe { handle.cast::<Stand>().as_mut() }) else { return refuse(NULL, "no handle".to_owned()) };
        if timeline::stream_context(stream.addr()) != Some(stand.context) && !stream.is_null() {
            return refuse(BAD_PARAM, "a stream of another device".to_owned());
        }
        (stand.stream, stand.id) = (stream.addr() as u64, timeline::stream_id(stream.addr()).unwrap_or(0));
        0
    }

    /// Of any kind.
    fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut Ptr) -> c_int {
        let node = Node::create(kind);
        node.expose_provenance();
        // SAFETY: the header's contract.
        unsafe { store(descriptor, node.cast()) };
        0
    }

    /// Once. A plan unloads its kernels.
    fn cudnnBackendDestroyDescriptor(descriptor: Ptr) -> c_int {
        // SAFETY: the header's contract.
        let Some(node) = (unsafe { node(descriptor) }) else { return NULL };
        if node.kind == kind::EXECUTION_PLAN {
            if timeline::disturb() != 0 {
                return refuse(EXECUTION_FAILED, "a plan is unloaded while a stream is captured".to_owned());
            }
            timeline::plan_destroyed(descriptor.addr(), driver::entered());
        }
        Node::destroy(node)
    }

    /// So many finalizations of plans return this from now on.
    fn recording_fail_plans(status: c_int, count: c_int) -> c_int {
        *FAULT.lock() = (status, count);
        0
    }

    /// Kept as it is.
    fn cudnnBackendSetAttribute(descriptor: Ptr, name: c_int, ty: c_int, count: i64, elements: *const c_void) -> c_int {
        // SAFETY: the header's contract.
        unsafe { node(descriptor).map_or(NULL, |node| node.set(name, ty, count, elements)) }
    }

    /// What is read of plans, engines and their configurations.
    fn cudnnBackendGetAttribute(
        descriptor: Ptr, name: c_int, asked: c_int, requested: i64, count: *mut i64, elements: Ptr
    ) -> c_int {
        // SAFETY: the header's contract.
        let Some(node) = (unsafe { node(descriptor) }) else { return NULL };
        if node.state != State::Final {
            return refuse(NOT_FINALIZED, format!("attribute {name} is read of kind {}, which is not final", node.kind));
        }
        let none: [c_int; 0] = [];
        // SAFETY: the header's contract, in each arm with the type that was asked for.
        unsafe {
            match (node.kind, name, asked) {
                (kind::ENGINEHEUR, attribute::ENGINEHEUR_RESULTS, ty::DESCRIPTOR)
                | (kind::ENGINECFG, attribute::ENGINECFG_ENGINE, ty::DESCRIPTOR) => fill(node, requested, count, elements),
                (kind::ENGINECFG, attribute::ENGINECFG_KNOB_CHOICES, ty::DESCRIPTOR) => answer(&none, requested, count, elements),
                (kind::ENGINECFG, attribute::ENGINECFG_WORKSPACE_SIZE, ty::INT64)
                | (kind::EXECUTION_PLAN, attribute::PLAN_WORKSPACE_SIZE, ty::INT64) => {
                    answer(&[WORKSPACE.cast_signed()], requested, count, elements)
                }
                (kind::ENGINECFG, attribute::ENGINECFG_SHARED_MEMORY_USED, ty::INT32) => answer(&[0i32], requested, count, elements),
                (kind::ENGINE, attribute::ENGINE_GLOBAL_INDEX, ty::INT64) => {
                    answer(&[node.number(name).unwrap_or(ENGINE)], requested, count, elements)
                }
                (kind::ENGINE, attribute::ENGINE_NUMERICAL_NOTE | attribute::ENGINE_BEHAVIOR_NOTE, _) => {
                    answer(&none, requested, count, elements)
                }
                (kind::DEVICEPROP, attribute::DEVICEPROP_JSON, ty::CHAR) => answer(H200, requested, count, elements),
                (kind::EXECUTION_PLAN, attribute::PLAN_JSON, ty::CHAR) => {
                    let json = node.graph.as_ref().map(|graph| graph.to_json()).unwrap_or_default();
                    answer(json.as_bytes(), requested, count, elements)
                }
                _ => unreadable(node, name),
            }
        }
    }

    /// Checks what later calls rely on. A plan loads its kernels.
    fn cudnnBackendFinalize(descriptor: Ptr) -> c_int {
        // SAFETY: the header's contract.
        let Some(node) = (unsafe { node(descriptor) }) else { return NULL };
        if node.kind == kind::EXECUTION_PLAN {
            if timeline::disturb() != 0 {
                return refuse(EXECUTION_FAILED, "a plan is loaded while a stream is captured".to_owned());
            }
            let mut fault = FAULT.lock();
            if fault.1 > 0 {
                fault.1 -= 1;
                return refuse(fault.0, "a failure that was asked for".to_owned());
            }
        }
        Node::finalize(node)
    }

    /// Records what is submitted, once it is seen to fit.
    fn cudnnBackendExecute(handle: Ptr, plan: Ptr, pack: Ptr) -> c_int {
        // SAFETY: the header's contract; a pack is used by one thread at a time.
        let (stand, plan, pack) = unsafe { (handle.cast::<Stand>().as_ref(), plan.cast::<Node>().as_ref(), node(pack)) };
        let (Some(stand), Some(plan), Some(node)) = (stand, plan, pack) else { return refuse(NULL, "execution of nothing".to_owned()) };
        let are = [(plan.kind, plan.state), (node.kind, node.state)];
        let (Some(graph), true) = (&plan.graph, are == [(kind::EXECUTION_PLAN, State::Final), (kind::VARIANT_PACK, State::Final)]) else {
            return refuse(NOT_FINALIZED, "execution of what is no final plan, or on what is no final pack".to_owned());
        };
        let pack = &mut node.pack;
        let sure = Some((std::ptr::from_ref(plan).addr(), memory::freed()));
        if pack.fits != sure {
            match graph.check(pack) {
                Ok(number_bytes) => (pack.number_bytes, pack.fits) = (number_bytes, sure),
                Err(what) => return refuse(EXECUTION_FAILED, what),
            }
        }
        if driver::current() != stand.context {
            return refuse(EXECUTION_FAILED, "the context of another device, or none, is current".to_owned());
        }
        if timeline::stream_id(stand.stream as usize) != Some(stand.id) {
            return refuse(EXECUTION_FAILED, "the stream of the handle is gone, and another may be at its address".to_owned());
        }
        let devices = pack.pointers.iter().zip(&pack.number_bytes).filter(|(_, width)| **width == 0).map(|(&address, _)| address);
        let work = Work { plan: std::ptr::from_ref(plan).addr(), memory: devices.chain([pack.workspace]).collect() };
        match timeline::submit(stand.stream as usize, work) {
            Ok(true) => {}
            Ok(false) => return 0,
            Err(code) => return refuse(EXECUTION_FAILED, format!("the driver says {code}")),
        }
        record::write(|entry| {
            let count = pack.uids.len();
            (entry.what, entry.operations, entry.stream, entry.workspace) = (EXECUTION, graph.operations, stand.stream, pack.workspace);
            (entry.to, entry.from, entry.bytes) = (0, 0, 0);
            entry.tensors = count as u32;
            entry.uids[..count].copy_from_slice(&pack.uids);
            entry.pointers[..count].copy_from_slice(&pack.pointers);
            entry.number_bytes[..count].copy_from_slice(&pack.number_bytes);
            for (n, &width) in pack.number_bytes.iter().enumerate() {
                if width > 0 {
                    let mut bytes = [0; 8];
                    let from = std::ptr::with_exposed_provenance::<u8>(pack.pointers[n] as usize);
                    // SAFETY: the header's contract: as many bytes as the tensor's type has.
                    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), usize::from(width)) };
                    entry.numbers[n] = u64::from_ne_bytes(bytes);
                }
            }
        });
        0
    }
}
