//! Block scales of 8-bit floats (MXFP8 of OCP's microscaling formats): one power of two for each 32 elements along the axis that a GEMM sums over.
//!
//! An element of `q`, `k` or `v` represents its value times the scale of its block. Blocks of `q` and `k` run along `dim_qk`, those of `v` along
//! `seq_kv`; the last block of `v` may have fewer elements. Scales are declared parameters, one byte each ([`F8E8M0`]), in the order that tensor
//! cores read: [`BlockScales::place`].

use crate::check::Check;
use crate::dtype::DType;
use crate::error::{SpecError, SpecErrors};
use crate::expr::{Axes, Declared, ParamKind};
use crate::float8::F8E8M0;
use crate::operand::Operand;
use crate::problem::Problem;
use crate::spec::{AttentionSpec, TensorSpec};
use crate::tensor::ParamValue;

/// Number of elements that share a scale.
pub const BLOCK: i64 = 32;
/// Lines and blocks of a tile of scales. Memory is padded to whole tiles.
const TILE: [i64; 2] = [128, 4];

/// A declared parameter that holds the scales of an operand's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockScale {
    /// The block scales of `q`.
    Q,
    /// The block scales of `k`.
    K,
    /// The block scales of `v`.
    V,
}

impl BlockScale {
    /// Every block scale, in the order in which a problem declares them.
    pub const ALL: [BlockScale; 3] = [BlockScale::Q, BlockScale::K, BlockScale::V];

    /// Returns the name of the declared parameter that holds these scales.
    pub const fn name(self) -> &'static str {
        match self {
            BlockScale::Q => "block_scale_q",
            BlockScale::K => "block_scale_k",
            BlockScale::V => "block_scale_v",
        }
    }

    /// Returns the operand whose elements this parameter scales.
    pub const fn operand(self) -> Operand {
        match self {
            BlockScale::Q => Operand::Q,
            BlockScale::K => Operand::K,
            BlockScale::V => Operand::V,
        }
    }

    /// Returns the block scale of an operand; `None` for operands other than `q`, `k` and `v`.
    pub fn of(operand: Operand) -> Option<BlockScale> {
        BlockScale::ALL.into_iter().find(|scale| scale.operand() == operand)
    }

    /// Returns the operand's axes of lines and of blocks.
    const fn axes(self) -> [usize; 2] {
        match self {
            BlockScale::Q | BlockScale::K => [2, 3],
            BlockScale::V => [3, 2],
        }
    }
}

/// The block scales of an operand, and their layout.
///
/// A *line* is a query, a key or, for `v`, an index of `dim_v`; its blocks follow one another along the other axis. In memory each head of a batch
/// entry has tiles of 128 lines by 4 blocks, tiles of the same lines adjacent. Within a tile, scales have the order 32 × 4 × 4: cuDNN's `F8_128x4`.
/// Padding may hold any scale but NaN; zeroed memory does.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Operand, Shape};
/// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 200, seq_kv: 300, dim_qk: 64, dim_v: 96 };
/// let problem = AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bshd).with_block_scales().validate()?;
/// let [q, v] = [Operand::Q, Operand::V].map(|operand| problem.block_scales(operand).unwrap());
/// assert_eq!((q.extents(), q.elements()), ([1, 8, 256, 4], 8192));
/// assert_eq!((v.extents(), v.elements()), ([1, 2, 128, 12], 3072));
/// // Key 130, the block of keys 128 to 159, of element 33.
/// assert_eq!(v.place([0, 0, 130, 33]), 512 + 16 + 4);
/// # Ok::<(), sdpa_core::SpecErrors>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockScales {
    which: BlockScale,
    tensor: TensorSpec,
}

impl BlockScales {
    fn new(which: BlockScale, tensor: TensorSpec) -> BlockScales {
        BlockScales { which, tensor }
    }

    /// Returns the number of lines, and of blocks per line, that have elements.
    fn used(&self) -> [i64; 2] {
        let [lines, along] = self.which.axes().map(|axis| self.tensor.dims[axis]);
        [lines, (along.max(1) - 1) / BLOCK + 1]
    }

    /// Returns the extents of the parameter that holds the scales: (batch, heads, lines, blocks per line). A line is a query, a key or,
    /// for `v`, an index of `dim_v`. The number of lines is padded to a multiple of 128, and the number of blocks to a multiple of 4.
    pub fn extents(&self) -> [i64; 4] {
        let [lines, blocks] = self.used();
        let padded = |n: i64, tile: i64| (n.max(1) - 1) / tile * tile + tile;
        [self.tensor.dims[0], self.tensor.dims[1], padded(lines, TILE[0]), padded(blocks, TILE[1])]
    }

    /// Returns the number of scales in the parameter, including padding. Each scale is one byte.
    pub fn elements(&self) -> usize {
        self.extents().iter().product::<i64>().unsigned_abs() as usize
    }

    /// Returns the index, within the parameter that holds the scales, of the scale for the operand's element at (batch, head, seq, dim).
    pub fn place(&self, at: [i64; 4]) -> usize {
        let [_, heads, lines, blocks] = self.extents();
        let [line, along] = self.which.axes().map(|axis| at[axis]);
        let block = along / BLOCK;
        let tile = (line / TILE[0]) * (blocks / TILE[1]) + block / TILE[1];
        let head = (at[0] * heads + at[1]) * lines * blocks;
        (head + tile * TILE[0] * TILE[1] + line % 32 * 16 + line / 32 % 4 * 4 + block % TILE[1]).unsigned_abs() as usize
    }

    /// Iterates over the operand's elements. Yields for each element its offset in memory and the index of its scale.
    pub fn places(&self) -> impl Iterator<Item = [usize; 2]> {
        let ([batch, heads, seq, dim], scales) = (self.tensor.dims, *self);
        let rows = (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..seq).map(move |s| [b, h, s])));
        rows.flat_map(move |[b, h, s]| (0..dim).map(move |d| [b, h, s, d])).map(move |at| {
            let element: i64 = at.iter().zip(scales.tensor.strides).map(|(n, stride)| n * stride).sum();
            [element.unsigned_abs() as usize, scales.place(at)]
        })
    }

    /// Computes block scales from numbers in the operand's memory layout, by OCP's rule: `2^(⌊log₂ amax⌋ − e)`. Here `amax` is the largest finite
    /// magnitude of the block and `e` the exponent of the largest number of `dtype`. Blocks of zeros, and padding, have the smallest scale, 2⁻¹²⁷.
    ///
    /// # Errors
    /// Fails if there are fewer numbers than the operand has elements, or if `dtype` is not an 8-bit float.
    pub fn of_numbers(&self, numbers: &[f32], dtype: DType) -> Result<Vec<F8E8M0>, SpecErrors> {
        let name = self.which.operand().name();
        let mut errors = Vec::new();
        if !dtype.is_fp8() {
            errors.push(SpecError::new("dtype", dtype, "f8e4m3 or f8e5m2"));
        }
        let need = self.tensor.extent().unwrap_or(i64::MAX);
        if i64::try_from(numbers.len()).is_ok_and(|given| given < need) {
            errors.push(SpecError::new(format!("{name} length"), numbers.len(), format!("at least {need} elements")));
        }
        if !errors.is_empty() {
            return Err(SpecErrors(errors));
        }
        let mut amax = vec![0f32; self.elements()];
        for [element, scale] in self.places() {
            let size = numbers[element].abs();
            if size.is_finite() {
                amax[scale] = amax[scale].max(size);
            }
        }
        Ok(amax.into_iter().map(|amax| F8E8M0::of_block(amax, dtype)).collect())
    }

    fn declared(&self) -> Result<Declared, &'static str> {
        let kind = ParamKind::Tensor { axes: Axes::table(&self.extents())?, dtype: DType::F8E8M0 };
        Ok(Declared { name: self.which.name().to_owned(), kind, default: None })
    }
}

/// Reports the mistakes of a specification with block scales, and declares the scales.
pub(crate) fn declare(check: &mut Check, spec: &AttentionSpec) -> Vec<Declared> {
    if !spec.block_scaled {
        return Vec::new();
    }
    if !spec.dtype.is_fp8() {
        check.fail("dtype", spec.dtype, "f8e4m3 or f8e5m2 with block scales");
    }
    let dim_qk = spec.q.dims[3];
    if dim_qk % BLOCK != 0 {
        check.fail("q.dims[3] (dim_qk)", dim_qk, format!("a multiple of {BLOCK} with block scales"));
    }
    if spec.packed.is_some() {
        check.fail("packed", "packed sequences", "none with block scales: their layout pads each batch entry to whole tiles");
    }
    if spec.paged.is_some() {
        check.fail("paged", "a paged KV cache", "none with block scales: their layout pads each batch entry to whole tiles");
    }
    let mut declared = Vec::new();
    for (which, tensor) in BlockScale::ALL.into_iter().zip([spec.q, spec.k, spec.v]) {
        // Invalid extents are reported elsewhere. Clamp them, so that the block scales can still be computed.
        let dims = tensor.dims.map(|n| n.clamp(1, i64::from(i32::MAX)));
        match BlockScales::new(which, TensorSpec { dims, ..tensor }).declared() {
            Ok(own) => declared.push(own),
            Err(_) => {
                check.fail(format!("{}.dims", which.operand()), format!("{dims:?}"), "fewer than 2^31 block scales, padding included")
            }
        }
    }
    declared
}

impl Problem {
    /// Returns the layout of an operand's block scales; `None` if the problem has no block scales, or if the operand is not `q`, `k` or
    /// `v`.
    pub fn block_scales(&self, operand: Operand) -> Option<BlockScales> {
        let which = BlockScale::of(operand).filter(|_| self.block_scaled())?;
        Some(BlockScales::new(which, *self.tensor(operand)?))
    }

    /// Finds the block scales of an operand among the `values` of the problem's parameters; `None` if the operand has no block scales.
    pub fn block_scale_values<'a>(&self, operand: Operand, values: &[ParamValue<'a>]) -> Option<&'a [F8E8M0]> {
        let which = BlockScale::of(operand).filter(|_| self.block_scaled())?;
        let at = self.params().iter().position(|p| p.name == which.name())?;
        match values.get(at)? {
            ParamValue::F8E8M0(scales) => Some(scales),
            ParamValue::Scalar(_)
            | ParamValue::F32(_)
            | ParamValue::F16(_)
            | ParamValue::BF16(_)
            | ParamValue::I32(_)
            | ParamValue::I64(_)
            | ParamValue::Bool(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{F8E4M3, F8E5M2, Layout, Mask, Packed, Paged, Param, ScoreMod, Shape};

    fn shape() -> Shape {
        Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 150, seq_kv: 300, dim_qk: 192, dim_v: 140 }
    }

    fn spec() -> AttentionSpec {
        AttentionSpec::dense(DType::F8E4M3, shape(), Layout::Bshd).with_block_scales()
    }

    /// Reorders tiles as a reshape does: (lines / 128, 4, 32) by (blocks / 4, 4) to (lines / 128, blocks / 4, 32, 4, 4).
    fn reordered(lines: usize, blocks: usize) -> Vec<[usize; 2]> {
        let mut order = Vec::new();
        for of_lines in 0..lines / 128 {
            for of_blocks in 0..blocks / 4 {
                for row in 0..32 {
                    for quarter in 0..4 {
                        for block in 0..4 {
                            order.push([of_lines * 128 + quarter * 32 + row, of_blocks * 4 + block]);
                        }
                    }
                }
            }
        }
        order
    }

    #[test]
    fn scales_lie_as_a_reshape_has_them() {
        let problem = spec().validate().unwrap();
        for (operand, extents) in [(Operand::Q, [2, 4, 256, 8]), (Operand::K, [2, 2, 384, 8]), (Operand::V, [2, 2, 256, 12])] {
            let scales = problem.block_scales(operand).unwrap();
            assert_eq!(scales.extents(), extents, "{operand}");
            let [batch, heads, lines, blocks] = extents.map(|n| n as usize);
            let order = reordered(lines, blocks);
            assert_eq!(scales.elements(), batch * heads * order.len());
            let tensor = problem.tensor(operand).unwrap();
            let mut seen = 0;
            for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                for (n, [line, block]) in order.iter().enumerate() {
                    let [line, along] = [*line as i64, *block as i64 * 32 + 7];
                    let [s, d] = if operand == Operand::V { [along, line] } else { [line, along] };
                    if s < tensor.dims[2] && d < tensor.dims[3] {
                        assert_eq!(scales.place([b as i64, h as i64, s, d]), (b * heads + h) * order.len() + n, "{operand} {s} {d}");
                        seen += 1;
                    }
                }
            }
            assert!(seen > 1000, "{operand}");
        }
    }

    #[test]
    fn numbers_are_narrowed_block_by_block() {
        let problem = spec().with_dtype(DType::F8E5M2).validate().unwrap();
        for operand in [Operand::Q, Operand::V] {
            let (scales, tensor) = (problem.block_scales(operand).unwrap(), *problem.tensor(operand).unwrap());
            let numbers: Vec<f32> =
                (0..tensor.extent().unwrap()).map(|n| (n as f32 * 0.37).sin() * 2f32.powi((n / 777 % 41 - 20) as i32)).collect();
            let (four, of_four) = F8E4M3::narrow(&numbers, &scales).unwrap();
            let (five, of_five) = F8E5M2::narrow(&numbers, &scales).unwrap();
            // Check each block separately.
            let at = |[b, h, s, d]: [i64; 4]| (b * tensor.strides[0] + h * tensor.strides[1] + s * tensor.strides[2] + d) as usize;
            let [_, _, seq, dim] = tensor.dims;
            for (s, d) in (0..seq).step_by(7).flat_map(|s| (0..dim).step_by(5).map(move |d| (s, d))) {
                let block: Vec<usize> = match operand == Operand::V {
                    true => (s / 32 * 32..seq.min(s / 32 * 32 + 32)).map(|s| at([1, 1, s, d])).collect(),
                    false => (d / 32 * 32..d / 32 * 32 + 32).map(|d| at([1, 1, s, d])).collect(),
                };
                let largest = block.iter().fold(0f64, |most, &n| most.max(f64::from(numbers[n]).abs()));
                let place = scales.place([1, 1, s, d]);
                for (scale, most) in [(of_four[place], 8), (of_five[place], 15)] {
                    let want = largest.log2().floor() as i32 - most;
                    assert_eq!(f64::from(scale.to_f32()), 2f64.powi(want), "{operand} {s} {d}");
                }
                let here = at([1, 1, s, d]);
                assert_eq!(four[here], F8E4M3::from_f32((f64::from(numbers[here]) / f64::from(of_four[place].to_f32())) as f32));
                assert_eq!(five[here], F8E5M2::from_f32((f64::from(numbers[here]) / f64::from(of_five[place].to_f32())) as f32));
            }
        }
    }

    #[test]
    fn blocks_of_odd_numbers_have_scales() {
        let problem = AttentionSpec::dense(
            DType::F8E4M3,
            Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 1, seq_kv: 1, dim_qk: 128, dim_v: 8 },
            Layout::Bhsd,
        )
        .with_block_scales()
        .validate()
        .unwrap();
        let scales = problem.block_scales(Operand::Q).unwrap();
        let mut numbers = vec![0f32; 128];
        numbers[32..35].copy_from_slice(&[f32::NAN, f32::INFINITY, -3.0]);
        (numbers[64], numbers[96]) = (f32::MAX, f32::from_bits(1));
        let (elements, of) = F8E4M3::narrow(&numbers, &scales).unwrap();
        let bits: Vec<u8> = of[..4].iter().map(|scale| scale.to_bits()).collect();
        assert_eq!(bits, [0, 127 + 1 - 8, 127 + 127 - 8, 0]);
        assert!(elements[32].to_f32().is_nan());
        assert_eq!([33, 34].map(|n| elements[n].to_f32()), [448.0, -3.0 * 128.0]);
        assert!(of[4..].iter().all(|scale| scale.to_bits() == 0));
        let told = F8E4M3::narrow(&numbers[..100], &scales).unwrap_err().to_string();
        assert_eq!(told, "q length: got 100, expected at least 128 elements");
        assert!(scales.of_numbers(&numbers, DType::BF16).is_err());
    }

    #[test]
    fn they_are_declared_and_part_of_the_problem() {
        let problem = spec().validate().unwrap();
        let names: Vec<&str> = problem.params().iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["block_scale_q", "block_scale_k", "block_scale_v"]);
        for (declared, which) in problem.params().iter().zip(BlockScale::ALL) {
            let elements = problem.block_scales(which.operand()).unwrap().elements();
            assert_eq!(crate::params::elements(declared, problem.extents()), elements as i64);
        }
        assert_eq!(crate::check::kind(problem.params()[0].kind), "a table [2, 4, 256, 8] of f8e8m0");
        let plain = AttentionSpec { block_scaled: false, ..spec() }.validate().unwrap();
        assert_ne!(plain, problem);
        assert!(plain.block_scales(Operand::Q).is_none() && problem.block_scales(Operand::O).is_none());
        let text = serde_json::to_string(&spec()).unwrap();
        assert_eq!(serde_json::from_str::<AttentionSpec>(&text).unwrap(), spec());
        // Expect four mistakes: three block scales are missing, and `descale_q` is given although the problem does not declare it.
        let told = problem.bind(&[Param::new("descale_q", &[1.0])]).unwrap_err();
        assert_eq!(told.0.len(), 4, "{told}");
    }

    #[test]
    fn every_mistake_is_told_at_once() {
        let fields = |spec: &AttentionSpec| spec.validate().unwrap_err().0.into_iter().map(|e| e.field).collect::<Vec<_>>();
        let odd = Shape { dim_qk: 40, ..shape() };
        let mut wrong = AttentionSpec::dense(DType::BF16, odd, Layout::Bhsd).with_block_scales();
        wrong.packed = Some(Packed::of(400));
        wrong.paged = Some(Paged::new(16, 90));
        let told = fields(&wrong);
        for field in ["dtype", "q.dims[3] (dim_qk)", "packed", "paged"] {
            assert!(told.iter().any(|f| f == field), "{field}: {told:?}");
        }
        let long = Shape { batch: 1 << 12, heads_q: 1 << 10, heads_kv: 1, seq_q: 1, ..shape() };
        assert_eq!(fields(&AttentionSpec::dense(DType::F8E4M3, long, Layout::Bhsd).with_block_scales()), ["q.dims"]);
        let own: ScoreMod = "tensor block_scale_v[head]: f32;\nscore + block_scale_v".parse().unwrap();
        assert!(spec().score_mod(own).validate().unwrap_err().to_string().contains("a reserved name"));
        assert!(spec().mask(Mask::causal()).with_dropout(0.5).with_sink().validate().is_ok());
    }

    #[test]
    fn there_is_no_backward_pass() {
        let told = spec().backward().validate().unwrap_err();
        assert_eq!(told.0.iter().map(|e| e.field.as_str()).collect::<Vec<_>>(), ["forward.block_scaled"], "{told}");
        assert!(told.to_string().contains("along those"), "{told}");
    }
}
