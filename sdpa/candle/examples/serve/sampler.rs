//! Sampling of the next token.

use crate::weights::Random;
use candle_core::{Result, bail};

/// The choice among the tokens of a distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sampling {
    /// Divides the logits. 0 selects the most probable token.
    pub(crate) temperature: f32,
    /// Samples among the fewest most probable tokens whose probabilities sum to this number, more than 0 and at most 1.
    pub(crate) top_p: f32,
    pub(crate) seed: u64,
}

impl Sampling {
    pub(crate) const GREEDY: Sampling = Sampling { temperature: 0., top_p: 1., seed: 0 };

    pub(crate) fn check(&self) -> Result<()> {
        if !(self.temperature >= 0. && self.temperature.is_finite()) {
            bail!("temperature: got {}, expected a finite number, at least 0", self.temperature);
        }
        if !(self.top_p > 0. && self.top_p <= 1.) {
            bail!("top_p: got {}, expected a number above 0 and at most 1", self.top_p);
        }
        Ok(())
    }
}

/// A sampler with the random numbers of one request, so that its text does not depend on the other requests of a batch.
#[derive(Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    random: Random,
}

impl Sampler {
    pub(crate) fn new(sampling: Sampling) -> Sampler {
        Sampler { sampling, random: Random::new(sampling.seed) }
    }

    /// Returns a token. NaN logits are an error: every choice would be arbitrary.
    pub(crate) fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        if logits.is_empty() || logits.iter().any(|x| x.is_nan()) {
            bail!("logits: got {} tokens, or NaN; expected a number for each token", logits.len());
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        if self.sampling.temperature == 0. {
            return Ok(order[0] as u32);
        }
        let largest = logits[order[0]];
        let weight = |token: usize| f64::from((logits[token] - largest) / self.sampling.temperature).exp();
        let total: f64 = order.iter().map(|token| weight(*token)).sum();
        // The nucleus: tokens in falling order, up to the one that reaches `top_p`.
        let (mut kept, mut sum) = (0, 0.);
        while kept < order.len() && (kept == 0 || sum < f64::from(self.sampling.top_p) * total) {
            sum += weight(order[kept]);
            kept += 1;
        }
        let mut rest = f64::from(self.random.number()) * sum;
        let chosen = order[..kept].iter().find(|token| {
            rest -= weight(**token);
            rest < 0.
        });
        Ok(*chosen.unwrap_or(&order[kept - 1]) as u32)
    }
}
