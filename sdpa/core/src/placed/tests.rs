use super::*;
use crate::expr::{Place, Precision};
use crate::{Align, DType, Dropout, Layout, Packed, ScoreMod, Shape};

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 24, seq_kv: 30, dim_qk: 8, dim_v: 8 };

fn spec() -> AttentionSpec {
    AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd)
}

/// Returns the value of a parameter at a position (batch, head, q, k) of the whole problem.
fn value(name: &str, [batch, head, q, k]: [i64; 4]) -> f64 {
    match name {
        "doc_q" => (q / 7) as f64,
        "doc_k" => (k / 7) as f64,
        "seq_len_q" => [24, 13][batch as usize] as f64,
        "seq_len_kv" => [17, 30][batch as usize] as f64,
        "cap" => 20.0,
        "slopes" => 0.25 * (head + 1) as f64,
        "bias" => (31 * q + k) as f64,
        "own" => f64::from(u8::from((q * 5 + k * 3 + head) % 4 != 1)),
        other => panic!("{other}"),
    }
}

fn values(trace: &Trace, numbers: &[(&str, f32)], at: [i64; 4]) -> Vec<f64> {
    let of = |name: &str| numbers.iter().find(|(n, _)| *n == name).map_or_else(|| value(name, at), |(_, x)| f64::from(*x));
    trace.params().iter().map(|p| of(&p.name)).collect()
}

/// Evaluates a trace at `here`, an index of a problem of these extents that is `at` in the whole problem.
fn eval(trace: &Trace, numbers: &[(&str, f32)], here: [i64; 4], at: [i64; 4], extents: [i64; 4], score: f64) -> Vec<f64> {
    let params = values(trace, numbers, at);
    trace.eval(&Place { score, upstream: 1.5, index: here, extents, params: &params }, Precision::F32)
}

fn attends(problem: &Problem, numbers: &[(&str, f32)], here: [i64; 4], at: [i64; 4]) -> bool {
    let kept = problem.kept();
    let [_, _, q, k] = here;
    let of = |has: bool, name: &str, extent: i64| if has { (value(name, at) as i64).clamp(0, extent) } else { extent };
    let lengths = [of(kept.seq_len_q, SEQ_LEN_Q, problem.seq_q()), of(kept.seq_len_kv, SEQ_LEN_KV, problem.seq_kv())];
    let rest = kept.rest.as_ref().is_none_or(|rest| eval(rest, numbers, here, at, problem.extents(), 0.0)[0] != 0.0);
    kept.region.keeps(q, k) && kept.ends.keeps(q, k, lengths) && q < lengths[0] && k < lengths[1] && rest
}

/// Compares a placed specification with the whole one at every position of the part. Returns whether any pair is attended.
fn compare(spec: &AttentionSpec, at: &Placement) -> bool {
    let whole = spec.validate().unwrap();
    let placed = spec.placed(at).unwrap();
    let part = placed.as_ref().map(|placed| (placed, placed.spec.validate().unwrap()));
    let mut any = false;
    let heads = at.heads_q.end - at.heads_q.start;
    for batch in 0..SHAPE.batch {
        for head in 0..heads {
            for (q, k) in (0..at.q.len).flat_map(|q| (0..at.k.len).map(move |k| (q, k))) {
                let (here, there) = ([batch, head, q, k], [batch, head + at.heads_q.start, at.q.at(q), at.k.at(k)]);
                let want = attends(&whole, &[], there, there);
                any |= want;
                let Some((placed, part)) = &part else {
                    assert!(!want, "{at:?} {there:?} {:?}", spec.masks);
                    continue;
                };
                let numbers = placed.numbers(part.params());
                assert_eq!(attends(part, &numbers, here, there), want, "{at:?} {there:?} {}", part.kept());
                let modified = |problem: &Problem, numbers: &[(&str, f32)], here| {
                    let extents = problem.extents();
                    problem.score_mod().map(|trace| eval(trace, numbers, here, there, extents, 0.75)[0].to_bits())
                };
                assert_eq!(modified(part, &numbers, here), modified(&whole, &[], there), "{at:?} {there:?}");
            }
        }
    }
    any
}

fn placements() -> Vec<Placement> {
    let chunks = |extent: i64| {
        let mut all = vec![Chunk::new(0, 1, extent), Chunk::new(0, 1, 7), Chunk::new(9, 1, 5), Chunk::new(extent - 1, 1, 1)];
        all.extend([Chunk::new(1, 3, 7), Chunk::new(2, 3, 7), Chunk::new(0, 2, 4)]);
        all
    };
    let mut all = Vec::new();
    for q in chunks(SHAPE.seq_q) {
        for k in chunks(SHAPE.seq_kv) {
            for (heads_q, heads_kv) in [(0..4, 0..2), (2..4, 1..2), (3..4, 1..2)] {
                all.push(Placement { q, k, heads_q, heads_kv });
            }
        }
    }
    all
}

#[test]
fn masks_of_parts_are_those_of_the_whole() {
    let own = "tensor own[head, q, k]: bool; own & (q + head) % 5 != k % 3";
    let masks = [
        &["causal"][..],
        &["causal-bottom-right"],
        &["window:6,0"],
        &["window:3,4:bottom-right"],
        &["prefix-lm:11"],
        &["prefix-lm:11", "window:9,inf"],
        &["document", "causal"],
        &["padding", "window:8,1:ends"],
        &["padding & (causal-ends | k < 3)"],
        &["!causal | k < 5"],
        &[own],
        &["k * 2 <= q + seq_kv - seq_q"],
        &["k > q + 40"],
    ];
    let mut attended = 0;
    for masks in masks {
        let mut spec = spec();
        spec.masks = masks.iter().map(|mask| mask.parse().unwrap_or_else(|e| panic!("{e}"))).collect();
        attended += placements().iter().filter(|at| compare(&spec, at)).count();
    }
    assert!(attended > 1000, "{attended}");
}

#[test]
fn score_mods_of_parts_see_positions_of_the_whole() {
    for text in ["alibi", "tensor bias[q, k]: f32; score + bias * f32(q - k)", "score + f32(q * seq_kv + k * 7 + head * 1000 + batch)"] {
        let spec = spec().score_mod(text.parse().unwrap_or_else(|e| panic!("{e}"))).score_mod("softcap:20".parse().unwrap());
        placements().iter().for_each(|at| assert!(compare(&spec, at)));
    }
}

#[test]
fn gradients_written_by_hand_are_placed_too() {
    let by_hand = ScoreMod::new("own", |score, at, _| score + at.q.to_f32()).unwrap();
    let by_hand = by_hand.with_bprop(|grad, _, at, _| grad * (at.k * 2 + at.head).to_f32()).unwrap();
    let at = Placement::of(&spec()).with_q(Chunk::new(6, 1, 6)).with_k(Chunk::new(15, 1, 15)).with_heads(2..4, 1..2);
    let placed = spec().score_mod(by_hand).placed(&at).unwrap().unwrap();
    let backward = placed.spec.backward().validate().unwrap();
    let trace = &backward.gradient().unwrap().trace;
    let numbers = placed.numbers(backward.params());
    assert_eq!(numbers.len(), 4);
    let got = eval(trace, &numbers, [0, 1, 2, 3], [0, 3, 8, 18], backward.forward().extents(), 0.5);
    assert_eq!(got[..2], [8.5, 1.5 * 39.0]);
}

#[test]
fn positions_are_exact_as_far_as_i32() {
    let long = i64::from(i32::MAX);
    let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: long, seq_kv: long, dim_qk: 1, dim_v: 1 };
    let spec =
        AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).score_mod("score + f32(q % 1000) + 1000.0 * f32(k % 7)".parse().unwrap());
    for start in [(1 << 24) + 1, (1 << 30) + 12_345, long - 50] {
        let at = Placement::of(&spec).with_q(Chunk::new(start, 3, 9)).with_k(Chunk::new(start + 1, 1, 9));
        let placed = spec.placed(&at).unwrap().unwrap();
        let part = placed.spec.validate().unwrap();
        let numbers = placed.numbers(part.params());
        let trace = part.score_mod().unwrap();
        for i in 0..9 {
            let got = eval(trace, &numbers, [0, 0, i, i], [0; 4], part.extents(), 0.0)[0];
            assert_eq!(got, ((start + 3 * i) % 1000 + 1000 * ((start + 1 + i) % 7)) as f64);
        }
    }
}

#[test]
fn parts_with_equal_distances_share_a_plan() {
    let spec = spec().mask(Mask::causal()).mask("document".parse().unwrap()).score_mod("alibi".parse().unwrap());
    let part = |q, k| {
        let at = Placement::of(&spec).with_q(Chunk::new(q, 1, 6)).with_k(Chunk::new(k, 1, 6));
        spec.placed(&at).unwrap().map(|placed| placed.spec.validate().unwrap())
    };
    assert_eq!(part(6, 6), part(12, 12));
    assert_eq!(part(12, 0), part(18, 6));
    // Keys that no query of the part attends to leave no part.
    assert_eq!(part(0, 6), None);
    // The whole problem is itself.
    let whole = spec.placed(&Placement::of(&spec)).unwrap().unwrap();
    assert_eq!((whole.spec, whole.starts, whole.dropout_offset), (spec.clone(), [0; 2], 0));
}

#[test]
fn heads_of_one_batch_entry_drop_the_same_elements() {
    let shape = Shape { batch: 1, ..SHAPE };
    let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).with_dropout(0.3);
    let at = Placement::of(&spec).with_heads(2..4, 1..2);
    let placed = spec.placed(&at).unwrap().unwrap();
    let [whole, part] = [&spec, &placed.spec].map(|spec| spec.validate().unwrap());
    let (whole, part) = (whole.dropout_mask(5, 100).unwrap(), part.dropout_mask(5, 100 + placed.dropout_offset).unwrap());
    let mut kept = 0;
    for (head, q, k) in (0..2).flat_map(|head| (0..24).flat_map(move |q| (0..30).map(move |k| (head, q, k)))) {
        kept += usize::from(part.keeps([0, head, q, k]));
        assert_eq!(part.keeps([0, head, q, k]), whole.keeps([0, head + 2, q, k]));
    }
    assert!((800..1200).contains(&kept), "{kept}");
}

fn refused(spec: &AttentionSpec, at: &Placement) -> String {
    spec.placed(at).unwrap_err().to_string()
}

#[test]
fn parts_that_cannot_be_right_are_refused() {
    let at = Placement::of(&spec()).with_q(Chunk::new(0, 1, 12));
    let mut dropped = spec();
    dropped.dropout = Some(Dropout::new(0.5));
    assert!(refused(&dropped, &at).contains("count random numbers by positions in the call"));
    assert!(refused(&dropped, &Placement::of(&spec()).with_heads(0..2, 0..1)).contains("batch is 1"));
    assert!(refused(&spec().batch_invariant(), &at).contains("batch_invariant"));
    let packed = AttentionSpec::packed(DType::F16, Shape { seq_kv: 24, ..SHAPE }, Packed::of(40));
    assert!(packed.clone().batch_invariant().unpacked().unwrap_err().to_string().contains("batch_invariant"));
    assert!(refused(&packed, &Placement::of(&packed)).contains("packed sequences"));
    for (q, what) in [(Chunk::new(-1, 1, 3), "placement.q"), (Chunk::new(20, 3, 3), "below 24"), (Chunk::new(0, 0, 3), "stride")] {
        let told = refused(&spec(), &Placement::of(&spec()).with_q(q));
        assert!(told.contains(what), "{told}");
    }
    for (heads_q, heads_kv) in [(1..4, 0..2), (0..4, 0..1), (0..3, 0..3), (2..2, 1..1), (3..5, 1..2)] {
        let told = refused(&spec(), &Placement::of(&spec()).with_heads(heads_q, heads_kv));
        assert!(told.contains("placement.heads"), "{told}");
    }
    let own: ScoreMod = "scalar chunk_q_low = 1.0; score * chunk_q_low".parse().unwrap();
    assert!(refused(&spec().score_mod(own), &at).contains("a reserved name"));
    assert_eq!(spec().mask(Mask::window(Some(0), None, Align::TopLeft)).placed(&at).unwrap_err().to_string(), {
        spec().mask(Mask::window(Some(0), None, Align::TopLeft)).validate().unwrap_err().to_string()
    });
}

#[test]
fn regions_attend_to_chunks_in_which_a_pair_is_kept() {
    let chunks = [Chunk::new(0, 1, 5), Chunk::new(9, 1, 4), Chunk::new(1, 4, 5), Chunk::new(2, 4, 3), Chunk::new(17, 1, 1)];
    let (mut equal, mut empty) = (0, 0);
    for (lower, upper) in [(None, None), (None, Some(0)), (Some(-4), Some(0)), (Some(2), Some(3)), (Some(-3), None), (None, Some(-9))] {
        for prefix in [None, Some(0), Some(3), Some(10)] {
            let region = Region { lower, upper, prefix };
            for (q, k) in chunks.iter().flat_map(|q| chunks.iter().map(move |k| (q, k))) {
                let any = (0..q.len).any(|i| (0..k.len).any(|j| region.keeps(q.at(i), k.at(j))));
                let found = region.attends(q, k);
                assert!(found || !any, "{region:?} {q} {k}");
                if q.stride == k.stride {
                    assert_eq!(found, any, "{region:?} {q} {k}");
                    (equal, empty) = (equal + 1, empty + usize::from(!any));
                }
            }
        }
    }
    assert!(equal > 300 && empty > 50 && empty < equal, "{equal} {empty}");
}

#[test]
fn chunks_join_where_they_are_one_run() {
    let of = Chunk::new;
    assert_eq!(of(0, 1, 3).joined(&of(3, 1, 2)), Some(of(0, 1, 5)));
    assert_eq!(of(1, 4, 3).joined(&of(13, 4, 2)), Some(of(1, 4, 5)));
    assert_eq!(of(1, 4, 1).joined(&of(4, 1, 1)), Some(of(1, 3, 2)));
    assert_eq!(of(1, 1, 1).joined(&of(4, 3, 2)), Some(of(1, 3, 3)));
    for (a, b) in [(of(0, 1, 3), of(4, 1, 2)), (of(0, 2, 3), of(6, 1, 2)), (of(3, 1, 2), of(0, 1, 3)), (of(5, 1, 1), of(5, 1, 1))] {
        assert_eq!(a.joined(&b), None, "{a} {b}");
    }
    assert_eq!((of(2, 3, 4).find(8), of(2, 3, 4).find(9), of(2, 3, 4).find(14), of(2, 3, 4).find(-1)), (Some(2), None, None, None));
    assert_eq!((of(2, 3, 4).to_string(), of(2, 1, 4).to_string(), of(2, 3, 4).part(1..3)), ("2..12:3".into(), "2..6".into(), of(5, 3, 2)));
}
