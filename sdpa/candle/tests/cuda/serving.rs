//! Paged attention and KV caches on a GPU, against the same calls on the CPU in f32.

use crate::textbook::{CPU, Random, close};
use crate::{gpu, rounded, tolerance};
use candle_core::{DType, Device, Tensor};
use sdpa_candle::{Attention, ExecutorName, KvCache, Mask, PagedKvCache, PagedShape, Pages, flash_attn_varlen_paged_windowed, library};

const PAGE: usize = 32;
const LENGTHS: [u32; 4] = [70, 130, 33, 64];
const OFFSETS: [u32; 5] = [0, 1, 48, 48, 112];
/// Entries after the last key of a sequence are not read.
const TABLE: [[u32; 5]; 4] = [[3, 1, 10, 77, 77], [8, 0, 5, 12, 15], [2, 13, 99, 99, 99], [7, 4, 6, 6, 6]];

fn on(device: &Device, x: &Tensor) -> Tensor {
    // The CPU computes in f32.
    if device.is_cpu() && x.dtype().is_float() { x.to_dtype(DType::F32).unwrap() } else { x.to_device(device).unwrap() }
}

fn within(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1e-4 } else { tolerance(dtype) }
}

fn pages(device: &Device) -> Pages {
    let of = |x: &[u32]| Tensor::new(x, device).unwrap();
    Pages::new(&Tensor::new(&TABLE, device).unwrap(), &of(&LENGTHS)).queries(&of(&OFFSETS), 64)
}

#[test]
fn pages_are_read_as_on_the_cpu() {
    let Some(device) = gpu() else { return };
    for (dtype, dim, executor) in [
        (DType::BF16, 64, None),
        (DType::F16, 128, None),
        (DType::BF16, 128, Some(ExecutorName::CUDA)),
        (DType::F32, 64, Some(ExecutorName::CUDA)),
    ] {
        let mut random = Random::new(51);
        let q = rounded(&mut random, &[112, 8, dim], dtype);
        // The pools are two layers of one allocation.
        let pools = rounded(&mut random, &[2, 16, PAGE, 2, dim], dtype);
        let sink = random.tensor(&[8]);
        let run = |device: &Device| {
            let (q, pools, sink) = (on(device, &q), on(device, &pools), on(device, &sink));
            let (k, v) = (pools.get(0).unwrap(), pools.get(1).unwrap());
            let mut attention = Attention::new().mask(Mask::causal_ends());
            if let Some(executor) = executor.filter(|_| device.is_cuda()) {
                attention = attention.executor(executor).score_mod(library::softcap(5.)).with_sink(&sink);
            } else if executor.is_some() {
                attention = attention.score_mod(library::softcap(5.)).with_sink(&sink);
            }
            let (o, stats) = attention.forward_paged_with_stats(&pages(device), &q, &k, &v).unwrap();
            [o.to_device(&CPU).unwrap(), stats.to_device(&CPU).unwrap()]
        };
        for (n, (got, want)) in run(&device).iter().zip(run(&CPU)).enumerate() {
            close(&format!("{dtype:?} {dim} {executor:?}: result {n}"), got, &want, within(dtype));
        }
    }
}

#[test]
fn the_function_of_candle_flash_attn_reads_pages() {
    let Some(device) = gpu() else { return };
    let dtype = DType::BF16;
    let mut random = Random::new(52);
    let (q, k, v) = (
        rounded(&mut random, &[112, 8, 64], dtype),
        rounded(&mut random, &[16, PAGE, 2, 64], dtype),
        rounded(&mut random, &[16, PAGE, 2, 64], dtype),
    );
    let ranges = Tensor::new(&[[[0i64, 0], [0, 0]], [[90, 110], [0, 2]], [[0, 3], [0, 0]], [[3, 3], [10, 40]]], &CPU).unwrap();
    for (left, right, softcap, with_ranges) in
        [(None, Some(0), None, false), (Some(20), Some(0), Some(5.), false), (None, Some(0), None, true), (Some(9), Some(2), None, true)]
    {
        let run = |device: &Device| {
            let (q, k, v) = (on(device, &q), on(device, &k), on(device, &v));
            let of = |x: &[u32]| Tensor::new(x, device).unwrap();
            let ranges = with_ranges.then(|| ranges.to_dtype(DType::I32).unwrap().to_device(device).unwrap());
            let o = flash_attn_varlen_paged_windowed(
                &q,
                &k,
                &v,
                &of(&OFFSETS),
                &of(&[0, 70, 200, 233, 297]),
                &Tensor::new(&TABLE, device).unwrap(),
                ranges.as_ref(),
                64,
                130,
                0.125,
                left,
                right,
                PAGE,
                softcap,
            );
            o.unwrap().to_device(&CPU).unwrap()
        };
        close(&format!("{left:?} {right:?} {softcap:?} {with_ranges}"), &run(&device), &run(&CPU), within(dtype));
    }
}

#[test]
fn caches_return_what_they_return_on_the_cpu() {
    let Some(device) = gpu() else { return };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let run = |device: &Device| {
            let mut random = Random::new(53);
            let mut tensor = |dims: &[usize]| on(device, &rounded(&mut random, dims, dtype));
            let cache_type = if device.is_cpu() { DType::F32 } else { dtype };
            let shape = PagedShape { layers: 2, pages: 24, page_size: 16, heads_kv: 2, dim_qk: 64, dim_v: 64 };
            let mut cache = PagedKvCache::new(shape, cache_type, device).unwrap();
            let attention = Attention::new().mask(Mask::causal_ends());
            let mut results = Vec::new();
            let mut step = |cache: &mut PagedKvCache, new: &[_]| {
                let step = cache.step(new).unwrap();
                for layer in 0..2 {
                    let (q, k, v) = (tensor(&[step.tokens(), 8, 64]), tensor(&[step.tokens(), 2, 64]), tensor(&[step.tokens(), 2, 64]));
                    results.push(cache.attend(layer, &step, &attention, &q, &k, &v).unwrap().to_device(&CPU).unwrap());
                }
            };
            let (a, b, c) = (cache.open(), cache.open(), cache.open());
            step(&mut cache, &[(a, 37)]);
            step(&mut cache, &[(a, 1), (b, 60)]);
            step(&mut cache, &[(a, 1), (b, 1), (c, 5)]);
            cache.close(a).unwrap();
            step(&mut cache, &[(b, 1), (c, 90)]);
            step(&mut cache, &[(c, 1), (b, 1)]);
            let mut contiguous = KvCache::new(80);
            for tokens in [50, 1, 20] {
                let (q, k) = (tensor(&[2, 8, tokens, 64]), tensor(&[2, 2, tokens, 64]));
                let (keys, values) = contiguous.append(&k, &k).unwrap();
                let o = Attention::new().mask(Mask::causal_bottom_right()).forward(&q, &keys, &values).unwrap();
                results.push(o.to_device(&CPU).unwrap());
            }
            results
        };
        for (n, (got, want)) in run(&device).iter().zip(run(&CPU)).enumerate() {
            close(&format!("{dtype:?}: result {n}"), got, &want, within(dtype));
        }
    }
}

#[test]
fn tensors_that_require_a_gradient_are_refused_before_anything_runs() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(54);
    let (q, k) = (crate::on(&device, &random.tensor(&[112, 8, 64])), on(&device, &random.tensor(&[16, PAGE, 2, 64])));
    let error = Attention::new().forward_paged(&pages(&device), &q, &k, &k).unwrap_err().to_string();
    assert!(error.contains("q: got a tensor that requires a gradient"), "{error}");
}
