//! A two-column table: names on the left, values on the right.

/// A two-column table for the terminal. Each row has a name and a value; a value may have several lines.
#[derive(Debug, Default)]
pub(crate) struct Table(Vec<Row>);

/// Maximum width of a name that other rows are aligned to.
const WIDEST: usize = 100;

#[derive(Debug)]
enum Row {
    Title(String),
    Pair(String, String),
}

impl Table {
    pub(crate) fn row(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push(Row::Pair(name.into(), value.into()));
    }

    /// Adds a title line to the table.
    pub(crate) fn title(&mut self, text: impl Into<String>) {
        self.0.push(Row::Title(text.into()));
    }

    /// Adds a row for each value; only the first row has the name.
    pub(crate) fn rows(&mut self, name: &str, values: impl IntoIterator<Item = String>) {
        for (n, value) in values.into_iter().enumerate() {
            self.row(if n == 0 { name } else { "" }, value);
        }
    }

    pub(crate) fn render(&self) -> String {
        let letters = |name: &str| name.chars().count();
        let width = |row: &Row| if let Row::Pair(name, _) = row { letters(name) } else { 0 };
        // A name longer than WIDEST does not widen the column: it moves only the value of its own row.
        let width = self.0.iter().map(width).filter(|&width| width <= WIDEST).max().unwrap_or(0);
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
                let gap = " ".repeat(width.saturating_sub(letters(name)));
                text.push_str(format!("{name}{gap}  {line}").trim_end());
                text.push('\n');
            }
        }
        text
    }
}

/// Returns the items as a list `a, b`, or `none` without items.
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
        let name = "n".repeat(70_000);
        table.row(&name, "2");
        assert_eq!(table.render(), format!("a     1\n      2\nlong  x\n      y\n{name}  2\n"));
        assert_eq!((list::<&str>(&[]), list(&["q", "k"])), ("none".to_owned(), "q, k".to_owned()));
    }
}
