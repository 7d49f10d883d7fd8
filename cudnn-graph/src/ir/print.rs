//! The text form of a graph: one line per tensor, then one line per op, score ops indented under theirs.
//!
//! The text contains exactly what distinguishes two graphs: equal graphs print the same everywhere.
//!
//! ```text
//! t0 "q" f16 [1,2,4,8] strides [64,32,8,1] device
//! t1 "scalar1" f32 [1] strides [1] by_value(0.125)
//! t2 "mul2" f32 [1,2,4,8] strides [64,32,8,1] virtual
//! y t2 = mul(x t0, b t1) compute f32
//! ```
//!
//! Defaults are left out: alignment 16, reordering none, no ragged offsets, absent operands and constants.

use super::op::{
    BandSide, ConvBackwardData, ConvBackwardFilter, ConvForward, ConvGeometry, Distribution, Op, ResampleBackward, ResampleForward,
    ReshapeMode, Rope, RopeBackward, Routing, Seed, Window,
};
use super::operands::Operand;
use super::pointwise::Params;
use super::tensor::{Reordering, Scalar, Storage, Tensor, TensorId};
use super::{Graph, Verified};
use std::fmt::{self, Display, Formatter};

impl Display for Graph {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (id, tensor) in self.ids().zip(&self.tensors) {
            writeln!(f, "{}", TensorLine { id, tensor })?;
        }
        for op in &self.ops {
            write!(f, "{}", OpLine(op))?;
            if let Some(score) = op.score() {
                f.write_str(" {\n")?;
                for inner in &score.ops {
                    writeln!(f, "    {}", OpLine(inner))?;
                }
                f.write_str("}")?;
            }
            f.write_str("\n")?;
        }
        Ok(())
    }
}

impl Display for Verified {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self.graph(), f)
    }
}

/// One tensor, as a graph prints it.
pub(crate) struct TensorLine<'g> {
    pub(crate) id: TensorId,
    pub(crate) tensor: &'g Tensor,
}

impl Display for TensorLine<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        // Destructure the tensor, so that a new field does not compile until it is printed.
        let Tensor { name, dtype, dims, strides, storage, alignment, reordering, ragged } = self.tensor;
        write!(f, "{} {name:?} {dtype} {dims} strides {strides} {}", self.id, StorageText(*storage))?;
        if *alignment != 16 {
            write!(f, " align {alignment}")?;
        }
        match reordering {
            Reordering::None => {}
            Reordering::F8x128x4 => f.write_str(" reordering f8x128x4")?,
        }
        if let Some(ragged) = ragged {
            write!(f, " ragged {}", ragged.offsets)?;
            if let Some(multiplier) = ragged.multiplier {
                write!(f, " times {multiplier}")?;
            }
        }
        Ok(())
    }
}

struct StorageText(Storage);

impl Display for StorageText {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Storage::Device => f.write_str("device"),
            Storage::Virtual => f.write_str("virtual"),
            Storage::ByValue(None) => f.write_str("by_value"),
            Storage::ByValue(Some(value)) => write!(f, "by_value({})", ScalarText(value)),
            Storage::Constant(value) => write!(f, "constant({})", ScalarText(value)),
        }
    }
}

/// A number with a visible type: `1.0`, `1`, `1i64`.
struct ScalarText(Scalar);

impl Display for ScalarText {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Scalar::F32(_) | Scalar::I32(_) => write!(f, "{}", self.0),
            Scalar::I64(_) => write!(f, "{}i64", self.0),
        }
    }
}

struct List<'a, T>(&'a [T]);

impl<T: Display> Display for List<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, item) in self.0.iter().enumerate() {
            write!(f, "{}{item}", if i > 0 { "," } else { "" })?;
        }
        f.write_str("]")
    }
}

fn operands(f: &mut Formatter<'_>, list: &[Operand]) -> fmt::Result {
    for (i, operand) in list.iter().enumerate() {
        write!(f, "{}{} {}", if i > 0 { ", " } else { "" }, operand.field, operand.tensor)?;
    }
    Ok(())
}

/// One op without its score ops, as a graph prints it.
pub(crate) struct OpLine<'g>(pub(crate) &'g Op);

impl Display for OpLine<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let all = self.0.operands();
        operands(f, &all.outputs)?;
        write!(f, " = {}(", self.0.name())?;
        operands(f, &all.inputs)?;
        f.write_str(")")?;
        match self.0 {
            Op::Pointwise(p) => {
                write!(f, " compute {}", p.compute)?;
                constants(f, &p.params)?;
            }
            Op::Matmul(m) => {
                write!(f, " compute {}", m.compute)?;
                constant(f, "padding", m.padding)?;
            }
            Op::Reduction(r) => {
                write!(f, " {} compute {}", r.mode.name(), r.compute)?;
                flag(f, "deterministic", r.deterministic)?;
            }
            Op::Reshape(r) => match r.mode {
                None => {}
                Some(ReshapeMode::ViewOnly) => f.write_str(" view_only")?,
                Some(ReshapeMode::Logical) => f.write_str(" logical")?,
            },
            Op::Transpose(t) => write!(f, " permutation {}", List(&t.permutation))?,
            Op::Slice(s) => write!(f, " start {} limit {} step {}", List(&s.start), List(&s.limit), List(&s.step))?,
            Op::Concat(c) => write!(f, " axis {}", c.axis)?,
            Op::ConvForward(ConvForward { geometry, compute, .. })
            | Op::ConvBackwardData(ConvBackwardData { geometry, compute, .. })
            | Op::ConvBackwardFilter(ConvBackwardFilter { geometry, compute, .. }) => {
                let ConvGeometry { stride, dilation, pre_padding, post_padding } = geometry;
                write!(f, " stride {} dilation {}", List(stride), List(dilation))?;
                write!(f, " padding {} {} compute {compute}", List(pre_padding), List(post_padding))?;
            }
            Op::NormForward(n) => write!(f, " {}", n.mode.name())?,
            Op::NormBackward(n) => write!(f, " {}", n.mode.name())?,
            Op::GenStats(s) => write!(f, " compute {}", s.compute)?,
            Op::BnFinalize(b) => write!(f, " compute {}", b.compute)?,
            Op::BnBackwardWeights(b) => write!(f, " compute {}", b.compute)?,
            Op::ResampleForward(ResampleForward { mode, window, compute, .. })
            | Op::ResampleBackward(ResampleBackward { mode, window, compute, .. }) => {
                let Window { extent, stride, pre_padding, post_padding } = window;
                write!(f, " {} window {} stride {}", mode.name(), List(extent), List(stride))?;
                write!(f, " padding {} {} compute {compute}", List(pre_padding), List(post_padding))?;
            }
            Op::Upsample(u) => write!(f, " compute {}", u.compute)?,
            Op::MoeMatmul(m) => {
                match m.routing {
                    Routing::None => {}
                    Routing::Gather(_) => f.write_str(" gather")?,
                    Routing::Scatter { top_k, .. } => write!(f, " scatter top_k {top_k}")?,
                }
                write!(f, " compute {}", m.compute)?;
            }
            Op::MoeMatmulBackward(m) => write!(f, " compute {}", m.compute)?,
            Op::Rope(Rope { scale, width, .. }) | Op::RopeBackward(RopeBackward { scale, width, .. }) => {
                write!(f, " scale {scale:?}")?;
                if let Some(width) = width {
                    write!(f, " width {width}")?;
                }
            }
            Op::Rng(r) => {
                match r.distribution {
                    Distribution::Bernoulli(p) => write!(f, " bernoulli({p:?})")?,
                    Distribution::Uniform(a, b) => write!(f, " uniform({a:?}, {b:?})")?,
                    Distribution::Normal(mean, deviation) => write!(f, " normal({mean:?}, {deviation:?})")?,
                }
                match r.seed {
                    Seed::Value(seed) => write!(f, " seed {seed}")?,
                    // The seed tensor is printed with the operands.
                    Seed::Tensor(_) => {}
                }
            }
            Op::Softmax(s) => flag(f, "stats_log2", s.stats_log2)?,
            Op::BandMask(m) => f.write_str(match m.side {
                BandSide::Right => " right",
                BandSide::Left => " left",
            })?,
            Op::PagedLoad(_) => {}
            Op::BlockScaleQuantize(q) => write!(f, " block {} compute {}", List(&q.block), q.compute)?,
            Op::BlockScaleDequantize(q) => write!(f, " block {} compute {}", List(&q.block), q.compute)?,
            Op::SdpaForward(s) => {
                if let Some(dropout) = &s.dropout {
                    write!(f, " dropout {:?}", dropout.probability)?;
                }
            }
            Op::SdpaBackward(_) => {}
        }
        if let Some(score) = self.0.score() {
            write!(f, " score {} -> {}", score.input, score.output)?;
        }
        Ok(())
    }
}

fn flag(f: &mut Formatter<'_>, name: &str, set: bool) -> fmt::Result {
    if set { write!(f, " {name}") } else { Ok(()) }
}

fn constant(f: &mut Formatter<'_>, name: &str, value: Option<f64>) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, " {name} {value:?}"))
}

fn constants(f: &mut Formatter<'_>, params: &Params) -> fmt::Result {
    let Params { axis, relu_lower_clip, relu_upper_clip, relu_lower_slope, elu_alpha, softplus_beta, swish_beta } = *params;
    if let Some(axis) = axis {
        write!(f, " axis {axis}")?;
    }
    constant(f, "relu_lower_clip", relu_lower_clip)?;
    constant(f, "relu_upper_clip", relu_upper_clip)?;
    constant(f, "relu_lower_slope", relu_lower_slope)?;
    constant(f, "elu_alpha", elu_alpha)?;
    constant(f, "softplus_beta", softplus_beta)?;
    constant(f, "swish_beta", swish_beta)
}
