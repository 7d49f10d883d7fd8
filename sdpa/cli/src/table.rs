//! A short table: names on the left, values on the right.

/// Rows of a name and a value; a value may have several lines.
#[derive(Debug, Default)]
pub(crate) struct Table(Vec<Row>);

#[derive(Debug)]
enum Row {
    Title(String),
    Pair(String, String),
}

impl Table {
    pub(crate) fn row(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push(Row::Pair(name.into(), value.into()));
    }

    /// A line by itself, in front of rows.
    pub(crate) fn title(&mut self, text: impl Into<String>) {
        self.0.push(Row::Title(text.into()));
    }

    /// A row for each value, the name in front of the first only.
    pub(crate) fn rows(&mut self, name: &str, values: impl IntoIterator<Item = String>) {
        for (n, value) in values.into_iter().enumerate() {
            self.row(if n == 0 { name } else { "" }, value);
        }
    }

    pub(crate) fn render(&self) -> String {
        let width = |row: &Row| if let Row::Pair(name, _) = row { name.chars().count() } else { 0 };
        let width = self.0.iter().map(width).max().unwrap_or(0);
        let mut text = String::new();
        for row in &self.0 {
            let (name, value) = match row {
                Row::Pair(name, value) => (name, value),
                Row::Title(title) => {
                    text.push_str(title);
                    text.push('\n');
                    continue;
                }
            };
            for (n, line) in value.lines().enumerate() {
                let name = if n == 0 { name.as_str() } else { "" };
                text.push_str(format!("{name:width$}  {line}").trim_end());
                text.push('\n');
            }
        }
        text
    }
}

/// `a, b`, or `none`.
pub(crate) fn list<S: AsRef<str>>(items: &[S]) -> String {
    if items.is_empty() { "none".to_owned() } else { items.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::default();
        table.row("a", "1\n2");
        table.rows("long", ["x".to_owned(), "y".to_owned()]);
        assert_eq!(table.render(), "a     1\n      2\nlong  x\n      y\n");
        assert_eq!((list::<&str>(&[]), list(&["q", "k"])), ("none".to_owned(), "q, k".to_owned()));
    }
}
