//! Events of a cache as counters of the `metrics` facade, each with the label `cache`.
//!
//! | name | counts |
//! |---|---|
//! | `sdpa_cache_hits_total` | lookups that found a plan; threads report theirs in batches |
//! | `sdpa_cache_misses_total` | lookups that built |
//! | `sdpa_cache_failures_total` | builds that failed or found no engine |
//! | `sdpa_cache_evictions_total` | evicted plans, with the label `why` |
//! | `sdpa_cache_build_seconds` | a histogram of build times |

use super::facts::What;
use metrics::{counter, histogram};
use std::cell::Cell;

std::thread_local! {
    /// Whether this thread is inside a recorder.
    static TELLING: Cell<bool> = const { Cell::new(false) };
}

/// Ends the recording that [`telling`] began, even by a panic.
struct Telling;

impl Drop for Telling {
    fn drop(&mut self) {
        let _ = TELLING.try_with(|telling| telling.set(false));
    }
}

/// Runs `tell`, unless this thread is already in it: a recorder that calls the cache would recurse forever.
fn telling(tell: impl FnOnce()) {
    if TELLING.try_with(|telling| telling.replace(true)) == Ok(false) {
        let _ends = Telling;
        tell();
    }
}

/// Counts an event.
pub(super) fn event(cache: &str, what: &What) {
    let cache = cache.to_owned();
    telling(|| match what {
        What::Missed { .. } => counter!("sdpa_cache_misses_total", "cache" => cache).increment(1),
        What::Built { time, .. } => histogram!("sdpa_cache_build_seconds", "cache" => cache).record(time.total),
        What::Failed { .. } | What::Unsupported { .. } => counter!("sdpa_cache_failures_total", "cache" => cache).increment(1),
        What::Evicted { why, .. } => counter!("sdpa_cache_evictions_total", "cache" => cache, "why" => why.text()).increment(1),
        What::Thrashing { .. } | What::Resized { .. } => {}
    });
}

/// Reports the hits up to now.
pub(super) fn hits(cache: &str, hits: u64) {
    telling(|| counter!("sdpa_cache_hits_total", "cache" => cache.to_owned()).absolute(hits));
}
