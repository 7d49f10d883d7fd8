//! The numbers of a picture: modified scores and unmasked keys in cells, and the score_mod as a curve.

use crate::operands::Operands;
use crate::oracle::has_lengths;
use crate::oracle::rules::{self, Function};
use crate::request::Request;
use sdpa::ScoreMod;
use sdpa::expr::Trace;
use sdpa_oracle::Mask;

/// Maximum number of cells per side.
pub(super) const CELLS: usize = 128;
/// Maximum number of examined positions per side of a cell.
const SAMPLES: usize = 8;
/// The curve covers scores from −`REACH` to `REACH`.
pub(super) const REACH: f64 = 60.0;
const STEPS: usize = 240;

/// The part of a head that is shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) batch: i64,
    pub(super) head: i64,
    /// A constant score; `None` for the scores of the operands.
    pub(super) score: Option<f64>,
}

/// Cells of scores, with queries downwards.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The mean of the finite modified scores that are not masked out; `None` if there are none.
    pub(super) values: Vec<Option<f64>>,
    /// An unmasked infinity or NaN in the cell, if there is one.
    pub(super) odd: Vec<Option<Odd>>,
    /// The fraction of pairs that masks keep.
    pub(super) kept: Vec<f64>,
    /// Number of unmasked pairs of each kind of infinity or NaN, the first of them, and the number of examined pairs.
    pub(super) odd_pairs: [u64; 3],
    pub(super) first_odd: Option<[usize; 2]>,
    pub(super) looked: u64,
}

/// An unmasked score that is infinite or NaN. If a cell has several, the first variant of this list is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Odd {
    NotANumber,
    Infinite,
    MinusInfinite,
}

impl Odd {
    /// Every kind of infinity or NaN.
    pub(super) const ALL: [Odd; 3] = [Odd::NotANumber, Odd::Infinite, Odd::MinusInfinite];

    fn of(x: f64) -> Option<Odd> {
        if x.is_nan() {
            Some(Odd::NotANumber)
        } else if x.is_infinite() {
            Some(if x > 0.0 { Odd::Infinite } else { Odd::MinusInfinite })
        } else {
            None
        }
    }

    /// Returns a description of the kind.
    pub(super) fn said(self) -> &'static str {
        match self {
            Odd::NotANumber => "not a number",
            Odd::Infinite => "inf",
            Odd::MinusInfinite => "-inf",
        }
    }
}

/// The score_mod as a function of the score, at one position.
#[derive(Debug)]
pub(super) struct Curve {
    /// The query and the key of the position.
    pub(super) place: [i64; 2],
    /// Pairs of a score and the modified score.
    pub(super) values: Vec<[f64; 2]>,
    /// Pairs of a score and the derivative; empty if there is no derivative.
    pub(super) slopes: Vec<[f64; 2]>,
}

/// Returns the smallest and the largest finite number.
pub(super) fn range(numbers: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    numbers.filter(|x| x.is_finite()).fold(None, |range, x| match range {
        None => Some([x, x]),
        Some([low, high]) => Some([low.min(x), high.max(x)]),
    })
}

/// Returns the examined positions of a cell along one axis.
fn places(cell: usize, cells: usize, extent: usize) -> impl Iterator<Item = usize> {
    let (from, to) = (cell * extent / cells, (cell + 1) * extent / cells);
    let looked = (to - from).min(SAMPLES);
    (0..looked).map(move |n| from + n * (to - from) / looked)
}

impl Field {
    /// Computes the cells.
    pub(super) fn new(request: &Request, operands: &Operands, view: View) -> Field {
        let p = &request.problem;
        let extents = p.extents();
        let [rows, columns] = [extents[2], extents[3]].map(|n| usize::try_from(n).unwrap_or(1));
        let modify = p.score_mod().map(|trace| Function::new(trace, &operands.params, extents));
        let masks: Vec<Mask<'_>> = request.spec.masks.iter().map(|m| rules::mask(m, &operands.params, extents, has_lengths(p))).collect();
        let score = |q: usize, k: usize| view.score.unwrap_or_else(|| operands.score(request, [view.batch, view.head], [q, k]));
        let (tall, wide) = (rows.min(CELLS), columns.min(CELLS));
        let mut field = Field {
            rows: tall,
            columns: wide,
            values: Vec::new(),
            odd: Vec::new(),
            kept: Vec::new(),
            odd_pairs: [0; 3],
            first_odd: None,
            looked: 0,
        };
        for row in 0..tall {
            for column in 0..wide {
                let (mut looked, mut kept, mut finite, mut sum) = (0u32, 0u32, 0u32, 0f64);
                let mut odd: Option<Odd> = None;
                for q in places(row, tall, rows) {
                    for k in places(column, wide, columns) {
                        let index = [view.batch, view.head, q as i64, k as i64];
                        looked += 1;
                        if !masks.iter().all(|m| m.keeps(index, extents)) {
                            continue;
                        }
                        kept += 1;
                        let score = score(q, k);
                        let value = modify.as_ref().map_or(score, |f| f.eval(score, 0.0, index)[0]);
                        if value.is_finite() {
                            finite += 1;
                            sum += value;
                        }
                        if let Some(found) = Odd::of(value) {
                            odd = Some(odd.map_or(found, |odd| odd.min(found)));
                            field.odd_pairs[found as usize] += 1;
                            field.first_odd.get_or_insert([q, k]);
                        }
                    }
                }
                field.looked += u64::from(looked);
                field.odd.push(odd);
                field.kept.push(f64::from(kept) / f64::from(looked.max(1)));
                field.values.push((finite > 0).then(|| sum / f64::from(finite)));
            }
        }
        field
    }
}

impl Curve {
    /// Computes the curve at the middle of the diagonal.
    pub(super) fn new(request: &Request, operands: &Operands, view: View) -> Curve {
        let p = &request.problem;
        let extents = p.extents();
        let q = extents[2] / 2;
        let place = [q, q.min(extents[3] - 1)];
        let index = [view.batch, view.head, place[0], place[1]];
        let scores = || (0..=STEPS).map(|n| (2.0 * n as f64 / STEPS as f64 - 1.0) * REACH);
        let along = |trace: Option<&Trace>, root: usize| -> Vec<[f64; 2]> {
            let function = trace.map(|trace| Function::new(trace, &operands.params, extents));
            let plain = |x| if root == 0 { x } else { 1.0 };
            scores().map(|x| [x, function.as_ref().map_or(plain(x), |f| f.eval(x, 1.0, index)[root])]).collect()
        };
        let values = along(p.score_mod().map(AsRef::as_ref), 0);
        let gradient = request.spec.backward().validate().ok();
        let slopes = gradient.map_or_else(Vec::new, |b| along(b.gradient().map(|g| &g.trace), 1));
        Curve { place, values, slopes }
    }
}

/// Returns the texts of score_mods.
pub(super) fn names(mods: &[ScoreMod]) -> Vec<String> {
    mods.iter().map(|m| m.to_string().replace('\n', "; ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_cover_everything_once_and_large_ones_are_sampled() {
        for (extent, cells) in [(1, 1), (7, 7), (129, 128), (1000, 128)] {
            let all: Vec<usize> = (0..cells).flat_map(|cell| places(cell, cells, extent)).collect();
            assert_eq!(all, (0..extent).collect::<Vec<_>>(), "{extent}");
        }
        let all: Vec<usize> = places(1, 2, 4096).collect();
        assert_eq!((all.len(), all[0]), (SAMPLES, 2048));
    }
}
