//! Dropout of P by a counter-based generator that is the same on every executor.

use crate::dtype::DType;
use crate::expr::{Axes, Declared, ParamKind};
use crate::problem::Problem;
use crate::tensor::ParamValue;
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};

/// The name of the declared parameter with the seed of a call's random numbers: one i64.
pub const DROPOUT_SEED: &str = "dropout_seed";
/// The name of the declared parameter with a call's offset in the sequence of random numbers: one i64.
///
/// Two calls with one seed share no random number if their offsets differ by at least [`Problem::dropout_span`].
pub const DROPOUT_OFFSET: &str = "dropout_offset";

/// Dropout of attention probabilities P: each element is dropped with this probability, and the others are multiplied by `1 / (1 − p)`.
///
/// `stats`, `row_max` and `sum_exp` describe P before dropout. The declared parameters [`DROPOUT_SEED`] and [`DROPOUT_OFFSET`] of a call and the
/// position of an element decide whether it is dropped. The executor, the layout and the masks have no influence, so a backward pass with the numbers
/// of its forward pass drops the same elements. [`DropoutMask`] has the formula.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Dropout {
    p: f32,
}

impl Dropout {
    /// Creates dropout with probability `p`. [`AttentionSpec::validate`](crate::AttentionSpec::validate) checks that `p` is between 0 and 1,
    /// both excluded.
    pub fn new(p: f32) -> Dropout {
        Dropout { p }
    }

    /// Returns the probability that an element is dropped.
    pub fn p(self) -> f32 {
        self.p
    }

    /// Returns the probability that an element is kept, `1 − p`.
    pub fn keep(self) -> f64 {
        1.0 - f64::from(self.p)
    }

    /// Returns the factor by which kept elements are multiplied: `1 / (1 − p)`.
    pub fn scale(self) -> f32 {
        (1.0 - self.p).recip()
    }

    /// Returns the threshold `floor((1 − p)·65536)`: an element is kept if its random number, from 0 to 65,535, is not above it.
    pub fn most(self) -> u32 {
        (self.keep() * 65536.0).floor() as u32
    }
}

impl PartialEq for Dropout {
    fn eq(&self, other: &Dropout) -> bool {
        self.p.to_bits() == other.p.to_bits()
    }
}

impl Eq for Dropout {}

impl Hash for Dropout {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.p.to_bits().hash(state);
    }
}

/// Side length of the square blocks of P for which the generator computes dropout at once: 16 queries by 16 keys.
pub const SQUARE: usize = 16;

/// The elements of P that a call keeps, from [`Problem::dropout_mask`].
///
/// The generator is that of cuDNN's engines, inferred from their output on an H200: Philox4x32 (Salmon et al., *Parallel random numbers: as easy as
/// 1, 2, 3*, SC 2011) with seven rounds. For a query `q` and a key `k` of a head `h` of a batch entry `b`:
///
/// ```text
/// n       = offset + 4·((b·heads_q + h)·8 + k mod 8) + (q mod 8) div 2                 64 bits
/// counter = (low, high of n div 4, (k div 16)·ceil(seq_q / 16) + q div 16, 0)
/// key     = (low, high of seed)
/// half    = (q mod 2) + 2·((k div 8) mod 2) + 4·((q div 8) mod 2)                       of eight, 16 bits each, the low one of a word first
/// stays where philox(counter, key)[half] ≤ floor((1 − p)·65536)
/// ```
///
/// So the probability to keep an element is `(floor((1 − p)·65536) + 1) / 65536`. If the offset is a multiple of four, queries `q`, `q + 2`, `q + 4`
/// and `q + 6` of every eight share their mask, as in cuDNN. For packed sequences, `b` is the sequence, and `q` and `k` are positions in it.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
/// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
/// let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_dropout(0.1).validate()?;
/// let mask = problem.dropout_mask(42, 0).unwrap();
/// let kept = (0..128).flat_map(|q| (0..128).map(move |k| (q, k))).filter(|&(q, k)| mask.keeps([0, 3, q, k])).count();
/// assert!((14_400..15_100).contains(&kept), "{kept} of 16,384");
/// # Ok::<(), sdpa_core::SpecErrors>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutMask {
    key: [u32; 2],
    offset: u64,
    heads: u64,
    squares_q: u32,
    most: u32,
}

impl DropoutMask {
    fn new(dropout: Dropout, [_, heads, seq_q, _]: [i64; 4], seed: i64, offset: i64) -> DropoutMask {
        let [seed, offset, heads] = [seed, offset, heads].map(i64::cast_unsigned);
        let squares_q = seq_q.unsigned_abs().div_ceil(SQUARE as u64) as u32;
        DropoutMask { key: [seed as u32, (seed >> 32) as u32], offset, heads, squares_q, most: dropout.most() }
    }

    /// Returns whether the element at (batch, head, query, key) is kept.
    pub fn keeps(&self, [batch, head, q, k]: [usize; 4]) -> bool {
        let square = self.square([batch, head, q / SQUARE, k / SQUARE]);
        square[q % SQUARE] >> (k % SQUARE) & 1 == 1
    }

    /// Returns which elements of a 16 × 16 block of P are kept, for queries `16·q` to `16·q + 15` and keys `16·k` to `16·k + 15`. Each
    /// query has one number, with one bit per key, the first key lowest. A bit is 1 if the element is kept.
    pub fn square(&self, [batch, head, q, k]: [usize; 4]) -> [u16; SQUARE] {
        let first = self.offset.wrapping_add(32u64.wrapping_mul((batch as u64).wrapping_mul(self.heads).wrapping_add(head as u64)));
        let place = (k as u32).wrapping_mul(self.squares_q).wrapping_add(q as u32);
        let mut kept = [0; SQUARE];
        let mut before = None;
        for pair in 0..4 {
            // Row pairs with equal counters get equal random numbers, so reuse those of the previous row pair.
            let counters: [u64; 8] = std::array::from_fn(|k| first.wrapping_add(4 * k as u64 + pair as u64) >> 2);
            let words = match before {
                Some((same, words)) if same == counters => words,
                _ => philox(counters, place, self.key),
            };
            before = Some((counters, words));
            for (word, numbers) in words.iter().enumerate() {
                let (column, row) = (8 * (word % 2), 8 * (word / 2) + 2 * pair);
                for (k, number) in numbers.iter().enumerate() {
                    let stays = |half: u32| u16::from(half <= self.most) << (column + k);
                    kept[row] |= stays(number & 0xffff);
                    kept[row + 1] |= stays(number >> 16);
                }
            }
        }
        kept
    }
}

const ROUNDS: u32 = 7;
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Returns four words for each of eight counters, which differ only in their lower half.
fn philox(counters: [u64; 8], place: u32, key: [u32; 2]) -> [[u32; 8]; 4] {
    let mut state = [counters.map(|n| n as u32), counters.map(|n| (n >> 32) as u32), [place; 8], [0; 8]];
    for round in 0..ROUNDS {
        let key = [0, 1].map(|n| key[n].wrapping_add(STEPS[n].wrapping_mul(round)));
        let mut next = [[0; 8]; 4];
        for lane in 0..8 {
            let product = |n: usize| u64::from(MULTIPLIERS[n]) * u64::from(state[2 * n][lane]);
            let (one, two) = (product(0), product(1));
            next[0][lane] = (two >> 32) as u32 ^ state[1][lane] ^ key[0];
            next[1][lane] = two as u32;
            next[2][lane] = (one >> 32) as u32 ^ state[3][lane] ^ key[1];
            next[3][lane] = one as u32;
        }
        state = next;
    }
    state
}

/// Returns the parameters that a problem with dropout declares.
pub(crate) fn declared() -> [Declared; 2] {
    let kind = ParamKind::Tensor { axes: Axes::NONE, dtype: DType::I64 };
    [DROPOUT_SEED, DROPOUT_OFFSET].map(|name| Declared { name: name.to_owned(), kind, default: None })
}

impl Problem {
    /// Returns the dropout mask of a call with this seed and offset; `None` for a problem without dropout.
    pub fn dropout_mask(&self, seed: i64, offset: i64) -> Option<DropoutMask> {
        self.dropout().map(|dropout| DropoutMask::new(dropout, self.extents(), seed, offset))
    }

    /// Returns the dropout mask of a call. It reads the seed and the offset from the `values` of the parameters `declared`. `None` for a
    /// problem without dropout.
    pub fn dropout_of(&self, declared: &[Declared], values: &[ParamValue<'_>]) -> Option<DropoutMask> {
        let number = |name: &str| match values.get(declared.iter().position(|p| p.name == name)?)? {
            ParamValue::I64(numbers) => numbers.first().copied(),
            ParamValue::Scalar(_)
            | ParamValue::F32(_)
            | ParamValue::F16(_)
            | ParamValue::BF16(_)
            | ParamValue::I32(_)
            | ParamValue::Bool(_)
            | ParamValue::F8E8M0(_) => None,
        };
        self.dropout_mask(number(DROPOUT_SEED)?, number(DROPOUT_OFFSET)?)
    }

    /// Returns the required distance between the offsets of two calls with one seed, so that the calls share no random number.
    pub fn dropout_span(&self) -> i64 {
        self.batch().saturating_mul(self.heads_q()).saturating_mul(32).saturating_add(4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionSpec, Layout, ScoreMod, Shape};

    fn spec() -> AttentionSpec {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 40, seq_kv: 50, dim_qk: 8, dim_v: 16 };
        AttentionSpec::dense(DType::F16, shape, Layout::Bhsd)
    }

    #[test]
    fn philox_is_that_of_its_authors() {
        // The expected words are the known answers of Random123 1.14 for philox4x32 with 7 rounds.
        let zeros = philox([0; 8], 0, [0; 2]).map(|word| word[3]);
        assert_eq!(zeros, [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
    }

    #[test]
    fn dropout_is_part_of_the_problem_and_declares_its_numbers() {
        let (plain, dropped) = (spec().validate().unwrap(), spec().with_dropout(0.25).validate().unwrap());
        assert_ne!(plain, dropped);
        assert_ne!(dropped, spec().with_dropout(0.5).validate().unwrap());
        assert_eq!(dropped.params(), declared());
        assert_eq!(dropped.dropout().map(Dropout::p), Some(0.25));
        assert!(plain.dropout_mask(1, 2).is_none() && dropped.dropout_mask(1, 2).is_some());
        let values = [ParamValue::I64(&[7]), ParamValue::I64(&[9])];
        assert_eq!(dropped.dropout_of(dropped.params(), &values), dropped.dropout_mask(7, 9));
    }

    #[test]
    fn a_probability_is_more_than_none_and_less_than_all() {
        for p in [0.0, -0.1, 1.0, 2.0, f32::NAN, f32::INFINITY] {
            let told = spec().with_dropout(p).validate().unwrap_err().to_string();
            assert!(told.contains("dropout") && told.contains("above 0 and below 1"), "{told}");
        }
        for p in [f32::MIN_POSITIVE, 0.5, 1.0f32.next_down()] {
            assert!(spec().with_dropout(p).validate().is_ok(), "{p}");
        }
        let own: ScoreMod = "tensor dropout_seed[head]: f32;\nscore + dropout_seed".parse().unwrap();
        let told = spec().score_mod(own).with_dropout(0.5).validate().unwrap_err().to_string();
        assert!(told.contains("parameter dropout_seed") && told.contains("a reserved name"), "{told}");
        let told = spec().with_dropout(0.5).backward().wrt(DROPOUT_SEED, DType::F32).validate().unwrap_err().to_string();
        assert!(told.contains("a floating-point parameter"), "{told}");
    }

    /// The formula in the documentation of `DropoutMask`, term by term.
    fn written(mask: &DropoutMask, [b, h, q, k]: [usize; 4]) -> bool {
        let n = mask.offset.wrapping_add(4 * ((b as u64 * mask.heads + h as u64) * 8 + k as u64 % 8) + (q as u64 % 8) / 2);
        let words = philox([n / 4; 8], (k / 16) as u32 * mask.squares_q + (q / 16) as u32, mask.key).map(|word| word[0]);
        let half = q % 2 + 2 * (k / 8 % 2) + 4 * (q / 8 % 2);
        words[half / 2] >> (16 * (half % 2)) & 0xffff <= mask.most
    }

    #[test]
    fn squares_are_what_the_words_say() {
        let problem = spec().with_dropout(0.4).validate().unwrap();
        for (seed, offset) in [(0, 0), (-1, 3), (1 << 40, 1 << 50), (77, -6), (12345, i64::MAX)] {
            let mask = problem.dropout_mask(seed, offset).unwrap();
            for at in (0..50).flat_map(|k| (0..40).map(move |q| [(q + k) % 2, (3 * q + k) % 4, q, k])) {
                assert_eq!(mask.keeps(at), written(&mask, at), "{seed} {offset} {at:?}");
            }
        }
    }

    #[test]
    fn as_many_stay_as_are_said_to_and_calls_apart_have_nothing_in_common() {
        let shape = Shape { batch: 2, heads_q: 8, heads_kv: 8, seq_q: 256, seq_kv: 256, dim_qk: 8, dim_v: 8 };
        for p in [0.1, 0.5, 0.9] {
            let problem = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).with_dropout(p).validate().unwrap();
            let bits = |offset: i64| -> Vec<u16> {
                let mask = problem.dropout_mask(5, offset).unwrap();
                let squares = (0..16).flat_map(|bh| (0..256).map(move |at| [bh / 8, bh % 8, at / 16, at % 16]));
                squares.flat_map(|at| mask.square(at)).collect()
            };
            let (one, other) = (bits(1), bits(1 + problem.dropout_span()));
            let kept = one.iter().map(|row| row.count_ones()).sum::<u32>();
            let all = 16.0 * one.len() as f64;
            // Up to four rows share their numbers, so the variance is up to four times that of independent draws.
            let deviation = (4.0 * all * f64::from(p) * f64::from(1.0 - p)).sqrt();
            assert!((f64::from(kept) - all * f64::from(1.0 - p)).abs() < 5.0 * deviation, "{p}: {kept} of {all}");
            let agree = one.iter().zip(&other).map(|(one, other)| (!(one ^ other)).count_ones()).sum::<u32>();
            let by_chance = f64::from(p * p + (1.0 - p) * (1.0 - p));
            assert!((f64::from(agree) / all - by_chance).abs() < 0.01, "{p}: {agree} of {all} agree");
        }
    }
}
