//! Attention in candle on an NVIDIA GPU, on cuDNN and on native CUDA kernels, against candle's own autograd over the textbook formula in f64 on the CPU.
//! Without a GPU the tests print that they are skipped; `SDPA_REQUIRE=candle-cuda` makes that a failure.

mod gradients;
mod graph;
mod ranks;
mod serving;
#[path = "../attention/textbook.rs"]
#[allow(dead_code)]
mod textbook;

use candle_core::{DType, Device, Result, Tensor, Var};
use sdpa_candle::expr::{Axis, BF16};
use sdpa_candle::{Attention, Documents, ExecutorName, Mask, flash_attn_varlen, flash_attn_windowed, library};
use textbook::{CPU, Random, Textbook, close, keep, wide};

/// A device with its own stream, on which candle orders the work of different threads.
fn gpu() -> Option<Device> {
    match Device::new_cuda_with_stream(0) {
        Ok(device) => Some(device),
        Err(why) => {
            let required = std::env::var("SDPA_REQUIRE").is_ok_and(|names| names.split(',').any(|name| name == "candle-cuda"));
            assert!(!required, "candle-cuda: {why}");
            println!("SKIP candle-cuda: {why}");
            None
        }
    }
}

/// Rounds to `dtype`, so that both sides have equal numbers.
fn rounded(random: &mut Random, dims: &[usize], dtype: DType) -> Tensor {
    random.tensor(dims).to_dtype(dtype).unwrap()
}

fn on(device: &Device, tensor: &Tensor) -> Var {
    Var::from_tensor(&tensor.to_device(device).unwrap()).unwrap()
}

fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F16 { 4e-3 } else { 3e-2 }
}

/// Compares the output on the GPU, and the gradients of a weighted sum of it, with the textbook's.
fn compare(what: &str, (got, want): (&Tensor, &Tensor), random: &mut Random, pairs: &[(&str, &Tensor, &Tensor)]) {
    let within = tolerance(got.dtype());
    close(&format!("{what}: o"), &got.to_device(&CPU).unwrap(), want, within);
    let weights = rounded(random, got.dims(), got.dtype());
    let gradients = |o: &Tensor| {
        let weights = weights.to_dtype(o.dtype()).unwrap().to_device(o.device()).unwrap();
        (o * weights).unwrap().sum_all().unwrap().backward().unwrap()
    };
    let (mine, theirs) = (gradients(got), gradients(want));
    for (name, a, b) in pairs {
        let a = mine.get(a).unwrap_or_else(|| panic!("{what}: {name} has no gradient"));
        close(&format!("{what}: d{name}"), &a.to_device(&CPU).unwrap(), theirs.get(b).unwrap(), within);
    }
}

fn same(scores: &Tensor) -> Result<Tensor> {
    Ok(scores.clone())
}

fn capped(scores: &Tensor) -> Result<Tensor> {
    (scores / 2.)?.tanh()? * 2.
}

fn plain<'a>(dim: usize, keep: &'a Tensor) -> Textbook<'a> {
    Textbook { scale: 1. / (dim as f64).sqrt(), scores: &same, keep, sink: None, dropped: None }
}

#[test]
fn grouped_heads_a_softcap_and_a_window_about_the_end() {
    let Some(device) = gpu() else { return };
    for (dtype, dim) in [(DType::BF16, 64), (DType::F16, 72), (DType::BF16, 128)] {
        let mut random = Random::new(1);
        let (q, k, v) = (
            rounded(&mut random, &[2, 6, 131, dim], dtype),
            rounded(&mut random, &[2, 2, 203, dim], dtype),
            rounded(&mut random, &[2, 2, 203, dim], dtype),
        );
        let attention = Attention::new().score_mod(library::softcap(2.)).mask(Mask::causal_bottom_right());
        let [gq, gk, gv] = [&q, &k, &v].map(|x| on(&device, x));
        let (o, stats) = attention.forward_with_stats(&gq, &gk, &gv).unwrap();
        let [wq, wk, wv] = [&q, &k, &v].map(wide);
        let kept = keep(131, 203, |q, k| k <= q + 72);
        let (want, lse) = Textbook { scores: &capped, ..plain(dim, &kept) }.attend(&wq, &wk, &wv).unwrap();
        close("stats", &stats.to_device(&CPU).unwrap(), &lse, 1e-3);
        compare("grouped", (&o, &want), &mut random, &[("q", &gq, &wq), ("k", &gk, &wk), ("v", &gv, &wv)]);
    }
}

#[test]
fn a_packed_projection_is_read_through_three_views() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(2);
    // The shape is (batch, seq, 3, heads, dim), with an unused row before and after.
    let qkv = rounded(&mut random, &[2, 99, 3, 4, 64], DType::BF16);
    let view = |x: &Tensor, n: usize| x.narrow(1, 1, 97).unwrap().narrow(2, n, 1).unwrap().squeeze(2).unwrap().transpose(1, 2).unwrap();
    let (here, there) = (on(&device, &qkv), wide(&qkv));
    let (q, k, v) = (view(&here, 0), view(&here, 1), view(&here, 2));
    assert!(!q.is_contiguous() && k.layout().start_offset() > 0);
    let o = Attention::new().mask(Mask::causal()).forward(&q, &k, &v).unwrap();
    assert!(o.transpose(1, 2).unwrap().is_contiguous());
    let kept = keep(97, 97, |q, k| k <= q);
    let (want, _) = plain(64, &kept).attend(&view(&there, 0), &view(&there, 1).contiguous().unwrap(), &view(&there, 2)).unwrap();
    compare("views", (&o, &want), &mut random, &[("qkv", &here, &there)]);
}

#[test]
fn operands_in_strides_that_nobody_reads_are_copied() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(3);
    let (q, k) = (rounded(&mut random, &[1, 2, 64, 67], DType::BF16), rounded(&mut random, &[1, 2, 91, 64], DType::BF16));
    let [gq, gk] = [&q, &k].map(|x| on(&device, x));
    let [wq, wk] = [&q, &k].map(wide);
    let o = Attention::new().forward(&gq.transpose(2, 3).unwrap(), &gk, &gk).unwrap();
    let kept = keep(67, 91, |_, _| true);
    let (want, _) = plain(64, &kept).attend(&wq.transpose(2, 3).unwrap().contiguous().unwrap(), &wk, &wk).unwrap();
    compare("copied", (&o, &want), &mut random, &[("q", &gq, &wq), ("k", &gk, &wk)]);
}

#[test]
fn a_bias_and_sinks_have_their_gradients() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(4);
    let (q, k) = (rounded(&mut random, &[2, 4, 130, 64], DType::BF16), rounded(&mut random, &[2, 4, 130, 64], DType::BF16));
    // cuDNN sums the gradient of a bias in 16 bits only, so the bias is bf16.
    let (bias, sink) = (rounded(&mut random, &[4, 130, 130], DType::BF16), random.tensor(&[4]));
    let kept = keep(130, 130, |q, k| k <= q);
    let [gq, gk, gb, gs] = [&q, &k, &bias, &sink].map(|x| on(&device, x));
    let [wq, wk, wb, ws] = [&q, &k, &bias, &sink].map(wide);
    let causal = Attention::new().mask(Mask::causal());

    let biased = causal.clone().score_mod(library::bias([Axis::Head, Axis::Q, Axis::K], BF16)).param("bias", &gb);
    let o = biased.forward(&gq, &gk, &gk).unwrap();
    let add = |scores: &Tensor| scores.broadcast_add(&wb.unsqueeze(0)?);
    let (want, _) = Textbook { scores: &add, ..plain(64, &kept) }.attend(&wq, &wk, &wk).unwrap();
    compare("bias", (&o, &want), &mut random, &[("q", &gq, &wq), ("k", &gk, &wk), ("bias", &gb, &wb)]);

    let o = causal.with_sink(&gs).forward(&gq, &gk, &gk).unwrap();
    let (want, _) = Textbook { sink: Some(&ws), ..plain(64, &kept) }.attend(&wq, &wk, &wk).unwrap();
    compare("sink", (&o, &want), &mut random, &[("q", &gq, &wq), ("k", &gk, &wk), ("sink", &gs, &ws)]);
}

#[test]
fn lengths_drop_what_is_behind_them() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(5);
    let (q, k) = (rounded(&mut random, &[2, 2, 70, 64], DType::F16), rounded(&mut random, &[2, 2, 77, 64], DType::F16));
    let [gq, gk] = [&q, &k].map(|x| on(&device, x));
    let [wq, wk] = [&q, &k].map(wide);
    let lengths = |of: [u32; 2]| Tensor::new(&of, &device).unwrap();
    let attention = Attention::new().mask(Mask::padding()).param("seq_len_q", &lengths([70, 33])).param("seq_len_kv", &lengths([44, 77]));
    let o = attention.forward(&gq, &gk, &gk).unwrap();
    let entry = |rows: i64, keys: i64| keep(70, 77, |q, k| q < rows && k < keys);
    let kept = Tensor::stack(&[entry(70, 44), entry(33, 77)], 0).unwrap().unsqueeze(1).unwrap();
    let (want, _) = plain(64, &kept).attend(&wq, &wk, &wk).unwrap();
    compare("lengths", (&o, &want), &mut random, &[("q", &gq, &wq), ("k", &gk, &wk)]);
}

#[test]
fn documents_one_behind_the_other() {
    let Some(device) = gpu() else { return };
    let of: [u32; 5] = [0, 70, 71, 71, 200];
    for dtype in [DType::F16, DType::BF16] {
        let mut random = Random::new(6);
        let [q, k, v] = [6, 2, 2].map(|heads| rounded(&mut random, &[200, heads, 64], dtype));
        let [gq, gk, gv] = [&q, &k, &v].map(|x| on(&device, x));
        let [wq, wk, wv] = [&q, &k, &v].map(wide);
        let boundaries = Tensor::new(&of, &device).unwrap();
        let documents = Documents::new(&boundaries, 129);
        let scale = 1. / 8f32;
        let outputs = [
            Attention::new().mask(Mask::causal()).forward_packed(&documents, &gq, &gk, &gv).unwrap(),
            flash_attn_varlen(&gq, &gk, &gv, &boundaries, &boundaries, 129, 129, scale, true).unwrap(),
        ];
        // The textbook handles packed sequences as a mask over one row.
        let document = |n: i64| of.iter().filter(|&&begin| i64::from(begin) <= n).count();
        let kept = keep(200, 200, |q, k| k <= q && document(q) == document(k));
        let by_head = |x: &Tensor| x.transpose(0, 1).unwrap().unsqueeze(0).unwrap().contiguous().unwrap();
        let (want, _) = plain(64, &kept).attend(&by_head(&wq), &by_head(&wk), &by_head(&wv)).unwrap();
        let want = want.squeeze(0).unwrap().transpose(0, 1).unwrap();
        for o in &outputs {
            compare("documents", (o, &want), &mut random, &[("q", &gq, &wq), ("k", &gk, &wk), ("v", &gv, &wv)]);
        }
    }
}

#[test]
fn a_function_of_candle_flash_attn() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(7);
    // The layout is (batch, seq, heads, dim).
    let (q, k) = (rounded(&mut random, &[2, 150, 4, 64], DType::BF16), rounded(&mut random, &[2, 150, 2, 64], DType::BF16));
    let [gq, gk] = [&q, &k].map(|x| on(&device, x));
    let [wq, wk] = [&q, &k].map(wide);
    let o = flash_attn_windowed(&gq, &gk, &gk, 1. / 8., Some(40), Some(0)).unwrap();
    let kept = keep(150, 150, |q, k| k <= q && k >= q - 40);
    let turn = |x: &Tensor| x.transpose(1, 2).unwrap().contiguous().unwrap();
    let (want, _) = plain(64, &kept).attend(&turn(&wq), &turn(&wk), &turn(&wk)).unwrap();
    compare("window", (&o, &want.transpose(1, 2).unwrap()), &mut random, &[("q", &gq, &wq), ("k", &gk, &wk)]);
}

#[test]
fn threads_have_streams_of_their_own() {
    let Some(_) = gpu() else { return };
    std::thread::scope(|scope| {
        for n in 0..4 {
            scope.spawn(move || {
                let device = Device::new_cuda_with_stream(0).unwrap();
                let mut random = Random::new(20 + n);
                let q = rounded(&mut random, &[1, 2, 257, 64], DType::BF16);
                let (here, there) = (on(&device, &q), wide(&q));
                let kept = keep(257, 257, |q, k| k <= q);
                let (want, _) = plain(64, &kept).attend(&there, &there, &there).unwrap();
                for _ in 0..20 {
                    let o = Attention::new().mask(Mask::causal()).forward(&here, &here, &here).unwrap();
                    compare(&format!("thread {n}"), (&o, &want), &mut random, &[("q", &here, &there)]);
                }
            });
        }
    });
}

#[test]
fn what_one_executor_does_not_take_the_other_does_and_a_name_is_kept() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(8);
    let q = random.tensor(&[1, 2, 30, 16]);
    let (here, there) = (on(&device, &q), wide(&q));
    let causal = Attention::new().mask(Mask::causal());
    let kept = keep(30, 30, |q, k| k <= q);
    let (want, _) = plain(16, &kept).attend(&there, &there, &there).unwrap();
    // Only native CUDA kernels support f32.
    let why = causal.clone().executor(ExecutorName::CUDNN).forward(&here, &here, &here).unwrap_err().to_string();
    assert!(why.contains("cudnn") && why.contains("f32"), "{why}");
    for attention in [causal.clone(), causal.clone().executor(ExecutorName::CUDA), causal.executor(ExecutorName::CPU)] {
        let o = attention.forward(&here, &here, &here).unwrap();
        assert!(o.device().is_cuda());
        compare(&format!("f32 {attention:?}"), (&o, &want), &mut random, &[("q", &here, &there)]);
    }
    let elsewhere = Attention::new().forward(&here, &q, &q).unwrap_err().to_string();
    assert!(elsewhere.contains('k') && elsewhere.contains("device"), "{elsewhere}");
}

/// A mask that is not a band, on each executor by name and on the automatic selection; and learned ALiBi slopes, whose gradient cuDNN does not compute.
#[test]
fn rules_of_places_and_learned_slopes_train() {
    let Some(device) = gpu() else { return };
    let mut random = Random::new(9);
    let q = rounded(&mut random, &[1, 2, 300, 64], DType::BF16);
    let (here, there) = (on(&device, &q), wide(&q));
    let rule = Attention::new().mask("dilated:4 & causal".parse().unwrap());
    let kept = keep(300, 300, |q, k| k <= q && (q - k) % 4 == 0);
    let (want, _) = plain(64, &kept).attend(&there, &there, &there).unwrap();
    for attention in [rule.clone(), rule.clone().executor(ExecutorName::CUDA), rule.executor(ExecutorName::CUDNN)] {
        let o = attention.forward(&here, &here, &here).unwrap();
        compare(&format!("rule {attention:?}"), (&o, &want), &mut random, &[("q", &here, &there)]);
    }
    let slopes = on(&device, &Tensor::new(&[0.5f32, 0.25], &CPU).unwrap());
    let o = Attention::new().score_mod(library::alibi_with()).param("slopes", &slopes).forward(&here, &here, &here).unwrap();
    let gradients = o.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let slope = gradients.get(&slopes).unwrap().to_device(&CPU).unwrap().to_vec1::<f32>().unwrap();
    assert!(slope.iter().all(|x| x.is_finite()) && slope.iter().any(|x| *x != 0.0), "{slope:?}");
}
