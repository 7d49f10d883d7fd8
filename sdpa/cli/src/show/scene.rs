//! The elements of a picture.

use super::color::Color;

/// The alignment of a text at its point.
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

/// One element, drawn over the previous ones.
#[derive(Clone, Debug)]
pub(super) enum Item {
    /// A filled area: x, y, width, height. The name is the class in the SVG.
    Rect([f64; 4], Color, Option<&'static str>),
    /// A hatched area, for masked-out cells.
    Hatch([f64; 4]),
    /// An outline.
    Frame([f64; 4], Color),
    /// Straight lines between points, and their width.
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
