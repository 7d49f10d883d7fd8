//! Kernels around the attention that are no graphs: in PTX, made of the `.cu` beside it, so that no compiler is needed where they run.
//! A test compiles the one again and compares it with the other.

use cudnn_graph::{Device, Kernel};
use parking_lot::Mutex;
use std::ffi::CStr;

const DOCUMENTS: &str = concat!(include_str!("documents.ptx"), "\0");

/// Offsets of packed documents that one launch can compute.
pub const OFFSETS: usize = 9;

/// A kernel of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// Lengths of packed documents, and where they begin in each tensor.
    Documents,
    /// Fills the rows of documents that have nothing on the other side.
    Unpaired,
}

impl Own {
    /// Its name in the PTX.
    pub const fn name(self) -> &'static CStr {
        match self {
            Own::Documents => c"documents",
            Own::Unpaired => c"unpaired",
        }
    }

    /// The text that it is compiled of.
    pub const fn ptx(self) -> &'static str {
        match self {
            Own::Documents | Own::Unpaired => DOCUMENTS,
        }
    }
}

/// Every kernel, on one device.
#[derive(Debug)]
pub(crate) struct Loaded {
    device: u32,
    documents: Kernel,
    unpaired: Kernel,
}

/// Those of each device that needed some.
static LOADED: Mutex<Vec<&'static Loaded>> = Mutex::new(Vec::new());

impl Loaded {
    /// Those of a device, loaded once in the life of the process.
    pub(crate) fn on(device: &'static Device) -> Result<&'static Loaded, cudnn_graph::Error> {
        let mut all = LOADED.lock();
        if let Some(loaded) = all.iter().find(|loaded| loaded.device == device.ordinal()) {
            return Ok(loaded);
        }
        let ptx = CStr::from_bytes_with_nul(DOCUMENTS.as_bytes()).unwrap_or_default();
        let [documents, unpaired] = device.load_kernels(ptx, [Own::Documents.name(), Own::Unpaired.name()])?;
        let loaded: &'static Loaded = Box::leak(Box::new(Loaded { device: device.ordinal(), documents, unpaired }));
        all.push(loaded);
        Ok(loaded)
    }

    pub(crate) fn get(&self, which: Own) -> &Kernel {
        match which {
            Own::Documents => &self.documents,
            Own::Unpaired => &self.unpaired,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_its_text() {
        for own in [Own::Documents, Own::Unpaired] {
            let name = own.name().to_str().unwrap();
            assert!(own.ptx().contains(&format!(".visible .entry {name}(")), "{name}");
        }
        let offsets = DOCUMENTS.split(".entry documents(").nth(1).and_then(|text| text.split_once(')')).unwrap().0;
        assert_eq!(offsets.matches(".param").count(), 9 + 2 * OFFSETS);
    }
}
