//! One rank's connection with the others, and its plans.

use crate::error::one;
use candle_core::{Device, Result};
use sdpa::ExecutorName;
use sdpa::distributed::{Exchange, ExchangeError, Incoming, Outgoing, ParallelError, ParallelProblem, ParallelSpec};
#[cfg(feature = "cpu")]
use sdpa::{HostBackward, HostForward};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(feature = "cuda")]
use {
    candle_core::cuda::CudaDevice,
    sdpa::distributed::{DeviceContextParallel, Partials, SharedCommunicator},
};

/// The plans that a rank keeps unless it is told otherwise.
pub(crate) const PLANS: usize = 8;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The other ranks, over host memory.
#[derive(Clone, Debug)]
pub(crate) struct OnHost {
    rank: usize,
    size: usize,
    exchange: Arc<Mutex<Box<dyn Exchange>>>,
}

impl OnHost {
    fn new(exchange: impl Exchange + 'static) -> OnHost {
        OnHost { rank: exchange.rank(), size: exchange.size(), exchange: Arc::new(Mutex::new(Box::new(exchange))) }
    }
}

impl Exchange for OnHost {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn exchange(&mut self, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> std::result::Result<(), ExchangeError> {
        locked(&self.exchange).exchange(sends, receives)
    }

    fn abort(&mut self, reason: &str) {
        locked(&self.exchange).abort(reason);
    }
}

/// The ways to the other ranks.
#[derive(Debug)]
enum Link {
    Host(OnHost),
    #[cfg(feature = "cuda")]
    Cuda(SharedCommunicator, CudaDevice, Partials),
}

impl Link {
    fn abort(&self, reason: &str) {
        match self {
            Link::Host(exchange) => exchange.clone().abort(reason),
            #[cfg(feature = "cuda")]
            Link::Cuda(communicator, ..) => communicator.abort(reason),
        }
    }
}

#[cfg(feature = "cpu")]
type HostRank = sdpa::distributed::ContextParallel<OnHost>;

/// A problem that a rank has prepared.
#[derive(Debug)]
enum Ready {
    #[cfg(feature = "cpu")]
    Host(Box<HostRank>),
    #[cfg(feature = "cuda")]
    Cuda(Box<DeviceContextParallel>),
}

/// A prepared problem and its group.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) problem: Arc<ParallelProblem>,
    group: Arc<Group>,
    ready: Mutex<Ready>,
}

/// One rank and its connection with the others.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    link: Link,
    /// Held during a call, so that the exchanges of two threads do not mix.
    turn: Mutex<()>,
    /// The error of the first call that failed.
    failure: Mutex<Option<Arc<ParallelError>>>,
}

/// The plans of a rank, in the order of their last use.
///
/// All ranks make equal calls and so drop equal plans, which `PlanCache` does not promise: a rank that alone has dropped a plan would compare problems with
/// ranks that do not.
#[derive(Debug, Default)]
pub(crate) struct Plans(Mutex<Vec<(Key, Arc<Plan>)>>);

type Key = (ParallelSpec, Option<ExecutorName>);

impl Plans {
    /// Returns the plan of a problem, which is made when it is first asked for. At most `most` plans are kept.
    pub(crate) fn find_or_make(&self, group: &Arc<Group>, key: Key, most: usize) -> Result<Arc<Plan>> {
        {
            let mut kept = locked(&self.0);
            if let Some(place) = kept.iter().position(|(own, _)| *own == key) {
                let found = kept.remove(place);
                let plan = found.1.clone();
                kept.push(found);
                return Ok(plan);
            }
        }
        let plan = group.run(|| {
            let problem = Arc::new(key.0.validate()?);
            let ready = Mutex::new(group.ready(&problem, key.1)?);
            Ok(Arc::new(Plan { problem, group: group.clone(), ready }))
        })?;
        // A plan that is dropped waits for its last call, so drop it without the lock.
        let _dropped = {
            let mut kept = locked(&self.0);
            kept.push((key, plan.clone()));
            let more = kept.len().saturating_sub(most.max(1));
            kept.drain(..more).collect::<Vec<_>>()
        };
        Ok(plan)
    }
}

impl Plan {
    /// Runs a forward pass over host memory.
    #[cfg(feature = "cpu")]
    pub(crate) fn forward(&self, call: HostForward<'_>) -> Result<()> {
        self.on_host(|rank| rank.forward(call))
    }

    /// Runs a backward pass over host memory.
    #[cfg(feature = "cpu")]
    pub(crate) fn backward(&self, call: HostBackward<'_>) -> Result<()> {
        self.on_host(|rank| rank.backward(call))
    }

    #[cfg(feature = "cpu")]
    fn on_host(&self, run: impl FnOnce(&mut HostRank) -> std::result::Result<(), ParallelError>) -> Result<()> {
        self.group.run(|| match &mut *locked(&self.ready) {
            Ready::Host(rank) => {
                // Another plan may be the one that other ranks run.
                rank.compare_again();
                run(rank)
            }
            #[cfg(feature = "cuda")]
            Ready::Cuda(_) => Err(misplaced()),
        })
    }

    /// Runs a pass over device memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self, run: impl FnOnce(&mut DeviceContextParallel) -> std::result::Result<(), ParallelError>) -> Result<()> {
        self.group.run(|| match &mut *locked(&self.ready) {
            Ready::Cuda(rank) => run(rank),
            #[cfg(feature = "cpu")]
            Ready::Host(_) => Err(misplaced()),
        })
    }
}

#[cfg(all(feature = "cpu", feature = "cuda"))]
fn misplaced() -> ParallelError {
    ParallelError::Attention(sdpa::Error::Bug("a plan of another device".to_owned()))
}

impl Group {
    fn new(rank: usize, size: usize, link: Link) -> Group {
        Group { rank, size, link, turn: Mutex::default(), failure: Mutex::default() }
    }

    pub(crate) fn on_host(exchange: impl Exchange + 'static) -> Group {
        let link = OnHost::new(exchange);
        Group::new(link.rank, link.size, Link::Host(link))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_cuda(communicator: SharedCommunicator, device: CudaDevice, partials: Partials) -> Group {
        Group::new(communicator.rank(), communicator.size(), Link::Cuda(communicator, device, partials))
    }

    pub(crate) fn failure(&self) -> Option<Arc<ParallelError>> {
        locked(&self.failure).clone()
    }

    /// Calls `f` unless an earlier call failed. If it fails, the other ranks are told, and every later call fails.
    fn run<R>(&self, f: impl FnOnce() -> std::result::Result<R, ParallelError>) -> Result<R> {
        let _turn = locked(&self.turn);
        if let Some(why) = self.failure() {
            let why = if let ParallelError::Broken(why) = &*why { why.clone() } else { why.to_string() };
            return Err(candle_core::Error::wrap(ParallelError::Broken(why)));
        }
        f().map_err(|error| {
            let error = Arc::new(error);
            self.fail(&error.to_string(), &error);
            candle_core::Error::wrap(error)
        })
    }

    fn fail(&self, text: &str, error: &Arc<ParallelError>) {
        self.link.abort(text);
        locked(&self.failure).get_or_insert_with(|| error.clone());
    }

    /// Passes on the result of a call. The other ranks wait for a rank whose call failed, for whatever reason, unless they are told.
    pub(crate) fn noted<R>(&self, result: Result<R>) -> Result<R> {
        if let Err(error) = &result
            && self.failure().is_none()
        {
            let text = error.to_string();
            self.fail(&text, &Arc::new(ParallelError::Broken(text.clone())));
        }
        result
    }

    /// Returns an error if tensors on a device are not those of this rank.
    pub(crate) fn is_for(&self, name: &str, device: &Device) -> Result<()> {
        let wrong = |expected: String| one(format!("{name} device"), format!("{:?}", device.location()), expected);
        match &self.link {
            Link::Host(_) if device.is_cpu() => Ok(()),
            Link::Host(_) => Err(wrong("Cpu: the ranks exchange host memory".to_owned())),
            #[cfg(feature = "cuda")]
            Link::Cuda(_, own, _) if device.same_device(&Device::Cuda(own.clone())) => Ok(()),
            #[cfg(feature = "cuda")]
            Link::Cuda(_, own, _) => {
                let own = Device::Cuda(own.clone());
                Err(wrong(format!("{:?}, the device of the rank: use one candle device for the rank and its tensors", own.location())))
            }
        }
    }

    fn ready(&self, problem: &Arc<ParallelProblem>, _executor: Option<ExecutorName>) -> std::result::Result<Ready, ParallelError> {
        match &self.link {
            #[cfg(feature = "cpu")]
            Link::Host(exchange) => {
                let made = HostRank::new(crate::host::executor(), problem.clone(), exchange.clone())?;
                Ok(Ready::Host(Box::new(made)))
            }
            #[cfg(not(feature = "cpu"))]
            Link::Host(_) => Err(ParallelError::Attention(crate::pass::without("cpu").into())),
            #[cfg(feature = "cuda")]
            Link::Cuda(communicator, device, partials) => {
                let planner = crate::cuda::planner(device, _executor);
                let made = DeviceContextParallel::new(&planner, problem.clone(), communicator.clone(), *partials)?;
                Ok(Ready::Cuda(Box::new(made)))
            }
        }
    }

    /// Sends bytes to all other ranks. `lengths` are the numbers of bytes of all ranks. Returns the bytes of all ranks.
    pub(crate) fn gather(&self, own: &[u8], lengths: &[usize]) -> Result<Vec<Vec<u8>>> {
        self.run(|| match &self.link {
            Link::Host(exchange) => {
                let mut all: Vec<Vec<u8>> = lengths.iter().map(|n| vec![0; *n]).collect();
                all[self.rank].copy_from_slice(own);
                let others = (0..self.size).filter(|peer| *peer != self.rank);
                let sends: Vec<_> = others.map(|peer| Outgoing { peer, bytes: own }).collect();
                let others = all.iter_mut().enumerate().filter(|(peer, _)| *peer != self.rank);
                let mut receives: Vec<_> = others.map(|(peer, bytes)| Incoming { peer, bytes }).collect();
                exchange.clone().exchange(&sends, &mut receives)?;
                Ok(all)
            }
            #[cfg(feature = "cuda")]
            Link::Cuda(communicator, ..) => Ok(communicator.gather(own, lengths)?),
        })
    }

    /// Waits for the work of the rank's device, with the deadline of the communicator.
    pub(crate) fn wait(&self) -> Result<()> {
        self.run(|| match &self.link {
            Link::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Link::Cuda(communicator, device, _) => Ok(crate::cuda::wait(communicator, device)?),
        })
    }
}
