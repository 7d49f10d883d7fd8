//! Renders a picture as SVG.

use super::color::{DROPPED, HATCH};
use super::scene::{Anchor, Item, Scene, Size};
use crate::printable::markup;
use std::fmt::Write;

/// Two digits are finer than any screen.
fn number(x: f64) -> String {
    let text = format!("{x:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn place([x, y, w, h]: [f64; 4]) -> String {
    format!(r#"x="{}" y="{}" width="{}" height="{}""#, number(x), number(y), number(w), number(h))
}

/// Returns the complete file.
pub(super) fn render(scene: &Scene) -> Result<String, std::fmt::Error> {
    let (w, h) = (number(scene.width), number(scene.height));
    let mut out = String::new();
    writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">"#
    )?;
    writeln!(
        out,
        r#"<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="{}"/><path d="M-1.5 1.5l3-3M0 6l6-6M4.5 7.5l3-3" stroke="{}"/></pattern></defs>"#,
        DROPPED.hex(),
        HATCH.hex()
    )?;
    // Crisp edges avoid seams between neighbouring areas.
    writeln!(out, "<style>[class]{{shape-rendering:crispEdges}}</style>")?;
    writeln!(out, r##"<rect width="{w}" height="{h}" fill="#ffffff"/>"##)?;
    for item in &scene.items {
        match item {
            Item::Rect(area, color, name) => {
                let name = name.map_or_else(String::new, |name| format!(r#" class="{name}""#));
                writeln!(out, r#"<rect{name} {} fill="{}"/>"#, place(*area), color.hex())?;
            }
            Item::Hatch(area) => writeln!(out, r#"<rect {} fill="url(#hatch)"/>"#, place(*area))?,
            Item::Frame(area, color) => writeln!(out, r#"<rect {} fill="none" stroke="{}"/>"#, place(*area), color.hex())?,
            Item::Lines(points, color, width) => {
                let points: Vec<String> = points.iter().map(|[x, y]| format!("{},{}", number(*x), number(*y))).collect();
                writeln!(
                    out,
                    r#"<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" stroke-linejoin="round"/>"#,
                    points.join(" "),
                    color.hex(),
                    number(*width)
                )?;
            }
            Item::Text([x, y], anchor, size, color, text) => {
                let anchor = match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                };
                let size = match size {
                    Size::Small => "11",
                    Size::Large => "13",
                };
                writeln!(
                    out,
                    r#"<text x="{}" y="{}" text-anchor="{anchor}" font-size="{size}" fill="{}" xml:space="preserve">{}</text>"#,
                    number(*x),
                    number(*y),
                    color.hex(),
                    markup(text)
                )?;
            }
        }
    }
    out.push_str("</svg>\n");
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([number(1.0), number(0.126), number(-0.5), number(100.0)], ["1", "0.13", "-0.5", "100"]);
    }
}
