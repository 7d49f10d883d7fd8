//! The output file: there as a whole or not at all.

use crate::data::{Data, write_blocks};
use crate::header::file_shape;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use sdpa::{AttentionSpec, Layout};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A place for the output that was seen to take files.
#[derive(Debug)]
pub(crate) struct Destination {
    /// As the user wrote it.
    pub(crate) path: PathBuf,
    /// Links followed.
    file: PathBuf,
    folder: PathBuf,
}

impl Destination {
    /// Checks a path before anything is computed.
    pub(crate) fn new(path: &Path, input: Option<&Path>) -> Result<Destination, String> {
        let there = std::fs::metadata(path);
        if there.as_ref().is_ok_and(std::fs::Metadata::is_dir) {
            return Err("is a folder".to_owned());
        }
        if there.as_ref().is_ok_and(|facts| !facts.is_file()) {
            return Err("is not a file".to_owned());
        }
        if path.file_name().is_none() {
            return Err("is not the name of a file".to_owned());
        }
        let file = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if input.and_then(|input| std::fs::canonicalize(input).ok()).is_some_and(|input| input == file) {
            return Err("is the input file".to_owned());
        }
        let folder = match file.parent() {
            Some(folder) if folder != Path::new("") => folder.to_owned(),
            Some(_) | None => PathBuf::from("."),
        };
        if !folder.is_dir() {
            return Err(format!("there is no folder {}", folder.display()));
        }
        // Made and dropped: whether the folder takes files is known only then.
        temporary(&folder).map_err(|e| format!("cannot be written: {e}"))?;
        Ok(Destination { path: path.to_owned(), file, folder })
    }

    /// Writes `o` and `stats` beside the destination and then moves them there.
    pub(crate) fn write(&self, spec: &AttentionSpec, layout: Layout, o: &Data, stats: Option<&[f32]>) -> Result<(), String> {
        let temporary = temporary(&self.folder).map_err(|e| e.to_string())?;
        let header = header(spec, layout, o, stats.is_some())?;
        let written = || -> std::io::Result<()> {
            let mut out = BufWriter::new(temporary.as_file());
            out.write_all(&header)?;
            if let Some(stats) = stats {
                write_blocks(stats, &mut out, f32::to_le_bytes)?;
            }
            o.write(&mut out)?;
            out.flush()?;
            temporary.as_file().sync_all()
        };
        written().map_err(|e| e.to_string())?;
        temporary.persist(&self.file).map_err(|e| e.error.to_string())?;
        Ok(())
    }
}

/// The header of a file with `stats` and `o`: f32 first, so that every tensor is aligned to its elements.
fn header(spec: &AttentionSpec, layout: Layout, o: &Data, stats: bool) -> Result<Vec<u8>, String> {
    let dtype = match o {
        Data::F32(_) => Dtype::F32,
        Data::F16(_) => Dtype::F16,
        Data::BF16(_) => Dtype::BF16,
    };
    let mut tensors = Vec::new();
    if stats {
        tensors.push(("stats", Dtype::F32, spec.o.dims[..3].to_vec()));
    }
    tensors.push(("o", dtype, file_shape(spec.o.dims, layout).to_vec()));
    let mut offset = 0;
    let mut infos = Vec::new();
    for (name, dtype, shape) in tensors {
        let shape: Vec<usize> = shape.into_iter().map(|n| usize::try_from(n).unwrap_or(0)).collect();
        let end = offset + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        infos.push((name.to_owned(), TensorInfo { dtype, shape, data_offsets: (offset, end) }));
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
    // As any new file: what the umask leaves, and not the owner alone.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}
