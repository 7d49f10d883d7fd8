//! The raw tier: attention over device memory that the caller answers for.
#![allow(unsafe_code)]

use super::guard;
use super::plan::Planned;
use super::sum::{self, Room};
use crate::error::{Error, SpecError, SpecErrors};
use crate::lower::{Copy, Operand, Supply};
use crate::params;
use cudnn_graph::expr::{Declared, Place, Precision, Trace};
use cudnn_graph::ir::{Scalar, TensorId};
use cudnn_graph::{Bindings, Buffer, DType, DeviceSlice, Handle, Plan, Stream};
use std::sync::Arc;

/// A declared parameter in one call.
#[derive(Clone, Copy, Debug)]
pub struct DeviceParam<'a> {
    /// The name that it was declared by.
    pub name: &'a str,
    /// Its value.
    pub value: DeviceValue,
}

/// The value of a parameter.
#[derive(Clone, Copy, Debug)]
pub enum DeviceValue {
    /// For a scalar.
    Scalar(f32),
    /// For a tensor: dense, of this element type, 16-byte aligned. A truth value is a byte, 0 or 1.
    Tensor(DType, DeviceSlice),
    /// The same of lengths (`seq_len_q`, `seq_len_kv`), of which the caller promises that each lies between 0 and the extent of its axis:
    /// from cuDNN 9.26 on nothing is spent on clamping them. **A length that breaks the promise has results written past the end of `stats`
    /// and of gradients.**
    WithinExtent(DType, DeviceSlice),
}

impl DeviceValue {
    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<(DType, DeviceSlice)> {
        match *self {
            DeviceValue::Scalar(_) => None,
            DeviceValue::Tensor(dtype, slice) | DeviceValue::WithinExtent(dtype, slice) => Some((dtype, slice)),
        }
    }

    fn is_within_extent(&self) -> bool {
        match self {
            DeviceValue::Scalar(_) | DeviceValue::Tensor(..) => false,
            DeviceValue::WithinExtent(..) => true,
        }
    }
}

/// The parameters of a call, with the defaults of the scalars that it does not name.
pub fn with_defaults<'a>(declared: &'a [Declared], mut given: Vec<DeviceParam<'a>>) -> Vec<DeviceParam<'a>> {
    for p in declared {
        if let Some(default) = p.default.filter(|_| given.iter().all(|g| g.name != p.name)) {
            given.push(DeviceParam { name: &p.name, value: DeviceValue::Scalar(default) });
        }
    }
    given
}

/// The gradient of a declared parameter.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGradient<'a> {
    /// The name of the parameter.
    pub name: &'a str,
    /// Dense, of the element type that the problem asks for, 16-byte aligned.
    pub slice: DeviceSlice,
}

/// Device memory and numbers of one forward call.
#[derive(Clone, Copy, Debug)]
pub struct DeviceForward<'a> {
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
    /// Values of declared parameters, every one: plans are shared by specifications that differ in defaults alone. See
    /// [`with_defaults`].
    pub params: &'a [DeviceParam<'a>],
    /// At least [`Planned::workspace_bytes`], 256-byte aligned. `None`: memory that is kept for calls of this thread on this stream.
    pub workspace: Option<DeviceSlice>,
}

/// Device memory and numbers of one backward call.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBackward<'a> {
    /// Queries, strided as the problem says.
    pub q: DeviceSlice,
    /// Keys.
    pub k: DeviceSlice,
    /// Values.
    pub v: DeviceSlice,
    /// Output of the forward pass.
    pub o: DeviceSlice,
    /// f32, (batch, heads_q, seq_q), dense, 16-byte aligned: the forward pass's.
    pub stats: DeviceSlice,
    /// Gradient of the output.
    pub d_o: DeviceSlice,
    /// Gradient of the queries.
    pub dq: DeviceSlice,
    /// Gradient of the keys.
    pub dk: DeviceSlice,
    /// Gradient of the values.
    pub dv: DeviceSlice,
    /// The scale of the forward pass.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters, every one, those of the forward pass.
    pub params: &'a [DeviceParam<'a>],
    /// Gradients of declared parameters: each that the problem asks for, once.
    pub gradients: &'a [DeviceGradient<'a>],
    /// At least [`Planned::workspace_bytes`], 256-byte aligned. `None`: memory that is kept for calls of this thread on this stream.
    pub workspace: Option<DeviceSlice>,
}

/// Either call.
struct Call<'a> {
    operands: [Option<DeviceSlice>; 8],
    stats: Option<DeviceSlice>,
    attn_scale: Option<f32>,
    params: &'a [DeviceParam<'a>],
    gradients: &'a [DeviceGradient<'a>],
    workspace: DeviceSlice,
}

impl Call<'_> {
    fn operand(&self, operand: Operand) -> Result<DeviceSlice, Error> {
        self.operands[operand as usize].ok_or_else(|| one(operand.name(), "absent", "an operand of the pass"))
    }
}

/// Pieces of the workspace begin at multiples of this.
const PIECE: u64 = 256;

/// What lies in the workspace behind the plans' own scratch.
struct Pieces {
    copied: Vec<(Operand, DeviceSlice)>,
    scratch: Vec<(TensorId, DeviceSlice)>,
    sums: Vec<Room>,
    end: u64,
}

/// The sums of one gradient, bound.
struct SumCalls<'a> {
    plans: Vec<(&'a Plan, Bindings)>,
    result: DeviceSlice,
    gradient: DeviceSlice,
}

impl Planned {
    /// Offsets from the beginning of the workspace.
    fn pieces(&self) -> Pieces {
        let mut next = self.plans().map(|p| p.workspace_bytes()).max().unwrap_or(0).next_multiple_of(PIECE);
        let mut take = |bytes: u64| {
            let piece = DeviceSlice { address: next, bytes };
            next += bytes.next_multiple_of(PIECE);
            piece
        };
        let copied = self.copies.iter().map(|c| {
            let tensor = self.lowered.operand(c.operand);
            (c.operand, take(tensor.map_or(0, |id| self.lowered.bytes(id))))
        });
        let copied = copied.collect();
        let mut scratch = Vec::new();
        for (id, supply) in &self.lowered.supplies {
            match supply {
                Supply::Scratch | Supply::Spread { .. } | Supply::Guarded(_) | Supply::Terms { .. } => {
                    scratch.push((*id, take(self.lowered.bytes(*id))))
                }
                Supply::Number(_) | Supply::Param(_) | Supply::Table(_) | Supply::Gradient(_) => {}
            }
        }
        let sums = self.sums.iter().map(|sums| sums.room(&mut take)).collect();
        Pieces { copied, scratch, sums, end: next }
    }

    /// Whether calls need nothing of the workspace but the plan's own scratch.
    fn is_simple(&self) -> bool {
        let takes_room = |s: &Supply| matches!(s, Supply::Scratch | Supply::Spread { .. } | Supply::Guarded(_) | Supply::Terms { .. });
        self.copies.is_empty() && !self.lowered.supplies.iter().any(|(_, s)| takes_room(s))
    }

    /// Bytes of device memory that a call needs besides its operands: scratch of the plans, and room for copied operands.
    pub fn workspace_bytes(&self) -> u64 {
        if self.is_simple() { self.plan.workspace_bytes() } else { self.pieces().end }
    }

    /// Names of the operands that are copied because the engines cannot use them in place.
    pub fn copied(&self) -> Vec<&'static str> {
        self.copies.iter().map(|c| c.operand.name()).collect()
    }

    /// Puts the tables of the graph into device memory, and waits for that.
    ///
    /// # Errors
    /// The environment's.
    pub fn upload_tables(&mut self, stream: &Stream) -> Result<(), Error> {
        for (_, supply) in &self.lowered.supplies {
            let Supply::Table(table) = supply else { continue };
            let mut buffer = Buffer::new(stream.device(), usize::try_from(table.bytes()).unwrap_or(usize::MAX))?;
            match table {
                crate::lower::Table::F32(x) => buffer.upload(stream, 0, x)?,
                crate::lower::Table::I32(x) => buffer.upload(stream, 0, x)?,
            }
            self.tables.push(Arc::new(buffer));
        }
        for (step, _) in self.sums.iter().flat_map(|sums| &sums.steps) {
            self.tables.push(Arc::new(sum::ones(step, stream)?));
        }
        stream.synchronize()?;
        Ok(())
    }

    /// Submits one forward pass to the handle's stream. Nothing waits.
    ///
    /// # Safety
    /// Until the stream has passed this call: every slice is device memory of the handle's device, really as large as said; lengths are what
    /// [`DeviceValue::WithinExtent`] says of them; `o`, `stats` and the workspace are not used by anything else; `q`, `k`, `v` and parameters are not written. `self` may go:
    /// what the device needs of it stays until it is done, and until a graph that this call was captured into is gone.
    ///
    /// # Errors
    /// A scale that is not positive, stats missing or too many, parameters missing, unknown, doubled or of another type, slices
    /// that are too short or misaligned, all before anything runs; cuDNN's own.
    pub unsafe fn forward(&self, handle: &Handle<'_>, call: &DeviceForward<'_>) -> Result<(), Error> {
        match (call.stats, self.job.problem().stats()) {
            (Some(_), true) | (None, false) => {}
            (None, true) => return Err(one("stats", "absent", "the problem asks for stats")),
            (Some(_), false) => return Err(one("stats", "given", "the problem does not ask for stats")),
        }
        let call = Call {
            operands: [Some(call.q), Some(call.k), Some(call.v), Some(call.o), None, None, None, None],
            stats: call.stats,
            attn_scale: call.attn_scale,
            params: call.params,
            gradients: &[],
            workspace: self.workspace(handle, call.workspace)?,
        };
        // SAFETY: the caller's.
        unsafe { self.submit(handle, &call) }
    }

    /// Submits one backward pass to the handle's stream. Nothing waits.
    ///
    /// # Safety
    /// Until the stream has passed this call: every slice is device memory of the handle's device, really as large as said;
    /// gradients and the workspace are not used by anything else; what is read is not written. `self` may go, as there.
    ///
    /// # Errors
    /// As [`Planned::forward`], and for gradients of parameters.
    pub unsafe fn backward(&self, handle: &Handle<'_>, call: &DeviceBackward<'_>) -> Result<(), Error> {
        let operands = [call.q, call.k, call.v, call.o, call.d_o, call.dq, call.dk, call.dv].map(Some);
        let call = Call {
            operands,
            stats: Some(call.stats),
            attn_scale: call.attn_scale,
            params: call.params,
            gradients: call.gradients,
            workspace: self.workspace(handle, call.workspace)?,
        };
        // SAFETY: the caller's.
        unsafe { self.submit(handle, &call) }
    }

    /// # Safety
    /// As [`Planned::forward`] and [`Planned::backward`].
    unsafe fn submit(&self, handle: &Handle<'_>, call: &Call<'_>) -> Result<(), Error> {
        self.plan.check_device(handle.device())?;
        let attn_scale = call.attn_scale.unwrap_or(self.job.problem().default_scale());
        guard::check_scale(attn_scale)?;
        if !call.workspace.address.is_multiple_of(PIECE) {
            return Err(one("workspace", format!("{:#x}", call.workspace.address), &format!("a multiple of {PIECE} bytes")));
        }
        let simple = self.is_simple();
        let pieces = if simple { None } else { Some(self.place(call.workspace)?) };
        let mut bindings = Bindings::new();
        bindings.push_value(self.lowered.attn_scale, Scalar::F32(attn_scale));
        for &(operand, id) in &self.lowered.operands {
            let copied = pieces.as_ref().and_then(|p| p.copied.iter().find(|(o, _)| *o == operand));
            bindings.push_slice(id, copied.map_or_else(|| call.operand(operand), |(_, slice)| Ok(*slice))?);
        }
        if let (Some(id), Some(slice)) = (self.lowered.stats, call.stats) {
            bindings.push_slice(id, slice);
        }
        if let Some(pieces) = &pieces {
            for (id, slice) in &pieces.scratch {
                bindings.push_slice(*id, self.promised(call, *id).unwrap_or(*slice));
            }
        }
        if !self.lowered.supplies.is_empty() || !call.params.is_empty() {
            self.supply(call, &mut bindings)?;
        }
        if !simple {
            // What a caller got wrong shows before the first copy is submitted.
            self.plan.check(&bindings, call.workspace)?;
        }
        let sums = pieces.as_ref().map_or_else(|| Ok(Vec::new()), |pieces| self.sum_calls(call, pieces))?;
        let copies = pieces.as_ref().map_or_else(|| Ok(Vec::new()), |pieces| self.copy_calls(call, pieces))?;
        self.noting_use(handle, || {
            for copy in copies.iter().filter(|c| !c.after) {
                // SAFETY: the caller's; the pieces of the workspace do not overlap.
                unsafe { copy.run(handle, call.workspace) }?;
            }
            // SAFETY: the caller's.
            unsafe { self.plan.execute(handle, &bindings, call.workspace) }?;
            for sum in &sums {
                for (plan, bindings) in &sum.plans {
                    // SAFETY: the caller's; the pieces of the workspace do not overlap.
                    unsafe { plan.execute(handle, bindings, call.workspace) }?;
                }
                // SAFETY: the caller's; the result lies in the workspace.
                unsafe { handle.copy(sum.result, sum.gradient) }?;
            }
            for copy in copies.iter().filter(|c| c.after) {
                // SAFETY: the caller's.
                unsafe { copy.run(handle, call.workspace) }?;
            }
            Ok(())
        })
    }

    /// The caller's workspace, or that of the calls of this thread on the handle's stream.
    fn workspace(&self, handle: &Handle<'_>, given: Option<DeviceSlice>) -> Result<DeviceSlice, Error> {
        given.map_or_else(|| Ok(handle.workspace(self.workspace_bytes())?), Ok)
    }

    /// The caller's own lengths in place of clamped ones, where they are promised to need no clamping and engines nothing else.
    fn promised(&self, call: &Call<'_>, tensor: TensorId) -> Option<DeviceSlice> {
        let supply = self.lowered.supplies.iter().find(|(id, _)| *id == tensor).map(|(_, supply)| supply)?;
        let guarded = match supply {
            Supply::Guarded(guarded) if !guarded.keyless => guarded,
            Supply::Guarded(_)
            | Supply::Number(_)
            | Supply::Param(_)
            | Supply::Spread { .. }
            | Supply::Table(_)
            | Supply::Scratch
            | Supply::Gradient(_)
            | Supply::Terms { .. } => return None,
        };
        let [name] = guarded.params() else { return None };
        let value = call.params.iter().find(|p| p.name == *name)?.value;
        value.tensor().filter(|_| value.is_within_extent()).map(|(_, slice)| slice)
    }

    /// Conversions and copies, seen to fit, in the order of their submission but for the attention between them.
    fn copy_calls(&self, call: &Call<'_>, pieces: &Pieces) -> Result<Vec<CopyCall<'_>>, Error> {
        let mut all = Vec::with_capacity(self.conversions.len() + self.copies.len());
        for conversion in self.conversions.iter().filter(|c| self.promised(call, c.tensor).is_none()) {
            let given = |name: &String| Some(call.params.iter().find(|p| p.name == *name)?.value.tensor()?.1);
            let mut from = conversion.names.iter().filter_map(given);
            let to = pieces.scratch.iter().find(|(id, _)| *id == conversion.tensor).map(|(_, slice)| *slice);
            // Parameters have been checked.
            let (Some(first), Some(to)) = (from.next(), to) else { continue };
            let (copy, plan) = (&conversion.copy, &*conversion.plan);
            let copy = CopyCall { copy, plan, ends: [first, to], second: from.next(), after: false };
            copy.check(&format!("parameter {}", conversion.names.join(" or ")), call.workspace)?;
            all.push(copy);
        }
        for planned in &self.copies {
            let given = call.operand(planned.operand)?;
            let used = pieces.copied.iter().find(|(o, _)| *o == planned.operand).map_or(given, |(_, slice)| *slice);
            let after = self.job.writes(planned.operand);
            let ends = if after { [used, given] } else { [given, used] };
            let copy = CopyCall { copy: &planned.copy, plan: &planned.plan, ends, second: None, after };
            copy.check(planned.operand.name(), call.workspace)?;
            all.push(copy);
        }
        Ok(all)
    }

    /// The sums that follow the attention plan, seen to fit, each gradient's with where its result is and where it goes.
    fn sum_calls(&self, call: &Call<'_>, pieces: &Pieces) -> Result<Vec<SumCalls<'_>>, Error> {
        let read = self.lowered.supplies.iter().filter(|(_, s)| matches!(s, Supply::Table(_))).count();
        let steps = self.sums.iter().map(|s| s.steps.len()).sum::<usize>();
        if self.tables.len() != read + steps {
            return Err(no_tables());
        }
        let mut ones = self.tables[read..].iter().map(|table| slice_of(table));
        let mut all = Vec::new();
        for (sums, room) in self.sums.iter().zip(&pieces.sums) {
            let terms = pieces.scratch.iter().find(|(id, _)| *id == sums.tensor).map(|(_, slice)| *slice);
            let gradient = call.gradients.iter().find(|g| g.name == sums.name).map(|g| g.slice);
            // Gradients have been checked.
            let (Some(terms), Some(gradient)) = (terms, gradient) else { continue };
            let plans = sums.calls(terms, *room, &mut ones);
            plans.iter().try_for_each(|(plan, bindings)| plan.check(bindings, call.workspace))?;
            if gradient.bytes < room.rounded.bytes {
                let rule = format!("at least {} bytes", room.rounded.bytes);
                return Err(one(&format!("gradient of {}", sums.name), gradient.bytes, &rule));
            }
            all.push(SumCalls { plans, result: room.rounded, gradient: DeviceSlice { bytes: room.rounded.bytes, ..gradient } });
        }
        Ok(all)
    }

    /// Binds parameters, tables and gradients, once all of them are known to be right.
    fn supply(&self, call: &Call<'_>, bindings: &mut Bindings) -> Result<(), Error> {
        let values = self.check_params(call)?;
        let mut tables = self.tables.iter();
        for (id, supply) in &self.lowered.supplies {
            match supply {
                Supply::Number(trace) => bindings.push_value(*id, number(trace, &values)),
                // What is not there was said already.
                Supply::Param(name) => {
                    if let Some((_, slice)) = call.params.iter().find(|p| p.name == name).and_then(|p| p.value.tensor()) {
                        bindings.push_slice(*id, slice);
                    }
                }
                Supply::Table(_) => match tables.next() {
                    Some(buffer) => bindings.push_slice(*id, slice_of(buffer)),
                    None => return Err(no_tables()),
                },
                Supply::Gradient(name) => {
                    if let Some(g) = call.gradients.iter().find(|g| g.name == name) {
                        bindings.push_slice(*id, g.slice);
                    }
                }
                Supply::Scratch | Supply::Spread { .. } | Supply::Guarded(_) | Supply::Terms { .. } => {}
            }
        }
        Ok(())
    }

    /// The scalars by name, once everything about parameters and their gradients is right.
    fn check_params<'a>(&'a self, call: &Call<'_>) -> Result<Vec<(&'a str, f32)>, SpecErrors> {
        let given = call.params.iter().map(|p| match p.value {
            DeviceValue::Scalar(x) => (p.name, params::Given::Scalar(x)),
            DeviceValue::Tensor(dtype, slice) | DeviceValue::WithinExtent(dtype, slice) => {
                (p.name, params::Given::Tensor { dtype, elements: slice.bytes * 8 / u64::from(dtype.bits()) })
            }
        });
        let given: Vec<_> = given.collect();
        let extents = self.job.problem().extents();
        // Plans are shared by specifications that differ in defaults: no default is known here.
        let declared: Vec<Declared> = self.job.params().iter().map(|p| Declared { default: None, ..p.clone() }).collect();
        let mut errors = params::check(&declared, extents, &given, true).err().map_or_else(Vec::new, |e| e.0);
        let wanted: Vec<&str> = self.lowered.supplies.iter().filter_map(|(_, s)| gradient_name(s)).collect();
        for (n, g) in call.gradients.iter().enumerate() {
            if !wanted.contains(&g.name) || call.gradients[..n].iter().any(|before| before.name == g.name) {
                errors.push(SpecError::new(format!("gradient of {}", g.name), "given", "once, and only where the problem asks for it"));
            }
        }
        for name in wanted.iter().filter(|name| call.gradients.iter().all(|g| g.name != **name)) {
            errors.push(SpecError::new(format!("gradient of {name}"), "absent", "the problem asks for it"));
        }
        if !errors.is_empty() {
            return Err(SpecErrors(errors));
        }
        let scalar = |p: &DeviceParam<'_>| match p.value {
            DeviceValue::Scalar(x) => Some(x),
            DeviceValue::Tensor(..) | DeviceValue::WithinExtent(..) => None,
        };
        let value = |name: &str| call.params.iter().find(|p| p.name == name).and_then(scalar);
        Ok(self.job.params().iter().filter_map(|p| Some((p.name.as_str(), value(&p.name)?))).collect())
    }

    /// The pieces of this workspace.
    fn place(&self, workspace: DeviceSlice) -> Result<Pieces, Error> {
        let mut pieces = self.pieces();
        if workspace.bytes < pieces.end {
            return Err(one("workspace", workspace.bytes, &format!("at least {} bytes", pieces.end)));
        }
        pieces.copied.iter_mut().for_each(|(_, slice)| slice.address += workspace.address);
        pieces.scratch.iter_mut().for_each(|(_, slice)| slice.address += workspace.address);
        for room in &mut pieces.sums {
            room.between.address += workspace.address;
            room.result.address += workspace.address;
            room.rounded.address += workspace.address;
        }
        Ok(pieces)
    }
}

/// A copy with where it reads and writes.
struct CopyCall<'a> {
    copy: &'a Copy,
    plan: &'a Plan,
    ends: [DeviceSlice; 2],
    second: Option<DeviceSlice>,
    /// Whether it comes after the attention.
    after: bool,
}

impl CopyCall<'_> {
    /// What the `n`th run reads and writes, and where the latter is.
    fn bindings(&self, n: u64) -> (Bindings, DeviceSlice) {
        let copy = self.copy;
        let at = |slice: DeviceSlice, step: u64| {
            let bytes = slice.bytes.saturating_sub(n * step);
            DeviceSlice { address: slice.address.saturating_add(n * step), bytes }
        };
        let [from, to] = [at(self.ends[0], copy.from_step), at(self.ends[1], copy.to_step)];
        let mut bindings = Bindings::new().slice(copy.from, from).slice(copy.to, to);
        if let (Some(id), Some(slice)) = (copy.second, self.second) {
            bindings = bindings.slice(id, slice);
        }
        if let Some(zeros) = copy.zeros {
            bindings = bindings.slice(zeros, to);
        }
        (bindings, to)
    }

    /// The last run reaches furthest; steps keep what the first one is aligned to.
    fn check(&self, what: &str, workspace: DeviceSlice) -> Result<(), Error> {
        for n in [0, self.copy.repeats.saturating_sub(1)] {
            let checked = self.plan.check(&self.bindings(n).0, workspace);
            checked.map_err(|e| one(what, "what is bound", &format!("memory that its copy can use: {e}")))?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Planned::forward`].
    unsafe fn run(&self, handle: &Handle<'_>, workspace: DeviceSlice) -> Result<(), Error> {
        for n in 0..self.copy.repeats {
            let (bindings, to) = self.bindings(n);
            if self.copy.zeros.is_some() {
                // SAFETY: the caller's; what is written here is written once more by the copy.
                unsafe { handle.zero(to) }?;
            }
            // SAFETY: the caller's.
            unsafe { self.plan.execute(handle, &bindings, workspace) }?;
        }
        Ok(())
    }
}

fn no_tables() -> Error {
    one("tables", "absent", "Planned::upload_tables puts them into device memory")
}

fn slice_of(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

fn gradient_name(supply: &Supply) -> Option<&str> {
    match supply {
        Supply::Gradient(name) | Supply::Terms { name, dims: _ } => Some(name),
        Supply::Number(_) | Supply::Param(_) | Supply::Spread { .. } | Supply::Guarded(_) | Supply::Table(_) | Supply::Scratch => None,
    }
}

/// A function of declared scalars.
fn number(trace: &Trace, scalars: &[(&str, f32)]) -> Scalar {
    let value = |name: &str| scalars.iter().find(|(n, _)| *n == name).map_or(f64::NAN, |(_, x)| f64::from(*x));
    let values: Vec<f64> = trace.params().iter().map(|p| value(&p.name)).collect();
    let at = Place { score: 0.0, upstream: 0.0, index: [0; 4], extents: [0; 4], params: &values };
    let root = trace.roots()[0];
    let x = trace.eval(&at, Precision::F32)[0];
    match trace.ty(root) {
        cudnn_graph::expr::Type::F32 => Scalar::F32(x as f32),
        cudnn_graph::expr::Type::I32 | cudnn_graph::expr::Type::Bool => Scalar::I32(x as i32),
    }
}

fn one(field: &str, value: impl std::fmt::Display, rule: &str) -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new(field, value, rule)]))
}
