//! Suggestions for misspelled names.

/// Returns the number of letters that are wrong, missing, superfluous or swapped with the next.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let mut least = (rows[i][j] + usize::from(x != y)).min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i - 1] == *y && b[j - 1] == *x {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// Returns the name nearest to `text` by edit distance, or `None` if that distance is more than a third of the letters of `text`. Of
/// equally near names it returns the alphabetically first.
pub fn nearest<'n>(text: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let letters: Vec<char> = text.chars().take(64).collect();
    let most = letters.len() / 3;
    let near = |name: &'n str| (distance(&letters, &name.chars().collect::<Vec<_>>()), name);
    let found = names.into_iter().filter(|name| name.chars().count().abs_diff(letters.len()) <= most).map(near).min();
    found.filter(|(distance, _)| *distance <= most).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn what_is_near_is_found_and_what_is_not_is_not() {
        let names = ["tanh", "sin", "cos", "select", "sqrt", "rsqrt", "causal"];
        for (text, want) in [("tahn", "tanh"), ("tnh", "tanh"), ("selct", "select"), ("sqr", "sqrt"), ("causl", "causal"), ("cus", "cos")] {
            assert_eq!(nearest(text, names), Some(want), "{text}");
        }
        for text in ["", "x", "gelu", "softplus", "ta"] {
            assert_eq!(nearest(text, names), None, "{text}");
        }
    }
}
