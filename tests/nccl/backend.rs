//! Ranks over memory of the emulated driver, with the emulation of NCCL between them. Calls have host memory, which is uploaded.
#![allow(unsafe_code, reason = "calls over device memory")]

use crate::communicators::open;
use crate::harness::Rank as HostRank;
use crate::planner::OnCpu;
use conformance::emulated;
use conformance::share::{DAYS, Share, VARIABLE};
use sdpa::device::{DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue};
use sdpa::distributed::{DeviceContextParallel, ParallelError, ParallelProblem, Partials, Planner, SharedCommunicator};
use sdpa::nvidia::{Buffer, Device, DeviceSlice, Stream};
use sdpa::{DType, Elements, ElementsMut, HostBackward, HostForward, Param, ParamValue};
use sdpa_driver::{Communicator, Element, Nccl, Rank, UniqueId};
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);

/// The end of a rank that joins a group.
pub(crate) struct Link {
    nccl: Arc<Nccl>,
    device: &'static Device,
    id: UniqueId,
    rank: Rank,
}

/// Returns the ends of the ranks of a group.
pub(crate) fn group(ranks: usize) -> Vec<Link> {
    let (nccl, device) = open().expect("the emulation is built");
    let id = nccl.unique_id().unwrap();
    (0..ranks).map(|rank| Link { nccl: nccl.clone(), device, id, rank: Rank { rank, size: ranks, local: 0 } }).collect()
}

impl Link {
    pub(crate) fn rank(&self) -> usize {
        self.rank.rank
    }

    pub(crate) fn device(&self) -> &'static Device {
        self.device
    }

    pub(crate) fn communicator(&self, deadline: Duration) -> Communicator {
        Communicator::new(&self.nccl, self.device, &self.id, self.rank, deadline).unwrap()
    }
}

/// Makes a rank. Its transfers are as early, or as late, as its streams allow; with `delays`, they are the other way round.
pub(crate) fn join(problem: &Arc<ParallelProblem>, link: Link, delays: Option<u64>) -> Result<Hosted, ParallelError> {
    emulated::late_transfers((problem.ranks() + link.rank() + usize::from(delays.is_some())) % 2 == 1);
    Hosted::new(&OnCpu, problem, &link, Partials::F32)
}

/// The number of shares of which a run takes one, another each day: each launch of a kernel is emulated.
pub(crate) const SHARES: usize = DAYS as usize;

/// Returns whether this run takes a case.
pub(crate) fn runs(case: usize) -> bool {
    Share::parse(&Share::wanted(VARIABLE, DAYS)).unwrap().has(case)
}

/// A rank whose calls have host memory.
pub(crate) struct Hosted {
    ranks: DeviceContextParallel,
    stream: Stream,
}

impl Hosted {
    pub(crate) fn new(
        planner: &dyn Planner,
        problem: &Arc<ParallelProblem>,
        link: &Link,
        partials: Partials,
    ) -> Result<Hosted, ParallelError> {
        Hosted::sharing(planner, problem, link.communicator(DEADLINE), partials)
    }

    pub(crate) fn sharing(
        planner: &dyn Planner,
        problem: &Arc<ParallelProblem>,
        communicator: impl Into<SharedCommunicator>,
        partials: Partials,
    ) -> Result<Hosted, ParallelError> {
        let communicator = communicator.into();
        let stream = communicator.device().stream().unwrap();
        Ok(Hosted { ranks: DeviceContextParallel::new(planner, problem.clone(), communicator, partials)?, stream })
    }

    fn upload<T: Element>(&self, data: &[T]) -> Buffer {
        let mut buffer = Buffer::new(self.stream.device(), size_of_val(data)).unwrap();
        buffer.upload(&self.stream, 0, data).unwrap();
        buffer
    }

    fn elements(&self, data: &Elements<'_>) -> Buffer {
        match data {
            Elements::F32(x) => self.upload(x),
            Elements::F16(x) => self.upload(x),
            Elements::BF16(x) => self.upload(x),
            Elements::F8E4M3(_) | Elements::F8E5M2(_) => panic!("8-bit floats"),
        }
    }

    /// Allocates memory of NaNs.
    fn result(&self, bytes: usize) -> Buffer {
        let mut buffer = Buffer::new(self.stream.device(), bytes).unwrap();
        buffer.fill(&self.stream, 0xff).unwrap();
        buffer
    }

    fn download(&self, from: &Buffer, to: &mut ElementsMut<'_>) {
        match to {
            ElementsMut::F32(x) => from.download(&self.stream, 0, x),
            ElementsMut::F16(x) => from.download(&self.stream, 0, x),
            ElementsMut::BF16(x) => from.download(&self.stream, 0, x),
            ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => panic!("8-bit floats"),
        }
        .unwrap();
    }

    fn params(&self, params: &[Param<'_>]) -> Vec<Option<(DType, Buffer)>> {
        let one = |p: &Param<'_>| {
            let buffer = match p.value {
                ParamValue::Scalar(_) => return None,
                ParamValue::F32(x) => self.upload(x),
                ParamValue::F16(x) => self.upload(x),
                ParamValue::BF16(x) => self.upload(x),
                ParamValue::I32(x) => self.upload(x),
                ParamValue::I64(x) => self.upload(x),
                ParamValue::Bool(x) => self.upload(&x.iter().map(|&b| u8::from(b)).collect::<Vec<u8>>()),
                ParamValue::F8E8M0(_) => panic!("8-bit floats"),
            };
            Some((p.value.dtype().unwrap(), buffer))
        };
        params.iter().map(one).collect()
    }
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

fn device<'a>(params: &[Param<'a>], uploaded: &[Option<(DType, Buffer)>]) -> Vec<DeviceParam<'a, DeviceSlice>> {
    let value = |p: &Param<'_>, up: &Option<(DType, Buffer)>| match (p.value, up) {
        (_, Some((dtype, buffer))) => DeviceValue::Tensor(*dtype, slice(buffer)),
        (ParamValue::Scalar(x), None) => DeviceValue::Scalar(x),
        (other, None) => panic!("{other:?}"),
    };
    params.iter().zip(uploaded).map(|(p, up)| DeviceParam::new(p.name, value(p, up))).collect()
}

fn size(data: &ElementsMut<'_>) -> usize {
    data.len() * data.dtype().bits() as usize / 8
}

impl HostRank for Hosted {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn forward(&mut self, call: HostForward<'_>) -> Result<(), ParallelError> {
        let HostForward { q, k, v, mut o, stats, row_max, sum_exp, attn_scale, params, .. } = call;
        let [q, k, v] = [q, k, v].map(|x| self.elements(&x));
        let to = self.result(size(&o));
        let mut statistics = [stats, row_max, sum_exp].map(|x| x.map(|x| (self.result(4 * x.len()), x)));
        let uploaded = self.params(params);
        let params = device(params, &uploaded);
        let [stats, row_max, sum_exp] = statistics.each_ref().map(|x| x.as_ref().map(|(buffer, _)| slice(buffer)));
        let call = DeviceForward::new(slice(&q), slice(&k), slice(&v), slice(&to)).stats(stats).row_max(row_max).sum_exp(sum_exp);
        // SAFETY: buffers live until the stream was waited for.
        unsafe { self.ranks.forward(&self.stream, &call.attn_scale(attn_scale).params(&params)) }?;
        self.ranks.wait(&self.stream)?;
        self.download(&to, &mut o);
        for (buffer, x) in statistics.iter_mut().flatten() {
            buffer.download(&self.stream, 0, x).unwrap();
        }
        Ok(())
    }

    fn backward(&mut self, call: HostBackward<'_>) -> Result<(), ParallelError> {
        let HostBackward { q, k, v, o, d_o, stats, dq, dk, dv, attn_scale, params, gradients, .. } = call;
        let [q, k, v, o, d_o] = [q, k, v, o, d_o].map(|x| self.elements(&x));
        let stats = self.upload(stats);
        let mut results = [dq, dk, dv].map(|x| (self.result(size(&x)), x));
        let mut sums: Vec<_> = gradients.into_iter().map(|g| (g.name, self.result(size(&g.data)), g.data)).collect();
        let uploaded = self.params(params);
        let params = device(params, &uploaded);
        let asked: Vec<_> = sums.iter().map(|(name, buffer, _)| DeviceGradient::new(name, slice(buffer))).collect();
        let [dq, dk, dv] = results.each_ref().map(|(buffer, _)| slice(buffer));
        let call = DeviceBackward::new((slice(&q), slice(&k), slice(&v)), (slice(&o), slice(&stats)), slice(&d_o), (dq, dk, dv));
        // SAFETY: as above.
        unsafe { self.ranks.backward(&self.stream, &call.attn_scale(attn_scale).params(&params).gradients(&asked)) }?;
        self.ranks.wait(&self.stream)?;
        for (buffer, x) in &mut results {
            self.download(buffer, x);
        }
        for (_, buffer, x) in &mut sums {
            self.download(buffer, x);
        }
        Ok(())
    }
}
