//! Llama, Gemma 3 and Qwen 3 with the attention and the differentiable ops of this crate, on random weights. The program trains each model for some steps and
//! generates tokens. With `--features originals` it also runs candle-transformers' models on the same weights.
//!
//! ```text
//! cargo run --release --package sdpa-candle --example models
//! ```

mod config;
mod decoder;
#[cfg(feature = "originals")]
mod originals;
mod task;
#[cfg(test)]
mod tests;
mod weights;

use candle_core::{DType, Device, Result};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder};
use config::{Config, Family};
use decoder::Decoder;
use std::time::Instant;
use weights::Random;

/// Returns a sequence of random tokens.
fn text(config: &Config, seed: u64, tokens: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..tokens).map(|_| random.below(config.vocabulary) as u32).collect()
}

fn main() -> Result<()> {
    for family in Family::ALL {
        let config = Config::small(family);
        let variables = weights::random(&config, 1, &Device::Cpu)?;
        let model = Decoder::load(&config, &VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
        let sequences = [text(&config, 2, 40), text(&config, 3, 25)];
        let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        let named = weights::named(&variables);

        #[cfg(feature = "originals")]
        {
            let mut original = originals::Original::load(&config, &variables)?;
            let (count, _) = task::trained(&named, &original.loss(sequences[0])?.backward()?)?;
            println!("{}: {count} of {} variables have a gradient in candle-transformers", family.name(), named.len());
        }
        let (count, _) = task::trained(&named, &task::loss(&model, &sequences)?.backward()?)?;
        println!("{}: {count} of {} variables have a gradient", family.name(), named.len());

        let mut optimizer = AdamW::new(variables.all_vars(), ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() })?;
        for step in 0..=30 {
            let loss = task::loss(&model, &sequences)?;
            if step % 10 == 0 {
                println!("{}: step {step}, loss {:.4}", family.name(), loss.to_scalar::<f32>()?);
            }
            optimizer.backward_step(&loss)?;
        }
        let started = Instant::now();
        let tokens = task::generate(&model, &sequences[0][..8], 40)?;
        println!("{}: {:?}…, {:.0} tokens/s", family.name(), &tokens[..8], 40. / started.elapsed().as_secs_f64());
    }
    Ok(())
}
