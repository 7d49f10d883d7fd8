//! Times `sdpa_candle::flash_attn` against candle-nn's own attention on the CPU, call by call.
//!
//! ```sh
//! cargo run --release --package sdpa-candle --example cpu_speed
//! ```
//!
//! Prints for each problem the median times of both, and candle's time divided by ours. Both are first checked against each other.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};
use std::time::Instant;

/// A name, the element type, (batch, heads_q, heads_kv, seq_q, seq_kv, dim), causal, and the number of rounds.
type Problem = (&'static str, DType, [usize; 6], bool, usize);

const PROBLEMS: [Problem; 9] = [
    ("prefill f32", DType::F32, [1, 16, 16, 2048, 2048, 64], false, 5),
    ("prefill f32, causal", DType::F32, [1, 16, 16, 2048, 2048, 64], true, 5),
    ("prefill bf16, causal", DType::BF16, [1, 16, 16, 2048, 2048, 64], true, 5),
    ("prefill f32, GQA 32/8, d 128, causal", DType::F32, [1, 32, 8, 1024, 1024, 128], true, 5),
    ("prefill f16, GQA 32/8, d 128, causal", DType::F16, [1, 32, 8, 1024, 1024, 128], true, 5),
    ("short f32", DType::F32, [8, 12, 12, 128, 128, 64], false, 15),
    ("decode f32, GQA 32/8, d 128", DType::F32, [1, 32, 8, 1, 8192, 128], false, 15),
    ("decode bf16, GQA 32/8, d 128", DType::BF16, [1, 32, 8, 1, 8192, 128], false, 15),
    ("decode f32, batch 8", DType::F32, [8, 16, 16, 1, 2048, 64], false, 15),
];

fn theirs(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, causal: bool) -> Result<Tensor> {
    let mask = if causal { AttnMask::causal() } else { AttnMask::None };
    // The result is (batch, heads, seq, dim) for operands (batch, seq, heads, dim).
    if q.dtype() == DType::BF16 {
        flash_attn::<bf16>(q, k, v, scale, mask, None, None)
    } else if q.dtype() == DType::F16 {
        flash_attn::<f16>(q, k, v, scale, mask, None, None)
    } else {
        flash_attn::<f32>(q, k, v, scale, mask, None, None)
    }
}

fn median(mut ms: Vec<f64>) -> f64 {
    ms.sort_by(f64::total_cmp);
    ms[ms.len() / 2]
}

fn main() -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    println!("{threads} threads, candle-nn 0.11");
    println!("{:<40} {:>10} {:>10} {:>8} {:>10}", "problem", "ours ms", "candle ms", "speedup", "difference");
    for (name, dtype, [batch, heads_q, heads_kv, seq_q, seq_kv, dim], causal, rounds) in PROBLEMS {
        let random = |seq, heads| Tensor::randn(0f32, 1., (batch, seq, heads, dim), &Device::Cpu)?.to_dtype(dtype);
        let (q, k, v) = (random(seq_q, heads_q)?, random(seq_kv, heads_kv)?, random(seq_kv, heads_kv)?);
        let scale = 1. / (dim as f32).sqrt();
        let own = || sdpa_candle::flash_attn(&q, &k, &v, scale, causal);
        let other = || theirs(&q, &k, &v, scale, causal);
        let (left, right) = (own()?.to_dtype(DType::F32)?, other()?.to_dtype(DType::F32)?);
        let right = if right.dims() == left.dims() { right } else { right.transpose(1, 2)? };
        let difference = (left - right)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..2 * rounds {
            let start = Instant::now();
            let done = if round % 2 == 0 { own()? } else { other()? };
            times[round % 2].push(start.elapsed().as_secs_f64() * 1e3);
            drop(done);
        }
        let [ours, candle] = times.map(median);
        println!("{name:<40} {ours:>10.3} {candle:>10.3} {:>7.2}x {difference:>10.1e}", candle / ours);
    }
    Ok(())
}
