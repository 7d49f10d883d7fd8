//! Compiles native CUDA kernels.

use super::{Made, Maker, untaken};
use crate::args::CompileArgs;
use crate::doctor::INSTALL_COMPILER;
use crate::exit::{Failure, Line, Mistakes};
use crate::file;
use cudnn_graph::DeviceProfile;
use sdpa::ExecutorName;
use sdpa::cuda::kernel::{KernelKey, MachineCode};
use sdpa::cuda::{Nvrtc, Target, files};
use sdpa::cudnn::lower::Job;
use std::collections::HashMap;
use std::path::Path;

/// Checks that the library path is a file or a folder.
pub(super) fn check(args: &CompileArgs, mistakes: &mut Mistakes) {
    if let Some(path) = &args.nvrtc {
        mistakes.take(format!("--nvrtc {}", path.display()), file::is_library(path));
    }
}

/// Kernels for one device, compiled by one NVRTC. Problems that differ in lengths share them.
pub(super) struct Kernels {
    nvrtc: Nvrtc,
    target: Target,
    compiled: Vec<MachineCode>,
    /// Kernels of earlier problems, and their sizes.
    known: HashMap<KernelKey, usize>,
}

impl Kernels {
    pub(super) fn new(args: &CompileArgs, profile: &DeviceProfile) -> Result<Kernels, Failure> {
        let nvrtc = Nvrtc::load(args.nvrtc.as_deref()).map_err(|e| {
            let lines = [e.to_string(), INSTALL_COMPILER.to_owned()];
            Failure::Executor(lines.map(|line| Line::new("cuda", line)).into())
        })?;
        files::takes(&args.out).map_err(|why| untaken(&args.out, &why))?;
        Ok(Kernels { nvrtc, target: Target::new(profile.sm(), profile.sm_count()), compiled: Vec::new(), known: HashMap::new() })
    }
}

impl Maker for Kernels {
    const EXECUTOR: ExecutorName = ExecutorName::CUDA;

    fn make(&mut self, job: &Job) -> Result<Made, sdpa::Error> {
        let keys = self.target.kernels(job)?;
        let engine = keys.first().map_or_else(String::new, |key| key.tile.clone());
        let mut bytes = 0;
        for key in keys {
            bytes += match self.known.get(&key) {
                Some(known) => *known,
                None => {
                    let code = MachineCode::compile(&self.nvrtc, key.clone()).map_err(|e| sdpa::Error::failed(ExecutorName::CUDA, e))?;
                    let size = code.code().len();
                    self.compiled.push(code);
                    self.known.insert(key, size);
                    size
                }
            };
        }
        Ok(Made { engine, workspace_bytes: None, bytes })
    }

    fn compiler(&self) -> String {
        let [major, minor] = self.nvrtc.version();
        format!("NVRTC {major}.{minor}")
    }

    fn write(self, path: &Path) -> Result<(), String> {
        files::add(path, self.compiled).map_err(|e| e.to_string())
    }
}
