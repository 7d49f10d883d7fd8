//! Rates and fixed costs of the devices of a group.

use crate::schedule::Pass;
use serde::{Deserialize, Serialize};

/// The time of attention in one pass: a fixed cost for each launch, and operations at a constant rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Kernel {
    /// Floating-point operations per second, counted over the pairs that bands attend to.
    pub flops: f64,
    /// Seconds in which the host submits one call. They are hidden while the device is busy.
    pub launch: f64,
}

impl Kernel {
    /// Creates the model of a kernel.
    pub const fn new(flops: f64, launch: f64) -> Kernel {
        Kernel { flops, launch }
    }
}

/// Rates and fixed costs of equal ranks, by which [`simulate`](crate::simulate) computes times and [`Strategy::Auto`](crate::Strategy::Auto) chooses.
///
/// The rates of the default are assumptions for one H100 with NVLink. It has no fixed costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Machine {
    /// Attention of the forward pass.
    pub forward: Kernel,
    /// Attention of the backward pass.
    pub backward: Kernel,
    /// Bytes per second that one rank sends to all others, and as many that it receives.
    pub bandwidth: f64,
    /// Bytes per second from one rank to another.
    pub link: f64,
    /// Seconds that each exchange takes in addition to its bytes.
    pub latency: f64,
    /// Seconds of the host before the first step of each pass, in which ranks compare their problems.
    pub call: f64,
    /// Seconds in which the host submits one transfer, copy or sum. They are hidden while the device is busy.
    pub submit: f64,
    /// Bytes per second that copies, sums and fills of memory read and write together.
    pub copies: f64,
    /// Bytes per second of merges of partial outputs, counted as if each operand were read, and each result written, once.
    pub merges: f64,
    /// Bytes of buffers that one rank may use; `None` for no limit.
    pub memory: Option<u64>,
}

impl Default for Machine {
    fn default() -> Machine {
        Machine {
            forward: Kernel::new(600e12, 0.0),
            backward: Kernel::new(600e12, 0.0),
            bandwidth: 300e9,
            link: 300e9,
            latency: 0.0,
            call: 0.0,
            submit: 0.0,
            copies: 1.2e12,
            merges: 600e9,
            memory: None,
        }
    }
}

impl Machine {
    /// Returns the rates of one H200 of several with NVLink, in the Python package with PyTorch 2.11 and NCCL 2.28.9, for causal attention in bf16 of head
    /// dim 128. The source is `benches/results/2026-11-29-h200-several-gpus.txt`.
    ///
    /// - `forward` and the rate of `backward` are least squares over the rows of one GPU.
    /// - The other costs are fitted to the times of two GPUs in the second run of `times` there, and rounded. These times hardly depend on `latency`, and
    ///   determine `bandwidth` and `link` no better than 250 to 450 GB/s: two ranks cannot tell one from the other.
    pub fn h200() -> Machine {
        Machine {
            forward: Kernel::new(685e12, 47e-6),
            backward: Kernel::new(645e12, 100e-6),
            bandwidth: 350e9,
            link: 350e9,
            latency: 10e-6,
            call: 1.3e-3,
            submit: 30e-6,
            copies: 1.2e12,
            merges: 600e9,
            memory: None,
        }
    }

    /// Returns the kernel of a pass.
    pub fn kernel(&self, pass: Pass) -> Kernel {
        match pass {
            Pass::Forward => self.forward,
            Pass::Backward => self.backward,
        }
    }
}
