//! Backend descriptors: attributes as they were set, and what they come to once finalized.

use crate::graph::{Graph, Tensor};
use crate::record::{self, refuse};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

pub(crate) const BAD_PARAM: c_int = 2000;
pub(crate) const NOT_FINALIZED: c_int = 2004;
const DUPLICATED: c_int = 2009;
const ATTRIBUTE_TYPE: c_int = 2010;

/// Kinds of descriptors.
pub(crate) mod kind {
    pub(crate) const ENGINE: i32 = 2;
    pub(crate) const ENGINECFG: i32 = 3;
    pub(crate) const ENGINEHEUR: i32 = 4;
    pub(crate) const EXECUTION_PLAN: i32 = 5;
    pub(crate) const OPERATIONGRAPH: i32 = 15;
    pub(crate) const VARIANT_PACK: i32 = 16;
    pub(crate) const TENSOR: i32 = 17;
    pub(crate) const DEVICEPROP: i32 = 38;
}

/// Attributes that mean something here.
pub(crate) mod attribute {
    pub(crate) const ENGINEHEUR_OPERATION_GRAPH: i32 = 201;
    pub(crate) const ENGINEHEUR_RESULTS: i32 = 202;
    pub(crate) const ENGINECFG_ENGINE: i32 = 300;
    pub(crate) const ENGINECFG_KNOB_CHOICES: i32 = 302;
    pub(crate) const ENGINECFG_WORKSPACE_SIZE: i32 = 303;
    pub(crate) const ENGINECFG_SHARED_MEMORY_USED: i32 = 304;
    pub(crate) const PLAN_HANDLE: i32 = 400;
    pub(crate) const PLAN_ENGINE_CONFIG: i32 = 401;
    pub(crate) const PLAN_WORKSPACE_SIZE: i32 = 402;
    pub(crate) const PLAN_JSON: i32 = 405;
    pub(crate) const OPERATIONGRAPH_OPS: i32 = 801;
    pub(crate) const TENSOR_BYTE_ALIGNMENT: i32 = 900;
    pub(crate) const TENSOR_DATA_TYPE: i32 = 901;
    pub(crate) const TENSOR_DIMENSIONS: i32 = 902;
    pub(crate) const TENSOR_STRIDES: i32 = 903;
    pub(crate) const TENSOR_UNIQUE_ID: i32 = 906;
    pub(crate) const TENSOR_IS_VIRTUAL: i32 = 907;
    pub(crate) const TENSOR_IS_BY_VALUE: i32 = 908;
    pub(crate) const TENSOR_RAGGED_OFFSET: i32 = 913;
    pub(crate) const PACK_UNIQUE_IDS: i32 = 1000;
    pub(crate) const PACK_DATA_POINTERS: i32 = 1001;
    pub(crate) const PACK_WORKSPACE: i32 = 1003;
    pub(crate) const ENGINE_OPERATION_GRAPH: i32 = 1300;
    pub(crate) const ENGINE_GLOBAL_INDEX: i32 = 1301;
    pub(crate) const ENGINE_NUMERICAL_NOTE: i32 = 1303;
    pub(crate) const ENGINE_BEHAVIOR_NOTE: i32 = 1305;
    pub(crate) const DEVICEPROP_JSON: i32 = 2702;
}

/// Types of attributes' elements.
pub(crate) mod ty {
    pub(crate) const INT64: i32 = 3;
    pub(crate) const DESCRIPTOR: i32 = 15;
    pub(crate) const INT32: i32 = 23;
    pub(crate) const CHAR: i32 = 24;
    /// Types of eight bytes, and of one; all others are an int's four.
    pub(super) const WIDE: [i32; 5] = [0, INT64, 5, 6, DESCRIPTOR];
    pub(super) const NARROW: [i32; 2] = [2, CHAR];
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Open,
    Final,
    Destroyed,
}

struct Attribute {
    name: i32,
    ty: i32,
    bytes: Vec<u8>,
}

/// What a variant pack names.
#[derive(Default)]
pub(crate) struct Pack {
    pub(crate) uids: Vec<i64>,
    pub(crate) pointers: Vec<u64>,
    pub(crate) workspace: u64,
    /// Bytes of each number, 0 for device memory.
    pub(crate) number_bytes: Vec<u8>,
    /// The plan that all of it was found to fit, and how often memory had been freed by then.
    pub(crate) fits: Option<(usize, u64)>,
}

/// A descriptor. One that is destroyed stays, so that whoever uses it after that is told.
pub(crate) struct Node {
    pub(crate) kind: i32,
    turn: u64,
    pub(crate) state: State,
    attributes: Vec<Attribute>,
    /// Of graphs, and of whatever is made of one.
    pub(crate) graph: Option<Arc<Graph>>,
    pub(crate) pack: Pack,
    /// Of tensors.
    tensor: Option<Tensor>,
}

impl Node {
    pub(crate) fn create(kind: i32) -> *mut Node {
        let turn = record::created(kind);
        let node = Node { kind, turn, state: State::Open, attributes: Vec::new(), graph: None, pack: Pack::default(), tensor: None };
        Box::into_raw(Box::new(node))
    }

    pub(crate) fn destroy(&mut self) -> c_int {
        if self.state == State::Destroyed {
            return refuse(BAD_PARAM, format!("a descriptor of kind {} is destroyed twice", self.kind));
        }
        record::destroyed(self.kind, self.turn);
        self.state = State::Destroyed;
        (self.attributes, self.graph, self.pack, self.tensor) = (Vec::new(), None, Pack::default(), None);
        0
    }

    /// Made by the library and not by its caller.
    pub(crate) fn give(&mut self, graph: Option<Arc<Graph>>) {
        (self.graph, self.state) = (graph, State::Final);
    }

    /// # Safety
    /// `elements` points to `count` elements of that type.
    pub(crate) unsafe fn set(&mut self, name: i32, ty: i32, count: i64, elements: *const c_void) -> c_int {
        if self.state != State::Open {
            return refuse(BAD_PARAM, format!("attribute {name} is set on a descriptor of kind {} that is not open", self.kind));
        }
        let Ok(count) = usize::try_from(count) else { return refuse(BAD_PARAM, format!("{count} elements")) };
        let width = if ty::WIDE.contains(&ty) {
            8
        } else if ty::NARROW.contains(&ty) {
            1
        } else {
            4
        };
        let mut bytes = vec![0; count * width];
        if !bytes.is_empty() {
            // SAFETY: the caller's.
            unsafe { std::ptr::copy_nonoverlapping(elements.cast(), bytes.as_mut_ptr(), bytes.len()) };
        }
        self.attributes.retain(|a| a.name != name);
        self.attributes.push(Attribute { name, ty, bytes });
        0
    }

    fn bytes(&self, name: i32) -> &[u8] {
        self.attributes.iter().find(|a| a.name == name).map_or(&[], |a| &a.bytes)
    }

    fn wide(&self, name: i32) -> Vec<i64> {
        self.bytes(name).chunks_exact(8).map(|b| i64::from_ne_bytes(std::array::from_fn(|n| b[n]))).collect()
    }

    fn is_set(&self, name: i32) -> bool {
        self.attributes.iter().any(|a| a.name == name)
    }

    pub(crate) fn text(&self, name: i32) -> String {
        String::from_utf8_lossy(self.bytes(name)).into_owned()
    }

    /// The descriptors that an attribute refers to.
    fn others(&self, name: i32) -> Vec<&Node> {
        // SAFETY: attributes of this type hold pointers that `create` made, and nodes are never freed.
        self.wide(name).into_iter().map(|raw| unsafe { &*std::ptr::with_exposed_provenance::<Node>(raw as usize) }).collect()
    }

    fn all_others(&self) -> Vec<&Node> {
        let names = self.attributes.iter().filter(|a| a.ty == ty::DESCRIPTOR).map(|a| a.name);
        names.flat_map(|name| self.others(name)).collect()
    }

    /// An integer that was set, for whoever reads it back.
    pub(crate) fn number(&self, name: i32) -> Option<i64> {
        self.wide(name).first().copied()
    }

    pub(crate) fn finalize(&mut self) -> c_int {
        if self.state != State::Open {
            return refuse(BAD_PARAM, format!("a descriptor of kind {} is finalized, and not open", self.kind));
        }
        if let Some(other) = self.all_others().iter().find(|o| o.state != State::Final) {
            return refuse(NOT_FINALIZED, format!("kind {} refers to one of kind {} that is not final", self.kind, other.kind));
        }
        let status = match self.kind {
            kind::TENSOR => self.finalize_tensor(),
            kind::OPERATIONGRAPH => self.finalize_graph(),
            kind::ENGINEHEUR => self.take_graph(attribute::ENGINEHEUR_OPERATION_GRAPH),
            kind::ENGINE => self.take_graph(attribute::ENGINE_OPERATION_GRAPH),
            kind::ENGINECFG => self.take_graph(attribute::ENGINECFG_ENGINE),
            kind::EXECUTION_PLAN => self.finalize_plan(),
            kind::VARIANT_PACK => self.finalize_pack(),
            _ => 0,
        };
        if status == 0 {
            self.state = State::Final;
        }
        status
    }

    fn take_graph(&mut self, from: i32) -> c_int {
        self.graph = self.others(from).first().and_then(|node| node.graph.clone());
        if self.graph.is_some() { 0 } else { refuse(BAD_PARAM, format!("kind {} has no graph by attribute {from}", self.kind)) }
    }

    fn finalize_tensor(&mut self) -> c_int {
        let code = self.bytes(attribute::TENSOR_DATA_TYPE).first().copied().unwrap_or(u8::MAX);
        let (dims, strides) = (self.wide(attribute::TENSOR_DIMENSIONS), self.wide(attribute::TENSOR_STRIDES));
        let flag = |name| self.bytes(name).first().is_some_and(|&b| b != 0);
        let (is_virtual, by_value) = (flag(attribute::TENSOR_IS_VIRTUAL), flag(attribute::TENSOR_IS_BY_VALUE));
        let uid = self.number(attribute::TENSOR_UNIQUE_ID);
        let alignment = self.number(attribute::TENSOR_BYTE_ALIGNMENT);
        // Where packed entries begin and end, offsets say.
        let dims = if self.is_set(attribute::TENSOR_RAGGED_OFFSET) { vec![1; dims.len()] } else { dims };
        match Tensor::new(uid, code, [&dims, &strides], alignment, is_virtual, by_value) {
            Ok(tensor) => {
                self.tensor = Some(tensor);
                0
            }
            Err(what) => refuse(BAD_PARAM, what),
        }
    }

    fn finalize_graph(&mut self) -> c_int {
        let operations = self.others(attribute::OPERATIONGRAPH_OPS);
        let mut tensors = Vec::new();
        let mut left = operations.clone();
        while let Some(node) = left.pop() {
            tensors.extend(node.tensor);
            left.extend(node.all_others());
        }
        let count = operations.len();
        match Graph::new(count, tensors) {
            Ok(graph) => {
                self.graph = Some(Arc::new(graph));
                0
            }
            Err(what) => refuse(BAD_PARAM, what),
        }
    }

    fn finalize_plan(&mut self) -> c_int {
        if self.is_set(attribute::PLAN_JSON) {
            self.graph = Graph::from_json(&self.text(attribute::PLAN_JSON)).map(Arc::new);
            return if self.graph.is_some() { 0 } else { refuse(BAD_PARAM, "not the JSON of a plan".to_owned()) };
        }
        if !self.is_set(attribute::PLAN_HANDLE) {
            return refuse(BAD_PARAM, "a plan without a handle".to_owned());
        }
        self.take_graph(attribute::PLAN_ENGINE_CONFIG)
    }

    fn finalize_pack(&mut self) -> c_int {
        let uids = self.wide(attribute::PACK_UNIQUE_IDS);
        let pointers: Vec<u64> = self.wide(attribute::PACK_DATA_POINTERS).into_iter().map(i64::cast_unsigned).collect();
        if uids.len() != pointers.len() {
            return refuse(BAD_PARAM, format!("{} ids and {} pointers", uids.len(), pointers.len()));
        }
        if let Some(twice) = uids.iter().enumerate().find(|(n, uid)| uids[..*n].contains(uid)) {
            return refuse(DUPLICATED, format!("the id {} is there twice", twice.1));
        }
        let workspace = self.number(attribute::PACK_WORKSPACE).unwrap_or(0).cast_unsigned();
        self.pack = Pack { uids, pointers, workspace, ..Pack::default() };
        0
    }
}

/// Refuses an attribute that cannot be read.
pub(crate) fn unreadable(node: &Node, name: i32) -> c_int {
    refuse(ATTRIBUTE_TYPE, format!("attribute {name} of a descriptor of kind {} cannot be read", node.kind))
}
