//! Binds one call to a schedule: a device address for each slot and a value for each scalar.

use super::plan::Planned;
use super::raw::{DeviceCall, DeviceParam, DeviceValue};
use super::schedule::{Argument, Number, PIECE, Slot, SlotId, Source};
use super::unsupported;
use crate::error::Error;
use crate::lower::Job;
use cudnn_graph::DeviceSlice;
use cudnn_graph::ir::Scalar;
use sdpa_core::error::{SpecError, SpecErrors};
use sdpa_core::expr::{Declared, ParamKind, Place, Precision, Type};
use sdpa_core::{Amax, DType};
use sdpa_core::{Operand, Side, Statistic, TensorSpec, packed, params};
use smallvec::SmallVec;

/// The kind of value that a declared parameter accepts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Takes {
    Scalar,
    /// A tensor of this element type and at least this many bytes.
    Tensor(DType, u64),
}

impl Takes {
    pub(super) fn of(declared: &Declared, extents: [i64; 4]) -> Takes {
        match declared.kind {
            ParamKind::Scalar => Takes::Scalar,
            ParamKind::Tensor { axes: _, dtype } => Takes::Tensor(dtype, dtype.bytes(params::elements(declared, extents).unsigned_abs())),
        }
    }

    fn takes(self, value: &DeviceValue) -> bool {
        match (self, value) {
            (Takes::Scalar, DeviceValue::Scalar(x)) => !x.is_nan(),
            (Takes::Tensor(dtype, bytes), DeviceValue::Tensor(given, slice) | DeviceValue::WithinExtent(given, slice)) => {
                dtype == *given && slice.bytes >= bytes
            }
            (Takes::Scalar, DeviceValue::Tensor(..) | DeviceValue::WithinExtent(..)) | (Takes::Tensor(..), DeviceValue::Scalar(_)) => false,
        }
    }
}

/// The addresses and values of a call that passed every check.
pub(super) struct Bound {
    addresses: SmallVec<[u64; 32]>,
    /// Values by the index of the declared parameter.
    params: SmallVec<[DeviceValue; 8]>,
    scale: f32,
    /// Tokens of queries and of keys that the memory of a packed call holds.
    tokens: [i64; 2],
}

impl Bound {
    pub(super) fn new(scale: f32) -> Bound {
        Bound { addresses: SmallVec::new(), params: SmallVec::new(), scale, tokens: [0; 2] }
    }

    pub(super) fn address(&self, slot: SlotId) -> u64 {
        self.addresses[slot.0]
    }

    /// Returns whether the caller promised that all of these parameters are within their extents. The kernel that clamps them is skipped then.
    pub(super) fn spares(&self, params: &[usize]) -> bool {
        !params.is_empty() && params.iter().all(|&at| self.params[at].is_within_extent())
    }

    pub(super) fn argument(&self, argument: Argument) -> u64 {
        match argument {
            Argument::Slot(slot) => self.address(slot),
            Argument::Tokens(side) => self.tokens[side as usize].unsigned_abs(),
            Argument::Fixed(x) => x as u64,
        }
    }

    fn scalar(&self, param: usize) -> f32 {
        match self.params[param] {
            DeviceValue::Scalar(x) => x,
            DeviceValue::Tensor(..) | DeviceValue::WithinExtent(..) => f32::NAN,
        }
    }

    pub(super) fn number(&self, number: &Number) -> Scalar {
        match number {
            Number::Scale => Scalar::F32(self.scale),
            Number::Fixed(value) => *value,
            Number::Param(at) => Scalar::F32(self.scalar(*at)),
            Number::Of(trace, params) => {
                let values: SmallVec<[f64; 8]> = params.iter().map(|&at| f64::from(self.scalar(at))).collect();
                let at = Place { score: 0.0, upstream: 0.0, index: [0; 4], extents: [0; 4], params: &values };
                let x = trace.eval_first(&at, Precision::F32);
                match trace.roots().first().map(|root| trace.ty(*root)) {
                    Some(Type::I32 | Type::Bool) => Scalar::I32(x as i32),
                    Some(Type::F32) | None => Scalar::F32(x as f32),
                }
            }
        }
    }
}

impl Planned {
    /// Fills `bound`, which is empty, in place: it is too large to be returned by value.
    ///
    /// # Errors
    /// Returns every mistake in the call.
    pub(super) fn bind(&self, call: &DeviceCall<'_>, workspace: DeviceSlice, bound: &mut Bound) -> Result<(), Error> {
        self.bind_right(call, workspace, bound).ok_or_else(|| self.mistakes(call, workspace))
    }

    fn has(&self, operand: Operand) -> bool {
        operand.written(self.job.direction()).is_some()
    }

    fn takes(&self, statistic: Statistic) -> bool {
        match &self.job {
            Job::Forward(problem) => problem.computes(statistic),
            Job::Backward(_) => statistic == Statistic::Stats,
        }
    }

    fn told(&self) -> &'static [Amax] {
        Amax::told(self.job.problem(), self.job.direction())
    }

    pub(super) fn scale(&self, call: &DeviceCall<'_>) -> f32 {
        call.attn_scale.unwrap_or_else(|| self.job.problem().default_scale())
    }

    /// Names of declared parameters are unique. If the counts agree and each declared name is found, no other parameter was passed.
    fn bind_right(&self, call: &DeviceCall<'_>, workspace: DeviceSlice, bound: &mut Bound) -> Option<()> {
        let complete = call.params.len() == self.takes.len()
            && call.gradients.len() == self.schedule.gradients().len()
            && call.amax.len() == self.told().len()
            && self.tables.len() == self.schedule.tables().len()
            && self.kernels.is_some() == self.launches
            && Statistic::ALL.into_iter().all(|statistic| call.statistic(statistic).is_some() == self.takes(statistic))
            && Operand::ALL.into_iter().all(|operand| call.operand(operand).is_some() == self.has(operand));
        let holds = workspace.address.is_multiple_of(PIECE) && workspace.bytes >= self.workspace_bytes();
        if !complete || !holds || unsupported::check_scale(bound.scale).is_err() {
            return None;
        }
        if self.launches {
            bound.tokens = self.tokens(call);
        }
        for (n, (declared, takes)) in self.job.params().iter().zip(&self.takes).enumerate() {
            let named = |p: &&DeviceParam<'_>| p.name == declared.name;
            let given = call.params.get(n).filter(named).or_else(|| call.params.iter().find(named))?;
            if !takes.takes(&given.value) {
                return None;
            }
            bound.params.push(given.value);
        }
        for slot in self.schedule.slots() {
            let (address, mine) = match self.of_caller(call, slot, |at| bound.params.get(at).copied()) {
                Some(slice) => (slice.address, fits(slot, slice)),
                None => (self.own(workspace, slot.source)?, true),
            };
            if !mine {
                return None;
            }
            bound.addresses.push(address);
        }
        Some(())
    }

    /// Returns how many query and key tokens all operands and row statistics of a packed call can hold.
    #[inline(never)]
    fn tokens(&self, call: &DeviceCall<'_>) -> [i64; 2] {
        let problem = self.job.problem();
        let Some(packed) = problem.packed() else { return [0; 2] };
        let mut tokens = Side::ALL.map(|side| problem.total(side));
        let hold =
            |tensor: &TensorSpec, dtype: DType, slice: DeviceSlice| packed::tokens(tensor, slice.bytes * 8 / u64::from(dtype.bits()));
        for (operand, tensor) in self.job.tensors().filter(|(operand, _)| problem.packs(operand.side())) {
            if let Some(slice) = call.operand(operand) {
                let least = &mut tokens[operand.side() as usize];
                *least = hold(&tensor, self.job.dtype_of(operand), slice).min(*least);
            }
        }
        for slice in Statistic::ALL.into_iter().filter_map(|statistic| call.statistic(statistic)) {
            tokens[0] = hold(&problem.stats_tensor(), DType::F32, slice).min(tokens[0]);
        }
        let least = tokens[0].min(tokens[1]);
        if packed.cross { tokens } else { [least; 2] }
    }

    /// Returns the caller's memory for a slot, if the slot belongs to the caller and the call passes memory for it.
    fn of_caller(&self, call: &DeviceCall<'_>, slot: &Slot, param: impl Fn(usize) -> Option<DeviceValue>) -> Option<DeviceSlice> {
        match slot.source {
            Source::Operand(operand) => call.operand(operand),
            Source::Rows(operand, offset) => call
                .operand(operand)
                .map(|whole| DeviceSlice { address: whole.address + offset, bytes: whole.bytes.saturating_sub(offset) }),
            Source::Statistic(statistic) => call.statistic(statistic),
            Source::Param(at) => Some(param(at)?.tensor()?.1),
            Source::Gradient(at) => {
                let name = &self.schedule.gradients()[at];
                call.gradients.iter().find(|g| g.name == name).map(|g| g.slice)
            }
            Source::Amax(which) => call.amax.iter().find(|amax| amax.of == which).map(|amax| amax.slice),
            Source::Lengths { offset: _, param: at } => {
                let value = param(at?)?;
                value.tensor().filter(|_| value.is_within_extent()).map(|(_, slice)| slice)
            }
            Source::Table(_) | Source::Scratch(_) => None,
        }
    }

    /// Returns the address of a slot that does not belong to the caller.
    fn own(&self, workspace: DeviceSlice, source: Source) -> Option<u64> {
        match source {
            Source::Table(at) => Some(self.tables.get(at)?.address()),
            Source::Scratch(offset) | Source::Lengths { offset, param: _ } => Some(workspace.address + self.base + offset),
            Source::Operand(_) | Source::Rows(..) | Source::Statistic(_) | Source::Param(_) | Source::Gradient(_) | Source::Amax(_) => None,
        }
    }

    #[cold]
    fn mistakes(&self, call: &DeviceCall<'_>, workspace: DeviceSlice) -> Error {
        let mut errors = unsupported::check_scale(self.scale(call)).err().map_or_else(Vec::new, |e| e.0);
        let unlike = |statistic: Statistic| statistic.unlike(call.statistic(statistic).is_some(), self.takes(statistic));
        errors.extend(Statistic::ALL.into_iter().filter_map(unlike));
        errors.extend(self.wrong_params(call));
        let gradients: Vec<&str> = call.gradients.iter().map(|g| g.name).collect();
        errors.extend(params::check_gradients(self.schedule.gradients().iter().map(String::as_str), &gradients));
        errors.extend(Amax::check(self.job.problem(), self.job.direction(), call.amax.iter().map(|amax| amax.of)));
        for operand in Operand::ALL {
            match (call.operand(operand), self.has(operand)) {
                (Some(_), true) | (None, false) => {}
                (None, true) => errors.push(SpecError::new(operand.name(), "nothing", "memory: it is an operand of the pass")),
                (Some(_), false) => {
                    errors.push(SpecError::new(operand.name(), "memory", format!("none: it is no operand of the {} pass", self.job.name())))
                }
            }
        }
        let named = |at: usize| {
            let name = &self.job.params().get(at)?.name;
            call.params.iter().find(|p| p.name == name).map(|p| p.value)
        };
        for slot in self.schedule.slots() {
            // Skip wrong lengths of parameters here: `wrong_params` already reports them, in elements instead of bytes.
            let is_param = matches!(slot.source, Source::Param(_));
            if let Some(slice) = self.of_caller(call, slot, named) {
                errors.extend(misfits(slot, slice).into_iter().filter(|e| !(is_param && e.field.ends_with("length"))));
            }
        }
        let (address, bytes, need) = (workspace.address, workspace.bytes, self.workspace_bytes());
        if !address.is_multiple_of(PIECE) {
            errors.push(SpecError::new("workspace address", format!("{address:#x}"), format!("a multiple of {PIECE} bytes")));
        }
        if bytes < need {
            errors.push(SpecError::new("workspace length", format!("{bytes} bytes"), format!("at least {need} bytes")));
        }
        if self.tables.len() != self.schedule.tables().len() || self.kernels.is_some() != self.launches {
            errors.push(SpecError::new("tables", "nothing", "the plan's tables and kernels; call Planned::upload_tables first"));
        }
        if errors.is_empty() {
            Error::Bug("the checks of a call refused it, and none named a mistake".to_owned())
        } else {
            Error::Spec(SpecErrors(errors))
        }
    }

    fn wrong_params(&self, call: &DeviceCall<'_>) -> Vec<SpecError> {
        let given = call.params.iter().map(|p| match p.value {
            DeviceValue::Scalar(x) => (p.name, params::Supplied::Scalar(x)),
            DeviceValue::Tensor(dtype, slice) | DeviceValue::WithinExtent(dtype, slice) => {
                (p.name, params::Supplied::Tensor { dtype, elements: slice.bytes * 8 / u64::from(dtype.bits()) })
            }
        });
        let given: Vec<_> = given.collect();
        // Specifications that differ only in defaults share one plan, so a plan keeps no defaults.
        let declared: Vec<Declared> = self.job.params().iter().map(|p| Declared { default: None, ..p.clone() }).collect();
        params::check(&declared, self.job.problem().extents(), &given, true).err().map_or_else(Vec::new, |e| e.0)
    }
}

fn fits(slot: &Slot, slice: DeviceSlice) -> bool {
    slice.bytes >= slot.bytes && slice.address != 0 && slice.address & (u64::from(slot.alignment) - 1) == 0
}

/// Returns the mistakes in the caller's memory for a slot.
fn misfits(slot: &Slot, slice: DeviceSlice) -> Vec<SpecError> {
    let mut errors = Vec::new();
    if slice.bytes < slot.bytes {
        errors.push(SpecError::new(
            format!("{} length", slot.name),
            format!("{} bytes", slice.bytes),
            format!("at least {} bytes", slot.bytes),
        ));
    }
    if slice.address == 0 || !slice.address.is_multiple_of(u64::from(slot.alignment)) {
        let rule = format!("a multiple of {} bytes, and not 0", slot.alignment);
        errors.push(SpecError::new(format!("{} address", slot.name), format!("{:#x}", slice.address), rule));
    }
    errors
}
