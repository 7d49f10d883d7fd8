//! Reads a trace from its file.

use crate::file;
use sdpa::cache::CacheTrace;
use serde::Deserialize;
use std::path::Path;

/// Maximum bytes of a file. A journal of 4096 events is about a megabyte.
const MOST: u64 = 256 << 20;
/// The supported version.
const VERSION: u64 = 1;

/// Parsed first, because another version may differ in everything else.
#[derive(Deserialize)]
struct Header {
    caches: Vec<CacheHeader>,
}

#[derive(Deserialize)]
struct CacheHeader {
    version: u64,
}

/// Reads a trace, or returns every rule that its file violates.
pub(super) fn read(path: &Path) -> Result<CacheTrace, Vec<String>> {
    let bytes = bytes(path).map_err(|mistake| vec![mistake])?;
    parse(&bytes)
}

fn bytes(path: &Path) -> Result<Vec<u8>, String> {
    let bytes = file::bytes(path, MOST)?;
    if bytes.is_empty() { Err("is empty".to_owned()) } else { Ok(bytes) }
}

fn parse(bytes: &[u8]) -> Result<CacheTrace, Vec<String>> {
    let broken = |e: serde_json::Error| vec![format!("is not the JSON of a CacheTrace: {e}")];
    let header: Header = serde_json::from_slice(bytes).map_err(broken)?;
    if header.caches.is_empty() {
        return Err(vec!["has no caches".to_owned()]);
    }
    let versions = header.caches.iter().enumerate().filter(|(_, cache)| cache.version != VERSION);
    let mistakes: Vec<String> =
        versions.map(|(n, cache)| format!("caches[{n}].version: got {}, expected {VERSION}", cache.version)).collect();
    if mistakes.is_empty() { serde_json::from_slice(bytes).map_err(broken) } else { Err(mistakes) }
}
