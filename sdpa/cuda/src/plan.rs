//! A pass made ready: its kernel, its map in device memory, and calls of it.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::kernel::Kernel;
use crate::map::BlockMap;
use crate::params::{FAR, Params};
use crate::problem::Forward;
use sdpa_cache::{CacheValue, Weight};
use sdpa_core::device::{DeviceCall, DevicePrepared, DeviceValue};
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::{Operand, SINK, Statistic, TensorSpec};
use sdpa_driver::{Buffer, Device, DeviceSlice, Launch, Stream, Submission, TensorMap, Tiled};
use sdpa_nvidia::{Job, call};
use smallvec::SmallVec;
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

/// A map in device memory.
#[derive(Debug)]
struct Mapped {
    begin: Buffer,
    blocks: Buffer,
    rows: [i64; 2],
}

/// The kernel's structure of what traces read, in words of 8 bytes.
type Captured = SmallVec<[u64; 16]>;

/// What a device may still read of a plan.
#[derive(Clone, Debug)]
struct Kept {
    kernel: Arc<Kernel>,
    map: Option<Arc<Mapped>>,
}

/// A forward pass made ready on a device.
#[derive(Debug)]
pub struct CudaPlan {
    job: Job,
    forward: Forward,
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

/// Bytes of the second cache that keys and values may take: of its 50 MB, those that are near to all multiprocessors.
const CACHE_BYTES: i64 = 32 << 20;

fn bound(x: Option<i64>, none: i32) -> i32 {
    x.map_or(none, |x| i32::try_from(x).map_or(none, |x| x.clamp(-FAR, FAR)))
}

impl CudaPlan {
    pub(crate) fn new(job: Job, forward: Forward, kernel: Arc<Kernel>, stream: &Stream) -> Result<CudaPlan, Error> {
        let map = match BlockMap::of(&forward, &kernel.tile) {
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
        let tensors = forward.captured.tensors().into_iter().map(|(name, ..)| name.to_owned()).collect();
        let scalars = forward.captured.scalars().into_iter().map(str::to_owned).collect();
        Ok(CudaPlan { job, forward, kept: Kept { kernel, map }, tensors, scalars, used: OnceLock::new() })
    }

    /// What runs, for reports: the tile of the kernel, and its registers.
    pub fn engine(&self) -> String {
        let Kernel { tile, entry, .. } = &*self.kept.kernel;
        format!("forward {} x {} of {}, {}, {} registers", tile.queries(), tile.keys, tile.dim_qk, tile.dim_v, entry.registers)
    }

    /// The kernel that it runs.
    pub fn kernel(&self) -> &Kernel {
        &self.kept.kernel
    }

    /// # Safety
    /// As [`DevicePrepared::submit`].
    ///
    /// # Errors
    /// As [`DevicePrepared::submit`].
    unsafe fn submit_to(&self, stream: &Stream, call: &DeviceCall<'_, DeviceSlice>) -> Result<(), Error> {
        call::check(&self.job, call, self.workspace())?;
        let device = self.kept.kernel.module.device();
        if stream.device().ordinal() != device.ordinal() {
            let limit = format!("it is on device {}, the stream on {}", device.ordinal(), stream.device().ordinal());
            return Err(sdpa_driver::Error::Memory { what: "a kernel".to_owned(), bytes: 0, limit }.into());
        }
        let submission = &stream.begin()?;
        let maps = self.maps(submission, call)?;
        let blocks = self.blocks();
        let taken = self.counter(submission, call)?;
        let params = Params { taken: taken.address, ..self.params(call) };
        let captured = self.captured(call);
        let parameters: [*const c_void; 6] = [
            (&raw const maps[0]).cast(),
            (&raw const maps[1]).cast(),
            (&raw const maps[2]).cast(),
            (&raw const maps[3]).cast(),
            (&raw const params).cast(),
            captured.as_ptr().cast(),
        ];
        let tile = self.kept.kernel.tile;
        let launch = Launch { blocks: [blocks, 1, 1], threads: tile.threads(), shared_bytes: tile.shared_bytes() };
        self.noting_use(submission, || {
            // SAFETY: parameters are those of the kernel; the rest is the caller's, the counter a part of the workspace, and the map is kept with the plan.
            unsafe {
                if taken.bytes > 0 {
                    submission.zero(taken)?;
                }
                submission.launch_entry(&self.kept.kernel.entry, launch, &parameters)
            }
        })
    }

    /// Tiles of queries of all heads.
    fn all_tiles(&self) -> i64 {
        let [batch, heads_q, seq_q, _] = self.forward.extents;
        let queries = i64::from(self.kept.kernel.tile.queries());
        batch * heads_q * ((seq_q + queries - 1) / queries)
    }

    /// Blocks of threads: as many as multiprocessors, which take tile after tile, or as many as there are tiles.
    fn blocks(&self) -> u32 {
        let most = self.kept.kernel.module.device().sm_count();
        u32::try_from(self.all_tiles()).unwrap_or(u32::MAX).min(most)
    }

    /// Bytes of workspace: a counter, where there are more tiles than blocks.
    fn workspace(&self) -> u64 {
        if self.all_tiles() > i64::from(self.blocks()) { 256 } else { 0 }
    }

    /// Where the tiles that were taken are counted.
    fn counter(&self, submission: &Submission<'_>, call: &DeviceCall<'_, DeviceSlice>) -> Result<DeviceSlice, Error> {
        let workspace = match call.workspace.filter(|_| self.workspace() > 0) {
            Some(workspace) => workspace,
            None => submission.workspace(self.workspace())?,
        };
        Ok(DeviceSlice { address: workspace.address, bytes: if self.workspace() > 0 { 4 } else { 0 } })
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

    fn maps(&self, submission: &Submission<'_>, call: &DeviceCall<'_, DeviceSlice>) -> Result<[TensorMap; 4], Error> {
        let tile = self.kept.kernel.tile;
        let mut maps = [TensorMap::default(); 4];
        // Queries come as a whole tile, keys and values as a step of it, results leave by the rows of a warp.
        let rows = [tile.queries(), tile.keys, tile.keys, 16];
        for (n, operand) in [Operand::Q, Operand::K, Operand::V, Operand::O].into_iter().enumerate() {
            let address = call.operand(operand).map_or(0, |slice| slice.address);
            maps[n] = submission.tensor_map(address, &tiled(&self.forward.tensors[n], rows[n]))?;
        }
        Ok(maps)
    }

    fn tensor(call: &DeviceCall<'_, DeviceSlice>, name: &str) -> u64 {
        let given = call.params.iter().find(|p| p.name == name).and_then(|p| p.value.tensor());
        given.map_or(0, |(_, slice)| slice.address)
    }

    fn params(&self, call: &DeviceCall<'_, DeviceSlice>) -> Params {
        let Forward { region, ends, extents: [batch, heads_q, seq_q, seq_kv], group, score_mod, .. } = &self.forward;
        let tile = self.kept.kernel.tile;
        let tiles = seq_q.div_euclid(tile.queries().into()) + i64::from(seq_q % i64::from(tile.queries()) != 0);
        let scale = call.attn_scale.unwrap_or(self.job.problem().default_scale());
        // In the exponent a scale must be positive, or the largest score is the smallest.
        let natural = score_mod.is_some() || scale <= 0.0;
        let log2_e = std::f32::consts::LOG2_E;
        let map = self.kept.map.as_deref();
        let rows = map.map_or([1, 1], |map| map.rows);
        let by_head = i32::from(rows[1] > 1);
        Params {
            stats: call.statistic(Statistic::Stats).map_or(0, |slice| slice.address),
            seq_len_q: CudaPlan::tensor(call, SEQ_LEN_Q),
            seq_len_kv: CudaPlan::tensor(call, SEQ_LEN_KV),
            sink: CudaPlan::tensor(call, SINK),
            map_begin: map.map_or(0, |map| map.begin.address()),
            map_blocks: map.map_or(0, |map| map.blocks.address()),
            taken: 0,
            batch: *batch as i32,
            heads_q: *heads_q as i32,
            group: *group as i32,
            seq_q: *seq_q as i32,
            seq_kv: *seq_kv as i32,
            tiles: tiles as i32,
            section: self.section() as i32,
            map_batch: if rows[0] > 1 { rows[1] as i32 } else { 0 },
            map_head: by_head,
            lower: bound(region.lower, -FAR),
            upper: bound(region.upper, FAR),
            prefix: bound(region.prefix, 0),
            ends_lower: bound(ends.lower, -FAR),
            ends_upper: bound(ends.upper, FAR),
            natural: i32::from(natural),
            scale,
            unit: if natural { log2_e } else { scale * log2_e },
        }
    }

    /// Heads whose keys and values the second cache holds together: whole groups that share a key head, a power of two of them.
    fn section(&self) -> i64 {
        let Forward { tensors: [_, k, v, _], extents: [batch, heads_q, _, seq_kv], group, .. } = &self.forward;
        let head = 2 * seq_kv * (k.dims[3] + v.dims[3]);
        let fit = (CACHE_BYTES / head.max(1)).max(1);
        let power = 1 << fit.ilog2();
        (power * group).min(batch * heads_q)
    }

    /// What traces read in this call, as the kernel's structure: addresses of tensors, then scalars.
    fn captured(&self, call: &DeviceCall<'_, DeviceSlice>) -> Captured {
        let scalar = |name: &String| match call.params.iter().find(|p| p.name == name).map(|p| p.value) {
            Some(DeviceValue::Scalar(x)) => x,
            Some(DeviceValue::Tensor(..) | DeviceValue::WithinExtent(..)) | None => f32::NAN,
        };
        let mut words: Captured = self.tensors.iter().map(|name| CudaPlan::tensor(call, name)).collect();
        for pair in self.scalars.chunks(2) {
            let [low, high] = [pair.first(), pair.get(1)].map(|name| name.map_or(0, |name| scalar(name).to_bits()));
            words.push(u64::from(low) | u64::from(high) << 32);
        }
        // An empty structure has a byte.
        if words.is_empty() {
            words.push(0);
        }
        words
    }
}

/// An operand as the copy engine is told of it, its boxes of so many rows.
fn tiled(tensor: &TensorSpec, rows: u32) -> Tiled {
    let [batch, head, seq, dim] = tensor.dims.map(|d| d.max(1) as u64);
    // An axis of one element has any stride that the engine takes.
    let bytes = |axis: usize| if tensor.dims[axis] <= 1 { 16 } else { 2 * tensor.strides[axis].unsigned_abs() };
    Tiled { extents: [dim, seq, head, batch], strides: [bytes(2), bytes(1), bytes(0)], tile: [64, rows, 1, 1] }
}

impl DevicePrepared for CudaPlan {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn workspace_bytes(&self) -> u64 {
        self.workspace()
    }

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
