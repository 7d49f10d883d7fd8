//! Kernels that move, merge and sum rows. They are stored as PTX made from `kernels/ranks.cu`, so running them needs no compiler.
#![allow(unsafe_code, reason = "launches take addresses, for which callers vouch")]

use crate::device::view::View;
use parking_lot::Mutex;
use sdpa_core::DType;
use sdpa_driver::{Device, DeviceSlice, Error, Kernel, Submission};
use std::ffi::CStr;

const PTX: &str = concat!(include_str!("kernels/ranks.ptx"), "\0");
/// The threads of a block.
const THREADS: i64 = 256;
/// The elements of a row that one thread handles; `RUN` of the source.
const RUN: i64 = 8;
/// The threads that share the gradient of one sink.
pub(crate) const SINK_PARTS: i64 = 1024;

/// The kernels of one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    device: u32,
    moves: Kernel,
    outputs: Kernel,
    statistics: Kernel,
    rows: Kernel,
    sink_parts: Kernel,
    sink_sums: Kernel,
    tokens: Kernel,
}

static LOADED: Mutex<Vec<&'static Kernels>> = Mutex::new(Vec::new());

/// The calculation of [`Kernels::transfer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Copies elements, and rounds them if the types differ.
    Copy,
    /// Adds elements to floats.
    Add,
    /// Copies 64-bit integers and adds a number to each.
    Shift(i64),
}

/// Accumulators of a merged output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merged {
    pub(crate) o: View,
    pub(crate) row_max: View,
    pub(crate) sum_exp: View,
}

/// The sinks of all heads, and the first head of the rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sinks {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) first_head: i64,
}

/// The results that [`Kernels::finish`] writes. All statistics have one layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    pub(crate) o: View,
    pub(crate) stats: Option<View>,
    pub(crate) row_max: Option<View>,
    pub(crate) sum_exp: Option<View>,
}

fn number(n: i64) -> u64 {
    n.cast_unsigned()
}

/// The code of a type in the source. Types that are only copied count by their size.
fn code(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => 16 + u64::from(dtype.bits() / 8),
    }
}

fn shape(threads: i64) -> Result<[u32; 2], Error> {
    let blocks = u32::try_from((threads + THREADS - 1) / THREADS).ok().filter(|blocks| *blocks < 1 << 31);
    let too_large = || Error::Memory {
        what: "rows of a part".to_owned(),
        bytes: threads.unsigned_abs(),
        limit: format!("at most {} threads of {RUN} elements", (THREADS << 31) - THREADS),
    };
    Ok([blocks.ok_or_else(too_large)?, THREADS as u32])
}

impl Kernels {
    /// Returns the kernels of a device, loaded once per process.
    pub(crate) fn on(device: &'static Device) -> Result<&'static Kernels, Error> {
        let mut all = LOADED.lock();
        if let Some(known) = all.iter().find(|kernels| kernels.device == device.ordinal()) {
            return Ok(known);
        }
        let ptx = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default();
        let names =
            [c"move_elements", c"merge_outputs", c"merge_statistics", c"finish_rows", c"sink_parts", c"sink_sums", c"token_sequences"];
        let [moves, outputs, statistics, rows, sink_parts, sink_sums, tokens] = device.load_kernels(ptx, names)?;
        let made = Kernels { device: device.ordinal(), moves, outputs, statistics, rows, sink_parts, sink_sums, tokens };
        all.push(Box::leak(Box::new(made)));
        Ok(all[all.len() - 1])
    }

    /// Writes a view's elements, or their sums with those that are there, to another view of equal extents.
    ///
    /// # Safety
    /// The views are memory of the submission's device, which nothing else uses until the stream has passed this call.
    pub(crate) unsafe fn transfer(&self, on: &Submission<'_>, from: &View, to: &View, mode: Mode) -> Result<(), Error> {
        let [n0, n1, n2, n3] = from.dims;
        debug_assert_eq!(from.dims, to.dims);
        if from.dims.contains(&0) {
            return Ok(());
        }
        let (mode, more) = match mode {
            Mode::Copy => (0, 0),
            Mode::Add => (1, 0),
            Mode::Shift(more) => (2, more),
        };
        let mut arguments = [n0, n1, n2, n3].map(number).to_vec();
        for view in [from, to] {
            arguments.extend([view.address, code(view.dtype)]);
            arguments.extend(view.strides.map(number));
        }
        arguments.extend([mode, number(more)]);
        let shape = shape(n0 * n1 * n2 * ((n3 + RUN - 1) / RUN))?;
        // SAFETY: the arguments are those of the source; the caller vouches for the memory.
        unsafe { on.launch(&self.moves, shape, &arguments) }
    }

    /// Merges a partial output, dense in (batch, head, seq, dim), with its dense statistics into accumulators.
    ///
    /// # Safety
    /// As [`Kernels::transfer`].
    pub(crate) unsafe fn merge(&self, on: &Submission<'_>, part: &View, [max, sum]: [DeviceSlice; 2], to: &Merged) -> Result<(), Error> {
        let [batch, heads, seq, dim] = part.dims;
        let (rows, at) = (batch * heads * seq, to.row_max.strides);
        let mut arguments = [batch, heads, seq, dim].map(number).to_vec();
        arguments.extend([part.address, code(part.dtype), max.address, sum.address, to.o.address]);
        arguments.extend(to.o.strides[..3].iter().copied().map(number));
        arguments.extend([to.row_max.address, to.sum_exp.address]);
        arguments.extend(at[..3].iter().copied().map(number));
        // SAFETY: as above. The second kernel changes the statistics that the first one reads.
        unsafe { on.launch(&self.outputs, shape(rows * ((dim + RUN - 1) / RUN))?, &arguments) }?;
        let mut arguments = [batch, heads, seq].map(number).to_vec();
        arguments.extend([max.address, sum.address, to.row_max.address, to.sum_exp.address]);
        arguments.extend(at[..3].iter().copied().map(number));
        // SAFETY: as above.
        unsafe { on.launch(&self.statistics, shape(rows)?, &arguments) }
    }

    /// Writes a merged output and its statistics. `base` is the factor of `stats`.
    ///
    /// # Safety
    /// As [`Kernels::transfer`].
    pub(crate) unsafe fn finish(
        &self,
        on: &Submission<'_>,
        from: &Merged,
        sinks: Option<Sinks>,
        base: f32,
        to: &Finished,
    ) -> Result<(), Error> {
        let [batch, heads, seq, dim] = from.o.dims;
        let three = |view: &View| view.strides[..3].iter().copied().map(number).collect::<Vec<u64>>();
        let mut arguments = from.o.dims.map(number).to_vec();
        arguments.push(from.o.address);
        arguments.extend(three(&from.o));
        arguments.extend([from.row_max.address, from.sum_exp.address]);
        arguments.extend(three(&from.row_max));
        arguments.extend(sinks.map_or([0; 3], |sinks| [sinks.address, code(sinks.dtype), number(sinks.first_head)]));
        arguments.push(base.to_bits().into());
        arguments.extend([to.o.address, code(to.o.dtype)]);
        arguments.extend(three(&to.o));
        let statistics = [to.stats, to.row_max, to.sum_exp];
        arguments.extend(statistics.map(|view| view.map_or(0, |view| view.address)));
        arguments.extend(statistics.iter().flatten().next().map_or_else(|| vec![0; 3], three));
        // SAFETY: as above.
        unsafe { on.launch(&self.rows, shape(batch * heads * seq * ((dim + RUN - 1) / RUN))?, &arguments) }
    }

    /// Computes the contribution of rows to the gradient of the sinks, one f32 for each head. `scratch` has [`SINK_PARTS`] f32 for each head.
    ///
    /// # Safety
    /// As [`Kernels::transfer`].
    pub(crate) unsafe fn sink_gradient(
        &self,
        on: &Submission<'_>,
        [o, d_o, stats]: [&View; 3],
        sinks: Sinks,
        scratch: u64,
        to: u64,
    ) -> Result<(), Error> {
        let heads = o.dims[1];
        let three = |view: &View| view.strides[..3].iter().copied().map(number).collect::<Vec<u64>>();
        let mut arguments = o.dims.map(number).to_vec();
        arguments.push(o.address);
        arguments.extend(three(o));
        arguments.push(d_o.address);
        arguments.extend(three(d_o));
        arguments.extend([code(o.dtype), stats.address]);
        arguments.extend(three(stats));
        arguments.extend([sinks.address, code(sinks.dtype), number(SINK_PARTS), scratch]);
        // SAFETY: as above.
        unsafe { on.launch(&self.sink_parts, shape(heads * SINK_PARTS)?, &arguments) }?;
        // SAFETY: as above.
        unsafe { on.launch(&self.sink_sums, shape(heads)?, &[number(heads), number(SINK_PARTS), scratch, to]) }
    }

    /// Writes the sequences and positions of tokens, i32, by the offsets `cu_seqlens` of `count` sequences. `to` are those of
    /// [`PACKED_TENSORS`](sdpa_core::unpacked::PACKED_TENSORS), or 0.
    ///
    /// # Safety
    /// As [`Kernels::transfer`].
    pub(crate) unsafe fn tokens(
        &self,
        on: &Submission<'_>,
        (count, offsets, dtype): (i64, DeviceSlice, DType),
        tokens: i64,
        to: [u64; 4],
    ) -> Result<(), Error> {
        let mut arguments = vec![number(count), u64::from(dtype == DType::I64), offsets.address, number(tokens)];
        arguments.extend(to);
        // SAFETY: as above.
        unsafe { on.launch(&self.tokens, shape(tokens)?, &arguments) }
    }
}
