//! A pass made ready: its kernels, its map in device memory, and calls of it.

mod backward;
mod forward;
mod lists;
mod mma_backward;
mod mma_forward;
mod room;
mod told;

use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::map::BlockMap;
use crate::mma::Cut;
use crate::problem::{Forward, Lists};
use crate::sections::Sections;
use crate::source::MAP_SHARED_BYTES;
use crate::tile::{BackwardTile, Tile};
use sdpa_cache::{CacheValue, Weight};
use sdpa_core::device::{DeviceCall, DevicePrepared};
use sdpa_driver::{Buffer, Device, DeviceSlice, Stream, Submission};
use sdpa_nvidia::{Job, call};
use smallvec::SmallVec;
use std::sync::{Arc, OnceLock};
use told::ListsAt;

/// A map in device memory.
#[derive(Debug)]
struct Mapped {
    at: ListsAt,
    memory: SmallVec<[Buffer; 2]>,
}

/// What a device may still read of a plan.
#[derive(Clone, Debug)]
struct Kept {
    kernel: Arc<Kernel>,
    map: Option<Arc<Mapped>>,
    /// Of a pass that has two texts, the second: of gradients of keys.
    keys: Option<(Arc<Kernel>, Option<Arc<Mapped>>)>,
}

/// Of which tiles of queries and blocks of keys lists are made, and whether each list is a block's and has tiles.
#[derive(Clone, Copy, Debug)]
struct Walk {
    queries: u32,
    keys: u32,
    of_keys: bool,
}

impl Walk {
    /// The lists, where a rule of places alone says them.
    fn map(self, forward: &Forward) -> Option<BlockMap> {
        let of = if self.of_keys { BlockMap::of_keys } else { BlockMap::of_queries };
        of(forward, self.queries, self.keys)
    }
}

/// A problem as the kernels of its pass are told of it.
#[derive(Clone, Debug)]
pub(crate) enum Pass {
    Forward(Box<Forward>, Tile),
    Backward(Box<Backward>, BackwardTile, Sections),
    /// With `mma.sync`.
    MmaForward(Box<Forward>, Cut),
    MmaBackward(Box<Backward>, Cut),
}

impl Pass {
    /// The attention of either pass.
    fn attention(&self) -> &Forward {
        match self {
            Pass::Forward(forward, _) | Pass::MmaForward(forward, _) => forward,
            Pass::Backward(backward, ..) | Pass::MmaBackward(backward, _) => &backward.forward,
        }
    }

    /// The kernel that makes lists of blocks, where each call has its own.
    pub(crate) fn lists_entry(&self) -> Option<(EntryPoint, u32)> {
        (self.attention().lists() == Lists::AtCall).then_some((EntryPoint::BlockLists, MAP_SHARED_BYTES))
    }

    /// What its kernel walks over; of two, the first.
    fn walk(&self) -> Walk {
        match self {
            Pass::Forward(_, tile) => Walk { queries: tile.queries(), keys: tile.keys, of_keys: false },
            Pass::Backward(_, tile, _) => Walk { queries: tile.queries, keys: BackwardTile::KEYS, of_keys: true },
            Pass::MmaForward(_, cut) | Pass::MmaBackward(_, cut) => Walk { queries: cut.own, keys: cut.step, of_keys: false },
        }
    }
}

/// A pass made ready on a device.
#[derive(Debug)]
pub struct CudaPlan {
    job: Job,
    pass: Pass,
    kept: Kept,
    /// Whether calls make lists of blocks, where a rule reads tensors: not those around a map that is made.
    makes_lists: bool,
    /// Names of the tensors that traces read, and of the scalars, in the order of the kernel's structure.
    tensors: Vec<String>,
    scalars: Vec<String>,
    /// The device that was given work of it.
    used: OnceLock<&'static Device>,
}

impl CacheValue for CudaPlan {
    fn weight(&self) -> Weight {
        let maps = self.kept.map.iter().chain(self.kept.keys.iter().flat_map(|(_, map)| map));
        let maps = maps.flat_map(|map| &map.memory).map(|buffer| buffer.bytes() as u64).sum();
        Weight { host: 0, device: maps, workspace: 0 }
    }
}

impl CudaPlan {
    /// Of a pass that has two texts, the second is that of gradients of keys.
    pub(crate) fn new(job: Job, pass: Pass, kernel: Arc<Kernel>, keys: Option<Arc<Kernel>>, stream: &Stream) -> Result<CudaPlan, Error> {
        let mapped = |walk: Walk| {
            let Some(map) = walk.map(pass.attention()) else { return Ok(None) };
            let up = |numbers: &[u32]| {
                let mut buffer = Buffer::new(stream.device(), size_of_val(numbers).max(4))?;
                buffer.upload(stream, 0, numbers)?;
                Ok::<_, sdpa_driver::Error>(buffer)
            };
            let (begin, blocks) = (up(&map.begin)?, up(&map.blocks)?);
            let at = ListsAt { begin: begin.address(), end: begin.address() + 4, blocks: blocks.address(), rows: map.rows };
            Ok::<_, Error>(Some(Arc::new(Mapped { at, memory: SmallVec::from_iter([begin, blocks]) })))
        };
        let map = mapped(pass.walk())?;
        let keys = match (keys, &pass) {
            (Some(kernel), Pass::MmaBackward(_, cut)) => Some((kernel, mapped(mma_backward::walk_of_keys(cut))?)),
            (Some(_) | None, _) => None,
        };
        let captured = &pass.attention().captured;
        let tensors = captured.tensors().into_iter().map(|(name, ..)| name.to_owned()).collect();
        let scalars = captured.scalars().into_iter().map(str::to_owned).collect();
        Ok(CudaPlan { job, pass, kept: Kept { kernel, map, keys }, makes_lists: true, tensors, scalars, used: OnceLock::new() })
    }

    /// Submits a call, and gives the same pass around the blocks that its masks leave: calls of that find none again, as layers want it that have one mask. Where
    /// no mask reads tensors, blocks are found when the plan is made, and it is this plan.
    ///
    /// ```
    /// use sdpa_core::device::DeviceCall;
    /// use sdpa_cuda::{CudaPlan, Error};
    /// use sdpa_driver::{DeviceSlice, Stream};
    /// use std::sync::Arc;
    ///
    /// /// # Safety
    /// /// As `DevicePrepared::submit`.
    /// unsafe fn all(plan: &Arc<CudaPlan>, stream: &Stream, layers: &[DeviceCall<'_, DeviceSlice>]) -> Result<(), sdpa_core::Error> {
    ///     use sdpa_core::device::DevicePrepared;
    ///     let Some((first, others)) = layers.split_first() else { return Ok(()) };
    ///     // SAFETY: the caller's.
    ///     let mapped = unsafe { plan.with_block_map(stream, first) }?;
    ///     for layer in others {
    ///         // SAFETY: the caller's.
    ///         unsafe { mapped.submit(stream, layer) }?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Safety
    /// As [`DevicePrepared::submit`]; calls of what is given are submitted to this stream, or behind its work. What their masks read has the values that it has
    /// now: else pairs are kept or dropped that should not be.
    ///
    /// # Errors
    /// As [`DevicePrepared::submit`].
    #[allow(unsafe_code, reason = "the device tier's contract is handed on")]
    pub unsafe fn with_block_map(
        self: &Arc<CudaPlan>,
        stream: &Stream,
        call: &DeviceCall<'_, DeviceSlice>,
    ) -> Result<Arc<CudaPlan>, Error> {
        let device = self.kept.kernel.module.device();
        let room = |walk: Walk| {
            let Some(made) = lists::Made::of(self.pass.attention(), walk) else { return Ok(None) };
            let buffer = Buffer::new(device, usize::try_from(made.bytes()).unwrap_or(usize::MAX))?;
            Ok::<_, Error>(Some(Arc::new(Mapped { at: made.at(buffer.address()), memory: SmallVec::from_iter([buffer]) })))
        };
        let own = if self.makes_lists { room(self.pass.walk())? } else { None };
        let Some(map) = own else {
            // SAFETY: the caller's.
            unsafe { self.submit_to(stream, call) }?;
            return Ok(self.clone());
        };
        let keys = match (&self.kept.keys, &self.pass) {
            (Some((kernel, _)), Pass::MmaBackward(_, cut)) => Some((kernel.clone(), room(mma_backward::walk_of_keys(cut))?)),
            (Some(_) | None, _) => None,
        };
        let kept = Kept { kernel: self.kept.kernel.clone(), map: Some(map), keys };
        let (tensors, scalars) = (self.tensors.clone(), self.scalars.clone());
        let mut mapped =
            CudaPlan { job: self.job.clone(), pass: self.pass.clone(), kept, makes_lists: true, tensors, scalars, used: OnceLock::new() };
        // SAFETY: the caller's.
        unsafe { mapped.submit_to(stream, call) }?;
        mapped.makes_lists = false;
        Ok(Arc::new(mapped))
    }

    /// What runs, for reports: the cut of the kernel, and its registers.
    pub fn engine(&self) -> String {
        let registers = self.kept.kernel.entries.first().map_or(0, |(_, entry)| entry.registers);
        format!("{}, {registers} registers", self.pass.cut())
    }

    /// The kernels that it runs.
    pub fn kernel(&self) -> &Kernel {
        &self.kept.kernel
    }

    fn workspace(&self) -> u64 {
        match &self.pass {
            Pass::Forward(forward, tile) => self.forward_workspace(forward, tile),
            Pass::Backward(backward, tile, sections) => self.backward_workspace(backward, tile, sections),
            Pass::MmaForward(..) => self.lists_bytes(),
            Pass::MmaBackward(backward, cut) => mma_backward::Workspace::of(backward, cut, self.kept.map.is_none()).bytes,
        }
    }

    /// Bytes of workspace for lists of blocks that are made at each call.
    fn lists_bytes(&self) -> u64 {
        let made = lists::Made::of(self.pass.attention(), self.pass.walk()).filter(|_| self.kept.map.is_none());
        made.map_or(0, lists::Made::bytes)
    }

    /// # Safety
    /// As [`DevicePrepared::submit`].
    ///
    /// # Errors
    /// As [`DevicePrepared::submit`].
    #[allow(unsafe_code, reason = "the device tier's contract is handed on")]
    unsafe fn submit_to(&self, stream: &Stream, call: &DeviceCall<'_, DeviceSlice>) -> Result<(), Error> {
        call::check(&self.job, call, self.workspace())?;
        let device = self.kept.kernel.module.device();
        if stream.device().ordinal() != device.ordinal() {
            let limit = format!("it is on device {}, the stream on {}", device.ordinal(), stream.device().ordinal());
            return Err(sdpa_driver::Error::Memory { what: "a kernel".to_owned(), bytes: 0, limit }.into());
        }
        let submission = &stream.begin()?;
        let workspace = match call.workspace.filter(|_| self.workspace() > 0) {
            Some(workspace) => workspace,
            None => submission.workspace(self.workspace())?,
        };
        // SAFETY: the caller's; workspace is as large as the pass asks.
        unsafe {
            match &self.pass {
                Pass::Forward(forward, tile) => self.submit_forward(forward, tile, submission, call, workspace),
                Pass::Backward(backward, tile, sections) => self.submit_backward((backward, tile, sections), submission, call, workspace),
                Pass::MmaForward(forward, cut) => self.submit_mma_forward(forward, cut, submission, call, workspace),
                Pass::MmaBackward(backward, cut) => self.submit_mma_backward(backward, cut, submission, call, workspace),
            }
        }
    }

    /// From here on the plan is dropped behind what was submitted. A graph that it is captured into keeps it.
    fn noting_use(&self, submission: &Submission<'_>, submit: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.used.get_or_init(|| submission.device());
        if submission.is_capturing() {
            submission.keep_in_graph(Box::new(self.kept.clone()))?;
            return submit();
        }
        let submitted = submit();
        submission.mark()?;
        submitted
    }
}

impl Pass {
    /// The cut, for reports.
    pub(crate) fn cut(&self) -> String {
        match self {
            Pass::Forward(_, tile) => {
                let heads = if tile.heads() > 1 { format!(" of {} heads", tile.heads()) } else { String::new() };
                let parts = if tile.split { ", keys in parts" } else { "" };
                format!("forward {}{heads} x {} of {}, {}{parts}", tile.queries(), tile.keys, tile.dim_qk, tile.dim_v)
            }
            Pass::Backward(_, tile, _) => {
                let shares = if tile.shares > 1 { format!(", heads of a group in {} shares", tile.shares) } else { String::new() };
                let pair = if tile.pair { ", in pairs" } else { "" };
                format!("backward {} x {} of {}, {}{pair}{shares}", tile.queries, BackwardTile::KEYS, tile.dim_qk, tile.dim_v)
            }
            Pass::MmaForward(_, cut) => format!("forward mma.sync {} x {} of {}, {}", cut.own, cut.step, cut.dim_qk, cut.dim_v),
            Pass::MmaBackward(_, cut) => format!("backward mma.sync {} x {} of {}, {}", cut.own, cut.step, cut.dim_qk, cut.dim_v),
        }
    }
}

impl DevicePrepared for CudaPlan {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn workspace_bytes(&self) -> u64 {
        self.workspace()
    }

    fn engine(&self) -> String {
        CudaPlan::engine(self)
    }

    #[allow(unsafe_code, reason = "the device tier's contract is handed on")]
    unsafe fn submit(&self, stream: &Stream, call: &DeviceCall<'_, DeviceSlice>) -> Result<(), sdpa_core::Error> {
        // SAFETY: the caller's.
        Ok(unsafe { self.submit_to(stream, call) }?)
    }
}

impl Drop for CudaPlan {
    fn drop(&mut self) {
        if let Some(device) = self.used.get() {
            device.retire(Box::new(self.kept.clone()));
        }
    }
}
