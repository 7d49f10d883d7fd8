//! Parts of a problem over memory of the emulated driver, which is the host's, on the CPU executor.
#![allow(unsafe_code, reason = "addresses of the emulated driver are those of this process")]

use sdpa::cpu::CpuExecutor;
use sdpa::device::{DeviceCall, DevicePrepared, DeviceValue, OnDevice};
use sdpa::distributed::Planner;
use sdpa::half::{bf16, f16};
use sdpa::nvidia::{DeviceSlice, Stream};
use sdpa::{
    BackwardProblem, DType, Elements, ElementsMut, Error, Executor, HostBackward, HostForward, HostGradient, Operand, Param, ParamValue,
    Prepared, PreparedBackward, Problem,
};
use std::sync::Arc;

/// Plans every part for the CPU.
#[derive(Debug)]
pub(crate) struct OnCpu;

#[derive(Debug)]
struct Part {
    dtype: DType,
    /// The names and types of gradients of parameters.
    wrt: Vec<(String, DType)>,
    pass: Pass,
}

#[derive(Debug)]
enum Pass {
    Forward(Arc<dyn Prepared>),
    Backward(Arc<dyn PreparedBackward>),
}

impl Planner for OnCpu {
    fn plan(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        let prepared = CpuExecutor::default().prepare(problem)?;
        Ok(Arc::new(Part { dtype: problem.dtype(), wrt: Vec::new(), pass: Pass::Forward(prepared) }))
    }

    fn plan_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        let prepared = CpuExecutor::default().prepare_backward(problem)?;
        let wrt = problem.wrt().iter().map(|g| (g.name.clone(), g.dtype)).collect();
        Ok(Arc::new(Part { dtype: problem.forward().dtype(), wrt, pass: Pass::Backward(prepared) }))
    }

    fn ordinal(&self) -> Result<u32, Error> {
        Ok(0)
    }
}

/// Returns the memory of a slice.
///
/// # Safety
/// The slice is live memory of the emulated driver, initialised as `T`, that nothing writes while the result is used.
unsafe fn read<'a, T>(slice: DeviceSlice) -> &'a [T] {
    let at = std::ptr::with_exposed_provenance(slice.address as usize);
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts(at, slice.bytes as usize / size_of::<T>()) }
}

/// # Safety
/// As [`read`], and nothing else uses the memory.
unsafe fn write<'a, T>(slice: DeviceSlice) -> &'a mut [T] {
    let at = std::ptr::with_exposed_provenance_mut(slice.address as usize);
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts_mut(at, slice.bytes as usize / size_of::<T>()) }
}

/// # Safety
/// As [`read`].
unsafe fn elements<'a>(slice: DeviceSlice, dtype: DType) -> Elements<'a> {
    // SAFETY: the caller's, here and below.
    unsafe {
        match dtype {
            DType::F16 => read::<f16>(slice).into(),
            DType::BF16 => read::<bf16>(slice).into(),
            DType::F32 => read::<f32>(slice).into(),
            DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => panic!("operands of {dtype}"),
        }
    }
}

/// # Safety
/// As [`write`].
unsafe fn elements_mut<'a>(slice: DeviceSlice, dtype: DType) -> ElementsMut<'a> {
    // SAFETY: the caller's, here and below.
    unsafe {
        match dtype {
            DType::F16 => write::<f16>(slice).into(),
            DType::BF16 => write::<bf16>(slice).into(),
            DType::F32 => write::<f32>(slice).into(),
            DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => panic!("results of {dtype}"),
        }
    }
}

/// # Safety
/// As [`read`].
unsafe fn value<'a>(value: DeviceValue<DeviceSlice>) -> ParamValue<'a> {
    let (dtype, slice) = match value {
        DeviceValue::Scalar(x) => return ParamValue::Scalar(x),
        DeviceValue::Tensor(dtype, slice) => (dtype, slice),
        DeviceValue::WithinExtent(dtype, _) => panic!("a promise for a part of the lengths, {dtype}"),
    };
    // SAFETY: the caller's, here and below.
    unsafe {
        match dtype {
            DType::F16 => read::<f16>(slice).into(),
            DType::BF16 => read::<bf16>(slice).into(),
            DType::F32 => read::<f32>(slice).into(),
            DType::I32 => read::<i32>(slice).into(),
            DType::I64 => read::<i64>(slice).into(),
            DType::Bool => read::<bool>(slice).into(),
            DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => panic!("a parameter of {dtype}"),
        }
    }
}

impl DevicePrepared for Part {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn workspace_bytes(&self) -> u64 {
        0
    }

    fn engine(&self) -> String {
        "the CPU, over memory of the emulated driver".to_owned()
    }

    unsafe fn submit(&self, stream: &Stream, call: &DeviceCall<'_, DeviceSlice>) -> Result<(), Error> {
        stream.synchronize().map_err(|error| Error::Bug(error.to_string()))?;
        let at = |operand: Operand| call.operand(operand).expect("an operand of the pass");
        // SAFETY: the caller vouches for every slice; the driver's memory is this process's.
        let params: Vec<Param<'_>> = call.params.iter().map(|p| Param::new(p.name, unsafe { value(p.value) })).collect();
        // SAFETY: as above.
        let input = |operand: Operand| unsafe { elements(at(operand), self.dtype) };
        // SAFETY: as above.
        let output = |operand: Operand| unsafe { elements_mut(at(operand), self.dtype) };
        match &self.pass {
            Pass::Forward(prepared) => {
                let host = HostForward::new(input(Operand::Q), input(Operand::K), input(Operand::V), output(Operand::O));
                // SAFETY: as above.
                let statistics = [call.stats, call.row_max, call.sum_exp].map(|slice| slice.map(|slice| unsafe { write(slice) }));
                prepared.forward(host.statistics(statistics).attn_scale(call.attn_scale).params(&params)).map(drop)
            }
            Pass::Backward(prepared) => {
                // SAFETY: as above.
                let stats: &[f32] = unsafe { read(call.stats.expect("the statistics of a backward pass")) };
                let [q, k, v, o, d_o] = [Operand::Q, Operand::K, Operand::V, Operand::O, Operand::DO].map(input);
                let [dq, dk, dv] = [Operand::DQ, Operand::DK, Operand::DV].map(output);
                let gradients = call.gradients.iter().map(|g| {
                    let (_, dtype) = self.wrt.iter().find(|(name, _)| name == g.name).expect("a gradient of the pass");
                    // SAFETY: as above.
                    HostGradient::new(g.name, unsafe { elements_mut(g.slice, *dtype) })
                });
                let host = HostBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).attn_scale(call.attn_scale);
                prepared.backward(host.params(&params).gradients(gradients)).map(drop)
            }
        }
    }
}
