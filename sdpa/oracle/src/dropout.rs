//! The dropout mask: which P it keeps, element by element.

use crate::Place;

/// Dropout of P: the probability, and the numbers of a call that select the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The probability that an element of P is dropped.
    pub p: f64,
    /// The seed of the random numbers.
    pub seed: i64,
    /// The offset in the sequence of random numbers at which the call begins.
    pub offset: i64,
}

impl Dropout {
    /// Returns the factor of P at a position: 0 if the element is dropped. The extents are (batch, heads_q, seq_q, seq_kv).
    #[must_use]
    pub fn factor(&self, [b, h, q, k]: Place, [_, heads, seq_q, _]: Place) -> f64 {
        let n = i128::from(self.offset) + i128::from(4 * ((b * heads + h) * 8 + k % 8) + q % 8 / 2);
        let n = n.rem_euclid(1 << 64) as u128 / 4;
        let square = (k / 16) * ((seq_q + 15) / 16) + q / 16;
        let seed = i128::from(self.seed).rem_euclid(1 << 64) as u128;
        let words = philox([n % (1 << 32), n >> 32, square.unsigned_abs().into(), 0], [seed % (1 << 32), seed >> 32]);
        let halves: Vec<u128> = words.iter().flat_map(|word| [word % 65536, word / 65536]).collect();
        let half = usize::try_from(q % 2 + 2 * (k / 8 % 2) + 4 * (q / 8 % 2)).map_or(0, |half| halves[half]);
        let stays = half as f64 <= ((1.0 - self.p) * 65536.0).floor();
        if stays { 1.0 / (1.0 - self.p) } else { 0.0 }
    }
}

/// Philox4x32 with seven rounds (Salmon et al., 2011).
fn philox([mut a, mut b, mut c, mut d]: [u128; 4], [mut left, mut right]: [u128; 2]) -> [u128; 4] {
    const WORD: u128 = 1 << 32;
    for _ in 0..7 {
        let (one, two) = (0xD251_1F53 * a, 0xCD9E_8D57 * c);
        (a, b, c, d) = ((two / WORD) ^ b ^ left, two % WORD, (one / WORD) ^ d ^ right, one % WORD);
        (left, right) = ((left + 0x9E37_79B9) % WORD, (right + 0xBB67_AE85) % WORD);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_is_that_of_its_authors() {
        // The expected words are the known answers of Random123 1.14 for philox4x32 with 7 rounds.
        assert_eq!(philox([0; 4], [0; 2]), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        let ones = u128::from(u32::MAX);
        assert_eq!(philox([ones; 4], [ones; 2]), [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
    }
}
