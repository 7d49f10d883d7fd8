//! `cache report`: an HTML page of a trace of the plan caches. `cache info` and `cache clear`: the kernel cache on disk.

mod advice;
mod attempt;
mod chart;
mod findings;
mod html;
pub(crate) mod kernels;
mod keys;
mod lengths;
mod page;
mod reason;
mod scale;
mod tables;
#[cfg(test)]
mod tests;
mod timeline;
mod trace;
mod units;
mod verdict;

use crate::args::{CacheArgs, CacheCommand, CacheReportArgs};
use crate::exit::{Answer, Failure, Mistakes, Outcome};
use crate::progress::Progress;
use crate::save::Destination;
use crate::table::Table;
use findings::Findings;
use sdpa::cache::CacheTrace;
use serde::Serialize;
use std::io::Write;
use std::path::Path;

/// The parsed arguments of `cache report`.
struct Order {
    trace: CacheTrace,
    destination: Destination,
}

impl Order {
    fn read(args: &CacheReportArgs) -> Result<Order, Failure> {
        let mut mistakes = Mistakes::default();
        let trace = match trace::read(&args.trace) {
            Ok(trace) => Some(trace),
            Err(rules) => {
                rules.iter().for_each(|rule| mistakes.add(args.trace.display(), rule));
                None
            }
        };
        let path = args.output.as_deref().unwrap_or(Path::new("cache.html"));
        let destination = mistakes.take(format!("--output {}", path.display()), Destination::new(path, Some(&args.trace)));
        mistakes.finish(trace.zip(destination).map(|(trace, destination)| Order { trace, destination }))
    }
}

/// Runs the command `cache` and returns its output.
pub(crate) fn run(args: &CacheArgs, json: bool) -> Result<Answer, Failure> {
    match &args.command {
        CacheCommand::Report(args) => report(args, json),
        CacheCommand::Info => kernels::run(false, json),
        CacheCommand::Clear => kernels::run(true, json),
    }
}

fn report(args: &CacheReportArgs, json: bool) -> Result<Answer, Failure> {
    let order = Order::read(args)?;
    let findings = {
        let _step = Progress::new(json).spinner("reading the trace");
        findings::analyse(&order.trace)
    };
    let page = page::render(&findings);
    let written = order.destination.write_with(|out| out.write_all(page.as_bytes()));
    written.map_err(|e| Failure::environment(order.destination.path.display(), format!("cannot be written: {e}")))?;
    let told = Told { output: order.destination.path.display().to_string(), findings };
    Answer::new(json, &told, || told.text(), Outcome::Good)
}

/// The JSON of `cache report`.
#[derive(Serialize)]
struct Told {
    output: String,
    #[serde(flatten)]
    findings: Findings,
}

impl Told {
    fn text(&self) -> String {
        let mut table = Table::default();
        table.row("output", self.output.as_str());
        table.row("device", self.findings.device.as_str());
        table.row("cudnn", self.findings.cudnn.as_str());
        for cache in &self.findings.caches {
            let advice = cache.advice.iter().map(|advice| format!("- {} {}", advice.text, advice.because));
            table.rows(&cache.name, [cache.verdict.clone()].into_iter().chain(advice));
        }
        table.render()
    }
}
