//! Attention on 8-bit floats: scales of tensors, and the amax values from which the scales of the next call are computed.
//!
//! An 8-bit tensor represents its elements times one number, its *descale*. With [block scales](crate::BlockScale) each element is instead multiplied
//! by its block's scale. A pass multiplies a result by a *scale* before it rounds it to 8 bits, and returns the *amax*: the largest magnitude before
//! scaling. Scales and descales are declared parameters of a problem of 8-bit floats, one f32 each, in device memory for a device call. Each amax is
//! one f32 that the call passes memory for.

use crate::dtype::DType;
use crate::error::SpecError;
use crate::expr::{Axes, Declared, ParamKind};
use crate::operand::{Direction, Operand};
use crate::problem::Problem;
use crate::tensor::ParamValue;
use serde::Serialize;
use std::fmt;

/// A factor of a tensor, one f32: a declared parameter of every problem of 8-bit floats that has the tensor.
///
/// A descale converts 8-bit elements to the values that they represent. A scale multiplies a result before it is rounded to 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fp8Scale {
    /// The descale of `q`.
    DescaleQ,
    /// The descale of `k`.
    DescaleK,
    /// The descale of `v`.
    DescaleV,
    /// The descale of P, which is rounded to 8 bits before the second GEMM: 1 / [`Fp8Scale::ScaleS`].
    DescaleS,
    /// The scale of P.
    ScaleS,
    /// The scale of the output.
    ScaleO,
    /// The descale of `o`, which the backward pass reads: 1 / [`Fp8Scale::ScaleO`] of the forward pass.
    DescaleO,
    /// The descale of `d_o`.
    DescaleDO,
    /// The descale of dS: 1 / [`Fp8Scale::ScaleDP`].
    DescaleDP,
    /// The scale of dS times `attn_scale`.
    ScaleDP,
    /// The scale of dQ.
    ScaleDQ,
    /// The scale of dK.
    ScaleDK,
    /// The scale of dV.
    ScaleDV,
}

impl Fp8Scale {
    /// The scales of a forward pass.
    const FORWARD: [Fp8Scale; 6] =
        [Fp8Scale::DescaleQ, Fp8Scale::DescaleK, Fp8Scale::DescaleV, Fp8Scale::DescaleS, Fp8Scale::ScaleS, Fp8Scale::ScaleO];
    /// The scales of a backward pass.
    const BACKWARD: [Fp8Scale; 12] = [
        Fp8Scale::DescaleQ,
        Fp8Scale::DescaleK,
        Fp8Scale::DescaleV,
        Fp8Scale::DescaleS,
        Fp8Scale::ScaleS,
        Fp8Scale::DescaleO,
        Fp8Scale::DescaleDO,
        Fp8Scale::DescaleDP,
        Fp8Scale::ScaleDP,
        Fp8Scale::ScaleDQ,
        Fp8Scale::ScaleDK,
        Fp8Scale::ScaleDV,
    ];

    /// Returns the name of the declared parameter that holds this scale or descale.
    pub const fn name(self) -> &'static str {
        match self {
            Fp8Scale::DescaleQ => "descale_q",
            Fp8Scale::DescaleK => "descale_k",
            Fp8Scale::DescaleV => "descale_v",
            Fp8Scale::DescaleS => "descale_s",
            Fp8Scale::ScaleS => "scale_s",
            Fp8Scale::ScaleO => "scale_o",
            Fp8Scale::DescaleO => "descale_o",
            Fp8Scale::DescaleDO => "descale_d_o",
            Fp8Scale::DescaleDP => "descale_dp",
            Fp8Scale::ScaleDP => "scale_dp",
            Fp8Scale::ScaleDQ => "scale_dq",
            Fp8Scale::ScaleDK => "scale_dk",
            Fp8Scale::ScaleDV => "scale_dv",
        }
    }

    /// Returns the scales and descales of a pass, in the order in which its problem declares them.
    pub const fn of(direction: Direction) -> &'static [Fp8Scale] {
        match direction {
            Direction::Forward => &Fp8Scale::FORWARD,
            Direction::Backward => &Fp8Scale::BACKWARD,
        }
    }

    /// Returns the scale of an operand that a pass writes, or the descale of one that it reads.
    pub const fn of_operand(operand: Operand, written: bool) -> Fp8Scale {
        match operand {
            Operand::Q => Fp8Scale::DescaleQ,
            Operand::K => Fp8Scale::DescaleK,
            Operand::V => Fp8Scale::DescaleV,
            Operand::O if written => Fp8Scale::ScaleO,
            Operand::O => Fp8Scale::DescaleO,
            Operand::DO => Fp8Scale::DescaleDO,
            Operand::DQ => Fp8Scale::ScaleDQ,
            Operand::DK => Fp8Scale::ScaleDK,
            Operand::DV => Fp8Scale::ScaleDV,
        }
    }

    /// Checks the value of a scale or descale. Host calls check their scales; scales in device memory are not read before the pass runs.
    ///
    /// # Errors
    /// Fails if the value is negative, zero, infinite or NaN.
    pub fn check(self, value: f32) -> Result<(), SpecError> {
        if value.is_finite() && value > 0.0 {
            return Ok(());
        }
        Err(SpecError::new(
            format!("parameter {self}"),
            value,
            "a finite number above 0; fp8::scale_of computes a scale from the largest magnitude of a tensor",
        ))
    }

    pub(crate) fn declared(self) -> Declared {
        let kind = ParamKind::Tensor { axes: Axes::NONE, dtype: DType::F32 };
        Declared { name: self.name().to_owned(), kind, default: None }
    }
}

impl fmt::Display for Fp8Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The amax of a tensor that a pass rounds to 8 bits: its largest magnitude before scaling, one f32 that a call of 8-bit floats writes.
///
/// [`scale_of`] computes the scale of a later call from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Amax {
    /// Amax of P, after softmax and dropout.
    S,
    /// Amax of the output before scaling; with block scales, which leave the output unscaled, amax of the rounded output.
    O,
    /// Amax of dS times `attn_scale`.
    DP,
    /// Amax of dQ.
    DQ,
    /// Amax of dK.
    DK,
    /// Amax of dV.
    DV,
}

impl Amax {
    /// Returns the name used in calls, files and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Amax::S => "amax_s",
            Amax::O => "amax_o",
            Amax::DP => "amax_dp",
            Amax::DQ => "amax_dq",
            Amax::DK => "amax_dk",
            Amax::DV => "amax_dv",
        }
    }

    /// Returns the amax values that a forward or backward pass of 8-bit floats writes, if it has no block scales.
    pub const fn of(direction: Direction) -> &'static [Amax] {
        match direction {
            Direction::Forward => &[Amax::S, Amax::O],
            Direction::Backward => &[Amax::DP, Amax::DQ, Amax::DK, Amax::DV],
        }
    }

    /// Returns the amax values that a forward or backward pass over the problem `forward` writes. There are none if the operands are not
    /// 8-bit floats. With block scales there is only that of the output.
    pub fn told(forward: &Problem, direction: Direction) -> &'static [Amax] {
        match (forward.dtype().is_fp8(), forward.block_scaled()) {
            (false, _) => &[],
            (true, false) => Amax::of(direction),
            (true, true) => &[Amax::O],
        }
    }

    /// Checks that a call passes one destination for each amax value that its pass writes, and no other. `given` are the amax values for
    /// which it passes destinations. Returns a mistake for each one that is missing, repeated or superfluous.
    pub fn check(forward: &Problem, direction: Direction, given: impl Iterator<Item = Amax> + Clone) -> Vec<SpecError> {
        let (asked, dtype) = (Amax::told(forward, direction), forward.dtype());
        let mut errors = Vec::new();
        for (n, amax) in given.clone().enumerate() {
            if !asked.contains(&amax) {
                let rule = format!("none: a {} pass of {dtype} does not compute it", direction.name());
                errors.push(SpecError::new(amax.name(), "an output", rule));
            } else if given.clone().take(n).any(|before| before == amax) {
                errors.push(SpecError::new(amax.name(), "two outputs", "one"));
            }
        }
        let absent = asked.iter().filter(|amax| !given.clone().any(|given| given == **amax));
        errors.extend(
            absent.map(|amax| SpecError::new(amax.name(), "nothing", format!("memory for one f32: a pass of {dtype} computes it"))),
        );
        errors
    }
}

impl fmt::Display for Amax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The scales and descales of a call of 8-bit floats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Scales([f32; 13]);

impl Fp8Scales {
    /// Reads the scales and descales from the `values` of the parameters `declared`. One that the pass does not declare is 1.
    pub fn new(declared: &[Declared], values: &[ParamValue<'_>]) -> Fp8Scales {
        let mut scales = [1.0; 13];
        for scale in Fp8Scale::FORWARD.into_iter().chain(Fp8Scale::BACKWARD) {
            let value = declared.iter().position(|p| p.name == scale.name()).and_then(|at| values.get(at));
            if let Some(ParamValue::F32(value)) = value {
                scales[scale as usize] = value.first().copied().unwrap_or(1.0);
            }
        }
        Fp8Scales(scales)
    }

    /// Returns a mistake for every invalid scale or descale of a pass over `problem`.
    pub(crate) fn mistakes(problem: &Problem, declared: &[Declared], values: &[ParamValue<'_>]) -> Vec<SpecError> {
        if !problem.dtype().is_fp8() || problem.block_scaled() {
            return Vec::new();
        }
        let scales = Fp8Scales::new(declared, values);
        let all = Fp8Scale::FORWARD.into_iter().chain(Fp8Scale::BACKWARD).filter(|scale| declared.iter().any(|p| p.name == scale.name()));
        let mut all: Vec<Fp8Scale> = all.collect();
        all.sort_unstable();
        all.dedup();
        all.into_iter().filter_map(|scale| scale.check(scales.get(scale)).err()).collect()
    }

    /// Returns the value of one scale or descale; 1 if the pass does not declare it.
    pub fn get(&self, scale: Fp8Scale) -> f32 {
        self.0[scale as usize]
    }
}

/// Returns the scale of a tensor with this (expected) amax: `largest / amax / 2^margin`, where `largest` is that of the type.
///
/// With a margin of 0 the largest element becomes the largest number of the type. Each unit of margin leaves another power of two for larger elements
/// in a later step. If `amax` is 0, infinite or NaN, the scale is 1. The descale is its reciprocal.
///
/// ```
/// use sdpa_core::{DType, fp8};
/// assert_eq!(fp8::scale_of(3.5, DType::F8E4M3, 0), 128.0);
/// assert_eq!(fp8::scale_of(3.5, DType::F8E4M3, 1), 64.0);
/// assert_eq!(fp8::scale_of(0.0, DType::F8E5M2, 0), 1.0);
/// ```
pub fn scale_of(amax: f32, dtype: DType, margin: i32) -> f32 {
    let scale = dtype.largest() / amax / 2f32.powi(margin);
    // If the scale or its reciprocal is not a normal number, scaling and descaling would lose the tensor's values.
    if amax > 0.0 && scale.is_normal() && scale.recip().is_normal() { scale } else { 1.0 }
}

/// Returns the largest magnitude of the numbers: 0 without numbers, NaN if one of them is NaN.
pub fn amax_of(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |amax: f32, x| if amax.is_nan() || x.abs() <= amax { amax } else { x.abs() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionSpec, Layout, ScoreMod, Shape};

    fn spec() -> AttentionSpec {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 11, dim_qk: 16, dim_v: 32 };
        AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bhsd)
    }

    #[test]
    fn passes_declare_their_scales() {
        let names = |declared: &[Declared]| declared.iter().map(|p| p.name.clone()).collect::<Vec<_>>();
        let forward = spec().validate().unwrap();
        assert_eq!(names(forward.params()), ["descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"]);
        let backward = spec().backward().validate().unwrap();
        let read: Vec<&str> = Fp8Scale::of(Direction::Backward).iter().map(|scale| scale.name()).collect();
        assert_eq!(names(backward.params()), read);
        let values = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0].map(|x| [x]);
        let values: Vec<ParamValue<'_>> = values.iter().map(|x| ParamValue::F32(x)).collect();
        let scales = Fp8Scales::new(forward.params(), &values);
        assert_eq!(Fp8Scale::of(Direction::Forward).iter().map(|s| scales.get(*s)).collect::<Vec<_>>(), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(scales.get(Fp8Scale::ScaleDQ), 1.0);
    }

    #[test]
    fn each_scale_has_a_place_and_a_name_of_its_own() {
        let all = Fp8Scale::FORWARD.into_iter().chain(Fp8Scale::BACKWARD);
        let mut places: Vec<(usize, &str)> = all.map(|scale| (scale as usize, scale.name())).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.iter().map(|(place, _)| *place).collect::<Vec<_>>(), (0..13).collect::<Vec<_>>());
        for direction in [Direction::Forward, Direction::Backward] {
            let operands = direction.operands().iter().map(|o| Fp8Scale::of_operand(*o, o.written(direction) == Some(true)));
            assert!(operands.clone().all(|scale| Fp8Scale::of(direction).contains(&scale)), "{}", direction.name());
        }
    }

    #[test]
    fn every_scale_is_a_finite_number_above_zero() {
        let forward = spec().validate().unwrap();
        let backward = spec().backward().validate().unwrap();
        for declared in [forward.params(), backward.params()] {
            for (n, wrong) in declared.iter().enumerate() {
                for value in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, 3.0] {
                    let mut all = vec![[1.0]; declared.len()];
                    all[n] = [value];
                    let values: Vec<ParamValue<'_>> = all.iter().map(|x| ParamValue::F32(x)).collect();
                    let fields: Vec<String> =
                        Fp8Scales::mistakes(&forward, declared, &values).into_iter().map(|error| error.field).collect();
                    let is_usable = value == 3.0 || value == f32::MIN_POSITIVE;
                    assert_eq!(fields, if is_usable { Vec::new() } else { vec![format!("parameter {}", wrong.name)] }, "{value}");
                }
            }
        }
        // A score_mod's own tensor named `scale_o` is not an FP8 scale, so it may be negative.
        let own = spec().with_dtype(DType::BF16).score_mod("tensor scale_o[]: f32; score * scale_o".parse().unwrap());
        let own = own.validate().unwrap();
        assert!(Fp8Scales::mistakes(&own, own.params(), &[ParamValue::F32(&[-1.0])]).is_empty());
    }

    #[test]
    fn results_may_be_of_other_types() {
        let base = spec().validate().unwrap();
        for o in [DType::F8E5M2, DType::F16, DType::BF16] {
            let problem = spec().with_output_in(o).validate().unwrap();
            assert_eq!((problem.dtype_of(Operand::O), problem.dtype_of(Operand::K)), (o, DType::F8E4M3));
            assert_ne!(problem, base);
        }
        assert_eq!(spec().with_output_in(DType::F8E4M3).validate().unwrap(), base);
        let refused = |spec: AttentionSpec| spec.validate().unwrap_err().0.into_iter().map(|e| e.field).collect::<Vec<_>>();
        assert_eq!(refused(spec().with_output_in(DType::F32)), ["o_dtype"]);
        let wide = spec().with_dtype(DType::BF16);
        assert_eq!(refused(wide.clone().with_output_in(DType::F16)), ["o_dtype"]);
        assert!(wide.with_output_in(DType::BF16).validate().is_ok());
    }

    #[test]
    fn gradients_may_be_of_other_types() {
        let problem = spec().backward().with_upstream_in(DType::F8E5M2).with_gradients_in(DType::BF16).validate().unwrap();
        assert_eq!(problem.dtype_of(Operand::O), DType::F8E4M3);
        assert_eq!((problem.dtype_of(Operand::DO), problem.dtype_of(Operand::DK)), (DType::F8E5M2, DType::BF16));
        let plain = spec().backward().validate().unwrap();
        assert_eq!((plain.dtype_of(Operand::DO), plain.dtype_of(Operand::DV)), (DType::F8E4M3, DType::F8E4M3));
        assert_ne!(plain, problem);
        let refused = spec().backward().with_upstream_in(DType::BF16).with_gradients_in(DType::F32).validate().unwrap_err();
        assert_eq!(refused.0.into_iter().map(|e| e.field).collect::<Vec<_>>(), ["d_o_dtype", "gradient_dtype"]);
    }

    #[test]
    fn a_score_mod_cannot_declare_a_scale_too() {
        let own: ScoreMod = "tensor scale_s[head]: f32;\nscore + scale_s".parse().unwrap();
        let told = spec().score_mod(own).validate().unwrap_err().to_string();
        assert!(told.contains("parameter scale_s") && told.contains("a reserved name"), "{told}");
    }

    #[test]
    fn calls_have_room_for_each_amax_once() {
        let wrong = |dtype, given: &[Amax]| {
            let problem = spec().with_dtype(dtype).validate().unwrap();
            let errors = Amax::check(&problem, Direction::Forward, given.iter().copied());
            errors.into_iter().map(|e| format!("{} {}", e.field, e.value)).collect::<Vec<_>>()
        };
        assert!(wrong(DType::F8E5M2, &[Amax::O, Amax::S]).is_empty() && wrong(DType::F16, &[]).is_empty());
        assert_eq!(wrong(DType::F16, &[Amax::O]), ["amax_o an output"]);
        assert_eq!(wrong(DType::F8E4M3, &[Amax::DQ, Amax::O, Amax::O]), ["amax_dq an output", "amax_o two outputs", "amax_s nothing"]);
    }

    #[test]
    fn scales_are_made_of_what_tells_something() {
        for amax in [0.0, f32::NAN, f32::INFINITY, -1.0, f32::from_bits(1)] {
            assert_eq!(scale_of(amax, DType::F8E4M3, 0), 1.0, "{amax}");
        }
        for (amax, dtype) in [(0.37, DType::F8E4M3), (1e-9, DType::F8E5M2), (1e9, DType::F8E4M3)] {
            let scale = scale_of(amax, dtype, 0);
            assert!((scale * amax / dtype.largest() - 1.0).abs() < 1e-6 && scale_of(amax, dtype, 2) == scale / 4.0, "{amax}");
        }
        assert_eq!((amax_of(&[]), amax_of(&[1.0, -3.0, 2.0])), (0.0, 3.0));
        assert!(amax_of(&[1.0, f32::NAN, 9.0]).is_nan() && amax_of(&[f32::NEG_INFINITY]).is_infinite());
    }
}
