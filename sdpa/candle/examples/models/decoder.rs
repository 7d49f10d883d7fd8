//! Llama, Gemma 3 and Qwen 3 of candle-transformers, with the same names of weights. Compared with the originals, `rope`, `rms_norm` and
//! attention are those of sdpa-candle, and all sequences of a call are packed: activations are (tokens, …).

use crate::config::{Config, Family};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use sdpa_candle::{Align, Attention, Mask, library, ops};

/// Computes attention of layer `n` over `q`, `k` and `v` (tokens, heads, dim): within packed sequences, or over a KV cache.
pub(crate) type Attend<'a> = &'a mut dyn FnMut(usize, &Attention, [&Tensor; 3]) -> Result<Tensor>;

#[derive(Debug)]
struct Layer {
    attention: Attention,
    projections: [Tensor; 4],
    mlp: [Tensor; 3],
    head_norms: Option<[Tensor; 2]>,
    /// Before attention, after it (Gemma 3), before the MLP, after it (Gemma 3).
    norms: [Option<Tensor>; 4],
    rope: usize,
}

#[derive(Debug)]
pub(crate) struct Decoder {
    config: Config,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor,
    /// Cosines and sines (positions, dim / 2), of all layers and of those with a window.
    tables: [[Tensor; 2]; 2],
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)
}

/// Returns cosines and sines. The angles are f32, as in candle-transformers.
fn table(config: &Config, theta: f64, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let dim = config.dim;
    let frequencies: Vec<f32> = (0..dim).step_by(2).map(|i| 1f32 / theta.powf(i as f64 / dim as f64) as f32).collect();
    let frequencies = Tensor::from_vec(frequencies, (1, dim / 2), device)?;
    let positions = Tensor::arange(0u32, config.positions as u32, device)?.to_dtype(DType::F32)?.unsqueeze(1)?;
    let angles = positions.matmul(&frequencies)?;
    Ok([angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?])
}

impl Layer {
    fn load(config: &Config, n: usize, vb: &VarBuilder<'_>) -> Result<Layer> {
        let Config { hidden, intermediate, heads, heads_kv, dim, .. } = *config;
        let attention = vb.pp("self_attn");
        let norm = |name: &str| vb.get(hidden, &format!("{name}.weight"));
        let weight = |rows: usize, columns: usize, name: &str| attention.get((rows, columns), &format!("{name}_proj.weight"));
        let mlp = |rows: usize, columns: usize, name: &str| vb.get((rows, columns), &format!("mlp.{name}_proj.weight"));
        let head_norm = |name: &str| attention.get(dim, &format!("{name}_norm.weight"));
        let norms = match config.family {
            Family::Llama | Family::Qwen3 => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
            Family::Gemma3 => {
                ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"].map(Some)
            }
        };
        let [first, second, third, fourth] = norms.map(|name| name.map(norm).transpose());
        let window = config.has_window(n).then_some(config.window as i64);
        let mut attends = Attention::new().mask(Mask::window(window, Some(0), Align::Ends));
        if config.family == Family::Gemma3 {
            attends = attends.score_mod(library::softcap(config.softcaps[0]));
        }
        Ok(Layer {
            attention: attends,
            projections: [
                weight(heads * dim, hidden, "q")?,
                weight(heads_kv * dim, hidden, "k")?,
                weight(heads_kv * dim, hidden, "v")?,
                weight(hidden, heads * dim, "o")?,
            ],
            mlp: [mlp(intermediate, hidden, "gate")?, mlp(intermediate, hidden, "up")?, mlp(hidden, intermediate, "down")?],
            head_norms: if config.normalises_heads() { Some([head_norm("q")?, head_norm("k")?]) } else { None },
            norms: [first?, second?, third?, fourth?],
            rope: usize::from(config.has_window(n)),
        })
    }
}

impl Decoder {
    pub(crate) fn load(config: &Config, vb: &VarBuilder<'_>) -> Result<Decoder> {
        let model = vb.pp("model");
        let embedding = model.get((config.vocabulary, config.hidden), "embed_tokens.weight")?;
        let layers = (0..config.layers).map(|n| Layer::load(config, n, &model.pp("layers").pp(n))).collect::<Result<_>>()?;
        let head = if config.is_tied() { embedding.clone() } else { vb.get((config.vocabulary, config.hidden), "lm_head.weight")? };
        let tables = [config.theta, config.local_theta].map(|theta| table(config, theta, vb.dtype(), vb.device()));
        let [all, local] = tables;
        let tables = [all?, local?];
        Ok(Decoder { config: config.clone(), embedding, layers, norm: model.get(config.hidden, "norm.weight")?, head, tables })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Gemma 3 adds 1 to the weights of its norms.
    fn normalised(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        match self.config.family {
            Family::Llama | Family::Qwen3 => ops::rms_norm(x, weight, self.config.eps),
            Family::Gemma3 => ops::rms_norm(x, &(weight + 1.)?, self.config.eps),
        }
    }

    /// Returns the activations of the last layer, (tokens, hidden). `ids` and `positions` are u32 (tokens).
    pub(crate) fn forward(&self, ids: &Tensor, positions: &Tensor, attend: Attend<'_>) -> Result<Tensor> {
        let mut x = self.embedding.index_select(ids, 0)?;
        if self.config.family == Family::Gemma3 {
            x = (x * (self.config.hidden as f64).sqrt())?;
        }
        let tables: Vec<[Tensor; 2]> = self
            .tables
            .iter()
            .map(|[cos, sin]| Ok([cos.index_select(positions, 0)?, sin.index_select(positions, 0)?]))
            .collect::<Result<_>>()?;
        for (n, layer) in self.layers.iter().enumerate() {
            let norm = |place: usize, x: Tensor| match &layer.norms[place] {
                Some(weight) => self.normalised(&x, weight),
                None => Ok(x),
            };
            let attended = self.attend(n, &norm(0, x.clone())?, &tables[layer.rope], attend)?;
            x = (x + norm(1, attended)?)?;
            let mixed = self.mlp(layer, &norm(2, x.clone())?)?;
            x = (x + norm(3, mixed)?)?;
        }
        Ok(x)
    }

    fn attend(&self, n: usize, x: &Tensor, [cos, sin]: &[Tensor; 2], attend: Attend<'_>) -> Result<Tensor> {
        let layer = &self.layers[n];
        let (tokens, Config { heads, heads_kv, dim, .. }) = (x.dim(0)?, &self.config);
        let [q, k, v, o] = &layer.projections;
        let part = |weight: &Tensor, heads: usize| linear(x, weight)?.reshape((tokens, heads, *dim));
        let (mut q, mut k, v) = (part(q, *heads)?, part(k, *heads_kv)?, part(v, *heads_kv)?);
        if let Some([of_q, of_k]) = &layer.head_norms {
            (q, k) = (self.normalised(&q, of_q)?, self.normalised(&k, of_k)?);
        }
        // One batch entry holds all sequences; the tables have the position of each token in its sequence.
        let rotated = |x: &Tensor| ops::rope_thd(&x.unsqueeze(0)?, cos, sin)?.squeeze(0);
        let attended = attend(n, &layer.attention, [&rotated(&q)?, &rotated(&k)?, &v])?;
        linear(&attended.reshape((tokens, heads * dim))?, o)
    }

    fn mlp(&self, layer: &Layer, x: &Tensor) -> Result<Tensor> {
        let [gate, up, down] = &layer.mlp;
        let gate = linear(x, gate)?;
        let gate = if self.config.family == Family::Gemma3 { gate.gelu()? } else { gate.silu()? };
        linear(&(gate * linear(x, up)?)?, down)
    }

    /// Returns the logits (rows, vocabulary) of activations (rows, hidden).
    pub(crate) fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let logits = linear(&self.normalised(x, &self.norm)?, &self.head)?;
        match self.config.family {
            Family::Llama | Family::Qwen3 => Ok(logits),
            Family::Gemma3 => {
                let cap = f64::from(self.config.softcaps[1]);
                (logits / cap)?.tanh()? * cap
            }
        }
    }
}
