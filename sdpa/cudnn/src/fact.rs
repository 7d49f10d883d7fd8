//! The facts of a problem, as cuDNN's engines support them and as keys of plan files have them.

use crate::lower::Job;
use sdpa_core::error::Reason;
use sdpa_core::expr::Declared;
use sdpa_core::{BlockScale, DType, Fact};

fn limit(field: &str, value: String, limit: &str) -> Reason {
    Reason::Limit { field: field.to_owned(), value, limit: limit.to_owned() }
}

/// Tables among declared parameters.
fn tables(job: &Job, params: &[Declared]) -> Vec<Reason> {
    // Engines read scales of blocks in their order, and no expression reads these.
    let in_order = |name: &str| job.problem().block_scaled() && BlockScale::ALL.iter().any(|scale| scale.name() == name);
    let tables = params.iter().filter(|declared| declared.kind.extents().len() > 0 && !in_order(&declared.name));
    let reason = |table: &Declared| {
        let extents: Vec<i64> = table.kind.extents().collect();
        let rule = "cuDNN's engines read no tensor at computed places";
        limit(&format!("parameter {}", table.name), format!("a table {extents:?}"), rule)
    };
    tables.map(reason).collect()
}

/// Returns the reasons against a fact that hold on every version and device. [`unsupported::reasons`](crate::unsupported::reasons) asks for each fact first; an arm
/// without reasons says which file has the rules of some versions, devices or combinations, and which one lowers it.
///
/// There is no wildcard arm, on purpose: a new fact belongs here once `lower` or `schedule` computes it, or with a reason.
pub(crate) fn against(job: &Job, fact: &Fact<'_>) -> Vec<Reason> {
    match fact {
        Fact::Dtype(dtype @ DType::F32) => {
            vec![limit("dtype", dtype.to_string(), "cuDNN's attention takes f16, bf16 and 8-bit floats")]
        }
        Fact::Dtype(_) => Vec::new(),
        // `unsupported/fp8`; lowered by `lower/fp8` and `lower/blocks`.
        Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) | Fact::BlockScaled(_) => Vec::new(),
        // `unsupported`: the backward grid, and offsets of 32 bits.
        Fact::Batch(_) | Fact::HeadsQ(_) | Fact::HeadsKv(_) | Fact::SeqQ(_) | Fact::SeqKv(_) => Vec::new(),
        // `unsupported`: multiples of 8, at most 256.
        Fact::DimQk(_) | Fact::DimV(_) => Vec::new(),
        // `lower` copies what engines do not read as it is; `unsupported` has what cannot be copied.
        Fact::Strides(..) | Fact::Alignment(..) => Vec::new(),
        // `unsupported`; lowered by `lower/packed`.
        Fact::Packed(_) | Fact::CrossPacked(_) | Fact::WideBoundaries(_) | Fact::MostTokens(..) => Vec::new(),
        // `unsupported`; lowered by `lower/paged`.
        Fact::Pages(_) | Fact::PageSize(_) => Vec::new(),
        // `unsupported`; in the graph, or `schedule/sink`.
        Fact::Sink(_) => Vec::new(),
        // `unsupported`; lowered by `lower/dropout`.
        Fact::Dropout(_) => Vec::new(),
        // `unsupported/floats`, `unsupported/functions`; lowered by `lower/expr` and `lower/mask`.
        Fact::ScoreMod(_) | Fact::Band(..) | Fact::Prefix(_) | Fact::Ends(..) | Fact::Lengths(..) | Fact::Keep(_) => Vec::new(),
        Fact::Parameters(params) => tables(job, params),
        // `unsupported`, by version.
        Fact::Statistic(..) | Fact::StatsBase(_) => Vec::new(),
        // `unsupported/functions`; lowered by `lower/backward`. A parameter of a derivative is one of its score_mod.
        Fact::Gradient(_) | Fact::GradientsOf(_) | Fact::BackwardParameters(_) => Vec::new(),
        // `unsupported`; engines are chosen by it in `plan`.
        Fact::Deterministic(_) => Vec::new(),
    }
}

/// Returns the bytes of a fact in the key of a plan file. A fact has none where the programs that are sent to cuDNN, or the schedule around them, change
/// with it: their digests are in the key.
pub(crate) fn beside_programs(fact: &Fact<'_>) -> Option<u8> {
    match fact {
        // It chooses among the engines of one program.
        Fact::Deterministic(is_deterministic) => Some(u8::from(*is_deterministic)),
        Fact::Dtype(_)
        | Fact::OutputDtype(_)
        | Fact::BlockScaled(_)
        | Fact::Batch(_)
        | Fact::HeadsQ(_)
        | Fact::HeadsKv(_)
        | Fact::SeqQ(_)
        | Fact::SeqKv(_)
        | Fact::DimQk(_)
        | Fact::DimV(_)
        | Fact::Strides(..)
        | Fact::Alignment(..)
        | Fact::Packed(_)
        | Fact::CrossPacked(_)
        | Fact::WideBoundaries(_)
        | Fact::MostTokens(..)
        | Fact::Sink(_)
        | Fact::Dropout(_)
        | Fact::Pages(_)
        | Fact::PageSize(_)
        | Fact::ScoreMod(_)
        | Fact::Band(..)
        | Fact::Prefix(_)
        | Fact::Ends(..)
        | Fact::Lengths(..)
        | Fact::Keep(_)
        | Fact::Parameters(_)
        | Fact::Statistic(..)
        | Fact::StatsBase(_)
        | Fact::UpstreamDtype(_)
        | Fact::GradientDtype(_)
        | Fact::Gradient(_)
        | Fact::GradientsOf(_)
        | Fact::BackwardParameters(_) => None,
    }
}
