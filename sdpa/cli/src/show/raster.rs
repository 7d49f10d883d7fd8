//! Renders a picture as PNG.

use super::color::{Color, DROPPED, HATCH};
use super::scene::{Anchor, Item, Scene, Size};
use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use std::io::Write;

/// Pixels per unit of the picture.
const SCALE: f64 = 2.0;

struct Pixels {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

impl Pixels {
    fn blend(&mut self, x: i64, y: i64, color: Color, part: f64) {
        let (Ok(x), Ok(y)) = (usize::try_from(x), usize::try_from(y)) else { return };
        if x >= self.width || y >= self.height || part <= 0.0 {
            return;
        }
        let at = 3 * (y * self.width + x);
        let mixed = Color(self.rgb[at], self.rgb[at + 1], self.rgb[at + 2]).toward(color, part);
        self.rgb[at..at + 3].copy_from_slice(&[mixed.0, mixed.1, mixed.2]);
    }

    /// Rounds to integer pixels, so that neighbouring areas meet.
    fn each(&mut self, area: [f64; 4], color: impl Fn(i64, i64) -> Color) {
        let [x, y, w, h] = area.map(|n| n * SCALE);
        let edge = |n: f64| n.round() as i64;
        for py in edge(y)..edge(y + h).max(edge(y) + 1) {
            for px in edge(x)..edge(x + w).max(edge(x) + 1) {
                self.blend(px, py, color(px, py), 1.0);
            }
        }
    }

    fn lines(&mut self, points: &[[f64; 2]], color: Color, width: f64) {
        let points: Vec<[f64; 2]> = points.iter().map(|p| p.map(|n| n * SCALE)).collect();
        let reach = width * SCALE / 2.0;
        let bounds = |axis: usize| {
            let all = points.iter().map(|p| p[axis]);
            let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), n| (low.min(n), high.max(n)));
            ((low - reach - 1.0).floor().max(0.0) as usize, (high + reach + 2.0).max(0.0) as usize)
        };
        let ((left, right), (top, bottom)) = (bounds(0), bounds(1));
        let (right, bottom) = (right.min(self.width), bottom.min(self.height));
        // Each pixel uses its nearest line, so that corners are not drawn twice.
        let across = right.saturating_sub(left);
        let mut cover = vec![0f64; across * bottom.saturating_sub(top)];
        for pair in points.windows(2) {
            let ([ax, ay], [bx, by]) = (pair[0], pair[1]);
            let (dx, dy) = (bx - ax, by - ay);
            let length = (dx * dx + dy * dy).max(1e-12);
            let span = |a: f64, b: f64, low: usize, high: usize| {
                let (from, to) = (a.min(b) - reach - 1.0, a.max(b) + reach + 2.0);
                (from.max(low as f64) as usize).clamp(low, high)..(to.max(0.0) as usize).clamp(low, high)
            };
            for y in span(ay, by, top, bottom) {
                for x in span(ax, bx, left, right) {
                    let (px, py) = (x as f64 + 0.5 - ax, y as f64 + 0.5 - ay);
                    let part = ((px * dx + py * dy) / length).clamp(0.0, 1.0);
                    let distance = (px - part * dx).hypot(py - part * dy);
                    let at = (y - top) * across + (x - left);
                    cover[at] = cover[at].max((reach + 0.5 - distance).clamp(0.0, 1.0));
                }
            }
        }
        for (n, part) in cover.into_iter().enumerate() {
            self.blend((left + n % across.max(1)) as i64, (top + n / across.max(1)) as i64, color, part);
        }
    }

    fn text(&mut self, [x, y]: [f64; 2], anchor: Anchor, size: Size, color: Color, text: &str) {
        let height = match size {
            Size::Small => RasterHeight::Size20,
            Size::Large => RasterHeight::Size24,
        };
        let advance = get_raster_width(FontWeight::Regular, height) as f64;
        let length = advance * text.chars().count() as f64;
        let left = x * SCALE
            - match anchor {
                Anchor::Start => 0.0,
                Anchor::Middle => length / 2.0,
                Anchor::End => length,
            };
        // Put the base line of the text at four fifths of the glyph height.
        let top = (y * SCALE - 0.8 * height.val() as f64).round() as i64;
        for (n, c) in text.chars().enumerate() {
            let Some(glyph) = get_raster(c, FontWeight::Regular, height).or_else(|| get_raster('?', FontWeight::Regular, height)) else {
                continue;
            };
            let left = (left + advance * n as f64).round() as i64;
            for (row, y) in glyph.rows().zip(top..) {
                for (cover, x) in row.iter().zip(left..) {
                    self.blend(x, y, color, f64::from(*cover) / 255.0);
                }
            }
        }
    }
}

/// Writes the complete file.
pub(super) fn render(scene: &Scene, out: impl Write) -> Result<(), png::EncodingError> {
    let (width, height) = ((scene.width * SCALE) as usize, (scene.height * SCALE) as usize);
    let mut pixels = Pixels { width, height, rgb: vec![0xff; 3 * width * height] };
    for item in &scene.items {
        match item {
            Item::Rect(area, color, _) => pixels.each(*area, |_, _| *color),
            Item::Hatch(area) => pixels.each(*area, |x, y| {
                let pitch = 6 * SCALE as i64;
                if (x + y).rem_euclid(pitch) < SCALE as i64 { HATCH } else { DROPPED }
            }),
            Item::Frame([x, y, w, h], color) => {
                pixels.lines(&[[*x, *y], [x + w, *y], [x + w, y + h], [*x, y + h], [*x, *y]], *color, 1.0);
            }
            Item::Lines(points, color, width) => pixels.lines(points, *color, *width),
            Item::Text(at, anchor, size, color, text) => pixels.text(*at, *anchor, *size, *color, text),
        }
    }
    let mut encoder = png::Encoder::new(out, u32::try_from(width).unwrap_or(1), u32::try_from(height).unwrap_or(1));
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels.rgb)?;
    writer.finish()
}
