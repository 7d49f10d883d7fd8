//! Problems drawn at random, timed on native CUDA kernels and on cuDNN: what the choice between them is made of, and held against.

use crate::cuda::executor;
use crate::cuda_speed::{Pass, Round, times};
use crate::setup::{Result, executor as cudnn};
use conformance::timed::{Lies, Timed};
use cudnn_graph::Stream;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::{CudnnExecutor, PlanOptions};
use sdpa::device::OnDevice;
use sdpa_driver::DeviceSlice;
use std::fs::File;

type Ready = OnDevice<DeviceSlice, Stream>;

/// What is to be run of one problem.
struct Made {
    job: Job,
    first: Option<Ready>,
    cuda: Option<Ready>,
    cudnn: Option<Ready>,
}

/// Milliseconds that calls between two marks take, about.
const BETWEEN: f64 = 0.3;
const RUNS: usize = 5;

fn made(timed: &Timed, ours: &CudaExecutor, theirs: &CudnnExecutor) -> Result<Made> {
    let forward = timed.forward().map_err(|e| e.to_string())?;
    let cuda = ours.attention(&forward).ok().map(|(plan, _)| plan as Ready);
    let cudnn = || theirs.attention(&forward).ok().map(|(plan, _)| plan as Ready);
    if !timed.backward {
        return Ok(Made { cudnn: cudnn(), job: forward.into(), first: None, cuda });
    }
    let first = cuda.or_else(cudnn);
    let problem = timed.gradient().map_err(|e| e.to_string())?;
    let cuda = ours.gradient(&problem).ok().map(|(plan, _)| plan as Ready);
    let cudnn = theirs.attention_backward(&problem).ok().map(|(plan, _)| plan as Ready);
    Ok(Made { job: problem.into(), first, cuda, cudnn })
}

/// `count` problems from seed `first` on, or of none those that lines of standard input hold: a line of JSON each. Processes that do so beside one another share
/// the work of compiling: only one of them has the device at a time.
pub(crate) fn run(count: u64, first: u64) -> Result<()> {
    if count > 0 {
        return timed((first..first + count).map(Timed::drawn));
    }
    let lines = std::io::stdin().lines().map(|line| Ok(serde_json::from_str(&line?)?));
    timed(lines.collect::<Result<Vec<Timed>>>()?.into_iter())
}

fn timed(problems: impl Iterator<Item = Timed>) -> Result<()> {
    let (ours, theirs) = (executor(None)?, cudnn(PlanOptions::default())?);
    let stream = ours.device().stream()?;
    let turn = File::create(std::env::temp_dir().join("sdpa-device-turn"))?;
    for drawn in problems {
        let made = made(&drawn, &ours, &theirs)?;
        let passes: Vec<&Pass> = [&made.cuda, &made.cudnn].into_iter().flatten().map(|pass| &**pass as &Pass).collect();
        let documents = match &drawn.lies {
            Lies::Packed(lengths) => Some(&**lengths),
            Lies::Dense(_) | Lies::Paged(_) => None,
        };
        let round = Round { between: BETWEEN, runs: RUNS, documents };
        turn.lock()?;
        let ms = times(&stream, &made.job, &passes, made.first.as_deref().map(|first| first as &Pass), round);
        turn.unlock()?;
        let mut ms = ms?.into_iter();
        let cuda_ms = made.cuda.is_some().then(|| ms.next()).flatten();
        println!("{}", serde_json::to_string(&Timed { cuda_ms, cudnn_ms: ms.next(), ..drawn })?);
    }
    Ok(())
}
