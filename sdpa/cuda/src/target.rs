//! The schedule of a pass on a device, which need not be present.

use crate::backward::Backward;
use crate::family::Family;
use crate::head_sections::HeadSections;
use crate::kernel::KernelKey;
use crate::mma::{self, TileConfig};
use crate::problem::Forward;
use crate::schedule::{Gpu, Schedule, ScheduleReport};
use crate::tile_config::Tile;
use crate::unsupported::{is_of_layout, unsupported};
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
}

impl Target {
    /// Creates the description of a device with compute capability `sm` (90 for 9.0) and this number of SMs.
    pub fn new(sm: u32, multiprocessors: u32) -> Target {
        Target { sm, multiprocessors, tile: None, family: None }
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
        self.first_supporting(problem.batch_invariant(), |family| match family {
            Family::Wgmma => Forward::of(problem),
            Family::Mma => mma::forward(problem),
        })
    }

    pub(crate) fn supported_backward(&self, problem: &BackwardProblem) -> Result<(Family, Backward), Unsupported> {
        not_empty(problem.forward())?;
        self.first_supporting(problem.forward().batch_invariant(), |family| match family {
            Family::Wgmma => Backward::of(problem),
            Family::Mma => mma::backward(problem),
        })
    }

    /// Returns the first family that supports a problem on this device, with its view of the problem; otherwise the reasons of the family that has
    /// the fewest. The families round differently. So the strides, addresses and pages of a batch-invariant call must not select its family: if nothing
    /// else keeps it from the first family, no other one takes it.
    fn first_supporting<T>(
        &self,
        batch_invariant: bool,
        ask: impl Fn(Family) -> Result<T, Unsupported>,
    ) -> Result<(Family, T), Unsupported> {
        let asked = Family::ALL.into_iter().filter(|family| self.family.is_none_or(|only| only == *family));
        let (able, unable): (Vec<_>, Vec<_>) = asked.partition(|family| family.runs_on(self.sm));
        let mut refused: Option<Unsupported> = None;
        for family in able {
            match ask(family) {
                Ok(supported) => return Ok((family, supported)),
                Err(mut why) if batch_invariant && why.reasons.iter().all(is_of_layout) => {
                    let limit = "false for these operands: the kernels that support them have other bits".to_owned();
                    why.reasons.push(Reason::Limit { field: "batch_invariant".to_owned(), value: "true".to_owned(), limit });
                    return Err(why);
                }
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

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Paged, Shape};

    const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 200, seq_kv: 200, dim_qk: 128, dim_v: 128 };

    fn dense(dtype: DType, dim: i64) -> AttentionSpec {
        AttentionSpec::dense(dtype, Shape { dim_qk: dim, dim_v: dim, ..SHAPE }, Layout::Bhsd).with_stats()
    }

    /// Returns the specification with rows of K that TMA cannot read.
    fn apart(mut spec: AttentionSpec) -> AttentionSpec {
        spec.k.strides[2] += 4;
        spec.k.strides[1] *= 2;
        spec.k.strides[0] *= 2;
        spec
    }

    fn family(spec: &AttentionSpec) -> Result<Family, String> {
        Target::new(90, 132).supported_forward(&spec.validate().unwrap()).map(|(family, _)| family).map_err(|e| e.to_string())
    }

    #[test]
    fn the_layout_of_a_batch_invariant_call_does_not_select_its_family() {
        let narrow = dense(DType::BF16, 128);
        assert_eq!([family(&narrow), family(&narrow.clone().batch_invariant())], [Ok(Family::Wgmma), Ok(Family::Wgmma)]);
        assert_eq!(family(&apart(narrow.clone())), Ok(Family::Mma));
        let mut unaligned = narrow.clone();
        unaligned.v.alignment = 4;
        let pages = AttentionSpec::paged(DType::F16, SHAPE, Paged::new(4, 120));
        assert_eq!(family(&pages), Ok(Family::Mma));
        for spec in [apart(narrow), unaligned, pages] {
            let why = family(&spec.batch_invariant()).unwrap_err();
            assert!(why.contains("have other bits") && why.contains("16 bytes") | why.contains("page_size"), "{why}");
        }
        // The other family takes these in every call.
        for spec in [dense(DType::F32, 128), dense(DType::BF16, 192)] {
            assert_eq!(
                [family(&spec.clone().batch_invariant()), family(&apart(spec).batch_invariant())],
                [Ok(Family::Mma), Ok(Family::Mma)]
            );
        }
    }

    #[test]
    fn a_deterministic_pass_takes_the_family_that_supports_it() {
        let of = |spec: AttentionSpec| {
            let problem = spec.backward().deterministic().validate().unwrap();
            Target::new(90, 132).supported_backward(&problem).map(|(family, _)| family).map_err(|e| e.to_string())
        };
        let square = dense(DType::BF16, 128).score_mod("score * score".parse().unwrap());
        let rows = |batch: i64| {
            AttentionSpec::dense(DType::BF16, Shape { batch, heads_q: 128, heads_kv: 128, ..SHAPE }, Layout::Bhsd).with_stats()
        };
        assert_eq!([of(rows(40_000)), of(rows(60_000))], [Ok(Family::Wgmma), Ok(Family::Mma)]);
        let answers = [dense(DType::BF16, 128), apart(dense(DType::BF16, 128)), dense(DType::F16, 256), square].map(of);
        assert_eq!(answers, [Ok(Family::Wgmma), Ok(Family::Mma), Ok(Family::Wgmma), Ok(Family::Mma)]);
        let invariant = |spec: AttentionSpec| {
            let problem = spec.batch_invariant().backward().validate().unwrap();
            Target::new(90, 132).supported_backward(&problem).map(|(family, _)| family).map_err(|e| e.to_string())
        };
        assert_eq!(invariant(dense(DType::BF16, 128)), Ok(Family::Wgmma));
        assert!(invariant(apart(dense(DType::BF16, 128))).unwrap_err().contains("have other bits"));
    }
}
