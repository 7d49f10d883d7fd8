//! Row statistics of scores that are no numbers, which maxima pass over.

use super::emulation;
use conformance::msl::Emulated;
use metal_fallback::Kernels;
use sdpa::metal::MetalExecutor;
use sdpa::{AttentionSpec, DType, Executor, HostForward, Layout, Shape};

const SHAPE: Shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 300, dim_qk: 8, dim_v: 8 };
const ROWS: usize = 10;

/// Whether rows of such scores tell of them, and others do not.
pub(super) fn odd(executor: &MetalExecutor) -> Result<(), String> {
    let spec = AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd).with_row_max().with_sum_exp();
    let prepared = executor.prepare(&spec.validate().map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
    let wave = |len: usize| (0..len).map(|n| (n as f32 * 0.37).sin()).collect::<Vec<f32>>();
    let (mut q, k) = (wave(ROWS * 8), wave(300 * 8));
    let odd = [(2, f32::NAN), (7, f32::INFINITY)];
    odd.into_iter().for_each(|(row, x)| q[row * 8] = x);
    let (mut o, mut row_max, mut sum_exp) = (vec![0f32; ROWS * 8], [0f32; ROWS], [0f32; ROWS]);
    let call = HostForward::new(&q, &k, &k, &mut o).row_max(&mut row_max).sum_exp(&mut sum_exp);
    prepared.forward(call).map_err(|e| e.to_string())?;
    for row in 0..ROWS {
        let is_odd = odd.iter().any(|(at, _)| *at == row);
        let told = [row_max[row].is_nan() || row_max[row] == f32::INFINITY, sum_exp[row].is_nan()];
        if told != [is_odd; 2] {
            return Err(format!("row {row} has {} and {}", row_max[row], sum_exp[row]));
        }
    }
    Ok(())
}

#[test]
fn rows_with_scores_that_are_no_numbers_tell_of_them() {
    let Some(toolchain) = emulation("row statistics of NaN") else { return };
    for kernels in Kernels::ALL {
        odd(&Emulated::new(toolchain.clone(), 1).forced(kernels).executor()).unwrap_or_else(|e| panic!("{kernels:?}: {e}"));
    }
}
