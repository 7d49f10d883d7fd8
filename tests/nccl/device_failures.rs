//! Wrong calls and failing ranks over device memory.
#![allow(unsafe_code, reason = "calls over device memory")]

use crate::backend::{Hosted, Link, group};
use crate::harness::{Data, run_rank, spec};
use crate::planner::OnCpu;
use sdpa::device::{DeviceBackward, DeviceForward, DeviceParam, DeviceValue, OnDevice};
use sdpa::distributed::{DeviceContextParallel, ParallelError, ParallelProblem, ParallelSpec, Partials, Planner, Strategy};
use sdpa::nvidia::{Buffer, DeviceSlice, Stream};
use sdpa::{BackwardProblem, DType, Error, ExecutorName, Layout, Problem, Unsupported};
use std::sync::Arc;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(300);

fn problem(ranks: usize, mask: &str) -> Arc<ParallelProblem> {
    let attention = spec(DType::F32, [4, 2], [16, 16], Layout::Bhsd).mask(mask.parse().unwrap());
    Arc::new(ParallelSpec::new(attention, ranks).strategy(Strategy::Ring).with_backward().validate().unwrap())
}

/// Runs a function on each rank, and returns the results in the order of the ranks.
fn on_ranks<T: Send>(ranks: usize, run: impl Fn(Link) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = group(ranks).into_iter().map(|link| scope.spawn(|| run(link))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_that_differ_are_an_error_that_names_the_field() {
    let (causal, other) = (problem(3, "causal"), problem(3, "prefix-lm:9"));
    for partials in [None, Some(2)] {
        let results = on_ranks(3, |link| {
            let rank = link.rank();
            let differs = rank == 2;
            let problem = if differs && partials.is_none() { &other } else { &causal };
            let own = if differs && partials.is_some() { Partials::Operands } else { Partials::F32 };
            run_rank(problem, &Data::new(&problem.spec().attention, 1), Hosted::new(&OnCpu, problem, &link, own)?).map(drop)
        });
        for (rank, result) in results.into_iter().enumerate() {
            let expected = if rank == 2 { vec![0, 1] } else { vec![2] };
            let field = if partials.is_some() { "partials" } else { "masks" };
            assert!(
                matches!(&result, Err(ParallelError::Mismatch { field: found, ranks, .. }) if *found == field && *ranks == expected),
                "rank {rank}: {result:?}"
            );
        }
    }
}

/// Supports no part.
struct Refuses;

impl Planner for Refuses {
    fn plan(&self, _: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        Err(Unsupported::new(ExecutorName::new("refuses"), Vec::new()).into())
    }

    fn plan_backward(&self, _: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
        Err(Unsupported::new(ExecutorName::new("refuses"), Vec::new()).into())
    }

    fn ordinal(&self) -> Result<u32, Error> {
        Ok(0)
    }
}

#[test]
fn a_rank_without_a_plan_is_an_error_of_all_ranks() {
    let problem = problem(3, "causal");
    let data = Data::new(&problem.spec().attention, 1);
    let results = on_ranks(3, |link| {
        let planner: &dyn Planner = if link.rank() == 1 { &Refuses } else { &OnCpu };
        run_rank(&problem, &data, Hosted::new(planner, &problem, &link, Partials::F32)?).map(drop)
    });
    assert!(matches!(&results[1], Err(ParallelError::Attention(error)) if error.is_unsupported()), "{results:?}");
    assert!(matches!((&results[0], &results[2]), (Err(ParallelError::Device(_)), Err(ParallelError::Device(_)))), "{results:?}");
}

#[test]
fn a_rank_that_leaves_is_an_error_of_the_others_and_they_stay_broken() {
    let problem = problem(3, "causal");
    let data = Data::new(&problem.spec().attention, 1);
    let results = on_ranks(3, |link| {
        if link.rank() == 1 {
            drop(link.communicator(SHORT));
            return None;
        }
        let mut rank = DeviceContextParallel::new(&OnCpu, problem.clone(), link.communicator(SHORT), Partials::F32).unwrap();
        let call = Call::new(&problem, link.rank(), &data);
        let error = call.forward(&mut rank).unwrap_err();
        let later = call.forward(&mut rank).unwrap_err();
        let waits = rank.wait(&call.stream).unwrap_err();
        Some([error, later, waits].map(|error| error.to_string()))
    });
    for (rank, errors) in results.into_iter().enumerate().filter_map(|(rank, errors)| Some((rank, errors?))) {
        assert!(errors[0].contains("nccl") || errors[0].contains("waited") || errors[0].contains("Nccl"), "rank {rank}: {errors:?}");
        assert!(errors[1..].iter().all(|error| error.contains("an earlier call on this rank failed")), "rank {rank}: {errors:?}");
    }
}

/// The memory of a forward call of one rank.
struct Call {
    stream: Stream,
    /// `q`, `k`, `v`, `o`, `stats`, `row_max` and `sum_exp`.
    memory: [Buffer; 7],
}

impl Call {
    fn new(problem: &ParallelProblem, rank: usize, data: &Data) -> Call {
        use sdpa::distributed::Tensor;
        let device = group(1)[0].device();
        let stream = device.stream().unwrap();
        let tensors = [Tensor::Q, Tensor::K, Tensor::V, Tensor::O, Tensor::Stats, Tensor::RowMax, Tensor::SumExp];
        let memory = tensors.map(|tensor| {
            let mut buffer = Buffer::new(device, 4 * problem.local(rank, tensor).extent().unwrap() as usize).unwrap();
            let inputs = [(Tensor::Q, &data.q), (Tensor::K, &data.k), (Tensor::V, &data.v)];
            if let Some((_, whole)) = inputs.iter().find(|(own, _)| *own == tensor) {
                buffer.upload(&stream, 0, &problem.split(rank, tensor, whole)).unwrap();
            }
            buffer
        });
        Call { stream, memory }
    }

    fn slices(&self) -> [DeviceSlice; 7] {
        self.memory.each_ref().map(|buffer| DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 })
    }

    fn submit(&self, rank: &mut DeviceContextParallel, call: &DeviceForward<'_, DeviceSlice>) -> Result<(), ParallelError> {
        // SAFETY: buffers live until the stream was waited for; the emulated driver refuses other memory.
        unsafe { rank.forward(&self.stream, call) }
    }

    fn forward(&self, rank: &mut DeviceContextParallel) -> Result<(), ParallelError> {
        let [q, k, v, o, stats, row_max, sum_exp] = self.slices();
        self.submit(rank, &DeviceForward::new(q, k, v, o).stats(stats).row_max(row_max).sum_exp(sum_exp))
    }
}

#[test]
fn mistakes_of_a_call_are_all_named_and_leave_the_rank_as_it_was() {
    let problem = problem(1, "tensor own[head, q, k]: bool; own");
    let data = Data::new(&problem.spec().attention, 1);
    let link = group(1).remove(0);
    let mut rank = DeviceContextParallel::new(&OnCpu, problem.clone(), link.communicator(SHORT), Partials::F32).unwrap();
    let call = Call::new(&problem, 0, &data);
    let [q, k, v, o, stats, row_max, sum_exp] = call.slices();
    let short = DeviceSlice { bytes: 12, ..q };
    let odd = DeviceSlice { address: k.address + 2, ..k };
    let params = [DeviceParam::new("own", DeviceValue::Tensor(DType::F32, v)), DeviceParam::new("other", DeviceValue::Scalar(1.0))];
    let wrong = DeviceForward::new(short, odd, v, o).stats(stats).row_max(row_max).attn_scale(f32::NAN).params(&params);
    let told = call.submit(&mut rank, &wrong).unwrap_err().to_string();
    for part in ["q length: got 12 bytes", "k address", "sum_exp: got nothing", "attn_scale", "parameter own", "parameter other"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let mut own = Buffer::new(link.device(), 4 * 16 * 16).unwrap();
    own.fill(&call.stream, 1).unwrap();
    let own = DeviceSlice { address: own.address(), bytes: own.bytes() as u64 };
    let params = [DeviceParam::new("own", DeviceValue::Tensor(DType::Bool, own))];
    let right = DeviceForward::new(q, k, v, o).stats(stats).row_max(row_max).sum_exp(sum_exp).params(&params);
    call.submit(&mut rank, &right).unwrap();
    rank.wait(&call.stream).unwrap();
    let without = Arc::new(ParallelSpec::new(problem.spec().attention.clone(), 1).validate().unwrap());
    let mut rank = DeviceContextParallel::new(&OnCpu, without, group(1).remove(0).communicator(SHORT), Partials::F32).unwrap();
    // SAFETY: the call is refused.
    let refused = unsafe { rank.backward(&call.stream, &DeviceBackward::new((q, k, v), (o, stats), o, (q, k, v))) };
    assert!(refused.unwrap_err().to_string().contains("a problem with a backward pass"));
}

#[test]
fn other_groups_and_devices_are_refused() {
    let (two, one) = (problem(2, "causal"), problem(1, "causal"));
    let error = DeviceContextParallel::new(&OnCpu, two, group(1).remove(0).communicator(SHORT), Partials::F32).unwrap_err();
    assert!(matches!(error, ParallelError::Ranks { got: 1, expected: 2 }), "{error}");
    struct Elsewhere;
    impl Planner for Elsewhere {
        fn plan(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
            OnCpu.plan(problem)
        }

        fn plan_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, Error> {
            OnCpu.plan_backward(problem)
        }

        fn ordinal(&self) -> Result<u32, Error> {
            Ok(1)
        }
    }
    let error = DeviceContextParallel::new(&Elsewhere, one, group(1).remove(0).communicator(SHORT), Partials::F32).unwrap_err();
    assert_eq!(error.to_string(), "the communicator is on device 0, expected device 1, for which parts are prepared");
}
