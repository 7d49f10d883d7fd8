//! The HTML page: one file that loads no other and has no scripts.

use super::advice::Level;
use super::attempt::Phase;
use super::chart;
use super::findings::{CacheFindings, Findings};
use super::html::Html;
use super::tables::{self, reasons_of};
use super::units::{clip, count, many, percent, time};
use crate::memory::human;

const STYLE: &str = include_str!("style.css");
/// Maximum characters of a name and of a sentence.
const NAME: usize = 200;
const SENTENCE: usize = 1200;

/// Renders findings as HTML.
pub(super) fn render(findings: &Findings) -> String {
    let mut html = Html::default();
    html.element("html", &[("lang", &"en")], |html| {
        html.element("head", &[], |html| {
            html.empty("meta", &[("charset", &"utf-8")]);
            html.empty("meta", &[("name", &"viewport"), ("content", &"width=device-width, initial-scale=1")]);
            html.leaf("title", &[], format!("Plan caches of {}", clip(&findings.device, NAME)));
            html.style(STYLE);
        });
        html.element("body", &[], |html| {
            header(html, findings);
            for (n, cache) in findings.caches.iter().enumerate() {
                html.element("section", &[("id", &format!("cache-{n}"))], |html| section(html, cache));
            }
        });
    });
    html.finish()
}

fn header(html: &mut Html, findings: &Findings) {
    html.element("header", &[], |html| {
        html.leaf("h1", &[], "Caches of plans");
        html.leaf("p", &[], format!("{} · cuDNN {}", clip(&findings.device, NAME), clip(&findings.cudnn, NAME)));
        if findings.caches.len() > 1 {
            html.element("nav", &[], |html| {
                for (n, cache) in findings.caches.iter().enumerate() {
                    html.leaf("a", &[("href", &format!("#cache-{n}"))], clip(&cache.name, NAME));
                }
            });
        }
    });
}

fn section(html: &mut Html, cache: &CacheFindings) {
    let span = cache.span;
    html.element("h2", &[], |html| {
        html.text(clip(&cache.name, NAME));
        let from = if span.from_us == 0 { String::new() } else { format!("{} to ", time(span.from_us)) };
        html.leaf("small", &[], format!("{from}{}", time(span.to_us)));
    });
    let tone = if cache.healthy { "verdict good" } else { "verdict problem" };
    html.leaf("p", &[("class", &tone)], clip(&cache.verdict, SENTENCE));
    if cache.forgotten > 0 {
        let events = many(cache.forgotten, "earlier event was", "earlier events were");
        let text = format!("{events} forgotten: times, reasons and the chart are of what came later, hits and misses of everything.");
        html.leaf("p", &[("class", &"note")], text);
    }
    html.element("div", &[("class", &"figures")], |html| figures(html, cache));
    html.leaf("h3", &[], "What to change");
    html.element("ul", &[("class", &"advice")], |html| advice(html, cache));
    html.leaf("h3", &[], "What happened when");
    html.element("ul", &[("class", &"legend")], |html| legend(html, cache));
    html.element("div", &[("class", &"scroll chart")], |html| chart::timeline(html, cache));
    chart_note(html, cache);
    if !cache.reasons.is_empty() {
        html.leaf("h3", &[], "Why lookups found nothing");
        tables::reasons(html, &cache.reasons);
    }
    if !cache.keys.is_empty() {
        html.leaf("h3", &[], "Keys that took the longest");
        tables::keys(html, cache);
    }
    if !cache.entries.is_empty() {
        html.element("details", &[], |html| {
            html.leaf(
                "summary",
                &[],
                format!("{} now, the most recently used first", many(cache.entries.len() as u64, "entry", "entries")),
            );
            tables::entries(html, &cache.entries);
        });
    }
}

/// Writes one number with its name and details.
fn figure(html: &mut Html, name: &str, value: &str, of: &str, more: &str) {
    html.element("div", &[("class", &"figure")], |html| {
        html.leaf("h4", &[], name);
        html.element("p", &[("class", &"value")], |html| {
            html.text(value);
            html.leaf("small", &[], of);
        });
        html.leaf("p", &[("class", &"more")], more);
    });
}

fn figures(html: &mut Html, cache: &CacheFindings) {
    let f = &cache.figures;
    let bytes = |bytes: u64| human(bytes.into());
    let w = f.weight;
    let building = f.building_us.total as f64 / cache.span.length() as f64;
    let at_once = match cache.timeline.at_once {
        0 | 1 => String::new(),
        n => format!(", up to {n} at once"),
    };
    let rate = f.hit_rate.map_or_else(|| "–".to_owned(), percent);
    let memory = format!("host {}, device {}, workspace {}", bytes(w.host), bytes(w.device), bytes(w.workspace));
    let lookups = format!("{}, {}", many(f.hits, "hit", "hits"), many(f.misses, "miss", "misses"));
    let rows = [
        ("hit rate", rate, String::new(), lookups),
        (
            "time spent building",
            time(f.building_us.total),
            format!(" in {}", time(cache.span.length())),
            format!("{} of the time{at_once}", percent(building)),
        ),
        (
            "entries",
            count(f.entries as u64),
            format!(" of {}", count(f.limits.entries.get() as u64)),
            many(f.keys as u64, "key seen", "keys seen"),
        ),
        ("memory", bytes(w.bytes()), format!(" of {}", bytes(f.limits.bytes)), memory),
        ("evictions", count(f.evicted), String::new(), reasons_of(&f.evictions)),
        ("built again", count(f.rebuilt), String::new(), "a short while after they went".to_owned()),
        ("failures", count(f.failures), String::new(), format!("{} of what is unsupported", many(f.refusals, "refusal", "refusals"))),
        ("not kept", count(f.not_kept), String::new(), "too heavy beside what is pinned".to_owned()),
    ];
    for (name, value, of, more) in rows {
        figure(html, name, &value, &of, &more);
    }
}

fn advice(html: &mut Html, cache: &CacheFindings) {
    for advice in &cache.advice {
        let class = match advice.kind.level() {
            Level::Problem => "problem",
            Level::Tip => "tip",
            Level::Good => "good",
        };
        html.element("li", &[("class", &class)], |html| {
            html.leaf("b", &[], clip(&advice.text, SENTENCE));
            html.leaf("span", &[], clip(&advice.because, SENTENCE));
        });
    }
}

/// Writes the colours of the phases, with their times.
fn legend(html: &mut Html, cache: &CacheFindings) {
    let time_of = &cache.figures.building_us;
    for (phase, us) in Phase::ALL.map(|phase| (phase, phase.of(time_of))).into_iter().filter(|(_, us)| *us > 0) {
        let part = us as f64 / time_of.total.max(1) as f64;
        html.element("li", &[], |html| {
            html.leaf("i", &[("class", &phase.name())], "");
            html.text(format!("{} {}", phase.name(), time(us)));
            html.leaf("small", &[], percent(part));
        });
    }
    if cache.timeline.bars.iter().any(|bar| !bar.good) {
        html.element("li", &[], |html| {
            html.leaf("i", &[("class", &"failed")], "");
            html.text("failed");
        });
    }
}

fn chart_note(html: &mut Html, cache: &CacheFindings) {
    let bars = cache.timeline.bars.len();
    let left_out = if bars > chart::BARS {
        format!(" Of {} builds the longest {} are drawn.", count(bars as u64), count(chart::BARS as u64))
    } else {
        String::new()
    };
    let text = "Time spent building is a part of one thread's: two threads that build all the time are 200 %. Threads tell of hits in batches, \
                so that the rate of hits may lag a little.";
    html.leaf("p", &[("class", &"note")], format!("{text}{left_out}"));
}
