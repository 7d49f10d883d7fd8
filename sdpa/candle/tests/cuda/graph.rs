//! A decode step as a CUDA graph: captured once, launched for other sequences and lengths.
#![allow(unsafe_code)]

use crate::textbook::{CPU, Random, close};
use crate::{gpu, rounded, tolerance};
use candle_core::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::{DType, Device, Tensor};
use sdpa_candle::{Attention, Mask, PagedKvCache, PagedShape};

const SHAPE: PagedShape = PagedShape { layers: 2, pages: 24, page_size: 16, heads_kv: 2, dim_qk: 64, dim_v: 64 };

fn numbers(random: &mut Random, device: &Device, dims: &[usize]) -> Tensor {
    let x = rounded(random, dims, DType::BF16);
    if device.is_cpu() { x.to_dtype(DType::F32).unwrap() } else { x.to_device(device).unwrap() }
}

/// Runs a prefill and decode steps, and returns the outputs of each layer in each step.
fn results(device: &Device, dtype: DType, capture: bool) -> Vec<Tensor> {
    let mut random = Random::new(61);
    let mut cache = PagedKvCache::new(SHAPE, dtype, device).unwrap();
    let attention = Attention::new().mask(Mask::causal_ends());
    let ids = [cache.open(), cache.open(), cache.open()];
    let step = cache.step(&[(ids[0], 37), (ids[1], 5), (ids[2], 64)]).unwrap();
    for layer in 0..SHAPE.layers {
        let [q, k, v] = [[106, 8, 64], [106, 2, 64], [106, 2, 64]].map(|dims| numbers(&mut random, device, &dims));
        cache.attend(layer, &step, &attention, &q, &k, &v).unwrap();
    }
    let mut step = cache.decode_step(4, 256).unwrap();
    let zeros = |dims: [usize; 3]| Tensor::zeros(&dims, dtype, device).unwrap();
    let inputs: Vec<[Tensor; 3]> = (0..SHAPE.layers).map(|_| [zeros([4, 8, 64]), zeros([4, 2, 64]), zeros([4, 2, 64])]).collect();
    let outputs: Vec<Tensor> = (0..SHAPE.layers).map(|_| zeros([4, 8, 64])).collect();
    let (mut graph, mut all) = (None, Vec::new());
    for rows in [&[0usize, 1, 2][..], &[2, 0], &[1], &[1, 2, 0]] {
        let sequences: Vec<_> = rows.iter().map(|n| ids[*n]).collect();
        cache.refill(&mut step, &sequences).unwrap();
        for input in inputs.iter().flatten() {
            input.slice_set(&numbers(&mut random, device, input.dims()), 0, 0).unwrap();
        }
        let forward = || {
            for (layer, ([q, k, v], output)) in inputs.iter().zip(&outputs).enumerate() {
                output.slice_set(&cache.attend(layer, &step, &attention, q, k, v).unwrap(), 0, 0).unwrap();
            }
        };
        match (&graph, device.as_cuda_device()) {
            (None, Ok(cuda)) if capture => {
                let _uploads = cuda.enable_cuda_graph_htod_cache();
                let stream = cuda.cuda_stream();
                forward();
                stream.synchronize().unwrap();
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
                forward();
                let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
                let captured = stream.end_capture(flags).unwrap().expect("the capture has work");
                captured.launch().unwrap();
                graph = Some(captured);
            }
            (Some(graph), _) => graph.launch().unwrap(),
            (None, _) => forward(),
        }
        // Output rows after the last sequence are 0.
        all.extend(outputs.iter().map(|o| o.copy().unwrap().to_device(&CPU).unwrap().to_dtype(DType::F32).unwrap()));
    }
    all
}

#[test]
fn a_captured_decode_step_serves_other_sequences_and_lengths() {
    let Some(device) = gpu() else { return };
    // SAFETY: this test uses one stream of a context of its own, so no other stream uses its tensors.
    unsafe { device.as_cuda_device().unwrap().disable_event_tracking() };
    let want = results(&CPU, DType::F32, false);
    for capture in [false, true] {
        for (n, (got, want)) in results(&device, DType::BF16, capture).iter().zip(&want).enumerate() {
            close(&format!("captured: {capture}, result {n}"), got, want, tolerance(DType::BF16));
        }
    }
}
