//! Device memory whose parts have canaries around them.

use crate::setup::Result;
use cudnn_graph::{Buffer, DeviceSlice, Stream};

/// Around everything, in bytes.
const GAP: u64 = 64 << 10;
const CANARY: u8 = 0xa5;

/// Device memory for one pass in one buffer, with canaries around every part.
pub(crate) struct Arena {
    pub(crate) buffer: Buffer,
    pub(crate) parts: Vec<(String, DeviceSlice)>,
}

impl Arena {
    pub(crate) fn new(stream: &Stream, sizes: &[(String, u64)]) -> Result<Arena> {
        let total: u64 = sizes.iter().map(|(_, bytes)| bytes.next_multiple_of(256) + GAP).sum::<u64>() + GAP;
        let mut buffer = Buffer::new(stream.device(), usize::try_from(total)?)?;
        buffer.fill(stream, CANARY)?;
        let (mut parts, mut at) = (Vec::new(), buffer.address() + GAP);
        for (name, bytes) in sizes {
            parts.push((name.clone(), DeviceSlice { address: at, bytes: *bytes }));
            at += bytes.next_multiple_of(256) + GAP;
        }
        Ok(Arena { buffer, parts })
    }

    pub(crate) fn at(&self, name: &str) -> Result<DeviceSlice> {
        Ok(self.parts.iter().find(|(known, _)| known == name).ok_or_else(|| format!("no {name}"))?.1)
    }

    pub(crate) fn offset(&self, name: &str) -> Result<usize> {
        Ok(usize::try_from(self.at(name)?.address - self.buffer.address())?)
    }

    pub(crate) fn bytes(&self, stream: &Stream) -> Result<Vec<u8>> {
        let mut all = vec![0u8; self.buffer.bytes()];
        self.buffer.download(stream, 0, &mut all)?;
        Ok(all)
    }

    /// How many bytes outside of every part are no longer what they were, and the first of them.
    pub(crate) fn strayed(&self, all: &[u8]) -> Option<(usize, String)> {
        let inside = |n: usize| {
            let address = self.buffer.address() + n as u64;
            self.parts.iter().any(|(_, s)| (s.address..s.address + s.bytes).contains(&address))
        };
        let wrong: Vec<usize> = (0..all.len()).filter(|&n| all[n] != CANARY && !inside(n)).collect();
        let first = *wrong.first()?;
        let address = self.buffer.address() + first as u64;
        let before = self.parts.iter().rev().find(|(_, s)| s.address <= address);
        let name = before.map_or("the beginning", |(name, _)| name);
        let off = before.map_or(0, |(_, s)| address - s.address - s.bytes);
        Some((wrong.len(), format!("{off} bytes past {name}")))
    }

    /// A part, out of all bytes.
    pub(crate) fn part<'b>(&self, all: &'b [u8], name: &str) -> Result<&'b [u8]> {
        let at = self.offset(name)?;
        Ok(&all[at..at + usize::try_from(self.at(name)?.bytes)?])
    }
}
