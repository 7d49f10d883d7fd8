//! A training step and greedy generation.

use crate::decoder::Decoder;
use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use sdpa_candle::{Documents, KvCache};

/// Returns the activations (tokens, hidden) of packed sequences.
pub(crate) fn packed(model: &Decoder, sequences: &[&[u32]]) -> Result<Tensor> {
    let device = &Device::Cpu;
    let longest = sequences.iter().map(|s| s.len()).max().unwrap_or_default();
    let ends = sequences.iter().scan(0, |end, sequence| {
        *end += sequence.len() as u32;
        Some(*end)
    });
    let documents = Documents::new(&Tensor::new([0].into_iter().chain(ends).collect::<Vec<u32>>(), device)?, longest);
    let positions: Vec<u32> = sequences.iter().flat_map(|sequence| 0..sequence.len() as u32).collect();
    model.forward(&Tensor::new(sequences.concat(), device)?, &Tensor::new(positions, device)?, &mut |_, attention, [q, k, v]| {
        attention.forward_packed(&documents, q, k, v)
    })
}

/// Returns the mean cross entropy of the next token over packed sequences.
pub(crate) fn loss(model: &Decoder, sequences: &[&[u32]]) -> Result<Tensor> {
    let inputs: Vec<&[u32]> = sequences.iter().map(|s| &s[..s.len() - 1]).collect();
    let targets: Vec<u32> = sequences.iter().flat_map(|s| &s[1..]).copied().collect();
    let logits = model.logits(&packed(model, &inputs)?)?;
    candle_nn::loss::cross_entropy(&logits, &Tensor::new(targets, &Device::Cpu)?)
}

/// Returns the variables whose gradient is not 0 everywhere, and the names of the others.
pub(crate) fn trained(variables: &[(String, Var)], gradients: &GradStore) -> Result<(usize, Vec<String>)> {
    let mut without = Vec::new();
    for (name, variable) in variables {
        let size = match gradients.get(variable) {
            Some(gradient) => gradient.abs()?.max_all()?.to_scalar::<f32>()?,
            None => 0.,
        };
        if size == 0. {
            without.push(name.clone());
        }
    }
    Ok((variables.len() - without.len(), without))
}

/// Returns the most probable token after the last of these activations.
pub(crate) fn greedy(model: &Decoder, x: &Tensor) -> Result<u32> {
    model.logits(&x.narrow(0, x.dim(0)? - 1, 1)?)?.squeeze(0)?.argmax(0)?.to_scalar()
}

/// Continues a prompt by the most probable tokens, with a KV cache. The first call of the model has the whole prompt, each other one a token.
pub(crate) fn generate(model: &Decoder, prompt: &[u32], tokens: usize) -> Result<Vec<u32>> {
    let device = &Device::Cpu;
    let mut caches: Vec<KvCache> = (0..model.config().layers).map(|_| KvCache::new(prompt.len() + tokens)).collect();
    let mut text = prompt.to_vec();
    let mut done = 0;
    while text.len() < prompt.len() + tokens {
        let ids = Tensor::new(&text[done..], device)?;
        let positions = Tensor::arange(done as u32, text.len() as u32, device)?;
        let x = model.forward(&ids, &positions, &mut |layer, attention, qkv| {
            // The cache is (batch, heads, seq, dim), and refuses tensors that require a gradient.
            let [q, k, v] = qkv.map(|x| x.detach().transpose(0, 1)?.unsqueeze(0));
            let (k, v) = caches[layer].append(&k?, &v?)?;
            attention.forward(&q?, &k, &v)?.squeeze(0)?.transpose(0, 1)
        })?;
        done = text.len();
        text.push(greedy(model, &x)?);
    }
    Ok(text.split_off(prompt.len()))
}
