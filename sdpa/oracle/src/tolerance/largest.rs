//! The largest magnitude of a tensor that an executor of 8-bit floats does not return. The executor reports it (amax) for the scales of later calls.

use super::{Element, Wanted, Worst};

/// The largest magnitude of a tensor, and the range within which rounding may move it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Largest {
    value: f64,
    least: f64,
    most: f64,
}

impl Largest {
    /// Adds an element of the tensor, and the bound on its error.
    pub(crate) fn add(&mut self, value: f64, error: f64) {
        let size = value.abs();
        // An unknown (NaN) error accepts any value.
        let error = if error.is_nan() { f64::INFINITY } else { error };
        *self = self.and(Largest { value: size, least: (size - error).max(0.0), most: size + error });
    }

    /// Combines two parts of a tensor: returns the larger magnitude, and the range within which rounding may move it.
    #[must_use]
    pub(crate) fn and(self, other: Largest) -> Largest {
        Largest { value: self.value.max(other.value), least: self.least.max(other.least), most: self.most.max(other.most) }
    }

    /// Compares this magnitude with the one that an executor reports.
    #[must_use]
    pub fn compare(&self, got: f64) -> Worst {
        let tolerance = (self.most - self.value).max(self.value - self.least);
        Worst::of(got, Wanted { value: self.value, tolerance, magnitude: self.value, stored: Element::F32 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_magnitude_that_no_element_has_fails() {
        let mut largest = Largest::default();
        assert!(largest.compare(0.0).ratio <= 1.0 && largest.compare(1e-30).ratio > 1.0);
        largest.add(-2.0, 0.25);
        largest.add(1.75, 0.125);
        for right in [2.0, 1.75, 2.25] {
            assert!(largest.compare(right).ratio <= 1.0, "{right}");
        }
        for wrong in [0.0, 1.5, 2.5, 4.0, -2.0, f64::NAN, f64::INFINITY] {
            assert!(largest.compare(wrong).ratio > 1.0, "{wrong}");
        }
        assert_eq!(largest.compare(2.0).undecided, 0);
        largest.add(1.0, 5.0);
        assert_eq!(largest.compare(2.0).undecided, 1, "an element that may be 6 decides nothing");
    }
}
