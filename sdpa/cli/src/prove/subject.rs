//! The executor that is proven.

use super::evidence;
use crate::args::PlaceArgs;
use crate::exit::{Failure, Line};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::ledger::About as LedgerAbout;
use sdpa::{Dispatcher, Executor, ExecutorName, Preference};
use sdpa_conformance::prove::{About, Auto};
use std::fmt::Display;
use std::sync::Arc;

/// An executor, and the subject of its answers.
pub(super) struct Subject {
    pub(super) executor: Arc<dyn Executor>,
    pub(super) about: About,
    /// The ledger that answers form, for cuDNN.
    pub(super) ledger: Option<LedgerAbout>,
}

/// Returns the name of a preference on the command line.
pub(super) fn name(preference: Preference) -> &'static str {
    match preference {
        Preference::Auto => "auto",
        Preference::Named(name) => name.name(),
    }
}

impl Subject {
    /// Opens an executor. It bypasses the kernel cache on disk, where kernels of a proof would evict the user's.
    pub(super) fn open(preference: Preference, places: &PlaceArgs) -> Result<Subject, Failure> {
        // A ledger lists the problems that cuDNN was shown to compute correctly. With it, cuDNN would refuse problems that a proof has to
        // test. The automatic selection keeps its ledger, so that the proof tests what users run.
        let use_ledger = preference != Preference::Named(ExecutorName::CUDNN);
        let dispatcher = Dispatcher::new(places.options().with_use_ledger(use_ledger));
        let name = name(preference);
        let absent =
            |e: &dyn Display| Failure::Executor(vec![Line::new(name, format!("{e}; `cargo sdpa doctor` says what to do about it"))]);
        let mut ledger = None;
        let (executor, runs_on): (Arc<dyn Executor>, String) = match preference {
            Preference::Named(ExecutorName::CUDA) => {
                let cuda = dispatcher.cuda().map_err(|e| absent(&e))?;
                let [major, minor] = cuda.nvrtc().version();
                (cuda.clone(), format!("{}, sm {}, NVRTC {major}.{minor}", cuda.device().name(), cuda.device().sm()))
            }
            Preference::Named(ExecutorName::CUDNN) => {
                let cudnn = dispatcher.cudnn().map_err(|e| absent(&e))?;
                let (device, version) = (cudnn.device(), cudnn.library().version());
                ledger = Some(evidence::about(cudnn));
                (cudnn.clone(), format!("{}, sm {}, cuDNN {version}", device.name(), device.sm()))
            }
            Preference::Named(ExecutorName::METAL) => {
                let metal = dispatcher.metal();
                let facts = metal.facts().map_err(|e| absent(&e))?;
                (Arc::new(metal.clone()), format!("{}, {}", facts.name, facts.system))
            }
            Preference::Named(_) => (Arc::new(CpuExecutor::default()), format!("a processor of {}", std::env::consts::ARCH)),
            Preference::Auto => {
                let device = dispatcher.cuda().map_or_else(|_| "no NVIDIA GPU".to_owned(), |cuda| cuda.device().name().to_owned());
                let version = dispatcher.cudnn().map_or_else(|_| "none".to_owned(), |cudnn| cudnn.library().version().to_string());
                (Arc::new(Auto::new(dispatcher)), format!("{device}, cuDNN {version}"))
            }
        };
        let runs_on = format!("{runs_on}, sdpa {}", env!("CARGO_PKG_VERSION"));
        Ok(Subject { executor, about: About { executor: name.to_owned(), runs_on }, ledger })
    }
}
