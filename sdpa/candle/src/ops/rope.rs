//! Rotary position embeddings.

use super::{unlike, untyped};
use crate::error::none;
use crate::op::unary;
use candle_core::{Result, Tensor};
use candle_nn::rotary_emb;
use sdpa::SpecError;

/// The layout of `x`, and the pairs of elements that are rotated.
#[derive(Clone, Copy, Debug)]
enum Rotation {
    /// (batch, heads, seq, dim); elements `i` and `i + dim / 2`.
    Halves,
    /// (batch, heads, seq, dim); elements `2i` and `2i + 1`.
    Interleaved,
    /// (batch, seq, heads, dim); elements `i` and `i + dim / 2`.
    HalvesThd,
}

impl Rotation {
    fn axes(self) -> (&'static str, usize) {
        match self {
            Rotation::Halves | Rotation::Interleaved => ("(batch, heads, seq, dim)", 2),
            Rotation::HalvesThd => ("(batch, seq, heads, dim)", 1),
        }
    }

    fn fused(self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        match self {
            Rotation::Halves => rotary_emb::rope(x, cos, sin),
            Rotation::Interleaved => rotary_emb::rope_i(x, cos, sin),
            Rotation::HalvesThd => rotary_emb::rope_thd(x, cos, sin),
        }
    }

    fn mistakes(self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Vec<SpecError> {
        let (axes, seq) = self.axes();
        let mut errors: Vec<SpecError> = untyped("x", x).into_iter().collect();
        let dims = x.dims();
        if dims.len() != 4 || dims[3] == 0 || !dims[3].is_multiple_of(2) {
            errors.push(SpecError::new("x shape", format!("{dims:?}"), format!("{axes} with an even dim, at least 2")));
        }
        for (name, table) in [("cos", cos), ("sin", sin)] {
            errors.extend(unlike(name, table, x));
            if table.track_op() {
                let rule = "none: rope has no gradient for it; pass `detach()` of it";
                errors.push(SpecError::new(name, "a tensor that requires a gradient", rule));
            }
            let &[batch, _, _, dim] = dims else { continue };
            let rows = dims[seq];
            let fits = match *table.dims() {
                [positions, half] => positions >= rows && half * 2 == dim,
                [entries, positions, half] => entries == batch && positions >= rows && half * 2 == dim,
                _ => false,
            };
            if !fits {
                let rule = format!("[{rows} or more, {}], or with the batch {batch} before them", dim / 2);
                errors.push(SpecError::new(format!("{name} shape"), format!("{:?}", table.dims()), rule));
            }
        }
        errors
    }

    fn apply(self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        none(self.mistakes(x, cos, sin))?;
        let rows = x.dims()[self.axes().1];
        // candle's kernels take the batch stride of the tables from the rows of `x`, so a table for each entry must not have more.
        let rows_of = |table: &Tensor| table.narrow(table.rank() - 2, 0, rows)?.contiguous();
        let (cos, sin) = (rows_of(cos)?, rows_of(sin)?);
        let x = x.contiguous()?;
        if x.elem_count() == 0 {
            return Ok(x);
        }
        let y = self.fused(&x.detach(), &cos, &sin)?;
        if !x.track_op() {
            return Ok(y);
        }
        // The inverse of a rotation is its transpose, so the gradient is rotated back.
        unary("sdpa-rope", &x, y, move |_, gradient| Ok([Some(self.fused(&gradient.contiguous()?, &cos, &sin.neg()?)?)]))
    }
}

/// Rotates the pairs (`i`, `i + dim / 2`) of `x` (batch, heads, seq, dim), as `candle_nn::rotary_emb::rope` does, with a gradient of `x`.
/// `cos` and `sin` are (seq or more, dim / 2), or (batch, seq or more, dim / 2).
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use sdpa_candle::ops;
///
/// let angles = Tensor::arange(0f32, 12., &Device::Cpu)?.reshape((4, 3))?; // (seq, dim / 2)
/// let x = Var::from_tensor(&Tensor::ones((1, 2, 4, 6), candle_core::DType::F32, &Device::Cpu)?)?;
/// let y = ops::rope(&x, &angles.cos()?, &angles.sin()?)?;
/// // A rotation keeps the length, so the gradient of Σ y² is 2 x.
/// let gradient = y.sqr()?.sum_all()?.backward()?.remove(&x).unwrap();
/// assert!((gradient - 2.)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Returns every argument with a wrong shape, element type or device, and `cos` or `sin` that require a gradient.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rotation::Halves.apply(x, cos, sin)
}

/// Rotates the pairs (`2i`, `2i + 1`) of `x` (batch, heads, seq, dim), as `candle_nn::rotary_emb::rope_i` does, with a gradient of `x`. The
/// other arguments are those of [`rope`].
///
/// # Errors
/// Fails as [`rope`] does.
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rotation::Interleaved.apply(x, cos, sin)
}

/// Rotates the pairs (`i`, `i + dim / 2`) of `x` (batch, seq, heads, dim), as `candle_nn::rotary_emb::rope_thd` does, with a gradient of
/// `x`. The other arguments are those of [`rope`].
///
/// # Errors
/// Fails as [`rope`] does.
pub fn rope_thd(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rotation::HalvesThd.apply(x, cos, sin)
}
