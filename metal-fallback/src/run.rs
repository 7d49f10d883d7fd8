//! Runners of passes: an Apple GPU or an emulation.

use crate::error::Error;
use crate::packed::Tokens;
use crate::plan::Operand;
use crate::task::Task;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// The memory of an operand in one call: bytes to read or to write.
#[derive(Debug)]
pub enum Contents<'a> {
    /// Bytes that kernels read.
    Read(Cow<'a, [u8]>),
    /// Bytes that kernels write. Bytes that no kernel writes stay unchanged.
    Written(&'a mut [u8]),
}

impl Contents<'_> {
    /// Returns the bytes of the operand, for reading.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Contents::Read(bytes) => bytes,
            Contents::Written(bytes) => bytes,
        }
    }
}

/// One call of a pass: the scale, and the memory of each operand.
#[derive(Debug)]
pub struct Call<'a> {
    /// Factor of the scores; must be finite.
    pub attn_scale: f32,
    /// For packed sequences, the numbers of tokens that kernels access. `None` means the problem's maximum.
    pub tokens: Option<Tokens>,
    /// The memory of each operand of the call. Scratch buffers are not included; the runner allocates them.
    pub operands: Vec<(Operand, Contents<'a>)>,
}

impl Call<'_> {
    /// Returns the memory of an operand; `None` if the call has none.
    pub fn get(&self, operand: &Operand) -> Option<&Contents<'_>> {
        self.operands.iter().find(|(o, _)| o == operand).map(|(_, contents)| contents)
    }

    /// Checks that the call has memory for everything that the kernels of a pass access.
    ///
    /// # Errors
    /// Returns the first operand that is missing, too short, or read-only although a kernel writes it.
    pub fn check(&self, task: &Task) -> Result<(), Error> {
        for (operand, _) in task.operands().iter().filter(|(operand, _)| !operand.is_scratch()) {
            let need = task.reach(operand, self.tokens);
            let (entry, written) = task.user(operand);
            let wrong = |given: String, rule: String| Err(Error::Operand { entry, operand: operand.name().to_owned(), given, rule });
            match (self.get(operand), written) {
                (None, _) => return wrong("nothing".to_owned(), "memory".to_owned()),
                (Some(Contents::Read(_)), true) => return wrong("read-only memory".to_owned(), "writable memory".to_owned()),
                (Some(contents), _) if (contents.bytes().len() as u64) < need => {
                    return wrong(format!("{} bytes", contents.bytes().len()), format!("at least {need}"));
                }
                (Some(_), _) => {}
            }
        }
        Ok(())
    }
}

/// Properties of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The name that the system gives the GPU.
    pub name: String,
    /// The newest Apple GPU family that the GPU supports: 7 is M1.
    pub family: Option<u32>,
    /// The name and the version of the operating system.
    pub system: String,
    /// The largest number of threads per threadgroup.
    pub threads: u64,
    /// The largest size of threadgroup memory, in bytes.
    pub threadgroup_bytes: u64,
    /// The size of the memory that the GPU can use without loss of speed, in bytes.
    pub working_set_bytes: u64,
    /// Whether the GPU shares its memory with the CPU.
    pub unified_memory: bool,
}

/// Measurements of one run of a pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// Time in the kernels, by the GPU's own clock.
    pub kernels: Duration,
    /// Operands that were copied, because they are not whole memory pages.
    pub copied: Vec<Operand>,
}

/// A device or an emulation that runs passes.
pub trait Runner: Debug + Send + Sync {
    /// Returns the properties of the GPU or emulation.
    fn facts(&self) -> &Facts;

    /// Returns a pass with its kernels, which come from the cache or are built.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the kernels exceed the limits of the device, and [`Error::Compile`] if one of them cannot be
    /// compiled.
    fn prepare(&self, task: Task) -> Result<Arc<dyn Ready>, Error>;
}

/// A pass whose kernels are built, ready to run.
pub trait Ready: Debug + Send + Sync {
    /// Returns the pass that is run.
    fn task(&self) -> &Task;

    /// Runs the pass and waits for its end.
    ///
    /// # Errors
    /// Returns the errors of [`Call::check`] before anything runs. Any other error is a failure of the environment.
    fn run(&self, call: Call<'_>) -> Result<Ran, Error>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Forward, Kernels};
    use sdpa_core::DType;
    use sdpa_core::{Ends, Region, TensorSpec};

    #[test]
    fn a_call_has_what_kernels_reach_before_anything_runs() {
        let tensor = TensorSpec { dims: [1, 1, 8, 8], strides: [64, 64, 8, 1], alignment: 16 };
        let band = Region::default();
        let (q, k, v, o) = (tensor, tensor, tensor, tensor);
        let forward = Forward {
            dtype: DType::F32,
            q,
            k,
            v,
            o,
            band,
            ends: Ends::default(),
            seq_len_q: false,
            seq_len_kv: false,
            packed: None,
            paged: None,
            score_mod: None,
            keep: None,
            sink: false,
            dropout: None,
            stats: false,
            row_max: false,
            sum_exp: false,
        };
        let task = forward.task(Some(Kernels::Tiled)).unwrap();
        let bytes = vec![0u8; 256];
        let check = |lengths: [usize; 3], written: usize, o_written: bool| {
            let mut out = vec![0u8; written];
            let read = |n: usize| Contents::Read(Cow::Borrowed(&bytes[..n]));
            let o = if o_written { Contents::Written(&mut out) } else { read(256) };
            let named = [Operand::Q, Operand::K, Operand::V].into_iter().zip(lengths);
            let mut operands: Vec<(Operand, Contents<'_>)> = named.filter(|(_, n)| *n > 0).map(|(operand, n)| (operand, read(n))).collect();
            operands.push((Operand::O, o));
            Call { attn_scale: 1.0, tokens: None, operands }.check(&task).map_err(|e| e.to_string())
        };
        assert_eq!(check([256; 3], 256, true), Ok(()));
        for (said, got) in [
            ("k of attention_forward: got nothing, expected memory", check([256, 0, 256], 256, true)),
            ("v of attention_forward: got 255 bytes, expected at least 256", check([256, 256, 255], 256, true)),
            ("o of attention_forward: got 255 bytes, expected at least 256", check([256; 3], 255, true)),
            ("o of attention_forward: got read-only memory, expected writable memory", check([256; 3], 256, false)),
        ] {
            assert_eq!(got, Err(said.to_owned()));
        }
    }
}
