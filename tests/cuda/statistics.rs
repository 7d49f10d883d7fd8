//! Rows that are no numbers, in what is told of them.

use super::executor;
use super::mma;
use half::f16;
use sdpa::{AttentionSpec, DType, Executor, HostForward, Layout, Shape};

const DIM: usize = 64;

/// Of a row of NaN everything is NaN, of the one beside it nothing: of a whole tile, and of parts of many keys.
#[test]
fn rows_of_nan_are_told_of_as_such() {
    let (Some(tiles), Some(strided)) = (executor(), mma::executor()) else { return };
    for executor in [&tiles, &strided] {
        for keys in [70, 1700] {
            let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 1, seq_kv: keys, dim_qk: DIM as i64, dim_v: DIM as i64 };
            let spec = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).with_stats().with_row_max().with_sum_exp();
            let mut q = [f16::ONE; 2 * DIM];
            q[..DIM].fill(f16::NAN);
            let rows = vec![f16::ONE; keys as usize * DIM];
            let mut o = [f16::ZERO; 2 * DIM];
            let [mut stats, mut row_max, mut sum_exp] = [[0f32; 2]; 3];
            let call =
                HostForward::new(&q, &rows, &rows, &mut o).stats(&mut stats).row_max(&mut row_max).sum_exp(&mut sum_exp).attn_scale(0.125);
            executor.prepare(&spec.validate().unwrap()).unwrap().forward(call).unwrap();
            assert!(o[..DIM].iter().all(|o| o.is_nan()) && o[DIM..] == [f16::ONE; DIM], "{keys} keys: {o:?}");
            assert!([stats, row_max, sum_exp].iter().all(|of| of[0].is_nan()), "{keys} keys: {stats:?} {row_max:?} {sum_exp:?}");
            let near = |got: f32, want: f32| (got - want).abs() < 1e-3 * want;
            let sum = keys as f32;
            assert!(near(row_max[1], 8.0) && near(sum_exp[1], sum) && near(stats[1], 8.0 + sum.ln()), "{stats:?} {row_max:?} {sum_exp:?}");
        }
    }
}
