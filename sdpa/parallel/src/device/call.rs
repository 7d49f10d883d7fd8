//! Checks of a call over device memory.

use crate::device::Call;
use crate::device::program::Program;
use crate::device::view::bytes;
use crate::problem::ParallelProblem;
use crate::schedule::{Pass, Role, Tensor};
use sdpa_core::DType;
use sdpa_core::device::DeviceValue;
use sdpa_core::error::{SpecError, SpecErrors};
use sdpa_core::expr::Declared;
use sdpa_core::packed::CU_SEQLENS;
use sdpa_core::params::{self, Supplied, check_gradients};
use sdpa_core::unpacked::PACKED_TENSORS;
use sdpa_nvidia::call::memory;

/// Returns every mistake in a call.
pub(super) fn check(problem: &ParallelProblem, rank: usize, program: Option<&Program>, call: &Call<'_>) -> Result<(), SpecErrors> {
    let (whole, mut errors) = (problem.problem(), Vec::new());
    let Some(program) = program else {
        let rule = "a problem with a backward pass: ParallelSpec::with_backward";
        return Err(SpecErrors(vec![SpecError::new("pass", "backward", rule)]));
    };
    for (tensor, slice) in &call.tensors {
        let local = problem.local(rank, *tensor);
        let (dtype, alignment) = if tensor.is_statistic() { (DType::F32, 16) } else { (whole.dtype(), local.alignment) };
        let elements = local.extent().unwrap_or(i64::MAX);
        if elements > 0 {
            memory(&mut errors, tensor.name(), *slice, bytes(dtype, elements), alignment.into());
        }
    }
    let outputs = program.schedule.slots.iter().filter(|slot| slot.role == Role::Output);
    let given = |tensor: Tensor| call.tensors.iter().any(|(own, _)| *own == tensor);
    for slot in outputs.clone().filter(|slot| !given(slot.tensor)) {
        errors.push(SpecError::new(slot.tensor.name(), "nothing", "memory: the problem computes it"));
    }
    for (tensor, _) in call.tensors.iter().filter(|(tensor, _)| call.pass == Pass::Forward && tensor.is_statistic()) {
        if !outputs.clone().any(|slot| slot.tensor == *tensor) {
            errors.push(SpecError::new(tensor.name(), "memory", "none: the problem does not compute it"));
        }
    }
    let scale = call.attn_scale.unwrap_or_else(|| whole.default_scale());
    if !scale.is_finite() {
        errors.push(SpecError::new("attn_scale", scale, "a finite number"));
    }
    let dense = problem.declared(call.pass);
    // The caller passes the offsets of packed sequences, from which kernels make the tensors of the dense problem.
    let offsets = problem.packed().into_iter().flat_map(|packed| packed.params()).filter(|p| p.name == CU_SEQLENS);
    let own = dense.iter().filter(|p| problem.packed().is_none() || !PACKED_TENSORS.contains(&p.name.as_str()));
    let declared: Vec<Declared> = own.chain(offsets).cloned().collect();
    let declared = &declared[..];
    let extents = problem.packed().map_or_else(|| whole.extents(), |packed| packed.extents());
    let mut supplied = Vec::new();
    for p in call.params {
        supplied.push(match p.value {
            DeviceValue::Scalar(x) => (p.name, Supplied::Scalar(x)),
            DeviceValue::Tensor(dtype, slice) | DeviceValue::WithinExtent(dtype, slice) => {
                (p.name, Supplied::Tensor { dtype, elements: slice.bytes * 8 / u64::from(dtype.bits()) })
            }
        });
        let has_elements = declared.iter().find(|d| d.name == p.name).is_none_or(|d| params::elements(d, extents) > 0);
        if let Some((_, slice)) = p.value.tensor().filter(|_| has_elements) {
            memory(&mut errors, &format!("parameter {}", p.name), slice, 0, 16);
        }
    }
    errors.extend(params::check(declared, extents, &supplied, true).err().into_iter().flat_map(|e| e.0));
    let wanted = if call.pass == Pass::Forward { &[][..] } else { &problem.spec().wrt[..] };
    let named: Vec<&str> = call.gradients.iter().map(|g| g.name).collect();
    errors.extend(check_gradients(wanted.iter().map(|g| g.name.as_str()), &named));
    for gradient in call.gradients {
        let dtype = wanted.iter().find(|g| g.name == gradient.name).map_or(DType::F32, |g| g.dtype);
        let elements = declared.iter().find(|d| d.name == gradient.name).map_or(0, |d| params::elements(d, extents));
        memory(&mut errors, &format!("gradient of {}", gradient.name), gradient.slice, bytes(dtype, elements), 16);
    }
    if errors.is_empty() { Ok(()) } else { Err(SpecErrors(errors)) }
}
