//! Sections of an ELF file of machine code (a cubin).

/// A little-endian number of `N` bytes.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut all = [0; 8];
    all[..N].copy_from_slice(bytes.get(at..at.checked_add(N)?)?);
    Some(u64::from_le_bytes(all))
}

fn slice(bytes: &[u8], at: u64, len: u64) -> Option<&[u8]> {
    let at = usize::try_from(at).ok()?;
    bytes.get(at..at.checked_add(usize::try_from(len).ok()?)?)
}

fn sections(file: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    const NOBITS: u64 = 8;
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (first, size) = (number::<8>(file, 40)?, number::<2>(file, 58)?);
    let (count, names) = (number::<2>(file, 60)?, number::<2>(file, 62)?);
    let header = |n: u64| slice(file, first + n * size, size);
    let field = |n: u64, at: usize| number::<8>(header(n)?, at);
    let names = slice(file, field(names, 24)?, field(names, 32)?)?;
    let section = |n: u64| {
        let from = names.get(usize::try_from(number::<4>(header(n)?, 0)?).ok()?..)?;
        let name = &from[..from.iter().position(|byte| *byte == 0)?];
        let empty = number::<4>(header(n)?, 4)? == NOBITS;
        let contents = if empty { &[] } else { slice(file, field(n, 24)?, field(n, 32)?)? };
        Some((name, contents))
    };
    (0..count).map(section).collect()
}

/// The contents of the `.text` sections, one for each kernel, ordered by size and contents: independent of the names of the kernels.
///
/// # Errors
/// If `file` is not a 64-bit ELF file, or has no machine code.
pub fn machine_code(file: &[u8]) -> Result<Vec<&[u8]>, String> {
    let sections = sections(file).ok_or("not a 64-bit little-endian ELF file")?;
    let mut code: Vec<&[u8]> = sections.into_iter().filter(|(name, _)| name.starts_with(b".text.")).map(|(_, contents)| contents).collect();
    code.sort_by_key(|contents| (contents.len(), *contents));
    if code.is_empty() { Err("no .text section".to_owned()) } else { Ok(code) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with these sections, after one for their names.
    fn file(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut names = b"\0.shstrtab\0".to_vec();
        let at: Vec<usize> = sections
            .iter()
            .map(|(name, _)| {
                names.extend(name.as_bytes());
                names.push(0);
                names.len() - name.len() - 1
            })
            .collect();
        let mut body = vec![0; 64];
        let mut headers = vec![];
        let mut header = |name: usize, contents: &[u8]| {
            let mut own = vec![0u8; 64];
            own[..4].copy_from_slice(&(name as u32).to_le_bytes());
            own[4] = 1;
            own[24..32].copy_from_slice(&(body.len() as u64).to_le_bytes());
            own[32..40].copy_from_slice(&(contents.len() as u64).to_le_bytes());
            body.extend(contents);
            headers.extend(own);
        };
        header(1, &names);
        sections.iter().zip(at).for_each(|((_, contents), name)| header(name, contents));
        body[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let first = body.len() as u64;
        body[40..48].copy_from_slice(&first.to_le_bytes());
        body[58] = 64;
        body[60] = sections.len() as u8 + 1;
        body.extend(headers);
        body
    }

    #[test]
    fn machine_code_is_compared_by_contents_and_not_by_name() {
        let one = file(&[(".text.first", b"abcd"), (".nv.info", b"1"), (".text.second", b"xy")]);
        let renamed = file(&[(".text.a", b"xy"), (".text.b", b"abcd"), (".nv.info", b"22")]);
        let changed = file(&[(".text.first", b"abcd"), (".text.second", b"xz")]);
        assert_eq!(machine_code(&one).unwrap(), [&b"xy"[..], b"abcd"]);
        assert_eq!(machine_code(&one), machine_code(&renamed));
        assert_ne!(machine_code(&one), machine_code(&changed));
        assert!(machine_code(&one[..one.len() - 1]).is_err() && machine_code(b"text").is_err());
        assert!(machine_code(&file(&[(".data", b"1")])).is_err());
    }
}
