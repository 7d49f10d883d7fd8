//! Sanitises foreign text for terminals and logs: it cannot move the cursor, and its length is limited.

/// Returns true for control characters of terminals and of text direction.
fn is_control(c: char) -> bool {
    // Bidirectional marks, embeddings and isolates can hide the meaning of a text.
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes control characters, except line ends.
pub(crate) fn printable(text: &str) -> String {
    escaped(text, |c| c.escape_default().to_string())
}

/// Escapes control characters in JSON, where only strings can contain them.
pub(crate) fn printable_json(text: &str) -> String {
    escaped(text, |c| format!("\\u{:04x}", u32::from(c)))
}

fn escaped(text: &str, escape: impl Fn(char) -> String) -> String {
    if !text.chars().any(|c| is_control(c) && c != '\n') {
        return text.to_owned();
    }
    text.chars().map(|c| if is_control(c) && c != '\n' { escape(c) } else { c.to_string() }).collect()
}

/// Escapes text for HTML and SVG, also in attributes. Control characters, which both forbid, are shown as escapes.
pub(crate) fn markup(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(c),
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Number of characters shown from the beginning and from the end of a text, where error messages have their rule.
const SHOWN: [usize; 2] = [200, 400];

/// Returns a text that fits a line: if it is too long, only its beginning and its end.
pub(crate) fn brief(text: &str) -> String {
    let [first, last] = SHOWN;
    let count = text.chars().count();
    if count <= first + last {
        return text.to_owned();
    }
    let letters = |skip: usize, n: usize| text.chars().skip(skip).take(n).collect::<String>();
    format!("{} [...{} characters...] {}", letters(0, first), count - first - last, letters(count - last, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_lines_stay() {
        assert_eq!(printable("a\u{1b}[31mb\r\nc\u{7f}\u{9b}\u{202e}ä"), "a\\u{1b}[31mb\\r\nc\\u{7f}\\u{9b}\\u{202e}ä");
        let json = serde_json::to_string("a\u{9b}\u{7f}\n").unwrap();
        assert_eq!(printable_json(&json), "\"a\\u009b\\u007f\\n\"");
        assert_eq!(serde_json::from_str::<String>(&printable_json(&json)).unwrap(), "a\u{9b}\u{7f}\n");
    }

    #[test]
    fn texts_in_markup_are_what_xml_takes() {
        assert_eq!(markup("a < b & \"c\" > d\u{1b}\n"), "a &lt; b &amp; &quot;c&quot; &gt; d\u{fffd}\n");
    }

    #[test]
    fn long_texts_keep_their_ends() {
        let long = format!("begin{}end", "x".repeat(1 << 20));
        let brief = super::brief(&long);
        assert!(brief.len() < 700 && brief.starts_with("begin") && brief.ends_with("end"), "{brief}");
        assert_eq!(super::brief("short"), "short");
    }
}
