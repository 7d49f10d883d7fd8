//! Workspace for callers that bring none: a buffer for each thread and stream, which grows as needed. A thread's calls on a stream
//! follow one another there, so that they may use the same memory; those of two threads mix.

use super::device::Device;
use super::memory::Buffer;
use super::submission::Submission;
use crate::bind::DeviceSlice;
use crate::error::Error;
use std::cell::RefCell;

/// Buffers that a thread keeps.
const STREAMS: usize = 8;
/// Sizes are multiples of this.
const GRAIN: u64 = 1 << 16;

/// One buffer.
struct Room {
    device: &'static Device,
    /// By its number; none may be any.
    stream: Option<u64>,
    /// Empty only while it is dropped.
    buffer: Option<Buffer>,
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.device.retire(Box::new(buffer));
        }
    }
}

thread_local! {
    /// The one that was used last comes last.
    static ROOMS: RefCell<Vec<Room>> = const { RefCell::new(Vec::new()) };
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

impl Submission<'_> {
    /// Device memory of at least this size for what this thread submits next to the handle's stream: that of its last call on this
    /// stream, if it is large enough. While the stream is captured, memory that the graph keeps.
    ///
    /// # Errors
    /// The driver's own, out of memory above all.
    pub fn workspace(&self, bytes: u64) -> Result<DeviceSlice, Error> {
        if bytes == 0 {
            return Ok(DeviceSlice { address: 0, bytes: 0 });
        }
        if self.is_capturing() {
            // What graphs that are gone have left is given back first: else a process that captures and does nothing else keeps all of it.
            self.device().release_retired();
            let buffer = Buffer::new(self.device(), usize::try_from(bytes).unwrap_or(usize::MAX))?;
            let found = slice(&buffer);
            self.keep_in_graph(Box::new(buffer))?;
            return Ok(found);
        }
        let (device, stream) = (self.device(), self.handle().stream().id());
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
            let limit = "this thread is ending and keeps none: bring one".to_owned();
            return Err(Error::Memory { what: "workspace".to_owned(), bytes: bytes as u64, limit });
        }
        Ok(found)
    }
}
