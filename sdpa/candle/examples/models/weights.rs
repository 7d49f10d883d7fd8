//! Random weights.

use crate::config::{Config, Family};
use crate::decoder::Decoder;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

/// Random numbers that are identical in every run (xorshift): candle's own cannot be seeded on the CPU.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns a number from 0 up to 1.
    pub(crate) fn number(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((f64::from(self.number()) * end as f64) as usize).min(end.saturating_sub(1))
    }
}

/// Creates the variables of a model, under the names of candle-transformers.
pub(crate) fn random(config: &Config, seed: u64, device: &Device) -> Result<VarMap> {
    let variables = VarMap::new();
    Decoder::load(config, &VarBuilder::from_varmap(&variables, DType::F32, device))?;
    let mut random = Random::new(seed);
    for (name, variable) in named(&variables) {
        // Gemma 3 adds 1 to the weights of its norms.
        let middle = if name.ends_with("norm.weight") && config.family != Family::Gemma3 { 1. } else { 0. };
        let size = if variable.rank() == 1 { 0.2 } else { 2. / (variable.dims()[1] as f32).sqrt() };
        // With a larger embedding, a tied model repeats its last token.
        let size = if config.is_tied() && name.contains("embed_tokens") { size / 6. } else { size };
        let numbers = (0..variable.elem_count()).map(|_| middle + size * (2. * random.number() - 1.)).collect();
        variable.set(&Tensor::from_vec(numbers, variable.dims(), device)?)?;
    }
    Ok(variables)
}

/// Returns the variables in the order of their names.
pub(crate) fn named(variables: &VarMap) -> Vec<(String, candle_core::Var)> {
    let data = variables.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut named: Vec<_> = data.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    named
}
