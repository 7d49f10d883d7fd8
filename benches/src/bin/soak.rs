//! Many calls through a small cache: `soak [CALLS [SHAPES [ENTRIES [THREADS]]]]`, else 10⁶ calls over 10⁴ shapes, 64 entries, 16 threads.
//! Builds are counted and fail at random; what is wrong is printed, and the process fails.

use conformance::soak::{Soak, soak};
use std::process::ExitCode;

fn main() -> ExitCode {
    let number = |n: usize, default: u64| std::env::args().nth(n).and_then(|a| a.parse().ok()).unwrap_or(default);
    let size = Soak {
        calls: number(1, 1_000_000),
        shapes: number(2, 10_000) as usize,
        entries: number(3, 64) as usize,
        bytes: 2 << 20,
        threads: number(4, 16) as usize,
    };
    match soak(size) {
        Ok(told) => {
            println!("{size:?}\n{told:?}");
            if told.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(e) => {
            println!("{e}");
            ExitCode::FAILURE
        }
    }
}
