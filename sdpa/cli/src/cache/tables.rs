//! The tables of the page.

use super::attempt::{Phase, Took, micros};
use super::findings::CacheFindings;
use super::html::Html;
use super::keys::Count;
use super::reason::Reason;
use super::units::{clip, count, time};
use crate::memory::human;
use sdpa::cache::EntryFacts;

/// Maximum characters of a label, and of a value of a field.
const LABEL: usize = 300;
const VALUE: usize = 90;
/// Maximum rows of a table that lists everything.
const ROWS: usize = 1000;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Text(&'static str),
    Number(&'static str),
}

/// Writes a table with one row per item, and a line about omitted rows.
fn table<T>(html: &mut Html, columns: &[Column], items: &[T], in_all: usize, row: impl Fn(&mut Html, &T)) {
    html.element("div", &[("class", &"scroll")], |html| {
        html.element("table", &[], |html| {
            html.element("thead", &[], |html| {
                html.element("tr", &[], |html| {
                    for column in columns {
                        match column {
                            Column::Text(name) => html.leaf("th", &[], name),
                            Column::Number(name) => html.leaf("th", &[("class", &"n")], name),
                        }
                    }
                });
            });
            html.element("tbody", &[], |html| items.iter().take(ROWS).for_each(|item| html.element("tr", &[], |html| row(html, item))));
        });
    });
    let shown = items.len().min(ROWS);
    if in_all > shown {
        html.leaf("p", &[("class", &"note")], format!("{} of {} are shown.", count(shown as u64), count(in_all as u64)));
    }
}

fn label(html: &mut Html, text: &str) {
    html.element("td", &[("class", &"label")], |html| html.leaf("code", &[], clip(text, LABEL)));
}

fn number(html: &mut Html, text: impl std::fmt::Display) {
    html.leaf("td", &[("class", &"n")], text);
}

fn bytes(html: &mut Html, bytes: u64) {
    number(html, human(bytes.into()));
}

/// Returns counts with their reasons, or a dash for none.
pub(super) fn reasons_of(counts: &[Count]) -> String {
    let texts: Vec<String> = counts.iter().map(|c| format!("{} ({})", count(c.count), c.why.text())).collect();
    if texts.is_empty() { "–".to_owned() } else { texts.join(", ") }
}

/// Writes the time of builds by phase, as a bar and as text.
fn phases(html: &mut Html, built: &Took) {
    let whole = Phase::ALL.into_iter().map(|phase| phase.of(built) as f64).sum::<f64>().max(1.0);
    let text: Vec<String> = Phase::ALL
        .into_iter()
        .map(|phase| (phase.name(), phase.of(built)))
        .filter(|(_, us)| *us > 0)
        .map(|(name, us)| format!("{name} {}", time(us)))
        .collect();
    html.element("span", &[("class", &"phases"), ("title", &text.join(", "))], |html| {
        for phase in Phase::ALL {
            let part = phase.of(built) as f64 / whole * 100.0;
            if part >= 0.5 {
                html.leaf("i", &[("class", &phase.name()), ("style", &format!("width:{part:.1}%"))], "");
            }
        }
    });
}

/// Writes the keys with the longest build times.
pub(super) fn keys(html: &mut Html, cache: &CacheFindings) {
    use Column::{Number, Text};
    let columns = [
        Text("key"),
        Number("builds"),
        Number("time"),
        Number("mean"),
        Number("hits"),
        Text("evictions"),
        Text("engine"),
        Number("weight"),
    ];
    table(html, &columns, &cache.keys, cache.figures.keys, |html, key| {
        label(html, &key.label);
        let failed = if key.failed > 0 { format!(" + {} failed", count(key.failed)) } else { String::new() };
        number(html, format!("{}{failed}", count(key.builds)));
        number(html, time(key.total_us));
        number(html, time(key.mean_us));
        number(html, count(key.hits));
        html.leaf("td", &[], reasons_of(&key.evictions));
        html.element("td", &[], |html| html.leaf("code", &[], clip(&key.engine, VALUE)));
        bytes(html, key.bytes);
    });
}

/// Writes the reasons for misses.
pub(super) fn reasons(html: &mut Html, reasons: &[Reason]) {
    use Column::{Number, Text};
    let columns = [Text("why"), Number("misses"), Number("time"), Number("hits"), Text("for example")];
    table(html, &columns, reasons, reasons.len(), |html, reason| {
        html.leaf("td", &[("class", &"why")], clip(&reason.text(), LABEL));
        number(html, count(reason.misses));
        number(html, time(reason.total_us));
        number(html, count(reason.hits));
        html.element("td", &[("class", &"label")], |html| {
            html.leaf("code", &[], clip(&reason.example.label, LABEL));
            for difference in &reason.example.differences {
                html.element("div", &[("class", &"difference")], |html| {
                    html.leaf("b", &[], clip(&difference.field, VALUE));
                    html.leaf("code", &[], clip(&difference.asked, VALUE));
                    html.text(" ≠ ");
                    html.leaf("code", &[], clip(&difference.there, VALUE));
                });
            }
        });
    });
}

/// Writes the entries of the cache, the most recently used first.
pub(super) fn entries(html: &mut Html, entries: &[EntryFacts]) {
    use Column::{Number, Text};
    let columns = [
        Number("entry"),
        Text("key"),
        Text("engine"),
        Number("made at"),
        Number("built in"),
        Text(""),
        Number("hits"),
        Number("weight"),
        Text(""),
    ];
    table(html, &columns, entries, entries.len(), |html, entry| {
        number(html, entry.id);
        label(html, &entry.label);
        html.element("td", &[], |html| html.leaf("code", &[], clip(&entry.engine, VALUE)));
        number(html, time(micros(entry.made)));
        number(html, time(micros(entry.built.total)));
        html.element("td", &[], |html| phases(html, &Took::from(&entry.built)));
        number(html, count(entry.hits));
        bytes(html, entry.weight.bytes());
        html.leaf("td", &[], if entry.pinned { "pinned" } else { "" });
    });
}
