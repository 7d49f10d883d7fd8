//! Backward engines that have to be asked for by number and knobs: heuristics do not offer them, and NVIDIA's frontend asks so.
//!
//! They give the same bits on every run with a workspace that is linear in the lengths, where the engines that are offered keep dS
//! in the workspace, which grows with the product of the lengths: gigabytes at 16 Ki keys. On compute capability 10.0 one of them
//! is the only one for dims of 256.

use crate::lower::QueryGradient;
use cudnn_graph::{KnobType, Pin, Version};
use sdpa_core::backward::BackwardProblem;

/// One engine: architectures, first runtime, which graph it takes, for which problems besides those that ask for the same bits,
/// and its stages.
struct Row {
    sm: std::ops::RangeInclusive<u32>,
    since: Version,
    engine: i64,
    tile: [i64; 2],
    query_gradient: QueryGradient,
    /// Whether it is tried before what is offered, or only where that takes too much workspace.
    first: bool,
    only_one: fn(&BackwardProblem) -> bool,
    stages: fn(&BackwardProblem) -> i64,
}

fn wide(b: &BackwardProblem) -> bool {
    b.forward().dim_qk() > 128 && b.forward().dim_qk() == b.forward().dim_v()
}

/// cudnn-frontend 1.32, backward node; both were compiled for a profile of the architecture under 9.27.
const ROWS: [Row; 2] = [
    Row {
        sm: 90..=90,
        since: Version::new(9, 25, 0),
        engine: 6,
        tile: [2, 1],
        query_gradient: QueryGradient::Summed,
        first: false,
        only_one: |_| false,
        stages: |_| 4,
    },
    Row {
        sm: 100..=103,
        since: Version::new(9, 23, 0),
        engine: 5,
        tile: [3, 2],
        query_gradient: QueryGradient::AtOnce,
        first: true,
        only_one: wide,
        stages: |b| if wide(b) { 3 } else { 2 },
    },
];

/// An engine for a problem.
pub(super) struct Named {
    /// The configuration.
    pub(super) pin: Pin,
    /// The graph that it takes.
    pub(super) query_gradient: QueryGradient,
    /// Whether it comes before what is offered.
    pub(super) first: bool,
}

/// Bytes of workspace past which an engine that has to be named comes in, where the caller sets no limit: on an H200 it takes up to
/// ten times as long as what is offered (`benches/results/`).
pub(super) const LARGE_WORKSPACE: u64 = 4 << 30;

/// The engine for a problem, if there is one.
pub(super) fn engine(problem: &BackwardProblem, runtime: Version, sm: u32) -> Option<Named> {
    let row = ROWS.iter().find(|row| row.sm.contains(&sm) && runtime >= row.since)?;
    if problem.wrt_scores().next().is_some() || !(problem.deterministic() || (row.only_one)(problem)) {
        return None;
    }
    let [tile_m, tile_n] = row.tile;
    let knobs = vec![
        (KnobType::TILE_M, tile_m),
        (KnobType::TILE_N, tile_n),
        (KnobType::KERNEL_CFG, 2),
        (KnobType::STREAM_K, 0),
        (KnobType::TILE_CGA_M, 0),
        (KnobType::STAGES, (row.stages)(problem)),
    ];
    Some(Named { pin: Pin { engine: row.engine, knobs }, query_gradient: row.query_gradient, first: row.first })
}
