//! Reads PyTorch tensors through the function table of DLPack's exchange API: one call, where attributes would take ten.
#![allow(unsafe_code)]

use crate::call::Value;
use crate::error::one;
use crate::plan::{Given, Plan};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyTuple, PyType};
use sdpa::DType;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// `DLTensor`.
#[repr(C)]
struct Seen {
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    dtype: Element,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Element {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// The beginning of `DLPackExchangeAPI`, major version 1.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    older: *const Table,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    see: Option<unsafe extern "C" fn(*mut c_void, *mut Seen) -> c_int>,
    stream: *const c_void,
}

impl Seen {
    fn address(&self) -> u64 {
        self.data.addr() as u64 + self.byte_offset
    }

    /// Returns the low bits of the address, which determine its alignment.
    fn low(&self) -> u8 {
        (self.address() & 15) as u8
    }

    fn axes(&self, of: *const i64) -> &[i64] {
        let n = usize::try_from(self.ndim).unwrap_or(0);
        if n == 0 || of.is_null() {
            return &[];
        }
        // SAFETY: the caller holds the tensor, which stores one number per axis there.
        unsafe { std::slice::from_raw_parts(of, n) }
    }

    fn dtype(&self) -> Option<DType> {
        let Element { code, bits, lanes: 1 } = self.dtype else { return None };
        match (code, bits) {
            (0, 32) => Some(DType::I32),
            (0, 64) => Some(DType::I64),
            (2, 16) => Some(DType::F16),
            (2, 32) => Some(DType::F32),
            (4, 16) => Some(DType::BF16),
            (6, 8) => Some(DType::Bool),
            _ => None,
        }
    }
}

/// A reader of PyTorch tensors. It reads tensors of the types with which it was created, and no others.
#[pyclass(frozen, module = "sdpa._native")]
#[derive(Debug)]
pub struct Exchange {
    see: unsafe extern "C" fn(*mut c_void, *mut Seen) -> c_int,
    plain: Vec<Py<PyType>>,
}

impl Exchange {
    fn see(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Seen> {
        let kind = tensor.get_type_ptr();
        if !self.plain.iter().any(|plain| plain.as_ptr().cast() == kind) {
            return Err(PyValueError::new_err("not a plain tensor"));
        }
        let null = std::ptr::null_mut();
        let dtype = Element { code: 0, bits: 0, lanes: 0 };
        let mut seen = Seen { data: null, device: [0; 2], ndim: 0, dtype, shape: null.cast(), strides: null.cast(), byte_offset: 0 };
        // SAFETY: the table belongs to the type, the object is one of that type, and the GIL is held.
        match unsafe { (self.see)(tensor.as_ptr().cast(), &raw mut seen) } {
            0 => Ok(seen),
            _ => Err(PyErr::fetch(tensor.py())),
        }
    }

    /// Returns the address of a tensor.
    fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.see(tensor).map(|seen| seen.address())
    }

    /// Returns the address, element type and number of elements of a tensor.
    fn value(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Value> {
        let seen = self.see(tensor)?;
        let dtype = seen.dtype().ok_or_else(|| one("parameter", "another element type", "one of f32, f16, bf16, i32, i64, bool"))?;
        let elements = usize::try_from(seen.axes(seen.shape).iter().product::<i64>()).unwrap_or(0);
        Ok(Value::Tensor { address: seen.address(), dtype, elements })
    }
}

#[pymethods]
impl Exchange {
    /// Takes the capsule of the type, and the types of the tensors to read.
    #[new]
    fn new(capsule: &Bound<'_, PyCapsule>, plain: Vec<Py<PyType>>) -> PyResult<Exchange> {
        let table: NonNull<Table> = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?.cast();
        // SAFETY: a capsule of this name holds such a table, which lives as long as the process.
        let (major, see) = unsafe { (table.as_ref().major, table.as_ref().see) };
        match see {
            Some(see) if major == 1 => Ok(Exchange { see, plain }),
            _ => Err(one("DLPack exchange API", format!("version {major}"), "version 1")),
        }
    }

    /// Returns everything that determines the plan of a call over these tensors, as bytes: types, devices, extents, strides, alignments, and whether gradients
    /// are required. Returns `None` if a tensor is not plain memory.
    fn look<'py>(&self, tensors: &Bound<'py, PyTuple>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let py = tensors.py();
        let mut bytes: Vec<u8> = Vec::with_capacity(96 * tensors.len());
        for tensor in tensors.iter_borrowed() {
            // Arrays, sparse and nested tensors, and those of transforms take another path, which supports or rejects them.
            let Ok(seen) = self.see(&tensor) else { return Ok(None) };
            if tensor.call_method0(pyo3::intern!(py, "is_neg"))?.is_truthy()? {
                return Ok(None);
            }
            let tracked = tensor.getattr(pyo3::intern!(py, "requires_grad"))?.is_truthy()?;
            let axes = u8::try_from(seen.ndim).unwrap_or(u8::MAX);
            bytes.extend([axes, u8::from(tracked), seen.low(), seen.dtype.code, seen.dtype.bits]);
            bytes.extend(seen.device.iter().flat_map(|n| n.to_ne_bytes()));
            bytes.extend(seen.axes(seen.shape).iter().chain(seen.axes(seen.strides)).flat_map(|n| n.to_ne_bytes()));
        }
        Ok(Some(PyBytes::new(py, &bytes)))
    }

    /// Runs a plan over tensors that `look` has read: operands in the order of the pass, stats, tensors, values of scalars, gradients; as `Plan.run`.
    #[pyo3(signature = (plan, operands, stats, params, scalars, gradients, scale, threads, stream, workspace))]
    #[allow(clippy::too_many_arguments, reason = "what Python passes by position, in the hot path")]
    fn run(
        &self,
        py: Python<'_>,
        plan: &Plan,
        operands: &Bound<'_, PyTuple>,
        stats: Option<&Bound<'_, PyAny>>,
        params: &Bound<'_, PyTuple>,
        scalars: Vec<f32>,
        gradients: &Bound<'_, PyTuple>,
        scale: Option<f32>,
        threads: usize,
        stream: u64,
        workspace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let all = |tensors: &Bound<'_, PyTuple>| tensors.iter_borrowed().map(|x| self.address(&x)).collect::<PyResult<Vec<u64>>>();
        let one = |tensor: Option<&Bound<'_, PyAny>>| tensor.map_or(Ok(0), |x| self.address(x));
        let params = params.iter_borrowed().map(|x| self.value(&x)).collect::<PyResult<_>>()?;
        let (operands, gradients, workspace) = (all(operands)?, all(gradients)?, one(workspace)?);
        let given = Given { operands: &operands, stats: one(stats)?, params, scalars, gradients: &gradients, scale };
        plan.start(py, given, threads, stream, workspace)
    }
}
