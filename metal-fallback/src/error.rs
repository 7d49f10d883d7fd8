//! Errors of running plans.

use sdpa_core::Reason;

/// An error of running plans.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernels do not support the problem; another executor may. This error occurs only before anything runs.
    #[error("{}", .0.iter().map(Reason::to_string).collect::<Vec<_>>().join("; "))]
    Unsupported(Vec<Reason>),
    /// The Metal compiler cannot compile a kernel: a bug of the kernels.
    #[error("the kernel {entry} does not compile, please report it: {text}")]
    Compile {
        /// The name of the kernel.
        entry: &'static str,
        /// The compiler's message.
        text: String,
    },
    /// A call passes no memory for an operand, or read-only memory for an operand that a kernel writes.
    #[error("{operand} of {entry}: got {given}, expected {rule}")]
    Operand {
        /// The name of the kernel that uses the operand.
        entry: &'static str,
        /// The name of the operand.
        operand: String,
        /// A description of the memory that the call passes.
        given: String,
        /// The rule that the memory breaks.
        rule: String,
    },
    /// The system cannot allocate memory or create a command object.
    #[error("Metal could not create {what}; memory may be exhausted")]
    Exhausted {
        /// The resource that could not be created.
        what: String,
    },
    /// The kernels did not finish.
    #[error("{entry} failed: {text}")]
    Execution {
        /// The name of the kernel, or all kernels of one submission.
        entry: String,
        /// The runner's message.
        text: String,
    },
}
