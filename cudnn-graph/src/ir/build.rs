//! The builder: each method appends an op and infers the type of its result. No method fails; for invalid operands it guesses a type, and `verify`
//! reports the mistake.

mod network;
mod other;

pub use network::{
    BnFinalizeInputs, BnFinalizeOutputs, BnGradientInputs, BnGradients, NormGradientInputs, NormGradients, NormOutputs, RunningInputs,
};

use super::Graph;
use super::op::{BandMask, BandSide, Matmul, Op, Pointwise, Reduction, ReductionMode, Reshape, ReshapeMode, Slice, Softmax, Transpose};
use super::pointwise::{Mode, Params, Signature};
use super::tensor::{Ragged, Scalar, Storage, Tensor, TensorId};
use super::ty::{DType, Dims, Strides};

impl Graph {
    /// Adds a tensor to the graph as it is, and returns its id.
    pub fn tensor(&mut self, tensor: Tensor) -> TensorId {
        self.tensors.push(tensor);
        TensorId(self.tensors.len() as u32 - 1)
    }

    /// Adds an op to the graph as it is.
    pub fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Adds a dense input in device memory, which callers bind under `name`.
    pub fn input(&mut self, name: &str, dtype: DType, dims: impl Into<Dims>) -> TensorId {
        self.tensor(Tensor::device(name, dtype, dims))
    }

    /// Adds a dense input in device memory whose channels, the second axis, are innermost (NHWC).
    pub fn input_channels_last(&mut self, name: &str, dtype: DType, dims: impl Into<Dims>) -> TensorId {
        self.tensor(Tensor::device(name, dtype, dims).channels_last())
    }

    /// Adds a scalar in host memory, of shape (1, 1, 1, 1), whose value is part of the graph. A pointwise op whose result has
    /// another rank receives a scalar of that rank.
    pub fn scalar(&mut self, value: Scalar) -> TensorId {
        let name = format!("scalar{}", self.tensors.len());
        self.tensor(Tensor::by_value(name, value.dtype(), Some(value), 4))
    }

    /// Adds a scalar in host memory, of shape (1, 1, 1, 1), that the caller supplies at each execution. If its first use is a pointwise op
    /// whose result has fewer axes, it receives that rank; its value for [`interp`](crate::ir::interp) then has the same rank.
    pub fn parameter(&mut self, name: &str, dtype: DType) -> TensorId {
        self.tensor(Tensor::by_value(name, dtype, None, 4))
    }

    /// Makes a result an output in device memory of type `dtype`, which callers bind under `name`.
    pub fn output(&mut self, id: TensorId, name: &str, dtype: DType) -> TensorId {
        if let Some(tensor) = self.tensors.get_mut(id.index()) {
            tensor.name = name.to_owned();
            tensor.dtype = dtype;
            tensor.storage = Storage::Device;
        }
        id
    }

    /// Changes the element type of a tensor, and returns its id.
    pub fn set_dtype(&mut self, id: TensorId, dtype: DType) -> TensorId {
        if let Some(tensor) = self.tensors.get_mut(id.index()) {
            tensor.dtype = dtype;
        }
        id
    }

    /// Changes the strides of a tensor, in elements, and returns its id.
    pub fn set_strides(&mut self, id: TensorId, strides: impl Into<Strides>) -> TensorId {
        if let Some(tensor) = self.tensors.get_mut(id.index()) {
            tensor.strides = strides.into();
        }
        id
    }

    /// Sets the ragged offsets of a tensor, which pack its batch entries contiguously, and returns its id. With `None`, the strides
    /// determine where batch entries are.
    pub fn set_ragged(&mut self, id: TensorId, ragged: Option<Ragged>) -> TensorId {
        if let Some(tensor) = self.tensors.get_mut(id.index()) {
            tensor.ragged = ragged;
        }
        id
    }

    /// Changes the alignment of a tensor's address, in bytes, and returns its id.
    pub fn set_alignment(&mut self, id: TensorId, bytes: u32) -> TensorId {
        if let Some(tensor) = self.tensors.get_mut(id.index()) {
            tensor.alignment = bytes;
        }
        id
    }

    /// Removes the ops from index `from` on and returns them, for use in an inner graph.
    pub fn take_ops(&mut self, from: usize) -> Vec<Op> {
        self.ops.split_off(from.min(self.ops.len()))
    }

    fn dims(&self, id: TensorId) -> Dims {
        self.get(id).map_or_else(|| Dims(vec![1]), |t| t.dims.clone())
    }

    /// Gives a result channels last strides if an operand has them.
    fn like_channels_last(&mut self, id: TensorId, channels_last: bool) {
        if channels_last && let Some(tensor) = self.tensors.get_mut(id.index()) {
            tensor.strides = tensor.dims.channels_last();
        }
    }

    /// Gives a tensor the strides of another one of the same extents.
    fn like_strides(&mut self, id: TensorId, like: TensorId) {
        let strides = self.get(like).map(|t| t.strides.clone());
        if let (Some(tensor), Some(strides)) = (self.tensors.get_mut(id.index()), strides) {
            tensor.strides = strides;
        }
    }

    fn is_channels_last(&self, id: TensorId) -> bool {
        self.get(id).is_some_and(Tensor::is_channels_last)
    }

    /// Adds the result of an op as a virtual tensor, which exists only inside the fused kernel. Its name consists of `op` and its number.
    pub fn result(&mut self, op: &str, dtype: DType, dims: Dims) -> TensorId {
        let name = format!("{op}{}", self.tensors.len());
        self.tensor(Tensor::virtual_(name, dtype, dims))
    }

    /// Adds `y = mode(inputs)` as an op in f32 arithmetic, and returns `y`; comparisons return booleans. The inputs are x, b and t in
    /// that order, or dy and x for backward modes.
    pub fn pointwise(&mut self, mode: Mode, inputs: &[TensorId]) -> TensorId {
        let (compute, dtype) = match mode.signature() {
            Signature::Compare | Signature::LogicalBinary | Signature::LogicalUnary => (DType::Bool, DType::Bool),
            Signature::Index => (DType::I32, DType::I32),
            Signature::Unary | Signature::Identity | Signature::Binary | Signature::Select | Signature::Backward => {
                (DType::F32, DType::F32)
            }
        };
        self.pointwise_as(mode, inputs, compute, dtype, Params::default())
    }

    /// Adds a pointwise operation like [`Graph::pointwise`], with the given compute type, result type and constants.
    pub fn pointwise_as(&mut self, mode: Mode, inputs: &[TensorId], compute: DType, dtype: DType, params: Params) -> TensorId {
        let tensors: Vec<&Tensor> = inputs.iter().filter_map(|&id| self.get(id)).collect();
        let scalars = tensors.iter().all(|t| t.is_scalar_value());
        // A scalar does not raise the rank of the result.
        let shaped = || tensors.iter().filter(|t| scalars || !t.is_scalar_value());
        let dims = shaped().map(|t| t.dims.clone()).reduce(|a, b| a.broadcast(&b).unwrap_or(a)).unwrap_or_else(|| Dims(vec![1]));
        let channels_last = shaped().any(|t| t.is_channels_last() && t.dims == dims);
        let rank = dims.rank();
        let y = self.result(mode.name(), dtype, dims);
        self.like_channels_last(y, channels_last);
        let inputs: Vec<TensorId> = if scalars { inputs.to_vec() } else { inputs.iter().map(|&id| self.with_rank(id, rank)).collect() };
        self.push_pointwise(mode, &inputs, y, compute, params);
        y
    }

    /// Adds `y = mode(inputs)` as an op in f32 arithmetic, where `y` is an existing tensor.
    pub fn pointwise_into(&mut self, mode: Mode, inputs: &[TensorId], y: TensorId) {
        self.push_pointwise(mode, inputs, y, DType::F32, Params::default());
    }

    /// Returns a scalar with as many axes as its op's result, which cuDNN requires: the scalar itself, which changes unless an op uses it
    /// already, or else a copy of it. A parameter cannot be copied, and keeps the rank of its first use.
    fn with_rank(&mut self, id: TensorId, rank: usize) -> TensorId {
        let used = self.ops.iter().any(|op| op.operands().inputs.iter().any(|operand| operand.tensor == id));
        let Some(tensor) = self.tensors.get_mut(id.index()) else { return id };
        let value = match tensor.storage {
            Storage::ByValue(value) => value,
            Storage::Constant(value) => Some(value),
            Storage::Device | Storage::Virtual => return id,
        };
        let have = tensor.dims.rank();
        if have == rank || (have < rank && value.is_none()) {
            return id;
        }
        let ones = Tensor { dims: Dims(vec![1; rank]), strides: Strides(vec![1; rank]), ..tensor.clone() };
        if !used {
            *tensor = ones;
            return id;
        }
        if value.is_none() {
            return id;
        }
        let name = format!("scalar{}", self.tensors.len());
        self.tensor(Tensor { name, ..ones })
    }

    fn push_pointwise(&mut self, mode: Mode, inputs: &[TensorId], y: TensorId, compute: DType, params: Params) {
        let at = |n: usize| inputs.get(n).copied();
        // Without inputs, let the op read its own result: `verify` then reports the mistake.
        let first = at(0).unwrap_or(y);
        let op = match mode.signature() {
            Signature::Backward => Pointwise { mode, x: at(1).unwrap_or(y), b: None, t: None, dy: Some(first), y, compute, params },
            Signature::Unary
            | Signature::Identity
            | Signature::Binary
            | Signature::Compare
            | Signature::LogicalBinary
            | Signature::LogicalUnary
            | Signature::Index
            | Signature::Select => Pointwise { mode, x: first, b: at(1), t: at(2), dy: None, y, compute, params },
        };
        self.push(Op::Pointwise(op));
    }

    /// Adds a tensor with the extents of `x` whose elements are their own index along `axis`, i32.
    pub fn gen_index(&mut self, x: TensorId, axis: i64) -> TensorId {
        self.pointwise_as(Mode::GenIndex, &[x], DType::I32, DType::I32, Params { axis: Some(axis), ..Params::default() })
    }

    /// Adds a matrix product `a · b` over the last two axes, whose result is a virtual f32 tensor.
    pub fn matmul(&mut self, a: TensorId, b: TensorId) -> TensorId {
        let (da, db) = (self.dims(a).0, self.dims(b).0);
        let mut dims = da.clone();
        if let (Some(last), Some(&n)) = (dims.last_mut(), db.last()) {
            *last = n;
        }
        for (d, &other) in dims.iter_mut().zip(&db).take(da.len().saturating_sub(2)) {
            *d = (*d).max(other);
        }
        let c = self.result("matmul", DType::F32, Dims(dims));
        self.push(Op::Matmul(Matmul { a, b, c, m_override: None, n_override: None, k_override: None, padding: None, compute: DType::F32 }));
        c
    }

    /// Adds the reduction of `x` to the extents `dims`, a virtual f32 tensor.
    pub fn reduce(&mut self, mode: ReductionMode, x: TensorId, dims: impl Into<Dims>) -> TensorId {
        let y = self.result("reduction", DType::F32, dims.into());
        self.push(Op::Reduction(Reduction { mode, x, y, compute: DType::F32, deterministic: false }));
        y
    }

    /// Adds a reshape, whose result has the elements of `x` with other extents and strides.
    pub fn reshape(&mut self, x: TensorId, dims: impl Into<Dims>, strides: impl Into<Strides>, mode: Option<ReshapeMode>) -> TensorId {
        let dtype = self.get(x).map_or(DType::F32, |t| t.dtype);
        let y = self.result("reshape", dtype, dims.into());
        self.set_strides(y, strides);
        self.push(Op::Reshape(Reshape { x, y, mode }));
        y
    }

    /// Adds a transpose of `x`: axis `i` of the result is axis `permutation[i]` of `x`.
    pub fn transpose(&mut self, x: TensorId, permutation: &[i64]) -> TensorId {
        let (dtype, old) = (self.get(x).map_or(DType::F32, |t| t.dtype), self.dims(x).0);
        let at = |&axis: &i64| usize::try_from(axis).ok().and_then(|a| old.get(a).copied()).unwrap_or(1);
        let y = self.result("transpose", dtype, Dims(permutation.iter().map(at).collect()));
        self.push(Op::Transpose(Transpose { x, y, permutation: permutation.to_vec() }));
        y
    }

    /// Adds a slice, `x[start..limit]` along each axis.
    pub fn slice(&mut self, x: TensorId, start: &[i64], limit: &[i64]) -> TensorId {
        let dtype = self.get(x).map_or(DType::F32, |t| t.dtype);
        let dims = start.iter().zip(limit).map(|(s, l)| l.saturating_sub(*s)).collect();
        let y = self.result("slice", dtype, Dims(dims));
        self.push(Op::Slice(Slice { x, y, start: start.to_vec(), limit: limit.to_vec(), step: vec![1; start.len()] }));
        y
    }

    /// Adds a softmax over the last axis, a virtual f32 tensor; requires cuDNN 9.20. `stats` receives the natural logarithm of the sum of
    /// exponentials, including `sink`.
    pub fn softmax(&mut self, x: TensorId, stats: Option<TensorId>, sink: Option<TensorId>) -> TensorId {
        let dims = self.dims(x);
        let y = self.result("softmax", DType::F32, dims);
        self.push(Op::Softmax(Softmax { x, y, stats, max: None, sum_exp: None, sink, stats_log2: false }));
        y
    }

    /// Adds a mask on the scores `x` right of a diagonal (cuDNN 9.20): it keeps `row + shift + align >= col`, and replaces other scores
    /// by `fill`. `align` is `seq_kv − seq_q` if both `lengths` are given, and 0 otherwise.
    pub fn band_mask_right(
        &mut self,
        x: TensorId,
        fill: TensorId,
        shift: Option<TensorId>,
        lengths: Option<(TensorId, TensorId)>,
    ) -> TensorId {
        self.band_mask(x, fill, BandSide::Right, shift, None, lengths)
    }

    /// Adds a mask on the scores `x` left of a diagonal (cuDNN 9.20): it keeps `col + left - align > row`, and replaces other scores by
    /// `fill`. `align` is `seq_kv − seq_q` if both `lengths` are given, and 0 otherwise.
    pub fn band_mask_left(&mut self, x: TensorId, fill: TensorId, left: TensorId, lengths: Option<(TensorId, TensorId)>) -> TensorId {
        self.band_mask(x, fill, BandSide::Left, None, Some(left), lengths)
    }

    fn band_mask(
        &mut self,
        x: TensorId,
        fill: TensorId,
        side: BandSide,
        shift_right: Option<TensorId>,
        left: Option<TensorId>,
        lengths: Option<(TensorId, TensorId)>,
    ) -> TensorId {
        let dims = self.dims(x);
        let y = self.result("band_mask", DType::F32, dims);
        let (seq_q, seq_kv) = (lengths.map(|l| l.0), lengths.map(|l| l.1));
        self.push(Op::BandMask(BandMask { x, y, fill, side, shift_right, left, seq_q, seq_kv }));
        y
    }
}
