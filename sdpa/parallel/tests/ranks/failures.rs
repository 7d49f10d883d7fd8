//! Ranks that fail, stop, leave or run another problem.

use crate::backend::Delayed;
use crate::harness::{Data, run_rank, spec};
use sdpa_core::{
    AttentionSpec, BackwardProblem, DType, Error, Executor, ExecutorName, HostForward, Layout, Prepared, PreparedBackward, Problem,
    Unsupported,
};
use sdpa_cpu::CpuExecutor;
use sdpa_parallel::{
    ContextParallel, Exchange, ExchangeError, InProcess, Incoming, Outgoing, ParallelError, ParallelProblem, ParallelSpec, Pass, Sharding,
    Strategy,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Changes the specification of one rank.
type Change = fn(ParallelSpec) -> ParallelSpec;

const DEADLINE: Duration = Duration::from_millis(400);

fn attention() -> AttentionSpec {
    spec(DType::F32, [4, 2], [24, 24], Layout::Bhsd).mask("causal".parse().unwrap())
}

fn problem(strategy: Strategy) -> Arc<ParallelProblem> {
    Arc::new(ParallelSpec::new(attention(), 4).strategy(strategy).with_backward().validate().unwrap())
}

/// Runs `run` on every rank with [`DEADLINE`], and returns its results and the time of the slowest.
fn join<E: Exchange>(problem: &Arc<ParallelProblem>, exchange: E) -> Result<ContextParallel<E>, ParallelError> {
    ContextParallel::new(&CpuExecutor::default(), problem.clone(), exchange)
}

fn on_ranks<T: Send>(run: impl Fn(InProcess) -> T + Sync) -> (Vec<T>, Duration) {
    on_ranks_within(DEADLINE, run)
}

/// Runs `run` on every rank with a deadline, and returns its results and the time of the slowest.
fn on_ranks_within<T: Send>(deadline: Duration, run: impl Fn(InProcess) -> T + Sync) -> (Vec<T>, Duration) {
    let start = Instant::now();
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = InProcess::group(4, deadline).into_iter().map(|exchange| scope.spawn(|| run(exchange))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (results, start.elapsed())
}

/// An action of one rank in place of one of its exchanges.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Fails,
    Hangs,
    Leaves,
}

/// A rank with a fault.
#[derive(Debug)]
struct Faulty {
    inner: Option<InProcess>,
    fault: Fault,
    after: usize,
}

impl Exchange for Faulty {
    fn rank(&self) -> usize {
        2
    }

    fn size(&self) -> usize {
        4
    }

    fn exchange(&mut self, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<(), ExchangeError> {
        if self.after == 0 {
            match self.fault {
                Fault::Fails => self.abort("out of memory"),
                Fault::Hangs => std::thread::sleep(3 * DEADLINE),
                Fault::Leaves => self.inner = None,
            }
            return Err(ExchangeError::Failed { peer: 2, reason: "a fault".to_owned() });
        }
        self.after -= 1;
        self.inner.as_mut().unwrap().exchange(sends, receives)
    }

    fn abort(&mut self, reason: &str) {
        if let (Some(inner), Fault::Fails) = (&mut self.inner, self.fault) {
            inner.abort(reason);
        }
    }
}

#[test]
fn a_rank_with_a_fault_is_an_error_on_every_other_within_the_deadline() {
    for strategy in [Strategy::AllGather { head_groups: 1 }, Strategy::HeadExchange, Strategy::Ring, Strategy::Grid { heads: 2 }] {
        let problem = problem(strategy);
        let data = Data::new(&problem.spec().attention, 1);
        for fault in [Fault::Fails, Fault::Hangs, Fault::Leaves] {
            // The exchange of digests, the first one of the pass, and one of the backward pass.
            for after in [0, 1, 2] {
                let run = |exchange: InProcess| match exchange.rank() {
                    2 => run_rank(&problem, &data, join(&problem, Faulty { inner: Some(exchange), fault, after })?).map(|_| ()),
                    rank => run_rank(&problem, &data, join(&problem, Delayed { inner: exchange, seed: Some(rank as u64) })?).map(|_| ()),
                };
                let (results, took) = on_ranks(run);
                assert!(took < 5 * DEADLINE, "{took:?}");
                for (rank, result) in results.into_iter().enumerate() {
                    let told = format!("{strategy}, {fault:?} after {after}, rank {rank}");
                    match result {
                        Err(ParallelError::Exchange(error)) if rank != 2 => match (fault, error) {
                            (Fault::Fails, ExchangeError::Failed { peer: 2, reason }) => {
                                assert!(reason.contains("out of memory"), "{told}")
                            }
                            (Fault::Fails, error) => panic!("{told}: {error}"),
                            // A rank whose neighbour failed reports this.
                            (Fault::Hangs | Fault::Leaves, error) => {
                                let text = error.to_string();
                                assert!(
                                    ["did not answer", "left the group", "failed: "].iter().any(|what| text.contains(what)),
                                    "{told}: {text}"
                                );
                            }
                        },
                        Err(_) if rank == 2 => {}
                        Ok(()) if after == 2 => {
                            // With causal shards a rank may need nothing of those after it, and ends.
                            assert!(rank < 2 && matches!(strategy, Strategy::Ring | Strategy::AllGather { .. }), "{told}: no error");
                        }
                        other => panic!("{told}: {other:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_rank_that_panics_has_left() {
    let run = |exchange: InProcess| {
        let rank = exchange.rank();
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let mut exchange = exchange;
            assert!(rank != 1, "this rank panics, as this test wants");
            let mut received = [0u8; 4];
            exchange.exchange(&[], &mut [Incoming { peer: 1, bytes: &mut received }])
        }));
        made.ok()
    };
    // Printing the backtrace of the panic may take longer than `DEADLINE`.
    let deadline = 100 * DEADLINE;
    let (results, took) = on_ranks_within(deadline, run);
    assert!(took < deadline);
    assert_eq!(results, [0, 1, 2, 3].map(|rank| (rank != 1).then_some(Err(ExchangeError::Gone { peer: 1 }))));
}

#[test]
fn ranks_with_other_problems_are_told_which_field_differs() {
    let changes: [(&str, Change); 10] = [
        ("masks", |mut spec| {
            spec.attention.masks.clear();
            spec
        }),
        ("score_mods", |mut spec| {
            spec.attention = spec.attention.score_mod("softcap:20".parse().unwrap());
            spec
        }),
        ("strategy", |spec| spec.strategy(Strategy::AllGather { head_groups: 2 })),
        ("sharding", |spec| spec.sharding(Sharding::Zigzag)),
        ("sink", |mut spec| {
            spec.attention.sink = true;
            spec
        }),
        ("dim_v", |mut spec| {
            (spec.attention.v.dims[3], spec.attention.o.dims[3]) = (6, 6);
            (spec.attention.v, spec.attention.o) = (spec.attention.v.densely(), spec.attention.o.densely());
            spec
        }),
        ("dtype", |mut spec| {
            spec.attention.dtype = DType::BF16;
            spec
        }),
        ("seq_kv", |mut spec| {
            (spec.attention.k.dims[2], spec.attention.v.dims[2]) = (25, 25);
            (spec.attention.k, spec.attention.v) = (spec.attention.k.densely(), spec.attention.v.densely());
            spec
        }),
        ("axis order of operands", |mut spec| {
            spec.attention.q = sdpa_core::TensorSpec::dense(spec.attention.q.dims, Layout::Sbhd);
            spec
        }),
        ("heads_kv", |mut spec| {
            (spec.attention.k.dims[1], spec.attention.v.dims[1]) = (4, 4);
            (spec.attention.k, spec.attention.v) = (spec.attention.k.densely(), spec.attention.v.densely());
            spec
        }),
    ];
    let common = ParallelSpec::new(attention(), 4).strategy(Strategy::AllGather { head_groups: 1 }).with_backward();
    for (field, change) in changes {
        let other = change(common.clone());
        let run = |exchange: InProcess| {
            let rank = exchange.rank();
            let problem = Arc::new(if rank == 3 { &other } else { &common }.validate().unwrap());
            run_rank(&problem, &Data::new(&problem.spec().attention, 1), join(&problem, exchange)?).map(|_| ())
        };
        let (results, took) = on_ranks(run);
        assert!(took < 2 * DEADLINE);
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Err(ParallelError::Mismatch { field: found, ranks, .. }) => {
                    assert_eq!((found, ranks), (field, if rank == 3 { vec![0, 1, 2] } else { vec![3] }));
                }
                // The reason of the rank that found it first names the field too.
                Err(ParallelError::Exchange(ExchangeError::Failed { reason, .. })) => {
                    assert!(reason.starts_with(field), "{field}: {reason}")
                }
                other => panic!("{field}, rank {rank}: {other:?}"),
            }
        }
    }
}

/// An executor that supports nothing.
#[derive(Debug)]
struct Refuses;

impl Executor for Refuses {
    fn name(&self) -> ExecutorName {
        ExecutorName::new("refuses")
    }

    fn supports(&self, _: &Problem) -> Result<(), Unsupported> {
        Err(Unsupported::new(self.name(), Vec::new()))
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        Err(self.supports(problem).unwrap_err().into())
    }

    fn supports_backward(&self, _: &BackwardProblem) -> Result<(), Unsupported> {
        Err(Unsupported::new(self.name(), Vec::new()))
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        Err(self.supports_backward(problem).unwrap_err().into())
    }
}

#[test]
fn a_rank_without_a_plan_fails_before_the_others_wait() {
    let problem = problem(Strategy::Ring);
    let data = Data::new(&problem.spec().attention, 1);
    let run = |exchange: InProcess| {
        if exchange.rank() == 1 {
            return ContextParallel::new(&Refuses, problem.clone(), exchange).map(|_| ());
        }
        run_rank(&problem, &data, join(&problem, exchange)?).map(|_| ())
    };
    let (results, took) = on_ranks(run);
    assert!(took < DEADLINE);
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Err(ParallelError::Attention(error)) => assert!(rank == 1 && error.is_unsupported()),
            Err(ParallelError::Exchange(ExchangeError::Failed { peer: 1, .. })) => {}
            other => panic!("{rank}: {other:?}"),
        }
    }
}

#[test]
fn wrong_calls_are_mistakes_and_later_calls_fail() {
    let problem = Arc::new(ParallelSpec::new(attention().with_sink(), 1).strategy(Strategy::Ring).validate().unwrap());
    let exchange = InProcess::group(1, DEADLINE).remove(0);
    let mut rank = ContextParallel::new(&CpuExecutor::default(), problem.clone(), exchange).unwrap();
    let (q, k, mut o) = (vec![0.0; 5], vec![0.0; 2 * 2 * 24 * 8], vec![0.0; 2 * 4 * 24 * 4]);
    let told = rank.forward(HostForward::new(&q, &k, &k, &mut o).attn_scale(f32::NAN)).unwrap_err().to_string();
    for what in [
        "q length: got 5, expected 1536 elements, the shard of rank 0",
        "v length",
        "stats: got nothing",
        "row_max",
        "parameter sink",
        "attn_scale",
    ] {
        assert!(told.contains(what), "{what} in {told}");
    }
    let again = rank.forward(HostForward::new(&q, &k, &k, &mut o)).unwrap_err();
    assert!(matches!(&again, ParallelError::Broken(why) if why.contains("q length")), "{again}");
    let few = InProcess::group(2, DEADLINE).remove(0);
    let error = ContextParallel::new(&CpuExecutor::default(), problem.clone(), few).unwrap_err();
    assert!(matches!(error, ParallelError::Ranks { got: 2, expected: 1 }));
    assert_eq!(problem.declared(Pass::Forward).len(), 1);
}

#[test]
fn exchanges_with_wrong_ranks_and_lengths_are_errors() {
    let mut group = InProcess::group(2, DEADLINE);
    let (mut one, mut zero) = (group.remove(1), group.remove(0));
    for peer in [0, 2] {
        assert_eq!(zero.exchange(&[Outgoing { peer, bytes: &[1] }], &mut []), Err(ExchangeError::Peer { peer, size: 2 }));
    }
    zero.exchange(&[Outgoing { peer: 1, bytes: &[1, 2] }], &mut []).unwrap();
    let mut received = [0; 3];
    assert_eq!(
        one.exchange(&[], &mut [Incoming { peer: 0, bytes: &mut received }]),
        Err(ExchangeError::Length { peer: 0, got: 2, expected: 3 })
    );
    // Bytes that were sent before a rank left still arrive.
    zero.exchange(&[Outgoing { peer: 1, bytes: &[1, 2, 3] }], &mut []).unwrap();
    drop(zero);
    one.exchange(&[], &mut [Incoming { peer: 0, bytes: &mut received }]).unwrap();
    assert_eq!(received, [1, 2, 3]);
    assert_eq!(one.exchange(&[], &mut [Incoming { peer: 0, bytes: &mut received }]), Err(ExchangeError::Gone { peer: 0 }));
}
