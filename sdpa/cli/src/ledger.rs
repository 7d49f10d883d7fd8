//! Ledgers: records of the features that cuDNN computed correctly together.

use crate::exit::Mistakes;
use sdpa::cudnn::CudnnExecutor;
use sdpa::cudnn::ledger::{Ledger, LedgerError};
use serde::Serialize;

/// Returns the ledgers in the user's cache folder. It adds a mistake for one that cannot be read.
pub(crate) fn of_user(mistakes: &mut Mistakes) -> Vec<Ledger> {
    Ledger::all_of_user().unwrap_or_else(|e| {
        match e {
            LedgerError::Setting(e) => mistakes.add_once(e.variable, format!("got {:?}, expected {}", e.value, e.expected)),
            LedgerError::Io { .. } | LedgerError::Text { .. } => {
                mistakes.add("ledgers", format!("{e}; run `cargo sdpa prove cudnn` to write it again"));
            }
        }
        Vec::new()
    })
}

/// A summary of the ledger that the cudnn executor uses.
#[derive(Debug, Serialize)]
pub(crate) struct LedgerFacts {
    device: String,
    release: String,
    right: usize,
    wrong: usize,
    /// Number of proven pairs of features.
    pairs: usize,
}

impl LedgerFacts {
    /// Returns a summary of the ledger that an executor uses; `None` without a ledger.
    pub(crate) fn of(executor: &CudnnExecutor) -> Option<LedgerFacts> {
        executor.ledger().map(LedgerFacts::new)
    }

    pub(crate) fn new(ledger: &Ledger) -> LedgerFacts {
        let about = ledger.about();
        let (device, release) = (about.device.clone(), about.release.clone());
        LedgerFacts { device, release, right: about.right, wrong: about.wrong, pairs: ledger.pairs() }
    }

    pub(crate) fn text(&self) -> String {
        let LedgerFacts { device, release, right, wrong, pairs } = self;
        format!("{right} results right, {wrong} wrong on {device}, sdpa {release}; {pairs} pairs of features are proven")
    }
}

/// The text that `doctor` prints if the cudnn executor has no ledger.
pub(crate) const NONE: &str = "none for this version and architecture, so every problem is unproven; `cargo sdpa prove cudnn` makes one";
