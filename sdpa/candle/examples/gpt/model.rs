//! A small GPT: RoPE or ALiBi, GQA, packed sequences. Model weights are initialised from a seed and stored by name.

use crate::text::{ALPHABET, Random};
use candle_core::{D, Device, Result, Tensor, Var};
use sdpa_candle::{Attention, Documents, Mask, library};
use std::collections::BTreeMap;

/// Sizes and options.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) heads_kv: usize,
    pub(crate) dim: usize,
    pub(crate) alibi: bool,
    pub(crate) softcap: Option<f32>,
    /// Uses candle's plain ops instead of one fused attention.
    pub(crate) plain: bool,
}

impl Config {
    fn width(&self) -> usize {
        self.heads * self.dim
    }
}

/// The model weights, by name.
#[derive(Debug)]
pub(crate) struct Model {
    config: Config,
    pub(crate) weights: BTreeMap<String, Var>,
    attention: Attention,
}

/// Inputs that the layers of one step share.
pub(crate) struct Batch {
    boundaries: Vec<u32>,
    documents: Documents,
    /// Cosines and sines of RoPE, (tokens, 1, dim / 2).
    turn: [Tensor; 2],
    /// The bias of plain attention. It is 0 or −inf, (tokens, tokens), with ALiBi slopes times the distance if there are any, (heads, tokens, tokens).
    added: Option<Tensor>,
}

impl Model {
    pub(crate) fn new(config: Config, seed: u64) -> Result<Model> {
        let mut random = Random(seed);
        let mut weights = BTreeMap::new();
        let (width, vocabulary) = (config.width(), ALPHABET.chars().count());
        let mut add = |name: String, rows: usize, columns: usize, deviation: f32| -> Result<()> {
            let numbers: Vec<f32> = (0..rows * columns).map(|_| random.normal() * deviation).collect();
            weights.insert(name, Var::from_tensor(&Tensor::from_vec(numbers, (rows, columns), &Device::Cpu)?)?);
            Ok(())
        };
        add("embedding".to_owned(), vocabulary, width, 0.05)?;
        for layer in 0..config.layers {
            let inner = 1. / (width as f32).sqrt();
            let outer = inner / (2. * config.layers as f32).sqrt();
            add(format!("{layer}.qkv"), width, (config.heads + 2 * config.heads_kv) * config.dim, inner)?;
            add(format!("{layer}.out"), width, width, outer)?;
            add(format!("{layer}.up"), width, 4 * width, inner)?;
            add(format!("{layer}.down"), 4 * width, width, outer / 2.)?;
        }
        let mut attention = Attention::new().mask(Mask::causal());
        if let Some(cap) = config.softcap {
            attention = attention.score_mod(library::softcap(cap));
        }
        if config.alibi {
            let slopes = Tensor::new(library::alibi_slopes(config.heads), &Device::Cpu)?;
            attention = attention.score_mod(library::alibi_with()).param("slopes", &slopes);
        }
        Ok(Model { config, weights, attention })
    }

    pub(crate) fn batch(&self, boundaries: &[u32]) -> Result<Batch> {
        let tokens = boundaries[boundaries.len() - 1] as usize;
        let longest = boundaries.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(1) as usize;
        let documents = Documents::new(&Tensor::new(boundaries, &Device::Cpu)?, longest);
        let half = self.config.dim / 2;
        let places = boundaries.windows(2).flat_map(|pair| 0..pair[1] - pair[0]);
        let angle = |place: u32, n: usize| f64::from(place) / 10000f64.powf(n as f64 / half as f64);
        let angles: Vec<f64> = places.flat_map(|place| (0..half).map(move |n| angle(place, n))).collect();
        let turn = |f: fn(f64) -> f64| {
            let numbers: Vec<f32> = angles.iter().map(|&x| f(x) as f32).collect();
            Tensor::from_vec(numbers, (tokens, 1, half), &Device::Cpu)
        };
        let added = if self.config.plain { Some(self.added(boundaries)?) } else { None };
        Ok(Batch { boundaries: boundaries.to_vec(), documents, turn: [turn(f64::cos)?, turn(f64::sin)?], added })
    }

    /// Computes the bias of plain attention.
    fn added(&self, boundaries: &[u32]) -> Result<Tensor> {
        let tokens = boundaries[boundaries.len() - 1] as usize;
        let document: Vec<usize> = boundaries.windows(2).enumerate().flat_map(|(n, pair)| (pair[0]..pair[1]).map(move |_| n)).collect();
        let slopes = if self.config.alibi { library::alibi_slopes(self.config.heads) } else { vec![0.] };
        let document = &document;
        let row = |slope: f32, q: usize| {
            let cell = move |k: usize| {
                let kept = k <= q && document[q] == document[k];
                if kept { slope * (k as f32 - q as f32) } else { f32::NEG_INFINITY }
            };
            (0..tokens).map(cell)
        };
        let numbers: Vec<f32> = slopes.iter().flat_map(|&slope| (0..tokens).flat_map(move |q| row(slope, q))).collect();
        Tensor::from_vec(numbers, (slopes.len(), tokens, tokens), &Device::Cpu)
    }

    fn weight(&self, name: &str) -> Result<&Tensor> {
        self.weights.get(name).map(|weight| &**weight).ok_or_else(|| candle_core::Error::msg(format!("there is no weight {name}")))
    }

    /// Returns the logits of (tokens) characters, (tokens, vocabulary).
    pub(crate) fn forward(&self, tokens: &Tensor, batch: &Batch) -> Result<Tensor> {
        let embedding = self.weight("embedding")?;
        let mut x = embedding.index_select(tokens, 0)?;
        for layer in 0..self.config.layers {
            let weight = |name: &str| self.weight(&format!("{layer}.{name}"));
            let attended = self.attend(&norm(&x)?.matmul(weight("qkv")?)?, batch)?;
            x = (x + attended.matmul(weight("out")?)?)?;
            let up = norm(&x)?.matmul(weight("up")?)?;
            x = (x + up.relu()?.sqr()?.matmul(weight("down")?)?)?;
        }
        norm(&x)?.matmul(&embedding.t()?)
    }

    /// Attention over fused `qkv`, (tokens, heads · dim + 2 · heads_kv · dim), as a linear layer returns it. Returns (tokens, heads · dim).
    fn attend(&self, qkv: &Tensor, batch: &Batch) -> Result<Tensor> {
        let Config { heads, heads_kv, dim, .. } = self.config;
        let tokens = qkv.dim(0)?;
        let part = |from: usize, count: usize| qkv.narrow(1, from * dim, count * dim)?.reshape((tokens, count, dim));
        let (q, k, v) = (part(0, heads)?, part(heads, heads_kv)?, part(heads + heads_kv, heads_kv)?);
        let (q, k) = if self.config.alibi { (q, k) } else { (rotate(&q, &batch.turn)?, rotate(&k, &batch.turn)?) };
        let o = match &batch.added {
            None => self.attention.forward_packed(&batch.documents, &q, &k, &v)?,
            Some(added) => self.plain([&q, &k, &v], added)?,
        };
        o.reshape((tokens, heads * dim))
    }

    /// Attention with candle's own ops, which computes the scores of all pairs of tokens.
    fn plain(&self, [q, k, v]: [&Tensor; 3], added: &Tensor) -> Result<Tensor> {
        let Config { heads, heads_kv, dim, .. } = self.config;
        let by_head = |x: &Tensor| x.transpose(0, 1)?.contiguous();
        let repeat = |x: &Tensor| {
            let (kv, tokens, dim) = x.dims3()?;
            x.unsqueeze(1)?.broadcast_as((kv, heads / heads_kv, tokens, dim))?.reshape((heads, tokens, dim))
        };
        let (q, k, v) = (by_head(q)?, repeat(&by_head(k)?)?, repeat(&by_head(v)?)?);
        let mut scores = (q.matmul(&k.t()?)? * (1. / (dim as f64).sqrt()))?;
        if let Some(cap) = self.config.softcap {
            scores = ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?;
        }
        let scores = scores.broadcast_add(added)?;
        let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        weights.matmul(&v)?.transpose(0, 1)?.contiguous()
    }

    /// Returns the mean of `-ln p` of the next character, over the characters that have one in their sequence.
    pub(crate) fn loss(&self, text: &[u32], batch: &Batch) -> Result<Tensor> {
        let tokens = text.len() - 1;
        let logits = self.forward(&Tensor::new(&text[..tokens], &Device::Cpu)?, batch)?;
        let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
        let chosen = shifted.gather(&Tensor::new(&text[1..], &Device::Cpu)?.unsqueeze(1)?, 1)?.squeeze(1)?;
        let each = (shifted.exp()?.sum(D::Minus1)?.log()? - chosen)?;
        // The last character of a sequence does not count: the next character belongs to another sequence.
        let last = |n: usize| n + 1 < tokens && batch.boundaries.contains(&(n as u32 + 1));
        let counts: Vec<f32> = (0..tokens).map(|n| if last(n) { 0. } else { 1. }).collect();
        let total: f32 = counts.iter().sum();
        (each * Tensor::new(counts, &Device::Cpu)?)?.sum_all()? / f64::from(total)
    }
}

/// RMS norm, without a learned gain.
fn norm(x: &Tensor) -> Result<Tensor> {
    let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?;
    x.broadcast_div(&mean.sqrt()?)
}

/// Applies RoPE to the two halves, by the position in the sequence.
fn rotate(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let half = x.dim(2)? / 2;
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (a.broadcast_mul(sin)? + b.broadcast_mul(cos)?)?;
    Tensor::cat(&[first, second], 2)
}

/// AdamW over named weights, with a state that can be saved and restored.
#[derive(Debug)]
pub(crate) struct AdamW {
    pub(crate) first: BTreeMap<String, Tensor>,
    pub(crate) second: BTreeMap<String, Tensor>,
}

impl AdamW {
    pub(crate) fn new(weights: &BTreeMap<String, Var>) -> Result<AdamW> {
        let zeros = || weights.iter().map(|(name, x)| Ok((name.clone(), x.zeros_like()?.detach()))).collect::<Result<_>>();
        Ok(AdamW { first: zeros()?, second: zeros()? })
    }

    /// Performs one step; the first has the number 1.
    pub(crate) fn step(&mut self, weights: &BTreeMap<String, Var>, loss: &Tensor, step: u64, rate: f64) -> Result<()> {
        let gradients = loss.backward()?;
        let (b1, b2) = (0.9f64, 0.99f64);
        let (c1, c2) = (1. - b1.powf(step as f64), 1. - b2.powf(step as f64));
        for (name, weight) in weights {
            let Some(gradient) = gradients.get(weight) else {
                candle_core::bail!("{name} has no gradient");
            };
            let (Some(m), Some(v)) = (self.first.get(name), self.second.get(name)) else {
                candle_core::bail!("{name} has no optimizer state");
            };
            let m = ((m * b1)? + (gradient * (1. - b1))?)?;
            let v = ((v * b2)? + (gradient.sqr()? * (1. - b2))?)?;
            let change = ((&m / c1)? / ((&v / c2)?.sqrt()? + 1e-8)?)?;
            weight.set(&((weight.as_tensor() * (1. - rate * 0.01))? - (change * rate)?)?)?;
            self.first.insert(name.clone(), m.detach());
            self.second.insert(name.clone(), v.detach());
        }
        Ok(())
    }
}
