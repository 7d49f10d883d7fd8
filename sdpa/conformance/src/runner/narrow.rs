//! 8-bit floats: the scales of a call, and conversion of operands and results to real numbers.

use super::blocks::Blocks;
use crate::oracle::{self, element};
use crate::random::Random;
use sdpa::fp8::scale_of;
use sdpa::{
    Amax, AttentionSpec, BackwardProblem, BackwardSpec, DType, Direction, F8E4M3, F8E5M2, Fp8Scale, HostAmax, Layout, Operand, Param,
    Problem, Shape,
};

/// The scales of a problem with 8-bit floats; all are 1 for other types.
#[derive(Debug)]
pub(super) struct Narrowed {
    dtype: DType,
    scales: [f32; 13],
    /// Headroom in powers of two.
    margin: i32,
    /// Block scales, in place of tensor scales.
    blocks: Option<Blocks>,
}

/// Returns the largest magnitude.
fn amax(numbers: &[f64]) -> f32 {
    numbers.iter().filter(|x| x.is_finite()).fold(0.0, |amax, x| x.abs().max(amax)) as f32
}

impl Narrowed {
    /// Draws descales of operands, of any size.
    pub(super) fn draw(dtype: DType, seed: u64) -> Narrowed {
        let mut random = Random::new(seed ^ 0xf8);
        let mut narrowed = Narrowed { dtype, scales: [1.0; 13], margin: random.between(0, 2) as i32, blocks: None };
        if dtype.is_fp8() {
            for scale in [Fp8Scale::DescaleQ, Fp8Scale::DescaleK, Fp8Scale::DescaleV, Fp8Scale::DescaleDO] {
                narrowed.set(scale, random.pick(&[1.0, 0.0625, 0.3, 2.5]));
            }
        }
        narrowed
    }

    /// Adds block scales if the specification has them.
    pub(super) fn in_blocks(mut self, spec: &AttentionSpec, seed: u64) -> Narrowed {
        self.blocks = Blocks::draw(spec, seed);
        if self.blocks.is_some() {
            self.scales = [1.0; 13];
        }
        self
    }

    fn set(&mut self, scale: Fp8Scale, value: f32) {
        self.scales[scale as usize] = value;
    }

    fn get(&self, scale: Fp8Scale) -> f32 {
        self.scales[scale as usize]
    }

    /// Sets the scales of the forward pass from its values, which are given before descaling.
    pub(super) fn forward(&mut self, problem: &Problem, values: &[f64]) {
        if !self.dtype.is_fp8() || self.blocks.is_some() {
            return;
        }
        // The largest P is at most 1, or at most the dropout scale if there is dropout.
        let most = problem.dropout().map_or(1.0, |dropout| dropout.scale());
        let weights = scale_of(most, self.dtype, self.margin);
        let o = scale_of(most * amax(values) * self.get(Fp8Scale::DescaleV), problem.dtype_of(Operand::O), self.margin);
        let o = if problem.dtype_of(Operand::O).is_fp8() { o } else { 1.5 };
        for (scale, value) in
            [(Fp8Scale::ScaleS, weights), (Fp8Scale::DescaleS, weights.recip()), (Fp8Scale::ScaleO, o), (Fp8Scale::DescaleO, o.recip())]
        {
            self.set(scale, value);
        }
    }

    /// Sets the scales of the backward pass. `d_o` and the gradients are given as real numbers.
    pub(super) fn backward(&mut self, problem: &BackwardProblem, (values, upstream): (&[f64], &[f64]), scale: f64, gradients: [&[f64]; 3]) {
        let forward = problem.forward();
        let most = forward.dropout().map_or(1.0, |dropout| dropout.scale());
        // dP and δ are sums of products of either sign. Their difference is estimated as at most six standard deviations.
        let deviation = (forward.dim_v() as f32).sqrt() * amax(values) * self.get(Fp8Scale::DescaleV) * amax(upstream) / 4.0;
        let slopes = scale_of(most * deviation * scale.abs() as f32, problem.dtype_of(Operand::DO), 1);
        self.set(Fp8Scale::ScaleDP, slopes);
        self.set(Fp8Scale::DescaleDP, slopes.recip());
        let dtype = problem.dtype_of(Operand::DQ);
        for (scale, gradient) in [Fp8Scale::ScaleDQ, Fp8Scale::ScaleDK, Fp8Scale::ScaleDV].into_iter().zip(gradients) {
            // A margin of 1 leaves headroom for rounding.
            self.set(scale, if dtype.is_fp8() { scale_of(amax(gradient), dtype, 1) } else { 0.75 });
        }
    }

    /// Returns the factor from stored elements of an input to real numbers.
    pub(super) fn descale(&self, operand: Operand) -> f64 {
        self.get(Fp8Scale::of_operand(operand, false)).into()
    }

    /// Converts stored elements of an input to real numbers.
    pub(super) fn real(&self, operand: Operand, mut elements: Vec<f64>) -> Vec<f64> {
        match self.blocks.as_ref().and_then(|blocks| blocks.of(operand)) {
            Some(each) => elements.iter_mut().zip(each).for_each(|(x, scale)| *x *= scale),
            None => elements.iter_mut().for_each(|x| *x *= self.descale(operand)),
        }
        elements
    }

    /// Converts stored elements of a result to real numbers.
    pub(super) fn stands_for(&self, operand: Operand, mut elements: Vec<f64>) -> Vec<f64> {
        let scale = f64::from(self.get(Fp8Scale::of_operand(operand, true)));
        elements.iter_mut().for_each(|x| *x /= scale);
        elements
    }

    /// Converts real numbers to stored elements, before rounding.
    pub(super) fn rounds_to(&self, operand: Operand, mut real: Vec<f64>) -> Vec<f64> {
        let scale = f64::from(self.get(Fp8Scale::of_operand(operand, true)));
        real.iter_mut().for_each(|x| *x *= scale);
        real
    }

    /// Appends the scales of a pass to other parameters.
    pub(super) fn params<'a>(&'a self, direction: Direction, mut params: Vec<Param<'a>>) -> Vec<Param<'a>> {
        params.extend(self.blocks.iter().flat_map(Blocks::params));
        let scales = Fp8Scale::of(direction).iter().filter(|_| self.dtype.is_fp8() && self.blocks.is_none());
        params.extend(scales.map(|scale| {
            let at = *scale as usize;
            Param::new(scale.name(), &self.scales[at..=at])
        }));
        params
    }

    /// Returns slots for the amax values that a pass reports, set to NaN.
    pub(super) fn amax(&self, direction: Direction) -> Vec<(Amax, f32)> {
        let told = match (self.dtype.is_fp8(), &self.blocks) {
            (false, _) => &[],
            (true, None) => Amax::of(direction),
            (true, Some(_)) => &[Amax::O][..],
        };
        told.iter().map(|amax| (*amax, f32::NAN)).collect()
    }

    /// Returns the scales that the oracle needs for a forward pass.
    pub(super) fn told(&self, problem: &Problem) -> Option<oracle::Narrow> {
        let told = sdpa_oracle::Narrow::forward(self.get(Fp8Scale::ScaleS).into(), self.get(Fp8Scale::ScaleO).into());
        self.dtype.is_fp8().then(|| oracle::Narrow { told, o: problem.dtype_of(Operand::O) })
    }

    /// Returns the scales that the oracle needs for a backward pass.
    pub(super) fn told_backward(&self, problem: &BackwardProblem) -> Option<oracle::Narrow> {
        let narrow = self.told(problem.forward())?;
        let gradients = [Fp8Scale::ScaleDQ, Fp8Scale::ScaleDK, Fp8Scale::ScaleDV].map(|scale| self.get(scale).into());
        let told = sdpa_oracle::Narrow {
            slopes: self.get(Fp8Scale::ScaleDP).into(),
            slope: element(problem.dtype_of(Operand::DO)),
            gradients,
            gradient: element(problem.dtype_of(Operand::DQ)),
            ..narrow.told
        };
        Some(oracle::Narrow { told, ..narrow })
    }

    /// Checks amax of stored results: rounding is monotonic, so amax, scaled and rounded, equals the largest stored element. The oracle checks amax of P and
    /// dP.
    pub(super) fn judge<const N: usize>(&self, told: &[(Amax, f32)], dtype: DType, results: [(Amax, &Vec<f64>); N]) -> Result<(), String> {
        for (which, number) in told {
            let Some((_, elements)) = results.iter().find(|(of, _)| of == which) else { continue };
            let by = match which {
                Amax::O => Fp8Scale::ScaleO,
                Amax::DQ => Fp8Scale::ScaleDQ,
                Amax::DK => Fp8Scale::ScaleDK,
                Amax::DV => Fp8Scale::ScaleDV,
                Amax::S | Amax::DP => continue,
            };
            let (want, scaled) = (amax(elements), number * self.get(by));
            let rounded = match dtype {
                DType::F8E4M3 => F8E4M3::round(scaled),
                DType::F8E5M2 => F8E5M2::round(scaled),
                DType::F16 => half::f16::from_f32(scaled).to_f32(),
                DType::BF16 => half::bf16::from_f32(scaled).to_f32(),
                DType::F32 | DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => scaled,
            };
            if rounded != want {
                return Err(format!("{which} is {number}, times its scale {scaled}, and the largest element is {want}"));
            }
        }
        Ok(())
    }
}

/// Draws a random problem with 8-bit floats, often one that a cuDNN engine supports. Its lengths are not multiples of a tile, and it may
/// have bands and per-sequence lengths.
pub fn random_fp8(random: &mut Random) -> AttentionSpec {
    let heads_kv = random.between(1, 4);
    let dims = random.pick(&[[128, 128], [128, 128], [64, 64], [192, 128], [256, 256], [96, 96]]);
    let shape = Shape {
        batch: random.between(1, 3),
        heads_q: heads_kv * random.pick(&[1, 1, 2]),
        heads_kv,
        seq_q: random.between(2, 400),
        seq_kv: random.between(2, 500),
        dim_qk: dims[0],
        dim_v: dims[1],
    };
    let dtype = random.pick(&[DType::F8E4M3, DType::F8E4M3, DType::F8E5M2]);
    let mut spec = AttentionSpec::dense(dtype, shape, random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]));
    spec.o_dtype = random.pick(&[None, None, Some(DType::F8E5M2), Some(DType::F8E4M3)]);
    let masks: &[&str] = random.pick(&[
        &[][..],
        &["causal"],
        &["causal-bottom-right"],
        &["window:40,0"],
        &["window:30,9"],
        &["padding"],
        &["padding", "causal"],
    ]);
    spec.masks = masks.iter().filter_map(|mask| mask.parse().ok()).collect();
    spec.stats = random.between(0, 1) == 0;
    spec
}

/// Returns a backward problem of a forward problem with 8-bit floats. Half of them use the other 8-bit format for gradients.
pub fn random_fp8_gradients(spec: AttentionSpec, random: &mut Random) -> BackwardSpec {
    let other = random.pick(&[None, Some(DType::F8E5M2)]);
    let mut backward = spec.backward();
    (backward.d_o_dtype, backward.gradient_dtype) = (other, other);
    backward
}

/// Returns the amax of a tensor that a pass reported.
pub(super) fn reported(told: &[(Amax, f32)], which: Amax) -> Option<f64> {
    told.iter().find(|(of, _)| *of == which).map(|(_, number)| f64::from(*number))
}

/// Returns the slots as a call takes them.
pub(super) fn room(told: &mut [(Amax, f32)]) -> Vec<HostAmax<'_>> {
    told.iter_mut().map(|(of, value)| HostAmax::new(*of, value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_magnitudes_are_those_of_the_elements() {
        let mut narrowed = Narrowed::draw(DType::F8E4M3, 7);
        narrowed.set(Fp8Scale::ScaleO, 16.0);
        let elements = vec![-3.25, 26.0, 1.0];
        let judge = |told: f32| narrowed.judge(&[(Amax::O, told)], DType::F8E4M3, [(Amax::O, &elements)]);
        // The right amax is 26 / 16 = 1.625. A reported amax that rounds to 1.625 in 8 bits passes too.
        assert!(judge(1.625).is_ok() && judge(1.65).is_ok());
        for wrong in [0.0, 3.25, -1.625, 0.203, f32::NAN, f32::INFINITY] {
            assert!(judge(wrong).is_err(), "{wrong}");
        }
    }
}
