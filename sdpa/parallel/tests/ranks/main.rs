//! Ranks as threads over the CPU executor: schedules are proven, results compared with textbook attention of the whole problem, and failures provoked.

mod backend;
mod case;
mod failures;
mod harness;
mod parameters;
mod proofs;
mod results;
mod simulations;
