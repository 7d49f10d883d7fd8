//! The raw tier: attention over device memory that the caller answers for.
#![allow(unsafe_code)]

use super::guard;
use super::plan::{Planned, PlannedCopy};
use crate::error::{Error, SpecError, SpecErrors};
use crate::problem::{OPERANDS, Problem};
use crate::spec::TensorSpec;
use cudnn_graph::ir::Scalar;
use cudnn_graph::{Bindings, DeviceSlice, Handle};

/// Device memory and the scale of one forward call.
#[derive(Clone, Copy, Debug)]
pub struct DeviceForward {
    /// Queries, strided as the problem says.
    pub q: DeviceSlice,
    /// Keys.
    pub k: DeviceSlice,
    /// Values.
    pub v: DeviceSlice,
    /// Output.
    pub o: DeviceSlice,
    /// f32, (batch, heads_q, seq_q), dense, 16-byte aligned; there exactly when the problem asks for stats.
    pub stats: Option<DeviceSlice>,
    /// Multiplies the scores; positive. `None`: `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// At least [`Planned::workspace_bytes`], 256-byte aligned.
    pub workspace: DeviceSlice,
}

/// Pieces of the workspace begin at multiples of this.
const PIECE: u64 = 256;

fn tensor_bytes(problem: &Problem, tensor: &TensorSpec) -> u64 {
    let elements = u64::try_from(tensor.extent().unwrap_or(0)).unwrap_or(0);
    elements * u64::from(problem.dtype().bits() / 8)
}

impl Planned {
    /// Where each copied operand lies in the workspace, behind the plans' own scratch, and the end of it all.
    fn pieces(&self) -> (Vec<(usize, DeviceSlice)>, u64) {
        let plans = self.copies.iter().map(|c| &c.plan).chain([&self.plan]);
        let mut next = plans.map(|p| p.workspace_bytes()).max().unwrap_or(0).next_multiple_of(PIECE);
        let mut pieces = Vec::with_capacity(self.copies.len());
        for copy in &self.copies {
            let bytes = tensor_bytes(&self.problem, &self.problem.tensors()[copy.operand]);
            pieces.push((copy.operand, DeviceSlice { address: next, bytes }));
            next += bytes.next_multiple_of(PIECE);
        }
        (pieces, next)
    }

    /// Bytes of device memory that a call needs besides its operands: scratch of the plans, and room for copied operands.
    pub fn workspace_bytes(&self) -> u64 {
        if self.copies.is_empty() { self.plan.workspace_bytes() } else { self.pieces().1 }
    }

    /// Names of the operands that are copied because the engines cannot use them in place.
    pub fn copied(&self) -> Vec<&'static str> {
        self.copies.iter().map(PlannedCopy::name).collect()
    }

    /// Submits one forward pass to the handle's stream. Nothing waits.
    ///
    /// # Safety
    /// Until the stream has passed this call: every slice is device memory of the handle's device, really as large as said;
    /// `o`, `stats` and the workspace are not used by anything else; `q`, `k` and `v` are not written; `self` is not dropped.
    ///
    /// # Errors
    /// A scale that is not positive, stats missing or too many, slices that are too short or misaligned, all before anything
    /// runs; cuDNN's own.
    pub unsafe fn forward(&self, handle: &Handle, call: &DeviceForward) -> Result<(), Error> {
        let attn_scale = call.attn_scale.unwrap_or(self.problem.default_scale());
        guard::check_scale(attn_scale)?;
        let graph = &self.forward;
        let mut used = [call.q, call.k, call.v, call.o];
        if !self.copies.is_empty() {
            self.place(call.workspace, &mut used)?;
        }
        let ids = [graph.q, graph.k, graph.v, graph.o];
        let mut bindings = Bindings::new();
        for (id, slice) in ids.into_iter().zip(used) {
            bindings = bindings.slice(id, slice);
        }
        bindings = match (graph.stats, call.stats) {
            (Some(id), Some(slice)) => bindings.slice(id, slice),
            (None, None) => bindings,
            (Some(_), None) => return Err(one("stats", "absent", "the problem asks for stats")),
            (None, Some(_)) => return Err(one("stats", "given", "the problem does not ask for stats")),
        };
        bindings = bindings.value(graph.attn_scale, Scalar::F32(attn_scale));
        // What a caller got wrong shows before the first copy is submitted.
        if !self.copies.is_empty() {
            self.plan.check(&bindings, call.workspace)?;
        }
        let given = [call.q, call.k, call.v, call.o];
        for copy in self.copies.iter().filter(|c| c.name() != "o") {
            // SAFETY: the caller's; the pieces of the workspace do not overlap.
            unsafe { self.copy(handle, copy, given[copy.operand], used[copy.operand], call.workspace) }?;
        }
        // SAFETY: the caller's.
        unsafe { self.plan.execute(handle, &bindings, call.workspace) }?;
        for copy in self.copies.iter().filter(|c| c.name() == "o") {
            // SAFETY: the caller's.
            unsafe { self.copy(handle, copy, used[copy.operand], given[copy.operand], call.workspace) }?;
        }
        Ok(())
    }

    /// Puts copied operands where their pieces of the workspace are.
    fn place(&self, workspace: DeviceSlice, used: &mut [DeviceSlice; 4]) -> Result<(), Error> {
        let (pieces, end) = self.pieces();
        if workspace.bytes < end {
            return Err(one("workspace", workspace.bytes, &format!("at least {end} bytes")));
        }
        if !workspace.address.is_multiple_of(PIECE) {
            return Err(one("workspace", format!("{:#x}", workspace.address), &format!("a multiple of {PIECE} bytes")));
        }
        for (operand, piece) in pieces {
            used[operand] = DeviceSlice { address: workspace.address + piece.address, bytes: piece.bytes };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Planned::forward`].
    unsafe fn copy(
        &self,
        handle: &Handle,
        planned: &PlannedCopy,
        from: DeviceSlice,
        to: DeviceSlice,
        workspace: DeviceSlice,
    ) -> Result<(), Error> {
        let copy = &planned.copy;
        for n in 0..copy.repeats {
            let at = |slice: DeviceSlice, step: u64| DeviceSlice {
                address: slice.address + n * step,
                bytes: slice.bytes.saturating_sub(n * step),
            };
            let bindings = Bindings::new().slice(copy.from, at(from, copy.from_step)).slice(copy.to, at(to, copy.to_step));
            // SAFETY: the caller's.
            unsafe { planned.plan.execute(handle, &bindings, workspace) }?;
        }
        Ok(())
    }
}

fn one(field: &str, value: impl std::fmt::Display, rule: &str) -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new(field, value, rule)]))
}

/// Number of operands, which the arrays here are as long as.
const _: () = assert!(OPERANDS.len() == 4);
