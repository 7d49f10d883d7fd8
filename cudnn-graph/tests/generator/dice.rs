//! Random numbers that are a function of a seed.

/// A linear congruential generator.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    pub(crate) fn from(&mut self, low: i64, high: i64) -> i64 {
        low + self.roll((high - low + 1) as u64) as i64
    }

    pub(crate) fn list(&mut self, n: usize, low: i64, high: i64) -> Vec<i64> {
        (0..n).map(|_| self.from(low, high)).collect()
    }

    pub(crate) fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.roll(all.len() as u64) as usize]
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.roll(2) == 0
    }
}
