//! The intermediate representation: tensors, and ops that read and write them.
//!
//! `Graph` (append-only, anything goes) → [`verify`] → [`Verified`] (owns the graph) → encode, interpret, print.
//! Nothing in here knows that cuDNN exists as a library.
//!
//! Ops are kept exactly as they were written. Graphs are not hash-consed and nothing is simplified: cuDNN's engines
//! match the very ops, so a duplicate index generator or a multiplication by 1.0 can be what a kernel is found by.

mod blocks;
mod build;
mod float;
pub mod interp;
pub mod op;
pub mod operands;
pub mod pointwise;
mod print;
pub(crate) mod shape;
pub mod tensor;
pub mod ty;
pub mod verify;

pub use op::Op;
pub use pointwise::Mode;
pub use tensor::{Ragged, Reordering, Scalar, Storage, Tensor, TensorId};
pub use verify::{Verified, VerifyError, VerifyErrors};

use serde::{Deserialize, Serialize};

/// Tensors and ops, in the order in which they were made. [`Graph::verify`] says whether they make sense.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) ops: Vec<Op>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// Every tensor; a [`TensorId`] is its place.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Every op, producers before consumers once verified.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Tensors whose contents say where ops read and write, each once: see [`Op::addressing`], and offsets of ragged tensors.
    pub fn addressing(&self) -> Vec<TensorId> {
        let offsets = self.tensors.iter().filter_map(|t| t.ragged.map(|r| r.offsets));
        let mut all: Vec<TensorId> = self.ops.iter().flat_map(Op::addressing).chain(offsets).collect();
        all.sort();
        all.dedup();
        all
    }

    /// The tensor behind an id, or `None` for an id of another graph.
    pub fn get(&self, id: TensorId) -> Option<&Tensor> {
        self.tensors.get(id.index())
    }

    /// Ids of all tensors, in order.
    pub fn ids(&self) -> impl Iterator<Item = TensorId> + use<> {
        (0..self.tensors.len() as u32).map(TensorId)
    }

    /// The tensor that a caller binds under `name`.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.ids().find(|id| {
            let tensor = &self.tensors[id.index()];
            tensor.name == name && (tensor.is_device() || tensor.storage == Storage::ByValue(None))
        })
    }
}
