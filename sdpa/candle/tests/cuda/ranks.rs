//! Ranks as threads, one for each GPU of the machine up to four, over NCCL. A machine with one GPU runs one rank and prints that it skips the
//! others; `SDPA_REQUIRE=candle-cuda-ranks` makes that a failure.

use crate::textbook::{CPU, Random, Textbook, close, keep, wide};
use crate::{gpu, on, rounded, same, tolerance};
use candle_core::{DType, Device, Tensor, Var};
use sdpa_candle::distributed::{Communicator, Nccl, ParallelError, Partials, Rank, Sharding, Strategy};
use sdpa_candle::{Attention, ContextParallel, Mask, dispatcher, library};
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(120);

fn skip(why: &str) {
    let required = std::env::var("SDPA_REQUIRE").is_ok_and(|names| names.split(',').any(|name| name == "candle-cuda-ranks"));
    assert!(!required, "candle-cuda-ranks: {why}");
    println!("SKIP candle-cuda-ranks: {why}");
}

/// Returns the number of GPUs and NCCL, after a line for what is skipped.
fn gpus() -> Option<(usize, Arc<Nccl>)> {
    gpu()?;
    // The problems have four heads, which head exchange divides over the ranks.
    let all = (0..4).take_while(|n| Device::new_cuda_with_stream(*n).is_ok()).count();
    if all < 2 {
        skip("one GPU, and several ranks need two");
    }
    let nccl = Nccl::load(None).map_err(|why| skip(&why.to_string())).ok()?;
    Some((all, Arc::new(nccl)))
}

/// Runs a function on each rank, and returns the results in the order of the ranks. Without a GPU, there are none.
fn on_ranks<T: Send>(deadline: Duration, partials: Partials, run: impl Fn(ContextParallel, Device) -> T + Sync) -> Vec<T> {
    let Some((size, nccl)) = gpus() else { return Vec::new() };
    let id = nccl.unique_id().unwrap();
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (nccl, run) = (&nccl, &run);
            scope.spawn(move || {
                let device = Device::new_cuda_with_stream(rank).unwrap();
                let own = device.as_cuda_device().unwrap();
                let place = Rank { rank, size, local: rank };
                let communicator = Communicator::new(nccl, dispatcher(own).device().unwrap(), &id, place, deadline).unwrap();
                run(ContextParallel::on_cuda(own, communicator, partials).unwrap(), device)
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// One layer: the mask and the parameters differ, so that two problems share the communicator.
struct Layer {
    attention: Attention,
    keep: Tensor,
    sink: Tensor,
}

fn layers(seq: usize) -> [Layer; 2] {
    let mut random = Random::new(31);
    let mut of = |mask: Mask, rule: fn(i64, i64) -> bool| Layer {
        attention: Attention::new().mask(mask),
        keep: keep(seq, seq, rule),
        sink: random.tensor(&[4]),
    };
    [of(Mask::causal(), |q, k| k <= q), of("dilated:3 & causal".parse().unwrap(), |q, k| k <= q && (q - k) % 3 == 0)]
}

fn compare_layers(dtype: DType, dim: usize, partials: Partials, within: f64) {
    const SEQ: usize = 391;
    let mut random = Random::new(30);
    let q = rounded(&mut random, &[1, 4, SEQ, dim], dtype);
    let [k, v, weights] = [2, 2, 4].map(|heads| rounded(&mut random, &[1, heads, SEQ, dim], dtype));
    let layers = layers(SEQ);
    let expected = layers.each_ref().map(|layer| {
        let [q, k, v, sink] = [&q, &k, &v, &layer.sink].map(wide);
        let book = Textbook { scale: 1. / (dim as f64).sqrt(), scores: &same, keep: &layer.keep, sink: Some(&sink), dropped: None };
        let (o, _) = book.attend(&q, &k, &v).unwrap();
        let gradients = (&o * wide(&weights).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
        [o.detach()].into_iter().chain([&q, &k, &v, &sink].map(|x| gradients.get(x).unwrap().clone())).collect::<Vec<_>>()
    });
    let strategies = [Strategy::Auto, Strategy::AllGather { head_groups: 1 }, Strategy::HeadExchange, Strategy::Ring];
    let results = on_ranks(DEADLINE, partials, |rank, device| {
        let mut all = Vec::new();
        for sharding in [Sharding::Contiguous, Sharding::Zigzag, Sharding::Striped] {
            for strategy in strategies {
                let rank = rank.clone().sharding(sharding.clone()).strategy(strategy).seq(SEQ, SEQ);
                // The second pair of calls has the plans and the memory of the first.
                for layer in [0, 1, 0, 1] {
                    let Layer { attention, sink, .. } = &layers[layer];
                    let [q, k, v] = [&q, &k, &v].map(|x| on(&device, &rank.shard(x, 2).unwrap()));
                    let sink = on(&device, sink);
                    let o = attention.clone().with_sink(&sink).forward_parallel(&rank, &q, &k, &v).unwrap();
                    let weights = rank.shard(&weights, 2).unwrap().to_device(&device).unwrap();
                    let gradients = (&o * weights).unwrap().sum_all().unwrap().backward().unwrap();
                    rank.wait().unwrap();
                    let shards = [&o.detach(), gradients.get(&q).unwrap(), gradients.get(&k).unwrap(), gradients.get(&v).unwrap()];
                    let mut results = shards.map(|x| rank.unshard(x, 2).unwrap().to_device(&CPU).unwrap()).to_vec();
                    results.push(gradients.get(&sink).unwrap().to_device(&CPU).unwrap());
                    all.push((format!("{dtype:?}, {sharding:?}, {strategy}, layer {layer}"), layer, results));
                }
            }
        }
        all
    });
    let Some(first) = results.first() else { return };
    for (case, (what, layer, own)) in first.iter().enumerate() {
        for (n, expected) in expected[*layer].iter().enumerate() {
            let mut got = own[n].clone();
            for other in &results[1..] {
                let other = &other[case].2[n];
                // The sink's gradients are contributions of the ranks; the others are whole tensors.
                if n == 4 { got = (got + other).unwrap() } else { close(what, other, &got, 0.) }
            }
            close(&format!("{what}: result {n}"), &got, expected, within);
        }
    }
}

#[test]
fn layers_of_ranks_are_those_of_the_textbook() {
    compare_layers(DType::BF16, 64, Partials::Operands, tolerance(DType::BF16));
    compare_layers(DType::F16, 64, Partials::F32, tolerance(DType::F16));
    compare_layers(DType::F32, 32, Partials::Operands, 1e-4);
}

#[test]
fn learned_slopes_and_positions() {
    const SEQ: usize = 256;
    let mut random = Random::new(33);
    let x = rounded(&mut random, &[2, 4, SEQ, 64], DType::BF16);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &CPU).unwrap();
    let attention = Attention::new().score_mod(library::alibi_with()).mask(Mask::causal());
    let Some(device) = gpu() else { return };
    let [there, one] = [&x, &slopes].map(|x| on(&device, x));
    let o = attention.clone().param("slopes", &one).forward(&there, &there, &there).unwrap();
    let expected = o.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&one).unwrap().to_device(&CPU).unwrap();
    let parts = on_ranks(DEADLINE, Partials::Operands, |rank, device| {
        let rank = rank.sharding(Sharding::Zigzag);
        let (x, slopes) = (on(&device, &rank.shard(&x, 2).unwrap()), on(&device, &slopes));
        let positions = rank.positions(SEQ, &device).unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(positions.len(), x.dim(2).unwrap());
        let o = attention.clone().param("slopes", &slopes).forward_parallel(&rank, &x, &x, &x).unwrap();
        let gradients = o.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        rank.wait().unwrap();
        gradients.get(&slopes).unwrap().to_device(&CPU).unwrap()
    });
    let Some(sum) = parts.into_iter().reduce(|a, b| (a + b).unwrap()) else { return };
    close("the gradient of slopes", &sum, &expected, 3e-2);
}

#[test]
fn tensors_of_another_device_are_refused() {
    on_ranks(DEADLINE, Partials::Operands, |rank, device| {
        let x = Tensor::zeros((1, 2, 8, 64), DType::BF16, &CPU).unwrap();
        let wrong = Attention::new().forward_parallel(&rank, &x, &x, &x).unwrap_err().to_string();
        assert!(wrong.contains("q device: got Cpu") && wrong.contains("the device of the rank"), "{wrong}");
        let failure = rank.failure().unwrap();
        assert!(matches!(&*failure, ParallelError::Broken(text) if text.contains("q device")), "{failure}");
        let later = Attention::new().forward_parallel(&rank, &on(&device, &x), &on(&device, &x), &on(&device, &x));
        assert!(later.unwrap_err().to_string().contains("an earlier call on this rank failed"));
    });
}

#[test]
fn a_rank_that_stops_is_an_error_of_the_others_by_the_deadline() {
    let deadline = Duration::from_secs(20);
    let x = Random::new(34).tensor(&[1, 2, 64, 64]).to_dtype(DType::BF16).unwrap();
    let failures = on_ranks(deadline, Partials::Operands, |rank, device| {
        let x = Var::from_tensor(&x.to_device(&device).unwrap()).unwrap();
        Attention::new().forward_parallel(&rank, &x, &x, &x).unwrap();
        rank.wait().unwrap();
        if rank.rank() > 0 {
            // Alive, but with another task.
            std::thread::sleep(2 * deadline);
            return None;
        }
        // The plan was compared before, so the call may submit its transfers and leave the failure to `wait`.
        let result = Attention::new().forward_parallel(&rank, &x, &x, &x).and_then(|_| rank.wait());
        if rank.ranks() == 1 {
            result.unwrap();
            return None;
        }
        result.unwrap_err();
        Some(rank.failure().unwrap())
    });
    for failure in failures.iter().flatten() {
        assert!(matches!(&**failure, ParallelError::Device(_)), "{failure}");
    }
}
