//! Digests of a schedule's steps: graphs as they are sent, memory and numbers as they are bound.

use super::{Argument, Contents, Launch, Number, Run, Schedule, Slot, SlotId, Source, Step};
use crate::error::Error;
use crate::lower::Table;
use crate::planfile::{Digest, Parts};
use cudnn_graph::Version;
use cudnn_graph::encode::encode;

impl<P> Schedule<P> {
    /// Returns every graph that runs with its digest, over the program sent to cuDNN and its bindings.
    ///
    /// # Errors
    /// Fails if the version of cuDNN is too old for a graph.
    pub(in super::super) fn digests(&self, runtime: Version) -> Result<Vec<(&Run<P>, Digest)>, Error> {
        self.runs().map(|run| Ok((run, self.digest(run, runtime)?))).collect()
    }

    fn digest(&self, run: &Run<P>, runtime: Version) -> Result<Digest, Error> {
        let program = encode(&run.graph, runtime).map_err(cudnn_graph::Error::from)?;
        let program = serde_json::to_vec(&program).map_err(|e| Error::Bug(e.to_string()))?;
        let mut parts = Digest::parts().part(run.role.to_string().as_bytes()).part(&program);
        parts = parts.part(run.repeats.to_string().as_bytes());
        for port in &run.ports {
            parts = parts.part(format!("{:?} {}", port.tensor, port.step).as_bytes());
            parts = self.slot_parts(port.slot).iter().fold(parts, |parts, part| parts.part(part));
        }
        for (tensor, number) in &run.numbers {
            let number = match number {
                Number::Scale => "scale".to_owned(),
                // Bounds of masks and constants of score_mods are sent at each call, so passes that differ only in them share plans.
                Number::Fixed(value) => format!("its own {}", value.dtype()),
                Number::Param(at) => format!("parameter {at}"),
                // Defaults of scalars are values of a call, so they are not part of the digest.
                Number::Of(trace, params) => format!("{params:?} {}", trace.without_defaults()),
            };
            parts = parts.part(format!("{tensor:?}").as_bytes()).part(number.as_bytes());
        }
        Ok(parts.finish())
    }

    fn launched(&self, parts: Parts, launch: &Launch) -> Parts {
        let Launch { role, kernel, grid, arguments, spared_by } = launch;
        let parts = parts.part(role.to_string().as_bytes()).part(kernel.name().to_bytes()).part(kernel.ptx().as_bytes());
        arguments.iter().fold(parts.part(format!("{grid:?} {spared_by:?}").as_bytes()), |parts, argument| match *argument {
            Argument::Slot(slot) => parts.part(&self.slot_parts(slot).concat()),
            Argument::Tokens(side) => parts.part(format!("tokens of {side:?}").as_bytes()),
            Argument::Fixed(x) => parts.part(&x.to_le_bytes()),
        })
    }

    fn slot_parts(&self, id: SlotId) -> Vec<Vec<u8>> {
        let Slot { name, source, bytes, alignment } = self.slot(id);
        let mut parts = vec![format!("{name} {source:?} {bytes} {alignment}").into_bytes()];
        if let Source::Table(at) = source {
            parts.push(match &self.tables[*at] {
                // Use the bits of the numbers, because tables may hold NaN.
                Contents::Numbers(Table::F32(x)) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
                Contents::Numbers(Table::I32(x)) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
                Contents::Ones(dtype, count) => format!("{count} ones of {dtype}").into_bytes(),
            });
        }
        parts
    }
}

/// Returns the digest of a whole schedule.
///
/// # Errors
/// Fails as [`Schedule::digests`] does.
pub(in super::super) fn outline<P>(schedule: &Schedule<P>, runtime: Version) -> Result<Digest, Error> {
    let mut parts = Digest::parts();
    for step in schedule.steps() {
        parts = match step {
            Step::Run(run) => parts.part(&schedule.digest(run, runtime)?.0),
            Step::Launch(launch) => schedule.launched(parts, launch),
            Step::Zero(slot) => parts.part(b"zero").part(&schedule.slot_parts(*slot).concat()),
            Step::Move(from, to) => parts.part(b"move").part(&schedule.slot_parts(*from).concat()).part(&schedule.slot_parts(*to).concat()),
        };
    }
    Ok(parts.finish())
}
