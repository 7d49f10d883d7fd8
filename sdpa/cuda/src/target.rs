//! What passes are compiled from for a device, which need not be there.

use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::family::Family;
use crate::kernel::KernelKey;
use crate::mma::{self, Cut};
use crate::plan::Pass;
use crate::problem::{Forward, unsupported};
use crate::sections::Sections;
use crate::source;
use crate::tile::Tile;
use sdpa_core::backward::BackwardProblem;
use sdpa_core::empty;
use sdpa_core::error::{Reason, Unsupported};
use sdpa_core::problem::Problem;
use sdpa_driver::Device;
use sdpa_nvidia::Job;

/// A device, as far as the text of a kernel depends on it, and what is to be taken in place of the usual choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The compute capability: 90 for 9.0.
    pub sm: u32,
    /// Multiprocessors, which say whether keys are split, and the heads of a group shared out.
    pub multiprocessors: u32,
    /// The tile for every forward problem whose head dims it holds, in place of [`Forward::tile`].
    pub tile: Option<Tile>,
    /// The only family of kernels that is asked, in place of every one that the device runs, the fastest first.
    pub family: Option<Family>,
}

/// A pass, and the texts that it is compiled from: one, or two of which the second is of gradients of keys.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) pass: Pass,
    pub(crate) first: KernelKey,
    pub(crate) second: Option<KernelKey>,
}

/// A text, and its kernels with the shared memory of each.
type Text = (String, Vec<(EntryPoint, u32)>);

impl Target {
    /// A device of this compute capability and so many multiprocessors.
    pub fn new(sm: u32, multiprocessors: u32) -> Target {
        Target { sm, multiprocessors, tile: None, family: None }
    }

    /// A device that is there.
    pub fn of(device: &Device) -> Target {
        Target::new(device.sm(), device.sm_count())
    }

    /// What a pass is compiled from, in the order in which it is compiled.
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
    /// Every limit of the kernels that the pass breaks, on this device.
    pub fn kernels(&self, job: &Job) -> Result<Vec<KernelKey>, Unsupported> {
        let written = match job {
            Job::Forward(problem) => self.forward(problem),
            Job::Backward(problem) => self.backward(problem),
        };
        written.map(|Written { first, second, .. }| std::iter::once(first).chain(second).collect())
    }

    pub(crate) fn forward(&self, problem: &Problem) -> Result<Written, Unsupported> {
        let (family, forward) = self.takes(problem)?;
        let (pass, source, entries): (Pass, _, _) = match family {
            Family::Wgmma => {
                let own = self.tile.filter(|tile| tile.holds(problem.dim_qk(), problem.dim_v()));
                let tile = own.map_or_else(|| forward.tile(self.multiprocessors), Ok)?;
                let source = source::forward(&forward, &tile);
                let mut entries = vec![(EntryPoint::Forward, tile.shared_bytes())];
                entries.extend(forward.lists_tiles(&tile).then_some((EntryPoint::TileList, 0)));
                entries.extend(tile.split.then_some((EntryPoint::Combine, 0)));
                ((forward, tile).into(), source, entries)
            }
            Family::Mma => {
                let cut = Cut::of_forward(&forward)?;
                let source = mma::forward_text(&forward, &cut);
                ((forward, cut).into(), source, vec![(EntryPoint::Forward, cut.shared_bytes())])
            }
        };
        Ok(self.written(family, pass, (source, entries), None))
    }

    pub(crate) fn backward(&self, problem: &BackwardProblem) -> Result<Written, Unsupported> {
        let (family, backward) = self.takes_backward(problem)?;
        Ok(match family {
            Family::Wgmma => {
                let tile = backward.tile(self.multiprocessors)?;
                let source = source::backward(&backward, &tile);
                let mut entries = vec![
                    (EntryPoint::Backward, tile.shared_bytes()),
                    (EntryPoint::BackwardPreprocess, 0),
                    (EntryPoint::ConvertGradient, 0),
                ];
                entries.extend((tile.sums_bytes() == 0).then_some((EntryPoint::ConvertDq, 0)));
                let sections = Sections::of(&backward, &tile, self.multiprocessors);
                self.written(family, (backward, tile, sections).into(), (source, entries), None)
            }
            Family::Mma => {
                let cut = Cut::of_backward(&backward)?;
                let queries = vec![
                    (EntryPoint::BackwardDq, cut.shared_bytes()),
                    (EntryPoint::BackwardPreprocess, 0),
                    (EntryPoint::SinkGradient, mma::SINKS_SHARED_BYTES),
                    (EntryPoint::ConvertGradient, 0),
                    (EntryPoint::ReduceGradient, 0),
                ];
                let keys = vec![(EntryPoint::BackwardDkv, cut.shared_bytes())];
                let [queries, keys] = [(mma::queries_text(&backward, &cut), queries), (mma::keys_text(&backward, &cut), keys)];
                self.written(family, (backward, cut).into(), queries, Some(keys))
            }
        })
    }

    /// Each text has the kernel that makes lists, where calls make them.
    fn written(&self, family: Family, pass: Pass, first: Text, second: Option<Text>) -> Written {
        let (lists, cut) = (pass.lists_entry(), pass.cut());
        let key = |(source, mut entries): Text| {
            entries.extend(lists);
            KernelKey { source: source.into(), entries, cut: cut.clone(), architecture: family.architecture(self.sm) }
        };
        let (first, second) = (key(first), second.map(key));
        Written { pass, first, second }
    }

    pub(crate) fn takes(&self, problem: &Problem) -> Result<(Family, Forward), Unsupported> {
        not_empty(problem)?;
        self.taken(|family| match family {
            Family::Wgmma => Forward::of(problem),
            Family::Mma => mma::forward(problem),
        })
    }

    pub(crate) fn takes_backward(&self, problem: &BackwardProblem) -> Result<(Family, Backward), Unsupported> {
        not_empty(problem.forward())?;
        self.taken(|family| match family {
            Family::Wgmma => Backward::of(problem),
            Family::Mma => mma::backward(problem),
        })
    }

    /// What the first family takes of a problem that takes it, on this device; else the reasons of the one that has the fewest.
    fn taken<T>(&self, ask: impl Fn(Family) -> Result<T, Unsupported>) -> Result<(Family, T), Unsupported> {
        let asked = Family::ALL.into_iter().filter(|family| self.family.is_none_or(|only| only == *family));
        let (able, unable): (Vec<_>, Vec<_>) = asked.partition(|family| family.runs_on(self.sm));
        let mut refused: Option<Unsupported> = None;
        for family in able {
            match ask(family) {
                Ok(taken) => return Ok((family, taken)),
                Err(why) if refused.as_ref().is_none_or(|before| why.reasons.len() < before.reasons.len()) => refused = Some(why),
                Err(_) => {}
            }
        }
        if let Some(refused) = refused {
            return Err(refused);
        }
        // No family runs here: that, and what would be declined elsewhere.
        let [major, minor] = [self.sm / 10, self.sm % 10];
        let last = unable.last().copied().unwrap_or(Family::Mma);
        let device =
            Reason::Limit { field: "compute capability".to_owned(), value: format!("{major}.{minor}"), limit: last.devices().to_owned() };
        let more = ask(last).err().map_or_else(Vec::new, |why| why.reasons);
        Err(unsupported([device].into_iter().chain(more).collect()))
    }
}

fn not_empty(problem: &Problem) -> Result<(), Unsupported> {
    empty::declined(problem).map_or(Ok(()), |reason| Err(unsupported(vec![reason])))
}
