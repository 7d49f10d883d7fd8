//! A pass made ready: its kernels, its map in device memory, and calls of it.

mod backward;
mod forward;
mod lists;
mod room;
mod told;

use crate::backward::Backward;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::map::BlockMap;
use crate::problem::Forward;
use crate::tile::{BackwardTile, Tile};
use sdpa_cache::{CacheValue, Weight};
use sdpa_core::device::{DeviceCall, DevicePrepared};
use sdpa_driver::{Buffer, Device, DeviceSlice, Stream, Submission};
use sdpa_nvidia::{Job, call};
use std::sync::{Arc, OnceLock};

/// A map in device memory.
#[derive(Debug)]
struct Mapped {
    begin: Buffer,
    blocks: Buffer,
    rows: [i64; 2],
}

/// What a device may still read of a plan.
#[derive(Clone, Debug)]
struct Kept {
    kernel: Arc<Kernel>,
    map: Option<Arc<Mapped>>,
}

/// A problem as the kernels of its pass are told of it.
#[derive(Debug)]
pub(crate) enum Pass {
    Forward(Box<Forward>, Tile),
    Backward(Box<Backward>, BackwardTile),
}

impl Pass {
    /// The attention of either pass.
    fn attention(&self) -> &Forward {
        match self {
            Pass::Forward(forward, _) => forward,
            Pass::Backward(backward, _) => &backward.forward,
        }
    }

    fn map(&self) -> Option<BlockMap> {
        match self {
            Pass::Forward(forward, tile) => BlockMap::of(forward, tile),
            Pass::Backward(backward, tile) => BlockMap::of_keys(&backward.forward, tile.queries, BackwardTile::KEYS),
        }
    }
}

/// A pass made ready on a device.
#[derive(Debug)]
pub struct CudaPlan {
    job: Job,
    pass: Pass,
    kept: Kept,
    /// Names of the tensors that traces read, and of the scalars, in the order of the kernel's structure.
    tensors: Vec<String>,
    scalars: Vec<String>,
    /// The device that was given work of it.
    used: OnceLock<&'static Device>,
}

impl CacheValue for CudaPlan {
    fn weight(&self) -> Weight {
        let map = self.kept.map.as_ref().map_or(0, |map| (map.begin.bytes() + map.blocks.bytes()) as u64);
        Weight { host: 0, device: map, workspace: 0 }
    }
}

impl CudaPlan {
    pub(crate) fn new(job: Job, pass: Pass, kernel: Arc<Kernel>, stream: &Stream) -> Result<CudaPlan, Error> {
        let map = match pass.map() {
            None => None,
            Some(map) => {
                let up = |numbers: &[u32]| {
                    let mut buffer = Buffer::new(stream.device(), size_of_val(numbers).max(4))?;
                    buffer.upload(stream, 0, numbers)?;
                    Ok::<_, sdpa_driver::Error>(buffer)
                };
                Some(Arc::new(Mapped { begin: up(&map.begin)?, blocks: up(&map.blocks)?, rows: map.rows }))
            }
        };
        let captured = &pass.attention().captured;
        let tensors = captured.tensors().into_iter().map(|(name, ..)| name.to_owned()).collect();
        let scalars = captured.scalars().into_iter().map(str::to_owned).collect();
        Ok(CudaPlan { job, pass, kept: Kept { kernel, map }, tensors, scalars, used: OnceLock::new() })
    }

    /// What runs, for reports: the cut of the kernel, and its registers.
    pub fn engine(&self) -> String {
        let registers = self.kept.kernel.entries.first().map_or(0, |entry| entry.registers);
        format!("{}, {registers} registers", self.pass.cut())
    }

    /// The kernels that it runs.
    pub fn kernel(&self) -> &Kernel {
        &self.kept.kernel
    }

    fn workspace(&self) -> u64 {
        match &self.pass {
            Pass::Forward(forward, tile) => self.forward_workspace(forward, tile),
            Pass::Backward(backward, tile) => backward::Workspace::of(backward, tile, self.lists_bytes()).bytes,
        }
    }

    /// Bytes of workspace for lists of blocks that are made at each call.
    fn lists_bytes(&self) -> u64 {
        lists::Made::of(&self.pass).map_or(0, lists::Made::bytes)
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
                Pass::Backward(backward, tile) => self.submit_backward(backward, tile, submission, call, workspace),
            }
        }
    }

    /// From here on the plan is dropped behind what was submitted. A graph that it is captured into keeps it.
    fn noting_use(&self, submission: &Submission<'_>, submit: impl FnOnce() -> Result<(), sdpa_driver::Error>) -> Result<(), Error> {
        self.used.get_or_init(|| submission.device());
        if submission.is_capturing() {
            submission.keep_in_graph(Box::new(self.kept.clone()))?;
            return Ok(submit()?);
        }
        let submitted = submit();
        submission.mark()?;
        Ok(submitted?)
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
            Pass::Backward(_, tile) => format!("backward {} x {} of {}, {}", tile.queries, BackwardTile::KEYS, tile.dim_qk, tile.dim_v),
        }
    }
}

impl DevicePrepared for CudaPlan {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn workspace_bytes(&self) -> u64 {
        self.workspace()
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
