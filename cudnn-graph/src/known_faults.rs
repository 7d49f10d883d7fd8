//! Known faults: engines of cuDNN that compute wrong results, or access memory outside of their operands, without an error. [`Planner::new`] passes them
//! over, unless [`Policy::with_known_faults`] allows them.
//!
//! Random problems on an H200 under 9.19.0 showed these faults. No other version or device was tried, and none can be excluded, so every entry holds
//! for all versions and devices until a run shows otherwise. Conditions are wider than the problems that failed: an engine that is passed over costs
//! time or a refusal, one that is not costs results. Faults in attention are known to `sdpa-cudnn`; its graphs fulfil no condition of this table.
//!
//! [`Planner::new`]: crate::Planner::new
//! [`Policy::with_known_faults`]: crate::Policy::with_known_faults

use crate::ir::ty::DType;
use crate::ir::{Graph, NormMode, Op, Routing, Tensor, TensorId};
use crate::version::Version;

const EVERY: (Version, Version) = (Version::new(0, 0, 0), Version::new(u32::MAX, 0, 0));

/// One row of the table of known faults.
#[derive(Clone, Copy, Debug)]
pub struct KnownFault {
    /// The operation and the condition under which it is wrong, in a phrase.
    pub condition: &'static str,
    /// The number of the engine that has the fault; `None` if all engines have it.
    pub engine: Option<i64>,
    /// Whether only plans with [dynamic shapes](crate::Policy::dynamic_shapes) have the fault.
    pub dynamic_only: bool,
    /// The first and the last version of cuDNN that may have the fault.
    pub versions: (Version, Version),
    /// The error, in a phrase.
    pub what: &'static str,
    /// The run that showed the error.
    pub source: &'static str,
    /// Returns whether a graph fulfils the condition.
    pub(crate) applies: fn(&Graph) -> bool,
}

impl KnownFault {
    /// Every known fault, in the order of the table.
    pub const ALL: &'static [KnownFault] = &[
        KnownFault {
            condition: "only pointwise operations; an operand has extent 1 along the first axis, where the result has more, and another extent above 1, but not (1, c, 1, 1)",
            engine: Some(1),
            dynamic_only: false,
            versions: EVERY,
            what: "the operand is read past its end, so batch entries after the first are wrong",
            source: "seen on an H200 under 9.19.0 with addends of extents (1, 1, n) and (1, n, 1)",
            applies: broadcast_over_the_first_axis,
        },
        KnownFault {
            condition: "pooling of bf16 without an index, channels last",
            engine: Some(3),
            dynamic_only: false,
            versions: EVERY,
            what: "the result is written past its end",
            source: "seen on an H200 under 9.19.0, maxima and averages (11 of 11 problems)",
            applies: pooling_of_bf16,
        },
        KnownFault {
            condition: "a matrix product with weights per expert that gathers its rows",
            engine: None,
            dynamic_only: false,
            versions: EVERY,
            what: "indices are read past their end: an illegal memory access",
            source: "seen on an H200 under 9.19.0 (17 of 17 problems)",
            applies: gathered_rows,
        },
        KnownFault {
            condition: "the gradient of an instance norm, channels last",
            engine: Some(0),
            dynamic_only: false,
            versions: EVERY,
            what: "the gradient of the scale is wrong",
            source: "seen on an H200 under 9.19.0 (8 of about 13 problems)",
            applies: instance_norm_gradient,
        },
        KnownFault {
            condition: "a convolution of 8-bit floats, or a gradient of it, with channels that are not last",
            engine: None,
            dynamic_only: false,
            versions: EVERY,
            what: "the result is wrong",
            source: "seen on an H200 under 9.19.0 with engine 7 (6 of 7 forward problems, with groups or without) and with engine 4 (1 problem, with groups)",
            applies: channels_first_of_8_bits,
        },
        KnownFault {
            condition: "a matrix product of integers of 8 or 4 bits whose rows are no multiple of 8 elements, converted in the graph or not",
            engine: Some(7),
            dynamic_only: false,
            versions: EVERY,
            what: "elements of the result are wrong",
            source: "seen on an H200 under 9.19.0 with i8 rows of 9 elements",
            applies: rows_of_small_integers,
        },
        KnownFault {
            condition: "pooling with dynamic shapes",
            engine: None,
            dynamic_only: true,
            versions: EVERY,
            what: "the kernel reads a misaligned address, which ends the context",
            source: "seen on an H200 under 9.19.0, maxima and averages (4 of 4 problems that engines took)",
            applies: pooling,
        },
    ];

    /// Returns the known faults that a version of cuDNN may have for a graph, with or without dynamic shapes.
    pub fn of(graph: &Graph, runtime: Version, dynamic_shapes: bool) -> Vec<&'static KnownFault> {
        let is_of_version = |fault: &KnownFault| (fault.versions.0..=fault.versions.1).contains(&runtime);
        let all = KnownFault::ALL.iter().filter(|fault| dynamic_shapes || !fault.dynamic_only);
        all.filter(|fault| is_of_version(fault) && (fault.applies)(graph)).collect()
    }

    /// Returns whether an engine has the fault.
    pub fn is_of(&self, engine: i64) -> bool {
        self.engine.is_none_or(|faulty| faulty == engine)
    }

    /// Returns the reason for which an engine with the fault is passed over.
    pub fn reason(&self) -> String {
        format!("a known fault: {}: {} ({})", self.condition, self.what, self.source)
    }

    /// Returns the table of all known faults, in Markdown.
    pub fn table() -> String {
        let mut text = "| condition | cuDNN | engine | error, reported as success | source |\n|---|---|---|---|---|\n".to_owned();
        for KnownFault { condition, engine, dynamic_only: _, versions: (first, last), what, source, applies: _ } in KnownFault::ALL {
            let versions = match (*first == EVERY.0, *last == EVERY.1) {
                (true, true) => "every".to_owned(),
                (true, false) => format!("up to {last}"),
                (false, true) => format!("from {first} on"),
                (false, false) => format!("{first} to {last}"),
            };
            let engine = engine.map_or_else(|| "every".to_owned(), |engine| engine.to_string());
            text.push_str(&format!("| {condition} | {versions} | {engine} | {what} | {source} |\n"));
        }
        text
    }
}

/// Attention expands tensors by graphs of one addition, whose source of extents (1, n, 1) has the first stride 1. Cases of `sdpa-conformance` execute these on GPUs
/// and compare the results, so they are not meant.
fn broadcast_over_the_first_axis(graph: &Graph) -> bool {
    let expands = graph.ops().len() == 1;
    let repeated = |x: &Tensor, y: &Tensor| {
        let is_source = expands && matches!(x.dims.0[..], [_, _, 1]) && x.strides.0.first() == Some(&1);
        let (x, y) = (&x.dims.0[..], &y.dims.0[..]);
        let is_first = matches!((x, y), ([1, rest @ ..], [n, ..]) if *n > 1 && rest.iter().any(|&n| n > 1));
        // Extents (1, c, 1, 1) beside four axes are right: three of three problems.
        is_first && !is_source && !matches!(x, [_, _, 1, 1])
    };
    let is_faulty = |op: &Op| {
        let operands = op.operands();
        let y = operands.outputs.first().and_then(|o| graph.get(o.tensor));
        operands.inputs.iter().filter_map(|o| graph.get(o.tensor)).any(|x| y.is_some_and(|y| repeated(x, y)))
    };
    graph.ops().iter().all(|op| matches!(op, Op::Pointwise(_))) && graph.ops().iter().any(is_faulty)
}

/// Returns whether neighbouring channels are neighbours in memory, whatever the other strides are.
fn channels_are_last(graph: &Graph, id: TensorId) -> bool {
    graph.get(id).is_some_and(|t| t.strides.0.get(1) == Some(&1))
}

fn pooling(graph: &Graph) -> bool {
    graph.ops().iter().any(|op| matches!(op, Op::ResampleForward(_) | Op::ResampleBackward(_)))
}

fn pooling_of_bf16(graph: &Graph) -> bool {
    let is_bf16 = graph.tensors().iter().any(|t| t.is_device() && t.dtype == DType::BF16);
    let pools = |op: &Op| matches!(op, Op::ResampleForward(op) if op.index.is_none() && [op.x, op.y].iter().any(|&id| channels_are_last(graph, id)));
    is_bf16 && graph.ops().iter().any(pools)
}

fn gathered_rows(graph: &Graph) -> bool {
    graph.ops().iter().any(|op| matches!(op, Op::MoeMatmul(op) if matches!(op.routing, Routing::Gather(_))))
}

fn instance_norm_gradient(graph: &Graph) -> bool {
    let is_faulty = |op: &Op| matches!(op, Op::NormBackward(op) if op.mode == NormMode::Instance && [op.x, op.dy].iter().any(|&id| channels_are_last(graph, id)));
    graph.ops().iter().any(is_faulty)
}

fn channels_first_of_8_bits(graph: &Graph) -> bool {
    let is_faulty = |operands: [TensorId; 2]| {
        let is_small = |id: &TensorId| graph.get(*id).is_some_and(|t| matches!(t.dtype, DType::F8E4M3 | DType::F8E5M2));
        operands.iter().any(is_small) && !operands.iter().all(|&id| channels_are_last(graph, id))
    };
    graph.ops().iter().any(|op| {
        matches!(op, Op::ConvForward(op) if is_faulty([op.x, op.w]))
            || matches!(op, Op::ConvBackwardData(op) if is_faulty([op.dy, op.w]))
            || matches!(op, Op::ConvBackwardFilter(op) if is_faulty([op.dy, op.x]))
    })
}

/// The operands of attention's second product come from its first one, so integers of masks and score_mods are not meant.
fn rows_of_small_integers(graph: &Graph) -> bool {
    let is_faulty = |t: &Tensor| {
        let is_small = matches!(t.dtype, DType::I8 | DType::U8 | DType::I4 | DType::U4);
        t.is_device() && is_small && t.strides.0.iter().zip(&t.dims.0).any(|(&stride, &n)| stride == 1 && n % 8 != 0)
    };
    let factors = graph.ops().iter().filter_map(|op| if let Op::Matmul(op) = op { Some([op.a, op.b]) } else { None }).flatten();
    factors.into_iter().any(|factor| sources(graph, factor).iter().any(|&id| graph.get(id).is_some_and(is_faulty)))
}

/// Returns the tensors from which element-wise operations make a tensor, without any if another operation contributes.
fn sources(graph: &Graph, of: TensorId) -> Vec<TensorId> {
    let (mut open, mut found) = (vec![of], Vec::new());
    while let Some(id) = open.pop() {
        match graph.ops().iter().find(|op| op.operands().outputs.iter().any(|o| o.tensor == id)) {
            None => found.push(id),
            Some(op @ (Op::Pointwise(_) | Op::BlockScaleDequantize(_))) => open.extend(op.operands().inputs.iter().map(|o| o.tensor)),
            Some(_) => return Vec::new(),
        }
    }
    found
}
