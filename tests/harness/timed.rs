//! Problems whose times are measured on a GPU, one executor beside the other: as they are drawn, as they lie in a file, and as specifications.

use crate::random::Random;
use sdpa::{AttentionSpec, BackwardProblem, DType, Layout, Packed, Paged, Problem, Shape};
use serde::{Deserialize, Serialize};
use std::error::Error;

/// How tokens lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lies {
    /// Batch entries of one length each, one behind the other.
    Dense(Layout),
    /// Documents of these lengths in one row.
    Packed(Vec<i32>),
    /// Keys in pages of so many.
    Paged(i64),
}

/// A problem, and how long its pass took on each executor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timed {
    /// Of packed documents the number and the longest.
    pub shape: Shape,
    /// Of operands.
    pub dtype: DType,
    /// How tokens lie.
    pub lies: Lies,
    /// A text of the library, or none.
    pub score_mod: String,
    /// A text of the library, or none.
    pub mask: String,
    /// Whether it is the backward pass.
    pub backward: bool,
    /// Milliseconds of native CUDA kernels, where they take it.
    pub cuda_ms: Option<f64>,
    /// Milliseconds of cuDNN, where it takes it.
    pub cudnn_ms: Option<f64>,
}

/// Floating point operations of a forward pass without a mask, and of a backward one, at most: some milliseconds.
const MOST_FLOPS: [f64; 2] = [1.6e12, 1.2e12];
/// Elements of an operand, at most.
const MOST_ELEMENTS: i64 = 1 << 26;

const HEADS: [[i64; 2]; 7] = [[32, 32], [32, 8], [16, 16], [16, 8], [8, 8], [64, 8], [8, 1]];
const DIMS: [[i64; 2]; 7] = [[64, 64], [64, 64], [96, 96], [128, 128], [128, 128], [192, 128], [256, 256]];

impl Timed {
    /// A problem of a stream of its own for every seed.
    pub fn drawn(seed: u64) -> Timed {
        let r = &mut Random::new(seed * 7919 + 97);
        let backward = r.unit() < 0.4;
        let kind = r.unit();
        let [heads_q, heads_kv] = r.pick(&HEADS);
        let [dim_qk, dim_v] = r.pick(&DIMS);
        let mut shape = Shape { batch: 1, heads_q, heads_kv, seq_q: 0, seq_kv: 0, dim_qk, dim_v };
        let dtype = if r.unit() < 0.85 { DType::BF16 } else { DType::F16 };
        let mut score_mod = score_mod(r);
        let mask;
        let lies = if kind < 0.55 || backward && kind < 0.7 {
            shape.seq_q = length(r, 256.0, 16384.0);
            shape.seq_kv = if r.unit() < 0.85 { shape.seq_q } else { length(r, 256.0, 16384.0) };
            mask = square(r, shape.seq_q.min(shape.seq_kv));
            shape.batch = r.between(1, most_batch(&shape, backward).min(16));
            Lies::Dense(r.pick(&Layout::ALL))
        } else if kind < 0.7 || backward {
            let longest = length(r, 64.0, 8192.0);
            (shape.seq_q, shape.seq_kv) = (longest, longest);
            let number = r.between(1, most_batch(&shape, backward).min(1 + 65536 / longest));
            let alike = r.unit() < 0.5;
            let lengths: Vec<i32> = (0..number).map(|n| if alike || n == 0 { longest } else { r.between(1, longest) } as i32).collect();
            shape.batch = number;
            mask = r.pick(&["", "causal", "causal", "sliding-window:300"]).to_owned();
            Lies::Packed(lengths)
        } else {
            let most = if kind < 0.88 { 7.0 } else { 11.0 };
            shape.seq_q = (2f64.powf(r.unit() * most)) as i64;
            shape.seq_kv = length(r, 512.0, 65536.0).max(shape.seq_q);
            shape.batch = r.between(1, most_batch(&shape, false).min(64));
            mask = if shape.seq_q == 1 { r.pick(&["", "padding"]) } else { r.pick(&["", "causal-bottom-right", "causal-bottom-right"]) }
                .to_owned();
            score_mod = if r.unit() < 0.8 { String::new() } else { score_mod };
            if kind < 0.9 { Lies::Dense(r.pick(&Layout::ALL)) } else { Lies::Paged(r.pick(&[16, 64, 128])) }
        };
        Timed { shape, dtype, lies, score_mod, mask, backward, cuda_ms: None, cudnn_ms: None }
    }

    fn spec(&self) -> Result<AttentionSpec, Box<dyn Error + Send + Sync>> {
        let mut spec = match &self.lies {
            Lies::Dense(layout) => AttentionSpec::dense(self.dtype, self.shape, *layout),
            Lies::Packed(lengths) => AttentionSpec::packed(self.dtype, self.shape, Packed::of(lengths.iter().map(|&n| i64::from(n)).sum())),
            Lies::Paged(page_size) => {
                let per_entry = Paged::new(*page_size, 1).pages_of(self.shape.seq_kv);
                AttentionSpec::paged(self.dtype, self.shape, Paged::new(*page_size, per_entry * self.shape.batch))
            }
        };
        if !self.score_mod.is_empty() {
            spec = spec.score_mod(self.score_mod.parse()?);
        }
        if !self.mask.is_empty() {
            spec = spec.mask(self.mask.parse()?);
        }
        Ok(spec)
    }

    /// The forward problem, or that of the pass before a backward one.
    ///
    /// # Errors
    /// What specifications say.
    pub fn forward(&self) -> Result<Problem, Box<dyn Error + Send + Sync>> {
        let spec = self.spec()?;
        Ok(if self.backward { spec.with_stats() } else { spec }.validate()?)
    }

    /// The backward problem.
    ///
    /// # Errors
    /// What specifications say.
    pub fn gradient(&self) -> Result<BackwardProblem, Box<dyn Error + Send + Sync>> {
        Ok(self.spec()?.with_stats().backward().validate()?)
    }
}

/// Whole numbers between these, each octave as likely as another; half of them multiples of 128.
fn length(r: &mut Random, low: f64, high: f64) -> i64 {
    let length = (low * (high / low).powf(r.unit())) as i64;
    if r.unit() < 0.5 { (length + 127) / 128 * 128 } else { length }
}

/// Batch entries that a pass has at most.
fn most_batch(shape: &Shape, backward: bool) -> i64 {
    let dims = shape.dim_qk + shape.dim_v;
    let flops = (2 * shape.heads_q * shape.seq_q * shape.seq_kv * dims) as f64;
    let elements = (shape.heads_q * shape.seq_q).max(shape.heads_kv * shape.seq_kv) * shape.dim_qk;
    ((MOST_FLOPS[usize::from(backward)] / flops) as i64).min(MOST_ELEMENTS / elements).max(1)
}

fn score_mod(r: &mut Random) -> String {
    match r.between(0, 9) {
        0..=5 => String::new(),
        6 | 7 => format!("softcap:{}", r.pick(&[20, 30, 50])),
        8 => "alibi".to_owned(),
        _ => r.pick(&["bias:hqk", "score * 0.5 + f32(k - q) * 0.001", "sandwich:32"]).to_owned(),
    }
}

/// A mask over places, lengths or documents.
fn square(r: &mut Random, seq: i64) -> String {
    let some = |r: &mut Random| length(r, 16.0, (seq / 2).max(32) as f64);
    match r.between(0, 19) {
        0..=2 => String::new(),
        3..=6 => "causal".to_owned(),
        7 => "causal-bottom-right".to_owned(),
        8 | 9 => format!("sliding-window:{}", some(r)),
        10 => format!("window:{},{}", some(r), some(r)),
        11 => format!("prefix-lm:{}", some(r)),
        12 => format!("dilated:{} & causal", r.between(2, 5)),
        13 => format!("natten:{}", some(r) / 2 * 2 + 1),
        14 => format!("global-local:{},{}", some(r), r.between(4, 128)),
        15 => format!("k <= q & (k < {} | q - k < {})", r.between(1, 64), some(r)),
        16 => {
            let block = some(r);
            format!("q / {block} == k / {block} & k <= q")
        }
        17 => "padding".to_owned(),
        18 => "document & causal".to_owned(),
        _ => format!("abs(q - k) % {} < {}", r.between(300, 900), r.between(20, 200)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drawn_is_a_problem_and_comes_back_out_of_its_line() {
        for seed in 0..600 {
            let drawn = Timed::drawn(seed);
            drawn.forward().unwrap_or_else(|e| panic!("{drawn:?}: {e}"));
            if drawn.backward {
                drawn.gradient().unwrap_or_else(|e| panic!("{drawn:?}: {e}"));
            }
            let line = serde_json::to_string(&drawn).unwrap();
            assert_eq!(serde_json::from_str::<Timed>(&line).unwrap(), drawn);
        }
    }
}
