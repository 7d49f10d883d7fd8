//! Pseudorandom numbers that depend on the seed only, not on the machine or the number of threads.

use crate::data::Data;
use half::{bf16, f16};
use rayon::prelude::*;
use sdpa::{F8E4M3, F8E5M2};

/// Returns number `n` of a SplitMix64 stream (Steele, Lea and Flood, 2014).
fn bits(stream: u64, n: u64) -> u64 {
    let mut z = stream.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns an approximately normal number, mean 0 and variance 1: a sum of four uniform numbers of 16 bits.
fn normal(bits: u64) -> f32 {
    let sum: u64 = (0..4).map(|n| bits >> (16 * n) & 0xffff).sum();
    ((sum + 2) as f32 / 65536.0 - 2.0) * 3f32.sqrt()
}

/// Fills a tensor with random numbers. `which` selects the random stream, so that tensors of one seed differ.
pub(crate) fn fill(data: &mut Data, seed: u64, which: u64) {
    let stream = bits(bits(seed, 0), which);
    match data {
        Data::F32(x) => each(x, stream, |x| x),
        Data::F16(x) => each(x, stream, f16::from_f32),
        Data::BF16(x) => each(x, stream, bf16::from_f32),
        Data::F8E4M3(x, _) => each(x, stream, F8E4M3::from_f32),
        Data::F8E5M2(x, _) => each(x, stream, F8E5M2::from_f32),
    }
}

/// Returns random number `n`, 64 bits, of the stream that the seed and `which` select.
pub(crate) fn draw(seed: u64, which: u64, n: u64) -> u64 {
    bits(bits(bits(seed, 0), which), n)
}

fn each<T: Send>(to: &mut [T], stream: u64, of: impl Fn(f32) -> T + Sync) {
    const BLOCK: usize = 1 << 16;
    to.par_chunks_mut(BLOCK).enumerate().for_each(|(block, to)| {
        for (n, to) in to.iter_mut().enumerate() {
            *to = of(normal(bits(stream, (block * BLOCK + n) as u64)));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Element;

    #[test]
    fn numbers_are_normal_enough_and_their_own() {
        let made = |seed, which| {
            let mut data = Data::zeros(Element::F32, 100_000).unwrap();
            fill(&mut data, seed, which);
            let mut x = vec![0.0; 100_000];
            data.row(0, &mut x);
            x
        };
        let x = made(7, 0);
        let mean = x.iter().sum::<f64>() / 1e5;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        assert!(x == made(7, 0) && x != made(7, 1) && x != made(8, 0));
    }
}
