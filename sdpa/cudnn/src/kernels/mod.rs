//! Kernels around the attention that are no graphs: in PTX, made of the `.cu` beside it, so that no compiler is needed where they run.
//! A test compiles the one again and compares it with the other.

use cudnn_graph::{Device, Kernel};
use parking_lot::Mutex;
use std::ffi::CStr;
use std::sync::OnceLock;

const DOCUMENTS: &str = concat!(include_str!("documents.ptx"), "\0");
const ENTRIES: &str = concat!(include_str!("entries.ptx"), "\0");
const PIECES: &str = concat!(include_str!("pieces.ptx"), "\0");
const SINKS: &str = concat!(include_str!("sinks.ptx"), "\0");
const SUMS: &str = concat!(include_str!("sums.ptx"), "\0");

/// Offsets of packed documents that one launch can compute.
pub const OFFSETS: usize = 9;

/// A kernel of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// Lengths of packed documents, and where they begin in each tensor.
    Documents,
    /// Fills the rows of documents that have nothing on the other side.
    Unpaired,
    /// Adds sinks to the denominators of rows that were computed without.
    SinkRows,
    /// What rows add to the gradients of sinks, in parts.
    SinkParts,
    /// The sums of these parts.
    SinkGradient,
    /// Lengths of batch entries and a page table as engines may be given them.
    Entries,
    /// Sums of exponentials of rows without keys.
    RowSums,
    /// Merges rows of a piece into those of the pieces before it.
    MergeRows,
    /// Statistics of some rows, to or from those of all.
    StatsRows,
    /// Adds rows of a piece to those of the pieces before it.
    AddRows,
}

impl Own {
    /// Every kernel, those of a text one behind the other.
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

    /// Its name in the PTX.
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

    /// The text that it is compiled of.
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

/// Kernels on one device, as far as schedules have asked for them.
#[derive(Debug)]
pub(crate) struct Loaded {
    device: u32,
    kernels: [OnceLock<Kernel>; Own::ALL.len()],
}

/// Those of each device that needed some.
static LOADED: Mutex<Vec<&'static Loaded>> = Mutex::new(Vec::new());

impl Loaded {
    /// Those of a device, with these among them, each loaded once in the life of the process.
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
        assert_eq!(offsets.matches(".param").count(), 9 + 2 * OFFSETS);
    }
}
