//! Workspace for callers that pass none: one buffer per thread and stream, which grows as needed. A thread's calls on one stream are ordered, so they
//! can share memory; calls of two threads are not.

use crate::device::Device;
use crate::error::Error;
use crate::memory::Buffer;
use crate::memory::DeviceSlice;
use crate::submission::Submission;
use std::cell::RefCell;

/// The most buffers that a thread keeps.
const STREAMS: usize = 8;
/// Sizes are multiples of this many bytes.
const GRAIN: u64 = 1 << 16;

/// One buffer.
struct Room {
    device: &'static Device,
    /// The stream's number. Streams without numbers may be any stream.
    stream: Option<u64>,
    /// `None` only during drop.
    buffer: Option<Buffer>,
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.device.retire(Box::new(buffer));
        }
    }
}

/// Memory of a capture's last call, which its graph keeps.
struct Captured {
    stream: usize,
    /// The capture's number, which is unique: memory of a graph that is gone is never found again.
    capture: u64,
    slice: DeviceSlice,
}

thread_local! {
    /// The most recently used buffer is last.
    static ROOMS: RefCell<Vec<Room>> = const { RefCell::new(Vec::new()) };
    /// Buffers of streams under capture, the most recently used last.
    static CAPTURED: RefCell<Vec<Captured>> = const { RefCell::new(Vec::new()) };
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

impl Submission<'_> {
    /// Returns device memory of at least this size for the next work of this thread on the stream. It reuses the memory of this thread's
    /// last call on the stream if that is large enough. During capture, the graph keeps the memory alive, and all calls that are captured
    /// on this stream share it.
    ///
    /// # Errors
    /// Returns a driver error, usually because there is not enough memory.
    pub fn workspace(&self, bytes: u64) -> Result<DeviceSlice, Error> {
        if bytes == 0 {
            return Ok(DeviceSlice { address: 0, bytes: 0 });
        }
        if self.is_capturing() {
            return self.captured_workspace(bytes);
        }
        let (device, stream) = (self.device(), self.stream().id());
        let found = ROOMS.try_with(|rooms| {
            let mut rooms = rooms.try_borrow_mut().ok()?;
            let at = rooms.iter().rposition(|r| stream.is_some() && r.stream == stream && r.device.ordinal() == device.ordinal())?;
            let found = rooms[at].buffer.as_ref().map(slice).filter(|s| s.bytes >= bytes);
            let last = rooms.len() - 1;
            if found.is_some() {
                rooms.swap(at, last);
            } else {
                rooms.remove(at);
            }
            found
        });
        match found {
            Ok(Some(found)) => Ok(found),
            Ok(None) | Err(_) => self.make_room(stream, bytes),
        }
    }

    #[cold]
    fn captured_workspace(&self, bytes: u64) -> Result<DeviceSlice, Error> {
        let (stream, capture) = (self.raw().addr(), self.device().capture_of(self.raw())?);
        let same = |room: &Captured| room.stream == stream && room.capture == capture;
        let found = CAPTURED.try_with(|all| {
            let all = all.try_borrow().ok()?;
            all.iter().find(|room| same(room)).map(|room| room.slice).filter(|slice| slice.bytes >= bytes)
        });
        if let Ok(Some(found)) = found {
            return Ok(found);
        }
        // First free memory of graphs that are gone. A process that only captures would otherwise keep all of it.
        self.device().release_retired();
        let buffer = Buffer::new(self.device(), usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let made = slice(&buffer);
        self.keep_in_graph(Box::new(buffer))?;
        let _ = CAPTURED.try_with(|all| {
            if let Ok(mut all) = all.try_borrow_mut() {
                // A stream is in at most one capture at a time.
                all.retain(|room| room.stream != stream);
                if all.len() >= STREAMS {
                    all.remove(0);
                }
                all.push(Captured { stream, capture, slice: made });
            }
        });
        Ok(made)
    }

    #[cold]
    fn make_room(&self, stream: Option<u64>, bytes: u64) -> Result<DeviceSlice, Error> {
        let device = self.device();
        let bytes = usize::try_from(bytes.next_multiple_of(GRAIN)).unwrap_or(usize::MAX);
        device.release_retired();
        let buffer = Buffer::new(device, bytes)?;
        let found = slice(&buffer);
        let mut room = Some(Room { device, stream, buffer: Some(buffer) });
        let gone = ROOMS.try_with(|rooms| {
            let mut rooms = rooms.try_borrow_mut().ok()?;
            let gone = (rooms.len() >= STREAMS).then(|| rooms.remove(0));
            rooms.extend(room.take());
            gone
        });
        drop(gone);
        if room.is_some() {
            let limit = "this thread is ending and keeps no workspace: pass one with the call".to_owned();
            return Err(Error::Memory { what: "workspace".to_owned(), bytes: bytes as u64, limit });
        }
        Ok(found)
    }
}
