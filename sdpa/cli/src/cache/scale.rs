//! Axes: positions of numbers, and round numbers for ticks.

/// Returns a round number of at least `x`: 1, 2 or 5 times a power of ten.
fn round_up(x: f64) -> f64 {
    if !x.is_finite() || x <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(x.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|n| *n >= x * 0.999_999).unwrap_or(x)
}

/// A linear axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The range of the numbers.
    low: f64,
    high: f64,
    /// The range of drawn positions.
    from: f64,
    to: f64,
}

impl Scale {
    /// Maps numbers from `low` to `high` to positions from `from` to `to`.
    pub(super) fn new([low, high]: [f64; 2], [from, to]: [f64; 2]) -> Scale {
        Scale { low, high, from, to }
    }

    /// Maps numbers from 0 to a round number of at least `high`.
    pub(super) fn up_to(high: f64, drawn: [f64; 2]) -> Scale {
        Scale::new([0.0, round_up(high)], drawn)
    }

    pub(super) fn low(self) -> f64 {
        self.low
    }

    pub(super) fn high(self) -> f64 {
        self.high
    }

    /// Returns the position of a number, clamped to the ends of the axis.
    pub(super) fn at(self, x: f64) -> f64 {
        let part = ((x - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        self.from + (self.to - self.from) * part
    }

    /// Returns the drawn length of a difference.
    pub(super) fn length(self, x: f64) -> f64 {
        (x / (self.high - self.low) * (self.to - self.from)).abs()
    }

    /// Returns about eight round numbers with their texts.
    pub(super) fn ticks(self) -> Vec<(f64, String)> {
        let step = round_up((self.high - self.low) / 8.0);
        let places = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
        let first = (self.low / step - 1e-6).ceil();
        let numbers = (0..=10).map(|n| (first + f64::from(n)) * step).take_while(|x| *x <= self.high + step * 1e-6);
        numbers.map(|x| (x, format!("{x:.places$}"))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        let texts = |low: f64, high: f64| Scale::new([low, high], [0.0, 1.0]).ticks().into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        assert_eq!(texts(0.0, 60.0), ["0", "10", "20", "30", "40", "50", "60"]);
        assert_eq!(texts(0.0, 0.4), ["0.00", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30", "0.35", "0.40"]);
        assert_eq!(texts(1003.0, 1021.0), ["1005", "1010", "1015", "1020"]);
        for (low, high) in [(0.0, 1e-6), (0.0, 1.8e13), (1e13, 1e13 + 1e-3)] {
            assert!(texts(low, high).len() <= 11);
        }
    }

    #[test]
    fn numbers_are_drawn_within_the_axis() {
        let scale = Scale::up_to(37.0, [100.0, 0.0]);
        assert_eq!((scale.high(), scale.at(25.0), scale.at(99.0), scale.length(5.0)), (50.0, 50.0, 0.0, 10.0));
        assert_eq!(Scale::up_to(0.0, [0.0, 1.0]).high(), 1.0);
    }
}
