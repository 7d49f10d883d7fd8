//! Both executors ready for one problem, so that a script can take turns between them and others call by call.

use crate::cuda;
use crate::cuda_speed::{Pass, between, ready};
use crate::memory::Memory;
use crate::setup::{Result, executor as cudnn};
use crate::time::{Answer, Question, Turn, asked, flops};
use cudnn_graph::Stream;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::{CudnnExecutor, PlanOptions};
use sdpa::device::OnDevice;
use sdpa_driver::DeviceSlice;

type Ready = OnDevice<DeviceSlice, Stream>;

/// The problem that is ready.
struct Kept {
    asked: String,
    job: Job,
    flops: f64,
    own: Result<Ready>,
    cudnn: Result<Ready>,
    memory: Memory,
}

#[derive(Default)]
pub(crate) struct Turns {
    executors: Option<(CudaExecutor, CudnnExecutor)>,
    kept: Option<Kept>,
}

impl Turns {
    pub(crate) fn take(&mut self, stream: &Stream, question: &Question, turn: Turn) -> Result<Answer> {
        let backward = asked(question)?;
        let key = format!("{backward:?} {} {:?}", question.backward, question.documents);
        if self.kept.as_ref().is_none_or(|kept| kept.asked != key) {
            self.kept = None;
            let (ours, theirs) = match &mut self.executors {
                Some(both) => both,
                none => none.insert((cuda::executor(None)?, cudnn(PlanOptions::default())?)),
            };
            let forward = backward.forward.validate()?;
            let own = ours.attention(&forward).map(|(plan, _)| plan as Ready);
            let cudnn = theirs.attention(&forward).map(|(plan, _)| plan as Ready);
            let (mut job, mut first) = (Job::from(forward), None);
            let (mut own, mut cudnn): (Result<Ready>, Result<Ready>) = (own.map_err(Into::into), cudnn.map_err(Into::into));
            if question.backward {
                let problem = backward.validate()?;
                first = own.or(cudnn).ok();
                own = ours.gradient(&problem).map(|(plan, _)| plan as Ready).map_err(Into::into);
                cudnn = theirs.attention_backward(&problem).map(|(plan, _)| plan as Ready).map_err(Into::into);
                job = problem.into();
            }
            let passes: Vec<&Pass> = [&own, &cudnn].into_iter().flatten().map(|pass| &**pass as &Pass).collect();
            let memory = ready(stream, &job, &passes, first.as_deref().map(|first| first as &Pass), question.documents.as_deref())?;
            self.kept = Some(Kept { asked: key, job, flops: flops(&backward, question)?, own, cudnn, memory });
        }
        let kept = self.kept.as_ref().ok_or("nothing is ready")?;
        let pass = if turn.own { &kept.own } else { &kept.cudnn };
        let pass = pass.as_ref().map_err(ToString::to_string)?;
        let ms = between(stream, &kept.job, &kept.memory, &**pass, turn.calls)?;
        Ok(Answer { ms, tflops: kept.flops / ms / 1e9, engine: pass.engine(), workspace: pass.workspace_bytes() })
    }
}
