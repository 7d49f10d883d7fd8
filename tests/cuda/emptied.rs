//! Rows that a score_mod leaves no weight: no mask says so, and no list of blocks.

use super::documents::{up, whole};
use super::executor;
use conformance::emulated::{faulty, submit};
use conformance::random::Random;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::{DeviceBackward, DeviceForward};
use sdpa::{AttentionSpec, DType, DeviceExecutor, Layout, Shape};

const QUERIES: usize = 140;
const KEYS: usize = 130;
const DIM: usize = 64;
/// Queries from the first on whose scores are all minus infinity.
const EMPTIED: usize = 70;

/// Output, and gradients of queries, keys and values.
fn results(executor: &CudaExecutor) -> [Vec<bf16>; 4] {
    let (queries, keys, dim) = (QUERIES as i64, KEYS as i64, DIM as i64);
    let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: queries, seq_kv: keys, dim_qk: dim, dim_v: dim };
    let empties = format!("select(q < {EMPTIED}, log(0.0), score)").parse().unwrap();
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).score_mod(empties).with_stats();
    let stream = executor.device().stream().unwrap();
    let mut random = Random::new(5);
    let mut drawn = |rows: usize| up(executor, &stream, &(0..rows * DIM).map(|_| bf16::from_f64(random.normal())).collect::<Vec<_>>());
    let [q, k, v, d_o] = [QUERIES, KEYS, KEYS, QUERIES].map(&mut drawn);
    let [o, dq, dk, dv] = [QUERIES, QUERIES, KEYS, KEYS].map(|rows| up(executor, &stream, &vec![bf16::NAN; rows * DIM]));
    let stats = up(executor, &stream, &[f32::NAN; QUERIES]);
    let forward = DeviceForward::new(whole(&q), whole(&k), whole(&v), whole(&o)).stats(whole(&stats));
    let backward = DeviceBackward::new(
        (whole(&q), whole(&k), whole(&v)),
        (whole(&o), whole(&stats)),
        whole(&d_o),
        (whole(&dq), whole(&dk), whole(&dv)),
    );
    let ready = executor.prepare_device(&spec.validate().unwrap()).unwrap();
    submit(&*ready, &stream, &(&forward).into()).unwrap();
    let ready = executor.prepare_device_backward(&spec.backward().validate().unwrap()).unwrap();
    submit(&*ready, &stream, &(&backward).into()).unwrap();
    [(&o, QUERIES), (&dq, QUERIES), (&dk, KEYS), (&dv, KEYS)].map(|(buffer, rows)| {
        let mut numbers = vec![bf16::ZERO; rows * DIM];
        buffer.download(&stream, 0, &mut numbers).unwrap();
        numbers
    })
}

#[test]
fn rows_that_a_score_mod_empties_are_zero_and_change_no_gradient() {
    let Some(right) = executor() else { return };
    let [o, dq, dk, dv] = results(&right);
    for of_queries in [&o, &dq] {
        assert!(of_queries[..EMPTIED * DIM].iter().all(|x| *x == bf16::ZERO));
        assert!(of_queries[EMPTIED * DIM..].iter().all(|x| x.is_finite()) && of_queries[EMPTIED * DIM..].iter().any(|x| *x != bf16::ZERO));
    }
    for of_keys in [&dk, &dv] {
        assert!(of_keys.iter().all(|x| x.is_finite()) && of_keys.iter().any(|x| *x != bf16::ZERO));
    }
    // Without an infinity of the other sign the weights of such rows are no numbers, and gradients of values are made of them.
    let [.., spoiled] = faulty(["any ? lse_of_stat(stat) : INFINITE", "stat * LOG2_E"], || results(&executor().unwrap()));
    assert!(spoiled.iter().any(|x| x.is_nan()));
}
