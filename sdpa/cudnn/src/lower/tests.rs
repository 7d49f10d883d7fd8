//! Ops in lowered graphs. Workarounds for engine bugs do not change the result, so an oracle would not miss them.

use super::copy::densify;
use super::{Form, Job, LowerError, Operand, Supply, convert, lower};
use cudnn_graph::ir::op::Op;
use cudnn_graph::ir::{Mode, TensorId};
use cudnn_graph::{DType, Version};
use sdpa_cache::{CacheKey, Difference};
use sdpa_core::{AttentionSpec, Layout, Shape, TensorSpec};

/// A runtime that counts keys past the last one: `Quirk::KeysPastTheLast`.
const COUNTED: Version = Version::new(9, 19, 0);
/// A runtime without that quirk.
pub(super) const NEW: Version = Version::new(9, 27, 0);

pub(super) const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 4, seq_q: 130, seq_kv: 132, dim_qk: 64, dim_v: 64 };

pub(super) fn spec(shape: Shape, mods: &[&str], masks: &[&str]) -> AttentionSpec {
    let mut spec = AttentionSpec::dense(sdpa_core::DType::BF16, shape, Layout::Bhsd).with_stats();
    spec.score_mods = mods.iter().map(|text| text.parse().unwrap()).collect();
    spec.masks = masks.iter().map(|text| text.parse().unwrap()).collect();
    spec
}

pub(super) fn backward(shape: Shape, mods: &[&str], masks: &[&str]) -> Job {
    spec(shape, mods, masks).backward().validate().unwrap().into()
}

pub(super) fn forward(shape: Shape, mods: &[&str], masks: &[&str]) -> Job {
    spec(shape, mods, masks).validate().unwrap().into()
}

/// Counts the selects of a graph.
fn selects(job: &Job, runtime: Version) -> usize {
    let lowered = lower(job, Form::Composite, runtime).unwrap();
    let select = |op: &&Op| matches!(op, Op::Pointwise(p) if p.mode == Mode::BinarySelect);
    lowered.graph.graph().ops().iter().filter(select).count()
}

fn refused(job: &Job, form: Form, runtime: Version) -> Option<String> {
    match lower(job, form, runtime) {
        Ok(_) => None,
        Err(LowerError::Unsupported(why)) => Some(why),
        Err(LowerError::Bug(e)) => panic!("{e}"),
    }
}

#[test]
fn tiles_past_the_end_are_selected_away_where_they_count() {
    // Full tiles have nothing past their end, so no select is needed.
    let whole = Shape { seq_q: 128, seq_kv: 256, ..SHAPE };
    assert_eq!([selects(&backward(whole, &[], &[]), COUNTED), selects(&backward(SHAPE, &[], &[]), COUNTED)], [0, 1]);
    assert_eq!(selects(&backward(SHAPE, &[], &[]), NEW), 0);
    // A score_mod needs four selects: past the last query and past the last key, once after stats and once after the derivative.
    assert_eq!([selects(&backward(whole, &["softcap:30"], &[]), NEW), selects(&backward(SHAPE, &["softcap:30"], &[]), NEW)], [0, 4]);
    // One query needs a select for the rest of its tile, and another if the last tile of keys is partial.
    let one = Shape { seq_q: 1, ..SHAPE };
    assert_eq!([selects(&backward(one, &[], &[]), NEW), selects(&backward(Shape { seq_kv: 256, ..one }, &[], &[]), NEW)], [2, 1]);
}

#[test]
fn a_band_that_ends_before_the_last_key_needs_no_select_for_it() {
    // The band needs the same number of selects for all numbers of keys whose last tile is partial.
    let of = |seq_q, seq_kv| selects(&backward(Shape { seq_q, seq_kv, ..SHAPE }, &[], &["window:inf,3"]), COUNTED);
    // The last query, 9, attends to keys up to 12. With 13 keys that is the last one, with 14 it is before the last, and with 12 it is past the end.
    let [short, exact, long] = [of(10, 12), of(10, 13), of(10, 14)];
    assert_eq!((exact, long), (short - 1, short - 1));
    // Three queries attend to keys up to 5 (seq_q − 1 plus the upper bound). Of 7 keys that is not the last; with 5 keys it is past the
    // end.
    assert_eq!([of(3, 7), of(3, 5)], [exact, short]);
}

#[test]
fn what_is_masked_is_selected_a_second_time_where_nought_times_it_is_no_number() {
    let ops = |score_mod: &str, masks: &[&str]| {
        let lowered = lower(&backward(SHAPE, &[score_mod], masks), Form::Composite, NEW).unwrap();
        lowered.graph.graph().ops().len()
    };
    // Returns the number of ops that the mask adds. A mask that is applied twice adds twice as many.
    let of = |score_mod: &str, mask: &str| ops(score_mod, &[mask]) - ops(score_mod, &[]);
    for infinite in ["exp(score)", "2.0 / score"] {
        assert_eq!(of(infinite, "causal"), 2 * of("score * 2.0", "causal"), "{infinite}");
    }
    let rows = "tensor seq_len_q[batch]: i32; q < seq_len_q";
    let keys = "tensor seq_len_kv[batch]: i32; k < seq_len_kv";
    for mask in [rows, keys] {
        assert_eq!(of("exp(score)", mask), of("score * 2.0", mask), "{mask}");
    }
}

#[test]
fn padding_beside_a_score_mod_without_a_number_at_any_corner_is_refused() {
    let ends = [SHAPE.batch - 1, SHAPE.heads_q - 1, SHAPE.seq_q - 1, SHAPE.seq_kv - 1];
    for corner in 0..16 {
        let [batch, head, q, k] = [0, 1, 2, 3].map(|axis| if corner >> axis & 1 == 0 { 0 } else { ends[axis] });
        let score_mod = format!("select((batch == {batch} & head == {head}) & (q == {q} & k == {k}), score - score, score)");
        for mask in ["padding", "tensor seq_len_q[batch]: i32; q < seq_len_q", "tensor seq_len_kv[batch]: i32; k < seq_len_kv"] {
            let why = refused(&backward(SHAPE, &[&score_mod], &[mask]), Form::Composite, NEW);
            assert!(why.is_some_and(|why| why.contains("NaN at −∞")), "{score_mod} {mask}");
        }
        assert_eq!(refused(&backward(SHAPE, &[&score_mod], &["causal"]), Form::Composite, NEW), None);
    }
}

#[test]
fn lengths_are_operands_of_the_products_where_there_are_both() {
    let guarded = |mask: &str| {
        let lowered = lower(&backward(SHAPE, &[], &[mask]), Form::Composite, NEW).unwrap();
        lowered.supplies.iter().filter(|(_, supply)| matches!(supply, Supply::Guarded(_))).count()
    };
    let alone = ["tensor seq_len_q[batch]: i32; q < seq_len_q", "tensor seq_len_kv[batch]: i32; k < seq_len_kv"];
    assert_eq!((guarded("padding"), alone.map(guarded)), (2, [0, 0]));
}

#[test]
fn each_gradient_of_a_parameter_is_looked_at_by_itself() {
    let spec = spec(SHAPE, &["bias:hqk", "tensor gain[head]: f32; score * gain"], &[]);
    let asked = |names: &[&str]| {
        let spec = names.iter().fold(spec.backward(), |spec, name| spec.wrt(name, sdpa_core::DType::BF16));
        refused(&spec.validate().unwrap().into(), Form::Composite, NEW)
    };
    // The bias is added first, but a later score_mod multiplies the score, so engines sum neither gradient.
    for names in [&["gain"][..], &["bias", "gain"], &["gain", "bias"]] {
        assert!(asked(names).is_some_and(|why| why.contains("gain") || why.contains("bias")), "{names:?}");
    }
    let first = self::spec(SHAPE, &["bias:hqk", "tensor shift[k]: f32; select(shift > 0.0, score, score * 2.0)"], &[]);
    let both = first.backward().wrt("bias", sdpa_core::DType::BF16).wrt("shift", sdpa_core::DType::BF16).validate().unwrap();
    assert!(refused(&both.into(), Form::Composite, NEW).is_some_and(|why| why.contains("shift")));
}

#[test]
fn the_unified_form_takes_what_its_engines_compute() {
    let unified = |job: &Job| refused(job, Form::Unified, NEW);
    assert_eq!(unified(&backward(SHAPE, &[], &[])), None);
    for job in [backward(SHAPE, &[], &["causal"]), backward(SHAPE, &["softcap:30"], &[]), backward(SHAPE, &["softcap:30"], &["causal"])] {
        assert!(unified(&job).is_some_and(|why| why.contains("plain attention only")));
    }
    // The unified form refuses lengths of both sides with a score_mod. Lengths of the keys alone are lowered as a traced mask, which it
    // supports.
    assert!(unified(&forward(SHAPE, &["softcap:30"], &["padding"])).is_some_and(|why| why.contains("lengths with")));
    assert_eq!(unified(&forward(SHAPE, &["softcap:30"], &["tensor seq_len_kv[batch]: i32; k < seq_len_kv"])), None);
}

/// Problems whose masks and score_mods read tensors or functions over the batch. cuDNN computed them wrongly on an H100 (9.19.0).
fn over_the_batch() -> Vec<[Vec<&'static str>; 2]> {
    let masks = [
        "tensor t[batch]: i32; k < t",
        "tensor t[batch]: i32; k < t % 150",
        "tensor t[batch]: bool; t",
        "tensor t[batch, head]: i32; k < t",
        "tensor t[batch, head]: bool; t | k < 7",
        "tensor t[batch]: f32; f32(k) < t",
        "k < 40 + 10 * batch",
        "k < 20 + 5 * batch + 30 * head",
        "tensor seq_len_kv[batch]: i32; k < seq_len_kv",
        "tensor seq_len_q[batch]: i32; q < seq_len_q",
    ];
    let mods = [
        "tensor u[batch]: i32; score + 0.01 * f32(u % 7)",
        "tensor u[batch]: bool; select(u, score, score * 0.5)",
        "tensor u[batch, head]: f16; score * u",
        "score * f32(batch + 1)",
    ];
    let alone = masks.iter().map(|mask| [vec![], vec![*mask]]).chain(mods.iter().map(|modify| [vec![*modify], vec![]]));
    let both = masks.iter().flat_map(|mask| mods.iter().map(move |modify| [vec![*modify], vec![*mask]]));
    alone.chain(both).chain(masks.iter().map(|mask| [vec![], vec!["padding", mask]])).collect()
}

/// `Quirk::VectorsOverTheBatch`, `Quirk::LengthsOfOneSide`: engines read such a tensor at the head index.
#[test]
fn no_op_reads_a_tensor_over_the_batch_alone() {
    let mut read = 0;
    for shape in [SHAPE, Shape { seq_q: 1, ..SHAPE }, Shape { heads_q: 1, heads_kv: 1, ..SHAPE }] {
        for [mods, masks] in over_the_batch() {
            for job in [forward(shape, &mods, &masks), backward(shape, &mods, &masks)] {
                // A pass that cannot be lowered has no graph that reads a tensor.
                let Ok(lowered) = lower(&job, Form::Composite, COUNTED) else { continue };
                let graph = lowered.graph.graph();
                let padded = masks.contains(&"padding");
                for op in graph.ops() {
                    let Op::Pointwise(op) = op else { continue };
                    for input in [Some(op.x), op.b, op.t].into_iter().flatten() {
                        let traced = |(id, supply): &(TensorId, Supply)| {
                            *id == input && matches!(supply, Supply::Param(_) | Supply::Spread { .. } | Supply::Table(_))
                        };
                        let Some(tensor) = graph.get(input).filter(|_| lowered.supplies.iter().any(traced)) else { continue };
                        let [batch, _, seq_q, seq_kv] = tensor.dims.0[..] else { continue };
                        // Engines recognise the pair of tensors seq_len_q and seq_len_kv as lengths, so these may vary over the batch
                        // alone.
                        let recognised = padded && ["seq_len_q", "seq_len_kv"].contains(&tensor.name.as_str());
                        assert!(
                            batch == 1 || seq_q > 1 || seq_kv > 1 || recognised,
                            "{mods:?} {masks:?}: {} is {:?}",
                            tensor.name,
                            tensor.dims
                        );
                        read += usize::from(batch > 1 && !recognised);
                    }
                }
            }
        }
    }
    assert!(read > 300, "only {read} such tensors were read");
}

/// `Quirk::BooleansReadTwice`.
#[test]
fn booleans_are_read_once() {
    let modify = ["tensor t[batch]: bool; select(t, score, score * 0.5)"];
    for job in [forward(SHAPE, &modify, &[]), backward(SHAPE, &modify, &[])] {
        let lowered = lower(&job, Form::Composite, COUNTED).unwrap();
        let graph = lowered.graph.graph();
        let (t, _) = lowered.supplies.iter().find(|(_, supply)| matches!(supply, Supply::Spread { name, .. } if name == "t")).unwrap();
        let reads = graph.ops().iter().filter(|op| matches!(op, Op::Pointwise(p) if [Some(p.x), p.b, p.t].contains(&Some(*t)))).count();
        assert_eq!(reads, 1);
    }
}

#[test]
fn tensors_of_one_element_are_spread_where_they_are_compared() {
    let read = |job: Job| {
        let lowered = lower(&job, Form::Composite, COUNTED).unwrap();
        let of_t = |(id, supply): &(TensorId, Supply)| {
            let is_t = matches!(supply, Supply::Param(name) | Supply::Spread { name, .. } if name == "t");
            lowered.graph.graph().get(*id).filter(|_| is_t).map(|tensor| tensor.dims.0.to_vec())
        };
        lowered.supplies.iter().filter_map(of_t).collect::<Vec<_>>()
    };
    let one_entry = Shape { batch: 1, ..SHAPE };
    let one_query = Shape { seq_q: 1, ..SHAPE };
    let [seq_q, seq_kv] = [SHAPE.seq_q, SHAPE.seq_kv];
    let mask = "tensor t[]: f32; t < 0.75";
    assert_eq!(read(backward(SHAPE, &["softcap:5"], &[mask])), [[1, 1, seq_q, 1]]);
    assert_eq!(read(backward(one_query, &["softcap:5"], &[mask])), [[1, 1, 1, seq_kv]]);
    assert_eq!(read(backward(one_entry, &[], &["tensor t[batch]: f32; t < 0.75"])), [[1, 1, seq_q, 1]]);
    assert_eq!(read(backward(SHAPE, &["tensor t[]: f32; select(t < 0.75, score, score * 2.0)"], &[])), [[1, 1, seq_q, 1]]);
    // Engines read these scalars in place, without spreading them along an axis.
    assert_eq!(read(forward(SHAPE, &["softcap:5"], &[mask])), [[1, 1, 1, 1]]);
    assert_eq!(read(backward(SHAPE, &["tensor t[]: f32; score * t"], &[])), [[1, 1, 1, 1]]);
    assert_eq!(read(backward(SHAPE, &[], &["tensor t[]: f32; f32(k) < t"])), [[1, 1, 1, 1]]);
}

#[test]
fn forms_have_names() {
    assert_eq!([Form::Composite, Form::Unified].map(|form| form.to_string()), ["composite", "unified"]);
}

#[test]
fn copies_run_once_where_two_strides_are_enough() {
    let gapped = |dims: [i64; 4], strides: [i64; 4]| TensorSpec { dims, strides, alignment: 16 };
    let repeats = |from: TensorSpec| convert([DType::BF16; 2], &from, &from.densely()).unwrap().repeats;
    // An axis of one element has no effect, whatever its stride.
    assert_eq!(repeats(gapped([3, 1, 5, 8], [200, 7, 16, 1])), 1);
    assert_eq!(repeats(gapped([3, 4, 5, 8], [1000, 200, 16, 1])), 3);
    assert_eq!(repeats(gapped([3, 4, 5, 8], [640, 160, 16, 1])), 1);
}

#[test]
fn what_engines_read_in_place_is_not_copied() {
    let copied = |strides: [i64; 4], dims: [i64; 4]| {
        let mut spec = spec(Shape { seq_q: dims[2], seq_kv: 5, dim_qk: dims[3], ..SHAPE }, &[], &[]);
        spec.q = TensorSpec { dims, strides, alignment: 16 };
        densify(&spec.validate().unwrap().into()).1
    };
    let dims = [2, 4, 6, 64];
    assert_eq!(copied([4 * 6 * 64, 6 * 64, 64, 1], dims), []);
    assert_eq!(copied([4 * 6 * 72, 6 * 72, 72, 1], dims), []);
    // An operand is copied if its rows are not a multiple of 16 bytes apart, or if its heads share memory (stride 0).
    assert_eq!(copied([4 * 6 * 65, 6 * 65, 65, 1], dims), [Operand::Q]);
    assert_eq!(copied([6 * 64, 0, 64, 1], dims), [Operand::Q]);
    // `d_o` repeats one number along each row.
    let mut repeated = spec(SHAPE, &[], &[]).backward();
    repeated.d_o.strides[3] = 0;
    assert_eq!(densify(&repeated.validate().unwrap().into()).1, [Operand::DO]);
}

#[test]
fn keys_name_layouts_and_say_what_to_do_about_a_miss() {
    let job: Job = {
        let mut one = spec(Shape { seq_q: 1, ..SHAPE }, &[], &["causal"]).backward();
        // The query axis has extent 1, so its stride may be any number.
        one.forward.q.strides = [4 * 64, 64, 12_345, 1];
        one.deterministic = true;
        one.validate().unwrap().into()
    };
    assert!(job.deterministic());
    let fields = job.fields();
    let field = |name: &str| fields.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_str());
    assert_eq!((field("layout of q"), field("layout of k"), field("deterministic")), (Some("bhsd"), Some("bhsd"), Some("true")));
    for operand in Operand::ALL {
        assert!(field(&format!("layout of {operand}")).is_some() && field(&format!("alignment of {operand}")).is_some(), "{operand}");
    }
    let advice = |names: &[&str]| {
        let differ = |field: &&str| Difference { field: (*field).to_owned(), asked: "this".to_owned(), there: "that".to_owned() };
        Job::advice(&names.iter().map(differ).collect::<Vec<_>>())
    };
    assert_eq!((advice(&[]), advice(&["dtype"]), advice(&["mask", "dtype"])), (None, None, None));
    for (names, said) in [
        (&["batch"][..], "only the batch"),
        (&["mask"], "only the mask"),
        (&["seq_q", "mask"], "only lengths"),
        (&["score_mod", "gradient"], "only the score_mod"),
        (&["layout of dq", "alignment of d_o"], "only strides"),
    ] {
        assert!(advice(names).is_some_and(|advice| advice.contains(said)), "{names:?}");
    }
}
