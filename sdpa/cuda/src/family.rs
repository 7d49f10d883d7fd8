//! The families of kernels: the instructions that they are written with, and the devices that have these.

use std::fmt::{self, Display};

/// The kernels of a pass, by the instructions of the tensor cores that they ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `wgmma` and TMA: compute capability 9.0, tuned for it.
    Wgmma,
    /// `mma.sync` and copies that threads ask for: compute capability 8.0 and all after it. Right, and not tuned.
    Mma,
}

impl Family {
    /// Both, the faster first.
    pub const ALL: [Family; 2] = [Family::Wgmma, Family::Mma];

    /// The position in [`Family::ALL`].
    const fn position(self) -> usize {
        match self {
            Family::Wgmma => 0,
            Family::Mma => 1,
        }
    }

    /// Whether a device of this compute capability (90 for 9.0) has its instructions.
    pub fn runs_on(self, sm: u32) -> bool {
        match self {
            Family::Wgmma => sm == 90,
            Family::Mma => sm >= 80,
        }
    }

    /// The compute capabilities that it is for, in words.
    pub(crate) fn devices(self) -> &'static str {
        match self {
            Family::Wgmma => "the kernels with wgmma are for compute capability 9.0",
            Family::Mma => "the kernels are for compute capability 8.0 and newer",
        }
    }

    /// The architecture that its text is compiled for, on a device of this compute capability.
    pub fn architecture(self, sm: u32) -> String {
        match self {
            // Instructions of one architecture alone need the suffix `a`.
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
