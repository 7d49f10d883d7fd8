//! Gradients of declared parameters: how threadgroups share the pairs that read an element, and how partial sums are added.

use crate::backward::{ALONG_PARAMS, Backward, DELTA_SLOT};
use crate::params::{Numbers, SumParams};
use crate::plan::{Binding, Cut, Operand, Plan, Scratch};
use crate::rows::THREADS;
use crate::source::{PARAMETER, SUM, Source};
use crate::tile_config::{FRAGMENT, SIMD, Tiles};
use sdpa_core::Reason;
use sdpa_core::expr::Axis;
use sdpa_emit::Dialect;

/// Returns the plans of the kernels for the gradient of the parameter with index `n` in [`Backward::along`]. The first kernel sums over
/// blocks; the second adds the partial sums, unless each is complete.
pub(crate) fn plans(problem: &Backward, n: usize) -> Result<Vec<Plan>, Vec<Reason>> {
    let Some(along) = problem.along.get(n) else { return Ok(Vec::new()) };
    let forward = &problem.forward;
    let tiles = forward.tiles(Tiles::backward)?;
    let extents = forward.extents();
    let spans = Axis::ALL.map(|axis| along.axes.has(axis));
    let [batch, head, query, key] = spans;
    let whole = query && key;
    let blocks = |extent: i64, rows: u32| (extent - 1) / i64::from(rows) + 1;
    let (blocks_q, blocks_k) = (blocks(extents[2], tiles.own), blocks(extents[3], tiles.passing));
    let simdgroups = i64::from(tiles.own / FRAGMENT);
    // Extents of the partial sums, and the number of threadgroups.
    let (parts, groups) = match (query, key) {
        (true, true) => (along.axes.dims(extents), blocks_q * blocks_k),
        (true, false) => ([extents[0], extents[1], extents[2], 1], blocks_q),
        (false, true) => ([extents[0], extents[1], simdgroups, extents[3]], blocks_k),
        (false, false) => ([extents[0], extents[1], blocks_q * simdgroups, 1], blocks_q),
    };
    let elements: i64 = along.axes.dims(extents).iter().product();
    let ty = Dialect::Msl.element(along.dtype);
    let gradient = Operand::Gradient { name: along.name.clone(), dtype: along.dtype, elements };
    let scratch = Operand::Scratch(Scratch::new(format!("parts of the gradient of {}", along.name), &parts));
    let result = if whole { Binding::written(10, ty, gradient.clone()) } else { Binding::written(10, "float", scratch.clone()) };

    let mut constants = tiles.constants(forward.dims());
    let names = ["SPANS_BATCH", "SPANS_HEAD", "SPANS_QUERY", "SPANS_KEY"];
    constants.extend(names.into_iter().zip(spans.map(u32::from)));
    constants.push(("WHOLE", whole.into()));
    let cut = Cut {
        grid: [groups as u32, if whole && !head { 1 } else { extents[1] as u32 }, if whole && !batch { 1 } else { extents[0] as u32 }],
        threads: tiles.threads(),
        registers: tiles.parameter_registers(),
        buffers: problem.operands(&[result]),
        threadgroup: problem.memory(&tiles, true),
    };
    let mut plans = vec![problem.kernel(&PARAMETER, &constants, cut, (ALONG_PARAMS + n, Some(ty)))];
    if !whole {
        let buffers =
            vec![Binding::params(SumParams::NAME), Binding::read(DELTA_SLOT, "float", scratch), Binding::written(10, ty, gradient)];
        plans.push(sum(problem, ty, sum_params(spans, parts), buffers));
    }
    Ok(plans)
}

/// Partial sums are dense, with one per element along the axes that the parameter spans.
fn sum_params(spans: [bool; 4], parts: [i64; 4]) -> SumParams {
    let along = |spanned: bool| [0, 1, 2, 3].map(|axis| if spans[axis] == spanned { parts[axis] } else { 1 });
    let (spanned, summed) = (along(true), along(false));
    let strides = [parts[1] * parts[2] * parts[3], parts[2] * parts[3], parts[3], 1];
    SumParams { elements: spanned.iter().product(), spanned, summed, strides }
}

fn sum(problem: &Backward, ty: &str, params: SumParams, buffers: Vec<Binding>) -> Plan {
    let source = Source {
        problem: &problem.forward,
        element: problem.forward.element(),
        captured: &problem.captured(),
        gradient: None,
        along: Some(ty),
        params: &SumParams::msl(),
    };
    let cut = Cut {
        grid: [((params.elements - 1) / i64::from(THREADS / SIMD) + 1) as u32, 1, 1],
        threads: THREADS,
        registers: 0,
        buffers,
        threadgroup: Vec::new(),
    };
    cut.plan(source.text(&SUM, &[("THREADS", THREADS)]), SUM.entry, Numbers::Sum(params))
}
