//! A short soak of the cache on every run; the long one is `soak` of `benches`.

use conformance::soak::{Soak, soak};

#[test]
fn a_small_cache_under_many_threads_keeps_its_bounds() {
    let told = soak(Soak { calls: 40_000, shapes: 2_000, entries: 64, bytes: 2 << 20, threads: 16 }).unwrap();
    assert!(told.wrong.is_empty(), "{told:?}");
    assert!(told.hits > 5_000 && told.builds > 5_000 && told.failures > 500 && told.panics > 100, "{told:?}");
    // On Linux; elsewhere nobody tells, and nothing is asserted of it.
    assert!(told.rests == 256 && (told.resident[1] > 0 || !cfg!(target_os = "linux")), "{told:?}");
}
