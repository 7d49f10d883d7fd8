//! Bands aligned to the bottom right of each batch entry, in the pattern of NVIDIA's frontend: the difference of the lengths shifts the query index.

use super::super::expr::Draft;
use super::super::lowered::within;
use super::{F32_WHOLE, bound, clamped, declared_length, index, shifted};
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Mode, TensorId};
use cudnn_graph::{DType, Graph};
use sdpa_core::Side;
use sdpa_core::expr::{Binary, Builder, Const, NodeId};
use sdpa_core::mask::{Ends, SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::problem::Problem;

/// Returns the lengths that a bottom-right aligned band reads, clamped to the extents. Without such a band returns `masked`.
pub(super) fn lengths(to: &mut Draft<'_>, problem: &Problem, masked: [Option<TensorId>; 2]) -> [Option<TensorId>; 2] {
    if problem.kept().ends.is_full() {
        return masked;
    }
    Side::ALL.map(|side| {
        let there = within(&to.supplies[..], side);
        there.or_else(|| masked[side as usize].map(|_| clamped(to, problem, side, false)))
    })
}

/// Applies a bottom-right aligned band. Missing lengths are the extents.
pub(super) fn apply(
    g: &mut Graph,
    scores: TensorId,
    fill: TensorId,
    problem: &Problem,
    lengths: [Option<TensorId>; 2],
    band_op: bool,
) -> TensorId {
    let Ends { lower, upper } = problem.kept().ends;
    if lower.is_none() && upper.is_none() {
        return scores;
    }
    let [q, kv] = Side::ALL.map(|side| lengths[side as usize].unwrap_or_else(|| bound(g, problem.seq(side))));
    let mut out = scores;
    if let Some(upper) = upper {
        out = if band_op {
            let shift = (upper != 0).then(|| bound(g, upper));
            g.band_mask_right(out, fill, shift, Some((q, kv)))
        } else {
            let (row, col) = (index(g, out, 2), index(g, out, 3));
            let row = moved(g, row, [Mode::Add, Mode::Sub], [kv, q]);
            let row = shifted(g, row, upper);
            let keep = g.pointwise(Mode::CmpGe, &[row, col]);
            g.pointwise(Mode::BinarySelect, &[out, fill, keep])
        };
    }
    if let Some(lower) = lower {
        out = if band_op && lower < 0 && lower.abs() <= F32_WHOLE {
            let left = bound(g, -lower);
            g.band_mask_left(out, fill, left, Some((q, kv)))
        } else {
            let col = index(g, out, 3);
            let col = shifted(g, col, -lower);
            // Subtract `kv` before adding `q`: engines read the opposite order as a band aligned to the top left.
            let col = moved(g, col, [Mode::Sub, Mode::Add], [kv, q]);
            let row = index(g, out, 2);
            let keep = g.pointwise(Mode::CmpGt, &[col, row]);
            g.pointwise(Mode::BinarySelect, &[out, fill, keep])
        };
    }
    out
}

/// Shifts an index forward by one length and back by the other.
fn moved(g: &mut Graph, place: TensorId, modes: [Mode; 2], lengths: [TensorId; 2]) -> TensorId {
    let step = |place: TensorId, (mode, length)| g.pointwise_as(mode, &[place, length], DType::I32, DType::I32, Params::default());
    modes.into_iter().zip(lengths).fold(place, step)
}

/// Returns the terms of the band for a single query.
pub(super) fn terms(b: &mut Builder, problem: &Problem, key: NodeId) -> Vec<NodeId> {
    let kept = problem.kept();
    let Ends { lower, upper } = kept.ends;
    if lower.is_none() && upper.is_none() {
        return Vec::new();
    }
    // Lengths are unchecked data; clamp them to the extents.
    let mut length = |there: bool, name: &str, extent: i64| {
        let extent = b.konst(Const::I32(extent as i32));
        if !there {
            return extent;
        }
        let (length, none) = (declared_length(b, name), b.konst(Const::I32(0)));
        let least = b.binary(Binary::Max, length, none);
        b.binary(Binary::Min, least, extent)
    };
    let q = length(kept.seq_len_q, SEQ_LEN_Q, problem.seq_q());
    let kv = length(kept.seq_len_kv, SEQ_LEN_KV, problem.seq_kv());
    let corner = b.binary(Binary::Sub, kv, q);
    [(lower, Binary::Gt), (upper, Binary::Le)]
        .into_iter()
        .filter_map(|(limit, f)| {
            let limit = b.konst(Const::I32(limit? as i32));
            let end = b.binary(Binary::Add, corner, limit);
            Some(b.binary(f, key, end))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::{NEW, SHAPE, backward, forward};
    use super::super::super::{Form, Job, LowerError, Lowered, Supply, lower};
    use cudnn_graph::Version;
    use cudnn_graph::ir::op::Op;
    use cudnn_graph::ir::{Mode, TensorId};
    use sdpa_core::Shape;
    use sdpa_core::expr::{Axis, Builder, Place, Precision};
    use sdpa_core::mask::SEQ_LEN_KV;

    const OPS: Version = Version::new(9, 19, 0);

    fn lowered(job: &Job, runtime: Version) -> Lowered {
        lower(job, Form::Composite, runtime).unwrap()
    }

    /// Returns the mode and the other operand's name of each op, going back from a comparison to an index.
    fn steps(lowered: &Lowered, from: TensorId) -> Vec<(Mode, String)> {
        let graph = lowered.graph.graph();
        let made = |id| graph.ops().iter().find_map(|op| if let Op::Pointwise(p) = op { (p.y == id).then_some(p) } else { None });
        let (mut steps, mut at) = (Vec::new(), from);
        while let Some(op) = made(at).filter(|op| op.mode != Mode::GenIndex) {
            steps.insert(0, (op.mode, op.b.and_then(|b| graph.get(b)).map_or(String::new(), |t| t.name.clone())));
            at = op.x;
        }
        steps
    }

    #[test]
    fn bounds_about_the_ends_are_moved_as_the_frontend_moves_them() {
        for job in [forward(SHAPE, &[], &["padding", "window:9,0:ends"]), backward(SHAPE, &[], &["padding", "window:9,0:ends"])] {
            let lowered = lowered(&job, OPS);
            let compared = |mode: Mode| {
                let ops = lowered.graph.graph().ops().iter();
                let mut found = ops.filter_map(|op| if let Op::Pointwise(p) = op { (p.mode == mode).then_some(p.x) } else { None });
                found.next().map(|x| steps(&lowered, x)).unwrap()
            };
            let name = |step: &(Mode, String)| (step.0, step.1.trim_end_matches("_guarded").to_owned());
            let right: Vec<_> = compared(Mode::CmpGe).iter().map(name).collect();
            assert_eq!(right, [(Mode::Add, "seq_len_kv".to_owned()), (Mode::Sub, "seq_len_q".to_owned())]);
            let left: Vec<_> = compared(Mode::CmpGt)[1..].iter().map(name).collect();
            assert_eq!(left, [(Mode::Sub, "seq_len_kv".to_owned()), (Mode::Add, "seq_len_q".to_owned())]);
        }
    }

    #[test]
    fn lengths_of_one_query_lead_past_no_extent() {
        let one = Shape { seq_q: 1, ..SHAPE };
        let job = forward(one, &[], &["padding", "window:9,0:ends"]);
        let mut b = Builder::new();
        let key = b.index(Axis::K);
        let [lower] = super::terms(&mut b, job.problem(), key)[..] else { panic!("a bound on the left alone") };
        let rule = b.finish(&[lower]).unwrap();
        let [first, last] = [one.seq_kv - 9, one.seq_kv - 1];
        for (lengths, kept) in
            [([1, one.seq_kv], first), ([7, one.seq_kv + 100], first), ([1, 30], 21), ([i64::from(i32::MAX); 2], first), ([1, -5], 0)]
        {
            let named = |name: &str| lengths[usize::from(name == SEQ_LEN_KV)] as f64;
            let params: Vec<f64> = rule.params().iter().map(|p| named(&p.name)).collect();
            let at = |k| Place { score: 0.0, upstream: 0.0, index: [0, 0, 0, k], extents: job.problem().extents(), params: &params };
            let keeps = |k| rule.eval_first(&at(k), Precision::F32) != 0.0;
            assert!(keeps(kept) && keeps(last) && (kept == 0 || !keeps(kept - 1)), "{lengths:?}");
        }
    }

    #[test]
    fn bands_about_the_ends_take_lengths_of_both_sides() {
        let keys = "tensor seq_len_kv[batch]: i32; k < seq_len_kv";
        let lowered = |masks: &[&str]| lower(&forward(SHAPE, &[], masks), Form::Composite, NEW);
        let clamped =
            |masks: &[&str]| lowered(masks).unwrap().supplies.iter().filter(|(_, supply)| matches!(supply, Supply::Guarded(_))).count();
        assert_eq!([clamped(&[keys]), clamped(&["padding", "causal-ends"])], [0, 2]);
        assert!(matches!(lowered(&[keys, "causal-ends"]), Err(LowerError::Unsupported(_))));
    }

    #[test]
    fn a_band_about_the_ends_is_the_only_band() {
        let bands = |masks: &[&str]| {
            [forward(SHAPE, &[], masks), backward(SHAPE, &[], masks)].map(|job| {
                let lowered = lowered(&job, NEW);
                lowered.graph.graph().ops().iter().filter(|op| matches!(op, Op::BandMask(_))).count()
            })
        };
        assert_eq!(bands(&["padding", "window:9,3"]), [2, 2]);
        assert_eq!(bands(&["padding", "window:9,3:ends"]), [2, 2]);
        assert_eq!(bands(&["padding", "window:9,3:ends", "window:20,30"]), [2, 2]);
        assert_eq!(bands(&["padding", "causal-ends", "window:20,0", "prefix-lm:7"]), [1, 1]);
    }
}
