//! The picture: two maps and a curve.

use super::color::{BLUE, Color, DROPPED, GREY, GRID, INK, VERMILION, viridis};
use super::field::{Curve, Field, Odd, REACH, range};
use super::scene::{Anchor, Item, Scene};

/// The longer side of a map.
const SIDE: f64 = 300.0;
/// The upper edge of the panels.
const TOP: f64 = 120.0;
const WIDTH: f64 = 1216.0;
const HEIGHT: f64 = TOP + SIDE + 60.0;
/// Left edges of the panels.
const LEFT: [f64; 3] = [64.0, 492.0, 866.0];
/// Maximum characters of the title.
const LETTERS: usize = 150;

/// Formats a number briefly.
pub(super) fn short(x: f64) -> String {
    if x == 0.0 {
        return "0".to_owned();
    }
    if !(1e-2..1e5).contains(&x.abs()) {
        return format!("{x:.1e}");
    }
    let digits = usize::try_from(2 - x.abs().log10().floor() as i64).unwrap_or(0);
    let text = format!("{x:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Returns about six round numbers within a range.
fn ticks([low, high]: [f64; 2], whole: bool) -> Vec<f64> {
    let rough = (high - low) / 6.0;
    if rough.is_nan() || rough <= 0.0 {
        return vec![low];
    }
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
    let step = steps.into_iter().find(|s| *s >= rough * 0.8).unwrap_or(rough);
    let step = if whole { step.max(1.0) } else { step };
    let first = (low / step - 1e-9).ceil();
    let count = ((high - first * step) / step + 1e-9).floor().max(0.0) as usize;
    // Adding 0.0 turns −0 into 0.
    (0..=count).map(|n| (first + n as f64) * step + 0.0).collect()
}

/// The texts of the figure.
pub(super) struct Titles {
    pub(super) score_mods: Vec<String>,
    pub(super) masks: Vec<String>,
    /// The numbers of queries and keys.
    pub(super) extents: [i64; 2],
    /// A description of the other settings.
    pub(super) view: String,
    /// A description of the input scores.
    pub(super) score: String,
}

fn clip(text: &str) -> String {
    if text.chars().count() <= LETTERS { text.to_owned() } else { text.chars().take(LETTERS - 3).chain("...".chars()).collect() }
}

/// Returns the area of a map on the picture.
fn area(left: f64, extents: [i64; 2]) -> [f64; 4] {
    let [rows, columns] = extents.map(|n| n as f64);
    let longest = rows.max(columns);
    let side = |n: f64| (SIDE * n / longest).max(SIDE / 5.0);
    [left, TOP, side(columns), side(rows)]
}

/// Draws frame, ticks and labels of a map.
fn axes(scene: &mut Scene, [x, y, w, h]: [f64; 4], extents: [i64; 2]) {
    let [queries, keys] = extents.map(|n| n as f64);
    for key in ticks([0.0, keys - 1.0], true) {
        let at = x + (key + 0.5) / keys * w;
        scene.line([at, y + h], [at, y + h + 4.0], GREY, 1.0);
        scene.text([at, y + h + 16.0], Anchor::Middle, INK, short(key));
    }
    for query in ticks([0.0, queries - 1.0], true) {
        let at = y + (query + 0.5) / queries * h;
        scene.line([x - 4.0, at], [x, at], GREY, 1.0);
        scene.text([x - 8.0, at + 4.0], Anchor::End, INK, short(query));
    }
    scene.items.push(Item::Frame([x, y, w, h], GREY));
    scene.text([x + w / 2.0, y + h + 34.0], Anchor::Middle, GREY, "key");
    scene.text([x - 8.0, y - 8.0], Anchor::End, GREY, "query");
}

fn cell([x, y, w, h]: [f64; 4], field: &Field, row: usize, columns: std::ops::Range<usize>) -> [f64; 4] {
    let (wide, tall) = (w / field.columns as f64, h / field.rows as f64);
    [x + columns.start as f64 * wide, y + row as f64 * tall, columns.len() as f64 * wide, tall]
}

/// Returns the colour of an infinity or NaN, which the map does not use, and its class name in the SVG.
fn of_odd(odd: Odd) -> (Color, &'static str) {
    match odd {
        Odd::NotANumber => (VERMILION, "nan"),
        Odd::Infinite => (INK, "inf"),
        Odd::MinusInfinite => (GREY, "minus-inf"),
    }
}

fn scores(scene: &mut Scene, field: &Field, extents: [i64; 2]) {
    let map = area(LEFT[0], extents);
    let [x, y, w, h] = map;
    scene.title([x, y - 24.0], "modified score");
    scene.items.push(Item::Hatch(map));
    let bounds = range(field.values.iter().flatten().copied());
    let [low, high] = bounds.unwrap_or([0.0, 0.0]);
    let color = |value: f64| viridis(if high > low { (value - low) / (high - low) } else { 0.5 });
    for row in 0..field.rows {
        for column in 0..field.columns {
            if let Some(value) = field.values[row * field.columns + column] {
                scene.rect(cell(map, field, row, column..column + 1), color(value), Some("cell"));
            }
            if let Some(odd) = field.odd[row * field.columns + column] {
                let (color, name) = of_odd(odd);
                scene.rect(cell(map, field, row, column..column + 1), color, Some(name));
            }
        }
    }
    axes(scene, map, extents);
    let mut at = x;
    for odd in Odd::ALL.into_iter().filter(|odd| field.odd_pairs[*odd as usize] > 0) {
        let (color, _) = of_odd(odd);
        scene.rect([at, y + h + 42.0, 10.0, 10.0], color, None);
        scene.text([at + 14.0, y + h + 51.0], Anchor::Start, INK, odd.said());
        at += 24.0 + 7.0 * odd.said().len() as f64;
    }
    let bar = [x + w + 16.0, y, 12.0, SIDE];
    if bounds.is_none() {
        let said = if field.first_odd.is_some() { "no finite score" } else { "no attended pair" };
        scene.text([bar[0], y + 12.0], Anchor::Start, GREY, said);
        return;
    }
    if low == high {
        scene.rect([bar[0], y, 12.0, 12.0], color(low), None);
        scene.text([bar[0] + 18.0, y + 10.0], Anchor::Start, INK, short(low));
        return;
    }
    const BANDS: usize = 100;
    for n in 0..BANDS {
        let part = SIDE / BANDS as f64;
        let area = [bar[0], y + n as f64 * part, 12.0, part];
        scene.rect(area, viridis(1.0 - (n as f64 + 0.5) / BANDS as f64), Some("bar"));
    }
    scene.items.push(Item::Frame(bar, GREY));
    for tick in ticks([low, high], false) {
        let at = y + SIDE * (high - tick) / (high - low);
        scene.line([bar[0] + 12.0, at], [bar[0] + 16.0, at], GREY, 1.0);
        scene.text([bar[0] + 20.0, at + 4.0], Anchor::Start, INK, short(tick));
    }
}

fn mask(scene: &mut Scene, field: &Field, extents: [i64; 2]) {
    let map = area(LEFT[1], extents);
    let [x, y, w, _] = map;
    scene.title([x, y - 24.0], "mask");
    scene.items.push(Item::Hatch(map));
    let color = |kept: f64| DROPPED.toward(BLUE, 0.25 + 0.75 * kept);
    for row in 0..field.rows {
        let kept = &field.kept[row * field.columns..][..field.columns];
        let mut from = 0;
        for run in kept.chunk_by(|a, b| a == b) {
            if run[0] > 0.0 {
                scene.rect(cell(map, field, row, from..from + run.len()), color(run[0]), Some("kept"));
            }
            from += run.len();
        }
    }
    axes(scene, map, extents);
    let legend = x + w + 16.0;
    let partial = field.kept.iter().any(|kept| *kept > 0.0 && *kept < 1.0);
    let mut at = y;
    let mut entry = |scene: &mut Scene, color: Option<Color>, text: &str| {
        let place = [legend, at, 12.0, 12.0];
        match color {
            Some(color) => scene.rect(place, color, None),
            None => scene.items.push(Item::Hatch(place)),
        }
        scene.items.push(Item::Frame(place, GREY));
        scene.text([legend + 18.0, at + 10.0], Anchor::Start, INK, text);
        at += 20.0;
    };
    entry(scene, Some(BLUE), "kept");
    if partial {
        entry(scene, Some(color(0.5)), "half");
    }
    entry(scene, None, "dropped");
}

/// Returns a range with a margin for the curve.
fn padded(bounds: Option<[f64; 2]>) -> [f64; 2] {
    let [low, high] = bounds.unwrap_or([0.0, 1.0]);
    let more = if high > low { 0.06 * (high - low) } else { 1.0 };
    [low - more, high + more]
}

/// Returns the points of a curve, split at infinities and NaN.
fn path(points: &[[f64; 2]], to: impl Fn([f64; 2]) -> [f64; 2]) -> Vec<Vec<[f64; 2]>> {
    let parts = points.split(|p| !p[1].is_finite());
    parts.map(|part| part.iter().map(|p| to(*p)).collect()).filter(|part: &Vec<_>| part.len() > 1).collect()
}

fn line(scene: &mut Scene, curve: &Curve) {
    let [x, y, w, h] = [LEFT[2] + 20.0, TOP, SIDE - 20.0, SIDE];
    let [q, k] = curve.place;
    scene.title([x, y - 24.0], format!("score_mod(x) at query {q}, key {k}"));
    let values = padded(range(curve.values.iter().map(|p| p[1])));
    let slopes = range(curve.slopes.iter().map(|p| p[1]).chain([0.0, 1.0])).map_or([0.0, 1.0], |r| padded(Some(r)));
    let across = |score: f64| x + (score + REACH) / (2.0 * REACH) * w;
    let up = |[low, high]: [f64; 2], value: f64| y + (high - value) / (high - low) * h;
    for tick in ticks([-REACH, REACH], false) {
        scene.line([across(tick), y], [across(tick), y + h], GRID, 1.0);
        scene.text([across(tick), y + h + 16.0], Anchor::Middle, INK, short(tick));
    }
    for tick in ticks(values, false) {
        let at = up(values, tick);
        scene.line([x, at], [x + w, at], GRID, 1.0);
        scene.text([x - 8.0, at + 4.0], Anchor::End, BLUE, short(tick));
    }
    for tick in ticks(slopes, false) {
        let at = up(slopes, tick);
        scene.line([x + w, at], [x + w + 4.0, at], VERMILION, 1.0);
        scene.text([x + w + 8.0, at + 4.0], Anchor::Start, VERMILION, short(tick));
    }
    scene.items.push(Item::Frame([x, y, w, h], GREY));
    for part in path(&curve.slopes, |[score, slope]| [across(score), up(slopes, slope)]) {
        scene.items.push(Item::Lines(part, VERMILION, 1.8));
    }
    for part in path(&curve.values, |[score, value]| [across(score), up(values, value)]) {
        scene.items.push(Item::Lines(part, BLUE, 1.8));
    }
    scene.text([x + w / 2.0, y + h + 34.0], Anchor::Middle, GREY, "score x");
    scene.text([x, y - 8.0], Anchor::Start, BLUE, "value");
    let derivative = if curve.slopes.is_empty() { "no derivative" } else { "derivative" };
    scene.text([x + w, y - 8.0], Anchor::End, VERMILION, derivative);
}

/// Draws the complete picture.
pub(super) fn draw(titles: &Titles, field: &Field, curve: &Curve) -> Scene {
    let mut scene = Scene { width: WIDTH, height: HEIGHT, items: Vec::new() };
    let or_none = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join("  then  ") };
    let masks = if titles.masks.is_empty() { "none".to_owned() } else { titles.masks.join("  and  ") };
    scene.title([24.0, 30.0], clip(&format!("score_mod  {}", or_none(&titles.score_mods))));
    scene.title([24.0, 50.0], clip(&format!("mask       {masks}")));
    scene.text([24.0, 70.0], Anchor::Start, GREY, clip(&format!("{}, {}", titles.view, titles.score)));
    scores(&mut scene, field, titles.extents);
    mask(&mut scene, field, titles.extents);
    line(&mut scene, curve);
    scene
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks([0.0, 255.0], true), [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]);
        assert_eq!(ticks([0.0, 7.0], true).len(), 8);
        assert_eq!(ticks([0.0, 0.0], true), [0.0]);
        assert_eq!(ticks([-60.0, 60.0], false), [-60.0, -40.0, -20.0, 0.0, 20.0, 40.0, 60.0]);
        assert_eq!(ticks([-0.06, 1.06], false).len(), 6);
    }

    #[test]
    fn numbers_are_short() {
        let told = [0.0, 1.0, -29.96, 0.5, 123_456.0, 1e-9, 100.0, 1234.0].map(short);
        assert_eq!(told, ["0", "1", "-30", "0.5", "1.2e5", "1.0e-9", "100", "1234"]);
    }
}
