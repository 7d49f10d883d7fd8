//! The score_mod, mask, dropout and lengths of a problem; everything except its band.

use super::compile::Program;
use super::machine::{Bound, Machine, Row};
use crate::dropout::{Dropper, Left};
use crate::isa::Isa;
use pulp::{Simd, WithSimd};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::expr::Declared;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::operand::Side;
use sdpa_core::packed::Documents;
use sdpa_core::problem::Problem;
use sdpa_core::tensor::ParamValue;
use std::ops::Range;

/// The compiled score_mod and mask of a problem, and whether it has dropout.
#[derive(Debug)]
pub(crate) struct Rules {
    mods: Option<Program>,
    mask: Option<Program>,
    dropout: bool,
}

impl Rules {
    pub(crate) fn new(problem: &Problem) -> Rules {
        let mods = problem.score_mod().map(|trace| Program::new(trace));
        Rules { mods, mask: problem.kept().rest.as_ref().map(|trace| Program::new(trace)), dropout: problem.dropout().is_some() }
    }

    /// Compiles the rules of a backward problem: the score_mod with its gradients, and the mask.
    pub(crate) fn with_gradient(problem: &BackwardProblem) -> Rules {
        Rules { mods: problem.gradient().map(|gradient| Program::new(&gradient.trace)), ..Rules::new(problem.forward()) }
    }

    /// Returns the size in bytes of the registers that one worker needs.
    pub(crate) fn bytes(&self) -> usize {
        [&self.mods, &self.mask].into_iter().flatten().map(Program::bytes).sum()
    }

    /// Returns whether the problem has a mask besides bands and lengths, so that a key of a row's interval may be masked out.
    pub(crate) fn drop(&self) -> bool {
        self.mask.is_some()
    }

    /// Returns whether scores and P are used unchanged for all keys that bands and lengths leave: there is no score_mod, other mask or
    /// dropout.
    pub(crate) fn is_empty(&self) -> bool {
        self.mods.is_none() && self.mask.is_none() && !self.dropout
    }

    /// Binds the rules to the parameters of a call. `values` are the values of the parameters `declared`, in the same order.
    pub(crate) fn bind<'a>(&'a self, problem: &Problem, isa: Isa, declared: &[Declared], values: &[ParamValue<'a>]) -> RulesOf<'a> {
        let bind = |program: &'a Option<Program>| program.as_ref().map(|p| Bound::new(p, isa, problem.extents(), declared, values));
        let left = problem.dropout().zip(problem.dropout_of(declared, values));
        let left = left.map(|(dropout, mask)| Left { mask, scale: dropout.scale() });
        RulesOf { isa, mods: bind(&self.mods), mask: bind(&self.mask), dropout: left.map(|left| (left, problem.group() as usize)) }
    }
}

/// The score_mod, mask and dropout of a problem, bound to the parameters of a call.
#[derive(Debug)]
pub(crate) struct RulesOf<'a> {
    isa: Isa,
    mods: Option<Bound<'a>>,
    mask: Option<Bound<'a>>,
    /// The dropout of the call, and the number of query heads per KV head.
    dropout: Option<(Left, usize)>,
}

impl RulesOf<'_> {
    /// Returns whether the problem has a mask besides bands and lengths, so that a key of a row's interval may be masked out.
    pub(crate) fn drop(&self) -> bool {
        self.mask.is_some()
    }

    /// Creates the state with which one worker evaluates the score_mod, the mask and dropout.
    pub(crate) fn worker(&self) -> Worker<'_> {
        let dropper = self.dropout.map(|(left, group)| Dropper::new(left, group));
        Worker { isa: self.isa, mods: self.mods.as_ref().map(Machine::new), mask: self.mask.as_ref().map(Machine::new), dropper }
    }
}

/// The state with which one worker evaluates the score_mod, the mask and dropout of a call.
#[derive(Debug)]
pub(crate) struct Worker<'a> {
    isa: Isa,
    pub(crate) mods: Option<Machine<'a>>,
    mask: Option<Machine<'a>>,
    dropper: Option<Dropper>,
}

impl<'a> Worker<'a> {
    fn each(&mut self) -> impl Iterator<Item = &mut Machine<'a>> {
        [&mut self.mods, &mut self.mask].into_iter().flatten()
    }

    /// Selects a batch entry for the next calls.
    pub(crate) fn entry(&mut self, batch: usize) {
        self.each().for_each(|machine| machine.entry(batch));
        self.dropper.iter_mut().for_each(|dropper| dropper.entry(batch));
    }

    /// Selects a block of keys for the next calls.
    pub(crate) fn keys(&mut self, keys: &Range<usize>) {
        self.each().for_each(|machine| machine.keys(keys));
    }

    /// Stores the rows of the tile with index `tile`, one row per lane.
    pub(crate) fn rows(&mut self, tile: usize, rows: impl Iterator<Item = Row> + Clone) {
        self.each().for_each(|machine| machine.rows(tile, rows.clone()));
        self.dropper.iter_mut().for_each(|dropper| dropper.rows(tile, rows.clone()));
    }

    /// Evaluates the mask for some keys and a tile of `width` rows. An element of `kept`, in the layout `[key][row]`, becomes nonzero
    /// where the row attends to the key. Returns false if no pair remains. Without a mask it returns true and writes nothing.
    pub(crate) fn keep(&mut self, tile: usize, width: usize, keys: &Range<usize>, kept: &mut [u32]) -> bool {
        let Some(mask) = &mut self.mask else { return true };
        mask.tile(tile);
        let step = Machine::keys_at_a_time(width);
        let mut any = 0;
        for (first, kept) in keys.clone().step_by(step).zip(kept.chunks_mut(step * width)) {
            let keys = first..(first + step).min(keys.end);
            let from = mask.first(tile, &keys, &[]);
            any |= self.isa.run(Keep { from, to: &mut kept[..from.len()] });
        }
        any != 0
    }

    /// Applies dropout to P of some keys, in the layout `[key][row]`: sets elements to 0 or multiplies them by the dropout scale. dP gets
    /// the same factors.
    pub(crate) fn drop_out(&mut self, tile: usize, keys: &Range<usize>, weights: &mut [f32]) {
        self.dropper.iter_mut().for_each(|dropper| dropper.multiply(tile, keys, weights));
    }

    /// Applies the score_mod to the scores of some keys and a tile of `width` rows, in the layout `[key][row]`.
    pub(crate) fn modify(&mut self, tile: usize, width: usize, keys: &Range<usize>, scores: &mut [f32]) {
        let Some(mods) = &mut self.mods else { return };
        mods.tile(tile);
        let step = Machine::keys_at_a_time(width);
        for (first, scores) in keys.clone().step_by(step).zip(scores.chunks_mut(step * width)) {
            let keys = first..(first + step).min(keys.end);
            let scores = &mut scores[..keys.len() * width];
            let from = mods.first(tile, &keys, scores);
            from.iter().zip(scores).for_each(|(from, to)| *to = f32::from_bits(*from));
        }
    }
}

/// Copies elements, with 0 where the mask excludes a key.
#[derive(Debug)]
struct Keep<'a> {
    from: &'a [u32],
    to: &'a mut [u32],
}

impl WithSimd for Keep<'_> {
    type Output = u32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> u32 {
        let mut any = 0;
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = *from;
            any |= from;
        }
        any
    }
}

/// A step that sets scores to -inf where the mask excludes the key.
#[derive(Debug)]
pub(crate) struct DropUnkept<'a> {
    pub(crate) kept: &'a [u32],
    pub(crate) scores: &'a mut [f32],
}

impl WithSimd for DropUnkept<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (score, kept) in self.scores.iter_mut().zip(self.kept) {
            *score = if *kept != 0 { *score } else { f32::NEG_INFINITY };
        }
    }
}

/// The number of queries and the number of keys of each batch entry that are not padding; empty without padding.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lengths {
    of: Vec<[usize; 2]>,
    packed: bool,
}

impl Lengths {
    /// Reads the lengths from the parameters of a call. `values` are the values of the parameters `declared`, and `documents` are the
    /// packed sequences, if any.
    pub(crate) fn new(problem: &Problem, declared: &[Declared], values: &[ParamValue<'_>], documents: Option<&Documents>) -> Lengths {
        let kept = problem.kept();
        if documents.is_none() && !kept.seq_len_q && !kept.seq_len_kv {
            return Lengths::default();
        }
        let of = |there: bool, name: &str, batch: usize, most: i64| {
            let value = declared.iter().position(|p| p.name == name).filter(|_| there).map(|n| values[n].get(batch) as i64);
            value.map_or(most, |len| len.clamp(0, most)) as usize
        };
        let packed = |side: Side, batch: usize| documents.and_then(|documents| documents.of(side).get(batch)).map(Range::len);
        let entry = |batch| {
            let queries = || of(kept.seq_len_q, SEQ_LEN_Q, batch, problem.seq_q());
            let keys = || of(kept.seq_len_kv, SEQ_LEN_KV, batch, problem.seq_kv());
            [packed(Side::Queries, batch).unwrap_or_else(queries), packed(Side::Keys, batch).unwrap_or_else(keys)]
        };
        Lengths { of: (0..problem.batch() as usize).map(entry).collect(), packed: documents.is_some() }
    }

    /// Returns the numbers of queries and keys of a batch entry that are not padding; `None` without padding.
    pub(crate) fn get(&self, batch: usize) -> Option<[usize; 2]> {
        self.of.get(batch).copied()
    }

    /// Returns true for packed sequences, which have no memory past their lengths.
    pub(crate) fn packed(&self) -> bool {
        self.packed
    }
}
