//! The order of native CUDA kernels and cuDNN, held against the times of problems on an H100.

use conformance::golden;
use conformance::timed::Timed;
use sdpa::cuda::{EXCEPTIONS, Exception, Family, cudnn_first, cudnn_first_backward};
use sdpa::cudnn::ledger::Ledger;
use sdpa::cudnn::lower::Job;
use std::collections::BTreeMap;

/// A problem with the times of both executors.
struct Row {
    timed: Timed,
    exception: Option<&'static Exception>,
    /// The features because of which the ledger does not prove the problem, if any.
    unproven: Option<String>,
    /// How many times as fast as cuDNN the native kernels were.
    speed: f64,
}

fn timed(file: &str) -> Vec<Row> {
    // cuDNN 9.19 on an H100 made the times.
    let ledger = Ledger::all_released()
        .find(|(cudnn, sm)| (cudnn.minor, *sm) == (19, 90))
        .and_then(|(cudnn, sm)| Ledger::released(cudnn, sm))
        .unwrap();
    let path = format!("{}/../benches/results/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let of = |line: &str| {
        let timed: Timed = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        let (exception, job): (_, Job) = if timed.backward {
            let problem = timed.gradient().unwrap();
            (cudnn_first_backward(Family::Wgmma, &problem), problem.into())
        } else {
            let problem = timed.forward().unwrap();
            (cudnn_first(Family::Wgmma, &problem), problem.into())
        };
        let unproven = ledger.unproven(&job).map(|unproven| unproven.to_string());
        let speed = timed.cudnn_ms.unwrap() / timed.cuda_ms.unwrap();
        Row { timed, exception, unproven, speed }
    };
    text.lines().map(of).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let half = all.len() / 2;
    if all.len() % 2 == 1 { all[half] } else { f64::midpoint(all[half - 1], all[half]) }
}

/// How many times as long as the faster executor the one takes that is tried first.
fn lost(row: &Row, is_cudnn_first: bool) -> f64 {
    let first = if is_cudnn_first { row.speed } else { 1.0 / row.speed };
    first.max(1.0)
}

/// The geometric mean of what a rule for "cuDNN first" loses.
fn mean_lost(all: &[Row], is_cudnn_first: impl Fn(&Row) -> bool) -> f64 {
    (all.iter().map(|row| lost(row, is_cudnn_first(row)).ln()).sum::<f64>() / all.len() as f64).exp()
}

const FILES: [&str; 3] = ["2026-11-26-choice.jsonl", "2026-11-26-choice-others.jsonl", "2026-11-26-choice-functions.jsonl"];

/// Where docs/cuda.md has what is made of the times.
const BEGINS: &str = "<!-- made by tests/host/choice.rs -->\n";
const ENDS: &str = "<!-- end -->\n";

#[test]
fn the_page_has_each_exception_and_what_the_order_loses() {
    let all: Vec<Row> = FILES.into_iter().flat_map(timed).collect();
    let head = "| cuDNN is tried first for | pass | timed problems | proven | speed | cause |\n|---|---|---|---|---|---|\n";
    let mut made = head.to_owned();
    for exception in &EXCEPTIONS {
        let of = || all.iter().filter(|row| row.exception.is_some_and(|other| other.what == exception.what));
        let pass = if of().any(|row| row.timed.backward) { "backward" } else { "forward" };
        let (count, median) = (of().count(), median(of().map(|row| row.speed).collect()));
        let proven = of().filter(|row| row.unproven.is_none()).count();
        let mut why: BTreeMap<&str, usize> = BTreeMap::new();
        of().filter_map(|row| row.unproven.as_deref()).for_each(|text| *why.entry(text).or_default() += 1);
        println!("{}: {proven} of {count} proven; {why:?}", exception.what);
        assert!((median - exception.speed).abs() <= 0.0051 && median < 0.95, "{}: {median:.3} of {count}", exception.what);
        made.push_str(&format!("| {} | {pass} | {count} | {proven} | {median:.2} | {} |\n", exception.what, exception.cause));
    }
    made.push_str(
        "\n| times in `benches/results` | problems | at most 5 % slower | at most 10 % slower | mean loss | mean loss with the ledger |\n\
         |---|---|---|---|---|---|\n",
    );
    for file in FILES {
        let all = timed(file);
        let within =
            |bound: f64| 100.0 * all.iter().filter(|row| lost(row, row.exception.is_some()) <= bound).count() as f64 / all.len() as f64;
        let mean = mean_lost(&all, |row| row.exception.is_some());
        let proven = mean_lost(&all, |row| row.exception.is_some() && row.unproven.is_none());
        assert!(mean <= 1.018 && proven <= 1.018, "{file}: {mean}, {proven} with the ledger");
        let [five, ten] = [1.05, 1.1].map(within);
        let [mean, proven] = [mean, proven].map(|mean| 100.0 * (mean - 1.0));
        made.push_str(&format!("| `{file}` | {} | {five:.1} % | {ten:.1} % | {mean:.2} % | {proven:.2} % |\n", all.len()));
    }
    let page = std::fs::read_to_string(golden::repository("docs/cuda.md")).unwrap();
    let (before, rest) = page.split_once(BEGINS).unwrap();
    let (_, after) = rest.split_once(ENDS).unwrap();
    golden::check("docs/cuda.md", &format!("{before}{BEGINS}{made}{ENDS}{after}")).unwrap_or_else(|e| panic!("{e}"));
}
