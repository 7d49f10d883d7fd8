//! The facts of a problem: which of them cuDNN's engines support, and which are part of plan-file keys.

use crate::lower::Job;
use sdpa_core::error::Reason;
use sdpa_core::expr::Declared;
use sdpa_core::{BlockScale, DType, Fact};

fn limit(field: &str, value: String, limit: &str) -> Reason {
    Reason::Limit { field: field.to_owned(), value, limit: limit.to_owned() }
}

/// Returns reasons against declared parameters that are tables.
fn tables(job: &Job, params: &[Declared]) -> Vec<Reason> {
    // Block scales are declared as tables too, but engines read them in order and no expression indexes them.
    let in_order = |name: &str| job.problem().block_scaled() && BlockScale::ALL.iter().any(|scale| scale.name() == name);
    let tables = params.iter().filter(|declared| declared.kind.extents().len() > 0 && !in_order(&declared.name));
    let reason = |table: &Declared| {
        let extents: Vec<i64> = table.kind.extents().collect();
        let rule = "a tensor indexed only by batch, head, query and key: cuDNN's engines cannot read at computed indices";
        limit(&format!("parameter {}", table.name), format!("a table {extents:?}"), rule)
    };
    tables.map(reason).collect()
}

/// Returns the reasons why engines do not support a fact on any version of cuDNN and any device.
/// [`unsupported::reasons`](crate::unsupported::reasons) asks for each fact first. An arm without reasons names the files that have rules
/// for some versions, devices or combinations, and the file that lowers the fact.
///
/// There is deliberately no wildcard arm: a new fact needs an arm here once `lower` or `schedule` computes it, or a reason.
pub(crate) fn against(job: &Job, fact: &Fact<'_>) -> Vec<Reason> {
    match fact {
        Fact::Dtype(dtype @ DType::F32) => {
            vec![limit("dtype", dtype.to_string(), "f16, bf16, f8e4m3 or f8e5m2")]
        }
        Fact::Dtype(_) => Vec::new(),
        // Rules are in `unsupported/fp8`; `lower/fp8` and `lower/blocks` lower FP8 and block scales.
        Fact::OutputDtype(_) | Fact::UpstreamDtype(_) | Fact::GradientDtype(_) | Fact::BlockScaled(_) => Vec::new(),
        // Rules are in `unsupported`: the backward grid and 32-bit offsets.
        Fact::Batch(_) | Fact::HeadsQ(_) | Fact::HeadsKv(_) | Fact::SeqQ(_) | Fact::SeqKv(_) => Vec::new(),
        // Rules are in `unsupported`: multiples of 8, at most 256.
        Fact::DimQk(_) | Fact::DimV(_) => Vec::new(),
        // `lower` copies operands that engines cannot read in place; `unsupported` lists those that cannot be copied.
        Fact::Strides(..) | Fact::Alignment(..) => Vec::new(),
        // Rules are in `unsupported`; `lower/packed` lowers packed sequences.
        Fact::Packed(_) | Fact::CrossPacked(_) | Fact::WideBoundaries(_) | Fact::MostTokens(..) => Vec::new(),
        // Rules are in `unsupported`; `lower/paged` lowers paged keys and values.
        Fact::Pages(_) | Fact::PageSize(_) => Vec::new(),
        // Rules are in `unsupported`; the graph or `schedule/sink` adds the sink.
        Fact::Sink(_) => Vec::new(),
        // Rules are in `unsupported`; `lower/dropout` lowers dropout.
        Fact::Dropout(_) => Vec::new(),
        // Rules are in `unsupported/floats` and `unsupported/functions`; `lower/expr` lowers score_mods, `lower/mask` masks.
        Fact::ScoreMod(_) | Fact::Band(..) | Fact::Prefix(_) | Fact::Ends(..) | Fact::Lengths(..) | Fact::Keep(_) => Vec::new(),
        Fact::Parameters(params) => tables(job, params),
        // Rules are in `unsupported`, by version.
        Fact::Statistic(..) | Fact::StatsBase(_) => Vec::new(),
        Fact::BatchInvariant(false) => Vec::new(),
        Fact::BatchInvariant(true) => {
            vec![limit("batch_invariant", "true".to_owned(), "false: cuDNN divides the work of a call by its shape")]
        }
        // Rules are in `unsupported/functions`; `lower/backward` lowers derivatives. Their parameters are those of the score_mod.
        Fact::Gradient(_) | Fact::GradientsOf(_) | Fact::BackwardParameters(_) => Vec::new(),
        // Rules are in `unsupported`; `plan` chooses among engines by this flag.
        Fact::Deterministic(_) => Vec::new(),
    }
}

/// Returns the byte by which a fact changes the key of a plan file. Most facts have none: they change the programs sent to cuDNN or the
/// schedule around these, whose digests are in the key.
pub(crate) fn beside_programs(fact: &Fact<'_>) -> Option<u8> {
    match fact {
        // Determinism does not change the program. It restricts which of the program's engines may run.
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
        | Fact::BatchInvariant(_)
        | Fact::UpstreamDtype(_)
        | Fact::GradientDtype(_)
        | Fact::Gradient(_)
        | Fact::GradientsOf(_)
        | Fact::BackwardParameters(_) => None,
    }
}
