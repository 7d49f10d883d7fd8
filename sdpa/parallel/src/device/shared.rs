//! A communicator that the problems of one rank share.
#![allow(unsafe_code, reason = "transfers take addresses of device memory")]

use parking_lot::{Mutex, MutexGuard};
use sdpa_driver::{Buffer, Communicator, Device, DeviceSlice, Error, Stream};
use std::sync::Arc;

/// A communicator that several problems of one rank use, one call at a time.
///
/// A rank with layers of different problems makes a [`DeviceContextParallel`](crate::DeviceContextParallel) for each of them, and gives all of them a clone of
/// this value. All ranks must call their problems in one order. The communicator is dropped with the last clone.
#[derive(Clone, Debug)]
pub struct SharedCommunicator {
    rank: usize,
    size: usize,
    device: &'static Device,
    inner: Arc<Mutex<Communicator>>,
}

impl From<Communicator> for SharedCommunicator {
    fn from(communicator: Communicator) -> SharedCommunicator {
        let (rank, size, device) = (communicator.rank(), communicator.size(), communicator.device());
        SharedCommunicator { rank, size, device, inner: Arc::new(Mutex::new(communicator)) }
    }
}

impl SharedCommunicator {
    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the device.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Aborts the communicator, for all problems that share it.
    pub fn abort(&self, reason: &str) {
        self.lock().abort(reason);
    }

    /// Waits until a stream has passed its present end, as [`Communicator::wait`] does.
    ///
    /// # Errors
    /// Fails as [`Communicator::wait`] does.
    pub fn wait(&self, stream: &Stream) -> Result<(), Error> {
        self.lock().wait(stream)
    }

    /// Sends bytes of host memory to all other ranks and receives theirs, through device memory. `lengths` are the numbers of bytes of all ranks, and the
    /// result has the bytes of all ranks, in order. It waits for them.
    ///
    /// # Errors
    /// Fails if a driver or NCCL call fails, or if a rank does not answer before the deadline. The communicator is then aborted.
    pub fn gather(&self, own: &[u8], lengths: &[usize]) -> Result<Vec<Vec<u8>>, Error> {
        let starts: Vec<usize> = lengths
            .iter()
            .scan(0, |end, bytes| {
                let start = *end;
                *end += bytes.next_multiple_of(16);
                Some(start)
            })
            .collect();
        let all = starts.iter().zip(lengths).map(|(start, bytes)| start + bytes).max().unwrap_or(0);
        let stream = self.device.stream()?;
        let mut memory = Buffer::new(self.device, all)?;
        let slice = |rank: usize| (rank, DeviceSlice { address: memory.address() + starts[rank] as u64, bytes: lengths[rank] as u64 });
        let others = || (0..self.size).filter(|rank| *rank != self.rank);
        let from = slice(self.rank).1;
        let sends: Vec<_> = others().filter(|_| from.bytes > 0).map(|rank| (rank, from)).collect();
        let receives: Vec<_> = others().map(slice).filter(|(_, to)| to.bytes > 0).collect();
        memory.upload(&stream, starts[self.rank], own)?;
        if !(sends.is_empty() && receives.is_empty()) {
            let mut communicator = self.lock();
            // SAFETY: the slices are parts of a buffer that lives until the stream was waited for; dropping it after an error waits for the device.
            unsafe { communicator.exchange(&stream, &sends, &receives) }?;
            communicator.wait(&stream)?;
        }
        let download = |(start, bytes): (&usize, &usize)| {
            let mut part = vec![0; *bytes];
            memory.download(&stream, *start, &mut part)?;
            Ok(part)
        };
        starts.iter().zip(lengths).map(download).collect()
    }

    /// Waits for calls of other problems.
    pub(super) fn lock(&self) -> MutexGuard<'_, Communicator> {
        self.inner.lock()
    }
}
