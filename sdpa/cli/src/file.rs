//! Reads complete files. It rejects files without an end, and files larger than their purpose allows.

use std::fs::File;
use std::io::Read;
use std::path::Path;

fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format!("{} MiB", bytes >> 20) } else { format!("{bytes} bytes") }
}

/// Reads a regular file of at most `most` bytes.
pub(crate) fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let failed = |e: std::io::Error| format!("cannot be read: {e}");
    // Check the kind of file before opening it: opening a pipe would wait for a writer, and reading a device may never end.
    let facts = std::fs::metadata(path).map_err(failed)?;
    if !facts.is_file() {
        return Err("is not a file".to_owned());
    }
    let large = || format!("is larger than {}, the most that is read", size(most));
    if facts.len() > most {
        return Err(large());
    }
    let mut bytes = Vec::new();
    // Limit the read too: another process may have written to the file after the check.
    File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > most { Err(large()) } else { Ok(bytes) }
}

/// Reads a text file of at most `most` bytes.
pub(crate) fn text(path: &Path, most: u64) -> Result<String, String> {
    String::from_utf8(bytes(path, most)?).map_err(|e| format!("is not UTF-8 text: {e}"))
}

/// Checks that the path of a library is a file or a folder: loading anything else, such as a pipe, may never end.
pub(crate) fn is_library(path: &Path) -> Result<(), String> {
    match std::fs::metadata(path) {
        Ok(facts) if !facts.is_file() && !facts.is_dir() => Err("is neither a file nor a folder".to_owned()),
        // Accept a path that does not exist: the loader reports it.
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_or_is_too_large_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(text(&path, 5).as_deref(), Ok("12345"));
        assert_eq!(text(&path, 4), Err("is larger than 4 bytes, the most that is read".to_owned()));
        assert_eq!(bytes(folder.path(), 5), Err("is not a file".to_owned()));
        assert!(bytes(&folder.path().join("none"), 5).unwrap_err().starts_with("cannot be read"));
        // Files in /proc report size 0, whatever they contain.
        #[cfg(target_os = "linux")]
        {
            assert_eq!(bytes(Path::new("/dev/zero"), 5), Err("is not a file".to_owned()));
            assert!(bytes(Path::new("/proc/self/maps"), 5).unwrap_err().starts_with("is larger"));
        }
    }
}
