//! The families of kernels: their instructions, and the devices that have these.

use std::fmt::{self, Display};

/// A family of kernels, named after its tensor core instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Kernels with `wgmma` and TMA, for compute capability 9.0 only and tuned for it.
    Wgmma,
    /// Kernels with `mma.sync` and asynchronous copies by threads, for compute capability 8.0 and later. They are correct but not tuned.
    Mma,
}

impl Family {
    /// Both families, the faster one first.
    pub const ALL: [Family; 2] = [Family::Wgmma, Family::Mma];

    /// Returns the position in [`Family::ALL`].
    const fn position(self) -> usize {
        match self {
            Family::Wgmma => 0,
            Family::Mma => 1,
        }
    }

    /// Returns whether a device of compute capability `sm` (90 for 9.0) has the family's instructions.
    pub fn runs_on(self, sm: u32) -> bool {
        match self {
            Family::Wgmma => sm == 90,
            Family::Mma => sm >= 80,
        }
    }

    /// Returns a description of the compute capabilities on which the family's kernels run.
    pub(crate) fn devices(self) -> &'static str {
        match self {
            Family::Wgmma => "9.0 for the kernels with wgmma",
            Family::Mma => "8.0 or newer",
        }
    }

    /// Returns the architecture for which the family's source is compiled, such as `sm_90a`, on a device of compute capability `sm` (90
    /// for 9.0).
    pub fn architecture(self, sm: u32) -> String {
        match self {
            // Architecture-specific instructions such as WGMMA need the suffix `a`.
            Family::Wgmma => format!("sm_{sm}a"),
            Family::Mma => format!("sm_{sm}"),
        }
    }
}

const _: () = {
    let mut n = 0;
    while n < Family::ALL.len() {
        assert!(Family::ALL[n].position() == n, "every family is in ALL, at its position");
        n += 1;
    }
};

impl Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::Wgmma => "wgmma",
            Family::Mma => "mma.sync",
        })
    }
}
