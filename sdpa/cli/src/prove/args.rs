//! The arguments of `prove`.

use crate::args::PlaceArgs;
use crate::names::Named;
use clap::Args;
use std::path::PathBuf;

pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  no answer is wrong
  1  a result is outside its tolerance, or a process ended or timed out
  2  mistakes in the arguments, all listed; or saved answers of another executor, device or version
  3  the executor is absent
  4  failure at run time: disk or memory

RUST_LOG=debug prints more on stderr.";

/// The description in `--help`, after the line of the overview.
pub(crate) const ABOUT: &str = "\
Prove an executor: compute and check problems that combine features

A problem combines features: pass, element type, head dims, mask, score_mod, packed sequences, paged KV cache, sink, dropout and so on. With the \
strength `two`, any two features that the executor supports together occur in at least one problem. Every result is compared with \
textbook attention in f64.

One worker process per processor computes the problems, so an illegal access on the device ends one problem only. Answers are saved. \
After an interruption, also by Ctrl-C, the next run continues, and computes problems with wrong answers again. A run ends after 20 \
wrong answers.

The answers of cudnn make a ledger: the features that this version computes correctly together on this device. The automatic selection tries native \
kernels first for a problem that the ledger does not cover.";

#[derive(Debug, Args)]
pub(crate) struct ProveArgs {
    /// Prove cpu, cuda, cudnn, metal, or auto (the executor selected for each problem)
    #[arg(value_name = "EXECUTOR", value_parser = Named::executors(), hide_possible_values = true)]
    pub(crate) executor: String,
    /// Choose which combinations to test [default: ledger for cudnn, else two]
    ///
    /// two: any two features occur together in a problem. three: any three features do, among the pass, element type, head dims, packed
    /// or paged storage, and the properties of a declared parameter. ledger: any two features occur together in three problems.
    #[arg(long, value_name = "two|three|ledger", value_parser = Named::strengths(), hide_possible_values = true, help_heading = "Problems")]
    pub(crate) strength: Option<String>,
    /// Compute this problem again, such as 'two-way 5'
    #[arg(long, value_name = "NAME", help_heading = "Problems")]
    pub(crate) only: Option<String>,
    /// Compute at most N problems that have no answer yet [default: all]
    #[arg(long, value_name = "N", allow_hyphen_values = true, help_heading = "Problems")]
    pub(crate) problems: Option<String>,
    /// Keep the answers in this folder [default: proofs in the user's cache]
    ///
    /// The default is the folder `proofs` in SDPA_CACHE_DIR, else in `sdpa` in XDG_CACHE_HOME, else in ~/.cache/sdpa (on macOS ~/Library/Caches/sdpa). Each executor
    /// has a file there, EXECUTOR.jsonl: one line names the executor, device and versions, each other line is an answer. A ledger
    /// goes to the folder `ledgers` next to it, or to FOLDER.
    #[arg(long, value_name = "FOLDER", help_heading = "Answers")]
    pub(crate) state: Option<PathBuf>,
    /// Delete the answers of the executor and its ledgers, and compute nothing
    #[arg(long, help_heading = "Answers")]
    pub(crate) remove: bool,
    #[command(flatten, next_help_heading = "Libraries")]
    pub(crate) places: PlaceArgs,
}

/// The arguments of a worker process.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    pub(crate) executor: String,
    #[command(flatten)]
    pub(crate) places: PlaceArgs,
}
