//! Several problems of a rank over one communicator.

use crate::backend::{Hosted, group};
use crate::harness::{Data, run, run_rank};
use crate::planner::OnCpu;
use sdpa::distributed::{ParallelProblem, ParallelSpec, Partials, SharedCommunicator, Strategy, Tensor};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use sdpa_driver::Error;
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

fn on_ranks<T: Send>(ranks: usize, deadline: Duration, run: impl Fn(SharedCommunicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let start = |link: crate::backend::Link| {
            let run = &run;
            scope.spawn(move || run(link.communicator(deadline).into()))
        };
        let threads: Vec<_> = group(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn problem(mask: &str, strategy: Strategy) -> Arc<ParallelProblem> {
    let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 13, seq_kv: 13, dim_qk: 4, dim_v: 4 };
    let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bshd).mask(mask.parse::<Mask>().unwrap());
    let spec = spec.with_stats().with_row_max().with_sum_exp();
    Arc::new(ParallelSpec::new(spec, 2).strategy(strategy).with_backward().validate().unwrap())
}

#[test]
fn problems_take_turns_on_one_communicator() {
    if crate::communicators::open().is_none() {
        return;
    }
    let problems = [problem("causal", Strategy::Ring), problem("window:3,2", Strategy::HeadExchange)];
    let data = problems.each_ref().map(|problem| Data::new(&problem.spec().attention, 7));
    let expected = [0, 1].map(|n| run(&problems[n], &data[n], None));
    assert_ne!(expected[0].o, expected[1].o);
    let ranks = on_ranks(2, DEADLINE, |communicator| {
        // The first is dropped before the third is made, which must not end the communicator.
        let made = |n: usize| Hosted::sharing(&OnCpu, &problems[n], communicator.clone(), Partials::F32).unwrap();
        let [first, second] = [made(0), made(1)];
        let results = [(0, first), (1, second)].map(|(n, rank)| (n, run_rank(&problems[n], &data[n], rank).unwrap()));
        (communicator.rank(), results.into_iter().chain([(0, run_rank(&problems[0], &data[0], made(0)).unwrap())]).collect::<Vec<_>>())
    });
    for (rank, results) in ranks {
        for (turn, (n, [o, _, _, _, dq, dk, dv])) in results.into_iter().enumerate() {
            let of = [(Tensor::O, o, &expected[n].o), (Tensor::DQ, dq, &expected[n].dq), (Tensor::DK, dk, &expected[n].dk)];
            for (tensor, got, whole) in of.into_iter().chain([(Tensor::DV, dv, &expected[n].dv)]) {
                assert_eq!(got, problems[n].split(rank, tensor, whole), "{tensor:?} of rank {rank}, turn {turn}");
            }
        }
    }
}

#[test]
fn bytes_of_all_ranks_are_gathered_in_order() {
    if crate::communicators::open().is_none() {
        return;
    }
    for lengths in [vec![5], vec![3, 40, 1], vec![7, 0, 17, 2]] {
        let part = |rank: usize| (0..lengths[rank]).map(|n| (40 * rank + n) as u8 + 1).collect::<Vec<u8>>();
        let expected: Vec<Vec<u8>> = (0..lengths.len()).map(part).collect();
        for got in on_ranks(lengths.len(), DEADLINE, |communicator| communicator.gather(&part(communicator.rank()), &lengths)) {
            assert_eq!(got.unwrap(), expected);
        }
    }
}

#[test]
fn a_rank_that_gathers_nothing_is_an_error_within_the_deadline() {
    if crate::communicators::open().is_none() {
        return;
    }
    let errors = on_ranks(2, SHORT, |communicator| {
        if communicator.rank() == 1 {
            // Alive, but with another task.
            std::thread::sleep(3 * SHORT);
            return None;
        }
        Some([communicator.gather(&[1], &[1, 1]).unwrap_err(), communicator.gather(&[1], &[1, 1]).unwrap_err()])
    });
    let [error, later] = errors[0].as_ref().unwrap();
    assert!(matches!(error, Error::Timeout { after: SHORT, .. }), "{error}");
    assert!(later.to_string().contains("the communicator was aborted before"), "{later}");
}
