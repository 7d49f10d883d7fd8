//! The header of an input file, which is validated before anything else is read; and the tensors, read in blocks.

use crate::convert::{FileType, convert};
use crate::data::{Data, Element};
use crate::exit::Mistakes;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use sdpa::Layout;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Number of bytes before the header, which contain its length.
const LENGTH: u64 = 8;
/// Maximum length of a header, as in the library.
const LONGEST: u64 = 100_000_000;
/// Number of bytes read at a time; a multiple of every element.
const BLOCK: usize = 1 << 20;

/// An open input file with a valid header.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) path: PathBuf,
    file: File,
    data: u64,
    metadata: Metadata,
}

/// A tensor of an input file, with its type and shape.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<i64>,
    pub(crate) offset: u64,
}

/// The type, shape and position of an operand in an input file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) ty: FileType,
    /// In the file's order of axes.
    shape: [i64; 4],
    offset: u64,
}

impl Entry {
    /// Returns the extents in the order (batch, head, seq, dim), from the order of `layout`.
    pub(crate) fn dims(&self, layout: Layout) -> [i64; 4] {
        places(layout).map(|place| self.shape[place])
    }
}

/// Returns the memory indices of the batch, head, seq and dim axes.
fn places(layout: Layout) -> [usize; 4] {
    match layout {
        Layout::Bhsd => [0, 1, 2, 3],
        Layout::Bshd => [0, 2, 1, 3],
        Layout::Sbhd => [1, 2, 0, 3],
    }
}

/// Converts extents (batch, head, seq, dim) to the order of axes that files of this layout have.
pub(crate) fn file_shape(dims: [i64; 4], layout: Layout) -> [i64; 4] {
    let mut shape = [0; 4];
    for (place, dim) in places(layout).into_iter().zip(dims) {
        shape[place] = dim;
    }
    shape
}

/// A tensor of a header, before validation.
#[derive(Deserialize)]
struct Claim {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Returns the first invalid tensor of a header and the reason. The library's error does not contain its name.
fn blame(header: &[u8]) -> Option<String> {
    let all: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let mut claims = Vec::new();
    for (name, value) in all.into_iter().filter(|(name, _)| name != "__metadata__") {
        match serde_json::from_value::<Claim>(value) {
            Ok(claim) => claims.push((name, claim)),
            Err(e) => return Some(format!("tensor {name}: {e}")),
        }
    }
    claims.sort_by_key(|(_, claim)| claim.data_offsets);
    let mut next = 0;
    for (name, Claim { dtype, shape, data_offsets: [start, end] }) in claims {
        let bits = shape.iter().try_fold(dtype.bitsize() as u64, |n, extent| n.checked_mul(*extent));
        let said = end.checked_sub(start);
        if bits.is_none_or(|bits| said != Some(bits / 8) || !bits.is_multiple_of(8)) {
            let bytes = bits.map_or_else(|| "more bytes than can be counted".to_owned(), |bits| format!("{} bytes", bits.div_ceil(8)));
            return Some(format!("tensor {name}: the shape {shape:?} of {dtype} has {bytes}, but its data_offsets are [{start}, {end}]"));
        }
        if start != next {
            return Some(format!("tensor {name}: its data_offsets begin at {start}, not at {next}, where the tensor before it ends"));
        }
        next = end;
    }
    None
}

impl Header {
    /// Opens a file and reads only its header, which it compares with the size of the file.
    pub(crate) fn read(path: &Path) -> Result<Header, String> {
        // Check the kind of file before opening it: opening a pipe would wait for a writer.
        let facts = std::fs::metadata(path).map_err(|e| format!("cannot be read: {e}"))?;
        if !facts.is_file() {
            return Err("is not a file".to_owned());
        }
        let mut file = File::open(path).map_err(|e| format!("cannot be read: {e}"))?;
        let size = facts.len();
        let mut length = [0; LENGTH as usize];
        file.read_exact(&mut length).map_err(|_| format!("is not a safetensors file: it has {size} bytes and no header"))?;
        let length = u64::from_le_bytes(length);
        let data = length.saturating_add(LENGTH);
        if length > LONGEST || data > size {
            return Err(format!(
                "is not a safetensors file: a header of {length} bytes exceeds the file ({size} bytes) or the format's limit"
            ));
        }
        let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
        file.read_exact(&mut text).map_err(|e| format!("cannot be read: {e}"))?;
        let metadata: Metadata = serde_json::from_slice(&text).map_err(|e| match blame(&text) {
            Some(tensor) => format!("has a broken safetensors header: {tensor}"),
            None => format!("has a broken safetensors header: {e}"),
        })?;
        let said = data.saturating_add(metadata.data_len() as u64);
        if said != size {
            return Err(format!("is broken: its header describes {said} bytes, but the file has {size}"));
        }
        Ok(Header { path: path.to_owned(), file, data, metadata })
    }

    /// Returns the tensor of this name, of any type and shape.
    pub(crate) fn find(&self, name: &str) -> Option<Found> {
        let info = self.metadata.info(name)?;
        let shape = info.shape.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect();
        Some(Found { dtype: info.dtype, shape, offset: self.data + info.data_offsets.0 as u64 })
    }

    /// Returns an operand, which has four axes, or adds a mistake. `why` is the reason why it is needed, if that is not obvious. An operand of packed sequences
    /// has three axes, and becomes one batch entry of all tokens.
    pub(crate) fn operand(
        &self,
        name: &str,
        why: &str,
        (layout, packed): (Option<Layout>, bool),
        mistakes: &mut Mistakes,
    ) -> Option<Entry> {
        let about = self.path.display();
        let Some(found) = self.find(name) else {
            mistakes.add(about, self.lacks(name, why));
            return None;
        };
        let ty = FileType::of(found.dtype);
        if ty.is_none() {
            mistakes.add(&about, format!("{name}: got type {}, expected F16, BF16, F32 or F64", found.dtype));
        }
        let entries: &[i64] = if packed { &[1] } else { &[] };
        let shape = <[i64; 4]>::try_from([entries, &found.shape].concat()).ok();
        if shape.is_none() && packed {
            let axes = if layout == Some(Layout::Bhsd) { "heads, total, dim" } else { "total, heads, dim" };
            mistakes.add(&about, format!("{name}: got shape {:?}, expected three axes ({axes})", found.shape));
        } else if shape.is_none() {
            let axes = match layout {
                Some(Layout::Bhsd) | None => "batch, head, seq, dim",
                Some(Layout::Bshd) => "batch, seq, head, dim",
                Some(Layout::Sbhd) => "seq, batch, head, dim",
            };
            mistakes.add(&about, format!("{name}: got shape {:?}, expected four axes ({axes})", found.shape));
        }
        Some(Entry { ty: ty?, shape: shape?, offset: found.offset })
    }

    /// Reads `cu_seqlens` offsets: integers along one axis.
    pub(crate) fn boundaries(&self, name: &str, option: &str) -> Result<Vec<i32>, String> {
        let found = self.find(name).ok_or_else(|| self.lacks(name, &format!(", which {option} reads")))?;
        let len = match found.shape[..] {
            [len] if len >= 2 => usize::try_from(len).unwrap_or(usize::MAX),
            _ => return Err(format!("{name}: got shape {:?}, expected one axis of batch + 1 offsets", found.shape)),
        };
        let narrow = |n: i64| i32::try_from(n).map_err(|_| format!("{name}: got the element {n}, expected 32-bit integers"));
        if found.dtype == Dtype::I32 {
            Ok(self.load_whole::<4>(found.offset, len)?.into_iter().map(i32::from_le_bytes).collect())
        } else if found.dtype == Dtype::I64 {
            self.load_whole::<8>(found.offset, len)?.into_iter().map(|n| narrow(i64::from_le_bytes(n))).collect()
        } else {
            Err(format!("{name}: got type {}, expected I32 or I64", found.dtype))
        }
    }

    /// Returns the names and element types of those tensors that exist and have a supported type, whatever else is wrong with them.
    pub(crate) fn types<'n>(&self, names: &[&'n str]) -> Vec<(&'n str, FileType)> {
        names.iter().filter_map(|&name| FileType::of(self.metadata.info(name)?.dtype).map(|ty| (name, ty))).collect()
    }

    /// Returns the message that says that a tensor is missing.
    pub(crate) fn lacks(&self, name: &str, why: &str) -> String {
        format!("has no tensor {name}{why}; it has {}", self.names())
    }

    fn names(&self) -> String {
        const SHOWN: usize = 8;
        let mut names: Vec<String> = self.metadata.offset_keys();
        let more = names.len().saturating_sub(SHOWN);
        names.truncate(SHOWN);
        let list = crate::table::list(&names);
        if more > 0 { format!("{list} and {more} more") } else { list }
    }

    /// Reads an operand and converts it to this element type. Also returns the number of finite numbers that became infinite.
    pub(crate) fn load(&self, entry: &Entry, element: Element, len: usize, done: impl Fn(u64)) -> Result<(Data, u64), String> {
        self.load_at(entry.offset, entry.ty, element, len, done)
    }

    /// Reads a tensor with any number of axes, from `offset` on, and converts it to an element type.
    pub(crate) fn load_at(
        &self,
        offset: u64,
        ty: FileType,
        element: Element,
        len: usize,
        done: impl Fn(u64),
    ) -> Result<(Data, u64), String> {
        let mut data = Data::zeros(element, len)?;
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset)).map_err(|e| e.to_string())?;
        let mut block = vec![0; BLOCK];
        let (mut at, mut overflows) = (0, 0);
        while at < len {
            let elements = (len - at).min(BLOCK / ty.bytes());
            let bytes = &mut block[..elements * ty.bytes()];
            file.read_exact(bytes).map_err(|e| format!("cannot be read: {e}"))?;
            overflows += convert(ty, bytes, &mut data, at);
            at += elements;
            done(bytes.len() as u64);
        }
        Ok((data, overflows))
    }

    /// Reads elements of `N` bytes without conversion.
    pub(crate) fn load_whole<const N: usize>(&self, offset: u64, len: usize) -> Result<Vec<[u8; N]>, String> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset)).map_err(|e| e.to_string())?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len * N).map_err(|e| format!("no memory for {len} elements: {e}"))?;
        bytes.resize(len * N, 0);
        file.read_exact(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
        Ok(bytes.as_chunks::<N>().0.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_go_to_files_and_come_back() {
        let dims = [2, 3, 5, 7];
        let shapes = [Layout::Bhsd, Layout::Bshd, Layout::Sbhd].map(|l| file_shape(dims, l));
        assert_eq!(shapes, [[2, 3, 5, 7], [2, 5, 3, 7], [5, 2, 3, 7]]);
        for layout in [Layout::Bhsd, Layout::Bshd, Layout::Sbhd] {
            let entry = Entry { ty: FileType::F32, shape: file_shape(dims, layout), offset: 0 };
            assert_eq!(entry.dims(layout), dims);
        }
    }
}
