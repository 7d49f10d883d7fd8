//! Positioned reads in a file that several threads share.

use std::fs::File;
use std::io;

/// An open file for positioned reads.
#[derive(Debug)]
pub(super) struct Source {
    #[cfg(unix)]
    file: File,
    /// On other platforms a read moves the file position, so it needs a lock.
    #[cfg(not(unix))]
    file: parking_lot::Mutex<File>,
}

#[cfg(unix)]
impl Source {
    pub(super) fn new(file: File) -> Source {
        Source { file }
    }

    pub(super) fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn fill(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, offset)
    }
}

#[cfg(not(unix))]
impl Source {
    pub(super) fn new(file: File) -> Source {
        Source { file: parking_lot::Mutex::new(file) }
    }

    pub(super) fn length(&self) -> io::Result<u64> {
        Ok(self.file.lock().metadata()?.len())
    }

    fn fill(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.file.lock();
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(bytes)
    }
}

impl Source {
    /// Reads `length` bytes. The caller has checked that the file is long enough.
    pub(super) fn read(&self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        bytes.resize(length, 0);
        self.fill(&mut bytes, offset)?;
        Ok(bytes)
    }
}
