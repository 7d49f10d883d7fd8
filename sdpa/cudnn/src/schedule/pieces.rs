//! The schedule of a pass in pieces: schedules of the pieces, over rows of the caller's operands, and the kernels that combine their results.

use super::outline::{Outline, bug, outline};
use super::sink::{THREADS, blocks, number};
use super::{Argument, Launch, Port, Role, Run, Schedule, Slot, SlotId, Source, Step};
use crate::error::Error;
use crate::kernels::Own;
use crate::lower::{Job, Lowered, Operand, Statistic};
use crate::pieces::Part;
use sdpa_core::Direction;

/// Returns the schedule of a pass in pieces, each with its graph.
///
/// # Errors
/// Any error is a bug of the lowering.
pub(in super::super) fn pieces<'a>(job: &Job, parts: impl Iterator<Item = (&'a Part, &'a Lowered)>) -> Result<Schedule<()>, Error> {
    let problem = job.problem();
    let mut made = Outline::new(job);
    let stats = if job.direction() == Direction::Backward || problem.stats() {
        made.slot(Statistic::Stats.name().to_owned(), Source::Statistic(Statistic::Stats))
    } else {
        made.scratch(Statistic::Stats.name().to_owned(), 4 * problem.stats_elements().unsigned_abs())
    };
    made.holds(stats, 4 * problem.stats_elements().unsigned_abs(), 4);
    for (n, (part, lowered)) in parts.enumerate() {
        let own = outline(&part.job, &part.job, lowered)?;
        Absorbed { job, part, n, stats }.append(&mut made, &own)?;
    }
    Ok(made.finish())
}

/// A piece whose schedule becomes part of the whole.
struct Absorbed<'a> {
    job: &'a Job,
    part: &'a Part,
    n: usize,
    /// The stats of the whole pass.
    stats: SlotId,
}

impl Absorbed<'_> {
    fn append(&self, made: &mut Outline<'_>, own: &Schedule<()>) -> Result<(), Error> {
        let slots = own.slots().iter().map(|slot| self.slot(made, slot, own)).collect::<Result<Vec<_>, _>>()?;
        let statistics = own.slots().iter().position(|slot| slot.source == Source::Statistic(Statistic::Stats)).map(|at| slots[at]);
        let statistics = statistics.ok_or_else(|| bug("a piece without stats".to_owned()))?;
        let forward = self.job.direction() == Direction::Forward;
        if !forward && statistics != self.stats {
            self.move_stats(made, statistics, true);
        }
        for step in own.steps() {
            made.step(self.step(step, &slots));
        }
        if forward && self.part.beside.contains(&Operand::O) {
            self.merge(made, statistics, own, &slots)?;
        } else if forward && statistics != self.stats {
            self.move_stats(made, statistics, false);
        }
        if !forward {
            for &operand in &self.part.beside {
                self.add(made, operand, own, &slots)?;
            }
        }
        Ok(())
    }

    /// Returns the slot in the whole schedule for a slot of the piece's own schedule.
    fn slot(&self, made: &mut Outline<'_>, slot: &Slot, own: &Schedule<()>) -> Result<SlotId, Error> {
        let beside = |made: &mut Outline<'_>| made.scratch(format!("{}, piece {}", slot.name, self.n), slot.bytes);
        let id = match slot.source {
            Source::Operand(operand) if self.part.beside.contains(&operand) => beside(made),
            Source::Operand(operand) => self.rows(made, operand)?,
            Source::Statistic(Statistic::Stats) if self.whole_rows() && self.part.beside.iter().all(|&o| o != Operand::O) => self.stats,
            Source::Statistic(Statistic::Stats) | Source::Scratch(_) => beside(made),
            Source::Param(_) => made.slot(slot.name.clone(), slot.source),
            Source::Table(at) => made.table(own.tables()[at].clone(), slot.bytes),
            Source::Rows(..) | Source::Statistic(_) | Source::Gradient(_) | Source::Amax(_) | Source::Lengths { .. } => {
                return Err(bug(format!("a piece has {}", slot.name)));
            }
        };
        made.holds(id, slot.bytes, slot.alignment);
        Ok(id)
    }

    /// Returns the slot of the piece's rows in the caller's operand.
    fn rows(&self, made: &mut Outline<'_>, operand: Operand) -> Result<SlotId, Error> {
        let tensor = self.job.tensor(operand).ok_or_else(|| bug(format!("the {} pass has no {operand}", self.job.name())))?;
        let bytes = self.part.piece.offset(operand, tensor) * i64::from(self.job.problem().dtype().bits() / 8);
        let bytes = bytes.unsigned_abs();
        Ok(match bytes {
            0 => made.slot(operand.name().to_owned(), Source::Operand(operand)),
            _ => made.slot(format!("{operand} + {bytes}"), Source::Rows(operand, bytes)),
        })
    }

    fn whole_rows(&self) -> bool {
        self.part.piece.queries == (0..self.job.problem().seq_q())
    }

    fn step(&self, step: &Step<()>, slots: &[SlotId]) -> Step<()> {
        let here = |slot: SlotId| slots[slot.index()];
        match step {
            Step::Run(run) => {
                let Run { role, graph, ports, numbers, repeats, plan: () } = &**run;
                let role = if *role == Role::Attention && self.n > 0 { Role::Piece(self.n) } else { role.clone() };
                let ports = ports.iter().map(|port| Port { slot: here(port.slot), ..*port }).collect();
                Step::Run(Box::new(Run { role, graph: graph.clone(), ports, numbers: numbers.clone(), repeats: *repeats, plan: () }))
            }
            Step::Launch(launch) => {
                let arguments = launch.arguments.iter().map(|&argument| match argument {
                    Argument::Slot(slot) => Argument::Slot(here(slot)),
                    Argument::Tokens(_) | Argument::Fixed(_) => argument,
                });
                Step::Launch(Launch { arguments: arguments.collect(), ..launch.clone() })
            }
            Step::Zero(to) => Step::Zero(here(*to)),
            Step::Move(from, to) => Step::Move(here(*from), here(*to)),
        }
    }

    /// Adds a copy of statistics: from the whole to the piece (`back`), or from the piece to the whole.
    fn move_stats(&self, made: &mut Outline<'_>, own: SlotId, back: bool) {
        let problem = self.job.problem();
        let rows = self.part.job.problem().seq_q();
        let count = problem.batch() * problem.heads_q() * rows;
        let mut arguments = [count, rows, problem.seq_q(), self.part.piece.queries.start].map(Argument::Fixed).to_vec();
        arguments.extend([Argument::Slot(self.stats), Argument::Slot(own), Argument::Fixed(back.into())]);
        self.launch(made, Own::StatsRows, count, arguments);
    }

    fn merge(&self, made: &mut Outline<'_>, statistics: SlotId, own: &Schedule<()>, slots: &[SlotId]) -> Result<(), Error> {
        let problem = self.job.problem();
        let Rows { heads, rows, count, place, width, lanes } = self.shared(made, Operand::O, own, slots)?;
        let mut arguments = [count, heads, rows, problem.seq_q(), self.part.piece.queries.start].map(Argument::Fixed).to_vec();
        arguments.extend([self.stats, statistics].map(Argument::Slot));
        arguments.extend(place);
        arguments.extend([width, number(problem.dtype()), lanes].map(Argument::Fixed));
        self.launch(made, Own::MergeRows, count * lanes, arguments);
        Ok(())
    }

    fn add(&self, made: &mut Outline<'_>, operand: Operand, own: &Schedule<()>, slots: &[SlotId]) -> Result<(), Error> {
        let Rows { heads, rows, count, place, width, lanes } = self.shared(made, operand, own, slots)?;
        let mut arguments = [count, heads, rows].map(Argument::Fixed).to_vec();
        arguments.extend(place);
        arguments.extend([width, number(self.job.problem().dtype()), lanes].map(Argument::Fixed));
        self.launch(made, Own::AddRows, count * lanes, arguments);
        Ok(())
    }

    /// Returns the common arguments of the merging and the adding kernel, for rows that the piece wrote to the workspace.
    fn shared(&self, made: &mut Outline<'_>, operand: Operand, own: &Schedule<()>, slots: &[SlotId]) -> Result<Rows, Error> {
        let none = || bug(format!("the {} pass has no {operand}", self.job.name()));
        let (whole, part) = (self.job.tensor(operand).ok_or_else(none)?, self.part.job.tensor(operand).ok_or_else(none)?);
        let from = own.slots().iter().position(|slot| slot.source == Source::Operand(operand)).ok_or_else(none)?;
        let to = self.rows(made, operand)?;
        let [batch, heads, rows, width] = part.dims;
        let mut place = vec![Argument::Slot(to)];
        place.extend(whole.outer().map(Argument::Fixed));
        place.push(Argument::Slot(slots[from]));
        place.extend(part.outer().map(Argument::Fixed));
        Ok(Rows {
            heads,
            rows,
            count: batch * heads * rows,
            place,
            width,
            lanes: (width / 8).unsigned_abs().next_power_of_two().min(32) as i64,
        })
    }

    fn launch(&self, made: &mut Outline<'_>, kernel: Own, threads: i64, arguments: Vec<Argument>) {
        let (role, grid) = (Role::Merge(self.n), [blocks(threads), THREADS]);
        made.step(Step::Launch(Launch { role, kernel, grid, arguments, spared_by: Vec::new() }));
    }
}

/// Rows of two tensors, as arguments of a kernel.
struct Rows {
    heads: i64,
    rows: i64,
    count: i64,
    /// The address and the strides of each tensor.
    place: Vec<Argument>,
    width: i64,
    lanes: i64,
}
