//! Kernels of this crate that run around cuDNN's graphs. They are stored as PTX made from the `.cu` files next to it, so running them needs no
//! compiler. A test compiles the `.cu` files again and compares the results with the PTX.

use cudnn_graph::{Device, Kernel};
use parking_lot::Mutex;
use std::ffi::CStr;
use std::sync::OnceLock;

const DOCUMENTS: &str = concat!(include_str!("documents.ptx"), "\0");
const ENTRIES: &str = concat!(include_str!("entries.ptx"), "\0");
const PIECES: &str = concat!(include_str!("pieces.ptx"), "\0");
const SINKS: &str = concat!(include_str!("sinks.ptx"), "\0");
const SUMS: &str = concat!(include_str!("sums.ptx"), "\0");

/// The number of offset tensors that one launch of [`Own::Documents`] can compute.
pub const OFFSETS: usize = 9;
/// The number of parameters of the kernel [`Own::Documents`] that precede its parameters for offset tensors.
pub const BEFORE_OFFSETS: usize = 10;

/// A kernel of this crate, which runs before or after a cuDNN graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// Computes lengths of packed sequences, and their offsets in each tensor, from `cu_seqlens`.
    Documents,
    /// Fills result rows of packed sequences that have queries but no keys, or keys but no queries.
    Unpaired,
    /// Adds attention sinks to the softmax denominators of rows that cuDNN computed without them.
    SinkRows,
    /// Computes partial sums of the gradients of attention sinks, each over some of the rows.
    SinkParts,
    /// Adds up the partial sums of the gradients of attention sinks.
    SinkGradient,
    /// Clamps per-sequence lengths and the page table to values that engines can handle.
    Entries,
    /// Writes 0 as the sum of exponentials of rows without keys.
    RowSums,
    /// Merges the result rows of one piece of a decomposed mask into rows that earlier pieces wrote.
    MergeRows,
    /// Copies the row statistics of one piece of a decomposed mask to or from those of the whole pass.
    StatsRows,
    /// Adds the gradient rows of one piece of a decomposed mask to rows that earlier pieces wrote.
    AddRows,
}

impl Own {
    /// Every kernel of this crate. Kernels of the same PTX file are adjacent.
    pub const ALL: [Own; 10] = [
        Own::Documents,
        Own::Unpaired,
        Own::SinkRows,
        Own::SinkParts,
        Own::SinkGradient,
        Own::Entries,
        Own::RowSums,
        Own::MergeRows,
        Own::StatsRows,
        Own::AddRows,
    ];

    /// Returns the kernel's name in the PTX.
    pub const fn name(self) -> &'static CStr {
        match self {
            Own::Documents => c"documents",
            Own::Unpaired => c"unpaired",
            Own::SinkRows => c"sink_rows",
            Own::SinkParts => c"sink_parts",
            Own::SinkGradient => c"sink_gradient",
            Own::Entries => c"entries",
            Own::RowSums => c"row_sums",
            Own::MergeRows => c"merge_rows",
            Own::StatsRows => c"stats_rows",
            Own::AddRows => c"add_rows",
        }
    }

    /// Returns the PTX text that contains the kernel.
    pub const fn ptx(self) -> &'static str {
        match self {
            Own::Documents | Own::Unpaired => DOCUMENTS,
            Own::SinkRows | Own::SinkParts | Own::SinkGradient => SINKS,
            Own::Entries => ENTRIES,
            Own::RowSums => SUMS,
            Own::MergeRows | Own::StatsRows | Own::AddRows => PIECES,
        }
    }
}

/// Kernels of this crate that are loaded on one device; each is loaded when a schedule first needs it.
#[derive(Debug)]
pub(crate) struct Loaded {
    device: u32,
    kernels: [OnceLock<Kernel>; Own::ALL.len()],
}

/// Loaded kernels, one entry per device that needed some.
static LOADED: Mutex<Vec<&'static Loaded>> = Mutex::new(Vec::new());

impl Loaded {
    /// Returns the kernels of this crate on a device, and loads the `needed` ones if they are not loaded yet. Each is loaded once per
    /// process.
    pub(crate) fn on(device: &'static Device, needed: impl Iterator<Item = Own>) -> Result<&'static Loaded, cudnn_graph::Error> {
        let mut all = LOADED.lock();
        let known = all.iter().find(|loaded| loaded.device == device.ordinal()).copied();
        let loaded = known.unwrap_or_else(|| {
            let made: &'static Loaded = Box::leak(Box::new(Loaded { device: device.ordinal(), kernels: Default::default() }));
            all.push(made);
            made
        });
        for own in needed {
            let place = &loaded.kernels[own as usize];
            if place.get().is_none() {
                let ptx = CStr::from_bytes_with_nul(own.ptx().as_bytes()).unwrap_or_default();
                let [kernel] = device.load_kernels(ptx, [own.name()])?;
                place.get_or_init(|| kernel);
            }
        }
        Ok(loaded)
    }

    pub(crate) fn get(&self, which: Own) -> Option<&Kernel> {
        self.kernels[which as usize].get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_its_text() {
        for (place, own) in Own::ALL.into_iter().enumerate() {
            let name = own.name().to_str().unwrap();
            assert!(own as usize == place && own.ptx().contains(&format!(".visible .entry {name}(")), "{name}");
        }
        let offsets = DOCUMENTS.split(".entry documents(").nth(1).and_then(|text| text.split_once(')')).unwrap().0;
        assert_eq!(offsets.matches(".param").count(), BEFORE_OFFSETS + 2 * OFFSETS);
    }
}
