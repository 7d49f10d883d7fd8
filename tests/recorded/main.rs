//! The raw tier, plan files and the cache over the library `recording`, which is this process's cuDNN and driver: whoever reads its record
//! waits for the others (`conformance::recorder`).

mod calls;
mod captures;
mod key;
mod packed;
mod paged;
mod plans;
mod sinks;
mod submissions;
