//! Problems without a batch entry, a query or a key: results in device memory, in whichever direction.

use super::documents::{up, whole};
use super::executor;
use conformance::emulated::submit;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::{DeviceBackward, DeviceForward, DeviceSlice};
use sdpa::{AttentionSpec, DType, DeviceExecutor, Error, Executor, Layout, Shape};
use sdpa_driver::{Buffer, Element, Stream};

const NOWHERE: DeviceSlice = DeviceSlice { address: 0, bytes: 0 };

fn down<T: Element + Default>(stream: &Stream, buffer: &Buffer, elements: usize) -> Vec<T> {
    let mut numbers = vec![T::default(); elements];
    buffer.download(stream, 0, &mut numbers).unwrap();
    numbers
}

fn spec(dtype: DType, [batch, seq_q, seq_kv]: [i64; 3]) -> AttentionSpec {
    let shape = Shape { batch, heads_q: 2, heads_kv: 1, seq_q, seq_kv, dim_qk: 8, dim_v: 8 };
    AttentionSpec::dense(dtype, shape, Layout::Bhsd)
}

/// Memory of ones, one element more than is asked for, so that what is written past the end shows.
fn ones(executor: &CudaExecutor, stream: &Stream, elements: usize) -> Buffer {
    up(executor, stream, &vec![bf16::ONE; elements + 1])
}

#[test]
fn results_are_set_and_nothing_behind_them() {
    let Some(executor) = executor() else { return };
    let stream = executor.device().stream().unwrap();
    let spec = spec(DType::BF16, [2, 3, 0]).with_stats().with_row_max().with_sum_exp();
    let (rows, elements) = (2 * 2 * 3, 2 * 2 * 3 * 8);
    let [q, o] = [(); 2].map(|()| ones(&executor, &stream, elements));
    let statistics = [(); 3].map(|()| up(&executor, &stream, &vec![7f32; rows + 1]));
    let [stats, row_max, sum_exp] = statistics.each_ref().map(|buffer| Some(whole(buffer)));
    let call = DeviceForward::new(whole(&q), NOWHERE, NOWHERE, whole(&o)).stats(stats).row_max(row_max).sum_exp(sum_exp);
    let problem = spec.validate().unwrap();
    assert_eq!(executor.supports(&problem), Ok(()));
    submit(&*executor.prepare_device(&problem).unwrap(), &stream, &(&call).into()).unwrap();
    assert_eq!(down::<bf16>(&stream, &o, elements + 1), [vec![bf16::ZERO; elements], vec![bf16::ONE]].concat());
    for (buffer, value) in statistics.iter().zip([f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0]) {
        assert_eq!(down::<f32>(&stream, buffer, rows + 1), [vec![value; rows], vec![7.0]].concat());
    }
}

#[test]
fn gradients_of_keys_without_queries_are_zeros() {
    let Some(executor) = executor() else { return };
    let stream = executor.device().stream().unwrap();
    let problem = spec(DType::BF16, [2, 0, 3]).backward().validate().unwrap();
    let elements = 2 * 3 * 8;
    let [k, v, dk, dv] = [(); 4].map(|()| ones(&executor, &stream, elements));
    let call = DeviceBackward::new((NOWHERE, whole(&k), whole(&v)), (NOWHERE, NOWHERE), NOWHERE, (NOWHERE, whole(&dk), whole(&dv)));
    assert_eq!(executor.supports_backward(&problem), Ok(()));
    submit(&*executor.prepare_device_backward(&problem).unwrap(), &stream, &(&call).into()).unwrap();
    for buffer in [&dk, &dv] {
        assert_eq!(down::<bf16>(&stream, buffer, elements + 1), [vec![bf16::ZERO; elements], vec![bf16::ONE]].concat());
    }
}

/// No text is compiled, and who asks for one hears why.
#[test]
fn there_is_no_kernel() {
    let Some(executor) = executor() else { return };
    for (dtype, extents) in [(DType::BF16, [0, 3, 3]), (DType::F16, [2, 0, 3]), (DType::F32, [2, 3, 0])] {
        let spec = spec(dtype, extents);
        let (problem, gradient) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
        let refused = [executor.family(&problem).map(|_| ()).unwrap_err(), executor.backward_family(&gradient).map(|_| ()).unwrap_err()];
        for why in refused {
            assert!(why.to_string().contains("(batch, seq_q, seq_kv): got"), "{why}");
        }
        assert!(executor.attention(&problem).map_err(Error::from).unwrap_err().is_unsupported());
        executor.prepare(&problem).unwrap();
        executor.prepare_backward(&gradient).unwrap();
    }
}
