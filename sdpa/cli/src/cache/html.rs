//! A writer of HTML that always balances tags and escapes text.

use crate::printable::markup;
use std::fmt::Display;

/// Names and values.
pub(super) type Attributes<'a> = &'a [(&'a str, &'a dyn Display)];

/// The HTML written so far.
#[derive(Debug, Default)]
pub(super) struct Html(String);

impl Html {
    /// Writes an element around the output of `body`.
    pub(super) fn element(&mut self, name: &str, attributes: Attributes<'_>, body: impl FnOnce(&mut Html)) {
        self.open(name, attributes);
        body(self);
        self.close(name);
        self.0.push('\n');
    }

    /// Writes an element around a text.
    pub(super) fn leaf(&mut self, name: &str, attributes: Attributes<'_>, text: impl Display) {
        self.open(name, attributes);
        self.text(text);
        self.close(name);
    }

    /// Writes an empty element.
    pub(super) fn empty(&mut self, name: &str, attributes: Attributes<'_>) {
        self.begin(name, attributes);
        self.0.push_str("/>");
    }

    /// Writes a text, escaped.
    pub(super) fn text(&mut self, text: impl Display) {
        self.0.push_str(&markup(&text.to_string()));
    }

    /// Writes a style sheet. It is a constant of this program and needs no escaping.
    pub(super) fn style(&mut self, sheet: &'static str) {
        self.open("style", &[]);
        self.0.push_str(sheet);
        self.close("style");
    }

    /// Returns the page.
    pub(super) fn finish(self) -> String {
        format!("<!doctype html>\n{}", self.0)
    }

    fn begin(&mut self, name: &str, attributes: Attributes<'_>) {
        self.0.push('<');
        self.0.push_str(name);
        for (attribute, value) in attributes {
            self.0.push_str(&format!(" {attribute}=\"{}\"", markup(&value.to_string())));
        }
    }

    fn open(&mut self, name: &str, attributes: Attributes<'_>) {
        self.begin(name, attributes);
        self.0.push('>');
    }

    fn close(&mut self, name: &str) {
        self.0.push_str(&format!("</{name}>"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_values_are_escaped() {
        let mut html = Html::default();
        html.element("p", &[("title", &"a\"b<c"), ("n", &1.5)], |html| {
            html.leaf("b", &[], "k <= q & \"x\"\0");
            html.empty("br", &[]);
        });
        let wanted = "<p title=\"a&quot;b&lt;c\" n=\"1.5\"><b>k &lt;= q &amp; &quot;x&quot;\u{fffd}</b><br/></p>\n";
        assert_eq!(html.0, wanted);
    }
}
