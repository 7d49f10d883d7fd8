//! Parallel iteration over lists.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls `run` for each element of a list, in parallel with one thread per core.
pub fn side_by_side<T: Sync>(list: &[T], run: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(item) = list.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(item);
                }
            });
        }
    });
}
