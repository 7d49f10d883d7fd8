//! Checks of a call over device memory against its problem.

use crate::job::Job;
use sdpa_core::GradientSpec;
use sdpa_core::device::{DeviceCall, DeviceValue};
use sdpa_core::error::{SpecError, SpecErrors};
use sdpa_core::params::{self, Supplied};
use sdpa_core::{Amax, DType, Operand, Statistic};
use sdpa_driver::DeviceSlice;
use smallvec::SmallVec;

/// Checks the memory of one tensor of a call, and adds what is wrong with it to `errors`.
pub fn memory(errors: &mut Vec<SpecError>, name: &str, slice: DeviceSlice, bytes: u64, alignment: u64) {
    if slice.bytes < bytes {
        errors.push(SpecError::new(format!("{name} length"), format!("{} bytes", slice.bytes), format!("at least {bytes} bytes")));
    }
    if slice.address == 0 || !slice.address.is_multiple_of(alignment) {
        let rule = format!("a multiple of {alignment} bytes, and not 0");
        errors.push(SpecError::new(format!("{name} address"), format!("{:#x}", slice.address), rule));
    }
}

/// Checks a call of a pass against its job: the problem and the direction. `workspace_bytes` is the size that the pass needs. Packed
/// operands and statistics may have memory for any number of tokens, because the pass accesses only tokens for which there is memory.
///
/// # Errors
/// Returns every mistake in the call:
/// - operands of the other pass
/// - row statistics, parameters and gradients that are missing, unknown, repeated or of another type
/// - memory that is too short or misaligned, or a workspace that is too small
/// - a scale that is not finite
pub fn check(job: &Job, call: &DeviceCall<'_, DeviceSlice>, workspace_bytes: u64) -> Result<(), SpecErrors> {
    let (problem, mut errors) = (job.problem(), Vec::new());
    for operand in Operand::ALL {
        let name = operand.name();
        match (call.operand(operand), job.in_memory(operand)) {
            // A tensor without elements needs no memory, and an allocator may give it the address 0.
            (Some(_), Some(tensor)) if tensor.is_empty() => {}
            (Some(slice), Some(tensor)) => {
                let packed = problem.packs(operand.side());
                let elements = if packed { 0 } else { tensor.extent().unwrap_or(i64::MAX).unsigned_abs() };
                let bytes = job.dtype_of(operand).bytes(elements);
                memory(&mut errors, name, slice, bytes, tensor.alignment.into());
            }
            (None, None) => {}
            (None, Some(_)) => errors.push(SpecError::new(name, "nothing", "memory: it is an operand of the pass")),
            (Some(_), None) => errors.push(SpecError::new(name, "memory", format!("none: it is no operand of the {} pass", job.name()))),
        }
    }
    for statistic in Statistic::ALL {
        let taken = match job {
            Job::Forward(problem) => problem.computes(statistic),
            Job::Backward(_) => statistic == Statistic::Stats,
        };
        errors.extend(statistic.unlike(call.statistic(statistic).is_some(), taken));
        let elements = if problem.packed().is_some() { 0 } else { problem.stats_elements().unsigned_abs() };
        let has_rows = problem.packed().is_some() || elements > 0;
        if let Some(slice) = call.statistic(statistic).filter(|_| taken && has_rows) {
            memory(&mut errors, statistic.name(), slice, DType::F32.bytes(elements), 16);
        }
    }
    // Inline storage: a valid call allocates nothing.
    let given: SmallVec<[(&str, Supplied); 8]> = call
        .params
        .iter()
        .map(|p| match p.value {
            DeviceValue::Scalar(x) => (p.name, Supplied::Scalar(x)),
            DeviceValue::Tensor(dtype, slice) | DeviceValue::WithinExtent(dtype, slice) => {
                (p.name, Supplied::Tensor { dtype, elements: slice.bytes * 8 / u64::from(dtype.bits()) })
            }
        })
        .collect();
    let has_elements = |name: &str| {
        let declared = job.params().iter().find(|p| p.name == name);
        declared.is_none_or(|p| params::elements(p, problem.extents()) > 0)
    };
    for p in call.params {
        let misplaced = |slice: &DeviceSlice| slice.address == 0 || !slice.address.is_multiple_of(16);
        if let Some((_, slice)) = p.value.tensor().filter(|(_, slice)| misplaced(slice) && has_elements(p.name)) {
            let rule = "a multiple of 16 bytes, and not 0";
            errors.push(SpecError::new(format!("parameter {} address", p.name), format!("{:#x}", slice.address), rule));
        }
    }
    errors.extend(params::check(job.params(), problem.extents(), &given, true).err().into_iter().flat_map(|e| e.0));
    // Specifications with different defaults share a plan, so the plan knows no default.
    let left = job.params().iter().filter(|p| p.default.is_some() && given.iter().all(|(name, _)| *name != p.name));
    errors.extend(left.map(|p| {
        SpecError::new(format!("parameter {}", p.name), "nothing", "a value: defaults do not apply to calls with tensors in device memory")
    }));
    let wanted: &[GradientSpec] = match job {
        Job::Forward(_) => &[],
        Job::Backward(backward) => backward.wrt(),
    };
    let gradients: SmallVec<[&str; 8]> = call.gradients.iter().map(|g| g.name).collect();
    errors.extend(params::check_gradients(wanted.iter().map(|g| g.name.as_str()), &gradients));
    errors.extend(Amax::check(problem, job.direction(), call.amax.iter().map(|amax| amax.of)));
    let scale = call.attn_scale.unwrap_or(problem.default_scale());
    if !scale.is_finite() {
        errors.push(SpecError::new("attn_scale", scale, "a finite number"));
    }
    if let Some(slice) = call.workspace.filter(|_| workspace_bytes > 0) {
        memory(&mut errors, "workspace", slice, workspace_bytes, 256);
    }
    if errors.is_empty() { Ok(()) } else { Err(SpecErrors(errors)) }
}
