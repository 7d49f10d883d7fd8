//! What goes wrong when plans run.

use sdpa_core::Reason;

/// What goes wrong when plans run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody's fault: something else may run the problem. Only before anything ran.
    #[error("{}", .0.iter().map(Reason::to_string).collect::<Vec<_>>().join("; "))]
    Declined(Vec<Reason>),
    /// The compiler refuses a kernel: a bug of the kernels.
    #[error("{entry} does not compile: {text}")]
    Compile {
        /// The kernel.
        entry: &'static str,
        /// The compiler's own words.
        text: String,
    },
    /// A call binds nothing to an operand, or something that a kernel must not write.
    #[error("{operand} of {entry} is {given}: {rule}")]
    Operand {
        /// The kernel that uses it.
        entry: &'static str,
        /// The operand.
        operand: String,
        /// What the call gives.
        given: String,
        /// The rule that this breaks.
        rule: String,
    },
    /// The system gives no memory, or no object for commands.
    #[error("{what}: the system gives none")]
    Exhausted {
        /// What was asked for.
        what: String,
    },
    /// The kernels did not run to their end.
    #[error("{entry} failed: {text}")]
    Execution {
        /// The kernel, or all of those that were submitted together.
        entry: String,
        /// What went wrong, in the words of what ran them.
        text: String,
    },
}
