//! Verification (stub).

use super::Graph;

/// A graph that has passed every rule; it owns the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified(Graph);

impl std::ops::Deref for Verified {
    type Target = Graph;
    fn deref(&self) -> &Graph {
        &self.0
    }
}

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}")]
pub struct VerifyError {
    /// The op or tensor, as printed.
    pub at: String,
    /// The rule.
    pub message: String,
}

/// Every broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyErrors(pub Vec<VerifyError>);

impl std::fmt::Display for VerifyErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, e) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{e}")?;
        }
        Ok(())
    }
}

impl std::error::Error for VerifyErrors {}

impl Graph {
    /// Checks every rule.
    ///
    /// # Errors
    /// Every broken rule.
    pub fn verify(self) -> Result<Verified, VerifyErrors> {
        Ok(Verified(self))
    }
}
