//! Masks, as ops on scores.
//!
//! Each bound sets masked-out scores to −∞ in a select of its own, so no later op undoes a mask. A row without a key gives zeros and stats of −∞ on
//! every measured engine.

mod ends;

use super::expr::{Draft, Emitter, Pass, Reading};
use super::lowered::{Guarded, Supply};
use super::packed;
use crate::quirks::Quirk;
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Mode, Scalar, Tensor, TensorId};
use cudnn_graph::{DType, Graph, Version};
use sdpa_core::Side;
use sdpa_core::expr::{Axes, Axis, Binary, Builder, Const, Declared, Inputs, NodeId, ParamKind};
use sdpa_core::mask::{Region, SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::problem::Problem;

/// How per-sequence lengths reach the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lengths {
    /// Per side: lengths are a tensor with one number per batch entry, which engines recognise.
    tensors: [bool; 2],
    /// Per side: lengths are part of the element-wise mask.
    ruled: [bool; 2],
    /// Per side: lengths of packed sequences. They are within their extents, and no mask reads them.
    packed: [bool; 2],
}

impl Lengths {
    /// Returns how the lengths of a problem reach the kernel. Engines recognise a pair of lengths but read a single one at the head index
    /// (`Quirk::LengthsOfOneSide`), so a single one becomes part of the element-wise mask.
    pub(super) fn of(problem: &Problem) -> Lengths {
        let kept = problem.kept();
        let packed = Side::ALL.map(|side| problem.packs(side));
        let used = [kept.seq_len_q, kept.seq_len_kv];
        if super::has_lengths_of_one_side(problem) {
            return Lengths { ruled: used, ..Lengths::default() };
        }
        Lengths { tensors: [0, 1].map(|n| used[n] || packed[n]), ruled: [false; 2], packed }
    }

    /// Moves all lengths to the element-wise mask, except those of packed sequences, which have nothing past their ends.
    pub(super) fn as_rules(self) -> Lengths {
        Lengths { tensors: [false; 2], ruled: [0, 1].map(|n| self.drops(n) && !self.packed[n]), packed: self.packed }
    }

    /// Returns the length overrides of GEMMs for queries and keys, if both are tensors.
    pub(super) fn overrides(self, to: &mut Draft<'_>, problem: &Problem, runtime: Version) -> [Option<TensorId>; 2] {
        if self.tensors == [true; 2] { guarded(to, problem, runtime) } else { [None, None] }
    }

    fn drops(self, side: usize) -> bool {
        self.tensors[side] || self.ruled[side]
    }

    fn drop_anything(self) -> bool {
        self.drops(0) || self.drops(1)
    }

    /// Returns the lengths tensor of a side that engines recognise. Repeated calls return the same tensor.
    fn tensor(self, to: &mut Draft<'_>, problem: &Problem, side: Side) -> Option<TensorId> {
        if !self.tensors[side as usize] {
            return None;
        }
        if problem.packs(side) {
            return Some(packed::lengths(to, problem, side));
        }
        let name = match side {
            Side::Queries => SEQ_LEN_Q,
            Side::Keys => SEQ_LEN_KV,
        };
        let dims = [problem.batch(), 1, 1, 1];
        let made = |(tensor, supply): &&(TensorId, Supply)| {
            *supply == Supply::Param(name.to_owned()) && to.graph.get(*tensor).is_some_and(|t| t.dims.0[..] == dims)
        };
        if let Some((tensor, _)) = to.supplies.iter().find(made) {
            return Some(*tensor);
        }
        let tensor = to.graph.input(name, DType::I32, dims);
        to.supplies.push((tensor, Supply::Param(name.to_owned())));
        Some(tensor)
    }
}

/// Returns clamped lengths for rows and columns of GEMMs. The caller's lengths are unchecked data, so a kernel clamps them on the device; those of
/// packed sequences are in range by construction.
pub(super) fn guarded(to: &mut Draft<'_>, problem: &Problem, runtime: Version) -> [Option<TensorId>; 2] {
    // Engines also use the GEMM lengths in their padding masks. With this quirk, the kernel that clamps lengths gives a batch entry without
    // keys one key and no queries, so that its results are 0.
    let keyless = Quirk::EntriesWithoutKeys.holds(runtime);
    Side::ALL.map(|side| Some(clamped(to, problem, side, keyless)))
}

/// Returns the lengths of a side, clamped to its extent.
fn clamped(to: &mut Draft<'_>, problem: &Problem, of: Side, keyless: bool) -> TensorId {
    if problem.packs(of) {
        return packed::lengths(to, problem, of);
    }
    let guarded = Guarded { of, most: problem.seq(of), keyless };
    let tensor = to.graph.tensor(Tensor::device(format!("{}_guarded", guarded.param()), DType::I32, [problem.batch(), 1, 1, 1]));
    to.supplies.push((tensor, Supply::Guarded(guarded)));
    tensor
}

/// Returns whether masks drop anything besides the lengths that the op handles.
pub(super) fn drops(problem: &Problem, lengths: Lengths) -> bool {
    let kept = problem.kept();
    !kept.region.is_full() || !kept.ends.is_full() || kept.rest.is_some() || lengths.drop_anything()
}

/// Returns whether part of the masks must be evaluated element by element. A bottom-right aligned band and another band cannot both be bands: engines
/// take both for one (`Quirk::BandsOfTwoCorners`).
pub(super) fn has_rules(problem: &Problem) -> bool {
    let kept = problem.kept();
    kept.rest.is_some() || !kept.ends.is_full() && !kept.region.is_full()
}

/// Masks scores. The order is that of NVIDIA's frontend, with element-wise masks first.
pub(super) fn apply(to: &mut Draft<'_>, scores: TensorId, problem: &Problem, lengths: Lengths, runtime: Version, pass: Pass) -> TensorId {
    fill_dropped(to, scores, problem, lengths, (runtime, masked(runtime)), pass)
}

/// Masks scores with `fill` instead of −∞.
pub(super) fn fill_dropped(
    to: &mut Draft<'_>,
    scores: TensorId,
    problem: &Problem,
    lengths: Lengths,
    (runtime, fill): (Version, f32),
    pass: Pass,
) -> TensorId {
    let kept = problem.kept();
    if !drops(problem, lengths) {
        return scores;
    }
    let fill = to.graph.scalar(Scalar::F32(fill));
    // Engines for one query recognise bands and lengths only in plain attention, and they count keys from the start of each split.
    if problem.seq_q() == 1 && (problem.score_mod().is_some() || kept.rest.is_some() || lengths.drop_anything()) {
        return rule(to, scores, problem, (lengths.as_rules(), kept.region), fill, pass);
    }
    let (bands, ruled) = if kept.ends.is_full() { (kept.region, Region::default()) } else { (Region::default(), kept.region) };
    let mut out = rule(to, scores, problem, (lengths, ruled), fill, pass);
    let [q, kv] = Side::ALL.map(|side| lengths.tensor(to, problem, side));
    let ends = ends::lengths(to, problem, [q, kv]);
    let g = &mut *to.graph;
    let within = [(2, q), (3, kv)].map(|(axis, length)| {
        length.map(|length| {
            let index = g.gen_index(out, axis);
            (index, length)
        })
    });
    let within = within.map(|pair| pair.map(|(index, length)| g.pointwise(Mode::CmpLt, &[index, length])));
    let within = match within {
        [Some(rows), Some(keys)] => Some(g.pointwise(Mode::LogicalAnd, &[rows, keys])),
        [rows, keys] => rows.or(keys),
    };
    if let Some(within) = within {
        out = g.pointwise(Mode::BinarySelect, &[out, fill, within]);
    }
    let Region { lower, upper, prefix } = bands;
    let band_op = runtime >= super::UNIFIED_SINCE;
    out = ends::apply(g, out, fill, problem, ends, band_op);
    // Apply the right bound before the left one: NVIDIA's frontend says that kernels are faster in this order.
    if let Some(upper) = upper {
        out = if band_op { right_band(g, out, fill, upper) } else { right_ops(g, out, fill, upper) };
    }
    if let Some(prefix) = prefix {
        out = prefix_ops(g, out, fill, prefix);
    }
    if let Some(lower) = lower {
        let exact = lower.abs() <= F32_WHOLE;
        out = if band_op && exact { left_band(g, out, fill, lower) } else { left_ops(g, out, fill, lower) };
    }
    out
}

/// Applies the element-wise mask: bounds that cannot be bands, lengths that engines do not recognise, and the rest.
fn rule(
    to: &mut Draft<'_>,
    scores: TensorId,
    problem: &Problem,
    (lengths, region): (Lengths, Region),
    fill: TensorId,
    pass: Pass,
) -> TensorId {
    let mut b = Builder::new();
    let key = b.index(Axis::K);
    let query = if problem.seq_q() == 1 { b.konst(Const::I32(0)) } else { b.index(Axis::Q) };
    let mut terms = if problem.seq_q() == 1 { ends::terms(&mut b, problem, key) } else { Vec::new() };
    terms.extend(bounds(&mut b, problem, region, [query, key]));
    let [rows, keys] = lengths.ruled;
    for (used, name, index) in [(rows, SEQ_LEN_Q, query), (keys, SEQ_LEN_KV, key)] {
        if used {
            let length = declared_length(&mut b, name);
            terms.push(b.binary(Binary::Lt, index, length));
        }
    }
    if let Some(rest) = &problem.kept().rest {
        terms.extend(b.inline(rest, Inputs::default()));
    }
    let all = terms.into_iter().reduce(|x, y| b.binary(Binary::And, x, y));
    // The masks had these declarations, so this cannot fail.
    let Ok(rule) = b.finish(all.as_slice()) else { return scores };
    match rule.roots() {
        [root] => Emitter::new(&rule, Reading::new(problem, pass), scores).select(to, *root, scores, fill, DType::F32),
        _ => scores,
    }
}

/// Returns the terms of a region, written so that engines do not recognise a band.
fn bounds(b: &mut Builder, problem: &Problem, Region { lower, upper, prefix }: Region, [query, key]: [NodeId; 2]) -> Vec<NodeId> {
    let past = if problem.seq_q() == 1 { key } else { b.binary(Binary::Sub, key, query) };
    let within = [(lower, Binary::Gt), (upper, Binary::Le)].into_iter().filter_map(|(bound, f)| Some((bound?, f)));
    let mut terms = Vec::new();
    for (bound, f) in within {
        let bound = b.konst(Const::I32(bound as i32));
        terms.push(b.binary(f, past, bound));
    }
    if let Some(prefix) = prefix {
        let last = b.konst(Const::I32(prefix as i32 - 1));
        let last = b.binary(Binary::Max, query, last);
        terms.push(b.binary(Binary::Le, key, last));
    }
    terms
}

/// Declares the length of the batch entry as a parameter.
fn declared_length(b: &mut Builder, name: &str) -> NodeId {
    let kind = ParamKind::Tensor { axes: Axes::from([Axis::Batch]), dtype: sdpa_core::DType::I32 };
    b.param(Declared { name: name.to_owned(), kind, default: None })
}

/// Tile edge in queries and keys.
const TILE: i64 = 128;

/// Fills scores past the last key of a partial tile, unless a mask covers them.
pub(super) fn fill_past_keys(to: &mut Draft<'_>, scores: TensorId, problem: &Problem, runtime: Version) -> TensorId {
    let (seq_q, seq_kv) = (problem.seq_q(), problem.seq_kv());
    let covered = problem.has_lengths(Side::Keys) || problem.region().upper.is_some_and(|upper| seq_q - 1 + upper < seq_kv);
    if covered { scores } else { fill_past(to, scores, 3, seq_kv, masked(runtime)) }
}

/// Fills scores past the last query and the last key of partial tiles.
pub(super) fn fill_outside(to: &mut Draft<'_>, scores: TensorId, problem: &Problem, fill: f32) -> TensorId {
    let inside = fill_past(to, scores, 2, problem.seq_q(), fill);
    fill_past(to, inside, 3, problem.seq_kv(), fill)
}

/// Returns the score of a masked-out key.
pub(super) fn dropped(runtime: Version) -> f32 {
    masked(runtime)
}

fn fill_past(to: &mut Draft<'_>, scores: TensorId, axis: i64, end: i64, fill: f32) -> TensorId {
    if end % TILE == 0 {
        return scores;
    }
    let g = &mut *to.graph;
    let fill = g.scalar(Scalar::F32(fill));
    let index = g.gen_index(scores, axis);
    let end = bound(g, end);
    let within = g.pointwise(Mode::CmpLt, &[index, end]);
    g.pointwise(Mode::BinarySelect, &[scores, fill, within])
}

/// The largest integer below which f32 has all integers. The band op takes its left bound in f32.
const F32_WHOLE: i64 = 1 << 24;

/// Returns the score of a masked-out key: −∞, or before 9.10 the largest negative number, as in NVIDIA's frontend.
fn masked(runtime: Version) -> f32 {
    if runtime.at_least(9, 10) { f32::NEG_INFINITY } else { f32::MIN }
}

/// Declares a bound. Bounds are clamped to the lengths, which are below 2³¹.
fn bound(g: &mut Graph, value: i64) -> TensorId {
    g.scalar(Scalar::I32(value as i32))
}

fn right_band(g: &mut Graph, scores: TensorId, fill: TensorId, upper: i64) -> TensorId {
    let shift = (upper != 0).then(|| bound(g, upper));
    g.band_mask_right(scores, fill, shift, None)
}

fn left_band(g: &mut Graph, scores: TensorId, fill: TensorId, lower: i64) -> TensorId {
    let left = g.scalar(Scalar::F32(-(lower as f32)));
    g.band_mask_left(scores, fill, left, None)
}

fn index(g: &mut Graph, scores: TensorId, axis: i64) -> TensorId {
    g.gen_index(scores, axis)
}

fn shifted(g: &mut Graph, index: TensorId, by: i64) -> TensorId {
    if by == 0 {
        return index;
    }
    let by = bound(g, by);
    g.pointwise_as(Mode::Add, &[index, by], DType::I32, DType::I32, Params::default())
}

fn right_ops(g: &mut Graph, scores: TensorId, fill: TensorId, upper: i64) -> TensorId {
    let row = index(g, scores, 2);
    let col = index(g, scores, 3);
    let row = shifted(g, row, upper);
    let keep = g.pointwise(Mode::CmpGe, &[row, col]);
    g.pointwise(Mode::BinarySelect, &[scores, fill, keep])
}

fn left_ops(g: &mut Graph, scores: TensorId, fill: TensorId, lower: i64) -> TensorId {
    let row = index(g, scores, 2);
    let col = index(g, scores, 3);
    let col = shifted(g, col, -lower);
    let keep = g.pointwise(Mode::CmpGt, &[col, row]);
    g.pointwise(Mode::BinarySelect, &[scores, fill, keep])
}

/// Emits `k <= q or k < len` as `max(q, len - 1) >= k`.
fn prefix_ops(g: &mut Graph, scores: TensorId, fill: TensorId, prefix: i64) -> TensorId {
    let row = index(g, scores, 2);
    let col = index(g, scores, 3);
    let last = bound(g, prefix - 1);
    let row = g.pointwise_as(Mode::Max, &[row, last], DType::I32, DType::I32, Params::default());
    let keep = g.pointwise(Mode::CmpGe, &[row, col]);
    g.pointwise(Mode::BinarySelect, &[scores, fill, keep])
}
