//! The Metal kernels on an NVIDIA GPU: their MSL through NVRTC, with threads that really run side by side. `device msl`: every case and the
//! covering table; `device msl long`: up to 4096 queries and keys; `device msl few`: for compute-sanitizer; `device msl all`, or `3/40`: the
//! product of types, dims, masks, score_mods and kernels, or a share of it.

mod gpu;

use crate::setup::Result;
use conformance::case::Case;
use conformance::msl::table;
use conformance::runner::{Outcome, Source, Tally, run_backward_case, run_case, side_by_side};
use conformance::share::Share;
use gpu::Gpu;
use metal_fallback::Kernels;
use sdpa::metal::MetalExecutor;
use std::sync::{Arc, Mutex};

const NAME: &str = "metal-on-nvidia";

/// Few queries are run on every kernel, whatever the planner takes.
type Forced = (Case, Option<Kernels>);

/// Sizes that no emulation gets to.
const LONG: &str = r#"
[[case]]
name = "causal"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 4096, seq_kv = 4096, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["causal"]
[[case]]
name = "softcap, causal"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 4001, seq_kv = 4095, dim_qk = 128, dim_v = 128 }
dtype = "f16"
mask = ["causal-bottom-right"]
score_mod = ["softcap:10"]
[[case]]
name = "slopes, window"
shape = { batch = 1, heads_q = 4, heads_kv = 2, seq_q = 3000, seq_kv = 3000, dim_qk = 96, dim_v = 96 }
dtype = "bf16"
mask = ["window:500,0"]
score_mod = ["alibi-slopes"]
backward = { wrt = ["slopes:f32"] }
[[case]]
name = "lengths"
shape = { batch = 3, heads_q = 2, heads_kv = 1, seq_q = 2049, seq_kv = 2500, dim_qk = 80, dim_v = 80 }
dtype = "f16"
mask = ["padding", "causal"]
[[case]]
name = "bias"
shape = { batch = 2, heads_q = 2, heads_kv = 2, seq_q = 1500, seq_kv = 1600, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["document"]
score_mod = ["bias:hqk"]
backward = { wrt = ["bias:f32"] }
[[case]]
name = "wide"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 1025, seq_kv = 2047, dim_qk = 256, dim_v = 256 }
dtype = "f16"
mask = ["prefix-lm:300"]
[[case]]
name = "192 and 128"
shape = { batch = 1, heads_q = 2, heads_kv = 2, seq_q = 2048, seq_kv = 2048, dim_qk = 192, dim_v = 128 }
dtype = "bf16"
mask = ["causal"]
[[case]]
name = "f32"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 1100, seq_kv = 1300, dim_qk = 128, dim_v = 128 }
dtype = "f32"
score_mod = ["softcap:5"]
[[case]]
name = "decode"
shape = { batch = 4, heads_q = 8, heads_kv = 2, seq_q = 1, seq_kv = 4096, dim_qk = 128, dim_v = 128 }
dtype = "bf16"
[[case]]
name = "eight queries"
shape = { batch = 2, heads_q = 6, heads_kv = 2, seq_q = 8, seq_kv = 4095, dim_qk = 64, dim_v = 64 }
dtype = "f16"
mask = ["causal-bottom-right"]
score_mod = ["softcap:5"]
"#;

fn executor(gpu: &Arc<Gpu>, kernels: Option<Kernels>) -> MetalExecutor {
    let executor = MetalExecutor::over(gpu.clone());
    kernels.map_or(executor.clone(), |kernels| executor.with_kernels(kernels))
}

/// Both passes of all cases; how many failed.
fn run_all(what: &str, gpu: &Arc<Gpu>, cases: &[Forced], sources: &[Source]) -> usize {
    let (forward, backward) = (Mutex::new(Tally::default()), Mutex::new(Tally::default()));
    side_by_side(cases, |(case, kernels)| {
        let executor = executor(gpu, *kernels);
        let name = kernels.map_or(case.name.clone(), |kernels| format!("{}, {kernels:?}", case.name));
        let outcome: Outcome = run_case(case, &executor);
        add(&forward, |tally| tally.add(NAME, &name, &outcome));
        // The parts of a forward pass are no kernels of a backward one.
        if *kernels == Some(Kernels::Parts) {
            return;
        }
        for source in sources {
            let outcome = run_backward_case(case, *source, &executor);
            add(&backward, |tally| tally.add(NAME, &format!("backward {name}{}", source.suffix()), &outcome));
        }
    });
    let [forward, backward] = [forward, backward].map(|tally| tally.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner));
    println!("{}", forward.summary(&format!("{what}, {NAME}")));
    println!("{}", backward.summary(&format!("{what} backward, {NAME}")));
    forward.failed + backward.failed + usize::from(forward.passed == 0)
}

fn add(tally: &Mutex<Tally>, to: impl FnOnce(&mut Tally)) {
    to(&mut tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
}

fn with_kernels(cases: Vec<Case>) -> Vec<Forced> {
    let all = |case: Case| -> Vec<Forced> {
        if case.shape.seq_q > 8 {
            return vec![(case, None)];
        }
        Kernels::ALL.iter().map(|kernels| (case.clone(), Some(*kernels))).collect()
    };
    cases.into_iter().flat_map(all).collect()
}

pub(crate) fn run(what: Option<&str>) -> Result<()> {
    let gpu = Arc::new(Gpu::new()?);
    println!(
        "{}",
        MetalExecutor::over(gpu.clone()).facts().map_or_else(ToString::to_string, |facts| format!("{}, {}", facts.name, facts.system))
    );
    let rows = table::rows(false)?.into_iter().map(|row| (row.case, Some(row.kernels)));
    let failed = match what {
        None => {
            run_all("cases", &gpu, &with_kernels(Case::all()?), &[])
                + run_all("cases with score_mods", &gpu, &with_kernels(Case::all_library()?), &Source::ALL)
                + run_all("cases with sinks", &gpu, &with_kernels(Case::all_sinks()?), &Source::ALL)
                + run_all("cases with dropout", &gpu, &with_kernels(Case::all_dropout()?), &Source::ALL)
                + run_all("cases with windows about the ends", &gpu, &with_kernels(Case::all_ends()?), &Source::ALL)
                + run_all("cases with packed documents", &gpu, &with_kernels(Case::all_packed()?), &Source::ALL)
                + run_all("backward cases", &gpu, &with_kernels(Case::all_backward()?), &Source::ALL)
                + run_all("table", &gpu, &rows.collect::<Vec<_>>(), &[Source::Oracle])
        }
        Some("long") => run_all("long", &gpu, &with_kernels(Case::parse(LONG)?), &[Source::Executor]),
        Some("few") => run_all("few", &gpu, &rows.step_by(9).collect::<Vec<_>>(), &[Source::Oracle]),
        Some(share) => {
            let share = Share::parse(share).map_err(|why| format!("device msl [long | few | all | 3/40], not {why}"))?;
            let rows = share.take(table::rows(true)?).map(|row| (row.case, Some(row.kernels)));
            run_all("product", &gpu, &rows.collect::<Vec<_>>(), &[Source::Oracle])
        }
    };
    gpu.report();
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}
