//! Limits the norm of the error of a result, one tile of rows at a time.
//!
//! The tolerance of an element adds up worst cases, so it grows with the number of terms, while the element itself grows with the square root of that. For sums
//! of many terms, such a tolerance accepts zeros, twice the result, or the result of another head. [`Norms`] therefore also limits the norm of the error of
//! each tile: up to 64 rows of one head. Let `u` be the unit roundoff of the result's type and `e = 2⁻²⁴` that of f32. The limit is
//!
//! ```text
//! 2·F + D(V, largest row of V) + D(E, largest element of E) + D(S, S) + N/16
//! D(x, y) = √((x + 2·√(32·x·y) + 64·y) / 3)
//! ```
//!
//! **Independent errors.** `V`, `E` and `S` sum squares of errors, each times the norm of the row that it multiplies:
//!
//! | result | `V`: reaches one row | `E`: reaches one element | `S`: reaches several rows |
//! |---|---|---|---|
//! | `o` | `u·p·‖v‖` of each P | `u·‖o‖` where it is stored | |
//! | `dq` | `u·dS·‖k‖` of each pair, the error of its derivative, the error of δ times `‖Σ P·k‖` | `u·‖dq‖` | |
//! | `dk` | `u·dS·‖q‖` of each pair, the error of its derivative, `u` of the part of each head of a group | `u·‖dk‖` | errors of δ and of the statistic of each row |
//! | `dv` | `u·p·‖d_o‖` of each P, `u` of the part of each head of a group | `u·‖dv‖` | errors of the statistic of each row |
//! | parameters | | `u` of each element | `u·dS` of each pair, the error of its derivative, errors of δ |
//!
//! A sum of `n` terms in f32 adds `Σ(n) = 4·√n·e` of each term. δ is off by `u` of each element of `o`. In a chained pass it is also off by `u` of each P that
//! `o` was computed from, and by the errors of scores in that P.
//!
//! **The constant.** A rounding error of `a` is at most `u·a`. Within one binade it is uniform, so that it is sub-Gaussian with variance `(u·a)²/3`. A vector
//! `x` that sums such errors has `‖x‖² ≤ tr C + 2·√(t·tr C²) + 2·t·‖C‖` for its covariance `C`, except with a probability of `e⁻ᵗ`. That holds for any number
//! of terms (Hsu, Kakade and Zhang, 2012, Theorem 2.1). `D` is this for `t = 32`, with `tr C² ≤ ‖C‖·tr C`, and `‖C‖` at most the trace of the largest block of
//! errors that are independent of the others. A right result exceeds one `D` by chance in one of 7·10¹³ tiles. A run of less than 20,000 tiles, of three such
//! terms each, fails by chance with a probability below 10⁻⁹. Two choices leave a margin for larger runs: the factor of 2 before `F`, and `u·a` for errors that
//! are usually half of it. Right results use at most a fifth of the limit in every case of the tests.
//!
//! **Dependent errors.** `F` adds magnitudes. Each is of the size of f32's roundoff, except for 8-bit floats:
//!
//! - an error of a score reaches every product that its P is in, and the softmax denominator of the row;
//! - an error of a row's statistic is common to the row of `dq`;
//! - an error of δ that comes from f32 is common to the row of `dq`;
//! - tensor cores truncate each sum of 8-bit products in the same direction;
//! - numbers below the smallest normal one of a type lose their digits together.
//!
//! `N` is the norm of the tile in the oracle. A sixteenth of it covers an error that scales a complete tile: of the attention scale, of a scale of 8-bit
//! floats, of a biased approximation of `tanh` or `exp`.
//!
//! Row statistics have `F` alone: each row is one number in f32, and its tolerance is twice its error.
//!
//! **Undecided.** A tile whose norm is not above its limit is undecided: zeros would pass. Two kinds of tiles are decided nevertheless, because zeros are right
//! there: a tile that is 0 by cancellation, as `dq` of rows with one key is, and a tile whose norm is below one standard deviation of its own rounding. Their
//! limit is compared with the sum of magnitudes instead. A tile of a parameter's gradient may be one number, which is small by chance. Therefore such a
//! gradient is decided with all its tiles together.

use super::gradients::ABSOLUTE;

/// Maximum number of rows of a tile.
pub(crate) const TILE: usize = 64;
/// A limit is exceeded by chance with a probability of at most `e` to the power of minus this: 1.3·10⁻¹⁴.
const RARE: f64 = 32.0;
/// Error, relative to its norm, that a tile may have in addition.
const RELATIVE: f64 = 1.0 / 16.0;
/// Below this fraction of the sum of magnitudes, a result of the oracle in f64 consists of rounding errors.
const CANCELLED: f64 = 1e-10;

/// Bounds the norm of a sum of independent rounding errors whose squares sum to `total`, and to at most `largest` in any one direction.
fn deviation(total: f64, largest: f64) -> f64 {
    if total == f64::INFINITY { total } else { ((total + 2.0 * (total * largest * RARE).sqrt() + 2.0 * largest * RARE) / 3.0).sqrt() }
}

/// Rounding errors of a number or of the norm of a row, by how they add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Noise {
    /// Dependent errors: their magnitudes are added.
    pub(crate) fine: f64,
    /// Errors that are independent of each other and of those of other rows: their squares are added.
    pub(crate) variance: f64,
    /// Independent errors that each reach several rows: their squares are added.
    pub(crate) shared: f64,
    /// Independent roundings of the elements of a row: their squares are added.
    pub(crate) elements: f64,
    /// Absolute errors of numbers that are small for their type.
    pub(crate) small: f64,
}

impl Noise {
    /// Adds the errors `of` of a factor that multiplies a row. `square` is the squared norm of that row.
    pub(crate) fn add(&mut self, of: Noise, square: f64) {
        self.fine += of.fine * square.sqrt();
        self.variance += of.variance * square;
        self.shared += of.shared * square;
    }

    /// Adds the errors of another part of the same sum.
    pub(crate) fn merge(&mut self, of: Noise) {
        self.add(of, 1.0);
    }
}

/// Sums of squares over the rows of a tile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tile {
    error: f64,
    norm: f64,
    magnitude: f64,
    fine: f64,
    variance: f64,
    shared: f64,
    elements: f64,
    small: f64,
    /// The largest variance of a row, and of an element.
    largest: [f64; 2],
}

impl Tile {
    fn limit(&self) -> f64 {
        let independent = deviation(self.variance, self.largest[0]) + deviation(self.elements, self.largest[1]);
        2.0 * self.fine.sqrt() + independent + deviation(self.shared, self.shared) + RELATIVE * self.norm.sqrt()
    }

    /// Returns a typical rounding error: one standard deviation plus the absolute errors of small numbers.
    fn usual(&self) -> f64 {
        ((self.variance + self.elements + self.shared) / 3.0).sqrt() + self.small.sqrt()
    }

    fn and(self, of: Tile) -> Tile {
        Tile {
            error: self.error + of.error,
            norm: self.norm + of.norm,
            magnitude: self.magnitude + of.magnitude,
            fine: self.fine + of.fine,
            variance: self.variance + of.variance,
            shared: self.shared + of.shared,
            elements: self.elements + of.elements,
            small: self.small + of.small,
            largest: [self.largest[0].max(of.largest[0]), self.largest[1].max(of.largest[1])],
        }
    }

    fn ratio(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error.sqrt() / self.limit() }
    }

    fn is_undecided(&self) -> bool {
        let (norm, magnitude) = (self.norm.sqrt(), self.magnitude.sqrt());
        let size = if norm <= self.usual().max(CANCELLED * magnitude) { magnitude + ABSOLUTE * self.small.sqrt() } else { norm };
        self.limit() > 0.0 && self.limit() >= size
    }
}

/// A row of a result and of the oracle.
pub(crate) struct NormRow<'a> {
    pub(crate) got: &'a [f64],
    pub(crate) want: &'a [f64],
    /// The sum of magnitudes of the terms of each element.
    pub(crate) magnitude: &'a [f64],
    /// Noise of the norm of the row.
    pub(crate) noise: Noise,
}

/// The norms of the errors in the tiles of a result, relative to their limits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Norms {
    ratio: f64,
    undecided: u64,
    /// The tile that rows are added to.
    open: Tile,
    at: [usize; 3],
    /// All closed tiles of a parameter's gradient together; `None` for other results.
    whole: Option<Tile>,
}

impl Norms {
    /// Creates the norms of a parameter's gradient, which is decided with all its tiles together: one tile may be one number, which is
    /// small by chance.
    pub(crate) fn of_parameter() -> Norms {
        Norms { whole: Some(Tile::default()), ..Norms::default() }
    }

    /// Adds a row of a result to the tile of rows that is not complete yet.
    pub(crate) fn add(&mut self, row: &NormRow<'_>) {
        let Noise { fine, variance, shared, elements, small } = row.noise;
        // Skip rows where the oracle has an infinity or NaN: the comparison of elements requires the same value there.
        if row.want.iter().any(|x| !x.is_finite()) {
            return;
        }
        let known = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
        let tile = &mut self.open;
        // Skip elements that are not finite: they already fail the comparison of elements.
        tile.error += row.got.iter().zip(row.want).filter(|(got, _)| got.is_finite()).map(|(got, want)| (got - want).powi(2)).sum::<f64>();
        tile.norm += row.want.iter().map(|x| x * x).sum::<f64>();
        tile.magnitude += row.magnitude.iter().map(|x| x * x).sum::<f64>();
        tile.fine += known((fine + small).powi(2));
        tile.small += small * small;
        tile.variance += known(variance);
        tile.elements += known(elements);
        let square = |x: &f64| x * x;
        let (most, all) = (row.want.iter().map(square).fold(0.0, f64::max), row.want.iter().map(square).sum::<f64>());
        tile.largest =
            [tile.largest[0].max(known(variance)), tile.largest[1].max(if all > 0.0 { known(elements) * most / all } else { 0.0 })];
        // Add up `shared` of all rows, because each of these errors reaches several rows.
        tile.shared += known(shared);
    }

    /// Adds the row (batch, head, row) of a result to its tile. Callers add rows in order.
    pub(crate) fn add_at(&mut self, [batch, head, row]: [usize; 3], of: &NormRow<'_>) {
        let at = [batch, head, row / TILE];
        if at != self.at {
            self.close();
            self.at = at;
        }
        self.add(of);
    }

    /// Ends the open tile.
    pub(crate) fn close(&mut self) {
        let whole = self.whole.map(|whole| whole.and(self.open));
        *self = Norms { ratio: self.bound(), undecided: self.tiles(), whole, ..Norms::default() };
    }

    /// Adds the norms of other rows. The open rows of both belong to one tile.
    pub(crate) fn and(mut self, other: Norms) -> Norms {
        self.open = self.open.and(other.open);
        Norms { ratio: self.ratio.max(other.ratio), undecided: self.undecided + other.undecided, ..self }
    }

    /// Returns the largest ratio, over all tiles, of the norm of the error and its limit. Above 1, the result fails.
    #[must_use]
    pub fn bound(&self) -> f64 {
        let ratio = self.open.ratio();
        // An infinite error with an infinite limit has the ratio NaN, which must fail.
        if ratio.is_nan() { f64::INFINITY } else { self.ratio.max(ratio) }
    }

    /// Returns the number of undecided tiles: those whose limit is at least their norm.
    #[must_use]
    pub fn undecided(&self) -> u64 {
        self.whole.map_or_else(|| self.tiles(), |whole| u64::from(whole.is_undecided()))
    }

    fn tiles(&self) -> u64 {
        self.undecided + u64::from(self.open.is_undecided())
    }
}

/// The outcome of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every element and every norm is within its tolerance, and no tolerance would accept any result.
    Passed,
    /// An element or a norm is past its tolerance.
    Failed,
    /// Nothing is past its tolerance, but a tolerance would accept any result.
    Undecided,
}

impl Verdict {
    pub(crate) fn new(passes: bool, decided: bool) -> Verdict {
        match (passes, decided) {
            (false, _) => Verdict::Failed,
            (true, false) => Verdict::Undecided,
            (true, true) => Verdict::Passed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(got: f64, want: f64, fine: f64) -> Norms {
        let mut norms = Norms::default();
        norms.add(&NormRow { got: &[got; 4], want: &[want; 4], magnitude: &[1.0; 4], noise: Noise { fine, ..Noise::default() } });
        norms
    }

    #[test]
    fn a_norm_is_limited_and_decides_where_the_limit_is_below_it() {
        assert!(row(1.0, 1.0, 0.1).bound() == 0.0 && row(1.1, 1.0, 0.1).bound() < 1.0 && row(2.0, 1.0, 0.1).bound() > 1.0);
        assert_eq!([0.1, 2.0, f64::NAN, f64::INFINITY].map(|fine| row(1.0, 1.0, fine).undecided()), [0, 1, 1, 1]);
        // The terms cancel, so the right result is zero. Such a row is undecided only if its limit is at least the norm of the terms'
        // magnitudes (1.0 here).
        assert_eq!([0.1, 2.0].map(|fine| row(0.0, 1e-15, fine).undecided()), [0, 1]);
        // A tile of exact zeros without noise accepts zeros only.
        assert_eq!((row(0.0, 0.0, 0.0).undecided(), row(1e-30, 0.0, 0.0).bound()), (0, f64::INFINITY));
    }

    #[test]
    fn a_tile_is_judged_by_itself() {
        let mut norms = Norms::default();
        for at in 0..1024 {
            // One of the sixteen tiles contains wrong zeros.
            let got = if at / TILE == 3 { 0.0 } else { 1.0 };
            let noise = Noise { fine: 0.05, ..Noise::default() };
            norms.add_at([0, 0, at], &NormRow { got: &[got; 4], want: &[1.0; 4], magnitude: &[1.0; 4], noise });
        }
        norms.close();
        assert!(norms.bound() > 5.0 && norms.undecided() == 0, "{norms:?}");
        let both = row(1.0, 1.0, 0.1).and(row(2.0, 1.0, 0.1));
        assert!(both.bound() > 1.0 && both.bound() < row(2.0, 1.0, 0.1).bound());
    }

    #[test]
    fn an_error_is_worse_than_a_doubt() {
        assert_eq!(
            [(true, true), (true, false), (false, true), (false, false)].map(|(passes, decided)| Verdict::new(passes, decided)),
            [Verdict::Passed, Verdict::Undecided, Verdict::Failed, Verdict::Failed]
        );
    }
}
