//! The differentiable ops and the gradient through stats on a GPU.

use crate::textbook::{CPU, Random, Textbook, close, keep, wide};
use crate::{gpu, on, rounded, same, tolerance};
use candle_core::{DType, Device, Result, Tensor, Var};
use sdpa_candle::{Attention, Documents, ExecutorName, Mask, ops};

type Op = fn(&[&Tensor]) -> Result<Tensor>;

/// Compares an op on the GPU with the same op on the CPU: value and gradients of a weighted sum.
fn same_as_on_the_cpu(what: &str, device: &Device, op: Op, arguments: &[Tensor], tracked: usize, within: f64) {
    let run = |device: &Device| {
        let variables: Vec<Var> = arguments[..tracked].iter().map(|x| on(device, x)).collect();
        let rest: Vec<Tensor> = arguments[tracked..].iter().map(|x| x.to_device(device).unwrap()).collect();
        let all: Vec<&Tensor> = variables.iter().map(|x| x.as_tensor()).chain(&rest).collect();
        let y = op(&all).unwrap();
        let weights = rounded(&mut Random::new(1), y.dims(), y.dtype()).to_device(device).unwrap();
        let gradients = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let gradients = variables.iter().map(|x| gradients.get(x).unwrap().to_device(&CPU).unwrap());
        [y.to_device(&CPU).unwrap()].into_iter().chain(gradients).collect::<Vec<_>>()
    };
    for (n, (got, want)) in run(device).iter().zip(run(&CPU)).enumerate() {
        close(&format!("{what}, result {n}"), got, &want, within);
    }
}

#[test]
fn ops_and_their_gradients_are_those_of_the_cpu() {
    let Some(device) = gpu() else { return };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let within = if dtype == DType::F32 { 1e-5 } else { tolerance(dtype) };
        let mut random = Random::new(2);
        let mut numbers = |dims: &[usize]| rounded(&mut random, dims, dtype);
        let x = numbers(&[2, 6, 7, 64]);
        let (weight, bias) = (numbers(&[64]), numbers(&[64]));
        // A table for the batch, and one for each entry with more rows than positions.
        for table in [&[9, 32][..], &[2, 9, 32]] {
            let angles = numbers(table).to_dtype(DType::F32).unwrap();
            let [cos, sin] = [angles.cos(), angles.sin()].map(|x| x.unwrap().to_dtype(dtype).unwrap());
            let arguments = [x.clone(), cos, sin];
            let all: [(&str, Op); 3] = [
                ("rope", |x| ops::rope(x[0], x[1], x[2])),
                ("rope_i", |x| ops::rope_i(x[0], x[1], x[2])),
                ("rope_thd", |x| ops::rope_thd(x[0], x[1], x[2])),
            ];
            for (name, op) in all {
                same_as_on_the_cpu(&format!("{name} {dtype:?} {table:?}"), &device, op, &arguments, 1, within);
            }
        }
        let turned: Op = |x| ops::rms_norm(&x[0].transpose(1, 2)?, x[1], 1e-5);
        same_as_on_the_cpu(&format!("rms_norm {dtype:?}"), &device, turned, &[x.clone(), weight.clone()], 2, within);
        let layer: Op = |x| ops::layer_norm(x[0], x[1], x[2], 1e-5);
        same_as_on_the_cpu(&format!("layer_norm {dtype:?}"), &device, layer, &[x.clone(), weight, bias], 3, within);
        same_as_on_the_cpu(&format!("softmax {dtype:?}"), &device, |x| ops::softmax_last_dim(x[0]), &[x], 1, within);
    }
}

/// Returns the gradients of a weighted sum of output and stats.
fn gradients(o: &Tensor, stats: &Tensor, share: f64, variables: &[&Tensor]) -> Vec<Tensor> {
    let weighted = |x: &Tensor, seed: u64| {
        let weights = Random::new(seed).tensor(x.dims()).to_dtype(x.dtype()).unwrap().to_device(x.device()).unwrap();
        (x * weights).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap()
    };
    let loss = ((weighted(o, 3) * share).unwrap() + weighted(stats, 4)).unwrap();
    let gradients = loss.backward().unwrap();
    variables.iter().map(|x| gradients.get(x).unwrap().to_device(&CPU).unwrap()).collect()
}

#[test]
fn stats_have_gradients_on_every_executor() {
    let Some(device) = gpu() else { return };
    for (dtype, dim, executor) in [
        (DType::BF16, 64, None),
        (DType::F16, 128, None),
        (DType::BF16, 128, Some(ExecutorName::CUDA)),
        (DType::BF16, 256, Some(ExecutorName::CUDA)),
        (DType::F32, 64, Some(ExecutorName::CUDA)),
    ] {
        for share in [0., 1.] {
            let mut random = Random::new(5);
            let (q, k) = (rounded(&mut random, &[2, 4, 70, dim], dtype), rounded(&mut random, &[2, 2, 61, dim], dtype));
            let (v, sink) = (rounded(&mut random, &[2, 2, 61, dim], dtype), random.tensor(&[4]));
            let [gq, gk, gv, gs] = [&q, &k, &v, &sink].map(|x| on(&device, x));
            let [wq, wk, wv, ws] = [&q, &k, &v, &sink].map(wide);
            let mut attention = Attention::new().mask(Mask::causal()).with_sink(&gs);
            if let Some(executor) = executor {
                attention = attention.executor(executor);
            }
            let (o, stats) = attention.forward_with_stats(&gq, &gk, &gv).unwrap();
            let kept = keep(70, 61, |q, k| k <= q);
            let textbook = Textbook { scale: 1. / (dim as f64).sqrt(), scores: &same, keep: &kept, sink: Some(&ws), dropped: None };
            let (want, lse) = textbook.attend(&wq, &wk, &wv).unwrap();
            let mine = gradients(&o, &stats, share, &[&gq, &gk, &gs]);
            let theirs = gradients(&want, &lse, share, &[&wq, &wk, &ws]);
            let within = if dtype == DType::F32 { 1e-3 } else { tolerance(dtype) };
            for (n, (got, want)) in mine.iter().zip(&theirs).enumerate() {
                close(&format!("{dtype:?} {dim} {executor:?} {share}: gradient {n}"), got, want, within);
            }
        }
    }
}

/// Rows that attend to no key have the sink as their stats; rows outside of all sequences have −∞.
#[test]
fn packed_stats_are_those_of_the_cpu() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(6);
    let (q, k) = (rounded(&mut random, &[90, 4, 64], DType::BF16), rounded(&mut random, &[100, 2, 64], DType::BF16));
    let sink = random.tensor(&[4]);
    let run = |device: &Device, dtype: DType| {
        let offsets = |of: &[u32]| Tensor::new(of, device).unwrap();
        // The second sequence has no keys; the third has more queries than keys.
        let documents = Documents::new(&offsets(&[1, 40, 50, 85]), 39).keys(&offsets(&[0, 64, 64, 90]), 64);
        let var = |x: &Tensor| on(device, &x.to_dtype(dtype).unwrap());
        let (q, k, sink) = (var(&q), var(&k), on(device, &sink));
        let attention = Attention::new().mask(Mask::causal_ends()).with_sink(&sink);
        let (_, stats) = attention.forward_packed_with_stats(&documents, &q, &k, &k).unwrap();
        let weights = Random::new(7).tensor(stats.dims()).to_device(device).unwrap();
        let gradients = (&stats * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let gradients = [&q, &k, &sink].map(|x| gradients.get(x).unwrap().to_device(&CPU).unwrap());
        (stats.to_device(&CPU).unwrap(), gradients)
    };
    let ((stats, got), (lse, want)) = (run(&device, DType::BF16), run(&CPU, DType::F32));
    close("stats", &stats, &lse, 1e-3);
    assert_eq!(stats.get(0).unwrap().to_vec1::<f32>().unwrap(), [f32::NEG_INFINITY; 4]);
    for (n, (got, want)) in got.iter().zip(&want).enumerate() {
        close(&format!("gradient {n}"), got, want, tolerance(DType::BF16));
    }
}
