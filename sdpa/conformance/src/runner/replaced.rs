//! Replaces right results by wrong ones and records the verdicts of the check.

use super::backward::computed as computed_backward;
use super::{Draw, Source, computed};
use crate::case::Case;
use crate::compare::{GotGradients, Outputs, Verdict, compare_each, compare_each_gradients};
use crate::library::Library;
use crate::oracle::{self, Closures, Given};
use sdpa::{AttentionSpec, BackwardSpec, Executor};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Number of rows of a tile that is set to zero.
const TILE: usize = 64;
/// A replacement whose error is at most this many times that of the right result differs from it only by rounding.
const ROUNDING: f64 = 16.0;

/// A wrong result that replaces the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Replacement {
    /// The result is all zeros.
    Zeros,
    /// The result is doubled.
    Twice,
    /// The result has the opposite sign.
    Negative,
    /// One element of the result is NaN.
    Nan,
    /// One element of the result is infinite.
    Infinite,
    /// One head of the result is replaced by the next head.
    Head,
    /// One batch entry of the result is replaced by the next entry.
    Batch,
    /// The tile of 64 rows with the largest norm is set to zeros.
    LargeTile,
    /// The tile of 64 rows with the smallest norm above zero is set to zeros.
    SmallTile,
}

impl Replacement {
    /// Every replacement, in declaration order.
    pub const ALL: [Replacement; 9] = [
        Replacement::Zeros,
        Replacement::Twice,
        Replacement::Negative,
        Replacement::Nan,
        Replacement::Infinite,
        Replacement::Head,
        Replacement::Batch,
        Replacement::LargeTile,
        Replacement::SmallTile,
    ];

    /// The heading of its column in the table.
    fn name(self) -> &'static str {
        match self {
            Replacement::Zeros => "zeros",
            Replacement::Twice => "twice",
            Replacement::Negative => "negative",
            Replacement::Nan => "NaN",
            Replacement::Infinite => "infinity",
            Replacement::Head => "head",
            Replacement::Batch => "batch",
            Replacement::LargeTile => "large tile",
            Replacement::SmallTile => "small tile",
        }
    }

    /// Returns the wrong result, or `None` if there is no other head or entry. Extents are (batch, head, row, element).
    fn of(self, right: &[f64], dims: [usize; 4]) -> Option<Vec<f64>> {
        let [batch, heads, rows, dim] = dims;
        let mut wrong = right.to_vec();
        let square = |of: &[f64]| of.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>();
        // Returns the number of the part with the largest norm, which is replaced because an error has the largest effect there.
        let largest = |size: usize| {
            let squares = right.chunks(size.max(1)).map(square).enumerate();
            squares.fold((0, -1.0), |best, next| if next.1 > best.1 { next } else { best }).0
        };
        // Copies the next head or entry over the one with the largest norm.
        let next = |wrong: &mut Vec<f64>, size: usize, of: usize| {
            let at = largest(size);
            let from = at / of * of + (at + 1) % of;
            wrong[at * size..][..size].copy_from_slice(&right[from * size..][..size]);
        };
        match self {
            Replacement::Zeros => wrong.fill(0.0),
            Replacement::Twice => wrong.iter_mut().for_each(|x| *x *= 2.0),
            Replacement::Negative => wrong.iter_mut().for_each(|x| *x = -*x),
            Replacement::Nan => *wrong.get_mut(largest(1))? = f64::NAN,
            Replacement::Infinite => *wrong.get_mut(largest(1))? = f64::INFINITY,
            Replacement::Head if heads > 1 => next(&mut wrong, rows * dim, heads),
            Replacement::Batch if batch > 1 => next(&mut wrong, heads * rows * dim, batch),
            Replacement::LargeTile | Replacement::SmallTile => {
                let tiles = (0..batch * heads).flat_map(|head| {
                    let tiles = (0..rows).step_by(TILE).map(move |row| (head * rows + row, TILE.min(rows - row)));
                    tiles.map(|(row, n)| row * dim..(row + n) * dim)
                });
                let mut tiles: Vec<_> =
                    tiles.map(|tile| (square(&right[tile.clone()]), tile)).filter(|(square, _)| *square > 0.0).collect();
                tiles.sort_by(|x, y| x.0.total_cmp(&y.0));
                let tile = if self == Replacement::SmallTile { tiles.first() } else { tiles.last() };
                wrong[tile?.1.clone()].fill(0.0);
            }
            Replacement::Head | Replacement::Batch => return None,
        }
        Some(wrong)
    }

    /// Returns true if the replaced elements differ from the truth by more than rounding.
    fn differs(wrong: &[f64], right: &[f64], truth: &[f64]) -> bool {
        let replaced = || wrong.iter().zip(right).zip(truth).filter(|((wrong, right), _)| wrong.to_bits() != right.to_bits());
        // An infinity or NaN, on either side, is never a rounding difference.
        if replaced().any(|((wrong, right), _)| !wrong.is_finite() || !right.is_finite()) {
            return true;
        }
        let squares = |of: &mut dyn Iterator<Item = (f64, f64)>| {
            of.filter(|(x, truth)| x.is_finite() && truth.is_finite()).map(|(x, truth)| (x - truth).powi(2)).sum::<f64>()
        };
        let of_wrong = squares(&mut replaced().map(|((wrong, _), truth)| (*wrong, *truth)));
        let of_right = squares(&mut replaced().map(|((_, right), truth)| (*right, *truth)));
        // If few elements are replaced, they may be unusually accurate by chance; compare with the average error too.
        let of_all = squares(&mut right.iter().copied().zip(truth.iter().copied())) * replaced().count() as f64 / right.len().max(1) as f64;
        of_wrong.sqrt() > ROUNDING * of_right.max(of_all).sqrt()
    }
}

/// The verdict on one replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Said {
    /// The replacement equals the right result except for rounding, or it does not exist.
    Same,
    /// The check reports the replacement as failed.
    Failed,
    /// The check reports the replacement as undecided.
    Undecided,
    /// The check accepts the replacement, which is a bug.
    Passed,
}

/// The verdicts of the check on the right results of a pass, and on wrong results that replaced them.
#[derive(Clone, Debug, Default)]
pub struct Replaced {
    /// Number of verdicts, by tensor and replacement.
    counts: BTreeMap<(&'static str, Replacement), BTreeMap<Said, usize>>,
    /// Descriptions of replacements that pass the check, and of right results that fail it.
    pub wrong: Vec<String>,
    /// The reason why the right result is undecided.
    pub undecided: Option<String>,
}

impl Replaced {
    fn add(&mut self, tensor: &'static str, replacement: Replacement, said: Said) {
        *self.counts.entry((tensor, replacement)).or_default().entry(said).or_default() += 1;
        if said == Said::Passed {
            self.wrong.push(format!("{tensor} replaced by {replacement:?} passes"));
        }
    }

    fn right(&mut self, verdict: Verdict, told: &str) {
        match verdict {
            Verdict::Passed => {}
            Verdict::Failed => self.wrong.push(format!("the right result fails: {told}")),
            Verdict::Undecided => self.undecided = Some(told.to_owned()),
        }
    }

    /// Adds the counts and descriptions of another pass.
    pub fn merge(&mut self, other: &Replaced) {
        for (key, counts) in &other.counts {
            for (said, n) in counts {
                *self.counts.entry(*key).or_default().entry(*said).or_default() += n;
            }
        }
    }

    /// Returns the number of replacements that differ from the right result by more than rounding.
    #[must_use]
    pub fn seen(&self) -> usize {
        self.counts.values().flatten().filter(|(said, _)| **said != Said::Same).map(|(_, n)| n).sum()
    }

    /// Returns a table of the verdicts on replacements (failed, undecided, equal), with a line per tensor.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = "replaced by".to_owned();
        for replacement in Replacement::ALL {
            write!(table, " | {}", replacement.name()).ok();
        }
        let mut tensors: Vec<&str> = self.counts.keys().map(|(tensor, _)| *tensor).collect();
        tensors.dedup();
        for tensor in tensors {
            write!(table, "\n{tensor}").ok();
            for replacement in Replacement::ALL {
                let counts = self.counts.iter().find(|((of, by), _)| *of == tensor && *by == replacement).map(|(_, counts)| counts);
                let count = |said: Said| counts.and_then(|counts| counts.get(&said)).copied().unwrap_or(0);
                let passed = if count(Said::Passed) > 0 { format!(", {} PASSED", count(Said::Passed)) } else { String::new() };
                write!(
                    table,
                    " | {} failed, {} undecided, {} same{passed}",
                    count(Said::Failed),
                    count(Said::Undecided),
                    count(Said::Same)
                )
                .ok();
            }
        }
        table
    }
}

fn said(verdict: Verdict) -> Said {
    match verdict {
        Verdict::Passed => Said::Passed,
        Verdict::Failed => Said::Failed,
        Verdict::Undecided => Said::Undecided,
    }
}

/// Yields each replacement of a largest magnitude; `None` where it equals the right one.
fn magnitudes(right: f64) -> impl Iterator<Item = (Replacement, Option<f64>)> {
    Replacement::ALL.into_iter().map(move |replacement| {
        let wrong = replacement.of(&[right], [1; 4]).map(|wrong| wrong[0]);
        (replacement, wrong.filter(|wrong| *wrong != right))
    })
}

/// Replaces each result of a forward pass in turn.
fn outputs(p: &oracle::Problem<'_>, closures: &Closures<'_>, right: &Outputs) -> Replaced {
    let truth_of = oracle::attention(p, closures);
    let [batch, heads, seq_q, dim_v] = p.o_dims();
    let rows = [batch, heads, seq_q, 1];
    let tensors = [
        ("o", Some(&right.o), &truth_of.o, [batch, heads, seq_q, dim_v]),
        ("stats", right.of_rows[0].as_ref(), &truth_of.stats, rows),
        ("row_max", right.of_rows[1].as_ref(), &truth_of.row_max, rows),
        ("sum_exp", right.of_rows[2].as_ref(), &truth_of.sum_exp, rows),
    ];
    let mut replaced = Replaced::default();
    let (mut all, mut what) = (vec![right.clone()], Vec::new());
    for (replacement, wrong) in right.amax_s.into_iter().flat_map(magnitudes) {
        match wrong {
            None => replaced.add("amax_s", replacement, Said::Same),
            wrong => {
                all.push(Outputs { amax_s: wrong, ..right.clone() });
                what.push(("amax_s", replacement));
            }
        }
    }
    for (n, (name, of, truth, dims)) in tensors.into_iter().enumerate() {
        let Some(of) = of else { continue };
        for replacement in Replacement::ALL {
            let wrong = replacement.of(of, dims).map(|mut wrong| {
                // In a row that attends to no key, a statistic without the sink is right too, so such rows are not replaced.
                let keyless = |row: usize| n > 0 && truth_of.o_magnitude[row * dim_v..][..dim_v].iter().all(|x| *x == 0.0);
                let none = |(row, wrong): (usize, &f64)| *wrong == f64::NEG_INFINITY && keyless(row);
                let rows: Vec<usize> = wrong.iter().enumerate().filter(|x| none((x.0, x.1))).map(|(row, _)| row).collect();
                rows.into_iter().for_each(|row| wrong[row] = of[row]);
                wrong
            });
            match wrong.filter(|wrong| Replacement::differs(wrong, of, truth)) {
                None => replaced.add(name, replacement, Said::Same),
                Some(wrong) => {
                    let mut outputs = right.clone();
                    if n == 0 {
                        outputs.o = wrong
                    } else {
                        outputs.of_rows[n - 1] = Some(wrong)
                    }
                    all.push(outputs);
                    what.push((name, replacement));
                }
            }
        }
    }
    let distances = compare_each(p, closures, &all);
    replaced.right(distances[0].verdict(), &crate::compare::Measured::told(&distances[0]));
    for ((name, replacement), distance) in what.into_iter().zip(&distances[1..]) {
        replaced.add(name, replacement, said(distance.verdict()));
    }
    replaced
}

/// Replaces each gradient in turn.
fn gradients(
    p: &oracle::Problem<'_>,
    closures: &Closures<'_>,
    d_o: &Vec<f64>,
    given: Given<'_>,
    right: &GotGradients,
) -> Result<Replaced, String> {
    let truth = oracle::gradients(p, closures, d_o);
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = p.shape;
    let of_parameters = closures.along.iter().map(|along| ("a parameter's", along.dims));
    let of_parameters = of_parameters.chain(p.sink.map(|_| ("the sink's", [1, heads_q, 1, 1])));
    let operands = [
        ("dq", [batch, heads_q, seq_q, dim_qk], &truth.dq.value),
        ("dk", [batch, heads_kv, seq_kv, dim_qk], &truth.dk.value),
        ("dv", [batch, heads_kv, seq_kv, dim_v], &truth.dv.value),
    ];
    let along = of_parameters.zip(&truth.along).map(|((name, dims), truth)| (name, dims, &truth.value));
    let tensors: Vec<_> = operands.into_iter().chain(along).take(3 + right.along.len()).collect();
    let mut replaced = Replaced::default();
    // Each tensor of the list is replaced in turn and checked with the others unchanged.
    let (mut all, mut what) = (vec![right.clone()], Vec::new());
    for replacement in Replacement::ALL {
        let mut wrong = right.clone();
        for (n, (name, dims, truth)) in tensors.iter().enumerate() {
            let of = if n < 3 { &right.operands[n] } else { &right.along[n - 3].value };
            match replacement.of(of, *dims).filter(|wrong| Replacement::differs(wrong, of, truth)) {
                None => replaced.add(name, replacement, Said::Same),
                Some(other) => {
                    *(if n < 3 { &mut wrong.operands[n] } else { &mut wrong.along[n - 3].value }) = other;
                    what.push((all.len(), n, *name, replacement));
                }
            }
        }
        all.push(wrong);
    }
    let distances = compare_each_gradients(p, closures, d_o, given, &all)?;
    replaced.right(distances[0].verdict(), &crate::compare::Measured::told(&distances[0]));
    let magnitudes: Vec<_> = right.slopes.iter().flat_map(|slopes| magnitudes(slopes.amax_dp)).collect();
    let wrong = magnitudes.iter().map(|(_, wrong)| {
        let mut result = right.clone();
        if let Some((slopes, wrong)) = result.slopes.as_mut().zip(*wrong) {
            slopes.amax_dp = wrong;
        }
        result
    });
    let of_wrong = compare_each_gradients(p, closures, d_o, given, &wrong.collect::<Vec<_>>())?;
    for ((replacement, wrong), distance) in magnitudes.iter().zip(&of_wrong) {
        replaced.add("amax_dp", *replacement, if wrong.is_none() { Said::Same } else { said(distance.verdict()) });
    }
    for (list, n, name, replacement) in what {
        let mut distance = distances[0].clone();
        if n < 3 {
            distance.operands[n] = distances[list].operands[n]
        } else {
            distance.along[n - 3] = distances[list].along[n - 3]
        }
        replaced.add(name, replacement, said(distance.verdict()));
    }
    Ok(replaced)
}

/// Replaces each result of a forward pass by wrong ones, and records the verdicts of the check.
///
/// # Errors
/// Returns the outcome of the pass if the executor does not compute it.
pub fn replaced(spec: &AttentionSpec, draw: &Draw, library: Option<&Library>, executor: &dyn Executor) -> Result<Replaced, String> {
    computed(spec, draw, library, executor, outputs).map(|(replaced, _)| replaced).map_err(|outcome| format!("{outcome:?}"))
}

/// Replaces each result of a backward pass by wrong ones, and records the verdicts of the check.
///
/// # Errors
/// Fails as [`replaced`] does.
pub fn replaced_backward(
    spec: &BackwardSpec,
    draw: &Draw,
    library: Option<&Library>,
    source: Source,
    executor: &dyn Executor,
) -> Result<Replaced, String> {
    let done = computed_backward(spec, draw, library, source, executor, gradients);
    done.map_err(|outcome| format!("{outcome:?}"))?.0
}

/// Replaces each result of the forward pass of a case by wrong ones, and records the verdicts of the check.
///
/// # Errors
/// Fails as [`replaced`] does, and if the case does not parse.
pub fn replaced_case(case: &Case, executor: &dyn Executor) -> Result<Replaced, String> {
    let draw = Draw { attn_scale: case.attn_scale, spread: case.spread, shift: 0.0, seed: case.seed() };
    replaced(&case.spec()?, &draw, case.library()?.as_ref(), executor)
}

/// Replaces each result of the backward pass of a case by wrong ones, and records the verdicts of the check.
///
/// # Errors
/// Fails as [`replaced_case`] does.
pub fn replaced_backward_case(case: &Case, source: Source, executor: &dyn Executor) -> Result<Replaced, String> {
    let shift = case.backward.as_ref().map_or(0.0, |backward| backward.shift);
    let draw = Draw { attn_scale: case.attn_scale, spread: case.spread, shift, seed: case.seed() };
    replaced_backward(&case.backward_spec()?, &draw, case.library()?.as_ref(), source, executor)
}
