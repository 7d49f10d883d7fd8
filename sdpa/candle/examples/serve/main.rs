//! A serving loop: paged KV cache, continuous batching of chunked prefill and decode, sampling. The model is one of the example `models`, with random
//! weights.
//!
//! ```text
//! cargo run --release --package sdpa-candle --example serve -- --model qwen3 --requests 64
//! ```

#[path = "../models/config.rs"]
mod config;
#[path = "../models/decoder.rs"]
mod decoder;
mod engine;
mod sampler;
#[cfg(test)]
mod tests;
#[path = "../models/weights.rs"]
mod weights;

use candle_core::{DType, Device, Result, bail};
use candle_nn::VarBuilder;
use config::{Config, Family};
use decoder::Decoder;
use engine::{Engine, Request};
use sampler::Sampling;
use std::collections::HashMap;
use std::time::Instant;
use weights::Random;

const USAGE: &str = "serve [OPTIONS]
  --model NAME       llama, gemma3 or qwen3 (llama)
  --requests N       (32)
  --budget N         tokens of a step (64)
  --pages N          pages of the KV cache (128)
  --page-size N      tokens of a page (16)
  --temperature X    0 for the most probable token (0)
  --top-p X          (1)
  --seed N           (1)
  --device cpu|cuda  bf16 on CUDA, f32 on the CPU (cpu)";

#[derive(Debug)]
struct Options {
    family: Family,
    requests: usize,
    budget: usize,
    pages: usize,
    page_size: usize,
    sampling: Sampling,
    cuda: bool,
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
        text.parse().map_err(|_| candle_core::Error::msg(format!("{name}: got {text:?}, expected a number\n\n{USAGE}")))
    }
    let sampling = Sampling { seed: 1, ..Sampling::GREEDY };
    let mut options = Options { family: Family::Llama, requests: 32, budget: 64, pages: 128, page_size: 16, sampling, cuda: false };
    while let Some(name) = arguments.next() {
        let Some(value) = arguments.next() else { bail!("{name}: got no value\n\n{USAGE}") };
        match name.as_str() {
            "--model" => match Family::ALL.into_iter().find(|family| family.name() == value) {
                Some(family) => options.family = family,
                None => bail!("--model: got {value:?}, expected llama, gemma3 or qwen3"),
            },
            "--requests" => options.requests = number(&name, &value)?,
            "--budget" => options.budget = number(&name, &value)?,
            "--pages" => options.pages = number(&name, &value)?,
            "--page-size" => options.page_size = number(&name, &value)?,
            "--temperature" => options.sampling.temperature = number(&name, &value)?,
            "--top-p" => options.sampling.top_p = number(&name, &value)?,
            "--seed" => options.sampling.seed = number(&name, &value)?,
            "--device" if value == "cpu" || value == "cuda" => options.cuda = value == "cuda",
            _ => bail!("got {name} {value}\n\n{USAGE}"),
        }
    }
    Ok(options)
}

/// Loads a model whose weights are no variables: attention over a KV cache refuses tensors that require a gradient.
fn load(config: &Config, seed: u64, dtype: DType, device: &Device) -> Result<Decoder> {
    let variables = weights::random(config, seed, &Device::Cpu)?;
    let tensors: HashMap<_, _> = weights::named(&variables)
        .into_iter()
        .map(|(name, variable)| Ok((name, variable.detach().to_dtype(dtype)?.to_device(device)?)))
        .collect::<Result<_>>()?;
    Decoder::load(config, &VarBuilder::from_tensors(tensors, dtype, device))
}

/// Returns requests with prompts and texts of different lengths.
fn requests(config: &Config, sampling: Sampling, count: usize) -> Vec<Request> {
    let mut random = Random::new(sampling.seed);
    let mut request = |n: usize| {
        let prompt = (0..1 + random.below(60)).map(|_| random.below(config.vocabulary) as u32).collect();
        let sampling = Sampling { seed: sampling.seed.wrapping_add(n as u64), ..sampling };
        Request { prompt, tokens: 1 + random.below(40), sampling }
    };
    (0..count).map(&mut request).collect()
}

fn main() -> Result<()> {
    let options = options(std::env::args().skip(1))?;
    // On a stream of its own, candle orders the uses of a tensor.
    let device = if options.cuda { Device::new_cuda_with_stream(0)? } else { Device::Cpu };
    let dtype = if options.cuda { DType::BF16 } else { DType::F32 };
    let config = Config::small(options.family);
    let model = load(&config, 1, dtype, &device)?;
    let mut engine = Engine::new(&model, [options.pages, options.page_size], options.budget, dtype, &device)?;
    for request in requests(&config, options.sampling, options.requests) {
        engine.submit(request)?;
    }
    let started = Instant::now();
    let texts = engine.run()?;
    let (seconds, counts) = (started.elapsed().as_secs_f64(), engine.counts);
    for (n, text) in texts.iter().enumerate().take(4) {
        println!("request {n}: {} tokens, {:?}…", text.len(), &text[..text.len().min(8)]);
    }
    println!(
        "{} requests in {} steps, {} of them with decode and prefill, up to {} requests in a step",
        texts.len(),
        counts.steps,
        counts.mixed,
        counts.widest
    );
    println!(
        "{} tokens of prompts and {} generated in {seconds:.2} s: {:.0} generated tokens/s",
        counts.prefilled,
        counts.generated,
        counts.generated as f64 / seconds
    );
    println!("{} of {} pages are free", engine.free_pages(), options.pages);
    Ok(())
}
