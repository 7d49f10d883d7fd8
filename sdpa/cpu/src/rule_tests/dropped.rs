//! Masked-out pairs have no effect, whatever their operands and derivatives are.

use super::case::{Masked, Modified, Values, mask, score_mod};
use super::{Given, How, any, extents};
use crate::isa::Isa;
use crate::tests::{Random, Tensor, indices};
use sdpa_core::library::alibi_with;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::{AttentionSpec, DType, Layout, Mask, ScoreMod, Shape};

#[test]
fn infinite_derivatives_of_dropped_pairs_have_no_effect() {
    let random = &mut Random(23);
    for isa in Isa::all() {
        for (seq_q, seq_kv) in [(70, 33), (2, 40), (130, 150)] {
            // At key 0, the score and its derivative along `a` are infinite. On the diagonal, the derivative along the score is infinite.
            let stage = ScoreMod::new("steep", |s, at, p| {
                let far = (at.q - at.k).abs().to_f32();
                s / far + (s - s) / far + p.scalar("a", 1.0) * at.k.to_f32().log()
            });
            let far = |at: [usize; 4]| at[2].abs_diff(at[3]) as f64;
            let modified = Modified {
                stages: vec![stage.unwrap()],
                value: Box::new(move |s, at, v| s / far(at) + v.get("a", at) * (at[3] as f64).ln()),
                slope: Box::new(move |_, at, _| 1.0 / far(at)),
                along: vec![("a", Box::new(|_, at, _| (at[3] as f64).ln()))],
            };
            let rule = Mask::new("off the diagonal", |at, _| at.k.gt(0) & at.k.ne(at.q)).unwrap();
            let masked = Masked { masks: vec![rule], keep: Box::new(|at, _| at[3] > 0 && at[3] != at[2]) };
            let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q, seq_kv, dim_qk: 9, dim_v: 12 };
            any(&[isa], DType::F32, shape, (modified, masked), random, false);
        }
    }
}

#[test]
fn padding_may_hold_anything_and_is_zero() {
    let lengths: [[i32; 2]; 4] = [[50, 33], [0, 40], [61, 0], [7, 150]];
    for isa in Isa::all() {
        // Test with and without a score_mod, each with many rows and with few.
        for (modify, seq_q) in [(true, 70), (false, 70), (false, 2), (true, 2)] {
            let shape = Shape { batch: 4, heads_q: 4, heads_kv: 2, seq_q, seq_kv: 90, dim_qk: 16, dim_v: 24 };
            let mut spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::padding()).with_stats();
            spec.score_mods = if modify { vec![alibi_with()] } else { vec![] };
            let mut backward = spec.backward();
            if modify {
                backward = backward.wrt("slopes", DType::F32);
            }
            let problem = backward.validate().unwrap();
            let random = &mut Random(4);
            let mut values = Values::random(problem.forward(), random);
            for (name, _, value) in &mut values.0 {
                let place = usize::from(*name == SEQ_LEN_KV);
                if name == SEQ_LEN_Q || name == SEQ_LEN_KV {
                    *value = super::case::Value::I32(lengths.iter().map(|len| len[place]).collect());
                }
            }
            let params = values.bound();
            let forward = problem.forward();
            let [q, k, v, d_o] = [forward.q(), forward.k(), forward.v(), problem.d_o()].map(|s| Tensor::random(s, DType::F32, random));
            let mut given = Given { q, k, v, d_o };
            let how = How { isa, threads: 2 };
            let run = |given: &Given, spoil: f32| {
                let (mut o, stats) = how.forward::<f32>(&problem, given, &params, 0.3);
                let bits: Vec<u32> = indices(&o.spec).map(|index| (o.get(index) as f32).to_bits()).collect();
                for index in indices(&o.spec).filter(|index| index[2] as i32 >= lengths[index[0]][0]) {
                    assert_eq!(o.get(index), 0.0, "{how:?} {shape:?}");
                    o.set(index, spoil);
                }
                let gradients = how.backward::<f32>(&problem, given, (&o, &stats), &params, 0.3);
                let of_gradients: Vec<u64> = gradients.into_iter().flatten().map(f64::to_bits).collect();
                (bits, stats.into_iter().map(f32::to_bits).collect::<Vec<u32>>(), of_gradients)
            };
            let clean = run(&given, 0.0);
            for (tensors, place) in [([&mut given.q, &mut given.d_o], 0), ([&mut given.k, &mut given.v], 1)] {
                for tensor in tensors {
                    let spec = tensor.spec;
                    let past = |index: &[usize; 4]| index[2] as i32 >= lengths[index[0]][place];
                    indices(&spec).filter(past).for_each(|index| tensor.set(index, f32::NAN));
                }
            }
            assert!(clean == run(&given, f32::NAN), "{how:?} {shape:?} {modify}");
        }
    }
}

#[test]
fn keys_that_a_mask_drops_everywhere_may_hold_anything() {
    // A mask that depends on keys alone excludes the same keys for every row.
    let random = &mut Random(31);
    for isa in Isa::all() {
        for n in [16, 18, 5] {
            let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 65, seq_kv: 77, dim_qk: 8, dim_v: 8 };
            let rule = Mask::new("even", |at, _| (at.k % 2).eq(0)).unwrap();
            // The last argument makes some key NaN or infinite; the oracle decides which rows attend to it.
            for _ in 0..4 {
                let masked = Masked { masks: vec![rule.clone()], keep: Box::new(|at, _| at[3] % 2 == 0) };
                any(&[isa], DType::F32, shape, (score_mod(n, 2), masked), random, true);
            }
            any(&[isa], DType::F32, shape, (score_mod(n, 2), mask(18, extents(&shape))), random, true);
        }
    }
}
