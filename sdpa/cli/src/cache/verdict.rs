//! A summary of a cache in a few sentences.

use super::findings::Figures;
use super::reason::Reason;
use super::timeline::Span;
use super::units::{count, many, percent, time};

/// Minimum fraction of all build time for a reason to be named.
const TOLD: f64 = 0.2;

/// Summarises a cache in sentences: its builds, their reasons, and the lookups that hit.
pub(super) fn verdict(figures: &Figures, reasons: &[Reason], span: Span) -> String {
    let Some(rate) = figures.hit_rate else { return "This cache had no lookups.".to_owned() };
    let hits = format!("{} of {} lookups hit.", percent(rate), count(figures.hits.saturating_add(figures.misses)));
    if figures.builds == 0 {
        return format!("No build is in the trace; {hits}");
    }
    let took = figures.building_us.total;
    // Threads that build concurrently can spend more time in total than elapsed.
    let of = if took > span.length() { "of threads' time in" } else { "of" };
    let built = format!("{} took {} {of} {}", many(figures.builds, "build", "builds"), time(took), time(span.length()));
    let total = took as f64;
    let worst =
        reasons.iter().find(|reason| reason.total_us as f64 >= total * TOLD && (reason.evicted.is_some() || !reason.fields.is_empty()));
    let why = worst.map(|reason| {
        let these = if reason.misses >= figures.builds { "all".to_owned() } else { count(reason.misses) };
        match reason.evicted {
            Some(why) => format!("; {these} of them are of keys that were evicted earlier: {}", why.text()),
            None => format!("; {these} of them differ from an entry only in {}", reason.fields.join(", ")),
        }
    });
    format!("{built}{}; {hits}", why.unwrap_or_default())
}
