//! One call from Python: operands by address, in host memory or in device memory.
#![allow(unsafe_code)]

use crate::plan::Asked;
use half::{bf16, f16};
use sdpa::device::{DeviceCall, DeviceGradient, DeviceParam, DeviceValue};
use sdpa::nvidia::{Device, DevicePass, DeviceSlice, RawStream, Stream};
use sdpa::{
    BackwardProblem, DType, Elements, ElementsMut, Error, GradientSpec, HostBackward, HostForward, HostGradient, Operand, Param,
    ParamValue, Prepared, PreparedBackward, Problem, Report, SpecError, SpecErrors, TensorSpec,
};
use std::ffi::c_void;

/// The value of a declared parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Scalar(f32),
    Tensor { address: u64, dtype: DType, elements: usize },
}

/// The arguments of a call from Python. The caller keeps the tensors at these addresses alive, with the layout of the pass, and has
/// exclusive access to results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    /// Addresses of the operands in the order of the pass: `q k v o`, and then `d_o dq dk dv`.
    pub(crate) operands: &'a [u64],
    /// Numbers of elements of the operands and of stats.
    pub(crate) elements: (&'a [usize], usize),
    /// The address of stats. The maxima of rows and their sums of exponentials, if the pass has them, come after the stats in the same memory.
    pub(crate) stats: Option<u64>,
    pub(crate) values: &'a [(&'a str, Value)],
    /// Addresses of the gradients, in the order in which they were requested.
    pub(crate) gradients: &'a [u64],
    pub(crate) scale: Option<f32>,
}

fn wrong(field: &str, value: impl std::fmt::Display, rule: impl Into<String>) -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new(field, value, rule)]))
}

/// Returns an address as a pointer to elements of this size, or an error if it is null or misaligned.
fn pointer<T>(address: u64, elements: usize) -> Result<*mut T, Error> {
    if elements == 0 {
        return Ok(std::ptr::dangling_mut());
    }
    let at = usize::try_from(address).unwrap_or(0);
    if at == 0 || !at.is_multiple_of(align_of::<T>()) {
        return Err(wrong("address", format!("{address:#x}"), format!("a non-null address, a multiple of {}", align_of::<T>())));
    }
    Ok(at as *mut T)
}

fn read<'a, T>(address: u64, elements: usize) -> Result<&'a [T], Error> {
    let at = pointer::<T>(address, elements)?;
    // SAFETY: the caller keeps a tensor of `elements` elements alive during the call, and no thread writes to it.
    Ok(unsafe { std::slice::from_raw_parts(at, elements) })
}

fn write<'a, T>(address: u64, elements: usize) -> Result<&'a mut [T], Error> {
    let at = pointer::<T>(address, elements)?;
    // SAFETY: the caller allocated a tensor of `elements` elements for this call and does not share it. Every bit pattern is a valid number.
    Ok(unsafe { std::slice::from_raw_parts_mut(at, elements) })
}

fn not_a_float(dtype: DType) -> Error {
    wrong("dtype", dtype, "one of f32, f16, bf16")
}

fn elements<'a>(dtype: DType, address: u64, n: usize) -> Result<Elements<'a>, Error> {
    match dtype {
        DType::F32 => Ok(Elements::F32(read(address, n)?)),
        DType::F16 => Ok(Elements::F16(read::<f16>(address, n)?)),
        DType::BF16 => Ok(Elements::BF16(read::<bf16>(address, n)?)),
        DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => Err(not_a_float(dtype)),
    }
}

fn elements_mut<'a>(dtype: DType, address: u64, n: usize) -> Result<ElementsMut<'a>, Error> {
    match dtype {
        DType::F32 => Ok(ElementsMut::F32(write(address, n)?)),
        DType::F16 => Ok(ElementsMut::F16(write::<f16>(address, n)?)),
        DType::BF16 => Ok(ElementsMut::BF16(write::<bf16>(address, n)?)),
        DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => Err(not_a_float(dtype)),
    }
}

/// Returns booleans. They are read in place if every byte is 0 or 1, as in PyTorch and NumPy, and converted if a caller viewed other bytes as booleans.
fn truths(address: u64, n: usize, kept: &mut Vec<bool>) -> Result<&[bool], Error> {
    let bytes: &[u8] = read(address, n)?;
    if bytes.iter().fold(0, |all, byte| all | byte) <= 1 {
        // SAFETY: each byte is 0 or 1.
        return Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), n) });
    }
    kept.extend(bytes.iter().map(|&byte| byte != 0));
    Ok(kept)
}

/// Returns the number of elements that a tensor spans in memory.
pub(crate) fn length(tensor: &TensorSpec) -> usize {
    if tensor.dims.contains(&0) { 0 } else { usize::try_from(tensor.extent().unwrap_or(0)).unwrap_or(0) }
}

/// Operands in the order in which Python passes them.
pub(crate) const ORDER: [Operand; 8] = [Operand::Q, Operand::K, Operand::V, Operand::O, Operand::DO, Operand::DQ, Operand::DK, Operand::DV];

impl Call<'_> {
    /// Returns the address of an operand and its number of elements.
    fn operand(&self, n: usize) -> Result<(u64, usize), Error> {
        let there = self.operands.get(n).copied().zip(self.elements.0.get(n).copied());
        there.ok_or_else(|| wrong("operands", self.operands.len(), "an address for each operand of the pass"))
    }

    fn read(&self, dtype: DType, n: usize) -> Result<Elements<'_>, Error> {
        let (address, elements) = self.operand(n)?;
        self::elements(dtype, address, elements)
    }

    fn write(&self, dtype: DType, n: usize) -> Result<ElementsMut<'_>, Error> {
        let (address, elements) = self.operand(n)?;
        elements_mut(dtype, address, elements)
    }

    /// Returns the address of the maxima of rows, if the pass has them.
    fn row_max(&self, problem: &Problem) -> Option<u64> {
        self.stats.filter(|_| problem.row_max()).map(|address| address + DType::F32.bytes(self.elements.1 as u64))
    }

    /// Returns the address of the sums of exponentials of rows, if the pass has them. They come after the maxima in the same memory.
    fn sum_exp(&self, problem: &Problem) -> Option<u64> {
        self.stats.filter(|_| problem.sum_exp()).map(|address| address + 2 * DType::F32.bytes(self.elements.1 as u64))
    }

    fn with_params<R>(&self, run: impl FnOnce(&[Param<'_>]) -> Result<R, Error>) -> Result<R, Error> {
        let mut kept: Vec<Vec<bool>> = vec![Vec::new(); self.values.len()];
        let mut params: Vec<Param<'_>> = Vec::with_capacity(self.values.len());
        for ((name, value), kept) in self.values.iter().zip(&mut kept) {
            let value = match *value {
                Value::Scalar(x) => ParamValue::Scalar(x),
                Value::Tensor { address, dtype, elements } => match dtype {
                    DType::F32 => ParamValue::F32(read(address, elements)?),
                    DType::F16 => ParamValue::F16(read(address, elements)?),
                    DType::BF16 => ParamValue::BF16(read(address, elements)?),
                    DType::I32 => ParamValue::I32(read(address, elements)?),
                    DType::I64 => ParamValue::I64(read(address, elements)?),
                    DType::Bool => ParamValue::Bool(truths(address, elements, kept)?),
                    DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => return Err(not_a_float(dtype)),
                },
            };
            params.push(Param::new(name, value));
        }
        run(&params)
    }

    /// Runs a forward pass over host memory.
    pub(crate) fn forward(&self, problem: &Problem, prepared: &dyn Prepared) -> Result<Report, Error> {
        let dtype = problem.dtype();
        let rows = self.elements.1;
        self.with_params(|params| {
            prepared.forward(
                HostForward::new(self.read(dtype, 0)?, self.read(dtype, 1)?, self.read(dtype, 2)?, self.write(dtype, 3)?)
                    .statistics([
                        self.stats.map(|address| write(address, rows)).transpose()?,
                        self.row_max(problem).map(|address| write(address, rows)).transpose()?,
                        self.sum_exp(problem).map(|address| write(address, rows)).transpose()?,
                    ])
                    .attn_scale(self.scale)
                    .params(params),
            )
        })
    }

    /// Runs a backward pass over host memory.
    pub(crate) fn backward(&self, problem: &BackwardProblem, prepared: &dyn PreparedBackward) -> Result<Report, Error> {
        let dtype = problem.forward().dtype();
        let (at, to, rows) = (|n| self.read(dtype, n), |n| self.write(dtype, n), self.elements.1);
        let stats = self.stats.ok_or_else(|| wrong("stats", "nothing", "the stats of the forward pass"))?;
        self.with_params(|params| {
            let gradients = problem.wrt().iter().zip(self.gradients).map(|(g, &address)| {
                let n = usize::try_from(problem.gradient_elements(&g.name)).unwrap_or(0);
                Ok(HostGradient::new(&g.name, elements_mut(g.dtype, address, n)?))
            });
            prepared.backward(
                HostBackward::new((at(0)?, at(1)?, at(2)?), (at(3)?, read(stats, rows)?), at(4)?, (to(5)?, to(6)?, to(7)?))
                    .attn_scale(self.scale)
                    .params(params)
                    .gradients(gradients.collect::<Result<Vec<_>, Error>>()?),
            )
        })
    }

    /// Submits the call of a pass over device memory to a CUDA stream, without waiting.
    pub(crate) fn submit(
        &self,
        asked: &Asked,
        device: &'static Device,
        pass: &DevicePass,
        stream: u64,
        workspace: u64,
    ) -> Result<(), Error> {
        let (problem, backward) = match asked {
            Asked::Forward(problem) => (&**problem, None),
            Asked::Backward(problem) => (problem.forward(), Some(problem)),
        };
        let bytes = |dtype: DType, n: usize| dtype.bytes(n as u64);
        let mut operands: [Option<DeviceSlice>; Operand::ALL.len()] = [None; Operand::ALL.len()];
        for (n, operand) in ORDER.into_iter().enumerate().take(self.operands.len()) {
            let (address, elements) = self.operand(n)?;
            operands[operand as usize] = Some(DeviceSlice { address, bytes: bytes(problem.dtype(), elements) });
        }
        let params: Vec<DeviceParam<'_, DeviceSlice>> =
            self.values.iter().map(|(name, value)| DeviceParam::new(name, on_device(*value))).collect();
        let gradients: Vec<DeviceGradient<'_, DeviceSlice>> = backward.map_or_else(Vec::new, |problem| {
            let room = |(g, &address)| {
                let g: &GradientSpec = g;
                let n = usize::try_from(problem.gradient_elements(&g.name)).unwrap_or(0);
                DeviceSlice { address, bytes: bytes(g.dtype, n) }
            };
            let all = problem.wrt().iter().zip(self.gradients);
            all.map(|(g, address)| DeviceGradient::new(&g.name, room((g, address)))).collect()
        });
        let rows = self.elements.1;
        let call = DeviceCall {
            operands,
            stats: self.stats.map(|address| DeviceSlice { address, bytes: bytes(DType::F32, rows) }),
            row_max: self
                .row_max(problem)
                .filter(|_| backward.is_none())
                .map(|address| DeviceSlice { address, bytes: bytes(DType::F32, rows) }),
            sum_exp: self
                .sum_exp(problem)
                .filter(|_| backward.is_none())
                .map(|address| DeviceSlice { address, bytes: bytes(DType::F32, rows) }),
            amax: &[],
            attn_scale: self.scale,
            params: &params,
            gradients: &gradients,
            workspace: (workspace != 0).then_some(DeviceSlice { address: workspace, bytes: pass.workspace_bytes() }),
        };
        // SAFETY: PyTorch's current stream of this device outlives the call, because PyTorch frees no stream.
        let stream = unsafe { Stream::borrow(device, RawStream(stream as usize as *mut c_void)) };
        // SAFETY: the caller keeps the tensors alive, and PyTorch reuses their memory in stream order only. The results were allocated for this call.
        unsafe { pass.submit(&stream, &call) }
    }
}

fn on_device(value: Value) -> DeviceValue<DeviceSlice> {
    match value {
        Value::Scalar(x) => DeviceValue::Scalar(x),
        Value::Tensor { address, dtype, elements } => {
            DeviceValue::Tensor(dtype, DeviceSlice { address, bytes: dtype.bytes(elements as u64) })
        }
    }
}
