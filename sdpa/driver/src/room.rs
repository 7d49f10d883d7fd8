//! Workspace for callers that bring none: a buffer for each thread and stream, which grows as needed. A thread's calls on a stream
//! follow one another there, so that they may use the same memory; those of two threads mix.

use crate::device::Device;
use crate::error::Error;
use crate::memory::Buffer;
use crate::memory::DeviceSlice;
use crate::submission::Submission;
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

/// The memory of a capture's last call, which its graph keeps.
struct Captured {
    stream: usize,
    /// By its number, which no other capture has: what a graph that is gone has kept is never found again.
    capture: u64,
    slice: DeviceSlice,
}

thread_local! {
    /// The one that was used last comes last.
    static ROOMS: RefCell<Vec<Room>> = const { RefCell::new(Vec::new()) };
    /// Likewise, of streams that are captured.
    static CAPTURED: RefCell<Vec<Captured>> = const { RefCell::new(Vec::new()) };
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

impl Submission<'_> {
    /// Device memory of at least this size for what this thread submits next to the stream: that of its last call on this
    /// stream, if it is large enough. While the stream is captured, memory that the graph keeps, the same for calls that are captured one behind
    /// the other on this stream.
    ///
    /// # Errors
    /// The driver's own, out of memory above all.
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
        // What graphs that are gone have left is given back first: else a process that captures and does nothing else keeps all of it.
        self.device().release_retired();
        let buffer = Buffer::new(self.device(), usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let made = slice(&buffer);
        self.keep_in_graph(Box::new(buffer))?;
        let _ = CAPTURED.try_with(|all| {
            if let Ok(mut all) = all.try_borrow_mut() {
                // A stream is in one capture at a time.
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
            let limit = "this thread is ending and keeps none: bring one".to_owned();
            return Err(Error::Memory { what: "workspace".to_owned(), bytes: bytes as u64, limit });
        }
        Ok(found)
    }
}
