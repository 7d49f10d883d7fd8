//! Backward passes of the WGMMA kernels that sum dQ in fixed point.

use super::{CAUSAL, backward_on, each, judged};
use conformance::Case;
use conformance::emulated::{Emulated, executor_with};
use conformance::invariance::{Features, compare};
use conformance::random::Random;
use conformance::runner::{Draw, Source, fixed_point_problems, run_backward};
use conformance::say::{say, skip};
use conformance::share::{DAYS, new_seeds, of_today, one_of_today};
use sdpa::cuda::{CudaExecutor, CudaOptions, Family};
use sdpa::packed::CU_SEQLENS;
use sdpa::{
    AttentionSpec, DType, Elements, ElementsMut, Executor, HostBackward, HostForward, HostGradient, Layout, Mask, Packed, Param, SINK,
    Shape,
};
use std::collections::BTreeSet;

pub(super) const NAME: &str = "cuda-fixed-point-emulated";

fn executor(family: Option<Family>) -> Option<CudaExecutor> {
    let options = CudaOptions::default().with_family(family);
    executor_with(Emulated::H200, options).map_err(|why| skip("cuda", &why)).ok()
}

pub(super) fn wgmma() -> Option<CudaExecutor> {
    executor(Some(Family::Wgmma))
}

#[test]
fn random_problems() {
    let Some(executor) = wgmma() else { return };
    let seeds = new_seeds(NAME, 3);
    each("random", NAME, &seeds, |&seed, tally| {
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        for (what, spec) in fixed_point_problems(&mut Random::new(seed * 7919 + 43)) {
            let outcome = judged(run_backward(&spec, &draw, Source::ALL[(seed % 2) as usize], &executor), &spec, &executor);
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}"), &outcome);
        }
    });
}

/// Each warp has partial sums of its own, which are added in a fixed order.
#[test]
fn gradients_of_parameters() {
    let Some(executor) = wgmma() else { return };
    let cases = of_today(&format!("parameters {NAME}"), DAYS, Case::ordered_parameters().unwrap(), |_| Vec::new());
    backward_on(&executor, NAME, "deterministic gradients of parameters", &cases, &[Source::Oracle]);
}

/// Integers have the same sum in any order, so gradients have the same bits in any call.
#[test]
fn gradients_of_a_sequence_do_not_depend_on_the_rest_of_the_call() {
    // The `mma.sync` kernels compute the forward pass.
    let Some(executor) = executor(None) else { return };
    let causal = Features { lengths: &[[20, 20], [1, 150], [30, 300], [140, 140]], from_the_end: false, ..CAUSAL };
    let all = [
        causal,
        Features { dtype: DType::F16, dims: [128, 128], sink: true, masks: &["window:50,0:ends"], ..causal },
        Features { heads: [2, 2], score_mods: &["softcap:5", "alibi"], masks: &["causal-ends", "(q + k) % 3 != 1"], ..causal },
        Features { dims: [160, 136], lengths: &[[20, 20], [1, 150], [140, 140]], ..causal },
    ];
    for features in one_of_today(&format!("invariant {NAME}"), &all) {
        let compared = compare(&executor, &features).unwrap_or_else(|why| panic!("{features:?}: {why}"));
        say(&format!("batch_invariant {NAME}: {compared} equal results of {features:?}"));
    }
}

/// The bound of such a derivative would give dQ another scale beside longer sequences.
#[test]
fn a_bound_that_depends_on_extents_is_refused_if_bits_must_not() {
    let Some(executor) = wgmma() else { return };
    let spec = |score_mod: &str| AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).score_mod(score_mod.parse().unwrap());
    for (score_mod, is_supported) in [("softcap:5", true), ("alibi", true), ("score * f32(k)", false), ("score * f32(head)", true)] {
        let invariant = spec(score_mod).batch_invariant().backward().validate().unwrap();
        let refused = executor.supports_backward(&invariant).err().map(|e| e.to_string());
        assert_eq!(refused.is_none(), is_supported, "{score_mod}: {refused:?}");
        assert!(refused.is_none_or(|e| e.contains("bound depends on the extents")), "{score_mod}");
        assert!(executor.supports_backward(&spec(score_mod).backward().deterministic().validate().unwrap()).is_ok(), "{score_mod}");
    }
}

const SHAPE: Shape = Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 200, seq_kv: 200, dim_qk: 64, dim_v: 64 };

/// Head dims of both kernels. Wide ones add dQ by another instruction.
const DIMS: [usize; 2] = [64, 160];

fn spec_of(dtype: DType, dim: usize) -> AttentionSpec {
    AttentionSpec::dense(dtype, Shape { dim_qk: dim as i64, dim_v: dim as i64, ..SHAPE }, Layout::Bhsd)
}

/// A change of the elements of q, k, v and d_o, given the head dim.
type Change = fn(&mut [Vec<f32>; 4], usize);

/// Returns dq of a causal problem of this head dim whose operands `change` has altered.
fn dq_of(executor: &dyn Executor, dim: usize, deterministic: bool, change: impl Fn(&mut [Vec<f32>; 4])) -> Vec<f32> {
    let spec = spec_of(DType::BF16, dim).mask(Mask::causal());
    dq_in(half::bf16::from_f32, &spec, executor, deterministic, change)
}

/// Returns dq of a specification of [`spec_of`] whose elements `narrow` rounds.
fn dq_in<T>(
    narrow: fn(f32) -> T,
    spec: &AttentionSpec,
    executor: &dyn Executor,
    deterministic: bool,
    change: impl Fn(&mut [Vec<f32>; 4]),
) -> Vec<f32>
where
    T: Copy + Default + Into<f32>,
    for<'a> &'a Vec<T>: Into<Elements<'a>>,
    for<'a> &'a mut Vec<T>: Into<ElementsMut<'a>>,
{
    let mut random = Random::new(5);
    let [of_queries, of_keys] = [spec.q, spec.k].map(|tensor| tensor.dims.iter().product::<i64>() as usize);
    let mut operands = [of_queries, of_keys, of_keys, of_queries].map(|n| (0..n).map(|_| random.normal() as f32).collect::<Vec<_>>());
    change(&mut operands);
    let [q, k, v, d_o] = operands.map(|x| x.into_iter().map(narrow).collect::<Vec<T>>());
    let (mut o, mut stats) = (vec![T::default(); of_queries], vec![0.0; of_queries / spec.q.dims[3] as usize]);
    let problem = spec.clone().with_stats().validate().unwrap();
    executor.prepare(&problem).unwrap().forward(HostForward::new(&q, &k, &v, &mut o).stats(&mut stats)).unwrap();
    let mut backward = spec.clone().backward();
    backward.deterministic = deterministic;
    let problem = backward.validate().unwrap();
    let [mut dq, mut dk, mut dv] = [of_queries, of_keys, of_keys].map(|n| vec![T::default(); n]);
    let call = HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv));
    executor.prepare_backward(&problem).unwrap().backward(call).unwrap();
    dq.into_iter().map(Into::into).collect()
}

/// A row whose f32 sum is no number is no number in fixed point either, and no other row is.
#[test]
pub(super) fn what_is_no_number_stays_none() {
    let Some(executor) = wgmma() else { return };
    let changes: [(&str, Change); 5] = [
        ("nothing", |_, _| ()),
        ("an infinity in a key", |x, dim| x[1][150 * dim + 3] = f32::INFINITY),
        ("NaN in a value", |x, dim| x[2][130 * dim + 9] = f32::NAN),
        ("NaN in a query", |x, dim| x[0][20 * dim] = f32::NAN),
        ("an infinity in d_o", |x, dim| x[3][77 * dim + dim - 1] = f32::NEG_INFINITY),
    ];
    for dim in DIMS {
        let head = 200 * dim;
        for (what, change) in changes {
            let [floats, integers] = [false, true].map(|deterministic| dq_of(&executor, dim, deterministic, |x| change(x, dim)));
            let rows = |dq: &[f32]| dq.chunks(dim).map(|row| row.iter().any(|x| !x.is_finite())).collect::<Vec<_>>();
            assert_eq!(rows(&floats), rows(&integers), "{what}, head dim {dim}");
            assert_eq!(rows(&floats).contains(&true), what != "nothing", "{what}, head dim {dim}");
            assert!(
                floats[head..].iter().zip(&integers[head..]).all(|(a, b)| (a - b).abs() <= 0.02 * (a.abs() + 1e-3)),
                "{what}, head dim {dim}: the other head"
            );
        }
    }
}

/// dS that is too large for f16 makes rows infinite, although their statistics and deltas are finite.
#[test]
fn gradients_of_scores_that_overflow_are_no_numbers() {
    let Some(executor) = wgmma() else { return };
    for dim in DIMS {
        let spec = spec_of(DType::F16, dim).mask(Mask::causal());
        let loud = |x: &mut [Vec<f32>; 4]| {
            x[2].iter_mut().for_each(|x| *x *= 400.0);
            x[3].chunks_mut(dim).skip(50).step_by(3).for_each(|row| row.iter_mut().for_each(|x| *x *= 8000.0));
        };
        let [floats, integers] = [false, true].map(|deterministic| dq_in(half::f16::from_f32, &spec, &executor, deterministic, loud));
        let rows = |dq: &[f32]| dq.chunks(dim).map(|row| row.iter().any(|x| !x.is_finite())).collect::<Vec<_>>();
        let (of_floats, of_integers) = (rows(&floats), rows(&integers));
        assert!(of_floats.contains(&true) && of_floats.contains(&false), "head dim {dim}");
        assert_eq!(of_floats, of_integers, "head dim {dim}");
    }
}

/// Sums that are as large as their bound: every product has the largest magnitude, and all have one sign.
#[test]
pub(super) fn sums_may_be_as_large_as_their_bound() {
    let Some(executor) = wgmma() else { return };
    for (dim, (score_mod, gain)) in DIMS.into_iter().flat_map(|dim| [("score", 1.0f32), ("score * 3.0", 3.0)].map(|of| (dim, of))) {
        let spec = spec_of(DType::BF16, dim).score_mod(score_mod.parse().unwrap());
        let extreme = |x: &mut [Vec<f32>; 4]| {
            x[0].fill(0.0);
            let signed = |size: f32| move |(row, values): (usize, &mut [f32])| values.fill(if row % 2 == 0 { size } else { -size });
            x[1].chunks_mut(dim).enumerate().for_each(signed(24.0));
            x[2].chunks_mut(dim).enumerate().for_each(signed(40.0));
            x[3].fill(12.0);
        };
        let dq = dq_in(half::bf16::from_f32, &spec, &executor, true, extreme);
        // P is 1/200, dP is dim · 40 · 12 with the sign of the key, delta is 0; the scale is the inverse root of the head dim.
        let want = gain * dim as f32 * 40.0 * 12.0 * 24.0 / (dim as f32).sqrt();
        assert!(dq.iter().all(|x| (x - want).abs() <= 0.01 * want), "{score_mod}, head dim {dim}: {want} and {:?}", &dq[..4]);
    }
}

/// Each query has a scale of its own, so small gradients beside large ones keep their digits.
#[test]
pub(super) fn small_rows_beside_large_ones_keep_their_digits() {
    let Some(executor) = wgmma() else { return };
    for dim in DIMS {
        let scaled = |x: &mut [Vec<f32>; 4]| {
            x[3].chunks_mut(dim)
                .enumerate()
                .for_each(|(row, values)| values.iter_mut().for_each(|x| *x *= 10f32.powi((row % 40) as i32 - 30)));
        };
        let [floats, integers] = [false, true].map(|deterministic| dq_of(&executor, dim, deterministic, scaled));
        for (row, (a, b)) in floats.chunks(dim).zip(integers.chunks(dim)).enumerate() {
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let (all, apart) = (norm(&mut a.iter().copied()), norm(&mut a.iter().zip(b).map(|(a, b)| a - b)));
            assert!(apart <= 0.004 * all, "head dim {dim}, row {row}: {apart:e} of {all:e}");
        }
    }
}

/// A mask, a number of queries, and whether no query attends to a key.
type Masked = (&'static str, i64, fn(usize) -> bool);

/// Keys that no query attends to do not change the scales of dQ: the rest of dQ keeps its digits however large they are.
#[test]
pub(super) fn masked_out_keys_may_have_any_size() {
    let Some(executor) = wgmma() else { return };
    // A mask of keys, one that also differs by query and leaves out a whole KV block, and keys after the last query.
    let masks: [Masked; 4] = [
        ("k % 3 != 1", 200, |k| k % 3 == 1),
        ("k % 3 != 1 & k <= q", 200, |k| k % 3 == 1),
        ("(q + k) % 3 != 1 & (k < 128 | k >= 256)", 200, |k| (128..256).contains(&k)),
        ("causal", 140, |k| k >= 140),
    ];
    for dim in DIMS {
        for (mask, seq_q, is_out) in masks {
            let shape = Shape { dim_qk: dim as i64, dim_v: dim as i64, seq_kv: 300, seq_q, ..SHAPE };
            let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask.parse().unwrap());
            let loud = |x: &mut [Vec<f32>; 4]| {
                for (operand, size) in [(1, 1e18), (2, 1e12)] {
                    let rows = x[operand].chunks_mut(dim).enumerate();
                    rows.filter(|(row, _)| is_out(row % 300)).for_each(|(_, values)| values.iter_mut().for_each(|x| *x *= size));
                }
            };
            let [floats, integers] = [false, true].map(|deterministic| dq_in(half::bf16::from_f32, &spec, &executor, deterministic, loud));
            assert!(floats.iter().any(|x| x.abs() > 1e-3), "{mask}, head dim {dim}");
            let off = floats.iter().zip(&integers).map(|(a, b)| (a - b).abs() / (a.abs() + 1e-3)).fold(0.0, f32::max);
            assert!(off <= 0.02, "{mask}, head dim {dim}: {off}");
        }
    }
}

/// Returns the gradient of the sinks of a packed problem with many rows, in which each launch runs the threads in another order.
fn sink_gradient(executor: &dyn Executor, deterministic: bool) -> Vec<f32> {
    let mut random = Random::new(11);
    let shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 300, dim_qk: 64, dim_v: 64 };
    let spec = AttentionSpec::packed(DType::BF16, shape, Packed::new()).mask(Mask::causal()).with_sink();
    let tokens = 3 * 300;
    let mut draw = |n: i64| (0..n).map(|_| half::bf16::from_f32(random.normal() as f32)).collect::<Vec<_>>();
    let (q, k, v, d_o) = (draw(tokens * 256), draw(tokens * 128), draw(tokens * 128), draw(tokens * 256));
    let (boundaries, sinks) = ([0, 299, 300, 571], [0.5f32, -1.0, 2.0, 0.0]);
    let params = [Param::new(CU_SEQLENS, &boundaries[..]), Param::new(SINK, &sinks[..])];
    let (mut o, mut stats) = (vec![half::bf16::ZERO; q.len()], vec![0.0; (tokens * 4) as usize]);
    let problem = spec.clone().with_stats().validate().unwrap();
    executor.prepare(&problem).unwrap().forward(HostForward::new(&q, &k, &v, &mut o).stats(&mut stats).params(&params)).unwrap();
    let mut backward = spec.backward().wrt(SINK, DType::F32);
    backward.deterministic = deterministic;
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|like| vec![half::bf16::ZERO; like.len()]);
    let mut of_sinks = vec![f32::NAN; 4];
    let call = HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv));
    let call = call.params(&params).gradients([HostGradient::new(SINK, &mut of_sinks)]);
    executor.prepare_backward(&backward.validate().unwrap()).unwrap().backward(call).unwrap();
    of_sinks
}

#[test]
fn gradients_of_sinks_have_the_same_bits_in_every_call() {
    let Some(executor) = wgmma() else { return };
    let bits = |deterministic: bool| -> BTreeSet<Vec<u32>> {
        (0..12).map(|_| sink_gradient(&executor, deterministic).into_iter().map(f32::to_bits).collect()).collect()
    };
    assert_eq!(bits(true).len(), 1);
    // The test means something if another order of the sums has other bits.
    assert!(bits(false).len() > 1);
    let [ordered, any] = [true, false].map(|deterministic| sink_gradient(&executor, deterministic));
    assert!(ordered.iter().zip(&any).all(|(a, b)| (a - b).abs() <= 1e-4 * a.abs().max(0.1)), "{ordered:?} {any:?}");
}
