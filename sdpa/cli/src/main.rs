//! `cargo sdpa`: run, check and inspect attention from the command line.

mod args;
mod blocks;
mod cache;
mod compile;
mod completions;
mod convert;
mod data;
mod doctor;
mod exit;
mod expression;
mod file;
mod header;
mod inspect;
mod language;
mod ledger;
mod memory;
mod names;
mod operands;
mod oracle;
mod params;
mod plan;
mod printable;
mod progress;
mod prove;
mod random;
mod request;
mod run;
mod save;
mod scales;
mod show;
mod stand_in;
mod support;
mod table;

use args::{Cli, Command};
use clap::Parser;
use std::ffi::OsString;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Blocks SIGXFSZ. It would end the process when a file reaches the size limit (`ulimit -f`), and leave a temporary file. The write then fails with EFBIG, as
/// on a full disk. Threads that start later inherit this.
#[cfg(unix)]
fn block_file_size_signal() {
    use nix::sys::signal::{SigSet, Signal};
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    // `thread_block` fails only for an unknown operation, so its result is ignored.
    signals.thread_block().ok();
}

/// Other platforms have no such signal.
#[cfg(not(unix))]
fn block_file_size_signal() {}

/// Returns the arguments. Cargo runs `cargo sdpa run` as `cargo-sdpa sdpa run`; the first argument is then not a command.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|first| first == "sdpa") {
        arguments.remove(1);
    }
    arguments
}

fn main() -> ExitCode {
    block_file_size_signal();
    let cli = match Cli::try_parse_from(arguments()) {
        Ok(cli) => cli,
        // If the arguments do not parse, the parsed `--json` is not available.
        Err(e) => return exit::print_usage(&e, std::env::args_os().any(|a| a == "--json")).into(),
    };
    tracing_subscriber::fmt().with_env_filter(EnvFilter::from_default_env()).with_writer(std::io::stderr).init();
    let result = match &cli.command {
        Command::Run(args) => run::run(args, cli.json),
        Command::Inspect(args) => inspect::run(args, cli.json),
        Command::Show(args) => show::run(args, cli.json),
        Command::Compile(args) => compile::run(args, cli.json),
        Command::Support(args) => support::run(args, cli.json),
        Command::Language => language::run(cli.json),
        Command::Cache(args) => cache::run(args, cli.json),
        Command::Doctor(args) => doctor::run(args, cli.json),
        Command::Prove(args) => prove::run(args, cli.json),
        Command::ProveWorker(args) => return prove::worker(args).into(),
        Command::Completions(args) => completions::run(args, cli.json),
    };
    exit::print(result, cli.json).into()
}
