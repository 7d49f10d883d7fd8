//! One thing that was submitted, as it crosses from the recording library to whoever asks. Both sides compile this file.

/// Tensors of one execution at most.
pub const TENSORS: usize = 64;

/// A plan was executed.
pub const EXECUTION: u32 = 1;
/// Device memory was set to a byte.
pub const FILL: u32 = 2;
/// Device memory was copied to device memory.
pub const COPY: u32 = 3;
/// Host memory was copied to device memory.
pub const UPLOAD: u32 = 4;
/// Device memory was copied to host memory.
pub const DOWNLOAD: u32 = 5;
/// A kernel was launched: its blocks are `from`, its threads `bytes`, its arguments `pointers`.
pub const LAUNCH: u32 = 6;

/// One thing that was submitted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Which.
    pub what: u32,
    /// Operations in the graph of the plan.
    pub operations: u32,
    /// Where to: the stream.
    pub stream: u64,
    /// Written from here on, where nothing was executed.
    pub to: u64,
    /// Read from here on, in host memory for uploads.
    pub from: u64,
    /// How many bytes.
    pub bytes: u64,
    /// The workspace of an execution.
    pub workspace: u64,
    /// How many tensors follow.
    pub tensors: u32,
    /// Their ids.
    pub uids: [i64; TENSORS],
    /// What was bound to them: device addresses, or host addresses of numbers.
    pub pointers: [u64; TENSORS],
    /// Bytes of a number in host memory; 0 for device memory.
    pub number_bytes: [u8; TENSORS],
    /// The number as it was then, from the first byte on.
    pub numbers: [u64; TENSORS],
}

impl Entry {
    /// Nothing yet.
    pub const NONE: Entry = Entry {
        what: 0,
        operations: 0,
        stream: 0,
        to: 0,
        from: 0,
        bytes: 0,
        workspace: 0,
        tensors: 0,
        uids: [0; TENSORS],
        pointers: [0; TENSORS],
        number_bytes: [0; TENSORS],
        numbers: [0; TENSORS],
    };
}
