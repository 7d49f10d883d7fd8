//! Parameters that the options of a specification declare: sinks, and the seed and offset of dropout.

use crate::random::Random;
use sdpa::{AttentionSpec, DROPOUT_OFFSET, DROPOUT_SEED, Param, SINK};
use sdpa_oracle::Dropout;

/// The values of sinks and of the seed and offset of dropout, for the call and for the oracle.
pub(super) struct Own {
    sinks: Option<Vec<f32>>,
    widened: Option<Vec<f64>>,
    seed: i64,
    offset: i64,
    /// The dropout probability.
    p: Option<f32>,
}

impl Own {
    /// Draws sinks as large as scores, far below them, or absent, and seeds of any size. Half of the offsets are not a multiple of four.
    pub(super) fn draw(spec: &AttentionSpec, seed: u64) -> Own {
        let mut random = Random::new(seed ^ 0x51_4e6b);
        let one = |random: &mut Random| match random.between(0, 7) {
            0 => f32::NEG_INFINITY,
            1 => -30.0,
            _ => (2.0 * random.normal()) as f32,
        };
        let sinks: Option<Vec<f32>> = spec.sink.then(|| (0..spec.q.dims[1]).map(|_| one(&mut random)).collect());
        let widened = sinks.as_ref().map(|sinks| sinks.iter().map(|&x| f64::from(x)).collect());
        let number = |random: &mut Random| {
            let bits = random.pick(&[0, 8, 31, 33, 61]);
            random.between(-(1 << bits), 1 << bits)
        };
        let (seed, offset) = (number(&mut random), number(&mut random));
        let offset = if random.between(0, 1) == 0 { offset / 4 * 4 } else { offset };
        Own { sinks, widened, seed, offset, p: spec.dropout.map(|dropout| dropout.p()) }
    }

    /// Appends the sinks, the seed and the offset to other parameters of a call.
    pub(super) fn params<'a>(&'a self, mut params: Vec<Param<'a>>) -> Vec<Param<'a>> {
        params.extend(self.sinks.as_ref().map(|sinks| Param::new(SINK, sinks)));
        if self.p.is_some() {
            let numbers = [(DROPOUT_SEED, &self.seed), (DROPOUT_OFFSET, &self.offset)];
            params.extend(numbers.map(|(name, number)| Param::new(name, std::slice::from_ref(number))));
        }
        params
    }

    /// Returns the sinks for the oracle.
    pub(super) fn sink(&self) -> Option<&[f64]> {
        self.widened.as_deref()
    }

    /// Returns dropout for the oracle.
    pub(super) fn dropout(&self) -> Option<Dropout> {
        self.p.map(|p| Dropout { p: p.into(), seed: self.seed, offset: self.offset })
    }
}
