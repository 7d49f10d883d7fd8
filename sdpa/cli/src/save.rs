//! The output file, which is either complete or not written.

use crate::data::{Data, write_blocks};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A path for an output file that was checked to be writable.
#[derive(Debug)]
pub(crate) struct Destination {
    /// The path as the user wrote it.
    pub(crate) path: PathBuf,
    /// The path after following links.
    file: PathBuf,
    folder: PathBuf,
}

impl Destination {
    /// Checks that a file can be written to this path, before anything is computed. `input` is a file that must not be overwritten.
    pub(crate) fn new(path: &Path, input: Option<&Path>) -> Result<Destination, String> {
        let there = std::fs::metadata(path);
        if there.as_ref().is_ok_and(std::fs::Metadata::is_dir) {
            return Err("is a folder".to_owned());
        }
        if there.as_ref().is_ok_and(|facts| !facts.is_file()) {
            return Err("is not a file".to_owned());
        }
        // Check for a name that is too long, which would otherwise fail only when the temporary file is renamed.
        if let Err(e) = &there
            && e.kind() == std::io::ErrorKind::InvalidFilename
        {
            return Err(format!("cannot be written: {e}"));
        }
        if path.file_name().is_none() {
            return Err("is not the name of a file".to_owned());
        }
        let file = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if input.and_then(|input| std::fs::canonicalize(input).ok()).is_some_and(|input| input == file) {
            return Err("is the input file; name another file".to_owned());
        }
        let folder = match file.parent() {
            Some(folder) if folder != Path::new("") => folder.to_owned(),
            Some(_) | None => PathBuf::from("."),
        };
        if !folder.is_dir() {
            return Err(format!("there is no folder {}", folder.display()));
        }
        // Create and drop a temporary file: only that shows whether the folder is writable.
        temporary(&folder).map_err(|e| format!("cannot be written: {e}"))?;
        Ok(Destination { path: path.to_owned(), file, folder })
    }

    /// Writes tensors to a temporary file next to the destination, then renames it.
    pub(crate) fn write(&self, mut tensors: Vec<Tensor<'_>>) -> Result<(), String> {
        // Write the tensors with the largest elements first, so that every tensor is aligned to its element size.
        tensors.sort_by_key(|t| std::cmp::Reverse(t.elements.dtype().bitsize()));
        let header = header(&tensors)?;
        self.write_with(|out| {
            out.write_all(&header)?;
            tensors.iter().try_for_each(|t| match t.elements {
                Saved::F32(x) => write_blocks(x, out, f32::to_le_bytes),
                Saved::Number(x) => write_blocks(&x, out, f32::to_le_bytes),
                Saved::Data(x) => x.write(out),
            })
        })
    }

    /// Writes a temporary file next to the destination, then renames it.
    pub(crate) fn write_with(&self, write: impl FnOnce(&mut BufWriter<&File>) -> std::io::Result<()>) -> Result<(), String> {
        let temporary = temporary(&self.folder).map_err(|e| e.to_string())?;
        let written = || -> std::io::Result<()> {
            let mut out = BufWriter::new(temporary.as_file());
            write(&mut out)?;
            out.flush()?;
            drop(out);
            temporary.as_file().sync_all()
        };
        written().map_err(|e| e.to_string())?;
        temporary.persist(&self.file).map_err(|e| e.error.to_string())?;
        Ok(())
    }
}

/// The elements of a tensor that is written to a file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Saved<'a> {
    F32(&'a [f32]),
    Number([f32; 1]),
    Data(&'a Data),
}

impl Saved<'_> {
    fn dtype(self) -> Dtype {
        match self {
            Saved::F32(_) | Saved::Number(_) | Saved::Data(Data::F32(_)) => Dtype::F32,
            Saved::Data(Data::F16(_)) => Dtype::F16,
            Saved::Data(Data::BF16(_)) => Dtype::BF16,
            Saved::Data(Data::F8E4M3(..)) => Dtype::F8_E4M3,
            Saved::Data(Data::F8E5M2(..)) => Dtype::F8_E5M2,
        }
    }
}

/// A tensor that is written to a file: its name, shape and elements.
#[derive(Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) name: String,
    /// The extents, in the file's order of axes.
    pub(crate) shape: Vec<i64>,
    pub(crate) elements: Saved<'a>,
}

impl<'a> Tensor<'a> {
    pub(crate) fn new(name: &str, shape: &[i64], elements: Saved<'a>) -> Tensor<'a> {
        Tensor { name: name.to_owned(), shape: shape.to_vec(), elements }
    }

    /// Returns a note for the user if elements of the tensor are NaN.
    pub(crate) fn not_numbers(&self) -> Option<String> {
        let count = match self.elements {
            Saved::F32(x) => x.iter().filter(|x| x.is_nan()).count(),
            Saved::Number([x]) => usize::from(x.is_nan()),
            Saved::Data(x) => x.not_numbers(),
        };
        (count > 0).then(|| format!("{}: {count} elements are not a number", self.name))
    }
}

/// Returns the header of a file with these tensors, in this order.
fn header(tensors: &[Tensor<'_>]) -> Result<Vec<u8>, String> {
    let mut offset = 0;
    let mut infos = Vec::new();
    for tensor in tensors {
        let dtype = tensor.elements.dtype();
        let shape: Vec<usize> = tensor.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
        let end = offset + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        infos.push((tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (offset, end) }));
        offset = end;
    }
    let metadata = Metadata::new(None, infos).map_err(|e| e.to_string())?;
    let mut text = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

fn temporary(folder: &Path) -> std::io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".sdpa-").suffix(".tmp");
    // Give the file the permissions of an ordinary new file, restricted by the umask, not the private ones of a temporary file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}
