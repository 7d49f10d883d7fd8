//! Scales of 8-bit floats on the command line: read from the input if it has them, and otherwise computed from the current numbers.
//!
//! A first run reports the amax values of its results, and a second run uses the scales computed from them.

use crate::data::{Data, Element};
use crate::exit::{Failure, Mistakes};
use crate::params::{Bound, Values};
use crate::request::Request;
use sdpa::fp8::{amax_of, scale_of};
use sdpa::{Amax, Direction, Fp8Scale, HostAmax, Operand, Problem, SpecError};
use std::collections::BTreeMap;

/// The scales of 8-bit floats of a run, and the amax values (largest magnitudes) that it reported.
#[derive(Debug, Default)]
pub(crate) struct Scales {
    given: BTreeMap<Fp8Scale, f32>,
    made: BTreeMap<Fp8Scale, f32>,
    pub(crate) told: Vec<(Amax, f32)>,
}

/// Headroom for other rounding errors, in powers of two.
const MARGIN: i32 = 1;

/// Returns every scale of 8-bit floats that a pass may have.
pub(crate) fn all() -> Vec<Fp8Scale> {
    let mut all = [Fp8Scale::of(Direction::Forward), Fp8Scale::of(Direction::Backward)].concat();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns the scale of 8-bit floats whose parameter has this name.
pub(crate) fn named(name: &str) -> Option<Fp8Scale> {
    all().into_iter().find(|scale| scale.name() == name)
}

/// Returns the largest finite magnitude after descaling.
fn amax(data: &Data) -> f32 {
    let mut row = vec![0.0; data.len()];
    data.row(0, &mut row);
    let finite: Vec<f32> = row.into_iter().map(|x| x as f32).filter(|x| x.is_finite()).collect();
    amax_of(&finite)
}

/// Rounds numbers to 8-bit floats with this descale, or with one that maps the largest magnitude to the largest number of the type.
pub(crate) fn narrow(element: Element, wide: &Data, descale: Option<f32>) -> Result<Data, String> {
    let scale = descale.map_or_else(|| scale_of(amax(wide), element.dtype(), 0), f32::recip);
    let mut data = Data::zeros(element, wide.len())?;
    data.set_descale(descale.unwrap_or(scale.recip()));
    for at in 0..wide.len() {
        data.set(at, wide.get(at) as f32 * scale);
    }
    Ok(data)
}

impl Scales {
    /// Reads the scales of 8-bit floats from the input file, as far as it has them.
    ///
    /// # Errors
    /// Returns the scales that cannot be read, or that are not finite and above 0.
    pub(crate) fn read(request: &Request, seed: u64) -> Result<Scales, Failure> {
        let mut given = BTreeMap::new();
        let mut mistakes = Mistakes::default();
        for planned in request.params.iter().filter(|planned| planned.is_read()) {
            let Some(scale) = named(&planned.declared.name) else { continue };
            let (bound, _) = planned.load(request.header(), seed).map_err(|e| Failure::environment("memory", e))?;
            let value = bound.at([0; 4]) as f32;
            if let Err(SpecError { value, rule, .. }) = scale.check(value) {
                mistakes.add(format!("--input: {scale}"), format!("got {value}, expected {rule}"));
            }
            given.insert(scale, value);
        }
        mistakes.finish(Some(Scales { given, ..Scales::default() }))
    }

    /// Returns the descale of an operand, if the input has it.
    pub(crate) fn given(&self, operand: Operand) -> Option<f32> {
        self.given.get(&Fp8Scale::of_operand(operand, false)).copied()
    }

    /// Returns a scale, or 1 if it is not set.
    pub(crate) fn get(&self, scale: Fp8Scale) -> f32 {
        self.given.get(&scale).or_else(|| self.made.get(&scale)).copied().unwrap_or(1.0)
    }

    fn make(&mut self, scale: Fp8Scale, value: f32) {
        self.made.insert(scale, value);
    }

    /// Sets the scales of the operands from their numbers, and that of P, which is at most 1, or at most the dropout scale.
    pub(crate) fn begin(&mut self, request: &Request, [q, k, v]: [&Data; 3], gradient: Option<(&Data, Option<&Data>)>) {
        let dropped = request.problem.dropout().map_or(1.0, |dropout| dropout.scale());
        let weights = scale_of(dropped, request.problem.dtype(), 0);
        for (scale, value) in [
            (Fp8Scale::DescaleQ, q.descale()),
            (Fp8Scale::DescaleK, k.descale()),
            (Fp8Scale::DescaleV, v.descale()),
            (Fp8Scale::ScaleS, weights),
        ] {
            self.make(scale, value);
        }
        self.make(Fp8Scale::DescaleS, self.get(Fp8Scale::ScaleS).recip());
        // O is an average of V's rows, so |O| is at most the largest |V| times the dropout scale.
        self.result(request, Operand::O, dropped * amax(v), 0);
        if let Some((d_o, o)) = gradient {
            self.make(Fp8Scale::DescaleDO, d_o.descale());
            if let Some(o) = o {
                self.make(Fp8Scale::DescaleO, o.descale());
            }
            // Estimate the largest |dP − δ|, a sum of dim_v products of either sign, as six standard deviations.
            let deviation = (request.problem.dim_v() as f32).sqrt() * amax(v) * amax(d_o) / 4.0;
            self.slopes(request, dropped * deviation * request.attn_scale().abs());
        }
    }

    fn result(&mut self, request: &Request, operand: Operand, amax: f32, margin: i32) {
        let dtype = request.backward.as_ref().map_or(request.problem.dtype_of(operand), |b| b.problem.dtype_of(operand));
        let scale = Fp8Scale::of_operand(operand, true);
        self.make(scale, if dtype.is_fp8() { scale_of(amax, dtype, margin) } else { 1.0 });
        if !dtype.is_fp8() {
            self.given.remove(&scale);
        }
        if operand == Operand::O {
            self.make(Fp8Scale::DescaleO, self.get(scale).recip());
        }
    }

    fn slopes(&mut self, request: &Request, amax: f32) {
        let Some(backward) = &request.backward else { return };
        self.make(Fp8Scale::ScaleDP, scale_of(amax, backward.problem.dtype_of(Operand::DO), MARGIN));
        self.make(Fp8Scale::DescaleDP, self.get(Fp8Scale::ScaleDP).recip());
    }

    /// Computes scales from the amax values (largest magnitudes) that a run reported.
    pub(crate) fn learn(&mut self, request: &Request) {
        for (of, amax) in self.told.clone() {
            match of {
                Amax::S => {}
                Amax::O => self.result(request, Operand::O, amax, 0),
                Amax::DP => self.slopes(request, amax),
                Amax::DQ => self.result(request, Operand::DQ, amax, MARGIN),
                Amax::DK => self.result(request, Operand::DK, amax, MARGIN),
                Amax::DV => self.result(request, Operand::DV, amax, MARGIN),
            }
        }
    }

    /// Stores the scales in the declared parameters that a call receives.
    pub(crate) fn bind(&self, params: &mut [Bound]) {
        for bound in params {
            if let Some(scale) = named(&bound.name) {
                bound.values = Values::Float(Data::F32(vec![self.get(scale)]));
            }
        }
    }

    /// Returns slots in which a call stores the amax values (largest magnitudes) that the pass reports.
    pub(crate) fn room(&mut self, forward: &Problem, direction: Direction) -> Vec<HostAmax<'_>> {
        let told = Amax::told(forward, direction);
        self.told.retain(|(of, _)| !told.contains(of));
        let first = self.told.len();
        self.told.extend(told.iter().map(|of| (*of, f32::NAN)));
        self.told[first..].iter_mut().map(|(of, value)| HostAmax::new(*of, value)).collect()
    }

    /// Returns the amax (largest magnitude) of a tensor, if a pass reported it.
    pub(crate) fn reported(&self, which: Amax) -> Option<f64> {
        self.told.iter().find(|(of, _)| *of == which).map(|(_, number)| f64::from(*number))
    }

    /// Returns every scale and amax value, each with its name in files.
    pub(crate) fn numbers(&self) -> Vec<(String, f32)> {
        let scales = self.made.keys().chain(self.given.keys()).copied().collect::<std::collections::BTreeSet<_>>();
        let scales = scales.into_iter().map(|scale| (scale.name().to_owned(), self.get(scale)));
        scales.chain(self.told.iter().map(|(of, value)| (of.name().to_owned(), *value))).collect()
    }

    /// Returns the scales and types of 8-bit floats for the oracle.
    pub(crate) fn told_to_oracle(&self, slope: Element, gradient: Element) -> sdpa_oracle::Narrow {
        let wide = |scale: Fp8Scale| f64::from(self.get(scale));
        sdpa_oracle::Narrow {
            weights: wide(Fp8Scale::ScaleS),
            o: wide(Fp8Scale::DescaleO).recip(),
            slopes: wide(Fp8Scale::ScaleDP),
            slope: slope.into(),
            gradients: [Fp8Scale::ScaleDQ, Fp8Scale::ScaleDK, Fp8Scale::ScaleDV].map(wide),
            gradient: gradient.into(),
        }
    }
}
