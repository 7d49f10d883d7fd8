//! What a specification declares by itself: sinks, and the numbers of dropout.

use crate::random::Random;
use sdpa::{AttentionSpec, DROPOUT_OFFSET, DROPOUT_SEED, Param, SINK};
use sdpa_oracle::Dropout;

/// What of it a call is given, and the oracle.
pub(super) struct Own {
    sinks: Option<Vec<f32>>,
    widened: Option<Vec<f64>>,
    seed: i64,
    offset: i64,
    /// The probability that a weight is dropped.
    p: Option<f32>,
}

impl Own {
    /// Sinks of the size of scores, far below them, or none; numbers of any size, half of them with an offset that is no multiple of four.
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

    /// Those of a call, behind others.
    pub(super) fn params<'a>(&'a self, mut params: Vec<Param<'a>>) -> Vec<Param<'a>> {
        params.extend(self.sinks.as_ref().map(|sinks| Param::new(SINK, sinks)));
        if self.p.is_some() {
            let numbers = [(DROPOUT_SEED, &self.seed), (DROPOUT_OFFSET, &self.offset)];
            params.extend(numbers.map(|(name, number)| Param::new(name, std::slice::from_ref(number))));
        }
        params
    }

    /// Sinks as the oracle is told of them.
    pub(super) fn sink(&self) -> Option<&[f64]> {
        self.widened.as_deref()
    }

    /// Dropout as the oracle is told of it.
    pub(super) fn dropout(&self) -> Option<Dropout> {
        self.p.map(|p| Dropout { p: p.into(), seed: self.seed, offset: self.offset })
    }
}
