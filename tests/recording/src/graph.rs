//! What is known of an operation graph: the tensors that have to be bound.

use crate::descriptor::Pack;
use crate::entry::TENSORS;
use crate::memory;
use std::sync::OnceLock;

/// Workspace of every plan.
pub(crate) const WORKSPACE: u64 = 4096;
/// The version that is said, as cuDNN counts it: that of the environment's `RECORDING_CUDNN` in a process that has one.
pub(crate) fn version() -> usize {
    static SAID: OnceLock<usize> = OnceLock::new();
    *SAID.get_or_init(|| std::env::var("RECORDING_CUDNN").ok().and_then(|text| text.parse().ok()).unwrap_or(91900))
}

/// A tensor of a graph.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tensor {
    uid: i64,
    bytes: u64,
    alignment: u64,
    is_virtual: bool,
    by_value: bool,
}

/// Bytes of an element of a type; 0 for unknown types. Two elements of four bits are not needed here.
fn element(code: u8) -> u64 {
    match code {
        1 | 10 => 8,
        0 | 4 => 4,
        2 | 9 => 2,
        3 | 6 | 11 | 12 | 13 | 15 => 1,
        _ => 0,
    }
}

impl Tensor {
    pub(crate) fn new(
        uid: Option<i64>,
        code: u8,
        [dims, strides]: [&[i64]; 2],
        alignment: Option<i64>,
        is_virtual: bool,
        by_value: bool,
    ) -> Result<Tensor, String> {
        let uid = uid.ok_or("a tensor without an id")?;
        let wrong = |what: &str| format!("tensor {uid}: {what}");
        if dims.is_empty() || dims.len() != strides.len() || dims.iter().any(|&d| d < 1) || strides.iter().any(|&s| s < 0) {
            return Err(wrong(&format!("extents {dims:?} and strides {strides:?}")));
        }
        let alignment = alignment.and_then(|a| u64::try_from(a).ok()).filter(|a| a.is_power_of_two());
        let alignment = alignment.ok_or_else(|| wrong("no alignment"))?;
        let size = element(code);
        if size == 0 {
            return Err(wrong(&format!("data type {code}")));
        }
        let last: i64 = dims.iter().zip(strides).map(|(d, s)| (d - 1) * s).sum();
        Ok(Tensor { uid, bytes: (last.unsigned_abs() + 1) * size, alignment, is_virtual, by_value })
    }
}

/// A graph.
pub(crate) struct Graph {
    pub(crate) operations: u32,
    /// Those that a pack has to name.
    tensors: Vec<Tensor>,
}

impl Graph {
    pub(crate) fn new(operations: usize, mut tensors: Vec<Tensor>) -> Result<Graph, String> {
        tensors.retain(|t| !t.is_virtual);
        tensors.sort_by_key(|t| t.uid);
        tensors.dedup();
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].uid == pair[1].uid) {
            return Err(format!("two tensors have the id {}", pair[0].uid));
        }
        if operations == 0 || tensors.is_empty() || tensors.len() > TENSORS {
            return Err(format!("a graph of {operations} operations and {} tensors to be bound", tensors.len()));
        }
        Ok(Graph { operations: u32::try_from(operations).unwrap_or(u32::MAX), tensors })
    }

    /// What a plan of it is written as.
    pub(crate) fn to_json(&self) -> String {
        let row = |t: &Tensor| format!("{} {} {} {}", t.uid, t.bytes, t.alignment, u8::from(t.by_value));
        let rows: Vec<String> = self.tensors.iter().map(row).collect();
        let version = version();
        format!("{{\"cudnnVersion\":{version},\"recorded\":\"{};{}\"}}", self.operations, rows.join(";"))
    }

    pub(crate) fn from_json(json: &str) -> Option<Graph> {
        let (_, rest) = json.split_once("\"recorded\":\"")?;
        let mut rows = rest.split('"').next()?.split(';');
        let operations = rows.next()?.parse().ok()?;
        let tensor = |row: &str| {
            let mut numbers = row.split(' ').map(|n| n.parse::<i64>().ok());
            let mut next = || numbers.next().flatten();
            let (uid, bytes, alignment, by_value) = (next()?, next()?, next()?, next()? == 1);
            Some(Tensor { uid, bytes: bytes.unsigned_abs(), alignment: alignment.unsigned_abs(), is_virtual: false, by_value })
        };
        Graph::new(operations, rows.map(tensor).collect::<Option<Vec<_>>>()?).ok()
    }

    /// Whether a pack names exactly these tensors, and memory for each; how many bytes of each number it has.
    pub(crate) fn check(&self, pack: &Pack) -> Result<Vec<u8>, String> {
        let mut number_bytes = vec![0; pack.uids.len()];
        if let Some(unknown) = pack.uids.iter().find(|uid| self.tensors.iter().all(|t| t.uid != **uid)) {
            return Err(format!("the graph has no tensor {unknown} to be bound"));
        }
        if !pack.workspace.is_multiple_of(256) || !memory::holds(pack.workspace, WORKSPACE) {
            return Err(format!("{WORKSPACE} bytes of workspace at {:#x} are not allocated and aligned", pack.workspace));
        }
        // Pieces of the workspace that are bound: they are one or apart. A caller's own tensors may lie between one another.
        let mut pieces: Vec<(u64, u64)> = Vec::new();
        let room = memory::start(pack.workspace);
        for tensor in &self.tensors {
            let uid = tensor.uid;
            let at = pack.uids.iter().position(|u| *u == uid).ok_or_else(|| format!("nothing is bound to tensor {uid}"))?;
            let address = pack.pointers[at];
            if tensor.by_value {
                number_bytes[at] = u8::try_from(tensor.bytes).ok().filter(|n| *n <= 8).ok_or("a number of more than eight bytes")?;
                if address == 0 {
                    return Err(format!("the number {uid} has no address"));
                }
                continue;
            }
            let end = address.saturating_add(tensor.bytes);
            if !address.is_multiple_of(tensor.alignment) || !memory::holds(address, tensor.bytes) {
                return Err(format!("tensor {uid}: {} bytes at {address:#x} are not allocated and aligned", tensor.bytes));
            }
            if address < pack.workspace.saturating_add(WORKSPACE) && pack.workspace < end {
                return Err(format!("tensor {uid} lies in the plan's workspace"));
            }
            if memory::start(address) == room {
                if let Some(other) = pieces.iter().find(|other| other.0 != address && address < other.1 && other.0 < end) {
                    return Err(format!("tensor {uid} at {address:#x} overlaps the one at {:#x}", other.0));
                }
                pieces.push((address, end));
            }
        }
        Ok(number_bytes)
    }
}
