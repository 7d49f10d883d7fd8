//! Ranks as threads: shards of one problem against the problem on one rank, and against the textbook.

use crate::errors::told;
use crate::textbook::{CPU, Random, Textbook, close, keep, wide};
use candle_core::{DType, Device, Result, Tensor, Var};
use sdpa_candle::distributed::{Chunk, Exchange, ExchangeError, InProcess, Incoming, Outgoing, ParallelError, Sharding, Strategy};
use sdpa_candle::expr::{Axis, F32};
use sdpa_candle::{Attention, ContextParallel, ExecutorName, Mask, library};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(30);
const GATHER: Strategy = Strategy::AllGather { head_groups: 1 };

fn on_ends<E: Exchange, T: Send>(ends: Vec<E>, run: impl Fn(E) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(|| run(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs a function on each rank, and returns the results in the order of the ranks.
fn on_ranks<T: Send>(ranks: usize, run: impl Fn(ContextParallel) -> T + Sync) -> Vec<T> {
    on_ends(InProcess::group(ranks, DEADLINE), |end| run(ContextParallel::new(end)))
}

/// Whole operands and the weights of the output in a loss.
struct Data {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
}

impl Data {
    fn new(seed: u64, [batch, heads, heads_kv, seq_q, seq_kv, dim, dim_v]: [usize; 7]) -> Data {
        let mut random = Random::new(seed);
        let mut of = |heads, seq, dim| (random.tensor(&[batch, heads, seq, dim]) * 2.).unwrap();
        let (q, k, v) = (of(heads, seq_q, dim), of(heads_kv, seq_kv, dim), of(heads_kv, seq_kv, dim_v));
        Data { q, k, v, weights: of(heads, seq_q, dim_v) }
    }

    fn seq(&self) -> [usize; 2] {
        [self.q.dim(2).unwrap(), self.k.dim(2).unwrap()]
    }
}

/// The attention of a rank.
type Of = fn(usize) -> Attention;

/// An attention with variables as parameters: a fresh set for each rank.
type Make<'a> = dyn Fn() -> (Attention, Vec<Var>) + Sync + 'a;

/// Results of one call: `o`, then the gradients of `q`, `k`, `v`, then those of parameters.
fn results(o: &Tensor, weights: &Tensor, variables: &[&Var]) -> Vec<Tensor> {
    let gradients = (o * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let of = |variable: &&Var| gradients.get(variable).unwrap_or_else(|| panic!("a gradient is missing")).clone();
    std::iter::once(o.detach()).chain(variables.iter().map(of)).collect()
}

fn on_one_rank(data: &Data, make: &Make<'_>) -> Vec<Tensor> {
    let (attention, params) = make();
    let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| Var::from_tensor(x).unwrap());
    let o = attention.forward(&q, &k, &v).unwrap();
    results(&o, &data.weights, &[&q, &k, &v].into_iter().chain(&params).collect::<Vec<_>>())
}

fn of_rank(rank: &ContextParallel, data: &Data, make: &Make<'_>) -> Result<Vec<Tensor>> {
    let (attention, params) = make();
    let var = |x: &Tensor| Var::from_tensor(&rank.shard(x, 2)?);
    let (q, k, v) = (var(&data.q)?, var(&data.k)?, var(&data.v)?);
    let o = attention.forward_parallel(rank, &q, &k, &v)?;
    assert_eq!(o.dims(), [q.dim(0)?, q.dim(1)?, q.dim(2)?, v.dim(3)?]);
    Ok(results(&o, &rank.shard(&data.weights, 2)?, &[&q, &k, &v].into_iter().chain(&params).collect::<Vec<_>>()))
}

/// Runs on several ranks, and returns whole results: shards are joined, contributions to gradients of parameters summed.
fn on_several(ranks: usize, sharding: &Sharding, strategy: Strategy, data: &Data, make: &Make<'_>) -> Vec<Tensor> {
    let [seq_q, seq_kv] = data.seq();
    let of = |rank: ContextParallel| {
        let rank = rank.sharding(sharding.clone()).strategy(strategy).seq(seq_q, seq_kv);
        let mut all = of_rank(&rank, data, make).unwrap();
        for tensor in &mut all[..4] {
            *tensor = rank.unshard(tensor, 2).unwrap();
        }
        all
    };
    let mut all = on_ranks(ranks, of).into_iter();
    let mut sums = all.next().unwrap();
    for other in all {
        for (n, (sum, tensor)) in sums.iter_mut().zip(other).enumerate() {
            if n < 4 {
                close("what another rank gathered", &tensor, sum, 0.);
            } else {
                *sum = (&*sum + tensor).unwrap();
            }
        }
    }
    sums
}

/// Compares on 1, 2 and 3 ranks with one rank.
fn compare(what: &str, data: &Data, make: &Make<'_>, cases: &[(Sharding, Strategy)]) {
    let expected = on_one_rank(data, make);
    for ranks in 1..=3 {
        for (sharding, strategy) in cases {
            let got = on_several(ranks, sharding, *strategy, data, make);
            assert_eq!(got.len(), expected.len());
            for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
                close(&format!("{what}, {ranks} ranks, {sharding:?}, {strategy}: result {n}"), got, expected, 1e-5);
            }
        }
    }
}

fn every_case() -> Vec<(Sharding, Strategy)> {
    let strategies = [Strategy::Auto, GATHER, Strategy::HeadExchange, Strategy::Ring];
    let shardings = [Sharding::Contiguous, Sharding::Blocks, Sharding::Zigzag, Sharding::Striped];
    shardings.iter().flat_map(|sharding| strategies.map(|strategy| (sharding.clone(), strategy))).collect()
}

#[test]
fn grouped_heads_with_alibi_and_a_causal_mask() {
    let make = || (Attention::new().score_mod(library::alibi()).mask(Mask::causal()), Vec::new());
    compare("causal", &Data::new(1, [2, 4, 2, 19, 19, 8, 6]), &make, &every_case());
}

#[test]
fn windows_with_a_halo_and_another_number_of_keys() {
    let window = Mask::causal_bottom_right() & Mask::window(Some(4), Some(2), sdpa_candle::Align::TopLeft);
    let make = || (Attention::new().attn_scale(0.3).mask(window.clone()), Vec::new());
    let cases = [Strategy::Halo, GATHER, Strategy::Ring].map(|strategy| (Sharding::Contiguous, strategy));
    compare("window", &Data::new(2, [1, 3, 3, 14, 17, 8, 8]), &make, &cases);
}

#[test]
fn gradients_of_sinks_and_parameters_are_contributions() {
    let mut random = Random::new(3);
    let (sink, slopes, bias) = (random.tensor(&[4]), random.tensor(&[4]), random.tensor(&[13, 13]));
    let make = || {
        let [sink, slopes, bias] = [&sink, &slopes, &bias].map(|x| Var::from_tensor(x).unwrap());
        let attention = Attention::new().score_mod(library::alibi_with()).score_mod(library::bias([Axis::Q, Axis::K], F32));
        let attention = attention.mask(Mask::causal()).with_sink(&sink).param("slopes", &slopes).param("bias", &bias);
        (attention, vec![sink, slopes, bias])
    };
    compare("parameters", &Data::new(4, [1, 4, 1, 13, 13, 4, 4]), &make, &every_case());
}

#[test]
fn chunks_of_the_callers_own() {
    let chunks = [vec![Chunk::new(7, 1, 3), Chunk::new(0, 2, 3)], vec![Chunk::new(1, 2, 3), Chunk::new(6, 1, 1)]];
    let data = Data::new(5, [1, 2, 2, 10, 10, 8, 8]);
    let make = || (Attention::new().mask(Mask::causal()), Vec::new());
    let expected = on_one_rank(&data, &make);
    // The chunks have the number of all tokens: ranks with 6 and 4 need no `seq`.
    let shards = on_ranks(2, |rank| {
        let rank = rank.sharding(Sharding::Chunks(chunks.to_vec()));
        assert_eq!(rank.positions(10, &CPU).unwrap().to_vec1::<u32>().unwrap(), [vec![7, 8, 9, 0, 2, 4], vec![1, 3, 5, 6]][rank.rank()]);
        of_rank(&rank, &data, &make).unwrap().iter().map(|x| rank.unshard(x, 2).unwrap()).collect::<Vec<_>>()
    });
    for (n, expected) in expected.iter().enumerate() {
        shards.iter().for_each(|got| close(&format!("result {n}"), &got[n], expected, 1e-5));
    }
}

#[test]
fn the_textbook_agrees() {
    let data = Data::new(6, [1, 4, 2, 11, 11, 8, 8]);
    let make = || (Attention::new().score_mod(library::softcap(2.)).mask(Mask::causal()), Vec::new());
    let got = on_several(3, &Sharding::Zigzag, Strategy::Ring, &data, &make);
    let [q, k, v] = [&data.q, &data.k, &data.v].map(wide);
    let kept = keep(11, 11, |q, k| k <= q);
    let capped = |scores: &Tensor| (scores / 2.)?.tanh()? * 2.;
    let book = Textbook { scale: 1. / 8f64.sqrt(), scores: &capped, keep: &kept, sink: None, dropped: None };
    let (o, _) = book.attend(&q, &k, &v).unwrap();
    let expected = results(&o, &wide(&data.weights), &[&q, &k, &v]);
    for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
        close(&format!("result {n}"), got, expected, 1e-5);
    }
}

#[test]
fn half_precision_and_transposed_projections() {
    for dtype in [DType::F16, DType::BF16] {
        let mut random = Random::new(7);
        let whole = random.tensor(&[2, 12, 3, 2, 8]).to_dtype(dtype).unwrap();
        let part = |x: &Tensor, n: usize| x.narrow(2, n, 1).unwrap().squeeze(2).unwrap().transpose(1, 2).unwrap();
        let attention = Attention::new().mask(Mask::causal());
        let run = |x: &Var, rank: Option<&ContextParallel>| {
            let [q, k, v] = [0, 1, 2].map(|n| part(x, n));
            let o = match rank {
                Some(rank) => attention.forward_parallel(rank, &q, &k, &v).unwrap(),
                None => attention.forward(&q, &k, &v).unwrap(),
            };
            assert_eq!(o.dtype(), dtype);
            assert!(o.transpose(1, 2).unwrap().is_contiguous());
            let dx = o.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(x).unwrap().clone();
            [o.detach().transpose(1, 2).unwrap(), dx]
        };
        let expected = run(&Var::from_tensor(&whole).unwrap(), None);
        let got = on_ranks(2, |rank| {
            let rank = rank.sharding(Sharding::Striped);
            let shard = Var::from_tensor(&rank.shard(&whole, 1).unwrap()).unwrap();
            run(&shard, Some(&rank)).map(|x| rank.unshard(&x, 1).unwrap())
        });
        for (got, expected) in got.iter().flat_map(|got| got.iter().zip(&expected)) {
            close(&format!("{dtype:?}"), got, expected, if dtype == DType::F16 { 4e-3 } else { 3e-2 });
        }
    }
}

#[test]
fn a_rank_may_have_no_tokens() {
    let data = Data::new(8, [1, 2, 2, 4, 4, 8, 8]);
    let make = || (Attention::new().mask(Mask::causal()), Vec::new());
    let expected = on_one_rank(&data, &make);
    for strategy in [GATHER, Strategy::Ring, Strategy::Auto] {
        // Two tokens on each of the first two ranks.
        let got = on_several(3, &Sharding::Blocks, strategy, &data, &make);
        got.iter().zip(&expected).for_each(|(got, expected)| close(&format!("{strategy}"), got, expected, 1e-5));
    }
}

#[test]
fn shards_of_any_tensor_are_joined_again() {
    let whole = Tensor::arange(0u32, 2 * 11, &CPU).unwrap().reshape((11, 2)).unwrap();
    for sharding in [Sharding::Contiguous, Sharding::Blocks, Sharding::Zigzag, Sharding::Striped] {
        let types = [DType::U32, DType::I64, DType::U8, DType::F64, DType::BF16];
        for results in on_ranks(3, |rank| {
            let rank = rank.sharding(sharding.clone());
            let positions = rank.positions(11, &CPU).unwrap();
            let shard = rank.shard(&whole, 0).unwrap();
            let held: Vec<u32> = shard.to_vec2::<u32>().unwrap().iter().map(|row| row[0] / 2).collect();
            assert_eq!(held, positions.to_vec1::<u32>().unwrap());
            types.map(|dtype| rank.unshard(&shard.to_dtype(dtype).unwrap().t().unwrap(), 1).unwrap())
        }) {
            for (got, dtype) in results.iter().zip(types) {
                assert_eq!(got.dtype(), dtype);
                assert_eq!(got.to_dtype(DType::U32).unwrap().t().unwrap().to_vec2::<u32>().unwrap(), whole.to_vec2::<u32>().unwrap());
            }
        }
    }
    // Gradients flow to the tokens of the rank, and to no others.
    let gradients = on_ranks(2, |rank| {
        let whole = Var::from_tensor(&Random::new(9).tensor(&[2, 6])).unwrap();
        let shard = rank.sharding(Sharding::Zigzag).shard(&whole, 1).unwrap();
        shard.sum_all().unwrap().backward().unwrap().get(&whole).unwrap().to_vec2::<f32>().unwrap()
    });
    assert_eq!(gradients, [vec![vec![1., 1., 0., 0., 0., 1.]; 2], vec![vec![0., 0., 1., 1., 1., 0.]; 2]]);
}

/// Counts exchanges.
#[derive(Debug)]
struct Counted(InProcess, Arc<AtomicUsize>);

impl Exchange for Counted {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn exchange(&mut self, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> std::result::Result<(), ExchangeError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.exchange(sends, receives)
    }

    fn abort(&mut self, reason: &str) {
        self.0.abort(reason);
    }
}

#[test]
fn layers_share_plans_and_other_problems_have_their_own() {
    let data = Data::new(10, [1, 2, 1, 12, 12, 8, 8]);
    let capped = |by: f32| Attention::new().score_mod(library::softcap(by));
    // The last two share a plan, and differ in a number.
    let attentions = [Attention::new().mask(Mask::causal()), Attention::new(), capped(1.), capped(0.1)];
    let expected: Vec<_> = attentions.iter().map(|attention| on_one_rank(&data, &|| (attention.clone(), Vec::new()))).collect();
    let counts: Vec<_> = (0..2).map(|_| Arc::new(AtomicUsize::new(0))).collect();
    let ends = InProcess::group(2, DEADLINE).into_iter().zip(&counts).map(|(end, count)| Counted(end, count.clone())).collect();
    on_ends(ends, |end| {
        let (count, rank) = (end.1.clone(), ContextParallel::new(end).strategy(GATHER).kept_plans(2));
        let mut before = 0;
        // Three problems take turns on two places, so plans are dropped and made again.
        for n in [0, 0, 1, 2, 3, 0, 1, 3, 2] {
            let got = of_rank(&rank, &data, &|| (attentions[n].clone(), Vec::new())).unwrap();
            for (got, expected) in got.iter().zip(&expected[n]) {
                close(&format!("problem {n}"), got, &rank.shard(expected, 2).unwrap(), 1e-5);
            }
            let all = count.swap(0, Ordering::Relaxed);
            assert!(all > 0 && (before == 0 || n > 0 || all == before), "{all} exchanges, {before} before");
            before = if n == 0 { all } else { before };
        }
        // A clone has other options and the same group.
        let other = rank.clone().sharding(Sharding::Zigzag).strategy(Strategy::Ring);
        of_rank(&other, &data, &|| (attentions[0].clone(), Vec::new())).unwrap();
    });
}

#[test]
fn different_problems_are_named_on_all_ranks() {
    let x = Random::new(11).tensor(&[1, 2, 4, 8]);
    let cases: [(&str, Of); 3] = [
        ("masks", |rank| if rank == 1 { Attention::new().mask(Mask::causal()) } else { Attention::new() }),
        ("attn_scale", |rank| Attention::new().attn_scale(0.5 + rank as f32)),
        ("score_mods", |rank| Attention::new().score_mod(if rank == 1 { library::alibi() } else { library::softcap(1.) })),
    ];
    for (field, make) in cases {
        let mut named = 0;
        for (own, failure) in on_ranks(2, |rank| {
            // Both ranks have run both problems before: the ranks compare them in each call.
            for n in [0, 1] {
                make(n).forward_parallel(&rank, &x, &x, &x).unwrap();
            }
            told(make(rank.rank()).forward_parallel(&rank, &x, &x, &x), &[field, "differs between ranks"]);
            told(make(0).forward_parallel(&rank, &x, &x, &x), &["an earlier call on this rank failed (", field]);
            (rank.rank(), rank.failure().unwrap())
        }) {
            if let ParallelError::Mismatch { field: got, rank, ranks } = &*failure {
                assert_eq!((*got, *rank, &ranks[..]), (field, own, &[1 - own][..]));
                named += 1;
                continue;
            }
            // The other rank compared first.
            let told = matches!(&*failure, ParallelError::Exchange(ExchangeError::Failed { peer, reason }) if *peer == 1 - own && reason.contains(field));
            assert!(told, "{failure}");
        }
        assert!(named > 0, "{field}");
    }
    // Ranks of 3 and 2 tokens each take their number for that of the other.
    let lengths = on_ranks(2, |rank| {
        let shard = x.narrow(2, 0, 3 - rank.rank()).unwrap();
        told(Attention::new().forward_parallel(&rank, &shard, &shard, &shard), &["seq_q differs between ranks"]);
        rank.failure().unwrap().to_string()
    });
    assert!(lengths.iter().all(|text| text.contains("seq_q")), "{lengths:?}");
}

#[test]
fn a_mistake_of_one_rank_is_an_error_of_all() {
    let x = Random::new(12).tensor(&[1, 2, 4, 8]);
    let began = Instant::now();
    let failures = on_ranks(3, |rank| {
        let v = if rank.rank() == 1 { x.to_dtype(DType::F64).unwrap() } else { x.clone() };
        let result = Attention::new().forward_parallel(&rank, &x, &x, &v);
        if rank.rank() == 1 {
            told(result, &["v dtype: got f64, expected one of f32, f16, bf16"]);
        } else {
            told(result, &["rank 1 failed: ", "v dtype: got f64"]);
        }
        rank.failure().unwrap()
    });
    assert!(matches!(&*failures[1], ParallelError::Broken(text) if text.contains("v dtype")), "{failures:?}");
    for failure in [&failures[0], &failures[2]] {
        assert!(matches!(&**failure, ParallelError::Exchange(ExchangeError::Failed { peer: 1, .. })), "{failure}");
    }
    assert!(began.elapsed() < DEADLINE / 2);
}

#[test]
fn a_rank_that_computes_no_gradient_is_an_error_of_the_others() {
    let short = Duration::from_millis(300);
    let x = Random::new(13).tensor(&[1, 2, 4, 8]);
    let failures = on_ends(InProcess::group(2, short), |end| {
        let rank = ContextParallel::new(end).strategy(GATHER);
        let x = Var::from_tensor(&x).unwrap();
        let o = Attention::new().forward_parallel(&rank, &x, &x, &x).unwrap();
        if rank.rank() == 1 {
            // Alive, but with another task.
            std::thread::sleep(4 * short);
            return None;
        }
        told(o.sum_all().unwrap().backward(), &["rank 1 did not answer within 300ms"]);
        Some(rank.failure().unwrap())
    });
    let failure = failures[0].as_ref().unwrap();
    assert!(matches!(&**failure, ParallelError::Exchange(ExchangeError::Timeout { peer: 1, .. })), "{failure}");
}

#[test]
fn what_ranks_cannot_compute_is_told() {
    let x = Random::new(14).tensor(&[1, 2, 4, 8]);
    let one = || ContextParallel::new(InProcess::group(1, DEADLINE).remove(0));
    let two = |run: &(dyn Fn(&ContextParallel) -> Result<Tensor> + Sync), parts: &[&str]| {
        on_ranks(2, |rank| told(run(&rank), parts));
    };
    let number = |n: i64| Tensor::new(&[n], &CPU).unwrap();
    let dropped = Attention::new().with_dropout(0.5, &number(1), &number(2));
    two(&|rank| dropped.forward_parallel(&rank.clone().strategy(Strategy::Ring), &x, &x, &x), &["dropout", "head exchange"]);
    two(&|rank| Attention::new().forward_parallel(&rank.clone().strategy(Strategy::Halo), &x, &x, &x), &["a window"]);
    two(
        &|rank| Attention::new().forward_parallel(&rank.clone().seq(9, 9), &x, &x, &x),
        &["q tokens: got 4, expected", "with 9 tokens in all"],
    );
    let chunks = Sharding::Chunks(vec![vec![Chunk::new(0, 1, 4)]; 2]);
    two(&|rank| Attention::new().forward_parallel(&rank.clone().sharding(chunks.clone()), &x, &x, &x), &["sharding.chunks"]);
    two(&|rank| rank.unshard(&x.narrow(2, 0, 3 - rank.rank()).unwrap(), 3), &["the tensor of unshard"]);
    two(&|rank| rank.unshard(&x.narrow(2, 0, 1 + rank.rank()).unwrap(), 2), &["[1, 2] tokens on the ranks, expected [2, 1]"]);
    let flat = x.flatten_all().unwrap();
    told(Attention::new().forward_parallel(&one(), &flat, &x, &x), &["q shape: got [64], expected (batch, head, seq, dim)"]);
    let executor = Attention::new().executor(ExecutorName::CUDA);
    told(executor.forward_parallel(&one(), &x, &x, &x), &["executor: got cuda, expected cpu"]);
    let tracked = Var::from_tensor(&x).unwrap();
    told(one().unshard(&(tracked.as_tensor() * 2.).unwrap(), 2), &["a tensor that requires a gradient", "detach()"]);
    let single = ContextParallel::new(InProcess::group(1, DEADLINE).remove(0));
    assert!(single.failure().is_none() && single.wait().is_ok());
    assert_eq!((single.rank(), single.ranks()), (0, 1));
    assert!(matches!(x.device(), Device::Cpu));
}

/// Dropout with head exchange drops the elements that one rank drops.
#[test]
fn dropout_is_that_of_one_rank() {
    let number = |n: i64| Tensor::new(&[n], &CPU).unwrap();
    let make = || (Attention::new().with_dropout(0.4, &number(7), &number(3)).mask(Mask::causal()), Vec::new());
    let data = Data::new(15, [1, 4, 2, 12, 12, 8, 8]);
    let expected = on_one_rank(&data, &make);
    for ranks in [1, 2] {
        let got = on_several(ranks, &Sharding::Contiguous, Strategy::HeadExchange, &data, &make);
        got.iter().zip(&expected).for_each(|(got, expected)| close("dropout", got, expected, 1e-5));
    }
}
