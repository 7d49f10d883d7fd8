//! What the benchmark binaries share.
