//! The intermediate representation: tensors, and ops that read and write them.
//!
//! `Graph` (append-only, unchecked) → [`verify`] → [`Verified`] (owns the graph) → encode, interpret, print. This module is independent of the cuDNN
//! library.
//!
//! Ops are kept exactly as written. Graphs are neither hash-consed nor simplified, because cuDNN's engines match exact ops. A duplicate index
//! generator or a multiplication by 1.0 may be part of a kernel's pattern.

mod blocks;
mod build;
pub(crate) mod float;
pub mod interp;
mod norms;
pub mod op;
pub mod operands;
pub mod pointwise;
mod print;
pub(crate) mod shape;
pub mod tensor;
pub mod ty;
pub mod verify;

pub use build::{
    BnFinalizeInputs, BnFinalizeOutputs, BnGradientInputs, BnGradients, NormGradientInputs, NormGradients, NormOutputs, RunningInputs,
};
pub use op::{BandSide, ConvGeometry, Distribution, NormMode, Op, ReductionMode, ResampleMode, ReshapeMode, Routing, Seed, Window};
pub use pointwise::Mode;
pub use tensor::{Ragged, Reordering, Scalar, Storage, Tensor, TensorId};
pub use verify::{Verified, VerifyError, VerifyErrors};

use serde::{Deserialize, Serialize};

/// Tensors and ops, in the order of creation. [`Graph::verify`] checks them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) ops: Vec<Op>,
}

impl Graph {
    /// Creates an empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// Returns every tensor, in the order of their [`TensorId`].
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns every op. In a verified graph each op comes after the ops whose results it reads.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Returns the tensors whose contents determine the addresses that ops access, each once: those of [`Op::addressing`], and the
    /// offsets of ragged tensors.
    pub fn addressing(&self) -> Vec<TensorId> {
        let offsets = self.tensors.iter().filter_map(|t| t.ragged.map(|r| r.offsets));
        let mut all: Vec<TensorId> = self.ops.iter().flat_map(Op::addressing).chain(offsets).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Returns the tensors that ops write, each once, including the ops of score graphs.
    pub fn written(&self) -> Vec<TensorId> {
        let inner = self.ops.iter().filter_map(Op::score).flat_map(|score| &score.ops);
        let mut all: Vec<TensorId> = self.ops.iter().chain(inner).flat_map(|op| op.operands().outputs).map(|o| o.tensor).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Returns the tensor of an id; `None` if the graph has no tensor of this id.
    pub fn get(&self, id: TensorId) -> Option<&Tensor> {
        self.tensors.get(id.index())
    }

    /// Iterates over the ids of all tensors, in order.
    pub fn ids(&self) -> impl Iterator<Item = TensorId> + use<> {
        (0..self.tensors.len() as u32).map(TensorId)
    }

    /// Returns the tensor that a caller binds under `name`; `None` if there is none.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.ids().find(|id| {
            let tensor = &self.tensors[id.index()];
            tensor.name == name && (tensor.is_device() || tensor.storage == Storage::ByValue(None))
        })
    }
}
