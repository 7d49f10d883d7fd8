//! The history of a cache as SVG: hit rate, time spent building, builds, and other events, over a common axis of seconds.

use super::attempt::Phase;
use super::findings::CacheFindings;
use super::html::Html;
use super::scale::Scale;
use super::timeline::{Bar, Mark};
use super::units::{clip, percent, time};

const WIDTH: f64 = 1120.0;
const LEFT: f64 = 118.0;
const RIGHT: f64 = WIDTH - 14.0;
/// Height of a curve.
const PANEL: f64 = 96.0;
/// Distance between a curve and the next element.
const GAP: f64 = 28.0;
/// Height of the builds of one thread.
const LANE: f64 = 16.0;
/// Maximum number of threads that are drawn separately.
const LANES: usize = 6;
/// Height of a row of marks.
const ROW: f64 = 18.0;
/// Maximum number of bars that are drawn; the longest come first.
pub(super) const BARS: usize = 4000;
/// Minimum width of a visible bar.
const NARROW: f64 = 0.8;
/// Minimum width of a bar that the mouse can point at.
const POINTED: f64 = 2.0;

/// Two digits are finer than any screen.
fn number(x: f64) -> String {
    let text = format!("{x:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Appends a rectangle to a path.
fn rectangle(path: &mut String, [x, y, w, h]: [f64; 4]) {
    path.push_str(&format!("M{} {}h{}v{}h-{}z", number(x), number(y), number(w), number(h), number(w)));
}

/// Draws the chart.
pub(super) fn timeline(html: &mut Html, cache: &CacheFindings) {
    let t = &cache.timeline;
    let seconds = [t.span.from_us, t.span.to_us].map(|us| us as f64 / 1e6);
    let x = Scale::new(seconds, [LEFT, RIGHT]);
    let lanes = t.at_once.clamp(1, LANES);
    let rates = 12.0;
    let building = rates + PANEL + GAP;
    let builds = building + PANEL + GAP;
    let marks = builds + LANE * lanes as f64 + 8.0;
    let kinds: Vec<Mark> = Mark::ALL.into_iter().filter(|kind| t.marks.iter().any(|(mark, _)| mark == kind)).collect();
    let bottom = marks + ROW * kinds.len() as f64;
    let height = bottom + 40.0;
    let title = format!("Hit rate, time spent building, and builds of the cache {} over time", clip(&cache.name, 60));
    let view = format!("0 0 {WIDTH} {height}");
    html.element("svg", &[("viewBox", &view), ("role", &"img"), ("aria-label", &title)], |svg| {
        grid(svg, x, [rates, bottom]);
        hit_rate(svg, cache, x, rates);
        building_time(svg, cache, x, building);
        bars(svg, cache, x, builds, lanes);
        for (n, kind) in kinds.into_iter().enumerate() {
            mark_row(svg, cache, x, marks + ROW * n as f64, kind);
        }
    });
}

fn label(svg: &mut Html, class: &str, x: f64, y: f64, text: impl std::fmt::Display) {
    svg.leaf("text", &[("class", &class), ("x", &number(x)), ("y", &number(y))], text);
}

fn line(svg: &mut Html, class: &str, [x1, y1, x2, y2]: [f64; 4]) {
    let d = format!("M{} {}L{} {}", number(x1), number(y1), number(x2), number(y2));
    svg.empty("path", &[("class", &class), ("d", &d)]);
}

fn grid(svg: &mut Html, x: Scale, [top, bottom]: [f64; 2]) {
    for (second, text) in x.ticks() {
        line(svg, "grid", [x.at(second), top, x.at(second), bottom]);
        label(svg, "middle", x.at(second), bottom + 16.0, text);
    }
    line(svg, "axis", [LEFT, bottom, RIGHT, bottom]);
    label(svg, "middle", (LEFT + RIGHT) / 2.0, bottom + 33.0, "seconds since the cache was made");
}

/// Draws a percent axis on the left, with its name.
fn percents(svg: &mut Html, y: Scale, name: [&str; 2]) {
    let (top, bottom) = (y.at(y.high()), y.at(y.low()));
    for part in [0.0, 0.5, 1.0] {
        let value = y.low() + (y.high() - y.low()) * part;
        line(svg, if part == 0.0 { "axis" } else { "grid" }, [LEFT, y.at(value), RIGHT, y.at(value)]);
        label(svg, "end", LEFT - 6.0, y.at(value) + 4.0, percent(value));
    }
    for (n, name) in name.into_iter().enumerate() {
        label(svg, "name", 0.0, (top + bottom) / 2.0 + 14.0 * n as f64 - 3.0, name);
    }
}

/// Returns the seconds at the edges of a bin.
fn edges(cache: &CacheFindings, n: usize) -> [f64; 2] {
    let t = &cache.timeline;
    let width = t.span.length() as f64 / t.bins.len().max(1) as f64;
    [n, n + 1].map(|n| (t.span.from_us as f64 + width * n as f64) / 1e6)
}

/// Possible starts of the axis of rates, so that small differences stay visible.
const LOWEST: [f64; 3] = [0.9, 0.5, 0.0];

fn hit_rate(svg: &mut Html, cache: &CacheFindings, x: Scale, top: f64) {
    let bins = &cache.timeline.bins;
    let rates: Vec<Option<f64>> = bins.iter().map(|bin| bin.hit_rate).collect();
    let least = rates.iter().flatten().copied().fold(1.0, f64::min);
    let lowest = LOWEST.into_iter().find(|lowest| *lowest <= least).unwrap_or(0.0);
    let y = Scale::new([lowest, 1.0], [top + PANEL, top]);
    percents(svg, y, ["hit", "rate"]);
    let mut at = 0;
    // Draw one line for each run of bins that have lookups.
    for run in rates.split(Option::is_none) {
        let points: Vec<(usize, f64)> = run.iter().enumerate().filter_map(|(n, rate)| Some((at + n, (*rate)?))).collect();
        at += run.len() + 1;
        let (Some(&(first, begin)), Some(&(last, end))) = (points.first(), points.last()) else { continue };
        let [left, right] = [x.at(edges(cache, first)[0]), x.at(edges(cache, last)[1])];
        let mut d = format!("M{} {}", number(left), number(y.at(begin)));
        for (n, rate) in points {
            let [from, to] = edges(cache, n);
            d.push_str(&format!("L{} {}", number(x.at((from + to) / 2.0)), number(y.at(rate))));
        }
        d.push_str(&format!("L{} {}", number(right), number(y.at(end))));
        svg.empty("path", &[("class", &"rate"), ("d", &d)]);
        // Fill the area below the line only if the axis starts at 0, because the area would mislead otherwise.
        if lowest == 0.0 {
            fill(svg, "area", &format!("{d}V{}H{}z", number(y.at(0.0)), number(left)));
        }
    }
    for (n, bin) in bins.iter().enumerate().filter(|(_, bin)| bin.hit_rate.is_some()) {
        let rate = bin.hit_rate.map(percent).unwrap_or_default();
        pointed(svg, column(cache, x, n, top), &format!("{}: {rate} of {:.0} lookups", when(cache, n), bin.hits + bin.misses as f64));
    }
}

/// Returns the area of a bin in a panel.
fn column(cache: &CacheFindings, x: Scale, n: usize, top: f64) -> [f64; 4] {
    let [left, right] = edges(cache, n).map(|second| x.at(second));
    [left, top, right - left, PANEL]
}

fn when(cache: &CacheFindings, n: usize) -> String {
    let [from, to] = edges(cache, n);
    format!("{from:.3} s to {to:.3} s")
}

/// Draws a path in one colour.
fn fill(svg: &mut Html, class: &str, d: &str) {
    if !d.is_empty() {
        svg.empty("path", &[("class", &class), ("d", &d)]);
    }
}

/// Draws an invisible area with a tooltip.
fn pointed(svg: &mut Html, [x, y, w, h]: [f64; 4], text: &str) {
    let place: [(&str, &dyn std::fmt::Display); 5] =
        [("class", &"hover"), ("x", &number(x)), ("y", &number(y)), ("width", &number(w)), ("height", &number(h))];
    svg.element("rect", &place, |svg| svg.leaf("title", &[], text));
}

fn building_time(svg: &mut Html, cache: &CacheFindings, x: Scale, top: f64) {
    let bins = &cache.timeline.bins;
    let width = (cache.timeline.span.length() as f64 / bins.len().max(1) as f64).max(f64::MIN_POSITIVE);
    let part = |us: u64| us as f64 / width;
    let most = bins.iter().map(|bin| part(bin.building_us.total)).fold(0.0, f64::max);
    let y = Scale::up_to(most, [top + PANEL, top]);
    percents(svg, y, ["time spent", "building"]);
    let mut paths: [String; Phase::ALL.len()] = Default::default();
    for (n, bin) in bins.iter().enumerate() {
        let [left, _, w, _] = column(cache, x, n, top);
        let mut base = y.at(0.0);
        for (phase, path) in Phase::ALL.into_iter().zip(&mut paths) {
            let h = y.length(part(phase.of(&bin.building_us)));
            if h >= 0.01 {
                rectangle(path, [left + w * 0.06, base - h, w * 0.88, h]);
            }
            base -= h;
        }
    }
    for (phase, d) in Phase::ALL.into_iter().zip(&paths) {
        fill(svg, phase.name(), d);
    }
    for (n, bin) in bins.iter().enumerate().filter(|(_, bin)| bin.building_us.total > 0) {
        let told = Phase::ALL.into_iter().map(|phase| (phase.name(), phase.of(&bin.building_us))).filter(|(_, us)| *us > 0);
        let told: Vec<String> = told.map(|(name, us)| format!("{name} {}", time(us))).collect();
        let text = format!("{}: {} misses, building {}: {}", when(cache, n), bin.misses, time(bin.building_us.total), told.join(", "));
        pointed(svg, column(cache, x, n, top), &text);
    }
}

/// Returns the bars to draw, longest first.
fn longest(bars: &[Bar]) -> Vec<&Bar> {
    let mut bars: Vec<&Bar> = bars.iter().collect();
    bars.sort_by_key(|bar| std::cmp::Reverse(bar.time.total));
    bars.truncate(BARS);
    bars
}

fn bars(svg: &mut Html, cache: &CacheFindings, x: Scale, top: f64, lanes: usize) {
    let bars = longest(&cache.timeline.bars);
    let mut paths: [String; Phase::ALL.len()] = Default::default();
    let mut failed = String::new();
    let mut hovers = Vec::new();
    for bar in bars {
        let y = top + LANE * bar.lane.min(lanes - 1) as f64;
        let left = x.at(bar.begin as f64 / 1e6);
        let length = x.length(bar.time.total as f64 / 1e6).max(NARROW).min(RIGHT - left);
        // Scale by the sum of the phases, which exceeds the total if several threads worked on one build.
        let whole = Phase::ALL.into_iter().map(|phase| phase.of(&bar.time) as f64).sum::<f64>().max(1.0);
        let mut at = left;
        for (phase, path) in Phase::ALL.into_iter().zip(&mut paths) {
            let w = length * phase.of(&bar.time) as f64 / whole;
            if w >= 0.01 {
                rectangle(if bar.good { path } else { &mut failed }, [at, y + 1.0, w, LANE - 2.0]);
            }
            at += w;
        }
        if length >= POINTED {
            hovers.push(([left, y, length, LANE], bar));
        }
    }
    label(svg, "name", 0.0, top + LANE * lanes as f64 / 2.0 + 4.0, "builds");
    for (phase, d) in Phase::ALL.into_iter().zip(&paths) {
        fill(svg, phase.name(), d);
    }
    fill(svg, "failed", &failed);
    for (place, bar) in hovers {
        let name = cache.labels.get(bar.attempt).map_or("", String::as_str);
        let ended = if bar.good { "" } else { ", failed" };
        pointed(svg, place, &format!("{} at {:.3} s{ended}: {}", time(bar.time.total), bar.begin as f64 / 1e6, clip(name, 120)));
    }
}

fn mark_row(svg: &mut Html, cache: &CacheFindings, x: Scale, top: f64, kind: Mark) {
    label(svg, "name", 0.0, top + 13.0, kind.name());
    // Draw one mark per pixel, with the number of events there.
    let mut places: Vec<(i64, u64)> = Vec::new();
    let mut all: Vec<i64> =
        cache.timeline.marks.iter().filter(|(mark, _)| *mark == kind).map(|(_, at)| x.at(*at as f64 / 1e6).round() as i64).collect();
    all.sort_unstable();
    for place in all {
        match places.last_mut() {
            Some((last, count)) if *last == place => *count += 1,
            Some(_) | None => places.push((place, 1)),
        }
    }
    let mut d = String::new();
    for (place, _) in &places {
        d.push_str(&format!("M{place} {}v{}", number(top + 3.0), number(ROW - 6.0)));
    }
    svg.empty("path", &[("class", &format!("mark {}", kind.name())), ("d", &d)]);
    let count: u64 = places.iter().map(|(_, count)| count).sum();
    pointed(svg, [0.0, top, LEFT, ROW], &format!("{}: {count}", kind.name()));
}
