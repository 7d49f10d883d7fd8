//! What a picture is made of.

use super::color::Color;

/// Where a text is, seen from its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// The size of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    Small,
    Large,
}

/// One thing that is drawn, over those before.
#[derive(Clone, Debug)]
pub(super) enum Item {
    /// Filled: x, y, width, height. The name is for whoever reads the file.
    Rect([f64; 4], Color, Option<&'static str>),
    /// Hatched, as what is left out is.
    Hatch([f64; 4]),
    /// An outline.
    Frame([f64; 4], Color),
    /// Straight lines from point to point, and their width.
    Lines(Vec<[f64; 2]>, Color, f64),
    /// A line of text; the point is on its base line.
    Text([f64; 2], Anchor, Size, Color, String),
}

/// A picture.
#[derive(Clone, Debug, Default)]
pub(super) struct Scene {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) items: Vec<Item>,
}

impl Scene {
    pub(super) fn rect(&mut self, area: [f64; 4], color: Color, name: Option<&'static str>) {
        self.items.push(Item::Rect(area, color, name));
    }

    pub(super) fn line(&mut self, from: [f64; 2], to: [f64; 2], color: Color, width: f64) {
        self.items.push(Item::Lines(vec![from, to], color, width));
    }

    pub(super) fn text(&mut self, at: [f64; 2], anchor: Anchor, color: Color, text: impl Into<String>) {
        self.items.push(Item::Text(at, anchor, Size::Small, color, text.into()));
    }

    pub(super) fn title(&mut self, at: [f64; 2], text: impl Into<String>) {
        self.items.push(Item::Text(at, Anchor::Start, Size::Large, super::color::INK, text.into()));
    }
}
