//! Backward engines that must be requested by number and knobs: heuristics do not offer them, and NVIDIA's frontend requests them in this way.
//!
//! They are deterministic with a workspace that is linear in the lengths. Offered engines keep dS in the workspace, which grows with the product of
//! the lengths: gigabytes at 16 Ki keys. On compute capability 10.0 one of them is the only engine for head dim 256.

use crate::lower::QueryGradient;
use cudnn_graph::{KnobType, Pin, Version};
use sdpa_core::backward::BackwardProblem;

/// One engine: architectures, first runtime, graph pattern, problems that need it besides deterministic ones, and stages.
struct Row {
    sm: std::ops::RangeInclusive<u32>,
    since: Version,
    engine: i64,
    tile: [i64; 2],
    query_gradient: QueryGradient,
    /// Whether it is tried before offered engines, or only if these take too much workspace.
    first: bool,
    only_one: fn(&BackwardProblem) -> bool,
    stages: fn(&BackwardProblem) -> i64,
}

fn wide(b: &BackwardProblem) -> bool {
    b.forward().dim_qk() > 128 && b.forward().dim_qk() == b.forward().dim_v()
}

/// From cudnn-frontend 1.32, backward node. Both were compiled under 9.27 for a profile of the architecture.
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

/// An engine that is requested by number for a problem.
pub(super) struct Named {
    /// The engine's number and its knobs.
    pub(super) pin: Pin,
    /// The graph pattern that the engine matches.
    pub(super) query_gradient: QueryGradient,
    /// True if the engine is tried before the offered ones.
    pub(super) first: bool,
}

/// Workspace bytes above which a requested engine replaces offered ones, if the caller sets no limit. On an H200 it takes up to ten times as long
/// (`benches/results/`).
pub(super) const LARGE_WORKSPACE: u64 = 4 << 30;

/// Returns the engine for a problem, if there is one.
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
