//! Registers that the arrays of a kernel take, counted in its text.

/// 32-bit registers of an element, by its type.
const TYPES: [(&str, u32); 4] = [("float", 1), ("float2", 2), ("int", 1), ("uint", 1)];

/// A whole number, or products and quotients of some.
fn value(text: &str) -> Result<u32, String> {
    let words = text.replace('/', " / ").replace('*', " * ");
    let mut words = words.split_whitespace();
    let number = |word: Option<&str>| word.and_then(|w| w.parse::<u32>().ok()).ok_or(format!("an extent of an array: {text}"));
    let mut value = number(words.next())?;
    while let Some(sign) = words.next() {
        let next = number(words.next())?;
        value = match sign {
            "*" => value * next,
            "/" if next > 0 => value / next,
            _ => return Err(format!("an extent of an array: {text}")),
        };
    }
    Ok(value)
}

/// The registers of a declaration; 0 of a statement that declares no array.
fn declared(statement: &str) -> Result<u32, String> {
    let mut words = statement.trim().splitn(2, ' ');
    let (Some(ty), Some(rest)) = (words.next(), words.next()) else { return Ok(0) };
    let Some((_, registers)) = TYPES.iter().find(|(name, _)| *name == ty) else { return Ok(0) };
    // A declaration has its extents behind a name, and no value.
    let name = rest.split('[').next().unwrap_or_default();
    if !rest.contains('[') || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
        return Ok(0);
    }
    let mut extents = rest.split('[').skip(1).map(|extent| value(extent.trim_end_matches(']')));
    extents.try_fold(*registers, |product, extent| Ok(product * extent?))
}

/// The most that arrays of a body take at a time: those of a block until its end.
///
/// # Errors
/// Extents that are not numbers.
pub fn peak(body: &str) -> Result<u32, String> {
    let mut blocks = vec![0];
    let (mut most, mut statement) = (0, String::new());
    for c in body.chars() {
        match c {
            '{' => blocks.push(0),
            '}' => {
                blocks.pop();
                if blocks.is_empty() {
                    return Ok(most);
                }
            }
            ';' => {
                if let Some(block) = blocks.last_mut() {
                    *block += declared(&statement.replace('\n', " "))?;
                }
                most = most.max(blocks.iter().sum());
            }
            _ => {
                statement.push(c);
                continue;
            }
        }
        statement.clear();
    }
    Err("a body without an end".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_count_until_the_end_of_their_block() {
        let body = "float2 x[64 / 8]; for (int i = 0; i < 3; i++) { float y[2][3]; { uint z[1]; } } { float w[8 * 2 / 4]; x[0] = 1; }\n}";
        assert_eq!(peak(body), Ok(16 + 7));
        assert_eq!(peak("const float a = b[3]; threadgroup float* q = r; }"), Ok(0));
        assert!(peak("float x[N]; }").is_err() && peak("float x[2];").is_err());
    }
}
