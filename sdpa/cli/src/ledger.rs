//! Ledgers of what cuDNN computes correctly.

use crate::exit::Mistakes;
use sdpa::cudnn::CudnnExecutor;
use sdpa::cudnn::ledger::Ledger;
use serde::Serialize;

/// Returns the ledgers in the folder of the user; adds a mistake for one that cannot be read.
pub(crate) fn of_user(mistakes: &mut Mistakes) -> Vec<Ledger> {
    Ledger::all_of_user().unwrap_or_else(|e| {
        mistakes.add("ledgers", format!("{e}; cargo sdpa prove cudnn makes it again"));
        Vec::new()
    })
}

/// The ledger in use.
#[derive(Debug, Serialize)]
pub(crate) struct LedgerFacts {
    device: String,
    date: String,
    right: usize,
    wrong: usize,
    /// Pairs of features that are proven.
    pairs: usize,
}

impl LedgerFacts {
    /// Those of an executor's ledger; `None` where it has none.
    pub(crate) fn of(executor: &CudnnExecutor) -> Option<LedgerFacts> {
        let ledger = executor.ledger()?;
        let about = ledger.about();
        let (device, date) = (about.device.clone(), about.date.clone());
        Some(LedgerFacts { device, date, right: about.right, wrong: about.wrong, pairs: ledger.pairs() })
    }

    pub(crate) fn text(&self) -> String {
        let LedgerFacts { device, date, right, wrong, pairs } = self;
        format!("{right} results right, {wrong} wrong on {device}, {date}; {pairs} pairs of features are proven")
    }
}

/// The row of `doctor` where there is no ledger.
pub(crate) const NONE: &str = "none for this version and architecture, so every problem is unproven; `cargo sdpa prove cudnn` makes one";
