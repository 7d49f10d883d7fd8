//! Ranks whose parts run on the native CUDA kernels, emulated, in the type of the operands.

use crate::backend::{Hosted, group};
use crate::harness::{Data, run_rank, single};
use conformance::emulated;
use conformance::say::skip;
use sdpa::distributed::{ParallelSpec, Partials, Sharding, Strategy, Tensor};
use sdpa::{AttentionSpec, DType, Layout, Shape};
use std::sync::Arc;

fn apart(a: &[f32], b: &[f32]) -> f64 {
    let error: f64 = a.iter().zip(b).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
    let norm: f64 = b.iter().map(|y| f64::from(*y).powi(2)).sum();
    (error / norm).sqrt()
}

#[test]
fn parts_on_cuda_kernels_make_the_whole_problem() {
    let executor = match emulated::executor() {
        Ok(executor) => executor,
        Err(why) => return skip("nccl", &why),
    };
    let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 96, seq_kv: 96, dim_qk: 64, dim_v: 64 };
    let spec = AttentionSpec::dense(DType::F16, shape, Layout::Bshd).mask("causal".parse().unwrap());
    let spec = spec.score_mod("alibi".parse().unwrap()).with_sink().with_stats().with_row_max().with_sum_exp();
    let data = Data::new(&spec, 7);
    let one = single(&spec, &data);
    let cases = [
        (Strategy::Ring, Sharding::Zigzag, 2),
        (Strategy::AllGather { head_groups: 1 }, Sharding::Striped, 3),
        (Strategy::HeadExchange, Sharding::Contiguous, 2),
    ];
    for (strategy, sharding, ranks) in cases {
        let asked = ParallelSpec::new(spec.clone(), ranks).strategy(strategy).sharding(sharding).with_backward();
        let problem = Arc::new(asked.validate().unwrap());
        let run = |link| run_rank(&problem, &data, Hosted::new(&executor, &problem, &link, Partials::Operands)?);
        let parts: Vec<[Vec<f32>; 7]> = std::thread::scope(|scope| {
            let threads: Vec<_> = group(ranks).into_iter().map(|link| scope.spawn(|| run(link))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap_or_else(|e| panic!("{strategy}: {e}"))).collect()
        });
        let tensors = [Tensor::O, Tensor::Stats, Tensor::RowMax, Tensor::SumExp, Tensor::DQ, Tensor::DK, Tensor::DV];
        let expected = [&one.o, &one.stats, &one.row_max, &one.sum_exp, &one.dq, &one.dk, &one.dv];
        for (n, (tensor, expected)) in tensors.into_iter().zip(expected).enumerate() {
            let mut whole = vec![f32::NAN; expected.len()];
            for (rank, part) in parts.iter().enumerate() {
                problem.join(rank, tensor, &part[n], &mut whole);
            }
            assert!(apart(&whole, expected) < 2e-3, "{strategy}: {} is {:e} apart", tensor.name(), apart(&whole, expected));
        }
    }
}
