//! cargo sdpa.
fn main() {}
