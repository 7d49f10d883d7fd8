//! Verifies a [`Graph`]: returns [`Verified`], or every broken rule.
//!
//! A broken rule is a bug of the code that built the graph, never of the caller of an attention. Each cause is reported once: an op with a missing or
//! misshapen tensor is not checked further.
//!
//! # Tensors
//!
//! - The rank is 1 to 8, extents are 1 to `i32::MAX`, there is one stride per axis and none is negative; elements and
//!   bytes fit 64 bits.
//! - The alignment is a power of two.
//! - A by-value or constant tensor has one element, and a value of its element type if it has a value.
//! - Tensors that a caller binds (device ones, and by-value ones without a value) have names, and no two the same.
//! - Ragged offsets are (batch + 1, 1, 1, 1) for the batch of their tensor, i32 or i64, in device memory, and not the result of an op; a multiplier
//!   is at least 1. A scalar has none.
//!
//! # Flow
//!
//! - There is an op, and every id is one of this graph.
//! - A virtual tensor is written by exactly one operand (and may be unread), a device tensor by at most one, a scalar by none. Every tensor is used.
//! - No op reads its own result, and producers precede consumers.
//! - Score ops ([`Op::score`]): at least one, pointwise and band masks only. Their results are virtual and are not read outside. Tensors that they
//!   read from outside are not virtual. Input and output are virtual f32 (b, h_q, s_q, s_kv); no op writes the input, a score op writes the output.
//!
//! # Ops
//!
//! A *number* is any element type but bool. Arithmetic is computed in f64, f32, f16, bf16, i32 or i64.
//!
//! - **pointwise**: exactly the operands and constants of the mode. Operands broadcast to exactly the extents of the result.
//!   Arithmetic is on numbers, in integers only where [`Mode`] has a meaning there (add, sub, mul, min, max, div, mod,
//!   floor_mod, add_square, abs, neg, identity); functions and backward modes compute in floats. Comparisons are on numbers and
//!   yield a bool or a number. Logic is on bools and integers. Identity also converts bools. The condition of a select is a
//!   bool or an integer; its choices are numbers, or all bools. gen_index yields an integer, and its axis exists.
//! - **matmul**: equal ranks of at least 2, inner extents agree, each leading axis of `b` divides that of `a` or either is 1,
//!   numbers. Overrides are integers (batch, 1, …) and need a leading axis.
//! - **reduction**: numbers of equal rank; extents of the result divide those of the input (all may be equal).
//! - **reshape**: as many elements. **transpose**: a permutation. **slice**: a part that exists, in steps of at least 1.
//!   All three convert numbers but keep bools.
//! - **conv_forward**, **conv_backward_data**, **conv_backward_filter**: numbers of one rank from 3 to 5. The channels of the filters divide those of
//!   the images, and the ratio, the groups, divides the filters. Each list of the geometry has one number per spatial axis: strides and
//!   dilations at least 1, paddings at least 0. The result has the extents that these give.
//! - **resample_forward**, **resample_backward**: likewise for windows, which are larger than their padding. Only max has an index, an integer
//!   per result, and its gradient needs it.
//! - **upsample**: f32 of rank 4, with twice the spatial extents in the result; computes in f32.
//! - **norm_forward**, **norm_backward**: floats. The scale of batch and instance norm is (1, c, 1, …). That of the others has the extent of `x` or 1
//!   along each axis after the first, and at least one axis is normalized. The bias is like the scale, only RMS norm may have none. Epsilon is one
//!   f32 from the host. Statistics are f32, with extent 1 along normalized axes; RMS norm has no mean. Only batch norm has running statistics, and
//!   it always has statistics.
//! - **gen_stats**, **bn_finalize**: f32 (1, c, 1, …); the count is one i64 from the host.
//! - **concat**: the type of the result, and its extents except along the axis, where the extents add up.
//! - **moe_matmul**, **moe_matmul_backward**: tokens (1, rows, k), weights (experts, k, n), first_token i32 (experts, 1, 1), index and slot i32
//!   (1, rows, 1). top_k divides the rows.
//! - **rope**, **rope_backward**: floats (b, h, s, d), angles (s, 1, 1, width) for an even width of at most d, a finite scale.
//! - **rng**: a number; probability in [0, 1], an interval that is not empty, a deviation that is not negative; seed and
//!   offset are one integer.
//! - **softmax**: floats of the same extents; stats, max and sum_exp are f32 with a last axis of 1; the sink is f32
//!   (1, h, 1, 1); stats in base 2 need stats.
//! - **band_mask**: floats of the same extents (b, h, s_q, s_kv); fill is one f32 from the host; `left` on left masks and only
//!   there, `shift_right` on right masks only, both from the host; both lengths or neither, integers, one or one per batch entry.
//! - **paged_load**: container (blocks, h, block, d), lengths (b, 1, 1, 1), table (b, 1, pages, 1) in i32 with exactly as many
//!   pages as the result has; the result is (b, h, s, d), or (b, h, d, s) where the strides say so.
//! - **block scales**: a scale has as many elements as the tensor along an axis, or one per block (more if reordered);
//!   a size above 1 for each axis that has blocks.
//! - **sdpa_forward**, **sdpa_backward**: q (b, h_q, s_q, d_qk), k (b, h_k, s_kv, d_qk), v (b, h_v, s_kv, d_v), o (b, h_q, s_q, d_v)
//!   in floats; h_k and h_v divide h_q. Gradients are like what they belong to. Stats, max, sum_exp are f32 (b, h_q, s_q, 1),
//!   the sink (1, h_q, 1, 1), the scale one f32. Lengths are (b, 1, 1, 1), their prefix sums (b + 1, 1, 1, 1), integers, one of
//!   the two per side. Page tables come in pairs, with `seq_len_kv`. The block mask has a bit per 128 × 128 tile.
//!   The dropout probability is in [0, 1). Scales of 8-bit attention are one f32 each, for 8-bit q, k and v.
//!
//! [`Op::score`]: crate::ir::Op::score
//! [`Mode`]: crate::ir::Mode

mod attention;
mod convolution;
mod experts;
mod flow;
mod linear;
mod masks;
mod norms;
mod pages;
mod pointwise;
mod tensors;

use super::Graph;
use super::op::Op;
use super::print::{OpLine, TensorLine};
use super::tensor::{Tensor, TensorId};
use super::ty::{DType, Dims};
use std::fmt;

/// A graph that passed every rule of [`crate::ir::verify`]. It owns the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified(Graph);

impl Verified {
    /// Returns the verified graph.
    pub fn graph(&self) -> &Graph {
        &self.0
    }

    /// Returns the unverified graph, which can be changed and verified again.
    pub fn into_inner(self) -> Graph {
        self.0
    }
}

impl std::ops::Deref for Verified {
    type Target = Graph;
    fn deref(&self) -> &Graph {
        &self.0
    }
}

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}")]
#[non_exhaustive]
pub struct VerifyError {
    /// The op or tensor that breaks the rule, in the form of printed graphs.
    pub at: String,
    /// The rule that is broken, with the values that break it.
    pub message: String,
}

/// Every broken rule of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyErrors(pub Vec<VerifyError>);

impl fmt::Display for VerifyErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, e) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{e}")?;
        }
        Ok(())
    }
}

impl std::error::Error for VerifyErrors {}

impl Graph {
    /// Checks every rule of [`crate::ir::verify`].
    ///
    /// # Errors
    /// Returns every broken rule: those of tensors first, then those of ops, each in the order of the graph.
    pub fn verify(self) -> Result<Verified, VerifyErrors> {
        let mut errors = Vec::new();
        let sound = tensors::check(&self, &mut errors);
        let sites = flow::sites(&self);
        let usable = flow::check(&self, &sites, &mut errors);
        for (site, usable) in sites.iter().zip(usable) {
            if usable && named_tensors(site.op).all(|id| sound.get(id.index()).copied().unwrap_or(false)) {
                check_op(&mut At { graph: &self, op: site.op, errors: &mut errors });
            }
        }
        if errors.is_empty() { Ok(Verified(self)) } else { Err(VerifyErrors(errors)) }
    }
}

/// Iterates over every tensor that an op names, including the ends of its score graph.
fn named_tensors(op: &Op) -> impl Iterator<Item = TensorId> {
    let all = op.operands();
    let ends = op.score().map(|s| [s.input, s.output]).into_iter().flatten();
    all.inputs.into_iter().chain(all.outputs).map(|o| o.tensor).chain(ends)
}

fn check_op(at: &mut At<'_>) {
    match at.op {
        Op::Pointwise(op) => pointwise::check(at, op),
        Op::Matmul(op) => linear::matmul(at, op),
        Op::Reduction(op) => linear::reduction(at, op),
        Op::Reshape(op) => linear::reshape(at, op),
        Op::Transpose(op) => linear::transpose(at, op),
        Op::Slice(op) => linear::slice(at, op),
        Op::Concat(op) => experts::concat(at, op),
        Op::ConvForward(op) => convolution::forward(at, op),
        Op::ConvBackwardData(op) => convolution::backward_data(at, op),
        Op::ConvBackwardFilter(op) => convolution::backward_filter(at, op),
        Op::NormForward(op) => norms::forward(at, op),
        Op::NormBackward(op) => norms::backward(at, op),
        Op::GenStats(op) => norms::gen_stats(at, op),
        Op::BnFinalize(op) => norms::bn_finalize(at, op),
        Op::BnBackwardWeights(op) => norms::bn_backward_weights(at, op),
        Op::ResampleForward(op) => convolution::resample_forward(at, op),
        Op::ResampleBackward(op) => convolution::resample_backward(at, op),
        Op::Upsample(op) => convolution::upsample(at, op),
        Op::MoeMatmul(op) => experts::moe_matmul(at, op),
        Op::MoeMatmulBackward(op) => experts::moe_matmul_backward(at, op),
        Op::Rope(op) => experts::rope(at, op),
        Op::RopeBackward(op) => experts::rope_backward(at, op),
        Op::Rng(op) => masks::rng(at, op),
        Op::Softmax(op) => masks::softmax(at, op),
        Op::BandMask(op) => masks::band_mask(at, op),
        Op::PagedLoad(op) => pages::paged_load(at, op),
        Op::BlockScaleQuantize(op) => pages::quantize(at, op),
        Op::BlockScaleDequantize(op) => pages::dequantize(at, op),
        Op::SdpaForward(op) => attention::forward(at, op),
        Op::SdpaBackward(op) => attention::backward(at, op),
    }
}

/// One op with valid tensors, and the list of its mistakes.
struct At<'g> {
    graph: &'g Graph,
    op: &'g Op,
    errors: &'g mut Vec<VerifyError>,
}

impl<'g> At<'g> {
    fn tensor(&self, id: TensorId) -> &'g Tensor {
        &self.graph.tensors[id.index()]
    }

    fn dims(&self, id: TensorId) -> &'g [i64] {
        &self.tensor(id).dims.0
    }

    fn dtype(&self, id: TensorId) -> DType {
        self.tensor(id).dtype
    }

    fn fail(&mut self, message: impl Into<String>) {
        self.errors.push(VerifyError { at: OpLine(self.op).to_string(), message: message.into() });
    }

    /// Reports `message` unless `holds`, and returns `holds`.
    fn rule(&mut self, holds: bool, message: impl FnOnce() -> String) -> bool {
        if !holds {
            self.fail(message());
        }
        holds
    }

    fn extents(&mut self, field: &str, id: TensorId, want: &[i64]) -> bool {
        let got = self.tensor(id).dims.clone();
        self.rule(got.0 == want, || format!("{field} {id} is {got}, not {}", Dims(want.to_vec())))
    }

    fn type_is(&mut self, field: &str, id: TensorId, want: DType) {
        let got = self.dtype(id);
        self.rule(got == want, || format!("{field} {id} is {got}, not {want}"));
    }

    fn type_in(&mut self, field: &str, id: TensorId, class: Class) {
        let got = self.dtype(id);
        self.rule(class.has(got), || format!("{field} {id} is {got}, not {}", class.name()));
    }

    /// Checks that `id` has one element of `class`.
    fn one(&mut self, field: &str, id: TensorId, class: Class) {
        let dims = self.tensor(id).dims.clone();
        self.rule(dims.elements() == Some(1), || format!("{field} {id} is {dims}, not one element"));
        self.type_in(field, id, class);
    }

    /// Checks that `id` has the element type of `like`.
    fn type_like(&mut self, field: &str, id: TensorId, (like_field, like): (&str, TensorId)) {
        let (got, want) = (self.dtype(id), self.dtype(like));
        self.rule(got == want, || format!("{field} {id} is {got}, expected {want} as {like_field} {like}"));
    }

    /// Checks that `id` has the strides of `like`, which has the same extents.
    fn strides_like(&mut self, field: &str, id: TensorId, (like_field, like): (&str, TensorId)) {
        let (got, want) = (self.tensor(id), self.tensor(like));
        let same = got.dims != want.dims || got.strides.same(&want.strides, &want.dims);
        self.rule(same, || format!("{field} {id} has strides {}, expected {} as {like_field} {like}", got.strides, want.strides));
    }

    /// Checks that `id` has the strides of `like`, and that both are in the same kind of storage.
    fn similar(&mut self, field: &str, id: TensorId, like: (&str, TensorId)) {
        self.strides_like(field, id, like);
        let kind = |t: &Tensor| (t.is_virtual(), t.is_scalar_value());
        let same = kind(self.tensor(id)) == kind(self.tensor(like.1));
        self.rule(same, || format!("{field} {id} and {} {} are in different kinds of storage", like.0, like.1));
    }

    fn host_value(&mut self, field: &str, id: TensorId) {
        let holds = self.tensor(id).is_scalar_value();
        self.rule(holds, || format!("{field} {id} is not a value from the host"));
    }

    /// Checks that `x` and `y` are both numbers or both booleans.
    fn same_kind(&mut self, x: TensorId, y: TensorId) {
        let (from, to) = (self.dtype(x), self.dtype(y));
        self.rule((from == DType::Bool) == (to == DType::Bool), || format!("x {x} is {from}, but y {y} is {to}"));
    }

    fn compute_in(&mut self, compute: DType, class: Class) {
        let class = match class {
            Class::Float => Class::FloatArithmetic,
            Class::Number => Class::Arithmetic,
            other
            @ (Class::F32 | Class::Integer | Class::Logic | Class::FloatArithmetic | Class::Arithmetic | Class::IntegerArithmetic) => other,
        };
        self.rule(class.has(compute), || format!("computes in {compute}, not in {}", class.name()));
    }
}

/// The allowed types of an operand or a computation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    F32,
    Float,
    Integer,
    Number,
    /// Booleans and integers.
    Logic,
    FloatArithmetic,
    IntegerArithmetic,
    Arithmetic,
}

impl Class {
    fn has(self, dtype: DType) -> bool {
        match self {
            Class::F32 => dtype == DType::F32,
            Class::Float => dtype.is_float(),
            Class::Integer => dtype.is_integer(),
            Class::Number => dtype != DType::Bool,
            Class::Logic => !dtype.is_float(),
            Class::FloatArithmetic => [DType::F32, DType::F64, DType::F16, DType::BF16].contains(&dtype),
            Class::IntegerArithmetic => [DType::I32, DType::I64].contains(&dtype),
            Class::Arithmetic => Class::FloatArithmetic.has(dtype) || Class::IntegerArithmetic.has(dtype),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Class::F32 => "f32",
            Class::Float => "a float",
            Class::Integer => "an integer",
            Class::Number => "a number",
            Class::Logic => "a bool or an integer",
            Class::FloatArithmetic => "f32, f64, f16 or bf16",
            Class::IntegerArithmetic => "i32 or i64",
            Class::Arithmetic => "f32, f64, f16, bf16, i32 or i64",
        }
    }
}

fn tensor_error(graph: &Graph, id: TensorId, message: impl Into<String>) -> VerifyError {
    let at = graph.get(id).map_or_else(|| id.to_string(), |tensor| TensorLine { id, tensor }.to_string());
    VerifyError { at, message: message.into() }
}
