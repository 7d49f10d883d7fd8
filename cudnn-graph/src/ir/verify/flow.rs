//! Rules of data flow: which op writes and reads each tensor.

use super::{VerifyError, tensor_error};
use crate::ir::Graph;
use crate::ir::op::Op;
use crate::ir::operands::Operand;
use crate::ir::print::OpLine;
use crate::ir::tensor::{Storage, TensorId};
use std::collections::HashSet;

/// An op. For a score op, also the index of the site to which it belongs.
pub(super) struct Site<'g> {
    pub(super) op: &'g Op,
    inside: Option<usize>,
}

/// Returns every op, each followed by its score ops.
pub(super) fn sites(graph: &Graph) -> Vec<Site<'_>> {
    let mut all = Vec::new();
    for op in &graph.ops {
        let here = all.len();
        all.push(Site { op, inside: None });
        if let Some(score) = op.score() {
            all.extend(score.ops.iter().map(|op| Site { op, inside: Some(here) }));
        }
    }
    all
}

/// Uses of one tensor.
#[derive(Clone, Default)]
struct Use {
    /// The sites that write it, one per operand.
    writers: Vec<usize>,
    read: bool,
    /// The site whose score graph has it as input or output.
    input_of: Option<usize>,
    output_of: Option<usize>,
}

/// Reports mistakes of the data flow, and returns for each site whether its op can be checked further.
pub(super) fn check(graph: &Graph, sites: &[Site<'_>], errors: &mut Vec<VerifyError>) -> Vec<bool> {
    if graph.ops.is_empty() {
        errors.push(VerifyError { at: "graph".to_owned(), message: "got no op, expected at least one".to_owned() });
    }
    let uses = uses(graph, sites);
    for (id, found) in graph.ids().zip(&uses) {
        if let Some(message) = tensor_message(graph, sites, id, found) {
            errors.push(tensor_error(graph, id, message));
        }
    }
    let mut usable = Vec::with_capacity(sites.len());
    for (here, site) in sites.iter().enumerate() {
        let mut fail = |message: String| errors.push(VerifyError { at: OpLine(site.op).to_string(), message });
        usable.push(op_flow(graph, sites, &uses, here, &mut fail));
        if let Some(score) = site.op.score().filter(|_| site.inside.is_none()) {
            score_flow(score, &uses, here, &mut fail);
        }
    }
    usable
}

fn uses(graph: &Graph, sites: &[Site<'_>]) -> Vec<Use> {
    let mut uses = vec![Use::default(); graph.tensors.len()];
    let mut at = |id: TensorId, change: &mut dyn FnMut(&mut Use)| {
        if let Some(found) = uses.get_mut(id.index()) {
            change(found);
        }
    };
    for (here, site) in sites.iter().enumerate() {
        let all = site.op.operands();
        for Operand { tensor, .. } in all.inputs {
            at(tensor, &mut |u| u.read = true);
        }
        for Operand { tensor, .. } in all.outputs {
            at(tensor, &mut |u| u.writers.push(here));
        }
        if let Some(score) = site.op.score() {
            at(score.input, &mut |u| u.input_of = Some(here));
            at(score.output, &mut |u| u.output_of = Some(here));
        }
    }
    for ragged in graph.tensors.iter().filter_map(|t| t.ragged) {
        at(ragged.offsets, &mut |u| u.read = true);
    }
    uses
}

fn tensor_message(graph: &Graph, sites: &[Site<'_>], id: TensorId, found: &Use) -> Option<String> {
    let n = found.writers.len();
    if n == 0 && !found.read && found.input_of.is_none() && found.output_of.is_none() {
        return Some("no op uses it".to_owned());
    }
    let writers = || found.writers.iter().map(|&w| sites[w].op.name()).collect::<Vec<_>>().join(", ");
    match graph.get(id)?.storage {
        Storage::ByValue(_) | Storage::Constant(_) => {
            (n > 0).then(|| format!("a scalar value cannot be the result of an op ({})", writers()))
        }
        Storage::Device => (n > 1).then(|| format!("{n} operands write it ({})", writers())),
        Storage::Virtual if n > 1 => Some(format!("{n} operands write it ({})", writers())),
        // If the tensor is the input or output of a score graph, the op that has this graph reports the error.
        Storage::Virtual if n == 0 && found.input_of.is_none() && found.output_of.is_none() => {
            Some("it is virtual, but no op writes it".to_owned())
        }
        // An unread virtual tensor is legal: engines match a log-sum-exp even if no stats are requested.
        Storage::Virtual => None,
    }
}

/// Checks ids, order and scope of one op; returns false if its types cannot be checked.
fn op_flow(graph: &Graph, sites: &[Site<'_>], uses: &[Use], here: usize, fail: &mut impl FnMut(String)) -> bool {
    let site = &sites[here];
    let all = site.op.operands();
    let ends =
        site.op.score().map(|s| [Operand { field: "score input", tensor: s.input }, Operand { field: "score output", tensor: s.output }]);
    let missing: Vec<String> = (all.inputs.iter().chain(&all.outputs).copied())
        .chain(ends.into_iter().flatten())
        .filter(|o| graph.get(o.tensor).is_none())
        .map(|o| format!("{} {}", o.field, o.tensor))
        .collect();
    if !missing.is_empty() {
        fail(format!("refers to tensors that are not in the graph: {}", missing.join(", ")));
    }
    let mut usable = missing.is_empty();
    if site.inside.is_some() && !matches!(site.op, Op::Pointwise(_) | Op::BandMask(_)) {
        fail(format!("{} is not allowed among score ops", site.op.name()));
        usable = false;
    }
    let own_input = site.inside.and_then(|outer| sites[outer].op.score()).map(|score| score.input);
    let mut seen = HashSet::new();
    for Operand { field, tensor } in all.inputs {
        let (Some(found), true) = (uses.get(tensor.index()), seen.insert(tensor)) else { continue };
        if own_input == Some(tensor) {
            // Other writers of the score input are reported at the op that has the score ops.
        } else if found.writers.contains(&here) {
            fail(format!("{field} {tensor} is its own result"));
            usable = false;
        } else if let [writer] = found.writers[..] {
            let inside = sites[writer].inside;
            if inside.is_some() && inside != site.inside {
                fail(format!("{field} {tensor} belongs to a score graph, and ops outside of it cannot use it"));
            } else if site.inside.is_some() && inside.is_none() && graph.get(tensor).is_some_and(|t| t.is_virtual()) {
                fail(format!("{field} {tensor} is virtual, and no op of this score graph writes it"));
            } else if writer > here || site.inside == Some(writer) {
                fail(format!("{field} {tensor} is read before {} writes it", sites[writer].op.name()));
            }
        } else if found.writers.is_empty() && found.input_of.is_some() {
            fail(format!("{field} {tensor} belongs to a score graph, and ops outside of it cannot use it"));
        }
    }
    if site.inside.is_some() {
        for Operand { field, tensor } in all.outputs {
            if graph.get(tensor).is_some_and(|t| t.is_device()) {
                fail(format!("{field} {tensor} is not virtual, but results of score ops must be"));
            }
        }
    }
    usable
}

fn score_flow(score: &crate::ir::op::ScoreGraph, uses: &[Use], here: usize, fail: &mut impl FnMut(String)) {
    if score.ops.is_empty() {
        return fail("a score graph needs an op".to_owned());
    }
    if let Some(input) = uses.get(score.input.index()) {
        if !input.writers.is_empty() {
            fail(format!("score input {} is the result of an op", score.input));
        } else if input.input_of != Some(here) {
            fail(format!("score input {} is the score input of two ops", score.input));
        }
    }
    let made = |id: TensorId| score.ops.iter().any(|op| op.operands().outputs.iter().any(|o| o.tensor == id));
    if uses.get(score.output.index()).is_some() && !made(score.output) {
        fail(format!("score output {} is not the result of a score op", score.output));
    }
}
