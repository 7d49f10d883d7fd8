//! Steps for packed sequences: lengths and offsets before the attention, and unwritten results after it.

use super::outline::{Outline, bug};
use super::{Argument, Launch, Role, SlotId, Source, Step};
use crate::error::Error;
use crate::kernels::{BEFORE_OFFSETS, OFFSETS, Own};
use crate::lower::{Job, Lowered, Operand, Side, Statistic, Told};
use cudnn_graph::ir::TensorId;
use sdpa_core::mask::SEQ_LEN_KV;
use sdpa_core::problem::Problem;
use sdpa_core::{Packed, TensorSpec};

const THREADS: u32 = 128;
/// −∞ in f32, the stats of a row without keys.
const NO_KEY: i64 = 0xff80_0000;

fn other(side: Side) -> Side {
    match side {
        Side::Queries => Side::Keys,
        Side::Keys => Side::Queries,
    }
}

/// Returns the first arguments of both kernels: `cu_seqlens` of one side, then `cu_seqlens` of the other, or its lengths if it is not packed.
fn boundaries(made: &mut Outline<'_>, problem: &Problem, packed: &Packed, side: Side) -> Result<Vec<Argument>, Error> {
    let mut arguments = vec![Argument::Fixed(i64::from(packed.wide))];
    let (batch, bytes) = (problem.batch().unsigned_abs(), if packed.wide { 8 } else { 4 });
    let other = other(side);
    for side in [side, other].into_iter().filter(|side| problem.packs(*side)) {
        let slot = made.param(packed.boundaries(side))?;
        made.holds(slot, u64::from(bytes) * (batch + 1), bytes);
        arguments.extend([Argument::Slot(slot), Argument::Tokens(side), Argument::Fixed(problem.seq(side))]);
    }
    let counted = !problem.packs(other);
    if counted {
        let slot = made.param(SEQ_LEN_KV)?;
        made.holds(slot, 4 * batch, 4);
        arguments.extend([Argument::Slot(slot), Argument::Fixed(0), Argument::Fixed(problem.seq(other))]);
    }
    arguments.push(Argument::Fixed(counted.into()));
    Ok(arguments)
}

/// Adds launches that compute lengths and offsets, and returns the slots for the tensors.
pub(super) fn tell(
    made: &mut Outline<'_>,
    job: &Job,
    lowered: &Lowered,
    told: &[(TensorId, Told)],
) -> Result<Vec<(TensorId, SlotId)>, Error> {
    let problem = job.problem();
    let Some(packed) = problem.packed() else { return Ok(Vec::new()) };
    // If both sides share `cu_seqlens`, one launch computes both.
    let groups: &[&[Side]] = if packed.cross { &[&[Side::Queries], &[Side::Keys]] } else { &[&Side::ALL] };
    let mut bound = Vec::new();
    for sides in groups.iter().filter(|sides| sides.iter().all(|side| problem.packs(*side))) {
        let of = sides.iter().map(|&side| packed.boundaries(side)).next().unwrap_or_default();
        let mut slots: Vec<(Option<i64>, SlotId)> = Vec::new();
        for &(tensor, told) in told.iter().filter(|(_, told)| sides.contains(&told.side())) {
            let (what, token) = match told {
                Told::Lengths(_) => (format!("lengths by {of}"), None),
                Told::Offsets(_, token) => (format!("offsets of {token} by {of}"), Some(token)),
            };
            let known = slots.iter().find(|(known, _)| *known == token).map(|(_, slot)| *slot);
            let slot = known.unwrap_or_else(|| {
                let slot = made.scratch(what, lowered.bytes(tensor));
                slots.push((token, slot));
                slot
            });
            bound.push((tensor, slot));
        }
        let lengths = slots.iter().find(|(token, _)| token.is_none()).map(|(_, slot)| *slot);
        let lengths = lengths.ok_or_else(|| bug(format!("the lengths by {of} are not asked for")))?;
        let mut arguments = boundaries(made, problem, packed, sides[0])?;
        arguments.extend([Argument::Fixed(problem.batch()), Argument::Slot(lengths)]);
        let offsets = slots.iter().filter_map(|&(token, slot)| token.map(|token| [Argument::Slot(slot), Argument::Fixed(token)]));
        arguments.extend(offsets.flatten());
        let parameters = BEFORE_OFFSETS + 2 * OFFSETS;
        if arguments.len() > parameters {
            return Err(bug(format!("more strides by {of} than {OFFSETS}")));
        }
        arguments.resize(parameters, Argument::Fixed(0));
        let blocks = blocks(problem.batch() + 1).div_ceil(THREADS);
        made.step(Step::Launch(Launch {
            role: Role::Documents,
            kernel: Own::Documents,
            grid: [blocks, THREADS],
            arguments,
            spared_by: Vec::new(),
        }));
    }
    Ok(bound)
}

fn blocks(n: i64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Adds launches that fill results that engines leave unwritten: sequences with tokens on one side and none on the other.
pub(super) fn fill_unpaired(made: &mut Outline<'_>, job: &Job) -> Result<(), Error> {
    let problem = job.problem();
    let Some(packed) = problem.packed().filter(|packed| packed.cross) else { return Ok(()) };
    let bytes = i64::from(problem.dtype().bits() / 8);
    let operands: Vec<(Operand, TensorSpec)> = job.tensors().filter(|(operand, _)| job.writes(*operand)).collect();
    let mut filled: Vec<(Source, Side, TensorSpec, [i64; 2])> =
        operands.into_iter().map(|(operand, tensor)| (Source::Operand(operand), operand.side(), tensor, [bytes, 0])).collect();
    let bits = |statistic: Statistic| match statistic {
        Statistic::Stats | Statistic::RowMax => NO_KEY,
        Statistic::SumExp => 0,
    };
    let written = Statistic::ALL.into_iter().filter(|statistic| match job {
        Job::Forward(problem) => problem.computes(*statistic),
        Job::Backward(_) => false,
    });
    filled.extend(written.map(|s| (Source::Statistic(s), Side::Queries, problem.stats_tensor(), [4, bits(s)])));
    for (source, side, tensor, [bytes, bits]) in filled {
        let to = made.known(source).ok_or_else(|| bug("a result has no slot".to_owned()))?;
        let ([_, heads, _, width], [_, head, token, _]) = (tensor.dims, tensor.strides);
        let mut arguments = boundaries(made, problem, packed, side)?;
        arguments.push(Argument::Slot(to));
        arguments.extend([bytes, bits, heads, head, token, width].map(Argument::Fixed));
        let grid = [blocks(problem.batch()), THREADS];
        made.step(Step::Launch(Launch {
            role: Role::Unpaired(made.name(to)),
            kernel: Own::Unpaired,
            grid,
            arguments,
            spared_by: Vec::new(),
        }));
    }
    Ok(())
}
