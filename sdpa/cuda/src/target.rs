//! The schedule of a pass on a device, which need not be present.

use crate::backward::Backward;
use crate::family::Family;
use crate::head_sections::HeadSections;
use crate::kernel::KernelKey;
use crate::mma::{self, TileConfig};
use crate::problem::Forward;
use crate::schedule::{Gpu, Schedule, ScheduleReport};
use crate::tile_config::Tile;
use crate::unsupported::unsupported;
use crate::wgmma;
use sdpa_core::backward::BackwardProblem;
use sdpa_core::empty;
use sdpa_core::error::{Reason, Unsupported};
use sdpa_core::problem::Problem;
use sdpa_driver::Device;
use sdpa_nvidia::Job;

/// The properties of a device on which schedules and kernel sources depend, and overrides of the tile configurations that are selected by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The compute capability: 90 for 9.0.
    pub sm: u32,
    /// Number of SMs. It determines whether keys are split, and whether several thread blocks share a GQA group.
    pub multiprocessors: u32,
    /// The tile for every forward problem whose head dims fit it; `None` for the tile of [`Forward::tile`].
    pub tile: Option<Tile>,
    /// The only family of kernels to try. With `None`, all families that the device runs are tried, the fastest first.
    pub family: Option<Family>,
    /// Whether the WGMMA kernels take deterministic backward passes, whose dQ they sum in fixed point, and batch-invariant passes, whose keys they
    /// split in parts of a fixed size. False by default.
    pub fixed_order: bool,
}

impl Target {
    /// Creates the description of a device with compute capability `sm` (90 for 9.0) and this number of SMs.
    pub fn new(sm: u32, multiprocessors: u32) -> Target {
        Target { sm, multiprocessors, tile: None, family: None, fixed_order: false }
    }

    /// Creates the description of a device in this machine.
    pub fn of(device: &Device) -> Target {
        Target::new(device.sm(), device.sm_count())
    }

    /// Returns the keys of the kernels that a pass needs on this device, in the order of compilation.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// use sdpa_cuda::Target;
    ///
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 4096, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal());
    /// let kernels = Target::new(90, 132).kernels(&spec.validate()?.into())?;
    /// assert_eq!((kernels.len(), kernels[0].architecture.as_str()), (1, "sm_90a"));
    /// assert!(kernels[0].source.contains("wgmma"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns every limit of the kernels that the pass breaks on this device.
    pub fn kernels(&self, job: &Job) -> Result<Vec<KernelKey>, Unsupported> {
        Ok(self.schedule_of(job)?.kernels)
    }

    /// Returns the memory that a pass uses on this device in addition to its operands, and the work that its calls submit.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// use sdpa_cuda::Target;
    ///
    /// let shape = Shape { batch: 4, heads_q: 32, heads_kv: 8, seq_q: 1, seq_kv: 9000, dim_qk: 128, dim_v: 128 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// let schedule = Target::new(90, 132).schedule(&spec.validate()?.into())?;
    /// // Split-KV: a list of tiles, the kernel, and the kernel that combines splits.
    /// assert_eq!(schedule.steps.len(), 3);
    /// assert!(schedule.workspace > 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails as [`Target::kernels`] does.
    pub fn schedule(&self, job: &Job) -> Result<ScheduleReport, Unsupported> {
        Ok(self.schedule_of(job)?.report())
    }

    fn gpu(&self) -> Gpu {
        Gpu { sm: self.sm, multiprocessors: self.multiprocessors }
    }

    fn schedule_of(&self, job: &Job) -> Result<Schedule, Unsupported> {
        match job {
            Job::Forward(problem) => self.forward(problem),
            Job::Backward(problem) => self.backward(problem),
        }
    }

    pub(crate) fn forward(&self, problem: &Problem) -> Result<Schedule, Unsupported> {
        let (family, forward) = self.supported_forward(problem)?;
        Ok(match family {
            Family::Wgmma => {
                // Batch-invariant problems have one tile shape per head dim.
                let own = self.tile.filter(|tile| tile.holds(problem.dim_qk(), problem.dim_v()) && !problem.batch_invariant());
                let tile = own.map_or_else(|| forward.tile(self.multiprocessors), Ok)?;
                wgmma::forward_schedule(problem, &forward, &tile, self.gpu())
            }
            Family::Mma => mma::forward_schedule(problem, &forward, &TileConfig::of_forward(&forward)?, self.gpu()),
        })
    }

    pub(crate) fn backward(&self, problem: &BackwardProblem) -> Result<Schedule, Unsupported> {
        let (family, backward) = self.supported_backward(problem)?;
        Ok(match family {
            Family::Wgmma => {
                let tile = backward.tile(self.multiprocessors)?;
                let sections = HeadSections::of(&backward, &tile, self.multiprocessors);
                wgmma::backward_schedule(problem, &backward, (&tile, &sections), self.gpu())
            }
            Family::Mma => mma::backward_schedule(problem, &backward, &TileConfig::of_backward(&backward)?, self.gpu()),
        })
    }

    pub(crate) fn supported_forward(&self, problem: &Problem) -> Result<(Family, Forward), Unsupported> {
        not_empty(problem)?;
        self.first_supporting(|family| match family {
            Family::Wgmma => Forward::of(problem).and_then(|forward| self.invariant(forward)),
            Family::Mma => mma::forward(problem),
        })
    }

    pub(crate) fn supported_backward(&self, problem: &BackwardProblem) -> Result<(Family, Backward), Unsupported> {
        not_empty(problem.forward())?;
        self.first_supporting(|family| match family {
            Family::Wgmma => Backward::of(problem).and_then(|backward| self.ordered(problem, backward)),
            Family::Mma => mma::backward(problem),
        })
    }

    /// Refuses a batch-invariant forward pass of the WGMMA kernels unless the option `fixed_order` gives it to them.
    fn invariant(&self, forward: Forward) -> Result<Forward, Unsupported> {
        if !forward.batch_invariant || self.fixed_order {
            return Ok(forward);
        }
        let limit = "false: the option fixed_order selects splits of fixed size".to_owned();
        Err(unsupported(vec![Reason::Limit { field: "batch_invariant".to_owned(), value: "true".to_owned(), limit }]))
    }

    /// Refuses a deterministic pass of the WGMMA kernels unless the option `fixed_order` gives it to them.
    fn ordered(&self, problem: &BackwardProblem, backward: Backward) -> Result<Backward, Unsupported> {
        if !backward.deterministic || self.fixed_order {
            return Ok(backward);
        }
        let field = if problem.deterministic() { "deterministic" } else { "batch_invariant" };
        let limit = "false: the kernels sum dq in no fixed order without the option fixed_order".to_owned();
        Err(unsupported(vec![Reason::Limit { field: field.to_owned(), value: "true".to_owned(), limit }]))
    }

    /// Returns the first family that supports a problem on this device, with its view of the problem; otherwise the reasons of the family that has
    /// the fewest.
    fn first_supporting<T>(&self, ask: impl Fn(Family) -> Result<T, Unsupported>) -> Result<(Family, T), Unsupported> {
        let asked = Family::ALL.into_iter().filter(|family| self.family.is_none_or(|only| only == *family));
        let (able, unable): (Vec<_>, Vec<_>) = asked.partition(|family| family.runs_on(self.sm));
        let mut refused: Option<Unsupported> = None;
        for family in able {
            match ask(family) {
                Ok(supported) => return Ok((family, supported)),
                Err(why) if refused.as_ref().is_none_or(|before| why.reasons.len() < before.reasons.len()) => refused = Some(why),
                Err(_) => {}
            }
        }
        if let Some(refused) = refused {
            return Err(refused);
        }
        // No family runs on this device. Report that, and the reasons on other devices.
        let [major, minor] = [self.sm / 10, self.sm % 10];
        let last = unable.last().copied().unwrap_or(Family::Mma);
        let device =
            Reason::Limit { field: "compute capability".to_owned(), value: format!("{major}.{minor}"), limit: last.devices().to_owned() };
        let more = ask(last).err().map_or_else(Vec::new, |why| why.reasons);
        Err(unsupported([device].into_iter().chain(more).collect()))
    }
}

fn not_empty(problem: &Problem) -> Result<(), Unsupported> {
    empty::unsupported(problem).map_or(Ok(()), |reason| Err(unsupported(vec![reason])))
}
