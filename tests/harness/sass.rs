//! Machine code of NVIDIA's GPUs as instructions, by NVIDIA's disassembler.

use crate::golden::repository;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The instructions of a kernel, with their modifiers, in the order in which they lie.
#[derive(Debug)]
pub struct Instructions(Vec<String>);

/// The disassembler: where the variable `SDPA_NVDISASM` says, else where `scripts/setup-tests.sh` puts it.
///
/// # Errors
/// That it is not there.
pub fn find() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("SDPA_NVDISASM") {
        return Ok(named.into());
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository("target"), PathBuf::from);
    let file = target.join("cudnn/disassembler/nvidia/cu13/bin/nvdisasm");
    if file.exists() { Ok(file) } else { Err(format!("{} is not there; scripts/setup-tests.sh installs it", file.display())) }
}

/// An instruction of a line of the disassembler: `/*0070*/ @!P0 HGMMA.64x128x16.F32 R24, ... ;`.
fn instruction(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("/*")?.split_once("*/")?.1.trim_start();
    let rest = if rest.starts_with('@') { rest.split_once(' ')?.1.trim_start() } else { rest };
    let name = rest.split([' ', ';']).next()?;
    name.starts_with(|c: char| c.is_ascii_uppercase()).then_some(name)
}

/// Instructions of a kernel, out of all that the disassembler wrote.
fn of_kernel(text: &str, kernel: &str) -> Vec<String> {
    let (mut all, mut within) = (Vec::new(), false);
    for line in text.lines() {
        if let Some(section) = line.strip_prefix(".text.") {
            within = section.trim_end() == format!("{kernel}:");
        }
        if let Some(name) = instruction(line).filter(|_| within) {
            all.push(name.to_owned());
        }
    }
    all
}

/// Whether an instruction's name is this, or goes on behind it with a modifier.
fn is(other: &str, name: &str) -> bool {
    other.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl Instructions {
    /// Of a kernel in an ELF file of machine code.
    ///
    /// # Errors
    /// What the disassembler says; that there is no such kernel.
    pub fn of(disassembler: &Path, code: &[u8], kernel: &str) -> Result<Instructions, String> {
        let file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
        std::fs::write(file.path(), code).map_err(|e| e.to_string())?;
        let out = Command::new(disassembler).arg("-c").arg(file.path()).output().map_err(|e| format!("{}: {e}", disassembler.display()))?;
        if !out.status.success() {
            return Err(String::from_utf8_lossy(&out.stderr).into_owned());
        }
        let all = of_kernel(&String::from_utf8_lossy(&out.stdout), kernel);
        if all.is_empty() { Err(format!("no kernel {kernel}")) } else { Ok(Instructions(all)) }
    }

    /// How many there are whose name is this, or goes on behind it with a modifier.
    pub fn count(&self, name: &str) -> usize {
        self.0.iter().filter(|other| is(other, name)).count()
    }

    /// How many there are of this name without a modifier.
    pub fn bare(&self, name: &str) -> usize {
        self.0.iter().filter(|other| *other == name).count()
    }

    /// The instructions from the first to the last of this name.
    pub fn between(&self, name: &str) -> Instructions {
        let (first, last) = (self.0.iter().position(|other| is(other, name)), self.0.iter().rposition(|other| is(other, name)));
        Instructions(first.zip(last).map_or_else(Vec::new, |(first, last)| self.0[first..=last].to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let lines = [
            "        /*0070*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8], RZ, !UPT ;",
            "        /*0080*/              @!P0 MUFU.EX2 R4, R5 ;",
            "        /*0090*/             @!UP1 UTMALDG.4D [UR8], [UR4] ;",
            "        /*00a0*/                   EXIT ;",
        ];
        let names = lines.map(|line| instruction(line).unwrap());
        assert_eq!(names, ["HGMMA.64x128x16.F32", "MUFU.EX2", "UTMALDG.4D", "EXIT"]);
        let others = [
            "//--------------------- .text.attention_forward",
            "        .headerflags    @\"EF_CUDA_SM90\"",
            "                    /* 0x000fe2 */",
            "",
        ];
        assert!(others.iter().all(|line| instruction(line).is_none()));
        let all = Instructions([names, names].concat().into_iter().map(str::to_owned).collect());
        assert_eq!(["MUFU", "MUFU.EX", "HGMMA.64x128x16.F32", "HGMMA"].map(|name| all.count(name)), [2, 0, 2, 2]);
        assert_eq!(["MUFU", "MUFU.EX2", "EXIT"].map(|name| all.bare(name)), [0, 2, 2]);
        assert_eq!((all.between("MUFU").0.len(), all.between("MUFU").count("EXIT"), all.between("LDL").0.len()), (5, 1, 0));
        let text = [&[".text.other:"], &lines[..3], &[".text.one:"], &lines[1..], &[".text.another:"], &lines[3..]].concat().join("\n");
        assert_eq!(of_kernel(&text, "one"), ["MUFU.EX2", "UTMALDG.4D", "EXIT"]);
        assert!(of_kernel(&text, "on").is_empty());
    }
}
